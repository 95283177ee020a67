"""An LRU row as a list of slots, oldest first: repair, and the partition into hits and victims."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass


def repaired_lru(slots: list[int], hot_slots: int) -> list[int]:
    """A permutation of 0..H-1: the row itself if it is one.

    Of a slot that occurs several times the most recent occurrence counts, slots outside [0, H) are dropped, and
    slots that are missing come back as the oldest, in ascending order.
    """
    seen: set[int] = set()
    kept: list[int] = []
    for slot in reversed(slots):
        if 0 <= slot < hot_slots and slot not in seen:
            seen.add(slot)
            kept.append(slot)
    kept.reverse()
    return [slot for slot in range(hot_slots) if slot not in seen] + kept


@dataclass(frozen=True)
class Partition:
    """The slots of one LRU row, each part in its old order."""

    slot_of: dict[int, int]
    """The slot of every id that was found."""
    hits: list[int]
    victims: list[int]

    def renewed(self, loads: int) -> list[int]:
        """The order after the first `loads` victims took the misses: unused victims, loaded slots, hits."""
        return self.victims[loads:] + self.victims[:loads] + self.hits


def partition(lru: list[int], held: list[int], wanted: Container[int]) -> Partition:
    """Find the wanted ids among those that the slots hold; `lru` may be corrupt.

    An id in several slots is found in the most recently used one; its other copies are ordinary victims.
    """
    order = repaired_lru(lru, len(lru))
    # Walking from the oldest slot, a later copy of an id replaces an earlier one.
    slot_of = {held[slot]: slot for slot in order if held[slot] in wanted}
    hit_slots = set(slot_of.values())
    return Partition(
        slot_of,
        hits=[slot for slot in order if slot in hit_slots],
        victims=[slot for slot in order if slot not in hit_slots],
    )
