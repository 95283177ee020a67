"""Compress plans: what DeepSeek-V4's c4 / c128 KV compressor needs to know before a forward.

Each function works on CPU and on CUDA tensors. Row layouts are in :mod:`hotplan.plans`, the rules in
:mod:`hotplan.reference`, which gives the same bytes token by token. Argument names and rules follow SGLang 0.5.23
(``kernels/jit/csrc/deepseek_v4/c_plan.cuh``, ``c128_online_v2.cuh``).

Common to all:

* ``req_pool_indices`` int64 ``[B]`` names the batch's rows of the request pool. Its device D, one CUDA device or the
  CPU, is where every plan is built and returned.
* Lengths (``seq_lens``, ``extend_lens``, int64 ``[B]``, in tokens) lie on D or on the CPU. On the CPU they are checked
  before anything is written. On the GPU they are not, since that takes a synchronisation: the kernel then stays inside
  its buffers whatever they hold. ``check=True``, or ``HOTPLAN_CHECK=1`` with ``check=None``, synchronises and raises
  for them as well.
* ``out`` receives the plan: contiguous uint8 tensors on D, with at least the plan's rows; further rows become invalid
  rows. The result is then made of these tensors.
* One kernel launch per call, on the caller's current stream, without a synchronisation: safe under CUDA-graph capture
  (lengths on the CPU are frozen into the graph; GPU lengths are read at replay). Only a batch of more than 3,840
  requests with lengths on the CPU takes one launch per 3,840 requests.
* ``TypeError`` for a wrong type or dtype, ``ValueError`` for a wrong device, shape, stride or value; both name the
  argument, what was expected and what came.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hotplan import jit
from hotplan._backend import by_device, require_no_capture
from hotplan._switches import wants_check
from hotplan.plans import PrefillPlan

__all__ = [
    "plan_compress_decode",
    "plan_compress_decode_legacy",
    "plan_compress_prefill",
    "plan_compress_prefill_legacy",
    "plan_online_decode",
    "plan_online_prefill",
    "plan_online_verify",
    "plan_step_decode",
    "plan_step_prefill",
]


class _Operators:
    """The exported functions of one backend's module, looked up once."""

    def __init__(self, backend: str) -> None:
        import tvm_ffi

        module = jit.load("compress", backend)
        self.paged_prefill: Callable[..., Any] = module.get_function("paged_prefill")
        self.paged_prefill_pair: Callable[..., Any] = module.get_function("paged_prefill_pair")
        self.paged_decode: Callable[..., Any] = module.get_function("paged_decode")
        self.paged_decode_pair: Callable[..., Any] = module.get_function("paged_decode_pair")
        self.legacy_prefill: Callable[..., Any] = module.get_function("legacy_prefill")
        self.legacy_decode: Callable[..., Any] = module.get_function("legacy_decode")
        self.online_prefill: Callable[..., Any] = module.get_function("online_prefill")
        self.online_decode: Callable[..., Any] = module.get_function("online_decode")
        self.online_verify: Callable[..., Any] = module.get_function("online_verify")
        self.check_lengths: Callable[..., Any] = module.get_function("check_lengths")
        # Unpacking a tvm-ffi array asks for its length and bounds at every element: 1.8 us more for two of them.
        self.item: Callable[[Any, int], torch.Tensor] = tvm_ffi.get_global_func("ffi.ArrayGetItem")


_operators = by_device(_Operators)


def _check(
    ops: _Operators,
    check: bool | None,
    seq_lens: torch.Tensor,
    extend_lens: torch.Tensor | None = None,
    num_q_tokens: int = 0,
) -> None:
    """The checked mode for lengths on the GPU; those on the CPU are checked in any case."""
    on_gpu = getattr(seq_lens, "is_cuda", False)
    if check is None and not on_gpu:  # no need to ask the environment
        return
    if not wants_check(check) or not on_gpu:
        return
    require_no_capture("check")
    ops.check_lengths(seq_lens.cpu(), None if extend_lens is None else extend_lens.cpu(), num_q_tokens)


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
) -> PrefillPlan:
    """Plan one prefill, chunked-prefill or verify forward for one ratio.

    Request i has ``seq_lens[i]`` tokens after this forward, ``extend_lens[i]`` of them new. A new token at position p
    gets a compress row iff ``(p + 1) % compress_ratio == 0``, and a write row iff it lies among the trailing tokens
    that the ring must keep or, for paged c4, among the last 4 of its SWA page.

    Args:
        req_pool_indices: int64 ``[B]`` on D, rows of the request pool. B <= 65,535.
        req_to_token: int32 ``[num_reqs, width]`` on D, full KV slot of each token; rows may be strided.
        full_to_state: int64 ``[num_full_slots]`` on D, SWA slot of each full slot.
        seq_lens, extend_lens: int64 ``[B]`` on D or the CPU, tokens.
        num_q_tokens: tokens of this forward, the sum of ``extend_lens``; at most 65,536. With lengths on the GPU or
            ``use_cuda_graph`` it is the number of rows of both plans; unused ones are invalid rows. Lengths on the GPU
            may sum to less.
        compress_ratio: 4 or 128.
        swa_page_size: tokens of an SWA page, a multiple of ``ring_size``.
        ring_size: rows of a state ring, a multiple of ``compress_ratio``.
        use_req_ring: c4 only: one ring per request instead of one per SWA page, so that requests which share a prefix
            do not share state.
        use_cuda_graph: pad both plans to ``num_q_tokens`` rows, whatever the lengths are.
        write_pad: trailing tokens that are written in any case; None: what the ring has room for,
            ``ring_size - window + 2`` for a ring larger than a window, else 0.
        check: see the module's description.
        out: ``(compress, write)``, see the module's description.

    Returns:
        ``PrefillPlan(compress uint8 [n, 16], write uint8 [m, 8])`` on D, requests in batch order and positions
        ascending. n and m are exact for lengths on the CPU without ``use_cuda_graph``, else ``num_q_tokens``.

    Raises:
        TypeError, ValueError: see the module's description; among others lengths on the CPU that are not
            ``0 < extend <= seq`` or do not sum to ``num_q_tokens``.
    """
    ops = _operators("req_pool_indices", req_pool_indices)
    _check(ops, check, seq_lens, extend_lens, num_q_tokens)
    compress, write = _pair_of(out)
    new = ops.paged_prefill(
        req_pool_indices, req_to_token, full_to_state, seq_lens, extend_lens, compress, write,
        num_q_tokens, compress_ratio, swa_page_size, ring_size, use_req_ring, write_pad, use_cuda_graph,
    )  # fmt: skip
    return PrefillPlan(ops.item(new, 0), ops.item(new, 1)) if out is None else PrefillPlan(compress, write)


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
) -> torch.Tensor:
    """Plan one decode step, one new token per request, for one ratio.

    Args:
        req_pool_indices, req_to_token, full_to_state, seq_lens: as for :func:`plan_compress_prefill`; lengths count the
            new token.
        compress_ratio, swa_page_size, ring_size, use_req_ring, check: as there.
        out: uint8 ``[B, 16]`` on D.

    Returns:
        uint8 ``[B, 16]`` on D, one decode row per request, with the ring row of its newest token and the two pages that
        a window ending there would read.

    Raises:
        TypeError, ValueError: see the module's description.
    """
    ops = _operators("req_pool_indices", req_pool_indices)
    _check(ops, check, seq_lens)
    new = ops.paged_decode(
        req_pool_indices, req_to_token, full_to_state, seq_lens, out,
        compress_ratio, swa_page_size, ring_size, use_req_ring,
    )  # fmt: skip
    return new if out is None else out


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
) -> PrefillPlan:
    """Plan one forward for the older, unpaged state: two pages of 4 rows per request (c4), or one of 128 (c128).

    As :func:`plan_compress_prefill`, but pages come from the request alone and are always resolved, and neither a write
    pad nor the tails of SWA pages are written.

    Args:
        req_pool_indices: int64 ``[B]`` on D, rows of the request pool: the pages of the state. B <= 65,535.
        seq_lens, extend_lens, num_q_tokens, compress_ratio, use_cuda_graph, check, out: as for
            :func:`plan_compress_prefill`.

    Returns:
        ``PrefillPlan(compress uint8 [n, 16], write uint8 [m, 8])`` on D, in the same order and of the same sizes.

    Raises:
        TypeError, ValueError: see the module's description.
    """
    ops = _operators("req_pool_indices", req_pool_indices)
    _check(ops, check, seq_lens, extend_lens, num_q_tokens)
    compress, write = _pair_of(out)
    new = ops.legacy_prefill(
        req_pool_indices, seq_lens, extend_lens, compress, write, num_q_tokens, compress_ratio, use_cuda_graph
    )
    return PrefillPlan(ops.item(new, 0), ops.item(new, 1)) if out is None else PrefillPlan(compress, write)


def plan_compress_decode_legacy(
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    compress_ratio: int,
    check: bool | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Plan one decode step for the older, unpaged state.

    Args:
        req_pool_indices: int64 ``[B]`` on D, rows of the request pool: the pages of the state.
        seq_lens, compress_ratio, check, out: as for :func:`plan_compress_decode`.

    Returns:
        uint8 ``[B, 16]`` on D, the rows of :func:`plan_compress_decode` with the addresses of this layout.

    Raises:
        TypeError, ValueError: see the module's description.
    """
    ops = _operators("req_pool_indices", req_pool_indices)
    _check(ops, check, seq_lens)
    new = ops.legacy_decode(req_pool_indices, seq_lens, out, compress_ratio)
    return new if out is None else out


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
) -> PrefillPlan:
    """Plan one forward for the online c128 compressor, whose state is one row per request.

    Each request's new tokens are cut at absolute multiples of 128. A segment that ends on one is a compress row, a
    trailing one a write row. Both have the 16-byte compress layout: ``seq_len`` and ``ragged_id`` of its last token,
    ``buffer_len`` its number of tokens, ``read_page_0 = rid + state_slot_offset``, ``read_page_1 = rid``.

    Args:
        state_slot_offset: first state row of the committed bank, >= 0.
        req_pool_indices, seq_lens, extend_lens, num_q_tokens, use_cuda_graph, check, out: as for
            :func:`plan_compress_prefill`; both tensors of ``out`` are 16 bytes wide.

    Returns:
        ``PrefillPlan(compress uint8 [n, 16], write uint8 [m, 16])`` on D.

    Raises:
        TypeError, ValueError: see the module's description.
    """
    ops = _operators("req_pool_indices", req_pool_indices)
    _check(ops, check, seq_lens, extend_lens, num_q_tokens)
    compress, write = _pair_of(out)
    new = ops.online_prefill(
        req_pool_indices, seq_lens, extend_lens, compress, write, num_q_tokens, state_slot_offset, use_cuda_graph
    )
    return PrefillPlan(ops.item(new, 0), ops.item(new, 1)) if out is None else PrefillPlan(compress, write)


def plan_online_decode(
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    state_slot_offset: int = 0,
    check: bool | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Plan one decode step for the online c128 compressor.

    Args:
        state_slot_offset: first state row of the committed bank, >= 0.
        req_pool_indices, seq_lens, check, out: as for :func:`plan_compress_decode`.

    Returns:
        uint8 ``[B, 16]`` on D. Rows are ``seq_len``, ``write_loc = read_page_0 = rid + state_slot_offset``,
        ``read_page_1 = -1``.

    Raises:
        TypeError, ValueError: see the module's description.
    """
    ops = _operators("req_pool_indices", req_pool_indices)
    _check(ops, check, seq_lens)
    new = ops.online_decode(req_pool_indices, seq_lens, out, state_slot_offset)
    return new if out is None else out


def plan_online_verify(
    req_pool_indices: torch.Tensor,
    prefix_lens: torch.Tensor,
    *,
    num_draft_tokens: int,
    state_slot_offset: int,
    active_batch_size: int | torch.Tensor,
    out: PrefillPlan | tuple[torch.Tensor, torch.Tensor] | None = None,
) -> PrefillPlan:
    """Plan a verify batch for the online c128 compressor: one fixed row per request in each plan.

    Every request has ``num_draft_tokens`` new tokens, of which at most one closes a window. Its closed segment, if any,
    is row i of the compress plan, its trailing one row i of the write plan; what does not exist is an invalid row.

    Args:
        req_pool_indices: int64 ``[B]`` on D.
        prefix_lens: int32 ``[B]`` on D, tokens before this forward.
        num_draft_tokens: new tokens of every request, 1 to 128; ``B * num_draft_tokens <= 65,536``.
        state_slot_offset: first state row of the committed bank, >= 0.
        active_batch_size: how many leading requests are real. A tensor of one int32 or int64 on D is read when the
            kernel runs, so a captured graph follows it.
        out: two uint8 ``[B, 16]`` tensors on D.

    Returns:
        ``PrefillPlan(compress uint8 [B, 16], write uint8 [B, 16])`` on D.

    Raises:
        TypeError, ValueError: see the module's description.
    """
    ops = _operators("req_pool_indices", req_pool_indices)
    compress, write = _pair_of(out)
    is_tensor = isinstance(active_batch_size, torch.Tensor)
    new = ops.online_verify(
        req_pool_indices, prefix_lens, active_batch_size if is_tensor else None, compress, write,
        0 if is_tensor else active_batch_size, num_draft_tokens, state_slot_offset,
    )  # fmt: skip
    return PrefillPlan(ops.item(new, 0), ops.item(new, 1)) if out is None else PrefillPlan(compress, write)


def plan_step_prefill(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    full_to_state: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_lens: torch.Tensor,
    *,
    num_q_tokens: int,
    swa_page_size: int,
    ratios: tuple[int, ...] | list[int] = (4, 128),
    ring_sizes: tuple[int, ...] | list[int] = (8, 128),
    use_req_ring: bool = False,
    use_cuda_graph: bool = False,
    write_pad: int | tuple[int | None, ...] | list[int | None] | list[int] | None = None,
    check: bool | None = None,
    out: Mapping[int, PrefillPlan | tuple[torch.Tensor, torch.Tensor]] | None = None,
) -> dict[int, PrefillPlan]:
    """Plan all ratios of one forward in one launch, with the bytes of separate :func:`plan_compress_prefill` calls.

    Args:
        ratios, ring_sizes: one or two different ratios, and the ring size of each.
        use_req_ring: applies to ratio 4.
        write_pad: one for all ratios, or one per ratio.
        out: ``(compress, write)`` of every ratio.
        req_pool_indices, req_to_token, full_to_state, seq_lens, extend_lens: as for :func:`plan_compress_prefill`.
        num_q_tokens, swa_page_size, use_cuda_graph, check: as there.

    Returns:
        ``{ratio: PrefillPlan}`` in the order of ``ratios``.

    Raises:
        TypeError, ValueError: see the module's description.
    """
    _check_ratios(ratios, ring_sizes)
    pads = _pads(write_pad, ratios)
    if len(ratios) == 1:
        plan = plan_compress_prefill(
            req_pool_indices, req_to_token, full_to_state, seq_lens, extend_lens,
            num_q_tokens=num_q_tokens, compress_ratio=ratios[0], swa_page_size=swa_page_size, ring_size=ring_sizes[0],
            use_req_ring=_ring_of(use_req_ring, ratios[0]), use_cuda_graph=use_cuda_graph, write_pad=pads[0],
            check=check, out=_out_of(out, ratios[0]),
        )  # fmt: skip
        return {ratios[0]: plan}
    ops = _operators("req_pool_indices", req_pool_indices)
    _check(ops, check, seq_lens, extend_lens, num_q_tokens)
    first, second = ratios
    (c0, w0), (c1, w1) = _pair_of(_out_of(out, first)), _pair_of(_out_of(out, second))
    new = ops.paged_prefill_pair(
        req_pool_indices, req_to_token, full_to_state, seq_lens, extend_lens, c0, w0, c1, w1,
        num_q_tokens, swa_page_size, use_req_ring,
        first, ring_sizes[0], pads[0], second, ring_sizes[1], pads[1], use_cuda_graph,
    )  # fmt: skip
    if out is None:
        item = ops.item
        c0, w0, c1, w1 = item(new, 0), item(new, 1), item(new, 2), item(new, 3)
    return {first: PrefillPlan(c0, w0), second: PrefillPlan(c1, w1)}


def plan_step_decode(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    full_to_state: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    swa_page_size: int,
    ratios: tuple[int, ...] | list[int] = (4, 128),
    ring_sizes: tuple[int, ...] | list[int] = (8, 128),
    use_req_ring: bool = False,
    check: bool | None = None,
    out: Mapping[int, torch.Tensor] | None = None,
) -> dict[int, torch.Tensor]:
    """Plan all ratios of one decode step in one launch; the bytes are those of :func:`plan_compress_decode` calls.

    Args:
        ratios, ring_sizes, use_req_ring: as for :func:`plan_step_prefill`.
        out: uint8 ``[B, 16]`` of every ratio.
        req_pool_indices, req_to_token, full_to_state, seq_lens, swa_page_size, check: as for
            :func:`plan_compress_decode`.

    Returns:
        ``{ratio: uint8 [B, 16]}`` in the order of ``ratios``.

    Raises:
        TypeError, ValueError: see the module's description.
    """
    _check_ratios(ratios, ring_sizes)
    if len(ratios) == 1:
        plan = plan_compress_decode(
            req_pool_indices, req_to_token, full_to_state, seq_lens,
            compress_ratio=ratios[0], swa_page_size=swa_page_size, ring_size=ring_sizes[0],
            use_req_ring=_ring_of(use_req_ring, ratios[0]), check=check,
            out=_out_of(out, ratios[0]),
        )  # fmt: skip
        return {ratios[0]: plan}
    ops = _operators("req_pool_indices", req_pool_indices)
    _check(ops, check, seq_lens)
    first, second = ratios
    d0, d1 = _out_of(out, first), _out_of(out, second)
    new = ops.paged_decode_pair(
        req_pool_indices, req_to_token, full_to_state, seq_lens, d0, d1,
        swa_page_size, use_req_ring, first, ring_sizes[0], second, ring_sizes[1],
    )  # fmt: skip
    if out is None:
        d0, d1 = ops.item(new, 0), ops.item(new, 1)
    return {first: d0, second: d1}


def _check_ratios(ratios: tuple[int, ...] | list[int], ring_sizes: tuple[int, ...] | list[int]) -> None:
    for name, numbers in (("ratios", ratios), ("ring_sizes", ring_sizes)):
        if not isinstance(numbers, (tuple, list)):
            raise TypeError(f"{name}: expected a tuple or a list of ints, got {type(numbers).__name__}")
    if len(ratios) not in (1, 2) or (len(ratios) == 2 and ratios[0] == ratios[1]):
        raise ValueError(f"ratios: expected one or two different ratios, got {tuple(ratios)}")
    if len(ring_sizes) != len(ratios):
        raise ValueError(f"ring_sizes: expected one per ratio, {len(ratios)}, got {tuple(ring_sizes)}")


def _pads(
    write_pad: int | tuple[int | None, ...] | list[int | None] | list[int] | None, ratios: tuple[int, ...] | list[int]
) -> Sequence[int | None]:
    if not isinstance(write_pad, (tuple, list)):
        return (write_pad,) * len(ratios)
    if len(write_pad) != len(ratios):
        raise ValueError(f"write_pad: expected one per ratio, {len(ratios)}, got {tuple(write_pad)}")
    return write_pad


def _ring_of(use_req_ring: bool, ratio: int) -> bool:
    """``use_req_ring`` is about ratio 4; what is no bool is left to the check of all."""
    return False if ratio != 4 and isinstance(use_req_ring, int) else use_req_ring


# What `out` gives: tensors, or None, which asks an operator for new ones. No checker follows which it is.


def _out_of(out: Mapping[int, Any] | None, ratio: int) -> Any:
    if out is None:
        return None
    try:
        plan = out[ratio]
    except KeyError:
        raise ValueError(f"out: expected a plan for ratio {ratio}, got ratios {tuple(out)}") from None
    except (TypeError, IndexError):
        raise TypeError(f"out: expected a plan by ratio, got {type(out).__name__}") from None
    if plan is None:
        raise TypeError(f"out: expected a plan for ratio {ratio}, got None")
    return plan


def _pair_of(out: PrefillPlan | tuple[torch.Tensor, torch.Tensor] | None) -> tuple[Any, Any]:
    if out is None:
        return None, None
    if not isinstance(out, (tuple, list)):
        raise TypeError(f"out: expected (compress, write), got {type(out).__name__}")
    if len(out) != 2:
        raise ValueError(f"out: expected (compress, write), got {len(out)} tensors")
    if out[0] is None or out[1] is None:  # below, None asks for a new tensor
        raise TypeError(f"out: expected (compress, write), got None for {'compress' if out[0] is None else 'write'}")
    return out[0], out[1]
