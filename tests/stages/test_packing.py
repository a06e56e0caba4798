"""Packing: a document in company is a document alone, and every answer's token weighs the same."""

import json

import pytest
import torch

from helpers import assert_close
from palimpsa_surgery.stages.data import IGNORED, Sequences, TrainingOrder, collate, packing, prepare
from palimpsa_surgery.stages.recipe import load_recipe
from palimpsa_surgery.stages.snapshots import Snapshots
from palimpsa_surgery.stages.trainer import StageTrainer, quiet_transformers


@pytest.fixture
def prepared(recipe_dict, write_recipe, tokenizer, tmp_path, monkeypatch):
    """Tokenise a stage of the given data in sequences of 128 tokens."""
    monkeypatch.setattr(packing, "BATCH_UNITS", 5)

    def make(data, **fields):
        sizes = {"sequence_length": 128, "batch_tokens": 512, "tokens": 1024}
        recipe_dict["stages"] = [recipe_dict["stages"][0] | sizes | fields | {"data": data}]
        stage = load_recipe(write_recipe(recipe_dict)).stages[0]
        if not (tmp_path / "data").exists():
            prepare(stage, tokenizer, tmp_path / "data")
        return stage, Sequences(tmp_path / "data", stage)

    return make


def instructions(tmp_path) -> dict:
    """Answers of very unequal length."""
    path = tmp_path / "pairs.jsonl"
    pairs = [{"instruction": f"Count to {n}, " * 3, "output": "word " * (60 if n % 8 > 4 else 3)} for n in range(80)]
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return {"kind": "instruction", "files": [str(path)]}


def test_packed_documents_of_a_mixture_are_as_if_alone(prepared, small_model, text_file, tmp_path):
    """Through the collator and both kinds of layer: the small model's first is a Mamba2 layer, its second Palimpsa."""
    sources = [
        {"kind": "text", "share": 0.4, "files": [str(text_file)]},
        instructions(tmp_path) | {"share": 0.4},
        {"kind": "synthetic", "share": 0.2, "task": "passkey", "length": 100},
    ]
    _, sequences = prepared({"kind": "mixture", "sources": sources})
    assert small_model.config.palimpsa_layers == [1]
    chosen = [int((sequences.source == number).nonzero()[0][-1]) for number in range(3)]
    batch = collate([sequences[index] for index in chosen])
    assert batch["seq_idx"].max() >= 2
    with torch.no_grad():
        packed = small_model(**batch, use_cache=False)
        alone, losses, targets = torch.empty_like(packed.logits), 0.0, 0
        for row in range(3):
            for document in batch["seq_idx"][row].unique():
                inside = batch["seq_idx"][row] == document
                ids, labels = batch["input_ids"][row, inside][None], batch["labels"][row, inside][None]
                output = small_model(input_ids=ids, use_cache=False)
                alone[row, inside] = output.logits[0]
                losses += torch.nn.functional.cross_entropy(
                    output.logits[0, :-1], labels[0, 1:], ignore_index=IGNORED, reduction="sum"
                )
                targets += int((labels[0, 1:] != IGNORED).sum())
    assert_close(packed.logits, alone, 1e-5, "logits")
    assert_close(packed.loss, losses / targets, 1e-5, "loss")


def test_every_target_of_a_step_weighs_the_same_whatever_the_accumulation(prepared, small_model, tmp_path, monkeypatch):
    data = instructions(tmp_path)
    seen, losses = {}, {}
    start = {name: value.clone() for name, value in small_model.state_dict().items()}
    for micro in (512, 128):
        small_model.load_state_dict(start)
        stage, sequences = prepared(data, micro_batch_tokens=micro)
        order = TrainingOrder(sequences, count=4, seed=0, stage_index=0)
        folder = tmp_path / f"stage-{micro}"
        clip = StageTrainer._clip_grad_norm

        def keep(self, model, micro=micro, clip=clip):
            seen[micro] = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            return clip(self, model)

        with quiet_transformers(), monkeypatch.context() as patch:
            patch.setattr(StageTrainer, "_clip_grad_norm", keep)
            options = {"steps": 1, "seed": 0, "checkpoint_steps": 9, "advance": lambda units, text: None}
            StageTrainer(small_model, stage, order, Snapshots(folder, keep=2), **options).train()
        losses[micro] = json.loads((folder / "log.jsonl").read_text().splitlines()[0])["loss"]

    # Independently: one mean over all targets of the four sequences.
    small_model.load_state_dict(start)
    small_model.zero_grad()
    small_model.train()
    batch = collate([order[position] for position in range(4)])
    counts = (batch["labels"][:, 1:] != IGNORED).sum(dim=1)
    assert counts.max() > 1.5 * counts.min(), "else a mean of means would do as well"
    logits = small_model(input_ids=batch["input_ids"], seq_idx=batch["seq_idx"], use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=IGNORED
    )
    loss.backward()
    for micro in (512, 128):
        assert losses[micro] == pytest.approx(loss.item(), rel=1e-5)
        for name, parameter in small_model.named_parameters():
            if parameter.grad is not None:
                assert_close(seen[micro][name], parameter.grad, 1e-4, f"{micro} {name}")
