"""The processes of one run, as torchrun or `accelerate launch` started them: who this one is, and what they tell each
other outside of the tensors.

They speak through the key-value store that the launcher (or rank 0, where there is no agent) keeps at MASTER_ADDR and
MASTER_PORT. A wait there has no limit of time, as a collective's has: preparing data may take rank 0 hours.
"""

import json
import os
import time
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, TypeVar

from palimpsa_surgery.errors import UserError

if TYPE_CHECKING:
    from torch.distributed import Store

T = TypeVar("T")

LEAVE_PATIENCE = 10.0

_PATIENCE = timedelta(minutes=5)  # to reach the store: other nodes may start later
_PAUSE = 0.1  # seconds between two looks at the store


def world_size() -> int:
    """Number of processes that the launcher started; 1 without a launcher.

    Raises:
        UserError: the environment's WORLD_SIZE and RANK are not those of a launch.
    """
    size = _number("WORLD_SIZE", 1)
    if not rank() < size:
        raise UserError(f"the environment's RANK is {rank()}, which is not below its WORLD_SIZE, {size}")
    return size


def rank() -> int:
    """This process's number; 0 is the one that prepares, prints and writes."""
    return _number("RANK", 0)


def local_world_size() -> int:
    """Number of processes on this machine."""
    return _number("LOCAL_WORLD_SIZE", 1)


def local_rank() -> int:
    """This process's number on this machine."""
    return _number("LOCAL_RANK", 0)


def is_first() -> bool:
    """Whether this process is the one that prints and writes."""
    return rank() == 0


def first(work: Callable[[], T]) -> T | None:
    """Let rank 0 do something while the others wait, however long it takes.

    Returns:
        What `work` returned, on rank 0; None elsewhere.

    Raises:
        UserError: on all ranks, if `work` raised one.
    """
    if world_size() == 1:
        return work()
    key = f"first-{_next_turn()}"
    if not is_first():
        outcome = _wait(key)
        if outcome.startswith("failed"):
            raise UserError(outcome.removeprefix("failed").strip() or "rank 0 failed")
        return None
    try:
        result = work()
    except BaseException as error:
        _store().set(key, f"failed {error if isinstance(error, UserError | OSError) else ''}")
        raise
    _store().set(key, "done")
    return result


def agreed(work: Callable[[], T]) -> T:
    """Let rank 0 do something as `first` does, and give its result, which JSON must hold, to all ranks."""
    result = first(work)
    return result if world_size() == 1 else json.loads(tell(json.dumps(result)))


def meet() -> None:
    """Wait until all ranks have come here, however long the others take."""
    if world_size() == 1:
        return
    key = f"meet-{_next_turn()}"
    arrived = _store().add(key, 1)
    while arrived < world_size():
        time.sleep(_PAUSE)
        arrived = _store().add(key, 0)


def tell(value: str | None) -> str:
    """Give rank 0's text to all ranks; the others pass None."""
    if world_size() == 1:
        return value or ""
    key = f"tell-{_next_turn()}"
    if is_first():
        _store().set(key, value or "")
    return _wait(key)


def may_report() -> bool:
    """Whether this process is the first to report a failure: the others have nothing to add, and stay silent."""
    try:
        return world_size() == 1 or _store().add("reports", 1) == 1
    except UserError:  # the environment does not say which process this is
        return True
    except (RuntimeError, OSError, ValueError):  # nobody keeps the store: it was never reached, or rank 0 is gone
        return is_first()


def another_reported() -> bool:
    """Whether some process has said already why the run ends."""
    try:
        return world_size() > 1 and _store().add("reports", 0) > 0
    except (RuntimeError, OSError, ValueError):
        return False


def leave() -> bool:
    """Take leave of the other processes, if there are any, and say if there were; for the end of a program.

    Where no agent of a launcher keeps the store, it lives in rank 0, which stays until the others have left, or for
    LEAVE_PATIENCE seconds if one of them cannot.
    """
    try:
        if world_size() == 1:
            return False
        store = _store()
        left = store.add("left", 1)
        deadline = time.monotonic() + LEAVE_PATIENCE
        kept_here = is_first() and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        while kept_here and left < world_size() and time.monotonic() < deadline:
            time.sleep(_PAUSE)
            left = store.add("left", 0)
    except UserError:  # the environment is not that of a launch
        return False
    except (RuntimeError, OSError, ValueError):  # nobody keeps it any more
        pass
    return True


def _number(name: str, default: int) -> int:
    text = os.environ.get(name) or str(default)
    if not text.isdecimal():
        raise UserError(f"the environment's {name} must be a whole number, got {text!r}")
    return int(text)


@cache
def _store() -> "Store":
    """The launcher's store. A restart by torchrun gets keys of its own."""
    from torch.distributed import PrefixStore, rendezvous

    store, _, _ = next(rendezvous("env://", timeout=_PATIENCE))
    return PrefixStore(f"palimpsa-surgery/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


_turns = iter(range(2**62))


def _next_turn() -> int:
    """Number of this exchange; all ranks take part in all of them, in one order."""
    return next(_turns)


def _wait(key: str) -> str:
    store = _store()
    while not store.check([key]):
        time.sleep(_PAUSE)
    return store.get(key).decode()
