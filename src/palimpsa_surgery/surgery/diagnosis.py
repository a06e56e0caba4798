"""What a model does with long text: perplexity by position, remembrance, and what its states go through."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from palimpsa_surgery.errors import UserError
from palimpsa_surgery.surgery.analysis import to_json
from palimpsa_surgery.surgery.checkpoints import fingerprint, load_model, load_tokenizer, open_source
from palimpsa_surgery.surgery.devices import enough_memory, resolve_device
from palimpsa_surgery.surgery.diagnosis_plots import plot_diagnosis
from palimpsa_surgery.surgery.outputs import check_output_directory, fresh_directory
from palimpsa_surgery.surgery.position_loss import (
    BINS_PER_OCTAVE,
    LossByPosition,
    PositionLoss,
    Sequences,
    log_edges,
    mean_and_error,
    run_sequence,
)
from palimpsa_surgery.surgery.progress import progress_bar
from palimpsa_surgery.surgery.records import read_saved
from palimpsa_surgery.surgery.remembrance import DISTANCES, effective_remembrance, remembrance_starts
from palimpsa_surgery.surgery.state_statistics import LayerDiagnosis, StateStatistics
from palimpsa_surgery.surgery.text import check_text_files
from palimpsa_surgery.surgery.weights import one_line
from palimpsa_surgery.surgery.windows import observing

VERSION = 1
DIAGNOSIS_FILE = "diagnosis.json"

_SAMPLES_PER_OCTAVE = 2  # of the positions at which states are looked at
_FIRST_SAMPLE = 16


@dataclass(frozen=True)
class Remembrance:
    """Effective remembrance (2507.02782 section 3.4); see `remembrance.effective_remembrance`.

    Attributes:
        distance: a key of `remembrance.DISTANCES`.
        length: T, tokens before the prediction.
        starts: t, tokens taken away from the front.
        values: mean of EffRem_T(t) over sequences.
        standard_errors: of that mean; None for a single sequence.
    """

    distance: str
    length: int
    starts: tuple[int, ...]
    values: tuple[float, ...]
    standard_errors: tuple[float, ...] | None


@dataclass(frozen=True)
class Diagnosis:
    """What `diagnose` measured; the content of a `diagnosis.json`.

    Attributes:
        model: the model as the user named it.
        model_fingerprint: hash of its weights.
        sequences: number of texts, each of which starts from empty states.
        sequence_length: tokens of each.
        text_fingerprint: hash of their token ids.
        loss: by position.
        remembrance: of the ends of the same texts' beginnings.
        positions: numbers of tokens after which the states were sampled.
        layers: in order.
    """

    model: str
    model_fingerprint: str
    sequences: int
    sequence_length: int
    text_fingerprint: str
    loss: PositionLoss
    remembrance: Remembrance
    positions: tuple[int, ...]
    layers: tuple[LayerDiagnosis, ...]

    @property
    def tokens(self) -> int:
        """Tokens of text measured."""
        return self.sequences * self.sequence_length

    @property
    def palimpsa_layers(self) -> list[int]:
        """Indices of the Palimpsa layers."""
        return [layer.layer for layer in self.layers if layer.kind == "palimpsa"]

    def to_json(self) -> str:
        """The content of the file: plain JSON; numbers it lacks are "Infinity", "-Infinity" and "NaN"."""
        return to_json({"version": VERSION} | _encode(asdict(self)))

    def save(self, directory: str | os.PathLike) -> Path:
        """Write `diagnosis.json` into an existing folder and return its path."""
        path = Path(directory) / DIAGNOSIS_FILE
        path.write_text(self.to_json(), encoding="utf-8")
        return path

    @classmethod
    def load(cls, path: str | os.PathLike) -> Self:
        """Read a diagnosis from its folder or from the file itself.

        Raises:
            UserError: there is none, or the file is damaged, of another version or something else.
        """
        file, content = read_saved(path, DIAGNOSIS_FILE, kind="diagnosis", key="loss", version=VERSION)
        fields = _decode({name: value for name, value in content.items() if name != "version"})
        try:
            found = TypeAdapter(cls).validate_json(json.dumps(fields), strict=True)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"])) or "it"
            raise UserError(f"diagnosis {file} is damaged: {where}: {one_line(first['msg'])}") from None
        if problem := found.loss.problem():
            raise UserError(f"diagnosis {file} is damaged: loss: {problem}")
        return found


def _encode(value: Any) -> Any:
    """Copy nested data with NaN and negative infinity as strings; `to_json` does so with infinity."""
    if isinstance(value, dict):
        return {key: _encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encode(item) for item in value]
    return {"nan": "NaN", "-inf": "-Infinity"}.get(str(value), value) if isinstance(value, float) else value


def _decode(value: Any) -> Any:
    """Copy parsed JSON with numbers for the strings that stand for them."""
    if isinstance(value, dict):
        return {key: _decode(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_decode(item) for item in value]
    return float(value) if value in ("Infinity", "-Infinity", "NaN") else value


def diagnose(
    model: str | os.PathLike,
    data: str | os.PathLike | Sequence[str | os.PathLike],
    output: str | os.PathLike,
    *,
    tokenizer: str | os.PathLike | None = None,
    max_length: int = 8192,
    sequences: int = 8,
    piece_length: int = 2048,
    remembrance_length: int | None = None,
    remembrance_points: int = 24,
    distance: str = "tv",
    device: str | None = None,
    overwrite: bool = False,
) -> Diagnosis:
    """Measure what a model does with long text: position by position, layer by layer, head by head.

    Writes a folder with `diagnosis.json` and a figure for each quantity. The text is read in pieces with carried
    states, so that memory does not depend on its length, apart from the ids of one sequence.

    Args:
        model: folder or Hub id of a Mamba2 checkpoint, native or Hugging Face, or of a hybrid.
        data: `.txt`, `.jsonl` (field `text`) or `.parquet` (column `text`) files, read end to end.
        output: folder to write.
        tokenizer: folder or Hub id, where the checkpoint does not bring its own.
        max_length: tokens per sequence, each of which starts from empty states; any length.
        sequences: at most so many; the text must have enough for one.
        piece_length: tokens computed at once; changes memory and speed only.
        remembrance_length: tokens before the prediction whose dependence on its beginning is measured; default:
            `max_length`, at most 8192.
        remembrance_points: suffixes compared, at most. They cost about half of `remembrance_length` tokens each.
        distance: between predictions: "tv", "js" or "cosine".
        device: such as "cpu" or "cuda:1"; default: a GPU if there is one.
        overwrite: replace `output` if it is not empty.

    Raises:
        UserError: any mistake in the above; text too short for one sequence; a prediction that is not finite.
    """
    given = [data] if isinstance(data, str | os.PathLike) else list(data)
    check_output_directory(output, overwrite=overwrite, inputs=[model, tokenizer, *given])
    if remembrance_length is None:
        remembrance_length = min(max_length, 8192)
    _check_lengths(max_length, sequences, piece_length, remembrance_length, remembrance_points)
    if distance not in DISTANCES:
        raise UserError(f"unknown distance {distance!r} (known: {', '.join(DISTANCES)})")
    files = check_text_files(given)
    where = resolve_device(device)
    source = open_source(model)
    # Unusable text is reported before weights are read.
    texts = Sequences(files, load_tokenizer(source, tokenizer), length=max_length, at_most=sequences)
    network = load_model(source, device=where)

    samples = log_edges(min(_FIRST_SAMPLE, max_length), max_length, _SAMPLES_PER_OCTAVE)
    states = StateStatistics(network, samples)
    losses = LossByPosition(log_edges(1, max_length, BINS_PER_OCTAVE))
    starts = remembrance_starts(remembrance_length, remembrance_points)
    distances: list[Tensor] = []
    total = sequences * (max_length + sum(remembrance_length - start for start in starts))
    with torch.inference_mode(), progress_bar("diagnosing", total) as advance:
        for ids in texts:
            ids = ids.to(where)
            try:
                with enough_memory(
                    f"{where} has too little memory for {piece_length} tokens: give --piece-length less"
                ):
                    with observing(network, states):
                        for nll in run_sequence(network, ids, piece_length, states):
                            losses.add(nll)
                            advance(len(nll))
                    losses.finish_sequence()
                    distances.append(
                        effective_remembrance(
                            network,
                            ids[:remembrance_length],
                            starts,
                            distance=distance,
                            piece_length=piece_length,
                            advance=advance,
                        )
                    )
            except UserError as error:
                raise UserError(f"model {source.name}: {error} (sequence {len(distances)})") from None

    values, errors = mean_and_error(torch.stack(distances))
    diagnosis = Diagnosis(
        model=source.name,
        model_fingerprint=fingerprint(network),
        sequences=texts.count,
        sequence_length=max_length,
        text_fingerprint=texts.fingerprint,
        loss=losses.summary(),
        remembrance=Remembrance(distance, remembrance_length, tuple(starts), values, errors),
        positions=tuple(samples),
        layers=states.summary(),
    )
    with fresh_directory(output, overwrite=overwrite) as directory:
        diagnosis.save(directory)
        plot_diagnosis(diagnosis, directory)
    return diagnosis


def _check_lengths(
    max_length: int, sequences: int, piece_length: int, remembrance_length: int, remembrance_points: int
) -> None:
    for name, value, least in (
        ("max length", max_length, 2),
        ("number of sequences", sequences, 1),
        ("piece length", piece_length, 1),
        ("remembrance length", remembrance_length, 2),
        ("number of remembrance points", remembrance_points, 2),
    ):
        if value < least:
            raise UserError(f"{name} must be at least {least}, got {value}")
    if remembrance_length > max_length:
        raise UserError(f"remembrance length {remembrance_length} exceeds max length {max_length}")
