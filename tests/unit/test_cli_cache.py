"""mla cache list and clear, on a folder that jit_cache filled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mla import jit_cache
from mla.cli import app
from mla.jit_cache import Binary, Unit


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder with two kernels, one of them compiled ahead, and files of others."""
    monkeypatch.setenv("MLA_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("MLA_JIT", raising=False)
    report = {"registers": 40, "spill_store_bytes": 8}
    nvidia = Unit("cuda.sm_90a.plan.scan", "sm_90a", "// nvidia")
    amd = Unit("rocm.gfx942.plan.scan", "gfx942", "// amd", source_suffix=".hip", binary_suffix=".hsaco")
    jit_cache.forget()
    jit_cache.obtain(nvidia, lambda unit: Binary(b"12345", report), lambda: "nvrtc 13")
    jit_cache.write_ahead(amd, Binary(b"1234567"), "hiprtc 6", tmp_path)
    (tmp_path / "dumps").mkdir()
    (tmp_path / "dumps" / "1-000001-plan.pt").write_bytes(b"kept")
    (tmp_path / "other.json").write_text("[1]")
    return tmp_path


def test_list(folder: Path) -> None:
    done = CliRunner().invoke(app, ["cache", "list"])
    assert done.exit_code == 0
    assert "40 registers" in done.stdout and "8 spilled" in done.stdout and "2 kernels, 12 bytes" in done.stdout
    report = json.loads(CliRunner().invoke(app, ["cache", "list", "--json"]).stdout)
    assert report["folder"] == str(folder)
    assert [(one["kernel_id"], one["compiler"], one["bytes"], one["registers"]) for one in report["kernels"]] == [
        ("cuda.sm_90a.plan.scan", "nvrtc 13", 5, 40),
        ("rocm.gfx942.plan.scan", "hiprtc 6", 7, None),
    ]


def test_clear(folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    done = CliRunner().invoke(app, ["cache", "clear", "--dry-run"])
    assert done.exit_code == 0 and "would be deleted" in done.stdout and sorted(folder.rglob("*")) == before
    done = CliRunner().invoke(app, ["cache", "clear"])
    assert done.exit_code == 0 and "would" not in done.stdout
    left = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert left == {"other.json", "dumps/1-000001-plan.pt"}
    assert "0 kernels" in CliRunner().invoke(app, ["cache", "list"]).stdout


def test_no_folder_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CACHE_DIR", str(tmp_path / "none"))
    assert "0 kernels, 0 bytes" in CliRunner().invoke(app, ["cache", "list"]).stdout
    assert CliRunner().invoke(app, ["cache", "clear"]).exit_code == 0
