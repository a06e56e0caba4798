"""`eval` on tasks of one's own, against lm-eval's numbers, and on several processes."""

import functools
import os
import random
import socket
import subprocess
import sys

import pytest
import yaml

from palimpsa_surgery.errors import UserError
from palimpsa_surgery.hf_models import PalimpsaMamba2ForCausalLM
from palimpsa_surgery.stages.evaluation import evaluate
from palimpsa_surgery.stages.evaluation.harness import find_suite
from palimpsa_surgery.stages.synthetic import generate, write_lm_eval_tasks
from palimpsa_surgery.surgery.checkpoints import fingerprint, load_model
from palimpsa_surgery.surgery.export import export
from palimpsa_surgery.surgery.results import Evaluation
from stages.evaluation.conftest import choice_task

pytest.importorskip("lm_eval", reason="lm-eval is not installed")


def test_numbers_are_those_of_lm_eval_on_the_export(hybrid, task_folder, tmp_path, monkeypatch):
    from lm_eval import evaluator, simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    done = evaluate(hybrid, task_folder, tmp_path / "out", batch_size=2)
    assert list(done.tasks) == ["beasts", "key", "needles"]
    exported = export(hybrid, tmp_path / "exported")
    monkeypatch.setattr(evaluator, "add_env_info", lambda *_: None)  # seconds of looking at the machine
    manager = TaskManager(include_path=str(task_folder), include_defaults=False)
    theirs = simple_evaluate(
        HFLM(pretrained=str(exported.path), max_length=2048, batch_size=2, device="cpu"),
        tasks=list(done.tasks),
        task_manager=manager,
        bootstrap_iters=0,
    )
    for name, task in done.tasks.items():
        for metric, ours in task.metrics.items():
            assert ours.value == theirs["results"][name][f"{metric},none"], f"{name} {metric}"
        assert task.version == str(theirs["versions"][name])
        assert task.num_fewshot == theirs["n-shot"][name]
        assert task.documents == theirs["n-samples"][name]["effective"]
    assert done.model_fingerprint == fingerprint(load_model(exported.path))
    assert done.palimpsa_layers == (1,)
    assert Evaluation.load(tmp_path / "out") == done


def test_one_file_and_a_limit(hybrid, task_folder, tmp_path):
    done = evaluate(hybrid, task_folder / "beasts.yaml", tmp_path / "out", limit=3)
    assert {name: (task.documents, task.available) for name, task in done.tasks.items()} == {"beasts": (3, 4)}
    assert (done.preset, done.limit, done.tasks["beasts"].version) == ("beasts", 3, "3.0")
    assert {score.name for score in done.scores} == {"beasts acc", "beasts acc_norm"}
    with pytest.raises(UserError, match=r"file .*beasts.yaml has no task 'key' \(tasks: beasts\)"):
        evaluate(hybrid, task_folder / "beasts.yaml", tmp_path / "no", tasks=["key"])


def test_the_fingerprint_is_that_of_the_stored_weights(hybrid, task_folder, tmp_path):
    done = evaluate(hybrid, task_folder / "beasts.yaml", tmp_path / "out", limit=1, dtype="bfloat16")
    assert done.dtype == "bfloat16"
    assert done.model_fingerprint == fingerprint(load_model(hybrid))


def test_groups_of_a_folder_are_averaged_by_lm_eval(hybrid, task_folder, tmp_path):
    folder = tmp_path / "tasks"
    folder.mkdir()
    for name in ("one", "two"):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(choice_task(name, task_folder / "beasts.jsonl")))
    group = {"group": "both", "task": ["one", "two"], "aggregate_metric_list": [{"metric": "acc"}]}
    (folder / "both.yaml").write_text(yaml.safe_dump(group))
    done = evaluate(hybrid, folder, tmp_path / "out")
    assert {name: task.documents for name, task in done.tasks.items()} == {"both": 8, "one": 4, "two": 4}
    assert done.tasks["both"].metrics["acc"].value == done.tasks["one"].metrics["acc"].value
    assert done.tasks["both"].longest == done.tasks["one"].longest


DRAW = """\
import random
import datasets

def draw(**_):
    rows = [{"text": "Go", "choices": [" on", " in"], "gold": random.randrange(2)} for _ in range(64)]
    return {"test": datasets.Dataset.from_list(rows)}
"""


def test_data_that_tasks_draw_are_those_of_one_call_of_lm_eval(hybrid, tokenizer, tmp_path):
    """As RULER's are: the second task's depend on how often random numbers were drawn before."""
    from lm_eval.tasks import TaskManager

    (tmp_path / "draws.py").write_text(DRAW)
    for name in ("one", "two"):
        task = choice_task(name, tmp_path / "none") | {"dataset_path": "", "dataset_kwargs": None}
        (tmp_path / f"{name}.yaml").write_text(f"{yaml.safe_dump(task)}custom_dataset: !function draws.draw\n")
    module = sys.modules[evaluate.__module__]
    ours = module._load(find_suite(str(tmp_path)), tokenizer, (), str(tmp_path), None)
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    random.seed(0)  # simple_evaluate's
    theirs = manager.load(["one", "two"])["tasks"]
    assert [task.task_name for task in ours] == ["one", "two"]
    for task in ours:
        assert task.eval_docs["gold"] == theirs[task.task_name].eval_docs["gold"]


def test_generated_tasks_are_given_the_room_they_need(hybrid, tokenizer, tmp_path):
    examples = {"key": generate("passkey", tokenizer=tokenizer, length=2100, count=1, seed=2)}
    folder = write_lm_eval_tasks(examples, tmp_path / "tasks")
    with pytest.raises(UserError, match=r"task key: 2,1\d\d tokens are more than the 2,048 that .* states"):
        evaluate(hybrid, folder, tmp_path / "out")
    done = evaluate(hybrid, folder, tmp_path / "out", allow_longer=True)
    assert 2100 < done.tasks["key"].longest <= done.max_length
    assert done.truncated == 0
    cut = evaluate(hybrid, folder, tmp_path / "cut", allow_longer=True, max_length=2048)
    assert (cut.truncated, cut.max_length, cut.stated_length) == (1, 2048, 2048)


@pytest.fixture
def small_gpu(monkeypatch):
    """Have `--batch-size auto` search, as on a GPU: `small_gpu(rows)` has memory for so many."""
    from palimpsa_surgery.stages.evaluation.language_model import CountingLM

    def make(fitting):
        forward, seen = PalimpsaMamba2ForCausalLM.forward, []

        @functools.wraps(forward)  # `generate` looks at the signature
        def run(self, input_ids=None, **options):
            if len(input_ids) > fitting:
                raise RuntimeError("Triton Error [CUDA]: out of memory")
            seen.append((len(input_ids), options.get("use_cache")))
            return forward(self, input_ids, **options)

        monkeypatch.setattr(PalimpsaMamba2ForCausalLM, "forward", run)

        def language_model(network, words, length, batch_size, _):
            lm = CountingLM(network, words, max_length=length, batch_size=batch_size)
            lm.max_batch_size = 6  # instead of 64, from which it is a long way down
            return lm

        monkeypatch.setattr(sys.modules[evaluate.__module__], "_language_model", language_model)
        return seen

    return make


def test_auto_finds_the_largest_batch_that_fits(hybrid, task_folder, tmp_path, small_gpu):
    one_by_one = evaluate(hybrid, task_folder, tmp_path / "one", max_length=400, batch_size=1)
    seen = small_gpu(5)
    done = evaluate(hybrid, task_folder, tmp_path / "auto", max_length=400)
    assert done.scores == one_by_one.scores
    assert max(rows for rows, _ in seen) == 5
    assert {kept for _, kept in seen} == {False, True}, "states are kept to generate, and not to score"


@pytest.mark.parametrize(
    ("batch_size", "advice"),
    [("auto", "a number for --batch-size"), (4, "a smaller --batch-size"), (1, "a smaller --max-length")],
)
def test_too_little_memory_is_one_line(batch_size, advice, hybrid, task_folder, tmp_path, small_gpu):
    small_gpu(0)
    for task in ("beasts", "key"):
        with pytest.raises(UserError) as error:
            evaluate(hybrid, task_folder, tmp_path / "out", tasks=[task], max_length=400, batch_size=batch_size)
        assert str(error.value).startswith(f"cpu has too little memory for --batch-size {batch_size} and up to 400 tok")
        assert str(error.value).endswith(f"give {advice}")


LAUNCH = """
import multiprocessing, os, sys
import palimpsa_surgery.stages.evaluation.language_model  # once, before there are two of us
from palimpsa_surgery.cli.main import main

def work(rank):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = sys.argv[1]
    sys.exit(main(sys.argv[2:]))

processes = [multiprocessing.get_context("fork").Process(target=work, args=(rank,)) for rank in range(2)]
for process in processes:
    process.start()
for process in processes:
    process.join()
sys.exit(max(abs(process.exitcode) for process in processes))
"""


def test_two_processes_share_the_documents(hybrid, task_folder, tmp_path):
    """Started with the environment that `accelerate launch` and `torchrun` give."""
    shots, first = {"num_fewshot": 1, "fewshot_split": "test"}, {"fewshot_config": {"sampler": "first_n"}}
    for name, options in (("beasts", {}), ("drawn", shots), ("given", shots | first)):
        task = choice_task(name, task_folder / "beasts.jsonl") | options
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(task))
    alone = evaluate(hybrid, tmp_path, tmp_path / "alone", max_length=30)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["eval", hybrid, "--preset", tmp_path, "--output", tmp_path / "out", "--device", "cpu"]
    done = subprocess.run(
        [sys.executable, "-c", LAUNCH, *map(str, [port, *words, "--max-length", 30])],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("Wrote ") == 1
    together = Evaluation.load(tmp_path / "out")
    assert together.processes == 2
    assert together.tasks["beasts"].truncated == alone.tasks["beasts"].truncated > 0
    assert together.tasks["beasts"].longest == alone.tasks["beasts"].longest
    for name in ("beasts", "given"):
        assert together.tasks[name].metrics == alone.tasks[name].metrics
    assert not alone.notes
    assert together.notes == ("other examples stand in the prompts of drawn on another number of processes",)
