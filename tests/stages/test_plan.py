"""The plan: what it says of sources, memory and disk, from configuration alone."""

import io
import json
import re

import pytest
from rich.console import Console

from palimpsa_surgery.errors import UserError
from palimpsa_surgery.stages.pipeline import train
from palimpsa_surgery.stages.recipe import load_recipe
from palimpsa_surgery.surgery import hub
from palimpsa_surgery.surgery.checkpoints import open_config

NATIVE = {
    "d_model": 2560,
    "d_intermediate": 0,
    "n_layer": 64,
    "vocab_size": 50277,
    "ssm_cfg": {"layer": "Mamba2"},
    "attn_layer_idx": [],
    "attn_cfg": {},
    "rms_norm": True,
    "residual_in_fp32": True,
    "fused_add_norm": True,
    "pad_vocab_size_multiple": 16,
    "tie_embeddings": True,
}


@pytest.fixture
def config_only(tmp_path):
    """A folder that holds the config of mamba2-2.7b and nothing else."""

    def make(**changes):
        (tmp_path / "mamba2-2.7b").mkdir()
        (tmp_path / "mamba2-2.7b" / "config.json").write_text(json.dumps(NATIVE | changes))
        return tmp_path / "mamba2-2.7b"

    return make


@pytest.fixture
def hybrid_config(config_only, tmp_path):
    """The same as `replace` would have written it, without the weights."""
    config = open_config(config_only()).config
    config.palimpsa_layers = list(range(8, 16))
    config.save_pretrained(tmp_path / "hybrid")
    surgery = {"version": 1, "base_model": "state-spaces/mamba2-2.7b", "init": {"kind": "calibrated"}}
    (tmp_path / "hybrid" / "surgery.json").write_text(json.dumps(surgery))
    return tmp_path / "hybrid"


def printed(plan) -> str:
    console = Console(width=80, file=io.StringIO())
    console.print(plan)
    return console.file.getvalue()


def test_plan_of_the_baseline_needs_a_config_and_no_network(config_only, tmp_path):
    plan = train(config_only(), "mamba2-2.7b-baseline", tmp_path / "run", dry_run=True).plan
    assert not (tmp_path / "run").exists()
    assert plan.parameters == 2_702_599_680
    assert [(part.steps, part.tokens) for part in plan.stages] == [
        (9536, 9_999_220_736),
        (1192, 4_999_610_368),
        (120, 125_829_120),
    ]
    for part in plan.stages:
        assert part.optimizer_bytes == 16 * plan.parameters
        assert sum(source.share for source in part.sources) == pytest.approx(1)
        total = sum(source.tokens for source in part.sources)
        assert part.tokens < total <= 1.02 * part.tokens
        assert 2 * total <= part.data_bytes + 10 <= 2.2 * total
    # transformers' own Mamba2 of this size, whose norms and convolution keep more, took 24 GiB of an H200 beyond 10 of
    # bfloat16 weights and gradients. What stays of 64 layers are their inputs in float32, and one is formed again.
    activations = plan.stages[1].activations
    assert activations.checkpointed < 24 * 2**30
    assert activations.checkpointed == pytest.approx(64 * 32768 * 2560 * 4 + activations.kept / 64, rel=0.05)
    text = printed(plan)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    joined = " ".join(text.split())
    for words in (
        "FineWeb-Edu 70.0% 7.000B",
        "The weights are not here: neither read nor checked.",
        "a checkpoint to go on from takes 30.2 GiB, a finished stage 10.1 GiB",
        "Download: about 54.5 GiB of text (uncompressed), and more where a filter or part drops rows, streamed from "
        "HuggingFaceFW/fineweb-edu @ main",
        "Yukang/LongAlpaca-12k @ main.",
    ):
        assert words in joined, words


def test_the_plan_says_what_is_downloaded_of_a_checkpoint_of_the_hub(config_only, tmp_path, monkeypatch):
    folder = config_only()
    monkeypatch.setattr(hub, "snapshot_download", lambda name, allow_patterns: str(folder))
    plan = train("me/mamba2-2.7b", "mamba2-2.7b-baseline", tmp_path / "run", dry_run=True).plan
    assert "The weights of me/mamba2-2.7b are not checked yet" in " ".join(plan.notes)
    assert "will be downloaded: about 5.0 GiB in 16 bits" in " ".join(plan.notes)


def test_plan_of_the_hybrid(hybrid_config, tmp_path):
    plan = train(hybrid_config, "mamba2-2.7b", tmp_path / "run", dry_run=True).plan
    assert "in different ways" not in " ".join(plan.notes), "no stage reads what another holds out"
    groups = {treatment.group: count for treatment, (_, count) in plan.groups.items()}
    assert groups["importance projections"] == 8 * 160 * (2560 + 5120)
    assert groups["importance scale b_scale"] == groups["frozen Ip_log"] == 8 * 80
    assert plan.stages[0].optimizer_bytes == 16 * plan.parameters - 12 * 8 * 80
    assert max(map(len, printed(plan).splitlines())) <= 80


def test_the_two_recipes_do_not_suit_each_others_model(hybrid_config, tmp_path):
    with pytest.raises(UserError, match="palimpsa_layers is 8 where the recipe expects 0"):
        train(hybrid_config, "mamba2-2.7b-baseline", tmp_path / "run", dry_run=True)


def test_the_baseline_differs_in_the_model_alone():
    hybrid, baseline = (load_recipe(name).model_dump() for name in ("mamba2-2.7b", "mamba2-2.7b-baseline"))
    assert {key for key in hybrid if hybrid[key] != baseline[key]} == {"name", "description", "model"}
    assert baseline["model"]["palimpsa_layers"] == 0


def test_what_training_needs_is_still_there(config_only, tmp_path):
    with pytest.raises(UserError, match="holds no weights"):
        train(config_only(), "demo", tmp_path / "run")


def test_a_config_of_too_many_layers_is_refused(config_only, tmp_path):
    with pytest.raises(UserError, match="100000 layers are more than the 1024"):
        train(config_only(n_layer=100_000), "demo", tmp_path / "run", dry_run=True)


def test_sources_of_local_files(recipe_dict, write_recipe, finished, tmp_path):
    recipe_dict["stages"][0]["data"] = recipe_dict["stages"][0]["data"] | {"max_tokens": 200}
    recipe = load_recipe(write_recipe(recipe_dict))
    plan = train(finished.plan.source.path, recipe, tmp_path / "run", dry_run=True).plan
    first, second = (part.sources[0] for part in plan.stages)
    assert (first.name, first.origin, first.tokens, first.hub) == ("verses.jsonl", "verses.jsonl", 200, False)
    assert second.tokens == 64 + 320
    assert not re.search(r"Download|Hub", printed(plan))


CODE = {"kind": "text", "files": ["code.jsonl"]}


def part(column: str, start: float, end: float) -> dict:
    return {"by": column, "range": [start, end]}


@pytest.mark.parametrize(
    ("first", "second", "noted"),
    [
        ({}, {}, False),
        ({}, {"filter": {"language": "C++"}}, True),
        ({}, {"group_by": "repo"}, True),
        ({"filter": {"language": ["C", "C++"]}}, {"filter": {"language": ["C++", "Go"]}}, True),
        ({"filter": {"language": ["C"]}}, {"filter": {"language": "C++"}}, False),
        ({"part": part("repo", 0, 0.5)}, {"part": part("repo", 0.4, 1)}, True),
        ({"part": part("repo", 0.5, 1)}, {"part": part("language", 0, 0.5)}, True),
        ({"part": part("repo", 0.5, 1)}, {"part": part("repo", 0, 0.5), "group_by": "repo"}, False),
        ({}, {"held_out": 0.3}, True),
        ({}, {"files": ["other.jsonl"]}, False),
    ],
    ids=[
        *("alike", "filter", "group", "filters-meet", "filters-apart", "parts-meet", "other-parts", "parts-apart"),
        *("more-held-out", "other-file"),
    ],
)
def test_text_that_one_stage_holds_out_and_another_reads_is_noted(
    recipe_dict, write_recipe, finished, tmp_path, first, second, noted
):
    for name in ("code.jsonl", "other.jsonl"):
        (tmp_path / name).write_text('{"text": "a", "language": "C", "repo": "r"}\n')
    one, other = recipe_dict["stages"]
    one |= {"data": CODE | first, "sequence_length": 64}
    other["data"] = {"kind": "mixture", "sources": [CODE | second | {"share": 1.0}]}
    if not noted or "held_out" in second:
        other["data"] = CODE | second
    recipe = load_recipe(write_recipe(recipe_dict))
    plan = train(finished.plan.source.path, recipe, tmp_path / "run", dry_run=True).plan
    assert ("Stages first and second read code.jsonl in different ways" in " ".join(plan.notes)) is noted


@pytest.mark.parametrize("apart", [False, True])
def test_a_set_that_one_stage_reads_twice_is_noted(recipe_dict, write_recipe, finished, tmp_path, apart):
    (tmp_path / "code.jsonl").write_text('{"text": "a", "language": "C", "repo": "r"}\n')
    halves = [{"part": part("repo", 0, 0.5)}, {"part": part("repo", 0.5, 1)}] if apart else [{}, {"group_by": "repo"}]
    recipe_dict["stages"] = recipe_dict["stages"][:1]
    recipe_dict["stages"][0]["data"] = {"kind": "mixture", "sources": [CODE | half | {"share": 0.5} for half in halves]}
    recipe = load_recipe(write_recipe(recipe_dict))
    notes = " ".join(train(finished.plan.source.path, recipe, tmp_path / "run", dry_run=True).plan.notes)
    assert ("Stage first reads code.jsonl through several sources: what one holds out" in notes) is not apart
