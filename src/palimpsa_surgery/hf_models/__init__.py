"""The Hugging Face model. Importing this package registers it with transformers' Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .configuration_palimpsa_mamba2 import PalimpsaMamba2Config
from .modeling_palimpsa_mamba2 import (
    LayerState,
    PalimpsaMamba2CausalLMOutput,
    PalimpsaMamba2ForCausalLM,
    PalimpsaMamba2Model,
    PalimpsaMamba2Output,
    PalimpsaMamba2PreTrainedModel,
)

AutoConfig.register(PalimpsaMamba2Config.model_type, PalimpsaMamba2Config, exist_ok=True)
AutoModel.register(PalimpsaMamba2Config, PalimpsaMamba2Model, exist_ok=True)
AutoModelForCausalLM.register(PalimpsaMamba2Config, PalimpsaMamba2ForCausalLM, exist_ok=True)

__all__ = [
    "LayerState",
    "PalimpsaMamba2CausalLMOutput",
    "PalimpsaMamba2Config",
    "PalimpsaMamba2ForCausalLM",
    "PalimpsaMamba2Model",
    "PalimpsaMamba2Output",
    "PalimpsaMamba2PreTrainedModel",
]
