"""What the README says runs, and what it links to is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mla.cli import app

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_an_example_runs(example: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(example, "README.md", "exec"), {})
    assert capsys.readouterr().out == "torch.Size([1200, 16, 128]) torch.Size([1200, 16])\n"


def test_there_is_an_example() -> None:
    assert EXAMPLES


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))])
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing


def test_the_commands_named_are_those_there_are() -> None:
    named = set(re.findall(r"^\| `mla (\w+)", README, re.MULTILINE))
    assert named == {one.name for one in (*app.registered_commands, *app.registered_groups)}
