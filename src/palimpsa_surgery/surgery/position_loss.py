"""Perplexity by position of a text of any length, in pieces with carried states, and so in constant memory."""

import hashlib
import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, compress, pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from palimpsa_surgery.errors import UserError
from palimpsa_surgery.hf_models import PalimpsaMamba2ForCausalLM
from palimpsa_surgery.surgery.state_statistics import StateStatistics, rounded
from palimpsa_surgery.surgery.text import iter_token_blocks

BINS_PER_OCTAVE = 4
"""Bins of positions to a doubling."""

_LOGITS = 1 << 23  # logits held at once


@dataclass(frozen=True)
class PositionLoss:
    """Loss by position, in bins of positions: the bin i covers `starts[i]` to `ends[i] - 1`.

    Attributes:
        starts, ends: positions of the predicted tokens; the first token of a sequence, at 0, is not predicted.
        tokens: predictions in each bin, over all sequences.
        nll_sums: sum of their negative log likelihoods, in nats, not rounded.
        perplexity: exp of their mean (2507.02782 section 3.1: the mean comes before the exp).
        standard_errors: of the mean negative log likelihood, from the spread over sequences; None for a single one.
    """

    starts: tuple[int, ...]
    ends: tuple[int, ...]
    tokens: tuple[int, ...]
    nll_sums: tuple[float, ...]
    perplexity: tuple[float, ...]
    standard_errors: tuple[float, ...] | None

    @property
    def nll(self) -> list[float]:
        """Mean negative log likelihood of each bin, in nats."""
        return [total / tokens for total, tokens in zip(self.nll_sums, self.tokens, strict=True)]

    def double_octaves(self) -> list[tuple[int, int]]:
        """Ranges of positions for a table, [low, high), that begin at 1, 16, 64, 256, ..."""
        lows = [1, *(1 << power for power in range(4, 63, 2) if 1 << power in self.starts)]
        return list(zip(lows, [*lows[1:], self.ends[-1]], strict=True))

    def perplexity_between(self, low: int, high: int) -> float:
        """Perplexity of the tokens of the bins that begin at positions in [low, high); inf beyond any number."""
        here = [low <= start < high for start in self.starts]
        total, tokens = (sum(compress(values, here)) for values in (self.nll_sums, self.tokens))
        return math.exp(total / tokens) if total < 709 * tokens else math.inf

    def problem(self) -> str | None:
        """Why this cannot be what was measured, if that is so: for what is read from a file."""
        parts = (self.starts, self.ends, self.tokens, self.nll_sums, self.perplexity)
        if len({len(part) for part in parts}) > 1 or len(self.standard_errors or self.starts) != len(self.starts):
            return "its lists are not of one length"
        if not self.starts or self.starts[0] != 1 or self.starts[1:] != self.ends[:-1]:
            return "its bins do not follow each other from position 1"
        if any(start >= end for start, end in zip(self.starts, self.ends, strict=True)) or min(self.tokens) < 1:
            return "a bin is empty"
        if not all(map(math.isfinite, self.nll_sums)) or any(value != value for value in self.perplexity):
            return "a number is not finite"
        if min(self.nll_sums) < -1e-3 or min(self.perplexity) < 1:
            return "a perplexity is below 1"
        return None


class Sequences:
    """Texts of one length from files, one after another.

    Attributes:
        count: sequences read so far.
    """

    def __init__(self, files: Sequence[Path], tokenizer: PreTrainedTokenizerBase, *, length: int, at_most: int) -> None:
        """Read the first one.

        Args:
            length: tokens of each; what is left at the end of the text is left out.
            at_most: sequences.

        Raises:
            UserError: the text is not enough for one.
        """
        blocks = iter_token_blocks(files, tokenizer, sequence_length=length, max_tokens=at_most * length)
        first = next(blocks)
        if len(first) < length:
            names = ", ".join(map(str, files))
            raise UserError(f"text too short: {names} gave {len(first)} tokens, one sequence needs {length}")
        self.length, self.count = length, 0
        self._blocks = chain([first], blocks)
        self._digest = hashlib.sha256()

    def __iter__(self) -> Iterator[Tensor]:
        """Yield the token ids of each, [length]."""
        for block in self._blocks:
            if len(block) < self.length:  # the end of the text
                return
            self.count += 1
            self._digest.update(array("q", block).tobytes())
            yield torch.tensor(block)

    @property
    def fingerprint(self) -> str:
        """Hash of the token ids read so far: who has the same has measured on the same text."""
        return self._digest.hexdigest()


def log_edges(first: int, last: int, per_octave: int) -> list[int]:
    """Whole numbers from `first` to `last`, both included, about `per_octave` to a doubling as far as there are any."""
    steps = math.ceil(math.log2(last / first) * per_octave)
    edges = sorted({first, *(round(first * 2 ** (step / per_octave)) for step in range(steps)), last})
    if len(edges) > 2 and 2 * (edges[-1] - edges[-2]) < edges[-2] - edges[-3]:
        del edges[-2]  # rather a wider last bin than a narrow one
    return edges


def run_sequence(
    model: PalimpsaMamba2ForCausalLM, ids: Tensor, piece_length: int, statistics: StateStatistics
) -> Iterator[Tensor]:
    """Run a text from empty states, in pieces; yield the negative log likelihoods of each piece's next tokens.

    Args:
        ids: [T].
        piece_length: tokens of a piece at most; pieces also end wherever `statistics` samples the states.
        statistics: is shown the states. It sees the mixers only if it observes them.

    Yields:
        [tokens of the piece] float32: the entry i of the sequence belongs to the token at i + 1, and T - 1 has none.

    Raises:
        UserError: a prediction is NaN or infinite; the message names its position.
    """
    statistics.start_sequence()
    states = None
    for start, end in _pieces(statistics.positions, piece_length):
        output = model.backbone(ids[None, start:end], initial_states=states, return_final_states=True, use_cache=False)
        states = output.final_states
        yield _next_token_nll(model, output.last_hidden_state[0], ids[start + 1 : end + 1], start)
        statistics.finish_piece(end, states)


def _pieces(positions: Sequence[int], piece_length: int) -> Iterator[tuple[int, int]]:
    for low, high in pairwise([0, *positions]):
        for start in range(low, high, piece_length):
            yield start, min(start + piece_length, high)


def _next_token_nll(model: PalimpsaMamba2ForCausalLM, hidden: Tensor, targets: Tensor, start: int) -> Tensor:
    """-log q of the targets, [len(targets)], from hidden states [T, hidden_size] of the positions from `start`."""
    parts = [hidden.new_empty(0, dtype=torch.float32)]
    size = max(1, _LOGITS // model.config.vocab_size)  # the logits of a long piece need not exist at once
    for states, ids in zip(hidden[: len(targets)].split(size), targets.split(size), strict=True):
        logits = model.lm_head(states.to(model.lm_head.weight.dtype)).float()  # as the model's forward does
        parts.append(F.cross_entropy(logits, ids, reduction="none"))
    nll = torch.cat(parts)
    bad = (~torch.isfinite(nll)).nonzero()
    if len(bad):
        raise UserError(f"logits at position {start + int(bad[0])} are NaN or infinite")
    return nll


class LossByPosition:
    """Sums negative log likelihoods in bins of positions, one sequence after another."""

    def __init__(self, edges: Sequence[int]) -> None:
        """Prepare bins from `edges[i]` to `edges[i + 1] - 1`."""
        self.edges = list(edges)
        self.sequences: list[Tensor] = []
        self._start_sequence()

    def _start_sequence(self) -> None:
        self.position = 1  # of the next token to be predicted
        self.sums = torch.zeros(len(self.edges) - 1, dtype=torch.float64)

    def add(self, nll: Tensor) -> None:
        """Add the losses of the next positions, [T]."""
        positions = torch.arange(self.position, self.position + len(nll))
        bins = torch.searchsorted(torch.tensor(self.edges), positions, right=True) - 1
        self.sums.index_add_(0, bins, nll.double().cpu())
        self.position += len(nll)

    def finish_sequence(self) -> None:
        """End a sequence, which must have reached the last bin's end."""
        self.sequences.append(self.sums)
        self._start_sequence()

    def summary(self) -> PositionLoss:
        """The bins over all sequences, of which there must be one."""
        sums = torch.stack(self.sequences)  # [sequences, bins]
        widths = torch.tensor(self.edges).diff()
        tokens = widths * len(sums)
        _, errors = mean_and_error(sums / widths)
        return PositionLoss(
            starts=tuple(self.edges[:-1]),
            ends=tuple(self.edges[1:]),
            tokens=tuple(tokens.tolist()),
            nll_sums=tuple(sums.sum(0).tolist()),
            perplexity=rounded((sums.sum(0) / tokens).exp()),
            standard_errors=errors,
        )


def mean_and_error(values: Tensor) -> tuple[tuple[float, ...], tuple[float, ...] | None]:
    """Mean over the rows of [sequences, n] and its standard error; None if there is only one row."""
    count = len(values)
    return rounded(values.mean(0)), rounded(values.std(0) / math.sqrt(count)) if count > 1 else None
