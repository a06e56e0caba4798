"""The model on a GPU against the same model on the CPU; skipped without CUDA."""

import pytest
import torch
from safetensors.torch import load_file

from helpers import assert_close
from palimpsa_surgery.hf_models import PalimpsaMamba2Config, PalimpsaMamba2ForCausalLM
from palimpsa_surgery.surgery.checkpoints import load_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

LAYERS = [2, 5, 8, 11]


@pytest.fixture(scope="module")
def hybrid(tiny_checkpoint):
    """tiny-mamba2 with four Palimpsa layers whose importance is well away from Mamba2's limit, on the CPU."""
    source = load_model(tiny_checkpoint)
    torch.manual_seed(0)
    config = PalimpsaMamba2Config(**{**source.config.to_dict(), "palimpsa_layers": LAYERS})
    model = PalimpsaMamba2ForCausalLM(config).eval()
    model.load_state_dict(source.state_dict(), strict=False)
    with torch.no_grad():
        for layer in LAYERS:
            model.backbone.layers[layer].mixer.b_scale.uniform_(0.1, 1.0)
    return model


@pytest.fixture(scope="module")
def on_gpu(hybrid):
    model = PalimpsaMamba2ForCausalLM(hybrid.config)
    model.load_state_dict(hybrid.state_dict())
    return model.cuda().eval()


@pytest.fixture(scope="module")
def ids(reference_path):
    return load_file(reference_path)["kjv.257.input_ids"]


def test_logits_equal_the_cpu(hybrid, on_gpu, ids):
    with torch.no_grad():
        # mamba_ssm's kernels multiply float32 in TF32, ten bits of mantissa.
        assert_close(on_gpu(ids.cuda()).logits.cpu(), hybrid(ids).logits, 5e-3)


def test_gradients_of_a_step_equal_the_cpu(hybrid, on_gpu, ids):
    gradients = []
    for model in (hybrid.train(), on_gpu.train()):
        model.zero_grad()
        here = ids.to(model.device)
        model(here, labels=here).loss.backward()
        gradients.append({n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None})
        model.eval()
    assert gradients[0].keys() == gradients[1].keys()
    for name, expected in gradients[0].items():
        assert_close(gradients[1][name], expected, 2e-2, name)


def test_bfloat16_autocast_step_equals_the_cpu(hybrid, on_gpu, ids):
    losses = []
    for model in (hybrid, on_gpu):
        here = ids.to(model.device)
        with torch.no_grad(), torch.autocast(model.device.type, dtype=torch.bfloat16):
            losses.append(model(here, labels=here).loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=5e-3)


def test_prefill_and_decode_equal_the_full_pass(on_gpu, ids):
    ids = ids.cuda()
    with torch.no_grad():
        full = on_gpu(ids).logits
        output = on_gpu(ids[:, :200], use_cache=True)
        steps = [on_gpu(ids[:, t : t + 1], cache=output.cache, use_cache=True).logits for t in range(200, 257)]
    assert_close(torch.cat(steps, 1), full[:, 200:], 5e-3)


def test_a_32k_prompt_in_one_piece_equals_16(on_gpu):
    ids = torch.randint(1, 4000, (1, 32768), generator=torch.Generator().manual_seed(0)).cuda()
    with torch.no_grad():
        whole = on_gpu(ids, return_final_states=True, logits_to_keep=64)
        states = None
        for piece in ids.split(2048, 1):
            output = on_gpu(piece, initial_states=states, return_final_states=True, logits_to_keep=64)
            states = output.final_states
    assert_close(output.logits, whole.logits, 5e-3)
    for actual, expected in zip(states, whole.final_states, strict=True):
        assert_close(actual.recurrent_state, expected.recurrent_state, 5e-3)


def test_packed_and_padded_documents_on_the_gpu(on_gpu, ids):
    ids = ids.cuda()
    with torch.no_grad():
        full = on_gpu(ids).logits
        packed = on_gpu(ids.view(1, -1), cu_seqlens=torch.tensor([0, 257, 514], device="cuda")).logits
        padded = torch.nn.functional.pad(ids, (9, 0))
        mask = torch.nn.functional.pad(torch.ones_like(ids), (9, 0))
        left = on_gpu(padded, attention_mask=mask).logits[:, 9:]
    assert_close(packed.view_as(full), full, 5e-3)
    assert_close(left, full, 5e-3)


def test_checkpointing_and_compile_take_the_kernels_whole(on_gpu, ids):
    ids = ids.cuda()
    on_gpu.train()
    expected = on_gpu(ids, labels=ids).loss
    expected.backward()
    gradients = {n: p.grad.clone() for n, p in on_gpu.named_parameters() if p.grad is not None}
    on_gpu.zero_grad()
    on_gpu.gradient_checkpointing_enable({"use_reentrant": False})
    loss = on_gpu(ids, labels=ids).loss
    loss.backward()
    on_gpu.gradient_checkpointing_disable()
    on_gpu.eval()
    assert torch.equal(loss, expected)
    for name, gradient in gradients.items():
        assert_close(on_gpu.get_parameter(name).grad, gradient, 1e-4, name)
    with torch.no_grad():
        plain = on_gpu(ids, use_cache=False).logits
        assert_close(torch.compile(on_gpu)(ids, use_cache=False).logits, plain, 5e-3)
