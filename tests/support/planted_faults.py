"""Faults that compute-sanitizer has to find in this library's kernels: without them "0 reports" would prove nothing.

A fault is one edit of a kernel in a copy of the sources. What runs there is the same as elsewhere: the matrix's tests,
the library's own compilation, the same filter of kernels. The edits do what their tool looks for and no more: none
makes a kernel wait for ever or lose its way.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from tests.support.matrix_cases import LONG_ROWS, PLANS, PREFILLS, QUANTIZATIONS

ROOT = Path(__file__).resolve().parents[2]
_PARTS = ("mla", "backends", "kernels", "tests", "registry.yaml", "pyproject.toml")


@dataclass(frozen=True)
class Fault:
    """One edit, the tool that looks for such a thing, and a test of the matrix that runs the edited kernel."""

    tool: str
    implementation: str
    test: str
    case: object
    file: str
    old: str
    new: str

    @property
    def test_id(self) -> str:
        """Name of the test on a machine with a GPU."""
        return f"tests/kernels/test_matrix.py::test_{self.test}[{self.implementation}-{self.case}]"

    def edited(self) -> str:
        """Return the file with the fault in it."""
        text = (ROOT / self.file).read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file} has {text.count(self.old)} places {self.old!r}, not 1")
        return text.replace(self.old, self.new)

    def plant(self, folder: Path) -> None:
        """Copy the sources into an empty folder, with the fault."""
        for name in _PARTS:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(ROOT / name, folder / name)
        (folder / self.file).write_text(self.edited(), encoding="utf-8")


_RAGGED = PLANS[2]
_QUANTIZED = QUANTIZATIONS[0]
_PLAIN = PREFILLS[0]
_LONG = LONG_ROWS[0]  # of one head: its keys are worked on in parts, whose results lie in the workspace
_FP8 = next(case for case in PREFILLS if case.dtypes == "fp8" and case.v_transposed)
_SM80, _SM90, _TRITON = "kernels/cuda/sm80/", "kernels/cuda/sm90/", "kernels/triton/"
_ROWS_GUARD = "        if (row + 8 * r < item.rows)\n          *reinterpret_cast<uint4*>"
_END, _DIVERGENT = "    consume(params, shared, warpgroup);\n", "  if (threadIdx.x & 1) __syncthreads();\n"
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

FAULTS = (
    # Past the end of a tensor: one number, the rows of a last tile, a block of sequences.
    Fault("memcheck", "cuda.sm80.plan.scan", "plan", _RAGGED, f"{_SM80}plan.cu",
          "c < p.chunks; c += MLA_THREADS", "c <= p.chunks; c += MLA_THREADS"),
    Fault("memcheck", "cuda.sm80.prefill.mma", "prefill", _PLAIN, f"{_SM80}prefill_epilogue.cuh",
          "if (row >= item.rows) continue;", ""),
    Fault("memcheck", "cuda.sm90.prefill.wgmma", "prefill", _PLAIN, f"{_SM90}prefill_epilogue.cuh",
          _ROWS_GUARD, "          *reinterpret_cast<uint4*>"),
    Fault("memcheck", "cuda.sm90.prefill.fp8", "prefill", _FP8, f"{_SM90}prefill_epilogue.cuh",
          _ROWS_GUARD, "          *reinterpret_cast<uint4*>"),
    Fault("memcheck", "triton.any.plan.scan", "plan", _RAGGED, f"{_TRITON}plan.py",
          "in_buffer.to(tl.int32), mask=inside)", "in_buffer.to(tl.int32))"),
    Fault("memcheck", "triton.sm90.prefill.warps", "prefill", _PLAIN, f"{_TRITON}prefill_hopper.py",
          "gl.store(target, out, mask=(first + out_m < count)[:, None])", "gl.store(target, out)"),
    # Shared memory without a barrier between writer and reader: of the block, of the warp, of asynchronous roles.
    Fault("racecheck", "cuda.sm80.plan.scan", "plan", _RAGGED, f"{_SM80}plan.cu",
          "sums[warp] = inclusive;\n  __syncthreads();", "sums[warp] = inclusive;"),
    Fault("racecheck", "cuda.sm80.prefill.mma", "prefill", _PLAIN, f"{_SM80}prefill.cu",
          "__syncthreads();  // barrier 2", ""),
    Fault("racecheck", "cuda.sm90.prefill.wgmma", "prefill", _PLAIN, f"{_SM90}prefill_schedule.cuh",
          "total_entry(first + items, grouping);\n  __syncwarp();", "total_entry(first + items, grouping);"),
    Fault("racecheck", "cuda.sm90.prefill.wgmma", "prefill", _PLAIN, f"{_SM90}prefill_producer.cuh",
          _HAND_OVER, _HAND_OVER_LATE),
    Fault("racecheck", "triton.sm90.prefill.warps", "prefill", _PLAIN, f"{_TRITON}prefill_hopper.py",
          "n_keys, 0), numbers))\n                debug_barrier()", "n_keys, 0), numbers))"),
    # A barrier that half of each warp does not come to; at the end, where the others have left and none waits.
    Fault("synccheck", "cuda.sm80.plan.scan", "plan", _RAGGED, f"{_SM80}plan.cu",
          "    write_lengths(p, end);\n  }\n", f"    write_lengths(p, end);\n  }}\n{_DIVERGENT}"),
    Fault("synccheck", "cuda.sm90.prefill.wgmma", "prefill", _PLAIN, f"{_SM90}prefill.cu",
          _END, f"{_END}  {_DIVERGENT}"),
    Fault("synccheck", "cuda.sm90.prefill.fp8", "prefill", _FP8, f"{_SM90}prefill_fp8.cu",
          _END, f"{_END}  {_DIVERGENT}"),
    # Memory that nobody has written: an output that is added to, a part's sums, a field of the order of work.
    Fault("initcheck", "cuda.sm80.quantize.rows", "quantize", _QUANTIZED, f"{_SM80}quantize.cu",
          "[unit.block] = scale;", "[unit.block] += scale;"),
    Fault("initcheck", "cuda.sm90.prefill.wgmma", "long_rows_keep_the_mean_of_their_values", _LONG,
          f"{_SM90}prefill_combine.cuh",
          "  mine[kSlotO * 128] = make_float4(sums.m[0], sums.m[1], sums.l[0], sums.l[1]);\n", ""),
    Fault("initcheck", "triton.sm90.prefill.warps", "prefill", _PLAIN, f"{_TRITON}prefill.py",
          "        tl.store(at + 6, start, mask=inside)\n", ""),
)  # fmt: skip
