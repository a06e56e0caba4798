"""The PyTorch scan against the step-by-step recurrence, and the equivalences that define it."""

import itertools
import runpy

import pytest
import torch

from helpers import assert_close, relative_error
from palimpsa_surgery.kernels import (
    mamba2_kernels,
    palimpsa_scan,
    palimpsa_step,
    scan,
    ssd_scan,
    ssd_step,
    triton_jit,
)
from palimpsa_surgery.kernels.reference import palimpsa_scan_reference
from palimpsa_surgery.kernels.ssd import ssd_scan_chunked

NAMES = ("x", "dt", "A", "B", "C", "beta", "I_prior", "initial_state")


def random_inputs(batch=2, time=63, heads=4, head_dim=3, groups=2, state_size=5, dtype=torch.float64, seed=0):
    """Arguments of the scan in the order of `NAMES`, all requiring gradients."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    def uniform(*shape):
        return torch.rand(*shape, dtype=torch.float64, generator=generator)

    state = normal(batch, heads, 2, head_dim, state_size)
    state[:, :, 1].abs_()
    tensors = (
        normal(batch, time, heads, head_dim),
        0.5 * uniform(batch, time, heads),
        0.1 + uniform(heads),
        normal(batch, time, groups, state_size),
        normal(batch, time, groups, state_size),
        0.5 * uniform(batch, time, heads, head_dim),
        0.5 + uniform(heads),
        state,
    )
    return [v.to(dtype).requires_grad_() for v in tensors]


def random_documents(batch, time, seed=1):
    """Document numbers with a change every few tokens, some of them returning to an earlier number."""
    generator = torch.Generator().manual_seed(seed)
    changes = torch.rand(batch, time, generator=generator) < 0.1
    return changes.cumsum(1) % 3


def scan_with_everything(inputs, seq_idx=None):
    *arguments, state = inputs
    return palimpsa_scan(
        *arguments, initial_state=state, seq_idx=seq_idx, return_final_state=True, return_variance=True
    )


def gradients(outputs, inputs, seed=2):
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(o.shape, dtype=torch.float64, generator=generator).to(o.dtype) for o in outputs]
    return torch.autograd.grad(outputs, inputs, weights, allow_unused=True)


@pytest.mark.parametrize("packed", [False, True], ids=["one-document", "packed"])
@pytest.mark.parametrize("time", [1, 15, 16, 17, 63, 64, 65, 257, 513])
def test_scan_equals_the_recurrence(time, packed):
    inputs = random_inputs(time=time)
    seq_idx = random_documents(2, time) if packed else None
    actual = scan_with_everything(inputs, seq_idx)
    expected = palimpsa_scan_reference(*inputs, seq_idx=seq_idx)
    for name, a, e in zip(("y", "final state", "variance"), actual, expected, strict=True):
        assert_close(a, e, 1e-12, name)
    for name, a, e in zip(NAMES, gradients(actual, inputs), gradients(expected, inputs), strict=True):
        assert_close(a, e, 1e-11, f"gradient of {name}")


@pytest.mark.parametrize("output", [0, 1, 2], ids=["y", "final-state", "variance"])
def test_gradients_of_each_output_alone(output):
    inputs = random_inputs(time=40)
    actual, expected = scan_with_everything(inputs)[output], palimpsa_scan_reference(*inputs)[output]
    pairs = zip(NAMES, gradients([actual], inputs), gradients([expected], inputs), strict=True)
    for name, a, e in pairs:
        assert_close(a, torch.zeros_like(a) if e is None else e, 1e-11, f"gradient of {name}")


@pytest.mark.parametrize(
    "sizes",
    [(1, 1, 1, 1), (3, 7, 3, 2), (6, 4, 2, 16), (8, 64, 1, 128)],
    ids=lambda s: "H{}-P{}-G{}-N{}".format(*s),
)
def test_scan_takes_any_sizes(sizes):
    heads, head_dim, groups, state_size = sizes
    inputs = random_inputs(1, 33, heads, head_dim, groups, state_size)
    actual, expected = scan_with_everything(inputs), palimpsa_scan_reference(*inputs)
    assert_close(actual.y, expected[0], 1e-12)
    for name, a, e in zip(NAMES, gradients(actual, inputs), gradients(expected, inputs), strict=True):
        assert_close(a, e, 1e-11, f"gradient of {name}")


def test_float32_is_as_exact_as_the_loop_in_float32():
    inputs = random_inputs(time=300, dtype=torch.float32)
    exact = palimpsa_scan_reference(*(v.double() for v in inputs))
    exact_gradients = gradients(exact, inputs)
    actual, loop = scan_with_everything(inputs), palimpsa_scan_reference(*inputs)
    for name, a, l, e in zip(("y", "final state", "variance"), actual, loop, exact, strict=True):
        assert_close(a, e, max(2 * relative_error(l, e), 1e-6), name)
    pairs = zip(NAMES, gradients(actual, inputs), gradients(loop, inputs), exact_gradients, strict=True)
    for name, a, l, e in pairs:
        assert_close(a, e, max(2 * relative_error(l, e), 1e-6), f"gradient of {name}")


@pytest.mark.parametrize("cut", [1, 16, 50, 62])
def test_cut_and_carried_equals_whole(cut):
    inputs = random_inputs(time=63)
    *_, A, _, _, _, prior, state = inputs
    whole = scan_with_everything(inputs)

    def part(rows, state):
        x, dt, _, B, C, beta, _, _ = (v[:, rows] if v.ndim >= 3 else v for v in inputs)
        return scan_with_everything((x, dt, A, B, C, beta, prior, state))

    first = part(slice(0, cut), state)
    second = part(slice(cut, None), first.final_state)
    joined = (torch.cat((first.y, second.y), 1), second.final_state, torch.cat((first.variance, second.variance), 1))
    for a, e in zip(joined, whole, strict=True):
        assert_close(a, e, 1e-12)
    for name, a, e in zip(NAMES, gradients(joined, inputs), gradients(whole, inputs), strict=True):
        assert_close(a, e, 1e-11, f"gradient of {name}")


def test_documents_never_see_each_other():
    inputs = random_inputs(batch=1, time=50)
    x, dt, A, B, C, beta, prior, _ = inputs
    ends = [0, 7, 23, 24, 50]
    packed = palimpsa_scan(x, dt, A, B, C, beta, prior, cu_seqlens=torch.tensor(ends)).y
    for start, stop in itertools.pairwise(ends):
        alone = palimpsa_scan(*(v[:, start:stop] if v.ndim >= 3 else v for v in inputs[:6]), prior).y
        assert_close(packed[:, start:stop], alone, 1e-12)


def test_tokens_with_no_step_change_nothing():
    x, dt, A, B, C, beta, prior, state = (v.detach() for v in random_inputs(time=20))
    dt[:, 12:], beta[:, 12:] = 0, 0
    padded = palimpsa_scan(x, dt, A, B, C, beta, prior, initial_state=state, return_final_state=True)
    short = scan_with_everything((*(v[:, :12] if v.ndim >= 3 else v for v in (x, dt, A, B, C, beta)), prior, state))
    assert_close(padded.y[:, :12], short.y, 1e-14)
    assert_close(padded.final_state, short.final_state, 1e-14)


def test_without_importance_it_is_mamba2_and_with_it_it_is_not():
    x, dt, A, B, C, beta, _, state = random_inputs(time=70)
    one = torch.ones_like(A)
    empty = torch.stack((state[:, :, 0], torch.zeros_like(state[:, :, 0])), 2)
    y, final = ssd_scan(x, dt, A, B, C, initial_state=state[:, :, 0], return_final_state=True)
    for none in (None, torch.zeros_like(beta)):
        limit = palimpsa_scan(x, dt, A, B, C, none, one, initial_state=empty, return_final_state=True)
        assert_close(limit.y, y, 1e-12)
        assert_close(limit.final_state[:, :, 0], final, 1e-12)
    assert relative_error(palimpsa_scan(x, dt, A, B, C, beta, one, initial_state=empty).y, y) > 0.1


@pytest.mark.parametrize("packed", [False, True], ids=["one-document", "packed"])
@pytest.mark.parametrize("time", [1, 63, 64, 65, 200])
def test_ssd_equals_the_recurrence(time, packed):
    x, dt, A, B, C, _, _, state = random_inputs(time=time)
    seq_idx = random_documents(2, time) if packed else None
    state = state[:, :, 0]
    actual = ssd_scan(x, dt, A, B, C, initial_state=state, seq_idx=seq_idx, return_final_state=True)
    both = torch.stack((state, torch.zeros_like(state)), 2)
    y, final, _ = palimpsa_scan_reference(x, dt, A, B, C, None, torch.ones_like(A), both, seq_idx)
    expected = (y, final[:, :, 0])
    inputs = (x, dt, A, B, C, state)
    for a, e in zip(actual, expected, strict=True):
        assert_close(a, e, 1e-12)
    for a, e in zip(gradients(actual, inputs), gradients(expected, inputs), strict=True):
        assert_close(a, e, 1e-11)


@pytest.mark.parametrize("packed", [False, True], ids=["one-document", "packed"])
@pytest.mark.parametrize("final", [False, True], ids=["", "final-state"])
def test_mamba_ssm_gets_pieces_that_its_offsets_reach(final, packed, monkeypatch):
    """Its kernels are stood in for by what they compute, in their own terms."""
    x, dt, A, B, C, _, _, state = random_inputs(batch=3, time=63)
    D = torch.linspace(-1, 1, x.shape[2], dtype=x.dtype, requires_grad=True)
    inputs = (x, dt, A, B, C, D, state)
    lengths = torch.tensor([[4], [5], [63]])  # boundaries between pieces, elsewhere, nowhere
    seq_idx = torch.arange(63) // lengths if packed else None
    given = {"D": D, "initial_state": state[:, :, 0], "seq_idx": seq_idx, "return_final_state": final}
    expected = ssd_scan(x, dt, A, B, C, **given)
    reached = []

    def kernel(x, dt, A, B, C, D, chunk_size, initial_states, seq_idx, return_final_states):
        chunks = -(-x.shape[1] // chunk_size)
        reached.append(
            max(x.numel(), len(x) * chunks * 60, (len(x) - 1) * x.stride(0) + (x.shape[1] - 1) * x.stride(1))
        )
        if seq_idx is not None:
            assert seq_idx.dtype == torch.int32
            initial_states = initial_states * (seq_idx[:, 0] == 0)[:, None, None, None]
        y, state = ssd_scan_chunked(x, dt, -A, B, C, initial_states, seq_idx, return_final_states)
        return (y + D[:, None] * x, state) if return_final_states else y + D[:, None] * x

    monkeypatch.setattr(scan, "kernels_take", lambda *_: True)
    monkeypatch.setattr(mamba2_kernels, "_kernels", lambda: {"scan": kernel, "version": "2.3.2"})
    monkeypatch.setattr(mamba2_kernels, "REACH", 300)
    actual = ssd_scan(x, dt, A, B, C, **given, chunk_size=4)
    assert max(reached) < 300 < x.numel()
    assert (actual[1] is None) == (not final)
    actual, expected = ([v for v in values if v is not None] for values in (actual, expected))
    for a, e in zip(actual, expected, strict=True):
        assert_close(a, e, 1e-12)
    for a, e in zip(gradients(actual, inputs), gradients(expected, inputs), strict=True):
        assert_close(a, e, 1e-11)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-14)], ids=str)
def test_steps_equal_the_scan(dtype, tolerance):
    x, dt, A, B, C, beta, prior, state = (v.detach() for v in random_inputs(time=9, dtype=dtype))
    whole = palimpsa_scan(x, dt, A, B, C, beta, prior, initial_state=state, return_final_state=True)
    mamba_y, mamba_final = ssd_scan(x, dt, A, B, C, initial_state=state[:, :, 0], return_final_state=True)
    palimpsa_state, mamba_state = state.clone(), state[:, :, 0].clone()
    D = torch.linspace(-1, 1, 4)
    for t in range(9):
        now = (x[:, t], dt[:, t], A, B[:, t], C[:, t])
        skip = D[:, None] * x[:, t]
        assert_close(palimpsa_step(*now, beta[:, t], prior, palimpsa_state, D), whole.y[:, t] + skip, tolerance)
        assert_close(ssd_step(*now, mamba_state, D), mamba_y[:, t] + skip, tolerance)
    assert_close(palimpsa_state, whole.final_state, tolerance)
    assert_close(mamba_state, mamba_final, tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_the_skip_is_added_to_what_the_scans_return(dtype):
    """To the bit as the model added it when the scans knew none."""
    x, dt, A, B, C, beta, prior, _ = (v.detach() for v in random_inputs())
    x, B, C, D = (v.to(dtype) for v in (x, B, C, torch.linspace(-1, 1, 4)))
    for scan_without, arguments in ((palimpsa_scan, (beta.to(dtype), prior)), (ssd_scan, ())):
        without, with_skip = (scan_without(x, dt, A, B, C, *arguments, D=v)[0] for v in (None, D))
        assert torch.equal(with_skip, torch.addcmul(without, x, D[:, None]))


@pytest.mark.parametrize("case", ["alpha-zero", "dt-zero", "huge-keys", "large-importance"])
def test_extreme_inputs_stay_exact(case):
    inputs = [v.detach() for v in random_inputs(time=100)]
    if case == "alpha-zero":
        inputs[1][:, ::7] = 1e5  # exp(-A dt) is 0 in float64 too
        inputs[0][:, ::7] *= 1e-5
    elif case == "dt-zero":
        inputs[1].zero_()
    elif case == "huge-keys":
        inputs[3] *= 1e4
    else:
        inputs[5] *= 1e4
    inputs = [v.float().requires_grad_() for v in inputs]
    exact = palimpsa_scan_reference(*(v.double() for v in inputs))
    actual = scan_with_everything(inputs)
    for name, a, e in zip(("y", "final state", "variance"), actual, exact, strict=True):
        assert_close(a, e, 2e-5, name)
    loop = palimpsa_scan_reference(*inputs)
    pairs = zip(NAMES, gradients(actual, inputs), gradients(loop, inputs), gradients(exact, inputs), strict=True)
    for name, a, l, e in pairs:
        assert_close(a, e, max(4 * relative_error(l, e), 1e-5), f"gradient of {name}")


def test_bfloat16_keeps_states_in_float32():
    x, dt, A, B, C, beta, prior, state = (v.detach().float() for v in random_inputs(time=200))
    half = [v.bfloat16() for v in (x, B, C, beta)]
    rounded = palimpsa_scan(
        half[0], dt, A, half[1], half[2], half[3], prior, initial_state=state, return_final_state=True
    )
    exact = palimpsa_scan(
        half[0].float(),
        dt,
        A,
        half[1].float(),
        half[2].float(),
        half[3].float(),
        prior,
        initial_state=state,
        return_final_state=True,
    )
    assert rounded.y.dtype == torch.bfloat16
    assert rounded.final_state.dtype == torch.float32
    assert torch.equal(rounded.final_state, exact.final_state)
    assert torch.equal(rounded.y, exact.y.bfloat16())


def test_autocast_does_not_reach_into_the_scan():
    inputs = [v.detach().float().requires_grad_() for v in random_inputs(time=40)]
    plain = scan_with_everything(inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = scan_with_everything(inputs)
        inside_gradients = gradients(inside, inputs)
    assert torch.equal(inside.y, plain.y)
    for a, e in zip(inside_gradients, gradients(plain, inputs), strict=True):
        assert torch.equal(a, e)


def test_operators_pass_torch_library_checks():
    from palimpsa_surgery.kernels import chunked

    x, dt, A, B, C, beta, prior, state = random_inputs(batch=1, time=20, dtype=torch.float32)
    for variance in (False, True):
        torch.library.opcheck(
            chunked._chunked_scan, (x, dt, A, B, C, beta, prior, state, random_documents(1, 20), variance)
        )


def test_compiles_whole():
    inputs = [v.detach().float() for v in random_inputs(time=40)]
    compiled = torch.compile(scan_with_everything, backend="aot_eager", fullgraph=True)
    for a, e in zip(compiled(inputs), scan_with_everything(inputs), strict=True):
        assert torch.equal(a, e)


def bad_inputs():
    def change(index, value):
        return lambda inputs: [value(v) if i == index else v for i, v in enumerate(inputs)]

    yield "x-rank", change(0, lambda v: v[0]), "x must be a floating"
    yield "x", change(0, lambda v: v.long()), "x must be a floating"
    yield "dt", change(1, lambda v: v[:, :-1]), r"dt must have shape \(2, 63, 4\), got \(2, 62, 4\)"
    yield "dt", change(1, lambda v: v.bfloat16()), "dt must be float32"
    yield "A", change(2, lambda v: v[:3]), "A must have shape"
    yield "B", change(3, lambda v: v[:, :, :1].expand(-1, -1, 3, -1)), "groups dividing 4 heads"
    yield "C", change(4, lambda v: v[..., :4]), "C must have shape"
    yield "B", change(3, lambda v: v.float()), "B must be float64, got torch.float32"
    yield "C", change(4, lambda v: v.to("meta")), "C must be on cpu"
    yield "beta", change(5, lambda v: v[..., :1]), "beta must have shape"
    yield "I_prior", change(6, lambda v: v[:, None]), "I_prior must have shape"
    yield "beta", change(5, lambda v: v.long()), "beta must be bfloat16 or float16 or float32 or float64"
    yield "initial_state", change(7, lambda v: v[:, :, 0]), "initial_state must have shape"
    yield "initial_state", change(7, lambda v: v.bfloat16()), "initial_state must be float32 or float64"


@pytest.mark.parametrize(
    ("name", "spoil", "message"), list(bad_inputs()), ids=lambda v: v if isinstance(v, str) else ""
)
def test_bad_input_names_the_argument(name, spoil, message):
    with pytest.raises(ValueError, match=message):
        scan_with_everything(spoil([v.detach() for v in random_inputs()]))


@pytest.mark.parametrize(
    ("index", "spoil", "message"),
    [
        (0, lambda v: v[:, None], "x must be a floating"),
        (1, lambda v: v[..., None], r"dt must have shape \(2, 4\), got \(2, 4, 1\)"),
        (2, lambda v: v.half(), "A must be float32 or float64, got torch.float16"),
        (3, lambda v: v[:, :1].expand(-1, 3, -1), "groups dividing 4 heads"),
        (4, lambda v: v.float(), "C must be float64"),
        (5, lambda v: v.to("meta"), "beta must be on cpu"),
        (6, lambda v: v[1:], "I_prior must have shape"),
        (7, lambda v: v[:, :, :1], "state must have shape"),
        (8, lambda v: v[:, None], r"D must have shape \(4,\), got \(4, 1\)"),
        (7, lambda v: v.bfloat16(), "state must be float32 or float64"),
    ],
)
def test_bad_input_of_a_step_names_the_argument(index, spoil, message):
    inputs = [v.detach() for v in random_inputs(time=1)]
    token = [v[:, 0] if v.ndim > 2 and i < 6 else v for i, v in enumerate(inputs)] + [torch.ones(4)]
    token[index] = spoil(token[index])
    with pytest.raises(ValueError, match=message):
        palimpsa_step(*token)
    if index not in (5, 6, 7):
        with pytest.raises(ValueError, match=message):
            ssd_step(*token[:5], token[7][:, :, 0], token[8])


@pytest.mark.parametrize(
    ("D", "message"),
    [
        (torch.ones(4, 1), r"D must have shape \(4,\), got \(4, 1\)"),
        (torch.ones(4, device="meta"), "D must be on cpu like x, got meta"),
        (torch.ones(4, dtype=torch.long), "D must be .*float32.*, got torch.int64"),
    ],
    ids=["shape", "device", "type"],
)
def test_bad_skips_are_refused(D, message):
    inputs = random_inputs()[:7]
    for call, given in ((palimpsa_scan, inputs), (ssd_scan, inputs[:5])):
        with pytest.raises(ValueError, match=message):
            call(*given, D=D)


def test_a_mamba2_step_refuses_a_palimpsa_state():
    x, dt, A, B, C, _, _, state = (v.detach() for v in random_inputs(time=1))
    with pytest.raises(ValueError, match=r"state must have shape \(2, 4, 3, 5\), got \(2, 4, 2, 3, 5\)"):
        ssd_step(x[:, 0], dt[:, 0], A, B[:, 0], C[:, 0], state)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seq_idx": torch.zeros(2, 62, dtype=torch.long)}, "seq_idx must have shape"),
        ({"seq_idx": torch.zeros(2, 63)}, "seq_idx must hold integers"),
        ({"cu_seqlens": torch.tensor([0, 63])}, "batch of 1"),
    ],
    ids=["shape", "type", "batch"],
)
def test_bad_documents_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        palimpsa_scan(*random_inputs()[:7], **arguments)


@pytest.mark.parametrize(
    "boundaries",
    [[0, 40, 30, 63], [0, 62], [1, 63], [0.0, 63.0], [63]],
    ids=["decreasing", "short", "late", "floating", "single"],
)
def test_bad_boundaries_are_refused(boundaries):
    with pytest.raises(ValueError, match="cu_seqlens must"):
        palimpsa_scan(*random_inputs(batch=1)[:7], cu_seqlens=torch.tensor(boundaries))


def test_other_gpus_than_nvidias_run_pytorch(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert runpy.run_path(triton_jit.__file__)["triton"] is None


@pytest.mark.parametrize(("capability", "words"), [((9, 0), "Gluon for Hopper"), ((8, 0), "Triton")])
def test_paths_say_which_kernels_run(capability, words, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(mamba2_kernels, "_kernels", lambda: None)
    for name, value in {"GLUON_AVAILABLE": True, "triton": object()}.items():
        monkeypatch.setattr(scan, name, value)
    found = scan.paths(torch.device("cuda"))
    assert found["Palimpsa scan"].startswith(words)
    assert found["Mamba2 scan"].startswith("PyTorch: mamba_ssm")
    assert found["causal convolution"] == "Triton"
    assert set(scan.paths(torch.device("cpu")).values()) == {"PyTorch"}
