"""A stage's data: files in, sequences of tokens on disk.

Files are tokenised once, into `tokens.bin` (int32, `[sequences, sequence_length]`) and, for instructions,
`learn.bin` (one byte per token: is it part of an answer?).
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from palimpsa_surgery.errors import UserError
from palimpsa_surgery.stages.data.instructions import write_instructions
from palimpsa_surgery.stages.data.order import split
from palimpsa_surgery.stages.recipe import Stage, TextData, local_path
from palimpsa_surgery.surgery.outputs import fresh_directory
from palimpsa_surgery.surgery.text import iter_token_blocks

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def prepare(stage: Stage, tokenizer: "PreTrainedTokenizerBase", directory: Path) -> dict[str, int]:
    """Tokenise a stage's files into `directory`, which appears whole or not at all.

    Returns:
        Counts: `sequences`, `tokens` (those of a last, shorter sequence included), and for instructions the
        `examples` used, and those dropped for lack of a prompt or answer (`unanswered`) or because one
        sequence could not hold them (`too_long`).

    Raises:
        UserError: the files cannot be read, or do not give a sequence to train on and one to hold out.
    """
    if tokenizer.eos_token_id is None:
        raise UserError("the tokenizer has no end-of-text token (eos_token), which must end every document")
    write = {"text": _write_text, "instruction": write_instructions}[stage.data.kind]
    with fresh_directory(directory) as work:
        counts = write(stage.data, stage.sequence_length, tokenizer, work)
        training, held_out = split(counts["sequences"], stage.sequence_length, counts["tokens"], stage.data.held_out)
        if not len(training) or not len(held_out):
            dropped = f"; {counts['too_long']} examples are longer than that" if counts.get("too_long") else ""
            raise UserError(
                f"stage {stage.name}: {counts['tokens']} tokens of data, held_out {stage.data.held_out:g} of them, "
                f"make {len(training)} sequences of {stage.sequence_length} to train on and {len(held_out)} to "
                f"evaluate; each needs one{dropped}"
            )
        (work / "data.json").write_text(json.dumps(counts | {"eos_token_id": tokenizer.eos_token_id}))
    return counts


def _write_text(data: TextData, length: int, tokenizer: "PreTrainedTokenizerBase", directory: Path) -> dict[str, int]:
    files = [local_path(file) for file in data.files]
    counts = {"sequences": 0, "tokens": 0}
    with (directory / "tokens.bin").open("wb") as out:
        for block in iter_token_blocks(
            files, tokenizer, sequence_length=length, max_tokens=data.max_tokens, column=data.column
        ):
            if len(block) == length:  # the last one may be shorter: it is left out
                out.write(np.asarray(block, dtype=np.int32).tobytes())
                counts["sequences"] += 1
            counts["tokens"] += len(block)
    return counts
