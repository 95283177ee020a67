"""Timing for the benchmarks: GPU time by graph replay, host time by a clock around back-to-back calls.

Everything here is in microseconds per call and nothing is subtracted here.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch

Call = Callable[[], Any]
Check = Callable[[int, Any], None]

# What a replayed graph should last. A replay costs the host tens of microseconds and leaves a gap of one or
# two on the device, so a graph of 2 ms keeps both under 0.1 % of the result, also for calls of 1 us.
_GRAPH_TARGET_US = 2000.0
_MAX_GRAPH_CALLS = 400
_WALL_TARGET_S = 0.02
_MIN_WALL_CALLS, _MAX_WALL_CALLS = 20, 200
# Clocks rise while the device is busy; a warm-up shorter than this measures the ramp.
_WARM_UP_S = 0.03


@dataclass(frozen=True)
class Stats:
    """Microseconds per call over ``repeats`` samples, each the mean of ``calls`` calls."""

    median: float
    min: float
    p10: float
    p90: float
    max: float
    repeats: int
    calls: int

    @classmethod
    def of(cls, samples: Sequence[float], calls: int) -> Stats:
        """Summarise samples (microseconds per call). Raises ValueError for an empty list."""
        if not samples:
            raise ValueError("samples: expected at least one, got none")
        ordered = sorted(samples)

        def quantile(q: float) -> float:
            return ordered[min(len(ordered) - 1, round(q * (len(ordered) - 1)))]

        return cls(
            statistics.median(ordered),
            ordered[0],
            quantile(0.1),
            quantile(0.9),
            ordered[-1],
            len(ordered),
            calls,
        )

    def as_dict(self) -> dict[str, float | int]:
        """Plain numbers, rounded to a nanosecond, for a JSON line."""
        return {k: round(v, 3) if isinstance(v, float) else v for k, v in asdict(self).items()}


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor of a result (nested tuples, lists, dicts, DLPack producers), as torch tensors, in
    order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif hasattr(value, "__dlpack__"):
        yield torch.from_dlpack(value)
    elif hasattr(value, "__len__") and hasattr(value, "__getitem__") and not isinstance(value, (str, bytes)):
        for item in value:
            yield from tensors_in(item)


def spoil(results: Any) -> None:
    """Overwrite every tensor of the results, so that what a later check finds was written after this."""
    for tensor in tensors_in(results):
        tensor.view(torch.uint8).fill_(0xA5)


def graph_time(
    fns: Call | Sequence[Call],
    replays: int = 21,
    *,
    calls: int | None = None,
    prepare: Call | None = None,
    check: Check | None = None,
) -> Stats:
    """GPU time per call, by replaying one CUDA graph that holds many calls.

    ``fns`` are the same operation on different inputs; they are captured in rotation, so that a call never
    finds its own inputs in L2 unless the whole rotation fits there. The graph holds ``calls`` of them, by
    default as many full rotations as make it last about 2 ms. Samples are the event times of ``replays``
    back-to-back replays divided by the number of calls; the launch gap between two replays is therefore
    inside the number, spread over all calls.

    The results of the first rotation are overwritten with 0xA5 before the first replay and given to ``check``
    as ``check(index, result)`` after the last one, so what is checked is what the timed replays produced.
    ``prepare`` runs just before that overwriting: it can spoil what a call writes but does not return.
    Raises whatever a call raises, before anything is captured.
    """
    rotation = [fns] if callable(fns) else list(fns)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(stream):
        for fn in rotation:
            fn()
        begin.record()
        for fn in rotation:
            fn()
        end.record()
    torch.cuda.synchronize()
    if calls is None:
        eager_us = max(begin.elapsed_time(end) * 1000.0 / len(rotation), 1.0)
        rotations = max(1, round(min(_GRAPH_TARGET_US / eager_us, _MAX_GRAPH_CALLS) / len(rotation)))
        calls = rotations * len(rotation)

    graph = torch.cuda.CUDAGraph()
    results = []
    with torch.cuda.graph(graph, stream=stream):
        for index in range(calls):
            results.append(rotation[index % len(rotation)]())
    checked = min(len(rotation), calls)
    if prepare is not None:
        prepare()
    spoil(results[:checked])
    torch.cuda.synchronize()

    deadline = time.perf_counter() + _WARM_UP_S
    while True:
        graph.replay()
        torch.cuda.synchronize()
        if time.perf_counter() >= deadline:
            break
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    graph.replay()  # in flight while the first mark is queued: the first sample starts on a busy device
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    samples = [a.elapsed_time(b) * 1000.0 / calls for a, b in pairwise(marks)]
    if check is not None:
        for index in range(checked):
            check(index, results[index])
    del results
    graph.reset()
    return Stats.of(samples, calls)


def wall_time(
    fns: Call | Sequence[Call],
    *,
    calls: int | None = None,
    repeats: int = 15,
    warm_up: int = 20,
    sync: Call | None = None,
) -> Stats:
    """Host time per call, over ``calls`` back-to-back calls.

    ``fns`` rotate as in `graph_time`. ``calls`` is by default 200, and fewer (20 at the least) where 200
    would last longer than 20 ms. ``sync`` (such as ``torch.cuda.synchronize``) runs before and after each
    repeat, outside the timed region: the number is what the caller's thread spends, not when the device is
    done. 200 calls stay inside the launch queue, so the host does not wait for the device either, unless the
    call itself does. The garbage collector is off inside the region. The loop and the call of the closure
    (some 0.05 us) are included.
    """
    rotation = [fns] if callable(fns) else list(fns)
    for index in range(warm_up):
        kept = rotation[index % len(rotation)]()
    if calls is None:
        begin = time.perf_counter()
        for fn in rotation:
            kept = fn()
        each = (time.perf_counter() - begin) / len(rotation)
        calls = max(_MIN_WALL_CALLS, min(_MAX_WALL_CALLS, int(_WALL_TARGET_S / max(each, 1e-9))))
    sequence = [rotation[index % len(rotation)] for index in range(calls)]
    samples = []
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for _ in range(repeats):
            if sync is not None:
                sync()
            begin = time.perf_counter()
            for fn in sequence:
                kept = fn()  # noqa: F841 (a caller holds its last plan until it has the next)
            elapsed = time.perf_counter() - begin
            if sync is not None:
                sync()
            samples.append(elapsed * 1e6 / calls)
    finally:
        if was_enabled:
            gc.enable()
    return Stats.of(samples, calls)


def warm_clocks(device: torch.device, seconds: float = 0.3) -> None:
    """Keep a GPU busy until its clocks are up."""
    a = torch.rand((4096, 4096), device=device)
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        a @ a
        torch.cuda.synchronize()
