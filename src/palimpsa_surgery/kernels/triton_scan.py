"""The Palimpsa scan in Triton, forward and backward (paper Eq. 5 in natural parameters, A.5).

Letters: b batch, t time (s: an earlier token), h heads, p head_dim, g groups, n state_size. Time is cut into
segments of S tokens, and in the backward pass each segment into sub-chunks of L = 16 tokens.

The recurrences of M and Ibar are linear; only the read-out `M / (I_prior + Ibar)` is elementwise. So

1. `segment_states`: what each segment adds to the state is a decayed matrix product, `(dt x)ᵀ B` and `betaᵀ B²`.
2. `pass_states`: a short loop over segments gives the state at every segment's start.
3. `read_out`: all segments in parallel, a loop over time with the state in registers.

The backward pass saves nothing but the inputs. It runs 1 and 2 again, with shorter segments, and then

4. `segment_adjoints`: what each segment adds to the adjoint of its starting state (a loop over time, as in 3,
   because Z = C dy / I has no low rank), and `pass_states` backwards over segments.
5. `segment_gradients`: sub-chunks from last to first. For one value row p of a sub-chunk, with
   D[s, t] = decay from s to t (zero for t < s or across documents), as `[n, t]` tiles:

        M  = Bᵀ (dt x ∘ D)   + M_start decay      I  = I_prior + (B²)ᵀ (beta ∘ D) + Ibar_start decay
        Z  = C dy / I                             Z_I = -Z M / I               (direct adjoints of M and Ibar)
        Q  = Bᵀ Z                                 Q_I = (B²)ᵀ Z_I                  (as [s, t])
        W  = Z Dᵀ + decay E_M                     W_I = Z_I Dᵀ + decay E_I         (total adjoints of M[s], Ibar[s])
        d(dt x)[s] = Σ_t D Q + decay Σ_n B E_M    dbeta[s] = Σ_t D Q_I + decay Σ_n B² E_I
        dC += dy M / I                            dB += (dt x) W + 2 B beta W_I

   E_M and E_I, the adjoints that arrive from after the sub-chunk, become alpha W at its first token. The gradient of
   log alpha[r] sums up what token r lets through, formed inside the sub-chunk without any difference of long sums:
   from s < r to t ≥ r, D (dt x Q + beta Q_I); from the start to t ≥ r, decay (Z M_start + Z_I Ibar_start); from s < r
   to the end, decay (dt x B E_M + beta B² E_I); from the start to the end, decay (E_M M_start + E_I Ibar_start).

On Hopper step 4 is another. Step 5 starts without an adjoint after the segment, what that adds being linear in it:
`hopper_scan.py` has the order.

A reset at a document's start is a mask (the decay over it is zero), never log alpha = -inf. No decay is divided by, but
on Hopper products of decays that are at least 2^-16 (read-out) and 2^-11 (gradients).
Sums over heads, key blocks and time go through float32 partial results and a fixed order: results are deterministic.
The launches of the backward pass take a few heads at a time, which bounds its memory.
"""

import os

import torch
from torch import Tensor

from .decay import document_numbers
from .hopper_scan import BACKWARD_SEGMENT as TUNED_SEGMENT
from .hopper_scan import carry_gradients as tuned_carry_gradients
from .hopper_scan import fits as tuned_fits
from .hopper_scan import plan as tuned_plan
from .hopper_scan import programs_on
from .hopper_scan import read_out as tuned_read_out
from .hopper_scan import segment_gradients as tuned_segment_gradients
from .triton_backward import reduce_heads, reduce_rows, segment_adjoints, segment_gradients, skip_backward
from .triton_forward import pass_states, read_out, segment_states
from .triton_jit import NAMESPACE, cdiv, power_of_two, tl

# Constants measured on one H200 at B=1 T=32768 H=80 P=64 N=128 G=1 bf16 (docs/experiments.md has the table).
# Tokens a segment: keeps the states at 0.33 GiB, and the read-outs were no faster with 256 or 1,024.
FORWARD_SEGMENT = 512
# Backward: the kernel works out each sub-chunk's starting state from the segment's, so it prefers short ones.
BACKWARD_SEGMENT = 128
SUB_CHUNK = 16
KEY_BLOCK = 64  # of the portable gradient kernel: 10% faster than 32 on Hopper although it spills registers
# Tokens, value rows and keys of a product in `segment_states`: 0.99 ms in both passes, with 64 tokens 1.00 and in two
# stages 1.10, with 64 keys 1.25. Without tensor cores a product is unrolled: in float32 the larger tile spills 10 KB a
# thread, the smaller one nothing.
STATE_TILE, STATE_TILE_FP32 = (32, 64, 128), (16, 64, 64)
# Numbers of a state and loads in flight of a program of `pass_states`: 0.98 ms with 16 loads, 1.01 with 8, 1.38 with 4.
PASS_BLOCK, PASS_AHEAD = 128, 16
# Of the gradient kernel, one by default. In float32 one warp spills 2.3 KB a thread and compiles in 55 seconds, four
# spill 0.2 KB and take 15.
WARPS = {torch.float32: 4}
# Bytes of temporary tensors that a launch of the backward pass may take: on Hopper 20 heads of 32k tokens at a time,
# with four times as many the same 31.4 ms.
WORKSPACE_BYTES = 1024 * 2**20
# Elements from a token to the next beyond which inputs are copied: offsets within a forward segment have 32 bits.
MAX_STRIDE = 2**31 // FORWARD_SEGMENT - 1
# Rows of the batch times heads in a launch: CUDA's limit for the second and third axis of a grid
MAX_GRID = 65535
# Whether `hopper_scan.py` is used where it fits; tests turn it off to reach the portable kernels.
USE_TUNED = True
_INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"


# ---------------------------------------------------------------------------------------------------------------------
# Launches


def _dot_types(x: Tensor) -> dict:
    """Types of the matrix products' operands: float16 lacks the range for B² and adjoints, so it runs as TF32."""
    if x.dtype == torch.bfloat16:
        return {"DOT": tl.bfloat16, "PRECISION": "tf32"}
    return {"DOT": tl.float32, "PRECISION": "tf32" if x.dtype == torch.float16 else "ieee"}


def _states(x, dt, A, B, beta, initial_state, doc, segment, heads_per_group, largest=None):
    """States at the segments' boundaries `[b, h, segments + 1, 2, p, n]` and decays `[b, h, segments]`.

    Writes `largest`, where given, as `segment_states` has it.
    """
    batch, time, heads, head_dim = x.shape
    state_size = B.shape[3]
    segments = cdiv(time, segment)
    states = x.new_empty(batch, heads, segments + 1, 2, head_dim, state_size, dtype=torch.float32)
    decay = x.new_empty(batch, heads, segments, dtype=torch.float32)
    if initial_state is not None:
        states[:, :, 0].copy_(initial_state)
    BT, BP, BN = STATE_TILE_FP32 if x.dtype == torch.float32 else STATE_TILE
    BT = min(BT, segment)
    BP, BN = min(BP, max(16, power_of_two(head_dim))), min(BN, max(16, power_of_two(state_size)))
    grid = (batch * heads * cdiv(head_dim, BP) * cdiv(state_size, BN), segments)
    segment_states[grid](
        x, dt, beta, A, B, dt if doc is None else doc, states, decay, decay if largest is None else largest,
        *x.stride(), *dt.stride(), *beta.stride(), *B.stride()[:3],
        time, heads, heads_per_group, head_dim, state_size, segments, segment,
        BT=BT, BP=BP, BN=BN, HAS_DOC=doc is not None, HAS_LARGEST=largest is not None, **_dot_types(x),
        num_warps=4, num_stages=3,
    )  # fmt: skip
    _pass(states, decay, reverse=False, zero=initial_state is None)
    return states, decay


def _pass(states: Tensor, decay: Tensor, reverse: bool, zero: bool) -> None:
    batch, heads, segments = decay.shape
    size = states[0, 0, 0].numel()
    pass_states[(cdiv(size, PASS_BLOCK), batch * heads)](
        states, decay, segments, size, BLOCK=PASS_BLOCK, AHEAD=PASS_AHEAD, REVERSE=reverse, ZERO=zero, num_warps=1
    )


def _forward(x, dt, A, B, C, beta, I_prior, D, initial_state, doc, return_variance):
    batch, _, heads, head_dim = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    final_state = torch.empty(batch, heads, 2, head_dim, B.shape[3], dtype=torch.float32, device=x.device)
    variance = torch.empty(x.shape if return_variance else (0,), dtype=torch.float32, device=x.device)
    step = max(1, MAX_GRID // heads)
    for i in range(0, batch, step):
        rows = [None if v is None else v[i : i + step] for v in (x, dt, B, C, beta, initial_state, doc)]
        _forward_rows(*rows, A, I_prior, D, y[i : i + step], final_state[i : i + step], variance[i : i + step])
    return y, final_state, variance


def _forward_rows(x, dt, B, C, beta, initial_state, doc, A, I_prior, D, y, final_state, variance):
    batch, time, heads, head_dim = x.shape
    groups, state_size = B.shape[2:]
    return_variance = variance.numel() > 0
    states, _ = _states(x, dt, A, B, beta, initial_state, doc, FORWARD_SEGMENT, heads // groups)
    segments, documents = states.shape[2] - 1, dt if doc is None else doc
    sizes = (time, heads, heads // groups, head_dim)
    if not return_variance and USE_TUNED and tuned_fits(x, beta, B):
        tuned_read_out(x, dt, A, B, C, beta, I_prior, D, doc, states, y, FORWARD_SEGMENT)
    else:
        BP = 8
        read_out[(cdiv(head_dim, BP), segments, batch * heads)](
            x, dt, beta, A, B, C, I_prior, A if D is None else D, documents, states, y, variance,
            *x.stride(), *dt.stride(), *beta.stride(), *B.stride()[:3], *C.stride()[:3],
            *sizes, state_size, segments, FORWARD_SEGMENT,
            BP=BP, BN=power_of_two(state_size), HAS_DOC=doc is not None, HAS_SKIP=D is not None,
            HAS_VAR=return_variance, FAST=not _INTERPRET, num_warps=1,
        )  # fmt: skip
    final_state.copy_(states[:, :, -1])


def _backward_heads(
    x, dt, A, B, C, beta, I_prior, initial_state, doc, dy, dfinal, dvar, gradients, heads, group, first, tuned, segment
):
    """Write or, for `dkeys`, dB and dC of the group, add what these heads, a slice within one group, contribute.

    Returns dA and dprior `[2, h]`.
    """
    dx, ddt, dkeys, dbeta, dinitial = gradients
    x, dt, beta, dy, dx, ddt, dbeta = (v[:, :, heads] for v in (x, dt, beta, dy, dx, ddt, dbeta))
    dvar = dy if dvar is None else dvar[:, :, heads]
    A, I_prior = A[heads], I_prior[heads]
    B, C = B[:, :, group : group + 1], C[:, :, group : group + 1]
    batch, time, n_heads, head_dim = x.shape
    state_size = B.shape[3]
    documents = dt if doc is None else doc
    initial = None if initial_state is None else initial_state[:, heads]
    segments = cdiv(time, segment)
    largest = x.new_empty(2, batch, n_heads, segments * segment, dtype=torch.float32) if tuned else None
    states, decay = _states(x, dt, A, B, beta, initial, doc, segment, n_heads, largest)
    adjoints = torch.empty_like(states)
    if dfinal is not None:
        adjoints[:, :, -1].copy_(dfinal[:, heads])
    flags = {"HAS_DOC": doc is not None, "HAS_VAR": dvar is not dy, "FAST": not _INTERPRET}
    if tuned:
        own = tuned_segment_gradients(x, dt, A, B, C, beta, I_prior, doc, dy, largest, states, adjoints, dkeys, segment)
    else:
        BP = 8
        segment_adjoints[(cdiv(head_dim, BP), segments, batch * n_heads)](
            x, dt, beta, A, B, C, I_prior, dy, dvar, documents, states, adjoints,
            *x.stride(), *dt.stride(), *beta.stride(), *B.stride()[:3], *C.stride()[:3], *dy.stride(),
            *dvar.stride(), time, n_heads, n_heads, head_dim, state_size, segments, segment,
            BP=BP, BN=power_of_two(state_size), **flags, num_warps=1,
        )  # fmt: skip
    _pass(adjoints, decay, reverse=True, zero=dfinal is None)
    if dinitial is not None:
        dinitial[:, heads].copy_(adjoints[:, :, 0])
    outputs = (dx, ddt, dbeta, segment)
    if tuned:
        return tuned_carry_gradients(
            x, dt, A, B, beta, doc, states, adjoints, decay, own, dkeys[0, 0], *outputs, _dot_types(x)
        )
    keys, scalars = _gradients_portable(x, dt, A, B, C, beta, I_prior, doc, dy, states, adjoints, *outputs, dvar, flags)
    part_size, size, block = keys[0, 0, 0].numel(), dkeys[0, 0].numel(), 1024
    reduce_heads[(cdiv(size, block), batch, 2)](
        keys, dkeys, n_heads, part_size, size, BLOCK=block, FIRST=first, num_warps=4
    )
    return scalars


def _gradients_portable(x, dt, A, B, C, beta, I_prior, doc, dy, states, adjoints, dx, ddt, dbeta, segment, dvar, flags):
    """Step 5 in plain Triton; returns dB and dC `[2, b, h, t, n]`, dA and dprior `[2, h]`."""
    batch, time, heads, head_dim = x.shape
    state_size, segments = B.shape[3], states.shape[2] - 1
    xT, betaT, dyT = (v.permute(0, 2, 3, 1).contiguous() for v in (x, beta, dy))
    dvarT = dvar.permute(0, 2, 3, 1).contiguous() if flags["HAS_VAR"] else dyT
    BN = min(KEY_BLOCK, max(16, power_of_two(state_size)))
    blocks = cdiv(state_size, BN)
    starts = torch.empty_like(states[:, :, 1:])
    rows = x.new_empty(2, blocks, batch, heads, head_dim, time, dtype=torch.float32)
    keys = x.new_empty(2, batch, heads, time, state_size, dtype=torch.float32)
    dlog = x.new_empty(blocks, batch, heads, time, dtype=torch.float32)
    dprior_part = x.new_empty(blocks, batch, heads, segments, dtype=torch.float32)
    segment_gradients[(blocks, segments, batch * heads)](
        xT, dt, betaT, A, B, C, I_prior, dyT, dvarT, dt if doc is None else doc, states, starts, adjoints,
        *rows, *keys, dlog, dprior_part,
        *dt.stride(), *B.stride()[:3], *C.stride()[:3],
        time, batch, heads, heads, head_dim, state_size, segments,
        S=segment, L=SUB_CHUNK, BP=min(32, max(16, power_of_two(head_dim))), BN=BN,
        **flags, **_dot_types(x), num_warps=WARPS.get(x.dtype, 1), num_stages=1,
    )  # fmt: skip
    BT = 64
    dA_part = x.new_empty(batch, heads, cdiv(time, BT), dtype=torch.float32)
    reduce_rows[(cdiv(time, BT), batch * heads)](
        xT, dt, A, *rows, dlog, dx, ddt, dbeta, dA_part,
        *dt.stride(), *dx.stride()[:3], *ddt.stride(),
        time, heads, head_dim, blocks, batch * heads, BT=BT, BP=power_of_two(head_dim), num_warps=4,
    )  # fmt: skip
    return keys, torch.stack((dA_part.sum((0, 2)), dprior_part.sum((0, 1, 3))))


def _heads_at_a_time(batch, time, heads, head_dim, state_size, element_size) -> int:
    """Of one group, by bytes of temporary tensors: states, adjoints, scratch; transposed copies; partial results."""
    state_bytes = 3 * 2 * 4 * head_dim * state_size * (cdiv(time, BACKWARD_SEGMENT) + 1)
    row_bytes = 4 * time * head_dim * (3 * element_size / 4 + 2 * cdiv(state_size, KEY_BLOCK))
    a_head = batch * int(state_bytes + row_bytes + 2 * 4 * time * state_size)
    launches = cdiv(heads, max(1, min(WORKSPACE_BYTES // a_head, MAX_GRID // batch)))
    return cdiv(heads, launches)


def _backward(x, dt, A, B, C, beta, I_prior, D, initial_state, doc, dy, dfinal, dvar):
    pieces = []
    for i in range(0, x.shape[0], MAX_GRID):
        rows = (x, dt, B, C, beta, initial_state, doc, dy, dfinal, dvar)
        rows = (None if v is None else v[i : i + MAX_GRID] for v in rows)
        pieces.append(_backward_rows(*rows, A, I_prior, D))
    if len(pieces) == 1:
        return pieces[0]
    of_all = (2, 6, 7)  # dA, dprior and dD
    together = enumerate(zip(*pieces, strict=True))
    return tuple(v[0] if v[0] is None else sum(v) if k in of_all else torch.cat(v) for k, v in together)


def _backward_rows(x, dt, B, C, beta, initial_state, doc, dy, dfinal, dvar, A, I_prior, D):
    batch, time, heads, head_dim = x.shape
    groups, state_size = B.shape[2:]
    dx, dbeta = (torch.empty(x.shape, dtype=v.dtype, device=x.device) for v in (x, beta))
    ddt = torch.empty(dt.shape, dtype=torch.float32, device=x.device)
    dinitial = None if initial_state is None else torch.empty_like(initial_state, memory_format=torch.contiguous_format)
    dB, dC = (torch.empty(B.shape, dtype=B.dtype, device=x.device) for _ in range(2))
    tuned = dvar is None and USE_TUNED and tuned_fits(x, beta, B)
    segment = TUNED_SEGMENT if tuned else BACKWARD_SEGMENT
    dy = dy if dy.stride(-1) == 1 and dy.stride(1) <= MAX_STRIDE else dy.contiguous()
    heads_per_group = heads // groups
    if tuned:
        most = max(1, MAX_GRID // batch)
        step, shares = tuned_plan(batch, time, heads_per_group, most, programs_on(x.device), WORKSPACE_BYTES)
    else:
        step = _heads_at_a_time(batch, time, heads_per_group, head_dim, state_size, x.element_size())
    scalars = []
    for g in range(groups):
        if tuned:
            padded = cdiv(time, segment) * segment
            dkeys = torch.zeros(shares, 2, batch, padded, state_size, dtype=torch.float32, device=x.device)
        else:
            dkeys = torch.empty(2, batch, time, state_size, dtype=torch.float32, device=x.device)
        end = (g + 1) * heads_per_group
        for h0 in range(g * heads_per_group, end, step):
            gradients = (dx, ddt, dkeys, dbeta, dinitial)
            scalars += [
                _backward_heads(
                    x, dt, A, B, C, beta, I_prior, initial_state, doc, dy, dfinal, dvar, gradients,
                    slice(h0, min(h0 + step, end)), g, first=h0 == g * heads_per_group, tuned=tuned,
                    segment=segment,
                )
            ]  # fmt: skip
        if tuned:
            dkeys = (dkeys[0] if shares == 1 else dkeys.sum(0))[:, :, :time]
        dB[:, :, g], dC[:, :, g] = dkeys
    dA, dprior = (torch.cat([v[i] for v in scalars]) for i in range(2))
    return dx, ddt, dA, dB, dC, dbeta, dprior, None if D is None else _skip_backward(x, dy, D, dx), dinitial


def _skip_backward(x, dy, D, dx):
    """dD `[h]`; what the skip adds to dx is added in place."""
    batch, time, heads, head_dim = x.shape
    BT = 64
    parts = x.new_empty(cdiv(time, BT), batch, heads, dtype=torch.float32)
    skip_backward[(parts.numel(),)](
        x, dy, D, dx, parts, *x.stride(), *dy.stride(), time, batch, heads, head_dim,
        BT=BT, BP=power_of_two(head_dim), num_warps=4,
    )  # fmt: skip
    return parts.sum((0, 1))


# ---------------------------------------------------------------------------------------------------------------------
# Custom ops


def _zeros_like_rows(x: Tensor) -> Tensor:
    """A zero beta that takes no memory."""
    return x.new_zeros(1).expand(x.shape)


def _scan_forward(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    beta: Tensor | None,
    I_prior: Tensor,
    D: Tensor | None,
    initial_state: Tensor | None,
    documents: Tensor | None,
    return_variance: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    beta = _zeros_like_rows(x) if beta is None else beta
    with torch.cuda.device_of(x):  # Triton launches on the current device
        return _forward(x, dt, A, B, C, beta, I_prior, D, initial_state, documents, return_variance)


def _scan_forward_fake(x, dt, A, B, C, beta, I_prior, D, initial_state, documents, return_variance):
    batch, _, heads, head_dim = x.shape
    return (
        x.new_empty(x.shape),
        x.new_empty(batch, heads, 2, head_dim, B.shape[3], dtype=torch.float32),
        x.new_empty(x.shape if return_variance else (0,), dtype=torch.float32),
    )


def _scan_backward(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    beta: Tensor | None,
    I_prior: Tensor,
    D: Tensor | None,
    initial_state: Tensor | None,
    documents: Tensor | None,
    dy: Tensor,
    dfinal: Tensor | None,
    dvariance: Tensor | None,
) -> list[Tensor]:
    rows = _zeros_like_rows(x) if beta is None else beta
    given = (x, dt, A, B, C, rows, I_prior, D, initial_state, documents, dy, dfinal, dvariance)
    with torch.cuda.device_of(x):
        return [gradient for gradient in _backward(*given) if gradient is not None]


def _scan_backward_fake(x, dt, A, B, C, beta, I_prior, D, initial_state, documents, dy, dfinal, dvariance):
    likes = [x, dt, A, B, C, x if beta is None else beta, I_prior]
    likes += [v for v in (D, initial_state) if v is not None]
    return [torch.empty(v.shape, dtype=v.dtype, device=v.device) for v in likes]


_scan_op = torch.library.custom_op(f"{NAMESPACE}::scan", _scan_forward, mutates_args=())
_scan_op.register_fake(_scan_forward_fake)
_scan_backward_op = torch.library.custom_op(f"{NAMESPACE}::scan_backward", _scan_backward, mutates_args=())
_scan_backward_op.register_fake(_scan_backward_fake)


def _setup_context(ctx, inputs, output):
    *tensors, return_variance = inputs
    ctx.save_for_backward(*tensors)
    ctx.return_variance = return_variance
    ctx.set_materialize_grads(False)


def _autograd_backward(ctx, dy, dfinal, dvariance):
    x, dt, A, B, C, beta, I_prior, D, initial_state, documents = ctx.saved_tensors
    dy = x.new_zeros(1).expand(x.shape) if dy is None else dy
    dvariance = dvariance if ctx.return_variance else None
    gradients = _scan_backward_op(x, dt, A, B, C, beta, I_prior, D, initial_state, documents, dy, dfinal, dvariance)
    dx, ddt, dA, dB, dC, dbeta, dprior, *rest = gradients
    dD = None if D is None else rest[0]
    dinitial = None if initial_state is None else rest[-1]
    return dx, ddt, dA, dB, dC, None if beta is None else dbeta, dprior, dD, dinitial, None, None


_scan_op.register_autograd(_autograd_backward, setup_context=_setup_context)


# ---------------------------------------------------------------------------------------------------------------------
# Public


def palimpsa_scan_triton(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    beta: Tensor | None,
    I_prior: Tensor,
    initial_state: Tensor | None = None,
    seq_idx: Tensor | None = None,
    return_final_state: bool = False,
    return_variance: bool = False,
    D: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The scan of `scan.palimpsa_scan`, which validates and says what the arguments mean, in Triton.

    Args:
        x: `[b, t, h, p]`, bfloat16, float16 or float32; any strides, as for all inputs.
        dt: `[b, t, h]`. A, I_prior: `[h]`; all else is float32. B, C: `[b, t, g, n]` of x's type.
        beta: `[b, t, h, p]` or None for zero. initial_state: `[b, h, 2, p, n]` or None.
        seq_idx: `[b, t]` integers or None.
        return_final_state: return the state after the last token, `[b, h, 2, p, n]` float32.
        return_variance: return the predictive variance, `[b, t, h, p]` float32.
        D: `[h]` or None, adds `D x` to y.

    Returns:
        y `[b, t, h, p]` of x's type, final state or None, variance or None; differentiable. In the tuned kernels, where
        two keys share a reciprocal, importances, the prior's included, must lie between 1e-18 and 1e14.
    """
    documents = None if seq_idx is None else document_numbers(seq_idx).to(torch.int32)
    B, C = (v if v.stride(-1) == 1 else v.contiguous() for v in (B, C))
    x, dt, B, C, beta = (v if v is None or v.stride(1) <= MAX_STRIDE else v.contiguous() for v in (x, dt, B, C, beta))
    dt = dt.float()
    A, I_prior, D = (None if v is None else v.float().contiguous() for v in (A, I_prior, D))
    y, final_state, variance = _scan_op(x, dt, A, B, C, beta, I_prior, D, initial_state, documents, return_variance)
    return y, final_state if return_final_state else None, variance if return_variance else None
