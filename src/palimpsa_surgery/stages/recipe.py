"""Recipes: one YAML file that says everything about a training run (DESIGN section 8).

A recipe is data. Stages differ in their text and their numbers only; nothing in the code asks which stage it
is looking at. The schema is strict and holds only what works: an unknown key, a wrong unit or an impossible
combination is an error that names the field, raised before anything is loaded.
"""

import difflib
import json
import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_core import ErrorDetails

from palimpsa_surgery.errors import UserError
from palimpsa_surgery.stages.recipe_data import (
    DATA_KINDS,
    MIXED_KINDS,
    Data,
    HubSet,
    Part,
    Strict,
    SyntheticSource,
    sources_of,
)
from palimpsa_surgery.stages.recipe_training import (
    FittedNoise,
    Lora,
    NonFinite,
    RandomNoise,
    StateInitialisation,
    StatePassing,
    Tbtt,
    ZeroState,
)
from palimpsa_surgery.stages.recipe_yaml import read_yaml


class Packing(Strict):
    """How documents share a sequence."""

    reset_at_documents: bool = True
    """Start every document from an empty memory (`seq_idx`), as if it had the sequence to itself."""


class Schedule(Strict):
    """Learning rate over a stage: a linear warm-up, then one of these."""

    kind: Literal["constant", "cosine"]
    min_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Where a cosine ends, as a fraction of the peak."""


class Stage(Strict):
    """One training stage. Sizes are in tokens, lengths of time in optimizer steps."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$", max_length=40)]
    """Lower-case letters, digits and dashes: it names a folder."""
    data: Data
    packing: Packing = Packing()
    sequence_length: Annotated[int, Field(ge=2)]
    """Tokens per sequence."""
    batch_tokens: Annotated[int, Field(gt=0)]
    """Tokens per optimizer step; a multiple of `sequence_length`."""
    micro_batch_tokens: Annotated[int, Field(gt=0)] | None = None
    """Tokens per forward and backward pass, which is what memory depends on; null: all of `batch_tokens`."""
    tokens: Annotated[int, Field(gt=0)]
    """Tokens to train on; a multiple of `batch_tokens`. Data that are fewer are shuffled and used again."""
    learning_rate: Annotated[float, Field(gt=0, le=1)]
    """Peak learning rate of the parameters that came from Mamba2."""
    importance_learning_rate: Annotated[float, Field(gt=0, le=1)]
    """Peak learning rate of the importance parameters. A calibrated surgery starts them small, so they need
    more than the others."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which the learning rates rise from zero to their peak."""
    schedule: Schedule = Schedule(kind="cosine")
    weight_decay: Annotated[float, Field(ge=0, le=1)] = 0.1
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    """Adam's averaging weights of the gradient and of its square."""
    clip: Annotated[float, Field(gt=0)] = 1.0
    """Largest norm of the gradient; longer ones are scaled down to it."""
    non_finite: NonFinite = NonFinite()
    state: Annotated[StateInitialisation, Field(discriminator="kind")] = ZeroState()
    """What a sequence's recurrent states start from; validation always starts from zero."""
    lora: Lora | None = None
    """null: all weights are trained."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""

    @field_validator("sequence_length")
    @classmethod
    def _check_examples(cls, length: int, info: ValidationInfo) -> int:
        for place, source in sources_of(info.data["data"]) if "data" in info.data else ():
            if isinstance(source, SyntheticSource) and source.length >= length:
                raise UserError(
                    f"{length} is too short for the examples of data{place}: {source.length} tokens and an end-of-text"
                )
        return length

    @field_validator("batch_tokens", "micro_batch_tokens")
    @classmethod
    def _check_batch(cls, value: int | None, info: ValidationInfo) -> int | None:
        length, batch = info.data.get("sequence_length"), info.data.get("batch_tokens")
        if value is not None and length and value % length:
            raise UserError(f"{value} is not a multiple of sequence_length {length}")
        if value is not None and batch and batch % value:
            raise UserError(f"{value} does not divide batch_tokens {batch}")
        return value

    @field_validator("tokens")
    @classmethod
    def _check_tokens(cls, tokens: int, info: ValidationInfo) -> int:
        batch = info.data.get("batch_tokens")
        if batch and tokens % batch:
            raise UserError(f"{tokens} is not a multiple of batch_tokens {batch}")
        return tokens

    @field_validator("warmup_steps")
    @classmethod
    def _check_warmup(cls, warmup: int, info: ValidationInfo) -> int:
        tokens, batch = info.data.get("tokens"), info.data.get("batch_tokens")
        if tokens and batch and warmup >= tokens // batch:
            raise UserError(f"{warmup} must be fewer than the stage's {tokens // batch} steps")
        return warmup

    @field_validator("state")
    @classmethod
    def _check_state(cls, state: StateInitialisation, info: ValidationInfo) -> StateInitialisation:
        data = info.data.get("data")
        kinds = {source.kind for _, source in sources_of(data)} if data is not None else set()
        if isinstance(state, Tbtt) and (others := sorted(kinds - {"text"})):
            raise UserError(f"tbtt needs data of kind text, whose sequences follow each other, not {others[0]}")
        return state

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole stage."""
        return self.tokens // self.batch_tokens

    @property
    def batch_sequences(self) -> int:
        """Sequences per optimizer step."""
        return self.batch_tokens // self.sequence_length

    @property
    def micro_batch_sequences(self) -> int:
        """Sequences per forward pass."""
        return (self.micro_batch_tokens or self.batch_tokens) // self.sequence_length


class ExpectedModel(Strict):
    """The checkpoint the recipe was written for. `train` checks it; `replace` does the surgery."""

    base: str | None = None
    """Name of the Mamba2 the surgery started from, compared by its last part; null: any."""
    palimpsa_layers: Annotated[int, Field(ge=0)] | None = None
    """Number of replaced layers; null: any."""
    init: Literal["calibrated", "paper"] | None = None
    """How the importance parameters were initialised; null: any."""


class Samples(Strict):
    """Continuations of held-out text, before and after every stage."""

    count: Annotated[int, Field(ge=1)] = 3
    prompt_tokens: Annotated[int, Field(ge=1)] = 64
    """Tokens of a prompt, at most."""
    new_tokens: Annotated[int, Field(ge=1)] = 64
    """Tokens to generate, at most."""


class Evaluation(Strict):
    """What is looked at before, while and after a stage trains."""

    tokens: Annotated[int, Field(gt=0)] = 65536
    """Held-out tokens to score before and after, in whole sequences; at most what the stage's data hold out."""
    layers_every: Annotated[int, Field(ge=1)] | None = 100
    """Steps between two looks at the windows and importance of the replaced layers, on one held-out sequence; null:
    never."""
    samples: Samples | None = None
    """null: no text is generated."""


class Recipe(Strict):
    """A training run: what it starts from and its stages, in order."""

    name: Annotated[str, Field(min_length=1)]
    description: str = ""
    model: ExpectedModel = ExpectedModel()
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seeds the order of the data and everything else that is random."""
    checkpoint_steps: Annotated[int, Field(gt=0)] = 500
    """Optimizer steps between the checkpoints that an interrupted run goes on from."""
    keep_checkpoints: Annotated[int, Field(gt=0)] = 2
    """Whole checkpoints to keep of the stage under way. While one is written, the disk holds one more."""
    evaluation: Evaluation = Evaluation()
    report_to: tuple[Literal["tensorboard", "trackio", "wandb"], ...] = ()
    """Dashboards that get the log too, through transformers; each needs its own package and its own environment."""
    stages: Annotated[tuple[Stage, ...], Field(min_length=1)]

    @field_validator("stages")
    @classmethod
    def _check_names(cls, stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
        names = [stage.name for stage in stages]
        for name in names:
            if names.count(name) > 1:
                raise UserError(f"two stages are named {name!r}")
        return stages

    def to_yaml(self) -> str:
        """Return the recipe as YAML with every default written out and every path absolute."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def shipped_recipes() -> dict[str, Path]:
    """Names and files of the recipes that ship with the package."""
    folder = Path(str(files("palimpsa_surgery") / "stages" / "recipes"))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"), key=lambda path: path.stem)}


def hint(name: str | Path) -> str:
    """Name the shipped recipe that may have been meant, if one is close."""
    close = difflib.get_close_matches(str(name), shipped_recipes(), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def load_recipe(recipe: str | Path) -> Recipe:
    """Read and check a recipe: the name of a shipped one, or a YAML file.

    Raises:
        UserError: no such recipe, or one line that names every wrong field and what it held.
    """
    shipped = shipped_recipes()
    path = shipped.get(str(recipe), Path(recipe))
    if not path.is_file():
        raise UserError(f"recipe {str(recipe)!r} is neither a file nor one of: {', '.join(shipped)}{hint(recipe)}")
    content = read_yaml(path)
    try:
        # Through JSON, because strict validation takes a JSON array, but not a Python list, for a tuple.
        document = json.dumps(content)
    except RecursionError:
        raise UserError(f"recipe {path} is nested too deeply") from None
    except (TypeError, ValueError) as error:
        raise UserError(f"recipe {path} holds a value that is no text, number or list: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"recipe {path} must be a mapping with the keys {', '.join(Recipe.model_fields)}")
    try:
        return Recipe.model_validate_json(document, context={"folder": path.absolute().parent})
    except ValidationError as error:
        found = error.errors()
        # A list whose items are wrong is also reported as too short: keep the cause, not the consequence.
        causes = [e for e in found if not any(f["loc"][: len(e["loc"])] == e["loc"] for f in found if f is not e)]
        raise UserError(f"recipe {path.name}: {'; '.join(map(_describe, causes))}") from None


def differences(old: Any, new: Any, path: str = "") -> Iterator[str]:
    """Yield one phrase for each value that differs between two plain trees of dicts, lists and values."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys((*old, *new)):
            inner = f"{path}.{key}" if path else str(key)
            if key not in old or key not in new:
                yield f"{inner} is {'new' if key not in old else 'gone'}"
            else:
                yield from differences(old[key], new[key], inner)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (before, after) in enumerate(zip(old, new, strict=True)):
            yield from differences(before, after, f"{path}[{index}]")
    elif old != new:
        yield f"{path} was {_shorten(old)}, is {_shorten(new)}"


def _describe(error: ErrorDetails) -> str:
    """Say what is wrong with one field, as `stages[1].tokens: …`."""
    fields: type[BaseModel] | None = Recipe
    path = ""
    for number, part in enumerate(error["loc"], start=1):
        if isinstance(part, int):
            path += f"[{part}]"
        elif isinstance(part, str) and part in (kinds := _kinds_at(path)):  # pydantic's mark of the union's member
            fields = kinds[part]
        else:
            path += f".{part}" if path else str(part)
            if number < len(error["loc"]):  # the last part may be a key that its parent does not know
                fields = _NESTED.get(part, fields)
    value = _shorten(error["input"])
    match error["type"]:
        case "extra_forbidden":
            known = list(fields.model_fields)
            close = difflib.get_close_matches(str(error["loc"][-1]), known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"
            return f"{path}: unknown key ({hint})"
        case "missing":
            return f"{path}: required"
        case "union_tag_not_found" | "union_tag_invalid":
            return f"{path}.kind: must be one of {', '.join(_kinds_at(path))}"
        case "value_error":
            return f"{path}: {error['ctx']['error']}"
        case "int_type" | "int_from_float" | "int_parsing":
            return f"{path}: must be a whole number such as 1_000_000, got {value}"
        case "float_type":
            return f"{path}: must be a number, got {value}"
        case "too_short":
            return f"{path}: must not be empty"
    message = error["msg"].removeprefix("Input ").replace("should ", "must ")
    return f"{path}: {message[0].lower()}{message[1:]}, got {value}"


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _kinds_at(path: str) -> dict[str, type[Strict]]:
    """What may stand at a path where `kind` decides; empty elsewhere."""
    return _UNIONS.get(re.sub(r"\[\d+\]$", "", path.rpartition(".")[2]), {})


_UNIONS: dict[str, dict[str, type[Strict]]] = {
    "data": DATA_KINDS,
    "sources": MIXED_KINDS,
    "state": {
        "zero": ZeroState,
        "random_noise": RandomNoise,
        "fitted_noise": FittedNoise,
        "state_passing": StatePassing,
        "tbtt": Tbtt,
    },
}
_NESTED: dict[str, type[BaseModel]] = {
    "hub": HubSet,
    "part": Part,
    "stages": Stage,
    "packing": Packing,
    "schedule": Schedule,
    "non_finite": NonFinite,
    "lora": Lora,
    "model": ExpectedModel,
    "evaluation": Evaluation,
    "samples": Samples,
}
