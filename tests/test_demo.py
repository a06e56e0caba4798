"""The demo, once, as a user runs it: every verb on the shipped checkpoint, and training that really helps."""

import contextlib
import io
import os
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from palimpsa_surgery.cli.main import main
from palimpsa_surgery.stages import demo as library


@dataclass(frozen=True)
class Shown:
    result: library.Demo
    folder: Path
    text: str


@pytest.fixture(scope="module")
def shown(tmp_path_factory) -> Shown:
    """The demo's results and what it printed, with no network to reach for."""
    folder = tmp_path_factory.mktemp("demo")
    results, printed = [], io.StringIO()
    run_demo = library.demo

    def keep(*args, **options) -> library.Demo:
        results.append(run_demo(*args, **options))
        return results[0]

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
        patch.setenv("COLUMNS", "80")
        patch.setattr(library, "demo", keep)
        patch.chdir(folder)
        assert main(["demo", "--output", "out"]) == 0
    return Shown(results[0], folder / "out", printed.getvalue())


def test_training_helps(shown):
    """Against no training, on text and questions that no stage trained on."""
    prose, answers = shown.result.perplexities.prose, shown.result.perplexities.answers
    assert prose["after stage extend"] <= 0.95 * prose["hybrid, untrained"]
    assert answers["after stage instruct"] <= 0.5 * answers["hybrid, untrained"]
    assert prose["after stage instruct"] <= 1.25 * prose["hybrid, untrained"], "instructions cost the prose too much"


def test_every_stage_improves_on_its_own_held_out_text(shown):
    for stage in shown.result.run.record["stages"]:
        assert stage["after"]["loss"] < stage["before"]["loss"], stage["name"]


def test_surgery_changes_next_to_nothing_and_training_does(shown):
    assert 0 < shown.result.replacement.drift.relative < 0.02
    for values in (shown.result.perplexities.prose, shown.result.perplexities.answers):
        assert values["hybrid, untrained"] == pytest.approx(values["Mamba2"], rel=0.01)


def test_a_stranger_loads_the_export_and_generates(shown):
    reloaded = shown.result.reloaded
    assert reloaded.module.startswith("transformers_modules.")
    assert reloaded.difference <= 1e-4
    assert reloaded.text.startswith(library.PROMPT)
    assert len(reloaded.text) > len(library.PROMPT)


def test_it_shows_what_it_does_in_80_columns(shown):
    titles = re.findall(r"^(\d)\. ", shown.text, re.MULTILINE)
    assert titles == list("123456")
    for words in ("Memory windows", "● selected", "drift over", "Held-out loss", "Perplexity of held-out text"):
        assert words in shown.text
    for line in shown.text.splitlines():
        assert len(line) <= 80 or line.startswith("  "), "only paths may be longer"
    assert "\x1b" not in shown.text, "no colours where there is no terminal"


def test_it_says_where_everything_is(shown):
    paths = re.findall(r" (out/\S+)$", shown.text.split("What was made:")[1], re.MULTILINE)
    assert len(paths) == 5
    for path in paths:
        assert (shown.folder.parent / path).exists(), path
    assert (shown.folder / "analysis" / "windows.png").read_bytes().startswith(b"\x89PNG")


def test_the_commands_it_shows_are_the_verbs(shown):
    commands = re.findall(r"^palimpsa-surgery (\w+)", shown.text, re.MULTILINE)
    assert commands == ["analyze", "replace", "train", "export"]


def test_it_does_not_overwrite_unasked(cli, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    assert "not empty" in cli("demo", "--output", tmp_path).error
    assert os.listdir(tmp_path) == ["notes.txt"]


def test_a_command_is_broken_to_fit_80_columns(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ("analyze", tmp_path / "a-rather-long-name-of-a-folder", "--data", "another-long-name", "--output", "out")
    shown = library.shell_command(*words)
    assert max(map(len, shown.splitlines())) <= 76
    expected = " ".join(map(str, ("palimpsa-surgery", *words))).replace(f"{tmp_path}/", "")
    assert shown.replace(" \\\n    ", " ") == expected
