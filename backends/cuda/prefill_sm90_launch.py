"""The launch of the prefill kernels of Hopper, in 16 bits and in fp8: parameter blocks, workspace, order of a batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, TypeVar

import torch

from mla.backends.cuda import runtime
from mla.backends.cuda.counters import Counters, counters_of
from mla.backends.cuda.prefill_sm90_block import ScheduleParams
from mla.backends.cuda.prefill_sm90_workspace import PROCESSORS_MAX, Workspace
from mla.errors import ShapeError

if TYPE_CHECKING:
    from ctypes import Structure

    from mla.backends.cuda.compiler import KernelSpec
    from mla.problem import PrefillArgs

#: Key tiles of a sequence that the tag of a stage can count.
TILES_MAX = 1 << 18

_BLOCKS_MAX = 4096
_V = TypeVar("_V", bound=Hashable)


def launcher(
    device: torch.device,
    *,
    prefill_spec: Callable[[_V, bool], KernelSpec],
    schedule_spec: KernelSpec,
    workspace_of: Callable[[int, int, int, int], Workspace],
    contents: Callable[[PrefillArgs], tuple[object, ...]],
    make: Callable[[PrefillArgs, int, Counters | torch.Tensor], Structure],
    block_n: int,
    variant_of: Callable[[PrefillArgs], _V],
    usual: _V,
) -> Callable[[PrefillArgs], None]:
    """Compile and load the usual variant of a kernel; the result launches.

    What a call asks for beyond that (another variant, a large batch) is compiled when the first one comes.

    Parameters
    ----------
    prefill_spec : callable
        The kernel of a variant, and whether it is launched behind the kernel that orders a large batch.
    schedule_spec : KernelSpec
        The kernel that orders.
    workspace_of : callable
        What a call with T rows of q, L of k, B sequences and H heads needs.
    contents : callable
        All that a parameter block holds, biases apart.
    make : callable
        The parameter block of a call, apart from what lies in the workspace; takes `block_n` and the counters.
    block_n : int
        Keys of a tile.
    variant_of : callable
        What of a call, beside its problem, is compiled in.
    """
    processors = runtime.properties(device).multi_processor_count
    space_of = functools.lru_cache(maxsize=_BLOCKS_MAX)(workspace_of)

    @functools.cache
    def kernel(variant: _V, programmatic: bool) -> runtime.Kernel:
        return runtime.load(prefill_spec(variant, programmatic), device)

    @functools.cache
    def schedule() -> runtime.Kernel:
        return runtime.load(schedule_spec, device)

    kernel(usual, False)
    # Parameter blocks by their contents, only read once made: a model calls its layers with the same addresses again
    # and again.
    made: dict[tuple[object, ...], Structure] = {}

    def run(args: PrefillArgs) -> None:
        rows, heads, _ = args.q.shape
        keys, batch = args.k.shape[0], args.cu_seqlens_q.shape[0] - 1
        if rows == 0 or batch == 0:
            return
        if keys > TILES_MAX * block_n:
            raise ShapeError(f"k: {keys} rows, but this kernel counts at most {TILES_MAX * block_n}")
        space = space_of(rows, keys, batch, heads)
        counters = counters_of(args.q.device, 2 + space.arrivals)  # kept until the launch
        key = (counters.data_ptr(), *contents(args))
        block = made.get(key)
        if block is None:
            block = make(args, block_n, counters)
            block.processors = min(processors, PROCESSORS_MAX)
            if len(made) >= _BLOCKS_MAX:
                made.clear()
            if not args.mask.biases:
                made[key] = block
        grid = processors if space.slots else min(processors, (-(-rows // 64) + batch) * heads)
        if space.bytes:
            workspace = args.workspace
            if workspace is None:
                workspace = torch.empty(space.bytes, dtype=torch.uint8, device=args.q.device)
            block = type(block).from_buffer_copy(block)
            block.table, arrivals, block.slots = space.places(workspace.data_ptr())
            if space.ordered:
                block.arrivals = arrivals
                order = ScheduleParams(
                    block.sequences, block.table, batch, heads, grid, block.processors, block.arrivals
                )
                schedule().launch(order, 1)
        kernel(variant_of(args), space.ordered).launch(block, grid)

    return run
