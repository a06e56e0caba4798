"""Configuration of a Mamba2 model some of whose layers are Palimpsa layers."""

import math

from huggingface_hub.dataclasses import strict
from transformers import Mamba2Config


@strict
class PalimpsaMamba2Config(Mamba2Config):
    r"""Mamba2's configuration and which layers are Palimpsa layers.

    Args:
        palimpsa_layers (`list[int]`, *optional*, defaults to `[]`):
            Indices of the Palimpsa layers, increasing. Without any the model is Mamba2.
        importance_rank (`int`, *optional*):
            Inner size of the low-rank projection that computes beta. Defaults to `ceil(hidden_size / 16)`.
        norm_group_size (`int`, *optional*):
            Channels that the gated RMSNorm normalises together. Defaults to `intermediate_size / n_groups`, as
            in `mamba_ssm` and transformers; the authors' `meta_mamba2` models have one group of all channels.

    All other arguments are those of [`Mamba2Config`].

    Raises:
        StrictDataclassError: a field of the wrong type, or sizes that contradict each other, with both sides of
            the relation.
    """

    model_type = "palimpsa_mamba2"

    palimpsa_layers: list[int] | None = None
    importance_rank: int | None = None
    norm_group_size: int | None = None

    def __post_init__(self, **kwargs):
        self.palimpsa_layers = [] if self.palimpsa_layers is None else list(self.palimpsa_layers)
        if self.importance_rank is None:
            self.importance_rank = math.ceil(self.hidden_size / 16)
        if self.norm_group_size is None:
            self.norm_group_size = self.intermediate_size // self.n_groups
        super().__post_init__(**kwargs)

    @property
    def intermediate_size(self) -> int:
        """Channels inside the mixer, `num_heads * head_dim`."""
        return int(self.expand * self.hidden_size)

    def validate_architecture(self):
        """Check the relations between sizes."""
        super().validate_architecture()
        if self.num_heads % self.n_groups != 0:
            raise ValueError(f"num_heads ({self.num_heads}) must be a multiple of n_groups ({self.n_groups})")
        if self.norm_group_size < 1 or self.intermediate_size % self.norm_group_size != 0:
            raise ValueError(
                f"norm_group_size ({self.norm_group_size}) must divide expand * hidden_size ({self.intermediate_size})"
            )
        if self.importance_rank < 1:
            raise ValueError(f"importance_rank must be at least 1, got {self.importance_rank}")
        if not 0 < self.layer_norm_epsilon < 1:
            raise ValueError(f"layer_norm_epsilon must lie within 0 and 1, got {self.layer_norm_epsilon}")
        limits = self.time_step_limit
        if len(limits) != 2 or not 0 <= limits[0] <= limits[1]:
            raise ValueError(f"time_step_limit must be two numbers, 0 <= low <= high, got {limits}")
        if self.hidden_act not in ("silu", "swish"):
            raise ValueError(f"hidden_act must be silu, Mamba2's own, got {self.hidden_act!r}")
        layers = self.palimpsa_layers
        if layers != sorted(set(layers)) or (layers and not 0 <= layers[0] <= layers[-1] < self.num_hidden_layers):
            raise ValueError(
                f"palimpsa_layers must increase within 0 to num_hidden_layers - 1 ({self.num_hidden_layers - 1}), "
                f"got {layers}"
            )


__all__ = ["PalimpsaMamba2Config"]
