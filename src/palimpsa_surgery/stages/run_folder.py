"""The folder of a run: made, held by one launch, filled with data, and gone on with under the same conditions only."""

import json
import platform
import shutil
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from palimpsa_surgery import ranks
from palimpsa_surgery._version import __version__
from palimpsa_surgery.errors import Unavailable, UserError
from palimpsa_surgery.stages.launch import check_shared_folder
from palimpsa_surgery.stages.plan import Plan
from palimpsa_surgery.stages.recipe import Recipe, differences
from palimpsa_surgery.stages.snapshots import Snapshots
from palimpsa_surgery.surgery.outputs import check_output_directory, fresh_directory, replacing, writing
from palimpsa_surgery.surgery.records import RECIPE_FILE, RUN_FILE, read_run, read_run_recipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LOCK_FILE = ".lock"


def existing_run(output: Path, recipe: Recipe, options: dict) -> dict | None:
    """The record of the run that `output` holds, if there is one and it may be gone on with."""
    record = read_run(output)
    if record is None:
        if output.is_dir() and any(output.iterdir()):
            raise UserError(f"output folder {output} is not empty and holds no run (choose another --output)")
        check_output_directory(output)
    else:
        _check_same_conditions(output, record, recipe, options)
    return record


def check_unchanged(output: Path, record: dict) -> None:
    """See that nobody changed the record since it was read.

    Raises:
        UserError: somebody did.
    """
    if read_run(output) != record:
        raise UserError(f"run {output} was changed by another process meanwhile: start again to go on with it")


def start_run(plan: Plan, options: dict) -> dict:
    """Make the run's folder, in which nothing has been done yet."""
    import torch
    import transformers

    record = {
        "version": 1,
        "recipe": plan.recipe.name,
        "base": plan.source.name,
        "base_fingerprint": None,
        "vocabulary": None,
        "seed": plan.recipe.seed,
        **options,
        "stages": [
            {
                "name": part.stage.name,
                "status": "pending",
                "folder": part.folder,
                "steps": part.steps,
                "tokens": part.tokens,
                "data": None,
                "final": None,
            }
            for part in plan.stages
        ],
        "final": None,
        "versions": {
            "palimpsa_surgery": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    with fresh_directory(plan.output) as work:
        (work / RECIPE_FILE).write_text(plan.recipe.to_yaml(), encoding="utf-8")
        _put_record(work, record)
    return record


def check_weights(plan: Plan, record: dict) -> dict:
    """See that the weights are those that the run was started from; return its record.

    Raises:
        UserError: they are not.
    """
    from palimpsa_surgery.surgery.checkpoints import fingerprint, load_model

    found = fingerprint(load_model(plan.source))
    if record["base_fingerprint"] is None:
        # Named anew, since data may have been prepared from a copy without weights.
        record |= {"base": plan.source.name, "base_fingerprint": found}
        write_run(plan.output, record)
    elif found != record["base_fingerprint"]:
        raise UserError(
            f"run {plan.output} was started from other weights: fingerprint {record['base_fingerprint']}, "
            f"checkpoint {plan.source.name} has {found}"
        )
    return record


def prepare_data(plan: Plan, record: dict, wanted: list[int], tokenizer: "PreTrainedTokenizerBase") -> dict:
    """Tokenise the data of the stages that will run, and return the record; where a call was interrupted, go on.

    Data that turn out to be of no use leave no run behind, unless some have been tokenised: that may have taken hours.

    Raises:
        UserError: as `prepare` does; or the run was started with a tokenizer of another vocabulary.
    """
    from palimpsa_surgery.stages.data import prepare, vocabulary_hash

    found = vocabulary_hash(tokenizer)
    if record.get("vocabulary") not in (None, found):
        raise UserError(f"run {plan.output} was started with another tokenizer, whose vocabulary differs")
    record["vocabulary"] = found
    how = {"scored": plan.recipe.evaluation.tokens, "seed": plan.recipe.seed}
    try:
        for index in wanted:
            part, entry = plan.stages[index], record["stages"][index]
            folder = plan.output / part.folder / "data"
            if entry["data"] is None or (entry["status"] == "pending" and not folder.is_dir()):
                shutil.rmtree(folder, ignore_errors=True)  # whole, but a kill came before it was recorded
                entry["data"] = prepare(
                    part.stage, tokenizer, folder, tokens=part.tokens, place=f"stages[{index}].", **how
                )
                write_run(plan.output, record)
    except Unavailable:
        raise
    except UserError:
        if record["base_fingerprint"] is None and not any(plan.output.glob("*/data*")):
            shutil.rmtree(plan.output)
        raise
    return record


def write_run(output: Path, record: dict) -> None:
    """Replace `run.json` in one move, so that a kill leaves the old one or the new one; rank 0 does."""
    if ranks.is_first():
        with writing(output / RUN_FILE):
            _put_record(output, record)


def _put_record(folder: Path, record: dict) -> None:
    with replacing(folder / RUN_FILE) as draft:
        draft.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _check_same_conditions(output: Path, record: dict, recipe: Recipe, options: dict) -> None:
    """Refuse to go on with a run under other conditions than it was started under."""
    changes = [*differences(read_run_recipe(output, record), yaml.safe_load(recipe.to_yaml()))]
    for name, value in options.items():
        changes += differences(record[name], value, f"--{name.replace('_', '-')}")
    if changes:
        raise UserError(f"run {output} was started differently: {'; '.join(changes)} (choose another --output)")


@contextmanager
def holding(output: Path) -> Iterator[None]:
    """Hold a run's folder for this launch; the system lets go of it when rank 0 ends, however it ends."""
    import fcntl

    def hold() -> None:
        lock = stack.enter_context((output / LOCK_FILE).open("a"))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"run {output} is in use by another process") from None
        except OSError as error:  # some file systems of clusters have no locks
            warnings.warn(f"{output} cannot be locked ({error.strerror}): start no second process on it", stacklevel=2)

    with ExitStack() as stack:
        ranks.first(hold)
        check_shared_folder(output / LOCK_FILE)
        yield


def discard_work(folder: Path) -> None:
    """Remove what a stage needs only until it is finished."""
    Snapshots(folder, keep=1).discard()
    shutil.rmtree(folder / "data", ignore_errors=True)
