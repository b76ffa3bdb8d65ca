"""The memory of one job, and the buffer in which the keys and values of a chunk are made.

In the dtype of q, keys and values are views of one up-projection. In fp8 they are made by two: keys row by row, values
transposed, V^T = W_v @ latent^T, which is how fp8 tensor cores read them. No separate pass ever transposes anything.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from mla import quantize
from mla._check import check_offsets
from mla._prefill_call import Call
from mla.gather import Weight, find_run, project_to_fp8, projects_to_fp8, up_project
from mla.kv_cache import PagedKVCache
from mla.plan import PlanChunk, PrefillPlan
from mla.problem import KV_LORA_RANK, QK_ROPE_HEAD_DIM, GatherArgs
from mla.target import Target

#: Every part of a workspace begins on such a border, in bytes.
_PART_ALIGNMENT = 256
#: Rows of V^T are whole multiples of as many elements, so that they begin where kernels can copy them at once.
_V_ROW_MULTIPLE = 16

Parts = dict[str, torch.Tensor]


class Extents(NamedTuple):
    """Sizes of one job: rows of q, of the buffer, and the widths of a head."""

    total: int  # T
    rows: int  # N, or fewer where the batch cannot fill it
    heads: int
    nope: int
    v_dim: int
    dtype: torch.dtype
    partial: int  # rows of a partial result: T, or fewer
    fp8: torch.dtype | None = None  # of q, k and v while they are attended to
    rope_in_fp8: bool = False  # the cache's, hence that of q too
    v_transposed: bool = False
    rounds_as_it_projects: bool = False  # a projection to fp8 is one kernel, known `on` a target

    def on(self, target: str | Target, device: torch.device) -> Extents:
        """Return the extents of a job on a target."""
        if self.fp8 is None or not self.v_transposed:
            return self
        return self._replace(rounds_as_it_projects=projects_to_fp8(self.dtype, self.fp8, target, device))

    def parts(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Dtype and shape of each part of the workspace: the buffer, and two partial results with their LSE."""
        heads, rows, width = self.heads, self.rows, self.nope + self.v_dim
        result: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for name in ("so_far", "part") if self.partial else ():
            result[name] = torch.float32, (self.partial, heads, self.v_dim)
            result[f"{name}_lse"] = torch.float32, (self.partial, heads)
        if self.fp8 is None:
            result["latent"] = self.dtype, (rows, KV_LORA_RANK)
            result["projected"] = self.dtype, (rows, heads * width)
            return result
        padded = round_up(rows, _V_ROW_MULTIPLE)
        result["latent"] = self.dtype, (padded + 1, KV_LORA_RANK)
        if self.v_transposed:  # keys and values one after the other, each by its own part of the weight
            # A key's own scale is known when the key is.
            keys = 0 if self.rounds_as_it_projects and not self.rope_in_fp8 else self.nope
            values = 0 if self.rounds_as_it_projects else self.v_dim
            result["projected"] = self.dtype, (padded * heads * max(keys, values),)
            result["weight"] = self.dtype, (heads * width, KV_LORA_RANK)
        else:
            result["projected"] = self.dtype, (padded * heads * width,)
        result["k"] = self.fp8, (rows, heads, self.nope)
        result["k_scales"] = torch.float32, (rows, 1) if self.rope_in_fp8 else (1,)
        result["v"] = self.fp8, (padded * heads * self.v_dim,)
        result["v_scale"] = torch.float32, (heads,)
        result["q"] = self.fp8, (self.total, heads, self.nope + QK_ROPE_HEAD_DIM)
        if not self.rope_in_fp8:
            result["q_rope"] = self.dtype, (self.total, heads, QK_ROPE_HEAD_DIM)
        result["q_scale"] = torch.float32, (self.total, 1)
        return result

    def workspace_bytes(self) -> int:
        """Return the bytes of all parts, each rounded up to `_PART_ALIGNMENT`."""
        sizes = (dtype.itemsize * math.prod(shape) for dtype, shape in self.parts().values())
        return sum(round_up(size, _PART_ALIGNMENT) for size in sizes)

    def allocate(self, workspace: torch.Tensor | None, device: torch.device) -> Parts:
        """Return the parts, as views of a uint8 workspace where there is one."""
        parts = self.parts()
        if workspace is None:
            return {name: torch.empty(shape, dtype=dtype, device=device) for name, (dtype, shape) in parts.items()}
        views, offset = {}, 0
        for name, (dtype, shape) in parts.items():
            size = dtype.itemsize * math.prod(shape)
            views[name] = workspace[offset : offset + size].view(dtype).view(shape)
            offset += round_up(size, _PART_ALIGNMENT)
        return views


class Partial(NamedTuple):
    """Attention over some of the keys, to be merged."""

    output: torch.Tensor
    lse: torch.Tensor

    @staticmethod
    def of(parts: Parts, name: str) -> Partial:
        """Return a part."""
        return Partial(parts[name], parts[f"{name}_lse"])

    def rows(self, first: int, last: int) -> Partial:
        """Return those of some rows."""
        return Partial(self.output[first:last], self.lse[first:last])


class Queries(NamedTuple):
    """What stands for q in a call."""

    q: torch.Tensor
    q_rope: torch.Tensor | None = None
    q_scale: torch.Tensor | None = None

    def rows(self, rows: slice) -> Queries:
        """Return those of some rows."""
        return Queries(*(None if x is None else x[rows] for x in self))  # type: ignore[arg-type]

    def enter(self, call: Call) -> None:
        """Let a call attend from them."""
        call.q, call.q_rope, call.q_scale = self


class Views(NamedTuple):
    """A chunk of so many rows in the buffer."""

    latent: torch.Tensor
    projected: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    k_scales: torch.Tensor | None = None


class Buffer:
    """Keys and values of one chunk at a time, in the dtype of q.

    `point` comes before `fill`, so that a call can be judged before anything is launched.
    """

    def __init__(self, call: Call, plan: PrefillPlan, weight: Weight, extents: Extents, parts: Parts) -> None:
        assert isinstance(call.k_rope, PagedKVCache)
        self.queries = Queries(call.q)
        self._cache, self._plan, self._target, self._weight = call.k_rope, plan, call.target, weight
        self._extents, self._parts = extents, parts
        self._gather_run = find_run(self._cache, parts["latent"], self._target)
        self._views: dict[int, Views] = {}

    def begin(self) -> None:
        """Launch what is done once, before the first chunk."""

    def point(self, call: Call, chunk: PlanChunk) -> None:
        """Give a call the keys and values of one chunk, and its tables."""
        views = self._of(chunk)
        call.k, call.v, call.k_scales = views.k, views.v, views.k_scales
        call.cache_row_offsets, call.cache_offsets = chunk.buffer_row_offsets, chunk.cache_offsets

    def fill(self, chunk: PlanChunk) -> None:
        """Gather a chunk and project it up."""
        views = self._of(chunk)
        self._gather(chunk, views.latent, chunk.buffer_length)
        up_project(views.latent, self._weight, views.projected)

    def _of(self, chunk: PlanChunk) -> Views:
        rows = chunk.max_length
        views = self._views.get(rows)
        if views is None:
            views = self._views[rows] = self._make_views(rows)
        return views

    def _make_views(self, rows: int) -> Views:
        latent, projected = self._parts["latent"], self._parts["projected"]
        if rows < latent.shape[0]:
            latent, projected = latent[:rows], projected[:rows]
        nope, v_dim = self._extents.nope, self._extents.v_dim
        heads = projected.view(rows, self._extents.heads, nope + v_dim)
        return Views(latent, projected, heads[..., :nope], heads[..., nope:])

    def _gather(self, chunk: PlanChunk, latent: torch.Tensor, length: int | torch.Tensor) -> None:
        check_offsets(chunk.buffer_row_offsets, "buffer_row_offsets", latent.shape[0], "the buffer")
        self._gather_run(GatherArgs(chunk.buffer_row_offsets, chunk.cache_offsets, length, self._cache, latent))


class Fp8Buffer(Buffer):
    """Keys and values of one chunk at a time in fp8, each row of q with a scale, the values of each head with one.

    Where the cache's rope is fp8, each key has a scale, and q is quantised with its rope. Where it is bf16, all keys of
    a chunk share one, c, and the rope of q is divided by q_scale * c for each chunk, so that one number a row undoes
    both parts of a score, ``q_scale c (q8 . k8 + q_rope / (q_scale c) . rope)``: a scale a key would cost the kernel a
    multiplication for each score, and the rope in the pages is everybody's.

    A scale of several rows counts them all, so that none may be anybody's leftovers: what a page holds behind its
    sequence becomes zero before it is projected, and so do rows that only fill V^T up. Where the weight is a tensor it
    is no maximum, for which everything projected would be read once more, but a bound: the length of the longest latent
    times that of the weight's longest row. Random vectors of 512 elements stay five times below; relative errors
    of e4m3 stay what they are down to 2^15 below its largest number.
    """

    def __init__(self, call: Call, plan: PrefillPlan, weight: Weight, extents: Extents, parts: Parts) -> None:
        super().__init__(call, plan, weight, extents, parts)
        self._q, self._row_offsets = call.q, call.valid_length
        q = parts["q"] if extents.rope_in_fp8 else parts["q"][..., : extents.nope]
        self.queries = Queries(q, parts.get("q_rope"), parts["q_scale"])
        call.v_scale = parts["v_scale"]
        if extents.v_transposed:
            count = extents.heads * extents.nope
            self._key_weight, self._value_weight = parts["weight"][:count], parts["weight"][count:]

    def begin(self) -> None:
        """Quantise q, and put the weight's key rows and value rows together."""
        q_scale = self._parts["q_scale"].unsqueeze(2)
        quantize.launch(self._parts["q"], q_scale, self._q, 0, False, self._target)
        if not self._extents.rope_in_fp8:
            q_scale.clamp_(min=quantize.LEAST_SCALE_BESIDE_ROPE)
        if self._extents.v_transposed:
            assert isinstance(self._weight, torch.Tensor)
            heads, widths = (self._extents.heads, -1), (self._extents.nope, self._extents.v_dim)
            of_keys, of_values = self._weight.unflatten(0, heads).split(widths, 1)
            self._key_weight.unflatten(0, heads).copy_(of_keys)
            self._value_weight.unflatten(0, heads).copy_(of_values)
            longest = _lengths(self._parts["weight"])
            self._longest_key_row = longest[: len(self._key_weight)].amax()
            self._longest_value_rows = longest[len(self._key_weight) :].view(heads).amax(1)

    def fill(self, chunk: PlanChunk) -> None:
        """Gather a chunk, project it up and quantise it."""
        views, rows = self._of(chunk), chunk.max_length
        self._gather(chunk, views.latent, views.latent.shape[0])
        self._clear_leftovers(chunk, views.latent.shape[0])
        heads, split = (self._extents.heads, -1), (self._extents.nope, self._extents.v_dim)
        if self._extents.v_transposed:
            longest = _lengths(views.latent).amax()
            self._fill_keys(views, rows, longest * self._longest_key_row)
            self._fill_transposed(views, rows, longest * self._longest_value_rows)
        else:
            projected = views.projected[: rows * self._extents.heads * sum(split)].view(rows, -1)
            up_project(views.latent[:rows], self._weight, projected)
            k, v = projected.unflatten(1, heads).split(split, 2)
            self._quantize_keys(k, views)
            scale = self._parts["v_scale"]
            quantize.quantize_per_head(v, dtype=views.v.dtype, out=views.v, scale=scale, target=self._target)

    def _fill_keys(self, views: Views, rows: int, bound: torch.Tensor) -> None:
        """Project the keys up and quantise them."""
        if self._extents.rope_in_fp8:
            keys = views.projected[: rows * self._key_weight.shape[0]].view(rows, -1)
            torch.mm(views.latent[:rows], self._key_weight.t(), out=keys)
            self._quantize_keys(keys.unflatten(1, (self._extents.heads, -1)), views)
            return
        assert views.k_scales is not None
        least = quantize.LEAST_SCALE_BESIDE_ROPE
        quantize.write_scales_of(bound.float().view(1), views.k.dtype, views.k_scales, least)
        self._project(views.k.flatten(1), views.latent[:rows], self._key_weight, views.k_scales)
        self._divide_rope(views.k_scales)

    def _fill_transposed(self, views: Views, rows: int, bounds: torch.Tensor) -> None:
        """Project the values up into V^T and quantise that."""
        out = self._transposed(rows).flatten(0, 1)
        quantize.write_scales_of(bounds.float(), out.dtype, self._parts["v_scale"])
        self._project(out, self._value_weight, views.latent, self._parts["v_scale"])

    def _project(self, output: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor) -> None:
        """Write ``a @ b.T / scale`` in fp8, a scale for so many rows."""
        if self._extents.rounds_as_it_projects:
            project_to_fp8(output, a, b, scale, self._target)
            return
        room = self._parts["projected"][: output.numel()].view(output.shape)
        torch.mm(a, b.t(), out=room)
        # Row by row: a head is too much for a block of threads.
        each = scale.view(-1, 1).expand(-1, len(output) // len(scale)).reshape(-1, 1, 1) if len(scale) > 1 else scale
        quantize.launch(output.unsqueeze(1), each.view(-1, 1, 1), room.unsqueeze(1), 0, True, self._target)

    def _make_views(self, rows: int) -> Views:
        latent = self._parts["latent"][: round_up(rows, _V_ROW_MULTIPLE)]
        if self._extents.v_transposed:
            v = self._transposed(rows)[..., :rows].permute(2, 0, 1)
        else:
            heads, v_dim = self._extents.heads, self._extents.v_dim
            v = self._parts["v"][: rows * heads * v_dim].view(rows, heads, v_dim)
        scales = self._parts["k_scales"][:rows] if self._extents.rope_in_fp8 else self._parts["k_scales"]
        return Views(latent, self._parts["projected"], self._parts["k"][:rows], v, scales)

    def _transposed(self, rows: int) -> torch.Tensor:
        """Return V^T [H, dv, rows and what fills them up]."""
        heads, v_dim, padded = self._extents.heads, self._extents.v_dim, round_up(rows, _V_ROW_MULTIPLE)
        return self._parts["v"][: heads * v_dim * padded].view(heads, v_dim, padded)

    def _quantize_keys(self, keys: torch.Tensor, views: Views) -> None:
        assert views.k_scales is not None
        if self._extents.rope_in_fp8:
            quantize.launch(views.k, views.k_scales.unsqueeze(2), keys, 0, False, self._target)
            return
        quantize.write_scales(keys, (0, 1, 2), views.k.dtype, views.k_scales, quantize.LEAST_SCALE_BESIDE_ROPE)
        quantize.launch(views.k, views.k_scales.view(1, 1, 1), keys, 0, True, self._target)
        self._divide_rope(views.k_scales)

    def _divide_rope(self, k_scales: torch.Tensor) -> None:
        """Let one number a row undo both parts of a score."""
        both = (self._parts["q_scale"] * k_scales).unsqueeze(2)
        torch.div(self._q[..., self._extents.nope :], both, out=self._parts["q_rope"])

    def _clear_leftovers(self, chunk: PlanChunk, spare: int) -> None:
        """Zero the rows behind the last token of each sequence's last page; row `spare` is nobody's."""
        if self._cache.page_size > 1:
            rows = self._plan.shared(("leftovers", chunk.number), lambda: self._leftovers(chunk, spare))
            self._parts["latent"].index_fill_(0, rows, 0.0)

    def _leftovers(self, chunk: PlanChunk, spare: int) -> torch.Tensor:
        """Return those rows, int64; `spare` where a sequence has fewer than P - 1 of them."""
        lengths = self._cache.total_lengths(self._row_offsets)
        begin, end = chunk.buffer_row_offsets[:-1], chunk.buffer_row_offsets[1:]
        behind = (lengths - chunk.cache_offsets).clamp_(min=0).add_(begin).unsqueeze(1)
        rows = behind + torch.arange(self._cache.page_size - 1, dtype=torch.int32, device=behind.device)
        return torch.where(rows < end.unsqueeze(1), rows, spare).flatten()


def _lengths(rows: torch.Tensor) -> torch.Tensor:
    """Return the length of each row in f64, in which no square of a 16-bit element overflows or becomes zero."""
    return torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)


def make_buffer(call: Call, plan: PrefillPlan, weight: Weight, extents: Extents, parts: Parts) -> Buffer:
    """Return the buffer of a job."""
    return (Buffer if extents.fp8 is None else Fp8Buffer)(call, plan, weight, extents, parts)


def round_up(size: int, multiple: int) -> int:
    """Return the next multiple."""
    return -(-size // multiple) * multiple
