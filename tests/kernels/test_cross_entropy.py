"""The head's loss without its logits: equal to the plain one, and never holding more than a block of them."""

import sys
import types

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from helpers import assert_close
from palimpsa_surgery.hf_models import PalimpsaMamba2Config, PalimpsaMamba2ForCausalLM
from palimpsa_surgery.kernels import cross_entropy
from palimpsa_surgery.kernels.cross_entropy import linear_cross_entropy

TOKENS, HIDDEN, VOCAB = 150, 12, 400


class LargestTensor(TorchDispatchMode):
    """Remembers the number of elements of the largest tensor that any operation returned."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else (out,):
            if isinstance(value, torch.Tensor):
                self.numel = max(self.numel, value.numel())
        return out


def arguments(dtype, device="cpu"):
    """The same values for every type, up to rounding."""
    generator = torch.Generator().manual_seed(0)
    hidden_states = torch.randn(2, TOKENS // 2, HIDDEN, dtype=torch.float64, generator=generator)
    weight = torch.randn(VOCAB, HIDDEN, dtype=torch.float64, generator=generator)
    labels = torch.randint(0, VOCAB, (2, TOKENS // 2), generator=generator)
    labels[:, ::4] = -100
    hidden_states, weight = (v.to(device, dtype).requires_grad_() for v in (hidden_states, weight))
    return hidden_states, weight, labels.to(device)


def plain(hidden_states, weight, labels):
    """The definition: all logits at once."""
    logits = (hidden_states @ weight.T).flatten(0, 1)
    return F.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="sum")


def gradients(loss, *inputs):
    return torch.autograd.grad(loss / 7, inputs)


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 16 tokens; the last of them is shorter."""
    monkeypatch.setattr(cross_entropy, "LOGITS_PER_BLOCK", 16 * VOCAB)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=str)
def test_blocks_equal_the_plain_loss_and_its_gradients(dtype, tolerance, small_blocks):
    hidden_states, weight, labels = arguments(dtype)
    expected = plain(hidden_states, weight, labels)
    total, count = linear_cross_entropy(hidden_states, weight, labels)
    assert count == (labels != -100).sum()
    assert_close(total, expected, tolerance, "loss")
    for name, actual, wanted in zip(
        ("hidden_states", "weight"),
        gradients(total, hidden_states, weight),
        gradients(expected, hidden_states, weight),
        strict=True,
    ):
        assert_close(actual, wanted, tolerance, name)


def test_no_more_than_a_block_of_logits_ever_exists(small_blocks):
    hidden_states, weight, labels = arguments(torch.float32)
    with LargestTensor() as whole:
        gradients(plain(hidden_states, weight, labels), hidden_states, weight)
    assert whole.numel == TOKENS * VOCAB
    with LargestTensor() as blocked:
        gradients(linear_cross_entropy(hidden_states, weight, labels)[0], hidden_states, weight)
    assert blocked.numel == 16 * VOCAB
    with LargestTensor() as scored, torch.no_grad():
        linear_cross_entropy(hidden_states, weight, labels)
    assert scored.numel == 16 * VOCAB


def test_logits_are_computed_again_rather_than_saved(small_blocks):
    hidden_states, weight, labels = arguments(torch.float32)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        linear_cross_entropy(hidden_states, weight, labels)
    assert max(saved) == VOCAB * HIDDEN, "the weight itself"


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_the_model_gives_the_same_loss_and_gradients_without_logits(tied, monkeypatch):
    monkeypatch.setattr(cross_entropy, "LOGITS_PER_BLOCK", 16 * VOCAB)
    torch.manual_seed(0)
    config = PalimpsaMamba2Config(
        vocab_size=VOCAB,
        hidden_size=16,
        num_hidden_layers=2,
        num_heads=2,
        head_dim=16,
        state_size=4,
        n_groups=1,
        tie_word_embeddings=tied,
        palimpsa_layers=[1],
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    model = PalimpsaMamba2ForCausalLM(config).train()
    ids = torch.randint(0, VOCAB, (2, 40))
    labels = ids.masked_fill(torch.rand(ids.shape) < 0.3, -100)
    for items in (None, 100):
        results = []
        for return_logits in (True, False):
            model.zero_grad()
            out = model(ids, labels=labels, return_logits=return_logits, num_items_in_batch=items)
            assert (out.logits is None) != return_logits
            out.loss.backward()
            results.append((out.loss, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}))
        assert_close(results[1][0], results[0][0], 1e-6)
        for name, expected in results[0][1].items():
            assert_close(results[1][1][name], expected, 1e-5, name)
    with pytest.raises(ValueError, match="nothing to return without labels"):
        model(ids, return_logits=False)


@pytest.mark.parametrize("liger", ["absent", "broken", "old", "new"])
def test_liger_is_none_unless_it_fits(liger, monkeypatch):
    names = ("liger_kernel", "liger_kernel.transformers", "liger_kernel.transformers.fused_linear_cross_entropy")
    for name in names[: 1 if liger in ("absent", "broken") else 3]:
        monkeypatch.setitem(sys.modules, name, None if liger == "absent" else types.ModuleType(name))

    class Old:
        def __init__(self, ignore_index=-100, reduction="mean"):
            pass

    class New(Old):
        def __init__(self, ignore_index=-100, reduction="mean", accum_dtype=None):
            assert (reduction, accum_dtype) == ("sum", torch.float32)

    if liger in ("old", "new"):
        sys.modules[names[2]].LigerFusedLinearCrossEntropyLoss = Old if liger == "old" else New
    assert (cross_entropy._liger.__wrapped__() is not None) == (liger == "new")


def test_shapes_that_do_not_fit_are_named():
    hidden_states, weight, labels = arguments(torch.float32)
    with pytest.raises(ValueError, match=r"do not fit: got \(2, 75, 12\), \(400, 12\) and \(2, 74\)"):
        linear_cross_entropy(hidden_states, weight, labels[:, 1:])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("fused", [True, False], ids=["liger", "blocks"])
def test_on_cuda_both_ways_equal_float64(fused, small_blocks, monkeypatch):
    if fused and cross_entropy._liger() is None:
        pytest.skip("needs liger-kernel")
    if not fused:
        monkeypatch.setattr(cross_entropy, "_liger", lambda: None)
    device = f"cuda:{torch.cuda.device_count() - 1}"  # where there are several, not the current one
    exact = arguments(torch.float64, device)
    expected = plain(*exact)
    wanted_gradients = gradients(expected, *exact[:2])
    ours = arguments(torch.float32, device)
    total, _ = linear_cross_entropy(*ours)
    assert_close(total, expected, 1e-5, "loss")
    for actual, wanted in zip(gradients(total, *ours[:2]), wanted_gradients, strict=True):
        assert_close(actual, wanted, 1e-5)
    head_alone, _ = linear_cross_entropy(ours[0].detach(), *ours[1:])
    assert_close(gradients(head_alone, ours[1])[0], wanted_gradients[1], 1e-5, "weight beside frozen layers")
    with torch.autocast("cuda", torch.bfloat16):
        rounded, _ = linear_cross_entropy(*ours)
    assert_close(rounded, expected, 5e-3, "loss under autocast")
    for actual, wanted in zip(gradients(rounded, *ours[:2]), wanted_gradients, strict=True):
        assert_close(actual, wanted, 2e-2)
