"""The plans of a step, through the public operators, and how long building them took.

Lengths lie where a server has them: on the CPU for prefill and mixed steps, on the device for decode and verify steps.
Those two also write into tensors that stay, as under a CUDA graph, and have as many rows as the captured size.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np
import torch

from hotplan import reference
from hotplan.plans import PrefillPlan
from hotplan.replay.pool import Tables
from hotplan.replay.scheduler import PADDING_ROW, Step
from hotplan.replay.settings import RATIOS, Settings

Plans = Mapping[int, PrefillPlan] | Mapping[int, torch.Tensor]
"""One plan per ratio: PrefillPlan, or a uint8 [rows, 16] tensor for a decode step."""

_GRAPH_SIZES = (1, 2, 4, 8)


class _Common(TypedDict):
    """What both operators are told."""

    swa_page_size: int
    ratios: tuple[int, ...]
    ring_sizes: tuple[int, ...]


def padded_size(requests: int) -> int:
    """The CUDA-graph batch size that a decode batch runs with: 1, 2, 4, 8, 16, 24, ..."""
    return next((size for size in _GRAPH_SIZES if size >= requests), -(-requests // 8) * 8)


@dataclass
class Built:
    """Plans of a step; on the CPU both times are the same."""

    plans: Plans
    call_us: float  # until the call returned
    ready_us: float  # until the plans were finished on the device
    rows: int  # of all plans together, unused ones included


class PlanBuilder:
    """Builds the plans of steps over one set of tables."""

    def __init__(self, tables: Tables, settings: Settings) -> None:
        self._tables = tables
        self._settings = settings
        self._device = tables.device
        self._outputs: dict[tuple[str, int], Plans] = {}

    def warm_up(self) -> float:
        """Loads the operators (compiling them if this machine never did) and returns the seconds it took."""
        import hotplan

        start = time.perf_counter()
        one = torch.ones(1, dtype=torch.int64)
        rows = torch.full((1,), PADDING_ROW, dtype=torch.int64, device=self._device)
        tables = (self._tables.req_to_token, self._tables.full_to_state)
        common: _Common = {
            "swa_page_size": self._settings.page_size,
            "ratios": RATIOS,
            "ring_sizes": self._settings.ring_sizes,
        }
        hotplan.plan_step_prefill(rows, *tables, one, one, num_q_tokens=1, **common)
        hotplan.plan_step_decode(rows, *tables, one.to(self._device), **common)
        self._synchronize()
        return time.perf_counter() - start

    def build(self, step: Step) -> Built:
        """The step's plans. Copying lengths to the device is not part of the times: a server has them there."""
        import hotplan

        arguments, options = self._arguments(step, on_host=False)
        function = hotplan.plan_step_decode if step.kind == "decode" else hotplan.plan_step_prefill
        self._synchronize()
        start = time.perf_counter_ns()
        plans = function(*arguments, **options)
        called = time.perf_counter_ns()
        self._synchronize()
        ready = time.perf_counter_ns()
        tensors = [t for p in plans.values() for t in ((p,) if isinstance(p, torch.Tensor) else p)]
        return Built(plans, (called - start) / 1e3, (ready - start) / 1e3, sum(len(t) for t in tensors))

    def expected(self, step: Step) -> Plans:
        """The same plans from the reference, on the host's copies of the tables, in fresh tensors."""
        arguments, options = self._arguments(step, on_host=True)
        function = reference.plan_step_decode if step.kind == "decode" else reference.plan_step_prefill
        return function(*arguments, **options)

    def _arguments(self, step: Step, on_host: bool) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
        s, t = self._settings, self._tables
        options: dict[str, Any] = {
            "swa_page_size": s.page_size,
            "ratios": RATIOS,
            "ring_sizes": s.ring_sizes,
            "use_req_ring": s.req_ring,
        }
        rows, seq, extend = step.rows, step.seq, step.extend
        if step.kind == "decode":
            if s.pad_decode:
                rows, seq = (_padded(a, value) for a, value in ((rows, PADDING_ROW), (seq, 1)))
            lengths: tuple[np.ndarray, ...] = (seq,)
        else:
            options |= {"num_q_tokens": step.tokens, "use_cuda_graph": step.kind == "verify"}
            lengths = (seq, extend)
        if on_host:
            device, tables = torch.device("cpu"), (t.host_req_to_token, t.host_full_to_state)
        else:
            device, tables = self._device, (t.req_to_token, t.full_to_state)
            if step.kind in ("decode", "verify"):
                options["out"] = self._persistent(step.kind, len(rows) if step.kind == "decode" else step.tokens)
        length_device = device if step.kind in ("decode", "verify") else torch.device("cpu")
        moved = (torch.from_numpy(a).to(length_device) for a in lengths)
        return (torch.from_numpy(rows).to(device), *tables, *moved), options

    def _persistent(self, kind: str, rows: int) -> Plans:
        if (kind, rows) not in self._outputs:

            def empty(width: int) -> torch.Tensor:
                return torch.empty((rows, width), dtype=torch.uint8, device=self._device)

            if kind == "decode":
                self._outputs[kind, rows] = {ratio: empty(16) for ratio in RATIOS}
            else:
                self._outputs[kind, rows] = {ratio: PrefillPlan(empty(16), empty(8)) for ratio in RATIOS}
        return self._outputs[kind, rows]

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _padded(values: np.ndarray, fill: int) -> np.ndarray:
    return np.concatenate([values, np.full(padded_size(len(values)) - len(values), fill, dtype=values.dtype)])
