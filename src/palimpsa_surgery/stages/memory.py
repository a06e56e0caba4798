"""How much memory a training step takes, and a checkpoint on disk, from shapes alone.

Counted are the tensors that autograd keeps for the backward pass, layer by layer, and what is largest beside them.
Left out: carried states and noise of a stage's `state`, buffers of NCCL and of matrix products, and what the
allocator loses to fragments; leave a tenth of the memory free for them.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from palimpsa_surgery.kernels.chunked import SEGMENT
from palimpsa_surgery.kernels.cross_entropy import LOGITS_PER_BLOCK
from palimpsa_surgery.kernels.ssd import CHUNK

if TYPE_CHECKING:
    from palimpsa_surgery.hf_models import PalimpsaMamba2Config
    from palimpsa_surgery.stages.recipe import Stage

FULL, HALF = 4, 2  # bytes of float32 and bfloat16
TRAINED_BYTES = 4 * FULL
"""Of a trained parameter: weight, gradient, and Adam's two averages."""
CHECKPOINT_BYTES = 3 * FULL
"""On disk, of a trained parameter in a checkpoint to go on from: weight and Adam's two averages."""
FINAL_BYTES = FULL
"""On disk, of a parameter in a finished stage."""

_ADJOINTS = 10  # arrays of inner size that its backward pass holds at once, measured


@dataclass(frozen=True)
class Activations:
    """Bytes that one micro-batch takes on top of weights, gradients and optimizer."""

    kept: int
    """With everything kept for the backward pass."""
    checkpointed: int
    """With `gradient_checkpointing`: the input of each layer, and one layer at a time in full."""


def activations(config: "PalimpsaMamba2Config", stage: "Stage", *, on_gpu: bool = True) -> Activations:
    """Estimate the activations of a stage's micro-batch.

    Args:
        on_gpu: bfloat16 autocast and fused kernels; else float32 and the portable path.
    """
    tokens = stage.micro_batch_sequences * stage.sequence_length
    layers = config.num_hidden_layers
    new, old = len(config.palimpsa_layers), layers - len(config.palimpsa_layers)
    sizes = {
        palimpsa: tokens * _layer(config, palimpsa, resets=stage.packing.reset_at_documents, on_gpu=on_gpu)
        for palimpsa, count in ((True, new), (False, old))
        if count
    }
    inner = config.num_heads * config.head_dim
    transient = tokens * FULL * _ADJOINTS * inner if new else 0
    block = min(tokens, max(1, LOGITS_PER_BLOCK // config.vocab_size))
    head = tokens * 3 * FULL * config.hidden_size + 2 * FULL * block * config.vocab_size
    everything = new * sizes.get(True, 0) + old * sizes.get(False, 0)
    inputs = layers * tokens * FULL * config.hidden_size
    one = max(sizes.get(True, 0) + transient, sizes.get(False, 0))
    return Activations(int(everything + max(head, transient)), int(inputs + max(head, one)))


def _layer(config: "PalimpsaMamba2Config", palimpsa: bool, *, resets: bool, on_gpu: bool) -> float:
    """Bytes per token that one layer keeps for its backward pass."""
    half = HALF if on_gpu else FULL
    inner, groups = config.num_heads * config.head_dim, 2 * config.n_groups * config.state_size
    conv = inner + groups
    projected = inner + conv + config.num_heads
    # Of the norms the kernel keeps the inputs; the gate is a part of in_proj's output.
    total = (1 if on_gpu else 2) * FULL * config.hidden_size + half * config.hidden_size  # and the input of in_proj
    total += half * projected + 3 * FULL * config.num_heads  # its output; step sizes
    if on_gpu:
        total += half * conv  # convolution: its result; its input is in_proj's output
    else:
        total += (6 if resets else 3) * FULL * conv  # padded input, sum, silu; each tap without other documents as well
    total += (0 if on_gpu else 4) * FULL * inner + 2 * half * inner  # gated norm, and the input of out_proj
    if palimpsa:
        states = 2 * inner * config.state_size / SEGMENT
        total += 2 * half * inner + FULL * states  # importance gate, beta, and both states of each segment
    elif not on_gpu:
        total += FULL * (4 * CHUNK * config.num_heads + 3 * inner)  # decays and scores within chunks
    return total
