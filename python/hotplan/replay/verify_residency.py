"""What ``--check`` checks of HiSparse steps: launches against the reference, hot rows against their host rows."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hotplan.hot_buffer import HotBuffer
from hotplan.reference import hisparse as reference
from hotplan.replay.host_rows import HostRows
from hotplan.replay.pool import check

_OUTPUTS = ("hot_indices", "miss_mask", "resolved_global_indices", "valid_counts", "swap_counts")
_LISTS = ("swap_host_physical_rows", "swap_device_physical_rows")
_STATE = ("device_global_indices", "lru_slots")


@dataclass
class Launch:
    """One resolution, as it is launched; tensors on the CPU but `pages`.

    Attributes:
        tokens: request of the trace and position, per launch row that is not padding.
        requests: int32 [R], numbers in the hot buffer, -1 padding.
        positions: int32 [R, K], -1 none.
        slots: int32 [R, K], what req_to_token says of them, -1 none.
        pages: int32 [requests, pages], on the device, where positions are resolved; None: slots are.
        page_size: tokens per page.
        union_rows: tokens of a request that are resolved as one set, if positions are.
    """

    tokens: list[tuple[int, int]]
    requests: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    pages: torch.Tensor | None
    page_size: int
    union_rows: int

    @property
    def ids(self) -> torch.Tensor:
        return self.slots if self.pages is None else self.positions

    def options(self) -> dict[str, Any]:
        """Keywords for resolving, the operator's and HotBuffer's alike."""
        if self.pages is None:
            return {}
        return {
            "source_block_table": self.pages,
            "source_block_size": self.page_size,
            "max_union_rows": self.union_rows,
        }

    def where(self, row: int, column: int | None = None) -> str:
        """A launch row (and column) in words."""
        place = f"row {row}" if column is None else f"row {row}, column {column}"
        if row >= len(self.tokens):
            return f"{place} (padding)"
        index, position = self.tokens[row]
        return f"{place} (request {index}, token {position})"


@contextmanager
def _no_collection() -> Iterator[None]:
    """The reference makes many small objects and no cycles: looking for cycles meanwhile takes twice its time again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class ResidencyChecker:
    """Follows one hot buffer with the reference, which keeps its own state on the CPU."""

    def __init__(self, hot: HotBuffer, host: HostRows) -> None:
        self._hot, self._host = hot, host
        self._name = f"hot size {hot.hot_slots}"
        shape = (hot.max_rows, hot.top_k)
        self._tables = hot.block_table.cpu().clone()
        self._requests = torch.full((hot.max_requests,), -1, dtype=torch.int32)
        self._fresh = torch.arange(hot.hot_slots, dtype=torch.int16)
        self._state = {
            "device_global_indices": torch.full((hot.max_requests, hot.hot_slots), -1, dtype=torch.int32),
            "lru_slots": self._fresh.repeat(hot.max_requests, 1),
        }
        matrix = {name: torch.zeros(shape, dtype=torch.int32) for name in _OUTPUTS[:3] + _LISTS}
        counts = {name: torch.zeros(hot.max_rows, dtype=torch.int32) for name in _OUTPUTS[3:]}
        self._outputs = matrix | counts
        # Resolving looks at the caches' shapes only; memory that is never touched costs nothing.
        self._cache = torch.empty(hot.caches.shape[1:], dtype=torch.uint8)

    def admit(self, number: int) -> None:
        self._state["device_global_indices"][number] = -1
        self._state["lru_slots"][number] = self._fresh
        self._requests[number] = number

    def release(self, number: int) -> None:
        self._requests[number] = -1

    def invalidate(self, numbers: torch.Tensor, slots: torch.Tensor) -> None:
        reference.invalidate_written_slots(self._state["device_global_indices"], self._requests, numbers, slots)
        self._compare_state("after invalidate_written_slots")

    def compare(self, launch: Launch) -> int:
        """Repeats a resolution with the reference, compares results and state, then the bytes of all rows that it gave.
        Returns how many bytes were compared. Raises AssertionError."""
        rows = len(launch.requests)
        expected = {name: tensor[:rows] for name, tensor in self._outputs.items()}
        stats = torch.zeros(2, dtype=torch.int64)
        options = launch.options() | expected
        tables, states = self._tables, self._requests
        if launch.pages is not None:
            options |= {"source_block_table": launch.pages.cpu(), "request_ids": launch.requests}
        else:  # launch row r is the operator's request r
            numbers = launch.requests.long()
            tables, states = tables[numbers], torch.where(numbers < 0, -1, states[numbers])
        with _no_collection():
            reference.resolve_residency(
                self._host.pools[0],
                self._cache,
                tables,
                launch.ids,
                device_global_indices=self._state["device_global_indices"],
                lru_slots=self._state["lru_slots"],
                request_state_indices=states,
                stats=stats,
                **options,
            )
        got = {name: getattr(self._hot, name)[:rows].cpu() for name in expected}
        for name in _OUTPUTS:
            self._same(launch, name, got[name], expected[name])
        listed = torch.arange(self._hot.top_k) < expected["swap_counts"][:, None]
        for name in _LISTS:
            self._same(launch, name, got[name].where(listed, -1), expected[name].where(listed, -1))
        hits, misses = self._hot.stats()
        check([hits, misses] == stats.tolist(), f"{self._name}: stats: got {[hits, misses]}, expected {stats.tolist()}")
        self._compare_state("after resolve_residency")
        self._same(launch, "slots", got["resolved_global_indices"], launch.slots)
        return self._compare_bytes(launch, got["hot_indices"])

    def _compare_bytes(self, launch: Launch, hot_indices: torch.Tensor) -> int:
        wanted = launch.slots >= 0
        lost = torch.nonzero(wanted & (hot_indices < 0))
        if len(lost):
            row, column = lost[0].tolist()
            raise AssertionError(f"{self._name}: {launch.where(row, column)} got no hot row")
        slots, indices = launch.slots[wanted].long(), hot_indices[wanted].long()
        device = self._hot.device
        for layer in range(self._hot.layers):
            words = self._hot.caches[layer].view(-1, self._host.row_bytes).view(torch.int64)
            held = words[indices.to(device)]
            wrong = (held != self._host.expected(slots, layer, device)).any(dim=1).cpu()
            if wrong.any():
                first = int(torch.nonzero(wrong)[0])
                row, column = torch.nonzero(wanted)[first].tolist()
                what = self._host.explain(held[first].cpu(), int(slots[first]), layer)
                raise AssertionError(
                    f"{self._name}: {launch.where(row, column)}, layer {layer}: hot row {int(indices[first])} holds"
                    f" {what}, not that of slot {int(slots[first])} (position {int(launch.positions[row, column])})"
                )
        return self._hot.layers * len(slots) * self._host.row_bytes

    def _compare_state(self, when: str) -> None:
        for name in _STATE:
            got, expected = getattr(self._hot, name).cpu(), self._state[name]
            if not torch.equal(got, expected):
                number, slot = np.argwhere((got != expected).numpy())[0]
                raise AssertionError(
                    f"{self._name}: {name} differs from the reference {when}: state row {number}, entry {slot}: got"
                    f" {int(got[number, slot])}, expected {int(expected[number, slot])}"
                )

    def _same(self, launch: Launch, name: str, got: torch.Tensor, expected: torch.Tensor) -> None:
        if torch.equal(got, expected):
            return
        row, *column = np.argwhere((got != expected).numpy())[0].tolist()
        at = (row, *column)
        raise AssertionError(
            f"{self._name}: {name} differs from the reference: {launch.where(*at)}: got {int(got[at])}, expected"
            f" {int(expected[at])}"
        )
