"""The kernels of `hopper_carry.py` and `sum_flows` against what they are by definition, in float64."""

import torch

from helpers import assert_close
from palimpsa_surgery.kernels import hopper_scan
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
]
SEGMENT = 64


class Starts:
    """Stands in for the gradient kernel and keeps the states that it is given."""

    def __getitem__(self, grid):
        def launch(*arguments, **_):
            self.found = arguments[9].view(torch.bfloat16)

        return launch


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def loop(data: Data, states, v, beta, B, log_alpha):
    """From each segment's starting state, the states before every 16th token and after the segment."""
    time = v.shape[1]
    starts, ends = [], []
    for t in range(time):
        if t % SEGMENT == 0:
            state = states[:, :, t // SEGMENT]
        if t % hopper_scan.SUB_CHUNK == 0:
            starts.append(state)
        alpha = torch.exp(log_alpha[:, t])
        if data.seq_idx is not None and t > 0:
            alpha = alpha * (data.seq_idx[:, t] == data.seq_idx[:, t - 1])[:, None]
        added = torch.stack((v[:, t, ..., None] * B[:, t, :, None], beta[:, t, ..., None] * B[:, t, :, None] ** 2), 2)
        state = alpha[..., None, None, None] * state + added
        if t % SEGMENT == SEGMENT - 1 or t == time - 1:
            ends.append(state)
    return torch.stack(starts, 2), torch.stack(ends, 2)


def decays(data: Data, log_alpha):
    """What each segment keeps `[b, h, segments]`."""
    alpha = torch.exp(log_alpha)
    if data.seq_idx is not None:
        alpha[:, 1:] *= (data.seq_idx[:, 1:] == data.seq_idx[:, :-1])[..., None]
    return torch.stack([v.prod(1) for v in alpha.split(SEGMENT, 1)], 2)


def check(case: Case, dot, tolerance: float, start_tolerances: tuple[float, float], device: str = "cpu") -> None:
    """By autograd: starts, and what random adjoints after the segments add to random gradients.

    `dot`: Triton's type of the products' operands. `start_tolerances`: error of a start relative to itself, and to the
    sum of the magnitudes that it is made of.
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
        check_heads(given, a["C"][:, :, :1], everything, doc, dot_types, tolerance, start_tolerances)


def check_heads(given, C, data: Data, doc, dot_types, tolerance, start_tolerances) -> None:
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
    starts, ends = loop(data, states.double(), v, u, keys.expand(-1, -1, heads, -1), log_alpha)
    dv, du, dB, dlog = torch.autograd.grad((ends * adjoints[:, :, 1:].double()).sum(), leaves)
    magnitudes, _ = loop(data, states.double().abs(), v.abs(), u.abs(), keys.abs().expand(-1, -1, heads, -1), log_alpha)

    kernel, hopper_scan.segment_gradients_kernel = hopper_scan.segment_gradients_kernel, Starts()
    try:
        hopper_scan.segment_gradients(x, dt, A, B, C, beta, A, doc, x, states, adjoints, SEGMENT, dot_types)
        found = hopper_scan.segment_gradients_kernel.found
    finally:
        hopper_scan.segment_gradients_kernel = kernel
    found = found[:, :, : starts.shape[2]].permute(0, 1, 2, 4, 3, 6, 5).reshape(starts.shape).double()
    bound = start_tolerances[0] * starts.abs() + start_tolerances[1] * magnitudes
    assert ((found - starts).abs() <= bound).all()

    # what the segments' own tokens cause by each half of the keys, and NaN where there are none
    own = normal(2, HALVES, batch, time, heads, head_dim, seed=2).to(device)
    rows = torch.full((batch, heads, 2, HALVES, padded, head_dim), float("nan"), device=device)
    rows[..., :time, :] = own.permute(2, 4, 0, 1, 3, 5)
    own = own.sum(1)
    changes = torch.full((HALVES, batch, heads, padded), float("nan"), device=device)
    changes[..., :time] = normal(HALVES, batch, heads, time, seed=3).to(device)
    # each half of the keys knows d log alpha at other tokens; it is positive, so that dA does not cancel
    known = torch.arange(time, device=device) % SEGMENT % torch.tensor([[23], [16]], device=device) == 0
    flows = torch.full((HALVES, batch, heads, padded, NUM_WARPS), float("nan"), device=device)
    for half in range(HALVES):
        found = normal(batch, heads, int(known[half].sum()), NUM_WARPS, seed=6 + half).abs().to(device)
        flows[half, :, :, :time][:, :, known[half]] = found
    dprior = normal(HALVES, batch, heads, segments, NUM_WARPS, seed=4).to(device)
    total = normal(batch, time, B.shape[3], seed=5).to(device)
    before = total.double()
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
    assert_close(total.double(), before + dB[:, :, 0], tolerance, "dB")
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
