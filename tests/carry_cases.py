"""The kernels around the gradient kernel for Hopper, and the states it goes back from, against their definitions."""

from unittest import mock

import torch

from helpers import assert_close
from palimpsa_surgery.kernels import hopper_scan, hopper_spans, triton_scan
from palimpsa_surgery.kernels.decay import document_numbers
from palimpsa_surgery.kernels.hopper_gradients import HALVES, NUM_WARPS
from palimpsa_surgery.kernels.triton_jit import tl
from scan_cases import Case, Data, make

# One whole segment and tails of a tile and of a sub-chunk; a document that begins inside of a segment and with one
CASES = [
    Case(1, 1, 1, 64, 128, 1, torch.bfloat16),
    Case(2, 150, 2, 64, 128, 2, torch.bfloat16),
    Case(2, 130, 2, 64, 128, 1, torch.bfloat16, documents=3),
    Case(1, 128, 1, 64, 128, 1, torch.bfloat16, documents=4),
    Case(1, 150, 2, 64, 128, 1, torch.bfloat16, extreme="decay"),
    Case(1, 70, 1, 64, 128, 1, torch.bfloat16, documents=5, extreme="no step"),
    Case(1, 64, 2, 64, 128, 1, torch.bfloat16, extreme="importance"),
    Case(1, 32, 1, 64, 128, 1, torch.bfloat16, extreme="large B"),
]
SEGMENT = 64


class Spans:
    """Stands in for the gradient kernel: keeps its scales, factors and parts and, where it runs one, the anchors."""

    def __init__(self, kernel):
        self.kernel, self.spare = kernel, None

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            self.found = arguments[9:12]
            if self.kernel:
                self.kernel[grid](*arguments, **options)
                self.spare = arguments[13]

        return launch


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def decay_of_tokens(data: Data, log_alpha):
    """[b, t, h]."""
    alpha = torch.exp(log_alpha)
    if data.seq_idx is not None:
        same = data.seq_idx[:, 1:] == data.seq_idx[:, :-1]
        alpha = torch.cat((alpha[:, :1], alpha[:, 1:] * same[..., None]), 1)
    return alpha


def loop(data: Data, states, v, beta, B, squares, log_alpha):
    """From each segment's starting state, the states before and after every block of 16 tokens, and after segments."""
    time = v.shape[1]
    alpha = decay_of_tokens(data, log_alpha)
    before, after, ends = [], [], []
    for t in range(time):
        if t % SEGMENT == 0:
            state = states[:, :, t // SEGMENT]
        if t % hopper_scan.BLOCK == 0:
            before.append(state)
        added = torch.stack((v[:, t, ..., None] * B[:, t, :, None], beta[:, t, ..., None] * squares[:, t, :, None]), 2)
        state = alpha[:, t, :, None, None, None] * state + added
        if t % hopper_scan.BLOCK == hopper_scan.BLOCK - 1 or t == time - 1:
            after.append(state)
        if t % SEGMENT == SEGMENT - 1 or t == time - 1:
            ends.append(state)
    return torch.stack(before, 2), torch.stack(after, 2), torch.stack(ends, 2)


def decays(data: Data, log_alpha):
    """What each segment keeps `[b, h, segments]`."""
    alpha = decay_of_tokens(data, log_alpha)
    return torch.stack([v.prod(1) for v in alpha.split(SEGMENT, 1)], 2)


def as_kept(found, given, squares) -> tuple[torch.Tensor, ...]:
    """What going back takes away, in float64: v and beta [b, t, h, p], cut times 1 / c, and B² rounded."""
    time = given["x"].shape[1]
    r = found[0][:, :, :time].transpose(1, 2)
    scaled = (given["x"].float() * (given["dt"] * r)[..., None], given["beta"].float() * r[..., None])
    cut = ((v.contiguous().view(torch.int32) & -256).view(torch.float32).double() for v in scaled)
    v, beta = (torch.where(r[..., None] > 0, v / r[..., None].double(), 0.0) for v in cut)
    return v, beta, squares.bfloat16().double()


def anchors_of(spare, blocks: int, batch: int, heads: int) -> torch.Tensor:
    """[b, h, blocks, 2, p, n] of what the gradient kernel leaves, each program of one head."""
    segments = -(-blocks * hopper_scan.BLOCK // SEGMENT)
    spare = spare.flatten(1)[: heads * batch * segments].double()
    # head, batch, segment, half, block, state, row of a thread, warp, g, c, key of a thread
    spare = spare.view(heads, batch, segments, HALVES, -1, 2, 8, NUM_WARPS, 8, 4, 4)
    anchors = spare.permute(1, 0, 2, 4, 5, 8, 6, 3, 7, 9, 10).flatten(7).flatten(5, 6)
    return anchors.flatten(2, 3)[:, :, :blocks]


def check_spans(found, before, after, alpha, prior) -> None:
    """That spans are what they say, and that nothing outgrows what it must not."""
    scales, factors, parts = found
    blocks = before.shape[2]
    scales = scales.double()[:, :, : blocks * hopper_scan.BLOCK].unflatten(2, (blocks, -1))
    parts, factors = parts[:, :, :blocks], factors.double()[:, :, :blocks]
    first = alpha[:, :: hopper_scan.BLOCK].transpose(1, 2)
    split, ends = parts > 1, parts == 1
    assert (parts[:, :, SEGMENT // hopper_scan.BLOCK - 1 :: SEGMENT // hopper_scan.BLOCK] != 0).all(), "a span too long"
    assert (parts[:, :, -1] != 0).all(), "a span too long"
    goes_on = torch.cat((torch.zeros_like(ends[:, :, :1]), parts[:, :, :-1] == 0), 2)
    c = 1 / torch.where(split, 1.0, scales[..., -1])
    c_before = torch.cat((torch.ones_like(c[:, :, :1]), c[:, :, :-1]), 2)
    c_before[:, :, :: SEGMENT // hopper_scan.BLOCK] = 1
    assert_close(factors, torch.where(goes_on, 1.0, c_before * first), 2e-6, "factors")
    # neither c nor any element of I / c outgrows the start of its span, where the segment begins with an importance
    important = before[:, :, :: SEGMENT // hopper_scan.BLOCK, 1] >= 0
    assert (scales[~split] <= 1.001 * hopper_spans.GROWTH).all()
    start = torch.zeros_like(before[:, :, 0, 1])
    for j in range(blocks):
        begun = prior[:, None, None] + first[:, :, j, None, None] * before[:, :, j, 1]
        start = torch.where(goes_on[:, :, j, None, None], start, begun)
        end = (prior[:, None, None] + after[:, :, j, 1]) / c[:, :, j, None, None]
        fits = (end <= 1.01 * hopper_spans.GROWTH * start) | ~important[:, :, j * hopper_scan.BLOCK // SEGMENT]
        assert fits[ends[:, :, j]].all(), "I outgrows its span's start"


def check_anchors(anchors, found, before, after, magnitudes, alpha, prior) -> None:
    """M / c and I / c after a span, M and Ibar with the decay of the first token before a block in parts."""
    scales, _, parts = found
    blocks = before.shape[2]
    parts = parts[:, :, :blocks]
    split, ends = parts > 1, parts == 1
    first = alpha[:, :: hopper_scan.BLOCK].transpose(1, 2)
    c = 1 / scales.double()[:, :, hopper_scan.BLOCK - 1 : blocks * hopper_scan.BLOCK : hopper_scan.BLOCK]
    with_prior = torch.stack((torch.zeros_like(prior), prior), 1)[:, None, :, None, None]  # [h, 1, 2, 1, 1]
    for chosen, expected, size, scale in (
        (ends, after + with_prior, magnitudes[1] + with_prior, c),
        (split, before * first[..., None, None, None], magnitudes[0], torch.ones_like(c)),
    ):
        error = (anchors * scale[..., None, None, None] - expected).abs()[chosen]
        assert (error <= 1e-5 * size[chosen]).all(), "anchors"


def check(case: Case, dot, tolerance: float, device: str = "cpu", kernel=None) -> None:
    """By autograd: spans, and what random adjoints after the segments add to random gradients.

    `dot`: Triton's type of the products' operands. `kernel`: the gradient kernel, whose anchors are checked too.
    """
    everything = make(case, device)
    dot_types = {"DOT": dot, "PRECISION": "ieee"}
    per_group = case.heads // case.groups
    doc = None if everything.seq_idx is None else document_numbers(everything.seq_idx).to(torch.int32)
    for group in range(case.groups):
        heads = slice(group * per_group, (group + 1) * per_group)
        a = everything.arguments
        given = {name: a[name][:, :, heads] for name in ("x", "dt", "beta")} | {"A": a["A"][heads]}
        given["B"] = a["B"][:, :, group : group + 1]
        parts = check_heads(given, a["C"][:, :, :1], everything, doc, dot_types, tolerance, kernel)
        if case.extreme in ("decay", "large B"):
            assert (parts > 1).any(), "no block in parts"
        if not (case.extreme or case.documents) and case.time > SEGMENT:
            assert (parts == 0).any(), "no span longer than a block"


def check_heads(given, C, data: Data, doc, dot_types, tolerance, kernel) -> torch.Tensor:
    """Returns the blocks' parts."""
    x, dt, A, B, beta = (given[name] for name in ("x", "dt", "A", "B", "beta"))
    batch, time, heads, head_dim = x.shape
    segments = -(-time // SEGMENT)
    padded, device = segments * SEGMENT, x.device
    states, adjoints = (
        normal(batch, heads, segments + 1, 2, head_dim, B.shape[3], seed=i).to(device) for i in range(2)
    )

    exact = {name: v.double() for name, v in given.items()}
    exact["log_alpha"] = -exact["A"] * exact["dt"]
    exact["v"] = exact["dt"][..., None] * exact["x"]
    leaves = [exact[name].detach().requires_grad_() for name in ("v", "beta", "B", "log_alpha")]
    v, u, keys, log_alpha = leaves
    keys = keys.expand(-1, -1, heads, -1)
    before, after, ends = loop(data, states.double(), v, u, keys, keys**2, log_alpha)
    dv, du, dB, dlog = torch.autograd.grad((ends * adjoints[:, :, 1:].double()).sum(), leaves)

    largest = torch.full((2, batch, heads, padded), float("nan"), device=device)
    with mock.patch.object(triton_scan, "_pass"):  # slow where it is interpreted, and not needed for the largest
        triton_scan._states(x, dt, A, B, beta, None, doc, SEGMENT, heads, largest)
    stand_in, real = Spans(kernel), hopper_scan.segment_gradients_kernel
    hopper_scan.segment_gradients_kernel = stand_in
    try:
        added = torch.zeros(heads, 2, batch, padded, B.shape[3], device=device)
        given_adjoints = adjoints.clone()
        hopper_scan.segment_gradients(x, dt, A, B, C, beta, A, doc, x, largest, states, given_adjoints, added, SEGMENT)
    finally:
        hopper_scan.segment_gradients_kernel = real
    found_parts = stand_in.found[2]
    with torch.no_grad():
        most = keys.abs().amax(-1)
        expected = torch.stack((exact["x"].abs().amax(-1) * most, exact["beta"].abs().amax(-1) * most**2))
        assert_close(largest[..., :time], expected.permute(0, 1, 3, 2), 1e-6, "largest")
        alpha = decay_of_tokens(data, log_alpha)
        check_spans(stand_in.found, before, after, alpha, A.double())
        if kernel:
            kept = as_kept(stand_in.found, given, keys**2)
            before, after, _ = loop(data, states.double(), *kept[:2], keys, kept[2], log_alpha)
            absolute = (w.abs() for w in (states.double(), v, u, keys, keys**2))
            magnitudes = loop(data, *absolute, log_alpha)
            anchors = anchors_of(stand_in.spare, before.shape[2], batch, heads)
            check_anchors(anchors, stand_in.found, before, after, magnitudes, alpha, A.double())

    # what the segments' own tokens cause, and NaN where there are none
    own = normal(2, batch, time, heads, head_dim, seed=2).to(device)
    rows = torch.full((batch, heads, 2, padded, head_dim), float("nan"), device=device)
    rows[..., :time, :] = own.permute(1, 3, 0, 2, 4)
    changes = torch.full((HALVES, batch, heads, padded), float("nan"), device=device)
    changes[..., :time] = normal(HALVES, batch, heads, time, seed=3).to(device)
    # each half of the keys knows d log alpha at other tokens; it is positive, so that dA does not cancel
    known = torch.arange(time, device=device) % SEGMENT % torch.tensor([[23], [16]], device=device) == 0
    flows = torch.full((HALVES, batch, heads, padded, NUM_WARPS), float("nan"), device=device)
    for half in range(HALVES):
        found = normal(batch, heads, int(known[half].sum()), NUM_WARPS, seed=6 + half).abs().to(device)
        flows[half, :, :, :time][:, :, known[half]] = found
    dprior = normal(HALVES, batch, heads, segments, NUM_WARPS, seed=4).to(device)
    total = normal(batch, padded, B.shape[3], seed=5).to(device)
    total_before = total.double()
    dx, dbeta = (torch.full(x.shape, float("nan"), device=device) for _ in range(2))
    ddt = torch.full(dt.shape, float("nan"), device=device)
    decay = decays(data, exact["log_alpha"]).float()
    left = (rows, changes, flows, dprior)
    scalars = hopper_scan.carry_gradients(
        x, dt, A, B, beta, doc, states, adjoints, decay, left, total, dx, ddt, dbeta, SEGMENT, dot_types
    )
    dv += own[0]
    assert_close(dx, exact["dt"][..., None] * dv, tolerance, "dx")
    assert_close(dbeta, du + own[1], tolerance, "dbeta")
    assert_close(total.double()[:, :time], total_before[:, :time] + dB[:, :, 0], tolerance, "dB")
    assert torch.equal(total.double()[:, time:], total_before[:, time:])
    for half in range(HALVES):
        value = None
        for t in range(time):
            value = (
                flows[half, :, :, t].double().sum(-1) if known[half, t] else value + changes[half, :, :, t - 1].double()
            )
            dlog[:, t] += value
    assert_close(ddt, (exact["x"] * dv).sum(-1) - exact["A"] * dlog, tolerance, "ddt")
    dA = -(exact["dt"] * dlog).sum((0, 1))
    if dot_types["DOT"] == tl.float32:
        assert_close(scalars[0], dA, tolerance, "dA")
    # rounded, segments err independently of each other, and their sum may be close to nothing
    terms = torch.stack([v.sum(1) for v in (exact["dt"] * dlog).split(SEGMENT, 1)])
    assert (scalars[0] - dA).norm() <= tolerance * terms.norm(), "dA"
    assert_close(scalars[1], dprior.double().sum((0, 1, 3, 4)), 1e-6, "dprior")
    return found_parts
