"""The README's table of environment variables is what the code reads."""

from __future__ import annotations

import re

from tests.architecture.source_tree import ROOT

_READ = re.compile(r'(?:environ(?:\.get\(|\[)|_VARIABLE = )"([A-Z][A-Z0-9_]+)"')
#: Set for a library that is loaded, not read.
_FOREIGN = {"ROCM_PATH"}


def test_the_table_is_complete() -> None:
    files = [path for folder in ("mla", "backends") for path in (ROOT / folder).rglob("*.py")]
    files.append(ROOT / "tests" / "conftest.py")
    read = {name for path in files for name in _READ.findall(path.read_text(encoding="utf-8"))} - _FOREIGN
    section = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Environment")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `([A-Z0-9_]+)` \|", section, re.MULTILINE)) == read
