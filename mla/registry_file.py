"""Reads a registry document and checks it against the closed schema of docs/design.md."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import yaml

from mla.errors import RegistryError
from mla.problem import OPS, PREFILL_DTYPES, RopeKind
from mla.requirements import PageSize, Requirements

SCHEMA = 1
#: What a problem may ask for beyond the plain operation; see `mla.problem.Problem`.
FEATURES = (
    "lse", "sinks", "softcap", "bias", "split_q", "batch_invariant",
    "q_scale", "k_scales", "v_scale", "v_transposed", "rope_prescaled", "scales", "static_scale",
)  # fmt: skip

_ENTRY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_BACKEND = re.compile(r"[a-z][a-z0-9_]*")
_ID = re.compile(r"[a-z0-9_]+(\.[a-z0-9_]+){3,}")
_ONE_LINE = re.compile(r".+")
_DTYPES = (*PREFILL_DTYPES, "fp8_fnuz", "int32")
_OUT_DTYPES = ("bf16", "fp16", "fp32", "fp8", "fp8_fnuz", "int32")

_Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Implementation:
    """One registered implementation of one operation.

    Attributes
    ----------
    id : str
        ``<backend>.<arch>.<op>.<variant>``.
    entry : str
        ``module:Class``, imported on first use.
    priority : int
        Higher is tried first.
    sources : tuple of Path
        Kernel sources, absolute.
    note : str
        One line for `mla.explain`.
    origin : str
        ``file:line`` that registered it.
    """

    id: str
    op: str
    backend: str
    entry: str
    priority: int
    sources: tuple[Path, ...]
    requires: Requirements
    note: str
    origin: str

    def load(self) -> Any:
        """Import and return the entry class."""
        module, _, name = self.entry.partition(":")
        try:
            return getattr(importlib.import_module(module), name)
        except AttributeError as error:
            raise RegistryError(f"{self.origin}: {module} has no class {name!r}") from error


def read_implementations(source: str | os.PathLike[str] | Mapping[str, Any]) -> list[Implementation]:
    """Read every implementation of a registry document, in its order.

    Parameters
    ----------
    source : path or mapping
        A YAML file, or what one holds. Sources are relative to the file's folder, or to the current one.

    Raises
    ------
    RegistryError
        With ``file:line`` (for a mapping: the path of keys), the faulty value and what is allowed.
    """
    if isinstance(source, Mapping):
        return _Document("<mapping>", source, {}, Path.cwd()).implementations()
    path = Path(source)
    lines: dict[_Path, int] = {}
    return _Document(str(path), _read_yaml(path, lines), lines, path.parent).implementations()


class _Document:
    """Plain values, each reached by its path of keys, and the line on which it stands."""

    def __init__(self, label: str, content: Any, lines: dict[_Path, int], folder: Path) -> None:
        self.label, self.content, self.lines, self.folder = label, content, lines, folder

    def implementations(self) -> list[Implementation]:
        keys = ("schema", "implementations")
        top = self.mapping((), keys, required=keys)
        if type(top["schema"]) is not int or top["schema"] != SCHEMA:
            raise self.fault(("schema",), f"schema is {top['schema']!r}; this version reads schema {SCHEMA}")
        return [self.implementation(path) for path in self.items(("implementations",))]

    def implementation(self, path: _Path) -> Implementation:
        required = ("id", "op", "backend", "entry", "priority")
        values = self.mapping(path, (*required, "sources", "requires", "note"), required)
        op = self.word((*path, "op"), OPS)
        backend = self.text((*path, "backend"), _BACKEND, "a lower-case name")
        identifier = self.text((*path, "id"), _ID, "<backend>.<arch>.<op>.<variant>")
        if (identifier.split(".")[0], identifier.split(".")[2]) != (backend, op):
            raise self.fault((*path, "id"), f"id {identifier!r} must be {backend}.<arch>.{op}.<variant>")
        return Implementation(
            id=identifier,
            op=op,
            backend=backend,
            entry=self.text((*path, "entry"), _ENTRY, "module:Class"),
            priority=self.integer((*path, "priority"), minimum=0),
            sources=tuple(self.source(at) for at in self.items((*path, "sources"))) if "sources" in values else (),
            requires=self.requirements((*path, "requires")) if "requires" in values else Requirements(),
            note=self.text((*path, "note"), _ONE_LINE, "one line") if "note" in values else "",
            origin=self.origin(path),
        )

    def requirements(self, path: _Path) -> Requirements:
        readers: dict[str, Callable[[_Path], Any]] = {
            "arch": self.names,
            "dtypes": lambda at: self.words(at, _DTYPES),
            "out_dtypes": lambda at: self.words(at, _OUT_DTYPES),
            "dims": lambda at: tuple(self.pair(item) for item in self.items(at)),
            "rope": lambda at: self.words(at, get_args(RopeKind)),
            "page_size": self.page_size,
            "granularity": lambda at: tuple(self.integer(item, minimum=1) for item in self.items(at)),
            "masks": lambda at: None if self.value(at) == "any" else self.names(at),
            "features": lambda at: self.words(at, FEATURES),
            "alignment": lambda at: self.integer(at, minimum=1),
        }
        values = self.mapping(path, tuple(readers))
        return Requirements(**{key: readers[key]((*path, key)) for key in values})

    def page_size(self, path: _Path) -> PageSize:
        values = self.mapping(path, ("min", "max", "multiple_of"))
        return PageSize(**{key: self.integer((*path, key), minimum=1) for key in values})

    def source(self, path: _Path) -> Path:
        name = self.text(path, _ONE_LINE, "a path")
        file = self.folder / name
        if not file.is_file():
            raise self.fault(path, f"source {name!r} does not exist in {self.folder}")
        return file.absolute()

    def pair(self, path: _Path) -> tuple[int, int]:
        items = self.items(path)
        if len(items) != 2:
            raise self.fault(path, f"dims are pairs [q_depth, v_head_dim], not {self.value(path)!r}")
        return self.integer(items[0], minimum=1), self.integer(items[1], minimum=1)

    def names(self, path: _Path) -> tuple[str, ...]:
        return tuple(self.text(item, _ONE_LINE, "a name") for item in self.items(path))

    def words(self, path: _Path, known: Collection[str]) -> tuple[str, ...]:
        return tuple(self.word(item, known) for item in self.items(path))

    def word(self, path: _Path, known: Collection[str]) -> str:
        value = self.value(path)
        if not isinstance(value, str) or value not in known:
            raise self.fault(path, f"{_name(path)}: {value!r} is not one of {', '.join(known)}")
        return value

    def text(self, path: _Path, pattern: re.Pattern[str], form: str) -> str:
        value = self.value(path)
        if not isinstance(value, str) or not pattern.fullmatch(value):
            raise self.fault(path, f"{_name(path)} must be {form}, not {value!r}")
        return value

    def integer(self, path: _Path, minimum: int) -> int:
        value = self.value(path)
        if type(value) is not int or value < minimum:
            raise self.fault(path, f"{_name(path)} must be an integer >= {minimum}, not {value!r}")
        return value

    def items(self, path: _Path) -> list[_Path]:
        """Return the paths of a list's items."""
        value = self.value(path)
        if not isinstance(value, (list, tuple)):
            raise self.fault(path, f"{_name(path)} must be a list, not {value!r}")
        return [(*path, index) for index in range(len(value))]

    def mapping(self, path: _Path, known: Collection[str], required: Collection[str] = ()) -> Mapping[str, Any]:
        value = self.value(path)
        if not isinstance(value, Mapping):
            raise self.fault(path, f"{_name(path)} must be a mapping, not {value!r}")
        for key in value:
            if key not in known:
                known_keys = ", ".join(known)
                raise self.fault((*path, key), f"unknown key {key!r} in {_name(path)}; known keys: {known_keys}")
        for key in required:
            if key not in value:
                raise self.fault(path, f"{_name(path)} lacks the key {key!r}")
        return value

    def value(self, path: _Path) -> Any:
        value = self.content
        for key in path:
            value = value[key]
        return value

    def fault(self, path: _Path, message: str) -> RegistryError:
        return RegistryError(f"{self.origin(path)}: {message}")

    def origin(self, path: _Path) -> str:
        return f"{self.label}:{self.lines[path] if self.lines else '.'.join(map(str, path))}"


def _name(path: _Path) -> str:
    """Name a value in a message: the nearest key above it."""
    return next((key for key in reversed(path) if isinstance(key, str)), "the document")


def _read_yaml(path: Path, lines: dict[_Path, int]) -> Any:
    """Parse a file into plain values, noting under each path of keys the line of its key or value."""
    loader: yaml.SafeLoader | None = None

    def construct(node: yaml.Node, at: _Path) -> Any:
        assert loader is not None
        lines.setdefault(at, node.start_mark.line + 1)
        if isinstance(node, yaml.SequenceNode):
            return [construct(child, (*at, index)) for index, child in enumerate(node.value)]
        if not isinstance(node, yaml.MappingNode):
            return loader.construct_object(node)
        result: dict[str, Any] = {}
        for key_node, child in node.value:
            key = loader.construct_object(key_node)
            line, below = key_node.start_mark.line + 1, (*at, key)
            if not isinstance(key, str) or key in result:
                fault = f"repeated key {key!r}" if key in result else f"key {key!r} is not text"
                raise RegistryError(f"{path}:{line}: {fault}")
            lines[below] = line
            result[key] = construct(child, below)
        return result

    try:
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
        node = loader.get_single_node()
    except OSError as error:
        raise RegistryError(f"{path}:1: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RegistryError(f"{path}:1: not UTF-8 text: {error.reason}") from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise RegistryError(f"{path}:{line}: not valid YAML: {error.problem}") from error
    except yaml.YAMLError as error:
        raise RegistryError(f"{path}:1: not valid YAML: {str(error).splitlines()[0]}") from error
    if node is None:
        lines[()] = 1
        return None
    return construct(node, ())
