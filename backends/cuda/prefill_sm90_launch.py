"""The launch of the prefill kernels of Hopper, in 16 bits and in fp8: parameter blocks, workspace, order of a batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, TypeVar

import torch

from mla.backends.cuda import runtime
from mla.backends.cuda.counters import counters_of_stream
from mla.backends.cuda.prefill_sm90_block import ScheduleParams
from mla.backends.cuda.prefill_sm90_workspace import PROCESSORS_MAX, Workspace
from mla.errors import ShapeError

if TYPE_CHECKING:
    from ctypes import Structure

    from mla.backends.cuda.compiler import KernelSpec
    from mla.backends.cuda.runtime import Launch
    from mla.problem import Again, PrefillArgs

#: Key tiles of a sequence that the tag of a stage can count.
TILES_MAX = 1 << 18

_SPACES_MAX = 1024
_PLACES_MAX = 64
_V = TypeVar("_V", bound=Hashable)


def launcher(
    device: torch.device,
    *,
    prefill_spec: Callable[[_V, bool], KernelSpec],
    schedule_spec: KernelSpec,
    workspace_of: Callable[[int, int, int, int], Workspace],
    make: Callable[[PrefillArgs, int], Structure],
    block_n: int,
    variant_of: Callable[[PrefillArgs], _V],
    usual: _V,
) -> Callable[[PrefillArgs], Again | None]:
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
    make : callable
        The parameter block of a call and `block_n`, apart from counters and what lies in the workspace.
    block_n : int
        Keys of a tile.
    variant_of : callable
        What of a call, beside its problem, is compiled in.
    usual
        The variant that is compiled at once.
    """
    processors, index = runtime.properties(device).multi_processor_count, device.index
    space_of = functools.lru_cache(maxsize=_SPACES_MAX)(workspace_of)

    @functools.cache
    def kernel(variant: _V, programmatic: bool) -> runtime.Kernel:
        return runtime.load(prefill_spec(variant, programmatic), device)

    @functools.cache
    def schedule() -> runtime.Kernel:
        return runtime.load(schedule_spec, device)

    kernel(usual, False)

    def run(args: PrefillArgs) -> Again | None:
        rows, heads, _ = args.q.shape
        keys, batch = args.k.shape[0], args.cu_seqlens_q.shape[0] - 1
        if rows == 0 or batch == 0:
            return None
        if keys > TILES_MAX * block_n:
            raise ShapeError(f"k: {keys} rows, but this kernel counts at most {TILES_MAX * block_n}")
        space = space_of(rows, keys, batch, heads)
        need = space.bytes
        block = make(args, block_n)
        block.processors = min(processors, PROCESSORS_MAX)
        grid = processors if space.slots else min(processors, (-(-rows // 64) + batch) * heads)
        prefill = kernel(variant_of(args), space.ordered)
        given = 0 if args.workspace is None else args.workspace.data_ptr()

        def launch(counters: int, workspace: int) -> list[Launch]:
            """Launch with memory at these addresses; return what does so again."""
            own = type(block).from_buffer_copy(block)
            own.counters, own.arrivals = counters, counters + 8  # behind the two of the launch itself
            made = []
            if need:
                own.table, arrivals, own.slots = space.places(workspace)
                if space.ordered:
                    own.arrivals = arrivals
                    order = ScheduleParams(own.sequences, own.table, batch, heads, grid, own.processors, own.arrivals)
                    made.append(schedule().launch(order, 1))
            made.append(prefill.launch(own, grid))
            return [one for one in made if one is not None]

        def allocate() -> torch.Tensor | None:
            return None if given or not need else torch.empty(need, dtype=torch.uint8, device=device)

        placed: dict[tuple[int, int], list[Launch]] = {}  # by stream, which has its counters, and workspace

        def again() -> None:
            memory = allocate()  # anew each time, mostly the same
            workspace = given if memory is None else memory.data_ptr()
            where = torch._C._cuda_getCurrentRawStream(index), workspace
            known = placed.get(where)
            if known is not None:
                for one in known:
                    one()
                return
            if len(placed) >= _PLACES_MAX:
                placed.clear()
            placed[where] = launch(counters_of_stream(device).data_ptr(), workspace)

        if not torch.cuda.is_current_stream_capturing():
            again()
            return again
        memory, counters = allocate(), torch.zeros(2 + space.arrivals, dtype=torch.int32, device=device)
        launch(counters.data_ptr(), given if memory is None else memory.data_ptr())
        return None

    return run
