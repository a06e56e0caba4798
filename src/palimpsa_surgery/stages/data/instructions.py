"""Prompts and answers, packed whole into sequences."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from palimpsa_surgery.errors import UserError
from palimpsa_surgery.stages.recipe import InstructionData, local_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def write_instructions(
    data: InstructionData, length: int, tokenizer: "PreTrainedTokenizerBase", directory: Path
) -> dict[str, int]:
    """Pack whole examples, in order, into sequences whose rest is filled with end-of-text tokens."""
    head, tail = data.template.split("{prompt}")
    joint = tail.removesuffix("{answer}")
    counts = {"sequences": 0, "tokens": 0, "examples": 0, "unanswered": 0, "too_long": 0}
    ids: list[int] = []
    learn: list[bool] = []
    with (
        (directory / "tokens.bin").open("wb") as tokens_out,
        (directory / "learn.bin").open("wb") as learn_out,
    ):

        def flush() -> None:
            padding = length - len(ids)
            tokens_out.write(np.asarray(ids + [tokenizer.eos_token_id] * padding, dtype=np.int32).tobytes())
            learn_out.write(np.asarray(learn + [False] * padding, dtype=np.bool_).tobytes())
            counts["sequences"] += 1
            counts["tokens"] += length
            ids.clear()
            learn.clear()

        for prompt, answer in _iter_pairs(data):
            if not prompt or not answer:
                counts["unanswered"] += 1
                continue
            question = f"{head}{prompt}{joint}"
            # Tokenised in one piece and told apart by offset, because a token may span the joint.
            encoded = tokenizer(question + answer, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            example = [*encoded["input_ids"], tokenizer.eos_token_id]
            if len(example) > length:
                counts["too_long"] += 1
                continue
            if len(ids) + len(example) > length:
                flush()
            ids += example
            learn += [end > len(question) for _, end in encoded["offset_mapping"]] + [True]
            counts["examples"] += 1
        if ids:
            flush()
    return counts


def _iter_pairs(data: InstructionData) -> Iterator[tuple[str | None, str | None]]:
    """Yield each row's prompt and answer; either may be null.

    Raises:
        UserError: a row that is no JSON object, lacks a column, or holds neither text nor null there. The
            message names the file and the row, and for a missing column lists those found.
    """
    columns = (data.prompt_column, data.answer_column)
    for file in data.files:
        path = local_path(file)
        rows = _iter_parquet(path, columns) if path.suffix == ".parquet" else _iter_jsonl(path)
        for number, row in enumerate(rows, start=1):
            for column in columns:
                if column not in row:
                    raise UserError(f"{path}, row {number}: no column {column!r} (columns found: {', '.join(row)})")
                if not isinstance(row[column], str | None):
                    kind = type(row[column]).__name__
                    raise UserError(f"{path}, row {number}: column {column!r} holds {kind}, not text")
            yield row[columns[0]], row[columns[1]]


def _iter_jsonl(path: Path) -> Iterator[dict]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.isspace():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig"))
            except ValueError as error:
                raise UserError(f"{path}, line {number}: not a JSON object ({error})") from None
            if not isinstance(row, dict):
                raise UserError(f"{path}, line {number}: not a JSON object")
            yield row


def _iter_parquet(path: Path, columns: tuple[str, str]) -> Iterator[dict]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            found = file.schema_arrow.names
            missing = [column for column in columns if column not in found]
            if missing:
                raise UserError(f"{path}: no column {missing[0]!r} (columns found: {', '.join(found)})")
            for batch in file.iter_batches(batch_size=256, columns=list(columns)):
                yield from batch.to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path} is not a readable parquet file ({' '.join(str(error).split())})") from None
