"""The Hugging Face model: DESIGN's six facts, generation, checkpointing, round trips."""

import json

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    CompileConfig,
    Mamba2Config,
    Mamba2ForCausalLM,
)

from helpers import assert_close, relative_error
from palimpsa_surgery.hf_models import LayerState, PalimpsaMamba2Config, PalimpsaMamba2ForCausalLM

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_heads": 4,
    "head_dim": 16,
    "state_size": 8,
    "n_groups": 2,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
}


def make_model(seed=0, **changes):
    """A small hybrid with every parameter random, importance well away from Mamba2's limit."""
    torch.manual_seed(seed)
    config = PalimpsaMamba2Config(**{"palimpsa_layers": [1, 2], **SIZES, **changes})
    model = PalimpsaMamba2ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("dt_bias", "b_scale", "norm.weight", ".D", "conv1d.bias")):
                parameter.add_(torch.randn_like(parameter) * 0.3)
            elif name.endswith("A_log"):
                parameter.copy_(torch.linspace(-3, 1, parameter.numel()))
    return model


@pytest.fixture(scope="module")
def model():
    return make_model()


@pytest.fixture(scope="module")
def ids():
    return torch.randint(1, 96, (2, 45), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def full(model, ids):
    with torch.no_grad():
        return model(ids).logits


# --- Mamba2's numbers -------------------------------------------------------------------------------------------


def plain_mamba2(model):
    """transformers' own Mamba2 with the weights that it shares with `model`."""
    theirs = Mamba2ForCausalLM(Mamba2Config(**{**SIZES, "norm_eps": 1e-5})).eval()
    shared = {k: v for k, v in model.state_dict().items() if k in theirs.state_dict()}
    theirs.load_state_dict(shared)
    return theirs


def set_importance(model, b_scale):
    with torch.no_grad():
        for i in model.config.palimpsa_layers:
            model.backbone.layers[i].mixer.b_scale.fill_(b_scale)


@pytest.mark.parametrize("layers", [[], [0, 2]], ids=["kept", "hybrid-at-the-limit"])
def test_equals_transformers_mamba2_in_the_limit(layers, ids):
    model = make_model(palimpsa_layers=layers)
    set_importance(model, -1e4)  # softplus underflows to exactly zero
    theirs = plain_mamba2(model)
    model.train(), theirs.train()
    ours, expected = model(ids, labels=ids), theirs(ids, labels=ids)
    assert_close(ours.logits, expected.logits, 1e-6)
    ours.loss.backward(), expected.loss.backward()
    for name, parameter in theirs.named_parameters():
        assert_close(model.get_parameter(name).grad, parameter.grad, 2e-5, name)
    set_importance(model, 0.0)
    if layers:
        assert relative_error(model(ids).logits, expected.logits) > 1e-3


def test_a_group_norm_of_one_group_differs(ids, model, full):
    wide = make_model(norm_group_size=64)
    assert relative_error(wide(ids).logits, full) > 1e-3


# --- States -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["plain", "checkpointed", "reentrant"])
def test_cut_and_carried_equals_whole(checkpointing, ids):
    model = make_model().train()
    model(ids, labels=ids).loss.backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    whole = model(ids, return_final_states=True)
    model.zero_grad()
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    first = model(ids[:, :20], return_final_states=True)
    second = model(ids[:, 20:], initial_states=first.final_states, return_final_states=True)
    logits = torch.cat((first.logits, second.logits), 1)
    assert_close(logits, whole.logits, 1e-5)
    for a, e in zip(second.final_states, whole.final_states, strict=True):
        assert_close(a.conv_state, e.conv_state, 1e-5)
        assert_close(a.recurrent_state, e.recurrent_state, 1e-5)
    model.loss_function(logits, ids, vocab_size=96).backward()
    for name, gradient in expected.items():
        assert_close(model.get_parameter(name).grad, gradient, 1e-4, name)


def test_final_states_keep_no_sequence_alive():
    model = make_model()
    for state in model(torch.zeros(1, 500, dtype=torch.int64), return_final_states=True).final_states:
        held = state.conv_state.untyped_storage().nbytes()
        assert held <= 2 * state.conv_state.numel() * state.conv_state.element_size()


def test_initial_states_receive_gradients_under_checkpointing(ids):
    model = make_model().train()
    states = [
        LayerState(s.conv_state.detach().requires_grad_(), s.recurrent_state.detach().requires_grad_())
        for s in model(ids[:, :9], return_final_states=True).final_states
    ]
    leaves = [v for state in states for v in state]
    expected = torch.autograd.grad(model(ids[:, 9:], labels=ids[:, 9:], initial_states=states).loss, leaves)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    actual = torch.autograd.grad(model(ids[:, 9:], labels=ids[:, 9:], initial_states=states).loss, leaves)
    for a, e in zip(actual, expected, strict=True):
        assert e.abs().max() > 0
        assert_close(a, e, 1e-5)


def test_a_missing_conv_state_is_zeros(model, ids):
    states = model(ids[:, :9], return_final_states=True).final_states
    zeroed = [LayerState(torch.zeros_like(s.conv_state), s.recurrent_state) for s in states]
    without = [LayerState(None, s.recurrent_state) for s in states]
    with torch.no_grad():
        expected = model(ids[:, 9:], initial_states=zeroed).logits
        assert torch.equal(model(ids[:, 9:], initial_states=without).logits, expected)


@pytest.mark.parametrize("prefill", [1, 2, 3, 20, 44])
def test_prefill_and_decode_equal_the_full_pass(prefill, model, ids, full):
    with torch.no_grad():
        output = model(ids[:, :prefill], use_cache=True)
        logits = [output.logits]
        for t in range(prefill, 45):
            logits.append(model(ids[:, t : t + 1], cache=output.cache, use_cache=True).logits)
    assert_close(torch.cat(logits, 1), full, 1e-5)


@pytest.mark.parametrize("pieces", [[20, 25], [3, 1, 2, 39]], ids=str)
def test_a_prompt_in_pieces_equals_the_full_pass(pieces, model, ids, full):
    cache, logits = None, []
    with torch.no_grad():
        for piece in ids.split(pieces, 1):
            output = model(piece, cache=cache, use_cache=True)
            cache = output.cache
            logits.append(output.logits)
    assert_close(torch.cat(logits, 1), full, 1e-5)


def test_time_step_limit_holds_in_decoding_too(ids):
    model = make_model(time_step_limit=(0.05, 0.6))
    with torch.no_grad():
        full = model(ids).logits
        cache = model(ids[:, :30], use_cache=True).cache
        steps = [model(ids[:, t : t + 1], cache=cache, use_cache=True).logits for t in range(30, 45)]
    assert_close(torch.cat(steps, 1), full[:, 30:], 1e-5)
    assert relative_error(make_model()(ids).logits, full) > 1e-3


# --- Padding and packing ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right", "scattered"])
def test_padding_changes_no_real_token(side, model, ids, full):
    width = 60
    if side == "left":
        places = torch.arange(15, 60)
    elif side == "right":
        places = torch.arange(45)
    else:
        places = torch.randperm(width, generator=torch.Generator().manual_seed(3))[:45].sort().values
    padded, mask = torch.zeros(3, width, dtype=torch.long), torch.zeros(3, width, dtype=torch.long)
    padded[0, places], mask[0, places] = ids[0], 1
    padded[1, :45], mask[1, :45] = ids[1], 1
    padded[2], mask[2] = torch.randint(1, 96, (width,), generator=torch.Generator().manual_seed(4)), 1
    with torch.no_grad():
        output = model(padded, attention_mask=mask, return_final_states=True, output_hidden_states=True)
        unpadded = model(ids, return_final_states=True, output_hidden_states=True)
    assert_close(output.logits[0, places], full[0], 1e-6)
    assert_close(output.logits[1, :45], full[1], 1e-6)
    for a, e in zip(output.hidden_states, unpadded.hidden_states, strict=True):
        assert_close(a[0, places], e[0], 1e-6)
    for a, e in zip(output.final_states, unpadded.final_states, strict=True):
        for actual, expected in zip(a, e, strict=True):
            assert_close(actual[:2], expected, 1e-6)


def test_a_padded_prompt_continues_like_an_unpadded_one(model, ids, full):
    padded = torch.cat((torch.zeros(2, 5, dtype=torch.long), ids[:, :30], torch.zeros(2, 3, dtype=torch.long)), 1)
    mask = torch.ones_like(padded)
    mask[:, :5], mask[:, 35:] = 0, 0
    with torch.no_grad():
        cache = model(padded, attention_mask=mask, use_cache=True).cache
        rest = model(ids[:, 30:], cache=cache, use_cache=True).logits
    assert_close(rest, full[:, 30:], 1e-5)


@pytest.mark.parametrize("form", ["seq_idx", "cu_seqlens"])
def test_packed_documents_equal_separate_ones(form, model, ids, full):
    seq_idx = torch.arange(2).repeat_interleave(45)[None]
    packing = {"seq_idx": seq_idx} if form == "seq_idx" else {"cu_seqlens": torch.tensor([0, 45, 90])}
    with torch.no_grad():
        packed = model(ids.view(1, -1), **packing).logits.view(2, 45, -1)
        assert_close(packed, full, 1e-5)
        assert relative_error(model(ids.view(1, -1)).logits.view(2, 45, -1), full) > 1e-3


def test_a_lone_padded_token_changes_no_state(model, ids):
    mask = torch.tensor([[0], [1]])
    with torch.no_grad():
        states = model(ids[:, :9], return_final_states=True).final_states
        options = {"initial_states": states, "return_final_states": True}
        after = model(ids[:, 9:10], attention_mask=mask, **options).final_states
        real = model(ids[:, 9:10], **options).final_states
    for a, before, r in zip(after, states, real, strict=True):
        for value, kept, moved in zip(a, before, r, strict=True):
            assert torch.equal(value[0], kept[0])
            assert_close(value[1], moved[1], 1e-6)


def test_packed_and_padded(model, ids, full):
    """Padding between and after packed documents: neither output nor the last document's state may move."""
    row = torch.cat((ids[0], torch.zeros(4, dtype=torch.long), ids[1], torch.zeros(6, dtype=torch.long)))[None]
    mask = torch.ones_like(row)
    mask[:, 45:49], mask[:, 94:] = 0, 0
    seq_idx = torch.cat((torch.zeros(45), torch.full((4,), 9), torch.ones(45), torch.full((6,), 8))).long()[None]
    with torch.no_grad():
        output = model(row, attention_mask=mask, seq_idx=seq_idx, return_final_states=True)
        alone = model(ids[1:], return_final_states=True)
    assert_close(output.logits[0, :45], full[0], 1e-5)
    assert_close(output.logits[0, 49:94], full[1], 1e-5)
    for a, e in zip(output.final_states, alone.final_states, strict=True):
        assert_close(a.recurrent_state, e.recurrent_state, 1e-5)
        assert_close(a.conv_state, e.conv_state, 1e-5)


@pytest.mark.parametrize("batch", [1, 5])
def test_batch_size_changes_nothing(batch, model, ids, full):
    with torch.no_grad():
        rows = ids[:1].expand(batch, -1)
        assert_close(model(rows).logits[-1:], full[:1], 1e-6)


# --- Generation -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "strategy",
    [{"do_sample": False}, {"do_sample": True, "top_k": 20}, {"do_sample": False, "num_beams": 3}],
    ids=["greedy", "sampling", "beams"],
)
def test_generation_with_and_without_a_cache(strategy, model, ids):
    prompt = ids[:, :10]
    texts = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        texts.append(
            model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, use_cache=use_cache, **strategy
            )
        )
    assert texts[0].shape[1] > 10
    assert torch.equal(*texts)


def test_generation_from_left_padded_prompts(model, ids):
    lengths, width = (4, 10), 10
    batch, mask = torch.zeros(2, width, dtype=torch.long), torch.zeros(2, width, dtype=torch.long)
    for row, length in enumerate(lengths):
        batch[row, -length:], mask[row, -length:] = ids[row, :length], 1
    settings = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    together = model.generate(batch, attention_mask=mask, **settings)
    for row, length in enumerate(lengths):
        prompt = ids[row : row + 1, :length]
        alone = model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
        assert torch.equal(together[row, width:], alone[0, length:])


def test_generation_from_embeddings(model, ids):
    prompt = ids[:, :10]
    settings = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 6, "do_sample": False}
    from_ids = model.generate(prompt, **settings)[:, 10:]
    assert torch.equal(model.generate(inputs_embeds=model.backbone.embeddings(prompt), **settings), from_ids)


def test_only_the_wanted_logits_are_computed(model, ids, full):
    with torch.no_grad():
        assert_close(model(ids, logits_to_keep=3).logits, full[:, -3:], 1e-6)
        assert_close(model(ids, logits_to_keep=torch.tensor([0, 7])).logits, full[:, [0, 7]], 1e-6)


# --- Weights ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_round_trip_is_bit_for_bit(tied, dtype, tmp_path, ids):
    changes = {"tie_word_embeddings": tied, "rescale_prenorm_residual": True, "time_step_limit": (0.0, float("inf"))}
    model = make_model(**changes).to(dtype)
    model.save_pretrained(tmp_path)
    for loader in (PalimpsaMamba2ForCausalLM, AutoModelForCausalLM):
        loaded = loader.from_pretrained(tmp_path, dtype=dtype)
        expected, actual = model.state_dict(), loaded.state_dict()
        assert expected.keys() == actual.keys()
        for name, value in expected.items():
            assert torch.equal(actual[name], value), name
        trainable = {n: p.requires_grad for n, p in model.named_parameters()}
        assert {n: p.requires_grad for n, p in loaded.named_parameters()} == trainable
        assert (loaded.lm_head.weight.data_ptr() == loaded.backbone.embeddings.weight.data_ptr()) is tied
        with torch.no_grad():
            assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert isinstance(AutoConfig.from_pretrained(tmp_path), PalimpsaMamba2Config)
    assert type(AutoModel.from_pretrained(tmp_path)).__name__ == "PalimpsaMamba2Model"
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["palimpsa_layers"] == [1, 2]
    assert saved["importance_rank"] == 2


def test_a_mamba2_checkpoint_loads_as_a_model_without_palimpsa_layers(tmp_path, ids):
    theirs = plain_mamba2(make_model())
    theirs.save_pretrained(tmp_path)
    config = PalimpsaMamba2Config(**{**theirs.config.to_dict(), "palimpsa_layers": []})
    ours = PalimpsaMamba2ForCausalLM.from_pretrained(tmp_path, config=config)
    with torch.no_grad():
        assert_close(ours(ids).logits, theirs(ids).logits, 1e-6)


def test_bfloat16_stays_close_to_float32(ids, full):
    with torch.no_grad():
        rounded = make_model().bfloat16()(ids).logits
    assert_close(rounded, full, 3e-2)


def test_initialisation_is_finite_and_small():
    torch.manual_seed(0)
    mixer = PalimpsaMamba2ForCausalLM(PalimpsaMamba2Config(**SIZES, palimpsa_layers=[1])).backbone.layers[1].mixer
    assert torch.equal(mixer.b_scale, torch.ones(4))
    assert torch.equal(mixer.Ip_log, torch.zeros(4))
    assert not mixer.Ip_log.requires_grad
    assert mixer.b_proj.weight.abs().max() <= mixer.b_proj.weight.shape[1] ** -0.5
    assert 0.01 < mixer.b_rank_proj.weight.std() < 0.04


# --- Surroundings -----------------------------------------------------------------------------------------------


def test_compiles_whole(model, ids, full):
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert_close(compiled(ids, use_cache=False).logits, full, 1e-6)


def test_generation_compiles_the_step_whole(model, ids):
    """As `generate` does with a static cache on a GPU; once for all steps of one size."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    options = {"max_new_tokens": 8, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    options |= {"attention_mask": torch.ones_like(ids), "eos_token_id": None}
    eager = model.generate(ids, **options)
    config = CompileConfig(backend="aot_eager", fullgraph=True, mode=None)
    config._compile_all_devices = True
    for _ in range(2):
        compiled = model.generate(ids, **options, cache_implementation="static", compile_config=config)
        assert torch.equal(compiled.sequences, eager.sequences)
        assert_close(torch.stack(compiled.logits), torch.stack(eager.logits), 1e-6)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_autocast_trains_in_bfloat16(ids):
    model = make_model().train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(ids, labels=ids).loss
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.requires_grad)
    assert all(p.grad.dtype == torch.float32 for p in model.parameters() if p.requires_grad)


def test_every_trainable_parameter_learns(ids):
    model = make_model().train()
    model(ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        if name.endswith("Ip_log"):
            assert parameter.grad is None
        else:
            assert parameter.grad.abs().max() > 0, name


def test_the_observer_sees_what_the_scan_uses(model, ids):
    seen = {}
    for layer in model.backbone.layers:
        layer.mixer.observer = lambda i, values: seen.__setitem__(i, values)
    with torch.no_grad():
        watched = model(ids).logits
    for layer in model.backbone.layers:
        layer.mixer.observer = None
    with torch.no_grad():
        assert torch.equal(model(ids).logits, watched)
    assert sorted(seen) == [0, 1, 2]
    assert seen[0]["importance_gate"] is None
    assert seen[1]["importance_gate"].shape == (2, 45, 4, 16)
    assert seen[1]["dt"].shape == (2, 45, 4)
    assert seen[1]["dt"].min() > 0


def test_return_dict_false_gives_a_tuple(model, ids, full):
    with torch.no_grad():
        assert_close(model(ids, return_dict=False)[0], full, 1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "exactly one of input_ids and inputs_embeds"),
        ({"initial_states": [(None, None)]}, "one entry for each of 3 layers, got 1"),
        ({"return_final_states": True, "use_cache": True}, "a cache already carries the states"),
        ({"cu_seqlens": torch.tensor([0, 45])}, "batch of 1, got 2"),
        ({"cu_seqlens": torch.tensor([0, 45]), "seq_idx": torch.zeros(2, 45).long()}, "same thing"),
        ({"seq_idx": torch.zeros(2, 44).long()}, "seq_idx must have shape"),
        ({"attention_mask": torch.ones(2, 1, 45)}, r"attention_mask must be \[batch, time\]"),
        (
            {"initial_states": [(torch.zeros(2, 96, 5), None)] * 3},
            r"state must have shape \(2, 96, 4\), got \(2, 96, 5\)",
        ),
        ({"initial_states": [(None, torch.zeros(2, 4, 16, 9))] * 3}, "initial_state must have shape"),
    ],
    ids=[
        "no-input",
        "states",
        "cache-and-states",
        "boundaries-of-a-batch",
        "both-packings",
        "packing-shape",
        "mask",
        "conv-state",
        "recurrent-state",
    ],
)
def test_bad_calls_say_what_is_wrong(arguments, message, model, ids):
    given = (ids,) if arguments else ()
    with pytest.raises(ValueError, match=message):
        model(*given, **arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"palimpsa_layers": [3]}, r"palimpsa_layers must increase within 0 to num_hidden_layers - 1 \(2\), got \[3\]"),
        ({"palimpsa_layers": [1, 1]}, r"got \[1, 1\]"),
        ({"palimpsa_layers": [2, 0]}, r"got \[2, 0\]"),
        ({"n_groups": 3}, r"num_heads \(4\) must be a multiple of n_groups \(3\)"),
        ({"norm_group_size": 48}, r"norm_group_size \(48\) must divide expand \* hidden_size \(64\)"),
        ({"importance_rank": 0}, "importance_rank must be at least 1"),
        ({"head_dim": 8}, "must equal num_heads"),
        ({"hidden_act": "gelu"}, "hidden_act must be silu"),
        ({"layer_norm_epsilon": float("nan")}, "layer_norm_epsilon must lie within 0 and 1, got nan"),
        ({"time_step_limit": (0.5, 0.1)}, "time_step_limit must be two numbers"),
    ],
    ids=[
        "layer-range",
        "layer-twice",
        "layer-order",
        "groups",
        "norm-groups",
        "rank",
        "heads",
        "activation",
        "epsilon",
        "limits",
    ],
)
def test_contradictory_sizes_are_refused_with_both_sides(changes, message):
    with pytest.raises(StrictDataclassError, match=message):
        PalimpsaMamba2Config(**{**SIZES, **changes})
