"""Token tasks: MQAR and copying, solved from their input ids alone."""

import hashlib
import time

import numpy as np
import pytest
import torch

from palimpsa_surgery.errors import UserError
from palimpsa_surgery.stages.synthetic import CURRICULUM, IGNORED, TokenBatch, generate_tokens, token_accuracy
from palimpsa_surgery.stages.synthetic.copying import FIRST_SYMBOL, PADDING, SEPARATOR


def recall(input_ids: np.ndarray, pairs: int) -> np.ndarray:
    """Solve MQAR: where an id behind the pairs is a key, predict its value."""
    predictions = np.zeros_like(input_ids)
    for row, out in zip(input_ids, predictions, strict=True):
        value_of = dict(zip(row[0 : 2 * pairs : 2].tolist(), row[1 : 2 * pairs : 2].tolist(), strict=True))
        assert len(value_of) == pairs
        out[2 * pairs :] = [value_of.get(token, 0) for token in row[2 * pairs :].tolist()]
    return predictions


@pytest.mark.parametrize(("length", "pairs"), CURRICULUM, ids=lambda value: str(value))
def test_oracle_solves_mqar(length, pairs):
    batch = generate_tokens("mqar", length=length, count=20, seed=1)
    assert batch.input_ids.shape == batch.targets.shape == (20, length)
    assert batch.input_ids.dtype == batch.targets.dtype == np.int32
    assert ((batch.targets != IGNORED).sum(axis=1) == pairs).all()
    predictions = recall(batch.input_ids, pairs)
    assert token_accuracy(predictions, batch.targets).tolist() == [1] * 20
    assert token_accuracy(predictions + 1, batch.targets).tolist() == [0] * 20


@pytest.mark.parametrize("vocab_size", [8192, 34, 35])
def test_mqar_keys_and_values_are_of_disjoint_halves(vocab_size):
    batch = generate_tokens("mqar", length=64, count=50, seed=2, vocab_size=vocab_size)
    keys, values = batch.input_ids[:, 0:32:2], batch.input_ids[:, 1:32:2]
    assert keys.min() >= 1
    assert keys.max() < vocab_size // 2 <= values.min()
    assert values.max() < vocab_size
    for row in (*keys, *values):
        assert len(set(row.tolist())) == 16
    asked = batch.targets != IGNORED
    assert not asked[:, :32].any()
    assert not asked[:, 1::2].any()
    assert [set(ids[mask]) for ids, mask in zip(batch.input_ids, asked, strict=True)] == [set(row) for row in keys]


def test_mqar_filler():
    quiet = generate_tokens("mqar", length=64, pairs=4, count=20, seed=2, random_filler=False)
    asked = quiet.targets != IGNORED
    assert (quiet.input_ids[:, 8:][~asked[:, 8:]] == 0).all()
    noisy = generate_tokens("mqar", length=64, pairs=4, count=20, seed=2)
    assert (noisy.targets == quiet.targets).all()
    assert len(np.unique(noisy.input_ids[:, 8:])) > 500


@pytest.mark.parametrize("power", [0.01, 1.0])
def test_mqar_gaps_follow_the_power_law(power):
    """The first key's query is the first to choose its place."""
    batch = generate_tokens("mqar", length=64, pairs=4, count=20_000, seed=5, power=power)
    queries = (batch.input_ids == batch.input_ids[:, :1]) & (batch.targets == batch.input_ids[:, 1:2])
    gaps = (queries.argmax(axis=1) - 8) // 2
    expected = np.arange(1, 29) ** (power - 1.0)
    found = np.bincount(gaps, minlength=28) / len(gaps)
    assert found == pytest.approx(expected / expected.sum(), abs=0.01)


def test_mqar_keys_are_uniform():
    batch = generate_tokens("mqar", length=64, count=8000, seed=5, vocab_size=200)
    for column in (0, 30, 1, 31):
        counts = np.bincount(batch.input_ids[:, column], minlength=200)
        used = counts[1:100] if column % 2 == 0 else counts[100:]
        assert abs(used / used.mean() - 1).max() < 0.5  # six standard deviations at 80 expected


def test_mqar_is_fast_and_its_first_examples_do_not_depend_on_how_many_follow():
    start = time.perf_counter()
    many = generate_tokens("mqar", length=256, count=20_000, seed=7)
    assert time.perf_counter() - start < 10  # about 0.4 s of one core
    few = generate_tokens("mqar", length=256, count=4100, seed=7)
    assert (many.input_ids[:4100] == few.input_ids).all()
    assert (many.targets[:4100] == few.targets).all()
    assert (generate_tokens("mqar", length=256, count=10, seed=8).input_ids != few.input_ids[:10]).any(axis=1).all()


@pytest.mark.parametrize("string_length", [None, 5, (1, 10), [3, 10]], ids=str)
def test_oracle_solves_copying(string_length):
    batch = generate_tokens("copying", length=22, count=200, seed=1, string_length=string_length)
    lengths = set()
    for ids, targets in zip(batch.input_ids.tolist(), batch.targets.tolist(), strict=True):
        n = ids.index(SEPARATOR)
        lengths.add(n)
        string = ids[:n]
        assert min(string) >= FIRST_SYMBOL
        assert max(string) < 28
        assert ids == [*string, SEPARATOR, *string, *[PADDING] * (21 - 2 * n)]
        assert targets == [*[IGNORED] * n, *string, *[IGNORED] * (22 - 2 * n)]
    bounds = string_length or 10
    low, high = (bounds, bounds) if isinstance(bounds, int) else bounds
    assert lengths == set(range(low, high + 1))
    assert token_accuracy(batch.targets, batch.targets).tolist() == [1] * 200
    assert token_accuracy(batch.targets - 1, batch.targets).tolist() == [0] * 200


def test_labels_are_what_transformers_shift():
    batch = generate_tokens("copying", length=8, count=3, seed=1)
    targets = batch.targets[:, :-1]
    assert (batch.labels[:, 1:] == targets).all()
    assert (batch.labels[:, 0] == IGNORED).all()
    assert (batch.targets[:, -1] == IGNORED).all()  # so that nothing is lost
    asked = batch.labels != IGNORED
    assert (batch.labels[asked] == batch.input_ids[asked]).all()


def test_a_model_learns_from_labels(small_model):
    batch = generate_tokens("mqar", length=16, pairs=2, count=8, seed=1, vocab_size=32)
    ids, labels = (torch.from_numpy(array).long() for array in (batch.input_ids, batch.labels))
    output = small_model(input_ids=ids, labels=labels)
    at = torch.from_numpy(batch.targets).long()
    expected = torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), at.flatten(), ignore_index=IGNORED)
    assert output.loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_token_accuracy_without_targets_is_nan():
    targets = np.array([[1, IGNORED, 2], [IGNORED] * 3])
    accuracy = token_accuracy(np.array([[1, 5, 3], [1, 2, 3]]), targets)
    assert accuracy[0] == 0.5
    assert np.isnan(accuracy[1])


def test_token_examples_are_the_same_on_every_platform():
    def digest(batch: TokenBatch) -> str:
        return hashlib.sha256(batch.input_ids.tobytes() + batch.targets.tobytes()).hexdigest()[:16]

    assert digest(generate_tokens("mqar", length=64, count=10, seed=0)) == "095f486fa826e07f"
    assert digest(generate_tokens("copying", length=64, count=10, seed=0)) == "5b4055c445ce960e"


ERRORS = {
    "task": (dict(task="passkey"), r"task 'passkey' is not one of those made of token ids \(mqar, copying\)"),
    "option": (dict(hops=1), r"task 'mqar' has no option 'hops' \(it has pairs, power, random_filler, vocab_size\)"),
    "count": (dict(count=0), "count must be an integer of 1 or more, got 0"),
    "seed": (dict(seed=None), "seed must be an integer of 0 or more, got None"),
    "length": (dict(length=2), "length must be an integer of 4 or more, got 2"),
    "length-odd": (dict(length=65), "length must be even, got 65"),
    "pairs": (dict(pairs=17), "pairs must be an integer from 1 to 16, got 17"),
    "vocab-size": (dict(vocab_size=33), "vocab_size must be an integer from 34 to 2147483648, got 33"),
    "power": (dict(power=-1), "power must be a number from 0 to 10, got -1"),
    "copying-length": (dict(task="copying", length=2), "length must be an integer of 3 or more, got 2"),
    "copying-vocab-size": (dict(task="copying", vocab_size=3), "vocab_size must be an integer from 4 to"),
    "copying-string": (dict(task="copying", string_length=32), "string_length must be an integer from 1 to 31, got 32"),
    "copying-low": (dict(task="copying", string_length=(0, 9)), r"string_length\[0\] must be an integer from 1 to 31"),
    "copying-high": (dict(task="copying", string_length=(9, 8)), r"string_length\[1\] must be an integer from 9 to 31"),
}


@pytest.mark.parametrize(("arguments", "message"), ERRORS.values(), ids=ERRORS.keys())
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(UserError, match=message) as error:
        generate_tokens(**({"task": "mqar", "length": 64, "count": 2, "seed": 0} | arguments))
    assert "\n" not in str(error.value)
