"""Every error the library raises on purpose.

Each names the argument, what came and what is allowed, and is raised before any kernel is compiled or launched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mla.explanation import Explanation


class MlaError(Exception):
    """Base of all errors of this library."""


class ShapeError(MlaError, ValueError):
    """A tensor has the wrong rank, extent or stride, or two tensors disagree."""


class DTypeError(MlaError, TypeError):
    """A tensor has a dtype the operation does not take, or an argument has the wrong type."""


class DeviceError(MlaError, TypeError):
    """A tensor lies on a device where the operation cannot run."""


class ArgumentError(MlaError, ValueError):
    """A value is out of range, or arguments that exclude or need each other were given wrongly."""


class BufferOverflowError(MlaError, ValueError):
    """The plan needs more chunks than its tables have rows."""


class TargetError(MlaError, ValueError):
    """A target string names no known backend or architecture."""


class RegistryError(MlaError):
    """A registry file breaks the schema; the message starts with ``file:line``."""


class CompileError(MlaError):
    """A kernel did not compile; carries the compiler's log, its options and the path of the kept source."""


class MissingPackageError(MlaError, ImportError):
    """An integration needs a package that is not installed; the message ends with the command that installs it."""


class UnsupportedError(MlaError):
    """No implementation serves the problem on the target.

    Attributes
    ----------
    explanation : Explanation
        Every candidate with its reasons for and against.
    """

    def __init__(self, message: str, explanation: Explanation | None = None) -> None:
        super().__init__(message if explanation is None else f"{message}\n{explanation}")
        self.explanation = explanation
