"""The verb `replace`."""

import json

import pytest


@pytest.fixture(scope="module")
def analysis(tiny_checkpoint, kjv, tmp_path_factory):
    """Folder of an analysis of the tiny checkpoint, on 128 tokens."""
    from palimpsa_surgery.surgery.analysis import analyze

    folder = tmp_path_factory.mktemp("analysis") / "windows"
    analyze(tiny_checkpoint, kjv, folder, max_tokens=128, sequence_length=64)
    return folder


def test_it_prints_layers_ledger_and_drift(cli, tiny_checkpoint, analysis, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    output = tmp_path / "hybrid"
    outcome = cli("replace", tiny_checkpoint, "--analysis", analysis, "--top-k", 2, "--output", output)
    assert (outcome.code, outcome.stderr) == (0, "")
    lines = outcome.stdout.splitlines()
    assert max(map(len, lines[:-1])) <= 80
    record = json.loads((output / "surgery.json").read_text())
    first, second = record["palimpsa_layers"]
    for text in (
        f"replaced: layers {first}, {second} of 12",
        "init: calibrated, importance_target 0.1, seed 0",
        "6,634,016",  # parameters before
        "+24,608",  # 2 × (16 × 256 + 512 × 16 + 2 × 8)
        "13.3 MB",
        "copied bit for bit: 110 tensors",
        f"  backbone.layers.{{{first},{second}}}.mixer.b_proj.weight [512, 16]",
        "dropped: none",
        "drift over 128 tokens, before any training:",
        "largest importance ratio  0.09",
    ):
        assert text in outcome.stdout, text
    assert lines[-1] == f"Wrote {output}"


def test_top_k_0_needs_nothing_else(cli, tiny_checkpoint, tmp_path):
    outcome = cli("replace", tiny_checkpoint, "--top-k", 0, "--output", tmp_path / "control")
    assert outcome.code == 0
    assert "replaced: none (converted untouched)" in outcome.stdout
    assert "drift: none, since nothing was replaced" in outcome.stdout
    assert json.loads((tmp_path / "control" / "config.json").read_text())["model_type"] == "mamba2"


def test_all_options_reach_the_library(cli, tiny_checkpoint, kjv, tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text(kjv.read_text()[:300])
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").write_text("")
    options = {
        "--layers": "8,3",
        "--init": "calibrated",
        "--importance-target": 0.02,
        "--max-drift": 0.5,
        "--tokenizer": tiny_checkpoint / "tokenizer.json",
        "--seed": 7,
        "--device": "cpu",
        "--output": tmp_path / "out",
    }
    words = [word for pair in options.items() for word in pair]
    outcome = cli("replace", tiny_checkpoint, "--data", text, text, *words, "--overwrite")
    assert outcome.code == 0, outcome.stderr
    record = json.loads((tmp_path / "out" / "surgery.json").read_text())
    assert record["palimpsa_layers"] == [3, 8]
    assert record["init"] == {"kind": "calibrated", "importance_target": 0.02, "seed": 7}
    assert 0.015 < record["drift"]["max_importance_ratio"] < 0.02
    assert record["drift"]["tokens"] > 150
    assert not (tmp_path / "out" / "old").exists()


def test_a_dry_run_prints_the_same_and_writes_nothing(cli, tiny_checkpoint, analysis, tmp_path):
    arguments = ["replace", tiny_checkpoint, "--analysis", analysis, "--min-window", 60]
    dry = cli(*arguments, "--dry-run")
    assert dry.code == 0
    assert dry.stdout.endswith("Dry run: nothing was written.\n")
    assert list(tmp_path.iterdir()) == []
    wet = cli(*arguments, "--output", tmp_path / "hybrid")
    assert wet.stdout.splitlines()[:-1] == dry.stdout.splitlines()[:-1]


def test_paper_init_without_text_says_that_drift_was_not_measured(cli, tiny_checkpoint):
    outcome = cli("replace", tiny_checkpoint, "--layers", "1", "--init", "paper", "--dry-run")
    assert outcome.code == 0
    assert "drift: not measured, for want of text to measure it on" in outcome.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "top_k needs an analysis"),
        (["--top-k", "1", "--layers", "2"], "got top_k, layers"),
        (["--top-k", "13", "--analysis", "ANALYSIS"], "from 0 to 12, the number of layers; got 13"),
        (["--top-k", "1"], "top_k needs an analysis"),
        (["--layers", "3,"], "whole numbers separated by commas, such as 3,8; got '3,'"),
        (["--layers", "12"], "layers must be from 0 to 11, got 12"),
        (["--layers", "1"], 'init "calibrated" needs text'),
        (["--layers", "1", "--init", "none"], "init must be one of calibrated, paper; got 'none'"),
        (["--layers", "1", "--analysis", "missing"], "there is no analysis at missing"),
        (["--layers", "1", "--analysis", "ANALYSIS", "--max-drift", "1e-9"], "more than the limit of 1e-09"),
    ],
    ids=["no rule", "two rules", "k", "no analysis", "list", "no layer", "no text", "init", "missing", "drift"],
)
def test_mistakes_are_one_line_and_leave_nothing_behind(arguments, message, cli, tiny_checkpoint, analysis, tmp_path):
    arguments = [analysis if word == "ANALYSIS" else word for word in arguments]
    assert message in cli("replace", tiny_checkpoint, *arguments, "--output", tmp_path / "out").error
    assert list(tmp_path.iterdir()) == []


def test_an_output_is_needed_unless_nothing_is_written(cli, tiny_checkpoint):
    assert "no output folder given" in cli("replace", tiny_checkpoint, "--top-k", 0).error
