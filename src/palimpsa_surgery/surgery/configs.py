"""From the `config.json` of any supported checkpoint to our config."""

from math import ceil, inf
from pathlib import Path
from typing import Any, Literal

from huggingface_hub.errors import StrictDataclassError
from transformers import Mamba2Config

from palimpsa_surgery.errors import UserError
from palimpsa_surgery.hf_models import PalimpsaMamba2Config
from palimpsa_surgery.surgery.native import map_native_config
from palimpsa_surgery.surgery.weights import listed, one_line, read_json

SourceKind = Literal["native", "mamba2", "palimpsa_mamba2", "meta_mamba2"]

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")

# Fields of transformers' Mamba2Config itself, without those that every config of transformers has.
MAMBA2_FIELDS = frozenset(Mamba2Config.__annotations__) - {*TOKEN_IDS, "model_type"}
PALIMPSA_FIELDS = MAMBA2_FIELDS | {"palimpsa_layers", "importance_rank", "norm_group_size"}

SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "vocab_size",
    "num_heads",
    "head_dim",
    "expand",
    "state_size",
    "n_groups",
    "conv_kernel",
    "chunk_size",
)

# The authors' config (github.com/djo1996/Palimpsa, palimpsa/models/meta_mamba2): its own defaults, since
# transformers writes only what differs from the class's defaults.
META_DEFAULTS: dict[str, Any] = {
    "head_dim": 64,
    "vocab_size": 32000,
    "hidden_size": 2048,
    "state_size": 128,
    "num_hidden_layers": 48,
    "expand": 2,
    "conv_kernel": 4,
    "n_groups": 1,
    "use_bias": False,
    "use_conv_bias": True,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "residual_in_fp32": True,
    "time_step_min": 0.001,
    "time_step_max": 0.1,
    "time_step_floor": 1e-4,
    "time_step_limit": (0.0, inf),
    "use_cache": True,
    "chunk_size": 256,
    "tie_word_embeddings": False,
}
META_RENAMED = {"norm_eps": ("layer_norm_epsilon", 1e-5), "beta_step_rank": ("importance_rank", "auto")}
META_UNUSED = frozenset(
    {
        "attn_mode",
        "eval_diagnosis",
        "finetuning",
        "fuse_cross_entropy",
        "fuse_linear_cross_entropy",
        "fuse_norm",
        "init_diagnosis",
        "mode",
        "num_heads",
        "rescale_prenorm_residual",
        "rms_norm",
        "time_step_rank",
        "use_l2warp",
    }
)

# Keys of any transformers config that say nothing about what a causal language model computes.
BOOKKEEPING = frozenset(Mamba2Config().to_dict()) - MAMBA2_FIELDS - set(TOKEN_IDS) | {
    "auto_map",
    "torch_dtype",
    "_name_or_path",
    "name_or_path",
    "max_position_embeddings",
}


MAX_LAYERS = 1024
"""Sixteen times those of the largest Mamba2: laying out many more takes for ever, and only a damaged file has them."""


def read_config(folder: Path, name: str) -> tuple[SourceKind, PalimpsaMamba2Config, list[str]]:
    """Read `folder/config.json`.

    Args:
        folder: a checkpoint folder.
        name: what to call it in errors.

    Returns:
        The format, our config, and notes on settings that were accepted although nothing reads them. Token
        ids are those that the file states, else None.

    Raises:
        UserError: there is no config, or it describes something that is not supported.
    """
    if not (folder / "config.json").is_file():
        raise UserError(f"{name} has no config.json, so it is not a checkpoint folder")
    stored = read_json(folder / "config.json")
    where = f"config.json of {name}"
    model_type = stored.get("model_type")
    if "quantization_config" in stored:
        raise UserError(f"{where}: quantization_config is set; quantized checkpoints are not supported")
    if model_type is None and ("d_model" in stored or "ssm_cfg" in stored):
        mapped, notes = map_native_config(stored, where)
        return "native", _build(where, mapped, {}), notes
    if model_type == "mamba2":
        return model_type, *_hugging_face(stored, MAMBA2_FIELDS, where, palimpsa_layers=[])
    if model_type == "palimpsa_mamba2":
        if "palimpsa_layers" not in stored:
            raise UserError(f"{where}: palimpsa_layers is missing, so it does not say which layers were replaced")
        return model_type, *_hugging_face(stored, PALIMPSA_FIELDS, where)
    if model_type in ("meta_mamba2", "metamamba2"):
        return "meta_mamba2", *_meta(stored, where)
    if model_type is None:
        raise UserError(f"{where} has neither model_type nor d_model: neither a transformers nor a native config")
    raise UserError(
        f"{where}: model_type {model_type!r} is not supported, only native Mamba2 configs (which have none), "
        "mamba2, palimpsa_mamba2 and meta_mamba2"
    )


def _hugging_face(
    stored: dict[str, Any], known: frozenset[str], where: str, **more: Any
) -> tuple[PalimpsaMamba2Config, list[str]]:
    """Config of transformers' Mamba2 or of ours; absent fields have their class's defaults."""
    unread = [key for key in stored if key not in known | BOOKKEEPING | set(TOKEN_IDS)]
    notes = [f"{listed(unread, 20)}: read by nothing in transformers' Mamba2"] if unread else []
    return _build(where, {key: stored[key] for key in stored if key in known} | more, stored), notes


def _meta(stored: dict[str, Any], where: str) -> tuple[PalimpsaMamba2Config, list[str]]:
    """Config of the authors' models, in which all layers are Palimpsa layers, or none."""
    known = {*META_DEFAULTS, *META_RENAMED, *META_UNUSED, *BOOKKEEPING, *TOKEN_IDS, "metaplasticity"}
    if unknown := [key for key in stored if key not in known]:
        raise UserError(f"{where}: unknown setting {', '.join(unknown)}, which may change what the weights mean")
    notes = []
    if unused := [key for key in stored if key in META_UNUSED]:
        notes.append(f"{listed(unused, 20)}: do not change what the weights mean")
    mapped = {key: stored.get(key, default) for key, default in META_DEFAULTS.items()}
    mapped |= {ours: stored.get(key, default) for key, (ours, default) in META_RENAMED.items()}
    _check_sizes(mapped, where)
    inner = mapped["hidden_size"] * mapped["expand"]
    mapped["num_heads"] = inner // mapped["head_dim"]
    if mapped["importance_rank"] == "auto":
        mapped["importance_rank"] = ceil(mapped["hidden_size"] / 16)
    # Their gated norm spans all channels whatever n_groups is; transformers has one norm per group.
    mapped["norm_group_size"] = inner
    metaplastic = stored.get("metaplasticity", True)
    if not isinstance(metaplastic, bool):
        raise UserError(f"{where}: metaplasticity must be true or false, got {metaplastic!r}")
    if metaplastic:
        mapped["palimpsa_layers"] = list(range(mapped["num_hidden_layers"]))
        notes.append("b_scale is read through a softplus, as in the authors' current code; early versions did not")
    else:
        mapped["palimpsa_layers"] = []
        notes.append("metaplasticity is false: the importance parameters in the weights are dropped")
    return _build(where, mapped, stored), notes


def _build(where: str, mapped: dict[str, Any], stored: dict[str, Any]) -> PalimpsaMamba2Config:
    """Make and validate our config: mapped fields, stated token ids and, if stated, the longest input."""
    _check_sizes(mapped, where)
    if (activation := mapped.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise UserError(f"{where}: hidden_act {activation!r} is not supported, only 'silu'")
    more = {key: stored.get(key) for key in TOKEN_IDS}
    if "max_position_embeddings" in stored:
        more["max_position_embeddings"] = stored["max_position_embeddings"]
    # A step of initialisation, and these weights are past it. transformers' Mamba2 (5.24) takes it again after
    # loading, and so changes out_proj of every checkpoint that has it set.
    more["rescale_prenorm_residual"] = False
    try:
        return PalimpsaMamba2Config(**(mapped | more))
    except (StrictDataclassError, ValueError, TypeError) as error:
        raise UserError(f"{where}: {one_line(error.__cause__ or error)}") from error


def _check_sizes(mapped: dict[str, Any], where: str) -> None:
    for name in SIZES:
        if name in mapped and (type(mapped[name]) is not int or mapped[name] < 1):
            raise UserError(f"{where}: {name} must be a whole number above 0, got {mapped[name]!r}")
    if mapped.get("num_hidden_layers", 0) > MAX_LAYERS:
        raise UserError(
            f"{where}: {mapped['num_hidden_layers']} layers are more than the {MAX_LAYERS} that are supported"
        )
