"""HiSparse with SGLang's addressing: hotplan's device-buffer operators beside SGLang's, built in the same run.

    python benchmark/bench_device_buffer.py --sglang PATH --out benchmark/results/NAME.jsonl

See benchmark/README.md for what is measured and how.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

import hot_measure
import peers
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
    State,
    Step,
    check_bytes,
    check_equal,
    random_device_rows,
    random_pages,
    random_requests,
    rows_of,
    shuffled,
)
from hot_measure import REFERENCE_REQUESTS, Call, Measurements, PeerInBackground, Timed
from hotplan import hisparse
from hotplan.reference import device_buffer as reference

COLUMNS = ("requests, misses", "bytes of an item")
TRANSFER_COLUMNS = ("items of a layer", "direction")
TRANSLATE_COLUMNS = ("locations", "dtype")
HOST_COLUMNS = ("operator", "bytes of an item")

BATCHES, PERCENTS = (1, 8, 32, 128), (0, 2, 10, 50, 100)
FP8, PAGED = Layout(576), Layout(584, paged=True)
LAYOUTS = (FP8, Layout(512), Layout(656), Layout(1152), PAGED)
LARGE_HOT_SLOTS = 2 * HOT_SLOTS
# Of what is not the 576-byte table, these cases say enough: a launch, one request's bytes, the bus.
SOME = ((1, 2), (1, 100), (8, 10), (32, 2), (128, 2), (128, 10))
FEW = ((1, 2), (32, 2), (128, 10))
QUICK = ((1, 2), (1, 100), (128, 2))
ON_CPU, QUICK_ON_CPU = ((1, 2), (1, 100), (8, 2)), ((1, 10),)
THREADS_CASE = Case(32, 2)

STEPS, STEPS_LAYOUT = peers.HISPARSE_STEPS, Layout(peers.HISPARSE_STEPS_ITEM_BYTES)
STEPS_BATCHES, STEPS_MISSES = (1, 8, 32), (196, 784)
REPLACED = TOP_K // 10  # columns that differ from one speculative step to the next
PLANS = ((100, 2), (8, 200))  # requests, and misses of each
PLAN_BLOCKS = 4
TRANSFER_LAYERS, TRANSFER_ITEMS = 43, (256, 2048)
TRANSFER_ROWS = 4096  # of every layer on the GPU
LOCATIONS, MAPPING = (4096, 65536), 1 << 20


def cases(options: argparse.Namespace) -> list[tuple[Layout, Case]]:
    """What the table of single steps has."""
    chosen: list[tuple[Layout, int, Sequence[tuple[int, int]]]]
    if options.device == "cpu":
        chosen = [(layout, HOT_SLOTS, QUICK_ON_CPU if options.quick else ON_CPU) for layout in (FP8, PAGED)]
    elif options.quick:
        chosen = [(layout, HOT_SLOTS, QUICK) for layout in (FP8, PAGED)] + [(FP8, LARGE_HOT_SLOTS, QUICK[:1])]
    else:
        every = [(batch, percent) for batch in BATCHES for percent in PERCENTS]
        few, some = (every, every) if options.full else (FEW, SOME)
        chosen = [(layout, HOT_SLOTS, every if layout is FP8 else some) for layout in LAYOUTS]
        chosen += [(layout, LARGE_HOT_SLOTS, some if layout is FP8 else few) for layout in LAYOUTS]
    return [
        (layout, Case(*case, goal=GOALS.get(case) if layout is FP8 and slots == HOT_SLOTS else None, hot_slots=slots))
        for layout, slots, of in chosen
        for case in of
    ]


# --- Several steps ---


@dataclass(frozen=True)
class StepsCase:
    """A batch whose requests miss ``misses`` tokens each in all their steps."""

    requests: int
    misses: int

    @property
    def name(self) -> str:
        return f"{self.requests}, {self.misses}"


class StepsRequests:
    """One input set of several steps. A step asks for what the one before asked for but in REPLACED columns: those
    have tokens that no step asked for before, of which the STEPS-th part of the misses is not hot.

    ``positions`` int64 ``[R, H + misses]``: the first H are in the hot slots. ``tokens`` int32 ``[R, STEPS, K]``.
    No two of a request are equal modulo 2 * H, so that SGLang finds all hot ones at its first look.
    """

    def __init__(self, case: StepsCase, host_rows: int, index: int, device: torch.device) -> None:
        generator = torch.Generator(device=device).manual_seed(1013 * case.requests + 7 * case.misses + index)
        self.count = count = case.requests
        residues = shuffled(count, 2 * HOT_SLOTS, generator)[:, : HOT_SLOTS + case.misses]
        # None of the last tokens, which the page for the newest ones would be asked for.
        upper = torch.randint(0, CONTEXT // (2 * HOT_SLOTS), residues.shape, generator=generator, device=device)
        upper *= residues < 2 * HOT_SLOTS - PAGE - STEPS
        self.positions = residues + upper * 2 * HOT_SLOTS
        self.host_locs = rows_of(
            random_pages(count, host_rows, generator), torch.arange(CONTEXT, device=device).expand(count, -1)
        )
        self.tokens = self.positions.gather(1, self._chosen(case, generator)).view(count, STEPS, TOP_K)
        self.ids = self.host_locs.gather(1, self.tokens.flatten(1))
        self.tokens = self.tokens.to(torch.int32)

        self.sizes = peers.steps_sizes(count)
        slots = HOT_SLOTS + PAGE + self.sizes["scratch_locs"][1]
        self.rows = random_device_rows(count, slots, generator)
        device_locs, scratch_locs = self.rows.split([HOT_SLOTS + PAGE, slots - HOT_SLOTS - PAGE], dim=1)
        cached = self.positions[:, :HOT_SLOTS].to(torch.int32)
        newest = torch.full((count, PAGE), -1, dtype=torch.int32, device=device)
        self.table = torch.cat([cached, newest], dim=1)
        policy = torch.zeros(self.sizes["cache_policy"], dtype=torch.int32, device=device)
        self.order = torch.cat([policy[:1], shuffled(count, HOT_SLOTS, generator).to(torch.int32)])
        self.ours = State(self.table, self.order)
        # What SGLang keeps lies in more tables, and rows of slots and scratch change hands. Its scratch_state is no
        # state: a call leaves it ready for the next, and marks in it belong to a call by a number that must go up.
        self.theirs = State(self.table, device_locs, peers.steps_index(cached), policy, scratch_locs)
        self.device_locs, self.scratch_locs = device_locs.contiguous(), scratch_locs.contiguous()
        self.requests = torch.arange(count, device=device)
        lengths = torch.arange(CONTEXT - STEPS + 1, CONTEXT + 1, dtype=torch.int32, device=device)
        self.seq_lens = lengths.repeat(count)
        self.num_requests = torch.full((1,), count, dtype=torch.int32, device=device)
        self.out = torch.empty((count, STEPS, TOP_K), dtype=torch.int32, device=device)

    def _chosen(self, case: StepsCase, generator: torch.Generator) -> torch.Tensor:
        """int64 ``[R, STEPS * K]``: which of the positions the columns ask for."""
        new = case.misses // STEPS
        hits = shuffled(case.requests, HOT_SLOTS, generator)
        missing = HOT_SLOTS + torch.arange(case.misses, device=hits.device).expand(case.requests, -1)
        used = TOP_K - new
        current = torch.cat([hits[:, :used], missing[:, :new]], dim=1)
        current = current.gather(1, shuffled(case.requests, TOP_K, generator))
        steps = [current]
        for step in range(1, STEPS):
            fresh = [hits[:, used : used + REPLACED - new], missing[:, step * new : (step + 1) * new]]
            used += REPLACED - new
            columns = shuffled(case.requests, TOP_K, generator)[:, :REPLACED]
            current = current.scatter(1, columns, torch.cat(fresh, dim=1))
            steps.append(current)
        return torch.cat(steps, dim=1)

    def scratch_state(self) -> torch.Tensor:
        """As SGLang's server makes it. Row 0 counts."""
        scratch = torch.full(self.sizes["scratch_state"], -1, dtype=torch.int32, device=self.out.device)
        scratch[0] = 0
        return scratch

    def device_pool(self) -> torch.Tensor:
        return torch.empty(STEPS_LAYOUT.shape(self.rows.numel()), dtype=torch.uint8, device=self.out.device)

    def fill(self, pool: torch.Tensor) -> None:
        """The host's bytes in the rows of the hot slots, junk in the others."""
        pool.fill_(0xA5)
        ids = self.host_locs.gather(1, self.positions[:, :HOT_SLOTS]).flatten()
        STEPS_LAYOUT.write(pool, self.rows[:, :HOT_SLOTS].flatten(), STEPS_LAYOUT.words(ids))

    def arguments(self, tokens: torch.Tensor, device_locs: torch.Tensor) -> dict[str, torch.Tensor]:
        """All that ours and theirs are called with alike, but the pools and their state."""
        return {
            "top_k_tokens": self.tokens,
            "device_buffer_tokens": tokens,
            "host_cache_locs": self.host_locs,
            "device_buffer_locs": device_locs,
            "top_k_device_locs": self.out,
            "req_pool_indices": self.requests,
            "seq_lens": self.seq_lens,
            "num_real_reqs": self.num_requests,
        }

    @cached_property
    def none(self) -> torch.Tensor:
        """In place of the index, which ours does not look at."""
        return torch.empty((0, 2, 1), dtype=torch.int64, device=self.out.device)


# --- Expected results ---


def expect_step(requests: Requests, step: Step, host_rows: int, lib: Any) -> dict[str, torch.Tensor]:
    """What ``lib``, the reference or the CPU backend, gives for a step, on the device of the inputs. No item is
    copied, so bytes that nobody wrote stand for both pools."""
    t = requests.by_token
    tokens, lru = t.tokens.cpu().clone(), t.lru.cpu().clone()
    tokens[:, : requests.hot_slots] = requests.positions[:, : requests.hot_slots].cpu()
    lru[:] = requests.order.cpu()
    out = torch.zeros(step.positions.shape, dtype=torch.int32)
    lib.load_cache_to_device_buffer_mla(
        step.positions.cpu(), tokens, t.host_locs.cpu(), t.device_locs.cpu(),
        torch.empty(host_rows, dtype=torch.uint8), torch.empty(requests.rows.numel(), dtype=torch.uint8), out,
        t.requests.cpu(), t.seq_lens.cpu(), lru, 1, TOP_K, requests.hot_slots, PAGE, skip_io=True,
    )  # fmt: skip
    return {name: x.to(step.ids.device) for name, x in (("out", out), ("tokens", tokens), ("lru", lru))}


def expect_steps(r: StepsRequests, host_rows: int, lib: Any) -> dict[str, torch.Tensor]:
    """As `expect_step`, for several steps. Items are copied here, so they are small."""
    tokens, policy = r.table.cpu().clone(), r.order.cpu().clone()
    arguments = {name: x.cpu() for name, x in r.arguments(tokens, r.device_locs).items()}
    out = arguments["top_k_device_locs"] = torch.zeros(r.out.shape, dtype=torch.int32)
    scratch = r.scratch_state()[:1].cpu()
    lib.load_cache_to_device_buffer_spec_mla(
        host_cache=torch.zeros((host_rows, 1), dtype=torch.uint8),
        device_buffer=torch.empty((r.rows.numel(), 1), dtype=torch.uint8),
        state=hisparse.HiSparseSpecState(r.none.cpu(), policy, r.scratch_locs.cpu(), scratch),
        **arguments,
    )
    results = {"out": out, "tokens": tokens, "policy": policy[1:], "counts": scratch[0, : r.count]}
    return {name: x.to(r.out.device) for name, x in results.items()}


# --- Measurements ---


class Bench(Measurements):
    """Inputs, expected results, and one row per measurement."""

    def __init__(self, device: torch.device, pool: Pool, peer: Any, *, options: argparse.Namespace) -> None:
        super().__init__(device, peer, quick=options.quick, columns=COLUMNS)
        self.pool, self.full = pool, options.full
        self.cases = cases(options)
        # All layouts get the same host rows, so they are rows of the one with the fewest.
        self.host_rows = min(layout.rows(pool.bytes.numel()) for layout in LAYOUTS)
        self._requests: dict[tuple[int, int], list[Requests]] = {}
        self._steps: dict[Any, list[Step]] = {}
        self._expected: dict[Any, dict[str, torch.Tensor]] = {}

    # --- Inputs, made once ---

    def requests(self, case: Case) -> list[Requests]:
        key = (case.requests, case.hot_slots)
        if key not in self._requests:
            self._requests[key] = [
                random_requests(case, self.host_rows, index, self.device) for index in range(self.sets(case.requests))
            ]
        return self._requests[key]

    def steps(self, case: Case) -> list[Step]:
        key = (case.requests, case.hot_slots, case.misses)
        if key not in self._steps:
            self._steps[key] = [Step(r, case.misses, i) for i, r in enumerate(self.requests(case))]
        return self._steps[key]

    def expected(self, case: Case, index: int) -> dict[str, torch.Tensor]:
        key = (case.requests, case.hot_slots, case.misses, index)
        if key not in self._expected:
            requests, step = self.requests(case)[index], self.steps(case)[index]
            self._expected[key] = expect_step(requests, step, self.host_rows, self.judge(case.requests))
        return self._expected[key]

    def judge(self, requests: int) -> Any:
        """Whose results ours must equal. What the CPU backend gives cannot be checked with itself."""
        return reference if requests <= REFERENCE_REQUESTS or not self.gpu else hisparse

    def checked_by(self, requests: int) -> str:
        return ("reference" if self.judge(requests) is reference else "CPU backend") + ", bytes"

    @property
    def metric(self) -> str:
        return "graph" if self.gpu else "wall"

    @property
    def kind(self) -> str:
        return "GPU time" if self.gpu else "host time of the CPU backend"

    # --- Operations: ``lib`` is hotplan's module or the peer ---

    def step(self, lib: Any, case: Case, layout: Layout, threads: int = peers.HISPARSE_THREADS) -> Timed:
        host = self.pool.rows(layout)
        sets = list(zip(self.requests(case), self.steps(case), strict=True))
        buffers = [r.hot_cache(layout) for r, _ in sets]
        load = lib.load_cache_to_device_buffer_dsv4_mla if layout.paged else lib.load_cache_to_device_buffer_mla

        def call(r: Requests, step: Step, buffer: torch.Tensor) -> Call:
            t = r.by_token
            arguments = (
                step.positions, t.tokens, t.host_locs, t.device_locs, host, buffer, step.hot,
                t.requests, t.seq_lens, t.lru, layout.item_bytes, TOP_K, case.hot_slots, PAGE, threads, t.num_requests,
            )  # fmt: skip
            result = {"out": step.hot, "tokens": t.tokens, "lru": t.lru}
            return lambda: (load(*arguments), result)[-1]

        def spoil(index: int) -> None:
            sets[index][0].fill(buffers[index], layout)

        def check(index: int, result: dict[str, torch.Tensor]) -> None:
            check_equal(result, self.expected(case, index), f"set {index}")
            check_bytes(buffers[index], layout, result["out"], sets[index][1].ids, f"set {index}")

        calls = [call(*one, buffer) for one, buffer in zip(sets, buffers, strict=True)]
        return Timed(calls, check, [r.by_token.state for r, _ in sets], spoil, "one step")

    def several_steps(self, case: StepsCase) -> tuple[Timed, Timed | None]:
        """Ours and theirs. Where rows lie is not fixed in theirs, so it is checked by bytes and by how many misses
        it counted."""
        sets = [StepsRequests(case, self.host_rows, i, self.device) for i in range(self.sets(case.requests))]
        host = self.pool.rows(STEPS_LAYOUT)
        buffers, scratch = [r.device_pool() for r in sets], [r.scratch_state() for r in sets]

        def spoil(index: int) -> None:
            sets[index].fill(buffers[index])

        def check_rows(index: int, out: torch.Tensor) -> None:
            check_bytes(buffers[index], STEPS_LAYOUT, out, sets[index].ids, f"set {index}")

        def our_call(r: StepsRequests, buffer: torch.Tensor, scratch: torch.Tensor) -> Call:
            tokens, policy = r.ours.tensors
            state = hisparse.HiSparseSpecState(r.none, policy, r.scratch_locs, scratch)
            arguments = {**r.arguments(tokens, r.device_locs), "host_cache": host, "device_buffer": buffer}
            result = {"out": r.out, "tokens": tokens, "policy": policy[1:], "counts": scratch[0, : r.count]}
            return lambda: (
                hisparse.load_cache_to_device_buffer_spec_mla(**arguments, state=state),
                result,
            )[-1]

        def check_ours(index: int, result: dict[str, torch.Tensor]) -> None:
            wanted = expect_steps(sets[index], self.host_rows, self.judge(case.requests))
            check_equal(result, wanted, f"set {index}")
            check_rows(index, result["out"])

        calls = [our_call(*one) for one in zip(sets, buffers, scratch, strict=True)]
        ours = Timed(calls, check_ours, [r.ours for r in sets], spoil, "hotplan, several steps")
        if self.peer is None:
            return ours, None
        their_scratch = [r.scratch_state() for r in sets]

        def their_call(r: StepsRequests, buffer: torch.Tensor, scratch: torch.Tensor) -> Call:
            tokens, device_locs, index, policy, scratch_locs = r.theirs.tensors
            state = self.peer.HiSparseSpecState(index, policy, scratch_locs, scratch)
            arguments = {**r.arguments(tokens, device_locs), "host_cache": host, "device_buffer": buffer}
            result = {"out": r.out}
            return lambda: (
                self.peer.load_cache_to_device_buffer_spec_mla(**arguments, state=state),
                result,
            )[-1]

        def check_theirs(index: int, result: dict[str, torch.Tensor]) -> None:
            check_rows(index, result["out"])
            counts = their_scratch[index][0, : case.requests]
            check_equal({"counts": counts}, {"counts": torch.full_like(counts, case.misses)}, f"set {index}")

        calls = [their_call(*one) for one in zip(sets, buffers, their_scratch, strict=True)]
        who = f"{self.peer.name}, several steps"
        return ours, Timed(calls, check_theirs, [r.theirs for r in sets], spoil, who)

    def planned(self, lib: Any, requests: int, misses: int, layout: Layout) -> Timed:
        host, sets = self.pool.rows(layout), []
        for r in self.requests(Case(requests, 0)):
            src = torch.full((requests, TOP_K), -1, dtype=torch.int64, device=self.device)
            dst = src.to(torch.int32)
            src[:, :misses] = r.ids[:, r.hot_slots : r.hot_slots + misses]
            dst[:, :misses] = r.rows.gather(1, r.order[:, :misses].long())
            sets.append((r.hot_cache(layout), src, dst, torch.full((requests,), misses, dtype=torch.int32).to(dst)))
        real = torch.full((1,), requests, dtype=torch.int32, device=self.device)

        def call(buffer: torch.Tensor, src: torch.Tensor, dst: torch.Tensor, counts: torch.Tensor) -> Call:
            return partial(
                lib.copy_cache_planned_mla, miss_src=src, miss_dst=dst, miss_count=counts, num_real_reqs=real,
                host_cache=host, device_buffer=buffer, item_size_bytes=layout.item_bytes, num_blocks=PLAN_BLOCKS,
                is_dsv4_layout=layout.paged,
            )  # fmt: skip

        def check(index: int, _: Any) -> None:
            buffer, src, dst, _ = sets[index]
            check_bytes(buffer, layout, dst[:, :misses], src[:, :misses], f"set {index}")

        return Timed([call(*one) for one in sets], check, spoil=lambda index: sets[index][0].fill_(0xA5))

    def transfer(self, lib: Any, items: int, *, to_device: bool) -> Timed:
        """``items`` of every layer, between rows at random in the pools of both sides."""
        host = _LayerPools.of(self.pool)
        device = self._device_pools
        source = host if to_device else device
        # The host's pool says where items come from, so what is copied back to the host goes elsewhere.
        rows = (items + PAGE - 1) // PAGE * PAGE * 2
        pinned = self.gpu and not to_device
        where = {"pin_memory": True} if pinned else {"device": self.device}
        sets = []
        for index in range(2 if pinned else 4):
            generator = torch.Generator(device=self.device).manual_seed(items + index)
            src = torch.randperm(source.rows, generator=generator, device=self.device)[:items]
            dst = torch.randperm(rows, generator=generator, device=self.device)[:items]
            memory = torch.empty(TRANSFER_LAYERS * rows // PAGE * PAGED.shape(PAGE)[1], dtype=torch.uint8, **where)
            target = _LayerPools(memory)
            sets.append((source.addresses(self.device), target.addresses(self.device), src, dst, target))

        def check(index: int, _: Any) -> None:
            *_, src, dst, target = sets[index]
            got = target.words(dst.to(target.memory.device))
            wanted = source.places(src.to(target.memory.device))
            differs = (got != wanted).flatten(1).any(dim=1)
            if bool(differs.any()):
                layer = int(torch.nonzero(differs)[0])
                raise AssertionError(f"set {index}: layer {layer}: items differ from their source")

        calls = [partial(lib.transfer_cache_dsv4_mla, *one[:4]) for one in sets]
        return Timed(calls, check, spoil=lambda index: sets[index][4].memory.fill_(0xA5))

    @cached_property
    def _device_pools(self) -> _LayerPools:
        size = TRANSFER_LAYERS * TRANSFER_ROWS // PAGE * PAGED.shape(PAGE)[1]
        words = torch.arange(size // 8, device=self.device)
        return _LayerPools(words.view(torch.uint8))

    def translate(self, lib: Any, count: int) -> Timed:
        sets = []
        for index in range(8):
            generator = torch.Generator(device=self.device).manual_seed(count + index)
            mapping = torch.randint(0, 1 << 30, (MAPPING,), generator=generator, device=self.device)
            locations = torch.randint(-MAPPING // 16, MAPPING, (count,), generator=generator, device=self.device)
            sets.append((mapping, locations.clamp(min=-1)))

        def check(index: int, result: torch.Tensor) -> None:
            mapping, locations = sets[index]
            wanted = torch.where(locations < 0, locations, mapping[locations.clamp(min=0)])
            check_equal({"out": result}, {"out": wanted}, f"set {index}")

        return Timed([partial(lib.translate_padded_hisparse_locations, *one) for one in sets], check)

    # --- Rows ---

    def pair(self, make: Callable[..., Timed], *arguments: Any, **options: Any) -> tuple[Timed, Timed | None]:
        """An operation of ours and of the peer."""
        ours = make(hisparse, *arguments, **options)
        return ours, None if self.peer is None else make(self.peer, *arguments, **options)


class _LayerPools:
    """Memory cut into one pool of DeepSeek-V4's pages per layer."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.pages = memory.numel() // PAGED.shape(PAGE)[1] // TRANSFER_LAYERS
        self.rows = self.pages * PAGE

    @classmethod
    def of(cls, pool: Pool) -> _LayerPools:
        return cls(pool.bytes)

    @property
    def layer_bytes(self) -> int:
        return self.pages * PAGED.shape(PAGE)[1]

    def addresses(self, device: torch.device) -> torch.Tensor:
        """uint64 ``[layers]``."""
        first = self.memory.data_ptr()
        of = [first + layer * self.layer_bytes for layer in range(TRANSFER_LAYERS)]
        return torch.tensor(of, dtype=torch.uint64).to(device)

    def places(self, rows: torch.Tensor) -> torch.Tensor:
        """int64 ``[layers, n, words]``: where the words of items of every layer lie in the memory."""
        layers = torch.arange(TRANSFER_LAYERS, device=rows.device)[:, None, None]
        return layers * (self.layer_bytes // 8) + PAGED.words(rows)

    def words(self, rows: torch.Tensor) -> torch.Tensor:
        return self.memory.view(torch.int64)[self.places(rows)]


# --- Sections ---


def single(b: Bench) -> None:
    for layout, case in b.cases:
        section = f"One step, top-k {TOP_K}, {case.hot_slots} hot slots, {b.kind}"
        ours, theirs = b.pair(b.step, case, layout)
        b.measure(
            section, f"{case.requests}, {case.percent} %", layout.name, b.metric, ours, theirs=theirs, goal=case.goal,
            checked=b.checked_by(case.requests), copied_bytes=case.bytes(layout.item_bytes),
        )  # fmt: skip


def threads(b: Bench) -> None:
    """SGLang's server asks for another block size than its tests."""
    if b.peer is None:
        return
    section = f"SGLang's block size, one step, {HOT_SLOTS} hot slots, {b.kind}"
    case, ours = THREADS_CASE, b.step(hisparse, THREADS_CASE, FP8)
    for size in (peers.HISPARSE_THREADS, peers.HISPARSE_SERVER_THREADS):
        theirs = b.step(b.peer, case, FP8, size)
        b.measure(
            section, f"{case.requests}, {case.percent} %", f"{FP8.name}, SGLang with {size} threads", b.metric, ours,
            theirs=theirs, checked=b.checked_by(case.requests), copied_bytes=case.bytes(FP8.item_bytes),
        )  # fmt: skip


def steps(b: Bench) -> None:
    section = f"{STEPS} speculative steps, top-k {TOP_K}, {HOT_SLOTS} hot slots, {b.kind}"
    small = b.quick or not b.gpu
    for misses in STEPS_MISSES:
        for requests in STEPS_BATCHES[:1] if small else STEPS_BATCHES:
            case = StepsCase(requests, misses)
            ours, theirs = b.several_steps(case)
            b.measure(
                section, case.name, STEPS_LAYOUT.name, b.metric, ours, theirs=theirs, checked=b.checked_by(requests),
                copied_bytes=requests * misses * STEPS_LAYOUT.item_bytes,
            )  # fmt: skip


def planned(b: Bench) -> None:
    section = f"Copies of a recorded plan, {PLAN_BLOCKS} blocks, {b.kind}"
    for requests, misses in PLANS[1:] if b.quick else PLANS:
        for layout in (FP8, PAGED):
            ours, theirs = b.pair(b.planned, requests, misses, layout)
            b.measure(
                section, f"{requests}, {misses} each", layout.name, b.metric, ours, theirs=theirs, checked="bytes",
                copied_bytes=requests * misses * layout.item_bytes,
            )  # fmt: skip


def transfer(b: Bench) -> None:
    section = f"Transfer of {TRANSFER_LAYERS} layers' items, {b.kind}"
    for items in TRANSFER_ITEMS if b.full and b.gpu else TRANSFER_ITEMS[:1]:
        for to_device in (True, False):
            ours, theirs = b.pair(b.transfer, items, to_device=to_device)
            b.measure(
                section, str(items), "host to device" if to_device else "device to host", b.metric, ours,
                theirs=theirs, checked="bytes", copied_bytes=TRANSFER_LAYERS * items * PAGED.item_bytes,
                columns=TRANSFER_COLUMNS,
            )  # fmt: skip


def translate(b: Bench) -> None:
    section = f"Translation of locations, {b.kind}"
    for count in LOCATIONS:
        ours, theirs, note = _translations(b, count)
        b.measure(
            section, str(count), "int64", b.metric, ours, theirs=theirs, peer_note=note, checked="mapping",
            columns=TRANSLATE_COLUMNS,
        )  # fmt: skip


def _translations(b: Bench, count: int) -> tuple[Timed, Timed | None, str | None]:
    """Ours, theirs, and what stands in place of theirs."""
    if b.peer is not None and b.peer.translate_padded_hisparse_locations is None:
        return b.translate(hisparse, count), None, "no Triton"
    return (*b.pair(b.translate, count), None)


def host(b: Bench) -> None:
    """What a Python call costs the thread that makes it. On the CPU all other tables say that."""
    if not b.gpu:
        return
    requests, (_, misses) = 8, PLANS[1]
    case, steps_case = Case(requests, 2), StepsCase(requests, STEPS_MISSES[0])
    *translations, note = _translations(b, LOCATIONS[0])
    for operator, item, (ours, theirs), checked in (
        (f"one step, {requests} requests", FP8.name, b.pair(b.step, case, FP8), b.checked_by(requests)),
        (f"one step, {requests} requests", PAGED.name, b.pair(b.step, case, PAGED), b.checked_by(requests)),
        (f"{STEPS} steps, {requests} requests", STEPS_LAYOUT.name, b.several_steps(steps_case), b.checked_by(requests)),
        ("copies of a plan", FP8.name, b.pair(b.planned, requests, misses, FP8), "bytes"),
        ("transfer", PAGED.name, b.pair(b.transfer, TRANSFER_ITEMS[0], to_device=True), "bytes"),
        ("translation", "-", translations, "mapping"),
    ):
        b.measure(
            "Host time of a Python call on GPU tensors", operator, item, "wall", ours, theirs=theirs,
            peer_note=note if theirs is None else None, checked=checked, timer=b.host_time, columns=HOST_COLUMNS,
        )  # fmt: skip


SECTIONS: dict[str, Callable[[Bench], None]] = {
    "single": single,
    "threads": threads,
    "steps": steps,
    "planned": planned,
    "transfer": transfer,
    "translate": translate,
    "host": host,
}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_for(__doc__, SECTIONS, tuple(SECTIONS))
    parser.add_argument("--full", action="store_true", help="every batch, miss rate, item and hot buffer")
    hot_measure.add_pool_option(parser)
    options = parser.parse_args(arguments)
    options.sections = chosen_sections(parser, options.sections, SECTIONS)
    # Pages for a context of its own, and in every layer rows enough for the items that are transferred.
    contexts = PAGE * (CONTEXT // PAGE + 1) * max(layout.item_bytes for layout in LAYOUTS)
    layers = TRANSFER_LAYERS * PAGED.shape(2 * max(TRANSFER_ITEMS))[0] * PAGED.shape(PAGE)[1]
    all_items = options.full and options.device == "cuda"
    hot_measure.choose_pool(parser, options, max(contexts, layers if all_items else 0))
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sections, print the tables, write the results. Returns 1 if a result of ours was wrong."""
    options = parse(arguments)
    return hot_measure.run(
        "bench_device_buffer",
        options,
        family="device_buffer",
        peer=lambda: PeerInBackground(
            options,
            [peers.HISPARSE_HEADER, peers.HISPARSE_STEPS_HEADER],
            peers.build_peer_device_buffer,
            peers.SGLangDeviceBuffer,
        ),
        bench=partial(Bench, options=options),
        sections=SECTIONS,
        meta=lambda _: {"top_k": TOP_K, "full": options.full},
    )


if __name__ == "__main__":
    raise SystemExit(main())
