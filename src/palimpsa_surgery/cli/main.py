"""The command line: one verb per module of this folder, each a thin call of the library function it names.

A verb module holds one function named like the verb. Its docstring is the help text, which ends with two
commands to copy, kept unwrapped by a line that holds only the escape \\b:

    def export(...) -> None:
        '''Write a folder that AutoModelForCausalLM loads anywhere.

        \\b
        Examples:
          palimpsa-surgery export runs/demo --output exported
          palimpsa-surgery export hybrid --output exported --push-to-hub me/hybrid
        '''

Torch, transformers and Rich are imported inside these functions, so that `--help` is instant.
"""

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Annotated

import typer

from palimpsa_surgery import ranks
from palimpsa_surgery._version import __version__
from palimpsa_surgery.errors import UserError

VERBS = ("analyze", "replace", "recipes", "train", "export", "eval", "diagnose", "compare", "demo", "doctor")

app = typer.Typer(
    name="palimpsa-surgery",
    add_completion=False,
    rich_markup_mode=None,  # plain help: Rich costs a third of the time --help may take
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"palimpsa-surgery {__version__}")
        raise typer.Exit


@app.callback()
def palimpsa_surgery(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Give a pretrained Mamba2 language model a metaplastic memory.

    \b
    Examples:
      palimpsa-surgery demo --output demo-output
      palimpsa-surgery analyze tiny-mamba2 --data text.txt --output windows
    """


for _verb in VERBS:
    app.command(_verb)(getattr(importlib.import_module(f"palimpsa_surgery.cli.{_verb}"), _verb))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line on `arguments` (default: sys.argv) and return the exit code.

    0 for success, 2 with one line on stderr for a user's mistake or a fault of the machine (no permission, a full
    disk, no memory), 130 for Ctrl-C. Anything else is a bug and shows its traceback. Of several processes that end
    for one reason, only one says why.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "warning")
    os.environ.setdefault("DATASETS_VERBOSITY", "warning")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # logs and pipes get none of transformers' either
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # else a warning at every fork
    # Threads that spin while they wait gain 20% on two idle cores, and lose a factor of 2 to 4 on busy ones.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        with _interrupts_unwrapped():
            status = app(args=arguments or ["--help"], standalone_mode=False)
    except (UserError, typer.TyperException) as error:
        message = error.format_message() if isinstance(error, typer.TyperException) else str(error)
        if message:
            _report(f"error: {' '.join(message.splitlines())}")
        return 2
    except (OSError, MemoryError, RecursionError) as error:
        what = {MemoryError: "out of memory", RecursionError: "the input is nested too deeply"}
        _report(f"error: {what.get(type(error)) or ' '.join(str(error).split())}")
        return 2
    except (KeyboardInterrupt, typer.Abort):
        status = 130
    except Exception:
        if ranks.another_reported():  # this is what its end did to us
            return 2
        raise
    if status == 130:  # what typer makes of KeyboardInterrupt
        _report("interrupted")
    return status or 0


@contextlib.contextmanager
def _interrupts_unwrapped() -> Iterator[None]:
    """Raise KeyboardInterrupt for an exception that some library made of one, as lazy imports do."""
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, KeyboardInterrupt):
                raise cause from None
            cause = cause.__cause__ or cause.__context__
        raise


def _report(line: str) -> None:
    if ranks.may_report():
        print(line, file=sys.stderr, flush=True)


def run() -> None:
    """Entry point of the console script."""
    status = main()
    if ranks.leave():
        sys.stdout.flush()
        os._exit(status)  # a process group is not taken down in order once one has failed, and trying may hang
    sys.exit(status)
