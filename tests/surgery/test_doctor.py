"""`doctor` passes here, and catches wrong kernels."""

import sys
import types

import pytest
import torch

from palimpsa_surgery.errors import UserError
from palimpsa_surgery.kernels import conv, norm, scan
from palimpsa_surgery.surgery import doctor as module
from palimpsa_surgery.surgery.doctor import doctor


@pytest.fixture(autouse=True)
def short(monkeypatch):
    for lengths in (module.LENGTHS, module.PACKED_LENGTHS, module.MAMBA2_LENGTHS):
        monkeypatch.setitem(lengths, "cpu", (1, 17))


def test_this_installation_passes(cli):
    outcome = cli("doctor", "--device", "cpu")
    assert outcome.code == 0, outcome.stdout
    assert "checks passed" in outcome.stdout
    assert torch.__version__.split("+")[0] in outcome.stdout
    assert max(map(len, outcome.stdout.splitlines())) <= 80


class WrongGradient(torch.autograd.Function):
    """The identity, whose backward pass loses one row: what a miscompiled kernel does."""

    @staticmethod
    def forward(ctx, v):
        return v.view_as(v)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        gradient[:, -1] = 0
        return gradient


def test_a_wrong_gradient_is_caught(monkeypatch, cli):
    right = scan.palimpsa_scan

    def wrong(x, dt, A, B, *rest, **options):
        return right(x, dt, A, WrongGradient.apply(B), *rest, **options)

    monkeypatch.setattr(scan, "palimpsa_scan", wrong)
    outcome = cli("doctor", "--device", "cpu")
    assert outcome.code == 1
    assert "FAILED Palimpsa scan, float32, 17 tokens: gradient of B" in outcome.stdout
    assert "do not train" in outcome.stdout


@pytest.mark.parametrize("fault", ["nan", "raises"])
def test_a_broken_path_is_caught(fault, monkeypatch):
    def broken(*arguments, **options):
        if fault == "raises":
            raise RuntimeError("no kernel image is available")
        y, state = right(*arguments, **options)
        return y * float("nan"), state

    right = scan.ssd_scan
    monkeypatch.setattr(scan, "ssd_scan", broken)
    failed = [check for check in doctor("cpu").checks if not check.passed]
    assert {check.path for check in failed} == {"Mamba2 scan", "Mamba2 scan, packed"}
    assert fault == "nan" or failed[0].message == "no kernel image is available"


def test_a_wrong_norm_is_caught(monkeypatch):
    right = norm.rms_norm
    monkeypatch.setattr(norm, "rms_norm", lambda x, *rest, gate: right(x, *rest, gate=gate if gate is None else -gate))
    failed = [check for check in doctor("cpu").checks if not check.passed]
    assert {check.path for check in failed} == {"gated norm"}


def test_a_wrong_convolution_is_caught(monkeypatch):
    right = conv.causal_conv1d

    def leaking(x, weight, bias, state, seq_idx):
        return right(x, weight, bias, state, None if x.dtype is torch.bfloat16 else seq_idx)

    monkeypatch.setattr(conv, "causal_conv1d", leaking)
    failed = [check for check in doctor("cpu").checks if not check.passed]
    assert {(check.path, check.dtype) for check in failed} == {("causal convolution, packed", torch.bfloat16)}


@pytest.mark.parametrize("device", ["tpu", "nonsense", "cuda:99"])
def test_unknown_devices_are_refused(device, cli):
    assert device in cli("doctor", "--device", device).error
    with pytest.raises(UserError):
        doctor(device)


def test_on_a_gpu_it_checks_what_trains():
    """The tuned kernels do not return the variance, so most checks must not ask for it."""
    jobs = list(module._jobs(torch.device("cuda")))
    runs = {(job.args[0], job.keywords["dtype"]) for job in jobs}
    wanted = ("_palimpsa_scan", "_palimpsa_variance", "_mamba2_scan", "_palimpsa_steps", "_norm", "_gated_norm")
    for dtype in (torch.float32, torch.bfloat16):
        assert {(getattr(module, name), dtype) for name in wanted} <= runs
        convolutions = [j.args[3:] for j in jobs if j.args[0] is module._convolution and j.keywords["dtype"] is dtype]
        assert convolutions == [(65, False), (513, False), (65, True), (513, True)]
    bf16_scans = [j for j in jobs if j.args[0] is module._palimpsa_scan and j.keywords["dtype"] is torch.bfloat16]
    lengths = {packed: {j.args[3] for j in bf16_scans if j.args[4] is packed} for packed in (False, True)}
    assert lengths == {False: {1, 63, 64, 65, 257, 513, 2049}, True: {65, 513}}


def test_kernels_of_mamba_ssm_are_not_tuned_while_checking(monkeypatch):
    triton = pytest.importorskip("triton")
    configurations = [triton.Config({"BLOCK": size}) for size in (64, 32, 16)]
    kernels = types.ModuleType("mamba_ssm.ops.kernels")
    kernels.tuned = triton.autotune(configs=configurations, key=["n"])(triton.jit(kernel))
    monkeypatch.setitem(sys.modules, kernels.__name__, kernels)
    with module._untuned():
        assert kernels.tuned.configs == configurations[-1:]
    assert kernels.tuned.configs == configurations


def kernel(x, n, BLOCK):
    """What Triton would compile."""
