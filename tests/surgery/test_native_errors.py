"""Checkpoints that cannot be taken are refused in one line that names what is wrong."""

import contextlib
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from palimpsa_surgery.errors import UserError
from palimpsa_surgery.surgery.checkpoints import load_model, load_tokenizer, open_source
from surgery.native_writer import ABSENT, native_config, native_weights, write_meta, write_native, write_weights


def refusal(action: Callable[..., object], *arguments: object) -> str:
    """The message of the UserError that `action` raises, having checked that it is one line."""
    with pytest.raises(UserError) as caught:
        action(*arguments)
    message = str(caught.value)
    assert message
    assert "\n" not in message
    assert len(message) < 700, message
    return message


def change_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ABSENT}))


# Configs


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("ssm_cfg.layer", ABSENT, "'Mamba1': only Mamba2"),
        ("ssm_cfg.layer", "Mamba1", "'Mamba1': only Mamba2"),
        ("attn_layer_idx", [1], "[1]: attention layers"),
        ("d_intermediate", 128, "128: MLP blocks"),
        ("rms_norm", False, "False: LayerNorm"),
        ("ssm_cfg.rmsnorm", False, "False: mixers without their gated norm"),
        ("ssm_cfg.norm_before_gate", True, "True: a norm before the gate"),
        ("ssm_cfg.D_has_hdim", True, "True: a D for each channel"),
        ("ssm_cfg.d_ssm", 32, "is 32 but d_model * expand is 64"),
        ("ssm_cfg.headdim", 24, "d_model * ssm_cfg.expand = 64 is not a multiple of ssm_cfg.headdim = 24"),
        ("ssm_cfg.ngroups", 3, "4 heads is not a multiple of ssm_cfg.ngroups = 3"),
        ("ssm_cfg.colour", "blue", "unknown setting ssm_cfg.colour"),
        ("colour", "blue", "unknown setting colour"),
        ("d_model", ABSENT, "is missing"),
        ("n_layer", ABSENT, "is missing"),
        ("vocab_size", ABSENT, "is missing"),
        ("d_model", "32", "must be a whole number above 0, got '32'"),
        ("n_layer", True, "must be a whole number above 0, got True"),
        ("n_layer", 0, "must be a whole number above 0, got 0"),
        ("ssm_cfg.d_state", 16.0, "must be a whole number above 0, got 16.0"),
        ("ssm_cfg.expand", 1.5, "must be a whole number above 0, got 1.5"),
        ("ssm_cfg.d_conv", -1, "must be a whole number above 0, got -1"),
        ("pad_vocab_size_multiple", 0, "must be a whole number above 0, got 0"),
        ("tie_embeddings", "yes", "must be true or false, got 'yes'"),
        ("ssm_cfg.bias", 1, "must be true or false, got 1"),
        ("ssm_cfg.dt_limit", [0.5, 0.1], "must be two numbers, 0 <= low <= high, got [0.5, 0.1]"),
        ("ssm_cfg.dt_limit", 0.1, "must be two numbers"),
        ("ssm_cfg.dt_min", "small", "must be a number of at least 0, got 'small'"),
        ("ssm_cfg", ["Mamba2"], "must be an object, got ['Mamba2']"),
        ("ssm_cfg", None, "'Mamba1': only Mamba2"),
        ("quantization_config", {"bits": 4}, "quantized checkpoints are not supported"),
    ],
    ids=lambda value: "ABSENT" if value is ABSENT else None,
)
def test_native_config(tmp_path: Path, name: str, value: object, expected: str):
    config = native_config({name: value})
    (tmp_path / "config.json").write_text(json.dumps(config))
    message = refusal(open_source, tmp_path)
    assert name in message
    assert expected in message
    assert str(tmp_path) in message


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"model_type": "llama"}', "'llama' is not supported"),
        ('{"model_type": "mamba"}', "'mamba' is not supported"),
        ('{"hidden_size": 64}', "neither model_type nor d_model"),
        ('{"d_model": 64,', "not valid JSON"),
        ("[1, 2]", "a JSON list, not an object"),
        ('{"model_type": "palimpsa_mamba2"}', "palimpsa_layers is missing"),
        ('{"model_type": "palimpsa_mamba2", "palimpsa_layers": [99]}', "palimpsa_layers"),
        ('{"model_type": "mamba2", "num_heads": 3}', "(8192) must equal num_heads * head_dim (192)"),
        ('{"model_type": "mamba2", "n_groups": 3}', "n_groups (3)"),
        ('{"model_type": "mamba2", "n_groups": 0}', "n_groups must be a whole number above 0, got 0"),
        ('{"model_type": "mamba2", "hidden_size": "big"}', "hidden_size must be a whole number above 0, got 'big'"),
        ('{"model_type": "mamba2", "hidden_act": "gelu"}', "hidden_act 'gelu' is not supported"),
        ('{"model_type": "meta_mamba2", "wings": 2}', "unknown setting wings"),
        ('{"model_type": "meta_mamba2", "metaplasticity": "no"}', "metaplasticity must be true or false, got 'no'"),
        ('{"model_type": "meta_mamba2", "hidden_size": 0}', "hidden_size must be a whole number above 0, got 0"),
    ],
)
def test_other_config(tmp_path: Path, content: str, expected: str):
    (tmp_path / "config.json").write_text(content)
    assert expected in refusal(open_source, tmp_path)


def test_config_that_is_not_text(tmp_path: Path):
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    assert "not valid JSON" in refusal(open_source, tmp_path)


# Folders


def test_no_such_folder(tmp_path: Path):
    assert "no such folder" in refusal(open_source, tmp_path / "absent")
    assert "no such folder" in refusal(open_source, "./absent")
    assert "a/b/c: no such folder" in refusal(open_source, "a/b/c")
    assert "no such folder" in refusal(open_source, "someone/absent")  # offline, as all tests are


def test_a_file_or_an_empty_folder(tmp_path: Path):
    (tmp_path / "weights.bin").write_bytes(b"")
    assert "is a file" in refusal(open_source, tmp_path / "weights.bin")
    assert "has no config.json" in refusal(open_source, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(native_config()))
    message = refusal(open_source, tmp_path)
    assert "holds no weights" in message
    assert "pytorch_model.bin" in message


# Keys and shapes


def test_missing_unexpected_and_misshaped_keys(tmp_path: Path):
    weights = write_native(tmp_path)
    del weights["backbone.layers.1.mixer.A_log"]
    weights["backbone.layers.0.mixer.A_logs"] = torch.zeros(4)
    weights["backbone.layers.0.mixer.D"] = torch.zeros(5)
    write_weights(tmp_path, weights)
    message = refusal(open_source, tmp_path)
    assert "missing: backbone.layers.1.mixer.A_log;" in message
    assert "unexpected: backbone.layers.0.mixer.A_logs;" in message
    assert "wrong shape: backbone.layers.0.mixer.D is [5], not [4]" in message


def test_long_lists_of_keys_are_cut(tmp_path: Path):
    write_native(tmp_path, {"n_layer": 1})
    change_config(tmp_path, n_layer=5)
    message = refusal(open_source, tmp_path)
    assert "missing: backbone.layers.1.norm.weight, " in message
    assert "and 32 more" in message


def test_parameter_counts_are_compared(tmp_path: Path):
    weights = write_native(tmp_path, {"n_layer": 1})
    change_config(tmp_path, n_layer=2)
    held = sum(value.numel() for key, value in weights.items() if key != "lm_head.weight")
    implied = held + sum(value.numel() for key, value in weights.items() if ".layers.0." in key)
    message = refusal(open_source, tmp_path)
    assert f"the config implies {implied:,} parameters, pytorch_model.bin holds {held:,}" in message


def test_native_weights_under_a_transformers_config(tmp_path: Path):
    write_native(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "mamba2"}')
    assert "wrong shape: backbone.embedding.weight is [64, 32], not [32768, 4096]" in refusal(open_source, tmp_path)


def test_both_names_of_the_embedding(tmp_path: Path):
    weights = write_native(tmp_path)
    weights["backbone.embeddings.weight"] = weights["backbone.embedding.weight"].clone()
    write_weights(tmp_path, weights)
    assert "unexpected: backbone.embedding.weight" in refusal(open_source, tmp_path)


def test_importance_parameters_in_a_layer_that_is_not_listed(tmp_path: Path):
    write_meta(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for unwanted in ("norm_eps", "beta_step_rank"):
        del config[unwanted]
    config |= {"model_type": "palimpsa_mamba2", "palimpsa_layers": [1], "num_heads": 4, "importance_rank": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "unexpected: backbone.layers.0.mixer." in refusal(open_source, tmp_path)


def test_an_untied_head_must_be_there(tmp_path: Path):
    weights = write_native(tmp_path)
    del weights["lm_head.weight"]
    write_weights(tmp_path, weights)
    assert open_source(tmp_path).config.tie_word_embeddings
    change_config(tmp_path, tie_embeddings=False)
    assert "missing: lm_head.weight" in refusal(open_source, tmp_path)


def test_a_tied_head_must_equal_the_embeddings(tmp_path: Path):
    weights = write_native(tmp_path)
    weights["lm_head.weight"] = weights["backbone.embedding.weight"].clone()
    write_weights(tmp_path, weights)
    load_model(tmp_path)
    weights["lm_head.weight"][5, 7] += 1e-6
    write_weights(tmp_path, weights)
    assert "lm_head.weight differs from backbone.embeddings.weight" in refusal(load_model, tmp_path)


# Values and files


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("form", ["bin", "safetensors"])
def test_values_that_are_not_finite(tmp_path: Path, form: str, value: float):
    weights = write_native(tmp_path, form=form)
    weights["backbone.layers.1.mixer.in_proj.weight"][3, 4] = value
    write_weights(tmp_path, weights, form)
    message = refusal(load_model, tmp_path)
    assert "backbone.layers.1.mixer.in_proj.weight" in message
    assert "holds NaN or infinity in 1 of" in message


def test_values_that_the_wanted_type_cannot_hold(tmp_path: Path):
    weights = write_native(tmp_path)
    weights["backbone.norm_f.weight"][0] = 1e5
    write_weights(tmp_path, weights)
    load_model(tmp_path)
    message = refusal(lambda: load_model(tmp_path, dtype=torch.float16))
    assert "backbone.norm_f.weight" in message
    assert "does not fit torch.float16" in message


@pytest.mark.parametrize("keep", [0, 3, 1000, -100], ids=lambda n: f"keep{n}")
@pytest.mark.parametrize("form", ["bin", "safetensors"])
def test_truncated_file(tmp_path: Path, form: str, keep: int):
    write_native(tmp_path, form=form)
    file = next(file for file in tmp_path.iterdir() if file.name != "config.json")
    file.write_bytes(file.read_bytes()[:keep])
    message = refusal(open_source, tmp_path)
    assert file.name in message
    assert "damaged" in message


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_damaged_anywhere(tmp_path: Path, legacy: bool):
    """One byte out of place in the pickle or the archive's directory: an error in one line, or the same names."""
    write_native(tmp_path)
    file = tmp_path / "pytorch_model.bin"
    state = torch.load(file, weights_only=True)
    torch.save(state, file, _use_new_zipfile_serialization=not legacy)
    whole = file.read_bytes()
    positions = [*range(0, 2000, 37), *range(len(whole) - 4000, len(whole), 53)]
    for position in positions:
        file.write_bytes(whole[:position] + bytes([whole[position] ^ 0xFF]) + whole[position + 1 :])
        with contextlib.suppress(UserError):
            open_source(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
@pytest.mark.parametrize("content", [b"hello, world\n" * 20, b"PK\x03\x04" + b"\0" * 100], ids=["text", "zip-start"])
def test_not_a_weights_file(tmp_path: Path, name: str, content: bytes):
    (tmp_path / "config.json").write_text(json.dumps(native_config()))
    (tmp_path / name).write_bytes(content)
    message = refusal(open_source, tmp_path)
    assert name in message
    assert "damaged" in message


def test_git_lfs_pointer(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(native_config()))
    (tmp_path / "pytorch_model.bin").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    assert "is a Git LFS pointer" in refusal(open_source, tmp_path)


class Payload:
    """Creates a file when unpickled."""

    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self):
        return os.mkdir, (str(self.file),)


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_a_pickle_with_code_is_refused_and_not_run(tmp_path: Path, legacy: bool):
    weights = write_native(tmp_path)
    weights["backbone.norm_f.weight"] = Payload(tmp_path / "executed")
    torch.save(weights, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
    message = refusal(open_source, tmp_path)
    assert "pytorch_model.bin is refused: it is not plain tensors but asks for" in message
    assert "mkdir" in message
    assert not (tmp_path / "executed").exists()


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_bare_pickle_is_refused_and_not_run(tmp_path: Path):
    write_native(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({"a": Payload(tmp_path / "executed")}))
    assert "pytorch_model.bin is " in refusal(open_source, tmp_path)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ([torch.zeros(2)], "holds no dictionary of tensors but a value of type list"),
        ({"state_dict": {"a": torch.zeros(2)}}, "holds 'state_dict', which is not a tensor but of type dict"),
        ({"step": 3}, "holds 'step', which is not a tensor but of type int"),
        ({"a": torch.eye(3).to_sparse()}, "holds a as a torch.sparse_coo tensor"),
    ],
    ids=["list", "nested", "number", "sparse"],
)
def test_a_pickle_that_is_not_a_flat_dictionary(tmp_path: Path, content: object, expected: str):
    write_native(tmp_path)
    torch.save(content, tmp_path / "pytorch_model.bin")
    assert expected in refusal(open_source, tmp_path)


def test_a_legacy_file_of_plain_tensors_loads(tmp_path: Path):
    weights = write_native(tmp_path)
    torch.save(weights, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert torch.equal(load_model(tmp_path).backbone.norm_f.weight, weights["backbone.norm_f.weight"])


@pytest.mark.parametrize("form", ["bin", "safetensors"])
def test_integer_weights(tmp_path: Path, form: str):
    weights = native_weights(native_config({"tie_embeddings": False}))
    (tmp_path / "config.json").write_text(json.dumps(native_config({"tie_embeddings": False})))
    weights["backbone.layers.0.mixer.in_proj.weight"] = weights["backbone.layers.0.mixer.in_proj.weight"].to(torch.int8)
    write_weights(tmp_path, weights, form)
    message = refusal(open_source, tmp_path)
    assert "backbone.layers.0.mixer.in_proj.weight" in message
    assert "not as floating point numbers" in message


# Shards


@pytest.fixture(params=["bin", "safetensors"])
def shards(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    """A native checkpoint in three shards, and its index file."""
    write_native(tmp_path, form=f"sharded-{request.param}")
    return tmp_path, next(tmp_path.glob("*.index.json"))


def rewrite_index(index: Path, change: Callable[[dict[str, str]], object]) -> None:
    content = json.loads(index.read_text())
    change(content["weight_map"])
    index.write_text(json.dumps(content))


def test_missing_shard(shards: tuple[Path, Path]):
    folder, index = shards
    shard = next(folder.glob("*-00002-of-00003*"))
    shard.unlink()
    message = refusal(open_source, folder)
    assert f"{index.name} names {shard.name}, which is missing" in message


def test_index_places_a_key_where_it_is_not(shards: tuple[Path, Path]):
    folder, index = shards
    names = sorted(json.loads(index.read_text())["weight_map"].values())
    rewrite_index(index, lambda weight_map: weight_map.update({"backbone.norm_f.weight": names[0]}))
    message = refusal(open_source, folder)
    assert "backbone.norm_f.weight" in message
    assert "does not" in message


def test_index_omits_a_key(shards: tuple[Path, Path]):
    folder, index = shards
    rewrite_index(index, lambda weight_map: weight_map.pop("backbone.norm_f.weight"))
    message = refusal(open_source, folder)
    assert "holds backbone.norm_f.weight, which" in message


@pytest.mark.parametrize("name", ["../outside.bin", "/etc/passwd", 3], ids=str)
def test_index_points_out_of_the_folder(shards: tuple[Path, Path], name: object):
    folder, index = shards
    rewrite_index(index, lambda weight_map: weight_map.update({"backbone.norm_f.weight": name}))
    assert f"names {name!r}, which is not a file beside it" in refusal(open_source, folder)


def test_index_without_a_map(shards: tuple[Path, Path]):
    folder, index = shards
    index.write_text("{}")
    assert "has no weight_map" in refusal(open_source, folder)
    index.write_text("{")
    assert "not valid JSON" in refusal(open_source, folder)


def test_truncated_shard(shards: tuple[Path, Path]):
    folder, _ = shards
    shard = next(folder.glob("*-00003-of-00003*"))
    shard.write_bytes(shard.read_bytes()[:-50])
    assert f"{shard.name} is damaged" in refusal(open_source, folder)


# Tokenizers


def test_tokenizer_ids_beyond_the_embedding(tmp_path: Path, tiny_checkpoint: Path):
    write_native(tmp_path, {"vocab_size": 4090, "pad_vocab_size_multiple": 1})
    message = refusal(load_tokenizer, tmp_path, tiny_checkpoint)
    assert "has ids up to 4092, but the model's embedding has only 4090 rows" in message
    shutil.copy(tiny_checkpoint / "tokenizer.json", tmp_path)
    assert "has ids up to 4092" in refusal(load_tokenizer, tmp_path)
    assert any("has ids up to 4092" in note for note in open_source(tmp_path).notes)


def test_no_tokenizer(tmp_path: Path):
    write_native(tmp_path)
    message = refusal(load_tokenizer, tmp_path)
    assert "has no tokenizer" in message
    assert "--tokenizer" in message


def test_tokenizers_that_are_not(tmp_path: Path):
    write_native(tmp_path / "model")
    assert "no such file or folder" in refusal(load_tokenizer, tmp_path / "model", "./absent/tokenizer.json")
    assert "the folder holds none of" in refusal(load_tokenizer, tmp_path / "model", tmp_path / "model")
    for content in ("", "{}", "plain text"):
        (tmp_path / "tokenizer.json").write_text(content)
        assert "cannot be read" in refusal(load_tokenizer, tmp_path / "model", tmp_path / "tokenizer.json")
        assert "cannot be read" in refusal(load_tokenizer, tmp_path / "model", tmp_path)
    message = refusal(load_tokenizer, tmp_path / "model", "someone/absent")  # offline
    assert "someone/absent could not be fetched" in message
    assert "--tokenizer" in message


def test_a_tokenizer_with_code_is_not_run(tmp_path: Path):
    write_native(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}})
    )
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\nclass Evil: pass\n")
    assert "cannot be read" in refusal(load_tokenizer, tmp_path)
    assert not (tmp_path / "executed").exists()


def test_code_in_a_model_folder_is_not_run(tmp_path: Path):
    weights = write_native(tmp_path, form="safetensors")
    weights.pop("lm_head.weight")
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n")
    sizes = {"hidden_size": 32, "num_heads": 4, "head_dim": 16, "state_size": 16, "n_groups": 1, "vocab_size": 64}
    config = {"model_type": "mamba2", "num_hidden_layers": 2, "tie_word_embeddings": True, **sizes}
    config["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    load_model(tmp_path)
    assert not (tmp_path / "executed").exists()
