"""Cases of the norm's kernel, for Triton's interpreter on the CPU and for a GPU."""

from dataclasses import dataclass

import torch
from torch import Tensor

from helpers import assert_close
from palimpsa_surgery.kernels import triton_norm
from palimpsa_surgery.kernels.norm import rms_norm_pytorch
from scan_cases import between_nan

EPS = 1e-3  # large enough that its place in the formula shows
bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class NormCase:
    """Rows of channels in groups; `weight` is the weight's type, and with x's that of the result.

    `layout` is "rows", "slices" (channels among others, as the gate always is), or "scattered" (no two
    channels are neighbours, and the gradient is expanded).
    """

    rows: int
    channels: int
    groups: int = 1
    dtype: torch.dtype = fp32
    gated: bool = True
    weight: torch.dtype = fp32
    layout: str = "rows"

    def __str__(self) -> str:
        gate = "gated" if self.gated else "plain"
        types = "-".join(str(v).removeprefix("torch.") for v in (self.dtype, self.weight))
        return f"{self.rows}x{self.channels}-{self.groups}-{gate}-{types}-{self.layout}"


CASES = [
    *(NormCase(rows, channels) for rows in (1, 2, 33) for channels in (64, 80)),
    *(NormCase(33, 80, gated=False, dtype=dtype) for dtype in (fp32, bf16, fp16)),
    *(NormCase(2, 80, groups, dtype) for groups in (2, 5) for dtype in (fp32, bf16, fp16)),
    NormCase(17, 80, 2, bf16, weight=bf16),
    NormCase(5, 80, 5, layout="slices"),
    NormCase(5, 80, 2, gated=False, layout="slices"),
    NormCase(17, 80, layout="scattered"),
    NormCase(2, 1280),  # as 5,120: one and a quarter of a power of two, and several warps
    NormCase(2, 5, 5),
]


def make(case: NormCase, device: str) -> tuple[dict[str, Tensor], Tensor]:
    """The arguments with gradients, between NaN where they are strided, and the gradient of the result."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, case.rows, case.channels)

    def rows(dtype: torch.dtype = case.dtype) -> Tensor:
        v = torch.randn(shape, generator=generator).to(device, dtype)
        if case.layout == "slices":
            v = torch.nn.functional.pad(v, (3, 8), value=float("nan"))[..., 3:-8]
        return between_nan(v) if case.layout == "scattered" else v

    arguments = {"x": rows(), "weight": torch.rand(case.channels, generator=generator).to(device, case.weight)}
    if case.gated:
        arguments["gate"] = 3 * rows()
        arguments["gate"] = torch.nn.functional.pad(arguments["gate"], (0, 8), value=float("nan"))[..., :-8]
    dout = rows(torch.promote_types(case.dtype, case.weight))
    if case.layout == "scattered":
        arguments["weight"] = between_nan(arguments["weight"])
        dout = dout[:, :1, :1].expand(shape)
    return arguments, dout


def run(case: NormCase, arguments: dict[str, Tensor], dout: Tensor, wanted: tuple[str, ...]) -> dict[str, Tensor]:
    """Result of the kernel, and the gradients that are wanted."""
    leaves = {name: v.detach().requires_grad_(name in wanted) for name, v in arguments.items()}
    out = triton_norm.rms_norm_triton(
        leaves["x"], leaves["weight"], EPS, leaves.get("gate"), case.channels // case.groups, dout.dtype
    )
    return {"out": out, **dict(zip(wanted, torch.autograd.grad(out, [leaves[k] for k in wanted], dout), strict=True))}


def check(case: NormCase, device: str) -> None:
    """Result and gradients against float64; the same bits whichever gradients are asked for."""
    arguments, dout = make(case, device)
    names = tuple(arguments)
    actual = run(case, arguments, dout, names)
    leaves = {name: v.detach().double().requires_grad_() for name, v in arguments.items()}
    out = rms_norm_pytorch(leaves["x"], leaves["weight"], EPS, leaves.get("gate"), case.channels // case.groups)
    gradients = torch.autograd.grad(out, list(leaves.values()), dout.double())
    for name, expected in {"out": out, **dict(zip(names, gradients, strict=True))}.items():
        like = dout if name == "out" else arguments[name]
        assert actual[name].dtype == like.dtype
        # Rounding to the nearest errs by 0.2 of epsilon; Triton's interpreter cuts bfloat16 off, which doubles it.
        share = 0.6 if device == "cpu" and like.dtype is bf16 else 0.35
        assert_close(actual[name], expected, 1e-6 if like.dtype is fp32 else share * torch.finfo(like.dtype).eps, name)
    for name in names:
        for key, value in run(case, arguments, dout, (name,)).items():
            assert torch.equal(value, actual[key]), f"{key} changes when {name} alone has a gradient"


def check_operator(device: str) -> None:
    """torch.library's own checks, which tracing and autograd rely on."""
    for case in (NormCase(3, 80, 2, bf16), NormCase(3, 80, gated=False)):
        arguments, dout = make(case, device)
        leaves = {name: v.requires_grad_() for name, v in arguments.items()}
        given = (leaves["x"], leaves.get("gate"), leaves["weight"])
        group = case.channels // case.groups
        torch.library.opcheck(triton_norm._norm_op, (*given, EPS, group, dout.dtype))
