import dataclasses
import io
import json
import math

import numpy as np
import pytest
import torch
from rich.console import Console

from palimpsa_surgery.errors import UserError
from palimpsa_surgery.surgery.analysis import LEVELS, SAMPLE_TOKENS, Analysis, LayerWindows, analyze
from palimpsa_surgery.surgery.checkpoints import fingerprint, load_model, load_tokenizer
from palimpsa_surgery.surgery.plots import format_window, plot_windows, selection_note, window_table


def make_analysis(medians, *, paper=None, palimpsa=(), positions=4):
    """An analysis with these medians, all other windows in a fixed relation to them."""
    layers = tuple(
        LayerWindows(
            layer=index,
            kind="palimpsa" if index in palimpsa else "mamba2",
            median_window=float(median),
            paper_median_window=float((paper or medians)[index]),
            quantiles={str(level): max(1.0, median * 2 * level) for level in LEVELS},
            head_medians=(float(median), 1.0),
            position_medians=tuple(max(1.0, median * (1 + position / 9)) for position in range(positions)),
        )
        for index, median in enumerate(medians)
    )
    return Analysis(
        "some/model", "f00d", 1000, 8 * positions, layers, tuple(range(0, 8 * positions, 8)), ((5, 6), (7, 8))
    )


@pytest.fixture(scope="module")
def analysis(tiny_checkpoint, text_file, tmp_path_factory):
    folder = tmp_path_factory.mktemp("analysis") / "windows"
    return analyze(tiny_checkpoint, text_file, folder, max_tokens=700, sequence_length=300), folder


def test_windows_agree_with_a_float64_computation_from_the_raw_weights(analysis, tiny_checkpoint, text_file):
    measured, _ = analysis
    ids = load_tokenizer(tiny_checkpoint)(text_file.read_text())["input_ids"][:700]
    model = load_model(tiny_checkpoint)
    with torch.inference_mode():
        blocks = [model.backbone(torch.tensor([ids[i : i + 300]]), output_hidden_states=True) for i in (0, 300, 600)]
    weights = torch.load(tiny_checkpoint / "pytorch_model.bin", weights_only=True)
    for layer in measured.layers:
        w = {
            k: weights[f"backbone.layers.{layer.layer}.{k}"].double().numpy()
            for k in ("norm.weight", "mixer.in_proj.weight", "mixer.dt_bias", "mixer.A_log")
        }
        windows = []
        for block in blocks:
            u = block.hidden_states[layer.layer][0].double().numpy()
            u = u / np.sqrt((u**2).mean(-1, keepdims=True) + 1e-5) * w["norm.weight"]
            dt = np.log1p(np.exp(u @ w["mixer.in_proj.weight"][-8:].T + w["mixer.dt_bias"]))
            windows.append(1 / (1 - np.exp(-np.exp(w["mixer.A_log"]) * dt)))  # [T, H]
        every = np.concatenate(windows)
        per_token = [np.median(window, axis=1) for window in windows]
        # 300 positions share 256 bins: compare the bins that hold one position, seen by two or three blocks
        alone = [
            i
            for i, (a, b) in enumerate(zip(measured.positions, [*measured.positions[1:], 300], strict=True))
            if b - a == 1
        ]
        at = [
            np.median([block[measured.positions[i]] for block in per_token if len(block) > measured.positions[i]])
            for i in alone
        ]
        for name, actual, expected in (
            ("quantiles", [layer.quantiles[str(level)] for level in LEVELS], np.quantile(every, LEVELS)),
            ("median", layer.median_window, np.median(every)),
            ("heads", layer.head_medians, np.median(every, axis=0)),
            ("paper", layer.paper_median_window, np.median(np.concatenate(per_token))),
            ("positions", [layer.position_medians[i] for i in alone], at),
        ):
            np.testing.assert_allclose(actual, expected, rtol=0.01, err_msg=f"layer {layer.layer}: {name}")
    assert len(alone) > 200


def test_what_is_written_down(analysis, tiny_checkpoint, text_file):
    measured, folder = analysis
    assert sorted(path.name for path in folder.iterdir()) == ["analysis.json", "windows.png"]
    assert Analysis.load(folder) == Analysis.load(folder / "analysis.json") == measured
    content = json.loads((folder / "analysis.json").read_text())
    assert content["version"] == 1
    assert content["tokens"] == 700
    assert content["model"] == str(tiny_checkpoint)
    assert content["model_fingerprint"] == fingerprint(load_model(tiny_checkpoint))
    assert [row["layer"] for row in content["layers"]] == list(range(12))
    assert {row["kind"] for row in content["layers"]} == {"mamba2"}
    ids = load_tokenizer(tiny_checkpoint)(text_file.read_text())["input_ids"]
    assert content["calibration_sample"]["input_ids"] == [ids[:300], ids[300:600], ids[600:700]]
    assert (folder / "windows.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert measured.top_layers(4) == sorted(range(12), key=lambda i: -measured.median_windows[i])[:4]


def test_batches_change_nothing(small_checkpoint, text_file, tmp_path):
    one, three = (
        analyze(
            small_checkpoint,
            text_file,
            tmp_path / str(batch_size),
            max_tokens=730,  # the last sequence is shorter, and so forms a batch of its own
            sequence_length=100,
            batch_size=batch_size,
        )
        for batch_size in (1, 3)
    )
    assert one.tokens == three.tokens == 730
    assert one.calibration_sample == three.calibration_sample
    for a, b in zip(one.layers, three.layers, strict=True):
        assert b.median_window == pytest.approx(a.median_window, rel=0.01)
        assert b.position_medians == pytest.approx(a.position_medians, rel=0.01)


def test_the_sample_stays_small(small_checkpoint, text_file, tmp_path):
    measured = analyze(small_checkpoint, [text_file, text_file], tmp_path / "a", sequence_length=900)
    assert measured.tokens > SAMPLE_TOKENS
    assert sum(map(len, measured.calibration_sample)) == SAMPLE_TOKENS
    assert max(map(len, measured.calibration_sample)) == 900


def test_a_hybrid_has_windows_in_all_layers(make_checkpoint, text_file, tmp_path):
    hybrid = make_checkpoint(palimpsa_layers=[1])
    measured = analyze(hybrid, text_file, tmp_path / "a", max_tokens=200, sequence_length=100)
    assert [layer.kind for layer in measured.layers] == ["mamba2", "palimpsa", "mamba2"]
    assert measured.palimpsa_layers == [1]
    assert sorted(measured.top_layers(3)) == [0, 2]
    assert all(layer.median_window > 1 for layer in measured.layers)


def test_limits_of_the_time_step_count(make_checkpoint, text_file, tmp_path):
    checkpoint = make_checkpoint(lambda model: None, time_step_limit=(0.25, 0.25))
    measured = analyze(checkpoint, text_file, tmp_path / "a", max_tokens=100, sequence_length=100)
    rates = load_model(checkpoint).backbone.layers[0].mixer.decay_rate().double()
    expected = -1 / torch.expm1(-0.25 * rates)
    assert measured.layers[0].head_medians == pytest.approx(expected.tolist(), rel=0.01)


def test_a_layer_that_never_forgets_is_kept_as_valid_json(make_checkpoint, text_file, tmp_path):
    def freeze(model):
        model.backbone.layers[2].mixer.A_log.fill_(-200.0)  # A underflows to zero in float32

    measured = analyze(make_checkpoint(freeze), text_file, tmp_path / "a", max_tokens=100, sequence_length=50)
    assert measured.layers[2].median_window == measured.layers[2].paper_median_window == math.inf
    assert measured.top_layers(1) == [2]

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    text = (tmp_path / "a" / "analysis.json").read_text()
    assert json.loads(text, parse_constant=refuse)["layers"][2]["median_window"] == "Infinity"
    assert Analysis.load(tmp_path / "a") == measured


MISTAKES = {
    "batch size": ({"batch_size": 0}, "batch size must be at least 1, got 0"),
    "sequence length": ({"sequence_length": 1}, "sequence length must be at least 2 tokens, got 1"),
    "max tokens": ({"max_tokens": 0}, "at least 2, got 0"),
    "device": ({"device": "warp"}, "device 'warp' cannot be used"),
    "absent device": ({"device": "cuda:77"}, "device 'cuda:77' cannot be used"),
    "no data": ({"data": []}, "no text files given"),
    "missing data": ({"data": ["missing.txt"]}, "missing.txt does not exist"),
    "missing model": ({"model": "./missing"}, "missing"),
    "missing tokenizer": ({"tokenizer": "./missing"}, "missing"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_leave_nothing_behind(name, small_checkpoint, text_file, tmp_path):
    options, message = MISTAKES[name]
    arguments = {"model": small_checkpoint, "data": text_file, "output": tmp_path / "a", **options}
    with pytest.raises(UserError, match=message) as caught:
        analyze(**arguments)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_is_not_empty_is_refused_and_then_replaced(small_checkpoint, text_file, tmp_path):
    (tmp_path / "keep").write_text("precious")
    options = {"max_tokens": 50, "sequence_length": 50}
    with pytest.raises(UserError, match="is not empty"):
        analyze(small_checkpoint, text_file, tmp_path, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["keep"]
    analyze(small_checkpoint, text_file, tmp_path, overwrite=True, **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["analysis.json", "windows.png"]


def test_the_text_is_checked_before_the_weights_are_read(small_checkpoint, tmp_path, monkeypatch):
    (tmp_path / "binary.txt").write_bytes(b"\0\1\2")
    monkeypatch.setattr("palimpsa_surgery.surgery.analysis.load_model", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(UserError, match="binary"):
        analyze(small_checkpoint, tmp_path / "binary.txt", tmp_path / "a")


def damage(**changes):
    content = json.loads(make_analysis([3, 4]).to_json())
    return json.dumps(content | changes)


DAMAGED = {
    "empty": ("", "cannot be read"),
    "truncated": (make_analysis([3, 4]).to_json()[:200], "cannot be read"),
    "something else": ('{"name": "x"}', "is not an analysis"),
    "a list": ("[1]", "is not an analysis"),
    "newer": (damage(version=2), "is of version 2; this program reads 1"),
    "no layers": (damage(layers=[]), "damaged: it has no layers"),
    "wrong layers": (damage(layers=[{"layer": 1}]), "damaged: layer 0 is listed as 1"),
    "half a layer": (damage(layers=[{"layer": 0}]), "damaged: 'kind' is missing"),
    "no sample": (damage(calibration_sample={"input_ids": []}), "damaged: the calibration sample"),
    "odd sample": (damage(calibration_sample={"input_ids": [["a", "b"]]}), "a token id must be a whole number"),
    "sample is no object": (damage(calibration_sample=[1]), "damaged"),
    "positions": (damage(positions=[0]), "layer 0 has 4 position medians for 1 positions"),
    "window": (damage().replace('"median_window": 3.0', '"median_window": 0.5'), "at least 1, got 0.5"),
    "NaN": (damage().replace('"median_window": 3.0', '"median_window": NaN'), "at least 1, got nan"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_one_clear_line(name, tmp_path):
    text, message = DAMAGED[name]
    (tmp_path / "analysis.json").write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        Analysis.load(tmp_path)
    assert "analysis.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_analysis_is_named(tmp_path):
    with pytest.raises(UserError, match="there is no analysis at"):
        Analysis.load(tmp_path)


@pytest.mark.parametrize(
    "medians",
    [[3, 90, 7], [1], [5, 5, 5], [2, math.inf, 1e12], [math.inf] * 2, list(range(1, 65))],
    ids=["plain", "one", "equal", "infinite", "only infinite", "64 layers"],
)
def test_any_windows_can_be_drawn_and_listed(medians, tmp_path, recwarn):
    measured = make_analysis(medians, palimpsa=[0] if len(medians) > 2 else [])
    assert Analysis.load(measured.save(tmp_path)) == measured
    plot_windows(measured, measured.top_layers(8), tmp_path / "windows.png")
    assert (tmp_path / "windows.png").stat().st_size > 10_000
    assert [str(warning.message) for warning in recwarn] == []
    printed = io.StringIO()
    Console(width=80, file=printed).print(window_table(measured, measured.top_layers(1)))
    text = printed.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert text.count("● selected") == 1
    assert text.count("Palimpsa") == len(measured.palimpsa_layers)


def test_one_position_can_be_drawn(tmp_path):
    plot_windows(make_analysis([3, 4], positions=1), [1], tmp_path / "windows.png")
    assert (tmp_path / "windows.png").exists()


def test_the_note_says_when_the_papers_score_differs():
    assert (
        selection_note(make_analysis([9, 5, 7]), 2)
        == "Longest windows: layers 0, 2. The paper's score selects the same."
    )
    differing = make_analysis([9, 5, 7, 1], paper=[9, 8, 7, 1])
    assert selection_note(differing, 2).endswith("The paper's score would select layer 1 instead of layer 2.")
    assert differing.top_layers(2, paper=True) == [0, 1]


@pytest.mark.parametrize(
    ("window", "text"),
    [
        (1, "1.00"),
        (87.25, "87.2"),
        (999.6, "1.00k"),
        (12_345, "12.3k"),
        (999, "999"),
        (4.5e6, "4.50M"),
        (2e11, "2e11"),
        (math.inf, "∞"),
    ],
)
def test_windows_are_short_to_print(window, text):
    assert format_window(window) == text


def test_an_analysis_is_immutable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        make_analysis([3]).tokens = 4


def test_a_model_that_overflows_is_named(make_checkpoint, text_file, tmp_path):
    def explode(model):
        model.backbone.layers[1].norm.weight.fill_(3e38)

    with pytest.raises(UserError, match=r"model .* layer 1 has time steps that are NaN, infinite or negative"):
        analyze(make_checkpoint(explode), text_file, tmp_path / "a", max_tokens=50, sequence_length=50)
    assert list(tmp_path.iterdir()) == []


def _leaves(value, path=()):
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(item, (*path, key))
    if path:
        yield path


WINDOWS = {"median_window": 9.0, "paper_median_window": 8.0, "head_medians": [9.0, 7.0]}
WINDOWS |= {"quantiles": {str(level): 9.0 for level in LEVELS}}
CONTENT = {
    "version": 1,
    "model": "model",
    "model_fingerprint": "abc",
    "tokens": 8,
    "sequence_length": 4,
    "layers": [{"layer": 0, "kind": "mamba2", **WINDOWS, "position_medians": [9.0, "Infinity"]}],
    "positions": [0, 2],
    "calibration_sample": {"input_ids": [[1, 2, 3]]},
}


@pytest.mark.parametrize("path", list(_leaves(CONTENT)), ids=lambda path: ".".join(map(str, path)))
def test_any_value_of_a_wrong_type_is_one_line(path, tmp_path):
    file = tmp_path / "analysis.json"
    file.write_text(json.dumps(CONTENT))
    Analysis.load(file)
    for wrong in (None, True, -3, "text", [], {}, [[]], {"a": 1}, 10**400):
        if (path[0].startswith("model") and wrong == "text") or (path[0] != "layers" and wrong == 10**400):
            continue  # these may be text, and those as large as they like
        content = json.loads(json.dumps(CONTENT))
        inner = content
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = wrong
        file.write_text(json.dumps(content))
        with pytest.raises(UserError) as error:
            Analysis.load(file)
        assert "\n" not in str(error.value), (path, wrong)
