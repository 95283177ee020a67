"""HiSparse residency: hotplan beside SGLang's kernel, built in the same run.

    python benchmark/bench_hisparse.py --sglang PATH --out benchmark/results/NAME.jsonl

See benchmark/README.md for what is measured and how.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch

import peers
import report
import timing
from common_options import chosen_sections, parser_for
from hotplan import hisparse, jit
from hotplan.reference import hisparse as reference

TOP_K = peers.HISPARSE_TOP_K
HOT_SLOTS = peers.HISPARSE_HOT_SLOTS
PAGE = 64  # rows of a hot block, and of a page of the host pool
CONTEXT = 16384  # tokens of every request
ROW_BYTES = (576, 656, 1152)
GIB = 1 << 30
# Distinct multiples of 4096 below the end of a pool that nothing is copied from.
CLUSTER = 4096
CLUSTER_IDS = 8192
REFERENCE_REQUESTS = 8  # up to so many requests the plain-Python reference checks, above it the CPU backend
# The goals hold for 576-byte rows and a link that gathers them at this rate.
GOAL_ROW_BYTES, GOAL_RATE = 576, 48.7

Call = Callable[[], Any]
COLUMNS = ("requests, misses", "ids")
HOST_ROWS, POSITIONS = "host rows", "positions and pages"


@dataclass(frozen=True)
class Case:
    """A batch in which each request misses ``percent`` of its top-k. ``goal`` is that of swap_in in us."""

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

    def bytes(self, row_bytes: int) -> int:
        return self.requests * self.misses * row_bytes


CASES = (
    Case(1, 0, 5),
    Case(1, 2, 9),
    Case(1, 10, 12),
    Case(1, 50, 24),
    Case(1, 100, 35),
    Case(8, 2, 12),
    Case(8, 100, 204),
    Case(32, 2, 23),
    Case(32, 10, 84),
    Case(128, 0, 7),
    Case(128, 2, 69),
    Case(128, 10, 315),
)
QUICK = {(1, 2), (1, 100), (128, 2)}
BY_POSITION = {(1, 2), (32, 2), (128, 0), (128, 2)}
CLUSTERED = {(1, 2), (1, 100), (128, 2)}
ON_CPU, QUICK_ON_CPU = {(1, 2), (1, 100), (8, 2), (32, 10)}, {(1, 2), (1, 100)}
SWEEP = (
    *(Case(requests, percent) for percent in (2, 10) for requests in (1, 2, 4, 8, 16, 32, 64, 128, 256)),
    *(Case(requests, 2, hot_slots=10240) for requests in (1, 32, 128)),
)


# --- Inputs ---


class Pool:
    """Host memory in which every 8 bytes hold their own index, so that a copied row says where it came from."""

    def __init__(self, size: int, *, pinned: bool) -> None:
        self.bytes = torch.empty(size // 8 * 8, dtype=torch.uint8, pin_memory=pinned)
        torch.arange(size // 8, out=self.bytes.view(torch.int64))

    def rows(self, row_bytes: int) -> torch.Tensor:
        """uint8 ``[rows, row_bytes]``."""
        count = self.bytes.shape[0] // row_bytes
        return self.bytes[: count * row_bytes].view(count, row_bytes)


def words_of(ids: torch.Tensor, row_bytes: int) -> torch.Tensor:
    """int64 ``[n, row_bytes / 8]``: what the pool's rows ``ids`` hold."""
    words = row_bytes // 8
    return ids.to(torch.int64)[:, None] * words + torch.arange(words, device=ids.device)


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
        order = torch.randperm(self.count * self.blocks, generator=generator, device=device)
        self.block_table = order.view(self.count, self.blocks).to(torch.int32)
        self.hot_table = self.block_table[:, :-1]
        inside = torch.arange(PAGE, device=device, dtype=torch.int32)
        self.rows = (self.block_table[:, :, None] * PAGE + inside).flatten(1)  # [R, H + PAGE] hot row of every slot
        self.request_ids = torch.arange(self.count, dtype=torch.int32, device=device)
        self.cached = ids[:, : self.hot_slots].to(torch.int32)
        self.order = shuffled(self.count, self.hot_slots, generator).to(torch.int16)
        self.state = State(self.cached, self.order)
        self.dgi, self.lru = self.state.tensors

    def hot_cache(self, row_bytes: int) -> torch.Tensor:
        """Memory for the hot buffers of one layer, uint8 ``[blocks, PAGE, row_bytes]``."""
        shape = (self.count * self.blocks, PAGE, row_bytes)
        return torch.empty(shape, dtype=torch.uint8, device=self.ids.device)

    def fill(self, hot_cache: torch.Tensor) -> None:
        """The host's bytes in every hot row that holds an id."""
        row_bytes = hot_cache.shape[-1]
        ids = torch.zeros(hot_cache.shape[0] * PAGE, dtype=torch.int64, device=hot_cache.device)
        ids[self.rows[:, : self.hot_slots].flatten().long()] = self.ids[:, : self.hot_slots].flatten()
        words = row_bytes // 8
        inside = torch.arange(words, device=hot_cache.device)
        torch.add((ids * words)[:, None], inside, out=hot_cache.view(torch.int64).view(-1, words))

    @property
    def page_options(self) -> dict[str, Any]:
        """The arguments by which positions become ids."""
        return {
            "request_ids": self.request_ids,
            "source_block_table": self.source_table,
            "source_block_size": PAGE,
        }

    @cached_property
    def theirs(self) -> TheirRequests:
        return TheirRequests(self)


class TheirRequests:
    """The same requests as SGLang's kernel wants them: its ids are positions, and its tables are per token."""

    def __init__(self, ours: Requests) -> None:
        device = ours.ids.device
        newest = torch.full((ours.count, PAGE), -1, dtype=torch.int32, device=device)
        cached = ours.positions[:, : ours.hot_slots].to(torch.int32)
        self.state = State(torch.cat([cached, newest], dim=1), ours.order)
        self.tokens, self.lru = self.state.tensors
        positions = torch.arange(CONTEXT, device=device)
        pages = ours.source_table[:, positions // PAGE].to(torch.int64)
        self.host_locs = pages * PAGE + positions % PAGE
        self.device_locs = ours.rows
        self.requests = torch.arange(ours.count, device=device)
        self.seq_lens = torch.full((ours.count,), CONTEXT, device=device)
        self.num_requests = torch.full((1,), ours.count, dtype=torch.int32, device=device)


def random_requests(case: Case, host_rows: int, index: int, device: torch.device) -> Requests:
    """Contexts in random host pages, of which random tokens are in the hot buffer. Page 0 means "none" in a table."""
    generator = torch.Generator(device=device).manual_seed(1009 * case.requests + case.hot_slots + index)
    # The last token of a context is the newest, which SGLang keeps apart.
    positions = shuffled(case.requests, CONTEXT - 1, generator)[:, : case.hot_slots + TOP_K]
    pages = 1 + shuffled(case.requests, host_rows // PAGE - 1, generator)[:, : CONTEXT // PAGE]
    ids = pages.gather(1, positions // PAGE) * PAGE + positions % PAGE
    return Requests(ids, generator, positions, pages.to(torch.int32))


def clustered_requests(case: Case, index: int, device: torch.device) -> Requests:
    """Ids whose low 12 bits are equal."""
    generator = torch.Generator(device=device).manual_seed(1009 * case.requests + index)
    ids = CLUSTER * shuffled(case.requests, CLUSTER_IDS, generator)[:, : case.hot_slots + TOP_K]
    return Requests(ids, generator)


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


def expect(requests: Requests, step: Step, host_rows: int, lib: Any) -> dict[str, torch.Tensor]:
    """What ``lib``, the reference or the CPU backend, gives for a step, on the device of the inputs. No row is read,
    so rows of 16 bytes that nobody wrote stand for both caches."""
    host = torch.empty((host_rows, 16), dtype=torch.uint8)
    hot = torch.empty((requests.count * requests.blocks, PAGE, 16), dtype=torch.uint8)
    wanted = {name: torch.zeros(step.ids.shape, dtype=torch.int32) for name in ("hot", "swap_host", "swap_device")}
    wanted["counts"] = torch.zeros(requests.count, dtype=torch.int32)
    wanted["dgi"], wanted["lru"] = requests.cached.cpu().clone(), requests.order.cpu().clone()
    lib.resolve_residency(
        host, hot, requests.hot_table.cpu(), step.ids.cpu(), wanted["hot"], wanted["dgi"], wanted["lru"],
        swap_host_physical_rows=wanted["swap_host"], swap_device_physical_rows=wanted["swap_device"],
        swap_counts=wanted["counts"],
    )  # fmt: skip
    return {name: tensor.to(step.ids.device) for name, tensor in wanted.items()}


# --- Checks ---


def check_result(result: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], where: str) -> None:
    """Raise AssertionError naming the first element that differs. What lies past a list's count is not looked at."""
    listed = torch.arange(TOP_K, device=wanted["counts"].device)[None, :] < wanted["counts"][:, None]
    for name, got in result.items():
        differs = got != wanted[name]
        if name in ("swap_host", "swap_device"):
            differs &= listed
        if bool(differs.any()):
            at = tuple(torch.nonzero(differs)[0].tolist())
            raise AssertionError(f"{where}: {name}{list(at)}: {int(got[at])}, wanted {int(wanted[name][at])}")


def check_bytes(hot_cache: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor, where: str) -> None:
    """Raise AssertionError unless hot row ``rows[i]`` holds the bytes of host row ``ids[i]``, for every i."""
    row_bytes = hot_cache.shape[-1]
    flat = hot_cache.view(torch.int64).view(-1, row_bytes // 8)
    rows, ids = rows.flatten().long(), ids.flatten()
    outside = (rows < 0) | (rows >= flat.shape[0])
    if bool(outside.any()):
        at = int(torch.nonzero(outside)[0])
        raise AssertionError(f"{where}: entry {at}: hot row {int(rows[at])}, wanted one of {flat.shape[0]}")
    differs = (flat[rows] != words_of(ids, row_bytes)).any(dim=1)
    if bool(differs.any()):
        at = int(torch.nonzero(differs)[0])
        raise AssertionError(f"{where}: entry {at}: hot row {int(rows[at])} does not hold host row {int(ids[at])}")


def without(stats: timing.Stats, reset_us: float) -> timing.Stats:
    """The time of a call that was timed together with the reset of its state. AssertionError if nothing is left."""
    if stats.median <= reset_us:
        raise AssertionError(f"{stats.median:.2f} us with the reset of the state, {reset_us:.2f} us without the call")
    names = ("median", "min", "p10", "p90", "max")
    return replace(stats, **{name: getattr(stats, name) - reset_us for name in names})


def scaled_goal(goal: float | None, case: Case, row_bytes: int, rate: float | None) -> float | None:
    """The goal for another row size: what the goal for 576 bytes leaves beside its bytes, and the bytes at the
    measured ceiling (GB/s)."""
    if goal is None or row_bytes == GOAL_ROW_BYTES or rate is None:
        return goal if row_bytes == GOAL_ROW_BYTES else None
    fixed = goal - case.bytes(GOAL_ROW_BYTES) / GOAL_RATE / 1e3
    return round(fixed + case.bytes(row_bytes) / rate / 1e3, 1)


@dataclass
class Timed:
    """An operation on every set: a call resets its set's state first. ``spoil`` undoes on set i what an earlier call
    copied."""

    calls: list[Call]
    states: list[State]
    check: timing.Check
    spoil: Callable[[int], None] | None = None
    who: str = "hotplan"


class Bench:
    """Inputs, expected results, and one row per measurement."""

    def __init__(self, device: torch.device, pool: Pool, peer: Any, *, row_bytes: Sequence[int], quick: bool) -> None:
        self.device, self.pool, self.peer = device, pool, peer
        self.gpu, self.quick, self.row_bytes = device.type == "cuda", quick, tuple(row_bytes)
        self.repeats = (15 if quick else 21) if self.gpu else 3
        # Every row size gets the same ids, so they are rows of the widest.
        self.host_rows = pool.rows(max(self.row_bytes)).shape[0]
        wanted = (QUICK if quick else None) if self.gpu else (QUICK_ON_CPU if quick else ON_CPU)
        self.cases = [c for c in CASES if wanted is None or (c.requests, c.percent) in wanted]
        self.rows: list[report.Row] = []
        self.rates: dict[int, float | None] = {}
        self._requests: dict[Any, list[Requests]] = {}
        self._steps: dict[Any, list[Step]] = {}
        self._expected: dict[Any, dict[str, torch.Tensor]] = {}
        self._resets: dict[tuple[str, int, int], float] = {}
        self.resolved: dict[Case, timing.Stats | None] = {}
        self._peer_times: dict[Any, tuple[timing.Stats | None, str | None]] = {}

    # --- Inputs, made once ---

    def sets(self, requests: int) -> int:
        """Input sets that a rotation has: more where a set is small."""
        return max(4, min(16, 64 // requests)) if self.gpu else 2

    def requests(self, case: Case, clustered: bool = False) -> list[Requests]:
        key = (case.requests, case.hot_slots, clustered)
        if key not in self._requests:
            indices = range(self.sets(case.requests))
            self._requests[key] = [
                clustered_requests(case, index, self.device)
                if clustered
                else random_requests(case, self.host_rows, index, self.device)
                for index in indices
            ]
        return self._requests[key]

    def steps(self, case: Case, clustered: bool = False) -> list[Step]:
        key = (case, clustered)
        if key not in self._steps:
            self._steps[key] = [Step(r, case.misses, i) for i, r in enumerate(self.requests(case, clustered))]
        return self._steps[key]

    @cached_property
    def cluster_host(self) -> torch.Tensor:
        """Rows enough for clustered ids. Nothing is copied from them."""
        if self.gpu:
            return self.pool.rows(16)
        return torch.empty((CLUSTER * CLUSTER_IDS, 16), dtype=torch.uint8)

    def expected(self, case: Case, index: int, clustered: bool = False) -> dict[str, torch.Tensor]:
        key = (case, index, clustered)
        if key not in self._expected:
            requests, step = self.requests(case, clustered)[index], self.steps(case, clustered)[index]
            host_rows = self.cluster_host.shape[0] if clustered else self.host_rows
            lib = reference if self.checked_by(case) == "reference" else hisparse
            self._expected[key] = expect(requests, step, host_rows, lib)
        return self._expected[key]

    def checked_by(self, case: Case) -> str:
        # What the CPU backend gives cannot be checked with itself.
        by_reference = case.requests <= REFERENCE_REQUESTS or not self.gpu
        return "reference" if by_reference else "CPU backend"

    # --- Operations ---

    def swap_in(self, case: Case, row_bytes: int, *, by_position: bool = False) -> Timed:
        host, sets = self.pool.rows(row_bytes), list(zip(self.requests(case), self.steps(case), strict=True))
        hots = [r.hot_cache(row_bytes) for r, _ in sets]

        def call(index: int) -> Call:
            (r, step), hot = sets[index], hots[index]
            ids = step.positions if by_position else step.ids
            options = r.page_options if by_position else {}
            arguments = (host, hot, r.hot_table, ids, step.hot, r.dgi, r.lru)
            result = {"hot": step.hot, "dgi": r.dgi, "lru": r.lru}
            return lambda: (r.state.reset(), hisparse.swap_in(*arguments, **options), result)[-1]

        return self._copying(case, sets, hots, call)

    def resolve_and_gather(self, case: Case, row_bytes: int) -> Timed:
        host, sets = self.pool.rows(row_bytes), list(zip(self.requests(case), self.steps(case), strict=True))
        hots = [r.hot_cache(row_bytes) for r, _ in sets]

        def call(index: int) -> Call:
            (r, step), hot = sets[index], hots[index]
            arguments = (host, hot, r.hot_table, step.ids, step.hot, r.dgi, r.lru)
            lists = step.lists
            result = _resolved(r, step)
            return lambda: (
                r.state.reset(),
                hisparse.resolve_residency(*arguments, **lists),
                hisparse.gather_compact(host, hot, *lists.values()),
                result,
            )[-1]

        return self._copying(case, sets, hots, call)

    def resolve(self, case: Case, *, clustered: bool = False, by_position: bool = False) -> Timed:
        sets = list(zip(self.requests(case, clustered), self.steps(case, clustered), strict=True))
        # Only shapes are looked at. Ids are rows of the widest rows' pool, which the narrow ones' holds as well.
        row_bytes = 16 if clustered else self.row_bytes[0]
        host = self.cluster_host if clustered else self.pool.rows(row_bytes)

        def call(index: int) -> Call:
            r, step = sets[index]
            options: dict[str, Any] = {**step.lists, **(r.page_options if by_position else {})}
            ids = step.positions if by_position else step.ids
            arguments = (host, r.hot_cache(row_bytes), r.hot_table, ids, step.hot, r.dgi, r.lru)
            result = _resolved(r, step)
            return lambda: (r.state.reset(), hisparse.resolve_residency(*arguments, **options), result)[-1]

        def check(index: int, result: dict[str, torch.Tensor]) -> None:
            check_result(result, self.expected(case, index, clustered), f"set {index}")

        return Timed([call(i) for i in range(len(sets))], [r.state for r, _ in sets], check)

    def theirs(self, case: Case, row_bytes: int) -> Timed | None:
        """SGLang's swap-in, which has one size of top-k and hot buffer. Checked by the bytes of every column."""
        if self.peer is None or case.hot_slots != HOT_SLOTS:
            return None
        host, sets = self.pool.rows(row_bytes), list(zip(self.requests(case), self.steps(case), strict=True))
        hots = [r.hot_cache(row_bytes) for r, _ in sets]

        def call(index: int) -> Call:
            (r, step), hot = sets[index], hots[index].view(-1, row_bytes)
            t, result = r.theirs, {"hot": step.hot}
            arguments = (
                step.positions, t.tokens, t.host_locs, t.device_locs, host, hot, step.hot,
                t.requests, t.seq_lens, t.lru, t.num_requests,
            )  # fmt: skip
            return lambda: (t.state.reset(), self.peer.swap_in(*arguments), result)[-1]

        timed = self._copying(case, sets, hots, call, state=False)
        return replace(timed, states=[r.theirs.state for r, _ in sets], who=self.peer.name)

    def _copying(
        self,
        case: Case,
        sets: list[tuple[Requests, Step]],
        hots: list[torch.Tensor],
        make: Callable[[int], Call],
        *,
        state: bool = True,
    ) -> Timed:
        calls = [make(index) for index in range(len(sets))]

        def spoil(index: int) -> None:
            """Right bytes in all hot rows, then wrong ones in those that the call must copy."""
            (requests, step), hot = sets[index], hots[index]
            requests.fill(hot)
            calls[index]()
            flat = hot.view(-1, hot.shape[-1])
            flat[step.hot[step.missing].long().clamp(0, flat.shape[0] - 1)] = 0xA5

        def check(index: int, result: dict[str, torch.Tensor]) -> None:
            if state:
                check_result(result, self.expected(case, index), f"set {index}")
            check_bytes(hots[index], result["hot"], sets[index][1].ids, f"set {index}")

        return Timed(calls, [r.state for r, _ in sets], check, spoil)

    # --- Measurements ---

    def time(self, timed: Timed) -> timing.Stats:
        """Microseconds of one call, the reset of its state subtracted. The result of every set is checked."""

        def prepare() -> None:
            if timed.spoil is not None:
                for index in range(len(timed.calls)):
                    timed.spoil(index)

        if self.gpu:
            stats = timing.graph_time(timed.calls, self.repeats, prepare=prepare, check=timed.check)
        else:
            prepare()
            for index, call in enumerate(timed.calls):
                timing.spoil(call())
                timed.check(index, call())
            stats = timing.wall_time(timed.calls, repeats=self.repeats, warm_up=2)
        return without(stats, self.reset_time(timed))

    def _reset_key(self, timed: Timed) -> tuple[str, int, int]:
        return (timed.who, *timed.states[0].tensors[0].shape)

    def reset_time(self, timed: Timed) -> float:
        """Median of the resets alone, in a graph like that of the calls; the same for every case of a batch."""
        key = self._reset_key(timed)
        if key not in self._resets:
            resets = [state.reset for state in timed.states]
            stats = timing.graph_time(resets, self.repeats) if self.gpu else timing.wall_time(resets, repeats=3)
            self._resets[key] = stats.median
            who, requests, slots = key
            row = report.make_row(
                "Subtracted: the reset of the state", str(requests), f"{who}, {slots} slots", "reset", stats.as_dict(),
                columns=("requests", "whose state"), sets=len(resets),
            )  # fmt: skip
            self.rows.append(row)
        return self._resets[key]

    def measure(
        self,
        section: str,
        case: Case,
        ids: str,
        metric: str,
        ours: Timed,
        *,
        theirs: Timed | None = None,
        goal: float | None = None,
        bytes_too: bool = False,
        key: Any = None,
    ) -> timing.Stats | None:
        """Time our calls, and the peer's, and check the results of both. A wrong result or an exception becomes the
        row's ``checked`` and the run goes on. A later row with the same ``key`` gets the peer's same number."""
        faults = (AssertionError, RuntimeError, ValueError, TypeError)
        stats, peer_stats, peer_note = None, None, None
        try:
            stats = self.time(ours)
            checked = self.checked_by(case) + (", bytes" if bytes_too else "")
        except faults as error:
            checked = f"WRONG: {report.first_line(error)}"
        reset_us = self._resets.get(self._reset_key(ours))
        if theirs is not None and key in self._peer_times:
            peer_stats, peer_note = self._peer_times[key]
        elif theirs is not None:
            try:
                peer_stats = self.time(theirs)
            except AssertionError as error:
                peer_note = f"differs: {report.first_line(error)}"
            except faults as error:
                peer_note = f"error: {report.first_line(error)}"
            if key is not None:
                self._peer_times[key] = peer_stats, peer_note
        row = report.make_row(
            section,
            case.name,
            ids,
            metric,
            stats.as_dict() if stats else None,
            peer_stats.as_dict() if peer_stats else None,
            peer_name=self.peer.name if theirs is not None else None,
            peer_note=peer_note,
            goal=goal if self.gpu else None,
            checked=checked,
            columns=COLUMNS,
            sets=len(ours.calls),
            reset_us=None if reset_us is None else round(reset_us, 3),
        )
        self.rows.append(row)
        shown = " ".join(f"{who} {s.median:.2f}" for who, s in (("ours", stats), ("peer", peer_stats)) if s)
        notes = [note for note in (checked if stats is None else None, peer_note) if note]
        print(f"  {section}: {case.name}, {ids}, {metric}: {' '.join([shown, *notes])}", file=sys.stderr, flush=True)
        return stats

    def rate(self, row_bytes: int) -> float | None:
        """GB/s at which gather_compact brings random rows of a long list: what this machine's link gives to SMs."""
        if row_bytes not in self.rates:
            self.rates[row_bytes] = _ceiling_row(self, row_bytes)
        return self.rates[row_bytes]


def _resolved(r: Requests, step: Step) -> dict[str, torch.Tensor]:
    return {
        "hot": step.hot,
        "swap_host": step.swap_host,
        "swap_device": step.swap_device,
        "counts": step.counts,
        "dgi": r.dgi,
        "lru": r.lru,
    }


# --- Sections ---

CEILING = "Gather ceiling"


def _ceiling_row(b: Bench, row_bytes: int) -> float | None:
    host, requests = b.pool.rows(row_bytes), 128 if b.gpu else 2
    generator = torch.Generator(device=b.device).manual_seed(row_bytes)
    shape, total = (requests, TOP_K), requests * TOP_K
    sets = []
    for _ in range(2):
        hot = torch.empty((total // PAGE, PAGE, row_bytes), dtype=torch.uint8, device=b.device)
        ids = torch.randint(0, host.shape[0], shape, generator=generator, device=b.device, dtype=torch.int32)
        rows = torch.randperm(total, generator=generator, device=b.device).view(shape).to(torch.int32)
        sets.append((hot, ids, rows, torch.full((requests,), TOP_K, dtype=torch.int32, device=b.device)))
    calls = [lambda s=s: hisparse.gather_compact(host, *s) for s in sets]

    def prepare() -> None:
        for hot, *_ in sets:
            hot.fill_(0xA5)

    def check(index: int, _: Any) -> None:
        hot, ids, rows, _ = sets[index]
        check_bytes(hot, rows, ids, f"set {index}")

    case, how = f"{row_bytes}-byte rows", f"{requests} x {TOP_K} random rows"
    stats, rate, checked = None, None, "bytes"
    try:
        if b.gpu:
            stats = timing.graph_time(calls, 7, prepare=prepare, check=check)
        else:
            prepare()
            for index, call in enumerate(calls):
                check(index, call())
            stats = timing.wall_time(calls, repeats=b.repeats)
        rate = total * row_bytes / stats.median / 1e3
    except (AssertionError, RuntimeError, ValueError, TypeError) as error:
        checked = f"WRONG: {report.first_line(error)}"
    ours, columns = stats.as_dict() if stats else None, ("rows", "how")
    b.rows.append(report.make_row(CEILING, case, how, "gather_compact", ours, checked=checked, columns=columns))
    if rate is not None:
        _rate_row(b, case, how, rate)
    return rate


def ceiling(b: Bench) -> None:
    for row_bytes in b.row_bytes:
        b.rate(row_bytes)
    if b.gpu:
        _copy_engine_row(b)


def _copy_engine_row(b: Bench) -> None:
    """For comparison: what the copy engine gets from one piece of memory. It takes so long that launches vanish."""
    size = min(128 << 20, b.pool.bytes.shape[0])
    target = torch.empty(size, dtype=torch.uint8, device=b.device)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(6)]
    for mark in marks:
        target.copy_(b.pool.bytes[:size], non_blocking=True)
        mark.record()
    torch.cuda.synchronize()
    rates = sorted(size / (begin.elapsed_time(end) * 1e6) for begin, end in pairwise(marks))
    _rate_row(b, f"contiguous, {size >> 20} MiB", "copy engine", rates[len(rates) // 2])


def _rate_row(b: Bench, case: str, how: str, rate: float) -> None:
    value = {"median": round(rate, 2)}
    b.rows.append(report.make_row(CEILING, case, how, "rate", value, unit="GB/s", columns=("rows", "how")))
    print(f"  {CEILING}: {case}, {how}: {rate:.1f} GB/s", file=sys.stderr, flush=True)


def _title(b: Bench, row_bytes: int) -> str:
    return f"{row_bytes}-byte rows, one layer, {'GPU time' if b.gpu else 'host time of the CPU backend'}"


def _bytes_row(b: Bench, section: str, case: Case, row_bytes: int) -> None:
    """What the copied bytes alone take at the ceiling."""
    rate = b.rate(row_bytes)
    if rate is not None:
        value = {"median": round(case.bytes(row_bytes) / rate / 1e3, 3)}
        row = report.make_row(section, case.name, HOST_ROWS, "bytes at the ceiling", value, columns=COLUMNS)
        b.rows.append(row)


def table(b: Bench) -> None:
    for row_bytes in b.row_bytes:
        section = _title(b, row_bytes)
        for case in b.cases:
            _bytes_row(b, section, case, row_bytes)
            options: dict[str, Any] = {
                "theirs": b.theirs(case, row_bytes),
                "goal": scaled_goal(case.goal, case, row_bytes, b.rate(row_bytes)),
                "bytes_too": True,
                "key": (case, row_bytes),
            }
            b.measure(section, case, HOST_ROWS, "swap_in", b.swap_in(case, row_bytes), **options)
            # Resolution does not depend on the row size.
            if row_bytes == b.row_bytes[0]:
                _resolve_row(b, section, case)
            both = b.resolve_and_gather(case, row_bytes)
            b.measure(section, case, HOST_ROWS, "resolve + gather_compact", both, bytes_too=True)
            if row_bytes == b.row_bytes[0] and (case.requests, case.percent) in BY_POSITION:
                # SGLang always starts from positions, so its number stands beside both.
                fused = b.swap_in(case, row_bytes, by_position=True)
                b.measure(section, case, POSITIONS, "swap_in", fused, **options)
                alone = b.resolve(case, by_position=True)
                b.measure(section, case, POSITIONS, "resolve", alone, goal=case.resolve_goal)


def _resolve_row(b: Bench, section: str, case: Case) -> None:
    goal = case.resolve_goal
    b.resolved[case] = b.measure(section, case, HOST_ROWS, "resolve", b.resolve(case), goal=goal)


def clustered(b: Bench) -> None:
    """Ids that share their low bits, beside random ones: the goal is 1.5 times the time of those."""
    section = f"Resolve, ids that are multiples of {CLUSTER}"
    for case in b.cases:
        if (case.requests, case.percent) not in CLUSTERED:
            continue
        if case not in b.resolved:
            _resolve_row(b, section, case)
        elif (stats := b.resolved[case]) is not None:
            row = report.make_row(section, case.name, HOST_ROWS, "resolve", stats.as_dict(), columns=COLUMNS)
            b.rows.append(row)
        stats = b.resolved[case]
        goal = None if stats is None else round(1.5 * stats.median, 2)
        timed = b.resolve(case, clustered=True)
        b.measure(section, case, f"multiples of {CLUSTER}", "resolve", timed, goal=goal)


def sweep(b: Bench) -> None:
    """Other batches and hot buffers than the table's, hotplan alone."""
    row_bytes = b.row_bytes[0]
    section = f"Sweep, {row_bytes}-byte rows"
    for case in SWEEP if b.gpu and not b.quick else SWEEP[:2]:
        _bytes_row(b, section, case, row_bytes)
        b.measure(section, case, HOST_ROWS, "swap_in", b.swap_in(case, row_bytes), bytes_too=True)
        b.measure(section, case, HOST_ROWS, "resolve", b.resolve(case))


SECTIONS: dict[str, Callable[[Bench], None]] = {
    "ceiling": ceiling,
    "table": table,
    "clustered": clustered,
    "sweep": sweep,
}
DEFAULT_SECTIONS = ("ceiling", "table", "clustered")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_for(__doc__, SECTIONS, DEFAULT_SECTIONS)
    parser.add_argument("--sweep", action="store_true", help="the section sweep too: other batches and hot buffers")
    parser.add_argument(
        "--row-bytes",
        default=None,
        metavar="N,N",
        help=f"row sizes, multiples of 16 (default {','.join(map(str, ROW_BYTES))}; with --quick {ROW_BYTES[0]})",
    )
    parser.add_argument("--pool-gib", type=float, default=None, metavar="X", help="pinned host memory (default 4)")
    options = parser.parse_args(arguments)
    options.sections = chosen_sections(parser, options.sections, SECTIONS)
    if options.sweep and "sweep" not in options.sections:
        options.sections.append("sweep")
    sizes = options.row_bytes or ",".join(map(str, ROW_BYTES[:1] if options.quick else ROW_BYTES))
    try:
        options.row_bytes = [int(size) for size in sizes.split(",")]
    except ValueError:
        parser.error(f"--row-bytes: expected integers, got {sizes}")
    if any(size <= 0 or size % 16 for size in options.row_bytes):
        parser.error(f"--row-bytes: expected multiples of 16, got {sizes}")
    on_gpu = options.device == "cuda"
    if options.pool_gib is None:
        options.pool_gib = (2.0 if options.quick else 4.0) if on_gpu else 0.0625
    least = max(PAGE * (CONTEXT // PAGE + 1) * max(options.row_bytes), CLUSTER * CLUSTER_IDS * 16 if on_gpu else 0)
    if options.pool_gib * GIB < least:
        parser.error(f"--pool-gib: expected at least {least / GIB:.2f}, got {options.pool_gib:g}")
    return options


class PeerInBackground:
    """SGLang's kernel, compiled while the pool is pinned; None where it is not wanted or not to be had."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._build: peers.PeerBuild | None = None
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        self.version: str | None = None
        if options.no_peer or options.device == "cpu":
            return
        root = peers.sglang_root(options.sglang)
        if root is None:
            print("no SGLang found (pip install --no-deps sglang, or --sglang PATH): no peer column", file=sys.stderr)
            return
        self.version = f"SGLang {peers.sglang_version(root, peers.HISPARSE_HEADER)}"

        def build() -> None:
            try:
                self._build = peers.build_peer_hisparse(root)
            except Exception as error:
                self._error = error

        self._thread = threading.Thread(target=build, name="peer build")
        self._thread.start()

    def join(self) -> peers.SGLangHiSparse | None:
        if self._thread is None:
            return None
        self._thread.join()
        if self._error is not None:
            raise self._error
        how = "found built" if self._build.cached else f"built in {self._build.seconds:.1f} s"
        print(f"{self.version}, {how}", file=sys.stderr)
        return peers.SGLangHiSparse(self._build)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sections, print the tables, write the results. Returns 1 if a result of ours was wrong."""
    options = parse(arguments)
    os.environ.pop("HOTPLAN_CHECK", None)  # the checked mode synchronises; it is not what is measured
    gpu = options.device == "cuda"
    if gpu and not torch.cuda.is_available():
        print("no CUDA device; --device cpu times the CPU backend instead", file=sys.stderr)
        return 2
    device = torch.device("cuda", options.device_index) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    begin = time.perf_counter()
    # Ours first: the peer's build changes the environment that compilers are found by.
    for backend in ("cpu", "cuda") if gpu else ("cpu",):
        jit.load("hisparse", backend)
    background = PeerInBackground(options)
    pinning = time.perf_counter()
    try:
        pool = Pool(int(options.pool_gib * GIB), pinned=gpu)
        pool_seconds = time.perf_counter() - pinning
        print(f"host pool: {options.pool_gib:g} GiB in {pool_seconds:.1f} s", file=sys.stderr)
    finally:
        peer = background.join()
    bench = Bench(device, pool, peer, row_bytes=options.row_bytes, quick=options.quick)
    if gpu:
        timing.warm_clocks(device)
    started = time.perf_counter() - begin
    for name in options.sections:
        SECTIONS[name](bench)
    seconds = time.perf_counter() - begin
    meta = report.collect_meta(
        "bench_hisparse",
        device=options.device,
        device_index=options.device_index,
        peer=background.version,
        quick=options.quick,
        top_k=TOP_K,
        hot_slots=HOT_SLOTS,
        pool_gib=options.pool_gib,
        pool_seconds=round(pool_seconds, 1),
        gather_gb_per_s={str(size): round(rate, 2) for size, rate in bench.rates.items() if rate},
        start_seconds=round(started, 1),
        seconds=round(seconds, 1),
    )
    if options.out:
        report.write_results(options.out, bench.rows, meta)
    report.print_tables(bench.rows)
    print(report.describe_meta(meta))
    print(f"{seconds:.1f} s, {started:.1f} s of them for compilers and the pool")
    wrong = [row for row in bench.rows if report.is_wrong(row)]
    for row in wrong:
        print(f"{row['section']}: {row['case']}, {row['plans']}, {row['metric']}: {row['checked']}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
