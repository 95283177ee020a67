"""CUDA graphs of a call: replaying it, and timing it."""

from __future__ import annotations

from collections.abc import Callable

import torch


def captured(call: Callable[[], object]) -> Callable[[], None]:
    """What replays a graph of the call. Capturing it runs nothing."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def seconds_of(call: Callable[[], None]) -> float:
    """Median time of a replay of 20 calls."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            call()
    times = []
    for _ in range(15):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return sorted(times)[7]
