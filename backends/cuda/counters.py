"""The words by which the thread blocks of a launch share out and bring together its work."""

from __future__ import annotations

import ctypes

import torch

from mla.backends.cuda import compiler
from mla.backends.cuda.runtime import check, driver

_WORDS = 1 << 16
_CAPTURE_MODE_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


class Counters:
    """Int32 words of a stream, in memory that the driver gives and that stays.

    Not a tensor: torch may be filling the pool of a CUDA graph, as while ``torch.compile`` warms one up, and what
    outlives the call there is taken for an error and written over.
    """

    def __init__(self, device_index: int, stream: int) -> None:
        compiler.cuda_core().Device(device_index).set_current()  # a thread may have made no CUDA call yet
        cuda, address, mode = driver(), ctypes.c_uint64(), ctypes.c_int(_CAPTURE_MODE_RELAXED)
        # Another thread may be capturing, which forbids an allocation unless this thread says that it is no part of it.
        check(cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)), "cuThreadExchangeStreamCaptureMode")
        try:
            check(cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(4 * _WORDS)), "cuMemAlloc")
        finally:
            check(cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)), "cuThreadExchangeStreamCaptureMode")
        self._address = address.value
        zeroed = cuda.cuMemsetD32Async(address, ctypes.c_uint(0), ctypes.c_size_t(_WORDS), ctypes.c_void_p(stream))
        check(zeroed, "cuMemsetD32Async")

    def data_ptr(self) -> int:
        """Return the address."""
        return self._address


_of_streams: dict[tuple[int, int], Counters] = {}


def counters_of_stream(device: torch.device) -> Counters:
    """Return zeroed counters of the current stream, at most 65,536, which is not being captured.

    Kernels leave them zero, so that the same serve a stream. A captured graph may be replayed on any stream and needs
    counters of its own, zeroed by the graph.
    """
    key = (device.index, torch._C._cuda_getCurrentRawStream(device.index))
    counters = _of_streams.get(key)
    if counters is None:
        counters = _of_streams[key] = Counters(*key)
    return counters
