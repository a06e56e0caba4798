"""Checks of arguments, and the random streams that examples are drawn from."""

import zlib
from collections.abc import Iterable
from numbers import Real

import numpy as np

from palimpsa_surgery.errors import UserError


def check_integer(name: str, value: object, low: int, high: int | None = None) -> None:
    """Raise a UserError that names the argument unless `value` is an integer from `low` to `high`."""
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not whole or value < low or (high is not None and value > high):
        bounds = f"of {low} or more" if high is None else f"from {low} to {high}"
        raise UserError(f"{name} must be an integer {bounds}, got {value!r}")


def check_number(name: str, value: object, low: float, high: float) -> None:
    """Raise a UserError that names the argument unless `value` is a number from `low` to `high`."""
    if not isinstance(value, Real) or isinstance(value, bool) or not low <= value <= high:
        raise UserError(f"{name} must be a number from {low:g} to {high:g}, got {value!r}")


def check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Raise a UserError that names the argument and the choices unless `value` is one of them."""
    choices = tuple(choices)
    if value not in choices:
        raise UserError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def random_stream(seed: int, task: str, number: int) -> np.random.Generator:
    """The random numbers of one example (or one block of them): unlike any other task's, seed's or number's."""
    return np.random.default_rng([seed, zlib.crc32(task.encode()), number])
