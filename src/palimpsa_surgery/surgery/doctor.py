"""`doctor`: does this installation compute the right thing on this device?

Some Triton releases miscompile gated backward kernels on some GPUs and report nothing, so every path that the
model would take is run here, forward and backward, against float64 on the CPU.
"""

import functools
import importlib.metadata
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from palimpsa_surgery.errors import UserError
from palimpsa_surgery.kernels import conv, norm, scan
from palimpsa_surgery.kernels.chunked import palimpsa_scan_chunked
from palimpsa_surgery.kernels.ssd import ssd_scan_chunked

PACKAGES = (
    "palimpsa-surgery",
    "torch",
    "triton",
    "transformers",
    "accelerate",
    "datasets",
    "safetensors",
    "mamba-ssm",
    "causal-conv1d",
)

# Lengths around the kernels' tile and segment sizes. On a GPU each combination of type, packing and variance compiles
# the kernels again, which takes 5 to 20 seconds, so that few combinations are checked there.
LENGTHS = {"cpu": (1, 16, 65, 130), "cuda": (1, 63, 64, 65, 257, 513, 2049)}
PACKED_LENGTHS = {"cpu": LENGTHS["cpu"], "cuda": (65, 513)}
MAMBA2_LENGTHS = {"cpu": LENGTHS["cpu"], "cuda": (513,)}

# Relative RMS error allowed. bfloat16 rounds the results alone by 1.1e-3 (2^-9 / sqrt(3)); float32 kernels
# accumulate in another order than the reference, over up to 2,049 tokens. mamba_ssm multiplies float32 in TF32.
BOUNDS = {torch.float32: 2e-5, torch.bfloat16: 5e-3}
MAMBA_SSM_BOUNDS = {torch.float32: 2e-3, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Check:
    """One path at one length and type.

    Attributes:
        path: what was run, for example "Palimpsa scan, packed".
        dtype: type of the activations.
        length: tokens.
        worst: the result or gradient furthest from float64.
        error: its relative RMS error; infinite when it holds a NaN, or when the path raised.
        bound: the error allowed.
        message: what was raised, if anything.
    """

    path: str
    dtype: torch.dtype
    length: int
    worst: str
    error: float
    bound: float
    message: str = ""

    @property
    def passed(self) -> bool:
        """Whether the error is within its bound."""
        return self.error <= self.bound


@dataclass(frozen=True)
class Report:
    """What `doctor` found: versions by package, the path behind each operation, and the checks."""

    device: str
    versions: dict[str, str]
    paths: dict[str, str]
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        return all(check.passed for check in self.checks)


def doctor(device: str | None = None, *, progress: Callable[[Iterable], Iterable] = iter) -> Report:
    """Check versions, and every kernel forward and backward against float64.

    Of `mamba_ssm`'s kernels one configuration each is checked: to tune them, as the first training step does, takes
    minutes.

    Args:
        device: "cpu", "cuda" or "cuda:N"; None takes a GPU where there is one.
        progress: wraps the iteration over checks, to show it.

    Raises:
        UserError: the device is unknown or absent.
    """
    where = _device(device)
    paths = scan.paths(where)
    jobs = list(_jobs(where))
    with _untuned():
        checks = tuple(job() for job in progress(jobs))
    return Report(
        device=torch.cuda.get_device_name(where) if where.type == "cuda" else f"CPU ({platform.machine()})",
        versions=_versions(),
        paths=paths,
        checks=checks,
    )


@contextmanager
def _untuned() -> Iterator[None]:
    """Triton kernels that would be tuned over many configurations run with the last of them, the smallest."""
    tuners = []
    if "triton" in sys.modules:
        from triton.runtime.autotuner import Autotuner

        modules = [module for name, module in sys.modules.items() if name.startswith("mamba_ssm.")]
        found = {id(v): v for module in modules for v in vars(module).values() if isinstance(v, Autotuner)}
        tuners = [(tuner, tuner.configs) for tuner in found.values()]
    for tuner, configs in tuners:
        tuner.configs = configs[-1:]
    try:
        yield
    finally:
        for tuner, configs in tuners:
            tuner.configs = configs


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in LENGTHS:
        raise UserError(f"device must be cpu, cuda or cuda:N, got {name!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device {name} is not there: PyTorch sees {torch.cuda.device_count()} CUDA devices")
    return device


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    versions["CUDA of torch"] = torch.version.cuda or "none"
    return versions


def _jobs(device: torch.device) -> Iterator[Callable[[], Check]]:
    mamba2_bounds = BOUNDS if scan.paths(device)["Mamba2 scan"].startswith("PyTorch") else MAMBA_SSM_BOUNDS
    for dtype, bound in BOUNDS.items():
        check = functools.partial(_check, device=device, dtype=dtype)
        packings = (False,) if device.type == "cuda" and dtype is torch.float32 else (False, True)
        for packed in packings:
            suffix = ", packed" if packed else ""
            for length in (PACKED_LENGTHS if packed else LENGTHS)[device.type]:
                yield functools.partial(check, _palimpsa_scan, "Palimpsa scan" + suffix, bound, length, packed)
            path, mamba2_bound = "Mamba2 scan" + suffix, mamba2_bounds[dtype]
            for length in MAMBA2_LENGTHS[device.type]:
                yield functools.partial(check, _mamba2_scan, path, mamba2_bound, length, packed)
        yield functools.partial(check, _palimpsa_variance, "Palimpsa scan, packed, with variance", bound, 65, True)
        yield functools.partial(check, _palimpsa_steps, "Palimpsa decoding", bound, 7)
        yield functools.partial(check, _mamba2_steps, "Mamba2 decoding", bound, 7)
        for packed, path in enumerate(("causal convolution", "causal convolution, packed")):
            for length in PACKED_LENGTHS[device.type]:
                yield functools.partial(check, _convolution, path, bound, length, bool(packed))
        yield functools.partial(check, _norm, "norm", bound, 33)
        yield functools.partial(check, _gated_norm, "gated norm", bound, 33)


def _check(
    run: Callable[..., tuple[dict[str, Tensor], dict[str, Tensor]]],
    path: str,
    bound: float,
    length: int,
    packed: bool = False,
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> Check:
    try:
        actual, expected = run(device, dtype, length, packed)
    except Exception as error:  # whatever a broken compiler or driver raises is the finding
        return Check(path, dtype, length, type(error).__name__, float("inf"), bound, str(error))
    errors = {name: _relative_error(actual[name], value) for name, value in expected.items()}
    worst = max(errors, key=errors.__getitem__)
    return Check(path, dtype, length, worst, errors[worst], bound)


def _relative_error(actual: Tensor, expected: Tensor) -> float:
    actual = actual.detach().to("cpu", torch.float64)
    if not torch.isfinite(actual).all():
        return float("inf")
    scale = expected.square().mean().sqrt().clamp_min(1e-30)
    return ((actual - expected).square().mean().sqrt() / scale).item()


def _inputs(dtype: torch.dtype, length: int, packed: bool) -> tuple[dict[str, Tensor], Tensor | None]:
    """Arguments at the head shape of mamba2-2.7b (4 of its 80 heads, in 2 groups), drawn on the CPU."""
    generator = torch.Generator().manual_seed(length)
    batch, heads, head_dim, groups, state_size = 1, 4, 64, 2, 128

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    dt = torch.nn.functional.softplus(normal(batch, length, heads) - 3)
    values = {
        "x": normal(batch, length, heads, head_dim),
        "dt": dt,
        "A": torch.rand(heads, generator=generator) + 0.05,
        "B": normal(batch, length, groups, state_size),
        "C": normal(batch, length, groups, state_size),
        "beta": torch.sigmoid(normal(batch, length, heads, head_dim)) * dt[..., None],
        "I_prior": torch.rand(heads, generator=generator) + 0.5,
        "initial_state": normal(batch, heads, 2, head_dim, state_size).abs(),
        "D": normal(heads),
    }
    for name in ("x", "B", "C", "beta"):
        values[name] = values[name].to(dtype)
    seq_idx = None
    if packed:
        seq_idx = (torch.rand(batch, length, generator=generator) < 0.02).cumsum(1)
    return values, seq_idx


def _with_gradients(
    run: Callable[[Sequence[Tensor], Tensor | None], tuple[Tensor, ...]],
    reference: Callable[[Sequence[Tensor], Tensor | None], tuple[Tensor, ...]],
    arguments: dict[str, Tensor],
    seq_idx: Tensor | None,
    outputs: Sequence[str],
    device: torch.device,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Outputs and gradients of `run` on `device` and of `reference` in float64 on the CPU."""
    found = []
    weights: list[Tensor] = []
    for function, place, dtype in ((reference, "cpu", torch.float64), (run, device, None)):
        leaves = [v.to(place, dtype or v.dtype).requires_grad_() for v in arguments.values()]
        results = function(leaves, None if seq_idx is None else seq_idx.to(place))
        if not weights:
            # With random gradients alone those of A and I_prior cancel, and rounding is all that is left to compare.
            generator = torch.Generator().manual_seed(0)
            for result in results:
                scale = result.detach().square().mean().sqrt().clamp_min(1e-30)
                weights.append(result.detach() / scale + torch.randn(result.shape, generator=generator))
        # A gradient arrives in the type of the result it belongs to, so the reference rounds it too.
        gradients = [
            w.to(arguments["x"].dtype if i == 0 else torch.float32).to(place, r.dtype)
            for i, (w, r) in enumerate(zip(weights, results, strict=True))
        ]
        grads = torch.autograd.grad(results, leaves, gradients)
        names = [*outputs, *(f"gradient of {name}" for name in arguments)]
        found.append(dict(zip(names, (*results, *grads), strict=True)))
    return found[1], found[0]


def _palimpsa_scan(device: torch.device, dtype: torch.dtype, length: int, packed: bool, variance: bool = False):
    arguments, seq_idx = _inputs(dtype, length, packed)
    outputs = ("output", "final state", "variance")[: 2 + variance]

    def run(leaves, documents):
        *given, state, D = leaves
        options = {"seq_idx": documents, "return_final_state": True, "return_variance": variance}
        return scan.palimpsa_scan(*given, D=D, initial_state=state, **options)[: len(outputs)]

    def reference(leaves, documents):
        *given, D = leaves
        y, *others = palimpsa_scan_chunked(*given, documents, True, variance)
        return (_with_skip(y, given[0], D), *others)[: len(outputs)]

    return _with_gradients(run, reference, arguments, seq_idx, outputs, device)


def _palimpsa_variance(device: torch.device, dtype: torch.dtype, length: int, packed: bool):
    return _palimpsa_scan(device, dtype, length, packed, variance=True)


def _mamba2_scan(device: torch.device, dtype: torch.dtype, length: int, packed: bool):
    arguments, seq_idx = _inputs(dtype, length, packed)
    arguments = {name: arguments[name] for name in ("x", "dt", "A", "B", "C", "initial_state", "D")}
    arguments["initial_state"] = arguments["initial_state"][:, :, 0].contiguous()

    def run(leaves, documents):
        *given, state, D = leaves
        return scan.ssd_scan(*given, D=D, initial_state=state, seq_idx=documents, return_final_state=True)

    def reference(leaves, documents):
        *given, D = leaves
        y, final = ssd_scan_chunked(*given, documents, True)
        return _with_skip(y, given[0], D), final

    return _with_gradients(run, reference, arguments, seq_idx, ("output", "final state"), device)


def _with_skip(y: Tensor, x: Tensor, D: Tensor) -> Tensor:
    return y + D[:, None] * x


def _decoding(step, reference, arguments: dict[str, Tensor], device: torch.device):
    """Steps over a few tokens on `device` against the scan in float64."""
    state, D = arguments.pop("initial_state"), arguments.pop("D")
    y, final = reference(*(v.double() for v in arguments.values()), state.double())
    y = _with_skip(y, arguments["x"].double(), D.double())
    state, D = state.to(device), D.to(device)
    given = {name: v.to(device) for name, v in arguments.items()}
    steps = []
    for t in range(y.shape[1]):
        now = [v[:, t] if v.ndim >= 3 else v for v in given.values()]
        steps.append(step(*now, state, D))
    return {"output": torch.stack(steps, 1), "state": state}, {"output": y, "state": final}


def _palimpsa_steps(device: torch.device, dtype: torch.dtype, length: int, packed: bool):
    arguments, _ = _inputs(dtype, length, packed)
    return _decoding(
        scan.palimpsa_step, lambda *given: palimpsa_scan_chunked(*given, None, True)[:2], arguments, device
    )


def _mamba2_steps(device: torch.device, dtype: torch.dtype, length: int, packed: bool):
    arguments, _ = _inputs(dtype, length, packed)
    arguments = {name: arguments[name] for name in ("x", "dt", "A", "B", "C", "initial_state", "D")}
    arguments["initial_state"] = arguments["initial_state"][:, :, 0].contiguous()
    return _decoding(scan.ssd_step, lambda *given: ssd_scan_chunked(*given, None, True), arguments, device)


def _norm(device: torch.device, dtype: torch.dtype, length: int, packed: bool, gated: bool = False):
    """The norm of a block's input in float32 or of a scan's result, at mamba2-2.7b's sizes and as in training."""
    generator = torch.Generator().manual_seed(length)
    shape = (1, length, 5120 if gated else 2560)
    arguments = {"x": torch.randn(shape, generator=generator), "weight": torch.rand(shape[-1:], generator=generator)}
    if gated:
        arguments["x"] = arguments["x"].to(dtype)
        arguments["gate"] = torch.randn(shape, generator=generator).to(dtype)

    def run(leaves, _):
        x, weight, *gate = leaves
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype is torch.bfloat16):
            return (norm.rms_norm(x, weight, 1e-5, gate=gate[0] if gate else None),)

    def reference(leaves, _):
        x, weight, *gate = leaves
        return (norm.rms_norm_pytorch(x, weight, 1e-5, gate[0] if gate else None, shape[-1]),)

    return _with_gradients(run, reference, arguments, None, ("output",), device)


def _gated_norm(device: torch.device, dtype: torch.dtype, length: int, packed: bool):
    return _norm(device, dtype, length, packed, gated=True)


def _convolution(device: torch.device, dtype: torch.dtype, length: int, packed: bool):
    """At the size of the scans here, with weights in float32 as in training."""
    arguments, seq_idx = _inputs(dtype, length, packed)
    x = torch.cat([arguments[name].flatten(2) for name in ("x", "B", "C")], -1)
    generator = torch.Generator().manual_seed(length)
    weight, bias, state = (torch.randn(x.shape[-1], n, generator=generator) for n in (4, 1, 4))
    arguments = {"x": x, "weight": weight, "bias": bias[:, 0], "initial_state": state[None].to(dtype)}

    def run(leaves, documents):
        return (conv.causal_conv1d(*leaves, documents),)

    return _with_gradients(run, run, arguments, seq_idx, ("output",), device)
