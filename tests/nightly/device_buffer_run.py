"""The device buffer (SGLang's addressing), one step or several speculative ones, with all that must hold after each."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from hot_sets import NONE, Walk, check, check_sets, resolve, same

from hotplan import hisparse


class DeviceBufferRun:
    """Requests that grow token by token and are followed by others in the same row of the tables. The newest tokens lie
    in the slots behind the LRU, where the server writes them before each step.

    `damage` is called between the operator and the checks: a test plants errors there.
    """

    name = "device_buffer"

    def __init__(self, seed: int, damage: Callable[[DeviceBufferRun], object] | None = None) -> None:
        rng = self._rng = np.random.default_rng(seed)
        self._damage = damage
        self.steps = int(rng.choice([1, 1, 2, 4]))
        self.requests = int(rng.choice([16, 64, 128]))
        self.top_k = int(rng.choice([8, 31, 64]))
        self.slots = self.top_k + int(rng.choice([0, 1, 33, 2 * self.top_k]))
        self.extra = 1 if self.steps == 1 else self.steps
        self.longest = 6 * self.slots + 64
        width = self.slots + self.extra
        columns = self.steps * self.top_k
        scratch = columns if self.steps > 1 else 0
        owned = rng.permutation(self.requests * (width + scratch)).astype(np.int32).reshape(self.requests, -1)
        self.locs = torch.from_numpy(np.ascontiguousarray(owned[:, :width]))
        self.scratch_locs = torch.from_numpy(np.ascontiguousarray(owned[:, width:]))
        self.host_locs = torch.from_numpy(
            rng.permutation(self.requests * self.longest).astype(np.int64).reshape(self.requests, -1)
        )
        words = rng.integers(-(2**62), 2**62, size=(self.requests * self.longest, 2))
        self._words = words
        self.host = torch.from_numpy(words)
        self.device = torch.full((owned.size, 2), -1, dtype=torch.int64)
        self._expected_device = self.device.numpy().copy()
        self.tokens = torch.full((self.requests, width), -1, dtype=torch.int32)
        self._held = np.full((self.requests, self.slots), -1, dtype=np.int32)
        order = np.tile(np.arange(self.slots), (self.requests, 1))
        if self.steps > 1:
            # Zeros, as SGLang has them: repaired to 1, 2, ..., 0 by the first call of a row.
            order = np.roll(order, -1, axis=1)
            self.policy = torch.zeros((self.requests + 1, self.slots), dtype=torch.int32)
            self.scratch_state = torch.zeros((1, self.requests), dtype=torch.int32)
        else:
            self.lru_slots = torch.from_numpy(order.astype(np.int16))
        self._lru = order
        self.out = torch.empty((self.requests, self.steps, self.top_k), dtype=torch.int32)
        self.miss_src = torch.zeros((self.requests, columns), dtype=torch.int64)
        self.miss_dst = torch.zeros((self.requests, columns), dtype=torch.int32)
        self.miss_count = torch.zeros(self.requests, dtype=torch.int32)
        self.lengths = rng.integers(self.steps, self.longest - self.steps, size=self.requests)
        self._walk = Walk(rng, self.requests, self.top_k)

    def describe(self) -> str:
        return f"{self.requests} requests, K={self.top_k}, H={self.slots}, {self.steps} steps at once"

    @property
    def lru(self) -> torch.Tensor:
        return self.lru_slots if self.steps == 1 else self.policy[1:]

    def step(self) -> int:
        """One launch of all requests; how many rows it has."""
        self._turn_over()
        self.lengths += self.steps
        self._serve_newest()
        # The length of every step: the last one sees all tokens.
        seen = self.lengths[:, None] - self.steps + 1 + np.arange(self.steps)
        asked = np.stack([self._walk.ask(self.top_k, seen[:, i]) for i in range(self.steps)], axis=1)
        rid = torch.arange(self.requests)
        common = {
            "device_buffer_tokens": self.tokens,
            "host_cache_locs": self.host_locs,
            "device_buffer_locs": self.locs,
            "host_cache": self.host,
            "device_buffer": self.device,
            "req_pool_indices": rid,
            "seq_lens": torch.from_numpy(seen.ravel()),
            "num_real_reqs": None,
            "miss_src": self.miss_src,
            "miss_dst": self.miss_dst,
            "miss_count": self.miss_count,
        }
        if self.steps == 1:
            hisparse.load_cache_to_device_buffer_mla(
                top_k_tokens=torch.from_numpy(asked[:, 0]),
                top_k_device_locs=self.out[:, 0],
                lru_slots=self.lru_slots,
                item_size_bytes=16,
                num_top_k=self.top_k,
                hot_buffer_size=self.slots,
                **common,
            )
        else:
            state = hisparse.HiSparseSpecState(torch.zeros(0), self.policy, self.scratch_locs, self.scratch_state)
            hisparse.load_cache_to_device_buffer_spec_mla(
                top_k_tokens=torch.from_numpy(asked), top_k_device_locs=self.out, state=state, **common
            )
        if self._damage:
            self._damage(self)
        self._check(asked, seen)
        return self.requests * self.steps

    def _turn_over(self) -> None:
        """Requests that are long leave; a new one begins with a hot buffer that holds nothing."""
        for request in np.flatnonzero(self.lengths + self.steps > self.longest).tolist():
            self.tokens[request] = -1
            self._held[request] = -1
            order = np.arange(self.slots)
            self.lru[request] = torch.from_numpy(order).to(self.lru.dtype)
            self._lru[request] = order
            self.lengths[request] = self._rng.integers(self.steps, self.longest // 2)
            self._walk.restart(request)

    def _newest(self) -> np.ndarray:
        """[requests, extra]: the token in every slot behind the LRU, -1 where the request is too short for it."""
        return np.maximum(self.lengths[:, None] - 1 - np.arange(self.extra), NONE)

    def _serve_newest(self) -> None:
        """The server's part before a launch: newest tokens, and those of short requests, are in their slots."""
        newest = self._newest()
        slots = np.arange(self.slots, self.slots + self.extra)
        if self.steps > 1:
            self.tokens[:, self.slots :] = torch.from_numpy(newest.astype(np.int32))
        self._put(newest, np.broadcast_to(slots, newest.shape))
        if self.steps == 1:
            short = self.lengths <= self.slots
            tokens = np.tile(np.arange(self.slots), (self.requests, 1))
            inside = short[:, None] & (tokens < self.lengths[:, None])
            # A request that grows past its slots finds them all named, as a server leaves them.
            held = np.where(inside, tokens, self._held)
            changed = short[:, None] & (held != self._held)
            self._held = held.astype(np.int32)
            self.tokens[:, : self.slots][torch.from_numpy(changed)] = torch.from_numpy(self._held[changed])
            self._put(np.where(inside, tokens, NONE), tokens)

    def _put(self, tokens: np.ndarray, slots: np.ndarray) -> None:
        rows, at = np.nonzero(tokens >= 0)
        words = self._words[self.host_locs.numpy()[rows, tokens[rows, at]]]
        where = self.locs.numpy()[rows, slots[rows, at]]
        self.device.numpy()[where] = words
        self._expected_device[where] = words

    def _check(self, asked: np.ndarray, seen: np.ndarray) -> None:
        tokens, locs, host_locs = self.tokens.numpy(), self.locs.numpy(), self.host_locs.numpy()
        held, lru = tokens[:, : self.slots], self.lru.numpy()
        r = np.arange(self.requests)[:, None]
        flat = asked.reshape(self.requests, -1)
        newest = self._newest()
        short = np.zeros((self.requests, 1), dtype=bool) if self.steps > 1 else seen <= self.slots
        behind = self.lengths[:, None] - 1 - flat  # which slot behind the LRU would hold it
        is_new = (flat >= 0) & (behind < self.extra) & ~short
        pending = np.where(is_new | short, NONE, flat)
        expected = resolve(self._held, self._lru, pending, self.longest)

        # Several steps: a row that asks nothing of its LRU does not read it, so zeros stay what they are.
        reads = (pending >= 0).any(axis=1)
        check_sets(held, lru[reads])
        same("device_buffer_tokens", held, expected.held)
        same("lru", lru[reads].astype(np.int64), expected.lru[reads])
        named = newest if self.steps > 1 else np.full_like(newest, NONE)
        same("tokens behind the LRU", tokens[:, self.slots :], named)

        at = np.where(expected.slot >= 0, locs[r, np.maximum(expected.slot, 0)], NONE)
        if self.steps > 1:
            free = self.slots - (self.slots_hit(expected))
            spilled = expected.miss_number - free[:, None]
            spills = (expected.miss_number >= 0) & (spilled >= 0)
            at = np.where(spills, self.scratch_locs.numpy()[r, np.maximum(spilled, 0)], at)
        at = np.where(is_new, locs[r, self.slots + np.clip(behind, 0, self.extra - 1)], at)
        if self.steps == 1:
            column = np.arange(self.top_k)
            known = short & (flat >= 0) & (column < seen)
            at = np.where(known, locs[r, np.clip(flat, 0, self.slots)], np.where(short, NONE, at))
        got = self.out.numpy().reshape(flat.shape)
        same("top_k_device_locs", got, at)

        same("miss_count", self.miss_count.numpy(), expected.counts)
        if self.steps > 1:
            same("scratch_state", self.scratch_state.numpy()[0], expected.counts)
        sources = host_locs[expected.row, expected.wanted]
        same("miss_src", self.miss_src.numpy()[expected.row, expected.number], sources)
        first = np.nonzero(expected.first)
        targets = np.full(len(expected.row), NONE)
        offset = np.cumsum(expected.counts) - expected.counts
        targets[offset[first[0]] + expected.miss_number[first]] = at[first]
        same("miss_dst", self.miss_dst.numpy()[expected.row, expected.number], targets)

        # The copies, and no others: newest tokens, other requests and rows of the plan's past keep every byte.
        self._expected_device[targets] = self._words[sources]
        same("device_buffer", self.device.numpy(), self._expected_device)
        answered = (flat >= 0) & (got >= 0)
        wanted = host_locs[r, np.maximum(flat, 0)]
        same("rows at top_k_device_locs", self.device.numpy()[got[answered]], self._words[wanted[answered]])
        check((answered == (flat >= 0))[~short[:, 0]].all(), "a token was not given a row")
        self._held = expected.held
        self._lru = np.where(reads[:, None], expected.lru, self._lru)

    def slots_hit(self, expected) -> np.ndarray:
        """Slots of every row that were hits."""
        hit = np.zeros((self.requests, self.slots), dtype=bool)
        rows, columns = np.nonzero((expected.slot >= 0) & (expected.miss_number < 0))
        hit[rows, expected.slot[rows, columns]] = True
        return hit.sum(axis=1)
