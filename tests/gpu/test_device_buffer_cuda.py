"""The CUDA backend of the device buffer: the reference's results and bytes from every route, plain and as graph replay.

`-k quick` selects small cases of every kernel and route, for the sanitizers. Where HOTPLAN_SGLANG_SOURCES names the
directory of an installed or unpacked SGLang, its own kernels run beside ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from device_buffer_cases import (
    EDGES,
    ITEM_BYTES,
    KINDS,
    PAGE_BYTES,
    PAGE_SLOTS,
    PAGED_ITEM,
    POISON,
    UNTOUCHED,
    Bench,
    Case,
    Sequence,
    Step,
    Transfer,
    assert_recorded,
    corrupt_before_step,
    golden_cases,
    item_index,
    make_case,
    pool_bytes,
    random_step,
    sequences,
    step_of,
    worked_case,
)
from graphs import seconds_of
from hypothesis import HealthCheck, given, settings
from sglang_modules import sources
from threads import run_in_threads

import peers
from hotplan import hisparse
from hotplan.reference import device_buffer as reference

pytestmark = pytest.mark.gpu

PROPERTY = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
QUICK = settings(PROPERTY, max_examples=6)

PLANNED = ("linear", "dsv4", "steps")
"""Kinds whose operator records a plan."""


class Replayed:
    """A bench whose steps are replays of one captured graph: addresses are fixed, outputs are poisoned in between.

    The graph has what a server captures: a layer's swap-in, and its plan's copies for another layer.
    """

    def __init__(self, bench: Bench, step: Step) -> None:
        self.bench = bench
        case = bench.case
        self.arguments = bench.arguments(step) | {"num_real_reqs": bench.num_real_reqs}
        self.planned: dict[str, Any] | None = None
        if case.kind in PLANNED:
            self.planned = {name: getattr(bench, name)[: case.rows] for name in ("miss_src", "miss_dst", "miss_count")}
            self.planned |= {
                "num_real_reqs": bench.num_real_reqs,
                "host_cache": bench.host_pool(),
                "device_buffer": bench.device_pool(),
                "item_size_bytes": case.item_bytes,
                "is_dsv4_layout": case.paged,
            }
        # To compile, load and set up outside the capture; where all rows are padding, this touches outputs alone.
        bench.num_real_reqs.zero_()
        self.call()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.call()

    def call(self) -> None:
        self.bench.operator(hisparse)(**self.arguments)
        if self.planned is not None:
            hisparse.copy_cache_planned_mla(**self.planned)

    def run(self, step: Step) -> None:
        bench, case = self.bench, self.bench.case
        bench.prepare(step)
        for name in ("top_k_device_locs", "miss_src", "miss_dst", "miss_count"):
            bench.memory[name].fill_(POISON)
        top_k = self.arguments["top_k_blocks" if case.kind == "blocks" else "top_k_tokens"]
        top_k.copy_(torch.from_numpy(step.top_k))
        self.arguments["req_pool_indices"].copy_(torch.from_numpy(step.req_pool_indices))
        self.arguments["seq_lens"].copy_(torch.from_numpy(step.seq_lens))
        bench.num_real_reqs.fill_(case.rows if step.num_real is None else step.num_real)
        self.graph.replay()

    def assert_equal(self, theirs: Bench, where: str) -> None:
        self.bench.assert_equal(theirs, where)
        if self.planned is not None:
            theirs.replay(reference)
            assert theirs.planned is not None
            assert torch.equal(self.planned["device_buffer"].cpu(), theirs.planned[1]), f"{where} planned copy"


def assert_steps(
    case: Case,
    steps: list[Step],
    *,
    graph: bool = False,
    contract: bool = False,
    corrupt: Callable[[int, list[Bench]], None] | None = None,
    **options: Any,
) -> Bench:
    """Steps on the GPU, plain and (graph) replayed, against the reference on the CPU. options: of the benches.

    contract: they are clean, and what the contract says of them is checked, too.
    """
    theirs, ours = Bench(case, **options), Bench(case, "cuda", **options)
    replayed = Replayed(Bench(case, "cuda", **options), steps[0]) if graph else None
    benches = [theirs, ours] if replayed is None else [theirs, ours, replayed.bench]
    for number, step in enumerate(steps):
        if corrupt is not None:
            corrupt(number, benches)
        theirs.run(reference, step)
        ours.run(hisparse, step)
        ours.assert_equal(theirs, f"step {number}")
        if contract:
            ours.assert_contract(step, clean=True)
        if case.kind in PLANNED:
            ours.replay(hisparse)
        if replayed is not None:
            replayed.run(step)
            replayed.assert_equal(theirs, f"replayed step {number}")
    return ours


def run_sequence(sequence: Sequence, **options: Any) -> None:
    assert_steps(
        sequence.case,
        sequence.steps,
        corrupt=lambda number, benches: corrupt_before_step(sequence, number, benches),
        strided=sequence.strided,
        wide=sequence.wide,
        pool_offset=sequence.pool_offset,
        **options,
    )


def random_steps(case: Case, seed: int, count: int = 2, **options: Any) -> list[Step]:
    rng = np.random.default_rng(seed)
    return [random_step(case, rng, **options) for _ in range(count)]


def sized_case(kind: str, columns: int, hot_slots: int, **options: Any) -> Case:
    """A case with as many columns per step, of blocks that divide them."""
    if kind == "blocks":
        blocks = next(n for n in (8, 7, 5, 3, 1) if columns % n == 0)
        options |= {"top_k": columns // blocks, "block_tokens": blocks}
    else:
        options["top_k"] = columns
    # Large host pools take longer to make than all the rest.
    max_tokens = hot_slots + 100 if kind == "dsv4" else 2 * hot_slots + 5
    sizes = {"rows": 2, "item_bytes": 8, "spare_requests": 0, "max_tokens": max_tokens}
    return make_case(kind, seed=hot_slots, hot_slots=hot_slots, **(sizes | options))


# --------------------------------------------------------------------------------------------------------------- quick


@pytest.mark.parametrize("kind", ["linear", "dsv4"])
def test_quick_worked_values(kind: str) -> None:
    case = worked_case(kind)
    bench = Bench(case, "cuda")
    bench.device_buffer_tokens.copy_(torch.tensor([[1, 4, 2, 5, -1]]))
    for entries, length, out, lru, loads in (
        ([4, 2, 7], 8, [7, 3, 11], [0, 3, 1, 2], []),
        ([6, -1, 6], 8, [9, -1, 9], [3, 1, 2, 0], [(44, 9)]),
        ([8, 3, -5], 8, [-1, 5, -1], [1, 2, 0, 3], [(47, 5)]),
        ([2, 1, 0], 3, [3, 7, 9], [1, 2, 0, 3], []),
        ([1, -1, 0], 2, [7, -1, -1], [1, 2, 0, 3], []),
    ):
        bench.swap_in(hisparse, step_of(case, entries, lengths=[length]))
        assert bench.out()[0, 0].tolist() == out
        assert bench.lru()[0].tolist() == lru
        assert bench.loads(0) == loads


def test_quick_worked_values_of_several_steps() -> None:
    """H 4 and a first LRU of zeros, that is 1, 2, 3, 0. Five misses: four slots, then a scratch row."""
    case = worked_case("steps")
    bench = Bench(case, "cuda")
    bench.swap_in(hisparse, step_of(case, [0, 1, 2, 1, 3, 4], lengths=[5, 9]))
    assert bench.out()[0].tolist() == [[7, 3, 5], [3, 9, 20]]
    assert bench.loads(0) == [(50, 7), (49, 3), (48, 5), (47, 9), (46, 20)]
    assert bench.device_buffer_tokens[0].tolist() == [3, 0, 1, 2, -1]
    assert bench.lru()[0].tolist() == [1, 2, 3, 0]
    assert bench.scratch_state[0, 0] == 5


@pytest.mark.parametrize("strided", [False, True])
def test_quick_recorded_outputs(strided: bool) -> None:
    for case in golden_cases():
        assert_recorded(Bench(case, "cuda", strided=strided), hisparse)


@pytest.mark.parametrize("kind", KINDS)
def test_quick_sequences(kind: str) -> None:
    @QUICK
    @given(sequences((kind,)))
    def check(sequence: Sequence) -> None:
        run_sequence(sequence)

    check()


ROUTES = {
    "tile": {"linear": (600, 1100), "dsv4": (70, 300), "blocks": (40, 70)},
    "loop": {"linear": (100, 4100), "dsv4": (2049, 2100), "blocks": (2056, 2056), "steps": (65, 150)},
    "wide": {"linear": (512, 32768), "dsv4": (33, 26000), "blocks": (64, 32768), "steps": (4095, 4096)},
}
"""Columns of a step (the steps are three) and slots: in registers, in shared memory, and where that is too small."""


@pytest.mark.parametrize(("route", "kind"), [(route, kind) for route, kinds in ROUTES.items() for kind in kinds])
def test_quick_routes(route: str, kind: str) -> None:
    case = sized_case(kind, *ROUTES[route][kind], rows=1, steps=3)
    assert_steps(case, random_steps(case, 1, spread=0.6, short=0.0, invalid=0.02, duplicates=0.02))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [3, 20, 40, 70])
def test_quick_batches(rows: int, kind: str) -> None:
    """Eight, four, two blocks and one for every row, on a GPU of 132 processors."""
    case = sized_case(kind, 40, 72, rows=rows, item_bytes=48)
    assert_steps(case, random_steps(case, rows, spread=0.8, padding=0.5, wild=0.02))


@pytest.mark.parametrize("kind", KINDS)
def test_quick_sorted_copies(kind: str) -> None:
    """A block sorts what it copies by host rows, from 128 copies and 64 blocks on; each row has one block here."""
    case = sized_case(kind, 132, 140, rows=67, item_bytes=48)
    assert_steps(case, random_steps(case, 2, short=0.0))


PIECES = [(48, 0), (576, 0), (584, 0), (48, 8), (132, 4), (7, 0), (16, 1)]
"""Item bytes and offset of the pools, to be copied 16, 8, 4 and 1 byte at a time."""


@pytest.mark.parametrize("kind", ["linear", "blocks", "steps"])
def test_quick_pieces(kind: str) -> None:
    for item_bytes, offset in PIECES:
        case = make_case(kind, seed=item_bytes, top_k=6, hot_slots=40, item_bytes=item_bytes)
        assert_steps(case, random_steps(case, offset, short=0.1), contract=True, pool_offset=offset)


def planned_copy(
    module: Any,
    device: str,
    seed: int,
    *,
    rows: int = 5,
    capacity: int = 6,
    item_bytes: int = PAGED_ITEM,
    paged: bool = False,
    offset: int = 0,
    **options: Any,
) -> torch.Tensor:
    """The target pool, and what lies before it, after a plan with every kind of entry."""
    rng = np.random.default_rng(seed)
    size = rows * capacity
    target_rows = -(-size // PAGE_SLOTS) * PAGE_SLOTS
    host = torch.from_numpy(pool_bytes(2 * PAGE_SLOTS, item_bytes, paged, 1))
    memory = torch.full((offset + len(pool_bytes(target_rows, item_bytes, paged, 2)),), UNTOUCHED, dtype=torch.uint8)
    src = np.full((rows, capacity + 2), POISON, dtype=np.int64)
    dst = np.full((rows, capacity + 2), POISON, dtype=np.int32)
    src[:, :capacity] = rng.choice([*range(2 * PAGE_SLOTS), -1, 2 * PAGE_SLOTS, 2**40, -(2**63)], (rows, capacity))
    targets = rng.permutation(target_rows)[:size]
    wild = rng.random(size) < 0.2
    targets[wild] = rng.choice([-1, target_rows, 2**31 - 1, -(2**31)], wild.sum())
    dst[:, :capacity] = targets.reshape(rows, capacity)
    counts = rng.choice([0, 1, capacity, capacity, capacity + 3, -2, 2**31 - 1], rows + 1)
    real = int(rng.choice([0, rows // 2 + 1, rows, rows, rows + 2, -1]))
    memory = memory.to(device)
    plan = {
        "miss_src": torch.from_numpy(src).to(device)[:, :capacity],
        "miss_dst": torch.from_numpy(dst).to(device)[:, :capacity],
        "miss_count": torch.from_numpy(counts.astype(np.int32)).to(device),
        "num_real_reqs": torch.tensor([real], dtype=torch.int32, device=device),
    }
    module.copy_cache_planned_mla(
        **plan,
        host_cache=host.pin_memory() if device == "cuda" else host,
        device_buffer=memory[offset:],
        item_size_bytes=item_bytes,
        is_dsv4_layout=paged,
        **options,
    )
    return memory.cpu()


def assert_planned_copies(seeds: int, **options: Any) -> None:
    copied = 0
    for seed in range(seeds):
        expected = planned_copy(reference, "cpu", seed, **options)
        assert torch.equal(planned_copy(hisparse, "cuda", seed, **options), expected), (seed, options)
        copied += int((expected != UNTOUCHED).any())
    assert copied > 0


def test_quick_planned_copies() -> None:
    assert_planned_copies(6, paged=True)
    for item_bytes, offset in PIECES:
        assert_planned_copies(4, item_bytes=item_bytes, offset=offset)


@pytest.mark.parametrize("to_host", [False, True])
def test_quick_transfers(to_host: bool) -> None:
    for layers, count in ((1, 1), (3, 50), (2, 128), (2, 0), (0, 5)):
        transfer = Transfer("cuda", layers=layers, count=count, seed=count, to_host=to_host)
        transfer.run(hisparse)
        torch.cuda.synchronize()
        transfer.assert_copied()


def test_quick_translations() -> None:
    rng = np.random.default_rng(0)
    for mapping_dtype in (torch.int32, torch.int64):
        for dtype in (torch.int32, torch.int64):
            limits = torch.iinfo(dtype)
            mapping = torch.from_numpy(rng.integers(-5, 1000, 100)).to(mapping_dtype)
            values = rng.choice([*range(100), -1, -7, 100, limits.max, limits.min], 3 * 257)
            dense = torch.from_numpy(values).to(dtype).cuda()
            for locations in (dense[:0], dense[:1], dense[:256], dense[1:258], dense[::3], dense[:1].expand(300)):
                result = hisparse.translate_padded_hisparse_locations(mapping.cuda(), locations)
                expected = reference.translate_padded_hisparse_locations(mapping, locations.cpu())
                assert result.dtype == expected.dtype
                assert result.device == locations.device
                assert torch.equal(result.cpu(), expected)


# ------------------------------------------------------------------------------------------------------------- swap-in


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_hold_the_contract(kind: str) -> None:
    @PROPERTY
    @given(sequences((kind,), hostile=False))
    def check(sequence: Sequence) -> None:
        run_sequence(sequence, contract=True)

    check()


@pytest.mark.parametrize("kind", KINDS)
def test_hostile_sequences(kind: str) -> None:
    """Corrupt state, duplicates, tokens, requests, lengths and rows out of range, padding, odd strides."""

    @PROPERTY
    @given(sequences((kind,)))
    def check(sequence: Sequence) -> None:
        run_sequence(sequence)

    check()


@pytest.mark.parametrize("kind", KINDS)
def test_replayed_sequences(kind: str) -> None:
    """One captured graph for all steps of a sequence, however many of its rows are real."""

    @settings(PROPERTY, max_examples=12)
    @given(sequences((kind,)))
    def check(sequence: Sequence) -> None:
        run_sequence(sequence, graph=True)

    check()


@pytest.mark.parametrize("kind", KINDS)
def test_host_pool_on_the_device(kind: str) -> None:
    @settings(PROPERTY, max_examples=8)
    @given(sequences((kind,)))
    def check(sequence: Sequence) -> None:
        run_sequence(sequence, host_on_device=True)

    check()


SIZES = [
    *EDGES, (1023, 1023), (1023, 1024), (1024, 1025), (1025, 1025), (1025, 4097), (511, 8191), (513, 8193),
    (4096, 4097), (4097, 4097), (2048, 10240), (1000, 32767),
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("columns", "hot_slots"), SIZES)
def test_sizes_at_every_edge(kind: str, columns: int, hot_slots: int) -> None:
    """Columns and slots at the edges of warps, packs, blocks and routes."""
    case = sized_case(kind, columns, hot_slots, steps=2 + hot_slots % 3)
    assert (case.columns, case.hot_slots) == (columns, hot_slots)
    assert_steps(case, random_steps(case, columns, spread=0.7, short=0.2, invalid=0.01, duplicates=0.01))


@pytest.mark.parametrize(
    ("kind", "columns", "hot_slots", "item_bytes", "rows"),
    [
        ("linear", 2048, 4096, 1152, 1), ("linear", 2048, 4096, 656, 8), ("linear", 1024, 2048, 576, 8),
        ("linear", 1024, 2048, 16, 32), ("linear", 2048, 4096, 16, 128), ("linear", 512, 1024, 16, 200),
        ("dsv4", 2048, 4096, 584, 1), ("dsv4", 1024, 2048, 584, 8), ("dsv4", 512, 1024, 584, 32),
        ("dsv4", 128, 256, 584, 128), ("dsv4", 64, 128, 584, 200), ("blocks", 1024, 2048, 256, 8),
        ("blocks", 512, 1024, 32, 40), ("steps", 1024, 2048, 576, 1), ("steps", 2048, 4096, 656, 4),
        ("steps", 1024, 4096, 16, 32), ("steps", 512, 1024, 16, 128),
    ],
)  # fmt: skip
def test_served_sizes(kind: str, columns: int, hot_slots: int, item_bytes: int, rows: int) -> None:
    """Every layout of a server, a page behind the slots, plain and replayed; large batches with small pools."""
    case = sized_case(
        kind, columns, hot_slots, item_bytes=item_bytes, rows=rows, extra=64, steps=2 + rows % 3,
        max_tokens=hot_slots + 1000,
    )  # fmt: skip
    case.host_rows = 100 * PAGE_SLOTS  # which requests share here
    case.host_cache_locs %= case.host_rows
    steps = random_steps(case, rows, spread=0.8, short=0.1, padding=0.5)
    assert_steps(case, steps, graph=True, contract=rows <= 8)


@pytest.mark.parametrize("kind", KINDS)
def test_batches(kind: str) -> None:
    """Every number of blocks for a row, and the last batch that has it."""
    for rows in (1, 2, 16, 17, 33, 34, 66, 67, 133):
        case = sized_case(kind, 40, 70, rows=rows, item_bytes=20)
        assert_steps(case, random_steps(case, rows, 3, spread=0.7, padding=0.3), graph=True, strided=True)


@pytest.mark.parametrize("kind", KINDS)
def test_one_graph_for_every_batch(kind: str) -> None:
    """A captured batch of eight serves from none to eight rows, and more than that is eight."""
    case = sized_case(kind, 64, 160, rows=8, item_bytes=576, extra=4, max_tokens=900)
    steps = random_steps(case, 5, 12, spread=0.4, short=0.2)
    for step, real in zip(steps, (8, 3, 0, 5, 8, 1, 7, -1, 2, 9, 6, 8), strict=True):
        step.num_real = real
    assert_steps(case, steps, graph=True, contract=True)


@pytest.mark.parametrize(("kind", "columns", "hot_slots"), [("linear", 100, 26000), ("steps", 100, 26000)])
def test_more_rows_than_the_wide_route_takes_at_once(kind: str, columns: int, hot_slots: int) -> None:
    """Each of its blocks has memory of its own, and later rows come with another launch."""
    case = sized_case(kind, columns, hot_slots, rows=4, max_tokens=hot_slots + 500, steps=4)
    rng = np.random.default_rng(1)
    steps = [random_step(case, rng, short=0.0) for _ in range(2)]
    case.rows = 600
    for step in steps:
        at = [0, 255, 256, 599]
        entries = np.full((case.rows, *step.top_k.shape[1:]), -1, dtype=np.int32)
        entries[at] = step.top_k
        requests = np.full(case.rows, -1, dtype=np.int64)
        requests[at] = step.req_pool_indices
        lengths = np.zeros((case.rows, case.steps), dtype=np.int64)
        lengths[at] = step.seq_lens.reshape(4, case.steps)
        step.top_k, step.req_pool_indices, step.seq_lens = entries, requests, lengths.reshape(-1)
    assert_steps(case, steps, graph=True, contract=True)


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_plan_and_without_copies(kind: str) -> None:
    case = make_case(kind, seed=3, top_k=40, hot_slots=200, rows=3)
    full, plain, probe = (Bench(case, "cuda") for _ in range(3))
    for step in random_steps(case, 3, 3, spread=0.6):
        full.run(hisparse, step)
        plain.run(hisparse, step, plan=False)
        plain.assert_equal(full, names=("top_k_device_locs", *plain.state_names))
        assert (plain.miss_count == POISON).all()
        if case.several:
            continue
        probe.prepare(step)
        before = probe.device_bytes()
        probe.swap_in(hisparse, step, skip_io=True)
        for now, then in zip(probe.device_bytes(), before, strict=True):
            np.testing.assert_array_equal(now, then)
        for name in (*full.output_names, *full.state_names):
            assert torch.equal(full.memory[name], probe.memory[name]), name


def test_hints_change_nothing() -> None:
    case = make_case("linear", seed=5, top_k=100, hot_slots=300, rows=5)
    plain = Bench(case, "cuda")
    steps = random_steps(case, 5, short=0.0)
    for step in steps:
        plain.run(hisparse, step)
    for block_size in (1, 33, 960, 2**40):
        hinted = Bench(case, "cuda")
        for step in steps:
            hinted.run(hisparse, step, page_size=64, block_size=block_size)
            hinted.replay(hisparse, num_blocks=block_size, block_size=block_size)
        hinted.assert_equal(plain, f"block_size {block_size}")


@pytest.mark.parametrize("kind", KINDS)
def test_empty_launches(kind: str) -> None:
    case = make_case(kind, top_k=3, hot_slots=16)
    bench = Bench(case, "cuda")
    full = bench.arguments(random_step(case, np.random.default_rng(6)))
    name = "top_k_blocks" if kind == "blocks" else "top_k_tokens"
    before = {name: memory.clone() for name, memory in bench.memory.items()}
    for rows, top_k in ((0, 3), (2, 0), (0, 0)):
        shape = (rows, 2, top_k) if kind == "steps" else (rows, top_k)
        empty = torch.zeros(shape, dtype=torch.int32, device="cuda")
        changes = {name: empty, "req_pool_indices": full["req_pool_indices"][:rows]}
        changes["seq_lens"] = full["seq_lens"][: rows * case.steps]
        changes["top_k_device_locs"] = empty.clone() if kind == "steps" else full["top_k_device_locs"][:rows]
        if "num_top_k" in full:
            changes["num_top_k"] = top_k
        bench.operator(hisparse)(**(full | changes))
        torch.cuda.synchronize()
        for tensor, memory in bench.memory.items():
            assert torch.equal(memory, before[tensor]), tensor


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_share_a_request_stay_inside(kind: str) -> None:
    """The order of such rows is open, but not what they may touch, and the next step heals."""
    case = sized_case(kind, 64, 96, rows=20)
    bench = Bench(case, "cuda")
    for step in random_steps(case, 2, 8, short=0.0):
        step.req_pool_indices[:] = 7
        bench.swap_in(hisparse, step)
        assert int(bench.out().max()) < case.device_rows
        np.testing.assert_array_equal(bench.array("device_buffer_tokens")[:7], -1)
        np.testing.assert_array_equal(bench.array("device_buffer_tokens")[8:], -1)
    alone = random_steps(case, 3, 1, short=0.0)[0]
    alone.num_real = 1
    alone.req_pool_indices[0] = 7
    bench.swap_in(hisparse, alone)
    assert sorted(bench.lru()[7].tolist()) == list(range(case.hot_slots))


@pytest.mark.parametrize(
    ("kind", "columns", "hot_slots"),
    [("linear", 2048, 4096), ("dsv4", 512, 1024), ("blocks", 1024, 4100), ("steps", 1024, 2048), ("steps", 4095, 4096)],
)
def test_the_same_results_every_time(kind: str, columns: int, hot_slots: int) -> None:
    case = sized_case(kind, columns, hot_slots, rows=6, item_bytes=32, steps=3)
    steps = random_steps(case, 7, short=0.1, duplicates=0.1)
    first = None
    for _ in range(6):
        bench = Bench(case, "cuda")
        for step in steps:
            bench.run(hisparse, step)
        if first is not None:
            bench.assert_equal(first)
        first = bench


# --------------------------------------------------------------------------------------------------------------- bytes


@pytest.mark.parametrize("kind", ["linear", "blocks", "steps"])
def test_every_byte_of_an_item(kind: str) -> None:
    """Items of every size in pools of every alignment, with eight blocks for a row and with one."""
    for item_bytes in (1, *ITEM_BYTES):
        for offset in (0, 1, 4, 8):
            rows = 70 if offset == 0 and item_bytes in (7, 576, 584) else 2
            case = make_case(
                kind, seed=item_bytes, top_k=5, hot_slots=24, rows=rows, block_tokens=3, item_bytes=item_bytes
            )
            assert_steps(case, random_steps(case, offset), contract=True, pool_offset=offset)


@pytest.mark.parametrize(("rows", "capacity"), [(1, 8192), (33, 257), (1279, 5), (1280, 3), (1281, 3), (2561, 1)])
def test_planned_copies_of_every_shape(rows: int, capacity: int) -> None:
    """Many rows with few copies, few with many; more rows than one segment has; few blocks and many."""
    for num_blocks in (1, 4, 1000):
        assert_planned_copies(3, rows=rows, capacity=capacity, item_bytes=32, num_blocks=num_blocks)
    assert_planned_copies(4, rows=rows, capacity=capacity, paged=True)
    assert (planned_copy(hisparse, "cuda", 1, rows=rows, capacity=capacity, skip_io=True) == UNTOUCHED).all()


def test_translation_past_one_round() -> None:
    count = 17_000_000
    mapping = torch.randint(-3, 1 << 40, (1_000_000,), device="cuda")
    locations = torch.randint(-(1 << 18), 1 << 20, (count,), dtype=torch.int32, device="cuda")
    result = hisparse.translate_padded_hisparse_locations(mapping, locations)
    inside = (locations >= 0) & (locations < len(mapping))
    outside = torch.where(locations < 0, locations.long(), -1)
    assert torch.equal(result, torch.where(inside, mapping[locations.long().clamp(0, len(mapping) - 1)], outside))


def test_transfers_and_translations_in_a_graph() -> None:
    rng = np.random.default_rng(0)
    transfer = Transfer("cuda", layers=5, count=100)
    indices = transfer.arguments()
    mapping = torch.zeros(300, dtype=torch.int64, device="cuda")
    locations = torch.zeros(1000, dtype=torch.int32, device="cuda")
    hisparse.transfer_cache_dsv4_mla(**indices)
    hisparse.translate_padded_hisparse_locations(mapping, locations)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        hisparse.transfer_cache_dsv4_mla(**indices)
        result = hisparse.translate_padded_hisparse_locations(mapping, locations)
    for _ in range(3):
        for side, rows in transfer.rows.items():
            rows[:] = rng.permutation({"src": 2, "dst": 3}[side] * PAGE_SLOTS)[: len(rows)]
            rows[rng.random(len(rows)) < 0.1] = -1
            indices[f"{side}_indices"].copy_(torch.from_numpy(rows))
        for pool in transfer.dst:
            pool.fill_(UNTOUCHED)
        mapping.copy_(torch.from_numpy(rng.integers(-5, 2**40, 300)))
        locations.copy_(torch.from_numpy(rng.integers(-20, 320, 1000)))
        graph.replay()
        torch.cuda.synchronize()
        transfer.assert_copied()
        expected = reference.translate_padded_hisparse_locations(mapping.cpu(), locations.cpu())
        assert torch.equal(result.cpu(), expected)


def available_bytes() -> int:
    with open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


HUGE_PAGES = 125_000


@pytest.fixture(scope="module")
def huge_pools() -> tuple[torch.Tensor, torch.Tensor]:
    """4.68 GB of pinned host memory, and as much on the device."""
    size = HUGE_PAGES * PAGE_BYTES
    if available_bytes() < 3 * size or torch.cuda.mem_get_info()[0] < 2 * size:
        pytest.skip("too little memory for two pools of 4.7 GB")
    return torch.empty(size, dtype=torch.uint8, pin_memory=True), torch.empty(size, dtype=torch.uint8, device="cuda")


@pytest.mark.parametrize("kind", KINDS)
def test_pools_beyond_4_gib(kind: str, huge_pools: tuple[torch.Tensor, torch.Tensor]) -> None:
    host, target = huge_pools
    paged = kind == "dsv4"
    item_bytes, rows = (PAGED_ITEM, HUGE_PAGES * PAGE_SLOTS) if paged else (576, HUGE_PAGES * PAGE_BYTES // 576)
    # Items on both sides of 2^31 and of 2^32 bytes, and at the ends.
    middle = [edge // PAGE_BYTES * PAGE_SLOTS if paged else edge // 576 for edge in (2**31, 2**32)]
    items = np.array([0, *(row + i for row in middle for i in (-1, 0, 1)), rows - 1])
    slots = items[[5, 2, 7, 0, 3, 6, 1, 4]]
    case = Case(
        kind,
        top_k=2 if kind == "blocks" else 8,
        hot_slots=8,
        rows=1,
        device_buffer_locs=np.array([[*slots, 9]], dtype=np.int32),
        host_cache_locs=np.array([[*items, 1, 2, 3, 4]], dtype=np.int64),
        device_rows=PAGE_SLOTS,  # those of pools that are not used
        host_rows=PAGE_SLOTS,
        item_bytes=item_bytes,
        steps=2 if kind == "steps" else 1,
        block_tokens=4 if kind == "blocks" else 1,
        scratch_locs=np.zeros((1, 0)) if kind == "steps" else None,
    )
    pools = [pool if paged else pool.view(rows, item_bytes) for pool in huge_pools]
    bench = Bench(case, "cuda")
    bench.host_pools, bench.device_pools = [[pool] * len(bench.host_pools) for pool in pools]
    at = torch.from_numpy(item_index(items, item_bytes, paged))
    host[at] = torch.randint(0, 256, at.shape, dtype=torch.uint8)

    def assert_bytes(where: np.ndarray, what: str) -> None:
        torch.cuda.synchronize()
        got = target[torch.from_numpy(item_index(where, item_bytes, paged)).cuda()].cpu()
        assert torch.equal(got, host[at]), what
        target[at.cuda()] = UNTOUCHED

    target[at.cuda()] = UNTOUCHED
    entries = [0, 1] if kind == "blocks" else list(range(8)) * case.steps
    bench.operator(hisparse)(**bench.arguments(step_of(case, entries, lengths=[12] * case.steps)))
    out = bench.out()[0]
    assert sorted(out[0].tolist()) == sorted(slots.tolist())
    assert (out == out[0]).all()
    assert_bytes(out[0], "swap-in")
    if kind in PLANNED:
        hisparse.copy_cache_planned_mla(
            miss_src=bench.miss_src, miss_dst=bench.miss_dst, miss_count=bench.miss_count, num_real_reqs=None,
            host_cache=pools[0], device_buffer=pools[1], item_size_bytes=item_bytes, is_dsv4_layout=paged,
        )  # fmt: skip
        assert_bytes(out[0], "planned copy")
    if paged:
        pointers = [torch.tensor([pool.data_ptr()], dtype=torch.uint64, device="cuda") for pool in pools]
        indices = [torch.from_numpy(rows.astype(np.int64)).cuda() for rows in (items, slots)]
        hisparse.transfer_cache_dsv4_mla(*pointers, *indices)
        assert_bytes(slots, "transfer")


# ----------------------------------------------------------------------------------------------------- streams, timing


@pytest.mark.parametrize("kind", KINDS)
def test_side_stream(kind: str) -> None:
    """Work runs on the caller's stream: behind the copy that fills its top-k, before what reads its plan."""
    case = make_case(kind, seed=1, top_k=128, hot_slots=512, rows=4, item_bytes=576, block_tokens=2)
    stream, other = torch.cuda.Stream(), torch.cuda.Stream()
    busy = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    theirs, ours = Bench(case), Bench(case, "cuda")
    name = "top_k_blocks" if kind == "blocks" else "top_k_tokens"
    for step in random_steps(case, 1, 3, spread=0.5):
        theirs.run(reference, step)
        ours.prepare(step)
        ours.poison()
        arguments = ours.arguments(step)
        true_top_k = arguments[name].clone()
        arguments[name].fill_(-1)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for _ in range(20):
                busy.fill_(1)
            arguments[name].copy_(true_top_k)
            ours.operator(hisparse)(**arguments)
        if kind in PLANNED:
            theirs.replay(reference)
            if ours.planned is None:
                ours.planned = ours.host_pool(), ours.device_pool()
                torch.cuda.synchronize()
            other.wait_stream(stream)
            with torch.cuda.stream(other):
                hisparse.copy_cache_planned_mla(
                    miss_src=ours.miss_src, miss_dst=ours.miss_dst, miss_count=ours.miss_count, num_real_reqs=None,
                    host_cache=ours.planned[0], device_buffer=ours.planned[1], item_size_bytes=case.item_bytes,
                    is_dsv4_layout=case.paged,
                )  # fmt: skip
            other.synchronize()
            assert torch.equal(ours.planned[1].cpu(), theirs.planned[1])
        stream.synchronize()
        ours.assert_equal(theirs)


def test_many_threads_and_streams() -> None:
    cases = [make_case(KINDS[i % 4], seed=i, top_k=40 + i, hot_slots=300, rows=1 + 9 * i) for i in range(8)]
    steps = [random_steps(case, i, 4, spread=0.7) for i, case in enumerate(cases)]
    theirs = [Bench(case) for case in cases]
    for bench, asked in zip(theirs, steps, strict=True):
        for step in asked:
            bench.run(reference, step)
    ours = [Bench(case, "cuda") for case in cases]
    torch.cuda.synchronize()

    def work(i: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for step in steps[i]:
                ours[i].run(hisparse, step)
                if cases[i].kind in PLANNED:
                    ours[i].replay(hisparse)
            torch.cuda.current_stream().synchronize()
            ours[i].assert_equal(theirs[i])

    run_in_threads(len(cases), work)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
@pytest.mark.parametrize("kind", KINDS)
def test_second_device(kind: str) -> None:
    case = make_case(kind, seed=3, top_k=64, hot_slots=300, rows=3)
    theirs, ours = Bench(case), Bench(case, "cuda:1")
    for step in random_steps(case, 3, 3):
        theirs.run(reference, step)
        with torch.cuda.device(0):
            ours.run(hisparse, step)
            if kind in PLANNED:
                ours.replay(hisparse)
        ours.assert_equal(theirs)
    ours.device_buffer_locs = ours.device_buffer_locs.to("cuda:0")
    with pytest.raises(ValueError, match="^device_buffer_locs: expected device cuda:1, got cuda:0"):
        ours.run(hisparse, step)


@pytest.mark.parametrize("hot_slots", [4096, 8192])
def test_clustered_tokens_cost_what_random_tokens_cost(hot_slots: int) -> None:
    """A table that keeps low bits of tokens would walk its whole length for each."""
    count, tokens = 2048, 2048 * 4096
    case = Case(
        "linear",
        top_k=count,
        hot_slots=hot_slots,
        rows=1,
        device_buffer_locs=np.arange(hot_slots + 1, dtype=np.int32)[None],
        host_cache_locs=np.arange(tokens, dtype=np.int64)[None] % 4096,
        device_rows=hot_slots + 1,
        host_rows=4096,
    )
    bench = Bench(case, "cuda")
    fresh = bench.lru_slots.clone()

    def reset() -> None:
        bench.device_buffer_tokens.fill_(-1)
        bench.lru_slots.copy_(fresh)

    def resolution(entries: np.ndarray) -> float:
        arguments = bench.arguments(step_of(case, entries.tolist(), lengths=[tokens]), skip_io=True)

        def call() -> None:
            reset()
            hisparse.load_cache_to_device_buffer_mla(**arguments)

        seconds = seconds_of(call) - idle
        assert int(bench.miss_count[0]) == count
        return seconds

    idle = seconds_of(reset)
    random = resolution(np.random.default_rng(0).choice(tokens - 1, count, replace=False))
    assert resolution(np.arange(count) * 4096) < 1.5 * random
    assert resolution(np.arange(count)) < 1.5 * random


# -------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("kind", KINDS)
def test_pageable_pools_are_refused_or_read(kind: str) -> None:
    """Some systems let the GPU read all of host memory. On the others this must not become an illegal access."""
    case = make_case(kind, seed=0)
    ours, theirs = Bench(case, "cuda"), Bench(case)
    ours.host_pools = [pool.clone() for pool in theirs.host_pools]
    step = random_steps(case, 0, 1, short=0.0)[0]
    theirs.run(reference, step)
    name = "host_cache_k" if kind == "blocks" else "host_cache"
    try:
        ours.run(hisparse, step)
    except ValueError as error:
        assert f"{name}: expected pinned memory" in str(error)  # noqa: PT017
        return
    ours.assert_equal(theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_device_errors(kind: str) -> None:
    bench = Bench(make_case(kind, seed=0), "cuda")
    arguments = bench.arguments(random_steps(bench.case, 0, 1)[0]) | {"num_real_reqs": bench.num_real_reqs}
    call = bench.operator(hisparse)
    decides = ("device_buffer", "device_buffer_k", "host_cache", "host_cache_k", "host_cache_v")
    changes = {
        name: {name: value.cpu()}
        for name, value in arguments.items()
        if isinstance(value, torch.Tensor) and name not in decides
    }
    if kind == "steps":
        state = arguments["state"]
        for name in ("cache_policy", "scratch_locs", "scratch_state"):
            changes[f"state.{name}"] = {"state": state._replace(**{name: getattr(state, name).cpu()})}
    for name, change in changes.items():
        with pytest.raises(ValueError, match=f"^{name}: expected device cuda:0, got cpu"):
            call(**(arguments | change))
    torch.cuda.synchronize()
    assert (bench.out() == POISON).all()
    assert len(changes) > 7


def test_device_errors_of_the_other_operators() -> None:
    transfer = Transfer("cuda")
    arguments = transfer.arguments()
    for name in ("dst_ptrs", "src_indices", "dst_indices"):
        with pytest.raises(ValueError, match=f"^{name}: expected device cuda:0, got cpu"):
            hisparse.transfer_cache_dsv4_mla(**(arguments | {name: arguments[name].cpu()}))
    zeros = torch.zeros(4, dtype=torch.int32, device="cuda")
    with pytest.raises(ValueError, match="^locations: expected device cuda:0, got cpu"):
        hisparse.translate_padded_hisparse_locations(zeros, zeros.cpu())


# -------------------------------------------------------------------------------------------------------------- SGLang


class Peer(NamedTuple):
    """A swap-in of SGLang's, which is compiled for its sizes. top_k counts entries, tokens or blocks."""

    kind: str
    top_k: int
    hot_slots: int
    block_tokens: int = 1

    @property
    def function(self) -> str:
        """Of 1024 threads: it goes wrong with fewer than 512. With a plan, where it can record one."""
        blocks = self.kind == "blocks"
        layout = not blocks, self.kind == "dsv4", self.block_tokens, blocks
        sizes = 1024, self.top_k, self.hot_slots
        return peers._template("load_cache_to_device_buffer", *sizes, *layout, not blocks, False)


PEERS = [
    Peer("linear", 64, 64),
    Peer("linear", 512, 1000),
    Peer("linear", 2048, 8192),
    Peer("dsv4", 512, 1024),
    Peer("blocks", 16, 600, 32),
]
PEER_STEPS, PEER_TOP_K, PEER_SLOTS, PEER_ITEM = 2, 1024, 2048, 576
"""The swap-in of several steps."""


def peer_units() -> dict[str, str]:
    """A file for each kernel, so that they are compiled side by side."""
    copies = [peers._template("copy_cache_planned", 1024, True, paged, False) for paged in (False, True)]
    overlapped = peers._overlaps(peers._current_arch())
    sizes = 64, PEER_TOP_K, PEER_SLOTS, PEER_ITEM, PEER_STEPS, True, overlapped
    files = {f"{peer.kind}_{peer.top_k}": (peers.HISPARSE_HEADER, [peer.function]) for peer in PEERS}
    files["copies"] = peers.HISPARSE_HEADER, [*copies, peers._template("transfer_cache_dsv4_mla", 1024)]
    files["steps"] = peers.HISPARSE_STEPS_HEADER, [peers._template("load_cache_to_device_buffer_spec", *sizes)]
    return {
        f"{name}.cu": peers._unit(header, {peers._exported(function): function for function in functions})
        for name, (header, functions) in files.items()
    }


@pytest.fixture(scope="module")
def sglang() -> peers.SGLangDeviceBuffer:
    """Its own wrappers, for the kernels above."""
    root = sources()
    build = peers._build(root, "hotplan_test_device_buffer", peer_units(), peers.HISPARSE_HEADER, None, None)
    return peers.SGLangDeviceBuffer(build, root)


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: f"{peer.kind}-{peer.top_k}-{peer.hot_slots}")
def test_what_sglangs_kernel_gives(peer: Peer, sglang: peers.SGLangDeviceBuffer) -> None:
    """Outputs, LRU, tokens, plans and bytes, bit for bit, over steps, for input that SGLang's kernel takes."""
    changed = 0
    for seed in range(40):
        rng = np.random.default_rng((seed, peer.hot_slots))
        case = make_case(
            peer.kind,
            seed=seed,
            top_k=peer.top_k,
            hot_slots=peer.hot_slots,
            block_tokens=peer.block_tokens,
            extra=int(rng.choice([1, 4, 64])),
            rows=int(rng.integers(1, 9)),
            max_tokens=peer.hot_slots + int(rng.choice([1, 70, peer.hot_slots])),
            item_bytes=16 if peer.hot_slots > 1024 else int(rng.choice([16, 576, 656])),
        )
        assert case.hot_slots == peer.hot_slots
        options = {"strided": bool(rng.random() < 0.5), "wide": (bool(rng.random() < 0.5), bool(rng.random() < 0.5))}
        ours, theirs = Bench(case, "cuda", **options), Bench(case, "cuda", **options)
        # Long rows must fill their top-k: SGLang leaves the output of a -1 in them as it was.
        least = 0.3 if peer.kind == "blocks" else (peer.top_k + 1) / (peer.hot_slots + 1)
        for number in range(4):
            step = random_step(case, rng, spread=max(least, float(rng.choice([0.5, 0.8, 1.0]))), padding=0.4)
            if step.num_real is not None:
                step.num_real = min(step.num_real, case.rows)  # its planned copy reads as many counts
            for row, request in step.real_requests(case).items():
                if step.seq_lens[row] <= case.hot_slots:
                    # A new request, as none becomes shorter: or a token is in two slots, for which SGLang has no rule.
                    ours.device_buffer_tokens[request] = theirs.device_buffer_tokens[request] = -1
            for bench, operators in ((ours, hisparse), (theirs, sglang.wrappers)):
                bench.run(operators, step, block_size=1024, page_size=case.extra)
                if peer.kind in PLANNED:
                    bench.replay(operators)
            ours.assert_equal(theirs, f"seed {seed} step {number}")
            changed += int((ours.array("device_buffer_tokens") != ours.tokens_before).sum())
    assert changed > 1000


def test_what_sglangs_kernel_for_several_steps_gives(sglang: peers.SGLangDeviceBuffer) -> None:
    """Its locations are not deterministic: bytes of every occurrence, and what is loaded, which is the same for equal
    tables."""
    for seed in range(10):
        rng = np.random.default_rng(seed)
        case = make_case(
            "steps",
            seed=seed,
            top_k=PEER_TOP_K,
            hot_slots=PEER_SLOTS,
            steps=PEER_STEPS,
            extra=int(rng.choice([1, 4, 64])),
            rows=int(rng.integers(1, 5)),
            max_tokens=PEER_SLOTS + int(rng.choice([200, 1500])),
            item_bytes=PEER_ITEM,
            scratch_rows=PEER_STEPS * PEER_TOP_K,
        )
        ours, theirs = (Bench(case, "cuda", wide=(True, False)) for _ in range(2))
        # What SGLang's server makes for itself, in the place of what our operator does not need.
        shape = (case.requests + 1, max(4 * case.requests, 5 * PEER_STEPS * PEER_TOP_K))
        theirs.scratch_state = torch.full(shape, -1, dtype=torch.int32, device="cuda")
        theirs.scratch_state[0] = 0
        theirs.cache_index = torch.full((case.requests, 2, 2 * PEER_SLOTS), -1, dtype=torch.int64, device="cuda")
        known = rng.choice([0, 100, PEER_SLOTS])
        for request in range(case.requests):
            for bench in (ours, theirs):
                bench.set_tokens(request, {token: token for token in range(known)})
        for number in range(3):
            step = random_step(case, rng, spread=float(rng.choice([0.5, 0.8, 1.0])), padding=0.3, invalid=0.02)
            loaded = steps_loads(ours, hisparse, step), steps_loads(theirs, sglang.wrappers, step)
            if number == 0:
                assert loaded[0] == loaded[1], f"seed {seed}"


def steps_loads(bench: Bench, operators: Any, step: Step) -> dict[int, set[int]]:
    """Makes the call, checks what holds without a rule for slots, and gives the host rows that every row loaded."""
    bench.run(operators, step)
    case = bench.case
    out, tokens, lengths = bench.out(), step.tokens(case), step.lengths(case)
    real = step.real_requests(case)
    loads: dict[int, set[int]] = {}
    for row, request in real.items():
        asked = bench.check_columns(request, out[row], tokens[row], lengths[row], True)
        held = set(bench.tokens_before[request, : case.hot_slots].tolist())
        sources = [src for src, _ in bench.loads(row)]
        loads[row] = set(sources)
        assert len(sources) == len(loads[row])
        assert loads[row] == {int(case.host_cache_locs[request, token]) for token in asked if token not in held}
        assert bench.scratch_state[0, request] == len(sources)
    for row in set(range(case.rows)) - set(real):
        assert (out[row] == 0).all()
        assert bench.miss_count[row] == 0
    return loads


@pytest.mark.parametrize("to_host", [False, True])
def test_what_sglangs_transfer_gives(to_host: bool, sglang: peers.SGLangDeviceBuffer) -> None:
    for operators in (hisparse, sglang.wrappers):
        transfer = Transfer("cuda", layers=4, count=120, seed=9, to_host=to_host)
        for side, pool_rows in (("src", 2 * PAGE_SLOTS), ("dst", 3 * PAGE_SLOTS)):
            transfer.rows[side] = np.random.default_rng(1).permutation(pool_rows)[:120]  # SGLang's has no padding
        transfer.run(operators)
        torch.cuda.synchronize()
        transfer.assert_copied()


def test_what_sglangs_translation_gives(sglang: peers.SGLangDeviceBuffer) -> None:
    theirs = sglang.translate_padded_hisparse_locations
    if theirs is None:
        pytest.skip("no Triton")
    mapping = torch.randint(0, 1 << 30, (500,), device="cuda")
    for mapping_dtype in (torch.int32, torch.int64):
        for dtype in (torch.int32, torch.int64):
            dense = torch.randint(-3, 500, (1000,), device="cuda").to(dtype)
            for locations in (dense, dense[::3], dense[:0]):
                ours = hisparse.translate_padded_hisparse_locations(mapping.to(mapping_dtype), locations)
                expected = theirs(mapping.to(mapping_dtype), locations)
                assert ours.dtype == expected.dtype
                assert torch.equal(ours, expected)
