"""Checkpoints come in exactly as they are, and go out bit for bit."""

import copy
import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Mamba2Config, Mamba2ForCausalLM

from helpers import assert_close, http_error, relative_error
from palimpsa_surgery.errors import UserError
from palimpsa_surgery.hf_models import PalimpsaMamba2Config, PalimpsaMamba2ForCausalLM
from palimpsa_surgery.surgery import hub
from palimpsa_surgery.surgery.checkpoints import (
    fingerprint,
    key_table,
    load_model,
    load_tokenizer,
    open_source,
    parameter_count,
    save_checkpoint,
)
from palimpsa_surgery.surgery.ledger import ledger
from surgery.native_writer import FORMATS, reference_logits, write_meta, write_native

LENGTH = 21


def tokens(rows: int = 61, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(rows, (2, length), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def logits(model: torch.nn.Module, input_ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=input_ids).logits


def make_hybrid(palimpsa_layers: Sequence[int] = (), **changes: object) -> PalimpsaMamba2ForCausalLM:
    torch.manual_seed(5)
    sizes = {"hidden_size": 32, "num_heads": 4, "head_dim": 16, "state_size": 16, "num_hidden_layers": 3}
    config = PalimpsaMamba2Config(
        **{
            **sizes,
            "n_groups": 1,
            "vocab_size": 64,
            "palimpsa_layers": list(palimpsa_layers),
            "tie_word_embeddings": True,
            **changes,
        },
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = PalimpsaMamba2ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("dt_bias", "A_log", ".D", "b_scale", "Ip_log")):
                parameter.copy_(torch.randn_like(parameter))  # nothing that a re-initialisation would also give
    return model


# Native checkpoints


@pytest.mark.parametrize("text", ["docs.1", "docs.63", "kjv.257", "code.1000"])
def test_tiny_checkpoint_agrees_with_mamba_ssm(tiny_checkpoint: Path, reference_path: Path, text: str):
    reference = load_file(reference_path)
    got = logits(load_model(tiny_checkpoint), reference[f"{text}.input_ids"])[:, -8:]
    expected = reference[f"{text}.logits"]
    assert_close(got, expected, 1e-3)
    assert torch.equal(got.argmax(-1), expected.argmax(-1))


VARIANTS = {
    "plain": {},
    "untied": {"tie_embeddings": False},
    "two-groups": {"ssm_cfg.ngroups": 2},
    "four-groups-of-one-head": {"ssm_cfg.ngroups": 4},
    "d_state": {"ssm_cfg.d_state": 5},
    "headdim": {"ssm_cfg.headdim": 4},
    "expand": {"ssm_cfg.expand": 3},
    "odd-vocabulary": {"vocab_size": 37, "pad_vocab_size_multiple": 8},
    "unpadded-vocabulary": {"vocab_size": 37, "pad_vocab_size_multiple": 1},
    "bias": {"ssm_cfg.bias": True},
    "no-conv-bias": {"ssm_cfg.conv_bias": False},
    "d_conv": {"ssm_cfg.d_conv": 2},
    "chunk_size": {"ssm_cfg.chunk_size": 8},
    "dt_limit": {"ssm_cfg.dt_limit": [0.1, 0.5]},
    "residual-in-16-bit": {"residual_in_fp32": False},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_native_variant_agrees_with_reference(tmp_path: Path, name: str):
    changes = VARIANTS[name]
    weights = write_native(tmp_path, changes)
    model = load_model(tmp_path)
    input_ids = tokens(37)
    options = {"n_groups": changes.get("ssm_cfg.ngroups", 1)}
    expected = reference_logits(weights, input_ids, dt_limit=changes.get("ssm_cfg.dt_limit", (0, math.inf)), **options)
    assert_close(logits(model, input_ids), expected, 1e-5)
    if "ssm_cfg.dt_limit" in changes:
        assert relative_error(logits(model, input_ids), reference_logits(weights, input_ids, **options)) > 0.01
    if "ssm_cfg.ngroups" in changes:
        one_norm = reference_logits(weights, input_ids, norm_groups=1, **options)
        assert relative_error(logits(model, input_ids), one_norm) > 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_native_weights_arrive_exactly(tmp_path: Path, form: str, dtype: torch.dtype, tied: bool):
    weights = write_native(tmp_path, {"tie_embeddings": tied}, form=form, dtype=dtype)
    source = open_source(tmp_path)
    model = load_model(source)
    assert (source.kind, source.dtype, model.config.dtype) == ("native", dtype, dtype)
    assert (model.lm_head.weight is model.backbone.embeddings.weight) is tied
    loaded = {key.replace("embeddings", "embedding"): value for key, value in model.state_dict().items()}
    assert loaded.keys() == weights.keys()
    for key, value in weights.items():
        assert torch.equal(loaded[key], value.float()), key


def test_native_config_leaves_nothing_to_defaults_of_transformers(tmp_path: Path):
    write_native(tmp_path)
    source = open_source(tmp_path)
    config = source.config
    expected = {
        "n_groups": 1,
        "tie_word_embeddings": True,
        "vocab_size": 64,
        "layer_norm_epsilon": 1e-5,
        "chunk_size": 256,
        "conv_kernel": 4,
        "time_step_limit": (0.0, math.inf),
        "palimpsa_layers": [],
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    assert {key: getattr(config, key) for key in expected} == expected


def test_absent_native_settings_have_mamba_ssms_defaults(tmp_path: Path):
    changes = {"d_model": 64, "ssm_cfg": {"layer": "Mamba2"}}
    write_native(tmp_path, changes | {"pad_vocab_size_multiple": 8})
    config = json.loads((tmp_path / "config.json").read_text())
    minimal = {key: config[key] for key in ("d_model", "n_layer", "vocab_size", "ssm_cfg")}
    (tmp_path / "config.json").write_text(json.dumps(minimal))
    config = open_source(tmp_path).config
    assert (config.state_size, config.head_dim, config.expand, config.vocab_size) == (128, 64, 2, 64)
    assert config.tie_word_embeddings
    assert config.residual_in_fp32


def test_settings_without_effect_are_accepted_and_listed(tmp_path: Path):
    accepted = {
        "dt_min": 0.01,
        "dt_max": 0.2,
        "dt_init_floor": 1e-3,
        "conv_init": 0.1,
        "A_init_range": [1, 8],
        "use_mem_eff_path": False,
        "process_group": None,
        "sequence_parallel": False,
    }
    write_native(tmp_path)
    assert open_source(tmp_path).notes == ()
    write_native(tmp_path, {f"ssm_cfg.{key}": value for key, value in accepted.items()} | {"ssm_cfg.d_ssm": 64})
    source = open_source(tmp_path)
    for key in accepted:
        assert any(note.startswith(f"ssm_cfg.{key} = ") for note in source.notes), key
    config = source.config
    assert (config.time_step_min, config.time_step_max, config.time_step_floor) == (0.01, 0.2, 1e-3)


def test_mixed_types_are_kept_exactly(tmp_path: Path):
    weights = write_native(tmp_path, form="safetensors", dtype=torch.float16)
    weights["backbone.layers.0.mixer.A_log"] = torch.tensor([0.1, 0.2, 0.3, 0.4])
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    source = open_source(tmp_path)
    assert source.dtype == torch.float32
    assert any("torch.float16, torch.float32" in note for note in source.notes)
    model = load_model(source)
    assert torch.equal(model.backbone.layers[0].mixer.A_log, weights["backbone.layers.0.mixer.A_log"])


def test_a_loaded_model_does_not_depend_on_its_files(tmp_path: Path):
    for form in ("bin", "safetensors"):
        weights = write_native(tmp_path / form, form=form)
        model = load_model(tmp_path / form)
        for file in (tmp_path / form).iterdir():
            file.write_bytes(b"\0" * file.stat().st_size)
        assert torch.equal(model.backbone.norm_f.weight, weights["backbone.norm_f.weight"])


def test_safetensors_win_over_a_pickle_beside_them(tmp_path: Path):
    weights = write_native(tmp_path, form="safetensors")
    write_native(tmp_path, form="bin", seed=1)
    source = open_source(tmp_path)
    assert any("pytorch_model.bin: not read" in note for note in source.notes)
    assert torch.equal(load_model(source).backbone.norm_f.weight, weights["backbone.norm_f.weight"])


# Other formats


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_transformers_mamba2_comes_in_and_goes_out(tmp_path: Path, tied: bool):
    torch.manual_seed(0)
    original = Mamba2ForCausalLM(
        Mamba2Config(
            hidden_size=32,
            num_heads=4,
            head_dim=16,
            state_size=8,
            num_hidden_layers=2,
            n_groups=2,
            vocab_size=50,
            tie_word_embeddings=tied,
            rescale_prenorm_residual=True,
        )
    ).eval()
    original.save_pretrained(tmp_path / "in")
    source = open_source(tmp_path / "in")
    assert source.kind == "mamba2"
    model = load_model(source)
    assert_close(logits(model, tokens(50)), logits(original, tokens(50)), 1e-5)
    (tmp_path / "out").mkdir()
    save_checkpoint(model, tmp_path / "out")
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(reloaded) is Mamba2ForCausalLM
    for key, value in original.state_dict().items():
        assert torch.equal(reloaded.state_dict()[key], value), key


@pytest.mark.parametrize("model_type", ["meta_mamba2", "metamamba2"])
def test_authors_checkpoint(tmp_path: Path, model_type: str):
    weights = write_meta(tmp_path, model_type=model_type, n_groups=2)
    source = open_source(tmp_path)
    assert (source.kind, source.config.palimpsa_layers) == ("meta_mamba2", [0, 1])
    assert (source.config.norm_group_size, source.config.importance_rank) == (64, 3)
    assert any("softplus" in note for note in source.notes)
    got = logits(load_model(source), tokens())
    assert_close(got, reference_logits(weights, tokens(), n_groups=2, norm_groups=1, metaplastic=True), 1e-5)
    assert relative_error(got, reference_logits(weights, tokens(), n_groups=2, metaplastic=True)) > 0.01
    assert relative_error(got, reference_logits(weights, tokens(), n_groups=2, norm_groups=1)) > 0.01


def test_authors_checkpoint_without_metaplasticity_drops_its_importance(tmp_path: Path):
    weights = write_meta(tmp_path / "in", metaplasticity=False)
    source = open_source(tmp_path / "in")
    assert source.config.palimpsa_layers == []
    assert any(note.startswith("dropped 8 tensors: backbone.layers.0.mixer.b_scale") for note in source.notes)
    model = load_model(source)
    expected = reference_logits(weights, tokens(), n_groups=2, norm_groups=1)
    assert_close(logits(model, tokens()), expected, 1e-5)
    # transformers' Mamba2 has no such norm, so this is one of the rare plain models that need our class
    (tmp_path / "out").mkdir()
    save_checkpoint(model, tmp_path / "out")
    assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), tokens()), expected, 1e-5)


# Round trips


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shard", ["5GB", "20KB"], ids=["one-file", "shards"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_hybrid_round_trip_is_bit_exact(tmp_path: Path, tied: bool, shard: str, dtype: torch.dtype):
    model = make_hybrid([0, 2], tie_word_embeddings=tied, rescale_prenorm_residual=True)
    save_checkpoint(model, tmp_path, dtype=dtype, max_shard_size=shard)
    assert (tmp_path / "model.safetensors.index.json").exists() is (shard != "5GB")
    stored = {}
    for file in tmp_path.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            stored |= {key: tensors.get_tensor(key) for key in tensors.keys()}  # noqa: SIM118
    assert ("lm_head.weight" in stored) is not tied
    source = open_source(tmp_path)
    assert (source.kind, source.dtype, source.notes) == ("palimpsa_mamba2", dtype, ())
    for reloaded in (AutoModelForCausalLM.from_pretrained(tmp_path), load_model(source, dtype=dtype)):
        assert type(reloaded) is PalimpsaMamba2ForCausalLM
        assert (reloaded.lm_head.weight is reloaded.backbone.embeddings.weight) is tied
        assert reloaded.config.palimpsa_layers == [0, 2]
        for key, value in model.state_dict().items():
            assert torch.equal(reloaded.state_dict()[key], value.to(dtype)), key
    frozen = {name for name, parameter in load_model(source).named_parameters() if not parameter.requires_grad}
    assert frozen == {"backbone.layers.0.mixer.Ip_log", "backbone.layers.2.mixer.Ip_log"}
    assert model.dtype == torch.float32


def test_converted_checkpoint_keeps_its_bits_and_logits(tmp_path: Path, tiny_checkpoint: Path):
    model = load_model(tiny_checkpoint)
    tokenizer = load_tokenizer(tiny_checkpoint)
    save_checkpoint(model, tmp_path, tokenizer=tokenizer, extra_files={"surgery.json": "{}\n"})
    assert (tmp_path / "surgery.json").read_text() == "{}\n"
    original = torch.load(tiny_checkpoint / "pytorch_model.bin", weights_only=True)
    with safe_open(tmp_path / "model.safetensors", "pt") as stored:
        assert set(stored.keys()) == {k.replace("embedding.", "embeddings.") for k in original} - {"lm_head.weight"}
        for key in stored.keys():  # noqa: SIM118
            assert torch.equal(stored.get_tensor(key), original[key.replace("embeddings.", "embedding.")]), key
    written = json.loads((tmp_path / "config.json").read_text())
    assert (written["model_type"], written["architectures"]) == ("mamba2", ["Mamba2ForCausalLM"])
    assert (written["dtype"], written["eos_token_id"], written["pad_token_id"]) == ("float16", 0, 0)
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert (generation["eos_token_id"], generation["pad_token_id"]) == (0, 0)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert type(plain) is Mamba2ForCausalLM
    assert_close(logits(plain, tokens(4000, 70)), logits(model, tokens(4000, 70)), 1e-5)
    reloaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "In the beginning"
    assert (reloaded.eos_token_id, reloaded(text).input_ids) == (0, tokenizer(text).input_ids)


def test_longest_input_and_generation_settings_are_carried(tmp_path: Path):
    model = make_hybrid([1])
    model.config.max_position_embeddings = 32768
    model.generation_config.max_new_tokens = 17
    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()
        save_checkpoint(model, tmp_path / folder)
        model = load_model(tmp_path / folder)
        assert AutoModelForCausalLM.from_pretrained(tmp_path / folder).config.max_position_embeddings == 32768
    assert model.generation_config.max_new_tokens == 17


def test_generation_settings_that_transformers_refuses_are_left_behind(tmp_path: Path):
    write_native(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5, "do_sample": false}')
    source = open_source(tmp_path)
    assert any(note.startswith("generation_config.json is not carried over: ") for note in source.notes)
    (tmp_path / "out").mkdir()
    save_checkpoint(load_model(source), tmp_path / "out")


def test_saving_refuses_what_the_type_cannot_hold(tmp_path: Path):
    model = make_hybrid([])
    with torch.no_grad():
        model.backbone.norm_f.weight[3] = 1e6
    with pytest.raises(UserError, match=r"backbone\.norm_f\.weight.*does not fit torch\.float16: 1 of"):
        save_checkpoint(model, tmp_path, dtype=torch.float16)
    assert not any(tmp_path.iterdir())


def test_fingerprint_follows_values_and_not_types(tmp_path: Path):
    write_native(tmp_path, dtype=torch.float16)
    model = load_model(tmp_path)
    before = fingerprint(model)
    assert fingerprint(load_model(tmp_path, dtype=torch.float16)) == before
    with torch.no_grad():
        model.backbone.layers[1].mixer.D[0] += 1e-3
    assert fingerprint(model) != before


# Tokenizers and token ids


def test_token_ids_come_from_the_tokenizer(tiny_checkpoint: Path, tmp_path: Path):
    config = open_source(tiny_checkpoint).config
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (0, 0, 0)
    shutil.copytree(tiny_checkpoint, tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer.json").unlink()
    config = open_source(tmp_path).config
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (None, None, None)


def test_stated_token_ids_are_kept_where_there_is_no_tokenizer(tmp_path: Path):
    model = make_hybrid([0])
    model.config.eos_token_id = [7, 9]
    save_checkpoint(model, tmp_path)
    config = open_source(tmp_path).config
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (None, [7, 9], 7)
    assert load_model(tmp_path).generation_config.eos_token_id == [7, 9]


def test_absent_token_ids_are_not_those_of_transformers(tmp_path: Path):
    sizes = {"hidden_size": 32, "num_heads": 4, "head_dim": 16, "state_size": 16, "num_hidden_layers": 2}
    write_native(tmp_path)
    config = {"model_type": "mamba2", **sizes, "n_groups": 1, "vocab_size": 64, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load_model(tmp_path)
    for settings in (model.config, model.generation_config):
        assert (settings.bos_token_id, settings.eos_token_id, settings.pad_token_id) == (None, None, None)


def test_generation_may_stop_at_several_tokens(tiny_checkpoint: Path, tmp_path: Path):
    shutil.copytree(tiny_checkpoint, tmp_path / "in")
    (tmp_path / "in" / "generation_config.json").write_text('{"eos_token_id": [0, 5]}')
    model = load_model(tmp_path / "in")
    (tmp_path / "out").mkdir()
    save_checkpoint(model, tmp_path / "out", tokenizer=load_tokenizer(tmp_path / "in"))
    reloaded = load_model(tmp_path / "out")
    assert (reloaded.config.eos_token_id, reloaded.generation_config.eos_token_id) == (0, [0, 5])


def test_given_tokenizer_wins(tiny_checkpoint: Path, tmp_path: Path):
    write_native(tmp_path / "model", {"vocab_size": 5000})
    (tmp_path / "model" / "tokenizer.json").write_text("not a tokenizer")
    by_file = load_tokenizer(tmp_path / "model", tiny_checkpoint / "tokenizer.json")
    by_folder = load_tokenizer(str(tmp_path / "model"), str(tiny_checkpoint))
    assert by_file.get_vocab() == by_folder.get_vocab()
    assert (by_file.eos_token, by_file.pad_token) == ("<|endoftext|>", "<|endoftext|>")
    assert any("token ids are not taken" in note for note in open_source(tmp_path / "model").notes)


def test_native_checkpoint_of_its_size_implies_gpt_neox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_native(tmp_path, {"d_model": 8, "ssm_cfg.headdim": 8, "vocab_size": 50277})
    asked = []

    def from_pretrained(name, **options):
        asked.append((name, options))
        raise OSError("offline") from OfflineModeIsEnabled("offline")

    monkeypatch.setattr("palimpsa_surgery.surgery.tokenizer.AutoTokenizer.from_pretrained", from_pretrained)
    with pytest.raises(UserError, match=r"EleutherAI/gpt-neox-20b could not be fetched: .*--tokenizer"):
        load_tokenizer(tmp_path)
    assert asked == [("EleutherAI/gpt-neox-20b", {"trust_remote_code": False})]


# The Hub


def test_hub_repository_is_fetched_without_pickles_or_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    weights = write_native(tmp_path, form="safetensors")
    calls = []
    monkeypatch.setattr(hub, "snapshot_download", lambda name, allow_patterns: calls.append(allow_patterns) or tmp_path)
    source = open_source("someone/model")
    assert (source.name, source.path) == ("someone/model", tmp_path)
    assert len(calls) == 1
    assert "config.json" in calls[0]
    assert not any(".bin" in pattern or ".py" in pattern for pattern in calls[0])
    assert torch.equal(load_model(source).backbone.norm_f.weight, weights["backbone.norm_f.weight"])


def test_hub_repository_with_a_pickle_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def download(name, allow_patterns):
        assert name == "state-spaces/mamba2-tiny"
        if "pytorch_model.bin" in allow_patterns:
            write_native(tmp_path)
        return tmp_path

    monkeypatch.setattr(hub, "snapshot_download", download)
    assert open_source("state-spaces/mamba2-tiny").kind == "native"


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: http_error(RepositoryNotFoundError), "no such Hub repository"),
        (lambda: http_error(GatedRepoError), "gated"),
        (lambda: LocalEntryNotFoundError("no connection"), "no network"),
        (lambda: OfflineModeIsEnabled("offline"), "HF_HUB_OFFLINE"),
        (lambda: ConnectionError("reset"), "no network"),
        (lambda: OSError(28, "No space left on device"), "No space left"),
    ],
    ids=["missing", "gated", "no-network", "offline", "connection", "disk"],
)
def test_hub_errors_are_one_clear_line(monkeypatch: pytest.MonkeyPatch, make, expected: str):
    def download(*_, **__):
        raise make()

    monkeypatch.setattr(hub, "snapshot_download", download)
    with pytest.raises(UserError, match=expected) as caught:
        open_source("someone/model")
    assert "someone/model" in str(caught.value)
    assert "\n" not in str(caught.value)


# The key table and the ledger

SHAPES = {
    "plain": {},
    "untied": {"tie_word_embeddings": False},
    "hybrid": {"palimpsa_layers": [0, 2], "importance_rank": 5},
    "groups-and-biases": {"n_groups": 2, "use_bias": True, "use_conv_bias": False, "palimpsa_layers": [1]},
    "other-sizes": {"expand": 3, "num_heads": 6, "conv_kernel": 3, "state_size": 7, "palimpsa_layers": [0, 1, 2]},
}


@pytest.mark.parametrize("name", SHAPES)
def test_key_table_is_the_models_state(name: str):
    model = make_hybrid(**SHAPES[name])
    table = key_table(model.config)
    shapes = {rule.key: rule.shape for rule in table}
    assert shapes == {key: tuple(value.shape) for key, value in model.state_dict().items()}
    assert len(shapes) == len(table)
    assert parameter_count(model.config) == sum(p.numel() for p in model.parameters())
    assert [r.native for r in table if r.native != r.key] == ["backbone.embedding.weight"]


NATIVE_SIZES = {  # DESIGN section 6: d_model, layers, heads, rows of in_proj, channels of the convolution
    "130m": (768, 24, 24, 3352, 1792),
    "370m": (1024, 48, 32, 4384, 2304),
    "780m": (1536, 48, 48, 6448, 3328),
    "1.3b": (2048, 48, 64, 8512, 4352),
    "2.7b": (2560, 64, 80, 10576, 5376),
}


def released(size: str) -> PalimpsaMamba2Config:
    hidden, layers, heads, _, _ = NATIVE_SIZES[size]
    return PalimpsaMamba2Config(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_heads=heads,
        n_groups=1,
        vocab_size=50288,
        tie_word_embeddings=True,
    )


@pytest.mark.parametrize("size", NATIVE_SIZES)
def test_shapes_of_the_released_models(size: str):
    shapes = {rule.key: rule.shape for rule in key_table(released(size))}
    hidden, layers, heads, rows, channels = NATIVE_SIZES[size]
    mixer = f"backbone.layers.{layers - 1}.mixer."
    assert shapes[mixer + "in_proj.weight"] == (rows, hidden)
    assert shapes[mixer + "conv1d.weight"] == (channels, 1, 4)
    assert shapes[mixer + "A_log"] == (heads,)
    assert f"backbone.layers.{layers}.norm.weight" not in shapes


def test_ledger_of_the_papers_hybrid():
    before = released("2.7b")
    after = copy.deepcopy(before)
    after.palimpsa_layers = [3, 8, 13, 21, 34, 40, 55, 63]
    book = ledger(before, after)
    assert parameter_count(before) == 2_702_599_680
    importance = 8 * (80 + 80 + 160 * 2560 + 5120 * 160)
    assert book.parameters == {"copied": 2_702_599_680, "new": importance, "dropped": 0}
    assert book.before["importance"] == 0
    assert book.after["importance"] == importance
    assert {kind: n for kind, n in book.after.items() if kind != "importance"} == {
        kind: n for kind, n in book.before.items() if kind != "importance"
    }
    assert [rule.key for rule in book.new[:4]] == [
        f"backbone.layers.3.mixer.{name}" for name in ("b_scale", "Ip_log", "b_rank_proj.weight", "b_proj.weight")
    ]
    assert book.bytes(torch.float16) == 2 * (2_702_599_680 + importance)
    back = ledger(after, before)
    assert back.parameters == {"copied": 2_702_599_680, "new": 0, "dropped": importance}


def test_ledger_counts_an_untied_head():
    model = make_hybrid([], tie_word_embeddings=False)
    book = ledger(model.config, model.config)
    assert book.after["lm_head"] == book.after["embeddings"] == 64 * 32
    assert sum(book.after.values()) == sum(p.numel() for p in model.parameters())
