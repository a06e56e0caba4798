"""Other people's dashboards, which a recipe's `report_to` names; transformers' Trainer feeds them."""

import importlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from palimpsa_surgery.errors import UserError

MODULES = {"tensorboard": "torch.utils.tensorboard", "trackio": "trackio", "wandb": "wandb"}
"""What must import for each; its package has the name of the dashboard."""


def check_dashboards(names: Iterable[str]) -> None:
    """See that the packages of all dashboards import.

    Raises:
        UserError: one does not; the message says why, and what to do.
    """
    for name in names:
        try:
            importlib.import_module(MODULES[name])
        except Exception as error:  # a broken package fails in its own way
            reason = " ".join(str(error).split()) or type(error).__name__
            raise UserError(
                f"report_to: {name} cannot be imported ({reason}): pip install {name}, or leave it out"
            ) from None


@contextmanager
def one_line(names: Iterable[str]) -> Iterator[None]:
    """Make a UserError of an error of a dashboard's own, such as that nobody is logged in."""
    try:
        yield
    except Exception as error:
        name = type(error).__module__.partition(".")[0]
        if name not in names:
            raise
        raise UserError(f"report_to: {name} refuses: {' '.join(str(error).split())}") from None


def end_of_stage(names: Iterable[str]) -> None:
    """Close what belongs to one stage, so that the next starts its own; TensorBoard and trackio do so themselves."""
    if "wandb" in names:
        importlib.import_module("wandb").finish()
