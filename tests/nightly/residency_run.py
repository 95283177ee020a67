"""A hot buffer (hotplan.HotBuffer, vLLM's addressing) over many steps, with all that must hold after each."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from hot_sets import Walk, check, check_sets, resolve, same

import hotplan

_PAGE = 16  # host rows of a page, where ids are positions
_WORD = 0x9E3779B97F4A7C15 - 2**64


class ResidencyRun:
    """Requests that grow token by token in pages of a host pool, leave when they are long, and are followed by others in
    the same pages. Every token of a step is rewritten in the host pool after the step, as in a server.

    `damage` is called between the operators and the checks: a test plants errors there.
    """

    name = "residency"

    def __init__(self, seed: int, damage: Callable[[ResidencyRun], object] | None = None) -> None:
        rng = self._rng = np.random.default_rng(seed)
        self._damage = damage
        self.union = int(rng.choice([1, 1, 2, 3]))  # rows of a request that are one set
        self.requests = int(rng.choice([16, 64, 128]))
        self.top_k = int(rng.choice([8, 31, 64]))
        least = self.union * self.top_k
        self.slots = least + int(rng.choice([0, 1, 33, least]))
        self.longest = 4 * _PAGE * (self.slots // _PAGE + 2)  # tokens
        pages = self.requests * (self.longest // _PAGE)
        self.host_rows = (pages + 1) * _PAGE  # page 0 is nobody's
        self.pool = torch.zeros((self.host_rows, 16), dtype=torch.uint8)
        self._words = self.pool.numpy().view(np.int64)
        self._generation = np.zeros(self.host_rows, dtype=np.int64)
        self._write(np.arange(self.host_rows))
        self.hot = hotplan.HotBuffer(
            self.pool,
            max_requests=self.requests,
            max_rows=self.requests * self.union,
            top_k=self.top_k,
            hot_slots=self.slots,
            block_size=int(rng.choice([1, 16, 64])),
            device="cpu",
        )
        self.pages = torch.from_numpy(1 + rng.permutation(pages).astype(np.int32).reshape(self.requests, -1))
        self._walk = Walk(rng, self.requests, self.top_k)
        self.lengths = rng.integers(self.union, self.longest, size=self.requests)
        for _ in range(self.requests):
            self.hot.admit()
        self._held = np.full((self.requests, self.slots), -1, dtype=np.int32)
        self._lru = np.tile(np.arange(self.slots, dtype=np.int16), (self.requests, 1))
        slot, table, size = np.arange(self.slots), self.hot.block_table.numpy(), self.hot.block_size
        self._row_of = table[:, slot // size] * size + slot % size  # [requests, H]
        self._total = np.zeros(2, dtype=np.int64)

    def describe(self) -> str:
        return f"{self.requests} requests, K={self.top_k}, H={self.slots}, {self.union} rows in a set"

    def _write(self, rows: np.ndarray) -> None:
        self._generation[rows] += 1
        base = (rows * 2**20 + self._generation[rows]) * _WORD
        self._words[rows] = np.stack([base, ~base], axis=1)

    def _host_rows(self, positions: np.ndarray) -> np.ndarray:
        """[requests, n] positions as host rows; -1 stays."""
        at = np.maximum(positions, 0)
        pages = np.take_along_axis(self.pages.numpy(), at // _PAGE, axis=1)
        return np.where(positions >= 0, pages * _PAGE + at % _PAGE, -1)

    def step(self) -> int:
        """One launch of all requests; how many rows it has."""
        self._turn_over()
        requests, union, top_k = self.requests, self.union, self.top_k
        self.lengths += union
        newest = self._host_rows(self.lengths[:, None] - 1 - np.arange(union))
        self._invalidate(newest, union)
        positions = self._walk.ask(union * top_k, self.lengths)
        asked = self._host_rows(positions)
        numbers = torch.arange(requests, dtype=torch.int32)
        if union == 1:
            self.hot.resolve(torch.from_numpy(asked.astype(np.int32)), numbers)
        else:
            self.hot.resolve(
                torch.from_numpy(positions.reshape(requests * union, top_k)),
                numbers.repeat_interleave(union),
                source_block_table=self.pages,
                source_block_size=_PAGE,
                max_union_rows=union,
            )
        self.hot.gather()
        if self._damage:
            self._damage(self)
        self._check(positions, asked)
        self._write(newest.ravel())  # a token's own row is written after it was resolved
        self._invalidate(newest, union)
        return requests * union

    def _turn_over(self) -> None:
        """Requests that are long leave, and new ones take their numbers."""
        for number in np.flatnonzero(self.lengths + self.union > self.longest).tolist():
            self.hot.release(number)
            check(self.hot.admit() == number, "a released number was not given again")
            self._held[number] = -1
            self._lru[number] = np.arange(self.slots)
            self.lengths[number] = self._rng.integers(self.union, self.longest // 2)
            self._walk.restart(number)
            positions = np.arange(self.lengths[number])  # the prompt, written by a prefill
            self._write(self.pages.numpy()[number, positions // _PAGE] * _PAGE + positions % _PAGE)

    def _invalidate(self, rows: np.ndarray, newest: int) -> None:
        """The newest tokens, host rows [requests, newest], are written: each request forgets its own."""
        numbers = np.repeat(np.arange(self.requests, dtype=np.int32), newest)
        self.hot.invalidate(torch.from_numpy(numbers), torch.from_numpy(rows.ravel().astype(np.int64)))
        self._held[self._held >= self.lengths[:, None] - newest] = -1

    def _check(self, positions: np.ndarray, asked: np.ndarray) -> None:
        hot, requests, union, top_k = self.hot, self.requests, self.union, self.top_k
        held, lru = hot.device_global_indices.numpy(), hot.lru_slots.numpy()
        check_sets(held, lru)
        # No two requests share a page, so positions do for ids, and tables stay small.
        expected = resolve(self._held, self._lru, positions, self.longest)
        same("device_global_indices", held, self._host_rows(expected.held))
        same("lru_slots", lru, expected.lru)

        shape = (requests, union * top_k)
        r = np.arange(requests)[:, None]
        place = np.where(expected.slot >= 0, self._row_of[r, np.maximum(expected.slot, 0)], -1)
        got = hot.hot_indices.numpy().reshape(shape)
        same("hot_indices", got, place)
        same("resolved_global_indices", hot.resolved_global_indices.numpy().reshape(shape), asked)
        same("miss_mask", hot.miss_mask.numpy().reshape(shape), expected.first.astype(np.int32))
        valid = (asked >= 0).reshape(-1, top_k).sum(axis=1)
        same("valid_counts", hot.valid_counts.numpy(), valid)
        # The m-th miss of a set is element m of its rows' lists, one after the other.
        counts = np.clip(expected.counts[:, None] - np.arange(union) * top_k, 0, top_k).ravel()
        same("swap_counts", hot.swap_counts.numpy(), counts)
        listed = hot.swap_host_physical_rows.numpy().reshape(shape)[expected.row, expected.number]
        wanted = self._host_rows(np.where(expected.first, positions, -1))[expected.first]
        same("swap_host_physical_rows", listed, wanted)
        listed = hot.swap_device_physical_rows.numpy().reshape(shape)[expected.row, expected.number]
        same("swap_device_physical_rows", listed, self._row_of[expected.row, expected.victim])

        references, misses = int(valid.sum()), len(expected.row)
        self._total += references - misses, misses
        check(tuple(hot.stats()) == tuple(self._total), f"stats: got {tuple(hot.stats())}, expected {self._total}")

        cache = hot.caches[0].view(-1, 16).numpy().view(np.int64)
        wanted = positions >= 0
        same("rows at hot_indices", cache[got[wanted]], self._words[asked[wanted]])
        full = held >= 0
        same("rows of all slots", cache[self._row_of[full]], self._words[held[full]])
        self._held, self._lru = expected.held, expected.lru
