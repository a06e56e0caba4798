"""The verb `diagnose`."""

import json

import pytest


@pytest.fixture
def texts(tmp_path, kjv):
    """The same two hundred tokens in two files."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in ("a", "b"):
        (folder / f"{name}.txt").write_text(kjv.read_text()[:800])
    return sorted(folder.iterdir())


def test_it_prints_the_tables_and_where_the_files_are(cli, tiny_checkpoint, texts, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    sizes = ("--max-length", 48, "--sequences", 2, "--remembrance-points", 4)
    outcome = cli("diagnose", tiny_checkpoint, "--data", texts[0], "--output", tmp_path / "out", *sizes)
    assert (outcome.code, outcome.stderr) == (0, "")
    lines = outcome.stdout.splitlines()
    assert max(map(len, lines[:-1])) <= 80
    assert "Perplexity over 2 sequences of 48 tokens" in lines
    assert "Effective remembrance at 48 tokens" in lines
    assert all(name in outcome.stdout for name in ("layer", "window", "state std", "growth", "total variation"))
    assert lines[-1] == f"Wrote {tmp_path / 'out'}"
    written = ["diagnosis.json", "perplexity.png", "remembrance.png", "states.png", "windows.png"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == written


def test_all_options_reach_the_library(cli, tiny_checkpoint, texts, tmp_path, monkeypatch):
    monkeypatch.setattr("palimpsa_surgery.surgery.diagnosis.plot_diagnosis", lambda *_: None)  # the slowest part
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").write_text("")
    options = {
        "--tokenizer": tiny_checkpoint / "tokenizer.json",
        "--max-length": 30,
        "--sequences": 2,
        "--piece-length": 9,
        "--remembrance-length": 20,
        "--remembrance-points": 3,
        "--distance": "cosine",
        "--device": "cpu",
        "--output": tmp_path / "out",
    }
    words = [word for pair in options.items() for word in pair]
    outcome = cli("diagnose", tiny_checkpoint, "--data", *texts, *words, "--overwrite")
    assert (outcome.code, outcome.stderr) == (0, "")
    content = json.loads((tmp_path / "out" / "diagnosis.json").read_text())
    assert (content["sequences"], content["sequence_length"]) == (2, 30)
    remembrance = content["remembrance"]
    assert (remembrance["distance"], remembrance["length"], len(remembrance["starts"])) == ("cosine", 20, 3)
    assert not (tmp_path / "out" / "old").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Missing option '--data'"),
        (["--data", "missing.txt"], "text file missing.txt does not exist"),
        (["--data", "TEXT", "--distance", "l1"], "unknown distance 'l1'"),
        (["--data", "TEXT"], "tokens, one sequence needs 8192"),
    ],
    ids=["no data", "missing data", "distance", "short text"],
)
def test_mistakes_are_one_line_and_leave_nothing_behind(arguments, message, cli, tiny_checkpoint, texts, tmp_path):
    arguments = [texts[0] if word == "TEXT" else word for word in arguments]
    assert message in cli("diagnose", tiny_checkpoint, *arguments, "--output", tmp_path / "out").error
    assert not (tmp_path / "out").exists()


def test_an_output_that_is_not_empty_is_left_alone(cli, tiny_checkpoint, texts):
    folder = texts[0].parent
    error = cli("diagnose", tiny_checkpoint, "--data", texts[0], "--output", folder).error
    assert "is not empty (use --overwrite to replace it)" in error
    assert sorted(folder.iterdir()) == texts
