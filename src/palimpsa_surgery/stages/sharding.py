"""FSDP2: a model whose parameters, gradients and optimizer states are divided over all processes.

accelerate's own wrapping is not used, for two reasons. Its bfloat16 policy rounds every parameter, `A_log` and
`dt_bias` among them, which this model needs in float32; and it makes a group of the head and the embeddings that
waits for the head's `forward`, which a loss in blocks does not call. Here every parameter stays float32, on all wires,
and autocast makes the bfloat16 that matrix products take, exactly as on one GPU.
"""

from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from palimpsa_surgery import ranks

if TYPE_CHECKING:
    from accelerate.utils import FullyShardedDataParallelPlugin


def shard(model: nn.Module, plugin: "FullyShardedDataParallelPlugin") -> None:
    """Divide a model's parameters over all processes, in place: a unit for each block, and one for the rest.

    Args:
        plugin: accelerate's; of it, `reshard_after_forward` is taken, and its wrapping is switched off.
    """
    from torch.distributed.fsdp import fully_shard

    plugin.auto_wrap_policy = None
    for block in blocks(model):
        fully_shard(block, reshard_after_forward=plugin.reshard_after_forward)
    fully_shard(model)


def blocks(model: nn.Module) -> list[nn.Module]:
    """The model's layers: what transformers is told not to split."""
    names = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    return [module for module in model.modules() if type(module).__name__ in names]


def whole_parameters(model: nn.Module) -> dict[str, Tensor] | None:
    """Put each parameter together from all processes that share it, on rank 0's CPU.

    All ranks must call it together.

    Returns:
        From names to values, on rank 0; None elsewhere. Parameters that are not divided are not copied.
    """
    found = {}
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        if isinstance(value, DTensor):
            value = value.full_tensor().cpu()
        if ranks.is_first():
            found[name] = value
    return found if ranks.is_first() else None
