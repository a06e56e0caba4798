"""LoRA: adapters that learn beside Palimpsa layers trained in full, and that end as plain weights."""

import json
import sys

import pytest
import torch

from helpers import assert_close
from palimpsa_surgery.errors import UserError
from palimpsa_surgery.hf_models import PalimpsaMamba2ForCausalLM
from palimpsa_surgery.stages.lora import add_adapters, merge_adapters
from palimpsa_surgery.stages.optimisation import ADAPTERS, BESIDE_ADAPTERS, parameters_by_treatment
from palimpsa_surgery.stages.pipeline import train
from palimpsa_surgery.stages.recipe import Lora, load_recipe
from palimpsa_surgery.stages.trainer import StageTrainer
from palimpsa_surgery.surgery import checkpoints
from palimpsa_surgery.surgery.checkpoints import load_model, open_source

LORA = {"rank": 4, "alpha": 8.0, "dropout": 0.1}
ADAPTED = {f"backbone.layers.0.mixer.{name}.weight" for name in ("in_proj", "out_proj")}


@pytest.fixture
def recipe_of(recipe_dict, write_recipe):
    """One stage that trains adapters, fast enough for its loss to fall."""

    def make(lora=LORA, **fields):
        stage = recipe_dict["stages"][0] | {"lora": lora, "learning_rate": 1e-2, "tokens": 640} | fields
        return load_recipe(write_recipe(recipe_dict | {"stages": [stage]}))

    return make


@pytest.fixture
def hybrid(finished):
    """The small model as a checkpoint: layer 0 is kept, layer 1 is a Palimpsa layer."""
    return finished.plan.source.path


@pytest.fixture
def adapted(small_model) -> tuple[PalimpsaMamba2ForCausalLM, object]:
    """The small model with adapters that do something."""
    adapters = add_adapters(small_model, Lora.model_validate(LORA))
    torch.manual_seed(1)
    for name, parameter in small_model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return small_model, adapters


def test_a_stage_trains_adapters_and_palimpsa_layers_and_nothing_else(hybrid, recipe_of, tmp_path, monkeypatch):
    moved = {}
    original = StageTrainer.train

    def watched(self, *args, **kwargs):
        before = {name: value.detach().clone() for name, value in self.model.named_parameters()}
        original(self, *args, **kwargs)
        moved.update({name: not torch.equal(v, before[name]) for name, v in self.model.named_parameters()})

    monkeypatch.setattr(StageTrainer, "train", watched)
    run = train(hybrid, recipe_of(), tmp_path / "run")
    assert sum("lora_" in name for name in moved) == 4
    for name, did in moved.items():
        trained = "lora_" in name or (name.startswith("backbone.layers.1.") and not name.endswith("Ip_log"))
        assert did == trained, name

    stage = run.record["stages"][0]
    assert stage["after"]["loss"] < stage["before"]["loss"]
    losses = [
        json.loads(line)["loss"] for line in (run.plan.output / "01-first" / "log.jsonl").read_text().splitlines()
    ]
    assert losses[-1] < losses[0]
    final, start = load_model(open_source(run.final)).state_dict(), load_model(open_source(hybrid)).state_dict()
    assert final.keys() == start.keys(), "a plain checkpoint"
    for name in start:
        changed = name in ADAPTED or (name.startswith("backbone.layers.1.") and not name.endswith("Ip_log"))
        assert torch.equal(final[name], start[name]) != changed, name


def test_adapters_alone_lower_the_loss(adapted):
    """Nothing else is trained, and no gradient is lost on the way to either matrix."""
    model, _ = adapted
    parameters = parameters_by_treatment(model)[ADAPTERS]
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for parameter in parameters:
        parameter.requires_grad_()
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    ids = torch.randint(0, 4096, (2, 32), generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(10):
        loss = model(ids, labels=ids).loss
        loss.backward()
        assert all(parameter.grad.abs().max() > 0 for parameter in parameters)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1


def test_merged_adapters_equal_the_adapted_model(adapted, tmp_path):
    model, adapters = adapted
    ids = torch.randint(0, 4096, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model.eval()(ids).logits
        adapters.disable_adapter_layers()
        plain = model(ids).logits
        adapters.enable_adapter_layers()
        assert (expected - plain).abs().max() > 1e-3, "they do something"
        merge_adapters(adapters)
        assert_close(model(ids).logits, expected, 1e-5)
        checkpoints.save_checkpoint(model, tmp_path, tokenizer=None, dtype=torch.float32)
        assert_close(load_model(open_source(tmp_path))(ids).logits, expected, 1e-5)
    assert not any("lora" in name or "base_layer" in name for name in model.state_dict())


def test_each_projection_can_be_chosen(small_model):
    add_adapters(small_model, Lora.model_validate(LORA | {"target": ("out_proj",)}))
    assert {name.split(".lora_")[0] for name, _ in small_model.named_parameters() if "lora_" in name} == {
        "backbone.layers.0.mixer.out_proj"
    }
    groups = parameters_by_treatment(small_model)
    names = {id(parameter): name for name, parameter in small_model.named_parameters()}
    frozen = {names[id(parameter)] for parameter in groups[BESIDE_ADAPTERS]}
    assert "backbone.layers.0.mixer.out_proj.base_layer.weight" in frozen
    assert "backbone.embeddings.weight" in frozen
    assert not any(name.startswith("backbone.layers.1.") for name in frozen)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
def test_interrupted_and_resumed_is_the_same_to_the_bit(hybrid, recipe_of, tmp_path, monkeypatch, checkpointing):
    """Dropout's random numbers included."""
    recipe = recipe_of(gradient_checkpointing=checkpointing, tokens=320)
    whole = train(hybrid, recipe, tmp_path / "whole")
    original, calls = StageTrainer.training_step, []

    def interrupted(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return original(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(StageTrainer, "training_step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(hybrid, recipe, tmp_path / "run")
    resumed = train(hybrid, recipe, tmp_path / "run")
    ours, theirs = (load_model(open_source(run.final)).state_dict() for run in (resumed, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert resumed.record["stages"][0]["after"] == whole.record["stages"][0]["after"]


def test_the_plan_says_what_is_trained(hybrid, recipe_of, tmp_path):
    plan = train(hybrid, recipe_of(), tmp_path / "run", dry_run=True).plan
    note = next(note for note in plan.notes if "LoRA" in note)
    adapters = 4 * (32 + 148) + 4 * (64 + 32)  # in_proj [148, 32] and out_proj [32, 64] of layer 0, rank 4
    layer = sum(
        p.numel()
        for name, p in load_model(open_source(hybrid)).named_parameters()
        if name.startswith("backbone.layers.1.") and not name.endswith("Ip_log")
    )
    assert f"trains {adapters + layer:,} parameters: {adapters:,} in LoRA adapters of rank 4" in note


def test_without_peft_one_line_before_any_weight_is_loaded(hybrid, recipe_of, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    monkeypatch.setattr(checkpoints, "load_model", lambda *args: pytest.fail("weights were loaded"))
    with pytest.raises(UserError, match=r"LoRA needs peft.*pip install") as error:
        train(hybrid, recipe_of(), tmp_path / "run")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_a_model_without_kept_layers_is_refused(small_model):
    small_model.config.palimpsa_layers = [0, 1]
    with pytest.raises(UserError, match="this model has none"):
        add_adapters(small_model, Lora.model_validate(LORA))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 0}, r"lora\.rank: must be greater"),
        ({"alpha": None}, r"lora\.alpha: must be a number"),
        ({"dropout": 1.0}, r"lora\.dropout: must be less"),
        ({"target": ["conv1d"]}, r"lora\.target\[0\]: must be 'in_proj' or 'out_proj'"),
        ({"target": []}, r"lora\.target: must not be empty"),
        ({"r": 8}, r"lora\.r: unknown key"),
    ],
)
def test_bad_settings_name_their_field(change, message, recipe_of):
    with pytest.raises(UserError, match=message):
        recipe_of(LORA | change)
