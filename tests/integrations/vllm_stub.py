"""vLLM's interface of MLA prefill backends as two of its releases have it, and how its attention layer calls it.

Signatures, fields and calls are those of vllm/v1/attention/backends/mla/prefill/{base,registry,selector}.py and
vllm/model_executor/layers/attention/mla_attention.py in the source distributions of

    0.26.0 (commit f2654939e)    chunks are columns of tables, by index
    0.33.0 (commit 4ba787ec9)    chunks are objects, which may hold some of the sequences

What is not there raises: modules and metadata have the recorded names only, methods the recorded parameters.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, NamedTuple

import pytest
import torch

from mla.integrations import target_of
from mla.merge import merge_attn_states

VERSIONS = {"0.26.0": "f2654939e", "0.33.0": "4ba787ec9"}
_PREFILL = "vllm.v1.attention.backends.mla.prefill"


@dataclass(frozen=True, kw_only=True)
class MLADimensions:
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


class MLAPrefillSelectorConfig(NamedTuple):
    dtype: torch.dtype
    mla_dimensions: MLADimensions = MLADimensions(qk_nope_head_dim=0, qk_rope_head_dim=0, v_head_dim=0)


class DeviceCapability(NamedTuple):
    major: int
    minor: int


class _Base(ABC):
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_mla_dimensions: ClassVar[list[MLADimensions]] = []

    @staticmethod
    @abstractmethod
    def get_name() -> str:
        raise NotImplementedError

    @classmethod
    def supports_compute_capability(cls, device_capability: DeviceCapability | None) -> bool:
        return True

    @classmethod
    def supports_dtype(cls, dtype: torch.dtype) -> bool:
        return dtype in cls.supported_dtypes

    @classmethod
    def supports_mla_dimensions(cls, mla_dimensions: MLADimensions) -> bool:
        return not cls.supported_mla_dimensions or mla_dimensions in cls.supported_mla_dimensions

    @classmethod
    def is_available(cls) -> bool:
        return True

    def supports_quant_output(self, quant_key: object) -> bool:
        return False

    @classmethod
    def validate_configuration(
        cls, device_capability: DeviceCapability | None, selector_config: MLAPrefillSelectorConfig
    ) -> list[str]:
        checks = {
            "compute capability": cls.supports_compute_capability(device_capability),
            "dtype": cls.supports_dtype(selector_config.dtype),
            "dependencies": cls.is_available(),
            "MLA dimensions": cls.supports_mla_dimensions(selector_config.mla_dimensions),
        }
        return [f"{name} not supported" for name, fits in checks.items() if not fits]

    def __init__(
        self,
        num_heads: int,
        scale: float,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        vllm_config: object,
    ) -> None:
        self.num_heads = num_heads
        self.scale = scale
        self.kv_lora_rank = kv_lora_rank
        self.qk_nope_head_dim = qk_nope_head_dim
        self.qk_rope_head_dim = qk_rope_head_dim
        self.v_head_dim = v_head_dim
        self.vllm_config = vllm_config

    def clone(self) -> _Base:
        return self.__class__(
            num_heads=self.num_heads,
            scale=self.scale,
            kv_lora_rank=self.kv_lora_rank,
            qk_nope_head_dim=self.qk_nope_head_dim,
            qk_rope_head_dim=self.qk_rope_head_dim,
            v_head_dim=self.v_head_dim,
            vllm_config=self.vllm_config,
        )

    def prepare_metadata(self, prefill_metadata: object) -> None:
        self._prefill_metadata = prefill_metadata

    @abstractmethod
    def run_prefill_new_tokens(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        return_softmax_lse: bool,
        out: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError


class _Base026(_Base):
    @abstractmethod
    def run_prefill_context_chunk(
        self, chunk_idx: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError


class _Base033(_Base):
    def supports_out(self) -> bool:
        return False

    @abstractmethod
    def run_prefill_context_chunk(
        self, chunk: object, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError


@dataclass(slots=True)
class ContextChunk:
    """What 0.33 says of a chunk, as far as prefill backends of its own read it."""

    token_slice: slice
    query_start_loc: torch.Tensor
    max_query_len: int
    cu_seq_lens: torch.Tensor
    max_seq_len: int
    all_rows_active: bool


@dataclass(slots=True)
class ChunkedContext026:
    cu_seq_lens: torch.Tensor
    max_seq_lens: list[int]


@dataclass(slots=True)
class ChunkedContext033:
    chunks: list[ContextChunk]


@dataclass(slots=True)
class PrefillMetadata:
    query_start_loc: torch.Tensor
    max_query_len: int
    chunked_context: ChunkedContext026 | ChunkedContext033 | None = None
    q_data_type: torch.dtype | None = None
    output_dtype: torch.dtype | None = None


def registry() -> tuple[type[Enum], Callable[..., Any]]:
    """Return the enumeration of backends and the function that registers one, with nothing registered."""
    overrides: dict[Any, str] = {}

    class MLAPrefillBackendEnum(Enum):
        FLASH_ATTN = f"{_PREFILL}.flash_attn.FlashAttnPrefillBackend"
        CUSTOM = None

        def get_path(self) -> str:
            path = overrides.get(self, self.value)
            if not path:
                raise ValueError(f"MLA prefill backend {self.name} must be registered before use")
            return path

        def get_class(self) -> Any:
            module, name = self.get_path().rsplit(".", 1)
            return getattr(importlib.import_module(module), name)

        def is_overridden(self) -> bool:
            return self in overrides

    def register_mla_prefill_backend(backend: MLAPrefillBackendEnum, class_path: str | None = None) -> Any:
        assert isinstance(backend, MLAPrefillBackendEnum) and class_path is not None
        overrides[backend] = class_path
        return lambda x: x

    return MLAPrefillBackendEnum, register_mla_prefill_backend


def _module(name: str, **names: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, loader=None, is_package=True)
    module.__path__ = []
    vars(module).update(names)
    return module


def install(monkeypatch: pytest.MonkeyPatch, version: str) -> type[Enum]:
    """Put the interface of a release in the place of vLLM for the rest of a test; return its enumeration."""
    backends, register = registry()
    base = _Base026 if version == "0.26.0" else _Base033
    folders = ["vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends", "vllm.v1.attention.backends.mla"]
    modules = [_module(name) for name in (*folders, _PREFILL)]
    modules += [
        _module(f"{_PREFILL}.base", MLADimensions=MLADimensions, MLAPrefillBackend=base),
        _module(f"{_PREFILL}.registry", MLAPrefillBackendEnum=backends, register_mla_prefill_backend=register),
    ]
    for module in modules:
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "mla.integrations.vllm.backend", raising=False)
    return backends


def forward_mha(
    backend: Any,
    version: str,
    q: torch.Tensor,
    new: tuple[torch.Tensor, torch.Tensor],
    metadata: PrefillMetadata,
    context: Callable[[int], tuple[torch.Tensor, torch.Tensor]],
) -> torch.Tensor:
    """Call a backend as vLLM's attention layer of a release does, and merge what it returns.

    `context` gives k and v of a chunk, gathered and projected up.
    """
    assert backend.supports_quant_output(object()) is False
    has_context = metadata.chunked_context is not None
    k, v = new
    suffix = backend.run_prefill_new_tokens(q=q, k=k, v=v, return_softmax_lse=has_context, out=None, output_scale=None)
    if not has_context:
        return suffix
    output, lse = torch.zeros_like(suffix[0]), torch.full_like(suffix[1], -torch.inf)
    for tokens, part, part_lse in _context_parts(backend, version, q, metadata, context):
        assert part_lse.shape == (q.shape[1], part.shape[0])
        rows, row_lse = output[tokens], lse[:, tokens]
        merge_attn_states(rows, rows, row_lse, part, part_lse, row_lse, lse_layout="HT", target=target_of(q.device))
    merge_attn_states(output, output, lse, *suffix, lse_layout="HT", target=target_of(q.device))
    return output


def _context_parts(
    backend: Any,
    version: str,
    q: torch.Tensor,
    metadata: PrefillMetadata,
    context: Callable[[int], tuple[torch.Tensor, torch.Tensor]],
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    chunked = metadata.chunked_context
    if isinstance(chunked, ChunkedContext026):
        assert version == "0.26.0"
        for i in range(len(chunked.max_seq_lens)):
            k, v = context(i)
            yield slice(None), *backend.run_prefill_context_chunk(chunk_idx=i, q=q, k=k, v=v)
        return
    assert isinstance(chunked, ChunkedContext033)
    for i, chunk in enumerate(chunked.chunks):
        k, v = context(i)
        yield (
            chunk.token_slice,
            *backend.run_prefill_context_chunk(chunk=chunk, q=q[chunk.token_slice], k=k, v=v),
        )
