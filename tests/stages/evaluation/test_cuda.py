"""`eval`, `diagnose` and `compare` on a GPU against the same on the CPU; skipped without CUDA.

All of it runs in float32, the kept layers in PyTorch, so that what differs is the order of sums.
"""

import dataclasses
import json
import math

import pytest
import torch
import yaml

from helpers import assert_close, tiny_hybrid
from palimpsa_surgery.stages.evaluation import evaluate
from palimpsa_surgery.surgery.checkpoints import load_tokenizer, save_checkpoint
from palimpsa_surgery.surgery.comparison import compare
from palimpsa_surgery.surgery.diagnosis import diagnose
from stages.evaluation.conftest import choice_task

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.usefixtures("mamba2_in_pytorch"),
]

GPUS = ["cuda", pytest.param("cuda:1", marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two"))]
SIZES = {"max_length": 300, "sequences": 2}
BFLOAT16 = 0.05  # of a perplexity: the CPU's own error in bfloat16 is 0.022


@pytest.fixture(autouse=True)
def _no_figures(monkeypatch):
    monkeypatch.setattr("palimpsa_surgery.surgery.diagnosis.plot_diagnosis", lambda *_: None)
    monkeypatch.setattr("palimpsa_surgery.surgery.comparison.plot_comparison", lambda *_: None)


@pytest.fixture(scope="module")
def replaced(tiny_checkpoint, tmp_path_factory):
    """tiny-mamba2 with four Palimpsa layers, in float32."""
    folder = tmp_path_factory.mktemp("replaced")
    tokenizer = load_tokenizer(tiny_checkpoint)
    save_checkpoint(tiny_hybrid(tiny_checkpoint), folder, tokenizer=tokenizer, dtype=torch.float32)
    return folder


@pytest.fixture(scope="module")
def tasks(tiny_checkpoint, kjv, tmp_path_factory):
    """A task for each kind of request: choices, endings of verses, whole verses, and to go on as the CPU does."""
    folder = tmp_path_factory.mktemp("tasks")
    model, tokenizer = tiny_hybrid(tiny_checkpoint), load_tokenizer(tiny_checkpoint)
    verses = [line.split() for line in kjv.read_text().splitlines()[40:52]]
    rows = []
    for number, words in enumerate(verses):
        half = len(words) // 2
        text, endings = " ".join(words[:half]), [f" {' '.join(verse[-3:])}" for verse in (words, verses[number - 1])]
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        longer = model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
        rows.append({"text": text, "choices": endings, "gold": 0, "ending": endings[0], "on": tokenizer.decode(longer)})
    file = folder / "verses.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    generation = {"do_sample": False, "max_gen_toks": 6, "until": ["<|endoftext|>"]}
    for name, kind, target, metric in (
        ("choices", "multiple_choice", "{{gold}}", "acc"),
        ("endings", "loglikelihood", "{{ending}}", "perplexity"),
        ("verses", "loglikelihood_rolling", "{{text}}{{ending}}", "word_perplexity"),
        ("goes-on", "generate_until", "{{on}}", "exact_match"),
    ):
        task = choice_task(name, file) | {
            "output_type": kind,
            "doc_to_target": target,
            "metric_list": [{"metric": metric}],
        }
        if kind == "generate_until":
            task |= {"generation_kwargs": generation}
        if kind != "multiple_choice":
            del task["doc_to_choice"]
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(task))
    return folder


def test_scores_equal_the_cpu(replaced, tasks, tmp_path):
    pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    on_cpu = evaluate(replaced, tasks, tmp_path / "cpu", device="cpu")
    on_gpu = evaluate(replaced, tasks, tmp_path / "gpu", batch_size="auto")
    assert (on_gpu.device, on_gpu.dtype, on_gpu.batch_size) == (torch.cuda.get_device_name(), "float32", "auto")
    expected = {score.name: score.value for score in on_cpu.scores}
    assert {score.name: score.value for score in on_gpu.scores} == pytest.approx(expected, rel=1e-3)
    assert len(expected) == 4
    assert expected["goes-on exact_match"] == 1, "the targets are what the CPU generates"
    assert on_gpu.model_fingerprint == on_cpu.model_fingerprint
    halves = evaluate(replaced, tasks, tmp_path / "half", batch_size=3, dtype="bfloat16", tasks=["endings", "verses"])
    rounded = {score.name: expected[score.name] for score in halves.scores}
    assert {score.name: score.value for score in halves.scores} == pytest.approx(rounded, rel=BFLOAT16)


@pytest.mark.parametrize("device", GPUS)
def test_a_diagnosis_equals_the_cpus(device, replaced, kjv, tmp_path):
    options = {"piece_length": 128, "remembrance_points": 5, **SIZES}
    on_cpu = diagnose(replaced, kjv, tmp_path / "cpu", device="cpu", **options)
    on_gpu = diagnose(replaced, kjv, tmp_path / "gpu", device=device, **options)
    assert on_gpu.text_fingerprint == on_cpu.text_fingerprint
    assert on_gpu.model_fingerprint == on_cpu.model_fingerprint
    assert on_gpu.loss.perplexity == pytest.approx(on_cpu.loss.perplexity, rel=1e-3)
    assert on_gpu.remembrance.values == pytest.approx(on_cpu.remembrance.values, abs=1e-4, rel=1e-3)
    for ours, theirs in zip(on_gpu.layers, on_cpu.layers, strict=True):
        assert ours.head_windows == pytest.approx(theirs.head_windows, rel=0.02), "two bins of the histogram"
        assert_close(torch.tensor(ours.state_std), torch.tensor(theirs.state_std), 1e-3)
        if theirs.importance is not None:
            for name, table in dataclasses.asdict(theirs.importance).items():
                assert_close(torch.tensor(getattr(ours.importance, name)), torch.tensor(table), 1e-3, name)


def test_a_comparison_equals_the_cpus_and_has_the_gpus_speed(tiny_checkpoint, replaced, kjv, tmp_path):
    items = [tiny_checkpoint, replaced]
    on_cpu = compare(items, tmp_path / "cpu", data=kjv, device="cpu", **SIZES)
    for dtype, tolerance in (("float32", 1e-3), ("bfloat16", BFLOAT16)):
        on_gpu = compare(items, tmp_path / dtype, data=kjv, dtype=dtype, **SIZES)
        assert (on_gpu.device, on_gpu.dtype) == (torch.cuda.get_device_name(), dtype)
        for ours, theirs in zip(on_gpu.subjects, on_cpu.subjects, strict=True):
            assert dataclasses.replace(ours, loss=None, speed=None, state_bytes=None) == dataclasses.replace(
                theirs, loss=None, speed=None, state_bytes=None
            )
            assert ours.loss.perplexity == pytest.approx(theirs.loss.perplexity, rel=tolerance)
            assert (ours.state_bytes == theirs.state_bytes) == (dtype == "float32")
            assert ours.speed.prompt_tokens == 300
            assert all(0 < speed < math.inf for speed in (ours.speed.prefill, ours.speed.decode))
