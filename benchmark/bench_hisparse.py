"""HiSparse residency: hotplan beside SGLang's kernel, built in the same run.

    python benchmark/bench_hisparse.py --sglang PATH --out benchmark/results/NAME.jsonl

See benchmark/README.md for what is measured and how.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import torch

import hot_measure
import peers
import report
import timing
from common_options import chosen_sections, parser_for
from hot_inputs import (
    CONTEXT,
    GOALS,
    HOT_SLOTS,
    PAGE,
    TOP_K,
    Case,
    Layout,
    Pool,
    Requests,
    Step,
    check_bytes,
    check_equal,
    random_requests,
    rows_of,
    shuffled,
)
from hot_measure import FAULTS, REFERENCE_REQUESTS, Call, Measurements, PeerInBackground, Timed
from hotplan import hisparse
from hotplan.reference import hisparse as reference

ROW_BYTES = (576, 656, 1152)
# Distinct multiples of 4096 below the end of a pool that nothing is copied from.
CLUSTER = 4096
CLUSTER_IDS = 8192
# The goals hold for 576-byte rows and a link that gathers them at this rate.
GOAL_ROW_BYTES, GOAL_RATE = 576, 48.7

COLUMNS = ("requests, misses", "ids")
HOST_ROWS, POSITIONS = "host rows", "positions and pages"

CASES = tuple(Case(requests, percent, goal) for (requests, percent), goal in GOALS.items())
QUICK = {(1, 2), (1, 100), (128, 2)}
BY_POSITION = {(1, 2), (32, 2), (128, 0), (128, 2)}
CLUSTERED = {(1, 2), (1, 100), (128, 2)}
ON_CPU, QUICK_ON_CPU = {(1, 2), (1, 100), (8, 2), (32, 10)}, {(1, 2), (1, 100)}
SWEEP = (
    *(Case(requests, percent) for percent in (2, 10) for requests in (1, 2, 4, 8, 16, 32, 64, 128, 256)),
    *(Case(requests, 2, hot_slots=10240) for requests in (1, 32, 128)),
)
# A gather's own launch vanishes behind so many lists of TOP_K rows: 9 MB, some 200 us.
CEILING_LISTS = 8


# --- Inputs ---


def clustered_requests(case: Case, index: int, device: torch.device) -> Requests:
    """Ids whose low 12 bits are equal."""
    generator = torch.Generator(device=device).manual_seed(1009 * case.requests + index)
    ids = CLUSTER * shuffled(case.requests, CLUSTER_IDS, generator)[:, : case.hot_slots + TOP_K]
    return Requests(ids, generator)


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
    past = {
        name: torch.where(listed, result[name], wanted[name]) for name in ("swap_host", "swap_device") if name in result
    }
    check_equal({**result, **past}, wanted, where)


def scaled_goal(goal: float | None, case: Case, row_bytes: int, rate: float | None) -> float | None:
    """The goal for another row size: what the goal for 576 bytes leaves beside its bytes, and the bytes at the
    measured ceiling (GB/s)."""
    if goal is None or row_bytes == GOAL_ROW_BYTES or rate is None:
        return goal if row_bytes == GOAL_ROW_BYTES else None
    fixed = goal - case.bytes(GOAL_ROW_BYTES) / GOAL_RATE / 1e3
    return round(fixed + case.bytes(row_bytes) / rate / 1e3, 1)


class Bench(Measurements):
    """Inputs, expected results, and one row per measurement."""

    def __init__(self, device: torch.device, pool: Pool, peer: Any, *, row_bytes: Sequence[int], quick: bool) -> None:
        super().__init__(device, peer, quick=quick, columns=COLUMNS)
        self.pool, self.row_bytes = pool, tuple(row_bytes)
        # Every row size gets the same ids, so they are rows of the widest.
        self.host_rows = self.host(max(self.row_bytes)).shape[0]
        wanted = (QUICK if quick else None) if self.gpu else (QUICK_ON_CPU if quick else ON_CPU)
        self.cases = [c for c in CASES if wanted is None or (c.requests, c.percent) in wanted]
        self.rates: dict[tuple[int, int], float | None] = {}
        self._requests: dict[Any, list[Requests]] = {}
        self._steps: dict[Any, list[Step]] = {}
        self._expected: dict[Any, dict[str, torch.Tensor]] = {}
        self.resolved: dict[Case, timing.Stats | None] = {}

    # --- Inputs, made once ---

    def host(self, row_bytes: int) -> torch.Tensor:
        """The pool as rows, uint8 ``[rows, row_bytes]``."""
        return self.pool.rows(Layout(row_bytes))

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
            return self.host(16)
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
        host = self.host(row_bytes)

        def call(r: Requests, step: Step, hot: torch.Tensor) -> Call:
            ids = step.positions if by_position else step.ids
            options = r.page_options if by_position else {}
            arguments = (host, hot, r.hot_table, ids, step.hot, r.dgi, r.lru)
            result = {"hot": step.hot, "dgi": r.dgi, "lru": r.lru}
            return lambda: (hisparse.swap_in(*arguments, **options), result)[-1]

        return self._copying(case, row_bytes, call)

    def resolve_and_gather(self, case: Case, row_bytes: int) -> Timed:
        host = self.host(row_bytes)

        def call(r: Requests, step: Step, hot: torch.Tensor) -> Call:
            arguments = (host, hot, r.hot_table, step.ids, step.hot, r.dgi, r.lru)
            lists, result = step.lists, _resolved(r, step)
            return lambda: (
                hisparse.resolve_residency(*arguments, **lists),
                hisparse.gather_compact(host, hot, *lists.values()),
                result,
            )[-1]

        return self._copying(case, row_bytes, call)

    def resolve(self, case: Case, *, clustered: bool = False, by_position: bool = False) -> Timed:
        sets = list(zip(self.requests(case, clustered), self.steps(case, clustered), strict=True))
        # Only shapes are looked at. Ids are rows of the widest rows' pool, which the narrow ones' holds as well.
        row_bytes = 16 if clustered else self.row_bytes[0]
        host = self.cluster_host if clustered else self.host(row_bytes)

        def call(r: Requests, step: Step) -> Call:
            options: dict[str, Any] = {**step.lists, **(r.page_options if by_position else {})}
            ids = step.positions if by_position else step.ids
            hot = r.hot_cache(Layout(row_bytes)).view(-1, PAGE, row_bytes)
            arguments = (host, hot, r.hot_table, ids, step.hot, r.dgi, r.lru)
            result = _resolved(r, step)
            return lambda: (hisparse.resolve_residency(*arguments, **options), result)[-1]

        def check(index: int, result: dict[str, torch.Tensor]) -> None:
            check_result(result, self.expected(case, index, clustered), f"set {index}")

        return Timed([call(*one) for one in sets], check, [r.state for r, _ in sets])

    def theirs(self, case: Case, row_bytes: int) -> Timed | None:
        """SGLang's swap-in, which has one size of top-k and hot buffer. Checked by the bytes of every column."""
        if self.peer is None or case.hot_slots != HOT_SLOTS:
            return None
        host = self.host(row_bytes)

        def call(r: Requests, step: Step, hot: torch.Tensor) -> Call:
            t, result = r.by_token, {"hot": step.hot}
            arguments = (
                step.positions, t.tokens, t.host_locs, t.device_locs, host, hot.view(-1, row_bytes), step.hot,
                t.requests, t.seq_lens, t.lru, t.num_requests,
            )  # fmt: skip
            return lambda: (self.peer.swap_in(*arguments), result)[-1]

        timed = self._copying(case, row_bytes, call, state=False)
        return replace(timed, states=[r.by_token.state for r in self.requests(case)], who=self.peer.name)

    def _copying(
        self,
        case: Case,
        row_bytes: int,
        make: Callable[[Requests, Step, torch.Tensor], Call],
        *,
        state: bool = True,
    ) -> Timed:
        layout = Layout(row_bytes)
        sets = list(zip(self.requests(case), self.steps(case), strict=True))
        hots = [r.hot_cache(layout).view(-1, PAGE, row_bytes) for r, _ in sets]

        def spoil(index: int) -> None:
            sets[index][0].fill(hots[index], layout)

        def check(index: int, result: dict[str, torch.Tensor]) -> None:
            if state:
                check_result(result, self.expected(case, index), f"set {index}")
            check_bytes(hots[index], layout, result["hot"], sets[index][1].ids, f"set {index}")

        calls = [make(*one, hot) for one, hot in zip(sets, hots, strict=True)]
        return Timed(calls, check, [r.state for r, _ in sets], spoil)

    # --- Measurements ---

    def measure_case(
        self, section: str, case: Case, ids: str, metric: str, ours: Timed, *, bytes_too: bool = False, **options: Any
    ) -> timing.Stats | None:
        checked = self.checked_by(case) + (", bytes" if bytes_too else "")
        return self.measure(section, case.name, ids, metric, ours, checked=checked, **options)

    def rate(self, requests: int, row_bytes: int) -> float | None:
        """GB/s at which gather_compact brings many rows of the contexts of such a batch: what this machine's link
        gives to SMs."""
        key = (requests, row_bytes)
        if key not in self.rates:
            self.rates[key] = _ceiling_row(self, requests, row_bytes)
        return self.rates[key]


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


def _ceiling_row(b: Bench, requests: int, row_bytes: int) -> float | None:
    """Rows in random order of the very contexts whose rows the table copies: what a link gives depends on how far
    they are spread in host memory."""
    layout, host = Layout(row_bytes), b.host(row_bytes)
    lists = max(1, CEILING_LISTS // requests) if b.gpu else 1
    total = requests * lists * TOP_K
    sets = []
    for index, r in enumerate(b.requests(Case(requests, 0))):
        generator = torch.Generator(device=b.device).manual_seed(31 * requests + index)
        positions = shuffled(requests, CONTEXT, generator)[:, : lists * TOP_K]
        ids = rows_of(r.source_table.long(), positions).to(torch.int32).view(-1, TOP_K)
        rows = torch.randperm(total, generator=generator, device=b.device).to(torch.int32).view(-1, TOP_K)
        hot = torch.empty((total // PAGE, PAGE, row_bytes), dtype=torch.uint8, device=b.device)
        sets.append((hot, ids, rows, torch.full((requests * lists,), TOP_K, dtype=torch.int32, device=b.device)))

    def spoil(index: int) -> None:
        sets[index][0].fill_(0xA5)

    def check(index: int, _: Any) -> None:
        hot, ids, rows, _ = sets[index]
        check_bytes(hot, layout, rows, ids, f"set {index}")

    timed = Timed([lambda s=s: hisparse.gather_compact(host, *s) for s in sets], check, spoil=spoil)
    case, how = f"{row_bytes}-byte rows", f"{total}, batch of {requests}"
    stats, rate, checked = None, None, "bytes"
    try:
        stats = b.time(timed)
        rate = total * row_bytes / stats.median / 1e3
    except FAULTS as error:
        checked = f"WRONG: {report.first_line(error)}"
    ours, columns = stats.as_dict() if stats else None, ("rows", "how")
    b.rows.append(report.make_row(CEILING, case, how, "gather_compact", ours, checked=checked, columns=columns))
    if rate is not None:
        _rate_row(b, case, how, rate)
    return rate


def ceiling(b: Bench) -> None:
    for row_bytes in b.row_bytes:
        for requests in sorted({case.requests for case in b.cases}):
            b.rate(requests, row_bytes)
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
    rate = b.rate(case.requests, row_bytes)
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
                "goal": scaled_goal(case.goal, case, row_bytes, b.rate(case.requests, row_bytes)),
                "bytes_too": True,
                "key": (case, row_bytes),
            }
            b.measure_case(section, case, HOST_ROWS, "swap_in", b.swap_in(case, row_bytes), **options)
            # Resolution does not depend on the row size.
            if row_bytes == b.row_bytes[0]:
                _resolve_row(b, section, case)
            both = b.resolve_and_gather(case, row_bytes)
            b.measure_case(section, case, HOST_ROWS, "resolve + gather_compact", both, bytes_too=True)
            if row_bytes == b.row_bytes[0] and (case.requests, case.percent) in BY_POSITION:
                # SGLang always starts from positions, so its number stands beside both.
                fused = b.swap_in(case, row_bytes, by_position=True)
                b.measure_case(section, case, POSITIONS, "swap_in", fused, **options)
                alone = b.resolve(case, by_position=True)
                b.measure_case(section, case, POSITIONS, "resolve", alone, goal=case.resolve_goal)


def _resolve_row(b: Bench, section: str, case: Case) -> None:
    goal = case.resolve_goal
    b.resolved[case] = b.measure_case(section, case, HOST_ROWS, "resolve", b.resolve(case), goal=goal)


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
        b.measure_case(section, case, f"multiples of {CLUSTER}", "resolve", timed, goal=goal)


def sweep(b: Bench) -> None:
    """Other batches and hot buffers than the table's, hotplan alone."""
    row_bytes = b.row_bytes[0]
    section = f"Sweep, {row_bytes}-byte rows"
    for case in SWEEP if b.gpu and not b.quick else SWEEP[:2]:
        _bytes_row(b, section, case, row_bytes)
        b.measure_case(section, case, HOST_ROWS, "swap_in", b.swap_in(case, row_bytes), bytes_too=True)
        b.measure_case(section, case, HOST_ROWS, "resolve", b.resolve(case))


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
    hot_measure.add_pool_option(parser)
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
    cluster = CLUSTER * CLUSTER_IDS * 16 if options.device == "cuda" else 0
    least = max(PAGE * (CONTEXT // PAGE + 1) * max(options.row_bytes), cluster)
    hot_measure.choose_pool(parser, options, least)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sections, print the tables, write the results. Returns 1 if a result of ours was wrong."""
    options = parse(arguments)
    return hot_measure.run(
        "bench_hisparse",
        options,
        family="hisparse",
        peer=lambda: PeerInBackground(
            options, [peers.HISPARSE_HEADER], peers.build_peer_hisparse, lambda build, _: peers.SGLangHiSparse(build)
        ),
        bench=partial(Bench, row_bytes=options.row_bytes, quick=options.quick),
        sections=SECTIONS,
        meta=_meta,
    )


def _meta(b: Bench) -> dict[str, Any]:
    rates = {
        str(size): {str(requests): round(rate, 2) for (requests, of), rate in b.rates.items() if rate and of == size}
        for size in b.row_bytes
    }
    return {"top_k": TOP_K, "hot_slots": HOT_SLOTS, "gather_gb_per_s": rates}


if __name__ == "__main__":
    raise SystemExit(main())
