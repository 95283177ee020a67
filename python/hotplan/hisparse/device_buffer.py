"""HiSparse with SGLang's addressing: tokens are positions inside a request, resolution and copy are one call.

The whole KV pool lies in pinned host memory. Per request and layer H hot slots lie on the GPU, kept in LRU order, and
behind them at least one more slot for the newest tokens. Each decode step
:func:`~hotplan.hisparse.load_cache_to_device_buffer_mla` turns K tokens per request into device rows and loads what is
missing; where layers share the top-k, it also records its copies and :func:`~hotplan.hisparse.copy_cache_planned_mla`
makes them for the other layers. There is one function for each layout (linear, DeepSeek-V4's pages, keys and values of
multi-head attention by blocks) and one for two to four speculative steps at once.

Names, argument order and defaults are SGLang's (0.5.23, ``kernels/ops/kvcache/hisparse.py``). Rules and decisions are
in :mod:`hotplan.reference.device_buffer`, which gives the same results line by line.

Common to all:

* Tensors lie on the device D of ``device_buffer``, one CUDA device or the CPU. Host pools lie on the CPU, pinned where
  D is a GPU, whose kernels read them over PCIe; or on D.
* Column strides are 1. Where a row stride is free, rows that are written must not overlap.
* Pools are bytes, whatever their dtype and shape: contiguous rows of ``item_size_bytes``, of any size, all of which is
  copied. DeepSeek-V4's pages (dsv4) have 37,440 bytes for 64 items: the values of 576 bytes, then their scales of 8
  bytes, then 64 bytes that are not used.
* No synchronisation, no allocation except for results: safe under CUDA-graph capture, on the caller's current stream.
* Values in tensors are not checked, and whatever they are, nothing outside the tensors is read or written: what is no
  token, request or row gives -1.
* ``TypeError`` for a wrong type or dtype, ``ValueError`` for a wrong device, shape, stride or number; both name the
  argument, what was expected and what came. Nothing is written before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from hotplan import jit
from hotplan._backend import by_device

__all__ = [
    "HiSparseSpecState",
    "copy_cache_planned_mla",
    "load_blocks_to_device_buffer_mha",
    "load_cache_to_device_buffer_dsv4_mla",
    "load_cache_to_device_buffer_mla",
    "load_cache_to_device_buffer_spec_mla",
    "transfer_cache_dsv4_mla",
    "translate_padded_hisparse_locations",
]


class HiSparseSpecState(NamedTuple):
    """What several speculative steps keep between calls. Names and shapes are SGLang's, whose own tuple serves, too.

    Attributes:
        cache_index: not looked at. SGLang keeps a hash of the tokens here; ours is made anew in every call.
        cache_policy: int32 ``[>= 1 + reqs, H]``, row stride free (state): row 1 + r is the LRU of request r, slots from
            the oldest on, initially anything (zeros, as SGLang has them, become 1, 2, ..., H - 1, 0). Row 0 is not
            looked at.
        scratch_locs: int32 ``[>= reqs, capacity]``, row stride free: device rows for what finds no slot.
        scratch_state: int32 ``[>= 1, >= reqs]``, row stride free (out): row 0 counts the copies of a request's last
            call. The rest is not looked at.
    """

    cache_index: torch.Tensor
    cache_policy: torch.Tensor
    scratch_locs: torch.Tensor
    scratch_state: torch.Tensor


class _SpecState(Protocol):
    """What is looked at of a :class:`HiSparseSpecState`, for checkers: SGLang's tuple is another class."""

    @property
    def cache_policy(self) -> torch.Tensor: ...
    @property
    def scratch_locs(self) -> torch.Tensor: ...
    @property
    def scratch_state(self) -> torch.Tensor: ...


class _Operators:
    """The exported functions of one backend's module, looked up once."""

    def __init__(self, backend: str) -> None:
        module = jit.load("device_buffer", backend)
        self.load: Callable[..., Any] = module.get_function("load_cache_to_device_buffer")
        self.load_spec: Callable[..., Any] = module.get_function("load_cache_to_device_buffer_spec")
        self.copy_planned: Callable[..., Any] = module.get_function("copy_cache_planned")
        self.transfer: Callable[..., Any] = module.get_function("transfer_cache_dsv4_mla")
        self.translate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = module.get_function(
            "translate_padded_hisparse_locations"
        )


_operators = by_device(_Operators)


def load_cache_to_device_buffer_mla(
    top_k_tokens: torch.Tensor,
    device_buffer_tokens: torch.Tensor,
    host_cache_locs: torch.Tensor,
    device_buffer_locs: torch.Tensor,
    host_cache: torch.Tensor,
    device_buffer: torch.Tensor,
    top_k_device_locs: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    lru_slots: torch.Tensor,
    item_size_bytes: int,
    num_top_k: int,
    hot_buffer_size: int,
    page_size: int = 1,
    block_size: int = 256,
    num_real_reqs: torch.Tensor | None = None,
    miss_src: torch.Tensor | None = None,
    miss_dst: torch.Tensor | None = None,
    miss_count: torch.Tensor | None = None,
    skip_io: bool = False,
) -> None:
    """Say where every top-k token is on the device, load what is missing, renew the LRU.

    A request of n <= H tokens has token t in slot t. Otherwise the newest token is in slot H, which the LRU does not
    know; all other tokens that no slot holds are loaded over the oldest slots that are not asked for.

    Args:
        top_k_tokens: int32 ``[bs, K]``, row stride free: positions inside the request; -1 is none. Where a request has
            n <= H tokens, only its first min(n, K) columns count.
        device_buffer_tokens: int32 ``[reqs, H + extra]``, extra >= 1, row stride free (state): the token in every slot,
            initially -1.
        host_cache_locs: int64 ``[reqs, L]``, contiguous: the row of ``host_cache`` with every token.
        device_buffer_locs: int32 ``[reqs, H + extra]``, row stride of ``device_buffer_tokens``: the row of
            ``device_buffer`` that every slot owns.
        host_cache: contiguous, of any dtype and shape.
        device_buffer: contiguous, of any dtype and shape (out).
        top_k_device_locs: int32 ``[bs, >= K]``, row stride free (out): the row of ``device_buffer`` with every column's
            token, or -1. Columns from K on are not written.
        req_pool_indices: int32 or int64 ``[bs]``, contiguous: the request's row in the tables above.
        seq_lens: int32 or int64 ``[bs]``, contiguous: n, in tokens.
        lru_slots: int16 ``[reqs, H]``, row stride free (state): slots from the oldest on, initially 0..H-1;
            K <= H <= 32,768.
        item_size_bytes: bytes of a row of both pools, >= 1.
        num_top_k: K.
        hot_buffer_size: H.
        page_size: >= 1, a hint. How many slots there are says the shape of ``device_buffer_tokens``.
        block_size: >= 1, a hint. The launch suits the GPU; all sizes give the same results.
        num_real_reqs: int32 ``[1]``: rows from there on pad a captured batch; their columns become -1 and nothing else
            happens. None: there is no padding.
        miss_src: int64 ``[>= bs, >= K]``, row stride free (out): rows of ``host_cache`` that were copied, in the order
            of the columns that ask for them first; what lies past the count keeps. All three of these or none.
        miss_dst: int32 ``[>= bs, >= K]``, row stride of ``miss_src`` (out): where each went, -1 where that is no row.
        miss_count: int32 ``[>= bs]``, contiguous (out): copies of each row.
        skip_io: do everything but copy, to measure what the copies cost.

    Raises:
        TypeError, ValueError: see the module's description.
    """
    _operators("device_buffer", device_buffer).load(
        False, False, item_size_bytes, host_cache, device_buffer, top_k_tokens, num_top_k,
        device_buffer_tokens, host_cache_locs, device_buffer_locs, top_k_device_locs,
        req_pool_indices, seq_lens, lru_slots, hot_buffer_size, page_size, block_size,
        num_real_reqs, miss_src, miss_dst, miss_count, skip_io,
    )  # fmt: skip


def load_cache_to_device_buffer_dsv4_mla(
    top_k_tokens: torch.Tensor,
    device_buffer_tokens: torch.Tensor,
    host_cache_locs: torch.Tensor,
    device_buffer_locs: torch.Tensor,
    host_cache: torch.Tensor,
    device_buffer: torch.Tensor,
    top_k_device_locs: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    lru_slots: torch.Tensor,
    item_size_bytes: int,
    num_top_k: int,
    hot_buffer_size: int,
    page_size: int = 1,
    block_size: int = 256,
    num_real_reqs: torch.Tensor | None = None,
    miss_src: torch.Tensor | None = None,
    miss_dst: torch.Tensor | None = None,
    miss_count: torch.Tensor | None = None,
    skip_io: bool = False,
) -> None:
    """:func:`load_cache_to_device_buffer_mla` for DeepSeek-V4's pages in both pools.

    ``item_size_bytes`` is 584; both pools are whole pages of 37,440 bytes, aligned to 8 bytes, and a row is page
    ``row // 64``, slot ``row % 64``. Other arguments and errors as there.
    """
    _operators("device_buffer", device_buffer).load(
        False, True, item_size_bytes, host_cache, device_buffer, top_k_tokens, num_top_k,
        device_buffer_tokens, host_cache_locs, device_buffer_locs, top_k_device_locs,
        req_pool_indices, seq_lens, lru_slots, hot_buffer_size, page_size, block_size,
        num_real_reqs, miss_src, miss_dst, miss_count, skip_io,
    )  # fmt: skip


def load_blocks_to_device_buffer_mha(
    top_k_blocks: torch.Tensor,
    device_buffer_tokens: torch.Tensor,
    host_cache_locs: torch.Tensor,
    device_buffer_locs: torch.Tensor,
    host_cache_k: torch.Tensor,
    host_cache_v: torch.Tensor,
    device_buffer_k: torch.Tensor,
    device_buffer_v: torch.Tensor,
    top_k_device_locs: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    lru_slots: torch.Tensor,
    item_size_bytes: int,
    hot_buffer_size: int,
    sparse_block_size: int,
    page_size: int = 1,
    block_size: int = 256,
    num_real_reqs: torch.Tensor | None = None,
    skip_io: bool = False,
) -> None:
    """:func:`load_cache_to_device_buffer_mla` for blocks of tokens, keys and values.

    The top-k names blocks, everything else is about tokens: block e asks for the tokens ``e * sparse_block_size`` and
    following, of which those behind the request's end give -1.

    Args:
        top_k_blocks: int32 ``[bs, K]``, row stride free; negative: none.
        host_cache_k: contiguous, ``[host_rows, ...]`` with rows of ``item_size_bytes``.
        host_cache_v: likewise, as many rows.
        device_buffer_k: contiguous, of any dtype and shape (out).
        device_buffer_v: likewise, as many rows (out).
        top_k_device_locs: int32 ``[bs, >= K * sparse_block_size]``, row stride free (out), token by token. Further
            columns are not written.
        hot_buffer_size: H, at least ``K * sparse_block_size``.
        sparse_block_size: tokens of a block, >= 1.

    Other arguments and errors as there.
    """
    _operators("device_buffer_k", device_buffer_k).load(
        True, False, item_size_bytes, host_cache_k, host_cache_v, device_buffer_k, device_buffer_v, top_k_blocks,
        sparse_block_size, device_buffer_tokens, host_cache_locs, device_buffer_locs, top_k_device_locs,
        req_pool_indices, seq_lens, lru_slots, hot_buffer_size, page_size, block_size,
        num_real_reqs, None, None, None, skip_io,
    )  # fmt: skip


def load_cache_to_device_buffer_spec_mla(
    *,
    top_k_tokens: torch.Tensor,
    device_buffer_tokens: torch.Tensor,
    host_cache_locs: torch.Tensor,
    device_buffer_locs: torch.Tensor,
    host_cache: torch.Tensor,
    device_buffer: torch.Tensor,
    top_k_device_locs: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    state: HiSparseSpecState | _SpecState,
    num_real_reqs: torch.Tensor | None,
    miss_src: torch.Tensor | None = None,
    miss_dst: torch.Tensor | None = None,
    miss_count: torch.Tensor | None = None,
) -> None:
    """Two to four speculative steps of every request at once: a token that several of them lack is loaded once.

    All steps of a request are one set, and a token may be in any of the H slots, in requests of H tokens and less, too.
    The ``extra`` newest tokens may be in any of the slots behind the LRU, as ``device_buffer_tokens`` says, and are not
    loaded then. What finds no slot goes to the request's scratch rows, for this call alone. Unlike in SGLang, no rows
    change hands: neither ``device_buffer_locs`` nor ``scratch_locs`` is written.

    Args:
        top_k_tokens: int32 ``[bs, steps, K]``, strides of rows and steps free, 2 <= steps <= 4.
        host_cache: contiguous, ``[host_rows, ...]``; the bytes of its rows are the item size of both pools.
        top_k_device_locs: int32 ``[bs, steps, K]``, strides of rows and steps free (out). Padding becomes 0.
        seq_lens: int32 or int64 ``[bs * steps]``, contiguous: the tokens that each step can ask for.
        state: see :class:`HiSparseSpecState`; K <= H <= 32,768.
        num_real_reqs: as there; with a plan, ``miss_count`` of padding becomes 0.
        miss_src: int64 ``[>= bs, >= steps * K]``, row stride free (out). All three of these or none.
        miss_dst: int32 ``[>= bs, >= steps * K]``, row stride of ``miss_src`` (out).
        miss_count: int32 ``[>= bs]``, contiguous (out).

    Other arguments and errors as for :func:`load_cache_to_device_buffer_mla`.
    """
    try:
        policy, scratch_locs, scratch_state = state.cache_policy, state.scratch_locs, state.scratch_state
    except AttributeError:
        raise TypeError(f"state: expected a HiSparseSpecState, got {type(state).__name__}") from None
    _operators("device_buffer", device_buffer).load_spec(
        host_cache, device_buffer, top_k_tokens, device_buffer_tokens, host_cache_locs, device_buffer_locs,
        top_k_device_locs, req_pool_indices, seq_lens, policy, scratch_locs, scratch_state,
        num_real_reqs, miss_src, miss_dst, miss_count,
    )  # fmt: skip


def copy_cache_planned_mla(
    *,
    miss_src: torch.Tensor,
    miss_dst: torch.Tensor,
    miss_count: torch.Tensor,
    num_real_reqs: torch.Tensor | None,
    host_cache: torch.Tensor,
    device_buffer: torch.Tensor,
    item_size_bytes: int,
    num_blocks: int = 4,
    block_size: int = 1024,
    is_dsv4_layout: bool = False,
    skip_io: bool = False,
) -> None:
    """Make the copies of a recorded plan for another layer with the same top-k, on few SMs, beside other work.

    Row b takes part if it is below ``num_real_reqs[0]``, with its first ``clamp(miss_count[b], 0, capacity)`` copies.
    A copy from or to what is no row is skipped.

    Args:
        miss_src: int64 ``[bs, capacity]``, row stride free.
        miss_dst: int32 ``[bs, capacity]``, row stride of ``miss_src``.
        miss_count: int32 ``[>= bs]``, contiguous.
        num_real_reqs: int32 ``[1]``, or None: all rows.
        host_cache: this layer's, as for the function that recorded the plan.
        device_buffer: likewise (out).
        item_size_bytes: likewise.
        num_blocks: thread blocks at most, >= 1.
        block_size: >= 1, a hint.
        is_dsv4_layout: both pools are DeepSeek-V4's pages.
        skip_io: copy nothing.

    Raises:
        TypeError, ValueError: see the module's description.
    """
    _operators("device_buffer", device_buffer).copy_planned(
        is_dsv4_layout, item_size_bytes, host_cache, device_buffer, miss_src, miss_dst, miss_count, num_real_reqs,
        num_blocks, block_size, skip_io,
    )  # fmt: skip


def transfer_cache_dsv4_mla(
    src_ptrs: torch.Tensor,
    dst_ptrs: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    block_size: int = 1024,
) -> None:
    """Copy the same items of all layers between pools of DeepSeek-V4's pages.

    Args:
        src_ptrs: uint64 ``[layers]``, contiguous like all tensors here; its device is D: the address of every layer's
            pool. That D can follow it, and that the pool has the rows, is the caller's promise.
        dst_ptrs: uint64 ``[layers]``, likewise.
        src_indices: int64 ``[N]``: rows of the source pools. A copy from or to a negative row is skipped.
        dst_indices: int64 ``[N]``: rows of the target pools.
        block_size: >= 1, a hint.

    Raises:
        TypeError, ValueError: see the module's description.
    """
    _operators("src_ptrs", src_ptrs).transfer(src_ptrs, dst_ptrs, src_indices, dst_indices, block_size)


def translate_padded_hisparse_locations(mapping: torch.Tensor, locations: torch.Tensor) -> torch.Tensor:
    """``mapping[loc]`` for every location. Negative locations stay what they are; those behind the mapping give -1.

    Args:
        mapping: int32 or int64 ``[size]``, contiguous; its device is D.
        locations: int32 or int64 ``[n]``, stride free.

    Returns:
        ``[n]`` on D, contiguous, int64 where one of the two is, else int32.

    Raises:
        TypeError, ValueError: see the module's description.
    """
    return _operators("mapping", mapping).translate(mapping, locations)
