"""Comparisons and a model shared by all tests: `from helpers import assert_close`."""

from collections.abc import Callable
from pathlib import Path

import torch

from palimpsa_surgery.hf_models import PalimpsaMamba2Config, PalimpsaMamba2ForCausalLM
from palimpsa_surgery.surgery.checkpoints import load_model

TINY_HYBRID_LAYERS = [2, 5, 8, 11]


def tiny_hybrid(checkpoint: Path) -> PalimpsaMamba2ForCausalLM:
    """tiny-mamba2 with four Palimpsa layers whose importance is well away from Mamba2's limit, on the CPU."""
    source = load_model(checkpoint)
    torch.manual_seed(0)
    config = PalimpsaMamba2Config(**{**source.config.to_dict(), "palimpsa_layers": TINY_HYBRID_LAYERS})
    model = PalimpsaMamba2ForCausalLM(config).eval()
    model.load_state_dict(source.state_dict(), strict=False)
    with torch.no_grad():
        for layer in TINY_HYBRID_LAYERS:
            model.backbone.layers[layer].mixer.b_scale.uniform_(0.1, 1.0)
    return model


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square of the difference over the root mean square of `expected`, in float64."""
    actual, expected = actual.detach().double(), expected.detach().double()
    scale = expected.square().mean().sqrt().clamp_min(torch.finfo(torch.float64).tiny)
    return ((actual - expected).square().mean().sqrt() / scale).item()


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float, name: str = "tensor") -> None:
    """Fail unless both tensors are finite, of one shape, and within `tolerance` in relative RMS."""
    assert actual.shape == expected.shape, f"{name}: shape {tuple(actual.shape)} != {tuple(expected.shape)}"
    for label, tensor in (("actual", actual), ("expected", expected)):
        bad = (~torch.isfinite(tensor)).sum().item()
        assert bad == 0, f"{name}: {bad} of {tensor.numel()} values of {label} are NaN or infinite"
    error = relative_error(actual, expected)
    assert error <= tolerance, f"{name}: relative error {error:.3g} > {tolerance:.3g}"


def poisoned(make_empty: Callable) -> Callable:
    """`torch.empty` or its like, whose uninitialised memory is NaN, so that what is never written shows."""

    def wrapper(*arguments, **options):
        tensor = make_empty(*arguments, **options)
        if tensor.is_floating_point():
            tensor.detach().fill_(float("nan"))
        return tensor

    return wrapper


def http_error(kind: type[Exception]) -> Exception:
    """A refusal as `huggingface_hub` raises it."""
    import httpx2 as httpx

    return kind("refused", response=httpx.Response(401, request=httpx.Request("GET", "https://huggingface.co")))
