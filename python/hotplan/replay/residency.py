"""HiSparse in a replay: hot buffers in front of a host pool whose rows are the replay's token slots.

Of every decode and verify step (and of the generating requests in a mixed one), in the order of a server:

1. hot copies of the slots that this step's tokens get are invalidated: pages are used again;
2. the top-k positions of every token are resolved: in a decode step as the slots that req_to_token names, with several
   tokens a request as positions, which the operator takes through the request's pages, all of a request as one set;
3. every layer of the group copies what is missing;
4. the new tokens are written to their host rows, and their hot copies are invalidated. A token's own position is
   among its ids, as it is in an indexer's top-k, so there is one: its slot was resolved before its row was written.

A request is admitted with an empty hot buffer when its first token after a prefill is computed, and let go when it is
finished or retracted. Several hot sizes run side by side on the same ids.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from hotplan.hot_buffer import HotBuffer
from hotplan.replay.host_rows import HostRows
from hotplan.replay.locality import TopKSource
from hotplan.replay.scheduler import Request, Scheduler, Step
from hotplan.replay.settings import Settings
from hotplan.replay.steps import Built, padded_size
from hotplan.replay.trace import TraceRecord
from hotplan.replay.verify import CheckError, describe_step
from hotplan.replay.verify_residency import Launch, ResidencyChecker

CHECKED_IDS = 25_000_000
"""Top-k ids that a checked replay resolves by default: about a minute, for the reference takes 2.5 us for each."""

CHECKED_ROW_BYTES = 64
"""Bytes of a host row that a checked replay keeps and moves on the CPU by default, instead of the whole row."""

MAX_HOT_SLOTS = 32768
_GROUP = 8  # requests in a row that are followed together, so that they meet in steps


@dataclass(frozen=True)
class HiSparseSettings:
    """Sizes in slots or bytes; raises ValueError naming the setting, what was expected and what came."""

    hot_sizes: tuple[int, ...] = ()  # H, hot slots per request; (): (draft tokens + 2) x top-k
    block_size: int = 64  # hot slots per page
    row_bytes: int = 656  # one token's KV in one layer: 656 fp8 MLA, 576, 1152 bf16
    layers_per_group: int = 1  # layers that share their top-k ids and one resolution
    groups: int = 1  # such groups in the model: bytes, time and memory are multiplied
    pcie_gbps: float = 48.0  # GB/s of gathers from pinned memory; 45.6 to 50.9 by row size on PCIe 5 x16
    requests: int | None = None  # follow so many; None: all, with a check as many as make CHECKED_IDS ids
    pool_row_bytes: int | None = None  # bytes of a row that are there and move; None: row_bytes or CHECKED_ROW_BYTES

    def __post_init__(self) -> None:
        def need(ok: bool, name: str, expected: str) -> None:
            if not ok:
                raise ValueError(f"{name}: expected {expected}, got {getattr(self, name)}")

        need(len(set(self.hot_sizes)) == len(self.hot_sizes), "hot_sizes", "every size once")
        need(1 <= self.block_size <= MAX_HOT_SLOTS, "block_size", f"1..{MAX_HOT_SLOTS}")
        for name in ("row_bytes", "pool_row_bytes"):
            value = getattr(self, name)
            fits = value is None or (16 <= value <= 2**20 and value % 16 == 0)
            need(fits, name, "a multiple of 16 in 16..1048576")
        need(1 <= self.layers_per_group <= 1024, "layers_per_group", "1..1024")
        need(1 <= self.groups <= 1024, "groups", "1..1024")
        need(0 < self.pcie_gbps < float("inf"), "pcie_gbps", "GB/s above 0")
        need(self.requests is None or self.requests >= 1, "requests", "at least 1")

    def sizes(self, top_k: int, step_tokens: int) -> tuple[int, ...]:
        """Hot sizes, ascending. Every token of a step must find room, for they are resolved as one set."""
        least = step_tokens * top_k
        if least > MAX_HOT_SLOTS:
            raise ValueError(
                f"top_k: expected at most {MAX_HOT_SLOTS // step_tokens} with {step_tokens} tokens a step, which"
                f" share {MAX_HOT_SLOTS} hot slots at most, got {top_k}"
            )
        if not self.hot_sizes:
            return (min(least + top_k, MAX_HOT_SLOTS),)
        for size in self.hot_sizes:
            if not least <= size <= MAX_HOT_SLOTS:
                tokens = "" if step_tokens == 1 else f" for {step_tokens} tokens a step"
                raise ValueError(f"hot_sizes: expected {least}..{MAX_HOT_SLOTS} with top_k={top_k}{tokens}, got {size}")
        return tuple(sorted(self.hot_sizes))

    def step_bytes(self, misses: np.ndarray) -> np.ndarray:
        """Bytes that cross PCIe for so many misses of one group."""
        return misses * (self.row_bytes * self.layers_per_group * self.groups)

    def pcie_ms(self, misses: np.ndarray) -> np.ndarray:
        return self.step_bytes(misses) / (self.pcie_gbps * 1e6)

    def gpu_bytes(self, hot_size: int) -> int:
        """GPU memory of one request: hot rows of every layer, and a group's ids (int32), LRU (int16) and pages."""
        pages = -(-hot_size // self.block_size)
        rows = pages * self.block_size * self.row_bytes * self.layers_per_group
        return self.groups * (rows + 6 * hot_size + 4 * pages)


def spread(total: int, wanted: int) -> frozenset[int]:
    """`wanted` of the numbers 0..total-1, in groups of eight neighbours that are spread evenly."""
    if wanted >= total:
        return frozenset(range(total))
    groups = -(-wanted // _GROUP)
    return frozenset(i + i // _GROUP * (total - wanted) // groups for i in range(wanted))


@dataclass
class SizeLog:
    """One hot size; one entry per resolved step."""

    hot_size: int
    hits: list[int] = field(default_factory=list)
    misses: list[int] = field(default_factory=list)
    cold_misses: list[int] = field(default_factory=list)  # of these, in a request's first step after its admission
    resolve_us: list[float] = field(default_factory=list)
    copy_us: list[float] = field(default_factory=list)  # all layers of a group


@dataclass
class ResidencyLog:
    """What happened; one entry per step that resolved something."""

    settings: HiSparseSettings
    top_k: int
    source: str
    followed: int
    host_rows: int
    pool_row_bytes: int
    checked: bool
    sizes: list[SizeLog] = field(default_factory=list)
    start_ms: list[float] = field(default_factory=list)
    requests: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)  # tokens whose ids were resolved, padding not counted
    unknown_rows: int = 0  # tokens of followed requests without ids in the recording
    checked_rows: int = 0  # launch rows that were compared with the reference, over all hot sizes
    checked_bytes: int = 0  # bytes of hot rows that were compared with their host rows

    def __len__(self) -> int:
        return len(self.start_ms)


class _Buffer:
    """The hot buffer of one size, its log, and its checker."""

    def __init__(self, hot: HotBuffer, log: SizeLog, checker: ResidencyChecker | None) -> None:
        self.hot = hot
        self.log = log
        self.checker = checker

    def admit(self) -> int:
        number = self.hot.admit()
        if self.checker:
            self.checker.admit(number)
        return number

    def release(self, number: int) -> None:
        self.hot.release(number)
        if self.checker:
            self.checker.release(number)

    def invalidate(self, numbers: torch.Tensor, slots: torch.Tensor) -> None:
        self.hot.invalidate(numbers.to(self.hot.device), slots.to(self.hot.device))
        if self.checker:
            self.checker.invalidate(numbers, slots)


class HiSparse:
    """Observer of a replay that resolves and copies every step's top-k ids; see the module's description.

    Args:
        scheduler: the replay's, before its first step.
        trace: the replay's, in the order of arrival.
        settings: see `HiSparseSettings`.
        source: top-k ids.
        check: compare every launch with the reference and every hot row with its host row; raises CheckError.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        trace: Sequence[TraceRecord],
        settings: HiSparseSettings,
        source: TopKSource,
        check: bool = False,
    ) -> None:
        server, tables = scheduler.settings, scheduler.tables
        self._server, self._tables, self._source = server, tables, source
        self._device = tables.device
        sizes = settings.sizes(source.top_k, server.step_tokens)
        candidates = [i for i in range(len(trace)) if source.follows(i)]
        wanted = settings.requests or len(candidates)
        if check and settings.requests is None:
            per_token = _rows_per_token(server) * source.top_k * len(sizes)
            mean = sum(trace[i].output_length for i in candidates) / max(len(candidates), 1)
            wanted = max(1, int(CHECKED_IDS / (per_token * mean)))
        self._followed = frozenset(candidates[i] for i in spread(len(candidates), wanted))

        host_rows = len(tables.host_full_to_state)
        moved = settings.pool_row_bytes or settings.row_bytes
        if check and settings.pool_row_bytes is None and self._device.type == "cpu":
            moved = min(moved, CHECKED_ROW_BYTES)
        self._host = HostRows(host_rows, moved, settings.layers_per_group, self._device, patterned=check)
        self.log = ResidencyLog(
            settings, source.top_k, source.describe(), len(self._followed), host_rows, moved, checked=check
        )
        admitted = max(min(server.max_running, len(self._followed)), 1)
        self._buffers = []
        for size in sizes:
            hot = HotBuffer(
                self._host.pools,
                max_requests=admitted,
                max_rows=padded_size(admitted) * server.step_tokens,
                top_k=source.top_k,
                hot_slots=size,
                block_size=settings.block_size,
                device=self._device,
            )
            checker = ResidencyChecker(hot, self._host) if check else None
            self._buffers.append(_Buffer(hot, SizeLog(size), checker))
        self.log.sizes = [buffer.log for buffer in self._buffers]
        # The pages of every admitted request, as of its last step.
        self._pages = torch.zeros((admitted, tables.row_pages), dtype=torch.int32, device=self._device)
        self._admitted: dict[int, tuple[Request, int, int]] = {}  # index -> (request, admission, number)

    def __call__(self, step: Step, built: Built) -> None:
        try:
            self._serve(step)
        except AssertionError as error:
            raise CheckError(f"{describe_step(step)}: {error}") from None

    def _serve(self, step: Step) -> None:
        self._release()
        followed = [
            (request, prefix, prefix + extend)
            for request, prefix, extend in zip(step.requests, step.prefix.tolist(), step.extend.tolist(), strict=True)
            if request.index in self._followed and not request.prefilling
        ]
        cold = {self._admit(r) for r, _, _ in followed if r.index not in self._admitted}
        numbers = [self._admitted[r.index][2] for r, _, _ in followed]
        written = self._written(followed, numbers)
        if followed:
            for buffer in self._buffers:
                buffer.invalidate(*written)
            launch = self._launch(step, followed, numbers)
            if launch is not None:
                self._resolve(step, launch, cold)
        if self._host.patterned:
            self._host.write(self._slots(step.requests, step.prefix, step.seq))
        if followed:
            for buffer in self._buffers:
                buffer.invalidate(*written)

    # -- requests ------------------------------------------------------------------------------------------------------

    def _release(self) -> None:
        for index, (request, admission, number) in list(self._admitted.items()):
            if request.row < 0 or request.admissions != admission:
                for buffer in self._buffers:
                    buffer.release(number)
                del self._admitted[index]
                if request.generated >= request.record.output_length:
                    self._source.forget(index)

    def _admit(self, request: Request) -> int:
        """Its number, the same in all buffers since they admit and release alike."""
        (number,) = {buffer.admit() for buffer in self._buffers}
        self._admitted[request.index] = (request, request.admissions, number)
        return number

    # -- a step --------------------------------------------------------------------------------------------------------

    def _slots(self, requests: Iterable[Request], prefix: Iterable[int], seq: Iterable[int]) -> np.ndarray:
        """The slots of the tokens [prefix, seq) of every request, one after the other."""
        table = self._tables.host_req_to_token.numpy()
        slots = [table[r.row, p:s] for r, p, s in zip(requests, prefix, seq, strict=True)]
        return np.concatenate(slots or [np.empty(0)]).astype(np.int64)

    def _written(
        self, followed: list[tuple[Request, int, int]], numbers: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Number and slot of every new token."""
        lengths = [seq - prefix for _, prefix, seq in followed]
        slots = self._slots(*(zip(*followed, strict=True) if followed else ([], [], [])))
        return torch.tensor(np.repeat(numbers, lengths).astype(np.int32)), torch.from_numpy(slots)

    def _launch(self, step: Step, followed: list[tuple[Request, int, int]], numbers: list[int]) -> Launch | None:
        """The ids of a step's tokens as launch rows, padded like a captured decode batch; None: there are none."""
        requests: list[int] = []
        tokens: list[tuple[int, int]] = []
        ids: list[np.ndarray] = []
        for (request, prefix, seq), number in zip(followed, numbers, strict=True):
            for position in range(prefix, seq):
                row = self._source.ids(request.index, position)
                if row is None:
                    self.log.unknown_rows += 1
                    continue
                requests.append(number)
                tokens.append((request.index, position))
                ids.append(row)
        if not ids:
            return None
        if step.kind == "decode" and self._server.pad_decode:
            padding = padded_size(len(ids)) - len(ids)
            requests += [-1] * padding
            ids += [np.full(self._source.top_k, -1, dtype=np.int32)] * padding

        positions = np.stack(ids)
        row_of = {number: r.row for (r, _, _), number in zip(followed, numbers, strict=True)}
        table_rows = np.array([row_of.get(number, 0) for number in requests])[:, None]
        slots = self._tables.host_req_to_token.numpy()[table_rows, np.maximum(positions, 0)]
        by_position = self._server.step_tokens > 1
        if by_position:
            page_size = self._tables.page_size
            first_slots = self._tables.req_to_token.view(-1, self._tables.row_pages, page_size)[:, :, 0]
            rows = torch.tensor(list(row_of.values()), device=self._device)
            self._pages[torch.tensor(list(row_of), device=self._device)] = first_slots[rows] // page_size
        return Launch(
            tokens=tokens,
            requests=torch.tensor(requests, dtype=torch.int32),
            positions=torch.from_numpy(positions),
            slots=torch.from_numpy(np.where(positions >= 0, slots, -1)),
            pages=self._pages if by_position else None,
            page_size=self._tables.page_size,
            union_rows=self._server.step_tokens,
        )

    def _resolve(self, step: Step, launch: Launch, cold: set[int]) -> None:
        ids, requests = launch.ids.to(self._device), launch.requests.to(self._device)
        is_cold = np.isin(launch.requests.numpy(), list(cold))
        options = launch.options()
        results = []
        for buffer in self._buffers:
            hot = buffer.hot
            hot.reset_stats()
            self._synchronize()
            start = time.perf_counter_ns()
            hot.resolve(ids, requests, **options)
            self._synchronize()
            resolved = time.perf_counter_ns()
            for layer in range(hot.layers):
                hot.gather(layer)
            self._synchronize()
            copied = time.perf_counter_ns()
            hits, misses = hot.stats()
            cold_misses = int(hot.swap_counts[: len(requests)].cpu().numpy()[is_cold].sum())
            if buffer.checker:
                compared = buffer.checker.compare(launch)
                self.log.checked_rows += len(requests)
                self.log.checked_bytes += compared
            results.append((hits, misses, cold_misses, (resolved - start) / 1e3, (copied - resolved) / 1e3))
        # Only now, so that an interrupt leaves whole steps.
        for buffer, (hits, misses, cold_misses, resolve_us, copy_us) in zip(self._buffers, results, strict=True):
            buffer.log.hits.append(hits)
            buffer.log.misses.append(misses)
            buffer.log.cold_misses.append(cold_misses)
            buffer.log.resolve_us.append(resolve_us)
            buffer.log.copy_us.append(copy_us)
        self.log.start_ms.append(step.start_ms)
        self.log.requests.append(len({index for index, _ in launch.tokens}))
        self.log.rows.append(len(launch.tokens))

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _rows_per_token(server: Settings) -> float:
    """Launch rows for one token that stays: all of a verify step's, over the expected number accepted."""
    accepted = sum(server.accept_rate**i for i in range(server.step_tokens))
    return server.step_tokens / accepted
