"""Training and scoring one stage, on models that train in seconds."""

import json
import math

import pytest
import torch

from helpers import assert_close
from palimpsa_surgery.errors import UserError
from palimpsa_surgery.stages.data import IGNORED, Sequences, TrainingOrder, prepare
from palimpsa_surgery.stages.held_out import evaluate
from palimpsa_surgery.stages.recipe import load_recipe
from palimpsa_surgery.stages.snapshots import Snapshots
from palimpsa_surgery.stages.trainer import StageTrainer, quiet_transformers


@pytest.fixture
def run(tmp_path, tokenizer, small_model):
    """Train the small model on a recipe's first stage; return the trainer."""

    def train(recipe, steps=None, model=small_model, resume=False):
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
                Snapshots(tmp_path / "stage", keep=2),
                steps=steps,
                seed=0,
                checkpoint_steps=2,
                advance=lambda *_: None,
            )
            trainer.train(resume_from_checkpoint=trainer.snapshots.newest()[0] if resume else None)
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


def test_a_constant_rate_rises_and_stays(run, recipe_dict, write_recipe, tmp_path):
    run(changed(recipe_dict, write_recipe, warmup_steps=2, schedule={"kind": "constant"}, learning_rate=1e-3), steps=4)
    assert [line["learning_rate"] for line in log_of(tmp_path)] == pytest.approx([0, 5e-4, 1e-3, 1e-3])


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


def poison(model, calls, value=float("nan")):
    """Multiply the loss of the given forward passes, counted from 1, by `value`."""

    def hook(module, args, kwargs, output):
        seen.append(1)
        if len(seen) in calls:
            output.loss = output.loss * value
        return output

    seen: list[int] = []
    return model.register_forward_hook(hook, with_kwargs=True)


@pytest.mark.parametrize("micro", [None, 32], ids=["whole", "accumulated"])
def test_a_step_that_is_not_finite_is_skipped(
    run, recipe_dict, write_recipe, small_model, tmp_path, monkeypatch, micro
):
    """Weights and moments stay as they were, and so does the gradient of a good micro-batch beside the bad one."""
    snapshots = []

    def optimizer_state(trainer):
        return [
            {key: value.clone() for key, value in trainer.optimizer.optimizer.state[p].items()}
            for group in trainer.optimizer.param_groups
            for p in group["params"]
        ]

    original = StageTrainer.log

    def log(self, logs, start_time=None):
        snapshots.append((weights(self.model), optimizer_state(self)))
        original(self, logs, start_time)

    monkeypatch.setattr(StageTrainer, "log", log)
    poison(small_model, {None: {3}, 32: {5}}[micro])  # in the third step of four
    trainer = run(changed(recipe_dict, write_recipe, micro_batch_tokens=micro, warmup_steps=0), steps=4)
    (_, _), (second, moments), (third, third_moments), (fourth, _) = snapshots[:4]
    assert all(torch.equal(third[name], second[name]) for name in second)
    for before, after in zip(moments, third_moments, strict=True):
        assert before.keys() == after.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(after[key], before[key]) for key in before)
    assert not torch.equal(fourth["backbone.embeddings.weight"], third["backbone.embeddings.weight"])
    assert trainer.skipped_steps == 1
    log = log_of(tmp_path)
    assert [line.get("skipped", False) for line in log] == [False, False, True, False]
    assert log[2]["loss"] is None
    assert all(line["loss"] is not None for line in log if "skipped" not in line)
    rates = [line["learning_rate"] for line in log]
    assert rates == sorted(rates, reverse=True), "the schedule counts skipped steps"


def test_too_many_skipped_steps_in_a_row_stop_the_stage(run, recipe_dict, write_recipe, small_model):
    poison(small_model, {1, 3, 4, 5})
    recipe = changed(recipe_dict, write_recipe, non_finite={"max_consecutive": 2})
    with pytest.raises(UserError, match=r"stage first: the loss is not finite at step 5 \(3 steps in a row\)") as error:
        run(recipe)
    assert "\n" not in str(error.value)


def test_a_gpu_without_memory_is_said_in_one_line(run, small_recipe, small_model, monkeypatch):
    def refuse(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(small_model, "forward", refuse)
    with pytest.raises(UserError, match=r"^stage \S+: out of GPU memory: use a smaller micro_batch_tokens"):
        run(small_recipe)


def test_a_resumed_stage_counts_on(run, recipe_dict, write_recipe, small_model, tmp_path):
    """The second and third step are skipped before the checkpoint at 2 and after it."""
    recipe = changed(recipe_dict, write_recipe, non_finite={"max_consecutive": 1})
    with poison(small_model, {2, 3}), pytest.raises(UserError, match=r"at step 3 \(2 steps in a row\)"):
        run(recipe)
    with poison(small_model, {1}), pytest.raises(UserError, match=r"at step 3 \(2 steps in a row\)"):
        run(recipe, resume=True)
    trainer = run(recipe, resume=True)
    assert trainer.skipped_steps == 1


def test_gradient_that_is_not_finite_never_reaches_the_weights(run, recipe_dict, write_recipe, small_model):
    small_model.backbone.layers[0].mixer.D.register_hook(lambda gradient: gradient * float("inf"))
    before = weights(small_model)
    recipe = changed(recipe_dict, write_recipe, non_finite={"max_consecutive": 3})
    with pytest.raises(UserError, match=r"the gradient norm is not finite at step 4 \(4 steps in a row\)"):
        run(recipe)
    assert all(torch.equal(value, before[name]) for name, value in small_model.named_parameters())


def test_the_logits_are_never_held(run, small_recipe, small_model):
    seen = []
    small_model.register_forward_hook(lambda module, args, output: seen.append(output.logits))
    run(small_recipe, steps=1)
    assert seen == [None]


def test_clipping_scales_the_gradient_to_the_limit(run, recipe_dict, write_recipe, small_model, tmp_path):
    norms = []
    optimizer_step = torch.optim.AdamW.step

    def step(self, *args, **kwargs):
        squares = sum(p.grad.double().square().sum() for group in self.param_groups for p in group["params"])
        norms.append(squares.sqrt().item())
        return optimizer_step(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", step)
        run(changed(recipe_dict, write_recipe, clip=0.05), steps=3)
    before = [line["grad_norm"] for line in log_of(tmp_path)]
    assert min(before) > 0.05
    assert norms == pytest.approx([0.05] * 3, rel=1e-3)


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
