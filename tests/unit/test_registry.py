from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mla import registry as registry_module
from mla._paths import REGISTRY
from mla.errors import DTypeError, RegistryError
from mla.registry import Registry, register

GOOD = """\
schema: 1
implementations:
  - id: acme.any.merge.first
    op: merge
    backend: acme
    entry: acme.ops:Merge
    sources: [merge.cu]
    priority: 5
    note: quick
    requires:
      arch: [sm_8*, sm_90a]
      dtypes: [bf16, fp16]
      out_dtypes: [bf16]
      dims: [[192, 128]]
      rope: [paged, ragged]
      page_size: {min: 16, max: 256, multiple_of: 16}
      granularity: [64, 128]
      masks: [CausalMask]
      features: [lse]
      alignment: 16
"""


def _write(folder: Path, text: str, name: str = "registry.yaml") -> Path:
    (folder / "merge.cu").write_text("// kernel\n")
    path = folder / name
    path.write_text(text)
    return path


def _mapping(**changes: Any) -> dict[str, Any]:
    entry = {"id": "acme.any.merge.x", "op": "merge", "backend": "acme", "entry": "acme.ops:Merge", "priority": 1}
    return {"schema": 1, "implementations": [entry | changes]}


def test_a_file_is_read(tmp_path: Path) -> None:
    registry = Registry()
    registry.add(_write(tmp_path, GOOD))
    one = registry["acme.any.merge.first"]
    assert (one.op, one.backend, one.priority, one.note) == ("merge", "acme", 5, "quick")
    assert one.sources == (tmp_path / "merge.cu",)
    assert one.origin == f"{tmp_path / 'registry.yaml'}:3"
    assert one.requires.dims == ((192, 128),) and one.requires.granularity == (64, 128)
    assert one.requires.page_size is not None and 32 in one.requires.page_size
    assert 8 not in one.requires.page_size and 272 not in one.requires.page_size and 24 not in one.requires.page_size


def test_the_packaged_file_is_read_and_every_condition_may_be_absent() -> None:
    registry = Registry()
    registry.add(REGISTRY)
    assert {one.op for one in registry if one.backend == "reference"} == {
        "plan",
        "gather",
        "store",
        "prefill",
        "merge",
        "quantize",
    }
    assert registry["reference.cpu.merge.torch"].requires.dtypes is None


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("    note: quick", "    nota: quick", 9, "unknown key 'nota'"),
        ("      alignment: 16", "      alignement: 16", 20, "unknown key 'alignement'"),
        ("schema: 1", "schema: 2", 1, "schema is 2"),
        ("schema: 1", "schema: true", 1, "schema is True"),
        ("    op: merge\n", "", 3, "lacks the key 'op'"),
        ("    op: merge", "    op: marge", 4, "'marge' is not one of plan, gather, project, store, prefill, merge"),
        ("    op: merge", "    op: merge\n    op: merge", 5, "repeated key 'op'"),
        ("[merge.cu]", "[absent.cu]", 7, "source 'absent.cu' does not exist"),
        ("priority: 5", "priority: high", 8, "priority must be an integer >= 0, not 'high'"),
        ("priority: 5", "priority: true", 8, "priority must be an integer"),
        ("acme.ops:Merge", "acme.ops.Merge", 6, "entry must be module:Class"),
        ("id: acme.any.merge.first", "id: other.any.merge.first", 3, "must be acme.<arch>.merge.<variant>"),
        ("id: acme.any.merge.first", "id: acme.any.plan.first", 3, "must be acme.<arch>.merge.<variant>"),
        ("[bf16, fp16]", "[bf16, half]", 12, "'half' is not one of bf16"),
        ("[bf16, fp16]", "bf16", 12, "dtypes must be a list, not 'bf16'"),
        ("[[192, 128]]", "[[192, 128, 1]]", 14, "dims are pairs"),
        ("[paged, ragged]", "[paged, dense]", 15, "'dense' is not one of paged, batched, ragged"),
        ("min: 16", "min: 0", 16, "min must be an integer >= 1, not 0"),
        ("multiple_of: 16", "times: 16", 16, "unknown key 'times'"),
        ("features: [lse]", "features: [lse, magic]", 19, "'magic' is not one of lse"),
        ("masks: [CausalMask]", "masks: some", 18, "masks must be a list"),
        ("implementations:", "implementations: {}\nmore:", 3, "unknown key 'more'"),
        ("    op: merge", "    op: [merge", 5, "not valid YAML"),
    ],
)
def test_faults_name_their_line(tmp_path: Path, old: str, new: str, line: int, words: str) -> None:
    assert old in GOOD
    path = _write(tmp_path, GOOD.replace(old, new, 1))
    registry = Registry()
    with pytest.raises(RegistryError, match=f"^{re.escape(str(path))}:{line}: .*{re.escape(words)}"):
        registry.add(path)
    assert len(registry) == 0


@pytest.mark.parametrize("text", ["", "- just\n- a list\n", "text"])
def test_a_document_must_be_a_mapping(tmp_path: Path, text: str) -> None:
    path = _write(tmp_path, text)
    with pytest.raises(RegistryError, match=f"{re.escape(str(path))}:1: the document must be a mapping"):
        Registry().add(path)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RegistryError, match=r"absent\.yaml:1: cannot be read: No such file"):
        Registry().add(tmp_path / "absent.yaml")


@pytest.mark.parametrize(
    ("data", "words"), [(b"\xff\xfe\x00", "not UTF-8 text"), (b"schema: 1\n\x00", "not valid YAML")]
)
def test_a_file_that_is_no_text_is_an_error(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "binary.yaml"
    path.write_bytes(data)
    with pytest.raises(RegistryError, match=rf"binary\.yaml:\d+: {words}"):
        Registry().add(path)


def test_a_repeated_id_names_both_places(tmp_path: Path) -> None:
    registry = Registry()
    registry.add(_write(tmp_path, GOOD))
    second = _write(tmp_path, GOOD.replace("priority: 5", "priority: 6"), "second.yaml")
    with pytest.raises(RegistryError, match=r"second.yaml:3: id 'acme.any.merge.first' is taken by .*registry.yaml:3"):
        registry.add(second)


def test_an_ambiguous_order_is_refused_and_nothing_is_added(tmp_path: Path) -> None:
    registry = Registry()
    registry.add(_write(tmp_path, GOOD))
    document = _mapping(id="acme.any.merge.second", priority=7)
    document["implementations"].append(document["implementations"][0] | {"id": "acme.any.merge.third", "priority": 5})
    with pytest.raises(RegistryError, match=r"<mapping>:implementations.1: .*third.* both have priority 5 for merge"):
        registry.add(document)
    assert [one.id for one in registry] == ["acme.any.merge.first"]


def test_candidates_stand_by_priority_then_by_backend() -> None:
    registry = Registry()
    for backend, priority in (("slow", 1), ("quick", 9), ("first", 5), ("second", 5)):
        registry.add(_mapping(id=f"{backend}.any.merge.x", backend=backend, priority=priority))
    order = registry.candidates("merge", ("slow", "second", "first", "quick"))
    assert [one.backend for one in order] == ["quick", "second", "first", "slow"]
    assert registry.candidates("plan", ("slow",)) == []


def test_an_entry_without_its_class_is_named() -> None:
    registry = Registry()
    registry.add(_mapping(entry="json:NoSuchClass"))
    with pytest.raises(RegistryError, match="json has no class 'NoSuchClass'"):
        registry["acme.any.merge.x"].load()


def test_files_of_the_environment_extend_the_packaged_one(tmp_path: Path) -> None:
    first = _write(tmp_path, GOOD, "first.yaml")
    second = _write(
        tmp_path, GOOD.replace("merge.first", "merge.second").replace("priority: 5", "priority: 6"), "b.yaml"
    )
    script = "from mla import registry; print(*(one.id for one in registry.default() if one.backend == 'acme'))"
    environment = {**os.environ, "MLA_REGISTRY": os.pathsep.join(map(str, (first, second)))}
    environment["PYTHONPATH"] = str(Path(registry_module.__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["acme.any.merge.first", "acme.any.merge.second"]


def test_entry_points_extend_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class Point:
        def load(self) -> Any:
            return lambda: _mapping()

    asked: list[str] = []
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: asked.append(group) or [Point()])
    registry = registry_module._read_default.__wrapped__()
    assert asked == ["mla.registry"] and registry["acme.any.merge.x"].origin == "<mapping>:implementations.0"


@pytest.mark.parametrize("source", [None, 5])
def test_a_source_that_is_neither_path_nor_mapping_is_refused(source: object) -> None:
    with pytest.raises(DTypeError, match=f"source must be a path or a mapping, got {type(source).__name__}"):
        register(source)  # type: ignore[arg-type]
