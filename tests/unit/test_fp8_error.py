"""An affordable part of the table of docs/numerics.md, held to the library's bounds."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.fp8_error import Inputs, dominant, errors_of_cache, errors_of_operands, normal, outliers, shifted

BOUND = 5e-2


@pytest.mark.parametrize("make", [normal, outliers, dominant])
def test_error(make: Callable[..., Inputs]) -> None:
    inputs = make(1024, 2, 32)
    for found in (errors_of_operands(inputs, "head"), errors_of_cache(inputs, 128)):
        assert found.dequantised <= BOUND
        assert found.dequantised < found.unquantised <= BOUND, "what is stored in fp8 costs more than the arithmetic"


def test_long_sums_lose_nothing() -> None:
    found = errors_of_operands(shifted(32768, 2, 16), "head")
    assert found.unquantised <= BOUND
    assert abs(found.gain) <= 5e-3
