"""Where the package's own files lie: in a checkout, an editable install and an installed wheel alike."""

from __future__ import annotations

from pathlib import Path

#: Folder of the installed package. (``importlib.resources`` cannot join several parts below a namespace package on Python 3.11.)
PACKAGE = Path(__file__).resolve().parent
#: Kernel sources, one folder a vendor.
KERNELS = PACKAGE / "kernels"
#: The packaged list of implementations.
REGISTRY = PACKAGE / "registry.yaml"
