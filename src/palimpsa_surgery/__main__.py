"""`python -m palimpsa_surgery` is the command line."""

import _thread
import os
import signal
import sys
import threading


def run() -> None:
    """Entry point of the console script: quiet about Ctrl-C from the start, before anything else is imported."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from palimpsa_surgery.cli.main import run as run_command_line

    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.unraisablehook = _interrupt_again
    run_command_line()


def _interrupt_again(unraisable: "sys.UnraisableHookArgs") -> None:
    """Deliver a Ctrl-C that fell into a finaliser or an import's callback, where Python shows it and goes on."""
    if isinstance(unraisable.exc_value, KeyboardInterrupt):
        threading.Timer(0.01, _thread.interrupt_main).start()  # once we are out of there
    else:
        sys.__unraisablehook__(unraisable)


if __name__ == "__main__":
    run()
