import dataclasses
import io
import json
import math

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from safetensors.torch import load_file

from helpers import assert_close, relative_error
from palimpsa_surgery.errors import UserError
from palimpsa_surgery.surgery.analysis import Analysis, analyze
from palimpsa_surgery.surgery.checkpoints import fingerprint, load_model, load_tokenizer, open_source
from palimpsa_surgery.surgery.drift import measure_drift
from palimpsa_surgery.surgery.initialisation import calibrate_scales, draw_importance, inverse_softplus
from palimpsa_surgery.surgery.plots import replacement_report
from palimpsa_surgery.surgery.replacement import add_palimpsa_layers, replace

SHORT = "In the beginning God created the heaven and the earth. And the earth was without form, and void." * 2
NEW = ["b_rank_proj.weight", "b_proj.weight", "b_scale", "Ip_log"]


@pytest.fixture(scope="module")
def sample(tiny_checkpoint, text_file):
    """512 tokens of prose; the design's figures are of 1,024, which takes twice as long and differs little."""
    return (tuple(load_tokenizer(tiny_checkpoint)(text_file.read_text())["input_ids"][:512]),)


@pytest.fixture(scope="module")
def tiny_analysis(tiny_checkpoint, text_file, sample, tmp_path_factory):
    """The tiny checkpoint's analysis on those 512 tokens."""
    folder = tmp_path_factory.mktemp("tiny") / "windows"
    measured = analyze(tiny_checkpoint, text_file, folder, max_tokens=512, sequence_length=512)
    assert measured.calibration_sample == sample
    return measured


@pytest.fixture(scope="module")
def small_analysis(small_checkpoint, text_file, tmp_path_factory):
    """Folder of the small checkpoint's analysis, on two sequences of 60 tokens."""
    folder = tmp_path_factory.mktemp("small") / "windows"
    analyze(small_checkpoint, text_file, folder, max_tokens=120, sequence_length=60)
    return folder


@pytest.fixture(scope="module")
def tiny(tiny_checkpoint):
    return load_model(tiny_checkpoint)


def short(folder):
    """A file of about sixty tokens."""
    path = folder / "short.txt"
    path.write_text(SHORT)
    return path


def set_softplus(model, layers, value):
    """Give every head of these layers softplus(b_scale) = value."""
    for layer in layers:
        scale = -1e4 if value == 0 else math.log(math.expm1(value))
        model.backbone.layers[layer].mixer.b_scale.data.fill_(scale)


def ratios(model, *rows):
    """importance_ratio of each head by Palimpsa layer, from the states that the model carries between tokens."""
    layers, largest = model.config.palimpsa_layers, {}
    for row in rows:
        states = None
        for token in row:
            with torch.inference_mode():
                output = model.backbone(torch.tensor([[token]]), initial_states=states, return_final_states=True)
            states = output.final_states
            for layer in layers:
                importance = states[layer].recurrent_state[0, :, 1].amax((1, 2))
                largest[layer] = torch.maximum(largest.get(layer, importance), importance)
    return {layer: value / model.backbone.layers[layer].mixer.Ip_log.exp() for layer, value in largest.items()}


# The hybrid as its source


def test_kept_parameters_are_copied_bit_for_bit(tiny_checkpoint, tiny_analysis, tmp_path):
    brief = dataclasses.replace(tiny_analysis, calibration_sample=(tiny_analysis.calibration_sample[0][:100],))
    done = replace(tiny_checkpoint, tmp_path / "hybrid", analysis=brief, top_k=4)
    assert done.layers == tuple(sorted(tiny_analysis.top_layers(4))) == (4, 7, 8, 11)
    before = torch.load(tiny_checkpoint / "pytorch_model.bin", weights_only=True)
    after = load_file(tmp_path / "hybrid" / "model.safetensors")
    new = {f"backbone.layers.{layer}.mixer.{name}" for layer in done.layers for name in NEW}
    kept = {key.replace("embedding.", "embeddings."): value for key, value in before.items() if key != "lm_head.weight"}
    assert set(after) - {"lm_head.weight"} == set(kept) | new
    for key, value in kept.items():
        assert after[key].dtype == value.dtype == torch.float16
        assert torch.equal(after[key], value), key
    assert {after[key].dtype for key in new} == {torch.float16}
    config = json.loads((tmp_path / "hybrid" / "config.json").read_text())
    assert (config["model_type"], config["palimpsa_layers"]) == ("palimpsa_mamba2", [4, 7, 8, 11])

    assert 0.09 < done.drift.max_importance_ratio < 0.1
    assert 0 < done.drift.relative < 0.01


def test_no_importance_gives_the_source_and_some_importance_does_not(tiny, sample):
    layers, ids = [4, 7, 8, 11], torch.tensor(sample)[:, :200]
    hybrid = add_palimpsa_layers(tiny, layers, seed=0, dtype=torch.float16)
    with torch.inference_mode():
        expected = tiny(ids).logits
        set_softplus(hybrid, layers, 0.0)
        assert_close(hybrid(ids).logits, expected, 1e-6)
        set_softplus(hybrid, layers, 0.1)
        assert relative_error(hybrid(ids).logits, expected) > 1e-3


@pytest.mark.parametrize(
    ("importance", "relative", "kl"),
    [(0.01, 9e-4, 2e-6), (0.1, 8e-3, 2e-4), (None, 5e-2, 7e-3)],
    ids=["softplus-0.01", "softplus-0.1", "paper"],
)
def test_drift_of_the_tiny_checkpoint(importance, relative, kl, tiny, tiny_analysis):
    """The figures measured when the project was designed, with other draws of the projections."""
    layers = sorted(tiny_analysis.top_layers(4))
    hybrid = add_palimpsa_layers(tiny, layers, seed=0, dtype=torch.float32)
    if importance is not None:
        set_softplus(hybrid, layers, importance)
    drift = measure_drift(tiny, hybrid, tiny_analysis.calibration_sample, layers)
    assert drift.tokens == 512
    assert relative / 2 < drift.relative < relative * 2
    assert kl / 3 < drift.kl < kl * 3
    if importance is None:
        assert 2 < drift.max_importance_ratio < 10


def test_drift_is_what_the_logits_say(small_checkpoint, sample):
    source = load_model(small_checkpoint)
    hybrid = add_palimpsa_layers(source, [0, 2], seed=3, dtype=torch.float32)
    rows = (sample[0][:50], sample[0][50:80])
    drift = measure_drift(source, hybrid, rows, [0, 2])
    with torch.inference_mode():
        before, after = (
            torch.cat([model(torch.tensor([row])).logits[0].double() for row in rows]) for model in (source, hybrid)
        )
    p, q = before.log_softmax(-1), after.log_softmax(-1)
    assert drift.tokens == 80
    assert drift.relative == pytest.approx(relative_error(after, before), rel=1e-6)
    assert drift.kl == pytest.approx((p.exp() * (p - q)).sum(-1).mean().item(), rel=1e-4)
    largest = torch.stack(list(ratios(hybrid, *rows).values())).max().item()
    assert drift.max_importance_ratio == pytest.approx(largest, rel=1e-3)


def test_top_k_0_converts_without_text_or_analysis(tiny_checkpoint, tiny, sample, tmp_path):
    done = replace(tiny_checkpoint, tmp_path / "control", top_k=0)
    assert (done.layers, done.drift, done.init) == ((), None, {})
    config = json.loads((tmp_path / "control" / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("mamba2", ["Mamba2ForCausalLM"])
    control = load_model(tmp_path / "control")
    assert fingerprint(control) == fingerprint(tiny) == done.base_fingerprint
    ids = torch.tensor(sample)[:, :100]
    with torch.inference_mode():
        assert torch.equal(control(ids).logits, tiny(ids).logits)
    record = json.loads((tmp_path / "control" / "surgery.json").read_text())
    assert (record["palimpsa_layers"], record["drift"], record["analysis"]) == ([], None, None)
    assert not (tmp_path / "control" / "analysis.json").exists()
    assert len(load_tokenizer(tmp_path / "control")) == len(load_tokenizer(tiny_checkpoint))


def test_a_hybrid_can_have_more_layers_replaced(make_checkpoint, tmp_path):
    hybrid = make_checkpoint(palimpsa_layers=[1])
    done = replace(hybrid, tmp_path / "more", layers=[2], data=short(tmp_path), importance_target=0.05)
    assert (done.layers, done.palimpsa_layers) == ((2,), (1, 2))
    before, after = load_model(hybrid).state_dict(), load_model(tmp_path / "more").state_dict()
    assert set(after) - set(before) == {f"backbone.layers.2.mixer.{name}" for name in NEW}
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert done.drift.max_importance_ratio < 0.05


# Initialisation


def test_draws_follow_the_paper(tiny_checkpoint):
    config = open_source(tiny_checkpoint).config
    drawn = draw_importance(config, 3, seed=0)
    rank = config.importance_rank
    assert {name: tuple(value.shape) for name, value in drawn.items()} == {
        "b_rank_proj.weight": (rank, 256),
        "b_proj.weight": (512, rank),
        "b_scale": (8,),
        "Ip_log": (8,),
    }
    assert 0.1 <= drawn["b_scale"].min() < drawn["b_scale"].max() <= 1.0
    assert drawn["b_rank_proj.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    bound = rank**-0.5
    assert drawn["b_proj.weight"].abs().max().item() == pytest.approx(bound, rel=0.01)
    assert drawn["b_proj.weight"].std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)
    assert not drawn["Ip_log"].any()


def test_draws_depend_on_seed_and_layer_alone(small_checkpoint):
    source = load_model(small_checkpoint)

    def drawn(layers, seed):
        mixer = add_palimpsa_layers(source, layers, seed=seed, dtype=torch.float32).backbone.layers[1].mixer
        return torch.cat([mixer.get_parameter(name).flatten() for name in NEW])

    torch.manual_seed(1)
    first = drawn([1], 0)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    assert torch.equal(first, drawn([0, 1, 2], 0))
    assert torch.equal(state, torch.get_rng_state()), "the global generator is left alone"
    assert not torch.equal(first, drawn([1], 1))
    config = source.config
    assert not torch.equal(draw_importance(config, 0, 0)["b_scale"], draw_importance(config, 1, 0)["b_scale"])


@pytest.mark.parametrize("value", [1e-300, 1e-30, 1e-6, 0.1, 1.0, 40.0, 800.0])
def test_inverse_softplus(value):
    inverse = inverse_softplus(torch.tensor([value], dtype=torch.float64))
    assert inverse.isfinite().all()
    back = math.exp(inverse) if value < 1e-10 else F.softplus(inverse).item()  # softplus rounds e^x to x there
    assert back == pytest.approx(value, rel=1e-9)


@pytest.mark.parametrize(
    ("dtype", "target"),
    [(torch.float32, 0.1), (torch.float16, 0.1), (torch.bfloat16, 0.1), (torch.float16, 1e-5), (torch.float32, 0.5)],
    ids=str,
)
def test_the_target_holds_after_rounding(dtype, target, make_checkpoint, tmp_path):
    checkpoint = make_checkpoint(dtype=dtype)
    done = replace(checkpoint, tmp_path / "hybrid", layers=[0, 1, 2], data=short(tmp_path), importance_target=target)
    hybrid = load_model(tmp_path / "hybrid")
    assert open_source(tmp_path / "hybrid").dtype == dtype
    ids = load_tokenizer(checkpoint)(SHORT)["input_ids"]
    largest = torch.cat(list(ratios(hybrid, ids).values()))
    assert (largest < target).all()
    assert (largest > target * (0.9 if dtype == torch.bfloat16 else 0.95)).all(), "every head comes close"
    assert done.drift.max_importance_ratio == pytest.approx(largest.max().item(), rel=1e-3)
    assert measure_drift(load_model(checkpoint), hybrid, [ids], [0, 1, 2]) == done.drift, "what is written was measured"


def test_calibration_agrees_with_the_states_the_model_carries(small_checkpoint, sample):
    ids = sample[0][:90]
    source = load_model(small_checkpoint)
    hybrid = add_palimpsa_layers(source, [0, 2], seed=0, dtype=torch.float32)
    calibrate_scales(hybrid, [ids[:40], ids[40:]], [0, 2], 0.1, torch.float32)
    for layer, largest in ratios(hybrid, ids[:40], ids[40:]).items():
        assert (largest < 0.1).all()
        assert (largest > 0.095).all(), "each head has the largest scale, not only the first to reach the target"
        assert hybrid.backbone.layers[layer].mixer.b_scale.unique().numel() == 4


def test_strong_importance_still_settles_below_its_target(small_checkpoint, sample):
    """Later layers' inputs then depend on earlier layers' scales."""
    hybrid = add_palimpsa_layers(load_model(small_checkpoint), [0, 1, 2], seed=0, dtype=torch.float32)
    calibrate_scales(hybrid, [sample[0][:60]], [0, 1, 2], 1000.0, torch.float32)
    assert all((largest < 1000.0).all() for largest in ratios(hybrid, sample[0][:60]).values())


def test_a_head_that_writes_nothing_gets_a_finite_scale(make_checkpoint, tmp_path):
    def silence(model):
        model.backbone.layers[1].mixer.dt_bias[:2] = -1e4  # dt is zero

    done = replace(make_checkpoint(silence), tmp_path / "hybrid", layers=[1], data=short(tmp_path))
    scales = load_model(tmp_path / "hybrid").backbone.layers[1].mixer.b_scale
    assert scales[:2].tolist() == [1.0, 1.0]
    assert scales.isfinite().all()
    assert done.drift.max_importance_ratio < 0.1


# Records, refusals


def test_what_is_written_down(small_checkpoint, small_analysis, tmp_path):
    done = replace(small_checkpoint, tmp_path / "hybrid", analysis=small_analysis, top_k=2, seed=5)
    files = {path.name for path in (tmp_path / "hybrid").iterdir()}
    assert {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "surgery.json",
        "analysis.json",
        "windows.png",
    } <= files
    record = json.loads((tmp_path / "hybrid" / "surgery.json").read_text())
    windows = Analysis.load(small_analysis).median_windows
    assert record == {
        "version": 1,
        "base_model": str(small_checkpoint),
        "base_kind": "mamba2",
        "base_fingerprint": fingerprint(load_model(small_checkpoint)),
        "fingerprint": fingerprint(load_model(tmp_path / "hybrid")),
        "palimpsa_layers": list(done.layers),
        "replaced_layers": list(done.layers),
        "init": {"kind": "calibrated", "importance_target": 0.1, "seed": 5},
        "analysis": {"median_windows": {str(i): window for i, window in enumerate(windows)}, "tokens": 120},
        "drift": dataclasses.asdict(done.drift),
        "parameters": {"copied": done.ledger.parameters["copied"], "new": 2 * (2 * 32 + 64 * 2 + 4 + 4), "dropped": 0},
    }
    assert record["drift"]["tokens"] == 120
    assert Analysis.load(tmp_path / "hybrid") == Analysis.load(small_analysis)


def test_text_may_replace_the_sample_of_the_analysis(small_checkpoint, small_analysis, tmp_path):
    options = {"analysis": small_analysis, "top_k": 1, "dry_run": True}
    tokens = len(load_tokenizer(small_checkpoint)(SHORT)["input_ids"])
    assert replace(small_checkpoint, data=short(tmp_path), **options).drift.tokens == tokens != 120
    assert replace(small_checkpoint, **options).drift.tokens == 120


def test_paper_init_needs_no_text_and_says_that_drift_was_not_measured(small_checkpoint, tmp_path):
    done = replace(small_checkpoint, tmp_path / "hybrid", layers=[1], init="paper")
    assert done.drift is None
    record = json.loads((tmp_path / "hybrid" / "surgery.json").read_text())
    assert record["drift"] is None
    assert record["init"] == {"kind": "paper", "b_scale": [0.1, 1.0], "seed": 0}
    assert torch.equal(
        load_model(tmp_path / "hybrid").backbone.layers[1].mixer.b_scale,
        draw_importance(done.source.config, 1, 0)["b_scale"],
    )


def test_a_dry_run_writes_nothing(small_checkpoint, small_analysis, tmp_path):
    done = replace(small_checkpoint, tmp_path / "hybrid", analysis=small_analysis, top_k=1, dry_run=True)
    assert done.output is None
    assert done.drift.relative > 0
    assert list(tmp_path.iterdir()) == []


def test_too_much_drift_is_refused(small_checkpoint, small_analysis, tmp_path):
    options = {"analysis": small_analysis, "top_k": 2}
    drift = replace(small_checkpoint, dry_run=True, **options).drift.relative
    with pytest.raises(UserError, match=r"differ from the source's by .* relative, more than the limit of"):
        replace(small_checkpoint, tmp_path / "hybrid", max_drift=drift * 0.99, **options)
    assert list(tmp_path.iterdir()) == []
    replace(small_checkpoint, tmp_path / "hybrid", max_drift=drift * 1.01, **options)


def test_a_checkpoint_without_a_tokenizer_is_converted_without_one(
    make_checkpoint, small_analysis, text_file, tmp_path
):
    bare = make_checkpoint()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (bare / name).unlink()
    done = replace(bare, tmp_path / "hybrid", analysis=small_analysis, top_k=1)
    assert any("no tokenizer" in note for note in done.notes)
    assert not (tmp_path / "hybrid" / "tokenizer.json").exists()
    with pytest.raises(UserError, match="has no tokenizer"):
        replace(bare, tmp_path / "other", layers=[1], data=short(tmp_path))


MISTAKES = {
    "no rule": ({}, "top_k must be from 0 to 3, the number of layers; got 8"),
    "two rules": ({"top_k": 1, "layers": [1]}, "got top_k, layers"),
    "too many": ({"top_k": 4}, "top_k must be from 0 to 3, the number of layers; got 4"),
    "no such layer": ({"layers": [3]}, "layers must be from 0 to 2, got 3"),
    "none that long": ({"min_window": 1e9}, "no layer has a window of at least 1e"),
    "no analysis": ({"top_k": 1, "analysis": None}, "top_k needs an analysis"),
    "no text": ({"layers": [1], "analysis": None}, 'init "calibrated" needs text'),
    "drift without text": (
        {"layers": [1], "analysis": None, "init": "paper", "max_drift": 0.1},
        "max_drift needs text",
    ),
    "unknown init": ({"top_k": 1, "init": "zero"}, "init must be one of calibrated, paper; got 'zero'"),
    "target": ({"top_k": 1, "importance_target": 0}, "importance_target must be at least 1e-12 and finite, got 0"),
    "NaN target": ({"top_k": 1, "importance_target": math.nan}, "got nan"),
    "negative drift": ({"top_k": 1, "max_drift": -1.0}, "max_drift must be at least 0, got -1.0"),
    "NaN drift": ({"top_k": 1, "max_drift": math.nan}, "max_drift must be at least 0, got nan"),
    "seed": ({"top_k": 1, "seed": -1}, "seed must be at least 0, got -1"),
    "missing analysis": ({"top_k": 1, "analysis": "./missing"}, "there is no analysis at"),
    "missing data": ({"top_k": 1, "data": ["./missing.txt"]}, "missing.txt does not exist"),
    "missing model": ({"top_k": 1, "model": "./missing"}, "missing"),
    "device": ({"top_k": 1, "device": "warp"}, "device 'warp' cannot be used"),
    "no output": ({"top_k": 1, "output": None}, "no output folder given"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_leave_nothing_behind(name, small_checkpoint, small_analysis, tmp_path):
    options, message = MISTAKES[name]
    arguments = {"model": small_checkpoint, "output": tmp_path / "hybrid", "analysis": small_analysis, **options}
    with pytest.raises(UserError, match=message) as caught:
        replace(**arguments)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_an_analysis_of_another_model_is_refused(
    make_checkpoint, small_analysis, tiny_analysis, small_checkpoint, tmp_path
):
    def change(model):
        model.backbone.layers[0].mixer.D += 1e-3

    with pytest.raises(UserError, match=r"the analysis is of another model: it measured .*, whose weights differ"):
        replace(make_checkpoint(change), tmp_path / "hybrid", analysis=small_analysis, top_k=1)
    with pytest.raises(UserError, match="the analysis has 12 layers, the model 3"):
        replace(small_checkpoint, tmp_path / "hybrid", analysis=tiny_analysis, top_k=1)
    beyond = dataclasses.replace(Analysis.load(small_analysis), calibration_sample=((1, 4096),))
    with pytest.raises(UserError, match="token 4096, beyond the vocabulary"):
        replace(small_checkpoint, tmp_path / "hybrid", analysis=beyond, top_k=1)
    assert list(tmp_path.iterdir()) == []


def test_a_failure_while_writing_leaves_nothing_behind(small_checkpoint, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr("palimpsa_surgery.surgery.replacement.save_checkpoint", fail)
    with pytest.raises(OSError, match="disk full"):
        replace(small_checkpoint, tmp_path / "hybrid", top_k=0)
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_is_not_empty_is_refused_and_then_replaced(small_checkpoint, tmp_path):
    (tmp_path / "keep").write_text("precious")
    with pytest.raises(UserError, match="is not empty"):
        replace(small_checkpoint, tmp_path, top_k=0)
    assert [path.name for path in tmp_path.iterdir()] == ["keep"]
    replace(small_checkpoint, tmp_path, top_k=0, overwrite=True)
    assert not (tmp_path / "keep").exists()
    assert (tmp_path / "config.json").exists()


def test_the_report_says_when_the_papers_score_differs(small_checkpoint, small_analysis):
    measured = Analysis.load(small_analysis)
    longest, other = measured.top_layers(2)

    def report(score):
        layers = tuple(dataclasses.replace(layer, paper_median_window=score(layer)) for layer in measured.layers)
        changed = dataclasses.replace(measured, layers=layers)
        done = replace(small_checkpoint, analysis=changed, top_k=1, init="paper", dry_run=True)
        printed = io.StringIO()
        Console(width=80, file=printed).print(replacement_report(done))
        return printed.getvalue()

    assert "paper's score" not in report(lambda layer: layer.median_window)
    differing = report(lambda layer: 1e6 if layer.layer == other else layer.median_window)
    assert f"The paper's score would select layer {other} instead of layer {longest}." in differing
