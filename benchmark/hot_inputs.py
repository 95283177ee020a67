"""Inputs of the HiSparse benchmarks: host memory in which every item says where it came from, and batches of requests
as they are after many steps, with what a step asks of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

TOP_K, HOT_SLOTS = 2048, 4096
PAGE = 64  # rows of a hot block, of a page of the host pool, and of the page for the newest tokens of a request
CONTEXT = 16384  # tokens of every request
GIB = 1 << 30

# us for resolving and copying one layer of 576-byte rows, by requests and percent of misses, with 4096 hot slots.
GOALS: dict[tuple[int, int], float] = {
    (1, 0): 5,
    (1, 2): 9,
    (1, 10): 12,
    (1, 50): 24,
    (1, 100): 35,
    (8, 2): 12,
    (8, 100): 204,
    (32, 2): 23,
    (32, 10): 84,
    (128, 0): 7,
    (128, 2): 69,
    (128, 10): 315,
}


@dataclass(frozen=True)
class Case:
    """A batch in which each request misses ``percent`` of its top-k. ``goal`` is in us."""

    requests: int
    percent: int
    goal: float | None = None
    hot_slots: int = HOT_SLOTS

    @property
    def name(self) -> str:
        return f"{self.requests}, {self.percent} %" + (f", H {self.hot_slots}" if self.hot_slots != HOT_SLOTS else "")

    @property
    def misses(self) -> int:
        """Of one request."""
        return round(TOP_K * self.percent / 100)

    @property
    def resolve_goal(self) -> float:
        return 5 if self.requests == 1 else 7

    def bytes(self, item_bytes: int) -> int:
        return self.requests * self.misses * item_bytes


# --- Bytes ---


@dataclass(frozen=True)
class Layout:
    """How items lie in a pool: back to back, or in DeepSeek-V4's pages, which hold 64 values of 576 bytes, then the 64
    scales of 8 bytes that belong to them, then 64 bytes that are not used. All sizes are multiples of 8."""

    item_bytes: int
    paged: bool = False

    PAGE_WORDS = 37440 // 8
    VALUE_WORDS = 576 // 8

    @property
    def name(self) -> str:
        return f"{self.item_bytes}, dsv4 pages" if self.paged else str(self.item_bytes)

    def rows(self, size: int) -> int:
        """Items that fit into ``size`` bytes."""
        return size // (self.PAGE_WORDS * 8) * PAGE if self.paged else size // self.item_bytes

    def shape(self, rows: int) -> tuple[int, int]:
        """A uint8 pool of ``rows`` items (paged: whole pages of them)."""
        return (rows // PAGE, self.PAGE_WORDS * 8) if self.paged else (rows, self.item_bytes)

    def words(self, rows: torch.Tensor) -> torch.Tensor:
        """int64 ``[n, item_bytes / 8]``: where the words of items lie in a pool that is seen as one row of words."""
        rows = rows.to(torch.int64)[:, None]
        inside = torch.arange(self.item_bytes // 8, device=rows.device)
        if not self.paged:
            return rows * (self.item_bytes // 8) + inside
        page, slot = rows // PAGE * self.PAGE_WORDS, rows % PAGE
        values = page + slot * self.VALUE_WORDS + inside
        return torch.where(inside < self.VALUE_WORDS, values, page + PAGE * self.VALUE_WORDS + slot)

    def read(self, pool: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """int64 ``[n, item_bytes / 8]``: the words of items."""
        words = pool.view(torch.int64).view(-1)
        return words[self.words(rows)] if self.paged else words.view(-1, self.item_bytes // 8)[rows.long()]

    def write(self, pool: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> None:
        """Set the words of items, which must be distinct."""
        words = pool.view(torch.int64).view(-1)
        if self.paged:
            words[self.words(rows)] = values
        else:
            words.view(-1, self.item_bytes // 8)[rows.long()] = values


class Pool:
    """Host memory in which every 8 bytes hold their own index, so that a copied item says where it came from."""

    def __init__(self, size: int, *, pinned: bool) -> None:
        self.bytes = torch.empty(size // 8 * 8, dtype=torch.uint8, pin_memory=pinned)
        torch.arange(size // 8, out=self.bytes.view(torch.int64))

    def rows(self, layout: Layout) -> torch.Tensor:
        """All whole items of a layout, in the shape that it gives them."""
        shape = layout.shape(layout.rows(self.bytes.shape[0]))
        return self.bytes[: shape[0] * shape[1]].view(shape)


def check_bytes(pool: torch.Tensor, layout: Layout, rows: torch.Tensor, ids: torch.Tensor, where: str) -> None:
    """Raise AssertionError unless row ``rows[i]`` of a pool holds the bytes of host row ``ids[i]``, for every i."""
    rows, ids = rows.flatten(), ids.flatten()
    limit = layout.rows(pool.numel())
    outside = (rows < 0) | (rows >= limit)
    if bool(outside.any()):
        at = int(torch.nonzero(outside)[0])
        raise AssertionError(f"{where}: entry {at}: hot row {int(rows[at])}, wanted one of {limit}")
    differs = (layout.read(pool, rows) != layout.words(ids)).any(dim=1)
    if bool(differs.any()):
        at = int(torch.nonzero(differs)[0])
        raise AssertionError(f"{where}: entry {at}: hot row {int(rows[at])} does not hold host row {int(ids[at])}")


def check_equal(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], where: str) -> None:
    """Raise AssertionError naming the first element that differs."""
    for name, tensor in got.items():
        differs = tensor != wanted[name]
        if bool(differs.any()):
            at = tuple(torch.nonzero(differs)[0].tolist())
            raise AssertionError(f"{where}: {name}{list(at)}: {int(tensor[at])}, wanted {int(wanted[name][at])}")


# --- Batches ---


class State:
    """Tensors in one allocation, which one launch of one small kernel puts back as they were."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        flat = torch.cat([t.contiguous().view(torch.uint8).flatten() for t in tensors])
        self._words = flat.view(torch.int64)
        # Kept inverted: with bitwise_not the way back is a kernel. A copy would become a memcpy node, between which
        # and a kernel a graph has other gaps than between two kernels.
        self._inverse = ~self._words
        pieces = flat.split([t.nbytes for t in tensors])
        self.tensors = [p.view(t.dtype).view(t.shape) for p, t in zip(pieces, tensors, strict=True)]

    def reset(self) -> None:
        torch.bitwise_not(self._inverse, out=self._words)


def shuffled(count: int, size: int, generator: torch.Generator) -> torch.Tensor:
    """int64 ``[count, size]``: a permutation per row."""
    return torch.rand((count, size), generator=generator, device=generator.device).argsort(dim=1)


def random_pages(count: int, host_rows: int, generator: torch.Generator) -> torch.Tensor:
    """int64 ``[count, CONTEXT / PAGE]``: random host pages for contexts. Page 0 means "none" in a table."""
    return 1 + shuffled(count, host_rows // PAGE - 1, generator)[:, : CONTEXT // PAGE]


def rows_of(pages: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The host rows of positions, both ``[requests, ...]``."""
    return pages.gather(1, positions // PAGE) * PAGE + positions % PAGE


def random_device_rows(count: int, slots: int, generator: torch.Generator) -> torch.Tensor:
    """int32 ``[count, slots]``: the row that every slot owns, in whole pages in random order."""
    pages = torch.randperm(count * (slots // PAGE), generator=generator, device=generator.device)
    inside = torch.arange(PAGE, device=generator.device)
    return (pages.view(count, -1, 1) * PAGE + inside).flatten(1).to(torch.int32)


class Requests:
    """One input set: what a batch owns after many steps. Nothing is shared between sets but the host pool.

    ``ids`` int64 ``[R, H + K]`` are distinct per request: the first H are in the hot buffer, in shuffled LRU order,
    and the others are not. ``positions`` are their places in the context, which ``source_table`` maps to host pages.
    """

    def __init__(
        self,
        ids: torch.Tensor,
        generator: torch.Generator,
        positions: torch.Tensor | None = None,
        source_table: torch.Tensor | None = None,
    ) -> None:
        self.ids, self.positions, self.source_table = ids, positions, source_table
        self.count, self.hot_slots = ids.shape[0], ids.shape[1] - TOP_K
        device = ids.device
        self.blocks = self.hot_slots // PAGE + 1  # per request; the last is SGLang's, for the newest token
        self.rows = random_device_rows(self.count, self.blocks * PAGE, generator)  # [R, H + PAGE]
        self.hot_table = self.rows[:, : self.hot_slots : PAGE] // PAGE
        self.request_ids = torch.arange(self.count, dtype=torch.int32, device=device)
        self.cached = ids[:, : self.hot_slots].to(torch.int32)
        self.order = shuffled(self.count, self.hot_slots, generator).to(torch.int16)
        self.state = State(self.cached, self.order)
        self.dgi, self.lru = self.state.tensors

    def hot_cache(self, layout: Layout) -> torch.Tensor:
        """Memory for the hot buffers of one layer."""
        shape = layout.shape(self.count * self.blocks * PAGE)
        return torch.empty(shape, dtype=torch.uint8, device=self.ids.device)

    def fill(self, hot_cache: torch.Tensor, layout: Layout) -> None:
        """The host's bytes in every hot row that holds an id, junk in the others."""
        hot_cache.fill_(0xA5)
        rows, ids = self.rows[:, : self.hot_slots], self.ids[:, : self.hot_slots]
        layout.write(hot_cache, rows.flatten(), layout.words(ids.flatten()))

    @property
    def page_options(self) -> dict[str, Any]:
        """The arguments by which positions become ids."""
        return {
            "request_ids": self.request_ids,
            "source_block_table": self.source_table,
            "source_block_size": PAGE,
        }

    @cached_property
    def by_token(self) -> TokenTables:
        return TokenTables(self)


class TokenTables:
    """The same requests in SGLang's addressing: what is asked for are positions, and tables are per token."""

    def __init__(self, of: Requests) -> None:
        device = of.ids.device
        newest = torch.full((of.count, PAGE), -1, dtype=torch.int32, device=device)
        cached = of.positions[:, : of.hot_slots].to(torch.int32)
        self.state = State(torch.cat([cached, newest], dim=1), of.order)
        self.tokens, self.lru = self.state.tensors
        self.host_locs = rows_of(of.source_table.long(), torch.arange(CONTEXT, device=device).expand(of.count, -1))
        self.device_locs = of.rows
        self.requests = torch.arange(of.count, device=device)
        self.seq_lens = torch.full((of.count,), CONTEXT, device=device)
        self.num_requests = torch.full((1,), of.count, dtype=torch.int32, device=device)


def random_requests(case: Case, host_rows: int, index: int, device: torch.device) -> Requests:
    """Contexts in random host pages, of which random tokens are in the hot buffer."""
    generator = torch.Generator(device=device).manual_seed(1009 * case.requests + case.hot_slots + index)
    # The last token of a context is the newest, which SGLang keeps apart.
    positions = shuffled(case.requests, CONTEXT - 1, generator)[:, : case.hot_slots + TOP_K]
    pages = random_pages(case.requests, host_rows, generator)
    return Requests(rows_of(pages, positions), generator, positions, pages.to(torch.int32))


class Step:
    """A decode step of a set: ``misses`` of the top-k ids are not hot, in shuffled columns."""

    def __init__(self, requests: Requests, misses: int, index: int) -> None:
        device = requests.ids.device
        generator = torch.Generator(device=device).manual_seed(7919 * misses + index)
        count, slots = requests.count, requests.hot_slots
        hits = shuffled(count, slots, generator)[:, : TOP_K - misses]
        fresh = torch.arange(slots, slots + misses, device=device).expand(count, misses)
        chosen = torch.cat([hits, fresh], dim=1).gather(1, shuffled(count, TOP_K, generator))
        self.missing = chosen >= slots
        self.ids = requests.ids.gather(1, chosen).to(torch.int32)
        positions = requests.positions
        self.positions = None if positions is None else positions.gather(1, chosen).to(torch.int32)
        self.hot = torch.empty((count, TOP_K), dtype=torch.int32, device=device)
        self.swap_host, self.swap_device = torch.empty_like(self.hot), torch.empty_like(self.hot)
        self.counts = torch.empty(count, dtype=torch.int32, device=device)

    @property
    def lists(self) -> dict[str, torch.Tensor]:
        return {
            "swap_host_physical_rows": self.swap_host,
            "swap_device_physical_rows": self.swap_device,
            "swap_counts": self.counts,
        }
