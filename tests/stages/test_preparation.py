"""Preparation: mixtures by share, what is held out, what an interruption leaves, and a full disk."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml

from palimpsa_surgery.errors import Unavailable, UserError
from palimpsa_surgery.stages import pipeline
from palimpsa_surgery.stages.data import IGNORED, Sequences, check_data, packing, preparation, prepare, sources
from palimpsa_surgery.stages.data.mixture import next_source
from palimpsa_surgery.stages.data.preparation import data_bytes, token_type
from palimpsa_surgery.stages.held_out import evaluate
from palimpsa_surgery.stages.recipe import load_recipe


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    """So that little is made in advance."""
    monkeypatch.setattr(packing, "BATCH_UNITS", 5)


SHARES = [0.41, 0.27, 0.2, 0.07, 0.05]


def test_shares_are_met_within_one_percent_over_ten_million_tokens():
    """Two of the sources are examples, which leave a part of every sequence empty."""
    length, taken, rng = 1024, [0] * len(SHARES), np.random.default_rng(0)
    while (total := sum(taken)) < 10_000_000:
        number = next_source(SHARES, taken, length)
        taken[number] += int(rng.integers(400, length)) if number in (1, 3) else length
        total = sum(taken)
        far = len(SHARES) * length
        assert all(abs(count - share * total) < far for share, count in zip(SHARES, taken, strict=True))
    for share, count in zip(SHARES, taken, strict=True):
        assert abs(count / total / share - 1) < 0.01


@pytest.fixture
def words(tmp_path):
    """Three files in which every document tells where it is from."""
    for name, count in (("a", 400), ("b", 400), ("c", 12)):
        rows = [{"text": f"{name} document number {n} of the file, which is short"} for n in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def mixture(**changes) -> dict:
    sources = [
        {"kind": "text", "share": 0.5, "files": ["a.jsonl"]},
        {"kind": "text", "share": 0.3, "files": ["b.jsonl"]},
        {"kind": "synthetic", "share": 0.2, "task": "passkey", "length": 127, "min_length": 100, "name": "keys"},
    ]
    return {"kind": "mixture", "sources": sources, "held_out": 0.2} | changes


@pytest.fixture
def recipe(recipe_dict, write_recipe, words):
    """A recipe whose stage trains on 40 sequences of 128 tokens."""

    def make(data, **changes):
        stage = recipe_dict["stages"][0] | {"sequence_length": 128, "batch_tokens": 256, "tokens": 5120}
        recipe_dict["stages"] = [stage | {"data": data} | changes]
        return load_recipe(write_recipe(recipe_dict))

    return make


def stage_of(recipe):
    return recipe.stages[0]


def test_a_held_out_sample_without_a_target_is_refused(recipe, tokenizer, small_model, tmp_path):
    (tmp_path / "short.jsonl").write_text(json.dumps({"text": "<|endoftext|>a"}) + "\n")
    data = {"kind": "text", "files": ["short.jsonl"], "held_out": 0.5}
    stage = stage_of(recipe(data, sequence_length=2, batch_tokens=2, tokens=2))
    tokens = np.array([tokenizer.eos_token_id, 64, 64, 64], dtype=np.uint16)
    (tmp_path / "data").mkdir()
    tokens.tofile(tmp_path / "data" / "tokens.bin")
    about = {"eos_token_id": tokenizer.eos_token_id, "type": "uint16", "held_out": 2}
    (tmp_path / "data" / "data.json").write_text(json.dumps(about))
    with pytest.raises(UserError, match="none of the 1 held-out sequences that are scored holds anything to predict"):
        evaluate(small_model, Sequences(tmp_path / "data", stage), max_tokens=2, batch_size=1)


def test_a_mixture_on_disk(recipe, tokenizer, tmp_path):
    stage = stage_of(recipe(mixture()))
    counts = prepare(stage, tokenizer, tmp_path / "data", scored=1000)
    assert (counts["held_out"], counts["sequences"]) == (1000, 8 + 40)
    shares = [(source["name"], source["share"], source["sequences"]) for source in counts["sources"]]
    assert shares == [("a.jsonl", 0.5, 23), ("b.jsonl", 0.3, 14), ("keys", 0.2, 11)]
    sequences = Sequences(tmp_path / "data", stage)
    assert len(sequences.held_out) == 7
    assert len(sequences.training) == 40
    seen = {"a": 0, "b": 0, "keys": 0}
    for index in range(len(sequences.tokens)):
        item = sequences[index]
        text = tokenizer.decode(item["input_ids"])
        kind = "keys" if "pass key" in text else "a" if "a document" in text else "b"
        seen[kind] += 1
        learnt = (item["labels"] != IGNORED).sum().item()
        assert learnt < 20 if kind == "keys" else learnt > 100
        if kind != "keys":
            assert f"{ {'a': 'b', 'b': 'a'}[kind] } document" not in text, "a sequence is of one source"
    assert seen == {"a": 23, "b": 14, "keys": 11}
    size = sum((tmp_path / "data" / name).stat().st_size for name in ("tokens.bin", "learn.bin", "source.bin"))
    assert size == data_bytes(stage, 5120, 1000, len(tokenizer)) == 48 * (2 * 128 + 16 + 1)


def test_shares_are_of_tokens_that_fill_nothing_up(recipe, tokenizer, tmp_path):
    data = mixture()
    data["sources"][2] |= {"min_length": 92, "length": 100}  # one example in each sequence, a quarter is empty
    data["sources"][0]["share"], data["sources"][2]["share"] = 0.3, 0.4
    stage = stage_of(recipe(data, tokens=128 * 150, batch_tokens=128))
    counts = prepare(stage, tokenizer, tmp_path / "data", scored=128)
    sequences = Sequences(tmp_path / "data", stage)
    read = np.zeros(3)
    for source, row in zip(sequences.source, sequences.tokens, strict=True):
        filling = len(row) - len(np.trim_zeros(row, "b")) - 1 if source == 2 else 0
        assert filling >= 128 - 101 or source < 2
        read[source] += len(row) - filling
    assert tokenizer.eos_token_id == 0
    assert [source["tokens"] for source in counts["sources"]] == read.tolist()
    for source, share in zip(counts["sources"], read / read.sum(), strict=True):
        assert source["met"] == share
        assert abs(share - source["share"]) < 0.01


def test_text_goes_on_in_the_next_sequence_of_its_source(recipe, tokenizer, tmp_path):
    stage = stage_of(recipe(mixture()))
    prepare(stage, tokenizer, tmp_path / "data", scored=1000)
    sequences = Sequences(tmp_path / "data", stage)
    order = sequences.in_text_order
    assert sorted(order) == sequences.training.tolist()
    assert sequences.source[order].tolist() == sorted(sequences.source[order])
    joined = tokenizer.decode(sequences.tokens[order[sequences.source[order] == 0]].reshape(-1))
    documents = joined.split("<|endoftext|>")[1:-1]
    first = int(documents[0].split()[3])
    numbers = range(first, first + len(documents))
    assert documents == [f"a document number {n} of the file, which is short" for n in numbers]
    for before, after in pairwise(order):
        same = sequences.source[before] == sequences.source[after]
        ended = sequences.tokens[before, -1] == tokenizer.eos_token_id
        assert sequences.continues(before, after) == (same and not ended)
    assert not sequences.continues(order[0], order[2])


def test_a_mixture_is_the_same_every_time(recipe, tokenizer, tmp_path):
    stage = stage_of(recipe(mixture()))
    for name in ("one", "two"):
        prepare(stage, tokenizer, tmp_path / name)
    for name in ("tokens.bin", "learn.bin", "data.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_a_source_that_runs_out_is_named(recipe, tokenizer, tmp_path):
    data = mixture()
    data["sources"][1]["files"] = ["c.jsonl"]
    message = (
        r"^stages\[0\]\.data\.sources\[1\]: c.jsonl ran out after \d+ of about 1,\d+ tokens that its share of the "
        r"stage needs \(repeat: true would begin it again\)$"
    )
    with pytest.raises(UserError, match=message):
        prepare(stage_of(recipe(data)), tokenizer, tmp_path / "data", place="stages[0].")
    assert not list(tmp_path.glob("data*"))


def test_a_source_that_repeats_begins_behind_what_is_held_out(recipe, tokenizer, tmp_path, monkeypatch):
    data = mixture(held_out=0.1)
    data["sources"][1] |= {"files": ["c.jsonl"], "repeat": True}
    stage = stage_of(recipe(data))
    counts = prepare(stage, tokenizer, tmp_path / "data", scored=300)
    assert counts["sources"][1]["laps"] >= 3
    sequences = Sequences(tmp_path / "data", stage)

    def documents(indices):
        texts = (tokenizer.decode(part) for part in sequences.tokens[indices])
        return {part.strip() for text in texts for part in text.split("<|endoftext|>") if "c document" in part}

    held_out = {text for text in documents(sequences.held_out) if text.startswith("c") and text.endswith("short")}
    assert len(held_out) >= 3
    training = documents(sequences.training)
    assert len(training) >= 6
    assert not held_out & training


def test_a_lap_does_not_read_on_from_a_document_that_was_cut(recipe, tokenizer, tmp_path):
    data = mixture(held_out=0.1)
    data["sources"][1] |= {"files": ["c.jsonl"], "repeat": True, "max_tokens": 100}
    stage = stage_of(recipe(data))
    counts = prepare(stage, tokenizer, tmp_path / "data", scored=128)
    assert counts["sources"][1]["laps"] >= 3
    sequences = Sequences(tmp_path / "data", stage)
    text = tokenizer.decode(sequences.tokens[sequences.source == 1].reshape(-1))
    documents = [part for part in text.split("<|endoftext|>")[1:-1] if part]
    whole = [f"c document number {n} of the file, which is short" for n in range(12)]
    assert all(any(start.startswith(document) for start in whole) for document in documents)
    assert len(set(documents) - set(whole)) == 1, "the one that was cut"


def test_repeating_a_source_that_is_all_held_out(recipe, tokenizer, tmp_path):
    data = mixture(held_out=0.5)
    data["sources"][1] |= {"files": ["c.jsonl"], "repeat": True}
    with pytest.raises(UserError, match=r"data\.sources\[1\]: c.jsonl ran out after"):
        prepare(stage_of(recipe(data)), tokenizer, tmp_path / "data")


class Stop(Exception):
    pass


@pytest.mark.parametrize("at", [1, 3], ids=["soon", "late"])
@pytest.mark.parametrize("grouped", [False, True], ids=["rows", "groups"])
def test_interrupted_preparation_goes_on(recipe, tokenizer, tmp_path, monkeypatch, at, grouped):
    data = mixture(held_out=0.1)
    data["sources"][1] |= {"repeat": True} | ({"group_by": "text", "group_window": 7} if grouped else {})
    data["sources"][1]["files"] = ["c.jsonl", "c.jsonl"]
    stage = stage_of(recipe(data))
    expected = prepare(stage, tokenizer, tmp_path / "whole", scored=128)
    monkeypatch.setattr(preparation, "SAVE_TOKENS", 128 * 9)
    saves, read = [], []

    def save(*arguments, write=preparation._write_state):
        write(*arguments)
        saves.append(1)
        if len(saves) == at:
            raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(preparation, "_write_state", save)
        with pytest.raises(Stop):
            prepare(stage, tokenizer, tmp_path / "data", scored=128)
    assert not (tmp_path / "data").exists(), "it is not taken for whole"
    with (tmp_path / "data.unfinished" / "tokens.bin").open("ab") as file:
        file.write(b"what was written after the state")
    with monkeypatch.context() as patch:
        take = packing.SequenceStream.take
        patch.setattr(packing.SequenceStream, "take", lambda self: read.append(1) or take(self))
        assert prepare(stage, tokenizer, tmp_path / "data", scored=128) == expected
    assert len(read) == 42 - at * 9 - 1 or len(read) == 41 - at * 9, "what was done is not done again"
    for name in ("tokens.bin", "learn.bin", "data.json"):
        assert (tmp_path / "data" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == [
        *("data.json", "learn.bin", "source.bin", "tokens.bin")
    ]


@pytest.mark.parametrize("change", ["seed", "file", "state", "state-cut", "state-lost", "state-of-a-list"])
def test_a_state_of_other_data_is_not_gone_on_from(recipe, tokenizer, tmp_path, monkeypatch, words, change):
    stage = stage_of(recipe(mixture()))
    monkeypatch.setattr(preparation, "SAVE_TOKENS", 128)

    def stop(*arguments, write=preparation._write_state):
        write(*arguments)
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(preparation, "_write_state", stop)
        with pytest.raises(Stop):
            prepare(stage, tokenizer, tmp_path / "data")
    if change == "file":
        (words / "a.jsonl").write_text((words / "a.jsonl").read_text().replace("number", "of the number"))
    elif change.startswith("state"):
        state = tmp_path / "data.unfinished" / "state.npz"
        whole = state.read_bytes()
        state.write_bytes({"state": b"PK damaged", "state-cut": whole[: len(whole) // 2]}.get(change, b""))
        if change == "state-of-a-list":
            np.savez(state, about="[]")
    seed = {"seed": 3}.get(change, 0)
    prepare(stage, tokenizer, tmp_path / "data", seed=seed)
    prepare(stage, tokenizer, tmp_path / "fresh", seed=seed)
    assert (tmp_path / "data" / "tokens.bin").read_bytes() == (tmp_path / "fresh" / "tokens.bin").read_bytes()


def test_a_file_that_lost_its_content_is_not_gone_on_with(recipe, tokenizer, tmp_path, monkeypatch):
    stage = stage_of(recipe(mixture()))
    monkeypatch.setattr(preparation, "SAVE_TOKENS", 128)

    def stop(*arguments, write=preparation._write_state):
        write(*arguments)
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(preparation, "_write_state", stop)
        with pytest.raises(Stop):
            prepare(stage, tokenizer, tmp_path / "data")
    (tmp_path / "data.unfinished" / "tokens.bin").unlink()
    with pytest.raises(UserError, match=r"tokens\.bin is damaged"):
        prepare(stage, tokenizer, tmp_path / "data")
    assert not list(tmp_path.glob("data*")), "its state is of no use"
    prepare(stage, tokenizer, tmp_path / "data")


def test_what_goes_wrong_late_loses_nothing(recipe, tokenizer, tmp_path, monkeypatch, words):
    """A row of a wrong type, or a source that runs out, may come after hours."""
    stage = stage_of(recipe(mixture()))
    monkeypatch.setattr(preparation, "SAVE_TOKENS", 128 * 10)
    rows = (words / "a.jsonl").read_text()
    (words / "a.jsonl").write_text(rows.replace("a document number 200", '"}\n{"text": 5, "b": "'))
    with pytest.raises(UserError, match=r"a\.jsonl:202: column 'text' is of type int"):
        prepare(stage, tokenizer, tmp_path / "data")
    assert (tmp_path / "data.unfinished" / "state.npz").exists()
    taken = []
    take = packing.SequenceStream.take
    monkeypatch.setattr(packing.SequenceStream, "take", lambda self: taken.append(1) or take(self))
    with pytest.raises(UserError, match=r"a\.jsonl:202: column 'text' is of type int"):
        prepare(stage, tokenizer, tmp_path / "data")
    assert len(taken) < 12, "it went on from the state"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG], ids=["full", "too-large"])
def test_full_disk_is_one_line_and_nothing_is_lost(recipe, tokenizer, tmp_path, monkeypatch, number):
    stage = stage_of(recipe(mixture()))

    def full(*arguments, **options):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(preparation, "SAVE_TOKENS", 128)
    with monkeypatch.context() as patch:
        patch.setattr(np, "savez", full)
        message = (
            f"^{tmp_path / 'data.unfinished'} cannot be written: {os.strerror(number)}; once it can be, run the same"
        )
        with pytest.raises(Unavailable, match=message):
            prepare(stage, tokenizer, tmp_path / "data")
    assert not (tmp_path / "data").exists()
    prepare(stage, tokenizer, tmp_path / "data")


def test_a_disk_that_cannot_be_read_names_the_source(recipe, tokenizer, tmp_path, monkeypatch):
    def broken(*arguments):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(sources.TextRows, "_rows", broken)
    with pytest.raises(Unavailable, match=r"^stages\[0\]\.data\.sources\[0\]: \[Errno 5\] Input/output error$"):
        prepare(stage_of(recipe(mixture())), tokenizer, tmp_path / "data", place="stages[0].")


def test_too_little_room_is_said_before_anything_is_written(recipe, tokenizer, tmp_path, monkeypatch):
    stage = stage_of(recipe(mixture()))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(Unavailable, match=r"data\.unfinished needs 0\.00 GiB of disk, 0\.00 are free; make room"):
        prepare(stage, tokenizer, tmp_path / "data")
    assert not list(tmp_path.glob("data*/tokens.bin"))


def test_tokenising_uses_all_cores_and_leaves_the_environment_alone(recipe, tokenizer, tmp_path, monkeypatch):
    seen = []
    encode = sources.TextRows.encode

    def watched(self, units):
        seen.append(os.environ["TOKENIZERS_PARALLELISM"])
        return encode(self, units)

    monkeypatch.setattr(sources.TextRows, "encode", watched)
    before = os.environ["TOKENIZERS_PARALLELISM"]
    prepare(stage_of(recipe(mixture())), tokenizer, tmp_path / "data")
    assert set(seen) == {"true"}
    assert os.environ["TOKENIZERS_PARALLELISM"] == before


KILLED = """
import os, signal, sys
from pathlib import Path
from transformers import PreTrainedTokenizerFast
from palimpsa_surgery.stages.data import preparation
from palimpsa_surgery.stages.recipe import load_recipe

write = preparation._write_state

def killed(*arguments):
    write(*arguments)
    os.kill(os.getpid(), signal.SIGKILL)

preparation.SAVE_TOKENS = 64
preparation._write_state = killed
checkpoint, recipe, data = sys.argv[1:]
recipe, tokenizer = load_recipe(recipe), PreTrainedTokenizerFast.from_pretrained(checkpoint)
how = {"tokens": recipe.stages[0].tokens, "scored": recipe.evaluation.tokens, "seed": recipe.seed}
preparation.prepare(recipe.stages[0], tokenizer, Path(data), **how)
"""
"""What `train` does in a run's folder, without what it imports before: that takes many times as long."""


def test_killed_while_tokenising(finished, tokenizer, tmp_path, monkeypatch):
    checkpoint, recipe = finished.plan.source.path, finished.plan.output.parent / "recipe.yaml"

    def stop(*arguments):
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(preparation._Writer, "write", stop)
        with pytest.raises(Stop):
            pipeline.train(checkpoint, recipe, tmp_path / "run")
    data = tmp_path / "run" / "01-first" / "data"
    command = [sys.executable, "-c", KILLED, str(checkpoint), str(recipe), str(data)]
    assert subprocess.run(command, check=False, capture_output=True).returncode == -signal.SIGKILL
    assert not data.exists()
    assert data.with_name("data.unfinished").is_dir()
    states = []

    def compare(plan, record, index, text_tokenizer):
        stage = plan.stages[index].stage
        prepare(stage, tokenizer, tmp_path / stage.name, scored=128)
        ours, theirs = (folder / "tokens.bin" for folder in (folder_of(plan, index), tmp_path / stage.name))
        assert ours.read_bytes() == theirs.read_bytes()

    def folder_of(plan, index):
        return plan.output / plan.stages[index].folder / "data"

    def read(*arguments, read=preparation._read_state):
        states.append(read(*arguments))
        return states[-1]

    monkeypatch.setattr(preparation, "_read_state", read)
    monkeypatch.setattr(pipeline, "run_stage", compare)
    assert pipeline.train(checkpoint, recipe, tmp_path / "run").did == ("first", "second")
    assert states[0] is not None, "it went on from where it was killed"
    assert states[1] is None


def test_a_mixture_trains(recipe, finished, tmp_path):
    made = recipe(mixture())
    run = pipeline.train(finished.plan.source.path, made, tmp_path / "run", max_steps=2)
    (stage,) = json.loads((tmp_path / "run" / "run.json").read_text())["stages"]
    assert [source["name"] for source in stage["data"]["sources"]] == ["a.jsonl", "b.jsonl", "keys"]
    assert stage["data"]["sequences"] == 1 + 4
    assert stage["after"]["tokens"] > 0
    assert run.final.is_dir()


@pytest.mark.parametrize("mixed", [False, True])
def test_a_filter_that_keeps_nothing(recipe, tokenizer, tmp_path, mixed):
    nothing = {"kind": "text", "files": ["a.jsonl"], "filter": {"text": "no such text"}}
    data = mixture()
    data["sources"][0] |= nothing
    place = r"^stages\[3\]\.data" + (r"\.sources\[0\]: " if mixed else ": ")
    with pytest.raises(UserError, match=place + r".*; the filter or part of a\.jsonl kept no row"):
        prepare(stage_of(recipe(data if mixed else nothing)), tokenizer, tmp_path / "data", place="stages[3].")


def test_a_filter_is_not_blamed_for_what_is_too_long(recipe, words, tokenizer, tmp_path):
    (words / "long.jsonl").write_text(json.dumps({"instruction": "a", "output": "word " * 500}) + "\n")
    part = {"by": "instruction", "range": [0, 1]}
    stage = stage_of(recipe({"kind": "instruction", "files": ["long.jsonl"], "part": part}))
    with pytest.raises(UserError, match=r"each needs one; left out: 1 too_long$"):
        prepare(stage, tokenizer, tmp_path / "data")


def test_types_of_tokens():
    assert token_type(50_288) == token_type(1 << 16) == np.uint16
    assert token_type((1 << 16) + 1) == np.uint32


def test_a_large_vocabulary(recipe, tokenizer, tmp_path, monkeypatch):
    stage = stage_of(recipe({"kind": "text", "files": ["a.jsonl"]}))
    prepare(stage, tokenizer, tmp_path / "small")
    monkeypatch.setattr(preparation, "token_type", lambda vocabulary: np.dtype(np.uint32))
    prepare(stage, tokenizer, tmp_path / "large")
    small, large = (Sequences(tmp_path / name, stage) for name in ("small", "large"))
    assert (small.tokens.dtype, large.tokens.dtype) == (np.uint16, np.uint32)
    assert torch.equal(small[3]["input_ids"], large[3]["input_ids"])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"kind": "text", "files": ["a.jsonl"], "column": "body"}, r"stages\[0\]\.data: .*no column 'body'"),
        (
            mixture(sources=[{"kind": "text", "share": 1, "files": ["a.jsonl"], "group_by": "repo"}]),
            r"stages\[0\]\.data\.sources\[0\]: .*no column 'repo' \(columns found: text\)",
        ),
        (
            mixture(sources=[{"kind": "synthetic", "share": 1, "task": "passkey", "length": 9}]),
            r"stages\[0\]\.data\.sources\[0\]: length is too short for passkey",
        ),
    ],
    ids=["column", "group", "task"],
)
def test_wrong_data_are_found_before_weights_are_loaded(
    recipe, recipe_dict, write_recipe, tokenizer, finished, tmp_path, monkeypatch, data, message
):
    from palimpsa_surgery.surgery import checkpoints

    def refuse(*arguments, **options):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(checkpoints, "load_model", refuse)
    made = recipe(data)
    with pytest.raises(UserError, match=message):
        check_data(made, tokenizer)
    with pytest.raises(UserError, match=message):
        pipeline.train(finished.plan.source.path, made, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_resolved_recipe_of_a_mixture_is_the_same_recipe(recipe, write_recipe):
    made = recipe(mixture())
    assert load_recipe(write_recipe(made.to_yaml(), "resolved.yaml")) == made
    assert Path(yaml.safe_load(made.to_yaml())["stages"][0]["data"]["sources"][0]["files"][0]).is_absolute()
