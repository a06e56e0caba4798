"""What a launcher asked for, and whether the libraries underneath made it.

torchrun and `accelerate launch` say in environment variables what they started; accelerate reads them and, where it
cannot do what they ask, may silently do something else: FSDP on the CPU becomes DDP, and `accelerate launch --cpu`
starts one process however many were asked for. Both end here with one line instead.
"""

import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from palimpsa_surgery import ranks
from palimpsa_surgery.errors import UserError
from palimpsa_surgery.stages.recipe import Stage
from palimpsa_surgery.surgery.outputs import writing

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator

SHARED_FOLDER_PATIENCE = 60.0
"""Seconds until what one node wrote must be visible on the others."""

_OF_A_LAUNCH = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What every launcher tells each of several processes, and the libraries underneath need."""

_UNSUPPORTED = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "accelerate's parallelism_config",
    "ACCELERATE_USE_SAGEMAKER": "SageMaker",
}
_FSDP_REFUSED = {
    "FSDP_OFFLOAD_PARAMS": "fsdp_offload_params is not supported",
    "FSDP_ACTIVATION_CHECKPOINTING": "set gradient_checkpointing in the recipe, not fsdp_activation_checkpointing",
}


@dataclass(frozen=True)
class Share:
    """How the batch of an optimizer step is divided: processes × accumulation × micro-batch = its sequences."""

    processes: int
    accumulation: int
    """Forward and backward passes of each process."""
    micro_batch: int
    """Sequences in each of them."""


def share(stage: Stage, processes: int) -> Share:
    """Divide a stage's batch over the processes, so that every step trains on the same sequences on any number.

    Each gets as many sequences. Its micro-batch is the largest that fits in the stage's and divides them.

    Raises:
        UserError: they cannot be divided evenly.
    """
    rows, left = divmod(stage.batch_sequences, processes)
    if left:
        raise UserError(
            f"stage {stage.name}: batch_tokens {stage.batch_tokens} are {stage.batch_sequences} sequences of "
            f"{stage.sequence_length} tokens, which {processes} processes cannot share evenly"
        )
    micro = max(size for size in range(1, min(stage.micro_batch_sequences, rows) + 1) if rows % size == 0)
    return Share(processes, rows // micro, micro)


def fsdp_requested() -> bool:
    """Whether the launcher asked for fully sharded data parallelism."""
    return _flag("ACCELERATE_USE_FSDP")


def check_request() -> None:
    """Refuse what cannot be done, before any work.

    Raises:
        UserError: the launcher asked for something that is not supported, or that this machine has not.
    """
    import torch

    if ranks.world_size() > 1 or os.environ.get("LOCAL_RANK"):
        if missing := [name for name in _OF_A_LAUNCH if not os.environ.get(name)]:
            raise UserError(
                f"the environment has WORLD_SIZE or LOCAL_RANK, but not {', '.join(missing)}: start the processes by "
                "torchrun or accelerate launch, or unset what is left of another launch"
            )
        ranks.local_rank()
    for variable, name in _UNSUPPORTED.items():
        if _flag(variable):
            raise UserError(f"{name} was asked for, which is not supported: use DDP or FSDP2")
    launched_alone = "ACCELERATE_USE_CPU" in os.environ and "RANK" not in os.environ
    if launched_alone and "MASTER_PORT" in os.environ:
        raise UserError(
            "accelerate launch was asked for several processes and started only one, as it does with --cpu: "
            "use torchrun --nproc_per_node"
        )
    gpus, local = torch.cuda.device_count(), ranks.local_world_size()
    if 0 < gpus < local:
        raise UserError(f"{local} processes were started on {socket.gethostname()}, which has {gpus} GPUs")
    if not fsdp_requested():
        return
    if (version := os.environ.get("FSDP_VERSION", "1")) != "2":
        raise UserError(f"FSDP of version {version} was asked for, which is not supported: set fsdp_version: 2")
    for variable, message in _FSDP_REFUSED.items():
        if _flag(variable):
            raise UserError(message)
    if not gpus:
        raise UserError("FSDP was asked for, which needs GPUs: on the CPU accelerate silently makes DDP of it")


def check_honoured(accelerator: "Accelerator") -> None:
    """Compare what accelerate made with what the launcher asked for.

    Raises:
        UserError: it made something else.
    """
    made, asked = accelerator.num_processes, ranks.world_size()
    if made != asked:
        raise UserError(f"{asked} processes were started, but accelerate sees {made}")
    kind = accelerator.distributed_type.value
    if fsdp_requested() and kind != "FSDP":
        where = "the CPU" if accelerator.device.type == "cpu" else f"{accelerator.device.type}"
        raise UserError(f"FSDP was asked for, but on {where} accelerate silently makes {kind} instead: leave it out")
    if not fsdp_requested() and kind not in ("NO", "MULTI_GPU", "MULTI_CPU"):
        raise UserError(f"accelerate made {kind} of a launch that did not ask for it")


def check_shared_folder(file: Path) -> None:
    """See that all ranks have rank 0's file before them, by what it writes there.

    Raises:
        UserError: on a rank that does not; the message names its machine. On all, if rank 0 cannot write there.
    """
    if ranks.world_size() == 1:
        return

    def leave_token() -> str:
        token = uuid4().hex
        with writing(file):
            file.write_text(token, encoding="utf-8")
        return token

    token = ranks.agreed(leave_token)
    deadline = time.monotonic() + SHARED_FOLDER_PATIENCE
    while not (file.is_file() and file.read_text(encoding="utf-8") == token):
        if time.monotonic() > deadline:
            raise UserError(
                f"rank {ranks.rank()} on {socket.gethostname()} does not see what rank 0 wrote to {file.parent}: "
                "--output must lie on a file system that all nodes share"
            )
        time.sleep(0.1)
    ranks.meet()  # nobody goes on, to write or to fail, before all have looked


def sum_over_ranks(*values: float, device: "torch.device") -> list[float]:
    """Add up each value over all ranks, in float64."""
    import torch

    if ranks.world_size() == 1:
        return list(values)
    total = torch.tensor(values, dtype=torch.float64, device=device)
    torch.distributed.all_reduce(total)
    return total.tolist()


def _flag(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in ("1", "true", "yes")
