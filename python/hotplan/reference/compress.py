"""Compress plans, straight from the rules.

Every function lists the new tokens of the batch, one array element per token (``_tokens``), and asks the
rules about each: does this token close a window, must it be stored, where does its state lie. Nothing is
counted in advance and nothing is in closed form, so this file shares no reasoning with the kernels that it
checks.

Words used below, as in the contract of the plans:

* ``seq`` tokens of a request after this forward, ``extend`` of them new, ``prefix = seq - extend``;
* new token ``j`` has position ``p = prefix + j`` and ragged id = (extends of the requests before it) + ``j``;
* a window is 8 tokens for ratio 4 (c4, windows overlap) and 128 tokens for ratio 128 (c128).

Lengths on the CPU are checked. Lengths on the GPU are not, because that would need a synchronisation, so
plans are defined for any values: a request has ``max(extend, 0)`` tokens and takes as many ragged ids; a
token at a negative position, at 2**31 - 1 or beyond, or with a ragged id past ``num_q_tokens`` does not exist;
an address that no table holds or that does not fit the int32 field is -1. ``unchecked=True`` plays that route
with CPU tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from hotplan._switches import wants_check
from hotplan.plans import COMPRESS_ROW, DECODE_ROW, WRITE_ROW, PrefillPlan, invalid_rows

_WINDOW = {4: 8, 128: 128}
_KEEP = {4: 4, 128: 0}  # rows before the last closed window's end that the next, overlapping window needs
_PAGE_TAIL = 4  # rows of a page that the first window of the next page reaches back to
_MAX_TOKENS = 65536  # a ragged id is a uint16
_MAX_BATCH = 65535
_MAX_RING = 2**30
_INT32_MAX = 2**31 - 1

# (index of the request in the batch, position) -> ring row as int64, -1 where there is none
_Locate = Callable[[np.ndarray, np.ndarray], np.ndarray]
_Plan = TypeVar("_Plan")


# ------------------------------------------------------------------------------------------ public functions


def plan_compress_prefill(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    full_to_state: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_lens: torch.Tensor,
    *,
    num_q_tokens: int,
    compress_ratio: int,
    swa_page_size: int,
    ring_size: int,
    use_req_ring: bool = False,
    use_cuda_graph: bool = False,
    write_pad: int | None = None,
    check: bool | None = None,
    out: PrefillPlan | tuple[torch.Tensor, torch.Tensor] | None = None,
    unchecked: bool = False,
) -> PrefillPlan:
    """Plan the compression of one forward with new tokens, for one ratio.

    Rules: a token closes a window iff ``(p + 1) % ratio == 0``. It is stored iff ``p >= first_w`` with
    ``first_w = min(last_c - keep, seq - write_pad)``, ``last_c = seq // ratio * ratio``, keep 4 (c4) or 0
    (c128), or, for c4 without ``use_req_ring``, iff it is one of the last 4 of its SWA page.

    Args:
        req_pool_indices: int64 ``[B]`` on device D, row of each request in ``req_to_token``. B < 65536
            for prefill.
        req_to_token: int32 ``[num_reqs, width]`` on D, full slot of each token. Rows may be strided.
        full_to_state: int64 ``[num_full_slots]`` on D, SWA slot of each full slot.
        seq_lens: int64 ``[B]`` on the CPU or on D, tokens per request including the new ones.
        extend_lens: int64 ``[B]`` beside ``seq_lens``, new tokens per request.
        num_q_tokens: rows of this forward's input, 0 to 65536; the sum of ``extend_lens`` where those are
            checked.
        compress_ratio: 4 or 128.
        swa_page_size: tokens per SWA page, a multiple of ``ring_size``.
        ring_size: rows per ring, a multiple of ``compress_ratio``.
        use_req_ring: ratio 4 only: one ring per request instead of one per SWA page.
        use_cuda_graph: give ``num_q_tokens`` rows, filled up with invalid ones, instead of the exact number.
            Always so for unchecked lengths.
        write_pad: trailing tokens to store in any case. None: ``ring_size - window + 2`` for rings larger
            than the window (speculative decoding), else 0.
        check: check lengths on the GPU too, which synchronises. None: the environment variable HOTPLAN_CHECK
            decides.
        out: plans to write into, contiguous uint8 on D with at least as many rows as needed; rows left become
            invalid rows. They are the returned tensors.
        unchecked: reference only. Treat lengths on the CPU as if they lay on the GPU.

    Returns:
        Plans on D, request by request, positions ascending: compress uint8 ``[n, 16]``, write uint8
        ``[m, 8]``.

    Raises:
        TypeError: an argument has another type or dtype.
        ValueError: a shape, device, ratio, ring, page or pad out of range; or a request without ``0 < extend
            <= seq``, or a sum of extends other than ``num_q_tokens``, named with its index and numbers.
    """
    ratio = _check_ratio("compress_ratio", compress_ratio)
    return _step_prefill(
        req_pool_indices,
        req_to_token,
        full_to_state,
        seq_lens,
        extend_lens,
        num_q_tokens=num_q_tokens,
        swa_page_size=swa_page_size,
        ratios=(ratio,),
        ring_sizes=(ring_size,),
        use_req_ring=_check_req_ring(use_req_ring, ratio),
        use_cuda_graph=use_cuda_graph,
        write_pad=(write_pad,),
        check=check,
        out=None if out is None else {ratio: out},
        unchecked=unchecked,
        labels={ratio: "out"},
    )[ratio]


def plan_step_prefill(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    full_to_state: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_lens: torch.Tensor,
    *,
    num_q_tokens: int,
    swa_page_size: int,
    ratios: Sequence[int] = (4, 128),
    ring_sizes: Sequence[int] = (8, 128),
    use_req_ring: bool = False,
    use_cuda_graph: bool = False,
    write_pad: int | Sequence[int | None] | None = None,
    check: bool | None = None,
    out: Mapping[int, PrefillPlan | tuple[torch.Tensor, torch.Tensor]] | None = None,
    unchecked: bool = False,
) -> dict[int, PrefillPlan]:
    """Plan all ratios of one forward: ``plan_compress_prefill`` for each of them.

    Args:
        ratios: different ratios, each 4 or 128.
        ring_sizes: one ring per ratio.
        use_req_ring: applies to ratio 4; other ratios have per-request rings anyway.
        write_pad: one value for all ratios, or one per ratio.
        out: plans to write into, one :class:`~hotplan.plans.PrefillPlan` per ratio.
        req_pool_indices, req_to_token, full_to_state, seq_lens, extend_lens: as for :func:`plan_compress_prefill`.
        num_q_tokens, swa_page_size, use_cuda_graph, check, unchecked: as there.

    Returns:
        ``{ratio: PrefillPlan}``, equal to the separate calls.

    Raises:
        TypeError, ValueError: as :func:`plan_compress_prefill`.
    """
    return _step_prefill(
        req_pool_indices,
        req_to_token,
        full_to_state,
        seq_lens,
        extend_lens,
        num_q_tokens=num_q_tokens,
        swa_page_size=swa_page_size,
        ratios=ratios,
        ring_sizes=ring_sizes,
        use_req_ring=use_req_ring,
        use_cuda_graph=use_cuda_graph,
        write_pad=write_pad,
        check=check,
        out=out,
        unchecked=unchecked,
        labels={ratio: f"out[{ratio}]" for ratio in ratios},
    )


def plan_compress_decode(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    full_to_state: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    compress_ratio: int,
    swa_page_size: int,
    ring_size: int,
    use_req_ring: bool = False,
    check: bool | None = None,
    out: torch.Tensor | None = None,
    unchecked: bool = False,
) -> torch.Tensor:
    """Plan one decode step, one new token per request, for one ratio.

    Row of each request: ``seq_len = seq``, ``write_loc`` of position ``seq - 1``, ``read_page_1 = write_loc
    // ratio`` and ``read_page_0`` the page of position ``max(seq - 1 - ratio, 0)``.

    Args:
        out: contiguous uint8 ``[B, 16]`` on D to write into; it is the returned tensor.
        req_pool_indices, req_to_token, full_to_state, seq_lens: as for :func:`plan_compress_prefill`.
        compress_ratio, swa_page_size, ring_size, use_req_ring, check, unchecked: as there.

    Returns:
        uint8 ``[B, 16]`` on D. Unchecked ``seq`` outside 1 .. 2**31 - 1 has location and pages -1.

    Raises:
        TypeError, ValueError: as :func:`plan_compress_prefill`; checked lengths must have ``1 <= seq <
            2**31``.
    """
    ratio = _check_ratio("compress_ratio", compress_ratio)
    return _step_decode(
        req_pool_indices,
        req_to_token,
        full_to_state,
        seq_lens,
        swa_page_size=swa_page_size,
        ratios=(ratio,),
        ring_sizes=(ring_size,),
        use_req_ring=_check_req_ring(use_req_ring, ratio),
        check=check,
        out=None if out is None else {ratio: out},
        unchecked=unchecked,
        labels={ratio: "out"},
    )[ratio]


def plan_step_decode(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    full_to_state: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    swa_page_size: int,
    ratios: Sequence[int] = (4, 128),
    ring_sizes: Sequence[int] = (8, 128),
    use_req_ring: bool = False,
    check: bool | None = None,
    out: Mapping[int, torch.Tensor] | None = None,
    unchecked: bool = False,
) -> dict[int, torch.Tensor]:
    """Plan all ratios of one decode step: ``{ratio: plan}``, equal to separate :func:`plan_compress_decode`
    calls.

    ``ratios``, ``ring_sizes`` and ``use_req_ring`` are as for :func:`plan_step_prefill`, ``out`` has one
    tensor per ratio, everything else is as for :func:`plan_compress_decode`.
    """
    return _step_decode(
        req_pool_indices,
        req_to_token,
        full_to_state,
        seq_lens,
        swa_page_size=swa_page_size,
        ratios=ratios,
        ring_sizes=ring_sizes,
        use_req_ring=use_req_ring,
        check=check,
        out=out,
        unchecked=unchecked,
        labels={ratio: f"out[{ratio}]" for ratio in ratios},
    )


def plan_compress_prefill_legacy(
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_lens: torch.Tensor,
    *,
    num_q_tokens: int,
    compress_ratio: int,
    use_cuda_graph: bool = False,
    check: bool | None = None,
    out: PrefillPlan | tuple[torch.Tensor, torch.Tensor] | None = None,
    unchecked: bool = False,
) -> PrefillPlan:
    """Plan one forward for the older state layout: two pages of 4 rows (c4) or one of 128 (c128) per request.

    Differs from :func:`plan_compress_prefill` in three ways: ``page = rid * 2 + (p // 4) % 2`` (c4) or
    ``rid`` (c128) and ``loc = page * ratio + p % ratio``; a token is stored iff ``p >= last_c - keep``,
    without pad or page tails; the pages of compress rows are resolved even where nothing is read. Arguments,
    results and errors are as there.
    """
    batch = _check_requests(req_pool_indices)
    num_q_tokens = _check_int("num_q_tokens", num_q_tokens, 0, _MAX_TOKENS)
    ratio = _check_ratio("compress_ratio", compress_ratio)
    tokens, padded = _read_tokens(
        req_pool_indices, batch, seq_lens, extend_lens, num_q_tokens, use_cuda_graph, check, unchecked
    )
    locate = _legacy_pages(req_pool_indices, ratio)
    stored = tokens.position >= tokens.seq // ratio * ratio - _KEEP[ratio]
    compress = _compress_rows(tokens, ratio, locate, unread_pages=True)
    return _store_one_prefill(
        compress,
        _write_rows(tokens, stored, locate),
        num_q_tokens if padded else None,
        req_pool_indices.device,
        out,
    )


def plan_compress_decode_legacy(
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    compress_ratio: int,
    check: bool | None = None,
    out: torch.Tensor | None = None,
    unchecked: bool = False,
) -> torch.Tensor:
    """Plan one decode step for the older state layout (see :func:`plan_compress_prefill_legacy`), uint8 ``[B,
    16]``.

    Arguments, results and errors are as for :func:`plan_compress_decode`.
    """
    batch = _check_requests(req_pool_indices)
    ratio = _check_ratio("compress_ratio", compress_ratio)
    seq = _read_decode_lengths(req_pool_indices, batch, seq_lens, check, unchecked)
    rows = _decode_rows(seq, ratio, _legacy_pages(req_pool_indices, ratio))
    return _store_one_decode(rows, req_pool_indices.device, out)


def plan_online_prefill(
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_lens: torch.Tensor,
    *,
    num_q_tokens: int,
    state_slot_offset: int = 0,
    use_cuda_graph: bool = False,
    check: bool | None = None,
    out: PrefillPlan | tuple[torch.Tensor, torch.Tensor] | None = None,
    unchecked: bool = False,
) -> PrefillPlan:
    """Plan one forward for the online c128 compressor, whose state is one row per request.

    New tokens are cut into segments at absolute multiples of 128. A segment is a row: ``seq_len`` its last
    position + 1, ``ragged_id`` of its last token, ``buffer_len`` its number of tokens, ``read_page_0 = rid +
    state_slot_offset``, ``read_page_1 = rid``. Segments that end on a multiple of 128 are compress rows, an
    open one at the end of a request is a write row.

    Args:
        state_slot_offset: rows from a request's committed state to the one it writes, 0 .. 2**31 - 1.
        req_pool_indices, seq_lens, extend_lens, num_q_tokens, use_cuda_graph, check, out, unchecked: as for
            :func:`plan_compress_prefill`.

    Returns:
        Two plans of 16-byte compress rows, exact or filled up to ``num_q_tokens`` as for
        :func:`plan_compress_prefill`.

    Raises:
        TypeError, ValueError: as :func:`plan_compress_prefill`.
    """
    batch = _check_requests(req_pool_indices)
    num_q_tokens = _check_int("num_q_tokens", num_q_tokens, 0, _MAX_TOKENS)
    offset = _check_int("state_slot_offset", state_slot_offset, 0, _INT32_MAX)
    tokens, padded = _read_tokens(
        req_pool_indices, batch, seq_lens, extend_lens, num_q_tokens, use_cuda_graph, check, unchecked
    )
    closes = (tokens.position + 1) % 128 == 0
    is_last = tokens.position == tokens.seq - 1
    slots = _slots(req_pool_indices)
    return _store_one_prefill(
        _segment_rows(tokens, closes, slots, offset),
        _segment_rows(tokens, is_last & ~closes, slots, offset),
        num_q_tokens if padded else None,
        req_pool_indices.device,
        out,
    )


def plan_online_decode(
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    state_slot_offset: int = 0,
    check: bool | None = None,
    out: torch.Tensor | None = None,
    unchecked: bool = False,
) -> torch.Tensor:
    """Plan one decode step for the online c128 compressor, uint8 ``[B, 16]``.

    Row of each request: ``seq_len = seq``, ``write_loc = read_page_0 = rid + state_slot_offset``,
    ``read_page_1 = -1``. No position goes into the location, so an unchecked ``seq`` of any value has one
    too. Arguments and errors are as for :func:`plan_online_prefill` and :func:`plan_compress_decode`.
    """
    batch = _check_requests(req_pool_indices)
    offset = _check_int("state_slot_offset", state_slot_offset, 0, _INT32_MAX)
    seq = _read_decode_lengths(req_pool_indices, batch, seq_lens, check, unchecked)
    rows = np.empty(batch, DECODE_ROW)
    rows["seq_len"] = seq & 0xFFFFFFFF
    rows["write_loc"] = rows["read_page_0"] = _shifted(_slots(req_pool_indices), offset)
    rows["read_page_1"] = -1
    return _store_one_decode(rows, req_pool_indices.device, out)


def plan_online_verify(
    req_pool_indices: torch.Tensor,
    prefix_lens: torch.Tensor,
    *,
    num_draft_tokens: int,
    state_slot_offset: int,
    active_batch_size: int | torch.Tensor,
    out: PrefillPlan | tuple[torch.Tensor, torch.Tensor] | None = None,
) -> PrefillPlan:
    """Plan a speculative verify batch for the online c128 compressor: one fixed row per request in each plan.

    Every request has ``num_draft_tokens`` new tokens, at most one of which closes a window. Its closed
    segment is row i of the compress plan, its open one row i of the write plan, laid out as in
    :func:`plan_online_prefill`; whichever does not exist is an invalid row.

    Args:
        req_pool_indices: int64 ``[B]`` on device D.
        prefix_lens: int32 ``[B]`` on D, tokens before the draft.
        num_draft_tokens: 1 .. 128.
        state_slot_offset: as for :func:`plan_online_prefill`.
        active_batch_size: requests from here on are padding, both their rows are invalid. An int in 0 .. B,
            or an int32 or int64 tensor ``[1]`` on D, of any value.
        out: two contiguous uint8 plans ``[B, 16]`` on D; they are the returned tensors.

    Returns:
        Two plans uint8 ``[B, 16]`` on D.

    Raises:
        TypeError, ValueError: an argument of another dtype, shape or device, or out of range.
    """
    batch = _check_requests(req_pool_indices)
    _check_tensor("prefix_lens", prefix_lens, torch.int32, [batch], req_pool_indices.device)
    drafts = _check_int("num_draft_tokens", num_draft_tokens, 1, 128)
    if batch * drafts > _MAX_TOKENS:
        raise ValueError(
            f"num_draft_tokens: expected batch * num_draft_tokens <= {_MAX_TOKENS}, got {batch} * {drafts}"
        )
    offset = _check_int("state_slot_offset", state_slot_offset, 0, _INT32_MAX)
    active = _read_active(active_batch_size, batch, req_pool_indices.device)

    compress, write = invalid_rows(COMPRESS_ROW, batch), invalid_rows(COMPRESS_ROW, batch)
    prefix = prefix_lens.tolist()[: max(active, 0)]
    tokens = _tokens([p + drafts for p in prefix], [drafts] * len(prefix), batch * drafts)
    closes = (tokens.position + 1) % 128 == 0
    opens = (tokens.position == tokens.seq - 1) & ~closes
    slots = _slots(req_pool_indices)
    compress[tokens.request[closes]] = _segment_rows(tokens, closes, slots, offset)
    write[tokens.request[opens]] = _segment_rows(tokens, opens, slots, offset)
    return _store_one_prefill(compress, write, None, req_pool_indices.device, out, exact=True)


# ------------------------------------------------------------------------------------------------ paged plans


def _step_prefill(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    full_to_state: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_lens: torch.Tensor,
    *,
    num_q_tokens: int,
    swa_page_size: int,
    ratios: Sequence[int],
    ring_sizes: Sequence[int],
    use_req_ring: bool,
    use_cuda_graph: bool,
    write_pad: int | Sequence[int | None] | None,
    check: bool | None,
    out: Mapping[int, PrefillPlan | tuple[torch.Tensor, torch.Tensor]] | None,
    unchecked: bool,
    labels: Mapping[int, str],
) -> dict[int, PrefillPlan]:
    batch = _check_requests(req_pool_indices)
    _check_tables(req_pool_indices, req_to_token, full_to_state)
    num_q_tokens = _check_int("num_q_tokens", num_q_tokens, 0, _MAX_TOKENS)
    swa_page_size = _check_int("swa_page_size", swa_page_size, 1, _MAX_RING)
    ratios, ring_sizes = _check_rings(ratios, ring_sizes, swa_page_size)
    pads = _check_pads(write_pad, ratios, ring_sizes)
    tokens, padded = _read_tokens(
        req_pool_indices, batch, seq_lens, extend_lens, num_q_tokens, use_cuda_graph, check, unchecked
    )

    rows = {}
    for ratio, ring, pad in zip(ratios, ring_sizes, pads, strict=True):
        paged = ratio == 4 and not use_req_ring
        if paged:
            locate = _paged_rings(req_pool_indices, req_to_token, full_to_state, swa_page_size, ring)
        else:
            locate = _request_rings(req_pool_indices, ring)
        last_closed = tokens.seq // ratio * ratio
        first_write = np.minimum(last_closed - _KEEP[ratio], tokens.seq - pad)
        stored = tokens.position >= first_write
        if paged:
            stored |= tokens.position % swa_page_size >= swa_page_size - _PAGE_TAIL
        compress = _compress_rows(tokens, ratio, locate, unread_pages=False)
        rows[ratio] = compress, _write_rows(tokens, stored, locate)

    num_rows = num_q_tokens if padded else None
    return _store_prefill(rows, num_rows, req_pool_indices.device, out, labels)


def _step_decode(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    full_to_state: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    swa_page_size: int,
    ratios: Sequence[int],
    ring_sizes: Sequence[int],
    use_req_ring: bool,
    check: bool | None,
    out: Mapping[int, torch.Tensor] | None,
    unchecked: bool,
    labels: Mapping[int, str],
) -> dict[int, torch.Tensor]:
    batch = _check_requests(req_pool_indices)
    _check_tables(req_pool_indices, req_to_token, full_to_state)
    swa_page_size = _check_int("swa_page_size", swa_page_size, 1, _MAX_RING)
    ratios, ring_sizes = _check_rings(ratios, ring_sizes, swa_page_size)
    seq = _read_decode_lengths(req_pool_indices, batch, seq_lens, check, unchecked)

    rows = {}
    for ratio, ring in zip(ratios, ring_sizes, strict=True):
        if ratio == 4 and not use_req_ring:
            locate = _paged_rings(req_pool_indices, req_to_token, full_to_state, swa_page_size, ring)
        else:
            locate = _request_rings(req_pool_indices, ring)
        rows[ratio] = _decode_rows(seq, ratio, locate)
    return _store_decode(rows, req_pool_indices.device, out, labels)


# ---------------------------------------------------------------------------------------------- which tokens


class _Tokens(NamedTuple):
    """The new tokens of a batch, request by request and ascending: int64 arrays, an element per token."""

    request: np.ndarray  # index in the batch
    seq: np.ndarray  # of that request
    j: np.ndarray
    position: np.ndarray
    ragged_id: np.ndarray


def _tokens(seq_lens: list[int], extend_lens: list[int], num_q_tokens: int) -> _Tokens:
    """List the tokens that exist.

    The lengths are Python ints, so that no difference of two of them can overflow.
    """
    parts = []
    start = 0  # ragged id of the request's token j = 0
    for i, (seq, extend) in enumerate(zip(seq_lens, extend_lens, strict=True)):
        count = max(extend, 0)
        prefix = seq - extend
        # Of j = 0 .. count - 1 those with positions 0 .. 2^31 - 2 and ragged ids below num_q_tokens.
        first = max(0, -prefix)
        last = min(count, _INT32_MAX - prefix, num_q_tokens - start)
        if first < last:
            parts.append((i, seq, prefix, start, first, last))
        start += count
    if not parts:
        return _Tokens(*(np.zeros(0, np.int64) for _ in _Tokens._fields))

    request, seqs, prefixes, starts, firsts, lasts = (np.array(column, np.int64) for column in zip(*parts, strict=True))
    lengths = lasts - firsts
    j = np.concatenate([np.arange(a, b) for a, b in zip(firsts, lasts, strict=True)])
    return _Tokens(
        np.repeat(request, lengths),
        np.repeat(seqs, lengths),
        j,
        np.repeat(prefixes, lengths) + j,
        np.repeat(starts, lengths) + j,
    )


def _chosen(tokens: _Tokens, mask: np.ndarray) -> _Tokens:
    return _Tokens(*(column[mask] for column in tokens))


# ------------------------------------------------------------------------------------------------------ where


def _slots(req_pool_indices: torch.Tensor) -> np.ndarray:
    """Request pool indices, -1 for those that address nothing.

    A ring, a page and a slot of request r have numbers of at least r, so nothing of r >= 2^31 fits an int32.
    Replacing such r here keeps all products below within 64 bits.
    """
    rid = req_pool_indices.cpu().numpy()
    return np.where((rid >= 0) & (rid <= _INT32_MAX), rid, -1)


def _paged_rings(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    full_to_state: torch.Tensor,
    swa_page_size: int,
    ring: int,
) -> _Locate:
    """One ring per SWA page: the tables say which SWA slot a token has, the slot says which ring row."""
    slots = _slots(req_pool_indices)

    def locate(request: np.ndarray, position: np.ndarray) -> np.ndarray:
        rid = slots[request]
        num_reqs, width = req_to_token.shape
        exists = (rid >= 0) & (rid < num_reqs) & (position >= 0) & (position < width)
        full = _look_up(req_to_token, exists, rid, position)
        exists = (full >= 0) & (full < len(full_to_state))
        swa = _look_up(full_to_state, exists, full)
        return np.where(swa >= 0, swa // swa_page_size * ring + swa % ring, -1)

    return locate


def _look_up(table: torch.Tensor, exists: np.ndarray, *index: np.ndarray) -> np.ndarray:
    """``table[index]`` as int64 where ``exists``, else -1.

    Gathers on the table's device, because a server's tables are large and only the entries should travel.
    """
    found = np.full(exists.shape, -1, np.int64)
    where = tuple(torch.from_numpy(i[exists]).to(table.device) for i in index)
    found[exists] = table[where].cpu().numpy()
    return found


def _request_rings(req_pool_indices: torch.Tensor, ring: int) -> _Locate:
    """One ring per request."""
    slots = _slots(req_pool_indices)

    def locate(request: np.ndarray, position: np.ndarray) -> np.ndarray:
        rid = slots[request]
        return np.where((rid >= 0) & (position >= 0), rid * ring + position % ring, -1)

    return locate


def _legacy_pages(req_pool_indices: torch.Tensor, ratio: int) -> _Locate:
    """Two pages per request that take turns (c4), or a single one (c128)."""
    slots = _slots(req_pool_indices)

    def locate(request: np.ndarray, position: np.ndarray) -> np.ndarray:
        rid = slots[request]
        page = rid * 2 + position // 4 % 2 if ratio == 4 else rid
        return np.where((rid >= 0) & (position >= 0), page * ratio + position % ratio, -1)

    return locate


def _field(address: np.ndarray) -> np.ndarray:
    """An int32 field: -1 for what is no address or does not fit."""
    return np.where((address >= 0) & (address <= _INT32_MAX), address, -1).astype(np.int32)


def _page_field(location: np.ndarray, ratio: int) -> np.ndarray:
    return _field(np.where(location >= 0, location // ratio, -1))


def _shifted(slots: np.ndarray, offset: int) -> np.ndarray:
    return _field(np.where(slots >= 0, slots + offset, -1))


# ------------------------------------------------------------------------------------------------------- rows


def _compress_rows(tokens: _Tokens, ratio: int, locate: _Locate, *, unread_pages: bool) -> np.ndarray:
    t = _chosen(tokens, (tokens.position + 1) % ratio == 0)
    window = _WINDOW[ratio]
    rows = np.empty(len(t.position), COMPRESS_ROW)
    rows["seq_len"] = t.position + 1
    rows["ragged_id"] = t.ragged_id
    rows["buffer_len"] = window - np.minimum(t.j + 1, window)
    page_0 = _page_field(locate(t.request, np.maximum(t.position - ratio, 0)), ratio)
    page_1 = _page_field(locate(t.request, t.position), ratio)
    # Where the whole window is new input no consumer follows the pages; upstream leaves -1 and the batch
    # index there.
    follows = (rows["buffer_len"] > 0) | unread_pages
    rows["read_page_0"] = np.where(follows, page_0, -1)
    rows["read_page_1"] = np.where(follows, page_1, t.request)
    return rows


def _write_rows(tokens: _Tokens, stored: np.ndarray, locate: _Locate) -> np.ndarray:
    t = _chosen(tokens, stored)
    rows = np.empty(len(t.position), WRITE_ROW)
    rows["ragged_id"] = t.ragged_id
    rows["write_loc"] = _field(locate(t.request, t.position))
    return rows


def _segment_rows(tokens: _Tokens, ends: np.ndarray, slots: np.ndarray, offset: int) -> np.ndarray:
    t = _chosen(tokens, ends)
    rows = np.empty(len(t.position), COMPRESS_ROW)
    rows["seq_len"] = t.position + 1
    rows["ragged_id"] = t.ragged_id
    # The segment began at the last multiple of 128, or with the request's first new token.
    rows["buffer_len"] = np.minimum(t.position % 128 + 1, t.j + 1)
    rows["read_page_0"] = _shifted(slots[t.request], offset)
    rows["read_page_1"] = slots[t.request]
    return rows


def _decode_rows(seq: np.ndarray, ratio: int, locate: _Locate) -> np.ndarray:
    request = np.arange(len(seq))
    exists = (seq >= 1) & (seq <= _INT32_MAX)
    position = np.where(exists, seq, 0) - 1  # -1 where there is no token, and locate() knows no such position
    previous = np.where(exists, np.maximum(position - ratio, 0), -1)
    location = locate(request, position)
    rows = np.empty(len(seq), DECODE_ROW)
    rows["seq_len"] = seq & 0xFFFFFFFF
    rows["write_loc"] = _field(location)
    rows["read_page_0"] = _page_field(locate(request, previous), ratio)
    rows["read_page_1"] = _page_field(location, ratio)
    return rows


# ---------------------------------------------------------------------------------------------------- results


def _store_prefill(
    rows: Mapping[int, tuple[np.ndarray, np.ndarray]],
    num_rows: int | None,
    device: torch.device,
    out: Mapping[int, PrefillPlan | tuple[torch.Tensor, torch.Tensor]] | None,
    labels: Mapping[int, str],
) -> dict[int, PrefillPlan]:
    """Pack the rows of each ratio; ``num_rows`` None means exactly those.

    All of ``out`` is checked before any of it is written.
    """
    outputs: dict[int, list[_Output]] = {}
    for ratio, pair in rows.items():
        given = (None, None) if out is None else _pair_of(_out_of(out, ratio, labels[ratio]), labels[ratio])
        outputs[ratio] = [
            _Output(f"{labels[ratio]}.{name}", r, len(r) if num_rows is None else num_rows, tensor, device)
            for name, r, tensor in zip(PrefillPlan._fields, pair, given, strict=True)
        ]
    return {ratio: PrefillPlan(*(output.store() for output in pair)) for ratio, pair in outputs.items()}


def _store_one_prefill(
    compress: np.ndarray,
    write: np.ndarray,
    num_rows: int | None,
    device: torch.device,
    out: PrefillPlan | tuple[torch.Tensor, torch.Tensor] | None,
    exact: bool = False,
) -> PrefillPlan:
    if exact and out is not None:
        for name, rows, tensor in zip(PrefillPlan._fields, (compress, write), _pair_of(out, "out"), strict=True):
            _check_tensor(f"out.{name}", tensor, torch.uint8, [len(rows), rows.dtype.itemsize], device)
    outs = None if out is None else {0: out}
    return _store_prefill({0: (compress, write)}, num_rows, device, outs, {0: "out"})[0]


def _store_decode(
    rows: Mapping[int, np.ndarray],
    device: torch.device,
    out: Mapping[int, torch.Tensor] | None,
    labels: Mapping[int, str],
) -> dict[int, torch.Tensor]:
    outputs = {}
    for ratio, r in rows.items():
        given = None if out is None else _out_of(out, ratio, labels[ratio])
        outputs[ratio] = _Output(labels[ratio], r, len(r), given, device)
    return {ratio: output.store() for ratio, output in outputs.items()}


def _store_one_decode(rows: np.ndarray, device: torch.device, out: torch.Tensor | None) -> torch.Tensor:
    return _store_decode({0: rows}, device, None if out is None else {0: out}, {0: "out"})[0]


def _out_of(out: Mapping[int, _Plan], key: int, label: str) -> _Plan:
    """The entry of ``out`` for one ratio, which must be there once any is given."""
    if not isinstance(out, Mapping):
        raise TypeError(f"out: expected a mapping from ratio to plan, got {type(out).__name__}")
    if key not in out:
        raise ValueError(f"{label}: expected a plan for every ratio, got the ratios {sorted(out)}")
    if out[key] is None:
        raise TypeError(f"{label}: expected a plan, got None")
    return out[key]


def _pair_of(plan: PrefillPlan | tuple[torch.Tensor, torch.Tensor], label: str) -> PrefillPlan:
    if not isinstance(plan, tuple) or len(plan) != 2:
        raise TypeError(f"{label}: expected a PrefillPlan of two tensors, got {type(plan).__name__}")
    if plan[0] is None or plan[1] is None:
        raise TypeError(f"{label}: expected a PrefillPlan of two tensors, got None for one")
    return PrefillPlan(*plan)


class _Output:
    """Rows on their way into a tensor: a new one, or the caller's, checked here and written in store()."""

    def __init__(
        self, name: str, rows: np.ndarray, num_rows: int, out: torch.Tensor | None, device: torch.device
    ) -> None:
        size = rows.dtype.itemsize
        self.rows, self.out, self.device = rows, out, device
        if out is None:
            self.num_rows = num_rows
            return
        _check_tensor(name, out, torch.uint8, [None, size], device)
        if rows.dtype == DECODE_ROW and len(out) != num_rows:
            raise ValueError(f"{name}: expected shape [{num_rows}, {size}], got {list(out.shape)}")
        if len(out) < num_rows:
            raise ValueError(f"{name}: expected at least {num_rows} rows, got shape {list(out.shape)}")
        if not out.is_contiguous():
            raise ValueError(f"{name}: expected a contiguous tensor, got strides {list(out.stride())}")
        self.num_rows = len(out)

    def store(self) -> torch.Tensor:
        rows = self.rows
        if len(rows) < self.num_rows:
            rows = np.concatenate([rows, invalid_rows(rows.dtype, self.num_rows - len(rows))])
        packed = torch.from_numpy(rows.view(np.uint8).reshape(self.num_rows, rows.dtype.itemsize))
        if self.out is None:
            return packed.to(self.device)
        return self.out.copy_(packed)


# ----------------------------------------------------------------------------------------------------- checks


def _read_tokens(
    req_pool_indices: torch.Tensor,
    batch: int,
    seq_lens: torch.Tensor,
    extend_lens: torch.Tensor,
    num_q_tokens: int,
    use_cuda_graph: bool,
    check: bool | None,
    unchecked: bool,
) -> tuple[_Tokens, bool]:
    """Check the lengths where that is possible or asked for, and list the tokens.

    The second result says whether plans are filled up to ``num_q_tokens`` rows.
    """
    _check_lengths_tensor("seq_lens", seq_lens, batch, req_pool_indices.device)
    _check_tensor("extend_lens", extend_lens, torch.int64, [batch], seq_lens.device)
    if batch > _MAX_BATCH:
        raise ValueError(f"req_pool_indices: expected at most {_MAX_BATCH} requests, got {batch}")
    wanted = wants_check(check)
    checked = seq_lens.device.type == "cpu" and not unchecked
    seq, extend = seq_lens.tolist(), extend_lens.tolist()
    if num_q_tokens > 0 and (checked or wanted):
        for i, (s, e) in enumerate(zip(seq, extend, strict=True)):
            if not 0 < e <= s <= _INT32_MAX:
                raise ValueError(
                    "extend_lens, seq_lens: expected 0 < extend <= seq < 2**31 for every request,"
                    f" got extend={e}, seq={s} for request {i}"
                )
        if sum(extend) != num_q_tokens:
            raise ValueError(f"num_q_tokens: expected the sum of extend_lens, {sum(extend)}, got {num_q_tokens}")
    return _tokens(seq, extend, num_q_tokens), use_cuda_graph or not checked


def _read_decode_lengths(
    req_pool_indices: torch.Tensor, batch: int, seq_lens: torch.Tensor, check: bool | None, unchecked: bool
) -> np.ndarray:
    _check_lengths_tensor("seq_lens", seq_lens, batch, req_pool_indices.device)
    seq = seq_lens.cpu().numpy()
    if wants_check(check) or (seq_lens.device.type == "cpu" and not unchecked):
        for i, s in enumerate(seq.tolist()):
            if not 1 <= s <= _INT32_MAX:
                raise ValueError(f"seq_lens: expected 0 < seq < 2**31, got seq={s} for request {i}")
    return seq


def _read_active(active: int | torch.Tensor, batch: int, device: torch.device) -> int:
    if not isinstance(active, torch.Tensor):
        return _check_int("active_batch_size", active, 0, batch)
    dtype = active.dtype if active.dtype in (torch.int32, torch.int64) else torch.int32
    _check_tensor("active_batch_size", active, dtype, [1], device)
    return int(active.item())


def _check_requests(req_pool_indices: torch.Tensor) -> int:
    _check_tensor("req_pool_indices", req_pool_indices, torch.int64, [None], None)
    return len(req_pool_indices)


def _check_tables(req_pool_indices: torch.Tensor, req_to_token: torch.Tensor, full_to_state: torch.Tensor) -> None:
    device = req_pool_indices.device
    _check_tensor("req_to_token", req_to_token, torch.int32, [None, None], device)
    _check_tensor("full_to_state", full_to_state, torch.int64, [None], device)


def _check_lengths_tensor(name: str, lengths: torch.Tensor, batch: int, device: torch.device) -> None:
    _check_tensor(name, lengths, torch.int64, [batch], None)
    if lengths.device.type != "cpu" and lengths.device != device:
        raise ValueError(f"{name}: expected device cpu or {device}, got {lengths.device}")


def _check_tensor(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: list[int | None], device: torch.device | None
) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
    if tensor.dtype != dtype:
        raise TypeError(f"{name}: expected dtype {dtype}, got {tensor.dtype}")
    got = list(tensor.shape)
    if len(got) != len(shape) or any(want not in (None, have) for want, have in zip(shape, got, strict=True)):
        wanted = ", ".join("*" if want is None else str(want) for want in shape)
        raise ValueError(f"{name}: expected shape [{wanted}], got {got}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name}: expected device {device}, got {tensor.device}")


def _check_int(name: str, value: int, low: int, high: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    value = int(value)
    if not low <= value <= high:
        raise ValueError(f"{name}: expected {low} .. {high}, got {value}")
    return value


def _check_ratio(name: str, ratio: int) -> int:
    if ratio not in _WINDOW:
        raise ValueError(f"{name}: expected 4 or 128, got {ratio!r}")
    return int(ratio)


def _check_req_ring(use_req_ring: bool, ratio: int) -> bool:
    if use_req_ring and ratio != 4:
        raise ValueError(f"use_req_ring: expected False for compress_ratio={ratio}, got True")
    return bool(use_req_ring)


def _check_rings(
    ratios: Sequence[int], ring_sizes: Sequence[int], swa_page_size: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    ratios = tuple(_check_ratio("ratios", r) for r in ratios)
    if not ratios or len(set(ratios)) != len(ratios):
        raise ValueError(f"ratios: expected different ratios, at least one, got {ratios}")
    ring_sizes = tuple(_check_int("ring_size", ring, 1, _MAX_RING) for ring in ring_sizes)
    if len(ring_sizes) != len(ratios):
        raise ValueError(f"ring_sizes: expected one per ratio {ratios}, got {ring_sizes}")
    for ratio, ring in zip(ratios, ring_sizes, strict=True):
        if ring % ratio != 0:
            raise ValueError(f"ring_size: expected a multiple of the ratio {ratio}, got {ring}")
        if swa_page_size % ring != 0:
            raise ValueError(f"swa_page_size: expected a multiple of ring_size {ring}, got {swa_page_size}")
    return ratios, ring_sizes


def _check_pads(
    write_pad: int | Sequence[int | None] | None, ratios: tuple[int, ...], ring_sizes: tuple[int, ...]
) -> list[int]:
    if isinstance(write_pad, Sequence):
        if len(write_pad) != len(ratios):
            raise ValueError(f"write_pad: expected one per ratio {ratios}, got {list(write_pad)}")
        given = list(write_pad)
    else:
        given = [write_pad] * len(ratios)
    pads = []
    for pad, ratio, ring in zip(given, ratios, ring_sizes, strict=True):
        if pad is None:
            window = _WINDOW[ratio]
            pads.append(ring - window + 2 if ring > window else 0)
        else:
            pads.append(_check_int("write_pad", pad, 0, _INT32_MAX))
    return pads
