"""Progress bars on stderr, for people only.

A bar is drawn when stderr is a terminal (or when Rich is told so by TTY_COMPATIBLE=1 or FORCE_COLOR=1);
logs and pipes get none, and of several processes only the first draws. Bars vanish when their work is done, so
that what stays on screen is the result.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from palimpsa_surgery import ranks

T = TypeVar("T")


@contextmanager
def progress_bar(description: str, total: float | None = None) -> Iterator[Callable[..., None]]:
    """Yield a function that moves a bar of `total` units (None: unknown) forward by the units given to it.

    A second argument to that function, such as "1,200 tokens/s", stands beside the bar from then on.
    """
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=28),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not (console.is_terminal and ranks.is_first())
    ) as progress:
        task = progress.add_task(description, total=total, note="")

        def advance(units: float = 1, note: str | None = None) -> None:
            progress.update(task, advance=units, **({} if note is None else {"note": note}))

        yield advance


def track(iterable: Iterable[T], description: str, total: float | None = None) -> Iterator[T]:
    """Iterate with a progress bar; `total` defaults to `len(iterable)` where there is one."""
    if total is None and hasattr(iterable, "__len__"):
        total = len(iterable)
    with progress_bar(description, total) as advance:
        for item in iterable:
            yield item
            advance(1)
