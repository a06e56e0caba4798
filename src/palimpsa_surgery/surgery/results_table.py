"""Evaluations for a terminal of 80 columns."""

from rich.console import Group
from rich.table import Table
from rich.text import Text

from palimpsa_surgery.surgery.results import Evaluation, conditions, score_table, task_rows


def results_report(evaluation: Evaluation) -> Group:
    """The summary, how it came about, and the documents that were cut or split."""
    parts = [
        Text(f"Scores, {evaluation.preset}", style="bold"),
        rich_table(score_table(evaluation)),
        Text(conditions(evaluation)),
    ]
    head, *rows = task_rows(evaluation)
    hurt = [row for row in rows if (row[-2], row[-1]) != ("0", "0")]
    if hurt:
        parts += [
            Text(
                f"Longer than {evaluation.max_length:,} tokens: cut (the beginning is lost) or split (read in windows)"
            ),
            rich_table([[row[i] for i in (0, 3, 4, 5, 6)] for row in (head, *hurt)]),
        ]
    return Group(*parts, *(Text(f"note: {note}", style="dim") for note in evaluation.notes))


def rich_table(rows: list[list[str]]) -> Table:
    """A table whose first row is its head; names at the left may be folded, numbers stand at the right."""
    table = Table()
    head, *body = rows
    table.add_column(head[0], overflow="fold")
    for name in head[1:]:
        table.add_column(name, justify="right", overflow="fold")
    for row in body:
        table.add_row(*map(Text, row))
    return table
