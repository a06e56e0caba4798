"""What Triton specialises the kernels on: nothing that changes from one batch to the next."""

import itertools

import pytest
import torch

from palimpsa_surgery.kernels import (
    hopper_carry,
    hopper_gradients,
    hopper_lanes,
    hopper_read_out,
    hopper_scan,
    hopper_spans,
    triton_conv,
    triton_forward,
    triton_norm,
    triton_scan,
)
from palimpsa_surgery.kernels.triton_jit import tl
from scan_cases import Case, make

jit = pytest.importorskip("triton.runtime.jit")
compiler = pytest.importorskip("triton.compiler")
backends = pytest.importorskip("triton.backends.compiler")


class Launches:
    """Stands in for a kernel and launches nothing: what Triton would compile for each launch's arguments."""

    def __init__(self, kernel):
        backend = compiler.make_backend(backends.GPUTarget("cuda", 90, 32))
        self.bind = jit.create_function_from_signature(kernel.signature, kernel.params, backend)
        self.compiled = set()

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            _, specialization, options = self.bind(*arguments, **options)
            self.compiled.add((str(specialization), str(options)))

        return launch


@pytest.fixture
def launched(monkeypatch):
    """How often each kernel is compiled, by module and name; stand-ins take the launches."""
    kernels = {}
    for module in (triton_scan, hopper_scan, triton_conv, triton_norm):
        for name, value in list(vars(module).items()):
            if isinstance(value, jit.JITFunction):
                monkeypatch.setattr(module, name, kernels.setdefault(f"{module.__name__}.{name}", Launches(value)))
    return lambda: {name.split(".", 2)[2]: len(kernel.compiled) for name, kernel in kernels.items() if kernel.compiled}


@pytest.mark.parametrize("tuned", [True, False], ids=["hopper", "portable"])
def test_other_lengths_and_heads_compile_nothing_anew(tuned, launched, monkeypatch):
    monkeypatch.setattr(triton_scan, "tuned_fits", lambda *_: tuned)
    for module in (triton_scan, hopper_scan):
        monkeypatch.setattr(module, "programs_on", lambda device: 264)
    shares = []
    data = make(Case(1, 700, 16, 64, 128, 1, torch.bfloat16))
    for time, workspace in ((700, 2**30), (700, 2**25), (33, 2**30), (512, 1), (1, 1)):
        monkeypatch.setattr(triton_scan, "WORKSPACE_BYTES", workspace)
        shares += [hopper_scan.plan(1, time, 16, triton_scan.MAX_GRID, 264, workspace)[1]]
        x, dt, A, B, C, beta, I_prior, _ = (
            v[:, :time].clone() if v is not None and v.ndim > 2 else v for v in data.arguments.values()
        )
        D = torch.zeros(17)[time % 2 :][:16]
        triton_scan._forward(x, dt, A, B, C, beta, I_prior, D, None, None, False)
        triton_scan._backward(x, dt, A, B, C, beta, I_prior, D, None, None, data.dy[:, :time], None, None)
    found = launched()
    assert len(found) >= 7
    assert {1, 16} <= set(shares)  # Triton would tell 1 and multiples of 16 apart
    # forwards and backwards; the first heads and those that follow
    twice = ("pass_states", "reduce_heads", *(("segment_states",) if tuned else ()))
    assert found == {name: 2 if name.endswith(twice) else 1 for name in found}


def test_launches_keep_to_their_room():
    workspace, programs = 2**30, 264
    for batch, time, heads, most in itertools.product(
        (1, 3, 8, 256), (1, 300, 4096, 40000, 2**17, 2**20), (1, 7, 80), (2, 10**6)
    ):
        step, shares = hopper_scan.plan(batch, time, heads, most, programs, workspace)
        assert 1 <= shares <= step <= min(heads, most)
        taken = hopper_scan.workspace_bytes(batch, time, step, shares, programs)
        assert taken <= max(workspace, hopper_scan.workspace_bytes(batch, time, 1, 1, programs))
    assert hopper_scan.plan(1, 2**15, 80, 10**6, programs, workspace) == (20, 2)
    assert hopper_scan.plan(1, 2**15, 80, 10**6, programs, 1) == (1, 1)


def test_the_tuned_kernels_take_bfloat16_alone(monkeypatch):
    """They read x and beta as pairs of it."""
    monkeypatch.setattr(hopper_scan, "AVAILABLE", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    x, beta, B = (torch.zeros(1, 2, *sizes, dtype=torch.bfloat16) for sizes in ((3, 64), (3, 64), (1, 128)))
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert hopper_scan.fits(x, beta, B)
    assert not hopper_scan.fits(x, beta.float(), B)
    assert not hopper_scan.fits(x.half(), beta, B)


def test_pairs_are_copied_where_addresses_do_not_allow_them():
    flat = torch.arange(2 * 3 * 4 * 64 + 1).bfloat16()
    for v in (flat[1:].view(2, 3, 4, 64), flat[:-1].view(2, 3, 4, 64), torch.ones(1, 1, 1, 65).bfloat16()[..., :64]):
        for values in (2, 8):
            pairs = hopper_scan._pairs(v, values)
            assert torch.equal(pairs.view(torch.bfloat16), v)
            assert pairs.data_ptr() % (2 * values) == 0
            assert all(stride % (values // 2) == 0 for stride in pairs.stride()[:-1])


def test_tokens_far_apart_are_copied(monkeypatch):
    """Offsets within a segment have 32 bits."""
    taken = []
    monkeypatch.setattr(triton_scan, "_scan_op", lambda *given: taken.extend(given) or given[:3])
    x = torch.empty(1, device="meta").as_strided((1, 7, 2, 8), (0, 2**23, 8, 1))
    triton_scan.palimpsa_scan_triton(x, x[..., 0], x[0, 0, :, 0], x[:, :, :1], x[:, :, :1], x, x[0, 0, :, 0])
    strides = [v.stride(1) for v in taken if v is not None and not isinstance(v, bool) and v.ndim > 2]
    assert len(strides) == 5
    assert max(strides) < 2**20


def test_other_numbers_of_rows_compile_no_norm_anew(launched):
    for rows in (1, 16, 33, 700, 20000):
        x, weight = torch.zeros(1, rows, 256, dtype=torch.bfloat16), torch.zeros(256)
        gate = torch.zeros(1, rows, 528, dtype=torch.bfloat16)[..., :256]
        triton_norm._norm(x, gate, weight, 1e-5, 256, x.dtype)
        triton_norm._norm_backward(x, gate, weight, x, 1e-5, 256)
    assert launched() == {"triton_norm.norm_forward": 1, "triton_norm.norm_backward": 1}


@pytest.mark.parametrize("width", [10576, 3352, 301], ids=["2.7b", "130m", "odd"])
def test_nothing_compiles_the_convolution_anew(width, launched):
    """Length, batch, and where rows, tails and documents lie; x is a slice, as in the model."""
    for batch, time in ((1, 1), (1, 33), (2, 512), (3, 7)):
        x = torch.empty(batch, time, width, dtype=torch.bfloat16)[..., 16:280]
        weight, bias = torch.empty(264, 4), torch.empty(264)
        whole, end = torch.empty(2, batch, 264, 4, dtype=x.dtype), torch.empty(batch, time + 4, 264, dtype=x.dtype)
        documents = torch.zeros(batch, time + 1, dtype=torch.int32)
        for tail in (whole[1], end[:, -4:].transpose(1, 2)):
            for seq_idx in (documents[:, 1:], documents[:1, :1].expand(batch, time)):
                triton_conv._forward(x, weight, bias, tail, seq_idx)
                triton_conv._backward(x, weight, bias, tail, seq_idx, x)
    assert launched() == {"triton_conv.conv_forward": 1, "triton_conv.conv_backward": 1}


def compile_for(
    capability: int, kernel, types: dict, constants: dict, num_warps: int, source=compiler.ASTSource, **options
) -> None:
    """Down to machine code, without a GPU; arguments not named in `types` are integers."""
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    target = backends.GPUTarget("cuda", capability, 32)
    compiled = compiler.compile(source(kernel, signature, constants), target, {"num_warps": num_warps} | options)
    assert f".target sm_{capability}" in compiled.asm["ptx"]
    assert compiled.asm["cubin"]


@pytest.mark.parametrize("capability", [75, 80, 90, 120])
@pytest.mark.parametrize("packed", [True, False], ids=["packed-tail", "plain"])
def test_convolution_compiles_without_a_gpu(packed, capability):
    """As it trains, for Turing to Blackwell."""
    types = dict.fromkeys(("x", "tail", "y", "dy", "dx", "dtail"), "*bf16")
    types |= dict.fromkeys(("weight", "bias", "parts"), "*fp32") | {"doc": "*i64" if packed else "*bf16"}
    sizes = {"BQ": triton_conv.BQ, "R": triton_conv.R, "BD": triton_conv.BD, "K": 4, "UNIT": 8}
    constants = sizes | {"HAS_BIAS": True, "HAS_TAIL": packed, "HAS_DOC": packed}
    compile_for(capability, triton_conv.conv_forward, types, constants, triton_conv.NUM_WARPS)
    compile_for(capability, triton_conv.conv_backward, types, constants, triton_conv.NUM_WARPS)


@pytest.mark.parametrize("capability", [75, 80, 90, 120])
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
def test_norm_compiles_without_a_gpu(gated, capability):
    """At mamba2-2.7b's sizes for Turing, which has no bfloat16 of its own, to Blackwell."""
    group = 5120 if gated else 2560
    half, x = "*bf16", "*bf16" if gated else "*fp32"
    types = {"x": x, "dx": x, "weight": "*fp32", "dw_part": "*fp32", "eps": "fp32"}
    types |= dict.fromkeys(("gate", "out", "dout", "dgate"), half)
    for name in ("forward", "backward"):
        sizes = triton_norm._sizes(group, getattr(triton_norm, f"{name.upper()}_CHANNELS"))
        constants = {"BN": sizes["BN"], "HAS_GATE": gated}
        compile_for(capability, getattr(triton_norm, f"norm_{name}"), types, constants, sizes["num_warps"])


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])
def test_products_of_the_hopper_backward_pass_compile_without_a_gpu(packed):
    types = dict.fromkeys(("dt", "A", "rows", "decay", "states", "adjoints", "dB", "dvx", "w"), "*fp32")
    types |= dict.fromkeys(("prior", "to_M", "to_I", "largest", "scales", "factors", "flow", "whole"), "*fp32")
    types |= dict.fromkeys(("x", "beta", "B", "dx", "dbeta"), "*bf16")
    types |= {"parts": "*i32", "doc": "*i32" if packed else "*fp32"}
    sizes = {"P": 64, "N": 128}
    constants = {"S": hopper_scan.BACKWARD_SEGMENT, "HAS_DOC": packed}
    constants |= {"LIMIT": hopper_spans.GROWTH, "LIMIT_M": hopper_spans.GROWTH_OF_M}
    compile_for(90, hopper_spans.find_spans, types, constants, 1)
    sizes |= {"DOT": tl.bfloat16, "PRECISION": "tf32"}
    constants = sizes | {"HAS_DOC": packed}
    tile = dict(zip(("BT", "BP", "BN"), triton_scan.STATE_TILE, strict=True)) | {"x_p": 1, "beta_p": 1}
    compile_for(90, triton_forward.segment_states, types, constants | tile | {"HAS_LARGEST": True}, 4)
    constants |= {"S": hopper_scan.BACKWARD_SEGMENT, "BT": hopper_scan.CARRY_TOKENS}
    compile_for(90, hopper_carry.carry_rows, types, constants, 4, maxnreg=hopper_scan.CARRY_REGISTERS)
    del constants["HAS_DOC"]
    sums = types | dict.fromkeys(("changes", "flows", "ddt", "dA"), "*fp32")
    compile_for(90, hopper_scan.sum_flows, sums, {"S": hopper_scan.BACKWARD_SEGMENT}, 2)
    compile_for(90, hopper_carry.carry_keys, types, constants | {"BN": hopper_scan.CARRY_KEYS}, 4)


@pytest.mark.skipif(not hopper_lanes.AVAILABLE, reason="needs Triton's Gluon")
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])
def test_hopper_kernels_compile_without_a_gpu(packed):
    source = pytest.importorskip("triton.experimental.gluon._runtime").GluonASTSource
    types = dict.fromkeys(("x", "beta", "B", "C", "dy", "y", "parts"), "*i32")
    types |= dict.fromkeys(
        ("dt", "A", "prior", "skip", "states", "adjoints", "rows", "keys", "changes", "flows", "dprior"), "*fp32"
    )
    types |= dict.fromkeys(("scales", "factors", "spare"), "*fp32")
    types["doc"] = "*i32" if packed else "*fp32"
    constants = {"HAS_DOC": packed}
    compile_for(90, hopper_gradients.segment_gradients, types, constants, hopper_gradients.NUM_WARPS, source)
    compile_for(90, hopper_read_out.read_out, types, constants | {"HAS_SKIP": True}, 4, source)
