"""How long the host takes for a call."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def microseconds(call: Callable[[], object], calls: int, rounds: int) -> float:
    """Return the best mean of some rounds, so that other work on the machine does not count.

    A GPU is waited for before each round, whose `calls` its queue has to have room for.
    """
    wait = torch.cuda.synchronize if torch.cuda.is_initialized() else lambda: None
    best = float("inf")
    for _ in range(rounds):
        wait()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, time.perf_counter() - start)
    wait()
    return best / calls * 1e6
