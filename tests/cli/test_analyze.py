"""The verb `analyze`."""

import json

import pytest


@pytest.fixture
def texts(tmp_path, kjv):
    """The same few hundred tokens in three files."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in ("a", "b", "c"):
        (folder / f"{name}.txt").write_text(kjv.read_text()[:800])
    return sorted(folder.iterdir())


def test_it_prints_the_table_and_where_the_files_are(cli, tiny_checkpoint, texts, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    outcome = cli("analyze", tiny_checkpoint, "--data", texts[0], "--output", tmp_path / "out", "--sequence-length", 64)
    assert (outcome.code, outcome.stderr) == (0, "")
    lines = outcome.stdout.splitlines()
    assert max(map(len, lines[:-1])) <= 80
    assert sum("● selected" in line for line in lines) == 8
    assert all(name in outcome.stdout for name in ("layer", "median", "p5", "p95", "paper", "rank"))
    assert "Longest windows: layers" in outcome.stdout
    assert "The paper's score" in outcome.stdout
    assert lines[-1] == f"Wrote {tmp_path / 'out'}"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["analysis.json", "windows.png"]


def test_all_options_reach_the_library(cli, tiny_checkpoint, texts, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").write_text("")
    options = {
        "--tokenizer": tiny_checkpoint / "tokenizer.json",
        "--max-tokens": 90,
        "--sequence-length": 30,
        "--batch-size": 2,
        "--device": "cpu",
        "--output": tmp_path / "out",
    }
    words = [word for pair in options.items() for word in pair]
    outcome = cli("analyze", tiny_checkpoint, "--data", texts[0], *words, "--overwrite")
    assert outcome.code == 0
    content = json.loads((tmp_path / "out" / "analysis.json").read_text())
    assert (content["tokens"], content["sequence_length"]) == (90, 30)
    assert not (tmp_path / "out" / "old").exists()


@pytest.mark.parametrize("form", ["one option", "an option each"])
def test_several_files_can_be_given_as_a_shell_expands_them(form, cli, tiny_checkpoint, texts, tmp_path):
    data = ["--data", *texts] if form == "one option" else [word for text in texts for word in ("--data", text)]
    outcome = cli("analyze", tiny_checkpoint, *data, "--output", tmp_path / "out", "--sequence-length", 100)
    assert outcome.code == 0
    one = len(json.loads((tmp_path / "out" / "analysis.json").read_text())["calibration_sample"]["input_ids"])
    tokens = json.loads((tmp_path / "out" / "analysis.json").read_text())["tokens"]
    assert one > 3
    assert tokens > 600


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Missing option '--data'"),
        (["--data", "missing.txt"], "text file missing.txt does not exist"),
        (["--data", "TEXT", "--batch-size", "0"], "batch size must be at least 1, got 0"),
        (["--data", "TEXT", "--max-tokens", "x"], "Invalid value for '--max-tokens'"),
        (["--data", "TEXT", "--device", "warp"], "device 'warp' cannot be used"),
    ],
    ids=["no data", "missing data", "batch size", "no number", "device"],
)
def test_mistakes_are_one_line_and_leave_nothing_behind(arguments, message, cli, tiny_checkpoint, texts, tmp_path):
    arguments = [texts[0] if word == "TEXT" else word for word in arguments]
    assert message in cli("analyze", tiny_checkpoint, *arguments, "--output", tmp_path / "out").error
    assert not (tmp_path / "out").exists()


def test_an_output_that_is_not_empty_is_left_alone(cli, tiny_checkpoint, texts):
    folder = texts[0].parent
    error = cli("analyze", tiny_checkpoint, "--data", texts[0], "--output", folder).error
    assert error == f"output folder {folder} is not empty (use --overwrite to replace it)"
    assert sorted(folder.iterdir()) == texts
