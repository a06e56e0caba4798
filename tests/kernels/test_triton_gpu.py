"""The Triton and Gluon kernels against float64 on a GPU: output, final state and every gradient.

In bfloat16 an error may be twice that of a PyTorch emulation that rounds the same operands (`emulation.py`), and 5e-3
at most.
"""

import contextlib

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import carry_cases
import conv_cases
import norm_cases
from emulation import emulate
from helpers import assert_close, poisoned, relative_error
from palimpsa_surgery.kernels import hopper_scan, palimpsa_scan, palimpsa_step, triton_scan
from palimpsa_surgery.kernels.chunked import palimpsa_scan_chunked
from palimpsa_surgery.kernels.conv import causal_conv1d
from palimpsa_surgery.kernels.hopper_scan import fits as tuned_fits
from palimpsa_surgery.kernels.reference import palimpsa_scan_reference
from palimpsa_surgery.kernels.triton_jit import tl
from palimpsa_surgery.kernels.triton_norm import rms_norm_triton
from palimpsa_surgery.kernels.triton_scan import palimpsa_scan_triton
from palimpsa_surgery.kernels.triton_step import palimpsa_step_triton
from scan_cases import Case, Data, Gradients, add_skip, differentiate, differentiate_exactly, make, scan_in_pieces

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
# fp16 lacks the range of B² and of the adjoints, so its products run as TF32, which rounds to as many bits.
BOUNDS = {fp32: 5e-6, fp16: 2e-3, bf16: 5e-3}
LENGTHS = [Case(1, t, 80, 64, 128, 1, bf16, initial=True) for t in (1, 63, 64, 65, 255, 257, 2049)]
EXTREMES = [
    Case(1, 257, 80, 64, 128, 1, bf16, initial=True, extreme=extreme)
    for extreme in ("decay", "no step", "large B", "importance", "outlier")
]
# what the tuned read-out rescales for: before every token, before some, never
RESCALED = [
    Case(2, 500, 4, 64, 128, 2, bf16, initial=True, documents=documents, extreme=extreme)
    for extreme in ("short memory", "stretches", "huge importance", "decay", "no step", "tiny step")
    for documents in (0, 5)
]
DOCUMENTS = [
    Case(2, 257, 80, 64, 128, 2, bf16, initial=True, documents=4),
    Case(1, 257, 80, 64, 128, 1, bf16, initial=True, documents=5, extreme="decay"),
]
SKIPS = [
    Case(2, 129, 4, 64, 128, 2, bf16, initial=True, strided=True, skip=True),
    Case(2, 600, 4, 64, 128, 2, bf16, initial=True, documents=3, skip=True),
]
OTHERS = [
    Case(1, 130, 80, 64, 128, 1, bf16, variance=True, documents=3),
    Case(1, 129, 80, 64, 128, 1, bf16, beta=False),
    Case(1, 65, 15, 100, 200, 1, bf16, initial=True),
    Case(2, 129, 4, 24, 48, 2, fp32, initial=True, documents=3, variance=True),
    Case(1, 129, 4, 24, 48, 2, fp32, initial=True, extreme="decay"),
    Case(2, 129, 4, 24, 48, 2, fp16, initial=True, documents=3, variance=True),
    Case(8193, 3, 8, 8, 16, 1, fp32, initial=True),  # more programs than a grid's second axis takes
]


@pytest.fixture(autouse=True)
def poison(monkeypatch, request):
    """Uninitialised memory is NaN, so that whatever the kernels fail to write shows; not while compiling."""
    if "compiled" in request.node.name:
        return
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))


@pytest.fixture
def portable(monkeypatch):
    """What GPUs without the tuned kernels run."""
    monkeypatch.setattr(triton_scan, "USE_TUNED", False)


def run(data: Data, variance: bool = False) -> Gradients:
    return differentiate(palimpsa_scan_triton, data, variance, return_final_state=True, return_variance=variance)


def compare(case: Case, exact=scan_in_pieces, cancelling: bool = True, **options) -> dict[str, tuple[float, float]]:
    """Error of each output and gradient of the case, and its bound.

    `cancelling`: noise alone is sent back, with which sums over tokens and heads cancel; else the output too, scaled.
    """
    data = make(case, "cuda")
    if not cancelling:
        with torch.no_grad():
            y = palimpsa_scan_triton(**data.arguments, seq_idx=data.seq_idx)[0].float()
        data.dy = (y / y.square().mean().sqrt() + data.dy).to(case.dtype)
    expected = differentiate_exactly(exact, data, case.variance, **options)
    actual = run(data, case.variance)
    x, beta, B = (data.arguments[name] for name in ("x", "beta", "B"))
    beta = triton_scan._zeros_like_rows(x) if beta is None else beta
    tuned = triton_scan.USE_TUNED and not case.variance and tuned_fits(x, beta, B)
    emulated = add_skip(emulate(data, case.variance, bf16, tuned), data) if case.dtype is bf16 else None
    found = {}
    for name, value in expected.items():
        assert torch.isfinite(actual[name]).all(), f"{name} is not finite"
        bound = BOUNDS[case.dtype]
        if emulated is not None:
            # In float32 the kernel's sums err too, where the emulation's are exact.
            bound = min(bound, max(2 * relative_error(emulated[name], value), 1e-4))
        found[name] = (relative_error(actual[name], value), bound)
    return found


def check(case: Case, **options) -> None:
    found = compare(case, **options)
    if case.time == 1 and not case.initial:
        found.pop("dA")  # zero but for rounding
    excess = {name: f"{error:.2e} > {bound:.2e}" for name, (error, bound) in found.items() if not error <= bound}
    assert not excess, f"{case}: {excess}"


@pytest.mark.parametrize("case", LENGTHS + EXTREMES + DOCUMENTS + SKIPS + OTHERS, ids=str)
def test_scan(case):
    check(case)


@pytest.mark.parametrize("case", carry_cases.CASES, ids=str)
def test_what_comes_from_later_segments(case):
    on_hopper = hopper_scan.AVAILABLE and torch.cuda.get_device_capability()[0] == 9
    kernel = hopper_scan.segment_gradients_kernel if on_hopper else None
    carry_cases.check(case, tl.bfloat16, 5e-3, "cuda", kernel)


@pytest.mark.parametrize("case", RESCALED, ids=str)
def test_every_token_of_the_read_out(case):
    data = make(case, "cuda")
    expected, _, _ = palimpsa_scan_reference(*(v.double() for v in data.arguments.values()), data.seq_idx)
    y, _, _ = palimpsa_scan_triton(**data.arguments, seq_idx=data.seq_idx)
    # a document that begins with dt = 0 has zeros
    errors = (y - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-30)
    assert errors.max() < 4e-3, f"token {errors.amax((0, 2)).argmax()}: {errors.max():.2e}"
    assert (y != expected.to(bf16)).float().mean() < 2e-2  # a part left out of the operands: more


@pytest.mark.parametrize("case", [LENGTHS[2], LENGTHS[5], *EXTREMES[:2], *DOCUMENTS, *SKIPS], ids=str)
def test_portable_kernels(case, portable):
    check(case)


def test_heads_in_several_launches(monkeypatch):
    data = make(Case(1, 257, 8, 64, 128, 2, bf16, initial=True), "cuda")
    expected = run(data)
    monkeypatch.setattr(triton_scan, "WORKSPACE_BYTES", 1)
    for name, value in run(data).items():
        assert_close(value, expected[name], 1e-3 if name in ("dB", "dC") else 1e-6, name)  # sums over heads


@pytest.mark.parametrize("kernels", ["tuned", "portable"])
def test_same_bits_twice(kernels, request):
    if kernels == "portable":
        request.getfixturevalue("portable")
    data = make(Case(2, 300, 8, 64, 128, 1, bf16, initial=True), "cuda")
    first, second = run(data), run(data)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_programs_that_take_several_heads(monkeypatch):
    """Of 11 heads three launches take 4, 4 and 3, and a program two of them: the same bits, and sums over all heads."""
    data = make(Case(2, 300, 11, 64, 128, 1, bf16, initial=True, documents=5), "cuda")
    expected = run(data)
    monkeypatch.setattr(triton_scan, "tuned_plan", lambda *_: (4, 2))
    first, second = run(data), run(data)
    assert all(torch.equal(first[name], second[name]) for name in first)
    for name, value in first.items():
        assert_close(value, expected[name], 1e-3 if name in ("dB", "dC") else 1e-6, name)


@pytest.mark.parametrize("cancelling", [True, False], ids=["noise", "output-and-noise"])
@pytest.mark.parametrize("kernels", ["tuned", "portable"])
def test_32k_tokens(kernels, cancelling, request):
    """Against the chunked scan in float64, which equals the loop to 1e-12 and keeps states every 256 tokens only."""
    if kernels == "portable":
        request.getfixturevalue("portable")
    case = Case(1, 32768, 4, 64, 128, 1, bf16)
    check(case, exact=palimpsa_scan_chunked, cancelling=cancelling, return_final_state=True)


def test_pieces_with_carried_states_equal_the_whole():
    data = make(Case(1, 32768, 2, 64, 128, 1, bf16), "cuda")
    a, state, pieces = data.arguments, None, []
    whole, final_state, _ = palimpsa_scan_triton(**a, return_final_state=True)
    for start in range(0, 32768, 2048):
        cut = {k: v[:, start : start + 2048] if v is not None and v.ndim > 2 else v for k, v in a.items()}
        y, state, _ = palimpsa_scan_triton(**cut | {"initial_state": state}, return_final_state=True)
        pieces.append(y)
    assert_close(torch.cat(pieces, 1), whole, 2e-3, "y in pieces")
    assert_close(state, final_state, 2e-3, "state after pieces")


def test_carried_over_a_million_tokens():
    """32 times 32k tokens with carried state stay finite, and equal a float64 loop over the last 4,096 of them."""
    data = make(Case(1, 32768, 2, 64, 128, 1, bf16), "cuda")
    a, state = data.arguments, None
    for _ in range(32):
        y, state, _ = palimpsa_scan_triton(**a | {"initial_state": state}, return_final_state=True)
    tail = {k: v[:, -4096:].double() if v is not None and v.ndim > 2 else v for k, v in a.items()}
    expected, _, _ = palimpsa_scan_reference(**tail)
    assert relative_error(y[:, -512:], expected[:, -512:]) < 5e-3  # older tokens have decayed


@pytest.mark.parametrize("dtype", [fp32, bf16])
@pytest.mark.parametrize(("head_dim", "state_size"), [(64, 128), (24, 48)])
def test_step(dtype, head_dim, state_size):
    data = make(Case(3, 5, 4, head_dim, state_size, 2, dtype, initial=True), "cuda")
    a = data.arguments
    y, final, _ = palimpsa_scan_reference(*(v.double() for v in a.values()))
    state, D = a["initial_state"].clone(), torch.linspace(-1, 1, 4, device="cuda")
    for t in range(5):
        token = [a[k][:, t] if a[k].ndim > 2 else a[k] for k in ("x", "dt", "A", "B", "C", "beta", "I_prior")]
        got = palimpsa_step_triton(*token, state, D)
        assert_close(got, y[:, t] + D[:, None] * a["x"][:, t], 5e-6 if dtype is fp32 else 4e-3, f"y[{t}]")
    assert_close(state, final, 1e-6, "state")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_a_gpu_that_is_not_the_current_one():
    results = []
    for device in ("cuda:0", "cuda:1"):
        data = make(Case(1, 70, 2, 64, 128, 1, bf16, initial=True), device)
        state = data.arguments["initial_state"].clone()
        token = {k: v[:, 0] if v.ndim > 2 else v for k, v in data.arguments.items() if k != "initial_state"}
        results.append(run(data) | {"step": palimpsa_step(**token, state=state), "state": state})
    for name, value in results[0].items():
        assert_close(results[1][name].to(value.device), value, 1e-6, name)


def test_float64_stays_float64():
    data = make(Case(1, 20, 2, 5, 20, 1, fp32, initial=True), "cuda")
    a = {name: v.double() for name, v in data.arguments.items()}
    expected, final, _ = palimpsa_scan_reference(**a)
    assert_close(palimpsa_scan(**a).y, expected, 1e-12)
    state = a.pop("initial_state").clone()
    for t in range(20):
        token = {name: v[:, t] if v.ndim > 2 else v for name, v in a.items()}
        assert_close(palimpsa_step(**token, state=state), expected[:, t], 1e-12)
    assert_close(state, final, 1e-12)


def test_non_contiguous_gradient():
    """y.sum() sends an expanded gradient."""
    data = make(Case(1, 70, 2, 64, 128, 1, bf16), "cuda")
    data.dy = torch.ones_like(data.dy[:1, :1, :1, :1]).expand(data.dy.shape)
    expanded = run(data)
    data.dy = data.dy.contiguous()
    assert all(torch.equal(expanded[name], value) for name, value in run(data).items())


def test_compiled_whole():
    """torch.compile takes forward and backward as single operators, without a graph break, also when checkpointed."""
    data = make(Case(1, 100, 2, 64, 128, 1, bf16, initial=True), "cuda")
    leaves = [v.detach().requires_grad_() for v in data.arguments.values()]

    def layer(*arguments):
        return palimpsa_scan(*arguments[:7], initial_state=arguments[7]).y * 2

    def checkpointed(*arguments):
        return checkpoint(layer, *arguments, use_reentrant=False)

    expected = layer(*leaves)
    gradients = torch.autograd.grad(expected, leaves, data.dy)
    for function in (layer, checkpointed):
        y = torch.compile(function, fullgraph=True)(*leaves)
        assert torch.equal(y, expected)
        for name, actual, value in zip(data.arguments, torch.autograd.grad(y, leaves, data.dy), gradients, strict=True):
            assert_close(actual, value, 1e-6, f"d{name}")


def test_operators_pass_torch_library_checks():
    data = make(Case(1, 20, 2, 64, 128, 1, bf16, initial=True), "cuda")
    leaves = [v.detach().requires_grad_() for v in data.arguments.values()]
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    D = torch.randn(2, device="cuda", requires_grad=True)
    for skip in (None, D):
        torch.library.opcheck(triton_scan._scan_op, (*leaves[:7], skip, leaves[7], None, True), test_utils=checks)


@contextlib.contextmanager
def no_waiting():
    """Whatever waits for the GPU raises a RuntimeError."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_neither_work_nor_bad_input_waits_for_the_gpu():
    data = make(Case(1, 64, 4, 64, 128, 2, bf16, initial=True), "cuda")
    leaves = {name: v.detach().requires_grad_() for name, v in data.arguments.items()}
    seq_idx = torch.arange(64, device="cuda")[None] // 20
    boundaries = torch.tensor([0, 20, 64])
    token = {k: v.detach()[:, 0] if v.ndim > 2 and k != "initial_state" else v.detach() for k, v in leaves.items()}
    token["state"] = token.pop("initial_state").clone()

    def work():
        for documents in ({}, {"seq_idx": seq_idx}, {"cu_seqlens": boundaries}):
            palimpsa_scan(**leaves, **documents).y.backward(data.dy)
        palimpsa_step(**token)

    work()  # compiles
    bad = {
        "x": lambda v: v[0],
        "dt": lambda v: v[:, 1:],
        "A": lambda v: v.half(),
        "B": lambda v: v.float(),
        "C": lambda v: v[..., :64],
        "beta": lambda v: torch.empty(v.shape),
        "I_prior": lambda v: v[None],
        "initial_state": lambda v: v.bfloat16(),
    }
    spoilt = {name: leaves | {name: spoil(leaves[name])} for name, spoil in bad.items()}
    spoilt["seq_idx"] = leaves | {"seq_idx": seq_idx[:, 1:]}
    spoilt["cu_seqlens"] = leaves | {"cu_seqlens": boundaries.flip(0)}
    with no_waiting():
        work()
        for name, arguments in spoilt.items():
            with pytest.raises(ValueError, match=f"^{name} must"):
                palimpsa_scan(**arguments)
        with pytest.raises(ValueError, match=r"^state must have shape .*, got"):
            palimpsa_step(**token | {"state": token["state"][:, :2]})


def test_boundaries_on_the_gpu_are_checked_too():
    arguments = make(Case(1, 64, 4, 64, 128, 2, bf16), "cuda").arguments
    good, bad = (torch.tensor(v, device="cuda") for v in ([0, 20, 64], [0, 30, 20, 64]))
    y = palimpsa_scan(**arguments, cu_seqlens=good).y
    assert torch.equal(y, palimpsa_scan(**arguments, cu_seqlens=good.cpu()).y)
    with pytest.raises(ValueError, match=r"cu_seqlens must increase .* got \[0, 30, 20, 64\]"):
        palimpsa_scan(**arguments, cu_seqlens=bad)


@pytest.mark.parametrize(
    "case",
    [
        *norm_cases.CASES,
        norm_cases.NormCase(2049, 5120, dtype=bf16),
        norm_cases.NormCase(65, 2560, gated=False, weight=bf16),
        norm_cases.NormCase(20, 2**14),
    ],
    ids=str,
)
def test_norm(case):
    norm_cases.check(case, "cuda")


def test_norm_beyond_32_bits():
    """Rows so far apart that the last begins past element 2^31."""
    rows, apart = 2**11 + 2, 2**20
    x = torch.empty(rows, apart, dtype=bf16, device="cuda")[:, :80]
    x.copy_(torch.randn(rows, 80, generator=torch.Generator().manual_seed(0)))
    weight, dout = torch.rand(80, device="cuda"), torch.ones(rows, 80, dtype=bf16, device="cuda")
    results = []
    for v in (x, x.contiguous()):
        leaves = [v.detach().requires_grad_(), weight.clone().requires_grad_(), v.detach().requires_grad_()]
        out = rms_norm_triton(*leaves[:2], 1e-5, leaves[2], 80, bf16)
        results.append((out, *torch.autograd.grad(out, leaves, dout)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_norm_as_it_is_compiled_passes_torch_library_checks():
    norm_cases.check_operator("cuda")


CONV_BOUNDS = {fp32: 2e-6, fp16: 4e-4, bf16: 2e-3}
WIDE = [
    conv_cases.ConvCase(t, batch=2, channels=5376, dtype=dtype, documents=documents, aligned=True)
    for t, dtype in ((1, bf16), (255, bf16), (256, fp32), (257, bf16), (2049, bf16))
    for documents in ("", "any", "edges")
]


@pytest.mark.parametrize("case", conv_cases.COVERED + WIDE, ids=str)
def test_convolution(case):
    conv_cases.check(case, CONV_BOUNDS, "cuda")


@pytest.mark.parametrize("check", [conv_cases.check_alone, conv_cases.check_nan, conv_cases.check_operators])
def test_convolution_too(check):
    check("cuda")


def test_convolution_beyond_offsets_of_32_bits():
    """The last rows of a batch of more than 2^31 elements are those of that row alone."""
    x = torch.randn(7, 65536, 5376, device="cuda", dtype=bf16)
    assert x.numel() > 2**31
    weight, bias = torch.randn(5376, 4, device="cuda"), torch.randn(5376, device="cuda")
    y = causal_conv1d(x, weight, bias)
    assert torch.equal(y[6:], causal_conv1d(x[6:], weight, bias))
    leaf = x.requires_grad_()
    (dx,) = torch.autograd.grad(causal_conv1d(leaf, weight, bias), leaf, y)
    last = x.detach()[6:].requires_grad_()
    assert torch.equal(dx[6:], torch.autograd.grad(causal_conv1d(last, weight, bias), last, y[6:])[0])


def test_convolution_compiled_whole_and_without_waiting():
    case = conv_cases.ConvCase(100, batch=2, channels=64, dtype=bf16)
    arguments, seq_idx, dy = conv_cases.make(case, "cuda")

    def layer(*leaves):
        return causal_conv1d(*leaves) * 2

    def checkpointed(*leaves):
        return checkpoint(layer, *leaves, use_reentrant=False)

    expected = conv_cases.differentiate(layer, arguments, seq_idx, dy)
    with no_waiting():
        conv_cases.differentiate(causal_conv1d, arguments, seq_idx, dy)
    for function in (layer, checkpointed):
        found = conv_cases.differentiate(torch.compile(function, fullgraph=True), arguments, seq_idx, dy)
        for name, value in expected.items():
            assert_close(found[name], value, 1e-6, name)
