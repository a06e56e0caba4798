"""The estimate of memory against the peak that torch measures, where that can be measured: on the CPU."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from palimpsa_surgery.hf_models import PalimpsaMamba2Config, PalimpsaMamba2ForCausalLM
from palimpsa_surgery.stages.memory import activations
from palimpsa_surgery.stages.recipe import Packing, Stage


def make_config(hidden_size: int, layers: int, palimpsa: int) -> PalimpsaMamba2Config:
    return PalimpsaMamba2Config(
        vocab_size=512,
        hidden_size=hidden_size,
        num_hidden_layers=layers,
        expand=2,
        head_dim=16,
        num_heads=hidden_size // 8,
        n_groups=1,
        state_size=16,
        tie_word_embeddings=True,
        palimpsa_layers=list(range(palimpsa)),
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )


def measured_peak(config: PalimpsaMamba2Config, rows: int, length: int, resets: bool, checkpointing: bool) -> int:
    """Most bytes that one forward and backward pass allocates beyond what is there before it."""
    torch.manual_seed(0)
    model = PalimpsaMamba2ForCausalLM(config).train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    ids = torch.randint(1, 500, (rows, length))
    inputs = {"input_ids": ids, "labels": ids}
    if resets:
        inputs["seq_idx"] = (torch.arange(length) // 50).expand(rows, length).int()

    def step():
        model(**inputs, use_cache=False).loss.backward()

    step()  # afterwards the gradients exist
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    now = peak = 0
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable")
@pytest.mark.parametrize("checkpointing", [False, True], ids=["all-kept", "checkpointed"])
@pytest.mark.parametrize(
    ("hidden_size", "layers", "palimpsa", "resets"),
    [(64, 4, 0, False), (64, 3, 3, True), (128, 3, 1, True)],
    ids=["mamba2", "palimpsa", "hybrid"],
)
def test_estimate_is_within_30_percent_of_the_peak(hidden_size, layers, palimpsa, resets, checkpointing):
    config = make_config(hidden_size, layers, palimpsa)
    stage = Stage.model_construct(
        sequence_length=192,
        batch_tokens=384,
        micro_batch_tokens=384,
        packing=Packing(reset_at_documents=resets),
    )
    estimate = activations(config, stage, on_gpu=False)
    estimate = estimate.checkpointed if checkpointing else estimate.kept
    peak = measured_peak(config, 2, 192, resets, checkpointing)
    assert 0.7 * peak < estimate < 1.3 * peak


def test_estimate_grows_with_tokens_alone():
    config = make_config(64, 4, 2)
    one, same, more = (
        activations(
            config, Stage.model_construct(sequence_length=length, batch_tokens=rows * length, packing=Packing())
        )
        for rows, length in ((2, 512), (1, 1024), (4, 512))
    )
    assert one == same
    assert more.kept == pytest.approx(2 * one.kept, rel=1e-6)
    assert one.checkpointed < one.kept
