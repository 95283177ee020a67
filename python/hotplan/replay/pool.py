"""Paged token slots and the tables that the plans read.

A *full* page holds the slots of `page_size` consecutive tokens for as long as anybody needs their KV. A *state* page
(SWA slots, where the c4 rings live) stands behind a full page only while those tokens are in somebody's sliding window.
Both are counted by their holders: running requests and the prefix cache. Page 0 of either pool is never handed out;
padding rows point there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch


class PageList:
    """Free pages 1..count-1 of one pool. The page freed last is used first: stale entries are met again soon."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count - 1, 0, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.count - 1 - len(self._free)

    def take(self) -> int:
        return self._free.pop()

    def give(self, page: int) -> None:
        self._free.append(page)

    def audit(self, used: set[int], name: str) -> None:
        """Raises AssertionError unless exactly the pages in `used` are out."""
        free = set(self._free)
        check(len(free) == len(self._free), f"{name}: a page is free twice")
        check(not free & used, f"{name}: pages {sorted(free & used)[:5]} are free and in use")
        check(len(free) + len(used) == self.count - 1, f"{name}: {self.used} pages are out, {len(used)} have a holder")


def check(ok: bool, message: str) -> None:
    """An assertion that stays on under ``python -O``."""
    if not ok:
        raise AssertionError(message)


class Tables:
    """req_to_token int32 [rows, width] and full_to_state int64 [full slots], written a page at a time.

    The copies on the host are the truth; ``flush`` brings the pages that changed to the device's copies (the same
    tensors where the device is the CPU). Freed rows of req_to_token keep their old slots, as in a server; freed state
    pages read -1 in full_to_state.
    """

    def __init__(self, rows: int, width: int, full_pages: int, page_size: int, device: torch.device) -> None:
        self.page_size = page_size
        self.row_pages = -(-width // page_size)
        self.device = device
        self.host_req_to_token = torch.zeros((rows, self.row_pages * page_size), dtype=torch.int32)
        self.host_full_to_state = torch.full((full_pages * page_size,), -1, dtype=torch.int64)
        self._token_pages = self.host_req_to_token.view(-1, page_size).numpy()
        self._state_pages = self.host_full_to_state.view(-1, page_size).numpy()
        self._offsets = np.arange(page_size, dtype=np.int64)
        self._state_pages[0] = self._offsets  # what padding rows read
        self.on_host = device.type == "cpu"
        self.req_to_token = self.host_req_to_token if self.on_host else self.host_req_to_token.to(device)
        self.full_to_state = self.host_full_to_state if self.on_host else self.host_full_to_state.to(device)
        self._changed_tokens: set[int] = set()
        self._changed_states: set[int] = set()

    def map_row(self, row: int, first: int, pages: Sequence[int]) -> None:
        """Row `row` holds `pages` from its page `first` on."""
        if not pages:
            return
        start = row * self.row_pages + first
        slots = np.asarray(pages, dtype=np.int64)[:, None] * self.page_size + self._offsets
        self._token_pages[start : start + len(pages)] = slots
        if not self.on_host:
            self._changed_tokens.update(range(start, start + len(pages)))

    def map_state(self, page: int, state_page: int) -> None:
        """Full page `page` has state page `state_page`, or none (-1)."""
        self._state_pages[page] = -1 if state_page < 0 else state_page * self.page_size + self._offsets
        if not self.on_host:
            self._changed_states.add(page)

    def flush(self) -> None:
        for changed, host, there in (
            (self._changed_tokens, self.host_req_to_token, self.req_to_token),
            (self._changed_states, self.host_full_to_state, self.full_to_state),
        ):
            if changed:
                index = torch.tensor(sorted(changed), dtype=torch.int64)
                values = host.view(-1, self.page_size)[index].to(self.device)
                there.view(-1, self.page_size)[index.to(self.device)] = values
                changed.clear()

    def audit(self, state_of: Sequence[int]) -> None:
        """Raises AssertionError unless full_to_state says exactly this state page (-1: none) of every page but page 0,
        and the device's tables equal the host's."""
        expected = np.asarray(state_of, dtype=np.int64)[:, None]
        expected = np.where(expected < 0, -1, expected * self.page_size + self._offsets)
        wrong = np.flatnonzero((self._state_pages != expected).any(axis=1)[1:]) + 1
        check(not len(wrong), f"full_to_state: wrong slots for pages {wrong[:5].tolist()}")
        if not self.on_host:
            self.flush()
            check(torch.equal(self.req_to_token.cpu(), self.host_req_to_token), "req_to_token differs on the device")
            check(torch.equal(self.full_to_state.cpu(), self.host_full_to_state), "full_to_state differs on the device")

    def row_pages_of(self, row: int, count: int) -> list[int]:
        """The first `count` pages of a row, read back from its slots."""
        start = row * self.row_pages
        pages: list[int] = (self._token_pages[start : start + count, 0] // self.page_size).tolist()
        return pages


class SlotPool:
    """Full and state pages with their holders counted, kept in step with full_to_state."""

    def __init__(self, full_pages: int, state_pages: int, tables: Tables) -> None:
        self.full = PageList(full_pages)
        self.state = PageList(state_pages)
        self._tables = tables
        self._holders = [0] * full_pages
        self._state_holders = [0] * full_pages
        self._state_of = [-1] * full_pages

    def take(self) -> int:
        """A fresh full page with a state page, one holder each. The caller has made sure that both exist."""
        page = self.full.take()
        self._holders[page] = self._state_holders[page] = 1
        self._state_of[page] = self.state.take()
        self._tables.map_state(page, self._state_of[page])
        return page

    def hold(self, page: int) -> None:
        check(self._holders[page] > 0, f"full page {page} is held after it was freed")
        self._holders[page] += 1

    def hold_state(self, page: int) -> None:
        check(self._state_holders[page] > 0, f"state of page {page} is held after it was freed")
        self._state_holders[page] += 1

    def drop_state(self, page: int) -> None:
        self._state_holders[page] -= 1
        check(self._state_holders[page] >= 0, f"state of page {page} is dropped twice")
        if self._state_holders[page] == 0:
            self.state.give(self._state_of[page])
            self._state_of[page] = -1
            self._tables.map_state(page, -1)

    def drop(self, page: int) -> None:
        """Drops a holder of a full page; holders of its state must have let go of that first."""
        self._holders[page] -= 1
        check(self._holders[page] >= 0, f"full page {page} is dropped twice")
        if self._holders[page] == 0:
            check(self._state_holders[page] == 0, f"full page {page} is freed while its state is held")
            self.full.give(page)

    def holders(self, page: int) -> int:
        return self._holders[page]

    def state_holders(self, page: int) -> int:
        return self._state_holders[page]

    def audit(self, holders: Iterable[int], state_holders: Iterable[int]) -> None:
        """Raises AssertionError unless counts, free lists and full_to_state agree with the holders given one by one."""
        full, state = [0] * self.full.count, [0] * self.full.count
        for page in holders:
            full[page] += 1
        for page in state_holders:
            state[page] += 1
        check(full == self._holders, "full pages: counted holders differ from the real ones")
        check(state == self._state_holders, "state pages: counted holders differ from the real ones")
        alive = [page for page, count in enumerate(state) if count]
        self.full.audit({page for page, count in enumerate(full) if count}, "full pages")
        self.state.audit({self._state_of[page] for page in alive}, "state pages")
        check(len({self._state_of[page] for page in alive}) == len(alive), "two full pages share a state page")
        self._tables.audit(self._state_of)
