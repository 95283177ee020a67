"""The CUDA backend of HiSparse: the reference's results and bytes from every route, as plain launch and as graph replay.

`-k quick` selects small cases of every kernel, for the sanitizers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from graphs import seconds_of
from hisparse_cases import (
    POISON,
    Bench,
    Case,
    Sequence,
    clustered_ids,
    corrupt_before_step,
    corrupt_dgi,
    corrupt_lru,
    golden_cases,
    golden_expectation,
    host_bytes,
    make_case,
    random_ids,
    sequences,
    worked_case,
)
from hypothesis import HealthCheck, given, settings
from threads import run_in_threads

from hotplan import hisparse, plans
from hotplan.hot_buffer import HotBuffer
from hotplan.reference import hisparse as reference

pytestmark = pytest.mark.gpu

PROPERTY = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
QUICK = settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])


class Replayed:
    """A bench whose steps are replays of one captured call: addresses are fixed, outputs are poisoned in between."""

    def __init__(self, bench: Bench, operator: str) -> None:
        self.bench = bench
        case = bench.case
        warm = Bench(make_case(top_k=case.top_k, hot_slots=case.hot_slots), device="cuda")
        warm.resolve(hisparse, np.zeros((2, case.top_k)), operator)  # compile, load and set up outside the capture
        torch.cuda.synchronize()
        self.arguments = list(bench.arguments(np.zeros((case.rows, case.top_k))))
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            getattr(hisparse, operator)(*self.arguments, **bench.options())

    def step(self, ids: np.ndarray) -> None:
        for name in Bench.OUTPUTS:
            getattr(self.bench, name).fill_(POISON)
        self.arguments[3].copy_(torch.from_numpy(ids.astype(np.int32)))
        self.graph.replay()


def assert_steps(
    case: Case,
    steps: Iterable[np.ndarray],
    operator: str = "resolve_residency",
    *,
    strided: bool = False,
    graph: bool = False,
    corrupt: Callable[[int, list[Bench]], None] | None = None,
) -> Bench:
    """Steps on the GPU, plain and (graph) replayed, against the reference on the CPU."""
    theirs = Bench(case, strided=strided)
    ours = [Bench(case, device="cuda", strided=strided)]
    replay = None
    if graph:
        ours.append(Bench(case, device="cuda", strided=strided))
        replay = Replayed(ours[1], operator)
    for step, ids in enumerate(steps):
        if corrupt is not None:
            corrupt(step, [theirs, *ours])
        theirs.resolve(reference, ids, operator)
        ours[0].resolve(hisparse, ids, operator)
        if replay is not None:
            replay.step(ids)
        torch.cuda.synchronize()
        for bench, how in zip(ours, ("plain", "replay"), strict=False):
            bench.assert_equal(theirs, f"{how} step {step}")
    return theirs


def random_steps(case: Case, seed: int, count: int = 3, **options: Any) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [random_ids(case, rng, **options) for _ in range(count)]


def run_sequence(sequence: Sequence, operator: str, *, graph: bool = False) -> None:
    assert_steps(
        sequence.case,
        sequence.ids,
        operator,
        strided=sequence.seed % 2 == 1,
        graph=graph,
        corrupt=lambda step, benches: corrupt_before_step(sequence, step, benches),
    )


# --------------------------------------------------------------------------------------------------------------- quick


def test_quick_worked_values() -> None:
    ids = [np.array([i]) for i in ([10, 3, 7, 12], [7, 50, 3, -1], [7, 50, 3, 100], [-1, -1, 100, -1])]
    for operator in ("resolve_residency", "swap_in"):
        bench = assert_steps(worked_case(), ids, operator, graph=True)
        assert bench.stats.tolist() == [5, 5]


@pytest.mark.parametrize("strided", [False, True])
def test_quick_recorded_outputs(strided: bool) -> None:
    for case in golden_cases():
        bench = Bench(case, device="cuda", strided=strided)
        for step, record in enumerate(case.steps):
            bench.resolve(hisparse, np.array(record["ids"]))
            for name, expected in golden_expectation(case, step).items():
                got = bench.array(name)[: len(expected)]
                np.testing.assert_array_equal(got.astype(np.int64), expected, err_msg=f"step {step} {name}")


@pytest.mark.parametrize("operator", ["resolve_residency", "swap_in"])
@given(sequence=sequences(hostile=False))
@QUICK
def test_quick_sequences(operator: str, sequence: Sequence) -> None:
    run_sequence(sequence, operator)


@pytest.mark.parametrize("operator", ["resolve_residency", "swap_in"])
@given(sequence=sequences(hostile=False, union=True))
@QUICK
def test_quick_unions(operator: str, sequence: Sequence) -> None:
    run_sequence(sequence, operator)


@pytest.mark.parametrize(("top_k", "hot_slots"), [(600, 1100), (32, 40), (1500, 27000)])
def test_quick_routes(top_k: int, hot_slots: int) -> None:
    """More ids than threads, fewer, and, in the last case, more slots than shared memory holds."""
    case = make_case(seed=1, top_k=top_k, hot_slots=hot_slots, block_size=64, rows=2, host_rows=4000, row_bytes=576)
    assert_steps(case, random_steps(case, 1, 2, spread=0.5, invalid=0.02), "swap_in")


def assert_copies(rows: int, top_k: int) -> None:
    case = make_case(
        seed=top_k, top_k=top_k, hot_slots=top_k + 5, block_size=16, rows=rows, host_rows=2 * top_k, row_bytes=48
    )
    assert_steps(case, random_steps(case, 1, 2), "swap_in")


def test_quick_sorted_copies() -> None:
    """A block sorts what it copies by host rows."""
    assert_copies(67, 129)


def gather_inputs(seed: int, rows: int = 3, top_k: int = 7) -> dict[str, torch.Tensor]:
    """Host rows up to and past 50, hot rows up to and past 24 and no row twice, hostile counts, masks and states."""
    rng = np.random.default_rng(seed)
    size = rows * top_k
    hot = np.resize(rng.permutation(27)[:size] - 1, size) if size <= 27 else np.arange(size) - 1
    return {
        "host": torch.from_numpy(rng.integers(-3, 56, (rows, top_k)).astype(np.int32)),
        "hot": torch.from_numpy(hot.reshape(rows, top_k).astype(np.int32)),
        "counts": torch.from_numpy(np.resize([top_k + 2, -1, top_k // 2, top_k], rows).astype(np.int32)),
        "mask": torch.from_numpy(rng.integers(-1, 2, (rows, top_k)).astype(np.int32)),
        "states": torch.from_numpy(np.resize([4, 0, -1], rows).astype(np.int32)),
    }


def gather_all(
    module: Any, inputs: dict[str, torch.Tensor], row_bytes: int, gap: int, offset: int, device: str, blocks: int = 6
) -> list[torch.Tensor]:
    """What the three gathers leave in poisoned hot caches, and gather_plan's attention indices."""
    host = torch.from_numpy(host_bytes(50, row_bytes))
    host = host.pin_memory() if device == "cuda" else host
    page = 4 * row_bytes + gap
    host_rows, hot_rows, counts, mask, states = (
        inputs[k].to(device) for k in ("host", "hot", "counts", "mask", "states")
    )
    packed = plans.invalid_rows(plans.SWAP_ROW, host_rows.numel()).reshape(host_rows.shape)
    packed["host_row"], packed["hot_row"] = inputs["host"], inputs["hot"]
    plan = torch.from_numpy(packed.view(np.uint8).reshape(*host_rows.shape, 16)).to(device)
    results = []
    attention = torch.full(host_rows.shape, POISON, dtype=torch.int32, device=device)
    for call in (
        lambda hot: module.gather_compact(host, hot, host_rows, hot_rows, counts),
        lambda hot: module.gather_planned(host, hot, plan, counts),
        lambda hot: module.gather_plan(
            host, hot, host_rows, hot_rows, mask, request_state_indices=states, attention_indices=attention,
            attention_block_stride=9,
        ),
    ):  # fmt: skip
        memory = torch.full((offset + blocks * page,), 0xA5, dtype=torch.uint8, device=device)
        call(memory[offset:].as_strided((blocks, 4, row_bytes), (page, row_bytes, 1)))
        results.append(memory.cpu())
    return [*results, attention.cpu()]


def assert_gathers(inputs: dict[str, torch.Tensor], row_bytes: int, gap: int, offset: int, blocks: int = 6) -> None:
    ours = gather_all(hisparse, inputs, row_bytes, gap, offset, "cuda", blocks)
    theirs = gather_all(reference, inputs, row_bytes, gap, offset, "cpu", blocks)
    for got, expected, what in zip(ours, theirs, ("compact", "planned", "plan", "attention"), strict=True):
        assert torch.equal(got, expected), (what, row_bytes, gap, offset)


ALIGNMENTS = [(0, 0), (16, 32), (4, 8), (1, 0), (0, 3)]


def test_quick_gathers() -> None:
    for gap, offset in ALIGNMENTS:
        for row_bytes in (16, 576):
            assert_gathers(gather_inputs(row_bytes), row_bytes, gap, offset)


def test_quick_invalidate() -> None:
    rng = np.random.default_rng(0)
    for slots in (1, 3, 40, 1030):
        theirs = torch.from_numpy(rng.integers(-2, 30, (5, slots)).astype(np.int32))
        ours = theirs.cuda()
        states = torch.tensor([2, -1, 5, 4, 0, 2**31 - 1], dtype=torch.int32)
        requests = torch.from_numpy(rng.integers(-2, 8, 60).astype(np.int32))
        written = torch.from_numpy(rng.integers(-3, 30, 60))
        written[:3] = torch.tensor([2**32 + 5, -(2**31) - 1, 2**63 - 1])
        hisparse.invalidate_written_slots(ours, states.cuda(), requests.cuda(), written.cuda())
        reference.invalidate_written_slots(theirs, states, requests, written)
        assert torch.equal(ours.cpu(), theirs)


@given(sequence=sequences(union=True))
@QUICK
def test_quick_plans(sequence: Sequence) -> None:
    """Packed plans and what gather_planned makes of them, with corrupt state."""
    ours, theirs = Bench(sequence.case, device="cuda"), Bench(sequence.case)
    names = tuple(n for n in Bench.OUTPUTS if not n.startswith("swap_")) + Bench.STATE
    for step, ids in enumerate(sequence.ids):
        corrupt_before_step(sequence, step, [theirs, ours])
        plan, expected = ours.plan(hisparse, ids), theirs.plan(reference, ids)
        ours.assert_equal(theirs, f"step {step}", names)
        np.testing.assert_array_equal(plans.swap_rows(plan.plan), plans.swap_rows(expected.plan))
        assert torch.equal(plan.counts.cpu(), expected.counts)
        hisparse.gather_planned(ours.host_cache, ours.hot_cache, plan.plan, plan.counts)
        reference.gather_planned(theirs.host_cache, theirs.hot_cache, expected.plan, expected.counts)
        assert torch.equal(ours.hot_pool.cpu(), theirs.hot_pool)


# ---------------------------------------------------------------------------------------------------------- resolution


@pytest.mark.parametrize("operator", ["resolve_residency", "swap_in"])
@given(sequence=sequences())
@PROPERTY
def test_sequences_of_steps(operator: str, sequence: Sequence) -> None:
    """Corrupt LRU and dgi, duplicates, hostile ids and pages, resident tables, padding, odd strides."""
    run_sequence(sequence, operator)


@pytest.mark.parametrize("operator", ["resolve_residency", "swap_in"])
@given(sequence=sequences(union=True))
@PROPERTY
def test_sequences_of_unions(operator: str, sequence: Sequence) -> None:
    run_sequence(sequence, operator)


@given(sequence=sequences())
@settings(PROPERTY, max_examples=15)
def test_replayed_sequences(sequence: Sequence) -> None:
    run_sequence(sequence, "swap_in", graph=True)


EDGES = [1, 2, 31, 32, 33, 63, 64, 65, 511, 512, 513, 2047, 2048, 2049]


@pytest.mark.parametrize("more", [0, 1, 31, 4096])
def test_sizes_at_every_edge(more: int) -> None:
    """K at the edges of warps, packs, batches and blocks; H = K, odd, and past one round of loads."""
    for top_k in EDGES:
        case = make_case(
            seed=top_k, top_k=top_k, hot_slots=top_k + more, block_size=16, rows=2, host_rows=3 * (top_k + more)
        )
        assert_steps(case, random_steps(case, top_k, 2, spread=0.6), "swap_in")


@pytest.mark.parametrize(
    ("top_k", "hot_slots"), [(2048, 4096), (2048, 10240), (2048, 32767), (512, 32768), (16384, 32768), (32768, 32768)]
)
def test_served_and_largest_sizes(top_k: int, hot_slots: int) -> None:
    case = make_case(
        seed=3, top_k=top_k, hot_slots=hot_slots, block_size=64, rows=2, host_rows=2 * hot_slots, mode="state"
    )
    steps = random_steps(case, 3, 2, spread=0.8, duplicates=0.05, invalid=0.01)

    def corrupt(step: int, benches: list[Bench]) -> None:
        if step == 1:
            rng = np.random.default_rng(3)
            lru, dgi = benches[0].array("lru_slots").copy(), benches[0].array("device_global_indices").copy()
            corrupt_lru(lru, rng)
            corrupt_dgi(dgi, rng, case.host_rows)
            for bench in benches:
                bench.lru_slots.copy_(torch.from_numpy(lru))
                bench.device_global_indices.copy_(torch.from_numpy(dgi))

    assert_steps(case, steps, "swap_in", corrupt=corrupt)


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 33, 128])
def test_batches(rows: int) -> None:
    """Every number of blocks per request, with padding, tables and resident pages; plain and replayed."""
    case = make_case(
        seed=rows, top_k=300, hot_slots=640, block_size=64, rows=rows, host_rows=rows * 900, row_bytes=656, mode="tables",
        padding=0.1, resident=0.1, holes=0.02, spare_states=2,
    )  # fmt: skip
    for operator in ("resolve_residency", "swap_in"):
        assert_steps(case, random_steps(case, rows, 3, spread=0.7), operator, strided=True, graph=True)


@pytest.mark.parametrize(
    ("rows", "top_k"), [(67, 127), (67, 128), (63, 128), (64, 128), (64, 255), (64, 256), (33, 300), (70, 2100)]
)
def test_copies_around_the_edges_of_sorting(rows: int, top_k: int) -> None:
    """128 copies of a block and 64 blocks, of which a request has one or two here on a GPU of 132 processors."""
    assert_copies(rows, top_k)


@pytest.mark.parametrize("steps", [2, 4])
def test_unions_of_served_sizes(steps: int) -> None:
    case = make_case(
        seed=steps, top_k=2048, hot_slots=10240, block_size=64, rows=3 * steps, host_rows=40000, mode="tables",
        steps_per_request=steps, union=True,
    )  # fmt: skip
    assert_steps(case, random_steps(case, steps, 2, spread=0.6), "swap_in", graph=True)


def test_a_union_too_large_for_shared_memory() -> None:
    case = make_case(
        seed=9, top_k=2048, hot_slots=20000, rows=9, host_rows=20000, mode="tables", steps_per_request=9, union=True
    )
    assert_steps(case, random_steps(case, 9, 2, spread=0.5, duplicates=0.1), "swap_in")


def resolve_unchecked(bench: Bench, ids: np.ndarray) -> None:
    """The reference's rule for unions that nobody looks at before the launch."""
    bench.poison()
    names = ("host_cache", "hot_cache", "hot_block_table", "global_indices", "hot_indices")
    arguments = dict(zip((*names, "device_global_indices", "lru_slots"), bench.arguments(ids), strict=True))
    absent = dict.fromkeys(("request_state_indices", "region_stride", "resident_block_table", "max_union_rows"))
    sizes = {"resident_block_size": 0, "resident_null_block": 0}
    reference._resolve(reference._check_resolve(**(absent | sizes | arguments | bench.options())), strict=False)


def test_unions_that_break_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(5)
    for seed in range(20):
        case = make_case(
            seed=seed, top_k=9, hot_slots=12, rows=12, host_rows=2000, mode="tables", steps_per_request=4, union=True
        )
        case.max_union_rows = 1 + seed % 4
        ours, theirs = Bench(case, device="cuda"), Bench(case)
        for step in range(3):
            ids = random_ids(case, rng, spread=0.02 if step == 1 else 1.0)
            ours.resolve(hisparse, ids)
            resolve_unchecked(theirs, ids)
            ours.assert_equal(theirs, f"seed {seed} step {step}")
    monkeypatch.setenv("HOTPLAN_CHECK", "1")
    with pytest.raises(ValueError, match="global_indices: expected at most H=12 distinct ids in a union"):
        ours.resolve(hisparse, random_ids(case, rng))
    case.max_union_rows = 2
    with pytest.raises(ValueError, match="request_ids: expected at most max_union_rows=2"):
        ours.resolve(hisparse, random_ids(case, rng), "swap_in")
    fine = make_case(
        seed=1, top_k=9, hot_slots=40, rows=4, host_rows=2000, mode="tables", steps_per_request=4, union=True
    )
    Bench(fine, device="cuda").plan(hisparse, random_ids(fine, rng))


def test_rows_that_share_state_stay_inside() -> None:
    """Without the union rule the order of such rows is open, but not what they may touch, and the next step heals."""
    case = make_case(seed=2, top_k=200, hot_slots=256, rows=16, host_rows=3000)
    case.request_state_indices = np.zeros(16, dtype=np.int32)
    bench = Bench(case, device="cuda")
    for ids in random_steps(case, 2, 10):
        bench.resolve(hisparse, ids, "swap_in")
    torch.cuda.synchronize()
    hot_rows = case.hot_blocks * case.block_size
    assert int(bench.hot_indices.max()) < hot_rows
    ids = random_ids(case, np.random.default_rng(2))
    alone = torch.full((16,), -1, dtype=torch.int32)
    alone[3] = 0
    bench.tables["request_state_indices"].copy_(alone)
    bench.resolve(hisparse, ids)
    assert sorted(bench.array("lru_slots")[0].tolist()) == list(range(256))


def test_the_same_results_every_time() -> None:
    case = make_case(seed=7, top_k=2048, hot_slots=4096, block_size=64, rows=12, host_rows=20000, row_bytes=576)
    ids = random_steps(case, 7, 2)
    first = None
    for _ in range(8):
        bench = Bench(case, device="cuda")
        for step in ids:
            bench.resolve(hisparse, step, "swap_in")
        torch.cuda.synchronize()
        if first is not None:
            bench.assert_equal(first)
        first = bench


# -------------------------------------------------------------------------------------------------------------- copies


def test_row_sizes() -> None:
    """Every byte of rows of 16 to 4096 bytes, for bases and page strides of every alignment."""
    for row_bytes in (16, 32, 48, 496, 512, 528, 576, 592, 656, 1008, 1152, 2064, 4096):
        for gap, offset in ALIGNMENTS:
            assert_gathers(gather_inputs(row_bytes + gap), row_bytes, gap, offset)


@pytest.mark.parametrize(("rows", "top_k"), [(1, 2048), (33, 257), (1025, 5), (2500, 1)])
def test_lists_of_every_shape(rows: int, top_k: int) -> None:
    """Many rows with short lists, few with long ones; more rows than one segment has."""
    inputs = gather_inputs(rows, rows, top_k)
    assert_gathers(inputs, 48, 0, 0, blocks=rows * top_k // 4 + 2)


@pytest.mark.parametrize("row_bytes", [576, 584 * 2, 656, 1152])
def test_swap_in_copies_every_byte(row_bytes: int) -> None:
    for rows, gap in ((1, 0), (5, 16), (40, 0), (3, 4), (2, 1)):
        case = make_case(
            seed=row_bytes, top_k=65, hot_slots=130, block_size=16, rows=rows, host_rows=400, row_bytes=row_bytes,
            page_gap_bytes=gap,
        )  # fmt: skip
        assert_steps(case, random_steps(case, rows, 3), "swap_in")


def test_584_byte_rows_are_refused() -> None:
    """The paged dsv4 item has an operator of its own; here a row is a multiple of 16 bytes."""
    host = torch.zeros((4, 584), dtype=torch.uint8).pin_memory()
    hot = torch.zeros((1, 4, 584), dtype=torch.uint8, device="cuda")
    index = torch.zeros((1, 1), dtype=torch.int32, device="cuda")
    with pytest.raises(ValueError, match="hot_cache: expected rows of a positive multiple of 16 bytes, got 584 bytes"):
        hisparse.gather_compact(host, hot, index, index, index[0])


def available_bytes() -> int:
    with open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def test_host_pool_beyond_4_gib() -> None:
    rows, row_bytes = 8_000_000, 576
    if available_bytes() < 3 * rows * row_bytes:
        pytest.skip("too little memory for a pinned pool of 4.6 GB")
    host = torch.empty((rows, row_bytes), dtype=torch.uint8, pin_memory=True)
    # Both sides of 2^31 and of 2^32 bytes, and the ends.
    ids = torch.tensor([0, 3_728_269, 3_728_270, 3_728_271, 7_456_540, 7_456_541, 7_999_998, 7_999_999])
    host[ids] = torch.from_numpy(host_bytes(8, row_bytes))
    case = make_case(top_k=8, hot_slots=16, block_size=4, rows=1, host_rows=1, row_bytes=row_bytes)
    for operator in ("swap_in", "lists", "plan"):
        bench = Bench(case, device="cuda")
        bench.host_cache = host
        if operator == "plan":
            plan = bench.plan(hisparse, ids[None].numpy())
            hisparse.gather_planned(host, bench.hot_cache, plan.plan, plan.counts)
        elif operator == "lists":
            bench.resolve(hisparse, ids[None].numpy())
            hisparse.gather_compact(
                host, bench.hot_cache, bench.swap_host_physical_rows, bench.swap_device_physical_rows, bench.swap_counts
            )
        else:
            bench.resolve(hisparse, ids[None].numpy(), operator)
        hot = bench.hot_cache.cpu().view(-1, row_bytes)
        assert torch.equal(hot[bench.hot_indices[0].cpu().long()], host[ids])


# ----------------------------------------------------------------------------------------------------- streams, timing


def test_side_stream() -> None:
    """Work runs on the caller's stream: behind the copy that fills its ids, before what reads its rows."""
    case = make_case(seed=1, top_k=256, hot_slots=512, block_size=64, rows=4, host_rows=4000, row_bytes=576)
    stream = torch.cuda.Stream()
    busy = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    theirs, ours = Bench(case), Bench(case, device="cuda")
    for ids in random_steps(case, 1, 4, spread=0.5):
        theirs.resolve(reference, ids, "swap_in")
        true_ids = torch.from_numpy(ids).cuda()
        ours.poison()
        arguments = list(ours.arguments(np.full((4, 256), -1)))
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for _ in range(20):
                busy.fill_(1)
            arguments[3].copy_(true_ids)
            hisparse.swap_in(*arguments, **ours.options())
        stream.synchronize()
        ours.assert_equal(theirs)


def test_many_threads_and_streams() -> None:
    cases = [
        make_case(seed=i, top_k=100 + i, hot_slots=300, rows=1 + 9 * i, host_rows=2000, row_bytes=576) for i in range(5)
    ]
    steps = [random_steps(case, i, 4) for i, case in enumerate(cases)]
    theirs = [Bench(case) for case in cases]
    for bench, ids in zip(theirs, steps, strict=True):
        for step in ids:
            bench.resolve(reference, step, "swap_in")
    ours = [Bench(case, device="cuda") for case in cases]
    torch.cuda.synchronize()

    def work(i: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for step in steps[i]:
                ours[i].resolve(hisparse, step, "swap_in")
            torch.cuda.current_stream().synchronize()
            ours[i].assert_equal(theirs[i])

    run_in_threads(len(cases), work)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
def test_second_device() -> None:
    case = make_case(seed=3, top_k=64, hot_slots=128, rows=3, host_rows=900)
    theirs, ours = Bench(case), Bench(case, device="cuda:1")
    for ids in random_steps(case, 3):
        theirs.resolve(reference, ids, "swap_in")
        with torch.cuda.device(0):
            ours.resolve(hisparse, ids, "swap_in")
        torch.cuda.synchronize(1)
        ours.assert_equal(theirs)
    ours.hot_block_table = ours.hot_block_table.to("cuda:0")
    with pytest.raises(ValueError, match="hot_block_table: expected device cuda:1, got cuda:0"):
        ours.resolve(hisparse, ids)


def test_clustered_ids_cost_what_random_ids_cost() -> None:
    case = make_case(top_k=2048, hot_slots=4096, block_size=64, rows=1, host_rows=1)
    bench = Bench(case, device="cuda")
    bench.host_cache = torch.empty((2049 * 4096, 16), dtype=torch.uint8)  # a resolution reads its size alone
    fresh = bench.lru_slots.clone()

    def reset() -> None:
        bench.device_global_indices.fill_(-1)
        bench.lru_slots.copy_(fresh)

    def resolution(ids: np.ndarray) -> float:
        arguments = bench.arguments(ids)
        options = bench.options()

        def call() -> None:
            reset()
            hisparse.resolve_residency(*arguments, **options)

        return seconds_of(call) - idle

    idle = seconds_of(reset)
    rng = np.random.default_rng(0)
    random = resolution(rng.choice(2048 * 4096, (1, 2048), replace=False))
    assert resolution(clustered_ids(1, 2048)) < 1.5 * random
    assert resolution(clustered_ids(1, 2048, period=1)) < 1.5 * random


# ------------------------------------------------------------------------------------------------------ the rest of it


def test_pageable_pools_are_refused_or_read() -> None:
    """Some systems let the GPU read all of host memory. On the others this must not become an illegal access."""
    case = make_case(top_k=8, hot_slots=16, rows=1, host_rows=50)
    ours, theirs = Bench(case, device="cuda"), Bench(case)
    ours.host_cache = theirs.host_cache.clone()
    ids = random_ids(case, np.random.default_rng(0))
    theirs.resolve(reference, ids, "swap_in")
    try:
        ours.resolve(hisparse, ids, "swap_in")
    except ValueError as error:
        assert "host_cache: expected pinned memory" in str(error)  # noqa: PT017
        return
    ours.assert_equal(theirs)


def test_device_errors() -> None:
    case = make_case(seed=0, top_k=4, hot_slots=8, rows=2, mode="tables", resident=0.5)
    bench = Bench(case, device="cuda")
    ids = random_ids(case, np.random.default_rng(0))
    names = ("host_cache", "hot_cache", "hot_block_table", "global_indices", "hot_indices")
    arguments = dict(zip((*names, "device_global_indices", "lru_slots"), bench.arguments(ids), strict=True))
    call = arguments | bench.options()
    for name, value in call.items():
        if not isinstance(value, torch.Tensor) or name in ("host_cache", "hot_cache"):
            continue
        with pytest.raises(ValueError, match=f"^{name}: expected device cuda:0, got cpu"):
            hisparse.resolve_residency(**(call | {name: value.cpu()}))
    with pytest.raises(ValueError, match="^host_cache: expected device cpu, got cuda:0"):
        hisparse.swap_in(**(call | {"host_cache": bench.host_cache.cuda()}))


def test_hot_buffer_in_a_graph() -> None:
    """One captured step serves batches of every size up to its own, while requests come and go."""
    pool = torch.stack([torch.from_numpy(host_bytes(3000, 576, generation=i)) for i in range(3)]).pin_memory()
    hot = HotBuffer(pool, max_requests=6, top_k=64, hot_slots=160, attention_block_stride=80)
    ids = torch.full((6, 64), -1, dtype=torch.int32, device="cuda")
    requests = torch.full((6,), -1, dtype=torch.int32, device="cuda")
    hot.resolve(ids, requests, layer=0)
    hot.gather(1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows = hot.resolve(ids, requests, layer=0)
        for layer in (1, 2):
            hot.gather(layer)
    generator = torch.Generator().manual_seed(0)
    live: list[int] = []
    for step in range(30):
        if hot.admitted < 6 and step % 3 != 2:
            live.append(hot.admit())
        elif step % 5 == 0:
            hot.release(live.pop(0))
        count = len(live)
        wanted = torch.stack([torch.randperm(400, generator=generator)[:64] for _ in range(6)]).int()
        ids.copy_(wanted)
        requests.fill_(-1)
        requests[:count] = torch.tensor(live, dtype=torch.int32)
        graph.replay()
        torch.cuda.synchronize()
        where = rows.cpu()
        assert (where[count:] == -1).all()
        assert (where[:count] >= 0).all()
        assert torch.equal(hot.attention_indices[:count].cpu(), where[:count] // 64 * 80 + where[:count] % 64)
        for layer in range(3):
            flat = hot.caches[layer].view(-1, 576).cpu()
            assert torch.equal(flat[where[:count].long()], pool[layer][wanted[:count].long()])
        changed = torch.randperm(400, generator=generator)[:50]
        pool[:, changed] += 1
        for request in live:
            hot.invalidate([request] * 50, changed.cuda())
    assert hot.stats().hits > 0
