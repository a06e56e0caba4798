"""Checkpoint folders, downloaded from the Hugging Face Hub when they are not local."""

import re
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from palimpsa_surgery.errors import UserError
from palimpsa_surgery.surgery.weights import WEIGHT_FILES, one_line

HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
"""A folder with any of these has a tokenizer."""

_SMALL_FILES = (
    "config.json",
    "generation_config.json",
    *TOKENIZER_FILES,
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
_SAFETENSORS = ("model.safetensors", "model.safetensors.index.json", "model-*.safetensors")
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-*.bin")


def checkpoint_folder(model: str | Path, *, weights: bool = True) -> Path:
    """Return the folder of a checkpoint, downloading what is needed of a Hub repository.

    Only configs, tokenizer files and one format of weights are fetched: never code, and pickles only where
    there are no safetensors.

    Args:
        model: a folder, or a Hub id such as `state-spaces/mamba2-2.7b`.
        weights: False: only configs and tokenizer files are downloaded.

    Raises:
        UserError: it is neither, or the Hub does not give it.
    """
    if not str(model):  # whose Path is the current folder
        raise UserError("the name of a model is empty")
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise UserError(f"model {model} is a file: give the folder that holds it")
    if isinstance(model, Path) or not HUB_ID.fullmatch(model) or model.startswith("."):
        raise UserError(f"model {model}: no such folder")
    try:
        folder = Path(snapshot_download(model, allow_patterns=[*_SMALL_FILES, *(_SAFETENSORS if weights else ())]))
        if weights and not any((folder / name).is_file() for name in WEIGHT_FILES):
            folder = Path(snapshot_download(model, allow_patterns=[*_SMALL_FILES, *_PICKLES]))
    except Exception as error:  # errors of the disk, the Hub, and its HTTP and Xet clients have no common base
        raise UserError(f"model {model}: no such folder, and {hub_problem(error)}") from error
    return folder


def hub_problem(error: BaseException) -> str:
    """Say in a few words why the Hub did not give a repository."""
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None and cause not in causes:
        causes.append(cause)
    for kind, problem in (
        (GatedRepoError, "the Hub repository is gated: accept its terms on its page, then run `hf auth login`"),
        (RevisionNotFoundError, "the Hub repository has no such revision"),
        (RepositoryNotFoundError, "there is no such Hub repository (a private one needs `hf auth login`)"),
        (HFValidationError, "that is not a Hub id either"),
        (OfflineModeIsEnabled, "it is not in the local cache, and the Hub is switched off (HF_HUB_OFFLINE)"),
        (HfHubHTTPError, f"the Hub refused: {one_line(error)}"),
        (LocalEntryNotFoundError, "it is not in the local cache, and the Hub cannot be reached (no network?)"),
        (ConnectionError, "the Hub cannot be reached (no network?)"),
    ):
        if any(isinstance(cause, kind) for cause in causes):
            return problem
    return one_line(error)
