"""What one step does to hot sets, for all rows at once in NumPy: cheap enough to be asked ten million times.

A row is one request: `held` [R, H] names the id in every slot (-1: none), `lru` [R, H] lists the slots from the oldest on.
A step asks for ids [R, C] (-1: none). Written from the contract in hotplan.reference, row for row, and from none of its
code.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

NONE = -1


class Resolved(NamedTuple):
    """Misses come row by row, in the order of the columns that name them first.

    Attributes:
        slot: [R, C], where every column's id is afterwards; -1: it asks for none, or its id found no slot.
        miss_number: [R, C], the number of the miss within its row, -1 where there is none.
        first: bool [R, C], the column that names a missing id first.
        row, number, wanted, victim: [misses]; victim is -1 where all slots of the row were hits or taken.
        counts: [R], misses of each row.
        held, lru: the state afterwards.
    """

    slot: np.ndarray
    miss_number: np.ndarray
    first: np.ndarray
    row: np.ndarray
    number: np.ndarray
    wanted: np.ndarray
    victim: np.ndarray
    counts: np.ndarray
    held: np.ndarray
    lru: np.ndarray


def resolve(held: np.ndarray, lru: np.ndarray, asked: np.ndarray, ids: int) -> Resolved:
    """One step; all ids are below `ids`."""
    rows, slots = held.shape
    r = np.arange(rows)[:, None]
    where = np.full((rows, ids), NONE, dtype=np.int32)
    row_of, slot_of = np.nonzero(held >= 0)
    where[row_of, held[row_of, slot_of]] = slot_of
    wanted = asked >= 0
    slot = np.where(wanted, where[r, np.maximum(asked, 0)], NONE)

    is_hit = np.zeros((rows, slots), dtype=bool)
    at = np.nonzero(slot >= 0)
    is_hit[at[0], slot[at]] = True

    missing = np.flatnonzero(wanted & (slot < 0))
    keys = missing // asked.shape[1] * ids + asked.ravel()[missing]
    unique, first_at, inverse = np.unique(keys, return_index=True, return_inverse=True)
    order = np.argsort(first_at)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    row, name = np.divmod(unique[order], ids)
    counts = np.bincount(row, minlength=rows)
    number = np.arange(len(row)) - (np.cumsum(counts) - counts)[row]
    first = np.zeros(asked.size, dtype=bool)
    first[missing[first_at]] = True

    in_order = is_hit[r, lru]
    age = np.cumsum(~in_order, axis=1) - 1  # of the slots that are no hits, from the oldest on
    oldest = np.take_along_axis(lru, np.argsort(in_order, axis=1, kind="stable"), axis=1)
    free = slots - is_hit.sum(axis=1)
    finds = number < free[row]
    victim = np.where(finds, oldest[row, np.minimum(number, slots - 1)], NONE)

    after = held.copy()
    after[row[finds], victim[finds]] = name[finds]
    loaded = ~in_order & (age < counts[:, None])
    places = np.argsort(np.where(in_order, 2, loaded), axis=1, kind="stable")
    slot.ravel()[missing] = victim[rank[inverse]]
    miss_number = np.full(asked.size, NONE)
    miss_number[missing] = number[rank[inverse]]
    return Resolved(
        slot,
        miss_number.reshape(asked.shape),
        first.reshape(asked.shape),
        row,
        number,
        name,
        victim,
        counts,
        after,
        np.take_along_axis(lru, places, axis=1),
    )


class Broken(AssertionError):
    """An invariant does not hold."""


def check(ok: object, what: str) -> None:
    if not ok:
        raise Broken(what)


def same(name: str, got: np.ndarray, expected: np.ndarray) -> None:
    """Raises Broken naming the first entry that differs."""
    check(got.shape == expected.shape, f"{name}: shape {got.shape}, expected {expected.shape}")
    if not np.array_equal(got, expected):
        at = tuple(np.argwhere(got != expected)[0].tolist())
        raise Broken(f"{name}{list(at)}: got {got[at]}, expected {expected[at]}")


def check_sets(held: np.ndarray, lru: np.ndarray) -> None:
    """Every LRU is a permutation of its slots, and no row holds an id twice."""
    ordered = np.sort(lru, axis=1)
    check((ordered == np.arange(lru.shape[1])).all(), "an LRU row is no permutation of its slots")
    ordered = np.sort(held, axis=1)
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    check(not twice.any(), "a row holds an id in two slots")


class Walk:
    """Which of its tokens every row asks for: the newest, a drifting set of favourites, and some of all the others."""

    def __init__(self, rng: np.random.Generator, rows: int, columns: int) -> None:
        self._rng = rng
        self._favourites = rng.random((rows, 3 * columns))  # as a share of the row's tokens, so that they stay in range

    def ask(self, columns: int, lengths: np.ndarray) -> np.ndarray:
        """int32 [rows, columns]: tokens below each row's length, some of them twice, some -1."""
        rng, rows = self._rng, len(lengths)
        drifting = rng.random(self._favourites.shape) < 0.01
        self._favourites[drifting] = rng.random(int(drifting.sum()))
        chosen = np.take_along_axis(self._favourites, rng.integers(self._favourites.shape[1], size=(rows, columns)), 1)
        kind = rng.random((rows, columns))
        share = np.where(kind < 0.7, chosen, rng.random((rows, columns)))
        tokens = (share * lengths[:, None]).astype(np.int32)
        newest = lengths[:, None] - 1 - rng.integers(4, size=(rows, columns))
        tokens = np.where(kind > 0.9, np.maximum(newest, 0), tokens)
        return np.where(kind > 0.98, NONE, tokens).astype(np.int32)

    def restart(self, row: int) -> None:
        self._favourites[row] = self._rng.random(self._favourites.shape[1])
