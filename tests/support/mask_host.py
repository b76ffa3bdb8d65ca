"""The C text of masks built as host C++, so that what a GPU would compute can be looked at without one."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch

from mla.mask_code import c_args, c_source
from mla.masks import Mask

CPU = torch.device("cpu")

_LOOPS = """
extern "C" void visible_{i}(const MaskArgs* m, int n, const int* p, int* out) {{
    for (int j = 0; j < n; ++j, p += 4) out[j] = mask_visible(*m, p[0], p[1], p[2], p[3]);
}}
extern "C" void tile_class_{i}(const MaskArgs* m, int n, const int* p, int* out) {{
    for (int j = 0; j < n; ++j, p += 6) out[j] = mask_tile_class(*m, p[0], p[1], p[2], p[3], p[4], p[5]);
}}
#if MLA_MASK_BIASES > 0
extern "C" void bias_{i}(const MaskArgs* m, int n, const int* p, float* out) {{
    for (int j = 0; j < n; ++j, p += 4) out[j] = mask_bias(*m, p[0], p[1], p[2], p[3]);
}}
#endif
extern "C" int args_size_{i}() {{ return sizeof(MaskArgs); }}
"""


def compiler() -> str | None:
    """Return a host C++ compiler, if there is one."""
    return shutil.which("g++") or shutil.which("clang++")


class HostMasks:
    """Several masks compiled into one library; mask i is called by its number."""

    def __init__(self, masks: Sequence[Mask], folder: Path) -> None:
        self.masks = masks
        text = ["#define MLA_DEVICE static inline"]
        for i, mask in enumerate(masks):
            code = c_source(mask.program)
            undo = [f"#undef {line.split()[1]}" for line in code.splitlines() if line.startswith("#define")]
            text += [f"namespace mask_{i} {{", code, _LOOPS.format(i=i), "}", *undo]
        source, library = folder / "masks.cpp", folder / "masks.so"
        source.write_text("\n".join(text))
        command = [str(compiler()), "-std=c++17", "-O1", "-shared", "-fPIC", "-nostdinc", "-Wall", "-Werror"]
        command += ["-Wno-unused-function", "-o", str(library), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        self.library = ctypes.CDLL(str(library))

    def call(self, name: str, i: int, points: torch.Tensor) -> torch.Tensor:
        """Call ``visible``, ``tile_class`` or ``bias`` of mask i on int32 [n, 4 or 6] points."""
        points = points.to(torch.int32).contiguous()
        out = torch.empty(len(points), dtype=torch.float32 if name == "bias" else torch.int32)
        args = c_args(self.masks[i], CPU)
        self.library[f"{name}_{i}"](
            ctypes.byref(args), len(points), ctypes.c_void_p(points.data_ptr()), ctypes.c_void_p(out.data_ptr())
        )
        return out

    def args_size(self) -> int:
        """Return what the compiler makes of ``sizeof(MaskArgs)``."""
        return int(self.library["args_size_0"]())
