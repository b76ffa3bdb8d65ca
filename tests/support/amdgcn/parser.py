"""Text of compiled amdgcn assembly -> instructions, labels, kernel descriptors and metadata."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

_LABEL = re.compile(r"^([A-Za-z_.$][\w.$]*):")
_NOT_IN_BRACKETS = re.compile(r",(?![^\[(]*[\])])")
_ENCODING = re.compile(r"_(?:e32|e64|dpp|sdwa|e64_dpp)$")


@dataclass(slots=True)
class Instruction:
    """One line of assembly, split but not yet interpreted."""

    name: str  # without the encoding suffix (_e32, _e64, _dpp, _sdwa)
    operands: list[str]
    modifiers: dict[str, str]  # "offset:16" -> {"offset": "16"}, a bare flag -> {"offen": ""}
    line: int
    text: str


@dataclass(slots=True)
class Kernel:
    """What the assembler would put into the kernel descriptor and the code object's notes."""

    name: str
    descriptor: dict[str, int]  # .amdhsa_* directives without the prefix
    metadata: dict[str, Any]  # one entry of amdhsa.kernels


@dataclass(slots=True)
class Program:
    """All code of one assembly file."""

    arch: str
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    kernels: dict[str, Kernel] = field(default_factory=dict)


def parse(text: str) -> Program:
    """Parse assembly as clang and Triton print it.

    Raises
    ------
    ValueError
        The text names no amdgcn target.
    """
    target = re.search(r'\.amdgcn_target "amdgcn-amd-amdhsa-(?:unknown)?-(gfx\w+)', text)
    if target is None:
        raise ValueError("no .amdgcn_target with a gfx architecture in the assembly text")
    program = Program(target[1])
    body, _, notes = text.partition(".amdgpu_metadata")
    entries = yaml.safe_load(notes.partition(".end_amdgpu_metadata")[0].strip())["amdhsa.kernels"]
    metadata = {entry[".name"]: entry for entry in entries}
    descriptor: dict[str, int] = {}
    for number, raw in enumerate(body.splitlines(), 1):
        line = raw.split(";", 1)[0].rstrip()
        label = _LABEL.match(line)
        if label:
            program.labels[label[1]] = len(program.code)
            continue
        line = line.strip()
        if line.startswith(".amdhsa_kernel "):
            name, descriptor = line.split()[1], {}
            program.kernels[name] = Kernel(name, descriptor, metadata[name])
        elif line.startswith(".amdhsa_"):
            key, value = line[len(".amdhsa_") :].split()
            if value.isdigit():
                descriptor[key] = int(value)
        elif line and not line.startswith("."):
            program.code.append(_instruction(line, number))
    return program


def _instruction(line: str, number: int) -> Instruction:
    mnemonic, _, rest = line.partition(" ") if " " in line else line.partition("\t")
    operands: list[str] = []
    modifiers: dict[str, str] = {}
    for part in _NOT_IN_BRACKETS.split(rest.strip()) if rest.strip() else ():
        words = part.split()
        operands.append(words[0])
        for word in words[1:]:
            key, _, value = word.partition(":")
            modifiers[key] = value
    return Instruction(_ENCODING.sub("", mnemonic), operands, modifiers, number, line)
