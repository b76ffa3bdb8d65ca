"""The process's list of implementations: the packaged ``registry.yaml``, extended by users.

After the packaged file come each file of ``MLA_REGISTRY`` (a list separated by `os.pathsep`), each entry point of the
group ``mla.registry`` (a callable that returns a path or a mapping), and what `register` is given.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mla._paths import REGISTRY
from mla.errors import DTypeError, RegistryError
from mla.registry_file import Implementation, read_implementations

_lock = threading.RLock()
_observers: list[Callable[[], None]] = []


class Registry:
    """Implementations by id; for each op and backend their order is unambiguous."""

    def __init__(self) -> None:
        self._by_id: dict[str, Implementation] = {}

    def __iter__(self) -> Iterator[Implementation]:
        return iter(tuple(self._by_id.values()))

    def __len__(self) -> int:
        return len(self._by_id)

    def __getitem__(self, implementation_id: str) -> Implementation:
        return self._by_id[implementation_id]

    @property
    def backends(self) -> tuple[str, ...]:
        """Names of all backends that have an implementation."""
        return tuple(dict.fromkeys(one.backend for one in self))

    def candidates(self, op: str, backends: Sequence[str]) -> list[Implementation]:
        """Return the implementations of an op as they are tried: by priority, then as ``backends`` stand."""
        found = [one for one in self if one.op == op and one.backend in backends]
        return sorted(found, key=lambda one: (-one.priority, backends.index(one.backend)))

    def add(self, source: str | os.PathLike[str] | Mapping[str, Any]) -> None:
        """Add every implementation of a document, or none of them.

        Raises
        ------
        RegistryError
            The document breaks the schema, repeats an id, or gives two implementations of one op and backend the same
            priority.
        """
        with _lock:
            by_id = dict(self._by_id)
            ranks = {(one.op, one.backend, one.priority): one for one in by_id.values()}
            for one in read_implementations(source):
                if one.id in by_id:
                    raise RegistryError(f"{one.origin}: id {one.id!r} is taken by {by_id[one.id].origin}")
                twin = ranks.setdefault((one.op, one.backend, one.priority), one)
                if twin is not one:
                    raise RegistryError(
                        f"{one.origin}: {one.id!r} and {twin.id!r} ({twin.origin}) both have priority {one.priority} "
                        f"for {one.op} on {one.backend}: the order would be ambiguous"
                    )
                by_id[one.id] = one
            self._by_id = by_id


def default() -> Registry:
    """Return the process's registry, read on first use."""
    with _lock:
        return _read_default()


@functools.cache
def _read_default() -> Registry:
    registry = Registry()
    registry.add(REGISTRY)
    for name in filter(None, os.environ.get("MLA_REGISTRY", "").split(os.pathsep)):
        registry.add(name)
    for point in importlib.metadata.entry_points(group="mla.registry"):
        registry.add(point.load()())
    return registry


def register(source: str | os.PathLike[str] | Mapping[str, Any]) -> None:
    """Add implementations to the process's registry.

    Parameters
    ----------
    source : path or mapping
        A registry document, ``{"schema": 1, "implementations": [...]}``, or the path of one. Sources of a file are
        relative to its folder, those of a mapping to the current one.

    Raises
    ------
    DTypeError
        The source is neither.
    RegistryError
        The document breaks the schema or clashes with what is registered; nothing of it is added.
    """
    if not isinstance(source, (str, os.PathLike, Mapping)):
        raise DTypeError(f"source must be a path or a mapping, got {type(source).__name__}")
    default().add(source)
    for observer in _observers:
        observer()


def on_change(observer: Callable[[], None]) -> None:
    """Call ``observer`` after every `register`: for memories of choices made from the registry."""
    _observers.append(observer)
