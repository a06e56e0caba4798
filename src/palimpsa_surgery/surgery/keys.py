"""The table of parameters: name, shape and kind of every tensor that a config implies.

It is the only place that knows the shapes. Loading checks checkpoints against it, and the ledger counts
with it, without a model being built.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

from palimpsa_surgery.hf_models import PalimpsaMamba2Config

Kind = Literal["embeddings", "in_proj", "conv1d", "dt_bias/A_log/D", "norms", "out_proj", "importance", "lm_head"]
"""Kinds of parameters, in the order in which tables list them."""

EMBEDDINGS = "backbone.embeddings.weight"
LM_HEAD = "lm_head.weight"


@dataclass(frozen=True)
class KeyRule:
    """What becomes of one tensor of a checkpoint.

    Attributes:
        key: its name in our models, which is transformers' Mamba2 name and that of the authors' code.
        shape: its shape.
        kind: the kind of parameter it is.
        native: its name in `mamba_ssm` checkpoints; checkpoints of any format may use either name.
        use: "copied"; "tied": may be absent, and must equal the embeddings if present; "dropped": expected
            in the checkpoint, but read by nothing in the model.
    """

    key: str
    shape: tuple[int, ...]
    kind: Kind
    native: str
    use: Literal["copied", "tied", "dropped"] = "copied"

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)


def key_table(config: PalimpsaMamba2Config, *, unused_importance: bool = False) -> list[KeyRule]:
    """List the tensors of a model with this config, in the model's order.

    Args:
        config: the model's config.
        unused_importance: also list, as dropped, importance parameters of layers that are not Palimpsa
            layers: the authors' checkpoints hold them even when `metaplasticity` is false.
    """

    def rule(key: str, shape: tuple[int, ...], kind: Kind, **changes: str) -> KeyRule:
        return KeyRule(key, shape, kind, **{"native": key, **changes})

    hidden, vocab = config.hidden_size, config.vocab_size
    table = [rule(EMBEDDINGS, (vocab, hidden), "embeddings", native="backbone.embedding.weight")]
    for layer in range(config.num_hidden_layers):
        prefix = f"backbone.layers.{layer}."
        table.append(rule(f"{prefix}norm.weight", (hidden,), "norms"))
        for name, shape, kind in _mixer(config):
            table.append(rule(f"{prefix}mixer.{name}", shape, kind))
        if unused_importance or layer in config.palimpsa_layers:
            use = "copied" if layer in config.palimpsa_layers else "dropped"
            for name, shape in _importance(config):
                table.append(rule(f"{prefix}mixer.{name}", shape, "importance", use=use))
    table.append(rule("backbone.norm_f.weight", (hidden,), "norms"))
    table.append(rule(LM_HEAD, (vocab, hidden), "lm_head", use="tied" if config.tie_word_embeddings else "copied"))
    return table


def parameter_count(config: PalimpsaMamba2Config) -> int:
    """Number of parameters of a model with this config; tied embeddings count once."""
    return sum(rule.size for rule in key_table(config) if rule.use == "copied")


def _mixer(config: PalimpsaMamba2Config) -> Iterator[tuple[str, tuple[int, ...], Kind]]:
    """Name, shape and kind of the parameters that Mamba2's mixer has."""
    hidden, heads = config.hidden_size, config.num_heads
    inner = heads * config.head_dim
    conv = inner + 2 * config.n_groups * config.state_size  # channels of x, B and C
    yield "dt_bias", (heads,), "dt_bias/A_log/D"
    yield "A_log", (heads,), "dt_bias/A_log/D"
    yield "D", (heads,), "dt_bias/A_log/D"
    yield "conv1d.weight", (conv, 1, config.conv_kernel), "conv1d"
    if config.use_conv_bias:
        yield "conv1d.bias", (conv,), "conv1d"
    yield "in_proj.weight", (inner + conv + heads, hidden), "in_proj"  # gate, then x, B, C, then dt
    if config.use_bias:
        yield "in_proj.bias", (inner + conv + heads,), "in_proj"
    yield "norm.weight", (inner,), "norms"
    yield "out_proj.weight", (hidden, inner), "out_proj"
    if config.use_bias:
        yield "out_proj.bias", (hidden,), "out_proj"


def _importance(config: PalimpsaMamba2Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of the parameters that a Palimpsa layer adds (DESIGN section 3)."""
    yield "b_scale", (config.num_heads,)
    yield "Ip_log", (config.num_heads,)
    yield "b_rank_proj.weight", (config.importance_rank, config.hidden_size)
    yield "b_proj.weight", (config.num_heads * config.head_dim, config.importance_rank)
