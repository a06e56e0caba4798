"""The command line as a whole: help, speed, versions, errors."""

import os
import resource
import subprocess
import sys

import pytest
import typer

from palimpsa_surgery import __version__
from palimpsa_surgery.cli.main import VERBS, app
from palimpsa_surgery.errors import UserError

COMMAND = [sys.executable, "-c", "from palimpsa_surgery.cli.main import run; run()"]
OPTIONS = {
    "analyze": "--batch-size --data --device --max-tokens --output --overwrite --sequence-length --tokenizer "
    "MODEL MORE_DATA",
    "replace": "--analysis --data --device --dry-run --importance-target --init --layers --max-drift --min-window "
    "--output --overwrite --seed --tokenizer --top-k MODEL MORE_DATA",
    "recipes": "ACTION NAME",
    "train": "--dry-run --max-steps --output --prepare-only --recipe --seed --stage --tokenizer CHECKPOINT",
    "export": "--max-length --output --overwrite --private --push-to-hub --results --tokenizer SOURCE",
    "eval": "--allow-longer --batch-size --device --dtype --lengths --limit --max-length --output --overwrite --preset "
    "--tasks --tokenizer MODEL",
    "diagnose": "--data --device --distance --max-length --output --overwrite --piece-length --remembrance-length "
    "--remembrance-points --sequences --tokenizer MODEL MORE_DATA",
    "compare": "--data --device --dtype --max-length --output --overwrite --sequences --tokenizer ITEMS",
    "demo": "--output --overwrite",
    "doctor": "--device",
}
HELPS = [[], *([verb] for verb in VERBS)]


def options() -> dict[str, list[str]]:
    """Arguments (upper case) and options of every verb."""
    command = typer.main.get_command(app)
    return {
        verb: sorted(option.upper() if option.isidentifier() else option for p in sub.params for option in p.opts)
        for verb, sub in command.commands.items()
    }


@pytest.mark.parametrize("verb", HELPS, ids=lambda verb: verb[0] if verb else "palimpsa-surgery")
def test_help_is_complete_and_fits_80_columns(cli, verb):
    outcome = cli(*verb, "--help")
    assert outcome.code == 0
    assert max(map(len, outcome.stdout.splitlines())) <= 80
    examples = outcome.stdout.split("Examples:\n")[1].split("\n\n")[0].splitlines()
    assert len(examples) == 2, "help shows two commands to copy"
    for example in examples:
        words = example.split()
        assert words[0] == "palimpsa-surgery"
        assert words[1] == (verb[0] if verb else words[1])
        unknown = {word for word in words if word.startswith("--")} - set(options()[words[1]])
        assert not unknown, f"{example}: no such option"


@pytest.mark.parametrize("verb", HELPS, ids=lambda verb: verb[0] if verb else "palimpsa-surgery")
def test_help_answers_in_half_a_second(verb):
    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([*COMMAND, *verb, "--help"], check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    # Time on the processor, which is all that help takes on an idle machine: this one may be busy with other tests.
    assert any(seconds() < 0.5 for _ in range(5))


def test_help_imports_neither_torch_nor_transformers():
    code = (
        "import sys; from palimpsa_surgery.cli.main import main\n"
        f"for verb in {HELPS!r}: assert main([*verb, '--help']) == 0\n"
        "print(sorted({'torch', 'transformers', 'rich', 'numpy', 'datasets'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


def test_no_arguments_show_the_help(cli):
    assert cli() == cli("--help")


def test_version(cli):
    assert cli("--version").stdout == f"palimpsa-surgery {__version__}\n"


def test_a_user_error_is_one_line_and_exit_code_2(cli, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise UserError("the file is\nnot what it should be")

    monkeypatch.setattr("palimpsa_surgery.surgery.export.export", fail)
    assert cli("export", "a", "--output", "b").error == "the file is not what it should be"


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (PermissionError(13, "Permission denied", "/locked"), "[Errno 13] Permission denied: '/locked'"),
        (OSError(28, "No space left on device"), "[Errno 28] No space left on device"),
        (MemoryError(), "out of memory"),
        (RecursionError("maximum depth"), "the input is nested too deeply"),
    ],
    ids=["permission", "disk", "memory", "nesting"],
)
def test_a_fault_of_the_machine_is_one_line_too(fault, message, cli, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise fault

    monkeypatch.setattr("palimpsa_surgery.surgery.export.export", fail)
    assert cli("export", "a", "--output", "b").error == message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "No such command 'nonsense'."),
        (["export"], "Missing argument 'SOURCE'."),
        (["export", "folder", "--nonsense"], "No such option: --nonsense"),
    ],
    ids=["verb", "argument", "option"],
)
def test_a_usage_error_is_one_line_and_exit_code_2(cli, arguments, message):
    assert message in cli(*arguments).error


def test_ctrl_c_is_one_line_and_exit_code_130(cli, monkeypatch):
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("palimpsa_surgery.surgery.export.export", interrupt)
    outcome = cli("export", "a", "--output", "b")
    assert (outcome.code, outcome.stderr) == (130, "interrupted\n")


def test_ctrl_c_that_a_library_wraps_is_ctrl_c(cli, monkeypatch):
    def wrap(*_: object, **__: object) -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            raise UserError("a module cannot be imported") from error

    monkeypatch.setattr("palimpsa_surgery.surgery.export.export", wrap)
    outcome = cli("export", "a", "--output", "b")
    assert (outcome.code, outcome.stderr) == (130, "interrupted\n")


def test_a_bug_keeps_its_traceback(monkeypatch, cli):
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("palimpsa_surgery.surgery.export.export", fail)
    with pytest.raises(ZeroDivisionError):
        cli("export", "a", "--output", "b")


def test_the_module_runs_like_the_console_script():
    environment = os.environ | {"COLUMNS": "80"}
    done = subprocess.run(
        [sys.executable, "-m", "palimpsa_surgery", "--version"], capture_output=True, text=True, env=environment
    )
    assert (done.returncode, done.stdout) == (0, f"palimpsa-surgery {__version__}\n")


def test_every_verb_is_a_function_of_the_package():
    import palimpsa_surgery

    names = ["evaluate" if verb == "eval" else verb for verb in VERBS]  # Python has an `eval` of its own
    assert all(callable(getattr(palimpsa_surgery, name)) for name in names)
    assert set(names) <= set(palimpsa_surgery.__all__)


def test_the_options_are_these():
    """A changed option is a changed interface: change it here too, and in the changelog."""
    assert {verb: " ".join(names) for verb, names in options().items()} == OPTIONS


INTERRUPTED = """
import builtins, os, signal
import palimpsa_surgery.__main__ as program
original = builtins.__import__

def interrupting(name, *arguments, **options):
    if name.startswith("palimpsa_surgery.cli"):
        os.kill(os.getpid(), signal.SIGINT)
    return original(name, *arguments, **options)

builtins.__import__ = interrupting
program.run()
"""


def test_interrupt_before_anything_is_imported_is_quiet():
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


IN_A_FINALISER = """
import os, signal, time
import palimpsa_surgery.__main__ as program
import palimpsa_surgery.surgery.export as library

class Finalised:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)

def export(*arguments, **options):
    Finalised()
    time.sleep(20)

library.export = export
program.sys.argv = ["palimpsa-surgery", "export", "a", "--output", "b"]
program.run()
"""


def test_interrupt_in_a_finaliser_is_not_lost():
    done = subprocess.run([sys.executable, "-c", IN_A_FINALISER], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")
