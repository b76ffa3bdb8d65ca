"""Seconds from the start of a process to its first result, with an empty and with a filled cache of compiled kernels.

    python benchmarks/cold_start.py [--only prefill.cuda] [--json FILE]

For each operation and target some processes start at once on an empty cache, then single ones on what those left.
``first`` is the first result less import and CUDA context, with the library's inputs made before; ``compiles`` are the
compilations that the cache's log has, with their seconds. Triton keeps a cache of its own, which has no such log.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from environment import environment

CASES = (("merge", "cuda", 16), ("prefill", "cuda", 16), ("prefill", "triton", 1))

CHILD = """
import sys, time
start = time.perf_counter()
import torch
import mla
imported = time.perf_counter()
torch.set_grad_enabled(False)
op, target = sys.argv[1:]
q, kv = (torch.ones(64, 16, width, device="cuda", dtype=torch.bfloat16) for width in (192, 256))
pages = torch.ones(1, 64, 576, device="cuda", dtype=torch.bfloat16)
offsets = torch.tensor([0, 64], device="cuda", dtype=torch.int32)
cache = mla.PagedKVCacheCollection.from_pages(pages, offsets[:1, None], offsets[:1]).layer(0)
x, lse = torch.ones(64, 16, 128, device="cuda", dtype=torch.bfloat16), torch.ones(64, 16, device="cuda")
y = x.clone()
torch.cuda.synchronize()
context = time.perf_counter()
if op == "merge":
    mla.merge_attn_states(y, x, lse, x, lse, target=target)
else:
    mla.prefill(
        q, kv[..., :128], kv[..., 128:], cache, mla.CausalMask(), offsets, offsets, 0.07, output=y, lse=lse,
        target=target,
    )
torch.cuda.synchronize()
done = time.perf_counter()
assert (y == 1).all(), y
print(imported - start, context - imported, done - context)
"""


def start(op: str, target: str, folder: str) -> subprocess.Popen[str]:
    # NVRTC has a cache of its own, which would answer for kernels that something else has compiled on this machine.
    folders = {"MLA_CACHE_DIR": folder, "TRITON_CACHE_DIR": f"{folder}/triton", "CUDA_CACHE_PATH": f"{folder}/cuda"}
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, op, target], stdout=subprocess.PIPE, text=True, env={**os.environ, **folders}
    )


def seconds(process: subprocess.Popen[str]) -> list[float]:
    """Return seconds of import, context and first result of a process, once it ends."""
    output = process.communicate()[0]
    if process.returncode:
        raise RuntimeError(f"a process ended with status {process.returncode}")
    return [float(part) for part in output.split()]


def measure(op: str, target: str, processes: int) -> dict[str, Any]:
    """Start the processes of one case."""
    with tempfile.TemporaryDirectory(prefix="mla cold ") as folder:
        cold = [seconds(one) for one in [start(op, target, folder) for _ in range(processes)]]
        log = Path(folder) / "compiles.log"
        compiles = re.findall(r"(\S+)\.cubin ([\d.]+) s$", log.read_text() if log.exists() else "", re.MULTILINE)
        warm = [seconds(start(op, target, folder)) for _ in range(3)]
    columns = [statistics.median(column) for column in zip(*warm, strict=True)]
    return {
        "op": op, "target": target, "processes": processes, "slowest_cold_first_s": max(one[2] for one in cold),
        "compiles": {name: float(time) for name, time in compiles},
        "warm_import_s": columns[0], "warm_context_s": columns[1], "warm_first_s": columns[2],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", help="one case, such as prefill.cuda")
    args = parser.parse_args()
    rows = []
    for op, target, processes in CASES:
        if args.only not in (None, f"{op}.{target}"):
            continue
        rows.append(measure(op, target, processes))
        row = rows[-1]
        print(
            f"{row['op']:8} {row['target']:7} {row['processes']:3} at once: slowest first result "
            f"{row['slowest_cold_first_s']:.2f} s, compiled {row['compiles'] or 'by Triton'}; then import "
            f"{row['warm_import_s']:.2f}, context {row['warm_context_s']:.2f}, first {row['warm_first_s']:.2f} s",
            flush=True,
        )
    if args.json:
        found = {"environment": environment(), "rows": rows}
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
