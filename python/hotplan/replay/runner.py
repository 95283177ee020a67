"""The loop: steps from the scheduler, plans of every step, checks, statistics."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from hotplan.replay.scheduler import Counters, Scheduler, Step
from hotplan.replay.settings import Settings
from hotplan.replay.steps import Built, PlanBuilder
from hotplan.replay.trace import TraceRecord
from hotplan.replay.verify import StepChecker

Observer = Callable[[Step, Built], None]
"""Called with every step before it is committed. Decode and verify plans are overwritten by later steps."""


@dataclass
class StepLog:
    """One column per quantity, one entry per step."""

    kind: list[str] = field(default_factory=list)
    start_ms: list[float] = field(default_factory=list)
    requests: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    call_us: list[float] = field(default_factory=list)
    ready_us: list[float] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)  # full slots of running requests, prefixes they use included
    cached_slots: list[int] = field(default_factory=list)  # full slots that only the prefix cache holds
    state_slots: list[int] = field(default_factory=list)  # the same of SWA slots: in a window, or only cached
    cached_state_slots: list[int] = field(default_factory=list)

    def add(self, step: Step, built: Built, scheduler: Scheduler) -> None:
        page = scheduler.settings.page_size
        cached = scheduler.cache.evictable_pages
        in_windows = scheduler.window_pages()
        self.kind.append(step.kind)
        self.start_ms.append(step.start_ms)
        self.requests.append(len(step.requests))
        self.tokens.append(step.tokens)
        self.rows.append(built.rows)
        self.call_us.append(built.call_us)
        self.ready_us.append(built.ready_us)
        self.slots.append((scheduler.pool.full.used - cached) * page)
        self.cached_slots.append(cached * page)
        self.state_slots.append(in_windows * page)
        self.cached_state_slots.append((scheduler.pool.state.used - in_windows) * page)

    def __len__(self) -> int:
        return len(self.kind)

    def of(self, kind: str, column: str) -> np.ndarray:
        """A column's entries of steps of one kind."""
        return np.array([v for k, v in zip(self.kind, getattr(self, column), strict=True) if k == kind])


@dataclass
class ReplayResult:
    """What a replay did; complete, or up to the interruption."""

    settings: Settings
    device: str
    requests: int  # of the trace
    log: StepLog
    counters: Counters
    warm_up_s: float
    wall_s: float = 0.0
    virtual_ms: float = 0.0
    total_slots: int = 0
    total_state_slots: int = 0
    evicted_blocks: int = 0
    evicted_states: int = 0
    checked_plans: int | None = None  # None: checking was off
    interrupted: bool = False

    @property
    def prefix_hit_rate(self) -> float:
        return self.counters.prefix_hits / self.counters.prompt if self.counters.prompt else 0.0


class Replay:
    """A trace on its way through the scheduler.

    Args:
        trace: requests, at least one.
        settings: see `Settings`.
        device: "cpu", "cuda" or "cuda:N"; tables and plans live there.
        check: compare every plan with the reference and check the server, see `verify`.

    Raises ValueError where the settings do not fit the trace.
    """

    def __init__(
        self, trace: Sequence[TraceRecord], settings: Settings, device: str = "cpu", check: bool = False
    ) -> None:
        if not trace:
            raise ValueError("trace: expected at least one request, got none")
        self.scheduler = Scheduler(trace, settings, device)
        self.builder = PlanBuilder(self.scheduler.tables, settings)
        width = self.scheduler.tables.host_req_to_token.shape[1]
        self.checker = StepChecker(self.scheduler, self.builder, width) if check else None
        self.requests = len(trace)
        self.device = device
        self.log = StepLog()

    def run(
        self,
        observers: Sequence[Observer] = (),
        on_progress: Callable[[Counters, int], None] | None = None,
    ) -> ReplayResult:
        """Runs to the end, or to Ctrl-C, which gives the result so far.

        `on_progress` gets the counters and the number of steps after every step. Raises CheckError for a wrong plan.
        """
        counters, scheduler = self.scheduler.counters, self.scheduler
        warm_up_s = self.builder.warm_up()
        result = ReplayResult(scheduler.settings, self.device, self.requests, self.log, counters, warm_up_s)
        start = time.perf_counter()
        try:
            with torch.inference_mode():
                while (step := scheduler.next_step()) is not None:
                    built = self.builder.build(step)
                    if self.checker:
                        self.checker.before(step, built)
                    for observe in observers:
                        observe(step, built)
                    self.log.add(step, built, scheduler)
                    scheduler.commit(step)
                    if self.checker:
                        self.checker.after(step)
                    if on_progress:
                        on_progress(counters, len(self.log))
            if self.checker:
                self.checker.finish()
        except KeyboardInterrupt:
            result.interrupted = True
        page = scheduler.settings.page_size
        result.wall_s = time.perf_counter() - start
        result.virtual_ms = scheduler.now_ms
        result.total_slots = (scheduler.pool.full.count - 1) * page
        result.total_state_slots = (scheduler.pool.state.count - 1) * page
        result.evicted_blocks = scheduler.cache.evicted_blocks
        result.evicted_states = scheduler.cache.evicted_states
        result.checked_plans = self.checker.plans if self.checker else None
        return result
