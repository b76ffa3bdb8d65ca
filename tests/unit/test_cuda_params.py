"""Parameter blocks of the CUDA backend on the host: packed bytes, tensor-map alignment, division by multiplying."""

from __future__ import annotations

import ctypes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mla.backends.cuda.plan import PlanParams, reciprocal
from mla.backends.cuda.runtime import TensorMap, with_tail
from mla.backends.params import MergeParams, packer


class Inner(ctypes.Structure):
    _fields_ = [("count", ctypes.c_int), ("data", ctypes.c_void_p)]


class Outer(ctypes.Structure):
    _fields_ = [("flag", ctypes.c_int), ("inner", Inner), ("scale", ctypes.c_float), ("bits", ctypes.c_uint)]


def test_packed_bytes_are_those_of_the_structure() -> None:
    assert packer(Outer)(1, -2, 2**63, 0.5, 2**32 - 1) == bytes(Outer(1, Inner(-2, 2**63), 0.5, 2**32 - 1))
    values = tuple(range(18))
    assert packer(MergeParams)(*values, 3, 4) == bytes(
        MergeParams(*(values[first : first + 3] for first in range(0, 18, 3)), 3, 4)
    )
    flat = tuple(range(1, len(PlanParams._fields_) + 1))
    assert packer(PlanParams)(*flat) == bytes(PlanParams(*flat))


@pytest.mark.parametrize("count", range(20))
def test_structs_with_tensor_maps_end_at_64_bytes(count: int) -> None:
    class Params(ctypes.Structure):
        _fields_ = with_tail([("map", TensorMap), *((f"n{i}", ctypes.c_int) for i in range(count))])

    assert ctypes.sizeof(Params) == 128 + -(-4 * count // 64) * 64


@given(st.integers(1, 2**31 - 1), st.integers(0, 2**31 - 1))
def test_reciprocal_divides_exactly(divisor: int, n: int) -> None:
    multiplier, shift = reciprocal(divisor)
    assert 0 < multiplier < 2**32
    for value in {n, n // divisor * divisor, max(0, n // divisor * divisor - 1), 2**31 - 1}:
        assert value * multiplier >> shift == value // divisor
