"""What one call asks for, in the two forms that dispatch and backends read.

`Problem` is what a kernel is chosen and compiled by: hashable, without tensors. The ``*Args`` classes carry the
canonical, validated tensors of one call: index tensors are contiguous int32 on the device of the call (a uint32 tensor
is viewed as int32), LSE tensors are [T, H] views whatever layout the caller has, optional tensors are None.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

    from mla.kv_cache import PagedKVCache
    from mla.masks import Mask, MaskProgram

#: Launches once more what an implementation has launched, on torch's current stream: the same addresses, shapes and
#: numbers. Called on a GPU alone, and not while a graph is captured.
Again = Callable[[], None]

Op = Literal["plan", "gather", "project", "store", "prefill", "merge", "quantize"]
OPS: tuple[Op, ...] = ("plan", "gather", "project", "store", "prefill", "merge", "quantize")

#: (q_depth, v_head_dim) pairs that kernels are written for: DeepSeek V2/V3/R1 and Kimi-K2; GLM-5.
SUPPORTED_DIMS: tuple[tuple[int, int], ...] = ((192, 128), (256, 256))
KV_LORA_RANK = 512
QK_ROPE_HEAD_DIM = 64

#: Rows of the dtype table of the specification (section 4), as the registry names them.
#: ``bf16``/``fp16``/``fp32``: q, k, v, rope and output alike.  ``bf16+fp8_rope``/``fp16+fp8_rope``/``fp32+fp8_rope``:
#: 16- or 32-bit q, k, v; fp8 rope with its scales.  ``fp8``: q, k, v and rope fp8, bf16 output.  ``fp8+bf16_rope``:
#: q_nope, k, v fp8, q_rope and rope bf16 (overloads 4 and 5), bf16 output.
PREFILL_DTYPES = (
    "bf16", "fp16", "fp32", "bf16+fp8_rope", "fp16+fp8_rope", "fp32+fp8_rope", "fp8", "fp8+bf16_rope",
)  # fmt: skip

RopeKind = Literal["paged", "batched", "ragged"]


@dataclass(frozen=True, slots=True)
class Problem:
    """A frozen description of one call: everything a kernel is selected and compiled by, nothing that changes by step.

    Attributes
    ----------
    op : str
        One of `OPS`.
    dtypes : str
        For prefill a row of `PREFILL_DTYPES`; for the other ops the short name of the data's dtype
        (``bf16``, ``fp16``, ``fp32``, ``fp8``); for plan ``int32``.
    out_dtype : str
        Short name of the output's dtype. ``fp32`` beside a 16-bit ``dtypes`` is a partial result to be merged.
    dims : tuple of int
        (q_depth, v_head_dim) in elements.
    page_size : int
        Tokens a page; 0 where no paged cache takes part.
    csr : bool
        The page table is in the indptr/indices form.
    rope : str or None
        ``paged``, ``batched`` ([B, n, dr]) or ``ragged`` ([L, dr]); None for other ops.
    mask : MaskProgram or None
        The mask as code; equal programs compile to equal kernels. None for other ops.
    features : frozenset of str
        What beyond the plain operation is asked: ``lse``, ``sinks``, ``softcap``, ``bias``, ``split_q``,
        ``batch_invariant``, ``q_scale``, ``k_scales``, ``v_scale``, ``v_transposed``, ``rope_prescaled``, ``scales``,
        ``static_scale`` (quantize: the scale is given), ``split_rope_scales`` (the rope's columns lie in two blocks of
        the scaled row, so that a key has two scales of rope).
    granularity : int
        Elements that share one scale in a quantised cache or rope; 0 when there are no scales. For quantize 0 says that
        a token shares one, or that the scale is static.
    alignment : int
        The largest power of two up to 16 that divides every base address and outer stride in bytes; a mask's biases,
        which every kernel reads element by element, do not count.
    """

    op: Op
    dtypes: str
    out_dtype: str = ""
    dims: tuple[int, int] = (192, 128)
    page_size: int = 0
    csr: bool = False
    rope: RopeKind | None = None
    mask: MaskProgram | None = None
    features: frozenset[str] = field(default_factory=frozenset)
    granularity: int = 0
    alignment: int = 16

    @property
    def qk_nope_head_dim(self) -> int:
        """Width of the part of a key that has no position."""
        return self.dims[0] - QK_ROPE_HEAD_DIM

    @property
    def v_head_dim(self) -> int:
        """Width of a value."""
        return self.dims[1]


@dataclass(slots=True)
class PlanArgs:
    """Arguments of ``plan``. Outputs are int32 views; see `mla.generic_flare_mla_prefill_ragged_paged_plan`."""

    input_row_offsets: torch.Tensor  # [B+1]
    cache: PagedKVCache  # lengths, page_size
    buffer_token_size: int  # N
    buffer_row_offsets: torch.Tensor  # [C, B+1]
    cache_offsets: torch.Tensor  # [C, B]
    buffer_lengths: torch.Tensor  # [C]
    required_chunks: torch.Tensor | None  # [1]


@dataclass(slots=True)
class GatherArgs:
    """Arguments of ``gather``: latent rows of one chunk out of the pages, dequantised."""

    buffer_row_offsets: torch.Tensor  # [B+1]
    cache_offsets: torch.Tensor  # [B]
    buffer_length: int | torch.Tensor  # rows to write; an int32 [1] tensor is read on the device (< 0 means none)
    cache: PagedKVCache
    output: torch.Tensor  # [N, kv_lora_rank]; rows [buffer_row_offsets[B], buffer_length) become zero


@dataclass(slots=True)
class ProjectArgs:
    """Arguments of ``project``: ``output = a @ b.T / scale`` in fp8, each number of rows with a scale of its own."""

    a: torch.Tensor  # [n, 512], rows contiguous, as those of b and of the output; any row stride
    b: torch.Tensor  # [m, 512]
    output: torch.Tensor  # [n, m] fp8
    scale: torch.Tensor  # f32 [s]: one for each n / s rows, a multiple of 64 where s > 1


@dataclass(slots=True)
class StoreArgs:
    """Arguments of ``store``: this step's rows into the pages, quantised where the cache is."""

    input_row_offsets: torch.Tensor  # [B+1]
    cache: PagedKVCache
    latent: torch.Tensor  # [T, kv_lora_rank]
    rope: torch.Tensor  # [T, dr]


@dataclass(slots=True)
class PrefillArgs:
    """Arguments of ``prefill``.

    For sequence b: ``new = cu_seqlens_q[b+1] - cu_seqlens_q[b]``, ``rows = cu_seqlens_k[b+1] - cu_seqlens_k[b]``,
    ``offset = cache_offsets[b]`` or 0. Without overrides the key length is: paged ``cache.lengths[b]`` (plus new unless
    ``cache.lengths_include_new``); batched ``rope.shape[1]``; ragged ``rows``; ``kv_lengths[b]`` overrides it. The
    position of the first query is: paged and batched, that key length before any override, minus new; ragged, the key
    length minus new; ``start_positions[b]`` overrides it (it may be negative).
    ``n_keys = min(rows, max(0, kv_len - offset))``.
    """

    output: torch.Tensor  # [T, H, dv]
    q: torch.Tensor  # [T, H, q_depth], or [T, H, dn] when q_rope is given
    q_rope: torch.Tensor | None  # [T, H, dr]
    k: torch.Tensor  # [L, H, dn]
    v: torch.Tensor  # [L, H, dv]
    rope_kind: RopeKind
    cache: PagedKVCache | None  # paged
    rope: torch.Tensor | None  # batched [B, n, dr], ragged [L, dr]: already the last dr columns
    rope_scales: torch.Tensor | None  # f32, shaped as rope with the last dim counted in blocks; see rope_scale_base
    rope_scale_base: int  # offset of rope's first column in the scaled row: column d has the scale (base + d) // g
    cu_seqlens_q: torch.Tensor  # [B+1]
    cu_seqlens_k: torch.Tensor  # [B+1]
    cache_offsets: torch.Tensor | None  # [B]
    start_positions: torch.Tensor | None  # [B]
    kv_lengths: torch.Tensor | None  # [B]
    softmax_scale: float
    mask: Mask
    max_seqlen_q: int  # a hint for the grid, never more than T
    q_scale: torch.Tensor | None  # f32 [T, 1] view
    k_scales: torch.Tensor | None  # f32 [L, 1] view
    v_scale: torch.Tensor | None  # f32 [1], [H] or [L, 1]
    rope_prescaled: bool
    lse: torch.Tensor | None  # f32 [T, H] view
    sinks: torch.Tensor | None  # f32 [H]
    softcap: float
    workspace: torch.Tensor | None  # uint8 [bytes]; None: the implementation allocates
    batch_invariant: bool


@dataclass(slots=True)
class MergeArgs:
    """Arguments of ``merge``; LSE tensors are f32 [T, H] views."""

    output: torch.Tensor  # [T, H, dv]
    prefix_output: torch.Tensor
    prefix_lse: torch.Tensor
    suffix_output: torch.Tensor
    suffix_lse: torch.Tensor
    output_lse: torch.Tensor | None


@dataclass(slots=True)
class QuantizeArgs:
    """Arguments of ``quantize``: fp8 rows and the scales that undo them.

    Column d of token t and head h has the scale ``[t, h, d // g]``; g is the problem's granularity, without one a row's
    width, and an extent of 1 stands for all.
    """

    x: torch.Tensor  # [T, H, D], D a multiple of 8
    output: torch.Tensor  # [T, H, D] fp8
    scale: torch.Tensor  # f32: [T, H, ceil(D / g)], [T, 1, 1] for one a token; read, not written, where it is static
