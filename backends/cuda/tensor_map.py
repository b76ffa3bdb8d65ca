"""TMA descriptors (tensor maps), encoded by the driver once for each view."""

from __future__ import annotations

import ctypes
import functools

import torch

from mla.backends.cuda.runtime import TensorMap, check, driver

#: CUtensorMapDataType of what kernels load; one-byte floats travel as bytes.
_DATA_TYPES = {
    torch.uint8: 0,
    torch.float8_e4m3fn: 0,
    torch.int32: 3,
    torch.float16: 6,
    torch.float32: 7,
    torch.bfloat16: 9,
}
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
_L2_PROMOTIONS = {0: 0, 64: 1, 128: 2, 256: 3}


@functools.lru_cache(maxsize=4096)
def tensor_map(
    pointer: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    *,
    steps: tuple[int, ...] | None = None,
    swizzle: int = 128,
    l2_promotion: int = 128,
) -> TensorMap:
    """Encode a tiled tensor map; elements outside `shape` read as zero.

    Parameters
    ----------
    pointer : int
        Address of the first element, a multiple of 16.
    dtype : torch.dtype
        One of `_DATA_TYPES`.
    shape : tuple of int
        Extents in elements, fastest dimension first (the order of TMA coordinates), 1 to 5 of them, each >= 1.
    strides : tuple of int
        Strides in bytes of ``shape[1:]``, multiples of 16 below 2^40.
    box : tuple of int
        Extents of what one copy spans, fastest first, each <= 256; ``box[0]`` spans at most `swizzle` bytes.
    steps : tuple of int, optional
        Of the elements that the box spans in a dimension, one copy moves every ``steps``-th; 1 to 8, ``steps[0]`` is 1.
        All of them when missing.
    swizzle : int
        0, 32, 64 or 128 bytes.
    l2_promotion : int
        Bytes that L2 fetches at a time: 0, 64, 128 or 256.

    Returns
    -------
    TensorMap
        The same object for the same arguments, to be assigned to a field of a parameter struct (which copies it).

    Raises
    ------
    MlaError
        The driver refuses the geometry.
    """
    rank = len(shape)
    room = ctypes.create_string_buffer(128 + 64)  # the encoder wants 64-byte alignment
    address = ctypes.addressof(room) + -ctypes.addressof(room) % 64
    u64, u32 = ctypes.c_uint64, ctypes.c_uint32
    result = driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(address),
        _DATA_TYPES[dtype],
        u32(rank),
        ctypes.c_void_p(pointer),
        (u64 * rank)(*shape),
        (u64 * max(1, rank - 1))(*strides),
        (u32 * rank)(*box),
        (u32 * rank)(*(steps or [1] * rank)),
        0,
        _SWIZZLES[swizzle],
        _L2_PROMOTIONS[l2_promotion],
        0,
    )
    check(result, f"cuTensorMapEncodeTiled of {dtype} {shape}, strides {strides}, box {box}, swizzle {swizzle}")
    return TensorMap.from_buffer_copy((ctypes.c_ubyte * 128).from_address(address))
