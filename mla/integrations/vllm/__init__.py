"""An MLA prefill backend for vLLM, outside its tree. Importing this module imports nothing of vLLM.

Installed together, vLLM finds `plugin` by its entry point; the backend is then chosen with

    vllm serve MODEL -ac.mla_prefill_backend=CUSTOM
"""

from __future__ import annotations

import logging

from mla.errors import ArgumentError, MlaError, UnsupportedError
from mla.integrations import require_package

#: Where vLLM imports the backend from, in the process that needs it.
BACKEND_PATH = "mla.integrations.vllm.backend.MlaPrefillBackend"

_log = logging.getLogger(__name__)


def register() -> None:
    """Make the backend vLLM's ``CUSTOM`` one for MLA prefill; vLLM uses it only where that is selected.

    Raises
    ------
    MissingPackageError
        vLLM is not installed.
    UnsupportedError
        vLLM is too old to take prefill backends from outside.
    ArgumentError
        Another package has registered a CUSTOM backend.
    """
    require_package("vllm", install="pip install vllm")
    try:
        from vllm.v1.attention.backends.mla.prefill.registry import (
            MLAPrefillBackendEnum,
            register_mla_prefill_backend,
        )
    except ImportError as error:
        raise UnsupportedError(f"this vLLM has no registry of MLA prefill backends ({error}); 0.26 has") from error
    custom = MLAPrefillBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() != BACKEND_PATH:
        raise ArgumentError(f"vLLM's CUSTOM MLA prefill backend is {custom.get_path()} already; VLLM_PLUGINS selects")
    register_mla_prefill_backend(custom, BACKEND_PATH)


def plugin() -> None:
    """Register, as the entry point ``vllm.general_plugins``; what prevents it is logged and leaves vLLM as it is."""
    try:
        register()
    except MlaError as error:
        _log.warning("mla-prefill is not available as an MLA prefill backend: %s", error)
