"""What ``--check`` checks, step by step.

1. Every plan equals the reference's, byte for byte.
2. The plans do their job: a model of the state rings follows which token's state each ring row holds. Whatever a plan
   says to read must hold exactly the tokens of that window, whatever prefix sharing, page reuse and undone drafts did.
3. The server around them is honest: every token is computed once, in a slot that nobody else writes, cached prefixes
   hold the prompt's own tokens, and (now and then) every page and row has exactly the holders that are counted.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from hotplan.plans import PrefillPlan, compress_rows, decode_rows, valid, write_rows
from hotplan.replay.pool import check
from hotplan.replay.scheduler import Request, Scheduler, Step
from hotplan.replay.settings import RATIOS, Settings
from hotplan.replay.steps import Built, PlanBuilder
from hotplan.replay.trace import BLOCK_TOKENS, TraceRecord

AUDIT_EVERY = 256
"""Steps between two audits of all pages, rows and counts."""

_WINDOW = {4: 8, 128: 128}
_NOTHING = -1  # never written
_REJECTED = -2  # a draft that was undone: no window may ever read it


class CheckError(AssertionError):
    """A step whose plans or tables are wrong; the message names the step and what differs."""


class TokenIds:
    """One number per token content, so that a ring row or a slot can say whose it is.

    Prompt blocks that requests share have the same ids, everything else is the request's own.
    """

    def __init__(self, trace_length: int, rows: int, settings: Settings) -> None:
        self._extra = settings.draft_tokens
        self._tags = np.zeros((rows, -(-trace_length // BLOCK_TOKENS) + 1), dtype=np.int64)
        self._owner = [-1] * rows
        self._chains: dict[tuple[int, int], int] = {}
        self._private: dict[int, np.ndarray] = {}
        self._next = 1

    def _fresh(self) -> int:
        self._next += 1
        return self._next

    def _tags_of(self, index: int, record: TraceRecord) -> np.ndarray:
        if index not in self._private:
            tags: list[int] = []
            tag = 0
            for key in record.hash_ids[: record.input_length // BLOCK_TOKENS]:
                tag = self._chains.setdefault((tag, key), self._fresh())
                tags.append(tag)
            blocks = -(-(record.input_length + record.output_length + self._extra) // BLOCK_TOKENS)
            tags += [self._fresh() for _ in range(blocks - len(tags))]
            self._private[index] = np.array(tags, dtype=np.int64)
        return self._private[index]

    def place(self, requests: Iterable[Request]) -> None:
        """Learns which request sits in which row."""
        for request in requests:
            if self._owner[request.row] != request.index:
                tags = self._tags_of(request.index, request.record)
                self._tags[request.row, : len(tags)] = tags
                self._owner[request.row] = request.index

    def of(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Ids of tokens; negative positions give the id of position 0."""
        positions = np.maximum(positions, 0)
        ids: np.ndarray = self._tags[rows, positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS
        return ids


class RingModel:
    """The contents of one ratio's state rings, as token ids, driven by plans the way the compressor kernels are."""

    def __init__(self, ratio: int, ring_rows: int, ids: TokenIds) -> None:
        self.ratio = ratio
        self._window = _WINDOW[ratio]
        self._ids = ids
        self._ring = np.full(ring_rows, _NOTHING, dtype=np.int64)

    def prefill(self, step: Step, compress: np.ndarray, write: np.ndarray) -> None:
        """A prefill, verify or mixed step. The compressor reads old rows before any new ones are written."""
        request = np.repeat(np.arange(len(step.rows)), step.extend)
        j = np.arange(len(request)) - np.repeat(np.cumsum(step.extend) - step.extend, step.extend)
        position = step.prefix[request] + j
        rows = step.rows[request]

        token = compress["ragged_id"].astype(np.int64)
        seq = compress["seq_len"].astype(np.int64)
        check(bool((seq == position[token] + 1).all()), f"c{self.ratio} compress plan: a row is not its token's")
        # The ring has those tokens of the window that this step does not bring.
        first = seq - self._window
        old = np.clip(step.prefix[request[token]] - first, 0, self._window)
        check(bool((compress["buffer_len"] == old).all()), f"c{self.ratio} compress plan: wrong buffer_len")
        reads = old > 0
        pages = np.stack([compress["read_page_0"], compress["read_page_1"]], axis=1).astype(np.int64)
        self._read(rows[token[reads]], seq[reads], old[reads], pages[reads])

        token = write["ragged_id"].astype(np.int64)
        stays = j[token] < step.accepted[request[token]]
        contents = np.where(stays, self._ids.of(rows[token], position[token]), _REJECTED)
        self._write(write["write_loc"], contents)

    def decode(self, step: Step, rows: np.ndarray) -> None:
        """A decode step: every request's newest token is written first, then windows that it closes are read."""
        seq = step.seq
        check(bool((rows["seq_len"] == seq).all()), f"c{self.ratio} decode plan: wrong seq_len")
        self._write(rows["write_loc"], self._ids.of(step.rows, seq - 1))
        closes = seq % self.ratio == 0
        pages = np.stack([rows["read_page_0"], rows["read_page_1"]], axis=1).astype(np.int64)
        whole = np.full(len(seq), self._window, dtype=np.int64)
        self._read(step.rows[closes], seq[closes], whole[closes], pages[closes])

    def _write(self, locations: np.ndarray, contents: np.ndarray) -> None:
        check(not len(locations) or int(locations.min()) >= 0, f"c{self.ratio}: a token is written nowhere")
        check(len(np.unique(locations)) == len(locations), f"c{self.ratio}: two tokens are written to one ring row")
        self._ring[locations] = contents

    def _read(self, rows: np.ndarray, seq: np.ndarray, old: np.ndarray, pages: np.ndarray) -> None:
        """The first `old` tokens of windows that end before position `seq` [n], from the two ring pages [n, 2]."""
        if not len(rows):
            return
        i = np.arange(self._window)
        position = seq[:, None] - self._window + i
        wanted = (i < old[:, None]) & (position >= 0)
        newer = position >= seq[:, None] - self.ratio  # the page of the closing token, else the one before
        page = np.where(newer, pages[:, 1:], pages[:, :1])
        check(bool((page[wanted] >= 0).all()), f"c{self.ratio}: a window is read from nowhere")
        held = self._ring[np.where(wanted, page * self.ratio + position % self.ratio, 0)]
        lost = wanted & (held != self._ids.of(rows[:, None], position))
        if lost.any():
            n, k = np.argwhere(lost)[0]
            what = {_NOTHING: "nothing", _REJECTED: "a rejected draft"}.get(int(held[n, k]), "another token")
            raise AssertionError(
                f"c{self.ratio}: the window that ends at position {seq[n] - 1} of row {rows[n]} needs position"
                f" {position[n, k]}, the ring holds {what}"
            )


class StepChecker:
    """Checks steps in order: `before` the plans are used, `after` the step is committed."""

    def __init__(self, scheduler: Scheduler, builder: PlanBuilder, longest: int) -> None:
        settings, tables = scheduler.settings, scheduler.tables
        self._scheduler = scheduler
        self._builder = builder
        self._ids = TokenIds(longest, settings.max_running + 1, settings)
        self._rings = {}
        for ratio, ring in zip(RATIOS, settings.ring_sizes, strict=True):
            by_page = ratio == 4 and not settings.req_ring
            rings = scheduler.pool.state.count if by_page else settings.max_running + 1
            self._rings[ratio] = RingModel(ratio, rings * ring, self._ids)
        self._slots = np.full(len(tables.host_full_to_state), _NOTHING, dtype=np.int64)
        self._next: dict[int, tuple[int, int]] = {}  # request -> (admission, next position)
        self.steps = 0
        self.plans = 0

    def before(self, step: Step, built: Built) -> None:
        try:
            self._compare(step, built)
            self._ids.place(step.requests)
            self._tokens(step)
            self._use(step, built)
        except AssertionError as error:
            raise CheckError(f"{describe_step(step)}: {error}") from None
        self.steps += 1

    def after(self, step: Step) -> None:
        if step.index % AUDIT_EVERY == AUDIT_EVERY - 1:
            try:
                self._scheduler.audit()
            except AssertionError as error:
                raise CheckError(f"after {describe_step(step)}: {error}") from None

    def finish(self) -> None:
        try:
            self._scheduler.drain()
        except AssertionError as error:
            raise CheckError(f"after the last step: {error}") from None

    def _compare(self, step: Step, built: Built) -> None:
        expected = self._builder.expected(step)
        for ratio in RATIOS:
            ours, theirs = _tensors(built.plans[ratio]), _tensors(expected[ratio])
            for kind, got in ours.items():
                self.plans += 1
                if not torch.equal(got.cpu(), theirs[kind]):
                    difference = _difference(kind, got, theirs[kind])
                    raise AssertionError(f"c{ratio} {kind} plan differs from the reference: {difference}")

    def _tokens(self, step: Step) -> None:
        page_size = self._scheduler.settings.page_size
        pool, table = self._scheduler.pool, self._scheduler.tables.host_req_to_token.numpy()
        for i, request in enumerate(step.requests):
            prefix, seq = int(step.prefix[i]), int(step.prefix[i] + step.extend[i])
            admission, position = self._next.get(request.index, (0, 0))
            if admission != request.admissions:
                possible = prefix % BLOCK_TOKENS == 0 and prefix < request.target
                check(possible, f"request {request.index}: begins with a prefix of {prefix} of {request.target} tokens")
                slots, positions = table[request.row, :prefix], np.arange(prefix)
                same = self._slots[slots] == self._ids.of(np.full(prefix, request.row), positions)
                check(bool(same.all()), f"request {request.index}: its cached prefix holds another prompt's tokens")
            else:
                check(prefix == position, f"request {request.index}: computes from {prefix}, not from {position}")
            for page in request.pages[prefix // page_size : (seq - 1) // page_size + 1]:
                check(pool.holders(page) == 1, f"request {request.index}: writes to page {page}, which others hold")
            self._next[request.index] = (request.admissions, prefix + int(step.accepted[i]))
        owner = np.repeat(np.arange(len(step.rows)), step.extend)  # of every token, as an index of the step
        j = np.arange(len(owner)) - np.repeat(np.cumsum(step.extend) - step.extend, step.extend)
        rows, positions = step.rows[owner], step.prefix[owner] + j
        slots = table[rows, positions]
        check(len(np.unique(slots)) == len(slots), "two tokens are computed in one slot")
        self._slots[slots] = np.where(j < step.accepted[owner], self._ids.of(rows, positions), _REJECTED)

    def _use(self, step: Step, built: Built) -> None:
        for ratio, ring in self._rings.items():
            plan = built.plans[ratio]
            if isinstance(plan, torch.Tensor):
                ring.decode(step, decode_rows(plan)[: len(step.rows)])
            else:
                compress, write = compress_rows(plan.compress), write_rows(plan.write)
                ring.prefill(step, compress[valid(compress)], write[valid(write)])


def describe_step(step: Step) -> str:
    return f"step {step.index} ({step.kind}, {len(step.requests)} requests, {step.tokens} tokens)"


def _tensors(plan: PrefillPlan | torch.Tensor) -> dict[str, torch.Tensor]:
    return plan._asdict() if isinstance(plan, PrefillPlan) else {"decode": plan}


def _difference(kind: str, got: torch.Tensor, want: torch.Tensor) -> str:
    """The first row that differs, in words."""
    if got.shape != want.shape:
        return f"shape {list(got.shape)}, expected {list(want.shape)}"
    view = {"compress": compress_rows, "write": write_rows, "decode": decode_rows}[kind]
    ours, theirs = view(got), view(want)
    rows = np.flatnonzero(ours != theirs)
    return f"{len(rows)} of {len(ours)} rows, first row {rows[0]}: got {ours[rows[0]]}, expected {theirs[rows[0]]}"
