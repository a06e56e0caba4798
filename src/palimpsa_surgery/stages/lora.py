"""LoRA through peft: low-rank changes of the kept Mamba2 layers' projections, merged into them at a stage's end.

peft refuses Mamba's `out_proj` in the model types it knows, since their fused kernels read `.weight` past an adapter
(peft issues 2274 and 2556), and lets any other model type through without a look. Here both mixers call
their projections as modules, on every path, so adapters take part; tests see them learn.
"""

from typing import TYPE_CHECKING

from palimpsa_surgery.errors import UserError
from palimpsa_surgery.stages.recipe_training import Lora

if TYPE_CHECKING:
    from peft.tuners.lora import LoraModel

    from palimpsa_surgery.hf_models import PalimpsaMamba2ForCausalLM


def add_adapters(model: "PalimpsaMamba2ForCausalLM", lora: Lora, *, seed: int = 0) -> "LoraModel":
    """Put adapters, which start as no change, around the kept layers' projections; `model` is changed in place.

    The first matrix of each is random, the same for the same seed; the global random state is left as it is. Which
    parameters are then trained is decided where all groups are, in `stages.optimisation`.

    Returns:
        peft's handle on the adapters, for `merge_adapters`.

    Raises:
        UserError: peft is not installed, or the model has no kept layer.
    """
    import torch

    try:
        from peft import LoraConfig
        from peft.tuners.lora import LoraModel
    except Exception as error:  # absent, or too old for the transformers beside it
        raise UserError(
            f'LoRA needs peft, which cannot be imported ({error}): pip install "palimpsa-surgery[lora]"'
        ) from None
    kept = sorted(set(range(model.config.num_hidden_layers)) - set(model.config.palimpsa_layers))
    if not kept:
        raise UserError("lora adapts the kept Mamba2 layers, and this model has none")
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=[f"backbone.layers.{layer}.mixer.{name}" for layer in kept for name in lora.target],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LoraModel(model, config, "default")


def merge_adapters(adapters: "LoraModel") -> None:
    """Add the adapters to the weights they change, and leave the plain model that was given to `add_adapters`."""
    adapters.merge_and_unload()
