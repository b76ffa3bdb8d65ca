"""The edits for compute-sanitizer still fit the sources, and the faults are in kernels that are registered."""

from __future__ import annotations

from pathlib import Path

import pytest

from mla import registry
from tests.support.sanitize import TOOLS
from tests.support.sanitizer_edits import EVERY_LANE_ARRIVES, FAULTS, ROOT, Edit, Fault, copy_sources


def changed(folder: Path) -> set[str]:
    """Return the files of a copy that differ from the sources."""
    files = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    return {str(path) for path in files if (folder / path).read_bytes() != (ROOT / path).read_bytes()}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.tool}-{fault.implementation}")
def test_a_fault_fits(fault: Fault) -> None:
    text = (ROOT / fault.edit.file).read_text(encoding="utf-8")
    assert fault.edit.of(text) != text
    assert fault.implementation in {one.id for one in registry.default()}


def test_every_tool_has_faults() -> None:
    assert {fault.tool for fault in FAULTS} == set(TOOLS)


def test_a_copy_has_the_edits_and_no_others(tmp_path: Path) -> None:
    copy_sources(tmp_path / "copy", EVERY_LANE_ARRIVES)
    assert changed(tmp_path / "copy") == {edit.file for edit in EVERY_LANE_ARRIVES}


def test_an_edit_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(ValueError, match="file has 2 places"):
        Edit("file", "a", "b").of("a a")
