"""The part of a recipe that says what a stage reads: text, instructions, synthetic tasks, or a mixture of them."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from palimpsa_surgery.errors import UserError
from palimpsa_surgery.surgery.assets import asset_path

TEXT_SUFFIXES = (".txt", ".jsonl", ".parquet")
ROW_SUFFIXES = (".jsonl", ".parquet")
ASSET_PREFIX = "asset:"
LOCAL_BUILDERS = ("parquet", "json")
"""What is no data set of the Hub, but reads files of this machine as one."""
LARGEST_NUMBER = 2**53
"""Whole numbers are no larger: up to here all that is computed with them is exact, in any library."""


class Strict(BaseModel):
    """Frozen; no unknown keys, no silent conversions ("10B" is not a number), nothing infinite or uncountable."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _check_size(cls, value: Any) -> Any:
        if isinstance(value, int) and value > LARGEST_NUMBER:
            raise UserError(f"must be no more than {LARGEST_NUMBER}")
        return value


def _resolve_file(name: str, info: ValidationInfo) -> str:
    """Make a path absolute (relative ones count from the recipe's folder) and see that the file exists."""
    if name.startswith(ASSET_PREFIX):
        asset_path(name.removeprefix(ASSET_PREFIX))
        return name
    folder = (info.context or {}).get("folder", Path())
    path = Path(folder, Path(name).expanduser()).absolute()
    if not path.is_file():
        raise UserError(f"no such file: {path}")
    if path.stat().st_size == 0:
        raise UserError(f"file is empty: {path}")
    return str(path)


def _with_suffix(*suffixes: str) -> AfterValidator:
    def check(name: str) -> str:
        if not name.endswith(suffixes):
            raise UserError(f"must end in {', '.join(suffixes)}, got {name!r}")
        return name

    return AfterValidator(check)


DataFile = Annotated[str, AfterValidator(_resolve_file)]
TextFiles = Annotated[tuple[Annotated[DataFile, _with_suffix(*TEXT_SUFFIXES)], ...], Field(min_length=1)]
RowFiles = Annotated[tuple[Annotated[DataFile, _with_suffix(*ROW_SUFFIXES)], ...], Field(min_length=1)]
Column = Annotated[str, Field(min_length=1)]


def local_path(file: str) -> Path:
    """Where a recipe's `files` entry lies on this machine."""
    return asset_path(file.removeprefix(ASSET_PREFIX)) if file.startswith(ASSET_PREFIX) else Path(file)


class HubSet(Strict):
    """A data set of the Hugging Face Hub, which is streamed: only what the stage needs of it is downloaded."""

    dataset: Annotated[str, Field(pattern=r"^[\w.-]+(/[\w.-]+)?$")]
    """Its id, such as `HuggingFaceFW/fineweb-edu`; or `parquet` or `json`, to read `data_files` of this machine."""
    config: str | None = None
    """Its configuration (subset); null: the only or the default one."""
    split: Annotated[str, Field(min_length=1)] = "train"
    revision: str | None = None
    """Branch, tag or commit; null: the newest."""
    data_files: Annotated[tuple[str, ...] | None, Field(min_length=1, validate_default=True)] = None
    """Only the files that match these patterns; null: all of the split."""

    @field_validator("data_files")
    @classmethod
    def _check_files(cls, patterns: tuple[str, ...] | None, info: ValidationInfo) -> tuple[str, ...] | None:
        if patterns is None and (dataset := info.data.get("dataset", "/")) in LOCAL_BUILDERS:
            raise UserError(f"required, since {dataset} reads files of this machine")
        return patterns


class Part(Strict):
    """Some of a set's rows, chosen by a hash that no seed changes: ranges apart have no row in common, in any run."""

    by: Column
    """Rows with the same value here (null is one) are in one part: a repository, or an id for each row on its own."""
    range: tuple[Annotated[float, Field(ge=0, le=1)], Annotated[float, Field(ge=0, le=1)]]
    """From which to below which fraction of the values: `[0, 0.5]` and `[0.5, 1]` are two halves."""

    @field_validator("range")
    @classmethod
    def _check_range(cls, ends: tuple[float, float]) -> tuple[float, float]:
        if not ends[0] < ends[1]:
            raise UserError(f"must begin below its end, got {list(ends)}")
        return ends

    def holds(self, value: object) -> bool:
        """Whether rows with this value are in the part."""
        digest = hashlib.blake2b(str(value).encode("utf-8", "surrogatepass"), digest_size=6).digest()
        return self.range[0] <= int.from_bytes(digest, "big") / 2**48 < self.range[1]


class Rows(Strict):
    """What every source has that is read row by row: from `files` or from `hub`, one of them."""

    files: RowFiles | None = None
    """Local `.jsonl` or `.parquet` files, or `asset:NAME` for one that ships with the package."""
    hub: Annotated[HubSet | None, Field(validate_default=True)] = None
    """A data set of the Hub instead."""
    filter: dict[Column, Any] = {}
    """Columns, and the value or the list of values of the rows that are kept. Dots lead into nested columns, here
    and wherever a column is named: `meta.redpajama_set_name`."""
    part: Part | None = None
    """Keep a part of the rows only. Stages that read one set share no document, held out or not, if each reads a part
    of its own `by` the same column."""
    shuffle_files: bool = False
    """Read the files, not the rows in them, in an order that the recipe's seed decides."""

    @field_validator("hub")
    @classmethod
    def _check_source(cls, hub: HubSet | None, info: ValidationInfo) -> HubSet | None:
        if "files" in info.data and (info.data["files"] is None) == (hub is None):
            raise UserError("give either files or hub")
        return hub

    @field_validator("filter")
    @classmethod
    def _check_filter(cls, columns: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        _check_no_txt("filter", bool(columns), info)
        for column, wanted in columns.items():
            values = _listed(wanted)
            if not values or not all(isinstance(value, str | int | float) for value in values):
                raise UserError(f"{column} must hold a value or a list of values, got {wanted!r}")
        return columns

    @field_validator("part")
    @classmethod
    def _check_part(cls, part: Part | None, info: ValidationInfo) -> Part | None:
        _check_no_txt("part", part is not None, info)
        return part

    @property
    def deciding(self) -> list[str]:
        """The columns that decide whether a row is kept."""
        return [*self.filter, *([self.part.by] if self.part else [])]


def is_wanted(value: Any, wanted: Any) -> bool:
    """Whether a value passes a filter's value or list of values. To Python true is 1; here it is not."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in _listed(wanted))


def _listed(wanted: Any) -> list:
    return wanted if isinstance(wanted, list) else [wanted]


def _check_no_txt(field: str, given: bool, info: ValidationInfo) -> None:
    plain = [file for file in info.data.get("files") or () if file.endswith(".txt")]
    if given and plain:
        raise UserError(f"{field} needs columns, and a .txt file has none: {plain[0]}")


class TextSource(Rows):
    """Plain text: documents are joined, with the end-of-text token after each, and cut into sequences."""

    kind: Literal["text"]
    files: TextFiles | None = None
    """Local `.txt`, `.jsonl` or `.parquet` files, or `asset:NAME` for one that ships with the package."""
    column: Column = "text"
    """The column that holds the text (a `.txt` file has no columns, it is one document)."""
    group_by: Column | None = None
    """Make one document of those that have the same value here, such as all files of a repository. Only documents
    of one file and of one window are brought together."""
    group_window: Annotated[int, Field(ge=2)] = 10_000
    """Documents that are held in memory at once to be grouped. Each file of the source is cut into such windows."""
    max_tokens: Annotated[int, Field(ge=2)] | None = None
    """Use this many tokens from the start of the source at most; null: as many as the stage needs."""

    @field_validator("group_by")
    @classmethod
    def _check_group(cls, group_by: str | None, info: ValidationInfo) -> str | None:
        _check_no_txt("group_by", group_by is not None, info)
        return group_by


class InstructionSource(Rows):
    """Prompts and answers: whole examples are packed into sequences, and only answers are learnt."""

    kind: Literal["instruction"]
    prompt_column: Column = "instruction"
    answer_column: Column = "output"
    template: str = "{prompt}\n\n{answer}"
    """What the model reads: `{prompt}` once, then text of your own, then `{answer}`, which ends it."""

    @field_validator("template")
    @classmethod
    def _check_template(cls, template: str) -> str:
        once = template.count("{prompt}") == template.count("{answer}") == 1
        if not once or not template.endswith("{answer}"):
            raise UserError("must hold {prompt} once and end in its only {answer}")
        return template


class SyntheticSource(Strict):
    """Examples of a synthetic task (`stages/synthetic`), made as they are needed and packed whole."""

    kind: Literal["synthetic"]
    task: str
    """`passkey`, `variables`, `copying`, `needles`, or one of RULER's forms of the last, such as `niah_multikey_1`."""
    length: Annotated[int, Field(ge=1)]
    """Tokens of prompt and answer together that no example exceeds; the end-of-text token comes on top."""
    min_length: Annotated[int, Field(ge=1)] | None = None
    """Draw each example's length uniformly from here to `length`; null: always `length`."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seeds the examples."""
    learn: Literal["answer", "all"] = "answer"
    """Which tokens are targets. In a mixture, answers alone hardly count beside text, of which every token is one."""
    options: dict[str, Any] = {}
    """The task's own, such as `haystack: essay` or `keys: 4`."""

    @field_validator("task")
    @classmethod
    def _check_task(cls, task: str) -> str:
        from palimpsa_surgery.stages.synthetic import TEXT_TASKS

        if task not in TEXT_TASKS:
            raise UserError(f"must be one of {', '.join(TEXT_TASKS)}, got {task!r}")
        return task

    @field_validator("options")
    @classmethod
    def _check_options(cls, options: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        from palimpsa_surgery.stages.synthetic import make_task

        if isinstance(files := options.get("files"), list):
            options = options | {"files": [_resolve_file(str(name), info) for name in files]}
        if "task" in info.data:
            make_task(info.data["task"], options)
        return options

    @field_validator("min_length")
    @classmethod
    def _check_lengths(cls, shortest: int | None, info: ValidationInfo) -> int | None:
        longest = info.data.get("length")
        if shortest is not None and longest is not None and shortest > longest:
            raise UserError(f"{shortest} is more than length {longest}")
        return shortest


class _HeldOut(Strict):
    held_out: Annotated[float, Field(gt=0, le=0.5)] = 0.02
    """Fraction of the data, at their start, that is evaluated and never trained on; at most, and where the data
    are enough, what `evaluation.tokens` scores. Each stage holds out what it reads first: stages that read one set
    through other filters, groups or mixtures hold out other documents of it, and the plan says so; a `part` for each
    keeps them apart."""


class _Share(Strict):
    name: Annotated[str, Field(min_length=1, max_length=40)] | None = None
    """What the plan and the record call this source; null: its set, first file or task."""
    share: Annotated[float, Field(gt=0, le=1)]
    """Its part of the tokens that are read, those that fill up sequences left out; not of the loss, in which every
    target weighs the same: a source of which only answers are learnt has less of it."""
    repeat: bool = False
    """Begin again when the source has run out, rather than stop with an error."""


class TextData(TextSource, _HeldOut):
    """A stage of text."""


class InstructionData(InstructionSource, _HeldOut):
    """A stage of instructions."""


class SyntheticData(SyntheticSource, _HeldOut):
    """A stage of a synthetic task."""


class MixedText(TextSource, _Share):
    """Text as a part of a mixture."""


class MixedInstructions(InstructionSource, _Share):
    """Instructions as a part of a mixture."""


class MixedTask(SyntheticSource, _Share):
    """A synthetic task as a part of a mixture."""


Mixed = Annotated[MixedText | MixedInstructions | MixedTask, Field(discriminator="kind")]


class MixtureData(_HeldOut):
    """Several sources by their share of tokens. Each sequence is of one source: that which is furthest behind."""

    kind: Literal["mixture"]
    sources: Annotated[tuple[Mixed, ...], Field(min_length=1, max_length=256)]

    @field_validator("sources")
    @classmethod
    def _check_shares(cls, sources: tuple[Mixed, ...]) -> tuple[Mixed, ...]:
        total = sum(source.share for source in sources)
        if abs(total - 1) > 1e-6:
            raise UserError(f"the shares must sum to 1, got {total:g} ({' + '.join(f'{s.share:g}' for s in sources)})")
        return sources


Source = TextSource | InstructionSource | SyntheticSource
Data = Annotated[TextData | InstructionData | SyntheticData | MixtureData, Field(discriminator="kind")]

DATA_KINDS: dict[str, type[Strict]] = {
    "text": TextData,
    "instruction": InstructionData,
    "synthetic": SyntheticData,
    "mixture": MixtureData,
}
MIXED_KINDS: dict[str, type[Strict]] = {
    "text": MixedText,
    "instruction": MixedInstructions,
    "synthetic": MixedTask,
}


def sources_of(data: TextData | InstructionData | SyntheticData | MixtureData) -> list[tuple[str, Source]]:
    """The sources of a stage's data, each behind its place in `data`: `""`, or `.sources[2]`."""
    if isinstance(data, MixtureData):
        return [(f".sources[{index}]", source) for index, source in enumerate(data.sources)]
    return [("", data)]


def name_of(source: Source) -> str:
    """What the plan and the record call a source."""
    if name := getattr(source, "name", None):
        return name
    if isinstance(source, SyntheticSource):
        return source.task
    if source.hub is not None:
        return source.hub.dataset
    first = local_path(source.files[0]).name
    return first if len(source.files) == 1 else f"{first} and {len(source.files) - 1} more"


def origin_of(source: Source) -> str:
    """Where a source comes from: the Hub set, with its revision, the files, or the task."""
    if isinstance(source, SyntheticSource):
        return f"generated: {source.task}"
    if source.hub is None:
        return ", ".join(local_path(file).name for file in source.files)
    config = f" ({source.hub.config})" if source.hub.config else ""
    return f"{source.hub.dataset}{config} @ {source.hub.revision or 'main'}"


def shared_sets(pairs: Iterable[tuple[Source, Source]]) -> str:
    """Hub sets and files of which both sources of a pair may read the same rows, since nothing keeps them apart."""
    shared: dict[str, str] = {}
    for one, other in pairs:
        if isinstance(one, Rows) and isinstance(other, Rows) and not _disjoint(one, other):
            theirs = _sets(other)
            shared |= {key: name for key, name in _sets(one).items() if key in theirs}
    return ", ".join(shared.values())


def _sets(source: Rows) -> dict[str, str]:
    """What a source reads, and what it is called in messages."""
    if source.hub is None:
        return {file: local_path(file).name for file in source.files}
    if source.hub.dataset in LOCAL_BUILDERS:
        return {pattern: Path(pattern).name for pattern in source.hub.data_files or ()}
    return {f"hub:{source.hub.dataset}": source.hub.dataset}  # configurations and splits may overlap


def _disjoint(one: Rows, other: Rows) -> bool:
    """Whether no row is kept by both."""
    if one.part and other.part and one.part.by == other.part.by:
        first, second = sorted((one.part.range, other.part.range))
        if first[1] <= second[0]:
            return True
    for column in one.filter.keys() & other.filter.keys():
        if not any(is_wanted(value, other.filter[column]) for value in _listed(one.filter[column])):
            return True
    return False
