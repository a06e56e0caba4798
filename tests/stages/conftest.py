"""Recipes, data and models small enough to train in seconds."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from transformers import PreTrainedTokenizerFast

from palimpsa_surgery.hf_models import PalimpsaMamba2Config, PalimpsaMamba2ForCausalLM
from palimpsa_surgery.stages.pipeline import Run, train
from palimpsa_surgery.stages.recipe import Recipe, load_recipe
from palimpsa_surgery.surgery.checkpoints import save_checkpoint


@pytest.fixture(scope="session")
def tokenizer(tiny_checkpoint) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_file=str(tiny_checkpoint / "tokenizer.json"), eos_token="<|endoftext|>")


def make_small_model() -> PalimpsaMamba2ForCausalLM:
    """Two layers, the second a Palimpsa layer, with the shipped tokenizer's vocabulary."""
    torch.manual_seed(0)
    config = PalimpsaMamba2Config(
        vocab_size=4096,
        hidden_size=32,
        num_hidden_layers=2,
        expand=2,
        head_dim=16,
        num_heads=4,
        n_groups=1,
        state_size=8,
        chunk_size=16,
        tie_word_embeddings=True,
        palimpsa_layers=[1],
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    return PalimpsaMamba2ForCausalLM(config).eval()


def make_recipe(text_file: Path) -> dict:
    """A valid recipe of two short stages."""
    stage = {
        "name": "first",
        "data": {"kind": "text", "files": [str(text_file)], "held_out": 0.1},
        "sequence_length": 32,
        "batch_tokens": 64,
        "tokens": 320,
        "learning_rate": 1e-3,
        "importance_learning_rate": 1e-2,
    }
    return {
        "name": "small",
        "checkpoint_steps": 2,
        "evaluation": {"tokens": 128, "layers_every": None},
        "stages": [stage, stage | {"name": "second", "sequence_length": 64}],
    }


@pytest.fixture
def small_model() -> PalimpsaMamba2ForCausalLM:
    return make_small_model()


@pytest.fixture(scope="session")
def text_file(tmp_path_factory, kjv: Path) -> Path:
    """Forty verses, one document each. Tests leave it as it is."""
    path = tmp_path_factory.mktemp("text") / "verses.jsonl"
    verses = kjv.read_text(encoding="utf-8").splitlines()[:40]
    path.write_text("".join(json.dumps({"text": verse}) + "\n" for verse in verses))
    return path


@pytest.fixture
def recipe_dict(text_file: Path) -> dict:
    """A valid recipe, to be changed by a test."""
    return make_recipe(text_file)


@pytest.fixture
def write_recipe(tmp_path: Path):
    """Write a recipe as YAML and return its path."""

    def write(content: dict | str, name: str = "recipe.yaml") -> Path:
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False))
        return path

    return write


@pytest.fixture
def small_recipe(recipe_dict, write_recipe) -> Recipe:
    return load_recipe(write_recipe(recipe_dict))


@pytest.fixture(scope="session")
def finished(tmp_path_factory, text_file, tokenizer) -> Run:
    """A run that nothing interrupted, beside its `hybrid` and `recipe.yaml`. Tests leave it as it is."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "hybrid").mkdir()
    save_checkpoint(make_small_model(), folder / "hybrid", tokenizer=tokenizer, dtype=torch.float16)
    surgery = {"version": 1, "base_model": "/models/small-mamba2", "init": {"kind": "calibrated"}}
    (folder / "hybrid" / "surgery.json").write_text(json.dumps(surgery))
    (folder / "recipe.yaml").write_text(yaml.safe_dump(make_recipe(text_file)))
    return train(folder / "hybrid", folder / "recipe.yaml", folder / "run")
