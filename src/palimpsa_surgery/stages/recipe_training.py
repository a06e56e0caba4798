"""The parts of a recipe that say how a stage trains: initial states, adapters, steps that are not finite."""

from typing import Annotated, Literal

from pydantic import Field

from palimpsa_surgery.stages.recipe_data import Strict


class ZeroState(Strict):
    """Every sequence starts from an empty memory."""

    kind: Literal["zero"] = "zero"


class RandomNoise(Strict):
    """Every state element starts from Gaussian noise (importance from its absolute value)."""

    kind: Literal["random_noise"]
    sigma: Annotated[float, Field(gt=0)]
    """Standard deviation, in the units of the states."""


class FittedNoise(Strict):
    """Gaussian noise with the running mean and variance of the final states of each layer and head."""

    kind: Literal["fitted_noise"]
    new_weight: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Weight of the newest micro-batch in the running statistics (1 - beta in arXiv 2507.02782 eqs. 5 and 6)."""


class StatePassing(Strict):
    """Start from the final states that the same row of the previous micro-batch, another text, left."""

    kind: Literal["state_passing"]
    zero_probability: Annotated[float, Field(ge=0, le=1)] = 0.1
    """How often a sequence starts from an empty memory instead."""


class Tbtt(Strict):
    """Start from the same document's previous sequence; data are read in the order of the text."""

    kind: Literal["tbtt"]


StateInitialisation = ZeroState | RandomNoise | FittedNoise | StatePassing | Tbtt


class Lora(Strict):
    """Train low-rank changes of the kept Mamba2 layers' projections instead of their weights (needs peft).

    Palimpsa layers are trained in full; embeddings, head, norms and all else of the kept layers stay as they are.
    The stage's final checkpoint holds plain, merged weights.
    """

    rank: Annotated[int, Field(ge=1)]
    alpha: Annotated[float, Field(gt=0)]
    """The change is scaled by alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of an adapter's inputs that are dropped in training."""
    target: Annotated[tuple[Literal["in_proj", "out_proj"], ...], Field(min_length=1)] = ("in_proj", "out_proj")
    """The projections that are adapted."""


class NonFinite(Strict):
    """What happens to a step whose loss or gradient is infinite or not a number: it is skipped and counted."""

    max_consecutive: Annotated[int, Field(ge=0)] = 5
    """So many steps may be skipped in a row; one more ends the run. 0: the first one does."""
