"""A step whose lengths change in place, as a captured graph sees it, and a recorder that replays calls on the CPU."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

import mla
from mla import dispatch
from mla.kv_cache import PagedKVCache, PagedKVCacheCollection
from mla.masks import Mask


class Step:
    """Buffers of fixed size for steps of up to `batch` sequences and `rows` new tokens.

    q, pages and weight stay; `set` writes lengths, row offsets and a scattered page table in place. Rows of q behind
    the last sequence stand for the padding of a captured batch.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        batch: int = 4,
        rows: int = 40,
        heads: int = 2,
        page_size: int = 16,
        columns: int = 6,
    ) -> None:
        self.page_size, self.rows, self.columns = page_size, rows, columns
        pages = batch * columns
        make = {"device": device, "dtype": dtype}
        self.q = torch.randn(rows, heads, 192).to(**make)
        self.weight = (torch.randn(heads * 256, 512) / 512**0.5).to(**make)
        self.pages = torch.randn(pages, page_size, 576).to(**make)
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        self.offsets = torch.zeros(batch + 1, dtype=torch.int32, device=device)
        self.table = torch.zeros(batch, columns, dtype=torch.int32, device=device)
        self.output = torch.zeros(rows, heads, 128, **make)
        self.lse = torch.zeros(rows, heads, device=device)
        self.cache = PagedKVCacheCollection.from_pages(self.pages, self.table, self.lengths)
        self.totals: list[int] = []
        self.new: list[int] = []

    def set(self, cached: list[int], new: list[int]) -> None:
        """Write the lengths of another step, and other pages, into the same memory."""
        self.new, self.totals = new, [c + n for c, n in zip(cached, new, strict=True)]
        assert sum(new) <= self.rows and max(self.totals) <= self.columns * self.page_size
        self.lengths.copy_(torch.tensor(cached))
        self.offsets.copy_(torch.tensor([0, *new]).cumsum(0))
        self.table.copy_(torch.randperm(self.table.numel()).view(self.table.shape))

    def draw(self, source: random.Random) -> None:
        """Write a random step, with sequences of no tokens among the others."""
        left, cached, new = self.rows, [], []
        for _ in range(self.lengths.shape[0]):
            count = source.choice((0, 1, min(7, left), source.randint(0, left)))
            count = min(count, left)
            left -= count
            new.append(count)
            cached.append(source.choice((0, 1, source.randint(0, self.columns * self.page_size - count))))
        self.set([min(c, self.columns * self.page_size - n) for c, n in zip(cached, new, strict=True)], new)

    def run(self, mask: Mask, target: str, buffer_token_size: int, **keywords: Any) -> torch.Tensor:
        """Run the whole job into `output`, return the LSE."""
        _, lse = mla.chunked_prefill(
            self.q, self.cache, 0, self.weight, self.offsets, mask, 192**-0.5, output=self.output, return_lse=True,
            buffer_token_size=buffer_token_size, target=target, **keywords,
        )  # fmt: skip
        return lse

    def expect(
        self, mask: Mask, target: str, buffer_token_size: int, **keywords: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return output and LSE of an eager call that knows the lengths, the rows of the sequences alone."""
        rows = sum(self.new)
        output, lse = mla.chunked_prefill(
            self.q[:rows], self.cache, 0, self.weight, self.offsets, mask, 192**-0.5, return_lse=True,
            buffer_token_size=buffer_token_size, seq_lens_cpu=self.totals, target=target, **keywords,
        )  # fmt: skip
        return output, lse

    def cut(self, buffer_token_size: int, chunks: int) -> list[bool]:
        """Return for each row of q whether the plan's tables do not hold all keys of its sequence."""
        start, result = 0, []
        for total, new in zip(self.totals, self.new, strict=True):
            result += [start + total > buffer_token_size * chunks] * new
            start += -(-total // self.page_size) * self.page_size
        return result


class Tape(TorchDispatchMode):
    """Records what a call does to memory, as a graph capture does; `replay` does it again without the call's Python.

    Kernels count as one action each, so that nothing that Python decided while recording is decided anew.
    """

    def __init__(self) -> None:
        super().__init__()
        self.actions: list[Callable[[], None]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)

        def again() -> None:
            for old, new in zip(tree_leaves(result), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

        self.actions.append(again)
        return result

    def record(self, call: Callable[[], Any]) -> Any:
        """Make a call, recording it."""

        def resolve(*question: Any) -> Any:
            kernel = real(*question)

            def run(args: Any) -> None:
                with _disable_current_modes():
                    kernel(args)
                self.actions.append(lambda: kernel(args))

            return run

        real = dispatch.resolve
        places = ("dispatch", "plan", "gather", "store", "merge", "quantize")
        patches = [mock.patch(f"mla.{place}.resolve", resolve) for place in places]
        # Of tensors on a device no value is looked at.
        patches += [mock.patch(f"mla.{place}.readable", lambda tensor: False) for place in ("_check", "gather")]
        patches += [mock.patch.object(PagedKVCache, "check_indices", lambda self, offsets: None)]
        dispatch.forget()
        try:
            for patch in patches:
                patch.start()
            with self:
                return call()
        finally:
            mock.patch.stopall()
            dispatch.forget()

    def replay(self) -> None:
        """Do it all again on the values of the day."""
        for action in self.actions:
            action()
