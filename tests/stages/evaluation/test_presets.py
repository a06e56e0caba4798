"""The presets on local data in their own formats, against our own arithmetic."""

import json
import math
from pathlib import Path

import datasets
import pytest
import requests
import torch

from palimpsa_surgery.errors import UserError
from palimpsa_surgery.stages.evaluation import evaluate
from palimpsa_surgery.stages.evaluation.presets import PRESETS, RULER_MARGIN
from palimpsa_surgery.surgery.checkpoints import load_model, load_tokenizer
from stages.evaluation.conftest import STORY

pytest.importorskip("lm_eval", reason="lm-eval is not installed")

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


@pytest.fixture
def local_data(tmp_path, monkeypatch):
    """Serve data sets of the Hub from jsonl files: `local_data({(path, name): (split, rows)})`."""
    genuine = datasets.load_dataset

    def serve(data):
        def load(path, name=None, split=None, **_):
            theirs, rows = data[path, name]
            file = tmp_path / f"{path.replace('/', '-')}-{name}.jsonl"
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
            splits = {"train", theirs}  # lm-eval looks for examples in train
            return genuine("json", data_files=dict.fromkeys(splits, str(file)), split=split)

        monkeypatch.setattr(datasets, "load_dataset", load)

    return serve


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


OFFLINE = ["niah_single_1", "niah_multikey_2", "niah_multikey_3", "ruler_vt", "ruler_cwe", "ruler_fwe"]
FETCHED = [name for name in PRESETS["ruler"].tasks if name not in OFFLINE]


def test_ruler_makes_its_data(tiny_checkpoint, hybrid, local_data, tmp_path, monkeypatch):
    """In one test, since its needles take 15 seconds to import."""
    done = evaluate(hybrid, "ruler", tmp_path / "out", tasks=OFFLINE, lengths=[1024], limit=1)
    assert list(done.tasks) == OFFLINE
    assert [(score.name, score.column) for score in done.scores] == [
        (name, "1,024") for name in ("N-1", "niah_multikey_2", "niah_multikey_3", "VT", "CWE", "FWE", "aggregation")
    ]
    assert done.truncated == 0
    assert done.max_length == 2048
    for name, task in done.tasks.items():
        assert (task.documents, task.available) == (1, 500), name
        assert 500 < task.longest <= 1024 + RULER_MARGIN, name

    two = evaluate(hybrid, "ruler", tmp_path / "two", tasks=["niah_single_1"], lengths=[300, 400], limit=2)
    assert two.tasks["niah_single_1"].documents == 4, "two of each length"
    assert [score.column for score in two.scores] == ["300", "400"]
    with pytest.raises(UserError, match=r"task niah_single_1: .*Could not generate any sample"):
        evaluate(hybrid, "ruler", tmp_path / "no", tasks=["niah_single_1"], lengths=[100])

    essays, nltk_data = (
        "its data set baber/paul_graham_essays cannot be fetched",
        "nltk's punkt_tab is not on this mach",
    )
    with pytest.raises(UserError, match=f"task niah_single_2: {essays}"):
        evaluate(hybrid, "ruler", tmp_path / "no", tasks=["niah_single_2"], lengths=[300])
    local_data({("baber/paul_graham_essays", None): ("train", [{"text": f"{STORY} the camels were coming. " * 60}])})
    monkeypatch.setattr("nltk.data.path", [])
    with pytest.raises(UserError, match=f"task niah_single_2: {nltk_data}"):
        evaluate(hybrid, "ruler", tmp_path / "no", tasks=["niah_single_2"], lengths=[300])
    import lm_eval.tasks.ruler.prepare_niah as needles

    monkeypatch.setattr(needles, "sent_tokenize", lambda text: text.split(". "))
    monkeypatch.setattr("requests.get", fetch_questions)
    real = evaluate(tiny_checkpoint, "ruler", tmp_path / "real", tasks=FETCHED, lengths=[600], limit=1)
    needles.get_haystack.cache_clear()
    assert sorted(real.tasks) == sorted(FETCHED)
    for name, task in real.tasks.items():
        assert (task.documents, task.truncated) == (1, 0), name
        assert 150 < task.longest <= 600 + RULER_MARGIN, name
    names = ["N-2", "N-3", "niah_multikey_1", "N-MQ", "N-MV", "HotPot", "SQA", "question answering"]
    assert [score.name for score in real.scores] == names


def fetch_questions(url, **_):
    """500 questions in the format of SQuAD, or of HotpotQA, as `requests` gives them."""
    stories = [f"{STORY} {number} camels were coming." for number in range(50)]
    asked = [("How many camels were coming?", str(number % 50)) for number in range(500)]
    if "SQuAD" in url:
        answers = [{"question": q, "is_impossible": False, "answers": [{"text": a}]} for q, a in asked]
        paragraphs = [{"context": story, "qas": answers[number::50]} for number, story in enumerate(stories)]
        content = {"data": [{"paragraphs": paragraphs}]}
    else:
        context = [[f"Herd {number}", [story]] for number, story in enumerate(stories)]
        content = [{"question": q, "answer": a, "context": context[n % 50 :][:2]} for n, (q, a) in enumerate(asked)]
    response = requests.Response()
    response.status_code, response._content = 200, json.dumps(content).encode()
    return response


def test_ruler_is_grouped_as_in_table_6():
    lengths = [4096, 8192]
    tasks = list(PRESETS["ruler"].tasks)
    results = {task: {"4096,none": n / 20, "8192,none": n / 40} for n, task in enumerate(tasks, start=1)}
    at = {task: 100 * numbers["4096,none"] for task, numbers in results.items()}
    keys = [f"niah_multikey_{number}" for number in (1, 2, 3)]
    niah = [f"niah_single_{number}" for number in (1, 2, 3)] + keys + ["niah_multiquery", "niah_multivalue"]
    expected = {
        **{f"N-{number}": at[f"niah_single_{number}"] for number in (1, 2, 3)},
        "N-MK": sum(at[key] for key in keys) / 3,
        "N-MQ": at["niah_multiquery"],
        "N-MV": at["niah_multivalue"],
        "retrieval": sum(at[task] for task in niah) / 8,
        "VT": at["ruler_vt"],
        "CWE": at["ruler_cwe"],
        "FWE": at["ruler_fwe"],
        "aggregation": (at["ruler_cwe"] + at["ruler_fwe"]) / 2,
        "HotPot": at["ruler_qa_hotpot"],
        "SQA": at["ruler_qa_squad"],
        "question answering": (at["ruler_qa_hotpot"] + at["ruler_qa_squad"]) / 2,
        "average of 13 tasks": sum(at.values()) / 13,
    }
    scores = PRESETS["ruler"].summary(results, {}, lengths)
    assert {s.name: s.value for s in scores if s.column == "4,096"} == pytest.approx(expected)
    assert {s.name: 2 * s.value for s in scores if s.column == "8,192"} == pytest.approx(expected)
    assert list(dict.fromkeys(score.name for score in scores)) == list(expected), "in the order of the table"
    assert len(scores) == 2 * len(expected)

    del results["niah_multikey_1"]
    results["ruler_vt"]["8192,none"] = -1  # lm-eval's word for no document of this length
    named = {(s.name, s.column): s.value for s in PRESETS["ruler"].summary(results, {}, lengths)}
    assert named["niah_multikey_2", "4,096"] == at["niah_multikey_2"]
    assert not {name for name, _ in named} & {"N-MK", "niah_multikey_1", "retrieval", "average of 13 tasks"}
    assert ("VT", "4,096") in named
    assert ("VT", "8,192") not in named


def test_every_task_of_the_presets_is_one_of_lm_evals():
    import lm_eval.tasks
    from lm_eval.tasks import TaskManager

    root = Path(lm_eval.tasks.__file__).parent
    for name, preset in PRESETS.items():
        folders = [root / folder for folder in set(preset.tasks.values())]
        manager = TaskManager(include_path=[str(folder) for folder in folders], include_defaults=False)
        assert set(preset.tasks) <= set(manager.all_subtasks), name
        if name == "ruler":
            assert list(preset.tasks) == manager.task_index["ruler"].cfg["task"]
        if name == "longbench2":
            assert set(preset.tasks) == manager.task_index["longbench2_tasks"].tags
