"""Text files in, blocks of tokens out: `.txt`, `.jsonl` and `.parquet` read alike, in constant memory.

A `.txt` file is one document; each line of a `.jsonl` and each row of a `.parquet` file is one, in the
field `text` unless another is named. The same document gives the same tokens whichever file it comes from.
"""

import codecs
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from palimpsa_surgery.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PIECE = 1 << 16
"""Characters handed to the tokenizer at once. Long documents are cut where a token cannot span the cut."""

_READ = 1 << 18  # bytes of a .txt file read at once
_ROWS = 256  # rows of a .parquet file decoded at once
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def check_text_files(files: Sequence[str | os.PathLike]) -> list[Path]:
    """Return `files` as Paths if each is a file that this module reads and is not empty.

    Looks at names and sizes only, so that it can be called before any expensive work.

    Raises:
        UserError: no file is named, or one is missing, a folder, empty, unreadable or of another kind.
    """
    if not files:
        raise UserError("no text files given")
    paths = [Path(file) for file in files]
    for path in paths:
        if path.is_dir():
            raise UserError(f"text file {path} is a folder; name the files in it")
        if not path.is_file():
            raise UserError(f"text file {path} does not exist")
        if path.suffix.lower() not in _READERS:
            kinds = ", ".join(_READERS)
            raise UserError(f"text file {path} is of unknown kind {path.suffix!r} (known: {kinds})")
        if path.stat().st_size == 0:
            raise UserError(f"text file {path} is empty")
        if not os.access(path, os.R_OK):
            raise UserError(f"text file {path} may not be read (permission denied)")
    return paths


def iter_documents(files: Sequence[str | os.PathLike], *, column: str = "text") -> Iterator[str]:
    """Yield the documents of `files`, one string each; blank ones are left out.

    A `.txt` file is one document and comes whole: for a large one, `iter_token_blocks` needs less memory.
    Lone surrogates, which JSON can spell but no tokenizer accepts, become U+FFFD.

    Args:
        column: of each `.jsonl` line or `.parquet` row, that which holds the text; dots lead into nested ones.

    Raises:
        UserError: at once as `check_text_files` does; while reading, for a file that is not what its suffix
            says, is not UTF-8, lacks `column`, or holds no text. The message names file and line.
    """
    paths = check_text_files(files)
    return ("".join(chunks) for chunks in _iter_chunked_documents(paths, column))


def iter_token_blocks(
    files: Sequence[str | os.PathLike],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    sequence_length: int,
    max_tokens: int | None,
    column: str = "text",
) -> Iterator[list[int]]:
    """Yield blocks of token ids: the documents of `files` end to end, with `eos` between them, cut up.

    Every block has `sequence_length` tokens except the last one, which may be shorter but has at least 2.
    No special token is added but the separating `eos`. Reading stops when `max_tokens` tokens (None: all of
    them) have been yielded; memory depends on neither.

    Args:
        tokenizer: a transformers tokenizer; its `eos_token_id` is needed for two or more documents only.
        column: as in `iter_documents`.

    Raises:
        UserError: as `iter_documents` does, for a length or limit below 2, for a tokenizer without `eos`
            where one is needed, and when the text has fewer than 2 tokens.
    """
    if sequence_length < 2:
        raise UserError(f"sequence length must be at least 2 tokens, got {sequence_length}")
    if max_tokens is not None and max_tokens < 2:
        raise UserError(f"the number of tokens must be at least 2, got {max_tokens}")
    paths = check_text_files(files)
    return _iter_token_blocks(paths, tokenizer, sequence_length, max_tokens, column)


def _iter_token_blocks(
    paths: Sequence[Path],
    tokenizer: "PreTrainedTokenizerBase",
    sequence_length: int,
    max_tokens: int | None,
    column: str,
) -> Iterator[list[int]]:
    waiting: list[int] = []
    seen = 0
    for ids in _iter_token_pieces(paths, tokenizer, column):
        ids = ids if max_tokens is None else ids[: max_tokens - seen]
        seen += len(ids)
        waiting += ids
        whole = len(waiting) // sequence_length * sequence_length
        for start in range(0, whole, sequence_length):
            yield waiting[start : start + sequence_length]
        waiting = waiting[whole:]
        if seen == max_tokens:
            break
    if seen < 2:
        names = ", ".join(map(str, paths))
        raise UserError(f"not enough text: {names} gave {seen} token(s), at least 2 are needed")
    if len(waiting) >= 2:
        yield waiting


def _iter_token_pieces(paths: Sequence[Path], tokenizer: "PreTrainedTokenizerBase", column: str) -> Iterator[list[int]]:
    """Token ids of the documents in pieces, with `eos` between documents."""
    for number, document in enumerate(_iter_chunked_documents(paths, column)):
        if number:
            if tokenizer.eos_token_id is None:
                raise UserError("the tokenizer has no eos token, which must separate one document from the next")
            yield [tokenizer.eos_token_id]
        for piece in split_pieces(document):
            # verbose=False: pieces may exceed model_max_length, a limit that does not concern them
            yield tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"]


def split_pieces(chunks: Iterable[str]) -> Iterator[str]:
    """Cut the text that `chunks` make up into pieces of at most PIECE characters, to be tokenised one by one.

    Where it is cut depends on the text alone, not on how it is chunked.
    """
    buffer, start = "", 0
    for chunk in chunks:
        buffer, start = buffer[start:] + chunk, 0
        while len(buffer) - start > PIECE:
            cut = _safe_cut(buffer, start)
            yield buffer[start:cut]
            start = cut
    if start < len(buffer):
        yield buffer[start:]


def _safe_cut(text: str, start: int) -> int:
    """Where to cut `text` so that the piece from `start` has at most PIECE characters.

    Before a lone space, where byte-level BPE always starts a word; else after a lone newline; else, in text
    that has neither, after exactly PIECE characters.
    """
    end = start + PIECE
    for mark, offset in ((" ", 0), ("\n", 1)):
        cut = text.rfind(mark, start + 1, end)
        while cut > 0 and (text[cut - 1].isspace() or text[cut + 1].isspace()):
            cut = text.rfind(mark, start + 1, cut)
        if cut > 0:
            return cut + offset
    return end


def _iter_chunked_documents(paths: Sequence[Path], column: str) -> Iterator[Iterable[str]]:
    """The documents of `paths`, each as chunks to be consumed before the next document is asked for."""
    for path in paths:
        yield from _READERS[path.suffix.lower()](path, column)


def _no_text(path: Path, column: str | None = None) -> UserError:
    return UserError(f"text file {path} holds no text" + (f" in {column!r}" if column else ""))


def _read_txt(path: Path, column: str) -> Iterator[Iterable[str]]:
    yield read_txt(path)


def read_txt(path: Path) -> Iterator[str]:
    """Yield a `.txt` file in chunks. Newlines stay as they are.

    Raises:
        UserError: it is not UTF-8, binary, or blank; the message says where.
    """
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    blank = True
    with path.open("rb") as file:
        while True:
            data = file.read(_READ)
            undecoded = len(decoder.getstate()[0])
            try:
                text = decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                where = file.tell() - len(data) - undecoded + error.start
                raise UserError(f"text file {path} is not UTF-8 text (near byte {where})") from None
            if "\0" in text:
                raise UserError(f"text file {path} is binary, not text (it contains NUL bytes)")
            if text:
                blank = blank and text.isspace()
                yield text
            if not data:
                break
    if blank:
        raise _no_text(path)


def _read_rows(path: Path, column: str) -> Iterator[Iterable[str]]:
    blank = True
    for where, row in iter_rows(path, [column]):
        text = text_of(row, column, where)
        if text and not text.isspace():
            blank = False
            yield (text,)
    if blank:
        raise _no_text(path, column)


def text_of(row: dict, column: str, where: str) -> str | None:
    """Return the text of a row's column, lone surrogates replaced by U+FFFD; None where it is null.

    Args:
        column: its name; dots lead into nested ones, as in `meta.language`.
        where: where the row is, for messages.

    Raises:
        UserError: there is no such column, or it holds something else; the message lists the columns found.
    """
    value = value_of(row, column, where)
    if value is not None and not isinstance(value, str):
        raise UserError(f"{where}: column {column!r} is of type {type(value).__name__}, not a string")
    return value and _LONE_SURROGATE.sub("\ufffd", value)


def value_of(row: dict, column: str, where: str) -> object:
    """Return what a row's column holds; arguments and errors are those of `text_of`."""
    if column in row:
        return row[column]
    value: object = row
    for name in column.split("."):
        if value is None:
            return None
        if not isinstance(value, dict) or name not in value:
            raise UserError(f"{where}: no column {column!r} (columns found: {', '.join(_columns(row)) or 'none'})")
        value = value[name]
    return value


def _columns(row: dict) -> Iterator[str]:
    """Names of a row's columns, those one level down included."""
    for name, value in row.items():
        yield name
        if isinstance(value, dict):
            yield from (f"{name}.{inner}" for inner in value)


def iter_rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[str, dict]]:
    """Yield where each row of a `.jsonl` or `.parquet` file is, for messages, and its columns by name.

    Args:
        columns: those that are needed (of nested ones, all that share the first part of the name); a `.jsonl`
            file gives the others as well.

    Raises:
        UserError: the file is not what its suffix says or not UTF-8, or a `.parquet` lacks a column. The
            message names file and line.
    """
    return _ROW_READERS[path.suffix.lower()](path, columns)


def _iter_jsonl(path: Path, columns: Sequence[str]) -> Iterator[tuple[str, dict]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}:{number}"
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig"))
            except UnicodeDecodeError:
                raise UserError(f"{where}: not UTF-8 text") from None
            except (ValueError, RecursionError) as error:
                raise UserError(f"{where}: not valid JSON ({error})") from None
            if not isinstance(row, dict):
                raise UserError(f"{where}: expected a JSON object with {_listed(columns)}, got {line[:40]!r}")
            yield where, row


def _iter_parquet(path: Path, columns: Sequence[str]) -> Iterator[tuple[str, dict]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            found = file.schema_arrow.names
            wanted = {column if column in found else column.split(".")[0]: column for column in columns}
            if missing := [column for root, column in wanted.items() if root not in found]:
                raise UserError(f"{path}: no column {missing[0]!r} (columns found: {', '.join(found) or 'none'})")
            number = 0
            for batch in file.iter_batches(batch_size=_ROWS, columns=list(wanted)):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", row
    except (pa.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"text file {path} is not a readable parquet file ({reason})") from None
    except UnicodeDecodeError:
        raise UserError(f"text file {path}: {_listed(columns)} is not UTF-8 text") from None


def _listed(columns: Sequence[str]) -> str:
    return f"column{'s' * (len(columns) > 1)} {', '.join(map(repr, columns))}"


_ROW_READERS: dict[str, Callable[[Path, Sequence[str]], Iterator[tuple[str, dict]]]] = {
    ".jsonl": _iter_jsonl,
    ".parquet": _iter_parquet,
}

_READERS: dict[str, Callable[[Path, str], Iterator[Iterable[str]]]] = {
    ".txt": _read_txt,
    ".jsonl": _read_rows,
    ".parquet": _read_rows,
}
