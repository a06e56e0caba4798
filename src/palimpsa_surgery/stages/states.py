"""What a training sequence's recurrent states start from (arXiv 2507.02782 section 4, for both kinds of layer).

Training from zero shows a model only the states that a short sequence reaches; these kinds show it others. A slot is
a row of the micro-batch on its rank: row r goes on from what row r of the rank's previous micro-batch left, whether
that belonged to the same optimizer step or not. Where documents of a packed row reset (`seq_idx`), the initial state
belongs to the row's first document, and what is carried on is the state of its last one. States are detached: no
gradient crosses from one micro-batch to the next. States that are not finite are not carried on. Only `tbtt` carries
the convolution's tail; the others start it at zero. Validation never uses any of this: it starts from zero.

Random numbers belong to a sequence's place in the stage, whatever rank has it. So a stage goes the same way on any
number of ranks whose micro-batches together have as many rows; `zero` and `random_noise`, which carry nothing, on any.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from palimpsa_surgery.hf_models import LayerState, PalimpsaMamba2Config
from palimpsa_surgery.stages.recipe_training import (
    FittedNoise,
    RandomNoise,
    StateInitialisation,
    StatePassing,
    Tbtt,
    ZeroState,
)


class InitialStates:
    """`kind: zero`, and what the other kinds have in common.

    Args:
        settings: the stage's `state`.
        config: of the model, for the shapes of its states.
        device: where the states are made.
        seed: of the random numbers, which no other part of the run uses.
        rank, ranks: which part of every forward pass this is, and of how many.
    """

    wants_final = False
    """Whether `after` must be given the final states."""
    resumes_alone = True
    """Whether a resumed run needs nothing of `state_dict`."""

    def __init__(
        self, settings: Any, config: PalimpsaMamba2Config, *, device: torch.device, seed: int, rank: int, ranks: int
    ) -> None:
        self.settings, self.device, self.seed, self.rank, self.ranks = settings, device, seed, rank, ranks
        matrix = (config.head_dim, config.state_size)
        self.shapes = [
            (config.num_heads, *((2,) if layer in config.palimpsa_layers else ()), *matrix)
            for layer in range(config.num_hidden_layers)
        ]
        self.position = 0
        """How many of the stage's sequences all ranks have begun; a resumed run sets it."""

    def before(self, rows: int, continues: Tensor | None = None) -> list[LayerState] | None:
        """Return the next micro-batch's initial states, one `LayerState` a layer; None for zeros.

        Args:
            rows: sequences in the micro-batch, as many on every rank.
            continues: `[rows]` bool, for `tbtt`: does the row go on with its document?
        """
        first = self.position + self.rank * rows
        self.position += self.ranks * rows
        return self._start(range(first, first + rows), continues)

    def after(self, final_states: Sequence[LayerState]) -> None:
        """Take over what the micro-batch's last tokens left."""

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs to go on with the same bits, `position` apart."""
        return {}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned, read onto the CPU."""

    def _start(self, sequences: range, continues: Tensor | None) -> list[LayerState] | None:
        """As `before`, of the sequences with these numbers in the stage."""
        return None

    def _generator(self, sequence: int) -> torch.Generator:
        number = np.random.SeedSequence((self.seed, sequence)).generate_state(1, np.uint64)[0]
        return torch.Generator(self.device).manual_seed(int(number >> 1))

    def _noise(self, sequences: range) -> list[Tensor]:
        """N(0, 1) for each layer, `[rows, ...]`."""
        noise = [torch.empty((len(sequences), *shape), device=self.device) for shape in self.shapes]
        for row, sequence in enumerate(sequences):
            generator = self._generator(sequence)
            for layer in noise:
                layer[row].normal_(generator=generator)
        return noise


class _RandomNoise(InitialStates):
    """Every element from N(0, sigma²); importance, which is never negative, from its absolute value."""

    def _start(self, sequences: range, continues: Tensor | None) -> list[LayerState]:
        return [_as_state(noise * self.settings.sigma) for noise in self._noise(sequences)]


class _FittedNoise(InitialStates):
    """Gaussian noise with the mean and variance of final states, for each layer and head (eqs. 5 and 6).

    M and Ibar of a Palimpsa layer have statistics of their own. Both start at zero, so the first micro-batch
    starts from zero states; ranks share one set of statistics.
    """

    wants_final = True
    resumes_alone = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # In float64, since a variance is a difference.
        self.mean = [torch.zeros(shape[:-2], dtype=torch.float64, device=self.device) for shape in self.shapes]
        self.variance = [torch.zeros_like(mean) for mean in self.mean]

    def _start(self, sequences: range, continues: Tensor | None) -> list[LayerState]:
        return [
            _as_state(mean.float()[..., None, None] + variance.sqrt().float()[..., None, None] * noise)
            for mean, variance, noise in zip(self.mean, self.variance, self._noise(sequences), strict=True)
        ]

    def after(self, final_states: Sequence[LayerState]) -> None:
        over = (0, -2, -1)  # rows, head_dim, state_size
        states = [state.recurrent_state.detach().double() for state in final_states]
        moments = torch.stack(
            [torch.cat([power.mean(over).flatten() for power in powers]) for powers in _first_two_powers(states)]
        )
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(moments)
            moments /= torch.distributed.get_world_size()
        sizes = [mean.numel() for mean in self.mean]
        new, weight = moments.split(sizes, dim=1), self.settings.new_weight
        for mean, variance, (first, second) in zip(self.mean, self.variance, new, strict=True):
            finite = (first + second).isfinite().view_as(mean)
            for old, found in ((mean, first), (variance, (second - first.square()).clamp(min=0))):
                old.copy_(torch.where(finite, old.lerp(found.view_as(old), weight), old))

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean, "variance": self.variance}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.mean, self.variance = ([value.to(self.device) for value in saved[k]] for k in ("mean", "variance"))


class _StatePassing(InitialStates):
    """The final states of the rank's previous micro-batch, each row zeroed with probability `zero_probability`."""

    wants_final = True
    resumes_alone = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.carried: list[LayerState] | None = None

    def _start(self, sequences: range, continues: Tensor | None) -> list[LayerState] | None:
        if self.carried is None:
            return None
        drawn = [torch.rand((), generator=self._generator(number), device=self.device) for number in sequences]
        kept = torch.stack(drawn) >= self.settings.zero_probability
        return [LayerState(None, _keep(state.recurrent_state, kept)) for state in self.carried]

    def after(self, final_states: Sequence[LayerState]) -> None:
        self.carried = _finite_rows([LayerState(None, state.recurrent_state.detach()) for state in final_states])

    def state_dict(self) -> dict[str, Any]:
        carried = None if self.carried is None else [tuple(state) for state in self.carried]
        return {"carried": carried}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        if saved["carried"] is None:
            self.carried = None
        else:
            self.carried = [LayerState(*(v if v is None else v.to(self.device) for v in s)) for s in saved["carried"]]


class _Tbtt(_StatePassing):
    """Both final states of the same document's previous chunk; zero where a row begins with a new document."""

    def _start(self, sequences: range, continues: Tensor | None) -> list[LayerState] | None:
        if self.carried is None:
            return None
        return [LayerState(*(_keep(value, continues) for value in state)) for state in self.carried]

    def after(self, final_states: Sequence[LayerState]) -> None:
        self.carried = _finite_rows([LayerState(*(value.detach() for value in state)) for state in final_states])


_KINDS = {
    ZeroState: InitialStates,
    RandomNoise: _RandomNoise,
    FittedNoise: _FittedNoise,
    StatePassing: _StatePassing,
    Tbtt: _Tbtt,
}


def make_initial_states(
    settings: StateInitialisation,
    config: PalimpsaMamba2Config,
    *,
    device: torch.device,
    seed: int,
    rank: int = 0,
    ranks: int = 1,
) -> InitialStates:
    """Return the source of initial states that a stage's `state` asks for; arguments as for `InitialStates`."""
    return _KINDS[type(settings)](settings, config, device=device, seed=seed, rank=rank, ranks=ranks)


def _as_state(noise: Tensor) -> LayerState:
    """Noise `[rows, heads, head_dim, state_size]`, or `[rows, heads, 2, …]` whose importance must not be negative."""
    if noise.ndim == 5:
        noise[:, :, 1].abs_()
    return LayerState(None, noise)


def _keep(state: Tensor, rows: Tensor) -> Tensor:
    """Zero all but the given rows, whatever they hold."""
    return state.masked_fill(~rows.to(state.device).view(-1, *(1,) * (state.ndim - 1)), 0)


def _finite_rows(states: list[LayerState]) -> list[LayerState]:
    """Zero, in every layer, each row that is not finite in one: carried on, it would spoil all that follows."""
    values = [value for state in states for value in state if value is not None]
    rows = torch.stack([value.isfinite().flatten(1).all(1) for value in values]).all(0)
    return [LayerState(*(value if value is None else _keep(value, rows) for value in state)) for state in states]


def _first_two_powers(states: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    return states, [state.square() for state in states]
