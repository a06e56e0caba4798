"""One short run of the tiny hybrid on one process, under DDP and under FSDP2, killed and resumed: is it one training?

    python benchmarks/parallel.py --output FOLDER [--processes 2] [--cpu | [--one-gpu] [--float32]]

Prints, for each way of launching, the largest relative difference of its losses and gradient norms from those of the
single process, and the distance of its weights against how far training moved them. `--float32` trains without
autocast, so that what differs is not rounding. `--cpu` leaves out FSDP2 and `accelerate launch`, which need GPUs, and
adds two launchers that meet over the network, as on two nodes. `--one-gpu` has only such pairs, for DDP and FSDP2: NCCL
takes two processes on one GPU when each says that it is on another host. Exit code 1 where a difference exceeds its
bound.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

LOSS_BOUNDS = {"bfloat16": 2e-3, "float32": 1e-5}
"""Largest relative difference of a step's loss: bfloat16 products round otherwise in batches of another size."""

PROGRAM = """
import os, signal, torch
if "FLOAT32" in os.environ:
    torch.cuda.is_bf16_supported = lambda *_, **__: False
from palimpsa_surgery.cli.main import run
from palimpsa_surgery.stages.trainer import StageTrainer
save = StageTrainer._save_rng_state
def killed(self, folder):
    if self.state.global_step == 4 and os.environ.get("RANK", "0") == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    save(self, folder)
if "KILLED" in os.environ:
    StageTrainer._save_rng_state = killed
run()
"""


def recipe_text(length: int) -> str:
    """Six steps of text with accumulation and four of answers, 16 and 8 sequences of `length` tokens a step."""
    rates = {"learning_rate": 1e-4, "importance_learning_rate": 1e-3}
    text = {"kind": "text", "files": ["asset:kjv.txt"], "max_tokens": 120 * length, "held_out": 0.1}
    answers = {"kind": "instruction", "files": ["asset:demo-instructions.jsonl"], "held_out": 0.1}
    sizes = {"sequence_length": length, "batch_tokens": 16 * length, "tokens": 96 * length}
    stages = [
        {"name": "text", "data": text, **sizes, "micro_batch_tokens": 4 * length, **rates},
        {"name": "answers", "data": answers, **sizes, "batch_tokens": 8 * length, "tokens": 32 * length, **rates},
    ]
    stages[1]["gradient_checkpointing"] = True
    content = {"name": "parallel", "checkpoint_steps": 2, "evaluation": {"tokens": 12 * length}, "stages": stages}
    return json.dumps(content)  # which is YAML too


def main() -> int:
    """Run all launches and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--processes", type=int, default=2)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--cpu", action="store_true")
    where.add_argument("--one-gpu", action="store_true", help="two processes, whatever --processes says")
    parser.add_argument("--float32", action="store_true")
    options = parser.parse_args()
    folder: Path = options.output.absolute()
    folder.mkdir(parents=True)
    hybrid, recipe = make_inputs(folder, 64 if options.cpu else 256)
    train = ["train", str(hybrid), "--recipe", str(recipe), "--output"]

    def begin(name: str, launcher: list[str], *, output: str | None = None, **variables: str) -> tuple:
        log = (folder / f"{name}.log").open("w")
        command = [*launcher, str(folder / "program.py"), *train, str(folder / (output or name))]
        environment = os.environ | variables | ({"FLOAT32": "1"} if options.float32 else {})
        return name, time.perf_counter(), subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    def end(name: str, began: float, process: subprocess.Popen) -> int:
        code = process.wait()
        print(f"{name}: exit code {code} after {time.perf_counter() - began:.0f} s", flush=True)
        return code

    count = str(options.processes)
    (folder / "program.py").write_text(PROGRAM)
    single = end(*begin("single", [sys.executable], CUDA_VISIBLE_DEVICES="0"))
    group = []
    if not options.one_gpu:
        group += [begin("ddp", torchrun("--nproc_per_node", count, "--master_port", "29601"))]
    if options.cpu or options.one_gpu:
        where = ("--nnodes", "2", "--master_addr", "127.0.0.1", "--master_port", "29602", "--node_rank")
        group += [begin(f"ddp-node{r}", torchrun(*where, str(r)), output="ddp-nodes", **host(r)) for r in range(2)]
    if options.one_gpu:
        where = ("--num_machines", "2", "--main_process_ip", "127.0.0.1", "--machine_rank")
        launch = accelerate("fsdp2", "2", 29603)
        group += [begin(f"fsdp2-node{r}", [*launch, *where, str(r)], output="fsdp2-nodes", **host(r)) for r in range(2)]
    several_gpus = not (options.cpu or options.one_gpu)
    if several_gpus:
        group += [
            begin("ddp-accelerate", accelerate("ddp", count, 29602)),
            begin("fsdp2", accelerate("fsdp2", count, 29603)),
            begin("fsdp2-killed", accelerate("fsdp2", count, 29604), output="fsdp2-resumed", KILLED="1"),
        ]
    codes = {name: end(name, began, process) for name, began, process in group}
    if several_gpus:
        codes["fsdp2-resumed"] = end(*begin("fsdp2-resumed", accelerate("fsdp2", count, 29605)))
    killed = codes.pop("fsdp2-killed", 1)
    failed = single or killed == 0 or any(codes.values())
    bound = LOSS_BOUNDS["float32" if options.cpu or options.float32 else "bfloat16"]
    for name in dict.fromkeys(re.sub(r"-node\d", "-nodes", name) for name in codes):
        failed |= not compare(folder / "single", folder / name, bound)
    for name in ["single", *codes, "fsdp2-killed"] if failed else []:
        if (log := folder / f"{name}.log").is_file():
            print(f"--- {name}\n{log.read_text()[-3000:]}", flush=True)
    if several_gpus:
        print(f"killed by signal {signal.SIGKILL.value}: the launcher's exit code was {killed}")
    return int(bool(failed))


def make_inputs(folder: Path, length: int) -> tuple[Path, Path]:
    """Write a hybrid of the shipped checkpoint, and the recipe."""
    from palimpsa_surgery import replace
    from palimpsa_surgery.surgery.assets import asset_path

    replace(asset_path("tiny-mamba2"), folder / "hybrid", layers=[4, 7, 8, 11], init="paper", device="cpu")
    (folder / "recipe.yaml").write_text(recipe_text(length))
    return folder / "hybrid", folder / "recipe.yaml"


def host(rank: int) -> dict[str, str]:
    """What lets NCCL take a GPU for that of a node of its own, which it reaches through the loopback device."""
    return {"NCCL_HOSTID": f"node{rank}", "NCCL_SOCKET_IFNAME": "lo"}


def torchrun(*options: str) -> list[str]:
    """Start of a command line that launches with torchrun."""
    return [sys.executable, "-m", "torch.distributed.run", *options]


def accelerate(config: str, processes: str, port: int) -> list[str]:
    """Start of a command line that launches with a configuration of the package."""
    from importlib.resources import files

    path = str(files("palimpsa_surgery") / "stages" / "accelerate" / f"{config}.yaml")
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", path]
    return [*launch, "--num_processes", processes, "--main_process_port", str(port)]


def compare(one: Path, other: Path, bound: float) -> bool:
    """Print how far two runs are apart; return whether every loss is within the bound."""
    import torch
    from safetensors.torch import load_file

    worst, start = {}, load_file(one.parent / "hybrid" / "model.safetensors")
    for stage in ("01-text", "02-answers"):
        if not (other / stage / "final").is_dir():
            print(f"{other.name}: stage {stage} is not finished", flush=True)
            return False
        logs = [[json.loads(line) for line in (run / stage / "log.jsonl").open()] for run in (one, other)]
        if len(logs[0]) != len(logs[1]):
            return False
        for field in ("loss", "grad_norm"):
            for a, b in zip(*logs, strict=True):
                worst[field] = max(worst.get(field, 0.0), abs(a[field] / b[field] - 1))
        weights = [load_file(run / stage / "final" / "model.safetensors") for run in (one, other)]
        moved = torch.cat([(weights[0][key] - start[key]).flatten() for key in start]).norm()
        apart = torch.cat([(weights[0][key] - weights[1][key]).flatten() for key in start]).norm()
        worst["weights"] = max(worst.get("weights", 0.0), (apart / moved).item())
    figures = ", ".join(f"{field} {value:.2e}" for field, value in worst.items())
    print(f"{other.name}: largest relative differences from one process: {figures}", flush=True)
    return worst["loss"] <= bound


if __name__ == "__main__":
    sys.exit(main())
