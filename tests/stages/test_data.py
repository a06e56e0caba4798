"""Data: what is learnt, where documents begin, what is held out, and in which order the rest comes."""

import json

import numpy as np
import pytest
import torch

from palimpsa_surgery.errors import UserError
from palimpsa_surgery.stages.data import IGNORED, Sequences, TrainingOrder, prepare
from palimpsa_surgery.stages.recipe import load_recipe


@pytest.fixture
def prepared(tmp_path, tokenizer):
    """Tokenise a recipe's first stage and return its sequences and counts."""

    def make(recipe):
        stage = recipe.stages[0]
        counts = prepare(stage, tokenizer, tmp_path / "data")
        return Sequences(tmp_path / "data", stage), counts

    return make


@pytest.fixture
def instruction_recipe(recipe_dict, write_recipe, tmp_path):
    """A recipe over the given prompts and answers, all of which are used."""

    def make(pairs, length=32, suffix=".jsonl", **data):
        path = tmp_path / f"pairs{suffix}"
        rows = [{"q": prompt, "a": answer} for prompt, answer in pairs]
        if suffix == ".parquet":
            import pyarrow as pa
            import pyarrow.parquet as pq

            pq.write_table(pa.Table.from_pylist(rows), path)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        columns = {"prompt_column": "q", "answer_column": "a", "held_out": 0.3}
        entry = {"kind": "instruction", "files": [str(path)], "template": "Q: {prompt}\nA: {answer}"}
        stage = {**recipe_dict["stages"][0], "sequence_length": length, "batch_tokens": length, "tokens": 99 * length}
        recipe_dict["stages"] = [{**stage, "data": entry | columns | data}]
        return load_recipe(write_recipe(recipe_dict))

    return make


@pytest.mark.parametrize(
    ("file", "content"), [("data.json", "{"), ("data.json", '{"type": 3}'), ("data.json", "[]"), ("tokens.bin", "abcd")]
)
def test_damaged_data_are_one_line(prepared, small_recipe, tmp_path, file, content):
    prepared(small_recipe)
    (tmp_path / "data" / file).write_text(content)
    with pytest.raises(UserError, match=f"^{tmp_path / 'data'} is damaged: .+$"):
        Sequences(tmp_path / "data", small_recipe.stages[0])


PAIRS = [(f"What is {n} {{and}} one?", f"It is {n + 1}, I say.") for n in range(8)]


def test_text_is_read_in_order_as_far_as_it_is_needed(prepared, small_recipe, tokenizer, text_file):
    sequences, counts = prepared(small_recipe)
    documents = [json.loads(line)["text"] for line in text_file.read_text().splitlines()]
    expected = []
    for document in documents:
        expected += [*tokenizer(document)["input_ids"], tokenizer.eos_token_id]
    tokens = sequences.tokens.reshape(-1).tolist()
    # 320 tokens to train on behind 320 / 9 that are held out, whole sequences of 32 of either
    assert len(tokens) == 32 * (2 + 10)
    assert tokens == expected[: len(tokens)]
    source = {"name": "verses.jsonl", "sequences": 12, "tokens": 384, "documents": 40}
    assert counts == {"sequences": 12, "tokens": 384, "held_out": 36, "sources": [source]}
    assert sequences.tokens.dtype == np.uint16
    assert len(sequences.training) == 10


def test_fewer_data_than_the_stage_has_tokens_are_used_up(prepared, recipe_dict, write_recipe, tokenizer, text_file):
    recipe_dict["stages"][0]["tokens"] = 64_000
    sequences, counts = prepared(load_recipe(write_recipe(recipe_dict)))
    documents = [json.loads(line)["text"] for line in text_file.read_text().splitlines()]
    total = sum(len(tokenizer(document)["input_ids"]) + 1 for document in documents)
    assert counts["tokens"] == total
    assert counts["sequences"] == total // 32
    assert counts["held_out"] == round(0.1 * total)
    assert len(sequences.held_out) + len(sequences.training) + 1 >= total // 32


def test_documents_reset_and_their_first_token_is_no_target(prepared, small_recipe, tokenizer):
    sequences, _ = prepared(small_recipe)
    changes = 0
    for index in range(len(sequences.tokens)):
        item = sequences[index]
        assert item["input_ids"].dtype == item["labels"].dtype == torch.int64
        assert item["seq_idx"].dtype == torch.int32
        after_end = torch.cat([torch.tensor([False]), item["input_ids"][:-1] == tokenizer.eos_token_id])
        assert torch.equal(item["seq_idx"], after_end.cumsum(0))
        assert torch.equal(item["labels"] == IGNORED, after_end)
        assert torch.equal(item["labels"][~after_end], item["input_ids"][~after_end])
        changes += int(item["seq_idx"][-1])
    assert changes >= 8


def test_without_reset_there_are_no_boundaries(prepared, recipe_dict, write_recipe):
    recipe_dict["stages"][0]["packing"] = {"reset_at_documents": False}
    sequences, _ = prepared(load_recipe(write_recipe(recipe_dict)))
    item = sequences[3]
    assert set(item) == {"input_ids", "labels"}
    assert torch.equal(item["input_ids"], item["labels"])


def test_token_limit(prepared, recipe_dict, write_recipe):
    limits = {"max_tokens": 100, "held_out": 0.4}
    recipe_dict["stages"][0]["data"] = recipe_dict["stages"][0]["data"] | limits
    _, counts = prepared(load_recipe(write_recipe(recipe_dict)))
    assert (counts["sequences"], counts["tokens"], counts["held_out"]) == (3, 100, 40)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_only_answers_are_learnt(prepared, instruction_recipe, tokenizer, suffix):
    sequences, counts = prepared(instruction_recipe(PAIRS, length=32, suffix=suffix))
    assert counts["sources"][0]["examples"] == len(PAIRS)
    seen = []
    for index in range(len(sequences.tokens)):
        item = sequences[index]
        assert int(item["seq_idx"][-1]) == 0, "filling is no document of its own"
        for document in range(int(item["seq_idx"][-1]) + 1):
            inside = item["seq_idx"] == document
            ids, labels = item["input_ids"][inside], item["labels"][inside]
            filling = int((ids == tokenizer.eos_token_id).sum()) - 1
            assert labels[len(ids) - filling :].tolist() == [IGNORED] * filling
            ids, labels = ids[: len(ids) - filling], labels[: len(ids) - filling]
            learnt = labels != IGNORED
            assert torch.equal(labels[learnt], ids[learnt])
            assert ids[-1] == tokenizer.eos_token_id
            assert learnt[-1], "the model must learn to stop"
            question, answer = tokenizer.decode(ids[~learnt]), tokenizer.decode(ids[learnt][:-1])
            assert question + answer == tokenizer.decode(ids[:-1])
            assert answer.startswith(" It is")
            seen.append((question.removeprefix("Q: ").removesuffix("\nA:"), answer.strip()))
    assert seen == PAIRS


def test_examples_stay_whole_and_what_is_left_out_is_counted(prepared, instruction_recipe):
    pairs = [*PAIRS, ("Too long", "word " * 40), ("No answer", None), (None, "No question"), ("Empty", "")]
    sequences, counts = prepared(instruction_recipe(pairs))
    (source,) = counts["sources"]
    assert 20 * len(PAIRS) < source.pop("tokens") < 32 * len(PAIRS) - 20, "all but those that fill up sequences"
    assert source == {
        "name": "pairs.jsonl",
        "sequences": len(PAIRS),
        "examples": len(PAIRS),
        "too_long": 1,
        "unanswered": 3,
    }
    assert counts["tokens"] == 32 * len(PAIRS)
    assert all(int((sequences[i]["labels"] != IGNORED).sum()) > 0 for i in range(len(PAIRS)))


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_missing_column_lists_those_found(prepared, instruction_recipe, suffix):
    recipe = instruction_recipe(PAIRS, suffix=suffix, answer_column="response")
    with pytest.raises(UserError, match=r"no column 'response' \(columns found: q, a\)"):
        prepared(recipe)


def test_answer_of_another_type(prepared, instruction_recipe):
    with pytest.raises(UserError, match=r"pairs.jsonl:2: column 'a' is of type int, not a string"):
        prepared(instruction_recipe([("a", "b"), ("c", 3)]))


@pytest.mark.parametrize(
    ("length", "held_out", "message"),
    [
        (4096, 0.5, r"^data: \d+ tokens, held_out 0\.5 of them, make 0 sequences of 4096"),
        (1000, 0.02, r"make 0 sequences of 1000 to train on and 1 to evaluate; each needs one"),
    ],
    ids=["none-at-all", "none-to-train-on"],
)
def test_too_little_data_leaves_nothing_behind(
    prepared, recipe_dict, write_recipe, tmp_path, length, held_out, message
):
    stage = recipe_dict["stages"][0] | {"sequence_length": length, "batch_tokens": length, "tokens": length}
    recipe_dict["stages"] = [stage | {"data": stage["data"] | {"held_out": held_out}}]
    with pytest.raises(UserError, match=message):
        prepared(load_recipe(write_recipe(recipe_dict)))
    assert not list(tmp_path.glob("data*"))


def test_what_is_held_out_is_never_trained_on_at_any_length(tmp_path, tokenizer, small_recipe):
    seen = []
    for stage in small_recipe.stages:  # 32 and 64 tokens long
        counts = prepare(stage, tokenizer, tmp_path / stage.name)
        sequences = Sequences(tmp_path / stage.name, stage)
        positions = np.arange(counts["sequences"] * stage.sequence_length).reshape(-1, stage.sequence_length)
        seen.append((positions[sequences.training], positions[sequences.held_out]))
        assert 0 <= counts["sequences"] - len(sequences.training) - len(sequences.held_out) <= 1
        assert positions[sequences.training].size == stage.tokens
        assert len(sequences.held_out) >= 1
    for training, _ in seen:
        for _, held_out in seen:
            assert held_out.max() < training.min()


def test_order_depends_on_seed_stage_and_position_alone(prepared, small_recipe):
    sequences, _ = prepared(small_recipe)
    lap = len(sequences.training)

    def order(seed, stage_index, positions=range(2 * lap)):
        training = TrainingOrder(sequences, count=2 * lap, seed=seed, stage_index=stage_index)
        return [tuple(training[position]["input_ids"].tolist()) for position in positions]

    whole = order(0, 0)
    assert order(0, 0, range(lap + 3, 2 * lap)) == whole[lap + 3 :], "a resumed run needs no history"
    expected = sorted(tuple(sequences.tokens[index].tolist()) for index in sequences.training)
    assert sorted(whole[:lap]) == sorted(whole[lap:]) == expected, "each lap uses every sequence once"
    assert whole[:lap] != whole[lap:]
    assert order(1, 0) != whole
    assert order(0, 1) != whole
