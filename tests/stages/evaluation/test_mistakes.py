"""Mistakes of `eval`'s users: each is one line, and leaves nothing behind."""

import json
import re
import shutil
import sys

import pytest
import torch
import yaml

from palimpsa_surgery.errors import UserError
from palimpsa_surgery.stages.evaluation import evaluate, parse_lengths
from palimpsa_surgery.surgery.checkpoints import save_checkpoint
from stages.conftest import make_small_model
from stages.evaluation.conftest import ROW, STORY, choice_task

pytest.importorskip("lm_eval", reason="lm-eval is not installed")


def test_nan_logits_are_one_line(tmp_path, tokenizer, task_folder):
    (tmp_path / "broken").mkdir()
    model = make_small_model()
    with torch.no_grad():
        model.backbone.norm_f.weight.fill_(3e38)  # finite, but what is multiplied by it is not
    save_checkpoint(model, tmp_path / "broken", tokenizer=tokenizer, dtype=torch.float32)
    for task in ("beasts", "key"):
        with pytest.raises(UserError, match="predicts NaN or infinity"):
            evaluate(tmp_path / "broken", task_folder, tmp_path / "out", tasks=[task])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("preset", "options", "message"),
    [
        ("comonsense", {}, "'comonsense' is no preset and no task file or folder (did you mean commonsense?)"),
        ("", {}, "'' is no preset and no task file or folder"),
        ("zebra", {}, "(presets: commonsense, ruler, longbench2)"),
        ("commonsense", {"tasks": ["pika"]}, "preset commonsense has no task 'pika' (did you mean piqa?)"),
        ("commonsense", {"tasks": []}, "no tasks of preset commonsense are named"),
        ("commonsense", {"lengths": [4096]}, "commonsense has no lengths to choose (--lengths is for ruler)"),
        ("commonsense", {"tasks": ["piqa"]}, "task piqa: its data set baber/piqa cannot be fetched: it is not in the"),
        ("ruler", {"lengths": [512]}, "ruler_vt cannot be made with 512 tokens: at least 1024"),
        ("ruler", {"lengths": [0]}, "lengths must be numbers of tokens, at least 1, got 0"),
        ("ruler", {"lengths": [2048, 2048]}, "lengths are given twice: 2048, 2048"),
        ("ruler", {}, "--lengths: 32,768 tokens are more than the 2,048 that"),
        ("FOLDER", {"max_length": 4096}, "--max-length: 4,096 tokens are more than the 2,048 that"),
        ("FOLDER", {"tasks": ["keys"]}, "has no task 'keys' (did you mean key?)"),
        ("FOLDER", {"max_length": 8, "tasks": ["key"]}, "which leaves no room for a prompt in a length of 8"),
        ("FOLDER", {"max_length": 0}, "max length must be at least 1, got 0"),
        ("FOLDER", {"limit": 0}, "limit must be at least 1, got 0"),
        ("FOLDER", {"batch_size": 0}, "batch size must be a number, at least 1, or auto, got 0"),
        ("FOLDER", {"batch_size": "huge"}, "batch size must be a number, at least 1, or auto, got 'huge'"),
        ("FOLDER", {"dtype": "int8"}, "unknown dtype 'int8' (known: float32, bfloat16, float16)"),
        ("FOLDER", {"tokenizer": "nowhere/at/all"}, "tokenizer nowhere/at/all: no such file or folder"),
        ("FOLDER", {"device": "warp"}, "device 'warp' cannot be used"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else None,
)
def test_mistakes_are_named_and_leave_nothing_behind(preset, options, message, hybrid, task_folder, tmp_path):
    with pytest.raises(UserError) as error:
        evaluate(hybrid, task_folder if preset == "FOLDER" else preset, tmp_path / "out", **options)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("just words", "cannot be read"),
        ("dataset_path: json", "names no `task` or `group`"),
        ("task: [", "cannot be read"),
        (
            "task: x\ndataset_path: json\ndataset_kwargs: {data_files: {test: gone.jsonl}}\ntest_split: test",
            "task x: its",
        ),
        ("task: x\ndoc_to_text: !function nowhere.at_all", "task x: it needs a package that is missing"),
    ],
)
def test_a_task_file_that_is_none(content, message, hybrid, tmp_path):
    (tmp_path / "task.yaml").write_text(content)
    with pytest.raises(UserError) as error:
        evaluate(hybrid, tmp_path / "task.yaml", tmp_path / "out")
    assert message in str(error.value)


MEAN = {"aggregation": "mean", "higher_is_better": True}
ACC = [{"metric": "acc"} | MEAN]


@pytest.mark.parametrize(
    ("change", "data", "message"),
    [
        ({"num_fewshot": 3}, ROW, "lm-eval cannot run task (ValueError: Sample larger than population or is negative)"),
        ({"unsafe_code": True}, ROW, "lm-eval cannot run task (ValueError: Attempted to run task: x which is marked"),
        ({"doc_to_text": "{{gone.at}}"}, ROW, "task x: it cannot be loaded (UndefinedError: 'gone' is undefined)"),
        ({"metric_list": [{"metric": "acurracy"}]}, ROW, "task x: lm-eval has no metric 'acurracy' (metrics: "),
        ({"metric_list": [*ACC, {"metric": "acc_nrom"} | MEAN]}, ROW, "no metric 'acc_nrom' (did you mean acc_norm?)"),
        (
            {"metric_list": [{"metric": "acc", "aggregation": "meen"}]},
            ROW,
            "no aggregation 'meen' (did you mean mean?)",
        ),
        (
            {"metric_list": [{"metric": "ter"}]},
            ROW,
            "gave no number (lm-eval gives no ter of x, a multiple_choice task)",
        ),
        ({}, "", "task x: its data are empty"),
        ({}, "{gone", "task x: its data cannot be read: "),
    ],
    ids=["shots", "unsafe", "field", "metric", "one-metric", "aggregation", "unfit", "empty", "json"],
)
def test_a_task_that_lm_eval_cannot_run(change, data, message, hybrid, tmp_path):
    (tmp_path / "rows.jsonl").write_text(data)
    (tmp_path / "task.yaml").write_text(yaml.safe_dump(choice_task("x", tmp_path / "rows.jsonl") | change))
    with pytest.raises(UserError) as error:
        evaluate(hybrid, tmp_path / "task.yaml", tmp_path / "out")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("second", "message"),
    [("task: x\ndataset_path: json", r"b.yaml names 'x', as .*a.yaml does"), ("task: [", "b.yaml cannot be read: ")],
    ids=["twice", "broken"],
)
def test_a_file_of_a_folder_that_lm_eval_would_pass_over(second, message, hybrid, tmp_path):
    (tmp_path / "rows.jsonl").write_text(ROW)
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(choice_task("x", tmp_path / "rows.jsonl")))
    (tmp_path / "b.yaml").write_text(second)
    with pytest.raises(UserError, match=message):
        evaluate(hybrid, tmp_path, tmp_path / "out")


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"WORLD_SIZE": "two"}, "the environment's WORLD_SIZE must be a whole number, got 'two'"),
        ({"WORLD_SIZE": "2"}, "has WORLD_SIZE or LOCAL_RANK, but not RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT"),
        ({"ACCELERATE_USE_CPU": "true", "MASTER_PORT": "1"}, "asked for several processes and started only one"),
    ],
    ids=["words", "alone", "accelerate"],
)
def test_a_launch_that_is_none(environment, message, hybrid, task_folder, tmp_path, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=message):
        evaluate(hybrid, task_folder, tmp_path / "out")


def test_a_tokenizer_without_an_end(hybrid, task_folder, tmp_path):
    shutil.copytree(hybrid, tmp_path / "endless")
    (tmp_path / "endless" / "tokenizer_config.json").write_text('{"tokenizer_class": "TokenizersBackend"}')
    with pytest.raises(UserError, match=r"the tokenizer of .*endless has no eos token, which lm-eval needs"):
        evaluate(tmp_path / "endless", task_folder, tmp_path / "out")


def test_a_folder_of_odd_files(hybrid, tmp_path):
    for name, content in (("a", "task: 3"), ("b", "task: x")):
        (tmp_path / f"{name}.yaml").write_text(content)
    with pytest.raises(UserError, match=r"the tasks in .* cannot be read \(TypeError: "):
        evaluate(hybrid, tmp_path, tmp_path / "out")


@pytest.mark.parametrize(
    ("tasks", "message"),
    [("[x, gone]", "group g names tasks that are not there: gone"), ("[{task: [x]}]", "group g names a task by ['x']")],
)
def test_a_group_of_odd_tasks(tasks, message, hybrid, tmp_path):
    (tmp_path / "rows.jsonl").write_text(ROW)
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(choice_task("x", tmp_path / "rows.jsonl")))
    (tmp_path / "g.yaml").write_text(f"group: g\ntask: {tasks}\n")
    for preset in (tmp_path, tmp_path / "g.yaml"):
        with pytest.raises(UserError, match=re.escape(message)):
            evaluate(hybrid, preset, tmp_path / "out")


def test_an_empty_folder_and_an_answer_that_is_too_long(hybrid, tmp_path):
    (tmp_path / "tasks").mkdir()
    with pytest.raises(UserError, match="holds no task of lm-eval"):
        evaluate(hybrid, tmp_path / "tasks", tmp_path / "out")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "Go", "choices": [f" {STORY}", " on"], "gold": 0}))
    (tmp_path / "tasks" / "long.yaml").write_text(yaml.safe_dump(choice_task("long", tmp_path / "rows.jsonl")))
    with pytest.raises(UserError, match=r"task long, document 0: an answer of \d+ tokens exceeds the length of 8"):
        evaluate(hybrid, tmp_path / "tasks", tmp_path / "out", max_length=8)
    documents = [{"text": "Go", "choices": [choice, " on"], "gold": 0} for choice in (" in", "")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in documents))
    with pytest.raises(UserError, match="task long, document 1: there is nothing to score after the prompt"):
        evaluate(hybrid, tmp_path / "tasks", tmp_path / "out")


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("lm_eval", "eval needs lm_eval, which is not installed"),
        ("lm_eval.models.huggingface", "eval needs lm_eval, which cannot be imported (ModuleNotFoundError: "),
        ("lm_eval.tasks", "eval needs lm_eval, which cannot be imported (ModuleNotFoundError: "),
        ("wonderwords", "eval needs wonderwords, which is not installed"),
    ],
)
def test_a_missing_package_is_one_line(missing, message, cli, hybrid, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    error = cli("eval", hybrid, "--preset", "ruler", "--output", tmp_path / "out").error
    assert error.startswith(message)
    assert error.endswith(": pip install 'palimpsa-surgery[eval]'")


def test_half_an_lm_eval_is_noticed_when_its_metrics_are_needed(hybrid, task_folder, tmp_path, monkeypatch):
    """lm-eval imports some of its own requirements late."""

    def fail(*_, **__):
        raise ModuleNotFoundError("No module named 'evaluate'", name="evaluate")

    monkeypatch.setattr("lm_eval.tasks.TaskManager.load", fail)
    with pytest.raises(UserError, match=r"task beasts: it needs a package that is missing .*'evaluate'.*pip install"):
        evaluate(hybrid, task_folder, tmp_path / "out")


def test_lengths_are_read_from_the_command_line():
    assert parse_lengths("4096, 8192") == [4096, 8192]
    with pytest.raises(UserError, match="lengths must be numbers of tokens such as 4096,8192, got '4k'"):
        parse_lengths("4k")
