"""The device buffer in plain Python, NumPy and PyTorch: what every operator means, written to be read.

The same idea as :mod:`hotplan.reference.hisparse` with SGLang's addressing: tokens are named by their position
inside the request, every request has its own row in the state tables, and resolution and copy are one call. The
contract was read off SGLang 0.5.23 (`kernels/jit/csrc/kvcacheio/hisparse.cuh`, `hisparse_spec.cuh`,
`kernels/ops/kvcache/hisparse.py`, `hisparse_slot_mapping.py`); names of functions and arguments, their order and
their defaults are SGLang's.

State is one row per request: H hot slots and behind them `extra` = `device_buffer_tokens.size(1) - H` more, which
the LRU does not know. `device_buffer_tokens` (tokens) names the token in every slot, `device_buffer_locs` (locs)
the device row that the slot owns, `lru_slots` lists the H hot slots from the least to the most recently used.
`host_cache_locs` (host locs) has the host row of every token. Names: bs launch rows, K top-k entries per step, H hot
slots, L columns of host locs, b a launch row, rid = `req_pool_indices[b]`, n = `seq_lens[b]`, t a token.

The functions take CPU tensors, or CUDA tensors (results are computed on the CPU and copied back). They are slow,
and users may import them. Outputs must not overlap inputs.

Worked values. H 4, K 3, locs [9, 7, 3, 5, 11], tokens [1, 4, 2, 5, -1], LRU [0, 1, 2, 3], n 8:

* [4, 2, 7] gives [7, 3, 11]: two hits, and 7 is the newest token. LRU [0, 3, 1, 2].
* then 6 alone is a miss and takes slot 0: 9, tokens [6, 4, 2, 5, -1], LRU [3, 1, 2, 0].
* [4, 5, 6, 7] with n 9 on a row that holds nothing (K 4): [9, 7, 3, 5], LRU [0, 1, 2, 3].
* short, locs [13, 9, 5, 1, 15], n 3: [2, 0, 1] gives [5, 13, 9]; n 2: [1, -1, 0, 0] gives [9, -1, -1, -1], as only
  the first n entries count.

Rules, and decisions where SGLang is silent or wrong. The compiled backends follow them too.

Rows

* Launch rows b >= `num_real_reqs[0]` are padding: their outputs become -1 (several steps: 0) and nothing else
  happens, except that with several steps `miss_count[b]` becomes 0. None means that all rows are real.
* A request outside the tables: all outputs of the row are -1, its miss_count is 0, nothing else happens.
* Two launch rows with one request are a caller's error, since a GPU launch has no order between them. Nothing is
  read or written outside the tensors; the reference takes the rows in ascending order.
* bs == 0 or K == 0 writes nothing at all, not even counts.

Which tokens

* n <= H is a short request: slot t holds token t. Column i gets locs[t] if 0 <= t < n and i < n, else -1; blocks
  know no limit for i. Neither state nor L are looked at; miss_count is 0. n <= 0 gives -1 everywhere.
* n > H: token n - 1 is the newest one and lives in slot H: locs[H], whatever `tokens` says, and never loaded.
* All other tokens are asked for only if 0 <= t < n and t < L; else -1, and nothing is touched.
* Blocks: entry e names the tokens e * sparse_block_size and following, negative entries and tokens that do not fit
  int32 are -1. Outputs, slots and the LRU stay token by token. Output columns behind K * sparse_block_size are not
  written.

Rows of the pools

* A pool is contiguous memory of whole items, whatever its dtype and shape. Linear pools have bytes //
  item_size_bytes rows; DeepSeek-V4's have 64 rows per page of 37,440 bytes, item_size_bytes is 584: the value of
  slot s lies at s * 576 (576 bytes), its scale at 36,864 + s * 8 (8 bytes), the last 64 bytes are nobody's.
* Keys and values of multi-head attention are two pools with one numbering of rows.
* A loc that is no row of the device pool is -1 in outputs. A hit on such a slot is a hit all the same.
* A miss whose host loc is no row of the host pool gets -1, takes no slot and counts nowhere.
* A miss that draws a slot without a device row takes it and counts; the slot's token becomes -1, outputs are -1, the
  plan has destination -1, and nothing is copied.
* Every byte of an item is copied, whatever its size; `skip_io` does everything but that.

Hits, misses, LRU

* A slot that holds a token that is asked for is a hit. Other tokens are misses in the order in which columns name
  them first; the m-th takes the m-th oldest slot that is no hit. Columns with the same token share its slot and its
  load.
* The new order is: unused victims, loaded slots in miss order, hits in their old order.
* Plans list the copies of row b in miss order: miss_src host rows, miss_dst device rows, miss_count how many.
  Entries behind the count are not written.
* A row whose columns are all answered without the LRU (-1, newest, extra, short) leaves state as it is. Any other row
  reads the LRU, so that is when a corrupt one is repaired: of a slot that occurs several times the most recent
  occurrence counts, slots outside [0, H) are dropped, missing slots come back as the oldest in ascending order. A
  token that several slots hold is found in the most recently used one; the others are ordinary victims.

Several steps (speculative decoding)

* A row's steps * K columns are one set, in (step, column) order; n is that of the row's step. There is no short
  request, and tokens may sit in any of the H slots.
* A token t >= n - extra is looked up in the extra slots first: the first of them that names t answers, if it has a
  device row, and the token is not loaded. Otherwise t is looked up like all others.
* There can be more misses than victims. The j-th of those takes the device row scratch_locs[rid, j], which enters no
  table; where it is no device row, outputs are -1 and the plan has destination -1. Misses behind the last scratch
  row get -1 and count nowhere. Nothing is rotated: device_buffer_locs and scratch_locs are never written.
* The LRU is cache_policy[1 + rid, :H], int32. It may begin as anything: zeros are repaired to 1, 2, ..., H - 1, 0.
  scratch_state[0, rid] becomes the row's number of misses, that of miss_count. Nothing else in `state` is read or
  written, and cache_index may be anything at all: SGLang's hash of tokens has no counterpart here.

Other operators

* A planned copy takes rows b < num_real_reqs[0] and entries m < clamp(miss_count[b], 0, capacity), and skips those
  whose source or destination is no row of the pools.
* A transfer between layers' pools trusts its pointers and indices; it skips negative indices. Two copies with one
  destination leave the bytes of either.
* A translation leaves negative locations as they are; those behind the mapping give -1.

Arguments

* seq_lens and req_pool_indices are int32 or int64, in any mix, for several steps too.
* num_top_k and hot_buffer_size must say what the shapes say. page_size, block_size and num_blocks are hints, any int
  from 1 on, and change no result.
* The columns of a step (K, or K * sparse_block_size) are at most H, H is at most 32768.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from hotplan.hisparse.device_buffer import HiSparseSpecState, _SpecState
from hotplan.reference._arrays import Arrays
from hotplan.reference._lru import partition
from hotplan.reference._tensor_checks import (
    check_at_least,
    check_bool,
    check_contiguous,
    check_device,
    check_int,
    check_separate_rows,
    check_shape,
    check_tensor,
    check_unit_columns,
    wrong_type,
    wrong_value,
)

INT32_MAX = 2**31 - 1
MAX_HOT_SLOTS = 32768

PAGE_SLOTS = 64
PAGE_BYTES = 37440
VALUE_BYTES = 576
SCALE_BYTES = 8
SCALES_AT = PAGE_SLOTS * VALUE_BYTES
PAGED_ITEM_BYTES = VALUE_BYTES + SCALE_BYTES

INTEGERS = (torch.int32, torch.int64)


# ----------------------------------------------------------------------------------------------------
# Pools


@dataclass
class _Pools:
    """The pools of one layer: one pair, or two with one numbering of rows."""

    pairs: list[tuple[torch.Tensor, torch.Tensor]]
    host_rows: int
    device_rows: int
    item_bytes: int
    paged: bool
    device: torch.device

    def host_row(self, loc: int) -> int:
        return loc if 0 <= loc < self.host_rows else -1

    def device_row(self, loc: int) -> int:
        return loc if 0 <= loc < self.device_rows else -1

    def copy(self, loads: list[tuple[int, int]]) -> None:
        """Copy host rows to device rows; a pair of which one is no row is skipped."""
        pairs = [(src, dst) for src, dst in loads if self.host_row(src) >= 0 and self.device_row(dst) >= 0]
        if not pairs:
            return
        src, dst = torch.tensor(pairs, dtype=torch.int64).t()
        for host, device in self.pairs:
            for source, target in zip(self._pieces(host), self._pieces(device), strict=True):
                data = source[self._index(src.to(source.device))].to(target.device)
                target[self._index(dst.to(target.device))] = data

    def _index(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (rows // PAGE_SLOTS, rows % PAGE_SLOTS) if self.paged else (rows,)

    def _pieces(self, pool: torch.Tensor) -> list[torch.Tensor]:
        """A pool's bytes, an index of _index for every piece of an item."""
        data = _bytes_of(pool)
        if not self.paged:
            return [data[: len(data) // self.item_bytes * self.item_bytes].view(-1, self.item_bytes)]
        pages = data.view(-1, PAGE_BYTES)
        scales_end = SCALES_AT + PAGE_SLOTS * SCALE_BYTES
        return [
            pages[:, :SCALES_AT].unflatten(1, (PAGE_SLOTS, VALUE_BYTES)),
            pages[:, SCALES_AT:scales_end].unflatten(1, (PAGE_SLOTS, SCALE_BYTES)),
        ]


def _bytes_of(pool: torch.Tensor) -> torch.Tensor:
    return pool.detach().view(-1).view(torch.uint8)


def _row_bytes(pool: torch.Tensor) -> int:
    """Bytes of an element of the first dimension of a contiguous tensor."""
    return int(np.prod(pool.shape[1:], dtype=np.int64)) * pool.element_size()


def _check_pool(name: str, pool: torch.Tensor, item_bytes: int, paged: bool) -> int:
    """The rows of a pool."""
    if pool.dim() == 0:
        raise wrong_value(name, "a tensor of at least 1 dimension", "shape ()")
    check_contiguous(name, pool)
    size = pool.numel() * pool.element_size()
    if not paged:
        return size // item_bytes
    if size % PAGE_BYTES != 0:
        raise wrong_value(name, f"whole pages of {PAGE_BYTES} bytes", f"{size} bytes")
    if size > 0 and pool.data_ptr() % 8 != 0:
        raise wrong_value(name, "memory aligned to 8 bytes", f"an address {pool.data_ptr() % 8} bytes behind that")
    return size // PAGE_BYTES * PAGE_SLOTS


def _check_pools(
    pools: dict[str, torch.Tensor], item_size_bytes: int, *, paged: bool = False, of_items: bool = False
) -> _Pools:
    """pools: host pools, then as many device pools. of_items: a host pool's first dimension counts items."""
    item_bytes = check_int("item_size_bytes", item_size_bytes, 1, INT32_MAX)
    if paged and item_bytes != PAGED_ITEM_BYTES:
        raise wrong_value("item_size_bytes", f"{PAGED_ITEM_BYTES}, DeepSeek-V4's", item_bytes)
    names = list(pools)
    host_names, device_names = names[: len(names) // 2], names[len(names) // 2 :]
    for name, pool in pools.items():
        check_tensor(name, pool)
    device = pools[device_names[0]].device
    for name, pool in pools.items():
        if name in device_names or pool.device.type != "cpu":
            check_device(name, pool, device, device_names[0])
    rows = {name: _check_pool(name, pool, item_bytes, paged) for name, pool in pools.items()}
    for name in host_names if of_items else ():
        if _row_bytes(pools[name]) != item_bytes:
            raise wrong_value(name, f"rows of item_size_bytes = {item_bytes} bytes", f"{_row_bytes(pools[name])} bytes")
    for group in (host_names, device_names):
        for name in group[1:]:
            if rows[name] != rows[group[0]]:
                raise wrong_value(name, f"{rows[group[0]]} rows (those of {group[0]})", f"{rows[name]} rows")
    pairs = [(pools[host], pools[target]) for host, target in zip(host_names, device_names, strict=True)]
    return _Pools(pairs, rows[host_names[0]], rows[device_names[0]], item_bytes, paged, device)


# ----------------------------------------------------------------------------------------------------
# Arguments of a swap-in


@dataclass
class _SwapIn(Arrays):
    """Everything that a swap-in works on."""

    pools: _Pools
    rows: int
    steps: int
    columns: int
    block_tokens: int | None
    slots: int
    extra: int
    requests: int
    max_tokens: int
    num_real: int
    owner: str

    @property
    def several(self) -> bool:
        return self.steps > 1

    def by_step(self, name: str, row: int) -> np.ndarray:
        """Row `row` of top_k or out as [steps, columns], in the array's own memory."""
        array: np.ndarray = self.arrays[name][row]
        return array if self.several else array[None]

    def check(
        self,
        name: str,
        tensor: torch.Tensor,
        dtypes: tuple[torch.dtype, ...],
        shape: tuple[int | None, ...],
        letters: str,
    ) -> None:
        """dtype, device and shape; None in `shape` is any size."""
        check_tensor(name, tensor, dtypes, (len(shape),))
        check_device(name, tensor, self.pools.device, self.owner)
        sizes = tuple(got if size is None else size for got, size in zip(tensor.shape, shape, strict=True))
        check_shape(name, tensor, sizes, letters)


def _check_num_real(num_real_reqs: torch.Tensor | None, rows: int, device: torch.device, owner: str) -> int:
    if num_real_reqs is None:
        return rows
    check_tensor("num_real_reqs", num_real_reqs, (torch.int32,), (1,))
    check_device("num_real_reqs", num_real_reqs, device, owner)
    check_shape("num_real_reqs", num_real_reqs, (1,), "[1]")
    return int(num_real_reqs.item())


def _check_same_stride(name: str, tensor: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    if min(len(tensor), len(other)) > 1 and tensor.stride(0) != other.stride(0):
        raise wrong_value(name, f"a row stride of {other.stride(0)} (that of {other_name})", tensor.stride(0))


def _check_plan(
    miss_src: torch.Tensor,
    miss_dst: torch.Tensor,
    miss_count: torch.Tensor,
    device: torch.device,
    owner: str,
    rows: int,
    columns: int,
) -> None:
    """Tensors of a plan for at least so many rows and columns."""
    for name, tensor, dtype in (("miss_src", miss_src, torch.int64), ("miss_dst", miss_dst, torch.int32)):
        check_tensor(name, tensor, (dtype,), (2,))
        check_device(name, tensor, device, owner)
        if tensor.shape[0] < rows or tensor.shape[1] < columns:
            raise wrong_value(name, f"at least {rows} rows of {columns} columns", f"shape {tuple(tensor.shape)}")
        check_separate_rows(name, tensor)
    _check_same_stride("miss_dst", miss_dst, "miss_src", miss_src)
    check_tensor("miss_count", miss_count, (torch.int32,), (1,))
    check_device("miss_count", miss_count, device, owner)
    check_at_least("miss_count", miss_count, rows)
    check_contiguous("miss_count", miss_count)


def _check_separate_steps(name: str, tensor: torch.Tensor) -> None:
    """An output [bs, steps, K] whose rows and steps may lie apart but not upon each other."""
    if tensor.numel() == 0:
        return
    rows, steps, columns = tensor.shape
    row, step, column = tensor.stride()
    if (columns > 1 and column != 1) or step < columns or (rows > 1 and row < (steps - 1) * step + columns):
        raise wrong_value(name, "a column stride of 1, and steps and rows apart", f"strides {tensor.stride()}")


def _check_swap_in(
    top_k: tuple[str, torch.Tensor],
    pools: _Pools,
    owner: str,
    lru: tuple[str, torch.Tensor],
    *,
    device_buffer_tokens: torch.Tensor,
    host_cache_locs: torch.Tensor,
    device_buffer_locs: torch.Tensor,
    top_k_device_locs: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    num_real_reqs: torch.Tensor | None,
    miss_src: torch.Tensor | None = None,
    miss_dst: torch.Tensor | None = None,
    miss_count: torch.Tensor | None = None,
    block_tokens: int | None = None,
    several: bool = False,
) -> _SwapIn:
    top_k_name, entries = top_k
    check_tensor(top_k_name, entries, (torch.int32,), (3 if several else 2,))
    check_device(top_k_name, entries, pools.device, owner)
    if entries.numel() > 0 and entries.shape[-1] > 1 and entries.stride(-1) != 1:
        raise wrong_value(top_k_name, "a column stride of 1", f"strides {entries.stride()}")
    rows = entries.shape[0]
    steps = entries.shape[1] if several else 1
    columns = entries.shape[-1] * (block_tokens or 1)
    if several and not 2 <= steps <= 4:
        raise wrong_value(top_k_name, "2 to 4 steps", f"shape {tuple(entries.shape)}")

    lru_name, lru_rows = lru
    check_tensor(lru_name, lru_rows, (torch.int32 if several else torch.int16,), (2,))
    slots = lru_rows.shape[1]
    if not columns <= slots <= MAX_HOT_SLOTS:
        raise wrong_value(lru_name, f"columns <= H <= {MAX_HOT_SLOTS} with {columns} columns", f"H = {slots}")
    check_tensor("device_buffer_tokens", device_buffer_tokens, (torch.int32,), (2,))
    requests, width = device_buffer_tokens.shape
    call = _SwapIn(
        pools,
        rows,
        steps,
        columns,
        block_tokens,
        slots,
        width - slots,
        requests,
        max_tokens=0,
        num_real=_check_num_real(num_real_reqs, rows, pools.device, owner),
        owner=owner,
    )

    if call.extra < 1:
        raise wrong_value("device_buffer_tokens", f"more than H = {slots} columns", f"shape {(requests, width)}")
    call.check("device_buffer_tokens", device_buffer_tokens, (torch.int32,), (None, None), "[reqs, H + extra]")
    check_separate_rows("device_buffer_tokens", device_buffer_tokens)
    shape = (requests, width)
    call.check("device_buffer_locs", device_buffer_locs, (torch.int32,), shape, "[reqs, H + extra]")
    check_unit_columns("device_buffer_locs", device_buffer_locs)
    _check_same_stride("device_buffer_locs", device_buffer_locs, "device_buffer_tokens", device_buffer_tokens)
    call.check("host_cache_locs", host_cache_locs, (torch.int64,), (requests, None), "[reqs, L]")
    check_contiguous("host_cache_locs", host_cache_locs)
    call.max_tokens = host_cache_locs.shape[1]
    check_device(lru_name, lru_rows, pools.device, owner)
    if several and len(lru_rows) < requests + 1:
        raise wrong_value(lru_name, f"at least reqs + 1 = {requests + 1} rows", f"shape {tuple(lru_rows.shape)}")
    if not several:
        check_shape(lru_name, lru_rows, (requests, slots), "[reqs, H]")
    check_separate_rows(lru_name, lru_rows)

    if several:
        call.check("top_k_device_locs", top_k_device_locs, (torch.int32,), tuple(entries.shape), "[bs, steps, K]")
        _check_separate_steps("top_k_device_locs", top_k_device_locs)
    else:
        call.check("top_k_device_locs", top_k_device_locs, (torch.int32,), (rows, None), "[bs, >= columns]")
        if top_k_device_locs.shape[1] < columns:
            got = f"shape {tuple(top_k_device_locs.shape)}"
            raise wrong_value("top_k_device_locs", f"at least {columns} columns", got)
        check_separate_rows("top_k_device_locs", top_k_device_locs)
    call.check("req_pool_indices", req_pool_indices, INTEGERS, (rows,), "[bs]")
    check_contiguous("req_pool_indices", req_pool_indices)
    call.check("seq_lens", seq_lens, INTEGERS, (rows * steps,), "[bs * steps]" if several else "[bs]")
    check_contiguous("seq_lens", seq_lens)
    plan = {"miss_src": miss_src, "miss_dst": miss_dst, "miss_count": miss_count}
    missing = [name for name, tensor in plan.items() if tensor is None]
    if missing and len(missing) < len(plan):
        raise wrong_value(missing[0], f"all of {', '.join(plan)}, or none", "None")
    if miss_src is not None and miss_dst is not None and miss_count is not None:
        _check_plan(miss_src, miss_dst, miss_count, pools.device, owner, rows, steps * columns)

    call.add_input("top_k", entries)
    call.add_input("locs", device_buffer_locs)
    call.add_input("host_locs", host_cache_locs)
    call.add_input("requests", req_pool_indices)
    call.add_input("lengths", seq_lens)
    call.add_output("out", top_k_device_locs)
    call.add_output("tokens", device_buffer_tokens)
    call.add_output("lru", lru_rows)
    for name, tensor in plan.items():
        call.add_output(name, tensor)
    return call


# ----------------------------------------------------------------------------------------------------
# The rules


def _tokens(call: _SwapIn, entries: list[int]) -> Iterator[int]:
    """The tokens that the entries of a step ask for, column by column; any int32, -1 for no block."""
    if call.block_tokens is None:
        yield from entries
        return
    for block in entries:
        for offset in range(call.block_tokens):
            token = block * call.block_tokens + offset
            yield token if block >= 0 and token <= INT32_MAX else -1


def _short_row(call: _SwapIn, locs: list[int], length: int, column: int, token: int) -> int:
    """What a short request, whose slot t holds token t, answers."""
    if not 0 <= token < length or (call.block_tokens is None and column >= length):
        return -1
    return call.pools.device_row(locs[token])


def _extra_row(call: _SwapIn, held: list[int], locs: list[int], length: int, token: int) -> int | None:
    """What the slots behind the LRU answer; None where they are not asked."""
    slots = call.slots
    if not call.several:
        return call.pools.device_row(locs[slots]) if token == length - 1 else None
    if 0 <= token < length and token >= length - call.extra and token in held[slots:]:
        row = call.pools.device_row(locs[held.index(token, slots)])
        return row if row >= 0 else None
    return None


def _resolve_row(call: _SwapIn, row: int) -> list[tuple[int, int]]:
    """One launch row: writes its outputs and its request's state, returns its copies."""
    out = call.by_step("out", row)[:, : call.columns]
    counts = call.get("miss_count")
    if row >= call.num_real:
        out[:] = 0 if call.several else -1
        if call.several and counts is not None:
            counts[row] = 0
        return []
    if counts is not None:
        counts[row] = 0
    request = int(call.arrays["requests"][row])
    if not 0 <= request < call.requests:
        out[:] = -1
        return []

    held = call.arrays["tokens"][request].tolist()
    locs = call.arrays["locs"][request].tolist()
    waiting: list[tuple[int, int, int]] = []
    for step in range(call.steps):
        length = int(call.arrays["lengths"][row * call.steps + step])
        for column, token in enumerate(_tokens(call, call.by_step("top_k", row)[step].tolist())):
            if not call.several and length <= call.slots:
                out[step, column] = _short_row(call, locs, length, column, token)
                continue
            answer = _extra_row(call, held, locs, length, token)
            if answer is not None:
                out[step, column] = answer
            elif 0 <= token < length and token < call.max_tokens:
                waiting.append((step, column, token))
            else:
                out[step, column] = -1

    wanted = list(dict.fromkeys(token for _, _, token in waiting))
    row_of, loads = _swap(call, request, wanted, held, locs)
    for step, column, token in waiting:
        out[step, column] = row_of.get(token, -1)
    misses = call.get("state_misses")
    if misses is not None:
        misses[0, request] = len(loads)
    if counts is not None:
        counts[row] = len(loads)
        call.arrays["miss_src"][row, : len(loads)] = [src for src, _ in loads]
        call.arrays["miss_dst"][row, : len(loads)] = [dst for _, dst in loads]
    return loads


def _swap(
    call: _SwapIn, request: int, wanted: list[int], held: list[int], locs: list[int]
) -> tuple[dict[int, int], list[tuple[int, int]]]:
    """Find or load distinct tokens in a request's slots: the row of each, and the copies."""
    loads: list[tuple[int, int]] = []
    if not wanted:
        return {}, loads
    pools = call.pools
    host_locs = call.arrays["host_locs"][request]
    lru = call.arrays["lru"][request + 1 if call.several else request, : call.slots]
    tokens = call.arrays["tokens"][request]

    slots = partition(lru.tolist(), held[: call.slots], set(wanted))
    row_of = {token: pools.device_row(locs[slot]) for token, slot in slots.slot_of.items()}
    missing = [token for token in wanted if token not in row_of and pools.host_row(int(host_locs[token])) >= 0]
    in_slots = list(zip(missing, slots.victims, strict=False))
    for token, slot in in_slots:
        row_of[token] = pools.device_row(locs[slot])
        tokens[slot] = token if row_of[token] >= 0 else -1
    lru[:] = slots.renewed(len(in_slots))
    scratch = call.get("scratch")
    if scratch is not None:
        for token, loc in zip(missing[len(in_slots) :], scratch[request].tolist(), strict=False):
            row_of[token] = pools.device_row(loc)
    loads = [(int(host_locs[token]), row_of[token]) for token in missing if token in row_of]
    return row_of, loads


def _swap_in(call: _SwapIn, skip_io: bool) -> None:
    if call.rows == 0 or call.columns == 0:
        return
    loads = [load for row in range(call.rows) for load in _resolve_row(call, row)]
    call.write_back()
    if not skip_io:
        call.pools.copy(loads)


# ----------------------------------------------------------------------------------------------------
# One step


def _check_hints(page_size: int, block_size: int) -> None:
    check_int("page_size", page_size, 1)
    check_int("block_size", block_size, 1)


def _check_sizes(name: str, value: int, expected: int, of: str) -> None:
    if check_int(name, value, 0) != expected:
        raise wrong_value(name, f"{expected} ({of})", value)


def _load_tokens(
    paged: bool,
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
    page_size: int,
    block_size: int,
    num_real_reqs: torch.Tensor | None,
    miss_src: torch.Tensor | None,
    miss_dst: torch.Tensor | None,
    miss_count: torch.Tensor | None,
    skip_io: bool,
) -> None:
    pools = {"host_cache": host_cache, "device_buffer": device_buffer}
    call = _check_swap_in(
        ("top_k_tokens", top_k_tokens),
        _check_pools(pools, item_size_bytes, paged=paged),
        "device_buffer",
        ("lru_slots", lru_slots),
        device_buffer_tokens=device_buffer_tokens,
        host_cache_locs=host_cache_locs,
        device_buffer_locs=device_buffer_locs,
        top_k_device_locs=top_k_device_locs,
        req_pool_indices=req_pool_indices,
        seq_lens=seq_lens,
        num_real_reqs=num_real_reqs,
        miss_src=miss_src,
        miss_dst=miss_dst,
        miss_count=miss_count,
    )
    _check_sizes("num_top_k", num_top_k, call.columns, "columns of top_k_tokens")
    _check_sizes("hot_buffer_size", hot_buffer_size, call.slots, "columns of lru_slots")
    _check_hints(page_size, block_size)
    _swap_in(call, check_bool("skip_io", skip_io))


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
    """Say where every top-k token is on the device, load those that are not, renew the LRU. Linear pools.

    All tensors lie on the device of device_buffer, except that host_cache may lie on the CPU. Row strides are free
    where nothing else is said, column strides are 1.

    Args:
        top_k_tokens: int32 [bs, K]: positions inside the request, -1 for none.
        device_buffer_tokens: int32 [reqs, H + extra], extra >= 1 (state): the token in every slot.
        host_cache_locs: int64 [reqs, L], contiguous: the host row of every token.
        device_buffer_locs: int32 [reqs, H + extra], row stride of device_buffer_tokens: the device row of every slot.
        host_cache: contiguous memory of items, any dtype and shape.
        device_buffer: contiguous memory of items (out), any dtype and shape.
        top_k_device_locs: int32 [bs, >= K] (out): the device row of every column, or -1.
        req_pool_indices: int32 or int64 [bs], contiguous: the row of the request in the tables.
        seq_lens: int32 or int64 [bs], contiguous: tokens of the request.
        lru_slots: int16 [reqs, H], K <= H <= 32768 (state).
        item_size_bytes: bytes of an item, 1 to 2**31 - 1.
        num_top_k: K.
        hot_buffer_size: H.
        page_size: a hint, >= 1.
        block_size: a hint, >= 1.
        num_real_reqs: int32 [1]: launch rows from there on are padding; None: there are none.
        miss_src: int64 [>= bs, >= K] (out): host rows of the copies; with the next two, or none of them.
        miss_dst: int32 [>= bs, >= K], row stride of miss_src (out): device rows of the copies.
        miss_count: int32 [>= bs], contiguous (out): copies of every launch row.
        skip_io: do all but copy.

    Raises:
        TypeError: a wrong type or dtype.
        ValueError: a wrong device, shape, stride or number.

    Source: SGLang's load_cache_to_device_buffer_mla, with the decisions in the module's docstring.
    """
    _load_tokens(False, **locals())


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
    """load_cache_to_device_buffer_mla with DeepSeek-V4's pages on both ends.

    Arguments and errors as there, but item_size_bytes is 584, and both pools are whole pages of 37,440 bytes, aligned
    to 8 bytes. Source: SGLang's load_cache_to_device_buffer_dsv4_mla.
    """
    _load_tokens(True, **locals())


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
    """The same for blocks of tokens, keys and values: load what is missing of the selected blocks.

    Arguments and errors as in load_cache_to_device_buffer_mla, except:

    Args:
        top_k_blocks: int32 [bs, K]: blocks of sparse_block_size tokens, negative for none.
        host_cache_k: contiguous, rows (elements of the first dimension) of item_size_bytes.
        host_cache_v: the same, as many rows.
        device_buffer_k: contiguous memory of items (out).
        device_buffer_v: the same, as many rows (out).
        top_k_device_locs: int32 [bs, >= K * sparse_block_size] (out): token by token.
        lru_slots: int16 [reqs, H], K * sparse_block_size <= H.
        sparse_block_size: tokens of a block, >= 1.

    Source: SGLang's load_blocks_to_device_buffer_mha.
    """
    block_tokens = check_int("sparse_block_size", sparse_block_size, 1, INT32_MAX)
    pools = {
        "host_cache_k": host_cache_k,
        "host_cache_v": host_cache_v,
        "device_buffer_k": device_buffer_k,
        "device_buffer_v": device_buffer_v,
    }
    call = _check_swap_in(
        ("top_k_blocks", top_k_blocks),
        _check_pools(pools, item_size_bytes, of_items=True),
        "device_buffer_k",
        ("lru_slots", lru_slots),
        device_buffer_tokens=device_buffer_tokens,
        host_cache_locs=host_cache_locs,
        device_buffer_locs=device_buffer_locs,
        top_k_device_locs=top_k_device_locs,
        req_pool_indices=req_pool_indices,
        seq_lens=seq_lens,
        num_real_reqs=num_real_reqs,
        block_tokens=block_tokens,
    )
    _check_sizes("hot_buffer_size", hot_buffer_size, call.slots, "columns of lru_slots")
    _check_hints(page_size, block_size)
    _swap_in(call, check_bool("skip_io", skip_io))


# ----------------------------------------------------------------------------------------------------
# Several steps


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
    """Resolve two to four speculative steps of every request as one set, and load what is missing once.

    Arguments and errors as in load_cache_to_device_buffer_mla, except:

    Args:
        top_k_tokens: int32 [bs, steps, K], strides of rows and steps free.
        host_cache: contiguous, [host_rows, ...]; an element of the first dimension is an item.
        top_k_device_locs: int32 [bs, steps, K], strides of rows and steps free (out).
        seq_lens: int32 or int64 [bs * steps], contiguous: tokens that each step sees.
        state: HiSparseSpecState; H is the number of columns of cache_policy, K <= H <= 32768.
        miss_src: int64 [>= bs, >= steps * K] (out), likewise miss_dst.

    Source: SGLang's load_cache_to_device_buffer_spec_mla, whose locations are not deterministic; these are.
    """
    for name in ("cache_policy", "scratch_locs", "scratch_state"):
        if not hasattr(state, name):
            raise wrong_type("state", "a HiSparseSpecState", type(state).__name__)
    check_tensor("host_cache", host_cache)
    if host_cache.dim() == 0 or _row_bytes(host_cache) == 0:
        raise wrong_value("host_cache", "rows of at least 1 byte", f"shape {tuple(host_cache.shape)}")
    pools = {"host_cache": host_cache, "device_buffer": device_buffer}
    call = _check_swap_in(
        ("top_k_tokens", top_k_tokens),
        _check_pools(pools, _row_bytes(host_cache)),
        "device_buffer",
        ("state.cache_policy", state.cache_policy),
        device_buffer_tokens=device_buffer_tokens,
        host_cache_locs=host_cache_locs,
        device_buffer_locs=device_buffer_locs,
        top_k_device_locs=top_k_device_locs,
        req_pool_indices=req_pool_indices,
        seq_lens=seq_lens,
        num_real_reqs=num_real_reqs,
        miss_src=miss_src,
        miss_dst=miss_dst,
        miss_count=miss_count,
        several=True,
    )
    call.check("state.scratch_locs", state.scratch_locs, (torch.int32,), (None, None), "[>= reqs, capacity]")
    check_at_least("state.scratch_locs", state.scratch_locs, call.requests, "rows")
    check_unit_columns("state.scratch_locs", state.scratch_locs)
    call.check("state.scratch_state", state.scratch_state, (torch.int32,), (None, None), "[>= 1, >= reqs]")
    if state.scratch_state.shape[0] < 1 or state.scratch_state.shape[1] < call.requests:
        expected = f"at least 1 row of {call.requests} columns"
        raise wrong_value("state.scratch_state", expected, f"shape {tuple(state.scratch_state.shape)}")
    check_unit_columns("state.scratch_state", state.scratch_state)  # one row is written, so rows may overlap
    call.add_input("scratch", state.scratch_locs)
    call.add_output("state_misses", state.scratch_state)
    _swap_in(call, skip_io=False)


# ----------------------------------------------------------------------------------------------------
# Copies and translation


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
    """Make the copies of a recorded plan for another layer that shares the top-k. No state is looked at.

    Args:
        miss_src: int64 [rows, capacity], row stride free: host rows.
        miss_dst: int32 [rows, capacity], row stride of miss_src: device rows.
        miss_count: int32 [>= rows], contiguous: copies of every row.
        num_real_reqs: int32 [1]: rows from there on are padding; None: there are none.
        host_cache: as in load_cache_to_device_buffer_mla, or the dsv4 one, as is_dsv4_layout says.
        device_buffer: likewise (out).
        item_size_bytes: bytes of an item, 584 in DeepSeek-V4's pages.
        num_blocks: a hint, >= 1.
        block_size: a hint, >= 1.
        is_dsv4_layout: pools are DeepSeek-V4's pages.
        skip_io: copy nothing.

    Raises:
        TypeError: a wrong type or dtype.
        ValueError: a wrong device, shape, stride or number.

    Source: SGLang's copy_cache_planned_mla.
    """
    paged = check_bool("is_dsv4_layout", is_dsv4_layout)
    pools = _check_pools({"host_cache": host_cache, "device_buffer": device_buffer}, item_size_bytes, paged=paged)
    check_tensor("miss_src", miss_src, (torch.int64,), (2,))
    rows, capacity = miss_src.shape
    _check_plan(miss_src, miss_dst, miss_count, pools.device, "device_buffer", rows, capacity)
    check_shape("miss_dst", miss_dst, (rows, capacity), "[rows, capacity] (that of miss_src)")
    num_real = _check_num_real(num_real_reqs, rows, pools.device, "device_buffer")
    check_int("num_blocks", num_blocks, 1)
    check_int("block_size", block_size, 1)
    if check_bool("skip_io", skip_io):
        return
    src, dst, counts = miss_src.tolist(), miss_dst.tolist(), miss_count.tolist()
    listed = [min(max(counts[row], 0), capacity) if row < num_real else 0 for row in range(rows)]
    pools.copy([(src[row][m], dst[row][m]) for row in range(rows) for m in range(listed[row])])


def transfer_cache_dsv4_mla(
    src_ptrs: torch.Tensor,
    dst_ptrs: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    block_size: int = 1024,
) -> None:
    """Copy items of all layers between pools in DeepSeek-V4's pages, which are named by their addresses.

    Args:
        src_ptrs: uint64 [layers], contiguous: addresses of pools.
        dst_ptrs: uint64 [layers], contiguous.
        src_indices: int64 [N], contiguous: rows in the source pools.
        dst_indices: int64 [N], contiguous: rows in the target pools.
        block_size: a hint, >= 1.

    Here all four lie on the CPU, and the addresses are those of host memory.

    Raises:
        TypeError: a wrong type or dtype.
        ValueError: a wrong device, shape, stride or number.

    Source: SGLang's transfer_cache_dsv4_mla.
    """
    for name, tensor, dtype in (
        ("src_ptrs", src_ptrs, torch.uint64),
        ("dst_ptrs", dst_ptrs, torch.uint64),
        ("src_indices", src_indices, torch.int64),
        ("dst_indices", dst_indices, torch.int64),
    ):
        check_tensor(name, tensor, (dtype,), (1,))
        if tensor.device.type != "cpu":
            raise wrong_value(name, "a CPU tensor, as the reference can follow no other address", tensor.device)
        check_contiguous(name, tensor)
    check_shape("dst_ptrs", dst_ptrs, tuple(src_ptrs.shape), "[layers] (that of src_ptrs)")
    check_shape("dst_indices", dst_indices, tuple(src_indices.shape), "[N] (that of src_indices)")
    check_int("block_size", block_size, 1)
    for src_pool, dst_pool in zip(src_ptrs.tolist(), dst_ptrs.tolist(), strict=True):
        for src, dst in zip(src_indices.tolist(), dst_indices.tolist(), strict=True):
            if src < 0 or dst < 0:
                continue
            for (src_at, size), (dst_at, _) in zip(_paged_pieces(src), _paged_pieces(dst), strict=True):
                ctypes.memmove(dst_pool + dst_at, src_pool + src_at, size)


def _paged_pieces(row: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Offset and size of the value and of the scale of a row."""
    page, slot = divmod(row, PAGE_SLOTS)
    start = page * PAGE_BYTES
    return (start + slot * VALUE_BYTES, VALUE_BYTES), (start + SCALES_AT + slot * SCALE_BYTES, SCALE_BYTES)


def translate_padded_hisparse_locations(mapping: torch.Tensor, locations: torch.Tensor) -> torch.Tensor:
    """mapping[loc] for every location, in a new contiguous tensor; negative locations stay, those behind it give -1.

    mapping: int32 or int64 [size], contiguous. locations: int32 or int64 [count], any stride, on the same device. The
    result has the dtype that torch.promote_types gives for the two.

    Raises:
        TypeError: a wrong type or dtype.
        ValueError: a wrong device, shape or stride.

    Source: SGLang's translate_padded_hisparse_locations, which reads behind the mapping.
    """
    check_tensor("mapping", mapping, INTEGERS, (1,))
    check_contiguous("mapping", mapping)
    check_tensor("locations", locations, INTEGERS, (1,))
    check_device("locations", locations, mapping.device, "mapping")
    table = mapping.tolist()
    translated = [loc if loc < 0 else table[loc] if loc < len(table) else -1 for loc in locations.tolist()]
    dtype = torch.promote_types(mapping.dtype, locations.dtype)
    return torch.tensor(translated, dtype=dtype, device=mapping.device)
