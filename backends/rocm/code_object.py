"""What the notes of an AMD code object say of its kernel: registers, spills, LDS.

A code object is an ELF file; its NT_AMDGPU_METADATA note is a MessagePack map (LLVM's AMDGPU usage guide, "Code Object
Metadata").
"""

from __future__ import annotations

import struct
from typing import Any

_NOTE_SECTION = 7  # SHT_NOTE
_NT_AMDGPU_METADATA = 32
_FIELDS = {
    "vgprs": ".vgpr_count",
    "agprs": ".agpr_count",
    "sgprs": ".sgpr_count",
    "vgpr_spills": ".vgpr_spill_count",
    "sgpr_spills": ".sgpr_spill_count",
    "lds_bytes": ".group_segment_fixed_size",
    "scratch_bytes": ".private_segment_fixed_size",
}


def report(code: bytes) -> dict[str, object]:
    """Read the figures of the first kernel of a code object; empty when it has no such note."""
    for metadata in _metadata(code):
        for kernel in metadata.get("amdhsa.kernels", ()):
            return {name: kernel.get(key, 0) for name, key in _FIELDS.items()}
    return {}


def _metadata(code: bytes) -> list[dict[str, Any]]:
    if code[:5] != b"\x7fELF\x02":
        return []
    (section_table,) = struct.unpack_from("<Q", code, 0x28)
    entry_size, count = struct.unpack_from("<HH", code, 0x3A)
    found = []
    for index in range(count):
        entry = section_table + index * entry_size
        (kind,) = struct.unpack_from("<I", code, entry + 4)
        offset, size = struct.unpack_from("<QQ", code, entry + 0x18)
        if kind == _NOTE_SECTION:
            found += _notes(code[offset : offset + size])
    return found


def _notes(data: bytes) -> list[dict[str, Any]]:
    found, place = [], 0
    while place + 12 <= len(data):
        name_size, size, kind = struct.unpack_from("<III", data, place)
        body = place + 12 + (name_size + 3) // 4 * 4
        if kind == _NT_AMDGPU_METADATA:
            found.append(_unpack(data[body : body + size], 0)[0])
        place = body + (size + 3) // 4 * 4
    return found


def _unpack(data: bytes, place: int) -> tuple[Any, int]:
    """Decode one MessagePack object; returns it and the place behind it."""
    tag = data[place]
    place += 1
    if tag < 0x80:
        return tag, place
    if tag >= 0xE0:
        return tag - 0x100, place
    if tag < 0x90:
        return _unpack_map(data, place, tag & 0x0F)
    if tag < 0xA0:
        return _unpack_list(data, place, tag & 0x0F)
    if tag < 0xC0:
        return _unpack_text(data, place, tag & 0x1F)
    if tag in (0xC0, 0xC2, 0xC3):
        return {0xC0: None, 0xC2: False, 0xC3: True}[tag], place
    numbers = {0xCC: "B", 0xCD: "H", 0xCE: "I", 0xCF: "Q", 0xD0: "b", 0xD1: "h", 0xD2: "i", 0xD3: "q", 0xCB: "d"}
    if tag in numbers:
        return struct.unpack_from(">" + numbers[tag], data, place)[0], place + struct.calcsize(numbers[tag])
    sized = {
        0xD9: ("B", _unpack_text), 0xDA: ("H", _unpack_text), 0xDB: ("I", _unpack_text),
        0xDC: ("H", _unpack_list), 0xDD: ("I", _unpack_list), 0xDE: ("H", _unpack_map), 0xDF: ("I", _unpack_map),
    }  # fmt: skip
    code, unpack = sized[tag]
    (size,) = struct.unpack_from(">" + code, data, place)
    return unpack(data, place + struct.calcsize(code), size)


def _unpack_text(data: bytes, place: int, size: int) -> tuple[str, int]:
    return data[place : place + size].decode(), place + size


def _unpack_list(data: bytes, place: int, size: int) -> tuple[list[Any], int]:
    items = []
    for _ in range(size):
        item, place = _unpack(data, place)
        items.append(item)
    return items, place


def _unpack_map(data: bytes, place: int, size: int) -> tuple[dict[Any, Any], int]:
    items = {}
    for _ in range(size):
        key, place = _unpack(data, place)
        items[key], place = _unpack(data, place)
    return items, place
