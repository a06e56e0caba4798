import dataclasses
import io
import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rich.console import Console

from helpers import assert_close
from palimpsa_surgery.errors import UserError
from palimpsa_surgery.hf_models import PalimpsaMamba2Config, PalimpsaMamba2ForCausalLM
from palimpsa_surgery.hf_models.modeling_palimpsa_mamba2 import PalimpsaMamba2Model
from palimpsa_surgery.kernels.reference import palimpsa_scan_reference
from palimpsa_surgery.surgery import remembrance
from palimpsa_surgery.surgery.checkpoints import fingerprint, load_model, load_tokenizer
from palimpsa_surgery.surgery.diagnosis import Diagnosis, diagnose
from palimpsa_surgery.surgery.diagnosis_plots import (
    diagnosis_report,
    plot_importance_ratio,
    plot_perplexity,
    plot_states,
    plot_windows,
)
from palimpsa_surgery.surgery.position_loss import log_edges, run_sequence
from palimpsa_surgery.surgery.remembrance import DISTANCES, effective_remembrance, log_spaced, remembrance_starts
from palimpsa_surgery.surgery.state_statistics import StateStatistics
from palimpsa_surgery.surgery.windows import observing

PLAIN_FIGURES = ["perplexity.png", "remembrance.png", "states.png", "windows.png"]
HYBRID_FIGURES = ["importance-ratio.png", "importance.png", "metaplasticity.png", "variance.png"]
SIZES = {"max_length": 90, "sequences": 3, "remembrance_length": 40, "remembrance_points": 7}


def give_importance(model):
    """Make importance large enough to matter, and heads and priors differ."""
    mixer = model.backbone.layers[1].mixer
    mixer.b_scale.copy_(torch.tensor([0.5, 1.0, 2.0, 3.0]))
    mixer.Ip_log.copy_(torch.tensor([-1.0, 0.0, 0.5, 1.0]))


@pytest.fixture
def no_figures(monkeypatch):
    """Leave out what takes most of the time of a small diagnosis."""
    monkeypatch.setattr("palimpsa_surgery.surgery.diagnosis.plot_diagnosis", lambda *_: None)


@pytest.fixture(scope="module")
def hybrid(make_checkpoint):
    """Layer 1 of 3 is a Palimpsa layer."""
    return make_checkpoint(give_importance, palimpsa_layers=[1])


@pytest.fixture(scope="module")
def model(hybrid):
    return load_model(hybrid)


@pytest.fixture(scope="module")
def ids(hybrid, text_file):
    """The three sequences that a diagnosis of SIZES reads, [3, 90]."""
    return torch.tensor(load_tokenizer(hybrid)(text_file.read_text())["input_ids"][:270]).view(3, 90)


@pytest.fixture(scope="module")
def diagnosis(hybrid, text_file, tmp_path_factory):
    folder = tmp_path_factory.mktemp("diagnosis") / "out"
    return diagnose(hybrid, text_file, folder, piece_length=13, **SIZES), folder


@pytest.fixture(scope="module")
def observed(model, ids):
    """One long pass over all sequences: its logits, and what the mixer of the Palimpsa layer showed."""
    seen = {}
    with torch.inference_mode(), observing(model, lambda layer, values: seen.update({layer: values})):
        return model(ids, use_cache=False).logits, seen


def states_after(model, ids, count):
    """Recurrent states of every layer after one pass over the first `count` tokens, in float64."""
    with torch.inference_mode():
        states = model.backbone(ids[:, :count], return_final_states=True, use_cache=False).final_states
    return [state.recurrent_state.double() for state in states]


def test_perplexity_in_pieces_is_that_of_one_long_pass(diagnosis, observed, ids):
    loss = diagnosis[0].loss
    nll = F.cross_entropy(observed[0][:, :-1].flatten(0, 1).double(), ids[:, 1:].flatten(), reduction="none")
    by_position = torch.cat([torch.zeros(3, 1), nll.view(3, -1)], dim=1)  # [3, 90], the entry t belongs to token t
    bins = list(zip(loss.starts, loss.ends, strict=True))
    assert [bins[0][0], bins[-1][1]] == [1, 90]
    assert list(loss.starts[1:]) == list(loss.ends[:-1])
    assert loss.tokens == tuple(3 * (high - low) for low, high in bins)
    sums = torch.tensor([by_position[:, low:high].sum() for low, high in bins])
    assert_close(torch.tensor(loss.nll_sums), sums, 1e-5, "sums")
    assert_close(torch.tensor(loss.perplexity), (sums / torch.tensor(loss.tokens)).exp(), 1e-4, "perplexity")
    per_sequence = torch.stack([by_position[:, low:high].mean(1) for low, high in bins], dim=1)
    assert_close(torch.tensor(loss.standard_errors), per_sequence.std(0) / math.sqrt(3), 1e-3, "errors")


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("shapes do not fit"),
    ],
    ids=["torch", "triton", "cublas", "other"],
)
def test_too_little_memory_is_one_line(error, hybrid, text_file, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(PalimpsaMamba2Model, "forward", fail)
    expected = (
        (RuntimeError, "shapes") if "shapes" in str(error) else (UserError, "cpu has too little memory for 13 tok")
    )
    with pytest.raises(expected[0], match=expected[1]):
        diagnose(hybrid, text_file, tmp_path / "out", piece_length=13, **SIZES)
    assert not (tmp_path / "out").exists()


def test_remembrance_of_a_model_in_bfloat16(hybrid, model, ids):
    rounded = load_model(hybrid, dtype=torch.bfloat16)
    starts = [0, 20, 39]
    assert_close(
        effective_remembrance(rounded, ids[0, :40], starts), effective_remembrance(model, ids[0, :40], starts), 0.1
    )


@pytest.mark.parametrize("distance", DISTANCES)
def test_effective_remembrance_is_that_of_separate_runs(distance, model, ids):
    text = ids[0, :40]
    starts = remembrance_starts(40, 9)
    found = effective_remembrance(model, text, starts, distance=distance, piece_length=11)
    with torch.inference_mode():
        full, *cut = (model(text[None, t:], use_cache=False).logits[0, -1].double().softmax(-1) for t in starts)
    measure = {
        "tv": lambda q: 0.5 * (full - q).abs().sum(),
        "js": lambda q: (
            sum(0.5 * F.kl_div((0.5 * (full + q)).log(), p, reduction="sum") for p in (full, q)) / math.log(2)
        ),
        "cosine": lambda q: 1 - F.cosine_similarity(full, q, dim=0),
    }[distance]
    assert found[0] == 0
    assert found[1:].min() > 0
    assert_close(found[1:], torch.stack([measure(q) for q in cut]), 1e-3, distance)


def test_remembrance_does_not_depend_on_what_is_computed_at_once(model, ids, monkeypatch):
    starts = remembrance_starts(40, 12)
    tokens = []
    together = effective_remembrance(model, ids[0, :40], starts, advance=tokens.append)
    assert sum(tokens) == sum(40 - start for start in starts)
    monkeypatch.setattr(remembrance, "_STATE_BYTES", 5 * remembrance.state_bytes(model.config))
    apart = effective_remembrance(model, ids[0, :40], starts, piece_length=1)
    assert_close(apart, together, 1e-3)


def test_the_diagnosis_averages_remembrance_over_the_texts(diagnosis, model, ids):
    found = diagnosis[0].remembrance
    each = torch.stack([effective_remembrance(model, row[:40], found.starts) for row in ids])
    assert (found.distance, found.length, len(found.starts)) == ("tv", 40, 7)
    assert found.values[0] == 0
    assert_close(torch.tensor(found.values), each.mean(0), 1e-3, "values")
    assert_close(torch.tensor(found.standard_errors), each.std(0) / math.sqrt(3), 1e-3, "errors")


@pytest.mark.parametrize("distance", DISTANCES)
def test_distances_lie_between_0_and_1(distance):
    one, other = torch.eye(4, dtype=torch.float64)[:2]
    even = torch.full((4,), 0.25, dtype=torch.float64)
    between = DISTANCES[distance](one, even).item()
    assert DISTANCES[distance](one, other) == pytest.approx(1)
    assert DISTANCES[distance](even, even) == 0
    expected = {"tv": 0.75, "js": 0.5 * math.log2(1.6) + 0.125 * math.log2(0.4) + 0.375, "cosine": 0.5}
    assert between == pytest.approx(expected[distance])


@pytest.mark.parametrize("position", [0, 2, -1], ids=["first", "third", "last"])
def test_states_are_those_of_one_pass_up_to_the_position(position, diagnosis, model, ids):
    measured = diagnosis[0]
    states = states_after(model, ids, measured.positions[position])
    for layer, state in zip(measured.layers, states, strict=True):
        M = state[:, :, 0] if layer.kind == "palimpsa" else state
        mean, std = M.flatten(2).mean(2).mean(0), M.flatten(2).std(2, correction=0).mean(0)
        assert_close(torch.tensor(layer.state_mean[position]), mean, 1e-3, f"mean of layer {layer.layer}")
        assert_close(torch.tensor(layer.state_std[position]), std, 1e-4, f"std of layer {layer.layer}")


def test_importance_is_that_of_the_states(diagnosis, model, ids):
    measured = diagnosis[0].layers[1].importance
    prior = model.backbone.layers[1].mixer.Ip_log.detach().double().exp()
    for index, position in enumerate(diagnosis[0].positions):
        above = states_after(model, ids, position)[1][:, :, 1].flatten(2)  # [3, H, P N]
        total = above + prior[:, None]
        low, high = total.amin(2), total.amax(2)
        for name, expected in {
            "mean": above.mean(2).mean(0),
            "std": above.std(2, correction=0).mean(0),
            "importance_ratio": (above.amax(2) / prior).amax(0),
            "metaplasticity_ratio": ((high - low) / low).mean(0),
        }.items():
            assert_close(torch.tensor(getattr(measured, name)[index]), expected, 1e-4, f"{name} at {position}")
    assert min(measured.metaplasticity_ratio[-1]) > 0.005


def test_variance_is_that_of_the_reference_scan(diagnosis, model, observed):
    measured, positions = diagnosis[0].layers[1].importance, diagnosis[0].positions
    seen, mixer = observed[1][1], model.backbone.layers[1].mixer
    dt, prior = seen["dt"], mixer.Ip_log.detach().exp()
    beta = seen["importance_gate"] * (F.softplus(mixer.b_scale.detach()) * dt)[..., None]
    variance = palimpsa_scan_reference(seen["x"], dt, seen["A"], seen["B"], seen["C"], beta, prior)[2]
    queries = seen["C"].square().sum(3).repeat_interleave(2, dim=2) / prior  # [3, T, H]: two heads to a group
    for index, (low, high) in enumerate(zip([0, *positions[:-1]], positions, strict=True)):
        for name, values in (("variance", variance.mean(3)), ("prior_variance", queries)):
            expected = values[:, low:high].mean((0, 1))
            assert_close(torch.tensor(getattr(measured, name)[index]), expected, 1e-4, f"{name} before {high}")
    assert max(np.divide(measured.variance[-1], measured.prior_variance[-1])) < 1


def test_windows_are_those_of_the_time_steps(diagnosis, observed):
    measured = diagnosis[0]
    for layer in measured.layers:
        seen = observed[1][layer.layer]
        windows = (-1 / torch.expm1(-seen["A"] * seen["dt"])).double().numpy()  # [3, T, H]
        assert layer.median_window == pytest.approx(np.median(windows), rel=0.01)
        assert layer.head_windows == pytest.approx(np.median(windows, axis=(0, 1)), rel=0.01)
        last = windows[:, measured.positions[-2] : measured.positions[-1]]
        assert layer.position_windows[-1] == pytest.approx(np.median(last), rel=0.01)


def test_what_is_written_down(diagnosis, hybrid, model):
    measured, folder = diagnosis
    assert sorted(path.name for path in folder.iterdir()) == sorted(["diagnosis.json", *PLAIN_FIGURES, *HYBRID_FIGURES])
    assert Diagnosis.load(folder) == Diagnosis.load(folder / "diagnosis.json") == measured
    content = json.loads((folder / "diagnosis.json").read_text())
    assert content["version"] == 1
    assert content["model"] == str(hybrid)
    assert content["model_fingerprint"] == fingerprint(model)
    assert (content["sequences"], content["sequence_length"], measured.tokens) == (3, 90, 270)
    assert content["positions"] == [16, 23, 32, 45, 64, 90]
    assert [layer["kind"] for layer in content["layers"]] == ["mamba2", "palimpsa", "mamba2"]
    assert [layer["importance"] is None for layer in content["layers"]] == [True, False, True]
    for figure in (*PLAIN_FIGURES, *HYBRID_FIGURES):
        assert (folder / figure).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_plain_mamba2_has_no_importance(small_checkpoint, text_file, tmp_path):
    measured = diagnose(
        small_checkpoint, text_file, tmp_path / "out", max_length=20, sequences=1, remembrance_points=3, distance="js"
    )
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["diagnosis.json", *PLAIN_FIGURES]
    assert measured.palimpsa_layers == []
    assert measured.loss.standard_errors is measured.remembrance.standard_errors is None
    assert measured.remembrance.length == 20
    assert Diagnosis.load(tmp_path / "out") == measured
    assert "metaplast" not in report(measured)


def test_the_end_of_the_text_that_fills_no_sequence_is_left_out(small_checkpoint, text_file, tmp_path, no_figures):
    short = tmp_path / "short.txt"
    short.write_text(text_file.read_text()[:900])
    length = len(load_tokenizer(small_checkpoint)(short.read_text())["input_ids"]) // 2 - 10
    measured = diagnose(
        small_checkpoint,
        short,
        tmp_path / "out",
        max_length=length,
        sequences=9,
        remembrance_length=2,
        remembrance_points=2,
    )
    assert (measured.sequences, measured.sequence_length) == (2, length)


def test_the_shortest_sequence(small_checkpoint, text_file, tmp_path, no_figures):
    measured = diagnose(small_checkpoint, text_file, tmp_path / "out", max_length=2, sequences=2, piece_length=1)
    assert (measured.loss.starts, measured.loss.ends, measured.loss.tokens) == ((1,), (2,), (2,))
    assert (measured.positions, measured.remembrance.starts) == ((2,), (0, 1))
    assert report(measured)


def test_a_head_that_never_forgets_is_kept_as_valid_json(make_checkpoint, text_file, tmp_path, no_figures):
    def freeze(model):
        model.backbone.layers[2].mixer.A_log[1] = -200.0  # A underflows to zero in float32

    measured = diagnose(make_checkpoint(freeze), text_file, tmp_path / "out", **SIZES)
    assert measured.layers[2].head_windows[1] == math.inf
    json.loads((tmp_path / "out" / "diagnosis.json").read_text(), parse_constant=pytest.fail)
    assert Diagnosis.load(tmp_path / "out") == measured
    plot_windows(measured, tmp_path / "figure.png")


def test_numbers_that_are_not_finite_are_kept_and_drawn(diagnosis, tmp_path):
    layer = diagnosis[0].layers[0]
    rows = ((math.nan, math.inf, -math.inf, 1.0), *layer.state_std[1:])
    odd = dataclasses.replace(
        diagnosis[0], layers=(dataclasses.replace(layer, state_std=rows), *diagnosis[0].layers[1:])
    )
    path = odd.save(tmp_path)
    json.loads(path.read_text(), parse_constant=pytest.fail)
    first = Diagnosis.load(path).layers[0].state_std[0]
    assert [str(value) for value in first] == ["nan", "inf", "-inf", "1.0"]
    plot_states(odd, tmp_path / "figure.png")
    assert report(odd)


def report(diagnosis, width=80):
    console = Console(file=io.StringIO(), width=width)
    console.print(diagnosis_report(diagnosis))
    return console.file.getvalue()


def test_the_report_fits_80_columns(diagnosis):
    text = report(diagnosis[0])
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    for words in ("Perplexity over 3 sequences of 90 tokens", "total variation", "metaplast.", "16 to 63", "any head"):
        assert words in text
    assert report(diagnosis[0], width=200) == text, "nothing is wrapped"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_length": 1}, "max length must be at least 2, got 1"),
        ({"sequences": 0}, "number of sequences must be at least 1, got 0"),
        ({"piece_length": 0}, "piece length must be at least 1, got 0"),
        ({"remembrance_length": 1}, "remembrance length must be at least 2, got 1"),
        ({"remembrance_length": 91}, "remembrance length 91 exceeds max length 90"),
        ({"remembrance_points": 1}, "number of remembrance points must be at least 2, got 1"),
        ({"distance": "l2"}, "unknown distance 'l2' (known: tv, js, cosine)"),
        ({"max_length": 10**6}, "tokens, one sequence needs 1000000"),
        ({"device": "warp"}, "device 'warp' cannot be used"),
    ],
    ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else None,
)
def test_mistakes_are_named_and_leave_nothing_behind(change, message, small_checkpoint, text_file, tmp_path):
    with pytest.raises(UserError) as error:
        diagnose(small_checkpoint, text_file, tmp_path / "out", **SIZES | change)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_predictions_that_are_nan_name_their_position(make_checkpoint, ids, text_file, tmp_path):
    def overflow(model):
        model.backbone.norm_f.weight[0] = 2e38  # infinite where the channel exceeds 1.7, so not everywhere

    checkpoint = make_checkpoint(overflow)
    with torch.inference_mode():
        logits = load_model(checkpoint)(ids, use_cache=False).logits
    bad = (~torch.isfinite(logits.log_softmax(-1))).any(-1)[:, :-1].nonzero()
    sequence, position = bad[0].tolist()
    assert position > 0
    with pytest.raises(UserError, match=rf"logits at position {position} are NaN or infinite \(sequence {sequence}\)"):
        diagnose(checkpoint, text_file, tmp_path / "out", **SIZES)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "is not a diagnosis"),
        ('{"version": 1, "layers": []}', "is not a diagnosis"),
        ('{"version": 2, "loss": {}}', "is of version 2; this program reads 1"),
        ('{"version": 1, "loss": {}}', "is damaged"),
        ('{"version": 1, "loss": 3}', "is damaged"),
    ],
)
def test_a_damaged_diagnosis_is_one_line(text, message, tmp_path):
    (tmp_path / "diagnosis.json").write_text(text)
    with pytest.raises(UserError, match=message):
        Diagnosis.load(tmp_path)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("loss", "starts"), "abc", "loss.starts: Input should be a valid array"),
        (("loss", "nll_sums", 0), None, "loss.nll_sums.0: Input should be a valid number"),
        (("loss", "nll_sums", 0), "NaN", "loss: a number is not finite"),
        (("loss", "tokens", 0), 0, "loss: a bin is empty"),
        (("loss", "perplexity", 0), 0.5, "loss: a perplexity is below 1"),
        (("loss", "nll_sums", 0), -2.0, "loss: a perplexity is below 1"),
        (("loss", "tokens"), [1], "loss: its lists are not of one length"),
        (("loss", "ends", 0), 9, "loss: its bins do not follow each other from position 1"),
        (("model",), 3, "model: Input should be a valid string"),
        (("model",), "\ud800", "it: Invalid JSON"),
        (("model_fingerprint",), {}, "model_fingerprint: Input should be a valid string"),
        (("sequences",), "2", "sequences: Input should be a valid integer"),
        (("layers",), {}, "layers: Input should be a valid array"),
        (("layers", 1, "importance"), 5, "layers.1.importance: Input should be"),
        (("remembrance",), None, "remembrance: Input should be"),
    ],
)
def test_a_wrong_value_is_one_line_that_names_it(place, value, message, diagnosis, tmp_path):
    path = diagnosis[0].save(tmp_path)
    content = json.loads(path.read_text())
    inner = content
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    path.write_text(json.dumps(content))
    with pytest.raises(UserError) as error:
        Diagnosis.load(path)
    assert f"{path} is damaged: {message}" in str(error.value)
    assert "\n" not in str(error.value)


def test_perplexities_beyond_any_number_are_drawn(diagnosis, tmp_path):
    loss = diagnosis[0].loss
    for name, odd in (("some", (math.inf, *loss.perplexity[1:])), ("all", (math.inf,) * len(loss.perplexity))):
        plot_perplexity(
            dataclasses.replace(diagnosis[0], loss=dataclasses.replace(loss, perplexity=odd)), tmp_path / f"{name}.png"
        )


def test_a_missing_diagnosis_is_one_line(tmp_path):
    with pytest.raises(UserError, match="there is no diagnosis at"):
        Diagnosis.load(tmp_path)


@pytest.mark.parametrize("last", [1, 2, 7, 90, 4097])
@pytest.mark.parametrize("count", [0, 1, 2, 12, 5000])
def test_log_spaced_numbers_are_distinct_and_reach_both_ends(last, count):
    numbers = log_spaced(last, count)
    assert len(numbers) == min(last, count)
    assert numbers == sorted(set(numbers))
    assert numbers[:1] == [1][:count]
    assert count < 2 or numbers[-1] == last


@pytest.mark.parametrize(("length", "points"), [(2, 2), (2, 9), (3, 3), (40, 7), (40, 99), (8192, 24)])
def test_starts_are_as_many_as_asked_for(length, points):
    starts = remembrance_starts(length, points)
    assert len(starts) == min(length, points)
    assert starts == sorted(set(starts))
    assert (starts[0], starts[-1]) == (0, length - 1)


def test_edges_are_powers_of_the_step_with_no_narrow_last_bin():
    assert log_edges(1, 16, 2) == [1, 2, 3, 4, 6, 8, 11, 16]
    assert log_edges(16, 130, 1) == [16, 32, 64, 130]
    assert log_edges(16, 110, 1) == [16, 32, 64, 110]
    assert log_edges(16, 16, 2) == [16]


def test_memory_of_the_states_counts_both_of_a_palimpsa_layer(model):
    states = states_after(model, torch.zeros(1, 3, dtype=torch.int64), 3)
    assert remembrance.state_bytes(model.config) == sum(state.numel() * 4 for state in states)


def test_many_layers_are_drawn(diagnosis, tmp_path):
    layers = tuple(dataclasses.replace(diagnosis[0].layers[number % 3], layer=number) for number in range(36))
    plot_importance_ratio(dataclasses.replace(diagnosis[0], layers=layers), tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_importance_that_stayed_zero_is_drawn(diagnosis, tmp_path):
    layer = diagnosis[0].layers[1]
    zeros = tuple((0.0,) * 4 for _ in diagnosis[0].positions)
    none = dataclasses.replace(layer.importance, importance_ratio=zeros, metaplasticity_ratio=zeros)
    flat = dataclasses.replace(diagnosis[0], layers=(dataclasses.replace(layer, importance=none),))
    plot_importance_ratio(flat, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    assert report(flat)


def test_the_length_is_no_limit_of_memory(text_file, tmp_path):
    config = PalimpsaMamba2Config(
        num_hidden_layers=2,
        hidden_size=32,
        num_heads=4,
        head_dim=16,
        state_size=8,
        vocab_size=64,
        n_groups=1,
        palimpsa_layers=[0],
    )
    model = PalimpsaMamba2ForCausalLM(config).eval()
    statistics = StateStatistics(model, [16, 500])
    longest = []
    with torch.inference_mode(), observing(model, lambda layer, seen: longest.append(seen["dt"].shape[1])):
        nll = torch.cat(list(run_sequence(model, torch.arange(500) % 64, 50, statistics)))
    assert len(nll) == 499
    assert max(longest) == 50
