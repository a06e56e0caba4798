"""What the package writes for itself to read later, and people may edit: each file's schema, and its reader.

Only what is read is checked; other keys are let through. A file that is not as it was written is one line that names
the field.
"""

import json
import os
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from palimpsa_surgery.errors import UserError
from palimpsa_surgery.surgery.weights import one_line

RUN_FILE, RECIPE_FILE, SURGERY_FILE = "run.json", "recipe.yaml", "surgery.json"

Count = Annotated[int, Field(ge=0)]
Window = float | Literal["Infinity"]


class Record(BaseModel):
    """Strict, with no NaN or infinity; keys that nothing reads are let through."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class Positions(Record):
    """Held-out loss by bins of positions, one value a bin in each list."""

    starts: list[Count]
    ends: list[Count]
    tokens: list[Count]
    loss: list[float]
    perplexity: list[float]

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        lengths = {len(getattr(self, name)) for name in type(self).model_fields}
        if len(lengths) > 1:
            raise ValueError("its lists are not of one length")
        return self


class Scores(Record):
    """Held-out results before or after a stage."""

    loss: float
    perplexity: float
    tokens: Count
    positions: Positions | None = None


class SourceCounts(Record):
    """What became of one source of a stage's data."""

    name: str
    too_long: Count = 0
    unanswered: Count = 0


class Data(Record):
    """What became of a stage's data."""

    sources: list[SourceCounts]


class StageRecord(Record):
    """One stage of a run."""

    name: str
    status: Literal["pending", "running", "done"]
    folder: Annotated[str, Field(pattern=r"^[0-9]+-[a-z0-9-]+$")]
    steps: Annotated[int, Field(gt=0)]
    tokens: Annotated[int, Field(gt=0)]
    data: Data | None
    before: Scores | None = None
    after: Scores | None = None
    seconds: float | None = None
    skipped_steps: Count = 0
    final: str | None

    @model_validator(mode="after")
    def _check_done(self) -> Self:
        results = (self.data, self.before, self.after, self.seconds)
        if self.status == "done" and None in results:
            raise ValueError("it is done, but not all of data, before, after and seconds are there")
        if self.final != (f"{self.folder}/final" if self.status == "done" else None):
            raise ValueError(f"final is {self.final!r}, which does not fit status {self.status}")
        return self


class RunRecord(Record):
    """The content of `run.json`."""

    version: Literal[1]
    recipe: str
    base: str
    base_fingerprint: str | None
    vocabulary: str | None = None
    seed: Count
    max_steps: Annotated[int, Field(gt=0)] | None
    tokenizer: str | None
    stages: Annotated[list[StageRecord], Field(min_length=1)]
    final: str | None
    versions: dict[str, str]

    @model_validator(mode="after")
    def _check_final(self) -> Self:
        if self.final != self.stages[-1].final:
            raise ValueError(f"final is {self.final!r}, but that of the last stage is {self.stages[-1].final!r}")
        return self


class RecipeStage(Record):
    """What the model card says of a recipe's stage."""

    name: str
    sequence_length: Annotated[int, Field(gt=0)]
    learning_rate: float
    importance_learning_rate: float
    data: dict[str, Any]


class RecipeRecord(Record):
    """What the model card says of a run's recipe, read by those who cannot use the recipes' own schema."""

    name: str
    description: str
    stages: list[RecipeStage]


class Init(Record):
    """How the new parameters were set."""

    kind: str | None = None


class Windows(Record):
    """What was measured before the surgery."""

    median_windows: dict[Annotated[str, Field(pattern=r"^[0-9]{1,6}$")], Window] | None = None
    tokens: Count | None = None


class DriftRecord(Record):
    """How far the surgery moved the model."""

    relative: float
    kl: float
    max_importance_ratio: float
    tokens: Count


class SurgeryRecord(Record):
    """The content of `surgery.json`."""

    base_model: str | None = None
    fingerprint: str | None = None
    init: Init = Init()
    analysis: Windows | None = None
    drift: DriftRecord | None = None


def read_run(folder: Path) -> dict[str, Any] | None:
    """Return what `run.json` says; None if `folder` holds no run.

    Raises:
        UserError: it is of another version, or not as it was written.
    """
    path = folder / RUN_FILE
    if not path.is_file():
        return None
    content = _json(path)
    if isinstance(content, dict) and content.get("version", 1) != 1:
        raise UserError(f"{path} is of version {content['version']!r}; this release reads version 1")
    return checked(content, RunRecord, f"{path} is not the record of a run")


def read_run_recipe(folder: Path, run: dict[str, Any]) -> dict[str, Any]:
    """Return the recipe of a run.

    Raises:
        UserError: it cannot be read, or is not that of `run`.
    """
    path = folder / RECIPE_FILE
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read: {one_line(error)}") from None
    recipe = checked(content, RecipeRecord, f"{path} is not the recipe of a run")
    names = [[stage["name"] for stage in record["stages"]] for record in (recipe, run)]
    if names[0] != names[1]:
        raise UserError(f"{path} has the stages {', '.join(names[0])}, but the run has {', '.join(names[1])}")
    return recipe


def read_surgery(folder: Path) -> dict[str, Any]:
    """Return what `replace` recorded about a checkpoint; empty for a checkpoint that it did not make.

    Raises:
        UserError: the record is not as it was written.
    """
    path = folder / SURGERY_FILE
    if not path.is_file():
        return {}
    return checked(_json(path), SurgeryRecord, f"{path} is not the record of a surgery")


def saved_file(path: str | os.PathLike, name: str, absent: str) -> Path:
    """The file that is meant by its own path or by that of its folder.

    Args:
        name: of the file in a folder.
        absent: what to say if there is none, such as "there is no analysis".

    Raises:
        UserError: there is none.
    """
    path = Path(path)
    file = path / name if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"{absent} at {path} (expected {name} in a folder, or the file)")
    return file


def check_version(content: dict[str, Any], version: int, file: str) -> None:
    """See that a file is of the version that this release reads; `file` names it in the message.

    Raises:
        UserError: it is of another one.
    """
    if content.get("version") != version or isinstance(content["version"], bool):
        raise UserError(f"{file} is of version {content.get('version')!r}; this program reads {version}")


def read_saved(path: str | os.PathLike, name: str, *, kind: str, key: str, version: int) -> tuple[Path, dict[str, Any]]:
    """Return the file of an analysis or diagnosis and its content.

    Args:
        path, name: as for `saved_file`.
        kind: the word for what it holds.
        key: what stands in each such file, beside the version, and makes it one.

    Raises:
        UserError: there is none, it cannot be read, or it is of another version or something else.
    """
    article = "an" if kind[0] in "aeiou" else "a"
    file = saved_file(path, name, f"there is no {kind}")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{kind} {file} cannot be read: {one_line(error)}") from None
    if not isinstance(content, dict) or not {"version", key} <= content.keys():
        raise UserError(f"{file} is not {article} {kind} (it has no version and {key})")
    check_version(content, version, f"{kind} {file}")
    return file, content


Checked = TypeVar("Checked")


def checked(content: Checked, schema: type[Record], complaint: str) -> Checked:
    """Return `content` itself if it suits the schema; else raise a UserError of one line that names the fields."""
    try:
        schema.model_validate(content)
    except ValidationError as error:
        found = [
            f"{'.'.join(map(str, item['loc'])) or 'it'}: {item['msg'].removeprefix('Value error, ')}"
            for item in error.errors(include_url=False)
        ]
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        raise UserError(one_line(f"{complaint}: {'; '.join(found[:3])}{more}", limit=400)) from None
    return content


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON: {one_line(error)}") from None
