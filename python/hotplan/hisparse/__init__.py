"""HiSparse: hot buffers on the GPU in front of a KV pool in pinned host memory.

:mod:`hotplan.hisparse.residency` has the operators with vLLM's addressing (ids of host rows, page tables),
:mod:`hotplan.hisparse.device_buffer` those with SGLang's (token positions, a row of state tables per request).
"""

from hotplan.hisparse.device_buffer import (
    HiSparseSpecState,
    copy_cache_planned_mla,
    load_blocks_to_device_buffer_mha,
    load_cache_to_device_buffer_dsv4_mla,
    load_cache_to_device_buffer_mla,
    load_cache_to_device_buffer_spec_mla,
    transfer_cache_dsv4_mla,
    translate_padded_hisparse_locations,
)
from hotplan.hisparse.residency import (
    SwapPlan,
    gather_compact,
    gather_plan,
    gather_planned,
    invalidate_written_slots,
    plan_swap_in,
    resolve_residency,
    swap_in,
)

__all__ = [
    "HiSparseSpecState",
    "SwapPlan",
    "copy_cache_planned_mla",
    "gather_compact",
    "gather_plan",
    "gather_planned",
    "invalidate_written_slots",
    "load_blocks_to_device_buffer_mha",
    "load_cache_to_device_buffer_dsv4_mla",
    "load_cache_to_device_buffer_mla",
    "load_cache_to_device_buffer_spec_mla",
    "plan_swap_in",
    "resolve_residency",
    "swap_in",
    "transfer_cache_dsv4_mla",
    "translate_padded_hisparse_locations",
]
