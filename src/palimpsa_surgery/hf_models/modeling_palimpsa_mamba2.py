"""Mamba2 with Palimpsa layers for transformers.

Parameter names, weights and numbers are Mamba2's. What differs from transformers' own Mamba2, for kept and new
layers alike: states are explicit inputs and outputs with gradients, packed documents stay apart on any device,
`time_step_limit` holds in decoding too, and the scan does not depend on optional packages.

Padding is handled once, in `PalimpsaMamba2Model`: the real tokens of each row are moved together to its left, and
padded positions get `dt = 0`, which neither writes to a state nor lets it decay.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.integrations.accelerate import force_accelerate_hooks
from transformers.masking_utils import create_recurrent_attention_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import PreTrainedModel
from transformers.models.mamba2.modeling_mamba2 import (
    Mamba2CausalLMOutput,
    Mamba2Mixer,
    Mamba2Output,
    Mamba2RMSNorm,
)

from ..kernels.conv import causal_conv1d
from ..kernels.cross_entropy import linear_cross_entropy
from ..kernels.norm import rms_norm
from ..kernels.scan import palimpsa_scan, palimpsa_step, seq_idx_from_cu_seqlens, ssd_scan, ssd_step
from .configuration_palimpsa_mamba2 import PalimpsaMamba2Config


class LayerState(NamedTuple):
    """What one layer carries from one token to the next; None stands for zeros.

    Attributes:
        conv_state: the last inputs of the convolution, `[batch, conv_dim, conv_kernel]`.
        recurrent_state: float32; M `[batch, num_heads, head_dim, state_size]` in a Mamba2 layer, M and Ibar
            `[batch, num_heads, 2, head_dim, state_size]` in a Palimpsa layer.
    """

    conv_state: Tensor | None = None
    recurrent_state: Tensor | None = None


@dataclass
class PalimpsaMamba2Output(Mamba2Output):
    """Mamba2's output and `final_states`, one `LayerState` for each layer, when they were asked for."""

    final_states: tuple[LayerState, ...] | None = None


@dataclass
class PalimpsaMamba2CausalLMOutput(Mamba2CausalLMOutput):
    """Mamba2's output and `final_states`, one `LayerState` for each layer, when they were asked for."""

    final_states: tuple[LayerState, ...] | None = None


class PalimpsaMamba2RMSNorm(Mamba2RMSNorm):
    """Mamba2's two norms, of a block's input and of a scan's result under its gate, as `kernels.norm` does them."""

    def __init__(self, hidden_size: int, eps: float, group_size: int | None = None):
        super().__init__(hidden_size, eps)
        self.group_size = group_size

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        """See `rms_norm`."""
        return rms_norm(hidden_states, self.weight, self.variance_epsilon, gate=gate, group_size=self.group_size)


class PalimpsaMamba2Mixer(Mamba2Mixer):
    """Mamba2's mixer with explicit states: the layers that surgery keeps."""

    def __init__(self, config: PalimpsaMamba2Config, layer_idx: int):
        super().__init__(config, layer_idx, initialize_mixer_weights=False)
        self.norm = PalimpsaMamba2RMSNorm(self.intermediate_size, config.layer_norm_epsilon, config.norm_group_size)
        # Called as observer(layer_idx, {"dt", "A", "x", "B", "C", "importance_gate"}) when set; changes nothing.
        self.observer: Callable[[int, dict[str, Tensor | None]], None] | None = None

    def decay_rate(self) -> Tensor:
        """A `[num_heads]`, > 0, float32: the forget gate is exp(-A dt)."""
        return torch.exp(self.A_log.float())

    def time_step(self, dt: Tensor) -> Tensor:
        """Step sizes after bias, softplus and limits, in float32: `[batch, time, num_heads]`."""
        dt = F.softplus(dt.float() + self.dt_bias.float())
        low, high = self.time_step_limit
        return dt if (low, high) == (0.0, math.inf) else dt.clamp(low, high)

    @force_accelerate_hooks("conv1d")
    def forward(
        self,
        hidden_states: Tensor,
        conv_state: Tensor | None = None,
        recurrent_state: Tensor | None = None,
        cache: Cache | None = None,
        lengths: Tensor | None = None,
        seq_idx: Tensor | None = None,
        return_final_state: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Mix along time.

        Args:
            hidden_states: `[batch, time, hidden_size]`.
            conv_state, recurrent_state: see `LayerState`; taken from `cache` when there is one.
            cache: read and updated; excludes explicit states.
            lengths: number of real tokens in each row, `[batch]`, which come first; None when all are real.
            seq_idx: document numbers `[batch, time]`.
            return_final_state: return the states after the last real token.

        Returns:
            `[batch, time, hidden_size]`, and the two final states (None unless asked for).
        """
        time = hidden_states.shape[1]
        if cache is not None:
            conv_state = cache.get_conv_state(self.layer_idx)
            recurrent_state = cache.get_recurrent_state(self.layer_idx)
        keep_state = return_final_state or cache is not None

        # 1. Project the input to gate, convolution channels and step sizes.
        gate, conv_input, dt = self.in_proj(hidden_states).split(
            [self.intermediate_size, self.conv_dim, self.num_heads], dim=-1
        )
        dt, A = self.time_step(dt), self.decay_rate()
        if lengths is not None:
            dt = dt.masked_fill(torch.arange(time, device=dt.device)[:, None] >= lengths[:, None, None], 0)

        # 2. Convolve along time, and split into values, keys and queries.
        x, B, C = causal_conv1d(conv_input, self.conv1d.weight.squeeze(1), self.conv1d.bias, conv_state, seq_idx).split(
            [self.intermediate_size, self.n_groups * self.ssm_state_size, self.n_groups * self.ssm_state_size], -1
        )
        x = x.unflatten(-1, (self.num_heads, self.head_dim))
        B, C = (v.unflatten(-1, (self.n_groups, self.ssm_state_size)) for v in (B, C))

        # 3. Scan, with the skip connection D x.
        in_place = cache is not None and recurrent_state is not None and time == 1 and not torch.is_grad_enabled()
        if in_place:
            y, final_state = self._step(hidden_states, x, dt, A, B, C, recurrent_state), recurrent_state
        else:
            y, final_state = self._scan(hidden_states, x, dt, A, B, C, recurrent_state, seq_idx, keep_state)

        # 4. Normalise under the gate and project back.
        out = self.out_proj(self.norm(y.flatten(2), gate).to(hidden_states.dtype))

        final_conv_state = self._conv_tail(conv_input, conv_state, lengths) if keep_state else None
        if cache is not None:
            cache.update_conv_state(final_conv_state, self.layer_idx)
            if not in_place:
                cache.update_recurrent_state(final_state, self.layer_idx)
        return out, final_conv_state, final_state

    def _conv_tail(self, conv_input: Tensor, conv_state: Tensor | None, lengths: Tensor | None) -> Tensor:
        """The last `conv_kernel` inputs of each row up to its last real token, `[batch, conv_dim, conv_kernel]`."""
        taps = self.conv_kernel_size
        if lengths is None:
            conv_input = conv_input[:, -taps:]  # a result that kept the whole sequence alive would undo checkpointing
        if conv_state is None:
            inputs = F.pad(conv_input, (0, 0, taps, 0))
        else:
            inputs = torch.cat((conv_state.to(conv_input.dtype).transpose(1, 2), conv_input), dim=1)
        if lengths is None:
            return inputs[:, -taps:].transpose(1, 2)
        positions = lengths[:, None, None] + torch.arange(taps, device=lengths.device)[:, None]
        return inputs.gather(1, positions.expand(-1, -1, inputs.shape[-1])).transpose(1, 2)

    def _observe(self, dt: Tensor, A: Tensor, x: Tensor, B: Tensor, C: Tensor, importance_gate: Tensor | None) -> None:
        if self.observer is not None:
            seen = {"dt": dt, "A": A, "x": x, "B": B, "C": C, "importance_gate": importance_gate}
            self.observer(self.layer_idx, seen)

    def _scan(
        self,
        hidden_states: Tensor,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        state: Tensor | None,
        seq_idx: Tensor | None,
        return_final_state: bool,
    ) -> tuple[Tensor, Tensor | None]:
        self._observe(dt, A, x, B, C, None)
        return ssd_scan(
            x,
            dt,
            A,
            B,
            C,
            D=self.D,
            initial_state=state,
            seq_idx=seq_idx,
            return_final_state=return_final_state,
            chunk_size=self.chunk_size,
        )

    def _step(
        self, hidden_states: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor
    ) -> Tensor:
        self._observe(dt, A, x, B, C, None)
        return ssd_step(x[:, 0], dt[:, 0], A, B[:, 0], C[:, 0], state, self.D)[:, None]


class PalimpsaMixer(PalimpsaMamba2Mixer):
    """Mamba2's mixer with an importance state: the layers that surgery puts in (paper Eq. 5, section 2.4).

    beta = sigmoid(b_proj(b_rank_proj(u))) softplus(b_scale) dt, where u is the mixer's input; as
    softplus(b_scale) goes to zero the layer becomes the Mamba2 layer it replaces.
    """

    def __init__(self, config: PalimpsaMamba2Config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.b_rank_proj = nn.Linear(self.hidden_size, config.importance_rank, bias=False)
        self.b_proj = nn.Linear(config.importance_rank, self.intermediate_size, bias=False)
        self.b_scale = nn.Parameter(torch.empty(self.num_heads))
        self.Ip_log = nn.Parameter(torch.empty(self.num_heads), requires_grad=False)

    @torch.no_grad()
    def init_mamba2_weights(self):
        """Initialise as for training from scratch (paper A.9: b_scale = 1, and the authors' projections)."""
        super().init_mamba2_weights()
        rank = self.b_proj.weight.shape[1]
        init.normal_(self.b_rank_proj.weight, mean=0.0, std=0.02)
        init.uniform_(self.b_proj.weight, -(rank**-0.5), rank**-0.5)
        init.ones_(self.b_scale)
        init.zeros_(self.Ip_log)

    def importance_gate(self, hidden_states: Tensor) -> Tensor:
        """sigmoid(b_proj(b_rank_proj(u))): `[batch, time, num_heads, head_dim]`, in (0, 1)."""
        gate = torch.sigmoid(self.b_proj(self.b_rank_proj(hidden_states)))
        return gate.unflatten(-1, (self.num_heads, self.head_dim))

    def importance(
        self, hidden_states: Tensor, dt: Tensor, A: Tensor, x: Tensor, B: Tensor, C: Tensor
    ) -> tuple[Tensor, Tensor]:
        """beta `[batch, time, num_heads, head_dim]` in the type of `x`, and I_prior `[num_heads]` in float32."""
        gate = self.importance_gate(hidden_states)
        self._observe(dt, A, x, B, C, gate)
        scale = F.softplus(self.b_scale.float()) * dt
        return (gate.float() * scale[..., None]).to(x.dtype), torch.exp(self.Ip_log.float())

    def _scan(
        self,
        hidden_states: Tensor,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        state: Tensor | None,
        seq_idx: Tensor | None,
        return_final_state: bool,
    ) -> tuple[Tensor, Tensor | None]:
        beta, I_prior = self.importance(hidden_states, dt, A, x, B, C)
        y, final_state, _ = palimpsa_scan(
            x,
            dt,
            A,
            B,
            C,
            beta,
            I_prior,
            D=self.D,
            initial_state=state,
            seq_idx=seq_idx,
            return_final_state=return_final_state,
        )
        return y, final_state

    def _step(
        self, hidden_states: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor
    ) -> Tensor:
        beta, I_prior = self.importance(hidden_states, dt, A, x, B, C)
        return palimpsa_step(x[:, 0], dt[:, 0], A, B[:, 0], C[:, 0], beta[:, 0], I_prior, state, self.D)[:, None]


class PalimpsaMamba2Block(GradientCheckpointingLayer):
    """Pre-norm residual block around one of the two mixers."""

    def __init__(self, config: PalimpsaMamba2Config, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.residual_in_fp32 = config.residual_in_fp32
        self.norm = PalimpsaMamba2RMSNorm(config.hidden_size, config.layer_norm_epsilon)
        mixer = PalimpsaMixer if layer_idx in config.palimpsa_layers else PalimpsaMamba2Mixer
        self.mixer = mixer(config, layer_idx)

    def forward(
        self,
        hidden_states: Tensor,
        conv_state: Tensor | None = None,
        recurrent_state: Tensor | None = None,
        cache: Cache | None = None,
        lengths: Tensor | None = None,
        seq_idx: Tensor | None = None,
        return_final_state: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Arguments and results as for the mixers.

        States are positional so that reentrant gradient checkpointing carries their gradients too.
        """
        residual = hidden_states.float() if self.residual_in_fp32 else hidden_states
        normed = self.norm(hidden_states.to(self.norm.weight.dtype))
        mixed, *final_state = self.mixer(
            normed, conv_state, recurrent_state, cache, lengths, seq_idx, return_final_state
        )
        return residual + mixed, *final_state


class PalimpsaMamba2PreTrainedModel(PreTrainedModel):
    """Weight initialisation and loading."""

    config: PalimpsaMamba2Config
    base_model_prefix = "backbone"
    _no_split_modules = ("PalimpsaMamba2Block",)
    supports_gradient_checkpointing = True
    _can_compile_fullgraph = True
    _is_stateful = True

    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        """As transformers', which makes every loaded parameter trainable; the prior importance stays fixed."""
        loaded = super().from_pretrained(*args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        for module in model.modules():
            if isinstance(module, PalimpsaMixer):
                module.Ip_log.requires_grad_(False)
        return loaded

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        """Mamba2's initialisation; the functions of `init` leave loaded parameters alone."""
        super()._init_weights(module)
        if isinstance(module, PalimpsaMamba2Mixer):
            module.init_mamba2_weights()
            init.kaiming_uniform_(module.conv1d.weight, a=math.sqrt(5))
            if module.conv1d.bias is not None:
                init.zeros_(module.conv1d.bias)
            scale = math.sqrt(self.config.num_hidden_layers) if self.config.rescale_prenorm_residual else 1.0
            # kaiming_uniform_ with a = sqrt(5) draws from ±1/sqrt(fan_in); GPT-2's scheme divides by sqrt(layers).
            bound = 1 / (math.sqrt(module.out_proj.in_features) * scale)
            init.uniform_(module.out_proj.weight, -bound, bound)


class PalimpsaMamba2Model(PalimpsaMamba2PreTrainedModel):
    """The stack of blocks without the language modelling head."""

    def __init__(self, config: PalimpsaMamba2Config):
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(PalimpsaMamba2Block(config, i) for i in range(config.num_hidden_layers))
        self.norm_f = Mamba2RMSNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        """The token embeddings."""
        return self.embeddings

    def set_input_embeddings(self, value: nn.Embedding):
        """Replace the token embeddings."""
        self.embeddings = value

    def forward(
        self,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        cache: Cache | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        attention_mask: Tensor | None = None,
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        initial_states: Sequence[LayerState | tuple[Tensor | None, Tensor | None]] | None = None,
        return_final_states: bool = False,
        **kwargs,
    ) -> tuple | PalimpsaMamba2Output:
        r"""
        Args:
            cache (`Cache`, *optional*): states to continue from and to update, for generation.
            attention_mask (`[batch, time]`, *optional*): 1 for real tokens, 0 for padding, anywhere in a row.
            seq_idx (`[batch, time]` integers, *optional*): document numbers; documents never see each other.
            cu_seqlens (`[documents + 1]`, *optional*): the same as boundaries, for a batch of 1.
            initial_states (*optional*): one `LayerState` for each layer, which the first document of a row
                continues from; gradients flow through it, also under gradient checkpointing.
            return_final_states (`bool`): return the states after the last real token of each row.

        Raises:
            ValueError: arguments that exclude each other, or states that do not fit the model.
        """
        output_hidden_states = (
            self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        )
        return_dict = self.config.return_dict if return_dict is None else return_dict
        explicit_states = initial_states is not None or return_final_states
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training and not explicit_states
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        if explicit_states and (use_cache or cache is not None):
            raise ValueError("a cache already carries the states: leave out initial_states and return_final_states")
        if initial_states is not None and len(initial_states) != len(self.layers):
            raise ValueError(
                f"initial_states must have one entry for each of {len(self.layers)} layers, got {len(initial_states)}"
            )
        if inputs_embeds is None:
            inputs_embeds = self.embeddings(input_ids)
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            use_cache = False
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        if cu_seqlens is not None:
            if seq_idx is not None:
                raise ValueError("seq_idx and cu_seqlens say the same thing: give one of them")
            if inputs_embeds.shape[0] != 1:
                raise ValueError(f"cu_seqlens needs a batch of 1, got {inputs_embeds.shape[0]}")
            seq_idx = seq_idx_from_cu_seqlens(cu_seqlens, inputs_embeds.shape[1], inputs_embeds.device)

        if seq_idx is not None and seq_idx.shape != inputs_embeds.shape[:2]:
            raise ValueError(f"seq_idx must have shape {tuple(inputs_embeds.shape[:2])}, got {tuple(seq_idx.shape)}")

        if attention_mask is not None and attention_mask.ndim != 2:
            raise ValueError(f"attention_mask must be [batch, time], got shape {tuple(attention_mask.shape)}")
        if attention_mask is not None and attention_mask.shape[1] == 1:
            mask = attention_mask  # transformers takes a lone token for a decoded one, which is never padding
        else:
            mask = create_recurrent_attention_mask(self.config, inputs_embeds, attention_mask, cache)
        padding = None if mask is None else _Padding(mask)
        hidden_states, lengths = inputs_embeds, None
        if padding is not None:
            hidden_states, lengths = padding.compact(inputs_embeds), padding.lengths
            seq_idx = None if seq_idx is None else padding.compact_documents(seq_idx)

        all_hidden_states, final_states = [], []
        for i, layer in enumerate(self.layers):
            if output_hidden_states:
                all_hidden_states.append(hidden_states)
            conv_state, recurrent_state = (None, None) if initial_states is None else initial_states[i]
            hidden_states, *final_state = layer(
                hidden_states,
                conv_state,
                recurrent_state,
                cache=cache,
                lengths=lengths,
                seq_idx=seq_idx,
                return_final_state=return_final_states,
            )
            if return_final_states:
                final_states.append(LayerState(*final_state))
        hidden_states = self.norm_f(hidden_states)
        all_hidden_states.append(hidden_states)
        if padding is not None:
            all_hidden_states = [padding.restore(h) for h in all_hidden_states]

        output = PalimpsaMamba2Output(
            last_hidden_state=all_hidden_states[-1],
            cache=cache if use_cache else None,
            hidden_states=tuple(all_hidden_states) if output_hidden_states else None,
            final_states=tuple(final_states) if return_final_states else None,
        )
        return output if return_dict else output.to_tuple()


class _Padding:
    """Moves the real tokens of each row together to its left, and back. A stable sort keeps their order."""

    def __init__(self, mask: Tensor):
        padded = mask == 0
        self.order = padded.to(torch.uint8).argsort(dim=1, stable=True)
        self.lengths = (~padded).sum(1)

    def compact(self, v: Tensor) -> Tensor:
        return v.gather(1, self.order[..., None].expand_as(v))

    def compact_documents(self, seq_idx: Tensor) -> Tensor:
        """Padded positions take the last real token's document, so that no reset follows it."""
        last = (self.lengths - 1).clamp(min=0)[:, None]
        positions = torch.arange(seq_idx.shape[1], device=seq_idx.device).minimum(last)
        return seq_idx.gather(1, self.order.gather(1, positions))

    def restore(self, v: Tensor) -> Tensor:
        return v.gather(1, self.order.argsort(dim=1)[..., None].expand_as(v))


class PalimpsaMamba2ForCausalLM(PalimpsaMamba2PreTrainedModel, GenerationMixin):
    """Mamba2 with Palimpsa layers and a language modelling head."""

    _tied_weights_keys = {"lm_head.weight": "backbone.embeddings.weight"}  # noqa: RUF012 (transformers' own form)

    def __init__(self, config: PalimpsaMamba2Config):
        super().__init__(config)
        self.backbone = PalimpsaMamba2Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        """The token embeddings."""
        return self.backbone.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Embedding):
        """Replace the token embeddings."""
        self.backbone.set_input_embeddings(value)

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        inputs_embeds: Tensor | None = None,  # named, since `generate` looks for it in the signature
        is_first_iteration: bool | None = False,
        **kwargs,
    ):
        """As Mamba2's: after the prompt no token is padding, so the mask is dropped."""
        inputs = super().prepare_inputs_for_generation(
            input_ids, inputs_embeds=inputs_embeds, is_first_iteration=is_first_iteration, **kwargs
        )
        if kwargs.get("use_cache") and not is_first_iteration:
            inputs["attention_mask"] = None
        return inputs

    def forward(
        self,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        cache: Cache | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        use_cache: bool | None = None,
        attention_mask: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        initial_states: Sequence[LayerState | tuple[Tensor | None, Tensor | None]] | None = None,
        return_final_states: bool = False,
        return_logits: bool = True,
        num_items_in_batch: int | Tensor | None = None,
        **kwargs,
    ) -> tuple | PalimpsaMamba2CausalLMOutput:
        r"""
        Args:
            labels (`[batch, time]`, *optional*): shifted inside the model, so pass `input_ids`; -100 is ignored.
            logits_to_keep (`int` or `Tensor`): compute logits for the last so many positions only (0: all), or
                for the given positions.
            return_logits (`bool`): False: only the loss, computed from blocks of logits (or by Liger's fused
                kernel on CUDA), so that memory does not grow with `time * vocab_size`; `logits` is None.
            num_items_in_batch (*optional*): the loss is the sum over targets divided by this number instead of
                by that of the targets, so that micro-batches of one step add up.

        All other arguments are those of [`PalimpsaMamba2Model`].

        Raises:
            ValueError: `return_logits=False` without `labels`, and what [`PalimpsaMamba2Model`] raises.
        """
        if labels is None and not return_logits:
            raise ValueError("return_logits=False leaves nothing to return without labels")
        return_dict = self.config.return_dict if return_dict is None else return_dict
        outputs = self.backbone(
            input_ids,
            inputs_embeds=inputs_embeds,
            cache=cache,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            return_dict=True,
            attention_mask=attention_mask,
            seq_idx=seq_idx,
            cu_seqlens=cu_seqlens,
            initial_states=initial_states,
            return_final_states=return_final_states,
        )
        hidden_states = outputs.last_hidden_state.to(self.lm_head.weight.dtype)
        loss = logits = None
        if return_logits:
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.lm_head(hidden_states[:, kept]).float()
            if labels is not None:
                loss = self.loss_function(
                    logits=logits,
                    labels=labels,
                    vocab_size=self.config.vocab_size,
                    num_items_in_batch=num_items_in_batch,
                    **kwargs,
                )
        else:
            total, targets = linear_cross_entropy(hidden_states[:, :-1], self.lm_head.weight, labels[:, 1:])
            loss = total / (targets if num_items_in_batch is None else num_items_in_batch)
        output = PalimpsaMamba2CausalLMOutput(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            final_states=outputs.final_states,
        )
        return output if return_dict else output.to_tuple()


__all__ = ["PalimpsaMamba2ForCausalLM", "PalimpsaMamba2Model", "PalimpsaMamba2PreTrainedModel"]
