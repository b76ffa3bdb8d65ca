"""What backends that compile at run time share: one source text per kernel, and a cache of what was built from it.

A kernel travels as a `Unit`: one text with all of its own headers inlined, so that the text alone (with options,
architecture and compiler version) says what the binary is. `obtain` finds the binary of a unit or builds it.

Layout of a cache folder, which is also the layout of a folder compiled ahead (there without ``-<key>``)::

    <kernel id>-<key>.cubin     the binary, as the vendor's tools read it
    <kernel id>-<key>.cu        the source it was built from
    <kernel id>-<key>.json      digest, compiler, options, checksum of the binary, registers, spills, shared memory
    compiles.log                one line for each compilation: time, process, file, seconds
    locks/                      one lock file per entry; the kernel drops a lock whose holder dies

Files are written aside and renamed, and a binary counts only when the checksum in its JSON fits: whatever else
happens (two writers, a full disk, a truncated file), the worst outcome is a second compilation.

Environment: ``MLA_CACHE_DIR`` the folder (default: the user's cache folder), ``MLA_AOT_DIR`` folders compiled ahead
(``os.pathsep`` list; ``MLA_CACHE_DIR`` is searched for such files too), ``MLA_JIT=0`` makes a miss an error.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import os
import re
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from mla.errors import CompileError

#: Bumped when the layout of an entry or the meaning of its key changes.
FORMAT = 1
#: Seconds to wait for another process that compiles the same unit, before compiling it here as well.
LOCK_TIMEOUT = 300.0

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)"[^\n]*$', re.MULTILINE)
# NVRTC has neither <stddef.h> nor clang's built-in, but the constant-expression form of its front end.
_OFFSETOF = """#ifdef __clang__
#define MLA_OFFSETOF(type, field) __builtin_offsetof(type, field)
#else
#define MLA_OFFSETOF(type, field) __INTADDR__(&(((type*)0)->field))
#endif"""
_PRAGMA_ONCE = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+once[ \t]*$", re.MULTILINE)


@dataclass(frozen=True)
class Unit:
    """One translation unit, complete: what is compiled and by what it is found again.

    Attributes
    ----------
    kernel_id : str
        Name of its files: letters, digits, ``.``, ``_``, ``-``, ``+``. One id stands for one text within a build.
    arch : str
        ``sm_90a``, ``gfx942``, ...
    text : str
        Source without quoted includes; see `assemble`.
    options : tuple of str
        Everything else the compiler is told, in the backend's own spelling.
    source_suffix, binary_suffix : str
        ``.cu`` and ``.cubin``, ``.hip`` and ``.hsaco``.
    """

    kernel_id: str
    arch: str
    text: str
    options: tuple[str, ...] = ()
    source_suffix: str = ".cu"
    binary_suffix: str = ".cubin"

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 over text, options and architecture: the same binary, whichever version of the compiler made it."""
        return _digest(str(FORMAT), self.text, self.arch, *self.options)


@dataclass(frozen=True)
class Binary:
    """A compiled unit.

    Attributes
    ----------
    code : bytes
        What the driver loads.
    report : mapping
        What the compiler said of it, JSON-able (registers, spills, shared memory, ...).
    path : Path or None
        Where it lies on disk; None when it was kept in memory only.
    """

    code: bytes
    report: Mapping[str, object] = field(default_factory=dict)
    path: Path | None = None


def assemble(
    source: Path,
    *,
    include_dirs: Sequence[Path] = (),
    defines: Mapping[str, int | str] | None = None,
    generated: Mapping[str, str] | None = None,
    epilogue: str = "",
) -> str:
    """Make one text of a source file: defines first, each own header inlined where it is first included.

    Parameters
    ----------
    source : Path
        The kernel's file. Its folder is searched first for quoted includes, then `include_dirs`.
    defines : mapping
        Macro names and values, written as ``#define`` lines so that the text says all by itself.
    generated : mapping
        Texts that stand for headers without a file, by the name they are included under.
    epilogue : str
        Text after the source, such as `layout_asserts`.

    Raises
    ------
    CompileError
        A quoted include is found nowhere; names it, the including file and the folders searched.
    """
    seen: set[str] = set()
    texts = dict(generated or {})

    def inline(text: str, name: str, folder: Path) -> str:
        text = _PRAGMA_ONCE.sub("", text)

        def replace(match: re.Match[str]) -> str:
            wanted = match[1]
            resume = f'#line {text.count(chr(10), 0, match.start()) + 2} "{name}"'
            if wanted in texts:
                key, body, where = wanted, texts[wanted], folder
            else:
                for directory in (folder, *include_dirs):
                    path = directory / wanted
                    if path.is_file():
                        break
                else:
                    searched = ", ".join(str(d) for d in (folder, *include_dirs))
                    raise CompileError(f'{name}: #include "{wanted}" is in none of {searched}')
                key, body, where = str(path.resolve()), path.read_text(encoding="utf-8"), path.parent
            if key in seen:
                return ""
            seen.add(key)
            return f'#line 1 "{wanted}"\n{inline(body, wanted, where)}\n{resume}'

        return _INCLUDE.sub(replace, text)

    head = "".join(f"#define {key} {value}\n" for key, value in (defines or {}).items())
    body = inline(source.read_text(encoding="utf-8"), source.name, source.parent)
    return f'{head}#line 1 "{source.name}"\n{body}\n{epilogue}'


def layout_asserts(params: type[ctypes.Structure]) -> str:
    """Write static_asserts that the C struct of the same name has the size and the field offsets of ``params``.

    Put after the source (``epilogue=``), they make a difference between host and device a compile error. Fields whose
    names begin with ``_`` are padding of the host's alone.
    """
    name = params.__name__
    size = ctypes.sizeof(params)
    lines = [_OFFSETOF, f'static_assert(sizeof({name}) == {size}, "{name}: size differs from the host\'s");']
    for field_name, *_ in params._fields_:
        if field_name.startswith("_"):
            continue
        offset = getattr(params, field_name).offset
        lines.append(
            f"static_assert(MLA_OFFSETOF({name}, {field_name}) == {offset}, "
            f'"{name}.{field_name}: offset differs from the host\'s");'
        )
    return "\n".join(lines) + "\n"


def jit_enabled() -> bool:
    """Tell whether a miss may compile (``MLA_JIT`` is not ``0``)."""
    return os.environ.get("MLA_JIT", "1") != "0"


def cache_dir() -> Path:
    """Return the cache folder, existing or not: ``MLA_CACHE_DIR``, else ``mla`` in the user's cache folder."""
    if folder := os.environ.get("MLA_CACHE_DIR"):
        return Path(folder)
    import platformdirs

    return Path(platformdirs.user_cache_dir("mla", appauthor=False))


def obtain(unit: Unit, compile_unit: Callable[[Unit], Binary], compiler: Callable[[], str]) -> Binary:
    """Return the binary of a unit: from memory, from a folder compiled ahead, from the cache, or by compiling it.

    Of several processes that miss at once one compiles and the others wait for it. Nothing here fails because of the
    cache folder: where it cannot be written, the process warns once and keeps binaries in memory.

    Parameters
    ----------
    unit : Unit
    compile_unit : callable
        Compiles; whatever it raises becomes the log of a `CompileError`.
    compiler : callable
        Names the compiler and its version, part of the key; not called for what was compiled ahead.

    Raises
    ------
    CompileError
        The source does not compile (log, options, path of the kept source), or it is missing while ``MLA_JIT=0``.
    """
    with _unit_lock(unit.digest):
        binary = _memory.get(unit.digest) or _find_ahead(unit)
        if binary is None:
            binary = _find_or_compile(unit, compile_unit, compiler)
        _memory[unit.digest] = binary
        return binary


def build_ahead(
    units: Iterable[Unit],
    compile_unit: Callable[[Unit], Binary],
    compiler: Callable[[], str],
    folder: Path | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> list[Path]:
    """Obtain units on all cores and write each under its plain kernel id; returns the binaries' paths, sorted.

    Parameters
    ----------
    units : iterable of Unit
        Of several with one kernel id the last counts.
    compile_unit, compiler : callable
        As `obtain` takes them.
    folder : Path, optional
        The cache folder when missing.
    progress : callable, optional
        Called with (kernels done, kernels in all, kernel id) after each.

    Raises
    ------
    CompileError
        A unit does not compile; what was written before it stays.
    OSError
        The folder cannot be written.
    """
    target = cache_dir() if folder is None else Path(folder)
    by_id = {unit.kernel_id: unit for unit in units}

    def build(unit: Unit) -> Path:
        return write_ahead(unit, obtain(unit, compile_unit, compiler), compiler(), target)

    paths = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        waiting = {pool.submit(build, unit): kernel_id for kernel_id, unit in by_id.items()}
        try:
            for done, future in enumerate(as_completed(waiting), 1):
                paths.append(future.result())
                if progress is not None:
                    progress(done, len(by_id), waiting[future])
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return sorted(paths)


def write_ahead(unit: Unit, binary: Binary, compiler: str, folder: Path) -> Path:
    """Write a unit under its plain kernel id, as `obtain` finds it in ``MLA_AOT_DIR``; returns the binary's path.

    Raises
    ------
    OSError
        The folder cannot be written.
    """
    return _store(unit, binary, compiler, folder, unit.kernel_id)


def forget() -> None:
    """Drop the binaries held in memory; the next `obtain` looks at the disk again."""
    _memory.clear()


_memory: dict[str, Binary] = {}
_locks: dict[str, threading.Lock] = {}
_locks_guard = threading.Lock()


@contextmanager
def _unit_lock(digest: str) -> Iterator[None]:
    with _locks_guard:
        lock = _locks.setdefault(digest, threading.Lock())
    with lock:
        yield


def _digest(*parts: str) -> str:
    sha = hashlib.sha256()
    for part in parts:
        data = part.encode()
        sha.update(len(data).to_bytes(8, "little") + data)
    return sha.hexdigest()


def _find_ahead(unit: Unit) -> Binary | None:
    folders = [Path(folder) for folder in os.environ.get("MLA_AOT_DIR", "").split(os.pathsep) if folder]
    for folder in (*folders, cache_dir()):
        if binary := _read(unit, folder, unit.kernel_id):
            return binary
    return None


def _find_or_compile(unit: Unit, compile_unit: Callable[[Unit], Binary], compiler: Callable[[], str]) -> Binary:
    folder = cache_dir()
    try:
        compiler_name = compiler()
    except Exception as error:
        raise CompileError(
            f"{unit.kernel_id} for {unit.arch} is not compiled ahead, and its compiler cannot be loaded: {error}"
        ) from error
    stem = f"{unit.kernel_id}-{_digest(unit.digest, compiler_name)[:16]}"
    if binary := _read(unit, folder, stem):
        return binary
    if not jit_enabled():
        raise CompileError(
            f"{unit.kernel_id} for {unit.arch} is neither in {folder} nor in MLA_AOT_DIR, and MLA_JIT=0 forbids "
            "compiling it; build it with `mla compile`"
        )
    with _entry_lock(folder / "locks" / f"{stem}.lock"):
        if binary := _read(unit, folder, stem):
            return binary
        start = time.perf_counter()
        try:
            binary = compile_unit(unit)
        except Exception as error:
            path = _keep_source(unit, folder, stem)
            raise CompileError(
                f"{unit.kernel_id} does not compile for {unit.arch} with {compiler_name}\n"
                f"options: {' '.join(unit.options)}\nsource: {path}\n{error}"
            ) from error
        seconds = time.perf_counter() - start
        try:
            path = _store(unit, binary, compiler_name, folder, stem)
            with (folder / "compiles.log").open("a", encoding="utf-8") as log:
                log.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} pid {os.getpid()} {path.name} {seconds:.3f} s\n")
        except OSError as error:
            _warn_unwritable(str(folder), str(error))
            return binary
        return Binary(binary.code, binary.report, path)


@contextmanager
def _entry_lock(path: Path) -> Iterator[None]:
    """Hold the lock of one entry; where locks do not work, hold nothing (an entry may then be built twice)."""
    import filelock

    lock = filelock.FileLock(str(path), timeout=LOCK_TIMEOUT)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except (OSError, NotImplementedError, filelock.Timeout):
        yield
        return
    try:
        yield
    finally:
        lock.release()


def _read(unit: Unit, folder: Path, stem: str) -> Binary | None:
    path = folder / f"{stem}{unit.binary_suffix}"
    try:
        entry = json.loads((folder / f"{stem}.json").read_text(encoding="utf-8"))
        if entry["digest"] != unit.digest:
            return None
        code = path.read_bytes()
        if hashlib.sha256(code).hexdigest() != entry["sha256"]:
            return None
        return Binary(code, entry["report"], path)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _store(unit: Unit, binary: Binary, compiler: str, folder: Path, stem: str) -> Path:
    entry = {
        "kernel_id": unit.kernel_id,
        "arch": unit.arch,
        "compiler": compiler,
        "options": list(unit.options),
        "digest": unit.digest,
        "sha256": hashlib.sha256(binary.code).hexdigest(),
        "bytes": len(binary.code),
        "report": dict(binary.report),
    }
    path = folder / f"{stem}{unit.binary_suffix}"
    _replace(folder / f"{stem}{unit.source_suffix}", unit.text.encode())
    _replace(path, binary.code)
    _replace(folder / f"{stem}.json", json.dumps(entry, indent=1).encode())
    return path


def _replace(path: Path, data: bytes) -> None:
    """Write a file so that a reader sees the old one or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def _keep_source(unit: Unit, folder: Path, stem: str) -> Path:
    """Keep the source of a failed compilation where its log can be read against it."""
    for place in (folder, Path(tempfile.gettempdir())):
        path = place / f"{stem}{unit.source_suffix}"
        with suppress(OSError):
            _replace(path, unit.text.encode())
            return path
    return Path("(nowhere: no folder can be written)")


_warned: set[str] = set()


def _warn_unwritable(folder: str, reason: str) -> None:
    if folder in _warned:
        return
    _warned.add(folder)
    warnings.warn(
        f"kernels cannot be cached in {folder} ({reason}); they are compiled anew in each process. "
        "Set MLA_CACHE_DIR to a folder that can be written.",
        RuntimeWarning,
        stacklevel=2,
    )
