"""The list of implementations: read from YAML, checked against a closed schema, extended by users.

The schema is told in docs/design.md. The packaged ``registry.yaml`` comes first, then each file of ``MLA_REGISTRY``
(a list separated by `os.pathsep`), then each entry point of the group ``mla.registry`` (a callable that returns a path
or a mapping), then what `register` is given. Every fault is a `RegistryError` that starts with ``file:line``.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import yaml

from mla._paths import REGISTRY
from mla.errors import RegistryError
from mla.problem import OPS, PREFILL_DTYPES, RopeKind

SCHEMA = 1

_ENTRY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_ID = re.compile(r"[a-z0-9_]+(\.[a-z0-9_]+){3,}")
_DTYPES = frozenset(PREFILL_DTYPES) | {"int32"}
_OUT_DTYPES = frozenset({"bf16", "fp16", "fp32", "fp8"})
FEATURES = frozenset({
    "lse", "sinks", "softcap", "bias", "split_q", "batch_invariant",
    "q_scale", "k_scales", "v_scale", "v_transposed", "rope_prescaled", "scales",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class PageSize:
    """Page sizes an implementation takes: within [min, max] and a multiple of ``multiple_of``."""

    min: int = 1
    max: int | None = None
    multiple_of: int = 1


@dataclass(frozen=True, slots=True)
class Requirements:
    """Conditions on a problem and an architecture; None states no condition."""

    arch: tuple[str, ...] | None = None
    dtypes: tuple[str, ...] | None = None
    out_dtypes: tuple[str, ...] | None = None
    dims: tuple[tuple[int, int], ...] | None = None
    rope: tuple[str, ...] | None = None
    page_size: PageSize | None = None
    granularity: tuple[int, ...] | None = None
    masks: tuple[str, ...] | None = None
    features: tuple[str, ...] | None = None
    alignment: int | None = None


@dataclass(frozen=True, slots=True)
class Implementation:
    """One registered implementation of one operation.

    Attributes
    ----------
    id : str
        ``<backend>.<arch>.<op>.<variant>``.
    entry : str
        ``module:Class``, imported on first use.
    sources : tuple of Path
        Kernel sources, absolute.
    priority : int
        Higher is tried first.
    origin : str
        ``file:line`` that registered it.
    """

    id: str
    op: str
    backend: str
    entry: str
    priority: int
    sources: tuple[Path, ...] = ()
    requires: Requirements = field(default_factory=Requirements)
    note: str = ""
    origin: str = ""

    def load(self) -> Any:
        """Import and return the entry class."""
        module, _, name = self.entry.partition(":")
        try:
            return getattr(importlib.import_module(module), name)
        except AttributeError as error:
            raise RegistryError(f"{self.origin}: {module} has no class {name!r}") from error


class Registry:
    """An ordered set of implementations without ambiguity."""

    def __init__(self) -> None:
        self._by_id: dict[str, Implementation] = {}
        self._lock = threading.Lock()

    def __iter__(self) -> Any:
        return iter(tuple(self._by_id.values()))

    def __len__(self) -> int:
        return len(self._by_id)

    def __getitem__(self, implementation_id: str) -> Implementation:
        return self._by_id[implementation_id]

    @property
    def backends(self) -> tuple[str, ...]:
        """Names of all backends that have an implementation."""
        return tuple(dict.fromkeys(implementation.backend for implementation in self))

    def candidates(self, op: str, backends: tuple[str, ...]) -> list[Implementation]:
        """Implementations of ``op`` by these backends, in the order they are tried: by priority, then as ``backends`` stand."""
        found = [one for one in self if one.op == op and one.backend in backends]
        return sorted(found, key=lambda one: (-one.priority, backends.index(one.backend)))

    def add(self, source: str | os.PathLike[str] | Mapping[str, Any]) -> None:
        """Add every implementation of a file or mapping, or none of them.

        Raises
        ------
        RegistryError
            The source breaks the schema, repeats an id, or gives two implementations of one op and backend one priority.
        """
        document = _Document.from_mapping(source) if isinstance(source, Mapping) else _Document.from_file(Path(source))
        with self._lock:
            by_id = dict(self._by_id)
            ranks = {(one.op, one.backend, one.priority): one for one in by_id.values()}
            for one in document.implementations():
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


class _Document:
    """A parsed registry document whose values know the line they stand on."""

    def __init__(self, label: str, content: Any, lines: dict[tuple[str | int, ...], int], folder: Path) -> None:
        self.label, self.content, self.lines, self.folder = label, content, lines, folder

    @classmethod
    def from_file(cls, path: Path) -> _Document:
        label = os.fspath(path)
        try:
            loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise RegistryError(f"{label}:0: cannot be read: {error.strerror}") from error
        lines: dict[tuple[str | int, ...], int] = {}
        try:
            node = loader.get_single_node()
            content = None if node is None else _construct(loader, node, (), lines, label)
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else 0
            raise RegistryError(f"{label}:{line}: not valid YAML: {error.problem}") from error
        finally:
            loader.dispose()
        return cls(label, content, lines, path.parent)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> _Document:
        return cls("<mapping>", mapping, {}, Path.cwd())

    def fail(self, path: tuple[str | int, ...], message: str) -> RegistryError:
        return RegistryError(f"{self.origin(path)}: {message}")

    def origin(self, path: tuple[str | int, ...]) -> str:
        if not self.lines:
            return f"{self.label}:{'.'.join(map(str, path))}"
        while path not in self.lines:
            path = path[:-1]
        return f"{self.label}:{self.lines[path]}"

    def implementations(self) -> list[Implementation]:
        top = self._mapping((), {"schema", "implementations"}, required={"schema", "implementations"})
        if top["schema"] != SCHEMA or isinstance(top["schema"], bool):
            raise self.fail(("schema",), f"schema is {top['schema']!r}; this version reads schema {SCHEMA}")
        entries = self._list(("implementations",))
        return [self._implementation(("implementations", index)) for index in range(len(entries))]

    def _implementation(self, path: tuple[str | int, ...]) -> Implementation:
        required = {"id", "op", "backend", "entry", "priority"}
        values = self._mapping(path, required | {"sources", "requires", "note"}, required)
        op = self._word((*path, "op"), OPS)
        backend = self._text((*path, "backend"), _NAME, "a lower-case name")
        identifier = self._text((*path, "id"), _ID, "<backend>.<arch>.<op>.<variant>")
        if identifier.split(".")[0] != backend or identifier.split(".")[2] != op:
            raise self.fail((*path, "id"), f"id {identifier!r} must be {backend}.<arch>.{op}.<variant>")
        sources = []
        if "sources" in values:
            for index, name in enumerate(self._list((*path, "sources"))):
                source = self.folder / str(name)
                if not source.is_file():
                    raise self.fail((*path, "sources", index), f"source {str(name)!r} does not exist in {self.folder}")
                sources.append(source.absolute())
        return Implementation(
            id=identifier,
            op=op,
            backend=backend,
            entry=self._text((*path, "entry"), _ENTRY, "module:Class"),
            priority=self._integer((*path, "priority"), minimum=0),
            sources=tuple(sources),
            requires=self._requirements((*path, "requires")) if "requires" in values else Requirements(),
            note=self._text((*path, "note"), re.compile(r".*"), "one line") if "note" in values else "",
            origin=self.origin(path),
        )

    def _requirements(self, path: tuple[str | int, ...]) -> Requirements:
        readers: dict[str, Callable[[tuple[str | int, ...]], Any]] = {
            "arch": lambda at: self._texts(at),
            "dtypes": lambda at: self._words(at, _DTYPES),
            "out_dtypes": lambda at: self._words(at, _OUT_DTYPES),
            "dims": self._dims,
            "rope": lambda at: self._words(at, get_args(RopeKind)),
            "page_size": self._page_size,
            "granularity": lambda at: tuple(
                self._integer((*at, index), minimum=1) for index in range(len(self._list(at)))
            ),
            "masks": lambda at: None if self._value(at) == "any" else self._texts(at),
            "features": lambda at: self._words(at, FEATURES),
            "alignment": lambda at: self._integer(at, minimum=1),
        }
        values = self._mapping(path, set(readers))
        return Requirements(**{key: readers[key]((*path, key)) for key in values})

    def _dims(self, path: tuple[str | int, ...]) -> tuple[tuple[int, int], ...]:
        pairs = []
        for index, pair in enumerate(self._list(path)):
            at = (*path, index)
            if not isinstance(pair, (list, tuple)) or len(pair) != 2:
                raise self.fail(at, f"dims are pairs [q_depth, v_head_dim], not {pair!r}")
            pairs.append((self._integer((*at, 0), minimum=1), self._integer((*at, 1), minimum=1)))
        return tuple(pairs)

    def _page_size(self, path: tuple[str | int, ...]) -> PageSize:
        values = self._mapping(path, {"min", "max", "multiple_of"})
        return PageSize(**{key: self._integer((*path, key), minimum=1) for key in values})

    def _value(self, path: tuple[str | int, ...]) -> Any:
        value = self.content
        for key in path:
            value = value[key]
        return value

    def _mapping(
        self, path: tuple[str | int, ...], known: set[str], required: set[str] | frozenset[str] = frozenset()
    ) -> Mapping[str, Any]:
        value = self._value(path)
        where = str(path[-1]) if path and isinstance(path[-1], str) else "an implementation" if path else "the file"
        if not isinstance(value, Mapping):
            raise self.fail(path, f"{where} must be a mapping, not {value!r}")
        for key in value:
            if key not in known:
                raise self.fail((*path, key), f"unknown key {key!r} in {where}; known keys: {', '.join(sorted(known))}")
        for key in sorted(required - set(value)):
            raise self.fail(path, f"{where} lacks the key {key!r}")
        return value

    def _list(self, path: tuple[str | int, ...]) -> list[Any] | tuple[Any, ...]:
        value = self._value(path)
        if not isinstance(value, (list, tuple)):
            raise self.fail(path, f"{path[-1]} must be a list, not {value!r}")
        return value

    def _text(self, path: tuple[str | int, ...], pattern: re.Pattern[str], form: str) -> str:
        value = self._value(path)
        if not isinstance(value, str) or not pattern.fullmatch(value):
            raise self.fail(path, f"{path[-1]} must be {form}, not {value!r}")
        return value

    def _texts(self, path: tuple[str | int, ...]) -> tuple[str, ...]:
        values = self._list(path)
        for index, value in enumerate(values):
            if not isinstance(value, str):
                raise self.fail((*path, index), f"{path[-1]} must be a list of names, not {value!r}")
        return tuple(values)

    def _word(self, path: tuple[str | int, ...], known: Any) -> str:
        value = self._value(path)
        if value not in known:
            name = path[-1] if isinstance(path[-1], str) else path[-2]
            raise self.fail(path, f"{name}: {value!r} is not one of {', '.join(sorted(known))}")
        return str(value)

    def _words(self, path: tuple[str | int, ...], known: Any) -> tuple[str, ...]:
        return tuple(self._word((*path, index), known) for index in range(len(self._list(path))))

    def _integer(self, path: tuple[str | int, ...], minimum: int) -> int:
        value = self._value(path)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise self.fail(path, f"{path[-1]} must be an integer >= {minimum}, not {value!r}")
        return value


def _construct(
    loader: yaml.SafeLoader, node: yaml.Node, path: tuple[str | int, ...], lines: dict[tuple[str | int, ...], int], label: str
) -> Any:
    """Turn a node into plain values, noting the line of each under its path."""
    lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.SequenceNode):
        return [_construct(loader, child, (*path, index), lines, label) for index, child in enumerate(node.value)]
    if isinstance(node, yaml.MappingNode):
        result: dict[str, Any] = {}
        for key_node, child in node.value:
            key = loader.construct_object(key_node)
            line = key_node.start_mark.line + 1
            if not isinstance(key, str) or key in result:
                raise RegistryError(f"{label}:{line}: {'repeated key' if key in result else 'key is not text:'} {key!r}")
            lines[(*path, key)] = line
            result[key] = _construct(loader, child, (*path, key), lines, label)
        return result
    return loader.construct_object(node)


_default: Registry | None = None
_default_lock = threading.RLock()
_observers: list[Callable[[], None]] = []


def default() -> Registry:
    """Return the process's registry, read on first use."""
    global _default
    if _default is None:
        with _default_lock:
            if _default is None:
                registry = Registry()
                registry.add(REGISTRY)
                for name in filter(None, os.environ.get("MLA_REGISTRY", "").split(os.pathsep)):
                    registry.add(name)
                for point in importlib.metadata.entry_points(group="mla.registry"):
                    registry.add(point.load()())
                _default = registry
    return _default


def register(source: str | os.PathLike[str] | Mapping[str, Any]) -> None:
    """Add implementations to the process's registry.

    Parameters
    ----------
    source : path or mapping
        A registry document, ``{"schema": 1, "implementations": [...]}``, or the path of one. Sources of a file are
        relative to its folder, those of a mapping to the current one.

    Raises
    ------
    RegistryError
        The document breaks the schema or clashes with what is registered; nothing of it is added.
    """
    default().add(source)
    for observer in _observers:
        observer()


def on_change(observer: Callable[[], None]) -> None:
    """Call ``observer`` after every `register`: for caches of choices made from the registry."""
    _observers.append(observer)
