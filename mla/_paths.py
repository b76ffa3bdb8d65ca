"""Where the package's own files lie: in a checkout, an editable install and an installed wheel alike."""

from __future__ import annotations

from pathlib import Path

#: Folder of the package. (On Python 3.11 ``importlib.resources`` cannot join several parts below a namespace package.)
PACKAGE = Path(__file__).resolve().parent
#: Kernel sources, one folder a vendor.
KERNELS = PACKAGE / "kernels"
#: The packaged list of implementations.
REGISTRY = PACKAGE / "registry.yaml"
