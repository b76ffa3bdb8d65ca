"""The faults that compute-sanitizer has to find are still faults of the sources, in kernels that are registered."""

from __future__ import annotations

from pathlib import Path

import pytest

from mla import registry
from tests.support.planted_faults import FAULTS, ROOT, Fault
from tests.support.sanitize import TOOLS


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.tool}-{fault.implementation}-{fault.file[-24:]}")
def test_a_fault_has_its_place(fault: Fault) -> None:
    assert fault.edited() != (ROOT / fault.file).read_text(encoding="utf-8")
    assert fault.implementation in {one.id for one in registry.default()}


def test_every_tool_has_faults() -> None:
    assert {fault.tool for fault in FAULTS} == set(TOOLS)


def test_planting_changes_one_file_of_a_copy(tmp_path: Path) -> None:
    fault = FAULTS[0]
    fault.plant(tmp_path)
    changed = [
        path
        for path in tmp_path.rglob("*.c*")
        if path.is_file() and path.read_bytes() != (ROOT / path.relative_to(tmp_path)).read_bytes()
    ]
    assert changed == [tmp_path / fault.file]
    assert (tmp_path / "mla" / "kernels").is_symlink()
