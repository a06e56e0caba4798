"""Config of native checkpoints, the `config.json` that `mamba_ssm` writes (DESIGN section 6).

Every key that `mamba_ssm` knows stands in one of the two tables below, with mamba_ssm's own default, so
that nothing is left to a default of transformers (which differ: 8 groups, untied embeddings). A key is
mapped, accepted and listed because the meaning of the weights does not depend on it, or restricted to the
values that a Mamba2 model of transformers can express. Keys in neither table are refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, inf
from typing import Any

from palimpsa_surgery.errors import UserError

NEEDED = object()  # the default of a key that has none


@dataclass(frozen=True)
class Setting:
    """What one key of a native config may be and becomes.

    Attributes:
        default: mamba_ssm's value where the key is absent.
        field: the field of our config that takes the value.
        type: what the value must be: "size" (an integer ≥ 1), "bool", "rate" (a number ≥ 0), "limits" (two
            numbers 0 ≤ low ≤ high), or "any".
        only: the only values that are supported.
        note: why the key may have any value; listed when it is present.
        refusal: what the other values would mean.
    """

    default: Any = NEEDED
    field: str | None = None
    type: str = "any"
    only: tuple = ()
    note: str = ""
    refusal: str = ""


INITIAL = "only concerns the initialisation of new models"
RUNTIME = "chooses how mamba_ssm computes, not what"

TOP_LEVEL: dict[str, Setting] = {
    "d_model": Setting(field="hidden_size", type="size"),
    "n_layer": Setting(field="num_hidden_layers", type="size"),
    "vocab_size": Setting(type="size"),
    "pad_vocab_size_multiple": Setting(8, type="size"),
    "tie_embeddings": Setting(True, field="tie_word_embeddings", type="bool"),
    "residual_in_fp32": Setting(True, field="residual_in_fp32", type="bool"),
    "rms_norm": Setting(True, only=(True,), refusal="LayerNorm blocks are not supported"),
    "d_intermediate": Setting(0, only=(0,), refusal="MLP blocks are not supported"),
    "attn_layer_idx": Setting([], only=([], None), refusal="attention layers are not supported"),
    "attn_cfg": Setting({}, note="only concerns attention layers, of which there are none"),
    "fused_add_norm": Setting(True, type="bool", note=RUNTIME),
    "ssm_cfg": Setting({}),
}

SSM_CFG: dict[str, Setting] = {
    "layer": Setting("Mamba1", only=("Mamba2",), refusal="only Mamba2 layers are supported"),
    "d_state": Setting(128, field="state_size", type="size"),
    "d_conv": Setting(4, field="conv_kernel", type="size"),
    "expand": Setting(2, field="expand", type="size"),
    "headdim": Setting(64, field="head_dim", type="size"),
    "ngroups": Setting(1, field="n_groups", type="size"),
    "chunk_size": Setting(256, field="chunk_size", type="size"),
    "bias": Setting(False, field="use_bias", type="bool"),
    "conv_bias": Setting(True, field="use_conv_bias", type="bool"),
    "dt_limit": Setting((0.0, inf), field="time_step_limit", type="limits"),
    "d_ssm": Setting(None),
    "D_has_hdim": Setting(False, only=(False,), refusal="a D for each channel is not supported"),
    "rmsnorm": Setting(True, only=(True,), refusal="mixers without their gated norm are not supported"),
    "norm_before_gate": Setting(False, only=(False,), refusal="a norm before the gate is not supported"),
    "dt_min": Setting(0.001, field="time_step_min", type="rate", note=INITIAL),
    "dt_max": Setting(0.1, field="time_step_max", type="rate", note=INITIAL),
    "dt_init_floor": Setting(1e-4, field="time_step_floor", type="rate", note=INITIAL),
    "A_init_range": Setting((1, 16), type="limits", note=INITIAL),
    "conv_init": Setting(None, note=INITIAL),
    "use_mem_eff_path": Setting(True, type="bool", note=RUNTIME),
    "process_group": Setting(None, note=RUNTIME),
    "sequence_parallel": Setting(True, type="bool", note=RUNTIME),
}

FIXED: dict[str, Any] = {
    "layer_norm_epsilon": 1e-5,  # of every norm in mamba_ssm's models
    "hidden_act": "silu",  # after the convolution and in the gate
    "initializer_range": 0.02,  # mamba_ssm's, for embeddings
    "time_step_rank": "auto",  # Mamba2 reads it nowhere
    "use_cache": True,
}
"""Fields that no key of a native config sets, because mamba_ssm leaves no choice."""


def map_native_config(native: Mapping[str, Any], where: str) -> tuple[dict[str, Any], list[str]]:
    """Translate a native config.

    Args:
        native: the content of `config.json`.
        where: what to call the checkpoint in errors.

    Returns:
        The fields of a PalimpsaMamba2Config without Palimpsa layers, token ids left out, and one note for
        each setting that was accepted without being mapped to something that the model computes.

    Raises:
        UserError: a key is unknown, missing, or has a value that is not supported, or sizes do not fit.
    """
    top, fields, notes = _apply(TOP_LEVEL, native, "", where)
    ssm_cfg = {} if top["ssm_cfg"] is None else top["ssm_cfg"]
    if not isinstance(ssm_cfg, Mapping):
        raise UserError(f"{where}: ssm_cfg must be an object, got {ssm_cfg!r}")
    ssm, ssm_fields, ssm_notes = _apply(SSM_CFG, ssm_cfg, "ssm_cfg.", where)

    inner = top["d_model"] * ssm["expand"]
    if ssm["d_ssm"] not in (None, inner):
        raise UserError(
            f"{where}: ssm_cfg.d_ssm is {ssm['d_ssm']} but d_model * expand is {inner}; "
            "a gated MLP inside the mixer is not supported"
        )
    if inner % ssm["headdim"]:
        raise UserError(
            f"{where}: d_model * ssm_cfg.expand = {inner} is not a multiple of ssm_cfg.headdim = {ssm['headdim']}"
        )
    heads = inner // ssm["headdim"]
    if heads % ssm["ngroups"]:
        raise UserError(
            f"{where}: d_model * ssm_cfg.expand / ssm_cfg.headdim = {heads} heads "
            f"is not a multiple of ssm_cfg.ngroups = {ssm['ngroups']}"
        )
    multiple = top["pad_vocab_size_multiple"]
    rows = ceil(top["vocab_size"] / multiple) * multiple
    return {
        **FIXED,
        **fields,
        **ssm_fields,
        "num_heads": heads,
        "vocab_size": rows,
        "palimpsa_layers": [],
    }, notes + ssm_notes


def _apply(
    table: Mapping[str, Setting], given: Mapping[str, Any], prefix: str, where: str
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Check `given` against `table`; return all values, our fields, and notes."""
    if unknown := [prefix + key for key in given if key not in table]:
        raise UserError(f"{where}: unknown setting {', '.join(unknown)}, which may change what the weights mean")
    values, fields, notes = {}, {}, []
    for key, setting in table.items():
        value = given.get(key, setting.default)
        if value is NEEDED:
            raise UserError(f"{where}: {prefix}{key} is missing")
        if key in given or setting.only:
            _check(setting, value, f"{where}: {prefix}{key}" + ("" if key in given else " (absent)"))
        values[key] = value
        if setting.field:
            convert = {"limits": lambda v: tuple(map(float, v)), "rate": float}.get(setting.type, lambda v: v)
            fields[setting.field] = convert(value)
        if setting.note and key in given and (prefix or value != setting.default):  # every config has the top level
            notes.append(f"{prefix}{key} = {value!r} {setting.note}")
    return values, fields, notes


def _check(setting: Setting, value: Any, what: str) -> None:
    """Raise UserError unless `value` is one that `setting` allows."""
    if setting.only and not any(value == one and type(value) is type(one) for one in setting.only):
        raise UserError(f"{what} is {value!r}: {setting.refusal}")
    if setting.type == "size" and not (type(value) is int and value >= 1):
        raise UserError(f"{what} must be a whole number above 0, got {value!r}")
    if setting.type == "bool" and not isinstance(value, bool):
        raise UserError(f"{what} must be true or false, got {value!r}")
    if setting.type == "rate" and not (_is_number(value) and value >= 0):
        raise UserError(f"{what} must be a number of at least 0, got {value!r}")
    if setting.type == "limits" and not (
        isinstance(value, list | tuple)
        and len(value) == 2
        and all(map(_is_number, value))
        and 0 <= value[0] <= value[1]
    ):
        raise UserError(f"{what} must be two numbers, 0 <= low <= high, got {value!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
