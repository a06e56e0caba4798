"""From a training run or a checkpoint folder to one that `AutoModelForCausalLM` loads anywhere.

A hybrid carries its own code: the files of `hf_models` and the kernels they need, flat beside the weights, as
transformers' custom code wants them. Only their import lines differ from the package's. A model without
Palimpsa layers is transformers' own Mamba2 and carries none.
"""

import json
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path, PurePath
from typing import Any

import yaml

from palimpsa_surgery.errors import UserError
from palimpsa_surgery.surgery.card import model_card
from palimpsa_surgery.surgery.checkpoints import (
    Source,
    fingerprint,
    load_model,
    load_tokenizer,
    open_source,
    save_checkpoint,
)
from palimpsa_surgery.surgery.outputs import check_output_directory, fresh_directory
from palimpsa_surgery.surgery.records import read_run, read_run_recipe, read_surgery
from palimpsa_surgery.surgery.results import Evaluation
from palimpsa_surgery.surgery.upload import check_repo_id, upload_folder
from palimpsa_surgery.surgery.weights import read_json

AUTO_MAP = {
    "AutoConfig": "configuration_palimpsa_mamba2.PalimpsaMamba2Config",
    "AutoModel": "modeling_palimpsa_mamba2.PalimpsaMamba2Model",
    "AutoModelForCausalLM": "modeling_palimpsa_mamba2.PalimpsaMamba2ForCausalLM",
}

NATIVE_LENGTH = 2048
"""Tokens that the published Mamba2 models were trained on at once (their README), the last resort."""

_PATH_FIELDS = ("base", "base_model", "files", "data_files")
"""Fields of `run.json`, `surgery.json` and recipes that may hold a path."""

# An import of a module of this package, which is always relative and names one module.
_IMPORT = re.compile(r"^(\s*from )(\.\.kernels\.|\.)(\w+)( import )", re.MULTILINE)


@dataclass(frozen=True)
class Export:
    """What `export` wrote.

    Attributes:
        path: the folder.
        palimpsa_layers: indices of the replaced layers.
        max_length: tokens given as `max_position_embeddings` and the tokenizer's `model_max_length`.
        max_length_reason: where that number comes from, in a few words.
        url: the Hub repository it was uploaded to, or None.
    """

    path: Path
    palimpsa_layers: tuple[int, ...]
    max_length: int
    max_length_reason: str
    url: str | None = None

    def __fspath__(self) -> str:
        return os.fspath(self.path)


def export(
    source: str | os.PathLike,
    output: str | os.PathLike,
    *,
    max_length: int | None = None,
    tokenizer: str | os.PathLike | None = None,
    results: Sequence[str | os.PathLike] = (),
    push_to_hub: str | None = None,
    private: bool = False,
    overwrite: bool = False,
) -> Export:
    """Write a folder that anyone loads with `AutoModelForCausalLM.from_pretrained`.

    The weights keep their type and their bits.

    Args:
        source: a finished run of `train`, or a checkpoint folder such as `replace` writes.
        output: the folder to write.
        max_length: longest input to state in the configs, in tokens. Nothing is limited by it, but evaluation
            harnesses cut their inputs to it. By default the longest stage of the run, else what the source
            states, else 2,048.
        tokenizer: folder, tokenizer.json or Hub id, where the source does not bring its own.
        results: folders that `eval` wrote for these weights, to be shown in the model card.
        push_to_hub: id of a Hub repository, `name` or `owner/name`, to upload the folder to; it is created
            if need be.
        private: create that repository as a private one.
        overwrite: replace `output` if it is not empty.

    Raises:
        UserError: the source is no such folder, or its run is not finished, or it is in a native format; a
            result is none of `eval`'s or of other weights; the output cannot be written; or the upload failed, after
            the folder was written.
    """
    if max_length is not None and max_length < 1:
        raise UserError(f"--max-length must be at least 1, got {max_length}")
    if private and push_to_hub is None:
        raise UserError("--private says how to create the repository of --push-to-hub, which is missing")
    if push_to_hub is not None:
        check_repo_id(push_to_hub)
    source = Path(source)
    check_output_directory(output, overwrite=overwrite, inputs=[source, tokenizer, *results])
    evaluations = [Evaluation.load(result) for result in results]
    for index, result in enumerate(results):
        if evaluations[index] in evaluations[:index]:
            raise UserError(f"{os.fspath(result)} holds results that are given twice")
    folder, run = resolve_run(source)
    check_output_directory(output, overwrite=overwrite, inputs=[folder])
    opened = open_source(folder)
    if opened.kind in ("native", "meta_mamba2"):
        raise UserError(
            f"{source} is in the {opened.kind} format: convert it first, with "
            f"`palimpsa-surgery replace {source} --top-k 0 --output DIR`"
        )
    surgery = without_paths(read_surgery(folder))
    length, reason = _choose_length(max_length, run, opened)

    model, words = load_model(opened, dtype=opened.dtype), load_tokenizer(opened, tokenizer)
    weights = fingerprint(model)
    for result, evaluation in zip(results, evaluations, strict=True):
        if evaluation.model_fingerprint != weights:
            raise UserError(f"{os.fspath(result)} holds results of other weights, those of {evaluation.model}")
    model.config.max_position_embeddings = words.model_max_length = length
    model.config.auto_map = dict(AUTO_MAP)  # dropped again when what is written is transformers' own Mamba2
    output = Path(output)
    with fresh_directory(output, overwrite=overwrite) as work:
        save_checkpoint(model, work, tokenizer=words)
        if (folder / "windows.png").is_file():
            shutil.copyfile(folder / "windows.png", work / "windows.png")
        if surgery:
            (work / "surgery.json").write_text(json.dumps(surgery, indent=2) + "\n", encoding="utf-8")
        if run is not None:
            recipe = yaml.safe_dump(run["recipe"], sort_keys=False, allow_unicode=True)
            (work / "recipe.yaml").write_text(recipe, encoding="utf-8")
        elif (folder / "recipe.yaml").is_file():  # an export exported again
            shutil.copyfile(folder / "recipe.yaml", work / "recipe.yaml")
        written = read_json(work / "config.json")
        if written["model_type"] == model.config.model_type:
            for name, text in code_files().items():
                (work / name).write_text(text, encoding="utf-8")
        card = model_card(
            push_to_hub or output.absolute().name,
            written,
            surgery=surgery,
            run=run,
            evaluations=evaluations,
            untrained=surgery.get("fingerprint") == weights,
            parameters=model.num_parameters(),
            figure=(work / "windows.png").is_file(),
        )
        (work / "README.md").write_text(card, encoding="utf-8")
    url = upload_folder(output, push_to_hub, private=private) if push_to_hub is not None else None
    return Export(output, tuple(model.config.palimpsa_layers), length, reason, url)


def resolve_run(source: Path) -> tuple[Path, dict[str, Any] | None]:
    """Return the folder of a source's weights and, if the source is a run, its `run.json` and recipe in one.

    Raises:
        UserError: `source` is no folder, or a run that is not finished.
    """
    if not source.is_dir():
        raise UserError(f"{source} is not a folder: give a run of `train`, or a checkpoint folder")
    if (run := read_run(source)) is None:
        return source, None
    if not run["final"]:
        missing = next(stage["name"] for stage in run["stages"] if stage["status"] != "done")
        raise UserError(f"run {source} is not finished: stage {missing} is missing (`train` again to resume it)")
    recipe = read_run_recipe(source, run)
    return source / run["final"], without_paths(run | {"recipe": recipe})


def without_paths(record: Any, key: str | None = None) -> Any:
    """Copy a tree of dicts, lists and values, with absolute paths in the fields that hold paths cut to their name.

    What is published need not tell how somebody's disk is laid out.
    """
    if isinstance(record, dict):
        return {name: without_paths(value, name) for name, value in record.items()}
    if isinstance(record, list):
        return [without_paths(value, key) for value in record]
    if key in _PATH_FIELDS and isinstance(record, str) and PurePath(record).is_absolute():
        return PurePath(record).name
    return record


def code_files() -> dict[str, str]:
    """Names and contents of the code that a hybrid carries: the model's files and all that they import."""
    package = files("palimpsa_surgery")
    wanted = [f"hf_models/{name}_palimpsa_mamba2.py" for name in ("configuration", "modeling")]
    found: dict[str, str] = {}
    while wanted:
        path = wanted.pop()
        folder, name = path.split("/")
        if name in found:
            continue
        text = (package / folder / name).read_text(encoding="utf-8")
        for _, prefix, module, _ in _IMPORT.findall(text):
            wanted.append(f"{'kernels' if prefix == '..kernels.' else folder}/{module}.py")
        found[name] = _IMPORT.sub(r"\1.\3\4", text)
    return found


def stated_length(source: Source) -> int | None:
    """Longest input that a checkpoint states, in tokens; None if it states none.

    Raises:
        UserError: what it states is no number of tokens.
    """
    stated = getattr(source.config, "max_position_embeddings", None)
    if stated is not None and not (isinstance(stated, int) and not isinstance(stated, bool) and stated > 0):
        raise UserError(f"{source.name} states max_position_embeddings {stated!r}, which is no number of tokens")
    return stated


def _choose_length(asked: int | None, run: dict[str, Any] | None, source: Source) -> tuple[int, str]:
    stated = stated_length(source)
    trained = max((stage["sequence_length"] for stage in run["recipe"]["stages"]), default=0) if run else 0
    if asked is not None:
        return asked, "as asked for"
    if trained and trained >= (stated or 0):
        return trained, "as in the run's longest stage"
    if stated:
        return stated, "as the source states"
    return NATIVE_LENGTH, "the published models' (--max-length states another)"
