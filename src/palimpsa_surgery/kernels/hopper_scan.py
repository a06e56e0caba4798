"""Launches of the kernels for Hopper; `triton_scan.py` asks `fits` and has the portable path.

Letters as in `triton_scan.py`, whose backward pass goes on from step 2 in another order here:

4. `find_spans`: from where to go back in time, by the most that `segment_states` says tokens write.
5. `segment_gradients`: the gradients that a segment's own tokens cause, and the adjoint of its start.
6. `pass_states` backwards, and `carry_rows` and `carry_keys`: by matrix products, what the adjoint after each segment
   adds. `sum_flows`: the gradient of log alpha.
"""

import functools

import torch
from torch import Tensor

from .hopper_block import MOST_TOKENS
from .hopper_carry import carry_keys, carry_rows
from .hopper_gradients import HALVES, HEAD_DIM, NUM_WARPS, STATE_SIZE
from .hopper_gradients import segment_gradients as segment_gradients_kernel
from .hopper_lanes import AVAILABLE
from .hopper_read_out import read_out as read_out_kernel
from .hopper_spans import GROWTH, GROWTH_OF_M, find_spans
from .triton_jit import cdiv, jit, tl

# Constants measured on one H200 at B=1 T=32768 H=80 P=64 N=128 G=1 bf16 (docs/experiments.md has the table).
BACKWARD_SEGMENT = MOST_TOKENS  # tokens a segment in the backward pass
BLOCK = 16  # tokens
# Tokens at a time of a program of `carry_rows` (2.1 ms with 64, 3.2 with 32, 2.9 with 128) and of one of `carry_keys`,
# and its keys (0.84 ms; 1.10 with 32 tokens, 0.93 with 128)
CARRY_TOKENS = 64
# Of a thread of `carry_rows`: room for three programs, 1.46 ms; without the limit 1.82, with 128 1.68
CARRY_REGISTERS = 168
CARRY_KEYS = 64
PROGRAMS = 2  # of the gradient kernel on a multiprocessor: what its registers and its shared memory have room for
SPARE_BYTES = 2 * 4 * HEAD_DIM * STATE_SIZE * BACKWARD_SEGMENT // BLOCK  # states of a program of the gradient kernel
# float32 values for each token and head that a launch takes, beside states, adjoints and rows
TOKEN_VALUES = 3 + HALVES * (1 + NUM_WARPS) + 4
# What a launch of all kernels costs beside their work, in rounds of the gradient kernel, of half of a segment's keys
# each (0.24 ms): f + b 34.3, 33.2 and 32.2 ms with 16, 8 and 4 launches
LAUNCH_ROUNDS = 1


@jit
def _since_known(known_a, a, known_b, b):
    """Of two stretches of tokens: whether a value is known in them, and that value with the changes since."""
    return known_a | known_b, tl.where(known_b != 0, b, a + b)


@jit
def sum_flows(
    changes, flows, dvx, flow, whole, dt, A, ddt, dA, dt_b, dt_t, dt_h, ddt_b, ddt_t, ddt_h, T, TP, H, NSEG,
    S: tl.constexpr,
):  # fmt: skip
    """ddt of one segment and head, and its part of dA [b, h, NSEG].

    Of the segment's own tokens, each half of the keys has flows [2, b, h, TP, 4], the parts of d log alpha unless the
    first is NaN, and changes [2, b, h, TP], by how much it grows from a token to the next. To this comes what goes from
    before the token to after the segment: flow [2, b, h, TP] from each token and whole [2, b, h, NSEG] from before it.
    """
    i_seg = tl.program_id(0).to(tl.int64)
    i_bh = tl.program_id(1).to(tl.int64)
    b = i_bh // H
    h = i_bh % H
    o_t = tl.arange(0, S)
    t = i_seg * S + o_t
    m_t = t < T
    m_before = m_t & (o_t > 0)
    part = tl.num_programs(1).to(tl.int64)
    p_t = i_bh * TP + t
    b_flow = tl.load(flow + p_t - 1, mask=m_before, other=0.0)
    b_flow += tl.load(flow + part * TP + p_t - 1, mask=m_before, other=0.0)
    b_q = tl.cumsum(b_flow, 0) + tl.load(whole + i_bh * NSEG + i_seg) + tl.load(whole + (part + i_bh) * NSEG + i_seg)
    for _ in tl.static_range(2):  # halves of the keys
        b_first = tl.load(flows + p_t * 4, mask=m_t, other=float("nan"))
        m_known = b_first == b_first
        for i in tl.static_range(1, 4):
            b_first += tl.load(flows + p_t * 4 + i, mask=m_known, other=0.0)
        b_change = tl.load(changes + p_t - 1, mask=m_before, other=0.0)
        b_value = tl.where(m_known, b_first, b_change)
        _, b_sum = tl.associative_scan((m_known.to(tl.int32), b_value), 0, _since_known)
        b_q += b_sum
        p_t += part * TP
    b_A = tl.load(A + h)
    b_dt = tl.load(dt + b * dt_b + t * dt_t + h * dt_h, mask=m_t, other=0.0)
    b_dvx = tl.load(dvx + i_bh * TP + t, mask=m_t, other=0.0)
    tl.store(ddt + b * ddt_b + t * ddt_t + h * ddt_h, b_dvx - b_A * b_q, mask=m_t)
    tl.store(dA + i_bh * NSEG + i_seg, -tl.sum(tl.where(m_t, b_dt * b_q, 0.0), 0))


def fits(x: Tensor, beta: Tensor, B: Tensor) -> bool:
    """Whether the kernels, measured on Hopper alone, take these arguments."""
    return (
        AVAILABLE
        and x.is_cuda
        and x.dtype == beta.dtype == torch.bfloat16
        and x.stride(-1) == 1
        and beta.stride(-1) == 1
        and B.shape[3] == STATE_SIZE
        and x.shape[3] == HEAD_DIM
        and torch.cuda.get_device_capability(x.device)[0] == 9
    )


def _pairs(v: Tensor, values: int = 2) -> Tensor:
    """The last axis as int32 pairs of bfloat16, without a copy where addresses of so many values at a time allow."""
    if v.data_ptr() % (2 * values) or any(stride % values for stride in v.stride()[:-1]):
        v = v.clone(memory_format=torch.contiguous_format)
    return v.view(torch.int32)


def read_out(x, dt, A, B, C, beta, I_prior, D, doc, states, y, segment):
    """Step 3: y `[b, t, h, p]`, with the skip, from the states at the segments' starts."""
    batch, time, heads, _ = x.shape
    segments = states.shape[2] - 1
    per_group = heads // B.shape[2]
    x, beta, B, C = _pairs(x), _pairs(beta), _pairs(B), _pairs(C)
    read_out_kernel[(segments, batch * heads)](
        x, dt, beta, A, B, C, I_prior, A if D is None else D, dt if doc is None else doc, states, y.view(torch.int32),
        *x.stride()[:3], *dt.stride(), *beta.stride()[:3], *B.stride()[:3], *C.stride()[:3],
        time, heads, per_group, segments, segment, HAS_DOC=doc is not None, HAS_SKIP=D is not None, num_warps=4,
    )  # fmt: skip


def programs_on(device: torch.device) -> int:
    """Of the gradient kernel, as many as run at a time; a CPU, where tests run it, counts as one multiprocessor."""
    on_cuda = device.type == "cuda"
    return PROGRAMS * (torch.cuda.get_device_properties(device).multi_processor_count if on_cuda else 1)


@functools.lru_cache(maxsize=1024)
def plan(batch: int, time: int, heads: int, most_heads: int, programs: int, workspace: int) -> tuple[int, int]:
    """Of one group's heads, how many a launch of the backward pass takes, at most so many, and how many shares of them.

    A program of the gradient kernel takes one share's heads one after the other and adds up their dB and dC, so more
    shares take more memory. What counts is when the last program ends.
    """
    found = []
    for shares in range(1, heads + 1):
        room = min(most_heads, (workspace - workspace_bytes(batch, time, 0, shares, programs)) // _bytes(batch, time))
        if shares > max(1, room):
            break
        launches = cdiv(heads, max(1, room))
        step = cdiv(heads, launches)
        rounds = HALVES * cdiv(cdiv(time, BACKWARD_SEGMENT) * batch * shares, programs) * cdiv(step, shares)
        found.append((launches * (rounds + LAUNCH_ROUNDS), shares, step))
    _, shares, step = min(found)
    return step, shares


def _bytes(batch: int, time: int) -> int:
    """Of a head's temporary tensors: states, adjoints, rows, and values of tokens."""
    segments = cdiv(time, BACKWARD_SEGMENT)
    states = 2 * 2 * HEAD_DIM * STATE_SIZE * (segments + 1)
    return 4 * batch * (states + segments * BACKWARD_SEGMENT * (2 * HEAD_DIM + TOKEN_VALUES))


def workspace_bytes(batch: int, time: int, step: int, shares: int, programs: int) -> int:
    """Of the temporary tensors of a launch of `step` heads in so many shares."""
    share = 2 * 4 * batch * cdiv(time, BACKWARD_SEGMENT) * BACKWARD_SEGMENT * STATE_SIZE
    return programs * SPARE_BYTES + shares * share + step * _bytes(batch, time)


def segment_gradients(x, dt, A, B, C, beta, I_prior, doc, dy, largest, states, adjoints, keys, segment):
    """Steps 4 and 5 for heads of one group: what each segment's own tokens cause, from `segment_states`'s largest.

    Slot k of adjoints becomes the adjoint of segment k's start. dB and dC are added to keys `[shares, 2, b, segments S,
    n]`. Returns what `carry_gradients` needs: what the kernel leaves in `rows`, `changes`, `flows` and `dprior`.
    """
    batch, time, heads, head_dim = x.shape
    segments = adjoints.shape[2] - 1
    padded = segments * segment
    blocks = padded // BLOCK
    documents = dt if doc is None else doc
    scales = x.new_empty(batch, heads, padded, dtype=torch.float32)
    factors = x.new_empty(batch, heads, blocks, dtype=torch.float32)
    parts = x.new_empty(batch, heads, blocks, dtype=torch.int32)
    find_spans[(segments, batch * heads)](
        dt, *largest, A, I_prior, documents, scales, factors, parts, *dt.stride(), time, padded, heads,
        S=segment, HAS_DOC=doc is not None, LIMIT=GROWTH, LIMIT_M=GROWTH_OF_M, num_warps=1,
    )  # fmt: skip
    rows = x.new_empty(batch, heads, 2, padded, head_dim, dtype=torch.float32)
    changes = x.new_empty(HALVES, batch, heads, padded, dtype=torch.float32)
    flows = x.new_empty(HALVES, batch, heads, padded, NUM_WARPS, dtype=torch.float32)
    dprior = x.new_empty(HALVES, batch, heads, segments, NUM_WARPS, dtype=torch.float32)
    shares = keys.shape[0]
    programs = min(programs_on(x.device), segments * batch * shares)
    spare = x.new_empty(programs, segment // BLOCK, 2 * head_dim * B.shape[3], dtype=torch.float32)
    x, beta, B, C, dy = (_pairs(v, 8) for v in (x, beta, B, C, dy))
    segment_gradients_kernel[(programs,)](
        x, dt, beta, A, B, C, I_prior, documents, dy, scales, factors, parts, states, spare, adjoints,
        rows, keys, changes, flows, dprior,
        *x.stride()[:3], *dt.stride(), *beta.stride()[:3], *B.stride()[:3], *C.stride()[:3], *dy.stride()[:3],
        time, padded, batch, heads, heads, segments, segment, shares,
        HAS_DOC=doc is not None, num_warps=NUM_WARPS,
    )  # fmt: skip
    return rows, changes, flows, dprior


def carry_gradients(x, dt, A, B, beta, doc, states, adjoints, decay, own, dB, dx, ddt, dbeta, segment, dot_types):
    """Step 6, adjoints passed on: what the adjoint after segment k, slot k + 1, adds to what its `own` tokens cause.

    Writes dx, ddt and dbeta and adds to dB `[b, segments S, n]`; returns dA and dprior `[2, h]`.
    """
    batch, time, heads, head_dim = x.shape
    state_size, segments = B.shape[3], decay.shape[2]
    rows, changes, flows, dprior = own
    padded, block = segments * segment, min(segment, CARRY_TOKENS)
    dvx, w = x.new_empty(2, batch, heads, padded, dtype=torch.float32)
    flow = x.new_empty(2, batch, heads, padded, dtype=torch.float32)
    whole = x.new_empty(2, batch, heads, segments, dtype=torch.float32)
    sizes = {"S": segment, "BT": block, "P": head_dim, "N": state_size, **dot_types}
    carry_rows[(segments, batch * heads, 2)](
        x, dt, beta, A, B, dt if doc is None else doc, rows, states, adjoints, decay, dx, dbeta, dvx, w, flow, whole,
        *x.stride()[:3], *dt.stride(), *beta.stride()[:3], *B.stride()[:2], *dx.stride()[:3],
        time, padded, heads, segments, HAS_DOC=doc is not None, **sizes, num_warps=4, num_stages=1,
        maxnreg=CARRY_REGISTERS,
    )  # fmt: skip
    carry_keys[(cdiv(time, block) * (state_size // CARRY_KEYS), batch)](
        x, dt, beta, B, adjoints, w, dB,
        *x.stride()[:3], *dt.stride(), *beta.stride()[:3], *B.stride()[:2],
        time, padded, heads, segments, BN=CARRY_KEYS, **sizes, num_warps=4, num_stages=3,
    )  # fmt: skip
    dA = x.new_empty(batch, heads, segments, dtype=torch.float32)
    sum_flows[(segments, batch * heads)](
        changes, flows, dvx, flow, whole, dt, A, ddt, dA, *dt.stride(), *ddt.stride(), time, padded, heads, segments,
        S=segment, num_warps=2,
    )  # fmt: skip
    return torch.stack((dA.sum((0, 2)), dprior.sum((0, 1, 3, 4))))
