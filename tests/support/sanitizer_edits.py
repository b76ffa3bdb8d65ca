"""Edits of kernels for compute-sanitizer: faults that it has to find, and what racecheck needs to see no others.

Without faults that are found "0 reports" would prove nothing. Each is one edit in a copy of the sources; what runs
there is the same as elsewhere: the matrix's tests, the library's own compilation, the same filter of kernels. The edits
do what their tool looks for and no more: none makes a kernel wait for ever or lose its way.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.support.matrix_cases import LONG_ROWS, PLANS, PREFILLS, QUANTIZATIONS

ROOT = Path(__file__).resolve().parents[2]
_PARTS = ("mla", "backends", "kernels", "tests", "registry.yaml", "pyproject.toml")


@dataclass(frozen=True)
class Edit:
    """A text of a source file that becomes another."""

    file: str
    old: str
    new: str

    def of(self, text: str) -> str:
        """Return the file's text as edited."""
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file} has {text.count(self.old)} places {self.old!r}, not 1")
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Fault:
    """An edit, the tool that looks for such a thing, and a test of the matrix that runs the edited kernel."""

    tool: str
    implementation: str
    test: str
    case: object
    edit: Edit

    @property
    def test_id(self) -> str:
        """Name of the test on a machine with a GPU."""
        return f"tests/kernels/test_matrix.py::test_{self.test}[{self.implementation}-{self.case}]"


def copy_sources(folder: Path, edits: Iterable[Edit]) -> None:
    """Copy what the tests need into a new folder, with some edits."""
    folder.mkdir()
    for name in _PARTS:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(ROOT / name, folder / name)
    for edit in edits:
        path = folder / edit.file
        path.write_text(edit.of(path.read_text(encoding="utf-8")), encoding="utf-8")


_RAGGED, _QUANTIZED, _PLAIN = PLANS[2], QUANTIZATIONS[0], PREFILLS[0]
_LONG = LONG_ROWS[0]  # of one head: its keys are worked on in parts, whose results lie in the workspace
_FP8 = next(case for case in PREFILLS if case.dtypes == "fp8" and case.v_transposed)
_SM80, _SM90, _TRITON = "kernels/cuda/sm80", "kernels/cuda/sm90", "kernels/triton"

_TMA_OF_VALUES = "mbarrier_arrive_expect_tx(full, kVTileBytes);\n          "
#: For racecheck, which follows mbarriers, but for the thread alone that arrives: not that __syncwarp has put what the
#: other lanes of its warp did before that. Here every lane of the sm_90 kernels arrives for itself, and counts fit. And
#: one consumer of the Triton kernel writes zeros behind the last values in fp8, where all of them read words and write
#: the same back, which is a race by name; what the others compute of that tile may be NaN here.
FOR_RACECHECK = (
    Edit(f"{_SM90}/prefill.cu", "kWarps = 4;", "kWarps = 128;"),
    Edit(f"{_SM90}/prefill.cu", "1 + kRopeGather", "1 + 32 * kRopeGather"),
    Edit(f"{_SM90}/prefill_producer.cuh", "if (lane == 0) mbarrier_arrive(shared.k", "mbarrier_arrive(shared.k"),
    Edit(f"{_SM90}/prefill_consumer.cuh", "if (elect_sync()) mbarrier_arrive", "mbarrier_arrive"),
    Edit(f"{_SM90}/prefill_fp8.cu", "kWarps = 4;", "kWarps = 128;"),
    Edit(f"{_SM90}/prefill_fp8.cu", "(shared.k_full(stage), 2);", "(shared.k_full(stage), 33);"),
    Edit(f"{_SM90}/prefill_fp8.cu", "kTransposeV ? kTransposers : 1", "kTransposeV ? 32 * kTransposers : 32"),
    Edit(f"{_SM90}/prefill_fp8.cu", "(shared.raw_empty(stage), k", "(shared.raw_empty(stage), 32 * k"),
    Edit(f"{_SM90}/prefill_fp8_helpers.cuh", "if (lead) mbarrier_arrive(shared.k", "mbarrier_arrive(shared.k"),
    Edit(f"{_SM90}/prefill_fp8_helpers.cuh", "if (lead) mbarrier_arrive(shared.v", "mbarrier_arrive(shared.v"),
    Edit(f"{_SM90}/prefill_fp8_helpers.cuh", "if ((threadIdx.x & 31) == 0) {\n      mbar", "{\n      mbar"),
    Edit(f"{_SM90}/prefill_fp8_producer.cuh", f"{_TMA_OF_VALUES}cp_async",
         f"{_TMA_OF_VALUES}for (int i = 1; i < 32; i++) mbarrier_arrive(full);\n          cp_async"),
    Edit(f"{_SM90}/prefill_fp8_consumer.cuh", "if (elect_sync()) mbarrier_arrive", "mbarrier_arrive"),
    Edit(f"{_SM90}/prefill_fp8_consumer.cuh", "const bool lead = elect_sync();", "const bool lead = true;"),
    Edit(f"{_TRITON}/hopper_fp8.py", "zero_columns(tile, n", "if WARPGROUP == 0: zero_columns(tile, n"),
)  # fmt: skip

_ROWS_STORED, _ALL_STORED = "const bool inside = row + 8 * r < item.rows;", "const bool inside = true;"
_HAND_OVER = """        *shared.item(group, q_phase ^ 1) = item;
        if (item.rows == 0) {
          mbarrier_arrive(shared.q_full(group));
          continue;
        }
        mbarrier_arrive_expect_tx(shared.q_full(group), kQBytes);
"""
_HAND_OVER_LATE = """        if (item.rows == 0) {
          *shared.item(group, q_phase ^ 1) = item;
          mbarrier_arrive(shared.q_full(group));
          continue;
        }
        mbarrier_arrive_expect_tx(shared.q_full(group), kQBytes);
        *shared.item(group, q_phase ^ 1) = item;
"""
_HALVES_OF_A_WARP = """\
if (threadIdx.x & 1)
      asm volatile("bar.sync 0;" ::: "memory");
    else
      asm volatile("bar.sync 0, %0;" ::"n"(MLA_THREADS) : "memory");"""
_CONSUMER = "    consume(params, shared, warpgroup);\n"
_NO_BARRIER = f"{_CONSUMER}    if (threadIdx.x == 0) mbarrier_arrive(shared.q(0));\n"
_PART = "  mine[kSlotO * 128] = make_float4(sums.m[0], sums.m[1], sums.l[0], sums.l[1]);\n"

FAULTS = (
    # Past the end of a tensor: a number, the rows of a last tile, a block of sequences.
    Fault("memcheck", "cuda.sm80.plan.scan", "plan", _RAGGED,
          Edit(f"{_SM80}/plan.cu", "c < p.chunks; c += MLA_THREADS", "c <= p.chunks; c += MLA_THREADS")),
    Fault("memcheck", "cuda.sm80.prefill.mma", "prefill", _PLAIN,
          Edit(f"{_SM80}/prefill_epilogue.cuh", "if (row >= item.rows) continue;", "")),
    Fault("memcheck", "cuda.sm90.prefill.wgmma", "prefill", _PLAIN,
          Edit(f"{_SM90}/prefill_epilogue.cuh", _ROWS_STORED, _ALL_STORED)),
    Fault("memcheck", "cuda.sm90.prefill.fp8", "prefill", _FP8,
          Edit(f"{_SM90}/prefill_epilogue.cuh", _ROWS_STORED, _ALL_STORED)),
    Fault("memcheck", "triton.any.plan.scan", "plan", _RAGGED,
          Edit(f"{_TRITON}/plan.py", "in_buffer.to(tl.int32), mask=inside)", "in_buffer.to(tl.int32))")),
    Fault("memcheck", "triton.sm90.prefill.warps", "prefill", _PLAIN,
          Edit(f"{_TRITON}/hopper_items.py", "out, mask=(first + out_m < count)[:, None])", "out)")),
    # Shared memory without a barrier between writer and reader, of the block and of asynchronous roles.
    Fault("racecheck", "cuda.sm80.plan.scan", "plan", _RAGGED,
          Edit(f"{_SM80}/plan.cu", "sums[warp] = inclusive;\n  __syncthreads();", "sums[warp] = inclusive;")),
    Fault("racecheck", "cuda.sm80.prefill.mma", "prefill", _PLAIN,
          Edit(f"{_SM80}/prefill.cu", "__syncthreads();  // barrier 2", "")),
    Fault("racecheck", "cuda.sm90.prefill.wgmma", "prefill", _PLAIN,
          Edit(f"{_SM90}/prefill_producer.cuh", _HAND_OVER, _HAND_OVER_LATE)),
    Fault("racecheck", "triton.sm90.prefill.warps", "prefill", _PLAIN,
          Edit(f"{_TRITON}/hopper_tiles.py", "groups.index(group).store(zero_group)",
               "groups.index(group).store((groups.index(group).load(zero_group.type.layout) == 1).to(gl.int32))")),
    # A barrier to which the halves of a warp come apart; an arrival at memory that is no barrier.
    Fault("synccheck", "cuda.sm80.plan.scan", "plan", _RAGGED,
          Edit(f"{_SM80}/plan.cu", "__syncthreads();  // the round before has read its sums", _HALVES_OF_A_WARP)),
    Fault("synccheck", "cuda.sm80.prefill.mma", "prefill", _PLAIN,
          Edit(f"{_SM80}/prefill.cu", "__syncthreads();  // barrier 2", _HALVES_OF_A_WARP)),
    Fault("synccheck", "cuda.sm90.prefill.wgmma", "prefill", _PLAIN,
          Edit(f"{_SM90}/prefill.cu", _CONSUMER, _NO_BARRIER)),
    Fault("synccheck", "cuda.sm90.prefill.fp8", "prefill", _FP8,
          Edit(f"{_SM90}/prefill_fp8.cu", _CONSUMER, _NO_BARRIER)),
    Fault("synccheck", "triton.sm90.prefill.warps", "prefill", _PLAIN,
          Edit(f"{_TRITON}/prefill_hopper.py", "mbarrier.init(raw_full.index(i), count=1)",
               "mbarrier.arrive(raw_full.index(i))")),
    # Memory that nobody has written: an output that is added to, a part's sums, a field of the order of work.
    Fault("initcheck", "cuda.sm80.quantize.rows", "quantize", _QUANTIZED,
          Edit(f"{_SM80}/quantize.cu", "[unit.block] = scale;", "[unit.block] += scale;")),
    Fault("initcheck", "cuda.sm90.prefill.wgmma", "long_rows_keep_the_mean_of_their_values", _LONG,
          Edit(f"{_SM90}/prefill_combine.cuh", _PART, "")),
    Fault("initcheck", "triton.sm90.prefill.warps", "prefill", _PLAIN,
          Edit(f"{_TRITON}/prefill.py", "        tl.store(at + 6, start, mask=inside)\n", "")),
)  # fmt: skip
