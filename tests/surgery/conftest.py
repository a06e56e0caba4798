"""Small checkpoints for the tests of the surgery."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from palimpsa_surgery.hf_models import PalimpsaMamba2Config, PalimpsaMamba2ForCausalLM
from palimpsa_surgery.surgery.checkpoints import load_tokenizer, save_checkpoint


@pytest.fixture(scope="session")
def make_checkpoint(tiny_checkpoint, tmp_path_factory) -> Callable[..., Path]:
    """Write a random model of three layers, four heads and two groups with the tiny checkpoint's tokenizer.

    `change(model)` may alter it before it is written; further arguments go into its config.
    """

    def make(
        change: Callable[[PalimpsaMamba2ForCausalLM], None] = lambda model: None,
        *,
        dtype: torch.dtype = torch.float32,
        **config: object,
    ) -> Path:
        sizes = {"num_hidden_layers": 3, "hidden_size": 32, "num_heads": 4, "head_dim": 16, "state_size": 8}
        options = {"n_groups": 2, "vocab_size": 4096, "tie_word_embeddings": True, "chunk_size": 32}
        torch.manual_seed(0)
        model = PalimpsaMamba2ForCausalLM(PalimpsaMamba2Config(**sizes | options | config))
        with torch.no_grad():
            change(model)
        folder = tmp_path_factory.mktemp("checkpoint")
        save_checkpoint(model, folder, tokenizer=load_tokenizer(tiny_checkpoint), dtype=dtype)
        return folder

    return make


@pytest.fixture(scope="session")
def small_checkpoint(make_checkpoint) -> Path:
    """The random model of three layers, none of them a Palimpsa layer."""
    return make_checkpoint()


@pytest.fixture(scope="session")
def text_file(kjv, tmp_path_factory) -> Path:
    """About 4,000 tokens of prose."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(kjv.read_text()[:12_000])
    return path
