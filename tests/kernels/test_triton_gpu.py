"""The Triton and Gluon kernels against the float64 loop on a GPU: output, final state and every gradient."""

import itertools

import pytest
import torch

from helpers import assert_close, relative_error
from palimpsa_surgery.kernels import triton_scan
from palimpsa_surgery.kernels.reference import palimpsa_scan_reference
from palimpsa_surgery.kernels.triton_scan import palimpsa_scan_triton
from palimpsa_surgery.kernels.triton_step import palimpsa_step_triton
from scan_cases import Case, check, differentiate, make

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

# dA and dI_prior sum over all tokens, rows and keys; with the random gradients of these tests the sums cancel, and
# what rounding leaves of them is larger, relatively, than each term's error (which ddt and dbeta show).
TOLERANCES = {
    torch.float32: {"all": 2e-5, "dA": 2e-3, "ddt": 1e-4},
    torch.float16: {"all": 2e-3, "dA": 1e-2, "dI_prior": 1e-2},
    torch.bfloat16: {"all": 5e-3, "dA": 3e-2, "dI_prior": 2e-2},
}
bf16, fp16 = torch.bfloat16, torch.float16
LENGTHS = [Case(2, t, 4, 64, 128, 1, bf16, initial=True) for t in (1, 63, 64, 65, 255, 257, 2049)]
OPTIONS = [
    Case(2, 257, 4, 64, 128, 2, bf16, initial=True, documents=4),
    Case(1, 130, 4, 64, 128, 1, bf16, variance=True, documents=3),
    Case(1, 129, 4, 64, 128, 1, bf16, beta=False),
    Case(1, 257, 4, 64, 128, 1, bf16, initial=True, extreme="decay"),
    Case(1, 257, 4, 64, 128, 1, bf16, initial=True, extreme="large B"),
    Case(1, 257, 4, 64, 128, 1, bf16, initial=True, extreme="importance"),
    Case(1, 257, 4, 64, 128, 1, bf16, initial=True, documents=5, extreme="decay"),
    Case(2, 129, 4, 24, 48, 2, torch.float32, initial=True, documents=3, variance=True),
    Case(1, 129, 4, 24, 48, 2, torch.float32, initial=True, extreme="decay"),
    Case(2, 129, 4, 24, 48, 2, fp16, initial=True, documents=3, variance=True),
    Case(1, 65, 3, 100, 200, 1, bf16, initial=True),
]


@pytest.fixture(autouse=True)
def poison(monkeypatch, request):
    """Uninitialised memory is NaN, so that whatever the kernels fail to write shows; not while compiling."""
    if "compiles" in request.node.name:
        return
    empty, new_empty, empty_like = torch.empty, torch.Tensor.new_empty, torch.empty_like

    def poisoned(make_empty):
        def wrapper(*args, **kwargs):
            tensor = make_empty(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        return wrapper

    monkeypatch.setattr(torch, "empty", poisoned(empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(new_empty))


@pytest.mark.parametrize("case", LENGTHS + OPTIONS, ids=str)
def test_scan(case):
    tolerances = dict(TOLERANCES[case.dtype])
    if case.extreme == "decay" and case.dtype is bf16:
        # d log alpha of a token that keeps 1e-3 of its state is a small difference of what large neighbours sum to
        tolerances["ddt"] = 1e-2
    check(palimpsa_scan_triton, case, tolerances, "cuda")


@pytest.mark.parametrize("time", [64, 257])
def test_portable_kernels(time, monkeypatch):
    """What GPUs without the tuned kernels run."""
    monkeypatch.setattr(triton_scan, "USE_TUNED", False)
    case = Case(1, time, 2, 64, 128, 1, bf16, initial=True)
    check(palimpsa_scan_triton, case, TOLERANCES[bf16], "cuda")


def test_heads_in_several_launches(monkeypatch):
    case = Case(1, 257, 4, 64, 128, 1, bf16, initial=True)
    monkeypatch.setattr(triton_scan, "WORKSPACE_BYTES", 1)
    check(palimpsa_scan_triton, case, TOLERANCES[bf16], "cuda")


def test_same_bits_twice():
    data = make(Case(2, 300, 8, 64, 128, 1, bf16, initial=True), "cuda")
    first, second = (differentiate(palimpsa_scan_triton, data, False, return_final_state=True) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_long_sequence_whole_and_in_pieces():
    """32k tokens against float64, and 16 pieces with carried states against the whole."""
    data = make(Case(1, 32768, 2, 64, 128, 1, bf16), "cuda")
    actual = differentiate(palimpsa_scan_triton, data, False, return_final_state=True)
    expected = differentiate(palimpsa_scan_reference, data, False, torch.float64)
    for name, value in expected.items():
        assert_close(actual[name], value, TOLERANCES[bf16].get(name, 5e-3), name)
    a, state, pieces = data.arguments, None, []
    for start in range(0, 32768, 2048):
        cut = {k: v[:, start : start + 2048] if v is not None and v.ndim > 2 else v for k, v in a.items()}
        y, state, _ = palimpsa_scan_triton(**cut | {"initial_state": state}, return_final_state=True)
        pieces.append(y)
    assert_close(torch.cat(pieces, 1), actual["y"], 2e-3, "y in pieces")
    assert_close(state, actual["final_state"], 2e-3, "state after pieces")


def test_carried_over_a_million_tokens():
    """32 times 32k tokens with carried state stay finite, and equal a float64 loop over the last 4,096 of them."""
    data = make(Case(1, 32768, 2, 64, 128, 1, bf16), "cuda")
    a, state = data.arguments, None
    for _ in range(32):
        y, state, _ = palimpsa_scan_triton(**a | {"initial_state": state}, return_final_state=True)
    tail = {k: v[:, -4096:].double() if v is not None and v.ndim > 2 else v for k, v in a.items()}
    expected, _, _ = palimpsa_scan_reference(**tail)
    assert relative_error(y[:, -512:], expected[:, -512:]) < 5e-3  # older tokens have decayed


@pytest.mark.parametrize("dtype", [torch.float32, bf16])
@pytest.mark.parametrize(("head_dim", "state_size"), [(64, 128), (24, 48)])
def test_step(dtype, head_dim, state_size):
    data = make(Case(3, 5, 4, head_dim, state_size, 2, dtype, initial=True), "cuda")
    a = data.arguments
    y, final, _ = palimpsa_scan_reference(*(v.double() for v in a.values()))
    state = a["initial_state"].clone()
    for t in range(5):
        token = [a[k][:, t] if a[k].ndim > 2 else a[k] for k in ("x", "dt", "A", "B", "C", "beta", "I_prior")]
        got = palimpsa_step_triton(*token, state)
        assert_close(got, y[:, t], 5e-6 if dtype is torch.float32 else 4e-3, f"y[{t}]")
    assert_close(state, final, 1e-6, "state")


def test_compiles_whole():
    """torch.compile takes forward and backward as single ops, without a graph break."""
    data = make(Case(1, 100, 2, 64, 128, 1, bf16), "cuda")
    compiled = torch.compile(lambda *args: palimpsa_scan_triton(*args)[0] * 2, fullgraph=True)
    leaves = [v for k, v in data.arguments.items() if v is not None]
    assert_close(compiled(*leaves), palimpsa_scan_triton(*leaves)[0] * 2, 1e-6, "y")


def test_non_contiguous_gradient():
    """y.sum() sends an expanded gradient."""
    data = make(Case(1, 70, 2, 64, 128, 1, bf16), "cuda")
    data.dy = torch.ones_like(data.dy[:1, :1, :1, :1]).expand(data.dy.shape)
    expected = differentiate(palimpsa_scan_reference, data, False, torch.float64)
    actual = differentiate(palimpsa_scan_triton, data, False, return_final_state=True)
    for name, value in itertools.islice(expected.items(), 2, None):
        assert_close(actual[name], value, TOLERANCES[bf16].get(name, 5e-3), name)
