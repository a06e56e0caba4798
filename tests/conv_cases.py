"""Inputs, float64 references and comparisons shared by the tests of the convolution's Triton kernels."""

from dataclasses import dataclass

import torch

from helpers import assert_close
from palimpsa_surgery.kernels import triton_conv
from palimpsa_surgery.kernels.conv import causal_conv1d

NAMES = ("x", "weight", "bias", "initial_state")
Arguments = dict[str, torch.Tensor | None]


@dataclass(frozen=True)
class ConvCase:
    """Sizes and options of one comparison."""

    time: int
    taps: int = 4
    batch: int = 3
    channels: int = 37
    dtype: torch.dtype = torch.float32
    weights: torch.dtype = torch.float32
    bias: bool = True
    tail: bool = True
    documents: str = "any"
    """"any": they begin anywhere and many have one token; "edges": at and beside the edges of rows and tiles; ""."""
    aligned: bool = False
    transposed: bool = False
    """All inputs with another order of axes in memory."""

    def __str__(self) -> str:
        sizes = f"B{self.batch}-T{self.time}-D{self.channels}-K{self.taps}"
        options = [str(v).removeprefix("torch.") for v in (self.dtype, self.weights)]
        options += [self.documents and f"documents-{self.documents}"]
        options += [name for name in ("bias", "tail", "aligned", "transposed") if getattr(self, name)]
        return "-".join([sizes, *filter(None, options)])


COVERED = [
    *(ConvCase(t, taps) for t, taps in ((1, 4), (3, 2), (5, 3), (64, 2), (200, 4))),
    *(ConvCase(t, taps, documents="edges") for t, taps in ((2, 3), (4, 4), (63, 3), (65, 4))),
    ConvCase(200, 4, documents="edges"),
    *(ConvCase(t, taps, bias=False, tail=False, documents="") for t, taps in ((1, 4), (5, 2), (65, 3), (200, 4))),
    *(ConvCase(65, taps, tail=False) for taps in (2, 3)),
    ConvCase(66, documents=""),
    ConvCase(66, batch=1, channels=152, aligned=True, tail=False),
    ConvCase(6, transposed=True),
    ConvCase(65, dtype=torch.float16),
    ConvCase(65, dtype=torch.bfloat16),
    ConvCase(17, 3, dtype=torch.float16, weights=torch.float16),
    ConvCase(17, dtype=torch.bfloat16, weights=torch.bfloat16),
]


def make(case: ConvCase, device: str = "cpu") -> tuple[Arguments, torch.Tensor | None, torch.Tensor]:
    """Arguments, document numbers and the gradient that arrives; x is a slice of what is NaN beside it."""
    generator = torch.Generator().manual_seed(case.time)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    batch, time, channels, taps = case.batch, case.time, case.channels, case.taps
    before, after = (8, 16) if case.aligned else (3, 6)
    projected = torch.full((batch, time + 2, before + channels + after), float("nan"), dtype=case.dtype, device=device)
    x = projected[:, 1:-1, before : before + channels]
    x.copy_(normal(batch, time, channels))
    tail = normal(batch, taps + 2, channels).to(case.dtype)[:, 1:-1].transpose(1, 2) if case.tail else None
    seq_idx = None
    if case.documents:
        begins = torch.rand(batch, time, generator=generator) < 0.4
        if case.documents == "edges":
            tile = triton_conv.BQ * triton_conv.R
            near = [edge + i for edge in (triton_conv.R, tile, 2 * tile) for i in (-3, -1, 0, 1, 2)]
            begins = torch.isin(torch.arange(time), torch.tensor(near)).expand(batch, -1)
        seq_idx = (begins.cumsum(1) % 2).to(device, torch.int32 if case.tail else torch.int64)  # numbers come back
    weight = normal(channels, taps).to(case.weights)
    bias = normal(channels).to(case.weights) if case.bias else None
    if case.transposed:
        x, weight, bias = x.mT.contiguous().mT, weight.mT.contiguous().mT, bias.repeat_interleave(2)[::2]
    arguments = dict(zip(NAMES, (x, weight, bias, tail), strict=True))
    return arguments, seq_idx, normal(batch, time, channels).to(case.dtype)


def differentiate(conv, arguments, seq_idx, dy, dtype=None, wanted=NAMES) -> dict[str, torch.Tensor]:
    """The output y, and the gradient of each of the wanted arguments that there are as dNAME."""
    leaves = {
        name: None if v is None else v.detach().to(dtype or v.dtype).requires_grad_(name in wanted)
        for name, v in arguments.items()
    }
    y = conv(*leaves.values(), seq_idx)
    inputs = {name: leaves[name] for name in wanted if leaves[name] is not None}
    gradients = torch.autograd.grad(y, list(inputs.values()), dy.to(y.dtype))
    return {"y": y.detach()} | {f"d{name}": v for name, v in zip(inputs, gradients, strict=True)}


def check(case: ConvCase, bounds: dict[torch.dtype, float], device: str = "cpu") -> None:
    """Compare the kernels' output and gradients with PyTorch in float64, within the bound for the type of each."""
    arguments, seq_idx, dy = make(case, device)
    exact = differentiate(causal_conv1d, arguments, seq_idx, dy, torch.float64)
    found = differentiate(triton_conv.causal_conv1d_triton, arguments, seq_idx, dy)
    assert found.keys() == exact.keys()
    assert found["y"].is_contiguous()
    for name, value in exact.items():
        expected = arguments["x" if name == "y" else name[1:]].dtype
        assert found[name].dtype == expected, f"{name} of {case}: {found[name].dtype}"
        if name != "y" and not value.any():  # of a tail that the only token's document does not reach
            assert not found[name].any()
            continue
        assert_close(found[name], value, bounds[expected], f"{name} of {case}")


def check_alone(device: str = "cpu") -> None:
    """Results are the same bits twice, and with each input alone requiring a gradient."""
    arguments, seq_idx, dy = make(ConvCase(20), device)
    whole = differentiate(triton_conv.causal_conv1d_triton, arguments, seq_idx, dy)
    for wanted in (NAMES, *((name,) for name in NAMES)):
        again = differentiate(triton_conv.causal_conv1d_triton, arguments, seq_idx, dy, wanted=wanted)
        assert len(again) == len(wanted) + 1
        for name, value in again.items():
            assert torch.equal(value, whole[name]), f"{name} with {wanted}"


def check_nan(device: str = "cpu") -> None:
    """What is not a number reaches the tokens that see it and, backwards, those that these see; no other document."""
    for taps in (2, 3, 4):
        arguments, _, dy = make(ConvCase(70, taps, documents=""), device)
        seq_idx = (torch.arange(70, device=device) >= 40).expand(3, -1).int()
        arguments["x"][1, 10] = arguments["x"][2, 39] = float("nan")
        found = differentiate(triton_conv.causal_conv1d_triton, arguments, seq_idx, dy)
        for name, before, after in (("y", 0, taps), ("dx", taps - 1, taps)):
            bad = torch.zeros(3, 70, dtype=torch.bool, device=device)
            bad[1, 10 - before : 10 + after] = True
            bad[2, 39 - before : 40] = True
            assert torch.equal(found[name].isnan(), bad[..., None].expand_as(found[name])), f"{name} of {taps} taps"
        assert found["dinitial_state"].isfinite().all()


def check_operators(device: str = "cpu") -> None:
    """torch.library's own checks of both operators."""
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for case in (ConvCase(9), ConvCase(9, bias=False, tail=False, documents="")):
        arguments, seq_idx, dy = make(case, device)
        leaves = [None if v is None else v.detach().clone().requires_grad_() for v in arguments.values()]
        torch.library.opcheck(triton_conv._conv_op, (*leaves, seq_idx), test_utils=checks)
        given = (*(None if v is None else v.detach() for v in leaves), seq_idx, dy)
        torch.library.opcheck(triton_conv._conv_backward_op, given, test_utils=checks[::2])
