"""What a run shows: logs of steps and layers, figures, samples, dashboards, and that looking changes nothing."""

import json
import math
import shutil
import sys
import types

import pytest
import torch
from transformers import TrainerCallback
from transformers.integrations import integration_utils

from palimpsa_surgery.errors import UserError
from palimpsa_surgery.stages.data import Sequences, prepare
from palimpsa_surgery.stages.held_out import continuations, evaluate, octaves, positions
from palimpsa_surgery.stages.pipeline import train
from palimpsa_surgery.stages.recipe import Samples, load_recipe
from palimpsa_surgery.stages.reporting import read_lines
from palimpsa_surgery.stages.run_plots import plot_stage
from palimpsa_surgery.surgery.checkpoints import load_model
from palimpsa_surgery.surgery.layer_probe import probe_layers


@pytest.fixture
def checkpoint(finished, tmp_path):
    return shutil.copytree(finished.plan.source.path, tmp_path / "hybrid")


@pytest.fixture
def sequences(small_recipe, tokenizer, tmp_path):
    prepare(small_recipe.stages[0], tokenizer, tmp_path / "data")
    return Sequences(tmp_path / "data", small_recipe.stages[0])


def assert_same_weights(run, other):
    for path in sorted(run.glob("*/final")):
        ours, theirs = (load_model(folder).state_dict() for folder in (path, other / path.relative_to(run)))
        assert all(torch.equal(ours[name], theirs[name]) for name in ours), path


def test_octaves_cover_every_position():
    assert octaves(2) == [1, 2]
    assert octaves(9) == [1, 2, 4, 8, 9]
    assert octaves(64) == [1, 2, 4, 8, 16, 32, 64]


def test_positions_count_from_where_the_memory_is_empty():
    ids = torch.zeros(2, 6)
    assert positions({"input_ids": ids})[1].tolist() == [0, 1, 2, 3, 4, 5]
    seq_idx = torch.tensor([[0, 0, 0, 1, 1, 2], [0, 0, 0, 0, 0, 0]])
    assert positions({"input_ids": ids, "seq_idx": seq_idx}).tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]]


def test_evaluation_by_position_is_the_plain_loss_sorted(small_model, sequences):
    result = evaluate(small_model, sequences, max_tokens=10**9, batch_size=3)
    expected = {start: [] for start in octaves(32)[:-1]}
    for index in sequences.held_out:
        item = {key: value[None] for key, value in sequences[index].items()}
        labels = item.pop("labels")[0]
        logits = small_model(**item, use_cache=False).logits[0].double()
        document = 0
        for t in range(1, 32):
            document = t if item["seq_idx"][0, t] != item["seq_idx"][0, t - 1] else document
            if labels[t] != -100:
                nll = -logits[t - 1].log_softmax(-1)[labels[t]].item()
                expected[max(start for start in expected if start <= t - document)].append(nll)
    bins = result["positions"]
    assert bins["starts"] == [start for start in expected if expected[start]]
    assert bins["tokens"] == [len(values) for values in expected.values() if values]
    assert bins["loss"] == pytest.approx([sum(v) / len(v) for v in expected.values() if v], rel=1e-5)
    assert bins["perplexity"] == pytest.approx([math.exp(value) for value in bins["loss"]])
    everything = [nll for values in expected.values() for nll in values]
    assert result["loss"] == pytest.approx(sum(everything) / len(everything), rel=1e-5)
    assert result["tokens"] == len(everything)


def test_probe_is_what_the_states_say(small_model, sequences):
    ids = sequences[0]["input_ids"][None]
    (probe,) = probe_layers(small_model, ids, layers=[1])
    state = small_model(ids, return_final_states=True, use_cache=False).final_states[1].recurrent_state
    importance = state[0, :, 1].flatten(1)
    assert probe.importance_ratio == pytest.approx(importance.max().item(), rel=1e-5)
    ratios = (importance.max(1).values - importance.min(1).values) / (1 + importance.min(1).values)
    assert probe.metaplasticity_ratio == pytest.approx(ratios.mean().item(), rel=1e-5)
    mamba2, palimpsa = probe_layers(small_model, ids)
    assert (mamba2.kind, mamba2.importance_ratio, mamba2.metaplasticity_ratio) == ("mamba2", None, None)
    assert palimpsa == probe
    mixer = small_model.backbone.layers[0].mixer
    hidden = small_model.backbone.layers[0].norm(small_model.backbone.embeddings(ids))
    dt = mixer.time_step(mixer.in_proj(hidden)[..., -4:])
    windows = 1 / (1 - torch.exp(-dt.double() * mixer.decay_rate().double()))
    assert mamba2.median_window == pytest.approx(windows.flatten().median().item(), rel=1e-4)
    assert mamba2.mean_log_window == pytest.approx(windows.log().mean().item(), rel=1e-4)


def test_continuations_are_the_likeliest_and_draw_nothing(small_model, sequences, tokenizer):
    before = torch.get_rng_state()
    (sample,) = continuations(small_model, tokenizer, sequences, Samples(count=1, prompt_tokens=8, new_tokens=4))
    assert torch.equal(torch.get_rng_state(), before)
    ids = sequences[sequences.held_out[0]]["input_ids"]
    assert sample["prompt"] == tokenizer.decode(ids[:8])
    assert sample["text"] == tokenizer.decode(ids[8:12])
    read = ids[:8]
    for _ in range(4):
        token = small_model(read[None], use_cache=False).logits[0, -1].argmax()
        read = torch.cat([read, token[None]])
        if token == sequences.eos_token_id:
            break
    assert sample["generated"] == tokenizer.decode(read[8:])


def test_a_watched_run_ends_with_the_same_bits(finished, checkpoint, recipe_dict, write_recipe, tmp_path):
    samples = {"count": 1, "prompt_tokens": 8, "new_tokens": 4}
    recipe_dict["evaluation"] |= {"layers_every": 2, "samples": samples}
    run = train(checkpoint, write_recipe(recipe_dict), tmp_path / "run").plan.output
    assert_same_weights(run, finished.plan.output)
    for folder in (run / "01-first", run / "02-second"):
        steps = len(read_lines(folder / "log.jsonl"))
        lines = read_lines(folder / "layers.jsonl")
        assert [line["step"] for line in lines] == sorted({*range(0, steps + 1, 2), steps})
        for line in lines:
            (layer,) = line["layers"]
            assert layer["layer"] == 1
            assert layer["median_window"] > 1
            assert layer["metaplasticity_ratio"] > 0
        texts = json.loads((folder / "samples.json").read_text())
        assert {when: len(texts[when]) for when in texts} == {"before": 1, "after": 1}
        for name in ("loss", "layers", "positions"):
            assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    record = json.loads((run / "run.json").read_text())
    assert record["stages"][0]["after"]["positions"]["starts"][0] == 1


def test_an_interrupted_run_shows_what_it_has_and_repeats_nothing(
    finished, checkpoint, recipe_dict, write_recipe, tmp_path, monkeypatch
):
    from palimpsa_surgery.stages import reporting

    recipe_dict["evaluation"] |= {"layers_every": 1}
    recipe = write_recipe(recipe_dict)
    plain = reporting.LayerReport._look

    def dies(self, step):
        plain(self, step)
        if step == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(reporting.LayerReport, "_look", dies)
    with pytest.raises(KeyboardInterrupt):
        train(checkpoint, recipe, tmp_path / "run")
    folder = tmp_path / "run" / "01-first"
    assert [line["step"] for line in read_lines(folder / "layers.jsonl")] == [0, 1, 2, 3]
    assert not (folder / "loss.png").exists()
    monkeypatch.setattr(reporting.LayerReport, "_look", plain)
    drawn = []
    monkeypatch.setattr("palimpsa_surgery.stages.run_plots.plot_stage", lambda *given: drawn.append(given[1]["status"]))
    train(checkpoint, recipe, tmp_path / "run", stage="first")
    assert drawn == ["running", "done"]
    assert [line["step"] for line in read_lines(folder / "layers.jsonl")] == [0, 1, 2, 3, 4, 5]
    assert [line["step"] for line in read_lines(folder / "log.jsonl")] == [1, 2, 3, 4, 5]
    assert_same_weights(tmp_path / "run", finished.plan.output)


def test_figures_of_little_or_odd_data(tmp_path):
    line = {"step": 1, "loss": None, "learning_rate": 0.1}
    (tmp_path / "log.jsonl").write_text(json.dumps(line) + "\n" + '{"step": 2, "lo')
    entry = {"name": "first", "steps": 3}
    plot_stage(tmp_path, entry)
    assert [path.name for path in tmp_path.iterdir()] == ["log.jsonl"]
    (tmp_path / "log.jsonl").write_text(
        "".join(json.dumps(line | {"step": n, "loss": n % 2 or None}) + "\n" for n in (1, 2))
    )
    layer = {"layer": 0, "median_window": None, "importance_ratio": 0.0, "metaplasticity_ratio": 1.0}
    (tmp_path / "layers.jsonl").write_text(json.dumps({"step": 0, "layers": [layer]}) + "\n")
    bins = {"starts": [1], "ends": [2], "tokens": [4], "loss": [900.0], "perplexity": [math.exp(700)]}
    plot_stage(tmp_path, entry | {"before": {"loss": 900.0, "positions": bins}})
    assert {path.stem for path in tmp_path.glob("*.png")} == {"loss", "layers", "positions"}


class Dashboard(TrainerCallback):
    """Stands for TensorBoard."""

    seen: list = []  # noqa: RUF012

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.seen.append((args.run_name, state.global_step, dict(logs)))


def test_dashboards_get_losses_and_layers(checkpoint, recipe_dict, write_recipe, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "tensorboard", Dashboard)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.ModuleType("tensorboard"))
    monkeypatch.setattr(Dashboard, "seen", [])
    recipe_dict |= {"report_to": ["tensorboard"]}
    recipe_dict["evaluation"] |= {"layers_every": 4}
    train(checkpoint, write_recipe(recipe_dict), tmp_path / "run", stage="first")
    assert " tokens/s" in capfd.readouterr().err  # beside the progress bar, which terminals get
    assert {name for name, _, _ in Dashboard.seen} == {"run-01-first"}
    assert [step for _, step, logs in Dashboard.seen if "loss" in logs] == [1, 2, 3, 4, 5]
    assert [step for _, step, logs in Dashboard.seen if "layer_1/metaplasticity_ratio" in logs] == [0, 4, 5]


def test_wandb_gets_a_run_for_each_stage(monkeypatch):
    from palimpsa_surgery.stages.dashboards import check_dashboards, end_of_stage

    calls = []
    fake = types.ModuleType("wandb")
    fake.finish = lambda: calls.append("finish")
    monkeypatch.setitem(sys.modules, "wandb", fake)
    check_dashboards(["wandb"])
    end_of_stage(["wandb"])
    end_of_stage([])
    assert calls == ["finish"]


def test_what_a_dashboard_refuses_is_one_line():
    from palimpsa_surgery.stages.dashboards import one_line

    refusal = type("UsageError", (Exception,), {"__module__": "wandb.errors.errors"})
    with pytest.raises(UserError, match=r"^report_to: wandb refuses: No API key\. Log in\.$"), one_line(("wandb",)):
        raise refusal("No API key.\nLog in.")
    with pytest.raises(refusal), one_line(()):
        raise refusal("not asked for")


@pytest.mark.parametrize("name", ["tensorboard", "trackio", "wandb"])
def test_a_dashboard_that_is_not_there_stops_the_run_at_once(
    name, checkpoint, recipe_dict, write_recipe, tmp_path, monkeypatch
):
    from palimpsa_surgery.stages.dashboards import MODULES
    from palimpsa_surgery.surgery import checkpoints

    monkeypatch.setitem(sys.modules, MODULES[name], None)  # so that importing it fails
    monkeypatch.setattr(checkpoints, "load_model", lambda *_, **__: pytest.fail("weights were loaded"))
    recipe = write_recipe(recipe_dict | {"report_to": [name]})
    with pytest.raises(UserError, match=rf"report_to: {name} cannot be imported .*pip install {name}") as error:
        train(checkpoint, recipe, tmp_path / "run")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_an_unknown_dashboard_is_refused(recipe_dict, write_recipe):
    with pytest.raises(UserError, match=r"report_to\[0\]: must be 'tensorboard', 'trackio' or 'wandb', got 'excel'"):
        load_recipe(write_recipe(recipe_dict | {"report_to": ["excel"]}))
