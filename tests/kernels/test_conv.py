"""The causal convolution: carried tails and document boundaries."""

import pytest
import torch
import torch.nn.functional as F

from helpers import assert_close
from palimpsa_surgery.kernels import conv
from palimpsa_surgery.kernels.conv import causal_conv1d


def direct(x, weight, bias):
    """The definition, one token and tap at a time, in float64."""
    batch, time, channels = x.shape
    out = torch.zeros(batch, time, channels, dtype=torch.float64) + (0 if bias is None else bias.double())
    taps = weight.shape[1]
    for t in range(time):
        for k in range(taps):
            if t - k >= 0:
                out[:, t] += weight[:, taps - 1 - k].double() * x[:, t - k].double()
    return F.silu(out)


@pytest.mark.parametrize("taps", [1, 2, 4])
@pytest.mark.parametrize("time", [1, 3, 20])
@pytest.mark.parametrize("with_bias", [False, True], ids=["no-bias", "bias"])
def test_equals_the_definition(time, taps, with_bias):
    torch.manual_seed(0)
    x, weight = torch.randn(2, time, 6), torch.randn(6, taps)
    bias = torch.randn(6) if with_bias else None
    assert_close(causal_conv1d(x, weight, bias), direct(x, weight, bias), 1e-6)


@pytest.mark.parametrize("cut", [1, 2, 9])
def test_a_carried_tail_continues(cut):
    torch.manual_seed(0)
    x, weight, bias = torch.randn(2, 12, 6), torch.randn(6, 4), torch.randn(6)
    padded = F.pad(x, (0, 0, 4, 0))
    tail = padded[:, cut : cut + 4].transpose(1, 2)
    rest = causal_conv1d(x[:, cut:], weight, bias, tail)
    assert_close(rest, causal_conv1d(x, weight, bias)[:, cut:], 1e-6)


def test_documents_never_see_each_other_and_the_tail_belongs_to_the_first():
    torch.manual_seed(0)
    x, weight, bias, tail = torch.randn(1, 12, 6), torch.randn(6, 4), torch.randn(6), torch.randn(1, 6, 4)
    seq_idx = torch.tensor([[5] * 2 + [1] * 1 + [5] * 9])
    packed = causal_conv1d(x, weight, bias, tail, seq_idx)
    assert_close(packed[:, :2], causal_conv1d(x[:, :2], weight, bias, tail), 1e-6)
    assert_close(packed[:, 2:3], causal_conv1d(x[:, 2:3], weight, bias), 1e-6)
    assert_close(packed[:, 3:], causal_conv1d(x[:, 3:], weight, bias), 1e-6)


@pytest.mark.parametrize("packed", [False, True], ids=["one-document", "packed"])
def test_bfloat16_is_rounded_once(packed):
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(*shape).bfloat16() for shape in ((2, 12, 6), (6, 4), (6,)))
    seq_idx = torch.arange(12).div(5, rounding_mode="floor").expand(2, -1) if packed else None
    rounded = causal_conv1d(x, weight, bias, seq_idx=seq_idx)
    exact = causal_conv1d(x.double(), weight.double(), bias.double(), seq_idx=seq_idx)
    assert rounded.dtype == torch.bfloat16
    assert_close(rounded, exact, 4e-3)


@pytest.mark.parametrize("name", ["weight", "bias", "initial_state", "seq_idx"])
def test_wrong_shapes_are_refused_by_name(name):
    good = {
        "weight": torch.randn(6, 4),
        "bias": torch.randn(6),
        "initial_state": torch.randn(2, 6, 4),
        "seq_idx": torch.zeros(2, 9, dtype=torch.long),
    }
    with pytest.raises(ValueError, match=rf"^the convolution's {name} must have shape \(.*\), got \("):
        causal_conv1d(torch.randn(2, 9, 6), **good | {name: good[name][1:]})


class OnGPU(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


@pytest.mark.parametrize(
    ("where", "dtype", "taps", "triton", "runs_triton"),
    [
        (OnGPU, torch.bfloat16, 4, object(), True),
        (OnGPU, torch.float32, 2, object(), True),
        (OnGPU, torch.float64, 4, object(), False),
        (OnGPU, torch.float32, 5, object(), False),
        (OnGPU, torch.float32, 1, object(), False),
        (OnGPU, torch.float32, 4, None, False),
        (torch.Tensor, torch.float32, 4, object(), False),
    ],
    ids=["bfloat16", "float32", "float64", "five-taps", "one-tap", "no-triton", "cpu"],
)
def test_what_runs_in_triton(where, dtype, taps, triton, runs_triton, monkeypatch):
    monkeypatch.setattr(conv, "triton", triton)
    monkeypatch.setattr(conv, "causal_conv1d_triton", lambda *_: "Triton")
    x, weight = (v.as_subclass(where) for v in (torch.randn(2, 9, 6, dtype=dtype), torch.randn(6, taps)))
    y = causal_conv1d(x, weight)
    assert isinstance(y, str) is runs_triton
