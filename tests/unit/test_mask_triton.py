"""The Triton text of masks, run by Triton's interpreter and compiled for both vendors.

Both happen in processes of their own: the interpreter is chosen when triton is imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mla.mask_code import head_stride, triton_source
from mla.masks import Mask
from tests.support.mask_cases import masks, random_points, random_tiles

pytest.importorskip("triton", reason="needs triton: pip install 'mla-prefill[triton]'")

KERNELS = """
@triton.jit
def probe(b, h, q, k, tiles, out_visible, out_class, out_bias, c0, c1, c2, c3,
          bias0, stride_b0, stride_h0, stride_q0, rows0, cols0, bias1, stride_b1, stride_h1, stride_q1, rows1, cols1,
          NQ: tl.constexpr, NK: tl.constexpr, BIASED: tl.constexpr):
    offs_q, offs_k = tl.arange(0, NQ), tl.arange(0, NK)
    pos_q, pos_k = q + offs_q[:, None], k + offs_k[None, :]
    offs = offs_q[:, None] * NK + offs_k[None, :]
    visible = tl.broadcast_to(mask_visible(b, h, pos_q, pos_k, c0, c1, c2, c3), (NQ, NK))
    tl.store(out_visible + offs, visible.to(tl.int32))
    q_lo, q_hi, k_lo, k_hi = tl.load(tiles), tl.load(tiles + 1), tl.load(tiles + 2), tl.load(tiles + 3)
    tl.store(out_class, mask_tile_class(b, h, q_lo, q_hi, k_lo, k_hi, c0, c1, c2, c3))
    if BIASED:
        bias = mask_bias(b, h, pos_q, pos_k, bias0, stride_b0, stride_h0, stride_q0, rows0, cols0,
                         bias1, stride_b1, stride_h1, stride_q1, rows1, cols1)
        tl.store(out_bias + offs, bias)
"""

RUN = """
import importlib.util, sys, torch
cases, results = torch.load(sys.argv[1]), []
for case in cases:
    spec = importlib.util.spec_from_file_location(case["file"].stem, case["file"])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for b, h, q, k, tiles in case["points"]:
        visible, answer = torch.empty(32, 64, dtype=torch.int32), torch.empty(1, dtype=torch.int32)
        bias = torch.zeros(32, 64)
        module.probe[(1,)](b, h, q, k, tiles, visible, answer, bias, *case["captures"], *case["biases"],
                           NQ=32, NK=64, BIASED=case["biased"])
        results.append((visible, answer, bias))
torch.save(results, sys.argv[2])
"""

COMPILE = """
import importlib.util, json, sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
path, biased, types = json.loads(sys.argv[1])
spec = importlib.util.spec_from_file_location("mask", path)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
names = module.probe.arg_names
constants = {"NQ": 32, "NK": 64, "BIASED": biased}
constants |= {name: None for name in names if name not in types and name not in constants}
signature = {name: types.get(name, "constexpr") for name in names}
for target, binary in ((GPUTarget("cuda", 90, 32), "ptx"), (GPUTarget("hip", "gfx942", 64), "amdgcn")):
    kernel = triton.compile(ASTSource(module.probe, signature, constants), target=target)
    assert len(kernel.asm[binary]) > 0
"""


def bias_arguments(mask: Mask) -> list[object]:
    arguments: list[object] = []
    for bias in mask.biases:
        arguments += [bias, bias.stride(0), head_stride(bias), bias.stride(2), *bias.shape[2:]]
    return arguments + [None] * (12 - len(arguments))


def write(mask: Mask, path: Path) -> Path:
    path.write_text(triton_source(mask.program) + KERNELS)
    return path


def run(script: str, *arguments: object, interpret: bool) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1" if interpret else "0"}
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr


def test_triton_text_computes_what_torch_computes(tmp_path: Path) -> None:
    cases, expected = [], []
    for i, (name, mask) in enumerate(masks().items()):
        points = []
        for (b, h, q, k), tile in zip(random_points(3).tolist(), random_tiles(3)[:, 2:], strict=True):
            points.append((b, h, q, k, tile.to(torch.int32).contiguous()))
            pos_q, pos_k = torch.arange(q, q + 32)[:, None], torch.arange(k, k + 64)
            bias = mask.bias(b, h, pos_q, pos_k).expand(32, 64)
            expected.append((name, mask.visible(b, h, pos_q, pos_k).int(), mask.tile_class(b, h, *tile.tolist()), bias))
        cases.append(
            {
                "file": write(mask, tmp_path / f"mask_{i}.py"),
                "captures": [*mask.captures, *[None] * (4 - len(mask.captures))],
                "biases": bias_arguments(mask),
                "biased": mask.program.has_bias,
                "points": points,
            }
        )
    torch.save(cases, tmp_path / "cases.pt")
    loader = "import torch, functools; torch.load = functools.partial(torch.load, weights_only=False)\n"
    run(loader + RUN, tmp_path / "cases.pt", tmp_path / "results.pt", interpret=True)
    for (name, visible, answer, bias), result in zip(expected, torch.load(tmp_path / "results.pt"), strict=True):
        assert torch.equal(result[0], visible), name
        assert result[1].item() == answer, name
        assert torch.equal(result[2], bias), name


@pytest.mark.parametrize("name", ["null", "chunks by head", "two biases"])
def test_triton_text_compiles_for_both_vendors(name: str, tmp_path: Path) -> None:
    mask = masks()[name]
    types = {
        "b": "i32",
        "h": "i32",
        "q": "i32",
        "k": "i32",
        "tiles": "*i32",
        "out_visible": "*i32",
        "out_class": "*i32",
    }
    types["out_bias"] = "*fp32"
    types |= {f"c{i}": "*i32" for i in range(len(mask.captures))}
    for i, dtype in enumerate(mask.program.biases):
        types |= {f"bias{i}": f"*{dtype}", f"rows{i}": "i32", f"cols{i}": "i32"}
        types |= {f"stride_{dim}{i}": "i64" for dim in "bhq"}
    path = write(mask, tmp_path / "mask.py")
    run(COMPILE, json.dumps([str(path), mask.program.has_bias, types]), interpret=False)
