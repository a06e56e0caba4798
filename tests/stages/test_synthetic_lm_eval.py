"""Examples as lm-eval tasks: files that it reads, and scores that are ours."""

import importlib
import json
import re

import pytest
import yaml

from palimpsa_surgery.errors import UserError
from palimpsa_surgery.stages.synthetic import generate, score, write_lm_eval_tasks
from palimpsa_surgery.stages.synthetic.lm_eval_task import EXTRA_TOKENS

NAMES = {"passkey_300": "passkey", "niah_mq.300": "niah_multiquery", "vt-300": "variables", "copy": "copying"}
NAMES |= {"1e3": "passkey"}  # which YAML would take for a number


class TaskLoader(yaml.SafeLoader):
    """Reads `!function package.module.name` as lm-eval does: as the function."""


def _function(loader: yaml.SafeLoader, node: yaml.ScalarNode):
    module, _, name = loader.construct_scalar(node).rpartition(".")
    return getattr(importlib.import_module(module), name)


TaskLoader.add_constructor("!function", _function)


@pytest.fixture
def examples(tokenizer):
    return {
        name: list(generate(task, tokenizer=tokenizer, length=450, count=3, seed=1)) for name, task in NAMES.items()
    }


@pytest.fixture
def folder(examples, tmp_path):
    return write_lm_eval_tasks(examples, tmp_path / 'a "folder"')


@pytest.mark.parametrize("name", NAMES)
def test_files_hold_all_that_lm_eval_needs(folder, examples, tokenizer, name):
    task = yaml.load((folder / f"{name}.yaml").read_text(encoding="utf-8"), TaskLoader)
    assert task["task"] == name
    file = task["dataset_kwargs"]["data_files"]["test"]
    with open(file, encoding="utf-8") as lines:
        docs = [json.loads(line) for line in lines]
    assert [doc["prompt"] for doc in docs] == [example.prompt for example in examples[name]]
    main = task["metric_list"][0]["metric"]
    for doc, example in zip(docs, examples[name], strict=True):
        results = task["process_results"](doc, [example.completion])
        assert set(results) == {metric["metric"] for metric in task["metric_list"]}
        assert results[main] == score(example, example.completion) == 1
        assert task["process_results"](doc, ["no idea"])[main] < 0.2
        prompt = len(tokenizer(example.prompt, add_special_tokens=False)["input_ids"])
        answer = len(tokenizer(example.completion, add_special_tokens=False)["input_ids"])
        generated = task["generation_kwargs"]["max_gen_toks"]
        assert answer + EXTRA_TOKENS <= generated
        assert prompt + generated <= task["metadata"]["max_length"]
        assert not set(task["generation_kwargs"]["until"]) & set(example.completion)


def test_lm_eval_runs_the_tasks(folder, examples):
    pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    from lm_eval import simple_evaluate
    from lm_eval.api.model import LM
    from lm_eval.tasks import TaskManager

    known = {example.prompt: example for task in examples.values() for example in task}

    class Reader(LM):
        """Answers the first example of each task and is wrong about the others."""

        def generate_until(self, requests, disable_tqdm=False):
            found = [known[request.args[0]] for request in requests]
            return [example.completion if example.meta["index"] == 0 else " ?" for example in found]

        def loglikelihood(self, requests, disable_tqdm=False):
            raise NotImplementedError

        def loglikelihood_rolling(self, requests, disable_tqdm=False):
            raise NotImplementedError

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    assert set(NAMES) <= set(manager.all_tasks)
    results = simple_evaluate(Reader(), tasks=list(NAMES), task_manager=manager, bootstrap_iters=0)["results"]
    for name, task in NAMES.items():
        metric = "character_accuracy" if task == "copying" else "string_match_all"
        assert results[name][f"{metric},none"] == pytest.approx(1 / 3)


def test_a_folder_is_replaced_only_when_asked(folder, examples):
    with pytest.raises(UserError, match="is not empty"):
        write_lm_eval_tasks(examples, folder)
    write_lm_eval_tasks({"copy": examples["copy"]}, folder, overwrite=True)
    assert sorted(path.name for path in folder.iterdir()) == ["copy.jsonl", "copy.yaml"]


ERRORS = {
    "none": ({}, "tasks must hold at least one task, got none"),
    "name": ({"a/b": ["copy"]}, "tasks: a name must be made of letters, digits, '_', '-' and '.', got 'a/b'"),
    "empty": ({"a": []}, "tasks: a has no examples"),
    "mixed": ({"a": ["copy", "passkey_300"]}, "tasks: a has examples of copying and of passkey"),
}


@pytest.mark.parametrize(("tasks", "message"), ERRORS.values(), ids=ERRORS.keys())
def test_bad_tasks_leave_nothing_behind(examples, tmp_path, tasks, message):
    wanted = {name: [example for part in parts for example in examples[part]] for name, parts in tasks.items()}
    with pytest.raises(UserError, match=re.escape(message)):
        write_lm_eval_tasks(wanted, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
