"""Inputs, float64 references and comparisons shared by the tests of the Triton kernels."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from helpers import assert_close, relative_error
from palimpsa_surgery.kernels.reference import palimpsa_scan_reference

NAMES = ("x", "dt", "A", "B", "C", "beta", "I_prior", "initial_state")
Gradients = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """Sizes and options of one comparison."""

    batch: int
    time: int
    heads: int
    head_dim: int
    state_size: int
    groups: int
    dtype: torch.dtype = torch.float32
    initial: bool = False
    documents: int = 0
    variance: bool = False
    extreme: str = ""
    beta: bool = True
    strided: bool = False
    skip: bool = False

    def __str__(self) -> str:
        sizes = f"B{self.batch}-T{self.time}-H{self.heads}-P{self.head_dim}-N{self.state_size}-G{self.groups}"
        options = [str(self.dtype).removeprefix("torch."), self.extreme]
        options += [name for name in ("initial", "documents", "variance", "strided", "skip") if getattr(self, name)]
        return "-".join([sizes, *filter(None, options), *([] if self.beta else ["no-beta"])])


@dataclass
class Data:
    """Arguments of a scan and the gradients that arrive at its outputs."""

    arguments: dict[str, torch.Tensor | None]
    seq_idx: torch.Tensor | None
    dy: torch.Tensor
    dfinal: torch.Tensor
    dvariance: torch.Tensor


def make(case: Case, device: str = "cpu", seed: int = 0) -> Data:
    """Random arguments, the same on every device; x, B and C are slices of one tensor, as in the model."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator).to(device)

    b, t, h, p, n, g = case.batch, case.time, case.heads, case.head_dim, case.state_size, case.groups
    conv = normal(b, t, h * p + 2 * g * n)
    if case.extreme == "large B":
        conv[..., h * p : h * p + g * n] *= 300
    conv = conv.to(case.dtype)
    x = conv[..., : h * p].view(b, t, h, p)
    B = conv[..., h * p : h * p + g * n].view(b, t, g, n)
    C = conv[..., h * p + g * n :].view(b, t, g, n)
    dt = F.softplus(normal(b, t, h) - 3)
    A = torch.exp(uniform(h) * 3 - 1)
    beta = torch.sigmoid(normal(b, t, h, p)) * 0.5 * dt[..., None]
    if case.extreme == "decay":  # a fifth of the tokens keep nothing (alpha underflows), a fifth all (dt = 0)
        kind = uniform(b, t, h)
        dt = torch.where(kind < 0.2, dt * 3e3, torch.where(kind > 0.8, 0, dt))
    if case.extreme == "no step":
        dt = torch.zeros_like(dt)
    if case.extreme == "importance":  # Ibar up to about 1e4 times the prior
        beta, A = beta * 100, A * 1e-2
    if case.extreme == "huge importance":  # Ibar up to about 1e8 times the prior
        beta, A = beta * 1e7, A * 1e-2
    if case.extreme == "short memory":  # alpha is 1e-3
        dt = (7 / A).expand(b, t, h)
    if case.extreme == "tiny step":  # some tokens write next to nothing: dt down to below float32's normal numbers
        small = 10.0 ** -(30 + torch.arange(t, device=device) % 12)[:, None]
        dt = torch.where(torch.arange(t, device=device)[:, None] % 3 == 0, small, dt)
    if case.extreme == "stretches":  # 24 tokens each with alpha 1e-3, 0, 1 and as usual
        kind = (torch.arange(t, device=device) // 24 % 4)[:, None]
        dt = torch.where(kind == 0, 7 / A, torch.where(kind == 1, dt * 3e3, torch.where(kind == 2, 0, dt)))
    outlier = 5 * t // 6
    if case.extreme == "outlier":  # a step 10^4 times as long as the others, after which nothing is sent back
        dt, A = torch.full_like(dt, 0.01), A * 0.02
        dt[:, outlier] = 100
    initial = None
    if case.initial:
        initial = torch.stack((normal(b, h, p, n), normal(b, h, p, n).abs()), 2)
    seq_idx = None
    if case.documents:  # the last document has the first one's number; another row's begin seven tokens earlier
        token = torch.arange(t, device=device) + 7 * torch.arange(b, device=device)[:, None]
        seq_idx = token * case.documents // t % max(case.documents - 1, 1)
    arguments = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "beta": beta.to(case.dtype) if case.beta else None}
    arguments |= {"I_prior": torch.exp(0.3 * normal(h)), "initial_state": initial}
    if case.skip:
        arguments["D"] = normal(h)
    dy = normal(b, t, h, p).to(case.dtype)
    if case.extreme == "outlier":
        dy[:, outlier:] = 0
    incoming = (dy, normal(b, h, 2, p, n), normal(b, t, h, p))
    if case.strided:
        arguments = {name: None if v is None else between_nan(v) for name, v in arguments.items()}
        incoming = tuple(map(between_nan, incoming))
    return Data(arguments, seq_idx, *incoming)


def between_nan(v: torch.Tensor) -> torch.Tensor:
    """The same values as every second element of a tensor that is NaN between them."""
    return torch.stack((v, torch.full_like(v, float("nan"))), -1)[..., 0]


def differentiate(scan, data: Data, variance: bool, dtype: torch.dtype | None = None, **options) -> Gradients:
    """Outputs y, final_state and variance, and the gradient of each argument as dNAME.

    `scan` takes the skip by its name D, and only where there is one.
    """
    leaves = {
        name: None if v is None else v.detach().to(dtype or v.dtype).requires_grad_()
        for name, v in data.arguments.items()
    }
    given = [v for name, v in leaves.items() if name != "D"]
    skip = {"D": leaves["D"]} if "D" in leaves else {}
    y, final_state, var = scan(*given, data.seq_idx, **skip, **options)
    outputs = {"y": y, "final_state": final_state} | ({"variance": var} if variance else {})
    incoming = (data.dy, data.dfinal, data.dvariance)[: len(outputs)]
    inputs = {name: v for name, v in leaves.items() if v is not None}
    gradients = torch.autograd.grad(
        list(outputs.values()),
        list(inputs.values()),
        [d.to(o.dtype) for d, o in zip(incoming, outputs.values(), strict=True)],
    )
    return {k: v.detach() for k, v in outputs.items()} | {
        f"d{name}": v for name, v in zip(inputs, gradients, strict=True)
    }


def differentiate_exactly(scan, data: Data, variance: bool, **options) -> Gradients:
    """`differentiate` in float64, of a scan that knows no skip."""
    arguments = {name: v for name, v in data.arguments.items() if name != "D"}
    return add_skip(differentiate(scan, replace(data, arguments=arguments), variance, torch.float64, **options), data)


def add_skip(found: Gradients, data: Data) -> Gradients:
    """Outputs and gradients with those of the skip D x, in float64."""
    if "D" not in data.arguments:
        return found
    x, D, dy = (v.double() for v in (data.arguments["x"], data.arguments["D"], data.dy))
    y, dx = found["y"] + D[:, None] * x, found["dx"] + D[:, None] * dy
    return found | {"y": y, "dx": dx, "dD": (dy * x).sum((0, 1, 3))}


def scan_in_pieces(x, dt, A, B, C, beta, I_prior, initial_state=None, seq_idx=None, piece: int = 64):
    """The reference loop, whose backward pass keeps the states of one piece at a time."""
    state, y, variance = initial_state, [], []
    if state is None:
        state = x.new_zeros(x.shape[0], x.shape[2], 2, x.shape[3], B.shape[3])
    for start in range(0, x.shape[1], piece):
        x_, dt_, B_, C_, beta_, seq_idx_ = (
            None if v is None else v[:, start : start + piece] for v in (x, dt, B, C, beta, seq_idx)
        )
        if seq_idx is not None and start > 0:
            same = seq_idx[:, start] == seq_idx[:, start - 1]
            state = torch.where(same[:, None, None, None, None], state, 0)
        given = (x_, dt_, A, B_, C_, beta_, I_prior, state, seq_idx_)
        y_, state, variance_ = checkpoint(
            palimpsa_scan_reference, *given, use_reentrant=False, preserve_rng_state=False
        )
        y.append(y_)
        variance.append(variance_)
    return torch.cat(y, 1), state, torch.cat(variance, 1)


def check(scan, case: Case, tolerances: dict[str, float], device: str = "cpu") -> dict[str, float]:
    """Compare the scan's outputs and gradients with the float64 loop; the errors.

    `tolerances` holds one for "all" and exceptions by name.
    """
    data = make(case, device)
    expected = differentiate_exactly(palimpsa_scan_reference, data, case.variance)
    actual = differentiate(scan, data, case.variance, return_final_state=True, return_variance=case.variance)
    for name, value in expected.items():
        if case.time == 1 and name == "dA" and not case.initial:  # zero but for rounding
            assert actual[name].abs().max() < 1e-3
            continue
        assert_close(actual[name], value, tolerances.get(name, tolerances["all"]), f"{name} of {case}")
    return {name: relative_error(actual[name], expected[name]) for name in expected}
