"""HiSparse residency: what a request's hot buffer holds, what must come from the host pool, and the copies.

The whole KV pool lies in pinned host memory. Per request a hot buffer of H slots lies on the GPU, kept in LRU order.
Each decode step :func:`~hotplan.hisparse.resolve_residency` turns K ids per launch row into hot rows and a list of
copies. :func:`~hotplan.hisparse.gather_compact`, :func:`~hotplan.hisparse.gather_planned` or
:func:`~hotplan.hisparse.gather_plan` make the copies for one layer, any number of layers after one resolution;
:func:`~hotplan.hisparse.swap_in` resolves and copies in one call. :func:`~hotplan.hisparse.invalidate_written_slots`
forgets hot copies of host rows that were rewritten. :class:`hotplan.HotBuffer` keeps the tensors for a caller who
does not have them yet.

Rules, names and decisions are in :mod:`hotplan.reference.hisparse`, which gives the same results line by line. The
first seven arguments and their order are those of vLLM's operators.

Common to all:

* Index tensors are int32 on the device D of ``hot_cache``, one CUDA device or the CPU. ``host_cache`` lies on the
  CPU; where D is a GPU it is pinned, and its rows are read over PCIe by the kernel that copies.
* The dtype of the caches does not matter: rows are bytes. ``hot_cache`` has rows of a multiple of 16 bytes,
  contiguous inside a block; the stride of blocks is free.
* No synchronisation, no allocation except for results: safe under CUDA-graph capture, on the caller's current stream.
* Index values on a GPU are not checked, since that takes a synchronisation; whatever they are, nothing outside the
  tensors is read or written. A call without launch rows or columns writes nothing, not even counts (but those of a
  plan). With ``HOTPLAN_CHECK=1`` a call with the union rule synchronises and raises for unions
  that are too long or too large, as CPU calls always do.
* ``TypeError`` for a wrong type or dtype, ``ValueError`` for a wrong device, shape, stride or value; both name the
  argument, what was expected and what came.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hotplan import jit
from hotplan._backend import by_device, require_no_capture
from hotplan._switches import is_on
from hotplan.plans import SwapPlan

__all__ = [
    "SwapPlan",
    "gather_compact",
    "gather_plan",
    "gather_planned",
    "invalidate_written_slots",
    "plan_swap_in",
    "resolve_residency",
    "swap_in",
]


class _Operators:
    """The exported functions of one backend's module, looked up once."""

    def __init__(self, backend: str) -> None:
        module = jit.load("hisparse", backend)
        self.resolve_residency: Callable[..., Any] = module.get_function("resolve_residency")
        self.swap_in: Callable[..., Any] = module.get_function("swap_in")
        self.plan_swap_in: Callable[..., Any] = module.get_function("plan_swap_in")
        self.check_unions: Callable[..., Any] = module.get_function("check_unions")
        self.gather_plan: Callable[..., Any] = module.get_function("gather_plan")
        self.gather_compact: Callable[..., Any] = module.get_function("gather_compact")
        self.gather_planned: Callable[..., Any] = module.get_function("gather_planned")
        self.invalidate_written_slots: Callable[..., Any] = module.get_function("invalidate_written_slots")


_operators = by_device(_Operators)


def _checks_unions(hot_cache: torch.Tensor, max_union_rows: int | None) -> bool:
    if max_union_rows is None or not getattr(hot_cache, "is_cuda", False):
        return False
    return is_on("HOTPLAN_CHECK")


def _check_unions(
    host_cache: torch.Tensor,
    hot_cache: torch.Tensor,
    hot_block_table: torch.Tensor,
    global_indices: torch.Tensor,
    device_global_indices: torch.Tensor,
    lru_slots: torch.Tensor,
    request_state_indices: torch.Tensor | None,
    max_union_rows: int | None,
    request_ids: torch.Tensor | None,
    source_block_table: torch.Tensor | None,
    source_block_size: int,
    resident_block_table: torch.Tensor | None,
    resident_block_size: int,
    resident_null_block: int,
) -> None:
    """The checked mode: what decides about unions, on the CPU. The hot cache's memory there is never touched."""
    require_no_capture("max_union_rows")

    def cpu(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.cpu()

    check = _operators("host_cache", host_cache).check_unions
    check(
        host_cache, torch.empty(hot_cache.shape, dtype=hot_cache.dtype), cpu(hot_block_table), cpu(global_indices),
        torch.empty(global_indices.shape, dtype=torch.int32), cpu(device_global_indices), cpu(lru_slots),
        cpu(request_state_indices), None, max_union_rows, None, None, None, 0,
        cpu(request_ids), cpu(source_block_table), source_block_size, None, None, None, None, None,
        cpu(resident_block_table), resident_block_size, resident_null_block,
    )  # fmt: skip


def _three_of(out: SwapPlan | tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None) -> tuple[Any, Any, Any]:
    """Tensors, or None, which asks the operator for new ones. No checker follows which it is."""
    if out is None:
        return None, None, None
    if not isinstance(out, (tuple, list)):
        raise TypeError(f"out: expected (plan, counts, hot_indices), got {type(out).__name__}")
    if len(out) != 3:
        raise ValueError(f"out: expected (plan, counts, hot_indices), got {len(out)} tensors")
    if any(tensor is None for tensor in out):  # below, None asks for a new tensor
        raise TypeError("out: expected (plan, counts, hot_indices), got None for one of them")
    return out[0], out[1], out[2]


def resolve_residency(
    host_cache: torch.Tensor,
    hot_cache: torch.Tensor,
    hot_block_table: torch.Tensor,
    global_indices: torch.Tensor,
    hot_indices: torch.Tensor,
    device_global_indices: torch.Tensor,
    lru_slots: torch.Tensor,
    *,
    request_state_indices: torch.Tensor | None = None,
    region_stride: int | None = None,
    max_union_rows: int | None = None,
    miss_mask: torch.Tensor | None = None,
    stats: torch.Tensor | None = None,
    attention_indices: torch.Tensor | None = None,
    attention_block_stride: int = 0,
    request_ids: torch.Tensor | None = None,
    source_block_table: torch.Tensor | None = None,
    source_block_size: int = 0,
    resolved_global_indices: torch.Tensor | None = None,
    valid_counts: torch.Tensor | None = None,
    swap_host_physical_rows: torch.Tensor | None = None,
    swap_device_physical_rows: torch.Tensor | None = None,
    swap_counts: torch.Tensor | None = None,
    resident_block_table: torch.Tensor | None = None,
    resident_block_size: int = 0,
    resident_null_block: int = 0,
) -> None:
    """Say where every top-k id is on the device and what must be copied where; renew the LRU. No bytes move.

    R launch rows, K = top-k, H hot slots per request, S state rows, BS = hot block size. The hot row of slot s is
    ``hot_block_table[request, s // BS] * BS + s % BS``.

    Args:
        host_cache: any dtype ``[host_rows, width]`` on the CPU, contiguous; host row g holds id g.
        hot_cache: any dtype ``[blocks, BS, width]`` on D with rows of as many bytes, a multiple of 16; fewer than
            2^31 - 1 rows.
        hot_block_table: int32 ``[requests, >= ceil(H / BS)]``, row stride free.
        global_indices: int32 ``[R, K]``, row stride free: ids, or positions where ``source_block_table`` is given. What
            is negative or names no host row is -1.
        hot_indices: int32 ``[R, K]`` (out): the hot row of every column, or -1.
        device_global_indices: int32 ``[S, H]`` (state), the id in every slot, initially -1; K <= H <= 32,768.
        lru_slots: int16 ``[S, H]`` (state), slots from the oldest on, initially 0..H-1 in every row.
        request_state_indices: int32 ``[n]``, the state row of a request; -1, as for the padding of a captured batch:
            its rows become -1 and nothing else happens. None: request r has state row r.
        region_stride: H or None; upstream's row stride of ``device_global_indices``.
        max_union_rows: resolve up to so many adjacent launch rows of one request (the tokens of a verify step) as one
            set: an id is loaded once for all of them. None: every row for itself.
        miss_mask: int32 ``[R, K]`` (out): 1 at the column that owns a copy.
        stats: int64 or uint64 ``[2]``: hits and misses are added to it.
        attention_indices: int32 ``[R, K]``, row stride free (out): the hot row for an attention kernel whose pages lie
            ``attention_block_stride`` rows apart.
        attention_block_stride: rows, >= BS.
        request_ids: int32 ``[>= R]``, the request of a launch row, together with ``source_block_table``. None: row r is
            request r.
        source_block_table: int32 ``[requests, pages]``, row stride free: host page of every ``source_block_size``
            positions; 0 and less: none.
        source_block_size: positions per page, >= 1.
        resolved_global_indices: int32 ``[R, K]`` (out): the id of every column, or -1.
        valid_counts: int32 ``[R]``, stride free (out): columns with an id or a resident row.
        swap_host_physical_rows, swap_device_physical_rows: int32 ``[R, K]`` (out): the copies, in miss order; what lies
            past the count keeps. All three of these or none.
        swap_counts: int32 ``[>= R]`` (out): copies of each row.
        resident_block_table: int32 ``[requests, pages]``, row stride free: hot page that holds every BS positions
            anyway; needs ``source_block_table``.
        resident_block_size: BS.
        resident_null_block: the entry that means "not resident", >= 0.

    Raises:
        TypeError, ValueError: see the module's description.
    """
    if _checks_unions(hot_cache, max_union_rows):
        _check_unions(
            host_cache, hot_cache, hot_block_table, global_indices, device_global_indices, lru_slots,
            request_state_indices, max_union_rows, request_ids, source_block_table, source_block_size,
            resident_block_table, resident_block_size, resident_null_block,
        )  # fmt: skip
    _operators("hot_cache", hot_cache).resolve_residency(
        host_cache, hot_cache, hot_block_table, global_indices, hot_indices, device_global_indices, lru_slots,
        request_state_indices, region_stride, max_union_rows, miss_mask, stats, attention_indices,
        attention_block_stride, request_ids, source_block_table, source_block_size,
        resolved_global_indices, valid_counts, swap_host_physical_rows, swap_device_physical_rows, swap_counts,
        resident_block_table, resident_block_size, resident_null_block,
    )  # fmt: skip


def swap_in(
    host_cache: torch.Tensor,
    hot_cache: torch.Tensor,
    hot_block_table: torch.Tensor,
    global_indices: torch.Tensor,
    hot_indices: torch.Tensor,
    device_global_indices: torch.Tensor,
    lru_slots: torch.Tensor,
    *,
    request_state_indices: torch.Tensor | None = None,
    region_stride: int | None = None,
    max_union_rows: int | None = None,
    miss_mask: torch.Tensor | None = None,
    stats: torch.Tensor | None = None,
    attention_indices: torch.Tensor | None = None,
    attention_block_stride: int = 0,
    request_ids: torch.Tensor | None = None,
    source_block_table: torch.Tensor | None = None,
    source_block_size: int = 0,
    resolved_global_indices: torch.Tensor | None = None,
    valid_counts: torch.Tensor | None = None,
    swap_host_physical_rows: torch.Tensor | None = None,
    swap_device_physical_rows: torch.Tensor | None = None,
    swap_counts: torch.Tensor | None = None,
    resident_block_table: torch.Tensor | None = None,
    resident_block_size: int = 0,
    resident_null_block: int = 0,
) -> None:
    """:func:`resolve_residency` and the copies of one layer in one call; one launch where the GPU has clusters of
    blocks.

    Afterwards ``hot_cache`` holds the row of every id. Arguments and errors as there; for layers that share the
    top-k, ask for the swap lists and copy them with :func:`gather_compact`.
    """
    if _checks_unions(hot_cache, max_union_rows):
        _check_unions(
            host_cache, hot_cache, hot_block_table, global_indices, device_global_indices, lru_slots,
            request_state_indices, max_union_rows, request_ids, source_block_table, source_block_size,
            resident_block_table, resident_block_size, resident_null_block,
        )  # fmt: skip
    _operators("hot_cache", hot_cache).swap_in(
        host_cache, hot_cache, hot_block_table, global_indices, hot_indices, device_global_indices, lru_slots,
        request_state_indices, region_stride, max_union_rows, miss_mask, stats, attention_indices,
        attention_block_stride, request_ids, source_block_table, source_block_size,
        resolved_global_indices, valid_counts, swap_host_physical_rows, swap_device_physical_rows, swap_counts,
        resident_block_table, resident_block_size, resident_null_block,
    )  # fmt: skip


def plan_swap_in(
    host_cache: torch.Tensor,
    hot_cache: torch.Tensor,
    hot_block_table: torch.Tensor,
    global_indices: torch.Tensor,
    device_global_indices: torch.Tensor,
    lru_slots: torch.Tensor,
    *,
    request_state_indices: torch.Tensor | None = None,
    region_stride: int | None = None,
    max_union_rows: int | None = None,
    miss_mask: torch.Tensor | None = None,
    stats: torch.Tensor | None = None,
    attention_indices: torch.Tensor | None = None,
    attention_block_stride: int = 0,
    request_ids: torch.Tensor | None = None,
    source_block_table: torch.Tensor | None = None,
    source_block_size: int = 0,
    resolved_global_indices: torch.Tensor | None = None,
    valid_counts: torch.Tensor | None = None,
    resident_block_table: torch.Tensor | None = None,
    resident_block_size: int = 0,
    resident_null_block: int = 0,
    out: SwapPlan | tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> SwapPlan:
    """:func:`resolve_residency` with its own outputs: the copies as one packed tensor, for :func:`gather_planned`.

    Args:
        out: ``(plan, counts, hot_indices)`` to write into, contiguous uint8 ``[R, K, 16]``, int32 ``[R]`` and int32
            ``[R, K]`` on D; the result is then made of them.

    Returns:
        ``SwapPlan``: see there. Copies are in the order of the swap lists of :func:`resolve_residency`, rows past a
        count are invalid rows (:func:`hotplan.plans.swap_rows` reads them).

    Other arguments and errors as for :func:`resolve_residency`.
    """
    if _checks_unions(hot_cache, max_union_rows):
        _check_unions(
            host_cache, hot_cache, hot_block_table, global_indices, device_global_indices, lru_slots,
            request_state_indices, max_union_rows, request_ids, source_block_table, source_block_size,
            resident_block_table, resident_block_size, resident_null_block,
        )  # fmt: skip
    plan, counts, hot_indices = _three_of(out)
    new = _operators("hot_cache", hot_cache).plan_swap_in(
        host_cache, hot_cache, hot_block_table, global_indices, device_global_indices, lru_slots,
        request_state_indices, region_stride, max_union_rows, miss_mask, stats, attention_indices,
        attention_block_stride, request_ids, source_block_table, source_block_size,
        resolved_global_indices, valid_counts, resident_block_table, resident_block_size, resident_null_block, plan,
        counts, hot_indices,
    )  # fmt: skip
    result = SwapPlan(*new) if out is None else SwapPlan(plan, counts, hot_indices)
    if result.plan.shape[1] == 0:
        result.counts.zero_()  # no kernel ran, and a plan's counts are those of the plan
    return result


def gather_plan(
    host_cache: torch.Tensor,
    hot_cache: torch.Tensor,
    global_indices: torch.Tensor,
    hot_indices: torch.Tensor,
    miss_mask: torch.Tensor,
    *,
    request_state_indices: torch.Tensor | None = None,
    attention_indices: torch.Tensor | None = None,
    attention_block_stride: int = 0,
) -> None:
    """Copy, for one layer, the columns that a resolution marked as misses; optionally write attention indices.

    A column is copied if its row is not padding, its mask is not 0, its id is >= 0 and its hot row is one of
    ``hot_cache``. An id past the host pool fills the hot row with zeros.

    Args:
        host_cache: any dtype ``[host_rows, width]`` on the CPU, contiguous, this layer's pool.
        hot_cache: any dtype ``[blocks, BS, width]`` or ``[rows, width]`` on D, this layer's hot buffers.
        global_indices: int32 ``[R, K]``, contiguous like all index tensors here: resolved ids.
        hot_indices, miss_mask: int32 ``[R, K]``, as :func:`resolve_residency` wrote them.
        request_state_indices: int32 ``[>= R]``, indexed by launch row here; negative: padding.
        attention_indices: int32 ``[R, K]`` (out), written for every column.
        attention_block_stride: rows, >= BS (1 where ``hot_cache`` is 2-D).

    Raises:
        TypeError, ValueError: see the module's description.
    """
    _operators("hot_cache", hot_cache).gather_plan(
        host_cache, hot_cache, global_indices, hot_indices, miss_mask,
        request_state_indices, attention_indices, attention_block_stride,
    )  # fmt: skip


def gather_compact(
    host_cache: torch.Tensor,
    hot_cache: torch.Tensor,
    miss_global_indices: torch.Tensor,
    miss_hot_indices: torch.Tensor,
    miss_counts: torch.Tensor,
) -> None:
    """Copy, for one layer, the first ``clamp(count, 0, K)`` entries of every launch row's swap list.

    Args:
        host_cache, hot_cache: as for :func:`resolve_residency`, this layer's.
        miss_global_indices, miss_hot_indices: int32 ``[R, K]``, contiguous: host row and hot row of every copy. A
            negative one is skipped, as is a hot row past ``hot_cache``; a host row past ``host_cache`` fills with
            zeros.
        miss_counts: int32 ``[>= R]``.

    Raises:
        TypeError, ValueError: see the module's description.
    """
    _operators("hot_cache", hot_cache).gather_compact(
        host_cache, hot_cache, miss_global_indices, miss_hot_indices, miss_counts
    )


def gather_planned(host_cache: torch.Tensor, hot_cache: torch.Tensor, plan: torch.Tensor, counts: torch.Tensor) -> None:
    """Copy a packed swap plan for one layer, by the rules of :func:`gather_compact`.

    Args:
        host_cache, hot_cache: as for :func:`resolve_residency`, this layer's.
        plan: uint8 ``[R, K, 16]``, contiguous, as :func:`plan_swap_in` returns it.
        counts: int32 ``[>= R]``.

    Raises:
        TypeError, ValueError: see the module's description.
    """
    _operators("hot_cache", hot_cache).gather_planned(host_cache, hot_cache, plan, counts)


def invalidate_written_slots(
    device_global_indices: torch.Tensor,
    request_state_indices: torch.Tensor,
    req_id_per_token: torch.Tensor,
    written_slots: torch.Tensor,
) -> None:
    """Forget the hot copies of host rows that were rewritten, in the hot buffers of the requests that wrote them.

    Args:
        device_global_indices: int32 ``[S, H]`` (state), contiguous like the others; its device is D.
        request_state_indices: int32 ``[n]``, the state row of a request.
        req_id_per_token: int32 ``[T]``, the request of every written token.
        written_slots: int64 ``[T]``, its host row. A token whose request or state row is out of range, or whose slot is
            negative, is skipped.

    The LRU keeps its order.

    Raises:
        TypeError, ValueError: see the module's description.
    """
    _operators("device_global_indices", device_global_indices).invalidate_written_slots(
        device_global_indices, request_state_indices, req_id_per_token, written_slots
    )
