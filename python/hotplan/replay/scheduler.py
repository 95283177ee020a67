"""The serving loop: which requests run in the next forward step, and what a step changes.

First come, first served. Prompts are prefilled in chunks under a token budget, several requests to a step; prefill and
decode steps take turns while both have work (or share a step, with `mixed`). With draft tokens every decode step is a
verify step that may be partly undone. Where slots run out, the request admitted last gives everything back and waits
again, to be prefilled anew with what it had generated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from hotplan.replay.pool import SlotPool, Tables, check
from hotplan.replay.prefix import Node, PrefixCache
from hotplan.replay.settings import Settings
from hotplan.replay.trace import BLOCK_TOKENS, TraceRecord

PADDING_ROW = 0
"""Row of req_to_token that no request gets."""

_MAX_TABLE_BYTES = 32 * 2**30


@dataclass(eq=False)
class Request:
    """One request of the trace on its way through the server."""

    index: int
    record: TraceRecord
    row: int = -1  # of req_to_token; -1 while it waits
    pages: list[int] = field(default_factory=list)  # full pages, by position // page_size
    state_from: int = 0  # pages from here on are in the window: their state is held
    nodes: list[Node] = field(default_factory=list)  # cached blocks that its prompt goes through
    computed: int = 0  # tokens whose KV is in the slots
    generated: int = 0  # tokens given to the user
    target: int = 0  # tokens to prefill: the prompt, and after a retraction what was generated
    admissions: int = 0

    @property
    def prefilling(self) -> bool:
        return self.computed < self.target


@dataclass(eq=False)
class Step:
    """One forward step; arrays are int64 [requests]. Request i computes positions prefix[i] .. seq[i] - 1."""

    index: int
    kind: str  # prefill, decode, verify or mixed
    start_ms: float
    requests: list[Request]
    rows: np.ndarray
    prefix: np.ndarray
    extend: np.ndarray
    accepted: np.ndarray  # tokens that stay, drawn in advance so that a checker can know: extend but in verify steps

    @property
    def seq(self) -> np.ndarray:
        end: np.ndarray = self.prefix + self.extend
        return end

    @property
    def tokens(self) -> int:
        return int(self.extend.sum())


@dataclass
class Counters:
    """What happened so far, in tokens unless said."""

    finished: int = 0  # requests
    prompt: int = 0  # prompt tokens of admitted requests
    prefix_hits: int = 0  # of those, found in the cache
    generated: int = 0
    rejected: int = 0  # drafts undone
    retractions: int = 0  # requests


class Scheduler:
    """Steps of a trace, one after the other: ``while (step := s.next_step()): ...; s.commit(step)``."""

    def __init__(self, trace: Sequence[TraceRecord], settings: Settings, device: torch.device | str = "cpu") -> None:
        self.settings = settings
        self.now_ms = 0.0
        self.counters = Counters()
        page = settings.page_size
        longest = max(r.input_length + r.output_length for r in trace) + settings.draft_tokens
        full_pages = _pages(settings.slots or max(2**22, 2 * longest), page)
        # What the first in line can need at once: a chunk of prompt, its window, and pages begun on either side.
        least_state = _pages(settings.token_budget, page) + _pages(settings.window, page) + 3 + 2 * settings.step_tokens
        state_pages = _pages(settings.state_slots, page) if settings.state_slots else max(full_pages // 4, least_state)
        for name, pages, least in (
            ("slots", full_pages, _pages(longest, page) + 2),
            ("state_slots", state_pages, least_state),
        ):
            if pages < least:
                raise ValueError(f"{name}: expected at least {least * page} for this trace, got {pages * page}")
        rows = settings.max_running + 1
        size = 4 * rows * _pages(longest, page) * page + 8 * full_pages * page
        if size > _MAX_TABLE_BYTES or full_pages * page >= 2**31:
            raise ValueError(
                f"max_running: expected at most {_MAX_TABLE_BYTES // 2**30} GiB of tables and 2147483647 slots, got"
                f" {size / 2**30:.0f} GiB for {settings.max_running} requests of {longest} tokens and"
                f" {full_pages * page} slots"
            )
        # Page 0 of either pool is padding's, hence one more.
        self.tables = Tables(rows, longest, full_pages + 1, page, torch.device(device))
        self.pool = SlotPool(full_pages + 1, state_pages + 1, self.tables)
        self.cache = PrefixCache(self.pool, page, settings.window)
        self.running: list[Request] = []  # in the order of admission
        self.waiting: deque[Request] = deque()
        self._arriving = deque(Request(i, r) for i, r in enumerate(sorted(trace, key=lambda r: r.timestamp)))
        self._free_rows = list(range(rows - 1, PADDING_ROW, -1))
        self._rng = np.random.default_rng(settings.seed)
        self._index = 0
        self._prefilled_last = False

    # -- choosing a step -----------------------------------------------------------------------------------------------

    def next_step(self) -> Step | None:
        """The next step, its slots allocated and the tables written; None when every request is finished."""
        while True:
            while self._arriving and self._arriving[0].record.timestamp <= self.now_ms:
                self.waiting.append(self._arriving.popleft())
            step = self._choose()
            if step is not None:
                self.tables.flush()
                return step
            if self.running or self.waiting:
                raise RuntimeError(
                    f"the server is stuck with {len(self.running)} running and {len(self.waiting)} waiting requests:"
                    f" {self.pool.full.free} full and {self.pool.state.free} state pages are free"
                )
            if not self._arriving:
                return None
            self.now_ms = max(self.now_ms, self._arriving[0].record.timestamp)  # idle until somebody comes

    def _choose(self) -> Step | None:
        if self.settings.mixed:
            generating = self._generating()
            chunks = self._prefill(self.settings.token_budget - len(generating) * self.settings.step_tokens)
            generating = [r for r in generating if r.row >= 0]  # a chunk's pages may have cost somebody theirs
            return self._step(generating, chunks)
        if self._prefilled_last:
            return self._decode_step() or self._prefill_step()
        return self._prefill_step() or self._decode_step()

    def _prefill_step(self) -> Step | None:
        return self._step([], self._prefill(self.settings.token_budget))

    def _decode_step(self) -> Step | None:
        return self._step(self._generating(), [])

    def _generating(self) -> list[Request]:
        """All requests past their prompt, each with slots for its next tokens; retracts others until they fit."""
        while True:
            requests = [r for r in self.running if not r.prefilling]
            need = sum(self._missing_pages(r, r.computed + self.settings.step_tokens) for r in requests)
            if need == 0 or self.cache.make_room(need, need):
                break
            self._retract()
        for request in requests:
            self._grow(request, request.computed + self.settings.step_tokens)
        return requests

    def _prefill(self, budget: int) -> list[tuple[Request, int]]:
        """Chunks of prompts, first of those begun, then of new requests, and slots for them."""
        chunks: list[tuple[Request, int]] = []
        for request in [r for r in self.running if r.prefilling]:
            if budget == 0:
                return chunks
            if request.row < 0:
                break  # it and all after it were just retracted
            chunk = min(budget, request.target - request.computed)
            if not self._room_for_chunk(request, chunk):
                return chunks
            self._grow(request, request.computed + chunk)
            chunks.append((request, chunk))
            budget -= chunk
        while budget and self.waiting and self._free_rows and self._admit():
            request = self.running[-1]
            chunk = min(budget, request.target - request.computed)
            need = self._missing_pages(request, request.computed + chunk)
            if not self.cache.make_room(need, need):
                break  # it stays admitted; later steps make room for it
            self._grow(request, request.computed + chunk)
            chunks.append((request, chunk))
            budget -= chunk
        return chunks

    def _room_for_chunk(self, request: Request, chunk: int) -> bool:
        """Room for a chunk of a prompt already begun, if need be at the cost of requests admitted after it."""
        need = self._missing_pages(request, request.computed + chunk)
        while not self.cache.make_room(need, need):
            if self.running[-1] is request:
                return False
            self._retract()
        return True

    def _admit(self) -> bool:
        """Gives the first waiting request a row and its cached prefix, if its whole prompt can be expected to fit."""
        request = self.waiting[0]
        record = request.record
        request.target = record.input_length + request.generated
        # The last token is always computed, hence the - 1; a partial block has a hash id but cannot be shared.
        most = min(record.input_length, request.target - 1) // BLOCK_TOKENS
        nodes = self.cache.match(record.hash_ids, most) if self.settings.prefix_cache else []
        for node in nodes:
            self.cache.use(node)
        promised = sum(self._missing_pages(r, r.target) for r in self.running if r.prefilling) + len(self.running)
        fresh = _pages(request.target, self.settings.page_size) - len(nodes) * BLOCK_TOKENS // self.settings.page_size
        if self.running and promised + fresh + 1 > self.pool.full.free + self.cache.evictable_pages:
            for node in reversed(nodes):
                self.cache.unuse(node)
            return False
        self.waiting.popleft()
        self.running.append(request)
        request.admissions += 1
        request.row = self._free_rows.pop()
        request.nodes = nodes
        request.pages = [page for node in nodes for page in node.pages]
        request.computed = len(nodes) * BLOCK_TOKENS
        request.state_from = self._window_page(request.computed)
        for page in request.pages:
            self.pool.hold(page)
        for page in request.pages[request.state_from :]:
            self.pool.hold_state(page)
        self.tables.map_row(request.row, 0, request.pages)
        self.counters.prompt += request.target
        self.counters.prefix_hits += request.computed
        return True

    def _step(self, generating: list[Request], chunks: list[tuple[Request, int]]) -> Step | None:
        requests = generating + [request for request, _ in chunks]
        if not requests:
            return None
        verify = self.settings.draft_tokens > 0
        extend = [self.settings.step_tokens] * len(generating) + [chunk for _, chunk in chunks]
        accepted = [self._accept(request) for request in generating] + [chunk for _, chunk in chunks]
        kind = "mixed" if generating and chunks else "prefill" if chunks else "verify" if verify else "decode"
        self._prefilled_last = bool(chunks)
        self._index += 1
        return Step(
            index=self._index - 1,
            kind=kind,
            start_ms=self.now_ms,
            requests=requests,
            rows=np.array([r.row for r in requests], dtype=np.int64),
            prefix=np.array([r.computed for r in requests], dtype=np.int64),
            extend=np.array(extend, dtype=np.int64),
            accepted=np.array(accepted, dtype=np.int64),
        )

    def _accept(self, request: Request) -> int:
        """Tokens that a decode or verify step leaves: drafts up to the first rejected one, and one more."""
        drafts = self.settings.draft_tokens
        if drafts == 0:
            return 1
        wrong = np.flatnonzero(self._rng.random(drafts) >= self.settings.accept_rate)
        kept = int(wrong[0]) if len(wrong) else drafts
        return min(kept + 1, request.record.output_length - request.generated)

    # -- what a step changes -------------------------------------------------------------------------------------------

    def commit(self, step: Step) -> None:
        """Ends a step: moves the clock, keeps what was accepted, caches blocks, moves windows, frees what is done."""
        self.now_ms = step.start_ms + self.settings.cost.step_ms(step.tokens)
        finished = False
        for request, accepted, extend in zip(step.requests, step.accepted.tolist(), step.extend.tolist(), strict=True):
            prefilling = request.prefilling
            request.computed += accepted
            if prefilling:
                if self.settings.prefix_cache:
                    self._cache_blocks(request)
                new = 0 if request.prefilling else 1
            else:
                new = accepted
                self.counters.rejected += extend - accepted
                self._undo(request)
            request.generated += new
            self.counters.generated += new
            if request.generated >= request.record.output_length:
                self._release(request)
                self.counters.finished += 1
                finished = True
            else:
                self._move_window(request)
        if finished:
            self.running = [r for r in self.running if r.row >= 0]

    def _cache_blocks(self, request: Request) -> None:
        """Puts the prompt blocks that this chunk completed into the prefix cache."""
        per_block = BLOCK_TOKENS // self.settings.page_size
        full_blocks = min(request.computed, request.record.input_length) // BLOCK_TOKENS
        for k in range(len(request.nodes), full_blocks):
            pages = request.pages[k * per_block : (k + 1) * per_block]
            parent = request.nodes[-1] if request.nodes else None
            node = self.cache.insert(parent, request.record.hash_ids[k], pages)
            self.cache.use(node)
            request.nodes.append(node)

    def _undo(self, request: Request) -> None:
        """Gives back pages that only rejected drafts had begun."""
        while len(request.pages) > _pages(request.computed, self.settings.page_size):
            page = request.pages.pop()
            self.pool.drop_state(page)
            self.pool.drop(page)

    def _move_window(self, request: Request) -> None:
        start = min(self._window_page(request.computed), len(request.pages))
        for page in request.pages[request.state_from : start]:
            self.pool.drop_state(page)
        request.state_from = max(request.state_from, start)

    def _release(self, request: Request) -> None:
        """Gives back everything a request holds. Its row of req_to_token keeps its old slots."""
        for page in request.pages[request.state_from :]:
            self.pool.drop_state(page)
        for page in request.pages:
            self.pool.drop(page)
        for node in reversed(request.nodes):
            self.cache.unuse(node)
        self._free_rows.append(request.row)
        request.row, request.pages, request.nodes = -1, [], []
        request.computed = request.state_from = 0

    def _retract(self) -> None:
        if len(self.running) < 2:
            raise RuntimeError("the only running request does not fit into the slots")  # sizes are checked at the start
        victim = self.running.pop()
        self._release(victim)
        self.waiting.appendleft(victim)
        self.counters.retractions += 1

    # -- slots ---------------------------------------------------------------------------------------------------------

    def _window_page(self, computed: int) -> int:
        """The first page with a token that the next token's window, or a plan's lookback, still reaches."""
        return max(computed - self.settings.window, 0) // self.settings.page_size

    def _missing_pages(self, request: Request, seq: int) -> int:
        return max(_pages(seq, self.settings.page_size) - len(request.pages), 0)

    def _grow(self, request: Request, seq: int) -> None:
        missing = self._missing_pages(request, seq)
        if missing:
            first = len(request.pages)
            request.pages += [self.pool.take() for _ in range(missing)]
            self.tables.map_row(request.row, first, request.pages[first:])

    def window_pages(self) -> int:
        """State pages that lie in the window of some running request."""
        return len({page for request in self.running for page in request.pages[request.state_from :]})

    def audit(self) -> None:
        """Checks every holder, count, free list and table against each other. Raises AssertionError."""
        full, state = self.cache.held()
        users: dict[Node, int] = {}
        rows = set(self._free_rows)
        check(len(rows) == len(self._free_rows) and PADDING_ROW not in rows, "free rows of req_to_token are wrong")
        for request in self.running:
            full += request.pages
            state += request.pages[request.state_from :]
            check(request.row > 0 and request.row not in rows, f"request {request.index} has no row of its own")
            rows.add(request.row)
            mapped = self.tables.row_pages_of(request.row, len(request.pages))
            check(mapped == request.pages, f"req_to_token: row {request.row} does not hold its request's pages")
            for node in request.nodes:
                users[node] = users.get(node, 0) + 1
        check(len(rows) == self.settings.max_running, "a row of req_to_token is lost")
        for node in self.cache.nodes():
            check(node.users == users.pop(node, 0), "users of a cached block are miscounted")
        check(not users, "a request uses a block that is not cached")
        self.pool.audit(full, state)

    def drain(self) -> None:
        """After the last step: empties the cache and checks that every slot and row came back."""
        self.cache.clear()
        self.audit()
        check(self.pool.full.used == 0 and self.pool.state.used == 0, "slots are lost")


def _pages(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size)
