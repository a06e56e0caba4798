import math

import pytest

from palimpsa_surgery.errors import UserError
from palimpsa_surgery.surgery.selection import select_layers, top_layers

WINDOWS = [3.0, 90.0, 7.0, math.inf, 90.0, 1.0]


def select(**options):
    return select_layers(len(WINDOWS), WINDOWS, **options)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ({"top_k": 1}, [3]),
        ({"top_k": 2}, [1, 3]),
        ({"top_k": 3}, [1, 3, 4]),
        ({"top_k": 6}, [0, 1, 2, 3, 4, 5]),
        ({"top_k": 0}, []),
        ({"layers": [4, 0]}, [0, 4]),
        ({"min_window": 7}, [1, 2, 3, 4]),
        ({"min_window": 90.5}, [3]),
        ({"min_window": 1}, [0, 1, 2, 3, 4, 5]),
        ({"top_k": 2, "palimpsa": [3]}, [1, 4]),
        ({"min_window": 7, "palimpsa": [3, 2]}, [1, 4]),
        ({"layers": [5], "palimpsa": [3]}, [5]),
    ],
    ids=str,
)
def test_rules(rule, expected):
    assert select(**rule) == expected


@pytest.mark.parametrize("rule", [{"top_k": 0}, {"layers": [2]}], ids=str)
def test_rules_that_need_no_windows(rule):
    assert select_layers(6, **rule) == rule.get("layers", [])


def test_longest_first_and_ties_by_index():
    assert top_layers(WINDOWS, 4) == [3, 1, 4, 2]
    assert top_layers([5.0] * 4, 2) == [0, 1]
    assert top_layers(WINDOWS, 99, palimpsa=[1, 3]) == [4, 2, 0, 5]


def test_without_a_rule_the_paper_s_number_of_layers():
    windows = [float(layer) for layer in range(12)]
    assert select_layers(12, windows) == list(range(4, 12)) == select_layers(12, windows, top_k=8)
    with pytest.raises(UserError, match="top_k needs an analysis"):
        select_layers(12)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({}, "from 0 to 6, the number of layers; got 8"),
        ({"top_k": 1, "layers": [1]}, "got top_k, layers"),
        ({"top_k": 0, "min_window": 2}, "got top_k, min_window"),
        ({"top_k": 7}, "from 0 to 6, the number of layers; got 7"),
        ({"top_k": -1}, "got -1"),
        ({"top_k": 5, "palimpsa": [0, 1]}, "from 0 to 4, the number of Mamba2 layers left; got 5"),
        ({"layers": []}, "list of layers is empty"),
        ({"layers": [6, 0]}, "from 0 to 5, got 6"),
        ({"layers": [-1]}, "from 0 to 5, got -1"),
        ({"layers": [2, 1, 2]}, "more than once: 2"),
        ({"layers": [1, 3], "palimpsa": [3]}, "Palimpsa layers already: 3"),
        ({"min_window": 100, "palimpsa": [3]}, "at least 100 tokens; the longest has 90"),
        ({"min_window": 0.5}, "at least 1 token, got 0.5"),
        ({"min_window": math.nan}, "got nan"),
    ],
    ids=str,
)
def test_mistakes(rule, message):
    with pytest.raises(UserError, match=message):
        select(**rule)


@pytest.mark.parametrize("rule", [{"top_k": 2}, {"min_window": 3}], ids=str)
def test_windows_are_needed(rule):
    with pytest.raises(UserError, match="needs an analysis"):
        select_layers(6, **rule)
    with pytest.raises(UserError, match="the analysis has 2 layers, the model 6"):
        select_layers(6, [1.0, 2.0], **rule)
