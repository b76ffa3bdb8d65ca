"""``mla cache``: the compiled kernels on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from mla import jit_cache

_BINARIES, _BESIDE = (".cubin", ".hsaco"), (".cu", ".hip", ".json")

app = typer.Typer(help="Show or empty the folder of compiled kernels.", no_args_is_help=True)


@app.command("list")
def list_(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on stdout.")] = False,
) -> None:
    """Show every compiled kernel: its size, registers and spills.

    The kernels of Triton lie in Triton's own cache (TRITON_CACHE_DIR).

    Examples: mla cache list; mla cache list --json
    """
    folder, kernels = jit_cache.cache_dir(), entries()
    if as_json:
        print(json.dumps({"folder": str(folder), "kernels": kernels}, indent=2))
        return
    for one in kernels:
        registers, spills = one["registers"], one["spill_bytes"]
        print(f"{one['bytes']:>10,} bytes  {registers or '?':>3} registers  {spills:>4} spilled  {one['file']}")
    size = sum(one["bytes"] for one in kernels)
    print(f"{len(kernels)} kernels, {size:,} bytes, in {folder}")


@app.command("clear")
def clear(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be deleted, and delete nothing.")] = False,
) -> None:
    """Delete the compiled kernels and their sources; dumps and foreign files stay.

    A running process keeps what it has loaded.

    Examples: mla cache clear --dry-run; mla cache clear
    """
    folder, removed = jit_cache.cache_dir(), 0
    for one in entries():
        stem = one["file"].rpartition(".")[0]
        for path in (folder / f"{stem}{suffix}" for suffix in (*_BINARIES, *_BESIDE)):
            removed += path.stat().st_size if path.exists() else 0
            if not dry_run:
                path.unlink(missing_ok=True)
    for path in (folder / "compiles.log", *folder.glob("locks/*.lock")):
        if not dry_run:
            path.unlink(missing_ok=True)
    print(f"{removed:,} bytes {'would be ' * dry_run}deleted from {folder}")


def entries() -> list[dict[str, Any]]:
    """Return what is known of each kernel in the cache folder, by file name."""
    found = []
    for path in sorted(jit_cache.cache_dir().glob("*.json")):
        binary, entry = _read(path)
        if binary is None:
            continue
        report = entry.get("report", {})
        found.append(
            {
                "file": binary.name,
                "kernel_id": entry["kernel_id"],
                "arch": entry["arch"],
                "compiler": entry["compiler"],
                "bytes": entry["bytes"],
                "registers": report.get("registers"),
                "spill_bytes": report.get("spill_store_bytes", 0),
            }
        )
    return found


def _read(path: Path) -> tuple[Path | None, dict[str, Any]]:
    """Return the binary that a description belongs to and the description, or None for another's file."""
    try:
        entry = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None, {}
    if not isinstance(entry, dict) or not {"kernel_id", "arch", "compiler", "bytes"} <= set(entry):
        return None, {}
    binary = next((path.with_suffix(s) for s in _BINARIES if path.with_suffix(s).exists()), None)
    return binary, entry
