"""Training and scoring one stage, on models that train in seconds."""

import json
import math

import pytest
import torch

from helpers import assert_close
from palimpsa_surgery.errors import UserError
from palimpsa_surgery.stages.data import IGNORED, Sequences, TrainingOrder, prepare
from palimpsa_surgery.stages.recipe import load_recipe
from palimpsa_surgery.stages.trainer import (
    CHECKPOINT_FILES,
    StageTrainer,
    evaluate,
    last_checkpoint,
    quiet_transformers,
)


@pytest.fixture
def run(tmp_path, tokenizer, small_model):
    """Train the small model on a recipe's first stage; return the trainer."""

    def train(recipe, steps=None, model=small_model):
        stage = recipe.stages[0]
        if not (tmp_path / "data").exists():
            prepare(stage, tokenizer, tmp_path / "data")
        steps = steps or stage.steps
        order = TrainingOrder(
            Sequences(tmp_path / "data", stage), count=steps * stage.batch_sequences, seed=0, stage_index=0
        )
        with quiet_transformers():
            trainer = StageTrainer(
                model,
                stage,
                order,
                tmp_path / "stage",
                steps=steps,
                seed=0,
                checkpoint_steps=2,
                advance=lambda units: None,
            )
            trainer.train()
        return trainer

    return train


def changed(recipe_dict, write_recipe, **fields):
    recipe_dict["stages"] = [recipe_dict["stages"][0] | fields]
    return load_recipe(write_recipe(recipe_dict))


def weights(model):
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def log_of(tmp_path):
    return [json.loads(line) for line in (tmp_path / "stage" / "log.jsonl").read_text().splitlines()]


def test_all_that_should_train_does(run, small_recipe, small_model):
    before = weights(small_model)
    run(small_recipe)
    for name, value in small_model.named_parameters():
        assert value.dtype == torch.float32
        assert torch.isfinite(value).all(), name
        assert torch.equal(value, before[name]) == name.endswith("Ip_log"), name


def test_precision_is_not_taken_from_the_environment(run, small_recipe, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    trainer = run(small_recipe, steps=1)
    assert trainer.accelerator.mixed_precision == ("bf16" if torch.cuda.is_available() else "no")


def test_log_has_each_step_with_its_rate(run, recipe_dict, write_recipe, tmp_path):
    recipe = changed(
        recipe_dict, write_recipe, warmup_steps=2, schedule={"kind": "cosine", "min_ratio": 0.1}, learning_rate=1e-3
    )
    run(recipe)
    log = log_of(tmp_path)
    assert [line["step"] for line in log] == [1, 2, 3, 4, 5]
    assert [line["tokens"] for line in log] == [64, 128, 192, 256, 320]
    cosine = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * t / 3)) for t in range(3)]
    expected = [1e-3 * factor for factor in (0, 0.5, *cosine)]
    assert [line["learning_rate"] for line in log] == pytest.approx(expected)
    assert all(math.isfinite(line["loss"]) and line["tokens_per_second"] > 0 for line in log)


def test_importance_has_its_own_rate_through_the_schedule(run, small_recipe):
    trainer = run(small_recipe, steps=3)
    rates = {group["name"]: group["initial_lr"] for group in trainer.optimizer.param_groups}
    assert rates["weights"] == 1e-3
    assert rates["importance scale b_scale"] == 1e-2
    ends = {group["name"]: group["lr"] for group in trainer.optimizer.param_groups}
    assert ends["weights"] == pytest.approx(1e-4)
    assert ends["importance scale b_scale"] == pytest.approx(1e-3)


def test_micro_batches_add_up_to_the_batch(run, recipe_dict, write_recipe, small_model, tmp_path):
    """With instructions, whose micro-batches hold unequal numbers of targets."""
    path = tmp_path / "pairs.jsonl"
    pairs = [{"instruction": "Count to " + "one " * n, "output": "word " * (14 - n)} for n in range(14)]
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    data = {"kind": "instruction", "files": [str(path)], "held_out": 0.2}
    start = weights(small_model)
    results = []
    for micro in (None, 32):
        small_model.load_state_dict(start, strict=False)
        run(changed(recipe_dict, write_recipe, data=data, micro_batch_tokens=micro), steps=2)
        results.append(weights(small_model))
    for name in start:
        if not torch.equal(results[0][name], start[name]):
            assert_close(results[1][name] - start[name], results[0][name] - start[name], 2e-3, name)


def test_gradient_checkpointing_changes_nothing(run, recipe_dict, write_recipe, small_model):
    start = weights(small_model)
    results = []
    for checkpointing in (False, True):
        small_model.load_state_dict(start, strict=False)
        run(changed(recipe_dict, write_recipe, gradient_checkpointing=checkpointing), steps=2)
        results.append(weights(small_model))
    for name in start:
        assert_close(results[1][name], results[0][name], 1e-5, name)


def test_loss_that_is_not_finite_stops_the_stage_and_names_the_step(run, small_recipe, small_model):
    def poison(module, args, kwargs, output):
        calls.append(1)
        if len(calls) == 3:
            output.loss = output.loss * float("nan")
        return output

    calls: list[int] = []
    small_model.register_forward_hook(poison, with_kwargs=True)
    with pytest.raises(UserError, match="stage first: the loss is nan at step 3") as error:
        run(small_recipe)
    assert "\n" not in str(error.value)


def test_gradient_that_is_not_finite_never_reaches_the_weights(run, small_recipe, small_model):
    small_model.backbone.layers[0].mixer.D.register_hook(lambda gradient: gradient * float("inf"))
    before = weights(small_model)
    with pytest.raises(UserError, match=r"the gradient norm is (nan|inf) at step 1"):
        run(small_recipe)
    assert all(torch.equal(value, before[name]) for name, value in small_model.named_parameters())


def test_evaluation_is_the_mean_over_targets(tmp_path, tokenizer, small_recipe, small_model):
    stage = small_recipe.stages[0]
    prepare(stage, tokenizer, tmp_path / "data")
    sequences = Sequences(tmp_path / "data", stage)
    total, targets = 0.0, 0
    with torch.no_grad():
        for index in sequences.held_out:
            item = sequences[index]
            logits = small_model(item["input_ids"][None], seq_idx=item["seq_idx"][None]).logits[0].double()
            labels = item["labels"][1:]
            kept = labels != IGNORED
            chosen = logits[:-1].log_softmax(-1)[kept].gather(1, labels[kept, None])
            total -= chosen.sum().item()
            targets += int(kept.sum())
    result = evaluate(small_model, sequences, max_tokens=10**9, batch_size=3)
    assert result["tokens"] == targets
    assert result["loss"] == pytest.approx(total / targets, rel=1e-5)
    assert result["perplexity"] == pytest.approx(math.exp(total / targets), rel=1e-4)
    few = evaluate(small_model, sequences, max_tokens=64, batch_size=3)
    assert few["tokens"] <= 64


def test_a_checkpoint_cut_short_is_not_resumed_from(tmp_path):
    for step, state in ((2, '{"global_step": 2}'), (4, '{"global_step": 4}'), (6, '{"global_st'), (10, None)):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        for name in CHECKPOINT_FILES[:-1]:
            (folder / name).write_bytes(b"x")
        if state:
            (folder / "trainer_state.json").write_text(state)
    (tmp_path / "checkpoint-12").mkdir()
    (tmp_path / "checkpoint-12" / "trainer_state.json").write_text('{"global_step": 12}')  # its weights are gone
    (tmp_path / "checkpoint-14").mkdir()
    (tmp_path / "checkpoint-14" / "trainer_state.json").write_text("{}")
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-4"
    assert last_checkpoint(tmp_path / "checkpoint-2") is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_cuda_weights_stay_float32_under_bfloat16_autocast(run, small_recipe, small_model, tmp_path):
    trainer = run(small_recipe)
    assert trainer.args.bf16
    assert trainer.args.n_gpu == 1
    for name, value in small_model.named_parameters():
        assert value.is_cuda
        assert value.dtype == torch.float32, name
        assert torch.isfinite(value).all(), name
    losses = [line["loss"] for line in log_of(tmp_path)]
    assert losses[-1] < losses[0]
    sequences = trainer.train_dataset.sequences
    on_gpu = evaluate(small_model, sequences, max_tokens=10**9, batch_size=2)
    on_cpu = evaluate(small_model.cpu(), sequences, max_tokens=10**9, batch_size=2)
    assert on_gpu["loss"] == pytest.approx(on_cpu["loss"], rel=2e-2)
