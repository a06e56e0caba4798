"""How long each layer of a model remembers, measured on text once and kept in a versioned file."""

import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal, Self

import torch

from palimpsa_surgery.errors import UserError
from palimpsa_surgery.surgery.checkpoints import fingerprint, load_model, load_tokenizer, open_source
from palimpsa_surgery.surgery.devices import enough_memory, resolve_device
from palimpsa_surgery.surgery.outputs import check_output_directory, fresh_directory
from palimpsa_surgery.surgery.plots import plot_windows
from palimpsa_surgery.surgery.progress import track
from palimpsa_surgery.surgery.records import read_saved
from palimpsa_surgery.surgery.selection import DEFAULT_TOP_K, top_layers
from palimpsa_surgery.surgery.text import check_text_files, iter_token_blocks
from palimpsa_surgery.surgery.weights import one_line
from palimpsa_surgery.surgery.windows import WindowStatistics, observing

VERSION = 1
ANALYSIS_FILE = "analysis.json"
FIGURE_FILE = "windows.png"

LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)
"""Quantiles kept for each layer."""

SAMPLE_TOKENS = 4096
"""Tokens of the text kept in the analysis, to calibrate and check replacements on."""


@dataclass(frozen=True)
class LayerWindows:
    """Windows N_t of one layer, in tokens; inf where nothing is forgotten.

    Attributes:
        layer: index of the layer.
        kind: what the layer is; Palimpsa layers have windows like any other.
        median_window: the layer's score, the median over all tokens and heads.
        paper_median_window: the paper's score, the median over positions of the median over heads (A.10).
        quantiles: from level, written as "0.05", to the quantile over all tokens and heads.
        head_medians: median over tokens of each head.
        position_medians: for each bin of positions, the median over its tokens of the median over heads.
    """

    layer: int
    kind: Literal["mamba2", "palimpsa"]
    median_window: float
    paper_median_window: float
    quantiles: dict[str, float]
    head_medians: tuple[float, ...]
    position_medians: tuple[float, ...]


@dataclass(frozen=True)
class Analysis:
    """What `analyze` measured; the content of an `analysis.json`.

    Attributes:
        model: the model as the user named it.
        model_fingerprint: hash of its weights, which tells whether an analysis belongs to a model.
        tokens: tokens of text measured.
        sequence_length: tokens per sequence; every sequence starts from an empty state.
        layers: one entry per layer, in order.
        positions: first position of each bin of `position_medians`.
        calibration_sample: token ids of the first sequences, about SAMPLE_TOKENS tokens in all.
    """

    model: str
    model_fingerprint: str
    tokens: int
    sequence_length: int
    layers: tuple[LayerWindows, ...]
    positions: tuple[int, ...]
    calibration_sample: tuple[tuple[int, ...], ...]

    @property
    def median_windows(self) -> list[float]:
        """Score of every layer."""
        return [layer.median_window for layer in self.layers]

    @property
    def paper_median_windows(self) -> list[float]:
        """The paper's score of every layer."""
        return [layer.paper_median_window for layer in self.layers]

    @property
    def palimpsa_layers(self) -> list[int]:
        """Layers that were Palimpsa layers when measured."""
        return [layer.layer for layer in self.layers if layer.kind == "palimpsa"]

    def top_layers(self, k: int, *, paper: bool = False) -> list[int]:
        """The `k` Mamba2 layers with the longest windows by this score or the paper's, longest first."""
        scores = self.paper_median_windows if paper else self.median_windows
        return top_layers(scores, k, palimpsa=self.palimpsa_layers)

    def to_json(self) -> str:
        """The content of the file: plain JSON, in which infinity is the string "Infinity"."""
        content = asdict(self)
        content["calibration_sample"] = {"input_ids": content["calibration_sample"]}
        return to_json({"version": VERSION} | content)

    def save(self, directory: str | os.PathLike) -> Path:
        """Write `analysis.json` into an existing folder and return its path."""
        path = Path(directory) / ANALYSIS_FILE
        path.write_text(self.to_json(), encoding="utf-8")
        return path

    @classmethod
    def load(cls, path: str | os.PathLike) -> Self:
        """Read an analysis from its folder or from the file itself.

        Raises:
            UserError: there is none, or the file is damaged, of another version or something else.
        """
        file, content = read_saved(path, ANALYSIS_FILE, kind="analysis", key="layers", version=VERSION)
        try:
            return cls._from_content(content)
        except KeyError as error:
            raise UserError(f"analysis {file} is damaged: {error} is missing") from None
        except (TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
            raise UserError(f"analysis {file} is damaged: {one_line(error)}") from None

    @classmethod
    def _from_content(cls, content: dict[str, Any]) -> Self:
        """Build from parsed JSON; KeyError, TypeError, ValueError or AttributeError if it is damaged."""
        positions = tuple(_whole(value, "a position") for value in content["positions"])
        layers = tuple(_layer(index, value, len(positions)) for index, value in enumerate(content["layers"]))
        if not layers:
            raise ValueError("it has no layers")
        sample = tuple(
            tuple(_whole(token, "a token id") for token in row) for row in content["calibration_sample"]["input_ids"]
        )
        if not sample or min(map(len, sample)) < 2:
            raise ValueError("the calibration sample must hold sequences of at least 2 tokens")
        return cls(
            model=_text(content["model"], "model"),
            model_fingerprint=_text(content["model_fingerprint"], "model_fingerprint"),
            tokens=_whole(content["tokens"], "tokens"),
            sequence_length=_whole(content["sequence_length"], "sequence_length"),
            layers=layers,
            positions=positions,
            calibration_sample=sample,
        )


def to_json(content: dict[str, Any]) -> str:
    """JSON for people as well: a line for each key, and for each object in a list. Infinity is a string."""
    lines = (f"{json.dumps(key)}: {_json_line(_encode_infinity(value))}" for key, value in content.items())
    return "{\n  " + ",\n  ".join(lines) + "\n}\n"


def _encode_infinity(value: Any) -> Any:
    """Copy nested data with infinity as the string "Infinity", since JSON has no number for it."""
    if isinstance(value, dict):
        return {key: _encode_infinity(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encode_infinity(item) for item in value]
    return "Infinity" if value == math.inf else value


def _json_line(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n    " + ",\n    ".join(json.dumps(item, allow_nan=False) for item in value) + "\n  ]"
    return json.dumps(value, allow_nan=False)


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} must be text, got {value!r}")
    return value


def _whole(value: Any, name: str) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{name} must be a whole number of at least 0, got {value!r}")
    return value


def _window(value: Any) -> float:
    number = math.inf if value == "Infinity" else value
    if isinstance(number, bool) or not isinstance(number, int | float) or not number >= 1:
        raise ValueError(f"a window must be a number of at least 1, got {value!r}")
    return float(number)  # OverflowError for whole numbers beyond 1e308


def _layer(index: int, content: dict[str, Any], positions: int) -> LayerWindows:
    if content["layer"] != index:
        raise ValueError(f"layer {index} is listed as {content['layer']!r}")
    if content["kind"] not in ("mamba2", "palimpsa"):
        raise ValueError(f"layer {index} is of unknown kind {content['kind']!r}")
    layer = LayerWindows(
        layer=index,
        kind=content["kind"],
        median_window=_window(content["median_window"]),
        paper_median_window=_window(content["paper_median_window"]),
        quantiles={str(float(level)): _window(value) for level, value in content["quantiles"].items()},
        head_medians=tuple(map(_window, content["head_medians"])),
        position_medians=tuple(map(_window, content["position_medians"])),
    )
    if not layer.head_medians or not {str(level) for level in LEVELS} <= layer.quantiles.keys():
        raise ValueError(f"layer {index} lacks head medians or one of the quantiles {LEVELS}")
    if len(layer.position_medians) != positions:
        raise ValueError(f"layer {index} has {len(layer.position_medians)} position medians for {positions} positions")
    return layer


def analyze(
    model: str | os.PathLike,
    data: str | os.PathLike | Sequence[str | os.PathLike],
    output: str | os.PathLike,
    *,
    tokenizer: str | os.PathLike | None = None,
    max_tokens: int | None = 65536,
    sequence_length: int = 2048,
    batch_size: int = 1,
    device: str | None = None,
    overwrite: bool = False,
) -> Analysis:
    """Measure how long each layer of a model remembers (paper 3.4, A.10 and Fig. 6).

    Writes a folder with `analysis.json` and the figure `windows.png`. Memory does not depend on the amount
    of text.

    Args:
        model: folder or Hub id of a Mamba2 checkpoint, native or Hugging Face, or of a hybrid.
        data: `.txt`, `.jsonl` (field `text`) or `.parquet` (column `text`) files.
        output: folder to write.
        tokenizer: folder or Hub id, where the checkpoint does not bring its own.
        max_tokens: stop after so many tokens; None reads everything.
        sequence_length: tokens per sequence, each of which starts from an empty state.
        batch_size: sequences computed at once.
        device: such as "cpu" or "cuda:1"; default: a GPU if there is one.
        overwrite: replace `output` if it is not empty.

    Raises:
        UserError: any mistake in the above.
    """
    inputs = [data] if isinstance(data, str | os.PathLike) else list(data)
    check_output_directory(output, overwrite=overwrite, inputs=[model, tokenizer, *inputs])
    if batch_size < 1:
        raise UserError(f"batch size must be at least 1, got {batch_size}")
    files = check_text_files(inputs)
    where = resolve_device(device)
    source = open_source(model)
    blocks = iter_token_blocks(
        files, load_tokenizer(source, tokenizer), sequence_length=sequence_length, max_tokens=max_tokens
    )
    first = next(blocks)  # so that unusable text is reported before weights are read
    network = load_model(source, device=where)
    config = network.config

    statistics = WindowStatistics(config.num_hidden_layers, config.num_heads, sequence_length)
    sample: list[tuple[int, ...]] = []
    batches = _batches(chain([first], blocks), batch_size)
    total = None if max_tokens is None else math.ceil(max_tokens / sequence_length / batch_size)

    def observer(layer: int, seen: dict[str, torch.Tensor | None]) -> None:
        try:
            statistics.update(layer, seen["dt"], seen["A"])
        except ValueError as error:
            raise UserError(f"model {source.name}: {error}") from error

    with torch.inference_mode(), observing(network, observer):
        for batch in track(batches, "measuring windows", total):
            size = f"{len(batch)} sequences of {len(batch[0])} tokens"
            with enough_memory(f"{where} has too little memory for {size}; ask for fewer or shorter ones"):
                network.backbone(torch.tensor(batch, device=where), use_cache=False)
            for block in batch:
                row = tuple(block[: SAMPLE_TOKENS - sum(map(len, sample))])
                if len(row) >= 2:
                    sample.append(row)

    analysis = _summarize(statistics, source.name, fingerprint(network), config.palimpsa_layers, sample)
    with fresh_directory(output, overwrite=overwrite) as directory:
        analysis.save(directory)
        plot_windows(analysis, analysis.top_layers(DEFAULT_TOP_K), directory / FIGURE_FILE)
    return analysis


def _batches(blocks: Iterable[list[int]], size: int) -> Iterator[list[list[int]]]:
    """Group blocks of equal length, so that none needs padding."""
    batch: list[list[int]] = []
    for block in blocks:
        if batch and (len(batch) == size or len(block) != len(batch[0])):
            yield batch
            batch = []
        batch.append(block)
    if batch:
        yield batch


def _summarize(
    statistics: WindowStatistics,
    model: str,
    model_fingerprint: str,
    palimpsa_layers: Sequence[int],
    sample: Sequence[tuple[int, ...]],
) -> Analysis:
    quantiles, paper = _rounded(statistics.layer_quantiles(LEVELS)), _rounded(statistics.paper_medians())
    heads, positions = _rounded(statistics.head_medians()), _rounded(statistics.position_medians())
    layers = tuple(
        LayerWindows(
            layer=index,
            kind="palimpsa" if index in palimpsa_layers else "mamba2",
            median_window=quantiles[index][LEVELS.index(0.5)],
            paper_median_window=paper[index],
            quantiles={str(level): value for level, value in zip(LEVELS, quantiles[index], strict=True)},
            head_medians=tuple(heads[index]),
            position_medians=tuple(positions[index]),
        )
        for index in range(statistics.num_layers)
    )
    return Analysis(
        model=model,
        model_fingerprint=model_fingerprint,
        tokens=statistics.tokens,
        sequence_length=statistics.sequence_length,
        layers=layers,
        positions=tuple(statistics.position_starts()),
        calibration_sample=tuple(sample),
    )


def _rounded(values: torch.Tensor) -> Any:
    """Nested lists of numbers of six digits: the rest is noise, and would double the file."""
    if values.ndim > 1:
        return [_rounded(row) for row in values]
    return [float(f"{value:.6g}") for value in values.tolist()]
