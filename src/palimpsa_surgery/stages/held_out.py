"""Held-out text: its loss, by how much of a document a model has read, and how the model would go on with it."""

import contextlib
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from palimpsa_surgery import ranks
from palimpsa_surgery.errors import UserError
from palimpsa_surgery.kernels.cross_entropy import LOGITS_PER_BLOCK
from palimpsa_surgery.stages.data import IGNORED, Sequences
from palimpsa_surgery.stages.launch import sum_over_ranks
from palimpsa_surgery.stages.recipe import Samples

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def has_bfloat16() -> bool:
    """Whether the forward pass is autocast to bfloat16."""
    return torch.cuda.is_available() and torch.cuda.is_bf16_supported()


def autocast(device: torch.device) -> torch.autocast:
    """The precision that training computes in, for what is computed beside it."""
    return torch.autocast("cuda", torch.bfloat16, enabled=device.type == "cuda" and has_bfloat16())


def held_out_sample(sequences: Sequences, max_tokens: int) -> np.ndarray:
    """Indices of whole held-out sequences, evenly spread, of at most so many tokens in all, but at least one."""
    count = min(len(sequences.held_out), max(1, max_tokens // sequences.tokens.shape[1]))
    return sequences.held_out[np.linspace(0, len(sequences.held_out) - 1, count).round().astype(int)]


@torch.no_grad()
def evaluate(model: "PreTrainedModel", sequences: Sequences, *, max_tokens: int, batch_size: int) -> dict:
    """Score held-out sequences from an empty memory: mean loss over the targets, in nats per token.

    All ranks must call it together; each scores some of the batches.

    Args:
        max_tokens: see `held_out_sample`.
        batch_size: sequences per forward pass.

    Returns:
        `loss`, `perplexity` = exp(loss), `tokens`, the number of targets, and `positions`: the same by octaves of the
        number of tokens read since the memory was last empty, as lists `starts` and `ends` (of which a bin reaches
        from one to before the other), `tokens`, `loss` and `perplexity`; bins without a target are left out.

    Raises:
        UserError: the loss is not finite, or nothing in the sample is a target.
    """
    chosen = held_out_sample(sequences, max_tokens)
    edges = octaves(sequences.tokens.shape[1])
    sums, counts = torch.zeros(2, len(edges) - 1, dtype=torch.float64)
    rank, size = ranks.rank(), ranks.world_size()
    batches = range(0, len(chosen), batch_size)
    with evaluating(model):
        for turn in range(math.ceil(len(batches) / size)):
            mine = turn * size + rank < len(batches)
            # A rank without a batch repeats another: parameters that are divided take all ranks in every pass.
            start = batches[turn * size + rank if mine else 0]
            (batch,) = sequences.batches(chosen[start : start + batch_size], batch_size)
            losses = token_losses(model, {key: value.to(model.device) for key, value in batch.items()})
            if mine:
                asked = batch["labels"][:, 1:] != IGNORED
                bins = torch.bucketize(positions(batch)[:, 1:][asked], torch.tensor(edges), right=True) - 1
                sums.index_add_(0, bins, losses[asked])
                counts.index_add_(0, bins, torch.ones_like(bins, dtype=torch.float64))
    together = sum_over_ranks(*sums.tolist(), *counts.tolist(), device=model.device)
    sums, counts = together[: len(sums)], together[len(sums) :]
    if not sum(counts):
        raise UserError(f"none of the {len(chosen)} held-out sequences that are scored holds anything to predict")
    mean = sum(sums) / sum(counts)
    if not math.isfinite(mean):
        raise UserError(f"the held-out loss is {mean}: the model's weights are of no use")
    rows = [
        (start, end, int(count), total / count)
        for start, end, count, total in zip(edges, edges[1:], counts, sums, strict=False)
        if count
    ]
    starts, ends, tokens, loss = (list(column) for column in zip(*rows, strict=True))
    return {
        "loss": mean,
        "perplexity": _exp(mean),
        "tokens": int(sum(counts)),
        "positions": {
            "starts": starts,
            "ends": ends,
            "tokens": tokens,
            "loss": loss,
            "perplexity": [_exp(value) for value in loss],
        },
    }


def octaves(length: int) -> list[int]:
    """Edges of the bins for positions 1 to `length - 1`: 1, 2, 4, …, the last one `length`."""
    return [*(1 << power for power in range((length - 1).bit_length())), length]


def positions(batch: dict[str, Tensor]) -> Tensor:
    """How many tokens precede each one since the memory was last empty, `[B, T]`."""
    index = torch.arange(batch["input_ids"].shape[1]).expand_as(batch["input_ids"])
    if "seq_idx" not in batch:
        return index
    starts = F.pad(batch["seq_idx"].diff() != 0, (1, 0), value=True)
    return index - torch.where(starts, index, 0).cummax(1).values


def token_losses(model: "PreTrainedModel", inputs: dict[str, Tensor]) -> Tensor:
    """Cross-entropy of each token but the first of a row, on the CPU, `[B, T - 1]` float64; 0 where nothing is asked.

    The logits of a long row never exist at once.
    """
    hidden: list[Tensor] = []
    labels = inputs["labels"][:, 1:]
    hook = model.backbone.register_forward_hook(lambda module, args, output: hidden.append(output.last_hidden_state))
    with hook, autocast(model.device):  # the hook goes at the end
        # The model as a whole, since only its own forward pass puts divided parameters together.
        model(**{key: value for key, value in inputs.items() if key != "labels"}, use_cache=False, logits_to_keep=1)
        states = hidden[0][:, :-1].flatten(0, 1).to(model.lm_head.weight.dtype)
        rows = max(1, LOGITS_PER_BLOCK // model.config.vocab_size)
        losses = [
            F.cross_entropy(model.lm_head(part).float(), targets, ignore_index=IGNORED, reduction="none").double().cpu()
            for part, targets in zip(states.split(rows), labels.flatten().split(rows), strict=True)
        ]
    return torch.cat(losses).view(labels.shape)


@torch.no_grad()
def continuations(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", sequences: Sequences, wanted: Samples
) -> list[dict[str, str]]:
    """Let the model go on with the beginnings of held-out sequences, always by its likeliest token.

    A prompt is what stands before the first answer, or the first tokens of running text. All ranks must call it
    together. No random number is drawn.

    Returns:
        For each: `prompt`, `text` (what really follows, as many tokens) and `generated`.
    """
    samples = []
    with evaluating(model), autocast(model.device):
        for index in held_out_sample(sequences, wanted.count * sequences.tokens.shape[1]):
            item = sequences[index]
            ids, learnt = item["input_ids"], (item["labels"] != IGNORED).nonzero()
            first = int(learnt[0]) if len(learnt) else 0
            end = first if first > 1 else min(wanted.prompt_tokens, len(ids) - 1)
            prompt = ids[max(0, end - wanted.prompt_tokens) : end][None].to(model.device)
            generated = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=wanted.new_tokens,
                do_sample=False,
                use_cache=True,
                pad_token_id=sequences.eos_token_id,
                eos_token_id=sequences.eos_token_id,
            )[0, prompt.shape[1] :]
            parts = {"prompt": prompt[0], "text": ids[end : end + wanted.new_tokens], "generated": generated}
            samples.append({name: tokenizer.decode(part) for name, part in parts.items()})
    return samples


@contextlib.contextmanager
def evaluating(model: "PreTrainedModel") -> Iterator[None]:
    """Without dropout, and as before at the end."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def _exp(loss: float) -> float:
    return math.exp(min(loss, 700.0))  # beyond which there is no float, and JSON has no infinity
