"""The surgery itself: layers of a Mamba2 model become Palimpsa layers that start out computing the same.

The result is a checkpoint folder with `surgery.json`, which says what was done to which model and how far the
result is from it.
"""

import copy
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from transformers import PreTrainedTokenizerBase

from palimpsa_surgery.errors import UserError
from palimpsa_surgery.hf_models import PalimpsaMamba2ForCausalLM
from palimpsa_surgery.surgery.analysis import (
    FIGURE_FILE,
    SAMPLE_TOKENS,
    Analysis,
    to_json,
)
from palimpsa_surgery.surgery.checkpoints import (
    Source,
    fingerprint,
    load_model,
    load_tokenizer,
    open_source,
    save_checkpoint,
)
from palimpsa_surgery.surgery.devices import resolve_device
from palimpsa_surgery.surgery.drift import Drift, measure_drift
from palimpsa_surgery.surgery.initialisation import PAPER_B_SCALE, calibrate_scales, draw_importance
from palimpsa_surgery.surgery.ledger import Ledger, ledger
from palimpsa_surgery.surgery.outputs import check_output_directory, fresh_directory
from palimpsa_surgery.surgery.plots import plot_windows
from palimpsa_surgery.surgery.selection import select_layers
from palimpsa_surgery.surgery.text import check_text_files, iter_token_blocks

VERSION = 1
SURGERY_FILE = "surgery.json"
SAMPLE_LENGTH = 2048
"""Tokens per sequence of a sample taken from text files."""

Init = Literal["calibrated", "paper"]
Sample = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Replacement:
    """What `replace` did, or would do.

    Attributes:
        source: the checkpoint that was operated on.
        base_fingerprint: hash of its weights.
        fingerprint: hash of the result's weights, by which training can be told from none.
        layers: the layers replaced now, increasing.
        palimpsa_layers: all Palimpsa layers of the result, increasing.
        init: how the new parameters were chosen; empty when there are none.
        ledger: parameters before and after.
        drift: how far the result is from the source; None when it was not measured, or nothing was replaced.
        analysis: the analysis that was used, if one was.
        output: the folder written; None in a dry run.
        notes: what the user should know besides.
    """

    source: Source
    base_fingerprint: str
    fingerprint: str
    layers: tuple[int, ...]
    palimpsa_layers: tuple[int, ...]
    init: dict[str, Any]
    ledger: Ledger
    drift: Drift | None
    analysis: Analysis | None
    output: Path | None
    notes: tuple[str, ...]

    def to_json(self) -> str:
        """The content of `surgery.json`."""
        analysis = None
        if self.analysis is not None:
            windows = {str(layer.layer): layer.median_window for layer in self.analysis.layers}
            analysis = {"median_windows": windows, "tokens": self.analysis.tokens}
        return to_json(
            {
                "version": VERSION,
                "base_model": self.source.name,
                "base_kind": self.source.kind,
                "base_fingerprint": self.base_fingerprint,
                "fingerprint": self.fingerprint,
                "palimpsa_layers": self.palimpsa_layers,
                "replaced_layers": self.layers,
                "init": self.init,
                "analysis": analysis,
                "drift": None if self.drift is None else asdict(self.drift),
                "parameters": self.ledger.parameters,
            }
        )


def replace(
    model: str | os.PathLike,
    output: str | os.PathLike | None = None,
    *,
    analysis: str | os.PathLike | Analysis | None = None,
    top_k: int | None = None,
    layers: Sequence[int] | None = None,
    min_window: float | None = None,
    init: Init = "calibrated",
    importance_target: float = 0.1,
    max_drift: float | None = None,
    data: str | os.PathLike | Sequence[str | os.PathLike] | None = None,
    tokenizer: str | os.PathLike | None = None,
    seed: int = 0,
    device: str | None = None,
    dry_run: bool = False,
    overwrite: bool = False,
) -> Replacement:
    """Replace layers of a Mamba2 model by Palimpsa layers and write the hybrid (paper 2.4, 3.4, A.10).

    Kept parameters are copied bit for bit. The layers are chosen by one of `top_k`, `layers` and
    `min_window`, by default the 8 that remember longest. The hybrid is compared with its source on a sample of
    text: `data`, or else the sample kept in the analysis; without either, `paper` is the only init and drift is
    not measured.

    Args:
        model: folder or Hub id of a Mamba2 checkpoint, native or Hugging Face, or of a hybrid.
        output: folder to write; may be left out of a dry run.
        analysis: what `analyze` wrote for this very model, or returned.
        top_k: replace so many layers, those with the longest windows; 0 converts the model untouched.
        layers: replace these layers.
        min_window: replace every layer whose window is at least so many tokens.
        init: "calibrated": each head gets the largest b_scale that keeps its importance below
            `importance_target` of the prior; "paper": b_scale is drawn from [0.1, 1.0].
        importance_target: see `init`.
        max_drift: refuse to write a hybrid whose logits differ by more than this, relative to the source's.
        data: `.txt`, `.jsonl` or `.parquet` files to calibrate and measure on.
        tokenizer: folder or Hub id, where the checkpoint does not bring its own.
        seed: of the new projections, and of `paper`'s b_scale.
        device: such as "cpu" or "cuda:1"; default: a GPU if there is one.
        dry_run: do everything but write.
        overwrite: replace `output` if it is not empty.

    Raises:
        UserError: any mistake in the above, an analysis of another model, or too large a drift.
    """
    texts = [data] if data is None or isinstance(data, str | os.PathLike) else list(data)
    if output is not None:
        stored = None if isinstance(analysis, Analysis) else analysis
        output = check_output_directory(output, overwrite=overwrite, inputs=[model, stored, tokenizer, *texts])
    elif not dry_run:
        raise UserError("no output folder given (only a dry run does without)")
    _check_options(init, importance_target, max_drift, seed)
    if analysis is not None and not isinstance(analysis, Analysis):
        analysis = Analysis.load(analysis)
    files = None if data is None else check_text_files(texts)
    where = resolve_device(device)
    source = open_source(model)
    chosen = select_layers(
        source.config.num_hidden_layers,
        None if analysis is None else analysis.median_windows,
        top_k=top_k,
        layers=layers,
        min_window=min_window,
        palimpsa=source.config.palimpsa_layers,
    )
    text_tokenizer, notes = _tokenizer(source, tokenizer, needed=files is not None and bool(chosen))
    sample = None
    if chosen:
        sample = _sample(files, text_tokenizer, analysis, source)
        if sample is None and init == "calibrated":
            raise UserError('init "calibrated" needs text: give an analysis or data, or use init "paper"')
        if sample is None and max_drift is not None:
            raise UserError("max_drift needs text to measure the drift on: give an analysis or data")

    base = load_model(source, device=where)
    base_fingerprint = fingerprint(base)
    if analysis is not None and analysis.model_fingerprint != base_fingerprint:
        raise UserError(f"the analysis is of another model: it measured {analysis.model}, whose weights differ")
    hybrid = add_palimpsa_layers(base, chosen, seed=seed, dtype=source.dtype)
    drift = None
    if sample is not None:
        if init == "calibrated":
            calibrate_scales(hybrid, sample, chosen, importance_target, source.dtype)
        drift = measure_drift(base, hybrid, sample, chosen)
        if not all(map(math.isfinite, asdict(drift).values())):
            raise UserError(f"the logits of {source.name} or of its hybrid are NaN or infinite on this text")
        if max_drift is not None and not drift.relative <= max_drift:
            raise UserError(
                f"the hybrid's logits differ from the source's by {drift.relative:.2g} relative, more than the "
                f"limit of {max_drift:g}; nothing was written"
            )

    result = Replacement(
        source=source,
        base_fingerprint=base_fingerprint,
        fingerprint=fingerprint(hybrid),
        layers=tuple(chosen),
        palimpsa_layers=tuple(hybrid.config.palimpsa_layers),
        init=_init_record(init, importance_target, seed) if chosen else {},
        ledger=ledger(base.config, hybrid.config),
        drift=drift,
        analysis=analysis,
        output=None if dry_run else output,
        notes=(*source.notes, *notes),
    )
    if not dry_run:
        with fresh_directory(output, overwrite=overwrite) as directory:
            save_checkpoint(
                hybrid,
                directory,
                tokenizer=text_tokenizer,
                dtype=source.dtype,
                extra_files={SURGERY_FILE: result.to_json()},
            )
            if analysis is not None:
                analysis.save(directory)
                plot_windows(analysis, chosen, directory / FIGURE_FILE)
    return result


@torch.no_grad()
def add_palimpsa_layers(
    model: PalimpsaMamba2ForCausalLM, layers: Sequence[int], *, seed: int, dtype: torch.dtype
) -> PalimpsaMamba2ForCausalLM:
    """A model in which `layers` are Palimpsa layers with the paper's init; all else is shared with `model`.

    Args:
        model: left as it is. The two models hold the same tensors, so that the second costs no memory.
        layers: indices of Mamba2 layers.
        seed: see `draw_importance`.
        dtype: the new parameters are rounded to this type.
    """
    config = copy.deepcopy(model.config)
    config.palimpsa_layers = sorted({*config.palimpsa_layers, *layers})
    state = model.state_dict()
    for layer in layers:
        for name, value in draw_importance(config, layer, seed).items():
            state[f"backbone.layers.{layer}.mixer.{name}"] = value.to(dtype).to(model.lm_head.weight)
    with torch.device("meta"):
        hybrid = PalimpsaMamba2ForCausalLM(config)
    hybrid.load_state_dict(state, strict=True, assign=True)
    hybrid.tie_weights()
    hybrid.config.dtype = model.config.dtype
    hybrid.generation_config = copy.deepcopy(model.generation_config)
    return hybrid.train(model.training)


def _check_options(init: str, importance_target: float, max_drift: float | None, seed: int) -> None:
    if init not in get_args(Init):
        raise UserError(f"init must be one of {', '.join(get_args(Init))}; got {init!r}")
    if not 1e-12 <= importance_target < math.inf:
        raise UserError(f"importance_target must be at least 1e-12 and finite, got {importance_target}")
    if max_drift is not None and not max_drift >= 0:
        raise UserError(f"max_drift must be at least 0, got {max_drift}")
    if seed < 0:
        raise UserError(f"seed must be at least 0, got {seed}")


def _init_record(init: Init, importance_target: float, seed: int) -> dict[str, Any]:
    how = {"importance_target": importance_target} if init == "calibrated" else {"b_scale": list(PAPER_B_SCALE)}
    return {"kind": init, **how, "seed": seed}


def _tokenizer(
    source: Source, tokenizer: str | os.PathLike | None, *, needed: bool
) -> tuple[PreTrainedTokenizerBase | None, list[str]]:
    """The tokenizer to write along, or a note that says why there is none."""
    try:
        return load_tokenizer(source, tokenizer), []
    except UserError as error:
        if needed or tokenizer is not None:
            raise
        return None, [f"the output has no tokenizer: {error}"]


def _sample(
    files: Sequence[Path] | None,
    tokenizer: PreTrainedTokenizerBase | None,
    analysis: Analysis | None,
    source: Source,
) -> Sample | None:
    """Token ids to calibrate and measure on: from the files, else from the analysis, else none."""
    if files is not None:
        blocks = iter_token_blocks(files, tokenizer, sequence_length=SAMPLE_LENGTH, max_tokens=SAMPLE_TOKENS)
        return tuple(tuple(block) for block in blocks)
    if analysis is None:
        return None
    highest = max(map(max, analysis.calibration_sample))
    if highest >= source.config.vocab_size:
        raise UserError(f"the analysis is of another model: its sample has token {highest}, beyond the vocabulary")
    return analysis.calibration_sample
