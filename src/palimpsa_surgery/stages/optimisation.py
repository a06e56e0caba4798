"""Which parameter is trained how: weight decay, learning rate, or not at all.

Every parameter is looked up by its exact name in one table; a name that is not in it is an error. The
transformers Trainer would choose by substring and decay `A_log` and `D`, whose pull towards zero changes how
long a layer remembers.
"""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from palimpsa_surgery.stages.recipe import Stage

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Treatment:
    """How the optimizer treats the parameters of one group."""

    group: str
    rate: str | None
    """The field of a stage that holds their peak learning rate; None: they are not trained."""
    decays: bool


WEIGHTS = Treatment("weights", "learning_rate", True)
UNDECAYED = Treatment("norms, biases, A_log, D", "learning_rate", False)
IMPORTANCE = Treatment("importance projections", "importance_learning_rate", True)
IMPORTANCE_SCALE = Treatment("importance scale b_scale", "importance_learning_rate", False)
ADAPTERS = Treatment("LoRA adapters", "learning_rate", False)
FROZEN = Treatment("frozen Ip_log", None, False)
BESIDE_ADAPTERS = Treatment("frozen beside LoRA", None, False)
TREATMENTS = (WEIGHTS, UNDECAYED, IMPORTANCE, IMPORTANCE_SCALE, ADAPTERS, FROZEN, BESIDE_ADAPTERS)

_LAYER = "backbone.layers.*."
_TABLE = {
    "backbone.embeddings.weight": WEIGHTS,
    "lm_head.weight": WEIGHTS,
    "backbone.norm_f.weight": UNDECAYED,
    f"{_LAYER}norm.weight": UNDECAYED,
    f"{_LAYER}mixer.in_proj.weight": WEIGHTS,
    f"{_LAYER}mixer.in_proj.bias": UNDECAYED,
    f"{_LAYER}mixer.conv1d.weight": WEIGHTS,
    f"{_LAYER}mixer.conv1d.bias": UNDECAYED,
    f"{_LAYER}mixer.dt_bias": UNDECAYED,
    f"{_LAYER}mixer.A_log": UNDECAYED,
    f"{_LAYER}mixer.D": UNDECAYED,
    f"{_LAYER}mixer.norm.weight": UNDECAYED,
    f"{_LAYER}mixer.out_proj.weight": WEIGHTS,
    f"{_LAYER}mixer.out_proj.bias": UNDECAYED,
    f"{_LAYER}mixer.b_rank_proj.weight": IMPORTANCE,
    f"{_LAYER}mixer.b_proj.weight": IMPORTANCE,
    f"{_LAYER}mixer.b_scale": IMPORTANCE_SCALE,
    f"{_LAYER}mixer.Ip_log": FROZEN,
    **{
        f"{_LAYER}mixer.{projection}.{matrix}.default.weight": ADAPTERS
        for projection in ("in_proj", "out_proj")
        for matrix in ("lora_A", "lora_B")
    },
}


def parameters_by_treatment(model: "torch.nn.Module") -> dict[Treatment, "list[torch.nn.Parameter]"]:
    """Sort every parameter of a model (on any device, meta included) by how it is trained.

    Where a model has LoRA adapters, they and the Palimpsa layers are trained, and nothing else.

    Raises:
        ValueError: a parameter's name is not in the table; the message lists the names.
    """
    groups: dict[Treatment, list[torch.nn.Parameter]] = {treatment: [] for treatment in TREATMENTS}
    named = {}
    unknown = []
    for name, parameter in model.named_parameters():
        rule = re.sub(r"^backbone\.layers\.\d+\.", _LAYER, name).replace(".base_layer.", ".")
        if rule in _TABLE:
            named[name] = parameter, _TABLE[rule]
        else:
            unknown.append(name)
    adapted = any(treatment is ADAPTERS for _, treatment in named.values())
    replaced = tuple(f"backbone.layers.{layer}." for layer in model.config.palimpsa_layers)
    for name, (parameter, treatment) in named.items():
        if adapted and treatment is not ADAPTERS and not name.startswith(replaced):
            treatment = BESIDE_ADAPTERS
        groups[treatment].append(parameter)
    if unknown:
        raise ValueError(f"no rule says how to train {', '.join(unknown)}")
    return {treatment: parameters for treatment, parameters in groups.items() if parameters}


def freeze_untrained(model: "torch.nn.Module") -> None:
    """Let only those parameters have gradients that some group trains."""
    for treatment, parameters in parameters_by_treatment(model).items():
        for parameter in parameters:
            parameter.requires_grad_(treatment.rate is not None)


def build_optimizer(model: "torch.nn.Module", stage: Stage) -> "torch.optim.Optimizer":
    """Return AdamW over the model's groups with a stage's numbers; parameters that no group trains are frozen."""
    import torch

    freeze_untrained(model)
    groups = []
    for treatment, parameters in parameters_by_treatment(model).items():
        if treatment.rate is None:
            continue
        groups.append(
            {
                "name": treatment.group,
                "params": parameters,
                "lr": getattr(stage, treatment.rate),
                "weight_decay": stage.weight_decay if treatment.decays else 0.0,
            }
        )
    on_cuda = all(parameter.is_cuda for parameter in model.parameters())
    return torch.optim.AdamW(groups, betas=stage.betas, fused=on_cuda or None)
