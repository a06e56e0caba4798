"""`compare`: what is measured against direct computations, and what may stand side by side."""

import dataclasses
import itertools
import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from palimpsa_surgery.errors import UserError
from palimpsa_surgery.surgery import comparison as library
from palimpsa_surgery.surgery import comparison_plots
from palimpsa_surgery.surgery.checkpoints import fingerprint, load_model, load_tokenizer
from palimpsa_surgery.surgery.comparison import Speed, bytes_of_states, compare
from palimpsa_surgery.surgery.diagnosis import Diagnosis, diagnose
from palimpsa_surgery.surgery.remembrance import state_bytes
from palimpsa_surgery.surgery.results import Score
from surgery.test_results import make_evaluation

SIZES = {"max_length": 40, "sequences": 2}


@pytest.fixture(scope="module")
def hybrid(make_checkpoint) -> Path:
    """Layer 1 of 3 is a Palimpsa layer; its other weights are those of `small_checkpoint`."""
    return make_checkpoint(palimpsa_layers=[1])


@pytest.fixture
def quick(monkeypatch):
    """No clocks: the speeds of the first, second, ... model measured."""
    speeds = itertools.cycle([Speed(40, 1000.0, 50.0), Speed(40, 800.0, 40.0)])
    monkeypatch.setattr(library, "measure_speed", lambda *_: next(speeds))


@pytest.fixture
def no_figure(monkeypatch):
    monkeypatch.setattr(library, "plot_comparison", lambda *_: None)


@pytest.fixture(scope="module")
def diagnosed(small_checkpoint, text_file, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("diagnosed") / "plain"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("palimpsa_surgery.surgery.diagnosis.plot_diagnosis", lambda *_: None)
        diagnose(small_checkpoint, text_file, folder, remembrance_points=2, remembrance_length=2, **SIZES)
    return folder


def save(folder: Path, **changes) -> Path:
    folder.mkdir()
    make_evaluation(**changes).save(folder)
    return folder


def test_models_are_measured_on_the_text(small_checkpoint, hybrid, text_file, tmp_path, quick):
    done = compare([small_checkpoint, hybrid], tmp_path / "out", data=text_file, **SIZES)
    ids = torch.tensor(load_tokenizer(hybrid)(text_file.read_text())["input_ids"][:80]).view(2, 40)
    for subject, checkpoint in zip(done.subjects, (small_checkpoint, hybrid), strict=True):
        model = load_model(checkpoint)
        with torch.inference_mode():
            logits = model(ids, use_cache=False).logits[:, :-1].flatten(0, 1).double()
        total = F.cross_entropy(logits, ids[:, 1:].flatten(), reduction="sum").item()
        assert sum(subject.loss.nll_sums) == pytest.approx(total, rel=1e-5)
        assert sum(subject.loss.tokens) == 78
        assert subject.fingerprint == fingerprint(model)
        conv = 3 * (64 + 2 * 2 * 8) * 4 * 4  # layers × channels × kernel × bytes
        assert subject.state_bytes == bytes_of_states(model) == state_bytes(model.config) + conv
    assert [subject.palimpsa_layers for subject in done.subjects] == [(), (1,)]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "comparison.json",
        "comparison.md",
        "comparison.png",
    ]
    content = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert (content["version"], content["kind"], content["dtype"]) == (1, "comparison", "float32")
    assert [model["speed"]["decode"] for model in content["models"]] == [50.0, 40.0]
    assert content["models"][1]["loss"]["nll_sums"] == list(done.subjects[1].loss.nll_sums)
    table = (tmp_path / "out" / "comparison.md").read_text().splitlines()
    assert "| decode, tokens/s | 50.0 | 40.0 | -20.0% |" in table
    first, second = (math.exp(sum(s.loss.nll_sums) / 78) for s in done.subjects)
    assert f"| 1 to 39 | {first:,.2f} | {second:,.2f} | {100 * (second / first - 1):+.1f}% |" in table


def test_speed_is_of_this_model(small_checkpoint):
    model, calls = load_model(small_checkpoint), []
    model.register_forward_hook(lambda module, arguments, output: calls.append(arguments[0].shape[1]))
    speed = library.measure_speed(model, 24)
    assert calls == [24, *[1] * 32] * 4
    assert speed.prompt_tokens == 24
    assert min(speed.prefill, speed.decode) > 0


def test_a_diagnosis_stands_beside_a_model_and_its_own_model(
    small_checkpoint, hybrid, diagnosed, text_file, tmp_path, quick, no_figure
):
    done = compare([diagnosed, hybrid, small_checkpoint], tmp_path / "out", data=text_file, **SIZES)
    plain, other = done.subjects
    assert (plain.palimpsa_layers, other.palimpsa_layers) == ((), (1,))
    assert plain.loss.nll_sums == pytest.approx(Diagnosis.load(diagnosed).loss.nll_sums, rel=1e-6)
    assert plain.speed.prefill == 800.0, "the diagnosis and the third item are one model"
    assert plain.parameters == load_model(small_checkpoint).num_parameters()


def test_results_of_one_model_become_one_column(tmp_path):
    other = (Score(name="PIQA acc_norm", value=60.0, unit="%", higher_is_better=True),)
    a = save(tmp_path / "a")
    b = save(tmp_path / "b", model="models/plain", model_fingerprint="ba5e", palimpsa_layers=())
    c = save(tmp_path / "c", preset="commonsense", scores=other, lengths=None)
    done = compare([a, c / "results.json", b], tmp_path / "out")
    assert done.labels == ["models/hybrid", "models/plain"], "as ids of the Hub look"
    assert [sorted(subject.evaluations) for subject in done.subjects] == [["commonsense", "ruler"], ["ruler"]]
    assert done.presets == ["ruler"]
    assert (done.device, done.dtype) == (None, None)
    lines = (tmp_path / "out" / "comparison.md").read_text().splitlines()
    assert "| N-1 (%) ↑ at 8,192 | 80.00 | 80.00 | +0.00 |" in lines
    assert "| Palimpsa layers | 1 | none |  |" in lines


def test_three_models_have_no_change_and_scores_of_any_unit_are_drawn(tmp_path):
    scores = (Score(name="beasts acc", value=0.5), Score(name="WikiText", value=12.0, unit="perplexity"))
    items = [
        save(tmp_path / name, model=f"{name}/hybrid", model_fingerprint=name, scores=scores, preset="mine")
        for name in "abc"
    ]
    done = compare(items, tmp_path / "out")
    assert done.labels == ["a/hybrid", "b/hybrid", "c/hybrid"], "their last parts are the same"
    assert "| beasts acc | 0.5 | 0.5 | 0.5 |" in (tmp_path / "out" / "comparison.md").read_text().splitlines()
    assert (tmp_path / "out" / "comparison.png").stat().st_size > 5000


TASKS = make_evaluation().tasks
SCORES_OF_VT = tuple(score for score in make_evaluation().scores if score.task == "ruler_vt")
OTHER = {"model": "models/plain", "model_fingerprint": "ba5e"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "there already are scores of ruler for these weights, those of models/hybrid"),
        (
            OTHER | {"limit": 5},
            "models/hybrid and models/plain were evaluated differently on ruler: limit none against 5",
        ),
        (OTHER | {"max_length": 99}, "evaluated differently on ruler: length 8704 against 99"),
        (OTHER | {"lengths": None}, "lengths (4096, 8192) against none"),
        (
            OTHER | {"tasks": {"ruler_vt": TASKS["ruler_vt"]}, "scores": SCORES_OF_VT},
            "task niah_single_1 is in one only",
        ),
        (
            OTHER | {"tasks": TASKS | {"ruler_vt": TASKS["ruler_vt"].model_copy(update={"version": "2.0"})}},
            "ruler_vt has version 1.0 against 2.0",
        ),
        (
            OTHER | {"tasks": TASKS | {"ruler_vt": TASKS["ruler_vt"].model_copy(update={"available": 9999})}},
            f"ruler_vt has available {TASKS['ruler_vt'].available} against 9999",
        ),
        (OTHER | {"preset": "commonsense"}, "models/hybrid has only ruler, which no other has: nothing to compare"),
        (
            {"preset": "commonsense"},
            "all items are of the same weights, those of models/hybrid",
        ),
    ],
    ids=["same", "limit", "length", "lengths", "tasks", "version", "available", "preset", "one-model"],
)
def test_results_that_cannot_be_compared(changes, message, tmp_path):
    items = [save(tmp_path / "a"), save(tmp_path / "b", **changes)]
    with pytest.raises(UserError) as error:
        compare(items, tmp_path / "out")
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_diagnoses_of_different_text_cannot_be_compared(diagnosed, tmp_path):
    found = Diagnosis.load(diagnosed)
    for name, changes, message in (
        ("text", {"text_fingerprint": "0"}, "measured on different text: other text or another tokenizer"),
        ("shape", {"sequences": 3}, "2 sequences of 40 tokens against 3 sequences of 40 tokens"),
        ("same", {"model_fingerprint": found.model_fingerprint}, "there already is a diagnosis of these weights"),
    ):
        (tmp_path / name).mkdir()
        dataclasses.replace(found, **{"model": "b", "model_fingerprint": "b"} | changes).save(tmp_path / name)
        with pytest.raises(UserError, match=message):
            compare([diagnosed, tmp_path / name], tmp_path / "out")
    with pytest.raises(UserError, match="has only perplexities by position, which no other has"):
        compare([diagnosed, save(tmp_path / "scores")], tmp_path / "out")


@pytest.mark.parametrize(
    ("items", "options", "message"),
    [
        (["MODEL"], {"data": "TEXT"}, "compare needs two models or results at least, got 1"),
        (["MODEL", "HYBRID"], {}, "is a model, to be measured on text: give --data FILE"),
        (
            ["DIAGNOSED", "DIAGNOSED"],
            {"data": "TEXT"},
            "--data is text to measure models on, but only results are given",
        ),
        (["DIAGNOSED", "HYBRID"], {"data": "TEXT"}, "give --sequences 2 --max-length 40"),
        (["MODEL", "nowhere"], {"data": "TEXT"}, "model nowhere: no such folder"),
        (["MODEL", ""], {"data": "TEXT"}, "the name of a model is empty"),
        (["MODEL", "FOLDER"], {"data": "TEXT"}, "or config.json: neither results nor a model"),
        (["MODEL", "HYBRID"], {"data": "TEXT", "tokenizer": ""}, "the name of a tokenizer is empty"),
        (["MODEL", "TEXT"], {"data": "TEXT"}, "is neither a results.json of `eval` nor a diagnosis.json of `diagnose`"),
        (["MODEL", "HYBRID"], {"data": "TEXT", "max_length": 1}, "max length must be at least 2, got 1"),
        (["MODEL", "HYBRID"], {"data": "TEXT", "sequences": 0}, "number of sequences must be at least 1, got 0"),
        (["MODEL", "HYBRID"], {"data": "TEXT", "dtype": "int4"}, "unknown dtype 'int4'"),
        (["MODEL", "HYBRID"], {"data": "TEXT", "device": "warp"}, "device 'warp' cannot be used"),
        (["MODEL", "HYBRID"], {"data": "gone.txt"}, "text file gone.txt does not exist"),
        (["MODEL", "HYBRID"], {"data": "TEXT", "max_length": 10**6}, "text too short"),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, list) else None,
)
def test_mistakes_are_named(items, options, message, small_checkpoint, hybrid, diagnosed, text_file, tmp_path, quick):
    names = {"MODEL": small_checkpoint, "HYBRID": hybrid, "DIAGNOSED": diagnosed, "TEXT": text_file}
    names["FOLDER"] = text_file.parent
    options = {key: names.get(value, value) for key, value in options.items()}
    with pytest.raises(UserError) as error:
        compare([names.get(item, item) for item in items], tmp_path / "out", **options)
    assert message in str(error.value)
    assert not (tmp_path / "out").exists()


def test_the_type_changes_neither_model_nor_text(small_checkpoint, hybrid, text_file, tmp_path, quick, no_figure):
    one, other = (
        compare([small_checkpoint, hybrid], tmp_path / kind, data=text_file, dtype=kind, **SIZES)
        for kind in ("float32", "bfloat16")
    )
    assert (one.dtype, other.dtype) == ("float32", "bfloat16")
    for plain, rounded in zip(one.subjects, other.subjects, strict=True):
        assert (plain.fingerprint, plain.text) == (rounded.fingerprint, rounded.text)
        assert plain.loss.nll_sums != rounded.loss.nll_sums
        assert rounded.state_bytes < plain.state_bytes, "the conv tails are smaller"


def test_models_of_different_types_are_measured_in_one():
    sources = [SimpleNamespace(dtype=dtype) for dtype in (torch.float16, torch.bfloat16, torch.float16)]
    gpu = torch.device("cuda")
    assert library._common_dtype(sources, gpu, None) == torch.float32, "the narrowest that holds both"
    assert library._common_dtype(sources[::2], gpu, None) == torch.float16
    assert library._common_dtype(sources, gpu, "bfloat16") == torch.bfloat16
    assert library._common_dtype([], gpu, None) is None


def test_bins_of_positions_must_be_the_same(diagnosed, tmp_path):
    found = Diagnosis.load(diagnosed)
    loss = {key: (value[0] + value[1], *value[2:]) for key, value in dataclasses.asdict(found.loss).items() if value}
    loss |= {"starts": (1, *found.loss.starts[2:]), "ends": found.loss.ends[1:]}
    other = dataclasses.replace(found, model_fingerprint="other", loss=dataclasses.replace(found.loss, **loss))
    (tmp_path / "other").mkdir()
    other.save(tmp_path / "other")
    with pytest.raises(UserError, match="were measured in different bins of positions"):
        compare([diagnosed, tmp_path / "other"], tmp_path / "out")


def test_a_score_that_only_one_has_is_in_the_table(tmp_path):
    scores = (Score(name="acc", value=0.5), Score(name="f1", value=0.25))
    items = [save(tmp_path / "a", scores=scores[:1]), save(tmp_path / "b", **OTHER, scores=scores)]
    lines = comparison_plots.comparison_markdown(compare(items, tmp_path / "out")).splitlines()
    assert "| f1 |  | 0.25 |  |" in lines


@pytest.mark.parametrize("count", [1, 2, 7, 13])
def test_a_figure_of_long_names_holds_its_legend(count, diagnosed, tmp_path, monkeypatch):
    monkeypatch.setattr(comparison_plots.Figure, "savefig", lambda figure, path: drawn.append(figure))
    drawn, found = [], Diagnosis.load(diagnosed)
    speed, evaluations = Speed(40, 9.0, 5.0), {"ruler": make_evaluation()}
    subjects = [
        library.Subject(f"a/long-name-{'of-a-model-' * 9}{i}", str(i), 1, (), found.loss, None, speed, 2, evaluations)
        for i in range(count)
    ]
    comparison_plots.plot_comparison(library.Comparison(tuple(subjects), "cpu", "float32"), tmp_path / "x.png")
    figure = drawn[0]
    figure.draw_without_rendering()
    places = [figure.legends[0].get_window_extent(), *(axes.get_tightbbox() for axes in figure.axes)]
    assert min(min(place.x0, place.y0) for place in places) >= 0
    assert max(place.x1 for place in places) <= figure.bbox.width
    assert max(place.y1 for place in places) <= figure.bbox.height
    assert not any(one.overlaps(other) for one, other in itertools.combinations(places, 2))
    looks = {(line.get_color(), line.get_marker()) for line in figure.legends[0].get_lines()}
    assert len(looks) == count, "no two look the same"


@pytest.mark.filterwarnings("error")
def test_small_changes_and_odd_names(tmp_path):
    name = "beasts $a_{b acc"  # which matplotlib would take for a formula, and a broken one
    items = []
    for model, value in (("plain", 0.5), ("hybrid", 0.5021)):
        scores = (Score(name=name, value=value), Score(name="prose", value=900.0, unit="perplexity"))
        folder = tmp_path / model
        items.append(
            save(folder, model=f"$_\u6a21\u578b {model}", model_fingerprint=model, scores=scores, preset="mine")
        )
    done = compare(items, tmp_path / "out")
    lines = (tmp_path / "out" / "comparison.md").read_text().splitlines()
    assert f"| {name} | 0.5 | 0.5021 | +0.0021 |" in lines
    assert [place[1] for place in comparison_plots._drawn_scores(done)] == [name], "900 would leave them no room"


@pytest.mark.parametrize("second", ["copy", "tokenizer"])
def test_what_makes_measuring_useless_is_noticed_before(
    second, small_checkpoint, hybrid, text_file, tmp_path, monkeypatch
):
    def fail(*_):
        raise AssertionError("something was measured")

    monkeypatch.setattr(library, "measure", fail)
    other = shutil.copytree(small_checkpoint if second == "copy" else hybrid, tmp_path / second)
    if second == "tokenizer":
        words = json.loads((other / "tokenizer.json").read_text())
        words["model"]["merges"] = words["model"]["merges"][:50]
        (other / "tokenizer.json").write_text(json.dumps(words))
    message = {"copy": "has the same weights as", "tokenizer": "measured on different text"}
    with pytest.raises(UserError, match=message[second]):
        compare([small_checkpoint, other], tmp_path / "out", data=text_file, **SIZES)
    assert not (tmp_path / "out").exists()


def test_conditions_that_differ_are_said_of_each(tmp_path):
    other = {"model": "hybrid", "model_fingerprint": "0123456789"}  # the same name before and after its training
    items = [save(tmp_path / "a", model="hybrid"), save(tmp_path / "b", dtype="float16", device="cpu", **other)]
    done = compare(items, tmp_path / "out")
    names = [f"hybrid ({subject.fingerprint[:6]})" for subject in done.subjects]
    assert done.labels == names
    lines = (tmp_path / "out" / "comparison.md").read_text().splitlines()
    assert [line.partition(": lm-eval ")[0] for line in lines if ": lm-eval " in line] == names
    assert sum("float16 on cpu" in line for line in lines) == 1


def test_predictions_that_are_nan(make_checkpoint, small_checkpoint, text_file, tmp_path, quick):
    broken = make_checkpoint(lambda model: model.backbone.norm_f.weight.fill_(3e38))
    with pytest.raises(UserError, match=r"logits at position \d+ are NaN or infinite \(sequence 0\)"):
        compare([small_checkpoint, broken], tmp_path / "out", data=text_file, **SIZES)
    assert not (tmp_path / "out").exists()


def test_a_folder_with_both_results(diagnosed, tmp_path):
    folder = save(tmp_path / "both")
    (folder / "diagnosis.json").write_text((diagnosed / "diagnosis.json").read_text())
    with pytest.raises(UserError, match=r"holds both results.json and diagnosis.json: name the file"):
        compare([folder, diagnosed], tmp_path / "out")
