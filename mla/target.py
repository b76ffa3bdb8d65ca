"""Names of what a call runs on: a backend, and the architecture to compile for or to explain."""

from __future__ import annotations

import difflib
import functools
import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from mla.errors import TargetError

if TYPE_CHECKING:
    from collections.abc import Iterable

#: Every target name of the library, and the backends that may serve it in order of preference at equal priority.
TARGET_BACKENDS: dict[str, tuple[str, ...]] = {
    "gpu": ("cuda", "rocm", "triton"),
    "cuda": ("cuda",),
    "rocm": ("rocm",),
    "triton": ("triton",),
    "cpu": ("reference",),
}
#: Backends that ship with the library.
BACKENDS = ("reference", "cuda", "rocm", "triton")

_NVIDIA_ARCH = re.compile(r"sm_\d{2,3}[af]?")
_AMD_ARCH = re.compile(r"gfx\d{1,2}[0-9a-f]{2}")
_ARCH_PATTERNS = {
    "gpu": (_NVIDIA_ARCH, _AMD_ARCH),
    "cuda": (_NVIDIA_ARCH,),
    "rocm": (_AMD_ARCH,),
    "triton": (_NVIDIA_ARCH, _AMD_ARCH),
}
#: Architectures offered when a name is misspelt; any other that has the right form is taken as well.
_COMMON_ARCHS = {
    _NVIDIA_ARCH: ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a"),
    _AMD_ARCH: ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"),
}


@dataclass(frozen=True, slots=True)
class Target:
    """A backend by name and, optionally, the architecture it compiles for.

    Attributes
    ----------
    name : str
        ``gpu``, ``cuda``, ``rocm``, ``triton``, ``cpu``, or a backend that a registry file of the user's names.
    arch : str or None
        ``sm_90a``, ``gfx942``, ...; None stands for the architecture of the device of the call.
    """

    name: str
    arch: str | None = None

    @classmethod
    def parse(cls, text: str | Target, *, backends: Iterable[str] = ()) -> Target:
        """Read ``name`` or ``name:arch``; ``str()`` of the result gives the text back.

        Parameters
        ----------
        text : str or Target
            A Target is returned as it is.
        backends : iterable of str
            Names of backends beyond the library's own.

        Raises
        ------
        TargetError
            Unknown name or architecture; the message has the nearest known one and the list.
        """
        if isinstance(text, Target):
            return text
        if not isinstance(text, str):
            raise TargetError(f"target must be a string such as 'cuda' or 'cuda:sm_90a', not {type(text).__name__}")
        name, colon, arch = text.partition(":")
        names = (*TARGET_BACKENDS, *sorted(set(backends) - set(BACKENDS)))
        if name not in names:
            raise TargetError(f"unknown target {text!r}{_nearest(name, names)}; known targets: {', '.join(names)}")
        if not colon:
            return cls(name)
        if name not in TARGET_BACKENDS and arch:
            return cls(name, arch)
        patterns = _ARCH_PATTERNS.get(name, ())
        if not patterns:
            raise TargetError(f"target {text!r}: {name!r} takes no architecture")
        if not any(pattern.fullmatch(arch) for pattern in patterns):
            archs = [common for pattern in patterns for common in _COMMON_ARCHS[pattern]]
            hint = f"{_nearest(arch, archs)}; for example: {', '.join(archs)}"
            raise TargetError(f"target {text!r}: unknown architecture {arch!r}{hint}")
        return cls(name, arch)

    def __str__(self) -> str:
        return self.name if self.arch is None else f"{self.name}:{self.arch}"

    @property
    def backends(self) -> tuple[str, ...]:
        """Backends that may serve this target; the vendor of ``arch`` narrows ``gpu``."""
        names = TARGET_BACKENDS.get(self.name, (self.name,))
        if self.name != "gpu" or self.arch is None:
            return names
        other = "cuda" if _AMD_ARCH.fullmatch(self.arch) else "rocm"
        return tuple(name for name in names if name != other)


@dataclass(frozen=True, slots=True)
class Availability:
    """What a backend's ``runtime.probe()`` finds on this machine.

    Attributes
    ----------
    reason : str or None
        None when calls can run; else one sentence saying what is missing and what mends it.
    archs : tuple of str
        Architecture of each device, in torch's order.
    versions : dict of str to str
        Versions of the vendor's pieces that were found.
    """

    reason: str | None
    archs: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)


def runs_on(backend: str, device: torch.device) -> bool:
    """Tell whether tensors on ``device`` are where ``backend`` runs; a backend of the user's own judges for itself."""
    if backend == "reference":
        return device.type == "cpu"
    if backend == "cuda":
        return device.type == "cuda" and torch.version.hip is None
    if backend == "rocm":
        return device.type == "cuda" and torch.version.hip is not None
    if backend == "triton":
        return device.type == "cuda" or (device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1")
    return True


@functools.cache
def device_arch(device: torch.device) -> str:
    """Name a device's architecture: ``cpu``, ``sm_90a``, ``sm_80``, ``gfx942``.

    Compute capability 9.0 is ``sm_90a``; a gfx name is the base, without features such as ``:sramecc+``.
    """
    if device.type != "cuda":
        return device.type
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return str(properties.gcnArchName).partition(":")[0]
    capability = (properties.major, properties.minor)
    return "sm_90a" if capability == (9, 0) else f"sm_{capability[0]}{capability[1]}"


def install_hint(extra: str) -> str:
    """Return the command that installs one of the package's extras."""
    return f"pip install 'mla-prefill[{extra}]'"


def _nearest(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""
