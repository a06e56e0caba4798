import math

import numpy as np
import pytest
import torch

from palimpsa_surgery.surgery.windows import POSITION_BINS, LogHistogram, WindowStatistics, log_window

LEVELS = [0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0]


def random_inputs(blocks=6, layers=2, length=40, heads=5, seed=0, spread=4.0):
    """Per block and layer, dt [1, T, H] over many orders of magnitude; and A [layers, H]."""
    generator = torch.Generator().manual_seed(seed)
    dt = torch.exp(spread * torch.randn(blocks, layers, 1, length, heads, generator=generator) - 5)
    return dt, torch.rand(layers, heads, generator=generator) * 16 + 0.1


def filled(dt, decay_rate, length=None):
    _, layers, _, time, heads = dt.shape
    statistics = WindowStatistics(layers, heads, length or time)
    for block in dt:
        for layer in range(layers):
            statistics.update(layer, block[layer], decay_rate[layer])
    return statistics


@pytest.mark.parametrize("seed", [0, 1])
def test_statistics_agree_with_float64_on_all_values_at_once(seed):
    dt, decay_rate = random_inputs(seed=seed)
    statistics = filled(dt, decay_rate)
    for layer in range(dt.shape[1]):
        window = 1 / -np.expm1(-decay_rate[layer].double().numpy() * dt[:, layer, 0].double().numpy())  # [blocks, T, H]
        per_token = np.median(window, axis=2)
        expected = {
            "layer_quantiles": np.quantile(window, LEVELS),
            "head_medians": np.median(window, axis=(0, 1)),
            "position_medians": np.median(per_token, axis=0),
            "paper_medians": np.median(per_token),
        }
        actual = {
            "layer_quantiles": statistics.layer_quantiles(LEVELS)[layer],
            "head_medians": statistics.head_medians()[layer],
            "position_medians": statistics.position_medians()[layer],
            "paper_medians": statistics.paper_medians()[layer],
        }
        for name in expected:
            np.testing.assert_allclose(actual[name].numpy(), expected[name], rtol=0.01, err_msg=name)


@pytest.mark.parametrize("decay", [0.0, 1e-42, 1e-30, 1e-12, 1e-7, 1e-3, 1.0, 50.0, 1e4])
def test_the_whole_range_of_float32_is_covered(decay):
    statistics = WindowStatistics(1, 1, 4)
    statistics.update(0, torch.full((1, 4, 1), decay), torch.ones(1))
    stored = np.float64(np.float32(decay))
    expected = 1 / -np.expm1(-stored) if decay else math.inf
    for value in (statistics.layer_quantiles([0.5]), statistics.paper_medians(), statistics.head_medians()):
        assert value.item() == pytest.approx(expected, rel=0.01)


def test_a_head_that_never_forgets_counts_as_infinite():
    dt = torch.ones(1, 10, 4)
    dt[:, :, :2] = 0  # half of the heads, and of the values
    statistics = WindowStatistics(1, 4, 10)
    statistics.update(0, dt, torch.ones(4))
    kept = 1 / (1 - math.exp(-1))
    assert statistics.head_medians()[0].tolist() == pytest.approx([math.inf, math.inf, kept, kept], rel=0.01)
    assert statistics.layer_quantiles([0.4, 0.6])[0].tolist() == pytest.approx([kept, math.inf], rel=0.01)
    assert statistics.layer_quantiles([0.5]).item() == math.inf  # as numpy: halfway to infinity
    assert statistics.position_medians()[0].tolist() == [math.inf] * 10


def test_order_and_division_make_no_difference():
    dt, decay_rate = random_inputs()
    expected = filled(dt, decay_rate)
    backwards = filled(dt.flip(0), decay_rate)
    merged = filled(dt[4:], decay_rate)
    merged.merge(filled(dt[:4], decay_rate))
    batched = WindowStatistics(2, 5, 40)
    for layer in range(2):
        batched.update(layer, dt[:, layer, 0], decay_rate[layer])
    untouched = WindowStatistics(2, 5, 40)
    untouched.merge(expected)
    for other in (backwards, merged, batched, untouched):
        assert other.tokens == expected.tokens == 240
        assert torch.equal(other.layer_quantiles(LEVELS), expected.layer_quantiles(LEVELS))
        assert torch.equal(other.head_medians(), expected.head_medians())
        assert torch.equal(other.position_medians(), expected.position_medians())
        assert torch.equal(other.paper_medians(), expected.paper_medians())


def test_memory_does_not_grow_with_text():
    dt, decay_rate = random_inputs(blocks=200, layers=1)[0], torch.ones(1, 5)
    dt = dt.clamp(1e-6, 1e2)
    dt[0, :, :, 0], dt[0, :, :, 1] = 1e-6, 1e2  # the range, which memory may depend on, is seen at once
    statistics = filled(dt[:20], decay_rate)
    sizes = statistics.heads.counts.shape, statistics.positions.counts.shape
    statistics.merge(filled(dt[20:], decay_rate))
    assert statistics.tokens == 8000
    assert (statistics.heads.counts.shape, statistics.positions.counts.shape) == sizes


@pytest.mark.parametrize("length", [1000, 257, 256, 10])
def test_long_sequences_share_bins_between_positions(length):
    """The windows rise with position: each bin holds the median of its own positions."""
    windows = torch.linspace(2, 1000, length, dtype=torch.float64)
    statistics = WindowStatistics(1, 1, length)
    statistics.update(0, -torch.log1p(-1 / windows)[None, :, None], torch.ones(1, dtype=torch.float64))
    starts = statistics.position_starts()
    assert len(starts) == min(length, POSITION_BINS)
    assert starts[0] == 0
    assert starts == sorted(set(starts))
    ends = [*starts[1:], length]
    expected = [np.median(windows[a:b]) for a, b in zip(starts, ends, strict=True)]
    np.testing.assert_allclose(statistics.position_medians()[0].numpy(), expected, rtol=0.01)
    assert statistics.paper_medians().item() == pytest.approx(np.median(windows), rel=0.01)


def test_text_shorter_than_a_sequence_leaves_no_empty_bins():
    statistics = WindowStatistics(1, 2, 1024)
    statistics.update(0, torch.ones(1, 10, 2), torch.ones(2))
    assert statistics.position_starts() == [0, 4, 8]
    assert torch.isfinite(statistics.position_medians()).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
def test_time_steps_that_make_no_sense_are_refused(bad):
    statistics = WindowStatistics(1, 2, 4)
    with pytest.raises(ValueError, match="layer 0 has time steps that are NaN, infinite or negative"):
        statistics.update(0, torch.full((1, 4, 2), bad), torch.ones(2))
    assert statistics.tokens == 0


def test_log_window_keeps_its_digits_where_forgetting_is_weak():
    dt = torch.tensor([[[1e-9]]])
    assert log_window(dt, torch.ones(1)).item() == pytest.approx(math.log(1e9), rel=1e-6)


def test_an_empty_histogram_has_no_quantiles():
    assert LogHistogram(3).quantiles([0.5]).isnan().all()
