"""Compress plans: hotplan beside SGLang's kernels, built in the same run.

    python benchmark/bench_compress.py --sglang PATH --out benchmark/results/NAME.jsonl

See benchmark/README.md for what is measured and how.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

import hotplan
import hotplan.reference
import peers
import report
import timing
from common_options import chosen_sections, parser_for, peer_root, ready_device

PAGE = 256  # SWA page of the server
RATIOS = (4, 128)
RINGS = {4: 8, 128: 128}  # without speculation
SPECULATIVE_RINGS = {4: 16, 128: 256}
BOTH = "c4 + c128"
OFFSET = 4096  # state_slot_offset of the online plans
SETS = 20  # input sets a timed call rotates through

Call = Callable[[], Any]
Want = Callable[[int], list[torch.Tensor]]


@dataclass(frozen=True)
class Case:
    """A batch: ``requests`` requests with ``new`` new tokens each, after a prefix of 0 to ``max_prefix``
    tokens.

    ``ragged`` draws each request's new tokens from 1 to ``2 * new - 1`` instead, with the total left as it
    is.
    """

    requests: int
    new: int
    max_prefix: int
    ragged: bool = False

    @property
    def name(self) -> str:
        return f"{self.requests} x {'~' if self.ragged else ''}{self.new}"

    @property
    def tokens(self) -> int:
        return self.requests * self.new


@dataclass(frozen=True)
class Inputs:
    """One set of inputs; tables of its own, so that no two sets share a cache line."""

    rid: torch.Tensor
    r2t: torch.Tensor
    f2s: torch.Tensor
    seq: torch.Tensor
    ext: torch.Tensor
    num_q: int

    @cached_property
    def host(self) -> Inputs:
        """The same on the CPU."""
        return Inputs(*(t.cpu() for t in (self.rid, self.r2t, self.f2s, self.seq, self.ext)), self.num_q)

    @cached_property
    def host_lengths(self) -> Inputs:
        """Lengths on the CPU, everything else where it is."""
        return replace(self, seq=self.seq.cpu(), ext=self.ext.cpu())

    @property
    def bytes(self) -> int:
        return sum(t.nbytes for t in (self.rid, self.r2t, self.f2s, self.seq, self.ext))


def make_inputs(case: Case, index: int, device: torch.device) -> Inputs:
    """Set ``index`` of a case. Both tables map whole 256-token pages to shuffled pages, as a paged allocator
    leaves them; request rows are shuffled and row 0 stays unused, as in a server."""
    seed = torch.Generator().manual_seed(1_000_003 * case.requests + 1009 * case.new + index)
    on_device = torch.Generator(device=device).manual_seed(index)
    count = case.requests
    if case.ragged:
        share = torch.randint(1, 2 * case.new, (count,), generator=seed)
        extend = _with_sum(share, case.tokens)
    else:
        extend = torch.full((count,), case.new)
    prefix = torch.randint(0, case.max_prefix + 1, (count,), generator=seed)
    pages = math.ceil((case.max_prefix + int(extend.max())) / PAGE)
    total = (count + 1) * pages
    offsets = torch.arange(PAGE, device=device)

    def shuffled() -> torch.Tensor:
        order = torch.randperm(total, generator=on_device, device=device)
        return (order[:, None] * PAGE + offsets).flatten()

    return Inputs(
        rid=(1 + torch.randperm(count, generator=seed)).to(device),
        r2t=shuffled().to(torch.int32).view(count + 1, pages * PAGE),
        f2s=shuffled(),
        seq=(prefix + extend).to(device),
        ext=extend.to(device),
        num_q=int(extend.sum()),
    )


def _with_sum(values: torch.Tensor, total: int) -> torch.Tensor:
    """``values`` (all >= 1) nudged by one here and there until they add up to ``total``."""
    values = values.clone()
    while (missing := total - int(values.sum())) != 0:
        movable = torch.nonzero(values > (1 if missing < 0 else 0)).flatten()[: abs(missing)]
        values[movable] += 1 if missing > 0 else -1
    return values


# --- The timed calls. Each returns a closure around one call of `lib`, which is hotplan or its reference. ---


def prefill(lib: Any, x: Inputs, ratio: int, ring: int, *, padded: bool, use_req_ring: bool = False) -> Call:
    fn = lib.plan_compress_prefill
    rid, r2t, f2s, seq, ext, num_q = x.rid, x.r2t, x.f2s, x.seq, x.ext, x.num_q
    return lambda: fn(
        rid,
        r2t,
        f2s,
        seq,
        ext,
        num_q_tokens=num_q,
        compress_ratio=ratio,
        swa_page_size=PAGE,
        ring_size=ring,
        use_req_ring=use_req_ring,
        use_cuda_graph=padded,
    )


def step_prefill(x: Inputs, rings: dict[int, int], *, padded: bool) -> Call:
    fn = hotplan.plan_step_prefill
    rid, r2t, f2s, seq, ext, num_q = x.rid, x.r2t, x.f2s, x.seq, x.ext, x.num_q
    ratios, ring_sizes = tuple(rings), tuple(rings.values())
    return lambda: fn(
        rid,
        r2t,
        f2s,
        seq,
        ext,
        num_q_tokens=num_q,
        swa_page_size=PAGE,
        ratios=ratios,
        ring_sizes=ring_sizes,
        use_cuda_graph=padded,
    )


def decode(lib: Any, x: Inputs, ratio: int, ring: int) -> Call:
    fn = lib.plan_compress_decode
    rid, r2t, f2s, seq = x.rid, x.r2t, x.f2s, x.seq
    return lambda: fn(rid, r2t, f2s, seq, compress_ratio=ratio, swa_page_size=PAGE, ring_size=ring)


def step_decode(x: Inputs, rings: dict[int, int]) -> Call:
    fn = hotplan.plan_step_decode
    rid, r2t, f2s, seq = x.rid, x.r2t, x.f2s, x.seq
    ratios, ring_sizes = tuple(rings), tuple(rings.values())
    out = {r: torch.empty((rid.shape[0], 16), dtype=torch.uint8, device=rid.device) for r in rings}
    return lambda: fn(rid, r2t, f2s, seq, swa_page_size=PAGE, ratios=ratios, ring_sizes=ring_sizes, out=out)


def prefill_legacy(lib: Any, x: Inputs, ratio: int, *, padded: bool) -> Call:
    fn = lib.plan_compress_prefill_legacy
    rid, seq, ext, num_q = x.rid, x.seq, x.ext, x.num_q
    return lambda: fn(rid, seq, ext, num_q_tokens=num_q, compress_ratio=ratio, use_cuda_graph=padded)


def decode_legacy(lib: Any, x: Inputs, ratio: int) -> Call:
    fn = lib.plan_compress_decode_legacy
    rid, seq = x.rid, x.seq
    return lambda: fn(rid, seq, compress_ratio=ratio)


def online_prefill(lib: Any, x: Inputs, *, padded: bool) -> Call:
    fn = lib.plan_online_prefill
    rid, seq, ext, num_q = x.rid, x.seq, x.ext, x.num_q
    return lambda: fn(rid, seq, ext, num_q_tokens=num_q, state_slot_offset=OFFSET, use_cuda_graph=padded)


def online_decode(lib: Any, x: Inputs) -> Call:
    fn = lib.plan_online_decode
    rid, seq = x.rid, x.seq
    return lambda: fn(rid, seq, state_slot_offset=OFFSET)


def online_verify(lib: Any, x: Inputs, drafts: int) -> Call:
    fn = lib.plan_online_verify
    rid, prefix = x.rid, (x.seq - x.ext).to(torch.int32)
    active = rid.shape[0] - 1
    return lambda: fn(rid, prefix, num_draft_tokens=drafts, state_slot_offset=OFFSET, active_batch_size=active)


class Bench:
    """Inputs, expected results, and one row per measurement."""

    def __init__(self, device: torch.device, peer: peers.SGLangCompress | None, *, quick: bool) -> None:
        self.device = device
        self.peer = peer
        self.gpu = device.type == "cuda"
        self.quick = quick
        self.sets = (4 if quick else SETS) if self.gpu else 2
        self.repeats = (5 if quick else 21) if self.gpu else (3 if quick else 15)
        self.rows: list[report.Row] = []
        self._inputs: dict[Case, list[Inputs]] = {}
        self._wanted: dict[Any, list[torch.Tensor]] = {}

    def inputs(self, case: Case) -> list[Inputs]:
        if case not in self._inputs:
            self._inputs[case] = [make_inputs(case, index, self.device) for index in range(self.sets)]
        return self._inputs[case]

    def want(self, case: Case, key: Any, make: Callable[[Any, Inputs], Call]) -> Want:
        """What the reference gives for set ``index``, as CPU tensors, computed once per case and key."""

        def wanted(index: int) -> list[torch.Tensor]:
            where = (case, key, index)
            if where not in self._wanted:
                call = make(hotplan.reference, self.inputs(case)[index].host)
                self._wanted[where] = list(timing.tensors_in(call()))
            return self._wanted[where]

        return wanted

    def measure(
        self,
        section: str,
        case: Case,
        plans: str,
        metric: str,
        ours: Sequence[Call],
        want: Want,
        *,
        theirs: Sequence[Call] | None = None,
        peer_note: str | None = None,
        goal: float | None = None,
        name: str | None = None,
    ) -> None:
        """Time our calls, and the peer's, and check the results of both. A wrong result or an exception
        becomes the row's ``checked`` and the run goes on, so that one fault does not cost the time of all the
        others."""

        def check_ours(index: int, result: Any) -> None:
            _same_bytes(list(timing.tensors_in(result)), want(index), f"set {index}")

        def check_theirs(index: int, result: Any) -> None:
            # A plan has two dimensions; what else a wrapper returns (its scratch buffer) has not.
            _same_rows([t for t in timing.tensors_in(result) if t.dim() == 2], want(index), f"set {index}")

        stats, checked = None, None
        if metric == "wall" or self.gpu:
            try:
                stats = self._time(metric, ours, check_ours)
                checked = "reference"
            except (AssertionError, RuntimeError, ValueError, TypeError) as error:
                checked = f"WRONG: {report.first_line(error)}"
        peer_stats = None
        if theirs is not None and self.peer is not None:
            try:
                peer_stats = self._time(metric, theirs, check_theirs)
            except (RuntimeError, ValueError, TypeError) as error:
                refused = "only support batch size" in str(error)
                peer_note = "refused" if refused else f"error: {report.first_line(error)}"
            except AssertionError as error:
                peer_note = f"differs: {report.first_line(error)}"
        elif self.peer is None:
            peer_note = None
        row = report.make_row(
            section,
            name or case.name,
            plans,
            metric,
            stats.as_dict() if stats else None,
            peer_stats.as_dict() if peer_stats else None,
            peer_name=self.peer.name if self.peer and (theirs is not None or peer_note) else None,
            peer_note=peer_note,
            goal=goal,
            checked=checked,
            sets=self.sets,
            input_bytes=sum(x.bytes for x in self.inputs(case)),
        )
        self.rows.append(row)
        shown = " ".join(f"{who} {value.median:.2f}" for who, value in (("ours", stats), ("peer", peer_stats)) if value)
        print(
            f"  {section}: {row['case']}, {plans}, {metric}: {shown or checked or 'not measured'}",
            file=sys.stderr,
            flush=True,
        )

    def _time(self, metric: str, calls: Sequence[Call], check: timing.Check) -> timing.Stats:
        if metric == "graph":
            return timing.graph_time(calls, self.repeats, check=check)
        for index, call in enumerate(calls):
            check(index, call())
        return timing.wall_time(calls, repeats=self.repeats, sync=torch.cuda.synchronize if self.gpu else None)

    @property
    def metric_on_device(self) -> tuple[str, ...]:
        """What a GPU-time section measures: without a GPU its column stays empty and the host's time stands
        in."""
        return ("graph",) if self.gpu else ("graph", "wall")


# --- Sections ---

# requests, new tokens, longest prefix; goals in us for one ratio and for both
PREFILL_GRAPH = [
    (Case(1, 8192, 8192), 3, 4),
    (Case(1, 65535, 8192), 4, 5),
    (Case(8, 8191, 8192), 4, 5),
    (Case(256, 255, 4096), 4, 5),
    (Case(1000, 65, 2048), 5, 6),
    (Case(1000, 4, 2048), 3, 4),
    (Case(16000, 4, 508), 8, 10),
]
PREFILL_WALL = [
    (Case(1, 8192, 8192), 12, 16),
    (Case(8, 8191, 8192), 12, 16),
    (Case(256, 255, 4096), 15, 20),
    (Case(1000, 65, 2048), 20, 25),
]
DECODE_BATCHES = (1, 8, 64, 256, 1024)
DECODE_GRAPH_GOAL, DECODE_WALL_GOAL = 2.0, 6.0


def _prefill_rows(
    b: Bench,
    section: str,
    case: Case,
    metric: str,
    *,
    rings: dict[int, int] = RINGS,
    goals: tuple[float | None, float | None] = (None, None),
    lengths_on_host: bool = False,
    label: str = "",
) -> None:
    """Rows c4, c128 and both in one launch. The peer's time for both is that of its two calls, one after the
    other."""
    sets = b.inputs(case)
    xs = [x.host_lengths for x in sets] if lengths_on_host else sets
    padded = not lengths_on_host
    want_of = {
        ratio: b.want(
            case,
            ("prefill", ratio, ring),
            lambda lib, x, ratio=ratio, ring=ring: prefill(lib, x, ratio, ring, padded=True),
        )
        for ratio, ring in rings.items()
    }

    def shape(wanted: list[torch.Tensor]) -> list[torch.Tensor]:
        return wanted if padded else [_valid_rows(t) for t in wanted]

    def want_both(index: int) -> list[torch.Tensor]:
        return [t for ratio in rings for t in shape(want_of[ratio](index))]

    def their(x: Inputs, ratio: int) -> Call | None:
        if b.peer is None:
            return None
        call = b.peer.prefill if metric == "graph" else b.peer.generate_prefill
        return lambda: call(x.rid, x.r2t, x.f2s, x.seq, x.ext, num_q=x.num_q, ratio=ratio, page=PAGE, ring=rings[ratio])

    for ratio, ring in rings.items():
        b.measure(
            section,
            case,
            f"c{ratio}{label}",
            metric,
            [prefill(hotplan, x, ratio, ring, padded=padded) for x in xs],
            lambda index, ratio=ratio: shape(want_of[ratio](index)),
            theirs=[their(x, ratio) for x in xs] if b.peer else None,
            goal=goals[0],
        )
    pairs = [[their(x, ratio) for ratio in rings] for x in xs] if b.peer else None
    b.measure(
        section,
        case,
        BOTH + label,
        metric,
        [step_prefill(x, rings, padded=padded) for x in xs],
        want_both,
        theirs=[_in_turn(pair) for pair in pairs] if pairs else None,
        goal=goals[1],
    )


def _in_turn(calls: Sequence[Call]) -> Call:
    first, second = calls
    return lambda: (first(), second())


def prefill_graph(b: Bench) -> None:
    for case, one, both in PREFILL_GRAPH:
        if not b.quick or case.tokens <= 8192:
            for metric in b.metric_on_device:
                _prefill_rows(b, "Prefill plans, lengths on the GPU", case, metric, goals=_goals(b, one, both))


def prefill_wall(b: Bench) -> None:
    for case, one, both in PREFILL_WALL:
        if not b.quick or case.tokens <= 8192:
            _prefill_rows(
                b,
                "Prefill plans, lengths on the CPU",
                case,
                "wall",
                goals=_goals(b, one, both),
                lengths_on_host=True,
            )


def _goals(b: Bench, *goals: float) -> tuple[float | None, ...]:
    """The goals are for an H200-class GPU; the CPU backend has none."""
    return goals if b.gpu else (None,) * len(goals)


def decode_section(b: Bench) -> None:
    section = "Decode plans, both ratios in one launch into preallocated outputs"
    for batch in (1, 8) if b.quick else DECODE_BATCHES:
        case = Case(batch, 1, 4095)
        xs = b.inputs(case)
        wants = [
            b.want(case, ("decode", ratio), lambda lib, x, ratio=ratio: decode(lib, x, ratio, RINGS[ratio]))
            for ratio in RATIOS
        ]
        for metric, goal in zip(("graph", "wall"), _goals(b, DECODE_GRAPH_GOAL, DECODE_WALL_GOAL), strict=True):
            b.measure(
                section,
                case,
                BOTH,
                metric,
                [step_decode(x, RINGS) for x in xs],
                lambda index, wants=wants: [t for want in wants for t in want(index)],
                theirs=[_in_turn([_their_decode(b.peer, x, r, metric) for r in RATIOS]) for x in xs]
                if b.peer
                else None,
                goal=goal,
                name=f"batch {batch}",
            )


def _their_decode(peer: peers.SGLangCompress, x: Inputs, ratio: int, metric: str) -> Call:
    call = peer.decode if metric == "graph" else peer.generate_decode
    return lambda: call(x.rid, x.r2t, x.f2s, x.seq, ratio=ratio, page=PAGE, ring=RINGS[ratio])


def extra(b: Bench) -> None:
    """What the goals leave out: other rings, the request ring, ragged batches, more requests than SGLang
    takes, and the legacy and online plans."""
    section = "Beyond the goals"
    long, verify = (Case(4, 500, 512), Case(32, 4, 1024)) if b.quick else (Case(256, 255, 4096), Case(1000, 4, 2048))
    for metric in b.metric_on_device:
        _prefill_rows(b, section, verify, metric, rings=SPECULATIVE_RINGS, label=", rings 16 and 256")
        if not b.quick:
            _prefill_rows(b, section, Case(256, 255, 4096, ragged=True), metric)
            _prefill_rows(b, section, Case(4096, 16, 1024), metric)
        _req_ring_row(b, section, verify, metric)
    if not b.quick:
        _prefill_rows(b, section, Case(4096, 16, 1024), "wall", lengths_on_host=True, label=", CPU lengths")
    _decode_alone_rows(b, section, Case(8 if b.quick else 64, 1, 4095))
    _legacy_rows(b, section, long)
    _online_rows(b, section, long, verify)


def _req_ring_row(b: Bench, section: str, case: Case, metric: str) -> None:
    ring = SPECULATIVE_RINGS[4]
    xs = b.inputs(case)

    def make(lib: Any, x: Inputs) -> Call:
        return prefill(lib, x, 4, ring, padded=True, use_req_ring=True)

    def their(x: Inputs) -> Call:
        return lambda: b.peer.prefill(
            x.rid,
            x.r2t,
            x.f2s,
            x.seq,
            x.ext,
            num_q=x.num_q,
            ratio=4,
            page=PAGE,
            ring=ring,
            use_req_ring=True,
        )

    b.measure(
        section,
        case,
        "c4, request ring 16",
        metric,
        [make(hotplan, x) for x in xs],
        b.want(case, "request ring", make),
        theirs=[their(x) for x in xs] if b.peer else None,
    )


def _decode_alone_rows(b: Bench, section: str, case: Case) -> None:
    xs = b.inputs(case)
    for ratio in RATIOS:

        def make(lib: Any, x: Inputs, ratio: int = ratio) -> Call:
            return decode(lib, x, ratio, RINGS[ratio])

        for metric in ("graph", "wall"):
            b.measure(
                section,
                case,
                f"c{ratio} decode alone, output allocated",
                metric,
                [make(hotplan, x) for x in xs],
                b.want(case, ("decode", ratio), make),
                theirs=[_their_decode(b.peer, x, ratio, metric) for x in xs] if b.peer else None,
                name=f"batch {case.requests}",
            )


def _legacy_rows(b: Bench, section: str, case: Case) -> None:
    sets = b.inputs(case)
    for ratio in RATIOS:
        want = b.want(case, ("legacy", ratio), lambda lib, x, ratio=ratio: prefill_legacy(lib, x, ratio, padded=True))
        plans = f"c{ratio} legacy"
        for metric in b.metric_on_device:
            b.measure(
                section,
                case,
                plans,
                metric,
                [prefill_legacy(hotplan, x, ratio, padded=True) for x in sets],
                want,
                peer_note="CPU lengths only",
            )
        xs = [x.host_lengths for x in sets]
        b.measure(
            section,
            case,
            f"{plans}, CPU lengths",
            "wall",
            [prefill_legacy(hotplan, x, ratio, padded=False) for x in xs],
            lambda index, want=want: [_valid_rows(t) for t in want(index)],
            theirs=[_their_legacy(b.peer, x, ratio) for x in xs] if b.peer else None,
        )
    batch = Case(8 if b.quick else 64, 1, 4095)
    for metric in ("graph", "wall"):
        b.measure(
            section,
            batch,
            "c4 legacy decode",
            metric,
            [decode_legacy(hotplan, x, 4) for x in b.inputs(batch)],
            b.want(batch, "legacy decode", lambda lib, x: decode_legacy(lib, x, 4)),
            theirs=[_their_legacy_decode(b.peer, x, metric) for x in b.inputs(batch)] if b.peer else None,
            name=f"batch {batch.requests}",
        )


def _their_legacy(peer: peers.SGLangCompress, x: Inputs, ratio: int) -> Call:
    return lambda: peer.generate_prefill_legacy(x.rid, x.seq, x.ext, num_q=x.num_q, ratio=ratio)


def _their_legacy_decode(peer: peers.SGLangCompress, x: Inputs, metric: str) -> Call:
    if metric == "graph":
        return lambda: peer.module.plan_decode_legacy(x.rid, x.seq, 4)
    return lambda: peer.generate_decode_legacy(x.rid, x.seq, ratio=4)


def _online_rows(b: Bench, section: str, case: Case, verify: Case) -> None:
    sets = b.inputs(case)
    want = b.want(case, "online", lambda lib, x: online_prefill(lib, x, padded=True))
    b.measure(
        section,
        case,
        "online",
        "graph",
        [online_prefill(hotplan, x, padded=True) for x in sets],
        want,
        peer_note="synchronises",
    )
    for xs, padded, lengths in (
        (sets, True, "GPU" if b.gpu else "device"),
        ([x.host_lengths for x in sets], False, "CPU"),
    ):
        # Without a sync only padded plans are possible; SGLang fetches the lengths first, and pads when asked
        # to.
        b.measure(
            section,
            case,
            f"online, {lengths} lengths",
            "wall",
            [online_prefill(hotplan, x, padded=padded) for x in xs],
            want if padded else lambda index: [_valid_rows(t) for t in want(index)],
            theirs=[_their_online(b.peer, x, padded) for x in xs] if b.peer else None,
        )
    batch = Case(8 if b.quick else 64, 1, 4095)
    for metric in ("graph", "wall"):
        b.measure(
            section,
            batch,
            "online decode",
            metric,
            [online_decode(hotplan, x) for x in b.inputs(batch)],
            b.want(batch, "online decode", online_decode),
            theirs=[_their_online_decode(b.peer, x) for x in b.inputs(batch)] if b.peer else None,
            name=f"batch {batch.requests}",
        )
    for metric in ("graph", "wall"):
        b.measure(
            section,
            verify,
            "online verify",
            metric,
            [online_verify(hotplan, x, verify.new) for x in b.inputs(verify)],
            b.want(verify, "online verify", lambda lib, x: online_verify(lib, x, verify.new)),
            peer_note="not in this release",
        )


def _their_online(peer: peers.SGLangCompress, x: Inputs, padded: bool) -> Call:
    return lambda: peer.generate_online_prefill(
        x.rid, x.r2t, x.seq, x.ext, num_q=x.num_q, offset=OFFSET, use_cuda_graph=padded
    )


def _their_online_decode(peer: peers.SGLangCompress, x: Inputs) -> Call:
    return lambda: peer.generate_online_decode(x.rid, x.r2t, x.seq, offset=OFFSET)


def floors(b: Bench) -> None:
    """What a launch costs with nothing to do, on this machine and in this run."""
    if not b.gpu:
        return
    cells = [torch.zeros(1, device=b.device) for _ in range(b.sets)]
    named: list[tuple[str, list[Call]]] = [
        ("torch fill_ of one element", [lambda cell=cell: cell.fill_(1.0) for cell in cells])
    ]
    if b.peer is not None:
        named.insert(0, ("empty kernel, one warp", [lambda cell=cell: b.peer.module.empty(cell) for cell in cells]))
    for name, calls in named:
        # fill_ returns its tensor, which graph_time may overwrite before the replays; nothing is checked
        # here.
        stats = {
            "graph": timing.graph_time(calls, b.repeats),
            "wall": timing.wall_time(calls, repeats=b.repeats, sync=torch.cuda.synchronize),
        }
        for metric, value in stats.items():
            b.rows.append(report.make_row("Floors", name, "-", metric, value.as_dict()))


SECTIONS: dict[str, Callable[[Bench], None]] = {
    "floors": floors,
    "prefill-graph": prefill_graph,
    "prefill-wall": prefill_wall,
    "decode": decode_section,
    "extra": extra,
}


# --- Checks ---


def _same_bytes(got: list[torch.Tensor], wanted: list[torch.Tensor], where: str) -> None:
    """Raise AssertionError naming the first row that differs."""
    if [tuple(t.shape) for t in got] != [tuple(t.shape) for t in wanted]:
        raise AssertionError(
            f"{where}: shapes {[tuple(t.shape) for t in got]}, wanted {[tuple(t.shape) for t in wanted]}"
        )
    for number, (a, w) in enumerate(zip(got, wanted, strict=True)):
        w = w.to(a.device)
        if not torch.equal(a, w):
            row = int(torch.nonzero((a != w).any(dim=1))[0])
            words = [t[row].contiguous().view(torch.int32).tolist() for t in (a, w)]
            raise AssertionError(f"{where}: plan {number}, row {row}: {words[0]}, wanted {words[1]}")


def _same_rows(got: list[torch.Tensor], wanted: list[torch.Tensor], where: str) -> None:
    """As `_same_bytes`, with the rows of both in an order of their own (SGLang's order on GPU lengths is not
    fixed)."""
    _same_bytes([_sorted_rows(t) for t in got], [_sorted_rows(t.to(got[0].device)) for t in wanted], where)


def _sorted_rows(plan: torch.Tensor) -> torch.Tensor:
    # The first 8 bytes hold the ragged id in every layout that has an order to lose, and invalid rows are all
    # alike.
    key = plan.contiguous().view(torch.int64)[:, 0]
    return plan[torch.argsort(key, stable=True)]


def _valid_rows(plan: torch.Tensor) -> torch.Tensor:
    """A padded prefill plan without its invalid rows, which have all bits of the first word set."""
    return plan[plan.view(torch.int32)[:, 0] != -1]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_for(__doc__, SECTIONS, tuple(SECTIONS))
    options = parser.parse_args(arguments)
    options.sections = chosen_sections(parser, options.sections, SECTIONS)
    return options


def find_peer(options: argparse.Namespace) -> peers.SGLangCompress | None:
    """SGLang's kernels, built now or found built; None where they are not wanted or not to be had."""
    root = peer_root(options)
    if root is None:
        return None
    build = peers.build_peer_compress(root)
    options.peer_version = f"SGLang {peers.sglang_version(root)}"
    print(f"{options.peer_version}, {build.how}", file=sys.stderr)
    return peers.SGLangCompress(build)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sections, print the tables, write the results. Returns 1 if a result of ours was wrong."""
    options = parse(arguments)
    device = ready_device(options)
    if device is None:
        return 2
    begin = time.perf_counter()
    peer = find_peer(options)
    bench = Bench(device, peer, quick=options.quick)
    if bench.gpu:
        timing.warm_clocks(device)
    for name in options.sections:
        SECTIONS[name](bench)
    seconds = time.perf_counter() - begin
    meta = report.collect_meta(
        "bench_compress",
        device=options.device,
        device_index=options.device_index,
        peer=getattr(options, "peer_version", None),
        quick=options.quick,
        seconds=round(seconds, 1),
    )
    return report.publish(bench.rows, meta, options.out)


if __name__ == "__main__":
    raise SystemExit(main())
