"""The verbs `compare` and `eval` on the command line."""

import json
from pathlib import Path

import pytest

from palimpsa_surgery.errors import UserError
from surgery.test_results import make_evaluation


@pytest.fixture
def results(tmp_path):
    folders = []
    for name in ("plain", "hybrid"):
        folders.append(tmp_path / f"scores-{name}")
        folders[-1].mkdir()
        make_evaluation(model=f"models/{name}", model_fingerprint=name).save(folders[-1])
    return folders


def test_it_prints_the_tables_and_where_the_files_are(cli, results, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    outcome = cli("compare", *results, "--output", tmp_path / "out")
    assert (outcome.code, outcome.stderr) == (0, "")
    lines = outcome.stdout.splitlines()
    assert max(map(len, lines[:-1])) <= 80
    assert "Scores, ruler" in lines
    assert any("N-1 (%) ↑ at 4,096" in line and "+0.00" in line for line in lines)
    assert lines[-1] == f"Wrote {tmp_path / 'out'}"


@pytest.fixture
def seen(monkeypatch):
    """What reaches the libraries, which do nothing."""
    calls = {}

    def record(*arguments, **options):
        calls.update(options, arguments=arguments)
        raise UserError("enough seen")

    monkeypatch.setattr("palimpsa_surgery.surgery.comparison.compare", record)
    monkeypatch.setattr("palimpsa_surgery.stages.evaluation.evaluate", record)
    return calls


def test_all_options_of_compare_reach_the_library(cli, seen):
    words = "a b c --data x.txt --data y.txt --tokenizer t --max-length 16 --sequences 3 --device cpu --dtype float16"
    assert cli("compare", *words.split(), "--output", "out", "--overwrite").error == "enough seen"
    assert seen == {
        "arguments": (["a", "b", "c"], Path("out")),
        "data": [Path("x.txt"), Path("y.txt")],
        "tokenizer": "t",
        "max_length": 16,
        "sequences": 3,
        "device": "cpu",
        "dtype": "float16",
        "overwrite": True,
    }


def test_all_options_of_eval_reach_the_library(cli, seen):
    words = (
        "model --preset ruler --tasks ruler_vt,niah_single_1 --limit 5 --lengths 4096,8192 --max-length 9000 "
        "--allow-longer --batch-size 4 --tokenizer t --device cpu --dtype bfloat16 --output out --overwrite"
    )
    assert cli("eval", *words.split()).error == "enough seen"
    assert seen == {
        "arguments": ("model", "ruler", Path("out")),
        "tasks": ["ruler_vt", "niah_single_1"],
        "limit": 5,
        "lengths": [4096, 8192],
        "max_length": 9000,
        "allow_longer": True,
        "batch_size": 4,
        "tokenizer": "t",
        "device": "cpu",
        "dtype": "bfloat16",
        "overwrite": True,
    }
    assert cli("eval", "model", "--preset", "ruler", "--output", "out", "--batch-size", "auto").error == "enough seen"
    assert seen["batch_size"] == "auto"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eval", "model", "--output", "out"], "Missing option '--preset'"),
        (["eval", "model", "--preset", "ruler", "--output", "out", "--lengths", "4k"], "got '4k'"),
        (["eval", "nowhere", "--preset", "commonsense", "--output", "out"], "model nowhere: no such folder"),
        (["eval", "model", "--preset", "commonsense", "--output", "out", "--batch-size", "x"], "or auto, got 'x'"),
        (["eval", "model", "--preset", "ruler", "--output", "out", "--batch-size", "9" * 5000], "or auto, got '999"),
        (["eval", "", "--preset", "commonsense", "--output", "out"], "the name of a model is empty"),
        (["compare", "--output", "out"], "Missing argument 'ITEM...'"),
        (["compare", "nowhere", "--output", "out"], "compare needs two models or results at least, got 1"),
    ],
    ids=["preset", "lengths", "model", "batch", "digits", "no name", "no items", "one item"],
)
def test_mistakes_are_one_line(arguments, message, cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message in cli(*arguments).error
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_is_not_empty_is_left_alone(cli, results):
    error = cli("compare", *results, "--output", results[0]).error
    assert "is not empty (use --overwrite to replace it)" in error
    error = cli("compare", *results, "--output", results[0], "--overwrite").error
    assert "is or holds the input" in error
    assert json.loads((results[0] / "results.json").read_text())["model"] == "models/plain"
