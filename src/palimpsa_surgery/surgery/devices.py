"""The device that computes, and what it says when its memory does not suffice."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from palimpsa_surgery.errors import UserError
from palimpsa_surgery.surgery.weights import one_line


def resolve_device(device: str | None) -> torch.device:
    """The device of that name; by default the first GPU if there is one, else the CPU.

    Raises:
        UserError: there is no such device here.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    there = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    there += [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    if torch.accelerator.is_available() and (kind := torch.accelerator.current_accelerator().type) != "cuda":
        there.append(kind)
    if device not in there:
        raise UserError(f"device {device!r} cannot be used: those here are {', '.join(there)}")
    chosen = torch.device(device)
    try:
        torch.empty(1, device=chosen)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch raises any of them
        raise UserError(f"device {device!r} cannot be used: {one_line(error)}") from None
    return chosen


def device_name(device: torch.device) -> str:
    """A GPU's name, else the kind of the device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def out_of_memory(error: BaseException) -> bool:
    """Whether a GPU's memory did not suffice.

    PyTorch's allocator has an exception of its own; Triton, cuBLAS and the driver say it in words.
    """
    said = str(error)
    in_words = isinstance(error, RuntimeError) and ("out of memory" in said or "_ALLOC_FAILED" in said)
    return in_words or isinstance(error, torch.OutOfMemoryError)


@contextmanager
def enough_memory(complaint: str) -> Iterator[None]:
    """Raise UserError with this message where a GPU's memory does not suffice for the block."""
    try:
        yield
    except RuntimeError as error:
        if out_of_memory(error):
            raise UserError(complaint) from None
        raise
