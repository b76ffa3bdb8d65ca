"""What ``MLA_LOGLEVEL`` makes the library say of each launch, through the logger ``mla`` of Python's `logging`.

    0   nothing; then nothing of this module is on the way of a call
    1   the operation and the implementation that serves it
    3   its arguments: shapes, dtypes, strides, numbers
    5   statistics of what it reads and writes; synchronises
    10  a file for each launch in ``MLA_DUMP_DIR``, which ``mla replay`` runs again; synchronises

While a graph is captured nothing can be read: levels 5 and 10 then say what 3 does. A replayed graph says nothing.
"""

from __future__ import annotations

import itertools
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mla import dispatch, jit_cache, replay
from mla._check import is_capturing
from mla.errors import ArgumentError

if TYPE_CHECKING:
    from mla.dispatch import Runner
    from mla.problem import Problem
    from mla.registry_file import Implementation

LEVELS = (0, 1, 3, 5, 10)

_logger = logging.getLogger("mla")
_numbers = itertools.count(1)


def set_level(level: int) -> None:
    """Set the level for the calls that follow, whatever ``MLA_LOGLEVEL`` says.

    Without a handler on the logger ``mla`` or above, lines go to stderr.

    Raises
    ------
    ArgumentError
        `level` is none of 0, 1, 3, 5, 10.
    """
    if level not in LEVELS:
        raise ArgumentError(f"the log level must be one of {', '.join(map(str, LEVELS))}, got {level!r}")
    if level and not _logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s[%(process)d] %(message)s"))
        _logger.addHandler(handler)
    if level:
        _logger.setLevel(logging.INFO)

    def watcher(implementation: Implementation, problem: Problem, run: Runner) -> Runner:
        return _Logged(implementation.id, problem, run, level)

    dispatch.watch(watcher if level else None)


def level_of_environment() -> int:
    """Return the level that ``MLA_LOGLEVEL`` names.

    Raises
    ------
    ArgumentError
        It is none of 0, 1, 3, 5, 10.
    """
    text = os.environ.get("MLA_LOGLEVEL", "0")
    for level in LEVELS:
        if text == str(level):
            return level
    raise ArgumentError(f"MLA_LOGLEVEL must be one of {', '.join(map(str, LEVELS))}, got {text!r}")


def set_level_from_environment() -> None:
    """Set the level that ``MLA_LOGLEVEL`` names; where it names none, each call is refused, but not the import."""
    try:
        level = level_of_environment()
    except ArgumentError as error:
        refusal = str(error)

        def refuse(implementation: Implementation, problem: Problem, run: Runner) -> Runner:
            raise ArgumentError(refusal)

        dispatch.watch(refuse)
        return
    if level:
        set_level(level)


def dump_dir() -> Path:
    """Return where level 10 writes: ``MLA_DUMP_DIR``, else ``dumps`` in the cache folder."""
    folder = os.environ.get("MLA_DUMP_DIR")
    return Path(folder) if folder else jit_cache.cache_dir() / "dumps"


class _Logged:
    """A prepared implementation that says what it does."""

    def __init__(self, implementation: str, problem: Problem, run: Runner, level: int) -> None:
        self._implementation, self._problem, self._run, self._level = implementation, problem, run, level

    def __call__(self, args: Any) -> None:
        op, level = self._problem.op, self._level
        number = next(_numbers)
        tensors = [value for _, value in replay.flatten(args) if isinstance(value, torch.Tensor)]
        if level >= 5 and is_capturing(tensors[0].device):
            level = 3
        _say(number, f"{op}: {self._implementation}")
        if level >= 3:
            for name, value in replay.flatten(args):
                _say(number, f"  {name}: {_describe(value)}{_statistics(value) if level >= 5 else ''}")
        if level < 10:
            self._run(args)
        else:
            self._dump(number, args)
        if level >= 5:
            for name, value in replay.written(op, args).items():
                _say(number, f"  wrote {name}:{_statistics(value)}")

    def _dump(self, number: int, args: Any) -> None:
        """Write the arguments, run, write the results too: a launch that kills the process leaves its arguments."""
        path = dump_dir() / f"{os.getpid()}-{number:06}-{self._problem.op}.pt"
        recording = replay.Recording.of(self._implementation, self._problem, args)
        recording.save(path)
        self._run(args)
        recording.add_results(args)
        recording.save(path)
        _say(number, f"  dumped to {path}; mla replay {path}")


def _say(number: int, text: str) -> None:
    _logger.info("#%d %s", number, text)


def _describe(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return str(value)
    return (
        f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} strides {list(value.stride())} {value.device}"
    )


def _statistics(value: Any) -> str:
    """Return the range, mean and special values of a tensor in words."""
    if not isinstance(value, torch.Tensor) or value.numel() == 0:
        return ""
    numbers = value.detach().float()
    finite = numbers[numbers.isfinite()]
    span = f" from {finite.min():.4g} to {finite.max():.4g}, mean {finite.mean():.4g}," if finite.numel() else ""
    return f";{span} {int(numbers.isnan().sum())} NaN, {int(numbers.isinf().sum())} inf"
