"""Rows of a source, file after file: from this machine, or streamed from the Hugging Face Hub.

A source is a list of files, each a list of rows, and nothing is shuffled but the files. So a place in it is two
numbers, from which reading goes on without reading again what came before in other files.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from palimpsa_surgery.errors import Unavailable, UserError
from palimpsa_surgery.stages.recipe_data import HubSet, Rows, is_wanted, local_path
from palimpsa_surgery.surgery.text import iter_rows, value_of

COMMIT = re.compile("[0-9a-f]{40}")
Row = tuple[str, dict]
"""Where it is, for messages, and its columns."""


class Position(NamedTuple):
    """A place in a source: what comes next."""

    file: int = 0
    """Files that have been read, in the order of reading."""
    row: int = 0
    """Rows that have been read of the next one."""
    units: int = 0
    """What has been used of that which the next rows make together (documents of a window)."""


class Files(Protocol):
    """The files of a source."""

    name: str
    """For messages."""
    revision: str | None
    """The commit of a set of the Hub."""

    def __len__(self) -> int: ...

    def rows(self, index: int, start: int) -> Iterator[Row]:
        """Rows of one file from number `start` on."""
        ...


class LocalFiles:
    """`.jsonl` and `.parquet` files of this machine."""

    revision = None

    def __init__(self, paths: Sequence[Path], columns: Sequence[str]) -> None:
        self.paths, self.columns = paths, columns
        self.name = ", ".join(map(str, paths))

    def __len__(self) -> int:
        return len(self.paths)

    def rows(self, index: int, start: int) -> Iterator[Row]:  # noqa: D102
        return islice(iter_rows(self.paths[index], self.columns), start, None)


class HubFiles:
    """The files of a data set of the Hub, streamed by `datasets`.

    Raises:
        UserError: the set, its split, configuration or a column does not exist; the message lists those that do.
        Unavailable: the Hub does not give it.
    """

    def __init__(self, hub: HubSet, columns: Sequence[str]) -> None:
        self.name = f"data set {hub.dataset}"
        with _hub_faults(self.name):
            import datasets

            datasets.disable_progress_bars()  # those of listing files; the stage has one of its own
            datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what it logs as errors, it raises as well
            builder = datasets.load_dataset_builder(
                hub.dataset,
                hub.config,
                revision=hub.revision,
                data_files=None if hub.data_files is None else list(hub.data_files),
            )
            self.dataset = builder.as_streaming_dataset(split=hub.split)
        self.revision: str | None = builder.hash if COMMIT.fullmatch(builder.hash or "") else None
        """The commit that is read; None of files of this machine, whose hash is of another kind."""
        if found := self.dataset.features:  # else they are known from the rows alone
            for column in columns:
                value_of(found, column, self.name)
            roots = {column if column in found else column.split(".")[0] for column in columns}
            self.dataset = self.dataset.select_columns(sorted(roots))

    def __len__(self) -> int:
        return self.dataset.num_shards

    def rows(self, index: int, start: int) -> Iterator[Row]:  # noqa: D102
        with _hub_faults(self.name, passing=Exception):
            file = self.dataset.shard(num_shards=len(self), index=index)
            for number, row in enumerate(file.skip(start) if start else file, start=start + 1):
                yield f"{self.name}, file {index + 1}, row {number}", row


def open_files(source: Rows, columns: Sequence[str]) -> Files:
    """Open a source's files; `columns` are those that will be read, those that decide which rows are kept apart."""
    columns = list(dict.fromkeys([*columns, *source.deciding]))
    if source.hub is not None:
        return HubFiles(source.hub, columns)
    return LocalFiles([local_path(file) for file in source.files], columns)


def file_order(source: Rows, count: int, seed: int) -> list[int]:
    """In which order a source's files are read."""
    return np.random.default_rng((seed, 1)).permutation(count).tolist() if source.shuffle_files else list(range(count))


def passes(source: Rows, row: dict, where: str) -> bool:
    """Whether a row is one of those that the source's filter and part keep."""
    wanted = all(is_wanted(value_of(row, column, where), value) for column, value in source.filter.items())
    return wanted and (source.part is None or source.part.holds(single_value(row, source.part.by, where)))


def single_value(row: dict, column: str, where: str) -> object:
    """Return what a row's column holds, by which rows can be told apart.

    Raises:
        UserError: there is no such column, or it holds several values.
    """
    value = value_of(row, column, where)
    if isinstance(value, dict | list):
        raise UserError(
            f"{where}: column {column!r} is of type {type(value).__name__}, and cannot tell rows apart: name a column "
            "of single values"
        )
    return value


@contextmanager
def _hub_faults(name: str, passing: type[Exception] = OSError) -> Iterator[None]:
    """Turn what `datasets` and the libraries below it raise into one line that says what to do.

    Args:
        passing: what may not be there the next time, even where it looks like a mistake of the user's: in the middle
            of a stream, a file that cannot be read may be a connection that broke.
    """
    import pyarrow as pa

    from palimpsa_surgery.surgery.hub import hub_problem

    try:
        yield
    except UserError:
        raise
    except (ValueError, pa.ArrowException) as error:  # a wrong split or configuration, a file that is not readable
        kind = Unavailable if isinstance(error, passing) else UserError
        raise kind(f"{name}: {' '.join(str(error).split())}") from error
    except Exception as error:  # errors of the disk, the Hub, and its HTTP and Xet clients have no common base
        raise Unavailable(f"{name}: {hub_problem(error)}; or name local copies as `files`") from error
