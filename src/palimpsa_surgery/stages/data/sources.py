"""What a source gives: units of text one by one, and what each becomes in tokens.

A unit is what is never cut in two while reading: a document, a piece of a long `.txt` file, a prompt with its
answer, an example of a synthetic task. Each comes with the position after it, where reading can go on.
"""

from collections.abc import Iterator, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from palimpsa_surgery.errors import UserError
from palimpsa_surgery.stages.data.rows import Position, file_order, open_files, passes, single_value
from palimpsa_surgery.stages.recipe_data import InstructionSource, SyntheticSource, TextSource, local_path
from palimpsa_surgery.stages.recipe_data import Source as SourceFields
from palimpsa_surgery.stages.synthetic import Example, generate
from palimpsa_surgery.surgery.text import read_txt, split_pieces, text_of, value_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GROUP_JOINT = "\n\n"
"""What stands between two documents that `group_by` joins."""


class Encoded(NamedTuple):
    """A unit in tokens."""

    ids: np.ndarray
    """`[tokens]`, int64; the end-of-text token included where the unit ends a document."""
    learn: np.ndarray
    """`[tokens]`, bool: is the token a target?"""
    ends: bool = True
    """Whether a document ends here; only pieces of a `.txt` file do not all end one."""


class Source(Protocol):
    """A source of one kind, ready to be read."""

    masked: bool
    """Whether some tokens are no targets."""
    whole: bool
    """Whether a unit must lie in one sequence. Then one that is too long for it is left out."""
    noun: str
    """What the record calls units: `documents` or `examples`."""

    def units(self, position: Position) -> Iterator[tuple[Any, Position]]:
        """Units from a position on, each with the position after it."""
        ...

    def encode(self, units: Sequence[Any]) -> list[Encoded | None]:
        """Each unit in tokens; None for one that lacks a prompt or an answer."""
        ...


def open_source(fields: SourceFields, tokenizer: "PreTrainedTokenizerBase", *, seed: int) -> Source:
    """Open a source; of what is read row by row, the first row has been read and its columns are there.

    Args:
        seed: decides the order of the files, where they are shuffled.

    Raises:
        UserError: it cannot be read, has no row, or lacks a column; the message lists the columns found.
        Unavailable: the Hub does not give it.
    """
    if isinstance(fields, SyntheticSource):
        return SyntheticTask(fields, tokenizer)
    return (TextRows if isinstance(fields, TextSource) else InstructionRows)(fields, tokenizer, seed)


class _ReadSource:
    """What text and instructions share: files, their order, and the check of the first row."""

    def __init__(
        self,
        fields: TextSource | InstructionSource,
        tokenizer: "PreTrainedTokenizerBase",
        seed: int,
        columns: Sequence[str],
    ) -> None:
        self.fields, self.tokenizer = fields, tokenizer
        self.files = open_files(fields, columns)
        self.order = file_order(fields, len(self.files), seed)
        columns = [*columns, *fields.deciding]
        for index in self.order:
            if self._is_plain(index):
                return
            for where, row in self.files.rows(index, 0):
                for column in columns:
                    value_of(row, column, where)
                return
        raise UserError(f"{self.files.name}: there is no row in it")

    def _is_plain(self, index: int) -> bool:
        return self.fields.files is not None and self.fields.files[index].endswith(".txt")


class TextRows(_ReadSource):
    """Documents of text; a unit is a text and whether it ends its document."""

    masked = whole = False
    noun = "documents"

    def __init__(self, fields: TextSource, tokenizer: "PreTrainedTokenizerBase", seed: int) -> None:
        super().__init__(fields, tokenizer, seed, [fields.column, *([fields.group_by] if fields.group_by else [])])

    def units(self, position: Position) -> Iterator[tuple[tuple[str, bool], Position]]:  # noqa: D102
        read = self._grouped if self.fields.group_by else self._documents
        for number in range(position.file, len(self.order)):
            index = self.order[number]
            start = position if number == position.file else Position(number)
            yield from self._pieces(index, start) if self._is_plain(index) else read(index, start)

    def encode(self, units: Sequence[tuple[str, bool]]) -> list[Encoded | None]:  # noqa: D102
        pieces = [list(split_pieces([text])) for text, _ in units]
        texts = [piece for unit in pieces for piece in unit]
        # verbose=False: pieces may exceed model_max_length, a limit that does not concern them
        rows = iter(self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"])
        encoded = []
        for (_, ends), unit in zip(units, pieces, strict=True):
            ids = [token for _ in unit for token in next(rows)] + [self.tokenizer.eos_token_id] * ends
            encoded.append(Encoded(np.array(ids, dtype=np.int64), np.ones(len(ids), dtype=np.bool_), ends))
        return encoded

    def _rows(self, index: int, start: Position) -> Iterator[tuple[str | None, str, dict, int]]:
        """Text (None: not wanted, or blank) of each row, where it is, the row, and the number of those read."""
        for number, (where, row) in enumerate(self.files.rows(index, start.row), start=start.row + 1):
            text = text_of(row, self.fields.column, where) if passes(self.fields, row, where) else None
            yield text if text and not text.isspace() else None, where, row, number

    def _documents(self, index: int, start: Position) -> Iterator[tuple[tuple[str, bool], Position]]:
        for text, _, _, number in self._rows(index, start):
            if text is not None:
                yield (text, True), Position(start.file, number)

    def _pieces(self, index: int, start: Position) -> Iterator[tuple[tuple[str, bool], Position]]:
        """A `.txt` file in pieces, each of which counts as a row."""
        pieces = _marked(split_pieces(read_txt(local_path(self.fields.files[index]))))
        for number, unit in enumerate(pieces, start=1):
            if number > start.row:
                yield unit, Position(start.file, number)

    def _grouped(self, index: int, start: Position) -> Iterator[tuple[tuple[str, bool], Position]]:
        groups: dict[object, list[str]] = {}
        held, window = 0, start

        def close(end: int) -> Iterator[tuple[tuple[str, bool], Position]]:
            for number, texts in enumerate(groups.values(), start=1):
                if number > window.units:
                    after = Position(start.file, window.row, number) if number < len(groups) else (start.file, end)
                    yield (GROUP_JOINT.join(texts), True), Position(*after)

        number = start.row
        for text, where, row, number in self._rows(index, start):
            if text is None:
                continue
            value = single_value(row, self.fields.group_by, where)
            groups.setdefault(object() if value is None else value, []).append(text)
            held += 1
            if held == self.fields.group_window:
                yield from close(number)
                groups, held, window = {}, 0, Position(start.file, number)
        yield from close(number)


class InstructionRows(_ReadSource):
    """Prompts and answers; a unit is one of each, or None where the row lacks either."""

    masked = whole = True
    noun = "examples"

    def __init__(self, fields: InstructionSource, tokenizer: "PreTrainedTokenizerBase", seed: int) -> None:
        super().__init__(fields, tokenizer, seed, [fields.prompt_column, fields.answer_column])
        self.head, tail = fields.template.split("{prompt}")
        self.joint = tail.removesuffix("{answer}")

    def units(self, position: Position) -> Iterator[tuple[tuple[str, str] | None, Position]]:  # noqa: D102
        columns = (self.fields.prompt_column, self.fields.answer_column)
        for number in range(position.file, len(self.order)):
            start = position.row if number == position.file else 0
            for row_number, (where, row) in enumerate(self.files.rows(self.order[number], start), start=start + 1):
                if passes(self.fields, row, where):
                    prompt, answer = (text_of(row, column, where) for column in columns)
                    yield (prompt, answer) if prompt and answer else None, Position(number, row_number)

    def encode(self, units: Sequence[tuple[str, str] | None]) -> list[Encoded | None]:  # noqa: D102
        pairs = [(f"{self.head}{unit[0]}{self.joint}", unit[1]) for unit in units if unit is not None]
        encoded = iter(_encode_pairs(pairs, self.tokenizer))
        return [None if unit is None else next(encoded) for unit in units]


class SyntheticTask:
    """Examples of a synthetic task, without end; a unit is an example."""

    masked = whole = True
    noun = "examples"

    def __init__(self, fields: SyntheticSource, tokenizer: "PreTrainedTokenizerBase") -> None:
        self.fields, self.tokenizer = fields, tokenizer
        self._examples(0)  # an example that does not fit its length is found now

    def units(self, position: Position) -> Iterator[tuple[Example, Position]]:  # noqa: D102
        for number, example in zip(count(position.row + 1), self._examples(position.row), strict=False):
            yield example, Position(0, number)

    def encode(self, units: Sequence[Example]) -> list[Encoded | None]:  # noqa: D102
        encoded = _encode_pairs([(example.prompt, example.completion) for example in units], self.tokenizer)
        if self.fields.learn == "all":
            return [Encoded(unit.ids, np.ones_like(unit.learn)) for unit in encoded]
        return encoded

    def _examples(self, start: int) -> Iterator[Example]:
        fields = self.fields
        lengths = {"length": fields.length, "min_length": fields.min_length}
        how = {"tokenizer": self.tokenizer, "count": 1 << 62, "seed": fields.seed, "start": start}
        return generate(fields.task, **lengths, **how, **fields.options)


def _marked(pieces: Iterator[str]) -> Iterator[tuple[str, bool]]:
    """Pieces, and whether each is the last one."""
    previous = None
    for piece in pieces:
        if previous is not None:
            yield previous, False
        previous = piece
    if previous is not None:
        yield previous, True


def _encode_pairs(pairs: Sequence[tuple[str, str]], tokenizer: "PreTrainedTokenizerBase") -> list[Encoded]:
    """Questions and answers as one text each, of which the answer and the end-of-text token are learnt.

    Tokenised in one piece and told apart by offset, because a token may span the joint.
    """
    if not pairs:
        return []
    encoded = tokenizer(
        [question + answer for question, answer in pairs],
        add_special_tokens=False,
        return_offsets_mapping=True,
        verbose=False,
    )
    units = []
    for (question, _), ids, offsets in zip(pairs, encoded["input_ids"], encoded["offset_mapping"], strict=True):
        learn = [end > len(question) for _, end in offsets]
        units.append(Encoded(np.array([*ids, tokenizer.eos_token_id]), np.array([*learn, True])))
    return units
