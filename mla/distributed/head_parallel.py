"""Each rank its own heads, the cache on every rank: no communication at all."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from mla._check import require_tensor
from mla.chunked import chunked_prefill
from mla.distributed.exchange import Group, as_process_group
from mla.distributed.local_mask import local_mask
from mla.gather import Weight
from mla.kv_cache import PagedKVCacheCollection
from mla.masks import Mask, as_mask


def head_parallel_prefill(
    q: torch.Tensor,
    kv_collection: PagedKVCacheCollection,
    layer_idx: int,
    weight: Weight,
    input_row_offsets: torch.Tensor,
    mask: Mask,
    scale: float,
    *,
    group: Group | None = None,
    **options: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend with this rank's heads; bitwise what one device computes for these heads.

    Parameters
    ----------
    q : torch.Tensor
        [T, H / world, dn + 64]: heads [rank * H / world, (rank + 1) * H / world) of the model.
    kv_collection : PagedKVCacheCollection
        All keys, the same on every rank.
    weight : torch.Tensor or callable
        The rows of kv_b_proj that belong to this rank's heads.
    mask : Mask
        Of the whole model: h counts all heads, and what it captures by h has all of them.
    group : ProcessGroup or DeviceMesh, optional
        The ranks that share the heads, in their order; a mesh of one dimension. Default: all ranks.
    **options
        Keywords of `mla.chunked_prefill`; `sinks` and `output` are of this rank's heads.

    Returns
    -------
    torch.Tensor, or a pair of them
        As `mla.chunked_prefill`, of this rank's heads.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError, UnsupportedError
        As `mla.chunked_prefill`; also where torch.distributed is not initialised.
    """
    members = as_process_group(group)
    require_tensor(q, "q", 3)
    rank, world, count = dist.get_rank(members), dist.get_world_size(members), q.shape[1]
    heads = range(rank * count, (rank + 1) * count)
    batch_size = kv_collection.batch_size
    own_mask = local_mask(as_mask(mask, "mask"), heads, world * count, None, batch_size, q.device)
    return chunked_prefill(q, kv_collection, layer_idx, weight, input_row_offsets, own_mask, scale, **options)
