"""The kernel cache: keys, damage, folders that cannot be written, many processes, folders compiled ahead."""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import filelock
import pytest

from mla import jit_cache
from mla.errors import CompileError
from mla.jit_cache import Binary, Unit, assemble, obtain

forks = pytest.mark.skipif(sys.platform == "win32", reason="needs fork")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh cache folder, with a space in its name."""
    path = tmp_path / "kernel cache"
    monkeypatch.setenv("MLA_CACHE_DIR", str(path))
    monkeypatch.delenv("MLA_AOT_DIR", raising=False)
    monkeypatch.delenv("MLA_JIT", raising=False)
    jit_cache.forget()
    return path


def unit(text: str = "kernel", **changes: object) -> Unit:
    return Unit(**{"kernel_id": "cuda.sm_80.op.variant", "arch": "sm_80", "text": text, "options": ("-O3",), **changes})


class Compiler:
    """Stands for a compiler: counts, and answers with bytes made of the source."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.runs = 0
        self.seconds = seconds

    def __call__(self, one: Unit) -> Binary:
        self.runs += 1
        time.sleep(self.seconds)
        return Binary(b"binary of " + one.text.encode(), {"registers": 42})


def version() -> str:
    return "compiler 1.0"


def compiles(folder: Path) -> int:
    return len((folder / "compiles.log").read_text().splitlines())


# ---- source text ---------------------------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "base.cuh").write_text("#pragma once\nint base;\n")
    (tmp_path / "include" / "outer.cuh").write_text('#pragma once\n#include "base.cuh"\nint outer;\n')
    (tmp_path / "near.cuh").write_text("int near;\n")
    (tmp_path / "kernel.cu").write_text(
        '// header\n#include "outer.cuh"\n#include "base.cuh"\n#include "near.cuh"\n#include "mask.cuh"\n'
        "#include <system>\nint last;\n"
    )
    return tmp_path


def assembled(tree: Path, mask: str = "int mask;\n", **defines: int) -> str:
    return assemble(tree / "kernel.cu", include_dirs=(tree / "include",), defines=defines, generated={"mask.cuh": mask})


def test_headers_are_inlined_once_in_order_of_use(tree: Path) -> None:
    lines = [line for line in assembled(tree, N=3).splitlines() if not line.startswith(("#line", "//")) and line]
    assert lines == [
        "#define N 3", "int base;", "int outer;", "int near;", "int mask;", "#include <system>", "int last;",
    ]  # fmt: skip


def test_lines_keep_their_file_and_number(tree: Path) -> None:
    lines = assembled(tree).splitlines()
    file, number, where = "", 0, {}
    for line in lines:
        if line.startswith("#line"):
            _, digits, name = line.split(" ", 2)
            file, number = name.strip('"'), int(digits) - 1
            continue
        number += 1
        where[line] = (file, number)
    assert where["int outer;"] == ("outer.cuh", 3)
    assert where["int base;"] == ("base.cuh", 2)
    assert where["int last;"] == ("kernel.cu", 7)


def test_missing_header_names_the_folders(tree: Path) -> None:
    (tree / "include" / "base.cuh").unlink()
    with pytest.raises(CompileError, match=r'outer\.cuh: #include "base\.cuh" is in none of .*include'):
        assembled(tree)


def test_the_key_covers_headers_defines_and_generated_text(tree: Path) -> None:
    texts = [assembled(tree), assembled(tree, N=1), assembled(tree, N=2), assembled(tree, mask="int other;\n")]
    (tree / "include" / "base.cuh").write_text("#pragma once\nint changed;\n")
    texts.append(assembled(tree))
    units = [unit(text) for text in texts]
    units += [unit(options=("-O2",)), unit(arch="sm_90a"), unit(options=("-O", "3")), unit()]
    assert len({one.digest for one in units}) == len(units)


def test_layout_asserts_state_size_and_offsets() -> None:
    class Params(ctypes.Structure):
        _fields_ = [("count", ctypes.c_int), ("data", ctypes.c_void_p), ("_tail", ctypes.c_byte * 48)]

    text = jit_cache.layout_asserts(Params)
    assert "sizeof(Params) == 64" in text
    assert "MLA_OFFSETOF(Params, data) == 8" in text
    assert "_tail" not in text


# ---- one process -----------------------------------------------------------------------------------------------------


def test_a_second_process_reads_what_the_first_built(folder: Path) -> None:
    compiler = Compiler()
    first = obtain(unit(), compiler, version)
    assert obtain(unit(), compiler, version).code == first.code
    jit_cache.forget()
    again = obtain(unit(), compiler, version)
    assert (again.code, again.report, again.path) == (b"binary of kernel", {"registers": 42}, first.path)
    assert compiler.runs == compiles(folder) == 1
    assert again.path is not None
    assert again.path.with_suffix(".cu").read_text() == "kernel"
    assert json.loads(again.path.with_suffix(".json").read_text())["compiler"] == "compiler 1.0"


def test_another_compiler_version_is_a_miss(folder: Path) -> None:
    compiler = Compiler()
    obtain(unit(), compiler, version)
    jit_cache.forget()
    obtain(unit(), compiler, lambda: "compiler 2.0")
    assert compiler.runs == 2
    assert len(list(folder.glob("*.cubin"))) == 2


@pytest.mark.parametrize(
    "damage",
    {
        "truncated binary": lambda path: path.write_bytes(path.read_bytes()[:3]),
        "empty binary": lambda path: path.write_bytes(b""),
        "flipped bit": lambda path: path.write_bytes(b"B" + path.read_bytes()[1:]),
        "no binary": lambda path: path.unlink(),
        "no json": lambda path: path.with_suffix(".json").unlink(),
        "truncated json": lambda path: path.with_suffix(".json").write_text('{"digest": "'),
        "foreign json": lambda path: path.with_suffix(".json").write_text("[1, 2]"),
        "json of bytes": lambda path: path.with_suffix(".json").write_bytes(b"\xff\xfe\x00"),
    }.items(),
    ids=lambda item: item[0],
)
def test_a_damaged_entry_is_rebuilt(folder: Path, damage: tuple[str, Callable[[Path], object]]) -> None:
    compiler = Compiler()
    path = obtain(unit(), compiler, version).path
    assert path is not None
    damage[1](path)
    jit_cache.forget()
    assert obtain(unit(), compiler, version).code == b"binary of kernel"
    assert compiler.runs == 2
    jit_cache.forget()
    obtain(unit(), compiler, version)
    assert compiler.runs == 2, "the rebuilt entry is whole"


def test_a_folder_that_cannot_be_written_costs_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("MLA_CACHE_DIR", str(tmp_path / "file" / "cache"))
    jit_cache.forget()
    compiler = Compiler()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for text in ("one", "two", "one", "two"):
            binary = obtain(unit(text), compiler, version)
            assert (binary.code, binary.path) == (b"binary of " + text.encode(), None)
    assert compiler.runs == 2
    assert len(caught) == 1
    assert "MLA_CACHE_DIR" in str(caught[0].message)


def test_a_folder_that_can_only_be_read_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Compiler()
    obtain(unit(), compiler, version)
    jit_cache.forget()

    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError("read-only file system")

    monkeypatch.setattr(jit_cache, "_replace", refuse)
    monkeypatch.setattr(filelock.FileLock, "acquire", refuse)
    assert obtain(unit(), compiler, version).path is not None
    with pytest.warns(RuntimeWarning, match="read-only file system"):
        assert obtain(unit("new"), compiler, version).path is None
    assert compiler.runs == 2


def test_jit_off_serves_hits_and_refuses_misses(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Compiler()
    obtain(unit(), compiler, version)
    jit_cache.forget()
    monkeypatch.setenv("MLA_JIT", "0")
    obtain(unit(), compiler, version)
    with pytest.raises(CompileError, match=r"cuda\.sm_80\.op\.variant for sm_80 .*MLA_JIT=0.*mla compile"):
        obtain(unit("new"), compiler, version)
    assert compiler.runs == 1


def test_a_failed_compilation_tells_log_options_and_source(folder: Path) -> None:
    def fail(one: Unit) -> Binary:
        raise ValueError("line 7: no such thing")

    with pytest.raises(CompileError) as caught:
        obtain(unit("broken"), fail, version)
    message = str(caught.value)
    assert "line 7: no such thing" in message
    assert "-O3" in message
    path = Path(message.partition("source: ")[2].partition("\n")[0])
    assert path.read_text() == "broken"
    assert obtain(unit("broken"), Compiler(), version).code == b"binary of broken", "a failure is not remembered"


def test_a_folder_compiled_ahead_needs_no_compiler(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = tmp_path / "ahead"
    path = jit_cache.write_ahead(unit(), Compiler()(unit()), version(), ahead)
    assert path == ahead / "cuda.sm_80.op.variant.cubin"
    monkeypatch.setenv("MLA_AOT_DIR", os.pathsep.join([str(tmp_path / "absent"), str(ahead)]))
    monkeypatch.setenv("MLA_JIT", "0")

    def no_compiler() -> str:
        raise AssertionError("asked for the compiler")

    assert obtain(unit(), Compiler(), no_compiler).path == path
    with pytest.raises(CompileError):
        obtain(unit("other text under the same id"), Compiler(), version)


def test_a_missing_compiler_is_told(folder: Path) -> None:
    def absent() -> str:
        raise ImportError("no NVRTC here")

    with pytest.raises(CompileError, match=r"variant for sm_80 is not compiled ahead.*no NVRTC here"):
        obtain(unit(), Compiler(), absent)


def test_the_cache_folder_itself_may_be_compiled_ahead(folder: Path) -> None:
    jit_cache.write_ahead(unit(), Compiler()(unit()), version(), folder)
    compiler = Compiler()
    assert obtain(unit(), compiler, version).path == folder / "cuda.sm_80.op.variant.cubin"
    assert compiler.runs == 0


def test_the_default_folder_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLA_CACHE_DIR", raising=False)
    assert jit_cache.cache_dir().name == "mla"
    assert jit_cache.cache_dir().is_absolute()


# ---- many processes --------------------------------------------------------------------------------------------------


def _obtain_at_once(barrier: object, results: object, seconds: float) -> None:
    barrier.wait()  # type: ignore[attr-defined]
    results.put(obtain(unit(), Compiler(seconds), version).code)  # type: ignore[attr-defined]


def _race(processes: int, seconds: float) -> list[bytes]:
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(processes), context.Queue()
    children = [context.Process(target=_obtain_at_once, args=(barrier, results, seconds)) for _ in range(processes)]
    for child in children:
        child.start()
    codes = [results.get(timeout=60) for _ in children]
    for child in children:
        child.join()
    return codes


@forks
def test_sixteen_cold_processes_compile_once(folder: Path) -> None:
    assert _race(16, seconds=0.3) == [b"binary of kernel"] * 16
    assert compiles(folder) == 1


@forks
def test_without_working_locks_nothing_breaks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object) -> None:
        raise NotImplementedError("no locks on this file system")

    monkeypatch.setattr(filelock.FileLock, "acquire", refuse)
    assert _race(8, seconds=0.05) == [b"binary of kernel"] * 8
    assert 1 <= compiles(folder) <= 8
    jit_cache.forget()
    compiler = Compiler()
    assert obtain(unit(), compiler, version).code == b"binary of kernel"
    assert compiler.runs == 0


def _compile_for_ever(started: object) -> None:
    def stuck(one: Unit) -> Binary:
        started.set()  # type: ignore[attr-defined]
        time.sleep(600)
        raise AssertionError

    obtain(unit(), stuck, version)


@forks
def test_a_lock_dies_with_its_holder(folder: Path) -> None:
    context = multiprocessing.get_context("fork")
    started = context.Event()
    child = context.Process(target=_compile_for_ever, args=(started,))
    child.start()
    assert started.wait(30)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    begin = time.monotonic()
    assert obtain(unit(), Compiler(), version).code == b"binary of kernel"
    assert time.monotonic() - begin < 10
    assert not list(folder.glob(".*.tmp"))
