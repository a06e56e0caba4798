"""Runs the command line as the ranks of several launches, one launch after the other, for `test_parallel`.

`python run_ranks.py launches.json`: a list of {"ranks": 2, "arguments": ["train", ...], "log": FILE} with, if wanted,
"kill_at" (rank 0 is killed by signal 9 while it writes the checkpoint of this step), "fail_at" (rank 1 alone meets a
user's error in this step), "slow_at" (rank 1 is late to write its part of this checkpoint), "log_masks" (each rank
writes what dropout keeps to this file and its number), "fsdp", and "copy_to" (where the run's folder is copied
afterwards). Prints the exit codes of all as JSON.

The ranks are forks of one process, so that the libraries are imported once. There is no agent of torchrun: rank 0
keeps the store.
"""

import gc
import hashlib
import json
import os
import shutil
import signal
import socket
import sys
import time
import traceback

import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType

from palimpsa_surgery.cli import main as command_line
from palimpsa_surgery.errors import UserError
from palimpsa_surgery.stages import pipeline
from palimpsa_surgery.stages.trainer import StageTrainer


def kill_at(step: int) -> None:
    save = StageTrainer._save_rng_state

    def killed(self, folder):
        if self.state.global_step == step and os.environ["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        save(self, folder)

    StageTrainer._save_rng_state = killed


def fail_at(step: int) -> None:
    original = StageTrainer.training_step

    def failing(self, *arguments):
        if self.state.global_step + 1 == step and os.environ["RANK"] == "1":
            raise UserError("rank 1 has had enough")
        return original(self, *arguments)

    StageTrainer.training_step = failing


def slow_at(step: int) -> None:
    save = StageTrainer._save_rng_state

    def slow(self, folder):
        if self.state.global_step == step and os.environ["RANK"] == "1":
            time.sleep(1)
        save(self, folder)

    StageTrainer._save_rng_state = slow


def log_masks(path: str) -> None:
    forward = torch.nn.Dropout.forward

    def logged(self, inputs):
        kept = forward(self, torch.ones_like(inputs))
        if self.training:
            with open(f"{path}{os.environ['RANK']}", "a") as file:
                print(hashlib.sha256(kept.bool().numpy().tobytes()).hexdigest(), file=file)
        return kept * inputs

    torch.nn.Dropout.forward = logged


def engage_fsdp() -> None:
    """Let accelerate's FSDP engage on the CPU, where by itself it makes DDP; all else is the libraries' own."""
    initialise = AcceleratorState.__init__

    def with_fsdp(self, *arguments, fsdp_plugin=None, **options):
        initialise(self, *arguments, fsdp_plugin=fsdp_plugin, **options)
        if fsdp_plugin is not None:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin

    AcceleratorState.__init__ = with_fsdp
    pipeline.check_request = lambda: None  # which refuses FSDP without a GPU
    os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"}


def be_rank(rank: int, launch: dict, port: int) -> None:
    size = str(launch["ranks"])
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    log = os.open(launch["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    for change in (kill_at, fail_at, slow_at, log_masks):
        if change.__name__ in launch:
            change(launch[change.__name__])
    if launch.get("fsdp"):
        engage_fsdp()
    sys.argv = ["palimpsa-surgery", *launch["arguments"]]
    command_line.run()


def run(launch: dict) -> list[int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(launch["ranks"]):
        child = os.fork()
        if child == 0:
            try:
                be_rank(rank, launch, port)
            except SystemExit as end:
                os._exit(end.code or 0)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(99)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if "copy_to" in launch:
        shutil.copytree(launch["arguments"][5], launch["copy_to"])
    return codes


if __name__ == "__main__":
    gc.freeze()  # what was imported is no garbage: the forks need not look through it each time they collect
    with open(sys.argv[1]) as file:
        print(json.dumps([run(launch) for launch in json.load(file)]))
