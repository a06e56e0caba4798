"""`eval`: the presets on local data in their own formats, against lm-eval's numbers and against our own arithmetic."""

import json
import math
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
import torch
import yaml

from palimpsa_surgery.errors import UserError
from palimpsa_surgery.stages.evaluation import evaluate, parse_lengths
from palimpsa_surgery.stages.evaluation.presets import PRESETS, RULER_MARGIN
from palimpsa_surgery.stages.synthetic import generate, write_lm_eval_tasks
from palimpsa_surgery.surgery.checkpoints import fingerprint, load_model, load_tokenizer, save_checkpoint
from palimpsa_surgery.surgery.export import export
from palimpsa_surgery.surgery.results import Evaluation
from stages.conftest import make_small_model

pytest.importorskip("lm_eval", reason="lm-eval is not installed")

STORY = "And Isaac went out to meditate in the field at the eventide: and he lifted up his eyes, and saw, and, behold,"
PAGE = " = Of trees = \n The fig tree putteth forth her green figs , and the vines give a good smell @-@ tree . \n " * 3
DATA = {
    ("EleutherAI/wikitext_document_level", "wikitext-2-raw-v1"): ("test", [{"page": PAGE}, {"page": " = Of men = \n"}]),
    ("EleutherAI/lambada_openai", "default"): (
        "test",
        [
            {"text": f"{STORY} the camels were coming"},
            {"text": "In the beginning God created the heaven and the earth"},
        ],
    ),
    ("baber/piqa", None): (
        "validation",
        [
            {"goal": "To bring forth water", "sol1": "smite the rock with a rod.", "sol2": "sit down.", "label": 0},
            {"goal": "To cross the sea", "sol1": "divide it.", "sol2": "curse it and go home again.", "label": 1},
            {"goal": "To make bread", "sol1": "grind the corn.", "sol2": "grind", "label": 1},
        ],
    ),
    ("Rowan/hellaswag", None): (
        "validation",
        [
            {
                "activity_label": "Fishing",
                "ctx_a": "Two brothers cast a net into the sea.",
                "ctx_b": "they",
                "endings": ["drew it up full of fishes.", "[title] fell asleep.", "sang.", "went up into a mountain."],
                "label": label,
            }
            for label in ("0", "3")
        ],
    ),
    ("allenai/winogrande", "winogrande_xl"): (
        "validation",
        [
            {
                "sentence": "David slew Goliath because _ was mighty.",
                "option1": "David",
                "option2": "he",
                "answer": "1",
            },
            {"sentence": "Esau sold to Jacob what _ had.", "option1": "Jacob", "option2": "Esau", "answer": "2"},
        ],
    ),
    **{
        ("allenai/ai2_arc", name): (
            "test",
            [
                {
                    "question": f"Which of these is {what}?",
                    "choices": {"text": ["a stone", "a lamb", "the sea", "bread"], "label": ["A", "B", "C", "D"]},
                    "answerKey": key,
                }
                for what, key in (("alive", "B"), ("water", "C"))
            ],
        )
        for name in ("ARC-Easy", "ARC-Challenge")
    },
    ("lighteval/siqa", None): (
        "validation",
        [
            {
                "context": "Ruth gleaned in the field.",
                "question": "What will Ruth do next?",
                "answerA": "sleep",
                "answerB": "beat out the barley",
                "answerC": "sail",
                "label": label,
            }
            for label in ("2", "3")
        ],
    ),
}
COLUMNS = {
    "WikiText word perplexity": ("wikitext", "word_perplexity"),
    "LAMBADA perplexity": ("lambada_openai", "perplexity"),
    "LAMBADA acc": ("lambada_openai", "acc"),
    "PIQA acc_norm": ("piqa", "acc_norm"),
    "HellaSwag acc_norm": ("hellaswag", "acc_norm"),
    "WinoGrande acc": ("winogrande", "acc"),
    "ARC-easy acc": ("arc_easy", "acc"),
    "ARC-challenge acc_norm": ("arc_challenge", "acc_norm"),
    "SIQA acc": ("social_iqa", "acc"),
}
"""Table 2: acc_norm for PIQA, HellaSwag and ARC-challenge, acc otherwise."""


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.getbasetemp() / "datasets")


@pytest.fixture
def local_data(tmp_path, monkeypatch):
    """Serve data sets of the Hub from jsonl files: `local_data({(path, name): (split, rows)})`."""
    genuine = datasets.load_dataset

    def serve(data):
        def load(path, name=None, **_):
            split, rows = data[path, name]
            file = tmp_path / f"{path.replace('/', '-')}-{name}.jsonl"
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
            splits = {"train", split}  # lm-eval looks for examples in train
            return genuine("json", data_files=dict.fromkeys(splits, str(file)))

        monkeypatch.setattr(datasets, "load_dataset", load)

    return serve


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory, tokenizer) -> Path:
    """Two layers, the second a Palimpsa layer whose importance matters, in float32."""
    folder = tmp_path_factory.mktemp("evaluation") / "hybrid"
    folder.mkdir()
    model = make_small_model()
    with torch.no_grad():
        model.backbone.layers[1].mixer.b_scale.fill_(2.0)
    save_checkpoint(model, folder, tokenizer=tokenizer, dtype=torch.float32)
    return folder


@pytest.fixture(scope="module")
def task_folder(tmp_path_factory, tokenizer) -> Path:
    """Generated tasks of ours, and one in which continuations are scored."""
    folder = tmp_path_factory.mktemp("tasks") / "tasks"
    kinds = {"key": "passkey", "needles": "niah_multiquery"}
    examples = {n: list(generate(k, tokenizer=tokenizer, length=300, count=3, seed=2)) for n, k in kinds.items()}
    write_lm_eval_tasks(examples, folder)
    rows = [
        {"text": f"{STORY} the {beast} were", "choices": [" coming", " and the sea"], "gold": 0} for beast in BEASTS
    ]
    (folder / "beasts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "beasts.yaml").write_text(yaml.safe_dump(choice_task("beasts", folder / "beasts.jsonl")))
    return folder


ROW = json.dumps({"text": "In the", "choices": [" beginning", " end"], "gold": 0})
BEASTS = ("camels", "oxen", "sheep", "kings of the land of Canaan and all their hosts")


def choice_task(name: str, file: Path) -> dict:
    metrics = [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")]
    return {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{gold}}",
        "target_delimiter": "",
        "metric_list": metrics,
        "metadata": {"version": 3.0},
    }


class Scorer:
    """Log-likelihoods straight from the model."""

    def __init__(self, checkpoint):
        self.model, self.tokenizer = load_model(checkpoint), load_tokenizer(checkpoint)

    def ids(self, text):
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    @torch.inference_mode()
    def log_likelihood(self, prompt, answer):
        """Sum over the tokens of `answer`, and whether all of them are the likeliest."""
        ids, known = self.ids(prompt + answer), len(self.ids(prompt))
        if not known:
            ids, known = [self.tokenizer.eos_token_id, *ids], 1
        logs = self.model(torch.tensor([ids]), use_cache=False).logits[0, known - 1 : -1].log_softmax(-1)
        targets = torch.tensor(ids[known:])
        return logs.gather(1, targets[:, None]).sum().item(), bool((logs.argmax(-1) == targets).all())

    def choose(self, prompt, answers, *, by_character=False):
        """The likeliest answer, or the likeliest in the mean over its characters; answers follow a space."""
        logs = [self.log_likelihood(prompt, f" {answer}")[0] for answer in answers]
        sizes = [len(answer) if by_character else 1 for answer in answers]
        return max(range(len(answers)), key=lambda index: logs[index] / sizes[index])


def rows(path, name=None):
    return DATA[path, name][1]


def percent(hits):
    return 100 * sum(hits) / len(hits)


def test_commonsense_is_the_papers_table_2(tiny_checkpoint, local_data, tmp_path):
    local_data(DATA)
    done = evaluate(tiny_checkpoint, "commonsense", tmp_path / "out")
    scores = {score.name: score.value for score in done.scores}
    assert list(scores) == [*COLUMNS, "average of 7 accuracies"]
    for name, (task, metric) in COLUMNS.items():
        factor = 100 if "acc" in metric else 1
        assert scores[name] == pytest.approx(factor * done.tasks[task].metrics[metric].value)
    assert scores["average of 7 accuracies"] == pytest.approx(sum(list(scores.values())[2:9]) / 7)

    scorer = Scorer(tiny_checkpoint)
    last = [scorer.log_likelihood(*split) for split in lambada_splits()]
    assert scores["LAMBADA perplexity"] == pytest.approx(math.exp(-sum(log for log, _ in last) / len(last)), rel=1e-4)
    assert scores["LAMBADA acc"] == percent([hit for _, hit in last])
    piqa = [
        scorer.choose(f"Question: {row['goal']}\nAnswer:", [row["sol1"], row["sol2"]], by_character=True)
        == row["label"]
        for row in rows("baber/piqa")
    ]
    assert scores["PIQA acc_norm"] == pytest.approx(percent(piqa))
    siqa = [
        scorer.choose(f"Q: {row['context']} {row['question']}\nA:", [row[f"answer{x}"] for x in "ABC"])
        == int(row["label"]) - 1
        for row in rows("lighteval/siqa")
    ]
    assert scores["SIQA acc"] == pytest.approx(percent(siqa))
    for subset, by_character, score in (
        ("ARC-Easy", False, "ARC-easy acc"),
        ("ARC-Challenge", True, "ARC-challenge acc_norm"),
    ):
        arc = [
            scorer.choose(f"Question: {row['question']}\nAnswer:", row["choices"]["text"], by_character=by_character)
            == "ABCD".index(row["answerKey"])
            for row in rows("allenai/ai2_arc", subset)
        ]
        assert scores[score] == pytest.approx(percent(arc))
    assert done.truncated == 0
    assert all(task.documents == task.available for task in done.tasks.values())
    assert (done.max_length, done.stated_length, done.limit) == (2048, 2048, None)


def lambada_splits():
    for row in rows("EleutherAI/lambada_openai", "default"):
        prompt, _, last = row["text"].rpartition(" ")
        yield prompt, f" {last}"


def test_what_is_cut_or_split_is_counted(tiny_checkpoint, local_data, tmp_path):
    local_data(DATA)
    names = ["wikitext", "lambada_openai", "piqa"]
    done = evaluate(tiny_checkpoint, "commonsense", tmp_path / "out", tasks=names, max_length=16)
    scorer = Scorer(tiny_checkpoint)
    needed = [len(scorer.ids(prompt + last)) - 1 for prompt, last in lambada_splits()]
    assert done.tasks["lambada_openai"].longest == max(needed)
    assert done.tasks["lambada_openai"].truncated == sum(tokens > 16 for tokens in needed) == 1
    needed = [
        max(len(scorer.ids(f"Question: {row['goal']}\nAnswer: {row[key]}")) - 1 for key in ("sol1", "sol2"))
        for row in rows("baber/piqa")
    ]
    assert done.tasks["piqa"].truncated == sum(tokens > 16 for tokens in needed) > 0
    wikitext = done.tasks["wikitext"]
    assert (wikitext.truncated, wikitext.split) == (0, 1)
    table = (tmp_path / "out" / "results.md").read_text()
    assert "2 documents cut" in table or f"{done.truncated} documents cut from the left" in table
    assert "average" not in " ".join(score.name for score in done.scores)
    assert done.notes == ("3 of the preset's 8 tasks: scores that need the others are left out",)


LONG = {"context": f"{STORY} the camels were coming. " * 2, "question": " What came?", "choices": ["a", "b", "c", "d"]}


def test_longbench2_is_grouped_as_in_table_3(tiny_checkpoint, local_data, tmp_path):
    subsets = {"longbench2_govt_single": "government_single", "longbench2_code": "code_repo_qa"}
    kinds = [("easy", "short"), ("hard", "short"), ("hard", "long"), ("easy", "long"), ("hard", "medium")]
    documents = [
        LONG | {"question": f"{question} {number}?", "answer": number % 4, "difficulty": kind[0], "length": kind[1]}
        for number, kind in enumerate(kinds)
        for question in ["What came"]
    ]
    local_data(
        {
            ("recursal/longbench-v2", "government_single"): ("train", documents[:3]),
            ("recursal/longbench-v2", "code_repo_qa"): ("train", documents[3:]),
        }
    )
    done = evaluate(tiny_checkpoint, "longbench2", tmp_path / "out", tasks=list(subsets))
    scorer = Scorer(tiny_checkpoint)
    hits = []
    for row in documents:
        choices = "\n".join(f"({letter}) {choice}" for letter, choice in zip("ABCD", row["choices"], strict=True))
        prompt = (
            f"Please read the following text and answer the question below.\n\n<text>\n{row['context']}\n</text>\n\n"
            f"What is the correct answer to this question: {row['question'].strip()}\nChoices:\n{choices}\n\nAnswer:"
        )
        hits.append(scorer.choose(prompt, "ABCD") == row["answer"])
    assert 0 < sum(hits) < 5, "else the groups cannot be told apart"
    expected = {"overall": percent(hits)}
    for position, groups in enumerate((("easy", "hard"), ("short", "medium", "long"))):
        for group in groups:
            expected[group] = percent([hit for hit, kind in zip(hits, kinds, strict=True) if kind[position] == group])
    assert {score.name: score.value for score in done.scores} == pytest.approx(expected)


def test_longbench2_without_the_groups_says_so(hybrid, local_data, tmp_path):
    local_data({("recursal/longbench-v2", "code_repo_qa"): ("train", [LONG | {"answer": 0, "domain": "code"}])})
    done = evaluate(hybrid, "longbench2", tmp_path / "out", tasks=["longbench2_code"])
    assert [score.name for score in done.scores] == ["overall"]
    assert "longbench2_code is not in the scores by difficulty or length (it has: context, question" in done.notes[1]


def test_ruler_makes_its_data_offline(tiny_checkpoint, hybrid, tmp_path):
    """In one test, since its needles take 15 seconds to import."""
    offline = ["niah_single_1", "niah_multikey_2", "niah_multikey_3", "ruler_vt", "ruler_cwe", "ruler_fwe"]
    done = evaluate(hybrid, "ruler", tmp_path / "out", tasks=offline, lengths=[1024], limit=1)
    assert list(done.tasks) == offline
    assert [(score.name, score.column) for score in done.scores] == [
        (name, "1,024") for name in ("N-1", "VT", "CWE", "FWE", "aggregation")
    ]
    assert done.truncated == 0
    assert done.max_length == 2048
    for name, task in done.tasks.items():
        assert (task.documents, task.available) == (1, 500), name
        assert 500 < task.longest <= 1024 + RULER_MARGIN, name

    two = evaluate(hybrid, "ruler", tmp_path / "two", tasks=["niah_single_1"], lengths=[300, 400], limit=2)
    assert two.tasks["niah_single_1"].documents == 4, "two of each length"
    assert [score.column for score in two.scores] == ["300", "400"]
    real = evaluate(tiny_checkpoint, "ruler", tmp_path / "real", tasks=["niah_single_1"], lengths=[300], limit=1)
    assert 200 < real.tasks["niah_single_1"].longest <= 300 + RULER_MARGIN
    with pytest.raises(UserError, match=r"task niah_single_1: .*Could not generate any sample"):
        evaluate(hybrid, "ruler", tmp_path / "no", tasks=["niah_single_1"], lengths=[100])
    with pytest.raises(UserError, match=r"task niah_single_2: its data set baber/paul_graham_essays cannot be fetched"):
        evaluate(hybrid, "ruler", tmp_path / "no", tasks=["niah_single_2"], lengths=[300])


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
    alone = evaluate(hybrid, task_folder / "beasts.yaml", tmp_path / "alone", max_length=30)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["eval", hybrid, "--preset", task_folder / "beasts.yaml", "--output", tmp_path / "out", "--device", "cpu"]
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
    assert together.scores == alone.scores


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
        ("FOLDER", {"batch_size": "huge"}, "batch size must be a number, at least 1, or auto, got huge"),
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


@pytest.mark.parametrize(
    ("change", "data", "message"),
    [
        ({"num_fewshot": 3}, ROW, "lm-eval cannot run task (ValueError: Sample larger than population or is negative)"),
        ({"unsafe_code": True}, ROW, "lm-eval cannot run task (ValueError: Attempted to run task: x which is marked"),
        ({"doc_to_text": "{{gone.at}}"}, ROW, "task x: it cannot be loaded (UndefinedError: 'gone' is undefined)"),
        ({}, "", "task x: its data are empty"),
        ({}, "{gone", "task x: its data cannot be read: "),
    ],
    ids=["shots", "unsafe", "field", "empty", "json"],
)
def test_a_task_that_lm_eval_cannot_run(change, data, message, hybrid, tmp_path):
    (tmp_path / "rows.jsonl").write_text(data)
    (tmp_path / "task.yaml").write_text(yaml.safe_dump(choice_task("x", tmp_path / "rows.jsonl") | change))
    with pytest.raises(UserError) as error:
        evaluate(hybrid, tmp_path / "task.yaml", tmp_path / "out")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


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


def test_every_task_of_the_presets_is_one_of_lm_evals():
    import lm_eval.tasks
    from lm_eval.tasks import TaskManager

    root = Path(lm_eval.tasks.__file__).parent
    for name, preset in PRESETS.items():
        folders = [root / folder for folder in set(preset.tasks.values())]
        manager = TaskManager(include_path=[str(folder) for folder in folders], include_defaults=False)
        assert set(preset.tasks) <= set(manager.all_subtasks), name
        if name == "ruler":
            assert set(preset.tasks) == set(manager.task_index["ruler"].cfg["task"])
        if name == "longbench2":
            assert set(preset.tasks) == manager.task_index["longbench2_tasks"].tags
