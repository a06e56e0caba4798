"""The verb `compare`: models, or results of `eval` and `diagnose`, side by side."""

import datetime
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import reduce
from itertools import combinations
from pathlib import Path

import torch
from torch import Tensor

from palimpsa_surgery._version import __version__
from palimpsa_surgery.errors import UserError
from palimpsa_surgery.surgery.analysis import to_json
from palimpsa_surgery.surgery.checkpoints import Source, fingerprint, load_model, load_tokenizer, open_source
from palimpsa_surgery.surgery.comparison_plots import comparison_markdown, plot_comparison
from palimpsa_surgery.surgery.devices import device_name, enough_memory, resolve_device
from palimpsa_surgery.surgery.diagnosis import DIAGNOSIS_FILE, Diagnosis
from palimpsa_surgery.surgery.dtypes import check_dtype, choose_dtype, dtype_name
from palimpsa_surgery.surgery.outputs import check_output_directory, fresh_directory
from palimpsa_surgery.surgery.position_loss import (
    BINS_PER_OCTAVE,
    LossByPosition,
    PositionLoss,
    Sequences,
    log_edges,
    run_sequence,
)
from palimpsa_surgery.surgery.progress import progress_bar
from palimpsa_surgery.surgery.results import RESULTS_FILE, Evaluation
from palimpsa_surgery.surgery.speed import Speed, bytes_of_states, measure_speed
from palimpsa_surgery.surgery.state_statistics import StateStatistics
from palimpsa_surgery.surgery.text import check_text_files

VERSION = 1
COMPARISON_FILE = "comparison.json"


@dataclass(frozen=True)
class Text:
    """What perplexities were measured on.

    Attributes:
        sequences, length: so many, of so many tokens each.
        fingerprint: hash of the token ids.
    """

    sequences: int
    length: int
    fingerprint: str


@dataclass(frozen=True)
class Subject:
    """One model of a comparison, and what is known of it; None where that was neither given nor measured.

    Attributes:
        name: as the user gave it, or as the result names it.
        fingerprint: hash of its weights, by which results of the same model are brought together.
        loss: by position, on `text`.
        state_bytes: of what it carries from one token to the next, one sequence, all layers.
        evaluations: by preset.
    """

    name: str
    fingerprint: str
    parameters: int | None = None
    palimpsa_layers: tuple[int, ...] | None = None
    loss: PositionLoss | None = None
    text: Text | None = None
    speed: Speed | None = None
    state_bytes: int | None = None
    evaluations: dict[str, Evaluation] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """What `compare` brought together; the content of a `comparison.json`.

    Attributes:
        subjects: at least two models, in the order given.
        device: where speeds were measured; None if none was.
        dtype: type of the measured models' parameters.
    """

    subjects: tuple[Subject, ...]
    device: str | None
    dtype: str | None

    @property
    def presets(self) -> list[str]:
        """Presets that two or more were evaluated on."""
        names = dict.fromkeys(preset for subject in self.subjects for preset in subject.evaluations)
        return [name for name in names if sum(name in subject.evaluations for subject in self.subjects) > 1]

    @property
    def labels(self) -> list[str]:
        """Short names, no two the same: a folder's without those around it, if that is enough to tell them apart."""

        def distinct(names: list[str], longer: list[str]) -> list[str]:
            return [
                more if names.count(name) > 1 or not name else name for name, more in zip(names, longer, strict=True)
            ]

        names = [subject.name for subject in self.subjects]
        short = [name if name.count("/") == 1 and not Path(name).exists() else Path(name).name for name in names]
        return distinct(distinct(short, names), [f"{s.name} ({s.fingerprint[:6]})" for s in self.subjects])

    def save(self, directory: str | os.PathLike) -> Path:
        """Write `comparison.json` into an existing folder and return its path."""
        path = Path(directory) / COMPARISON_FILE
        subjects = [
            {key: value for key, value in asdict(replace(subject, evaluations={})).items() if key != "evaluations"}
            | {"evaluations": {name: e.model_dump(mode="json") for name, e in subject.evaluations.items()}}
            for subject in self.subjects
        ]
        head = {"version": VERSION, "kind": "comparison", "palimpsa_surgery": __version__}
        head |= {"date": datetime.date.today().isoformat(), "device": self.device, "dtype": self.dtype}
        path.write_text(to_json(head | {"models": subjects}), encoding="utf-8")
        return path


def compare(
    items: Sequence[str | os.PathLike],
    output: str | os.PathLike,
    *,
    data: str | os.PathLike | Sequence[str | os.PathLike] | None = None,
    tokenizer: str | os.PathLike | None = None,
    max_length: int = 2048,
    sequences: int = 8,
    device: str | None = None,
    dtype: str | None = None,
    overwrite: bool = False,
) -> Comparison:
    """Bring models, or results of `eval` and `diagnose`, side by side.

    Results are used as they are; models are measured: perplexity by position on `data`, speed, and bytes of state.
    Results and models with the same weights become one column. Writes a folder with `comparison.json`,
    `comparison.md` and `comparison.png`.

    Args:
        items: model folders or Hub ids, and folders or files that `eval` and `diagnose` wrote.
        output: folder to write.
        data: text files, needed where there is a model to measure.
        tokenizer: folder, tokenizer.json or Hub id, where a model does not bring its own.
        max_length: tokens per sequence of the text, and of the prompt whose speed is measured.
        sequences: of text, at most.
        device: such as "cpu" or "cuda:1"; default: a GPU if there is one.
        dtype: of the measured models' parameters; default: on a GPU their own type, or the one that
            holds those of all; float32 elsewhere.
        overwrite: replace `output` if it is not empty.

    Raises:
        UserError: any mistake in the above; items that are of fewer than two models, or that cannot be compared.
    """
    files = [] if data is None else [data] if isinstance(data, str | os.PathLike) else list(data)
    check_output_directory(output, overwrite=overwrite, inputs=[*items, *files, tokenizer])
    for name, value, least in (("max length", max_length, 2), ("number of sequences", sequences, 1)):
        if value < least:
            raise UserError(f"{name} must be at least {least}, got {value}")
    check_dtype(dtype)
    where = resolve_device(device)
    if len(items) < 2:
        raise UserError(f"compare needs two models or results at least, got {len(items)}")
    results = {index: read_result(item) for index, item in enumerate(items)}
    models = [index for index, result in results.items() if result is None]
    sources = {index: open_source(items[index]) for index in models}
    if models and not files:
        raise UserError(f"{items[models[0]]} is a model, to be measured on text: give --data FILE")
    if files and not models:
        raise UserError("--data is text to measure models on, but only results are given")
    texts = check_text_files(files) if files else []
    given = [result for result in results.values() if isinstance(result, Diagnosis)]
    for found in given if models else ():
        if (found.sequences, found.sequence_length) != (sequences, max_length):
            raise UserError(
                f"{found.model} was diagnosed on {found.sequences} sequences of {found.sequence_length} tokens: give "
                f"--sequences {found.sequences} --max-length {found.sequence_length}"
            )
    kind = _common_dtype(list(sources.values()), where, dtype)
    subjects: dict[str, Subject] = {}
    measured: dict[str, tuple[Source, list[Tensor]]] = {}  # by fingerprint: a model, and its text's token ids
    for index, item in enumerate(items):
        result = results[index]
        if result is None:
            words = load_tokenizer(sources[index], tokenizer)
            text = Sequences(texts, words, length=max_length, at_most=sequences)
            ids = list(text)
            part = _unmeasured(sources[index], text, where)
            if part.fingerprint in measured:
                raise UserError(f"{item} has the same weights as {measured[part.fingerprint][0].name}")
            measured[part.fingerprint] = sources[index], ids
        else:
            part = _subject(result)
        subjects[part.fingerprint] = _merge(subjects.get(part.fingerprint), part, os.fspath(item))
    device_used, dtype_used = (device_name(where), dtype_name(kind)) if kind else (None, None)
    # Measuring takes long: whatever makes it useless is noticed before.
    check_comparable(Comparison(tuple(subjects.values()), device_used, dtype_used))
    for stored, (source, ids) in measured.items():
        subjects[stored] = measure(subjects[stored], source, ids, where, kind)
    done = Comparison(tuple(subjects.values()), device_used, dtype_used)
    check_comparable(done)
    with fresh_directory(output, overwrite=overwrite) as directory:
        done.save(directory)
        (directory / "comparison.md").write_text(comparison_markdown(done), encoding="utf-8")
        plot_comparison(done, directory / "comparison.png")
    return done


def _common_dtype(sources: Sequence[Source], device: torch.device, dtype: str | None) -> torch.dtype | None:
    """The type that all models are measured in, since speeds in several say nothing; None without models."""
    kinds = [choose_dtype(dtype, source.dtype, device) for source in sources]
    return reduce(torch.promote_types, kinds) if kinds else None


def read_result(item: str | os.PathLike) -> Evaluation | Diagnosis | None:
    """Read what `eval` or `diagnose` wrote; None if `item` is neither's, and so a model."""
    path = Path(item)
    readers: tuple[tuple[str, Callable], ...] = ((RESULTS_FILE, Evaluation.load), (DIAGNOSIS_FILE, Diagnosis.load))
    found = [read for name, read in readers if path.name == name or (path / name).is_file()] if str(item) else []
    if len(found) > 1:
        raise UserError(f"{path} holds both {RESULTS_FILE} and {DIAGNOSIS_FILE}: name the file")
    if not found and path.is_file():
        raise UserError(f"{path} is neither a {RESULTS_FILE} of `eval` nor a {DIAGNOSIS_FILE} of `diagnose`")
    if not found and path.is_dir() and str(item) and not (path / "config.json").is_file():
        raise UserError(f"{path} holds no {RESULTS_FILE}, {DIAGNOSIS_FILE} or config.json: neither results nor a model")
    return found[0](path) if found else None


def _subject(result: Evaluation | Diagnosis) -> Subject:
    if isinstance(result, Evaluation):
        return Subject(
            name=result.model,
            fingerprint=result.model_fingerprint,
            parameters=result.parameters,
            palimpsa_layers=result.palimpsa_layers,
            evaluations={result.preset: result},
        )
    return Subject(
        name=result.model,
        fingerprint=result.model_fingerprint,
        palimpsa_layers=tuple(result.palimpsa_layers),
        loss=result.loss,
        text=Text(result.sequences, result.sequence_length, result.text_fingerprint),
    )


def _unmeasured(source: Source, text: Sequences, device: torch.device) -> Subject:
    """A model and, read to its end, the text that it is to be measured on."""
    model = load_model(source, device=device, dtype=source.dtype)
    return Subject(
        name=source.name,
        fingerprint=fingerprint(model),
        parameters=model.num_parameters(),
        palimpsa_layers=tuple(model.config.palimpsa_layers),
        text=Text(text.count, text.length, text.fingerprint),
    )


def _merge(known: Subject | None, new: Subject, item: str) -> Subject:
    """Bring together what is known of one model."""
    if known is None:
        return new
    if twice := sorted(known.evaluations.keys() & new.evaluations.keys()):
        raise UserError(f"{item}: there already are scores of {twice[0]} for these weights, those of {known.name}")
    if new.loss is not None and known.loss is not None:
        raise UserError(f"{item}: there already is a diagnosis of these weights, that of {known.name}")
    return replace(
        known,
        parameters=known.parameters or new.parameters,
        loss=known.loss or new.loss,
        text=known.text or new.text,
        evaluations=known.evaluations | new.evaluations,
    )


def check_comparable(comparison: Comparison) -> None:
    """See that what stands side by side was measured alike.

    Raises:
        UserError: there are fewer than two models, one has nothing in common with any other, or what they have in
            common was measured on other text or under other conditions.
    """
    subjects = comparison.subjects
    if len(subjects) < 2:
        raise UserError(f"all items are of the same weights, those of {subjects[0].name}")
    for subject in subjects:
        others = [other for other in subjects if other is not subject]
        if not any(
            (subject.text and other.text) or subject.evaluations.keys() & other.evaluations.keys() for other in others
        ):
            kinds = [*subject.evaluations, *(["perplexities by position"] if subject.text else [])]
            raise UserError(f"{subject.name} has only {' and '.join(kinds)}, which no other has: nothing to compare")
    for one, other in combinations(subjects, 2):
        if one.text and other.text and one.text != other.text:
            shapes = [f"{text.sequences} sequences of {text.length} tokens" for text in (one.text, other.text)]
            difference = " against ".join(shapes) if shapes[0] != shapes[1] else "other text or another tokenizer"
            raise UserError(f"{one.name} and {other.name} were measured on different text: {difference}")
        if one.loss and other.loss and (one.loss.starts, one.loss.ends) != (other.loss.starts, other.loss.ends):
            raise UserError(f"{one.name} and {other.name} were measured in different bins of positions")
        for preset in one.evaluations.keys() & other.evaluations.keys():
            if difference := _difference(one.evaluations[preset], other.evaluations[preset]):
                raise UserError(f"{one.name} and {other.name} were evaluated differently on {preset}: {difference}")


def _difference(one: Evaluation, other: Evaluation) -> str | None:
    """The first condition that makes numbers incomparable, and its two values."""
    for name, word in (("limit", "limit"), ("max_length", "length"), ("lengths", "lengths")):
        first, second = getattr(one, name), getattr(other, name)
        if first != second:
            return f"{word} {first or 'none'} against {second or 'none'}"
    if one.tasks.keys() != other.tasks.keys():
        return f"task {sorted(one.tasks.keys() ^ other.tasks.keys())[0]} is in one only"
    for task, first in one.tasks.items():
        second = other.tasks[task]
        for name in ("version", "num_fewshot", "dataset", "available", "documents"):
            if getattr(first, name) != getattr(second, name):
                return f"{task} has {name} {getattr(first, name)} against {getattr(second, name)}"
    return None


@torch.inference_mode()
def measure(
    subject: Subject, source: Source, texts: Sequence[Tensor], device: torch.device, dtype: torch.dtype
) -> Subject:
    """Add what can be measured of a model: perplexity by position, speed and bytes of state.

    Args:
        source: the model.
        texts: token ids, [T] each.
        dtype: of the model's parameters.

    Raises:
        UserError: a prediction is not finite, or there is too little memory.
    """
    length = len(texts[0])
    losses = LossByPosition(log_edges(1, length, BINS_PER_OCTAVE))
    with enough_memory(f"{device} has too little memory for {source.name} at {length} tokens"):
        model = load_model(source, device=device, dtype=dtype)
        with progress_bar(f"measuring {Path(source.name).name}", len(texts) * length) as advance:
            for number, ids in enumerate(texts):
                try:
                    for nll in run_sequence(model, ids.to(device), 2048, StateStatistics(model, [length])):
                        losses.add(nll)
                        advance(len(nll))
                except UserError as error:
                    raise UserError(f"model {source.name}: {error} (sequence {number})") from None
                losses.finish_sequence()
        speed = measure_speed(model, length)
    return replace(subject, loss=losses.summary(), speed=speed, state_bytes=bytes_of_states(model))
