"""The backend behind the recorded interfaces of two releases of vLLM, held against the float64 oracle."""

from __future__ import annotations

import logging
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch

from mla import reference
from mla.errors import ArgumentError, DTypeError, MissingPackageError, UnsupportedError
from mla.integrations import vllm as integration
from mla.masks import CausalMask
from tests.integrations import vllm_stub
from tests.integrations.vllm_stub import ChunkedContext026, ChunkedContext033, ContextChunk, PrefillMetadata
from tests.support.tolerance import assert_output

ROOT = Path(__file__).parents[2]
HEADS = 3
CACHED, NEW = [300, 0, 70, 5], [20, 13, 1, 40]
#: Most keys of a chunk, per sequence in 0.26 and of a chunk in 0.33.
CHUNK = 128


def _offsets(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)


class Scene:
    """A step of four sequences, three of them with a cached prefix, with k and v as vLLM hands them over."""

    def __init__(
        self, dims: tuple[int, int] = (192, 128), dtype: torch.dtype = torch.bfloat16, device: str = "cpu"
    ) -> None:
        q_depth, width = dims
        nope = q_depth - 64
        self.device = device
        self.q = torch.randn(sum(NEW), HEADS, q_depth).to(device, dtype)
        self.k, self.v = [], []
        for cached, new in zip(CACHED, NEW, strict=True):
            own, shared = torch.randn(cached + new, HEADS, nope), torch.randn(cached + new, 1, 64)
            self.k.append(torch.cat((own, shared.expand(-1, HEADS, -1)), -1).to(device, dtype))
            self.v.append(torch.randn(cached + new, HEADS, nope + width).to(device, dtype)[..., nope:])
        self.dims = dims
        self.scale = 0.1

    def keys(self, spans: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return k and v of a span of each sequence, end to end."""
        return (
            torch.cat([k[a:b] for k, (a, b) in zip(self.k, spans, strict=True)]),
            torch.cat([v[a:b] for v, (a, b) in zip(self.v, spans, strict=True)]),
        )

    def spans(self, version: str) -> list[list[tuple[int, int]]]:
        """Return the cached keys of each chunk: parts of all sequences in 0.26, of a run of them in 0.33."""
        if version == "0.26.0":
            count = -(-max(CACHED) // CHUNK)
            return [[(min(c, i * CHUNK), min(c, (i + 1) * CHUNK)) for c in CACHED] for i in range(count)]
        first = [[(a, min(300, a + CHUNK)), (0, 0), (0, 0), (0, 0)] for a in range(0, 300, CHUNK)]
        return [*first, [(0, 0), (0, 0), (0, 70), (0, 5)]]

    def metadata(self, version: str) -> PrefillMetadata:
        starts = _offsets(NEW).to(self.device)
        chunks = [_offsets([b - a for a, b in spans]).to(self.device) for spans in self.spans(version)]
        context: Any
        if version == "0.26.0":
            context = ChunkedContext026(torch.stack(chunks), [int(c.diff().max()) for c in chunks])
        else:
            rows = [slice(0, 1)] * 3 + [slice(2, 4)]
            context = ChunkedContext033(
                [
                    ContextChunk(
                        token_slice=slice(int(starts[row.start]), int(starts[row.stop])),
                        query_start_loc=starts[row.start : row.stop + 1] - starts[row.start],
                        max_query_len=int(starts[row.start : row.stop + 1].diff().max()),
                        cu_seq_lens=chunk[row.start : row.stop + 1],
                        max_seq_len=int(chunk.diff().max()),
                        all_rows_active=True,
                    )
                    for chunk, row in zip(chunks, rows, strict=True)
                ]
            )
        return PrefillMetadata(starts, max(NEW), context, output_dtype=self.q.dtype)

    def backend(self, cls: Any) -> Any:
        q_depth, width = self.dims
        return cls(
            num_heads=HEADS,
            scale=self.scale,
            kv_lora_rank=512,
            qk_nope_head_dim=q_depth - 64,
            qk_rope_head_dim=64,
            v_head_dim=width,
            vllm_config=object(),
        ).clone()

    def expected(self, cached: bool) -> tuple[torch.Tensor, torch.Tensor]:
        spans = [(0 if cached else c, c + n) for c, n in zip(CACHED, NEW, strict=True)]
        k, v = self.keys(spans)
        nope = k.shape[-1] - 64
        counts = _offsets([b - a for a, b in spans])
        return reference.prefill(
            self.q, k[..., :nope], v, k[:, :1, nope:], CausalMask(), _offsets(NEW), counts, self.scale
        )


@pytest.fixture(params=vllm_stub.VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def backend_class(version: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    backends: Any = vllm_stub.install(monkeypatch, version)
    integration.plugin()
    return backends.CUSTOM.get_class()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dims", [(192, 128), (256, 256)])
def test_a_step_with_cached_prefixes(
    backend_class: Any, version: str, dims: tuple[int, int], dtype: torch.dtype, device: str
) -> None:
    scene = Scene(dims, dtype, device)
    backend, metadata = scene.backend(backend_class), scene.metadata(version)
    backend.prepare_metadata(metadata)
    spans = scene.spans(version)
    new = scene.keys([(c, c + n) for c, n in zip(CACHED, NEW, strict=True)])
    output = vllm_stub.forward_mha(backend, version, scene.q, new, metadata, lambda i: scene.keys(spans[i]))
    assert_output(output, scene.expected(cached=True)[0], "bf16", factor=2)


def test_new_tokens(backend_class: Any, version: str) -> None:
    scene = Scene()
    backend, metadata = scene.backend(backend_class), scene.metadata(version)
    backend.prepare_metadata(metadata)
    k, v = scene.keys([(c, c + n) for c, n in zip(CACHED, NEW, strict=True)])
    expected, expected_lse = scene.expected(cached=False)
    alone = backend.run_prefill_new_tokens(q=scene.q, k=k, v=v, return_softmax_lse=False)
    assert_output(alone, expected, "bf16")
    out = torch.full_like(alone, torch.nan)
    output, lse = backend.run_prefill_new_tokens(scene.q, k, v, True, out)
    assert output is out
    assert torch.equal(out, alone)
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse, expected_lse.T.float(), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("version", ["0.26.0"], indirect=True)
def test_a_sequence_without_context_is_empty(backend_class: Any, version: str) -> None:
    """Later chunks hold no such sequence."""
    scene = Scene()
    backend = scene.backend(backend_class)
    backend.prepare_metadata(scene.metadata(version))
    k, v = scene.keys(scene.spans(version)[0])
    output, lse = backend.run_prefill_context_chunk(0, scene.q, k, v)
    rows = slice(NEW[0], NEW[0] + NEW[1])
    assert (output[rows] == 0).all()
    assert (lse[:, rows] == -torch.inf).all()
    assert lse[:, : NEW[0]].isfinite().all()


@pytest.mark.parametrize("version", ["0.33.0"], indirect=True)
def test_in_place_context(backend_class: Any, version: str) -> None:
    scene = Scene()
    backend, metadata = scene.backend(backend_class), scene.metadata(version)
    backend.prepare_metadata(metadata)
    assert backend.supports_out()
    assert isinstance(metadata.chunked_context, ChunkedContext033)
    chunk, spans = metadata.chunked_context.chunks[-1], scene.spans(version)[-1]
    q = scene.q[chunk.token_slice]
    out = torch.empty(q.shape[0], HEADS, 128, dtype=q.dtype)
    output, _ = backend.run_prefill_context_chunk(chunk, q, *scene.keys(spans), out=out)
    assert output is out


def test_what_is_selected(backend_class: Any) -> None:
    """vLLM's own checks first; then the registry's, with every candidate's reason, as on a machine without a GPU."""
    assert backend_class.get_name() == "MLA_PREFILL"
    small = vllm_stub.MLADimensions(qk_nope_head_dim=64, qk_rope_head_dim=64, v_head_dim=64)
    usual = vllm_stub.MLADimensions(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    capability = vllm_stub.DeviceCapability(9, 0)

    def reasons(dtype: torch.dtype, dims: vllm_stub.MLADimensions) -> list[str]:
        return backend_class.validate_configuration(capability, vllm_stub.MLAPrefillSelectorConfig(dtype, dims))

    assert reasons(torch.bfloat16, small) == ["MLA dimensions not supported"]
    assert reasons(torch.float32, usual) == ["dtype not supported"]
    if not torch.cuda.is_available():
        (reason,) = reasons(torch.bfloat16, usual)
        assert "cuda.sm90.prefill" in reason
        assert "torch sees no" in reason


@pytest.mark.cuda
def test_selected_on_this_gpu(backend_class: Any) -> None:
    usual = vllm_stub.MLADimensions(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    config = vllm_stub.MLAPrefillSelectorConfig(torch.bfloat16, usual)
    assert backend_class.validate_configuration(vllm_stub.DeviceCapability(9, 0), config) == []


def test_refused(backend_class: Any, version: str) -> None:
    scene = Scene()
    backend = scene.backend(backend_class)
    backend.prepare_metadata(scene.metadata(version))
    k, v = scene.keys([(c, c + n) for c, n in zip(CACHED, NEW, strict=True)])
    with pytest.raises(UnsupportedError, match="output_scale"):
        backend.run_prefill_new_tokens(scene.q, k, v, False, output_scale=torch.ones(1))
    fp8 = (x.to(torch.float8_e4m3fn) for x in (scene.q, k, v))
    with pytest.raises(DTypeError, match="use_prefill_query_quantization"):
        backend.run_prefill_new_tokens(*fp8, False)


def test_registration(version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    backends: Any = vllm_stub.install(monkeypatch, version)
    integration.register()
    integration.register()
    assert backends.CUSTOM.get_path() == integration.BACKEND_PATH
    sys.modules["vllm.v1.attention.backends.mla.prefill.registry"].register_mla_prefill_backend(
        backends.CUSTOM, "another.Backend"
    )
    with pytest.raises(ArgumentError, match=r"another\.Backend already"):
        integration.register()
    with caplog.at_level(logging.WARNING):
        integration.plugin()
    assert "not available as an MLA prefill backend" in caplog.text
    assert backends.CUSTOM.get_path() == "another.Backend"


def test_vllm_that_has_no_registry_or_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm_stub.install(monkeypatch, "0.26.0")
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.mla.prefill.registry", None)
    with pytest.raises(UnsupportedError, match=r"no registry of MLA prefill backends"):
        integration.register()
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(MissingPackageError, match="pip install vllm"):
        integration.register()


def test_the_entry_point_leads_here_and_loads_no_engine() -> None:
    declared = (ROOT / "pyproject.toml").read_text()
    assert '[project.entry-points."vllm.general_plugins"]\nmla_prefill = "mla.integrations.vllm:plugin"' in declared
    assert (
        EntryPoint("mla_prefill", "mla.integrations.vllm:plugin", "vllm.general_plugins").load() is integration.plugin
    )
    script = (
        "import sys, mla, mla.integrations.vllm, mla.integrations.sglang, mla.integrations.flashinfer\n"
        "print(sorted({'vllm', 'transformers', 'sglang', 'flashinfer'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


def test_transformers_that_is_not_there() -> None:
    script = (
        "import sys; sys.modules['transformers'] = None\n"
        "from mla.errors import MissingPackageError\n"
        "try:\n    import mla.integrations.transformers\n"
        "except MissingPackageError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    assert "pip install 'mla-prefill[transformers]'" in done.stdout
