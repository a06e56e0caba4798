"""The scans and decode steps that the model calls: one place for validation, dispatch and fallbacks.

| | CUDA | elsewhere |
|---|---|---|
| Palimpsa scan | Triton (`triton_scan.py`), without it PyTorch | PyTorch (`chunked.py`) |
| Palimpsa step | Triton (`triton_step.py`), without it PyTorch | PyTorch (here) |
| Mamba2 scan and step | `mamba_ssm`'s Triton kernels when they import, else PyTorch | PyTorch (`ssd.py`, here) |

In float64 everything is PyTorch.

Letters as in `reference.py`: b batch, t time, h heads, p head_dim, g groups, n state_size.
"""

import functools
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .chunked import palimpsa_scan_chunked
from .decay import document_numbers
from .hopper_scan import AVAILABLE as GLUON_AVAILABLE
from .ssd import ssd_scan_chunked
from .triton_jit import kernels_take, triton
from .triton_scan import palimpsa_scan_triton
from .triton_step import palimpsa_step_triton

logger = logging.getLogger(__name__)

MAMBA_SSM_REACH = 2**31
"""Elements that an offset of `mamba_ssm`'s kernels, which has 32 bits, reaches: 399,457 tokens of mamba2-2.7b."""


class ScanOutput(NamedTuple):
    """What a scan returns; `final_state` and `variance` are None unless asked for."""

    y: Tensor
    final_state: Tensor | None
    variance: Tensor | None


def palimpsa_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    beta: Tensor | None,
    I_prior: Tensor,
    *,
    initial_state: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_final_state: bool = False,
    return_variance: bool = False,
) -> ScanOutput:
    """Palimpsa over a sequence (paper Eq. 5 in natural parameters, A.5), differentiable in every float argument.

        alpha   = exp(-A dt)
        M[t]    = alpha M[t-1]    + (dt x)[t] ⊗ B[t]
        Ibar[t] = alpha Ibar[t-1] + beta[t] ⊗ B[t]²
        y[t]    = (M[t] / (I_prior + Ibar[t])) C[t]        var[t] = (1 / (I_prior + Ibar[t])) C[t]²

    Args:
        x: values `[b, t, h, p]`.
        dt: step sizes `[b, t, h]`, ≥ 0, float32. A token with `dt = 0` and `beta = 0` changes nothing.
        A: decay rates `[h]`, > 0, float32.
        B: keys `[b, t, g, n]`, each shared by `h / g` heads.
        C: queries `[b, t, g, n]`.
        beta: precision of the observations `[b, t, h, p]`, ≥ 0; None means zero, which is exactly Mamba2.
        I_prior: prior importance `[h]`, > 0, float32.
        initial_state: `[b, h, 2, p, n]`, M and Ibar, which belong to the first document of a row; None for zero.
        seq_idx: document numbers `[b, t]`; the state restarts from zero where the number changes.
        cu_seqlens: `[documents + 1]`, increasing from 0 to t, the same information for b = 1. Best kept on the CPU: to
            check boundaries that are on a GPU takes a wait for it.
        return_final_state: also return the state after the last token.
        return_variance: also return the predictive variance.

    Returns:
        y `[b, t, h, p]` in the type of `x`; the final state `[b, h, 2, p, n]` and the variance
        `[b, t, h, p]` in float32.

    Raises:
        ValueError: an argument's shape, type or device does not fit the others.
    """
    _check_scan_arguments(x, dt, A, B, C, beta, I_prior)
    _check("initial_state", initial_state, (x.shape[0], x.shape[2], 2, x.shape[3], B.shape[3]), x, EXACT)
    seq_idx = _documents(seq_idx, cu_seqlens, x)
    scan = palimpsa_scan_triton if triton is not None and kernels_take(x, A) else palimpsa_scan_chunked
    return ScanOutput(*scan(x, dt, A, B, C, beta, I_prior, initial_state, seq_idx, return_final_state, return_variance))


def palimpsa_step(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    beta: Tensor,
    I_prior: Tensor,
    state: Tensor,
    D: Tensor | None = None,
) -> Tensor:
    """One token of `palimpsa_scan`, and the skip `D x`; updates `state` in place, and is not differentiable.

    Args:
        x: `[b, h, p]`; dt: `[b, h]`; A: `[h]`; B, C: `[b, g, n]`; beta: `[b, h, p]`; I_prior: `[h]`.
        state: `[b, h, 2, p, n]`, float32, overwritten with the state after the token.
        D: `[h]` or None for zero.

    Returns:
        y `[b, h, p]` in the type of `x`.

    Raises:
        ValueError: an argument's shape, type or device does not fit the others.
    """
    _check_step_arguments(x, dt, A, B, C, state, D, beta, I_prior)
    if triton is not None and kernels_take(x, A, state):
        return palimpsa_step_triton(x, dt, A, B, C, beta, I_prior, state, D)
    value, alpha, key, query = _token(x, dt, A, B, C, state.dtype)
    M, Ibar = state.unbind(2)
    M.mul_(alpha).addcmul_(value, key)
    Ibar.mul_(alpha).addcmul_(beta.to(state.dtype)[..., None], key.square())
    mean = M / (I_prior.to(state.dtype)[:, None, None] + Ibar)
    return _with_skip((mean @ query.transpose(-1, -2)).squeeze(-1), x, D)


def ssd_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    initial_state: Tensor | None = None,
    seq_idx: Tensor | None = None,
    return_final_state: bool = False,
    chunk_size: int = 256,
) -> tuple[Tensor, Tensor | None]:
    """Mamba2's scan: `palimpsa_scan` with beta = 0 and I_prior = 1, and only M as its state `[b, h, p, n]`.

    Args:
        chunk_size: tokens a chunk of `mamba_ssm`'s kernel; the PyTorch path chooses its own.

    Returns:
        y `[b, t, h, p]` in the type of `x` and the final state `[b, h, p, n]` in float32, or None.

    Raises:
        ValueError: an argument's shape, type or device does not fit the others.
    """
    _check_scan_arguments(x, dt, A, B, C)
    _check("initial_state", initial_state, (x.shape[0], x.shape[2], x.shape[3], B.shape[3]), x, FLOATS)
    seq_idx = _documents(seq_idx, None, x)
    kernels = _mamba_ssm_kernels() if kernels_take(x, A) else None
    if kernels is None:
        return ssd_scan_chunked(x, dt, A, B, C, initial_state, seq_idx, return_final_state)
    documents = None if seq_idx is None else document_numbers(seq_idx).to(torch.int32)
    scan = functools.partial(kernels["scan"], A=-A, chunk_size=chunk_size)
    return _mamba_ssm_scan(scan, (x, dt, B, C, documents), initial_state, chunk_size, return_final_state)


def _mamba_ssm_scan(
    scan: Callable,
    rows: Sequence[Tensor | None],
    state: Tensor | None,
    chunk_size: int,
    return_final_state: bool,
) -> tuple[Tensor, Tensor | None]:
    """`mamba_ssm`'s scan of x, dt, B, C and documents, numbered from the state's own as 0; halved until offsets fit."""
    x, dt, B, C, documents = rows
    batch, time, heads, head_dim = x.shape
    groups, state_size = B.shape[2:]
    chunks = (time + chunk_size - 1) // chunk_size
    # What it reads, and what it writes for a row of the batch: y, the states and C Bᵀ
    read = [sum((size - 1) * stride for size, stride in zip(v.shape, v.stride(), strict=True)) for v in (x, dt, B, C)]
    row = max(time * heads * head_dim, chunks * heads * head_dim * state_size, chunks * chunk_size**2 * groups)
    if max(*read, batch * row) < MAMBA_SSM_REACH or (batch == 1 and chunks == 1):
        out = scan(x, dt, B=B, C=C, initial_states=state, seq_idx=documents, return_final_states=return_final_state)
        return out if return_final_state else (out, None)

    def take(index, *values):
        return [None if v is None else v[index] for v in values]

    if batch > 1:
        parts = []
        for half in (slice(batch // 2), slice(batch // 2, None)):
            *half_rows, start = take(half, *rows, state)
            parts.append(_mamba_ssm_scan(scan, half_rows, start, chunk_size, return_final_state))
        return torch.cat([y for y, _ in parts]), torch.cat([v for _, v in parts]) if return_final_state else None
    cut = (chunks + 1) // 2 * chunk_size
    first, second = (take((slice(None), half), *rows) for half in (slice(cut), slice(cut, None)))
    if documents is not None:
        second[-1] = second[-1] - first[-1][:, -1:]
    y, state = _mamba_ssm_scan(scan, first, state, chunk_size, True)
    rest, state = _mamba_ssm_scan(scan, second, state, chunk_size, return_final_state)
    return torch.cat((y, rest), 1), state


def ssd_step(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor, D: Tensor | None = None) -> Tensor:
    """One token of `ssd_scan` that updates `state` `[b, h, p, n]` in place; all else as for `palimpsa_step`."""
    _check_step_arguments(x, dt, A, B, C, state, D)
    kernels = _mamba_ssm_kernels() if kernels_take(x, A, state) else None
    if kernels is not None:
        head_dim, state_size = state.shape[2:]
        # Without D and dt_bias mamba_ssm 2.3.2's step fails. It expects all of them for each row, and reads one value
        # a head where the strides say that they do not vary.
        zero = _zero(x.device).expand(x.shape[1], head_dim)
        return kernels["step"](
            state,
            x,
            dt[..., None].expand(-1, -1, head_dim),
            -A[:, None, None].expand(-1, head_dim, state_size),
            B,
            C,
            D=zero if D is None else D[:, None].expand(-1, head_dim),
            dt_bias=zero,
        )
    value, alpha, key, query = _token(x, dt, A, B, C, state.dtype)
    state.mul_(alpha).addcmul_(value, key)
    return _with_skip((state @ query.transpose(-1, -2)).squeeze(-1), x, D)


def _with_skip(y: Tensor, x: Tensor, D: Tensor | None) -> Tensor:
    return (y if D is None else torch.addcmul(y, x.to(y.dtype), D[:, None].to(y.dtype))).to(x.dtype)


def paths(device: torch.device) -> dict[str, str]:
    """What each operation runs on for tensors on `device`, in words."""
    palimpsa = tuned = "PyTorch"
    if device.type == "cuda" and triton is not None:
        palimpsa = tuned = "Triton"
        if GLUON_AVAILABLE and torch.cuda.is_available() and torch.cuda.get_device_capability(device)[0] == 9:
            tuned = "Gluon for Hopper in bfloat16 with heads of 64 x 128, else Triton"
    mamba2 = "PyTorch"
    if device.type == "cuda":
        mamba2 = "PyTorch: mamba_ssm's kernels do not import" if _mamba_ssm_kernels() is None else "mamba_ssm (Triton)"
    return {
        "Palimpsa scan": tuned,
        "Palimpsa decoding": palimpsa,
        "Mamba2 scan": mamba2,
        "Mamba2 decoding": mamba2,
        "causal convolution": palimpsa,
        "norms": palimpsa,
    }


def seq_idx_from_cu_seqlens(cu_seqlens: Tensor, time: int, device: torch.device) -> Tensor:
    """Document numbers `[1, time]` on `device` from boundaries `[documents + 1]` that increase from 0 to `time`.

    Boundaries on a GPU are read, which waits for it, except while compiling; those on the CPU reach the GPU without a
    wait.

    Raises:
        ValueError: not a vector of integers, or boundaries that do not increase from 0 to `time`.
    """
    if cu_seqlens.ndim != 1 or cu_seqlens.numel() < 2 or cu_seqlens.is_floating_point() or cu_seqlens.is_complex():
        raise ValueError(f"cu_seqlens must be a vector of at least two integers, got {_describe(cu_seqlens)}")
    if not torch.compiler.is_compiling():
        ends = cu_seqlens.tolist()
        if ends[0] != 0 or ends[-1] != time or any(a > b for a, b in itertools.pairwise(ends)):
            raise ValueError(f"cu_seqlens must increase from 0 to the sequence length {time}, got {ends}")
    if cu_seqlens.device.type == "cpu" and device.type == "cuda":
        cu_seqlens = cu_seqlens.pin_memory().to(device, non_blocking=True)
    positions = torch.arange(time, device=device)
    return torch.searchsorted(cu_seqlens.to(device).contiguous(), positions, right=True)[None]


def _documents(seq_idx: Tensor | None, cu_seqlens: Tensor | None, x: Tensor) -> Tensor | None:
    if cu_seqlens is not None:
        if seq_idx is not None:
            raise ValueError("seq_idx and cu_seqlens say the same thing: give one of them")
        if x.shape[0] != 1:
            raise ValueError(f"cu_seqlens needs a batch of 1, got x of shape {tuple(x.shape)}")
        return seq_idx_from_cu_seqlens(cu_seqlens, x.shape[1], x.device)
    if seq_idx is not None and (seq_idx.is_floating_point() or seq_idx.is_complex()):
        raise ValueError(f"seq_idx must hold integers, got {_describe(seq_idx)}")
    _check("seq_idx", seq_idx, x.shape[:2], x)
    return seq_idx


# States, dt, A and the prior lose their meaning in fewer bits.
EXACT = (torch.float32, torch.float64)
FLOATS = (torch.bfloat16, torch.float16, *EXACT)


def _check_scan_arguments(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    beta: Tensor | None = None,
    I_prior: Tensor | None = None,
) -> None:
    if x.ndim != 4 or x.shape[1] == 0 or x.dtype not in FLOATS:
        raise ValueError(f"x must be a floating [batch, time ≥ 1, heads, head_dim], got {_describe(x)}")
    batch, time, heads, _ = x.shape
    if B.ndim != 4 or B.shape[:2] != x.shape[:2] or B.shape[2] == 0 or heads % B.shape[2] != 0:
        raise ValueError(f"B must be [{batch}, {time}, groups dividing {heads} heads, state_size], got {_describe(B)}")
    _check("dt", dt, (batch, time, heads), x, EXACT)
    _check_shared(x, A, B, C, beta, I_prior)


def _check_step_arguments(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    state: Tensor,
    D: Tensor | None,
    beta: Tensor | None = None,
    I_prior: Tensor | None = None,
) -> None:
    if x.ndim != 3 or x.dtype not in FLOATS:
        raise ValueError(f"x must be a floating [batch, heads, head_dim], got {_describe(x)}")
    batch, heads, head_dim = x.shape
    if B.ndim != 3 or B.shape[0] != batch or B.shape[1] == 0 or heads % B.shape[1] != 0:
        raise ValueError(f"B must be [{batch}, groups dividing {heads} heads, state_size], got {_describe(B)}")
    _check("dt", dt, (batch, heads), x, EXACT)
    states = () if I_prior is None else (2,)
    _check("state", state, (batch, heads, *states, head_dim, B.shape[2]), x, EXACT)
    _check("D", D, (heads,), x, FLOATS)
    _check_shared(x, A, B, C, beta, I_prior)


def _check_shared(x: Tensor, A: Tensor, B: Tensor, C: Tensor, beta: Tensor | None, I_prior: Tensor | None) -> None:
    heads = (x.shape[-2],)
    _check("B", B, B.shape, x, (x.dtype,))
    _check("C", C, B.shape, x, (x.dtype,))
    _check("A", A, heads, x, EXACT)
    _check("beta", beta, x.shape, x, FLOATS)
    _check("I_prior", I_prior, heads, x, EXACT)


def _check(
    name: str, value: Tensor | None, shape: Sequence[int], x: Tensor, dtypes: tuple[torch.dtype, ...] | None = None
) -> None:
    """Shape, device (that of `x`) and type of an argument, from what PyTorch knows without asking the device."""
    if value is None:
        return
    if value.shape != shape:
        raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(value.shape)}")
    if value.device != x.device:
        raise ValueError(f"{name} must be on {x.device} like x, got {value.device}")
    if dtypes is not None and value.dtype not in dtypes:
        allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{name} must be {allowed}, got {value.dtype}")


def _describe(value: Tensor) -> str:
    return f"shape {tuple(value.shape)}, {value.dtype}"


def _token(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Of one token dt x `[b, h, p, 1]`, alpha `[b, h, 1, 1]`, key and query `[b, h, 1, n]`, in the state's type."""
    dt = dt.to(dtype)
    alpha = torch.exp(-A.to(dtype) * dt)[..., None, None]
    key, query = (v.to(dtype).repeat_interleave(x.shape[1] // v.shape[1], dim=1)[:, :, None] for v in (B, C))
    return (dt[..., None] * x.to(dtype))[..., None], alpha, key, query


@functools.cache
def _zero(device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # so that it may be used everywhere
        return torch.zeros(1, 1, device=device)


@functools.cache
def _mamba_ssm_kernels() -> dict[str, Any] | None:
    """`mamba_ssm`'s scan and step, or None with one warning when the package is absent or half installed."""
    try:
        from mamba_ssm.ops.triton.selective_state_update import selective_state_update
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
    except Exception as error:  # a source install without its compiled module fails in many ways
        logger.warning(
            "mamba_ssm's kernels cannot be used (%s: %s): Mamba2 layers fall back to PyTorch, which is right but slow",
            type(error).__name__,
            error,
        )
        return None
    return {"scan": mamba_chunk_scan_combined, "step": selective_state_update}
