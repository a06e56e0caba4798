"""The model on a GPU against the same model on the CPU; skipped without CUDA.

With the kept layers in PyTorch what is compared is our own: float32 throughout. With `mamba_ssm`'s kernels, where they
are installed, those layers multiply in TF32, ten bits of mantissa.
"""

import os

# mamba_ssm's own switch: one configuration for each kernel instead of minutes of tuning. Read when it is imported.
os.environ.setdefault("MAMBA_DETERMINISTIC", "1")

import pytest
import torch
from safetensors.torch import load_file
from transformers import CompileConfig

from helpers import assert_close, relative_error, tiny_hybrid
from palimpsa_surgery.hf_models import PalimpsaMamba2Config, PalimpsaMamba2ForCausalLM
from palimpsa_surgery.kernels.mamba2_kernels import mamba_ssm_imports

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

LOGITS = {"PyTorch": 1e-4, "mamba_ssm": 5e-3}
GRADIENTS = {"PyTorch": 1e-3, "mamba_ssm": 2e-2}


@pytest.fixture(params=["PyTorch", "mamba_ssm"])
def mamba2(request):
    """What the kept layers run on; a graph compiled before would keep what it found."""
    torch.compiler.reset()
    if request.param == "PyTorch":
        request.getfixturevalue("mamba2_in_pytorch")
    elif not mamba_ssm_imports():
        pytest.skip("mamba_ssm is not installed")
    return request.param


@pytest.fixture(scope="module")
def hybrid(tiny_checkpoint):
    return tiny_hybrid(tiny_checkpoint)


@pytest.fixture(scope="module")
def on_gpu(hybrid):
    model = PalimpsaMamba2ForCausalLM(hybrid.config)
    model.load_state_dict(hybrid.state_dict())
    return model.cuda().eval()


@pytest.fixture(scope="module")
def ids(reference_path):
    return load_file(reference_path)["kjv.257.input_ids"]


def step(model, ids: torch.Tensor, forward=None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of one training step, on the CPU; `forward` stands for the model where given."""
    model.train()
    model.zero_grad()
    here = ids.to(model.device)
    loss = (model if forward is None else forward)(input_ids=here, labels=here, use_cache=False).loss
    loss.backward()
    gradients = {n: p.grad.cpu().clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model.eval()
    return loss.detach().cpu(), gradients


def assert_gradients_close(actual: dict, expected: dict, tolerance: float) -> None:
    assert actual.keys() == expected.keys()
    errors = {name: relative_error(actual[name], value) for name, value in expected.items()}
    worst = sorted(errors.items(), key=lambda item: -item[1])[:5]
    assert worst[0][1] <= tolerance, worst


def test_logits_equal_the_cpu(hybrid, on_gpu, ids, mamba2):
    with torch.no_grad():
        assert_close(on_gpu(ids.cuda()).logits.cpu(), hybrid(ids).logits, LOGITS[mamba2])


def test_gradients_of_a_step_equal_the_cpu(hybrid, on_gpu, ids, mamba2):
    (_, expected), (_, actual) = step(hybrid, ids), step(on_gpu, ids)
    assert_gradients_close(actual, expected, GRADIENTS[mamba2])


def test_bfloat16_autocast_equals_the_cpu(hybrid, on_gpu, ids, mamba2):
    losses = []
    for model in (hybrid, on_gpu):
        here = ids.to(model.device)
        with torch.no_grad(), torch.autocast(model.device.type, dtype=torch.bfloat16):
            losses.append(model(here, labels=here).loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=5e-3)


def test_prefill_and_decode_equal_the_full_pass(on_gpu, ids, mamba2):
    ids = ids.cuda()
    with torch.no_grad():
        full = on_gpu(ids).logits
        output = on_gpu(ids[:, :200], use_cache=True)
        steps = [on_gpu(ids[:, t : t + 1], cache=output.cache, use_cache=True).logits for t in range(200, 257)]
    assert_close(torch.cat(steps, 1), full[:, 200:], LOGITS[mamba2])


def test_a_32k_prompt_in_one_piece_equals_16(on_gpu, mamba2_in_pytorch):
    ids = torch.randint(1, 4000, (1, 32768), generator=torch.Generator().manual_seed(0)).cuda()
    with torch.no_grad():
        whole = on_gpu(ids, return_final_states=True, logits_to_keep=64)
        states = None
        for piece in ids.split(2048, 1):
            output = on_gpu(piece, initial_states=states, return_final_states=True, logits_to_keep=64)
            states = output.final_states
    assert_close(output.logits, whole.logits, 1e-4)
    for actual, expected in zip(states, whole.final_states, strict=True):
        assert_close(actual.recurrent_state, expected.recurrent_state, 1e-4)


def test_packed_and_padded_documents(on_gpu, ids, mamba2_in_pytorch):
    ids = ids.cuda()
    with torch.no_grad():
        full = on_gpu(ids).logits
        packed = on_gpu(ids.view(1, -1), cu_seqlens=torch.tensor([0, 257, 514])).logits
        padded = torch.nn.functional.pad(ids, (9, 0))
        mask = torch.nn.functional.pad(torch.ones_like(ids), (9, 0))
        left = on_gpu(padded, attention_mask=mask).logits[:, 9:]
    assert_close(packed.view_as(full), full, 1e-4)
    assert_close(left, full, 1e-4)


@pytest.fixture
def small():
    """Two layers, one of each kind, which compile fast."""
    torch.manual_seed(0)
    config = PalimpsaMamba2Config(
        vocab_size=256,
        hidden_size=256,
        num_hidden_layers=2,
        num_heads=8,
        head_dim=64,
        state_size=128,
        n_groups=1,
        palimpsa_layers=[1],
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return PalimpsaMamba2ForCausalLM(config).cuda()


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
def test_compiles(checkpointing, small, mamba2):
    """A compiled training step equals the eager one; only `mamba_ssm`'s scan breaks the graph."""
    ids = torch.randint(0, 256, (2, 100))
    loss, gradients = step(small, ids)
    if checkpointing:
        small.gradient_checkpointing_enable({"use_reentrant": False})
        again, recomputed = step(small, ids)
        assert torch.equal(again, loss)
        assert_gradients_close(recomputed, gradients, 1e-5)
    compiled, actual = step(small, ids, torch.compile(small, fullgraph=mamba2 == "PyTorch"))
    assert_close(compiled, loss, 1e-5)
    assert_gradients_close(actual, gradients, 1e-4)


def test_generation_compiled_whole_equals_eager(small, mamba2):
    """With a static cache `generate` compiles the decoding step, and replays it as a CUDA graph."""
    small.eval()
    ids = torch.randint(1, 256, (3, 20), device="cuda")
    options = {"max_new_tokens": 12, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    options |= {"attention_mask": torch.ones_like(ids), "eos_token_id": None}
    eager = small.generate(ids, **options)
    static = {"cache_implementation": "static", "compile_config": CompileConfig(fullgraph=True)}
    for _ in range(2):  # the second time from another cache
        compiled = small.generate(ids, **options, **static)
        assert torch.equal(compiled.sequences, eager.sequences)
        assert_close(torch.stack(compiled.logits), torch.stack(eager.logits), 1e-4)
