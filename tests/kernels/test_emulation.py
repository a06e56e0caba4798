"""The yardstick of the GPU tests: the recurrence itself when it rounds nothing, and bfloat16's errors when it does."""

import pytest
import torch

from emulation import emulate
from helpers import assert_close, relative_error
from palimpsa_surgery.kernels.reference import palimpsa_scan_reference
from scan_cases import Case, differentiate, make


@pytest.mark.parametrize(
    "case",
    [
        Case(2, 35, 4, 5, 20, 2, initial=True, documents=3, variance=True),
        Case(1, 100, 2, 5, 20, 1, initial=True),
        Case(1, 33, 2, 5, 8, 1, initial=True, extreme="decay", beta=False),
    ],
    ids=str,
)
@pytest.mark.parametrize("tuned", [False, True])
def test_without_rounding_it_is_the_recurrence(case, tuned):
    data = make(case)
    expected = differentiate(palimpsa_scan_reference, data, case.variance, torch.float64)
    actual = emulate(data, case.variance, None, tuned, segment=32)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert_close(actual[name], value, 1e-14, name)


@pytest.mark.parametrize("tuned", [False, True])
def test_rounding_costs_what_bfloat16_costs(tuned):
    data = make(Case(1, 40, 4, 16, 32, 1, torch.bfloat16, initial=True))
    expected = differentiate(palimpsa_scan_reference, data, False, torch.float64)
    actual = emulate(data, False, torch.bfloat16, tuned)
    for name in ("y", "final_state", "dx", "dB", "dC", "dbeta"):
        assert 5e-4 < relative_error(actual[name], expected[name]) < 5e-3, name
