"""The edits for compute-sanitizer still fit the sources, and the faults are in kernels that are registered."""

from __future__ import annotations

from pathlib import Path

import pytest

from mla import dispatch, registry
from mla.backends.cuda.ops import PrefillFp8Sm90, PrefillSm90
from tests.support.cuda_execution import executed, needs_compiler
from tests.support.problems import Case, build
from tests.support.sanitize import TOOLS, is_hand_over
from tests.support.sanitizer_edits import FAULTS, FOR_RACECHECK, ROOT, Edit, Fault, copy_sources


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
    copy_sources(tmp_path / "copy", FOR_RACECHECK)
    assert changed(tmp_path / "copy") == {edit.file for edit in FOR_RACECHECK}


def test_only_where_a_kernel_begins_and_ends_are_races_of_triton_itself() -> None:
    text = (ROOT / "kernels/triton/prefill_hopper.py").read_text(encoding="utf-8").splitlines()
    begin = text.index("def prefill(") + 1
    race = "========= Error: Race reported between Read access at prefill+0x210 in <prefill_hopper f264befe9445ac0e>:{}"
    other = "\n=========     and Write access at prefill+0x4770 in {} [31 hazards]"
    assert is_hand_over(race.format(begin) + other.format(f"<prefill_hopper f264befe9445ac0e>:{begin}"))
    for place in (f"hopper_tiles.py:{begin}", f"<prefill_hopper f264befe9445ac0e>:{begin + 200}"):
        assert not is_hand_over(race.format(begin) + other.format(place))
    assert not is_hand_over(race.format(begin - 1)) and not is_hand_over(race.replace(" in <", " <").format(begin))


@needs_compiler
@pytest.mark.parametrize("entry", [PrefillSm90, PrefillFp8Sm90])
def test_every_arrival_is_counted(entry: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """The kernels for sm_90 in which every lane arrives come to their end, warp by warp on the host."""

    def edited(text: str) -> str:
        for edit in FOR_RACECHECK:
            text = text.replace(edit.old, edit.new) if ("fp8" in edit.file) == (entry is PrefillFp8Sm90) else text
        return text

    executed(monkeypatch, "sm_90a", entry, tmp_path, edited, seed)
    dtypes = "fp8" if entry is PrefillFp8Sm90 else "bf16"
    build(Case(dtypes=dtypes, lengths=((200, 130), (0, 1)), heads=1, page_size=16, chunk=(100, 90)), "cpu", seed).run(
        "cuda"
    )
    dispatch.forget()


def test_an_edit_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(ValueError, match="file has 2 places"):
        Edit("file", "a", "b").of("a a")
