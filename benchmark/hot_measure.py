"""How the HiSparse benchmarks measure and run: state that is put back inside the graph, results that are checked, the
peer beside ours, and the program around them."""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import peers
import report
import timing
from common_options import peer_root, ready_device
from hot_inputs import GIB, Pool, State
from hotplan import jit

Call = Callable[[], Any]
FAULTS = (AssertionError, RuntimeError, ValueError, TypeError)
REFERENCE_REQUESTS = 8  # up to so many requests the plain-Python reference checks, above it the CPU backend


@dataclass
class Timed:
    """An operation on every input set. ``calls[i]`` runs it on set i and returns what ``check`` looks at.

    ``states[i]`` is what a call on set i changes and every measured call must find as it was; none, where calls keep
    no state. ``spoil(i)`` puts wrong bytes where a call on set i copies to, and right ones where it does not.
    """

    calls: list[Call]
    check: timing.Check
    states: Sequence[State] = ()
    spoil: Callable[[int], None] | None = None
    who: str = "hotplan"

    def whole(self, index: int) -> Any:
        """The call on set ``index``, on fresh state."""
        if self.states:
            self.states[index].reset()
        return self.calls[index]()

    def prepare(self) -> None:
        if self.spoil is not None:
            for index in range(len(self.calls)):
                self.spoil(index)


def without(stats: timing.Stats, reset_us: float) -> timing.Stats:
    """The time of a call that was timed together with the reset of its state. AssertionError if nothing is left."""
    if stats.median <= reset_us:
        raise AssertionError(f"{stats.median:.2f} us with the reset of the state, {reset_us:.2f} us without the call")
    names = ("median", "min", "p10", "p90", "max")
    return replace(stats, **{name: getattr(stats, name) - reset_us for name in names})


class Measurements:
    """One row per measurement. ``columns`` are what the first two columns of a table are called, where a row does not
    say otherwise."""

    def __init__(self, device: torch.device, peer: Any, *, quick: bool, columns: tuple[str, str]) -> None:
        self.device, self.gpu, self.quick = device, device.type == "cuda", quick
        self.peer, self.columns = peer, columns
        self.repeats = (15 if quick else 21) if self.gpu else 3
        self.rows: list[report.Row] = []
        self._resets: dict[tuple[str, int, int], float] = {}
        self._peer_times: dict[Any, tuple[timing.Stats | None, str | None]] = {}

    def sets(self, requests: int) -> int:
        """Input sets that a rotation has: more where a set is small."""
        return max(4, min(16, 64 // requests)) if self.gpu else 2

    def time(self, timed: Timed) -> timing.Stats:
        """Microseconds of one call, the reset of its state subtracted. The result of every set is checked."""
        calls = [lambda i=i: timed.whole(i) for i in range(len(timed.calls))]
        if self.gpu:
            stats = timing.graph_time(calls, self.repeats, prepare=timed.prepare, check=timed.check)
        else:
            timed.prepare()
            for index, call in enumerate(calls):
                timing.spoil(call())
                timed.check(index, call())
            stats = timing.wall_time(calls, repeats=self.repeats, warm_up=2)
        return without(stats, self.reset_time(timed)) if timed.states else stats

    def host_time(self, timed: Timed) -> timing.Stats:
        """Microseconds that the caller of a GPU operator spends, back to back. State is put back before the calls that
        are checked, not between those that are timed."""
        timed.prepare()
        for index in range(len(timed.calls)):
            timing.spoil(timed.whole(index))
            timed.check(index, timed.whole(index))
        return timing.wall_time(timed.calls, repeats=self.repeats, sync=torch.cuda.synchronize)

    def _reset_key(self, timed: Timed) -> tuple[str, int, int] | None:
        return (timed.who, *timed.states[0].tensors[0].shape) if timed.states else None

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
        case: str,
        second: str,
        metric: str,
        ours: Timed,
        *,
        checked: str,
        theirs: Timed | None = None,
        peer_note: str | None = None,
        goal: float | None = None,
        key: Any = None,
        timer: Callable[[Timed], timing.Stats] | None = None,
        columns: tuple[str, str] | None = None,
        **more: Any,
    ) -> timing.Stats | None:
        """Time our calls, and the peer's, and check the results of both. A wrong result or an exception becomes the
        row's ``checked`` and the run goes on. A later row with the same ``key`` gets the peer's same number, and
        ``peer_note`` is what stands there where ``theirs`` is missing."""
        timer = timer or self.time
        stats, peer_stats = None, None
        try:
            stats = timer(ours)
        except FAULTS as error:
            checked = f"WRONG: {report.first_line(error)}"
        reset_us = self._resets.get(self._reset_key(ours))
        if theirs is not None and key in self._peer_times:
            peer_stats, peer_note = self._peer_times[key]
        elif theirs is not None:
            peer_note = None
            try:
                peer_stats = timer(theirs)
            except AssertionError as error:
                peer_note = f"differs: {report.first_line(error)}"
            except FAULTS as error:
                peer_note = f"error: {report.first_line(error)}"
            if key is not None:
                self._peer_times[key] = peer_stats, peer_note
        row = report.make_row(
            section,
            case,
            second,
            metric,
            stats.as_dict() if stats else None,
            peer_stats.as_dict() if peer_stats else None,
            peer_name=self.peer.name if theirs is not None or peer_note else None,
            peer_note=peer_note,
            goal=goal if self.gpu else None,
            checked=checked,
            columns=columns or self.columns,
            sets=len(ours.calls),
            reset_us=None if reset_us is None else round(reset_us, 3),
            **more,
        )
        self.rows.append(row)
        shown = " ".join(f"{who} {s.median:.2f}" for who, s in (("ours", stats), ("peer", peer_stats)) if s)
        notes = [note for note in (checked if stats is None else None, peer_note) if note]
        print(f"  {section}: {case}, {second}, {metric}: {' '.join([shown, *notes])}", file=sys.stderr, flush=True)
        return stats


# --- The program ---


def add_pool_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pool-gib", type=float, default=None, metavar="X", help="pinned host memory (default 4)")


def choose_pool(parser: argparse.ArgumentParser, options: argparse.Namespace, least: int) -> None:
    """The size of the pool, where none is given, and an end to the program where fewer than ``least`` bytes are."""
    if options.pool_gib is None:
        options.pool_gib = (2.0 if options.quick else 4.0) if options.device == "cuda" else 0.0625
    if options.pool_gib * GIB < least:
        parser.error(f"--pool-gib: expected at least {least / GIB:.2f}, got {options.pool_gib:g}")


class PeerInBackground:
    """SGLang's kernels, compiled while the pool is pinned; None where they are not wanted or not to be had."""

    def __init__(
        self,
        options: argparse.Namespace,
        headers: Sequence[str],
        build: Callable[[Any], peers.PeerBuild],
        wrap: Callable[[peers.PeerBuild, Any], Any],
    ) -> None:
        self._wrap = wrap
        self._build: peers.PeerBuild | None = None
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        self.version: str | None = None
        self._root = peer_root(options)
        if self._root is None:
            return
        self.version = f"SGLang {peers.sglang_version(self._root, *headers)}"

        def work() -> None:
            try:
                self._build = build(self._root)
            except Exception as error:
                self._error = error

        self._thread = threading.Thread(target=work, name="peer build")
        self._thread.start()

    def join(self) -> Any:
        if self._thread is None:
            return None
        self._thread.join()
        if self._error is not None:
            raise self._error
        print(f"{self.version}, {self._build.how}", file=sys.stderr)
        return self._wrap(self._build, self._root)


def run(
    name: str,
    options: argparse.Namespace,
    *,
    family: str,
    peer: Callable[[], PeerInBackground],
    bench: Callable[[torch.device, Pool, Any], Any],
    sections: Mapping[str, Callable[[Any], None]],
    meta: Callable[[Any], dict[str, Any]],
) -> int:
    """Run the sections, print the tables, write the results. Returns 1 if a result of ours was wrong, 2 without a
    GPU. ``meta`` says what goes into the results' meta record beside what all have."""
    device = ready_device(options)
    if device is None:
        return 2
    gpu = device.type == "cuda"
    begin = time.perf_counter()
    # Ours first: the peer's build changes the environment that compilers are found by.
    for backend in ("cpu", "cuda") if gpu else ("cpu",):
        jit.load(family, backend)
    background = peer()
    pinning = time.perf_counter()
    try:
        pool = Pool(int(options.pool_gib * GIB), pinned=gpu)
        pool_seconds = time.perf_counter() - pinning
        print(f"host pool: {options.pool_gib:g} GiB in {pool_seconds:.1f} s", file=sys.stderr)
    finally:
        built = background.join()
    made = bench(device, pool, built)
    if gpu:
        timing.warm_clocks(device)
    started = time.perf_counter() - begin
    for section in options.sections:
        sections[section](made)
    seconds = time.perf_counter() - begin
    record = report.collect_meta(
        name,
        device=options.device,
        device_index=options.device_index,
        peer=background.version,
        quick=options.quick,
        pool_gib=options.pool_gib,
        pool_seconds=round(pool_seconds, 1),
        start_seconds=round(started, 1),
        seconds=round(seconds, 1),
        **meta(made),
    )
    status = report.publish(made.rows, record, options.out)
    print(f"{seconds:.1f} s, {started:.1f} s of them for compilers and the pool")
    return status
