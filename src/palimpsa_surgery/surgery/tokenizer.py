"""Tokenizers of checkpoints, and the token ids that configs take from them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase, TokenizersBackend

from palimpsa_surgery.errors import UserError
from palimpsa_surgery.surgery.configs import TOKEN_IDS
from palimpsa_surgery.surgery.hub import HUB_ID, TOKENIZER_FILES, hub_problem
from palimpsa_surgery.surgery.weights import one_line

NATIVE_TOKENIZER = "EleutherAI/gpt-neox-20b"
"""Tokenizer of the `state-spaces` models, whose repositories do not hold it."""

_NATIVE_VOCABULARY = 50277
_END_OF_TEXT = ("<|endoftext|>", "</s>")
_HOW_TO_GIVE = "give one with --tokenizer: a folder, a tokenizer.json file or a Hub id"


def find_tokenizer(folder: Path, *, native: bool, rows: int) -> str | Path | None:
    """Where the tokenizer of a checkpoint is, without loading it.

    Args:
        folder: the checkpoint's folder.
        native: whether it has `mamba_ssm`'s format, whose tokenizer is known by name.
        rows: rows of its embedding.

    Returns:
        `folder` if it holds tokenizer files, else the Hub id that a native checkpoint of this size implies
        (its 50,277 entries padded to a multiple of at most 256), else None.
    """
    if has_tokenizer(folder):
        return folder
    return NATIVE_TOKENIZER if native and 0 <= rows - _NATIVE_VOCABULARY < 256 else None


def has_tokenizer(folder: Path) -> bool:
    """Whether the folder holds tokenizer files."""
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def read_tokenizer(tokenizer: str | Path, *, rows: int | None = None) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a folder, a bare `tokenizer.json`, or the Hub; code in it is never run.

    A tokenizer without a padding token pads with its end-of-text token.

    Args:
        tokenizer: where it is.
        rows: rows of the embedding it is for, to check that its ids fit.

    Raises:
        UserError: there is none, it cannot be read, or it has ids that the embedding lacks.
    """
    if not str(tokenizer):  # whose Path is the current folder
        raise UserError("the name of a tokenizer is empty")
    path = Path(tokenizer).expanduser()
    if path.is_dir() and not has_tokenizer(path):
        raise UserError(f"tokenizer {tokenizer}: the folder holds none of {', '.join(TOKENIZER_FILES)}")
    if path.is_file():
        loaded = _read_file(path)
    elif path.is_dir() and not (path / "tokenizer_config.json").is_file() and (path / "tokenizer.json").is_file():
        loaded = _read_file(path / "tokenizer.json")
    elif path.is_dir() or (isinstance(tokenizer, str) and HUB_ID.fullmatch(tokenizer)):
        loaded = _read_pretrained(path if path.is_dir() else tokenizer)
    else:
        raise UserError(f"tokenizer {tokenizer}: no such file or folder")
    if rows is not None and (highest := max(loaded.get_vocab().values(), default=-1)) >= rows:
        raise UserError(
            f"tokenizer {tokenizer} has ids up to {highest}, but the model's embedding has only {rows} rows"
        )
    if loaded.pad_token is None and loaded.eos_token is not None:
        loaded.pad_token = loaded.eos_token
    return loaded


def _read_file(file: Path) -> PreTrainedTokenizerBase:
    """A bare tokenizer.json: it does not say which token ends a text, so look for the usual ones."""
    try:
        tokenizer = TokenizersBackend(tokenizer_file=str(file))
    except Exception as error:  # the Rust library raises bare Exceptions
        raise UserError(f"tokenizer {file} cannot be read: {one_line(error)}") from error
    added = {str(token) for token in tokenizer.added_tokens_decoder.values()}
    if end := next((token for token in _END_OF_TEXT if token in added), None):
        tokenizer.bos_token = tokenizer.eos_token = end
    return tokenizer


def _read_pretrained(where: Path | str) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(where, trust_remote_code=False)
    except Exception as error:  # whatever tokenizer classes and their file readers raise
        if isinstance(where, Path):
            raise UserError(f"tokenizer in {where} cannot be read: {one_line(error)}") from error
        raise UserError(f"tokenizer {where} could not be fetched: {hub_problem(error)}; {_HOW_TO_GIVE}") from error


def no_tokenizer(name: str) -> UserError:
    """The error for a checkpoint that has no tokenizer."""
    return UserError(f"model {name} has no tokenizer; {_HOW_TO_GIVE}")


def token_ids(tokenizer: PreTrainedTokenizerBase | None, stated: Mapping[str, Any]) -> dict[str, Any]:
    """The token ids for a config: the tokenizer's, else those stated; padding falls back to end-of-text.

    A stated list of end-of-text ids that holds the tokenizer's is kept: chat models stop at several.
    """
    ids = {}
    for name in TOKEN_IDS:
        own, said = getattr(tokenizer, name, None), stated.get(name)
        ids[name] = said if own is None or (isinstance(said, list) and own in said) else own
    if ids["pad_token_id"] is None:
        eos = ids["eos_token_id"]
        ids["pad_token_id"] = eos[0] if isinstance(eos, list) else eos
    return ids
