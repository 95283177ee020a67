"""The HiSparse reference against recorded outputs, worked values, small examples and invariants."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hisparse_cases import (
    POISON,
    Bench,
    Case,
    Sequence,
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

from hotplan import plans
from hotplan.reference import hisparse

# Cases are small and many of them are drawn from a seed, so more examples beat shrinking.
PROPERTY = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])

INT32_MAX = 2**31 - 1


def ids_of(*rows: list[int]) -> np.ndarray:
    return np.array(rows, dtype=np.int32)


def set_state(bench: Bench, *, lru: list[int] | None = None, dgi: list[int] | None = None, row: int = 0) -> None:
    if lru is not None:
        bench.lru_slots[row] = torch.tensor(lru, dtype=torch.int16)
    if dgi is not None:
        bench.device_global_indices[row] = torch.tensor(dgi, dtype=torch.int32)


def swaps(bench: Bench, row: int = 0) -> list[tuple[int, int]]:
    count = int(bench.swap_counts[row])
    host, device = bench.swap_host_physical_rows[row], bench.swap_device_physical_rows[row]
    return list(zip(host[:count].tolist(), device[:count].tolist(), strict=True))


def line(tensor: torch.Tensor, row: int = 0) -> list[int]:
    return tensor[row].tolist()


# ----------------------------------------------------------------------------------------------------
# Recorded outputs and worked values


@pytest.mark.parametrize("case", list(golden_cases()), ids=lambda c: f"K{c.top_k}-H{c.hot_slots}-BS{c.block_size}")
@pytest.mark.parametrize("strided", [False, True], ids=["dense", "strided"])
def test_recorded_outputs(case: Case, strided: bool) -> None:
    bench = Bench(case, strided=strided)
    for number, step in enumerate(case.steps):
        bench.resolve(hisparse, np.array(step["ids"]))
        for name, expected in golden_expectation(case, number).items():
            got = bench.array(name)[: len(expected)]
            np.testing.assert_array_equal(got, expected, err_msg=f"step {number}: {name}")
        assert bench.swap_counts[case.rows] == POISON


def test_worked_values() -> None:
    bench = Bench(worked_case())
    bench.resolve(hisparse, ids_of([10, 3, 7, 12]))
    assert line(bench.hot_indices) == [20, 21, 22, 23]
    assert line(bench.attention_indices) == [60, 61, 62, 63]
    assert swaps(bench) == [(10, 20), (3, 21), (7, 22), (12, 23)]
    assert line(bench.miss_mask) == [1, 1, 1, 1]
    assert bench.stats.tolist() == [0, 4]
    assert line(bench.lru_slots) == [4, 5, 6, 7, 0, 1, 2, 3]
    assert line(bench.device_global_indices) == [10, 3, 7, 12, -1, -1, -1, -1]

    bench.stats.zero_()
    bench.resolve(hisparse, ids_of([7, 50, 3, -1]))
    assert line(bench.hot_indices) == [22, 8, 21, -1]
    assert line(bench.attention_indices) == [62, 24, 61, -1]
    assert line(bench.miss_mask) == [0, 1, 0, 0]
    assert swaps(bench) == [(50, 8)]
    assert bench.stats.tolist() == [2, 1]
    after_b = [5, 6, 7, 0, 3, 4, 1, 2], [10, 3, 7, 12, 50, -1, -1, -1]
    assert (line(bench.lru_slots), line(bench.device_global_indices)) == after_b

    bench.stats.zero_()
    bench.resolve(hisparse, ids_of([7, 50, 3, 100]))
    assert line(bench.hot_indices) == [22, 8, 21, -1]
    assert line(bench.attention_indices) == [62, 24, 61, -1]
    assert swaps(bench) == []
    assert bench.stats.tolist() == [3, 0]
    # All hits: the order among them is their old order, so nothing moves here.
    assert line(bench.lru_slots) == [5, 6, 7, 0, 3, 4, 1, 2]

    set_state(bench, lru=after_b[0], dgi=after_b[1])
    bench.stats.zero_()
    bench.resolve(hisparse, ids_of([-1, -1, 100, -1]))
    assert line(bench.hot_indices) == line(bench.attention_indices) == [-1] * 4
    assert line(bench.resolved_global_indices) == [-1] * 4
    assert bench.swap_counts[0] == 0
    assert bench.valid_counts[0] == 0
    assert bench.stats.tolist() == [0, 0]
    assert (line(bench.lru_slots), line(bench.device_global_indices)) == after_b


def tables_case(**changes: Any) -> Case:
    """The worked case with one-token source pages: position p is id source[p]."""
    case = worked_case()
    case.request_ids = np.zeros(1, dtype=np.int32)
    case.source_block_size = 1
    case.source_block_table = np.array([[0, 40, 41, 42]], dtype=np.int32)
    for name, value in changes.items():
        setattr(case, name, value)
    return case


def test_worked_values_with_resident_pages() -> None:
    # Positions 2 and 3 lie on resident page 7 (rows 28 to 31), positions 4 and 5 on none.
    case = tables_case(
        source_block_table=ids_of([0, 0, 0, 41, 40, 42]),
        resident_block_table=ids_of([7, 0]),
    )
    bench = Bench(case)
    bench.resolve(hisparse, ids_of([2, 4, 3, 5]))
    assert line(bench.resolved_global_indices) == [-1, 40, 41, 42]
    assert line(bench.hot_indices) == [30, 20, 31, 21]
    assert line(bench.attention_indices) == [86, 60, 87, 61]
    assert swaps(bench) == [(40, 20), (42, 21)]
    assert line(bench.lru_slots) == [2, 3, 4, 5, 6, 7, 0, 1]
    assert bench.valid_counts.tolist() == [4]
    assert bench.stats.tolist() == [0, 2]


# ----------------------------------------------------------------------------------------------------
# Duplicates


def test_duplicates_share_a_slot_and_a_load() -> None:
    bench = Bench(worked_case())
    bench.resolve(hisparse, ids_of([9, 5, 9, 9]))
    assert line(bench.hot_indices) == [20, 21, 20, 20]
    assert line(bench.miss_mask) == [1, 1, 0, 0]
    assert swaps(bench) == [(9, 20), (5, 21)]
    assert bench.valid_counts.tolist() == [4]
    # Two ids were loaded, two more columns found theirs already there.
    assert bench.stats.tolist() == [2, 2]
    assert line(bench.lru_slots) == [2, 3, 4, 5, 6, 7, 0, 1]

    bench.stats.zero_()
    bench.resolve(hisparse, ids_of([5, 5, -1, 8]))
    assert line(bench.hot_indices) == [21, 21, -1, 22]
    assert bench.stats.tolist() == [2, 1]
    assert line(bench.lru_slots) == [3, 4, 5, 6, 7, 0, 2, 1]


def test_duplicates_of_a_resident_id_are_pending() -> None:
    # Id 40 twice: once through a resident page, once (another position of the same source page) not.
    case = tables_case(
        source_block_size=4,
        source_block_table=np.array([[10, 10]], dtype=np.int32),
        resident_block_table=np.array([[7, 0]], dtype=np.int32),
    )
    bench = Bench(case)
    bench.resolve(hisparse, ids_of([0, 4, 1, 0]))
    assert line(bench.resolved_global_indices) == [40, 40, 41, 40]
    assert line(bench.hot_indices) == [28, 20, 29, 28]
    assert line(bench.miss_mask) == [0, 1, 0, 0]
    assert swaps(bench) == [(40, 20)]
    assert bench.stats.tolist() == [0, 1]


# ----------------------------------------------------------------------------------------------------
# State repair


@pytest.mark.parametrize(
    ("lru", "after"),
    [
        # Repeated slot 3: its later place counts, the missing slots 0 and 5 come back as the oldest.
        ([3, 1, 2, 3, 4, 7, 6, 1], [5, 2, 3, 4, 7, 6, 1, 0]),
        # Out of range on both sides, and the extremes of int16.
        ([8, -1, 32767, -32768, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 7, 0]),
        ([-1] * 8, [1, 2, 3, 4, 5, 6, 7, 0]),
        ([2] * 8, [1, 3, 4, 5, 6, 7, 2, 0]),
    ],
)
def test_corrupt_lru_is_repaired(lru: list[int], after: list[int]) -> None:
    """One miss: it takes the oldest slot of the repaired row, 0, which becomes the newest."""
    bench = Bench(worked_case())
    set_state(bench, lru=lru)
    bench.resolve(hisparse, ids_of([50, -1, -1, -1]))
    assert line(bench.hot_indices) == [20, -1, -1, -1]
    assert line(bench.lru_slots) == after
    assert line(bench.device_global_indices) == [50] + [-1] * 7


def test_corrupt_lru_keeps_hits_in_their_order() -> None:
    bench = Bench(worked_case())
    set_state(bench, lru=[6, 6, 4, 2, 4, 99, 0, 1], dgi=[10, 11, 12, 13, 14, 15, 16, 17])
    # Repaired: 3, 5, 7 come back; then 6, 2, 4, 0, 1. Ids 16, 14, 11 sit in 6, 4, 1; 60 takes slot 3.
    bench.resolve(hisparse, ids_of([11, 60, 14, 16]))
    assert line(bench.hot_indices) == [21, 23, 8, 10]
    assert line(bench.lru_slots) == [5, 7, 2, 0, 3, 6, 4, 1]
    assert line(bench.device_global_indices) == [10, 11, 12, 60, 14, 15, 16, 17]


def test_a_row_without_pending_ids_is_not_repaired() -> None:
    bench = Bench(worked_case())
    set_state(bench, lru=[9, 9, 9, 9, 9, 9, 9, 9])
    bench.resolve(hisparse, ids_of([-1, 100, -2, -1]))
    assert line(bench.lru_slots) == [9] * 8


def test_an_id_held_twice_hits_its_most_recent_copy() -> None:
    bench = Bench(worked_case())
    set_state(bench, lru=[3, 0, 1, 2, 4, 5, 6, 7], dgi=[-1, 30, 30, 30, -1, -1, -1, -1])
    bench.resolve(hisparse, ids_of([30, -1, -1, -1]))
    # Slot 2 is the latest of 3, 1 and 2; the others stay victims, with their entries.
    assert line(bench.hot_indices) == [22, -1, -1, -1]
    assert line(bench.lru_slots) == [3, 0, 1, 4, 5, 6, 7, 2]
    assert line(bench.device_global_indices) == [-1, 30, 30, 30, -1, -1, -1, -1]
    assert bench.stats.tolist() == [1, 0]
    assert bench.swap_counts[0] == 0

    bench.resolve(hisparse, ids_of([30, 31, 32, 33]))
    assert line(bench.hot_indices) == [22, 23, 20, 21]
    assert line(bench.device_global_indices) == [32, 33, 30, 31, -1, -1, -1, -1]


def test_dgi_entries_that_cannot_exist_are_victims() -> None:
    bench = Bench(worked_case())
    set_state(bench, dgi=[-5, 100, INT32_MAX, -(2**31), 7, -1, -1, -1])
    bench.resolve(hisparse, ids_of([-5, 100, INT32_MAX, 7]))
    assert line(bench.hot_indices) == [-1, -1, -1, 8]
    assert line(bench.resolved_global_indices) == [-1, -1, -1, 7]
    assert bench.stats.tolist() == [1, 0]


# ----------------------------------------------------------------------------------------------------
# Requests, padding, tables


@pytest.mark.parametrize(
    "changes",
    [
        {"request_state_indices": np.array([-1], dtype=np.int32)},
        {"request_state_indices": np.array([-9], dtype=np.int32)},
        {"request_state_indices": np.array([1], dtype=np.int32)},
        {"request_state_indices": np.array([], dtype=np.int32)},
        {"request_ids": np.array([1], dtype=np.int32)},
        {"request_ids": np.array([-1], dtype=np.int32)},
        {
            "request_ids": np.array([1], dtype=np.int32),
            "request_state_indices": np.array([-1, 0], dtype=np.int32),
        },
    ],
    ids=["minus one", "negative", "state >= S", "no index", "request >= S", "request < 0", "no hot pages"],
)
def test_padding(changes: dict[str, np.ndarray]) -> None:
    bench = Bench(tables_case(**changes))
    bench.resolve(hisparse, ids_of([1, 2, 3, 1]))
    for name in ("hot_indices", "attention_indices", "resolved_global_indices"):
        assert line(getattr(bench, name)) == [-1] * 4, name
    assert line(bench.miss_mask) == [0] * 4
    assert bench.valid_counts.tolist() == [0]
    assert bench.swap_counts.tolist() == [0, POISON]
    assert line(bench.swap_host_physical_rows) == [POISON] * 4
    assert line(bench.lru_slots) == list(range(8))
    assert line(bench.device_global_indices) == [-1] * 8
    assert bench.stats.tolist() == [0, 0]


def test_a_launch_row_past_the_states_is_padding() -> None:
    case = worked_case()
    case.rows = 2
    case.hot_block_table = ids_of([5, 2], [0, 1])
    bench = Bench(case)
    bench.resolve(hisparse, ids_of([1, 2, 3, 4], [1, 2, 3, 4]))
    assert bench.hot_indices.tolist() == [[20, 21, 22, 23], [-1] * 4]


def test_the_tables_of_the_request_are_used_not_those_of_the_row() -> None:
    case = worked_case()
    case.rows, case.state_rows = 2, 3
    case.request_ids = np.array([2, 0], dtype=np.int32)
    case.request_state_indices = np.array([1, -1, 0], dtype=np.int32)
    case.hot_block_table = ids_of([5, 2], [0, 1], [3, 4])
    case.source_block_size = 10
    case.source_block_table = ids_of([1, 2], [0, 0], [3, 4])
    bench = Bench(case)
    bench.resolve(hisparse, ids_of([0, 11, 20, -1], [0, 11, 19, 25]))
    # Request 2: pages 3 and 4 of ten tokens, hot page 3. Request 0: pages 1 and 2, hot page 5.
    assert bench.resolved_global_indices.tolist() == [[30, 41, -1, -1], [10, 21, 29, -1]]
    assert bench.hot_indices.tolist() == [[12, 13, -1, -1], [20, 21, 22, -1]]
    assert line(bench.device_global_indices, 0) == [30, 41] + [-1] * 6
    assert line(bench.device_global_indices, 1) == [10, 21, 29] + [-1] * 5


@pytest.mark.parametrize(
    ("page", "block_size", "token", "expected"),
    [
        (0, 4, 1, -1),
        (-3, 4, 1, -1),
        (24, 4, 3, 99),
        (25, 4, 0, -1),
        (INT32_MAX, 4, 0, -1),
        (INT32_MAX, 2**40, 1, -1),
        (2**20, 4096, 5, -1),
    ],
)
def test_source_pages(page: int, block_size: int, token: int, expected: int) -> None:
    """Null and negative pages, the end of the pool, products beyond 32 and 64 bits."""
    case = tables_case(source_block_size=block_size, source_block_table=ids_of([page]))
    bench = Bench(case)
    bench.resolve(hisparse, ids_of([token, -1, -1, INT32_MAX]))
    assert line(bench.resolved_global_indices)[:3] == [expected, -1, -1]
    if block_size < 2**31:
        assert line(bench.resolved_global_indices)[3] == -1
    assert bench.valid_counts.tolist() == [int(expected >= 0)]


@pytest.mark.parametrize(
    ("page", "null", "expected"),
    [(7, 0, 29), (0, 7, 1), (7, 7, 20), (-1, 0, 20), (2**29, 0, 20), (2**29 - 1, 0, INT32_MAX - 2)],
    ids=["resident", "page 0", "null", "negative", "too large", "largest"],
)
def test_resident_pages(page: int, null: int, expected: int) -> None:
    """A resident row that does not fit int32 is none; then the id goes to the hot buffer."""
    case = tables_case(resident_block_table=ids_of([page]), resident_null_block=null)
    bench = Bench(case)
    bench.resolve(hisparse, ids_of([1, -1, -1, -1]))
    assert line(bench.hot_indices) == [expected, -1, -1, -1]
    assert line(bench.resolved_global_indices) == [40, -1, -1, -1]
    # Row 2**31 - 3 exists, but at 12 rows per page its attention index does not fit.
    expected_attention = -1 if expected > 1000 else expected // 4 * 12 + expected % 4
    assert line(bench.attention_indices) == [expected_attention, -1, -1, -1]


def test_attention_index_at_the_end_of_int32() -> None:
    assert hisparse.attention_index(INT32_MAX, 1, 1) == INT32_MAX
    assert hisparse.attention_index(INT32_MAX - 1, 2**30, 2**30 + 1) == INT32_MAX
    assert hisparse.attention_index(INT32_MAX, 2**30, 2**30 + 1) == -1
    assert hisparse.attention_index(2, 1, 2**63 - 1) == hisparse.attention_index(-1, 1, 1) == -1


def test_a_resident_row_needs_no_source_page() -> None:
    case = tables_case(source_block_table=ids_of([0]), resident_block_table=ids_of([7, 7]))
    bench = Bench(case)
    bench.resolve(hisparse, ids_of([0, 5, 8, -1]))
    assert line(bench.hot_indices) == [28, 29, -1, -1]
    assert line(bench.resolved_global_indices) == [-1] * 4
    assert bench.valid_counts.tolist() == [2]
    assert bench.stats.tolist() == [0, 0]


@pytest.mark.parametrize("page", [-1, -(2**31), 6, INT32_MAX])
def test_hot_page_out_of_range(page: int) -> None:
    case = worked_case()
    case.hot_block_table = ids_of([page, 2])
    bench = Bench(case)
    set_state(bench, lru=[0, 4, 1, 5, 2, 6, 3, 7], dgi=[-1, -1, -1, 33, -1, -1, -1, -1])
    bench.resolve(hisparse, ids_of([10, 33, 11, 10]))
    # Slot 3 holds 33 on a page that is gone: a hit without a row. Id 10 draws slot 0, on the same page;
    # id 11 gets slot 4.
    assert line(bench.hot_indices) == [-1, -1, 8, -1]
    assert line(bench.attention_indices) == [-1, -1, 24, -1]
    assert line(bench.miss_mask) == [0, 0, 1, 0]
    assert swaps(bench) == [(10, -1), (11, 8)]
    assert line(bench.device_global_indices) == [-1, -1, -1, 33, 11, -1, -1, -1]
    assert line(bench.lru_slots) == [1, 5, 2, 6, 7, 0, 4, 3]
    assert bench.stats.tolist() == [2, 2]
    assert bench.valid_counts.tolist() == [4]


def test_rows_beyond_the_launch_and_optional_outputs_are_left_alone() -> None:
    case = make_case(seed=3, rows=2, mode="tables", resident=0.3)
    case.request_ids = np.append(case.request_ids, [0]).astype(np.int32)
    ids = random_ids(case, np.random.default_rng(0))
    full, bare = Bench(case), Bench(case)
    full.resolve(hisparse, ids)
    assert full.swap_counts[2] == POISON
    tables = {k: v for k, v in bare.options("stats").items() if k != "stats"}
    hisparse.resolve_residency(*bare.arguments(ids), **tables)
    full.assert_equal(bare, names=("hot_indices", "lru_slots", "device_global_indices"))
    assert bare.miss_mask.unique().tolist() == [POISON]


def test_stats_accumulate_in_either_type() -> None:
    case = make_case(seed=1, top_k=5, hot_slots=8)
    benches = [Bench(case, stats_dtype=dtype) for dtype in (torch.int64, torch.uint64)]
    for seed in range(3):
        ids = random_ids(case, np.random.default_rng(seed), spread=0.2)
        for bench in benches:
            bench.resolve(hisparse, ids)
    assert benches[0].stats.tolist() == benches[1].stats.tolist()
    assert sum(benches[0].stats.tolist()) == 3 * 2 * 5


@pytest.mark.parametrize("shape", [(0, 4), (1, 0), (0, 0)])
def test_empty_launches_write_nothing(shape: tuple[int, int]) -> None:
    case = worked_case()
    case.rows, case.top_k = shape
    bench = Bench(case)
    bench.resolve(hisparse, np.zeros(shape, dtype=np.int32))
    assert bench.swap_counts.unique().tolist() == [POISON]
    assert line(bench.lru_slots) == list(range(8))
    plan = bench.plan(hisparse, np.zeros(shape, dtype=np.int32))
    assert plan.plan.shape == (*shape, 16)
    assert plan.counts.tolist() == [0] * shape[0]
    hisparse.gather_planned(bench.host_cache, bench.hot_cache, plan.plan, plan.counts)
    assert not bench.hot_pool.any()


# ----------------------------------------------------------------------------------------------------
# Union rule


def union_case(*request_ids: int, hot_slots: int = 8, max_union_rows: int = 3, **changes: Any) -> Case:
    """Two requests of K = 2; identity source pages of one token, so that a position is an id (0 is null)."""
    pages = -(-hot_slots // 4)
    case = Case(
        top_k=2,
        hot_slots=hot_slots,
        block_size=4,
        rows=len(request_ids),
        state_rows=2,
        host_rows=100,
        hot_blocks=2 * pages,
        hot_block_table=np.arange(2 * pages, dtype=np.int32).reshape(2, pages),
        request_ids=np.array(request_ids, dtype=np.int32),
        source_block_size=1,
        source_block_table=np.tile(np.arange(100, dtype=np.int32), (2, 1)),
        attention_block_stride=10,
        max_union_rows=max_union_rows,
    )
    for name, value in changes.items():
        setattr(case, name, value)
    return case


def test_union_loads_an_id_once() -> None:
    bench = Bench(union_case(0, 0, 1, 0))
    bench.resolve(hisparse, ids_of([11, 12], [12, 13], [12, 11], [11, 14]))
    # Rows 0 and 1 are one set: 11, 12, 13. Row 2 is another request; row 3 is the first one's, not adjacent.
    assert bench.hot_indices.tolist() == [[0, 1], [1, 2], [8, 9], [0, 3]]
    assert bench.miss_mask.tolist() == [[1, 1], [0, 1], [1, 1], [0, 1]]
    assert bench.swap_counts.tolist() == [2, 1, 2, 1, POISON]
    assert bench.swap_host_physical_rows.tolist() == [[11, 12], [13, POISON], [12, 11], [14, POISON]]
    assert bench.swap_device_physical_rows.tolist() == [[0, 1], [2, POISON], [8, 9], [3, POISON]]
    # Run one: 3 loads, 1 further reference. Run two: 2 loads. Run three: one hit (11), one load (14).
    assert bench.stats.tolist() == [2, 6]
    assert line(bench.lru_slots) == [4, 5, 6, 7, 1, 2, 3, 0]
    assert line(bench.lru_slots, 1) == [2, 3, 4, 5, 6, 7, 0, 1]


def test_union_swaps_run_on_through_the_rows_of_the_run() -> None:
    bench = Bench(union_case(1, 1, 1))
    set_state(bench, dgi=[21, -1, -1, -1, -1, -1, -1, -1], row=1)
    # Row 0 asks for one id twice, so the loads of row 1 begin in row 0's segment. Row 2 needs no load.
    bench.resolve(hisparse, ids_of([22, 22], [23, 24], [0, 21]))
    assert bench.hot_indices.tolist() == [[9, 9], [10, 11], [-1, 8]]
    assert bench.miss_mask.tolist() == [[1, 0], [1, 1], [0, 0]]
    assert bench.swap_counts.tolist() == [2, 1, 0, POISON]
    assert bench.swap_host_physical_rows.tolist() == [[22, 23], [24, POISON], [POISON, POISON]]
    assert bench.stats.tolist() == [2, 3]
    assert line(bench.lru_slots, 1) == [4, 5, 6, 7, 1, 2, 3, 0]
    assert bench.valid_counts.tolist() == [2, 2, 1]

    planned = Bench(union_case(1, 1, 1))
    set_state(planned, dgi=[21, -1, -1, -1, -1, -1, -1, -1], row=1)
    plan = planned.plan(hisparse, ids_of([22, 22], [23, 24], [0, 21]))
    rows = plans.swap_rows(plan.plan)
    assert rows["column"].tolist() == [[0, 2], [3, 0xFFFFFFFF], [0xFFFFFFFF] * 2]
    assert rows["hot_row"].tolist() == [[9, 10], [11, -1], [-1, -1]]
    assert plan.counts.tolist() == [2, 1, 0]


def test_union_of_one_row_is_the_plain_rule() -> None:
    for seed in range(6):
        case = make_case(seed=seed, rows=3, top_k=9, hot_slots=16, mode="tables", resident=0.3, padding=0.3)
        plain, united = Bench(case), Bench(case)
        for step in range(3):
            ids = random_ids(case, np.random.default_rng((seed, step)), invalid=0.1, duplicates=0.2)
            case.max_union_rows = None
            plain.resolve(hisparse, ids)
            case.max_union_rows = 1
            united.resolve(hisparse, ids)
            plain.assert_equal(united, f"seed {seed} step {step}")


def test_padding_rows_are_no_run() -> None:
    """Graph padding repeats one request id as often as it likes."""
    case = union_case(0, 0, -1, -1, -1, 1, 1, max_union_rows=2)
    case.request_state_indices = np.array([1, -1], dtype=np.int32)
    bench = Bench(case)
    bench.resolve(hisparse, ids_of(*[[11, 12]] * 7))
    assert bench.hot_indices.tolist() == [[0, 1]] * 2 + [[-1, -1]] * 5
    assert bench.stats.tolist() == [2, 2]


def test_padding_between_two_rows_parts_their_run() -> None:
    bench = Bench(union_case(0, -1, 0))
    bench.resolve(hisparse, ids_of([11, 12], [11, 12], [13, 11]))
    assert bench.hot_indices.tolist() == [[0, 1], [-1, -1], [2, 0]]
    # One run would list all three loads from row 0 on.
    assert bench.swap_counts.tolist() == [2, 0, 1, POISON]
    assert bench.swap_host_physical_rows.tolist() == [[11, 12], [POISON] * 2, [13, POISON]]


def test_too_long_and_too_large_unions() -> None:
    bench = Bench(union_case(0, 0, 0, 1, max_union_rows=2))
    ids = ids_of([11, 12], [13, 14], [15, 16], [17, 18])
    with pytest.raises(ValueError, match=r"request_ids: expected at most max_union_rows = 2 .*got 3 rows of request 0"):
        bench.resolve(hisparse, ids)
    assert bench.hot_indices.unique().tolist() == [POISON]
    assert line(bench.lru_slots) == list(range(8))

    bench = Bench(union_case(1, 0, 0, 0, hot_slots=5))
    ids = ids_of([11, 12], [11, 12], [13, 14], [15, 16])
    with pytest.raises(ValueError, match=r"H = 5 distinct ids in a union, got 6 in rows 1 to 3 of request 0"):
        bench.resolve(hisparse, ids)
    assert bench.hot_indices.unique().tolist() == [POISON]
    assert not (bench.device_global_indices != -1).any()
    # Six references to five ids do fit.
    bench.resolve(hisparse, ids_of([11, 12], [11, 12], [13, 14], [15, 11]))
    assert bench.hot_indices.tolist() == [[8, 9], [0, 1], [2, 3], [4, 0]]


def resolve_unchecked(bench: Bench, ids: np.ndarray) -> None:
    bench.poison()
    names = ("host_cache", "hot_cache", "hot_block_table", "global_indices", "hot_indices")
    positional = dict(zip((*names, "device_global_indices", "lru_slots"), bench.arguments(ids), strict=True))
    defaults = dict.fromkeys(
        ("request_state_indices", "region_stride", "max_union_rows", "resident_block_table"), None
    ) | {"resident_block_size": 0, "resident_null_block": 0}
    hisparse._resolve(hisparse._check_resolve(**positional, **(defaults | bench.options())), strict=False)


def test_what_an_unchecked_launch_does_with_oversized_unions() -> None:
    bench = Bench(union_case(0, 0, 0, 1, max_union_rows=2))
    resolve_unchecked(bench, ids_of([11, 12], [13, 14], [15, 16], [17, 18]))
    assert bench.hot_indices.tolist() == [[0, 1], [2, 3], [-1, -1], [8, 9]]
    assert bench.swap_counts.tolist() == [2, 2, 0, 2, POISON]

    bench = Bench(union_case(0, 0, 0, hot_slots=5))
    set_state(bench, dgi=[-1, -1, 16, -1, -1])
    resolve_unchecked(bench, ids_of([11, 12], [13, 14], [15, 16]))
    # 16 is hot, so four slots are left for five misses: 15 comes last and goes without.
    assert bench.hot_indices.tolist() == [[0, 1], [3, 4], [-1, 2]]
    assert bench.miss_mask.tolist() == [[1, 1], [1, 1], [0, 0]]
    assert bench.swap_counts.tolist() == [2, 2, 0, POISON]
    assert bench.stats.tolist() == [1, 5]
    assert line(bench.device_global_indices) == [11, 12, 16, 13, 14]
    assert line(bench.lru_slots) == [0, 1, 3, 4, 2]


# ----------------------------------------------------------------------------------------------------
# Copies


def gather_bench(hot_dims: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Host row i is full of i + 1, hot rows of 200; 4 pages of 3 rows, one odd byte between them."""
    host = (torch.arange(9, dtype=torch.uint8) + 1)[:, None].repeat(1, 32)
    pool = torch.full((4 * (3 * 32 + 1),), 200, dtype=torch.uint8)
    if hot_dims == 2:
        return host, pool, pool[: 12 * 32].view(12, 32)
    return host, pool, pool.as_strided((4, 3, 32), (97, 32, 1))


@pytest.mark.parametrize("hot_dims", [2, 3])
def test_gather_plan(hot_dims: int) -> None:
    host, _, hot = gather_bench(hot_dims)
    attention = torch.full((3, 4), POISON, dtype=torch.int32)
    hisparse.gather_plan(
        host,
        hot,
        torch.tensor([[0, 8, 9, INT32_MAX], [1, -1, 2, 3], [4, 4, 4, 4]], dtype=torch.int32),
        torch.tensor([[0, 4, 11, 5], [12, 1, -1, 7], [2, 2, 2, 2]], dtype=torch.int32),
        torch.tensor([[1, -3, 1, 1], [1, 1, 1, 0], [1, 1, 1, 1]], dtype=torch.int32),
        request_state_indices=torch.tensor([5, 0, -1, -1], dtype=torch.int32),
        attention_indices=attention,
        attention_block_stride=10,
    )
    # Copied: 0 -> 0 and 8 -> 4. Host row 9 does not exist: zeros to 11 and 5. Hot row 12, id -1, hot row -1,
    # mask 0 and the padding row are skipped.
    expected = [200] * 12
    expected[0], expected[4], expected[11], expected[5] = 1, 9, 0, 0
    rows = hot.reshape(12, 32)
    assert rows[:, 0].tolist() == expected
    assert (rows == rows[:, :1]).all()
    if hot_dims == 3:
        assert attention.tolist() == [[0, 11, 32, 12], [40, 1, -1, 21], [-1] * 4]
    else:
        assert attention.tolist() == [[0, 40, 110, 50], [120, 10, -1, 70], [-1] * 4]


def test_gather_compact() -> None:
    host, pool, hot = gather_bench()
    before = pool.clone()
    hisparse.gather_compact(
        host,
        hot,
        torch.tensor([[0, 1, 2], [3, -1, 9], [5, 6, 7], [1, 1, 1]], dtype=torch.int32),
        torch.tensor([[0, 1, 2], [12, 3, 4], [6, -1, 8], [9, 9, 9]], dtype=torch.int32),
        torch.tensor([2, 99, 3, -4, 7], dtype=torch.int32),
    )
    expected = [1, 2, 200, 200, 0, 200, 6, 200, 8, 200, 200, 200]
    assert hot.reshape(12, 32)[:, 0].tolist() == expected
    # The bytes between the pages belong to somebody else.
    assert torch.equal(pool[96::97], before[96::97])


def test_gather_planned_equals_gather_compact_and_swap_in() -> None:
    case = make_case(seed=5, top_k=9, hot_slots=12, rows=3, row_bytes=48, page_gap_bytes=4, mode="state", padding=0.3)
    benches = [Bench(case, strided=True) for _ in range(4)]
    compact, planned, fused, masked = benches
    for step in range(4):
        ids = random_ids(case, np.random.default_rng(step), spread=0.3, invalid=0.1, duplicates=0.1)
        for bench in (compact, masked):
            bench.resolve(hisparse, ids)
        hisparse.gather_compact(
            compact.host_cache,
            compact.hot_cache,
            compact.swap_host_physical_rows,
            compact.swap_device_physical_rows,
            compact.swap_counts,
        )
        hisparse.gather_plan(
            masked.host_cache,
            masked.hot_cache,
            masked.resolved_global_indices,
            masked.hot_indices,
            masked.miss_mask,
        )
        fused.resolve(hisparse, ids, "swap_in")
        plan = planned.plan(hisparse, ids)
        for _ in range(2):
            hisparse.gather_planned(planned.host_cache, planned.hot_cache, plan.plan, plan.counts)
        compact.assert_equal(fused, f"step {step}")
        compact.assert_equal(masked, f"step {step}")
        names = (
            "hot_indices",
            "miss_mask",
            "resolved_global_indices",
            "lru_slots",
            "device_global_indices",
            "stats",
        )
        compact.assert_equal(planned, f"step {step}", names)
        rows = plans.swap_rows(plan.plan)
        for row in range(case.rows):
            count = int(plan.counts[row])
            assert count == compact.swap_counts[row]
            listed = rows[row, :count]
            assert list(zip(listed["host_row"], listed["hot_row"], strict=True)) == swaps(compact, row)
            assert compact.miss_mask[row].nonzero()[:, 0].tolist() == listed["column"].tolist()
            assert rows[row, count:].tolist() == [(-1, -1, 0xFFFFFFFF)] * (case.top_k - count)
    assert compact.hot_pool.any()


def test_plan_into_given_tensors() -> None:
    case = make_case(seed=2)
    ids = random_ids(case, np.random.default_rng(2))
    bench, other = Bench(case), Bench(case)
    out = hisparse.SwapPlan(
        torch.zeros(case.rows, case.top_k, 16, dtype=torch.uint8),
        torch.zeros(case.rows, dtype=torch.int32),
        torch.zeros(case.rows, case.top_k, dtype=torch.int32),
    )
    arguments = list(bench.arguments(ids))
    del arguments[4]
    plan = hisparse.plan_swap_in(*arguments, out=out)
    assert plan is out
    expected = other.plan(hisparse, ids)
    assert all(torch.equal(a, b) for a, b in zip(out, expected, strict=True))
    again = hisparse.plan_swap_in(*arguments, out=tuple(out))
    assert isinstance(again, plans.SwapPlan)
    assert all(a is b for a, b in zip(again, out, strict=True))


def test_gather_planned_skips_and_zero_fills() -> None:
    host, _, hot = gather_bench()
    rows = plans.invalid_rows(plans.SWAP_ROW, 6)
    rows[:5] = [(3, 0, 0), (9, 1, 1), (2**40, 2, 2), (4, -1, 3), (5, 12, 4)]
    plan = torch.from_numpy(rows.view(np.uint8).reshape(1, 6, 16))
    hisparse.gather_planned(host, hot, plan, torch.tensor([100], dtype=torch.int32))
    assert hot.reshape(12, 32)[:, 0].tolist() == [4, 0, 0] + [200] * 9


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int64])
def test_copies_do_not_look_at_the_type(dtype: torch.dtype) -> None:
    """Bytes that are NaN in one type and anything in another arrive unchanged; the pools may differ in type."""
    data = torch.from_numpy(host_bytes(20, 64))
    host = data.view(dtype)
    hot = torch.zeros(5, 4, 64, dtype=torch.uint8)
    ids = torch.arange(20, dtype=torch.int32).view(2, 10)
    hisparse.gather_compact(host, hot, ids, ids, torch.tensor([10, 10], dtype=torch.int32))
    assert torch.equal(hot.view(20, 64), data)
    hot = torch.zeros(5, 4, 64 // dtype.itemsize, dtype=dtype)
    hisparse.gather_compact(data, hot, ids, ids, torch.tensor([10, 10], dtype=torch.int32))
    assert torch.equal(hot.view(torch.uint8).view(20, 64), data)


def test_invalidate_written_slots() -> None:
    dgi = torch.tensor([[5, 6, 5, -4], [5, 7, 8, 9], [5, 6, 7, 8]], dtype=torch.int32)
    hisparse.invalidate_written_slots(
        dgi,
        torch.tensor([2, 0, -1, 3], dtype=torch.int32),
        torch.tensor([1, 0, 0, 1, 2, 3, -1, 4, 1], dtype=torch.int32),
        torch.tensor([5, 7, 9, -4, 5, 5, 5, 5, 6 + 2**32], dtype=torch.int64),
    )
    # Request 1 is state 0 and forgets 5 (both copies), request 0 is state 2 and forgets 7. Skipped otherwise:
    # no such slot, negative slots even where dgi holds one, padding, requests and states out of range.
    assert dgi.tolist() == [[-1, 6, -1, -4], [5, 7, 8, 9], [5, 6, -1, 8]]
    before = dgi.clone()
    empty = torch.zeros(0, dtype=torch.int32)
    hisparse.invalidate_written_slots(dgi, torch.tensor([2], dtype=torch.int32), empty, empty.long())
    assert torch.equal(dgi, before)


# ----------------------------------------------------------------------------------------------------
# Large shapes


def test_largest_hot_buffer() -> None:
    """Slots 0 .. 32767 fill an int16; K = H leaves no spare slot."""
    slots = 32768
    case = make_case(seed=0, top_k=slots, hot_slots=slots, block_size=64, rows=1, host_rows=2 * slots)
    bench = Bench(case)
    ids = np.arange(slots, dtype=np.int32)[None]
    bench.resolve(hisparse, ids)
    assert bench.swap_counts[0] == slots
    bench.resolve(hisparse, ids + slots // 2)
    assert bench.stats.tolist() == [slots // 2, slots + slots // 2]
    # The first half was evicted and loaded anew, the second half was hit: the order is again 0 .. H - 1.
    assert line(bench.lru_slots) == list(range(slots))
    assert bench.device_global_indices[0, 0] == slots
    assert bench.device_global_indices[0, -1] == slots - 1


# ----------------------------------------------------------------------------------------------------
# Invariants over sequences of steps, checked without the model


def expected_id(case: Case, row: int, token: int) -> tuple[int, bool]:
    """The id of a column and whether it is resident, by looking positions up one at a time."""
    if case.source_block_table is None:
        return (token if 0 <= token < case.host_rows else -1), False
    request = case.request_of(row)
    g, resident = -1, False
    size = case.source_block_size
    if 0 <= token < case.source_block_table.shape[1] * size:
        page = int(case.source_block_table[request, token // size])
        g = page * size + token % size if page > 0 else -1
    table = case.resident_block_table
    if table is not None and 0 <= token < table.shape[1] * case.block_size:
        page = int(table[request, token // case.block_size])
        resident = page != case.resident_null_block and page >= 0
    return (g if g < case.host_rows else -1), resident


class Watch:
    """Follows a bench from outside: what was used when, and which bytes the host pool holds now."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        case = bench.case
        self.used = np.full((case.state_rows, case.hot_slots), -1)
        self.step = 0

    def slot_of_row(self, request: int) -> dict[int, int]:
        """Hot row -> slot of a request, where its pages are in range."""
        case = self.bench.case
        rows = {}
        for slot in range(case.hot_slots):
            page = int(case.hot_block_table[request, slot // case.block_size])
            if 0 <= page < case.hot_blocks:
                rows[page * case.block_size + slot % case.block_size] = slot
        return rows

    def run(self, ids: np.ndarray) -> None:
        bench, case = self.bench, self.bench.case
        dgi_before, stats_before = bench.array("device_global_indices").copy(), bench.array("stats").copy()
        lru_before = bench.array("lru_slots").copy()
        bench.resolve(hisparse, ids, "swap_in")
        dgi, lru, hot = (bench.array(n) for n in ("device_global_indices", "lru_slots", "hot_indices"))
        hot_bytes, host = bench.hot_bytes(), bench.host_cache.numpy()

        runs: dict[int, list[int]] = {}
        for row in range(case.rows):
            state = case.state_of(row)
            if state < 0:
                assert (hot[row] == -1).all()
                assert bench.swap_counts[row] == 0
            else:
                runs.setdefault(state, []).append(row)
        untouched = [s for s in range(case.state_rows) if s not in runs]
        np.testing.assert_array_equal(dgi[untouched], dgi_before[untouched])
        np.testing.assert_array_equal(lru[untouched], lru_before[untouched])

        pending_columns = 0
        for state, rows in runs.items():
            before = {int(g): slot for slot, g in enumerate(dgi_before[state]) if g >= 0}
            slots = self.slot_of_row(case.request_of(rows[0]))
            asked: dict[int, int] = {}
            valid = {}
            for row in rows:
                valid[row] = 0
                for column, token in enumerate(ids[row].tolist()):
                    g, resident = expected_id(case, row, token)
                    valid[row] += g >= 0 or resident
                    assert bench.resolved_global_indices[row, column] == g
                    if resident:
                        continue
                    if g < 0:
                        assert hot[row, column] == -1
                        continue
                    pending_columns += 1
                    where = int(hot[row, column])
                    # Every valid column finds its bytes, and one id has one row.
                    assert where in slots
                    assert asked.setdefault(g, where) == where
                    assert (hot_bytes[where] == host[g]).all()
                    assert dgi[state, slots[where]] == g
                    # An id that was hot stays where it was.
                    assert g not in before or slots[where] == before[g]
                assert bench.valid_counts[row] == valid[row]
            if not asked:
                np.testing.assert_array_equal(lru[state], lru_before[state])
                continue
            # The LRU is a permutation, no id sits in two slots.
            assert sorted(lru[state].tolist()) == list(range(case.hot_slots))
            held = dgi[state][dgi[state] >= 0].tolist()
            assert len(held) == len(set(held))
            # What was asked for is now the newest, and nothing newer was evicted than what was spared.
            in_use = {slots[where] for where in asked.values()}
            assert set(lru[state, -len(in_use) :].tolist()) == in_use
            evicted = [s for s in in_use if dgi[state, s] != dgi_before[state, s]]
            spared = [s for s in range(case.hot_slots) if s not in in_use]
            if evicted and spared:
                assert self.used[state, evicted].max() <= self.used[state, spared].min()
            self.used[state, list(in_use)] = self.step
            # The lists say the same as the mask, entry by entry, in (row, column) order.
            loads = [pair for row in rows for pair in swaps(bench, row)]
            marked = [
                (expected_id(case, row, int(ids[row, column]))[0], int(hot[row, column]))
                for row in rows
                for column in np.flatnonzero(bench.array("miss_mask")[row])
            ]
            assert loads == marked
            assert {g for g, _ in loads} == set(asked) - set(before)
        hits, misses = (bench.array("stats") - stats_before).tolist()
        assert hits + misses == pending_columns
        assert misses == bench.swap_counts[: case.rows].sum()
        self.step += 1

    def rewrite_host_rows(self, rng: np.random.Generator) -> None:
        """Give some host rows new bytes and tell every request; stale copies would show in the next steps."""
        bench, case = self.bench, self.bench.case
        changed = np.flatnonzero(rng.random(case.host_rows) < 0.2)
        fresh = host_bytes(case.host_rows, case.row_bytes, generation=self.step + 1)
        bench.host_cache[changed] = torch.from_numpy(fresh[changed])
        states = torch.arange(case.state_rows, dtype=torch.int32)
        requests = np.repeat(np.arange(case.state_rows, dtype=np.int32), len(changed))
        hisparse.invalidate_written_slots(
            bench.device_global_indices,
            states,
            torch.from_numpy(requests),
            torch.from_numpy(np.tile(changed, case.state_rows).astype(np.int64)),
        )


@PROPERTY
@given(sequences(hostile=False))
def test_invariants(sequence: Sequence) -> None:
    watch = Watch(Bench(sequence.case, strided=True))
    for step, ids in enumerate(sequence.ids):
        watch.run(ids)
        watch.rewrite_host_rows(np.random.default_rng((sequence.seed, step)))


@PROPERTY
@given(sequences(hostile=False, union=True))
def test_invariants_of_unions(sequence: Sequence) -> None:
    watch = Watch(Bench(sequence.case, strided=True))
    for step, ids in enumerate(sequence.ids):
        watch.run(ids)
        watch.rewrite_host_rows(np.random.default_rng((sequence.seed, step)))


@PROPERTY
@given(sequences(hostile=True))
def test_hostile_steps_stay_consistent(sequence: Sequence) -> None:
    """With corrupt state a copy may be stale, but slots, counts and lists must still fit together."""
    case, bench = sequence.case, Bench(sequence.case)
    for step, ids in enumerate(sequence.ids):
        corrupt_before_step(sequence, step, [bench])
        stats_before = bench.array("stats").copy()
        bench.resolve(hisparse, ids)
        for row in range(case.rows):
            state = case.state_of(row)
            if state < 0:
                continue
            resident = [expected_id(case, row, token)[1] for token in ids[row].tolist()]
            resolved, hot = bench.array("resolved_global_indices")[row], bench.array("hot_indices")[row]
            pending = (resolved >= 0) & ~np.array(resident)
            if not pending.any():
                continue
            assert sorted(bench.lru_slots[state].tolist()) == list(range(case.hot_slots))
            # Columns with one id have one row, columns with different ids have different rows.
            placed = pending & (hot >= 0)
            pairs = set(zip(resolved[placed].tolist(), hot[placed].tolist(), strict=True))
            assert len({g for g, _ in pairs}) == len({where for _, where in pairs}) == len(pairs)
            listed = swaps(bench, row)
            assert [g for g, where in listed if where >= 0] == resolved[bench.array("miss_mask")[row] == 1].tolist()
            assert len({g for g, _ in listed}) == len(listed)
        hits, misses = (bench.array("stats") - stats_before).tolist()
        assert hits >= 0
        assert misses == bench.swap_counts[: case.rows].sum()


@pytest.mark.parametrize("seed", range(8))
def test_state_heals(seed: int) -> None:
    """Enough distinct ids replace everything that corruption left behind."""
    rng = np.random.default_rng(seed)
    top_k = int(rng.integers(1, 40))
    hot_slots = top_k + int(rng.integers(0, 50))
    case = make_case(seed=seed, top_k=top_k, hot_slots=hot_slots, rows=2, host_rows=2 * hot_slots, mode="state")
    bench = Bench(case)
    corrupt_lru(bench.array("lru_slots"), rng)
    corrupt_dgi(bench.array("device_global_indices"), rng, case.host_rows)
    for start in range(0, hot_slots + top_k, top_k):
        flood = (np.arange(top_k) + start) % case.host_rows
        bench.resolve(hisparse, np.tile(flood, (case.rows, 1)))
    for state in range(case.state_rows):
        assert sorted(bench.lru_slots[state].tolist()) == list(range(hot_slots))
        held = bench.device_global_indices[state].tolist()
        assert len(set(held)) == hot_slots
        assert max(held) < case.host_rows


# ----------------------------------------------------------------------------------------------------
# Arguments


def valid_call() -> dict[str, Any]:
    """Every argument of resolve_residency, valid, for two rows."""
    case = make_case(seed=0, top_k=4, hot_slots=8, block_size=4, rows=2, mode="tables", resident=0.5)
    bench = Bench(case)
    names = ("host_cache", "hot_cache", "hot_block_table", "global_indices", "hot_indices")
    arguments = bench.arguments(random_ids(case, np.random.default_rng(0)))
    call = dict(zip((*names, "device_global_indices", "lru_slots"), arguments, strict=True))
    return call | bench.options() | {"region_stride": 8, "max_union_rows": 2}


def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


BAD_ARGUMENTS = [
    ("hot_cache", None, TypeError, "expected a torch.Tensor, got NoneType"),
    ("hot_cache", zeros(6, 4, dtype=torch.uint8), ValueError, r"3 dimension\(s\), got shape \(6, 4\)"),
    (
        "hot_cache",
        zeros(6, 4, 24, dtype=torch.uint8),
        ValueError,
        "positive multiple of 16 bytes, got 24 bytes",
    ),
    (
        "hot_cache",
        zeros(6, 4, 0, dtype=torch.uint8),
        ValueError,
        "positive multiple of 16 bytes, got 0 bytes",
    ),
    ("hot_cache", zeros(6, 0, 16, dtype=torch.uint8), ValueError, "block size of at least 1"),
    (
        "hot_cache",
        zeros(6, 4, 32, dtype=torch.uint8)[:, :, :16],
        ValueError,
        "contiguous rows inside a block",
    ),
    ("hot_cache", zeros(4, 16, dtype=torch.uint8).expand(6, 4, 16), ValueError, "blocks that do not overlap"),
    (
        "hot_cache",
        zeros(1, 1, 16, dtype=torch.uint8).expand(1, 2**31, 16),
        ValueError,
        "contiguous rows inside",
    ),
    (
        "host_cache",
        zeros(9, 32, dtype=torch.uint8),
        ValueError,
        r"rows of 16 bytes \(those of hot_cache\), got 32",
    ),
    ("host_cache", zeros(9, 32, dtype=torch.uint8)[:, :16], ValueError, "expected a contiguous tensor"),
    ("host_cache", zeros(16, dtype=torch.uint8), ValueError, "2 dimension"),
    ("host_cache", zeros(9, 16, dtype=torch.uint8).to("meta"), ValueError, "a CPU tensor .* got device meta"),
    ("hot_block_table", zeros(2, 2, dtype=torch.int64), TypeError, "expected int32, got int64"),
    ("hot_block_table", zeros(2, 1), ValueError, "at least 2 columns for 8 slots in blocks of 4"),
    ("hot_block_table", zeros(2, 4)[:, ::2], ValueError, "column stride of 1"),
    (
        "hot_block_table",
        zeros(2, 2).to("meta"),
        ValueError,
        r"device cpu \(that of hot_cache\), got device meta",
    ),
    ("global_indices", zeros(2, 4, dtype=torch.int64), TypeError, "expected int32, got int64"),
    ("global_indices", zeros(8), ValueError, "2 dimension"),
    ("global_indices", zeros(2, 8)[:, ::2], ValueError, "column stride of 1"),
    ("hot_indices", zeros(2, 5), ValueError, r"shape \(2, 4\) = \[R, K\], got shape \(2, 5\)"),
    ("hot_indices", zeros(2, 8)[:, :4], ValueError, "expected a contiguous tensor"),
    ("device_global_indices", zeros(2, 3), ValueError, "K <= H <= 32768 with K = 4, got H = 3"),
    ("device_global_indices", zeros(1, 32769), ValueError, "got H = 32769"),
    ("device_global_indices", zeros(2, 16)[:, :8], ValueError, "expected a contiguous tensor"),
    ("lru_slots", zeros(2, 8), TypeError, "expected int16, got int32"),
    ("lru_slots", zeros(3, 8, dtype=torch.int16), ValueError, r"shape \(2, 8\) = \[S, H\]"),
    ("request_state_indices", zeros(2, dtype=torch.int64), TypeError, "expected int32, got int64"),
    ("request_state_indices", zeros(4)[::2], ValueError, "expected a contiguous tensor"),
    ("region_stride", 9, ValueError, "expected H = 8 or None, got 9"),
    ("region_stride", 8.0, TypeError, "expected an int, got float"),
    ("max_union_rows", 0, ValueError, "expected an int >= 1, got 0"),
    ("max_union_rows", True, TypeError, "expected an int, got bool"),
    ("miss_mask", zeros(2, 4, dtype=torch.bool), TypeError, "expected int32, got bool"),
    ("miss_mask", zeros(1, 4), ValueError, r"shape \(2, 4\)"),
    ("stats", zeros(2), TypeError, "expected int64 or uint64, got int32"),
    ("stats", zeros(3, dtype=torch.int64), ValueError, r"shape \(2,\) = \[hits, misses\]"),
    ("attention_indices", zeros(4).expand(2, 4), ValueError, "row stride of at least 4"),
    ("attention_indices", zeros(2, 3), ValueError, r"shape \(2, 4\)"),
    ("attention_block_stride", 3, ValueError, r"an int in \[4, 9223372036854775807\], got 3"),
    ("attention_block_stride", 2**63, ValueError, "got 9223372036854775808"),
    ("request_ids", None, ValueError, "a tensor, because source_block_table is given, got None"),
    ("request_ids", zeros(1), ValueError, "at least 2 elements, got 1"),
    ("source_block_table", None, ValueError, "a tensor, because request_ids is given, got None"),
    ("source_block_table", zeros(2, 8)[:, ::2], ValueError, "column stride of 1"),
    ("source_block_size", 0, ValueError, r"got 0"),
    ("source_block_size", "4", TypeError, "expected an int, got str"),
    ("resolved_global_indices", zeros(2, 4, dtype=torch.int16), TypeError, "expected int32, got int16"),
    ("valid_counts", zeros(3), ValueError, r"shape \(2,\) = \[R\]"),
    ("valid_counts", zeros(1).expand(2), ValueError, "a stride of at least 1"),
    ("swap_host_physical_rows", None, ValueError, "or none, got None"),
    ("swap_device_physical_rows", None, ValueError, "all of swap_host_physical_rows, .* or none, got None"),
    ("swap_counts", None, ValueError, "or none, got None"),
    ("swap_counts", zeros(1), ValueError, "at least 2 elements, got 1"),
    ("swap_device_physical_rows", zeros(4, 2), ValueError, r"shape \(2, 4\)"),
    ("resident_block_table", zeros(2, 8, dtype=torch.int16), TypeError, "expected int32, got int16"),
    ("resident_block_size", 8, ValueError, r"expected 4 \(that of hot_cache\), got 8"),
    ("resident_null_block", -1, ValueError, "got -1"),
]


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    BAD_ARGUMENTS,
    ids=[f"{i}-{b[0]}" for i, b in enumerate(BAD_ARGUMENTS)],
)
def test_bad_arguments(name: str, value: object, error: type[Exception], message: str) -> None:
    call = valid_call()
    hisparse.resolve_residency(**call)
    state = call["lru_slots"].clone()
    call[name] = value
    with pytest.raises(error, match=rf"^{name}: .*{message}"):
        hisparse.resolve_residency(**call)
    if name != "lru_slots":
        assert torch.equal(call["lru_slots"], state)


def test_arguments_that_need_others() -> None:
    call = valid_call()
    call["request_ids"] = call["source_block_table"] = None
    with pytest.raises(ValueError, match=r"^source_block_table: .*because resident_block_table is given"):
        hisparse.resolve_residency(**call)
    call["resident_block_table"] = None
    call["hot_block_table"] = zeros(1, 2)
    with pytest.raises(ValueError, match=r"^hot_block_table: expected at least 2 rows, got shape \(1, 2\)"):
        hisparse.resolve_residency(**call)


def test_first_seven_arguments_are_positional() -> None:
    case = make_case(seed=4)
    ids = random_ids(case, np.random.default_rng(4))
    bench, other = Bench(case), Bench(case)
    hisparse.resolve_residency(*bench.arguments(ids))
    other.resolve(hisparse, ids)
    bench.assert_equal(other, names=("hot_indices", "lru_slots", "device_global_indices"))
    with pytest.raises(TypeError):
        hisparse.resolve_residency(*bench.arguments(ids), None)


def gather_call() -> dict[str, Any]:
    host, _, hot = gather_bench()
    return {
        "host_cache": host,
        "hot_cache": hot,
        "global_indices": zeros(2, 3),
        "hot_indices": zeros(2, 3),
        "miss_mask": zeros(2, 3),
        "request_state_indices": zeros(2),
        "attention_indices": zeros(2, 3),
        "attention_block_stride": 3,
    }


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("hot_cache", zeros(2, dtype=torch.uint8), ValueError, r"2 or 3 dimension"),
        ("hot_cache", zeros(12, 64, dtype=torch.uint8)[:, :32], ValueError, "contiguous rows"),
        ("global_indices", zeros(2, 6)[:, ::2], ValueError, "a contiguous tensor"),
        ("hot_indices", zeros(2, 4), ValueError, r"shape \(2, 3\)"),
        ("miss_mask", zeros(2, 3, dtype=torch.uint8), TypeError, "expected int32, got uint8"),
        ("request_state_indices", zeros(1), ValueError, "at least 2 elements, got 1"),
        ("attention_indices", zeros(2, 6)[:, :3], ValueError, "a contiguous tensor"),
        ("attention_block_stride", 2, ValueError, "got 2"),
    ],
)
def test_bad_arguments_of_gather_plan(name: str, value: object, error: type[Exception], message: str) -> None:
    hisparse.gather_plan(**gather_call())
    with pytest.raises(error, match=rf"^{name}: .*{message}"):
        hisparse.gather_plan(**(gather_call() | {name: value}))


def test_bad_arguments_of_the_other_operators() -> None:
    host, _, hot = gather_bench()
    plan, counts = zeros(2, 3, 16, dtype=torch.uint8), zeros(2)
    with pytest.raises(ValueError, match=r"^miss_hot_indices: .*shape \(2, 3\)"):
        hisparse.gather_compact(host, hot, zeros(2, 3), zeros(3, 2), counts)
    with pytest.raises(ValueError, match=r"^miss_counts: expected at least 2 elements"):
        hisparse.gather_compact(host, hot, zeros(2, 3), zeros(2, 3), zeros(1))
    with pytest.raises(ValueError, match=r"^hot_cache: .*3 dimension"):
        hisparse.gather_compact(host, hot.reshape(12, 32), zeros(2, 3), zeros(2, 3), counts)
    with pytest.raises(TypeError, match=r"^plan: expected uint8, got int32"):
        hisparse.gather_planned(host, hot, zeros(2, 3, 4), counts)
    with pytest.raises(ValueError, match=r"^plan: .*\[R, K, 16\], got shape \(2, 3, 8\)"):
        hisparse.gather_planned(host, hot, plan[:, :, :8], counts)
    with pytest.raises(ValueError, match=r"^counts: expected at least 2 elements"):
        hisparse.gather_planned(host, hot, plan, zeros(1))
    with pytest.raises(TypeError, match=r"^written_slots: expected int64, got int32"):
        hisparse.invalidate_written_slots(zeros(2, 8), zeros(2), zeros(3), zeros(3))
    with pytest.raises(ValueError, match=r"^req_id_per_token: expected shape \(4,\)"):
        hisparse.invalidate_written_slots(zeros(2, 8), zeros(2), zeros(3), zeros(4, dtype=torch.int64))
    bench = Bench(worked_case())
    arguments = list(bench.arguments(ids_of([1, 2, 3, 4])))
    del arguments[4]
    out = hisparse.SwapPlan(zeros(1, 4, 8, dtype=torch.uint8), zeros(1), zeros(1, 4))
    with pytest.raises(ValueError, match=r"^out.plan: .*\(1, 4, 8\)"):
        hisparse.plan_swap_in(*arguments, out=out)
    with pytest.raises(ValueError, match=r"^out.counts: "):
        hisparse.plan_swap_in(*arguments, out=out._replace(plan=zeros(1, 4, 16, dtype=torch.uint8), counts=zeros(2)))
