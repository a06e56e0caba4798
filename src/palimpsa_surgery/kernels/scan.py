"""The scans and decode steps that the model calls: one place for validation, dispatch and fallbacks.

| | CUDA | elsewhere |
|---|---|---|
| Palimpsa scan | Triton (`triton_scan.py`), without it PyTorch | PyTorch (`chunked.py`) |
| Palimpsa step | Triton (`triton_step.py`), without it PyTorch | PyTorch (here) |
| Mamba2 scan and step | `mamba_ssm`'s Triton (`mamba2_kernels.py`), without it PyTorch | PyTorch (`ssd.py`, here) |

In float64 everything is PyTorch.

Letters as in `reference.py`: b batch, t time, h heads, p head_dim, g groups, n state_size.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .chunked import palimpsa_scan_chunked
from .hopper_scan import AVAILABLE as GLUON_AVAILABLE
from .mamba2_kernels import mamba_ssm_adds_skip, mamba_ssm_imports, ssd_scan_mamba_ssm, ssd_step_mamba_ssm
from .ssd import ssd_scan_chunked
from .triton_jit import kernels_take, triton
from .triton_scan import palimpsa_scan_triton
from .triton_step import palimpsa_step_triton


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
    D: Tensor | None = None,
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
        D: `[h]`, adds the skip `D x` to y; None for zero.
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
    _check("D", D, (x.shape[2],), x, FLOATS)
    seq_idx = _documents(seq_idx, cu_seqlens, x)
    given = (x, dt, A, B, C, beta, I_prior, initial_state, seq_idx, return_final_state, return_variance)
    if triton is not None and kernels_take(x, A):
        return ScanOutput(*palimpsa_scan_triton(*given, D))
    y, final_state, variance = palimpsa_scan_chunked(*given)
    return ScanOutput(_with_skip(y, x, D), final_state, variance)


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
    D: Tensor | None = None,
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
    _check("D", D, (x.shape[2],), x, FLOATS)
    _check("initial_state", initial_state, (x.shape[0], x.shape[2], x.shape[3], B.shape[3]), x, FLOATS)
    seq_idx = _documents(seq_idx, None, x)
    given = (initial_state, seq_idx, return_final_state)
    if not (kernels_take(x, A) and mamba_ssm_imports()):
        y, final_state = ssd_scan_chunked(x, dt, A, B, C, *given)
    elif mamba_ssm_adds_skip():
        return ssd_scan_mamba_ssm(x, dt, A, B, C, D, *given, chunk_size)
    else:
        y, final_state = ssd_scan_mamba_ssm(x, dt, A, B, C, None, *given, chunk_size)
    return _with_skip(y, x, D), final_state


def ssd_step(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor, D: Tensor | None = None) -> Tensor:
    """One token of `ssd_scan` that updates `state` `[b, h, p, n]` in place; all else as for `palimpsa_step`."""
    _check_step_arguments(x, dt, A, B, C, state, D)
    if kernels_take(x, A, state) and mamba_ssm_imports():
        return ssd_step_mamba_ssm(x, dt, A, B, C, state, D)
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
        mamba2 = "mamba_ssm (Triton)" if mamba_ssm_imports() else "PyTorch: mamba_ssm's kernels do not import"
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
