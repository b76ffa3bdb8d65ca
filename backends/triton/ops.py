"""The entries that the registry names."""

from __future__ import annotations

from mla.backends.triton.gather import Gather
from mla.backends.triton.merge import Merge
from mla.backends.triton.plan import Plan
from mla.backends.triton.prefill import Prefill
from mla.backends.triton.prefill_hopper import PrefillHopper
from mla.backends.triton.quantize import Quantize
from mla.backends.triton.store import Store

__all__ = ["ENTRIES", "Gather", "Merge", "Plan", "Prefill", "PrefillHopper", "Quantize", "Store"]

ENTRIES = (Plan, Gather, Store, Prefill, PrefillHopper, Merge, Quantize)
