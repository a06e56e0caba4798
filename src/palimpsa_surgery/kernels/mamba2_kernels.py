"""Mamba2's scan and decode step by `mamba_ssm`'s Triton kernels, where the package is installed.

`torch.compile` takes the step whole, as an operator. It leaves the scan out of its graphs, since the scan's backward
pass asks Triton's tuner what it chose.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .decay import document_numbers
from .triton_jit import NAMESPACE

logger = logging.getLogger(__name__)

REACH = 2**31
"""Elements that an offset of `mamba_ssm`'s kernels, which has 32 bits, reaches: 399,457 tokens of mamba2-2.7b."""


@functools.cache
def _kernels() -> dict[str, Any] | None:
    try:
        from mamba_ssm import __version__
        from mamba_ssm.ops.triton.selective_state_update import selective_state_update
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
    except Exception as error:  # a source install without its compiled module fails in many ways
        logger.warning(
            "mamba_ssm's kernels cannot be used (%s: %s): Mamba2 layers fall back to PyTorch, which is right but slow",
            type(error).__name__,
            error,
        )
        return None
    return {"scan": mamba_chunk_scan_combined, "step": selective_state_update, "version": __version__}


@torch.compiler.assume_constant_result
def mamba_ssm_imports() -> bool:
    """Whether `mamba_ssm`'s kernels are there; warns once when the package is absent or half installed."""
    return _kernels() is not None


@torch.compiler.assume_constant_result
def mamba_ssm_adds_skip() -> bool:
    """Whether its scan may get D.

    In versions before 2.3.0 the programs that share a head overwrite each other's parts of D's gradient.
    """
    major, minor = (int(part) for part in _kernels()["version"].split(".")[:2])
    return (major, minor) >= (2, 3)


@torch.compiler.disable
def ssd_scan_mamba_ssm(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    initial_state: Tensor | None,
    seq_idx: Tensor | None,
    return_final_state: bool,
    chunk_size: int,
) -> tuple[Tensor, Tensor | None]:
    """`scan.ssd_scan`, which validates and says what the arguments mean, by `mamba_ssm`."""
    documents = None if seq_idx is None else document_numbers(seq_idx).to(torch.int32)
    D = None if D is None else D.contiguous()  # its backward pass asks for that
    scan = functools.partial(_kernels()["scan"], A=-A, D=D, chunk_size=chunk_size)
    return _in_reach(scan, (x, dt, B, C, documents), initial_state, chunk_size, return_final_state)


def _in_reach(
    scan: Callable,
    rows: Sequence[Tensor | None],
    state: Tensor | None,
    chunk_size: int,
    return_final_state: bool,
) -> tuple[Tensor, Tensor | None]:
    """The scan of x, dt, B, C and documents, numbered from the state's own as 0; halved until offsets fit."""
    x, dt, B, C, documents = rows
    batch, time, heads, head_dim = x.shape
    groups, state_size = B.shape[2:]
    chunks = (time + chunk_size - 1) // chunk_size
    # What it reads, and what it writes for a row of the batch: y, the states and C Bᵀ
    read = [sum((size - 1) * stride for size, stride in zip(v.shape, v.stride(), strict=True)) for v in (x, dt, B, C)]
    row = max(time * heads * head_dim, chunks * heads * head_dim * state_size, chunks * chunk_size**2 * groups)
    if max(*read, batch * row) < REACH or (batch == 1 and chunks == 1):
        out = scan(x, dt, B=B, C=C, initial_states=state, seq_idx=documents, return_final_states=return_final_state)
        return out if return_final_state else (out, None)

    def take(index, *values):
        return [None if v is None else v[index] for v in values]

    if batch > 1:
        parts = []
        for half in (slice(batch // 2), slice(batch // 2, None)):
            *half_rows, start = take(half, *rows, state)
            parts.append(_in_reach(scan, half_rows, start, chunk_size, return_final_state))
        return torch.cat([y for y, _ in parts]), torch.cat([v for _, v in parts]) if return_final_state else None
    cut = (chunks + 1) // 2 * chunk_size
    first, second = (take((slice(None), half), *rows) for half in (slice(cut), slice(cut, None)))
    if documents is not None:
        second[-1] = second[-1] - first[-1][:, -1:]
    y, state = _in_reach(scan, first, state, chunk_size, True)
    rest, state = _in_reach(scan, second, state, chunk_size, return_final_state)
    return torch.cat((y, rest), 1), state


def _step(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor, D: Tensor | None, zero: Tensor
) -> Tensor:
    head_dim, state_size = state.shape[2:]
    # Without D and dt_bias mamba_ssm 2.3.2's step fails. It expects all of them for each row, and reads one value a
    # head where the strides say that they do not vary.
    zero = zero.expand(x.shape[1], head_dim)
    return _kernels()["step"](
        state,
        x,
        dt[..., None].expand(-1, -1, head_dim),
        -A[:, None, None].expand(-1, head_dim, state_size),
        B,
        C,
        D=zero if D is None else D[:, None].expand(-1, head_dim),
        dt_bias=zero,
    )


@functools.cache
def _zero(device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # so that it may be used everywhere
        return torch.zeros(1, 1, device=device)


def _step_alone(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor, D: Tensor | None) -> Tensor:
    return _step(x, dt, A, B, C, state, D, torch.zeros(1, 1, device=x.device))  # what a CUDA graph holds is not kept


_step_op = torch.library.custom_op(f"{NAMESPACE}::ssd_step", _step_alone, mutates_args=("state",))
_step_op.register_fake(lambda x, dt, A, B, C, state, D: torch.empty_like(x))


def ssd_step_mamba_ssm(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor, D: Tensor | None
) -> Tensor:
    """`scan.ssd_step`, which validates and says what the arguments mean, by `mamba_ssm`."""
    if torch.compiler.is_compiling():
        return _step_op(x, dt, A, B, C, state, D)
    return _step(x, dt, A, B, C, state, D, _zero(x.device))
