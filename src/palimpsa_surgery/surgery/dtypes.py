"""Types of parameters that a user may ask for."""

import torch

from palimpsa_surgery.errors import UserError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def check_dtype(dtype: str | None) -> None:
    """Raise UserError if there is no such type; None is one."""
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"unknown dtype {dtype!r} (known: {', '.join(DTYPES)})")


def choose_dtype(dtype: str | None, stored: torch.dtype, device: torch.device) -> torch.dtype:
    """The type of that name; by default the stored one on a GPU, and float32 elsewhere, where it is the fastest."""
    return DTYPES[dtype] if dtype else stored if device.type == "cuda" else torch.float32


def dtype_name(dtype: torch.dtype) -> str:
    """Its name without `torch.`."""
    return str(dtype).removeprefix("torch.")
