"""`python -m palimpsa_surgery` is the command line."""

import os
import signal


def run() -> None:
    """Entry point of the console script: quiet about Ctrl-C from the start, before anything else is imported."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from palimpsa_surgery.cli.main import run as run_command_line

    signal.signal(signal.SIGINT, signal.default_int_handler)
    run_command_line()


if __name__ == "__main__":
    run()
