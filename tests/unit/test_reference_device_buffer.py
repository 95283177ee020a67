"""The device-buffer reference against recorded outputs, worked values, one small example per rule, and its contract."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from device_buffer_cases import (
    EDGES,
    INT32_MAX,
    ITEM_BYTES,
    KINDS,
    PAGE_BYTES,
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
from hypothesis import HealthCheck, given, settings

from hotplan.reference import device_buffer

# Cases are small and many of them are drawn from a seed, so more examples beat shrinking.
PROPERTY = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])

WORKED_TOKENS = [1, 4, 2, 5, -1]


def bench_of(
    case: Case, tokens: list[int] | None = None, lru: list[int] | None = None, request: int = 0, **options: Any
) -> Bench:
    """A bench whose request holds `tokens`, with their bytes, in this LRU order."""
    bench = Bench(case, **options)
    if tokens is not None:
        bench.set_tokens(request, dict(enumerate(tokens)))
    if lru is not None:
        order = bench.lru().copy()
        order[request] = lru
        bench.set_lru(order)
    return bench


def ask(bench: Bench, *rows: list[int], n: int | list[int], **options: Any) -> list[int]:
    """One call; the outputs of launch row 0, all steps."""
    step = step_of(bench.case, *rows, lengths=n if isinstance(n, list) else [n], **options)
    bench.swap_in(device_buffer, step)
    return bench.out()[0].reshape(-1).tolist()


def held(bench: Bench, request: int = 0) -> list[int]:
    return bench.device_buffer_tokens[request].tolist()


def order(bench: Bench, request: int = 0) -> list[int]:
    return bench.lru()[request].tolist()


def state(bench: Bench) -> list[np.ndarray]:
    return [bench.memory[name].numpy().copy() for name in bench.state_names] + bench.device_bytes()


def assert_kept(bench: Bench, before: list[np.ndarray]) -> None:
    for mine, its in zip(state(bench), before, strict=True):
        np.testing.assert_array_equal(mine, its)


def row_bytes(bench: Bench, row: int, pool: int = 0) -> np.ndarray:
    case = bench.case
    return bench.device_bytes()[pool][item_index(np.array([row]), case.item_bytes, case.paged)[0]]


def host_item(bench: Bench, row: int, pool: int = 0) -> np.ndarray:
    case = bench.case
    return bench.host_bytes[pool][item_index(np.array([row]), case.item_bytes, case.paged)[0]]


# ----------------------------------------------------------------------------------------------------
# Recorded outputs and worked values


@pytest.mark.parametrize("case", list(golden_cases()), ids=lambda c: f"K{c.top_k}-H{c.hot_slots}-bs{c.rows}")
@pytest.mark.parametrize("strided", [False, True], ids=["dense", "strided"])
def test_recorded_outputs(case: Case, strided: bool) -> None:
    assert_recorded(Bench(case, strided=strided), device_buffer)


@pytest.mark.parametrize("kind", ["linear", "dsv4"])
def test_worked_values(kind: str) -> None:
    bench = bench_of(worked_case(kind), WORKED_TOKENS)
    before = bench.device_bytes()
    assert ask(bench, [4, 2, 7], n=8) == [7, 3, 11]
    assert order(bench) == [0, 3, 1, 2]
    assert held(bench) == WORKED_TOKENS
    assert bench.loads(0) == []
    np.testing.assert_array_equal(bench.device_bytes(), before)

    assert ask(bench, [6, -1, -1], n=8) == [9, -1, -1]
    assert held(bench) == [6, 4, 2, 5, -1]
    assert order(bench) == [3, 1, 2, 0]
    assert bench.loads(0) == [(44, 9)]
    np.testing.assert_array_equal(row_bytes(bench, 9), host_item(bench, 44))


def test_worked_values_of_several_misses() -> None:
    bench = Bench(worked_case(top_k=4))
    assert ask(bench, [4, 5, 6, 7], n=9) == [9, 7, 3, 5]
    assert order(bench) == [0, 1, 2, 3]
    assert held(bench) == [4, 5, 6, 7, -1]
    assert bench.loads(0) == [(46, 9), (45, 7), (44, 3), (43, 5)]


def test_worked_values_of_short_requests() -> None:
    locs = np.array([[13, 9, 5, 1, 15]], dtype=np.int32)
    bench = bench_of(worked_case(device_buffer_locs=locs), WORKED_TOKENS)
    before = state(bench)
    assert ask(bench, [2, 0, 1], n=3) == [5, 13, 9]
    wide = bench_of(worked_case(device_buffer_locs=locs, top_k=4), WORKED_TOKENS)
    assert ask(wide, [1, -1, 0, 0], n=2) == [9, -1, -1, -1]
    assert_kept(bench, before)
    assert_kept(wide, before)


# ----------------------------------------------------------------------------------------------------
# Rows


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_real", [-5, 0, 1, 2, 3, 99])
def test_padding_rows(kind: str, num_real: int) -> None:
    case = make_case(kind, seed=1, rows=3, top_k=4, hot_slots=20)
    bench = Bench(case, strided=True)
    step = random_step(case, np.random.default_rng(1), lengths=np.array([50, 10, 40]))
    step.num_real = num_real
    bench.run(device_buffer, step)
    bench.assert_contract(step, clean=True)
    for row in range(max(0, num_real), 3):
        # Several steps: callers accept 0 and nothing else.
        assert set(bench.out()[row].reshape(-1).tolist()) == {0 if kind == "steps" else -1}
        assert bench.miss_count[row] == (0 if kind == "steps" else POISON)
        request = int(step.req_pool_indices[row])
        np.testing.assert_array_equal(bench.lru()[request], bench.lru_before[request])
        if kind == "steps":
            assert bench.scratch_state[0, request] == POISON


def test_all_rows_are_real_without_a_number() -> None:
    case = make_case(seed=1, rows=3, top_k=4)
    step = random_step(case, np.random.default_rng(1), short=0.0)
    bare, told = Bench(case), Bench(case)
    bare.run(device_buffer, step)
    step.num_real = 3
    told.run(device_buffer, step)
    bare.assert_equal(told)
    assert (bare.miss_count >= 0).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("request_index", [-1, 2, INT32_MAX, -(2**31), 2**40, -(2**63)])
def test_requests_outside_the_tables(kind: str, request_index: int) -> None:
    case = make_case(kind, rows=2, spare_requests=0, top_k=2, block_tokens=2)
    bench = Bench(case)
    for length in (0, 3, case.max_tokens):
        step = random_step(case, np.random.default_rng(0), lengths=np.array([length, length]))
        step.req_pool_indices[:] = [request_index, request_index]
        before = state(bench)
        bench.swap_in(device_buffer, step)
        assert (bench.out() == -1).all()
        if kind != "blocks":
            assert bench.miss_count.tolist() == [0, 0]
        assert_kept(bench, before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(0, 4), (2, 0), (0, 0)])
def test_empty_launches_write_nothing(kind: str, shape: tuple[int, int]) -> None:
    case = make_case(kind, rows=2, top_k=4)
    case.rows, case.top_k = shape
    bench = Bench(case)
    before = state(bench)
    entries = np.zeros((shape[0], case.steps, shape[1]), dtype=np.int32)
    if kind != "steps":
        entries = entries[:, 0]
    step = Step(np.zeros(shape[0], dtype=np.int64), np.full(shape[0] * case.steps, 30), entries, num_real=0)
    bench.swap_in(device_buffer, step)
    assert (bench.miss_count == POISON).all()
    assert_kept(bench, before)


def test_rows_use_the_tables_of_their_request() -> None:
    case = make_case(rows=2, spare_requests=1, top_k=2, hot_slots=4)
    bench = Bench(case)
    ask(bench, [3, 1], [3, 0], n=[19, 19], requests=[2, 0])
    assert bench.out()[:, 0].tolist() == case.device_buffer_locs[[2, 0], :2].tolist()
    assert bench.device_buffer_tokens[:, :2].tolist() == [[3, 0], [-1, -1], [3, 1]]
    for row, (request, second) in enumerate([(2, 1), (0, 0)]):
        locs = case.device_buffer_locs[request].tolist()
        hosts = case.host_cache_locs[request]
        assert bench.loads(row) == [(hosts[3], locs[0]), (hosts[second], locs[1])]


# ----------------------------------------------------------------------------------------------------
# Which tokens


def test_short_and_long_meet_at_the_number_of_slots() -> None:
    bench = bench_of(worked_case(), WORKED_TOKENS)
    # Slot 3 is row 5 and holds token 5, which nobody looks at while the request fits.
    assert ask(bench, [3, 4, 0], n=4) == [5, -1, 9]
    assert order(bench) == [0, 1, 2, 3]
    # One token more: 4 is the newest one, 3 and 0 are loaded into the slots of 1 and 4.
    assert ask(bench, [3, 4, 0], n=5) == [9, 11, 7]
    assert held(bench) == [3, 0, 2, 5, -1]


@pytest.mark.parametrize("n", [0, -1, -(2**31), -(2**63)])
@pytest.mark.parametrize("kind", KINDS)
def test_requests_without_tokens(kind: str, n: int) -> None:
    case = worked_case(kind, block_tokens=1)
    bench = bench_of(case, WORKED_TOKENS)
    before = state(bench)
    assert ask(bench, [0, -1, 2] * case.steps, n=[n] * case.steps) == [-1] * (3 * case.steps)
    if kind == "steps":
        before[2][0, 0] = 0  # the count of misses
    assert_kept(bench, before)


def test_a_short_row_reads_as_many_columns_as_it_has_tokens() -> None:
    bench = Bench(worked_case(top_k=4))
    assert ask(bench, [-1, -1, 0, 1], n=2) == [-1, -1, -1, -1]
    assert ask(bench, [-1, 1, 0, 1], n=3) == [-1, 7, 9, -1]
    assert ask(bench, [-1, 1, 2, 0], n=4) == [-1, 7, 3, 9]


def test_short_blocks_read_all_columns() -> None:
    bench = Bench(worked_case("blocks", top_k=2, block_tokens=2))
    assert ask(bench, [-1, 0], n=1) == [-1, -1, 9, -1]
    assert ask(bench, [1, 0], n=3) == [3, -1, 9, 7]
    assert ask(bench, [3, -(2**31)], n=4) == [-1] * 4


def test_short_requests_leave_everything_as_it_is() -> None:
    bench = bench_of(worked_case(), WORKED_TOKENS, lru=[9, 9, -1, 2])
    before = state(bench)
    assert ask(bench, [0, 1, 2], n=4) == [9, 7, 3]
    assert_kept(bench, before)
    assert bench.miss_count.tolist() == [0]


def test_the_newest_token_has_a_slot_of_its_own() -> None:
    # Slot 4 holds the name of another token, slot 2 that of the newest one: neither counts.
    bench = bench_of(worked_case(), [1, 4, 7, 5, 2])
    before = state(bench)
    assert ask(bench, [7, 7, -1], n=8) == [11, 11, -1]
    assert_kept(bench, before)
    # A step later it is a token like others.
    assert ask(bench, [7, -1, -1], n=9) == [3, -1, -1]


def test_newest_tokens_of_blocks() -> None:
    bench = Bench(worked_case("blocks", top_k=2, block_tokens=2))
    # Tokens 6, 7 (beyond the request) and 4, 5: 6 is the newest.
    assert ask(bench, [3, 2], n=7) == [11, -1, 9, 7]
    assert held(bench) == [4, 5, -1, -1, -1]


@pytest.mark.parametrize("token", [-1, -2, -(2**31), 8, 9, 20, 21, INT32_MAX])
@pytest.mark.parametrize("kind", ["linear", "dsv4", "blocks", "steps"])
def test_tokens_that_do_not_exist(kind: str, token: int) -> None:
    case = worked_case(kind)
    bench = bench_of(case, WORKED_TOKENS, lru=[3, 3, 3, 3])
    # A slot that names such a token is no hit.
    bench.device_buffer_tokens[0, 1] = token
    before = state(bench)
    assert ask(bench, [token] * 3 * case.steps, n=[8] * case.steps) == [-1] * 3 * case.steps
    if kind == "steps":
        before[2][0, 0] = 0
    assert_kept(bench, before)


def test_tokens_beyond_the_host_table() -> None:
    """The table ends at 20 tokens: what is found without it is found, the rest is -1."""
    bench = bench_of(worked_case(), [1, 20, 19, -1, -1])
    # 24 is the newest; 20 is named by a slot, but cannot be there.
    assert ask(bench, [20, 19, 24], n=25) == [-1, 3, 11]
    assert bench.loads(0) == []
    short = Bench(worked_case(host_cache_locs=np.zeros((1, 0), dtype=np.int64)))
    assert ask(short, [3, 0, -1], n=4) == [5, 9, -1]
    assert ask(short, [3, 0, 4], n=5) == [-1, -1, 11]


def test_lengths_beyond_int32() -> None:
    bench = bench_of(worked_case(), WORKED_TOKENS)
    assert ask(bench, [4, -1, INT32_MAX], n=2**40) == [7, -1, -1]
    assert ask(bench, [4, -1, INT32_MAX], n=2**31) == [7, -1, 11]
    # The low 32 bits of this length are 3.
    assert ask(bench, [2, 1, 2], n=2**32 + 3) == [3, 9, 3]


def test_blocks_whose_tokens_do_not_fit() -> None:
    bench = Bench(worked_case("blocks", top_k=1, block_tokens=4))
    # Block 2**30 begins at token 2**32, whose low 32 bits are 0.
    assert ask(bench, [2**30], n=2**40) == [-1] * 4
    assert ask(bench, [2**30], n=2**32 + 1) == [-1] * 4
    assert ask(bench, [2**29], n=2**31) == [-1] * 4
    # The last block with room for its tokens ends in the newest one.
    assert ask(bench, [2**29 - 1], n=2**31) == [-1, -1, -1, 11]


# ----------------------------------------------------------------------------------------------------
# Rows of the pools


@pytest.mark.parametrize("loc", [-1, -(2**31), 64, INT32_MAX])
def test_slots_without_a_device_row(loc: int) -> None:
    locs = np.array([[9, loc, 3, 5, loc]], dtype=np.int32)
    bench = bench_of(worked_case(device_buffer_locs=locs), WORKED_TOKENS)
    assert ask(bench, [1, 2, 0], n=4) == [-1, 3, 9]
    # Token 4 is hit in slot 1, which has no row; the newest token's slot has none either.
    assert ask(bench, [4, 2, 7], n=8) == [-1, 3, -1]
    assert order(bench) == [0, 3, 1, 2]
    assert held(bench) == WORKED_TOKENS
    assert bench.loads(0) == []


@pytest.mark.parametrize("loc", [-1, 64, INT32_MAX])
def test_misses_that_draw_a_slot_without_a_device_row(loc: int) -> None:
    locs = np.array([[9, loc, 3, 5, 11]], dtype=np.int32)
    bench = bench_of(worked_case(device_buffer_locs=locs), WORKED_TOKENS, lru=[1, 0, 2, 3])
    before = bench.device_bytes()
    # Slot 1 is the oldest: 6 takes it all the same, is listed, and is not there afterwards.
    assert ask(bench, [6, 8, 6], n=10) == [-1, 9, -1]
    assert held(bench) == [8, -1, 2, 5, -1]
    assert order(bench) == [2, 3, 1, 0]
    assert bench.loads(0) == [(44, -1), (42, 9)]
    bench.apply(before[0], bench.host_bytes[0], [(42, 9)])
    np.testing.assert_array_equal(bench.device_bytes(), before)


@pytest.mark.parametrize("loc", [-1, -(2**63), 64, 2**32 + 44, 2**63 - 1])
@pytest.mark.parametrize("kind", ["linear", "steps"])
def test_misses_without_a_host_row(kind: str, loc: int) -> None:
    case = worked_case(kind)
    case.host_cache_locs[0, [4, 6]] = loc
    bench = bench_of(case, WORKED_TOKENS, lru=[0, 1, 2, 3])
    bench.device_buffer_tokens[0, 1] = 4
    # 6 cannot be loaded: it takes no slot, and 0 gets the oldest one. 4 needs no host row, since it is there.
    asked, empty = [6, 0, 4], [-1] * 3
    out = ask(bench, asked + empty * (case.steps - 1), n=[12] * case.steps)
    assert out == [-1, 9, 7] + empty * (case.steps - 1)
    assert bench.loads(0) == [(50, 9)]
    assert order(bench) == [2, 3, 0, 1]
    assert held(bench) == [0, 4, 2, 5, -1]
    if kind == "steps":
        assert bench.scratch_state[0, 0] == 1


def test_rows_are_whole_items() -> None:
    """Pools of 5 and 4 items, and almost one more."""
    case = worked_case(item_bytes=16, device_rows=5, host_rows=4)
    case.host_cache_locs = np.array([[0, 3, 4, 5, 1, 2, 0, 1]], dtype=np.int64)
    case.device_buffer_locs = np.array([[4, 5, 0, 1, 3]], dtype=np.int32)
    bench = Bench(case)
    memory = torch.full((6 * 16 - 1,), UNTOUCHED, dtype=torch.uint8)
    host = torch.from_numpy(pool_bytes(5, 16, False, 0))[:79]
    step = step_of(case, [1, 2, 0], lengths=[8])
    bench.swap_in(device_buffer, step, host_cache=host, device_buffer=memory)
    # Token 2's host row 4 and slot 1's device row 5 are not whole.
    assert bench.out()[0, 0].tolist() == [4, -1, -1]
    assert bench.loads(0) == [(3, 4), (0, -1)]
    assert torch.equal(memory[64:80], host[48:64])
    assert (memory[:64] == UNTOUCHED).all()
    assert (memory[80:] == UNTOUCHED).all()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool])
def test_pools_of_any_type_and_shape(dtype: torch.dtype) -> None:
    case = make_case(seed=3, rows=2, top_k=5, item_bytes=32)
    step = random_step(case, np.random.default_rng(3), short=0.0)
    bench = Bench(case)
    bench.prepare(step)
    host = bench.host_pools[0].view(-1)
    if dtype == torch.bool:
        host.bitwise_and_(1)
        bench.host_bytes[0] &= 1
        bench.prepare(step)
    width = 32 // dtype.itemsize
    shaped = host.view(dtype).view(-1, 1, width) if width > 1 else host.view(dtype)
    bench.swap_in(device_buffer, step, host_cache=shaped, device_buffer=bench.device_pools[0].view(-1).view(dtype))
    bench.assert_contract(step, clean=True)
    assert sum(len(bench.loads(row)) for row in range(2)) > 5


@pytest.mark.parametrize("item_bytes", ITEM_BYTES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pool_offset", [0, 1, 8])
def test_every_byte_of_an_item_is_copied(kind: str, item_bytes: int, pool_offset: int) -> None:
    if kind == "dsv4" and (item_bytes, pool_offset) != (PAGED_ITEM, 0):
        item_bytes, pool_offset = PAGED_ITEM, 8
    case = make_case(kind, seed=item_bytes, top_k=3, hot_slots=12, rows=2, max_tokens=20, item_bytes=item_bytes)
    bench = Bench(case, pool_offset=pool_offset)
    rng = np.random.default_rng(item_bytes)
    for _ in range(2):
        step = random_step(case, rng, short=0.0)
        bench.run(device_buffer, step)
        bench.assert_contract(step, clean=True)
    assert (bench.device_bytes()[-1] != UNTOUCHED).sum() > 3 * item_bytes // 2


def test_pages_keep_their_unused_bytes() -> None:
    case = make_case("dsv4", seed=2, top_k=40, hot_slots=60, rows=2)
    bench = Bench(case)
    step = random_step(case, np.random.default_rng(2), lengths=np.array([150, 150]))
    bench.run(device_buffer, step)
    bench.assert_contract(step, clean=True)
    pages = bench.device_bytes()[0].reshape(-1, PAGE_BYTES)
    assert (pages[:, PAGE_BYTES - 64 :] == UNTOUCHED).all()
    # Values and scales arrived where the layout says, on the second page too.
    src, dst = next(load for load in bench.loads(0) if load[1] >= 64)
    source = bench.host_bytes[0].reshape(-1, PAGE_BYTES)[src // 64]
    page, slot = pages[dst // 64], dst % 64
    np.testing.assert_array_equal(page[slot * 576 : slot * 576 + 576], source[src % 64 * 576 : src % 64 * 576 + 576])
    np.testing.assert_array_equal(
        page[36864 + slot * 8 : 36872 + slot * 8], source[36864 + src % 64 * 8 : 36872 + src % 64 * 8]
    )


@pytest.mark.parametrize("kind", ["linear", "dsv4", "blocks"])
def test_skip_io_does_everything_but_the_bytes(kind: str) -> None:
    case = make_case(kind, seed=4, rows=2, top_k=5, block_tokens=2)
    full, skipped = Bench(case), Bench(case)
    for number in range(3):
        step = random_step(case, np.random.default_rng(number), short=0.0, spread=0.5)
        full.swap_in(device_buffer, step)
        before = skipped.device_bytes()
        skipped.swap_in(device_buffer, step, skip_io=True)
        np.testing.assert_array_equal(skipped.device_bytes(), before)
        for name in (*full.output_names, *full.state_names):
            assert torch.equal(full.memory[name], skipped.memory[name]), name
    assert (full.device_bytes()[0] != UNTOUCHED).any()


# ----------------------------------------------------------------------------------------------------
# Hits, misses, LRU


def test_duplicates_share_a_slot_and_a_load() -> None:
    bench = Bench(worked_case(top_k=4))
    assert ask(bench, [6, 2, 6, 6], n=12) == [9, 7, 9, 9]
    assert bench.loads(0) == [(44, 9), (48, 7)]
    assert held(bench) == [6, 2, -1, -1, -1]
    assert order(bench) == [2, 3, 0, 1]
    # A hit that is named three times is one hit.
    assert ask(bench, [2, 2, 5, 2], n=12) == [7, 7, 3, 7]
    assert bench.loads(0) == [(45, 3)]
    assert order(bench) == [3, 0, 2, 1]


def test_new_order_is_unused_victims_then_loaded_then_hits() -> None:
    locs = np.arange(8, dtype=np.int32)[None]
    bench = bench_of(
        worked_case(top_k=5, hot_slots=7, device_buffer_locs=locs),
        [10, 11, 12, 13, 14, 15, 16, -1],
        lru=[6, 2, 5, 0, 4, 1, 3],
    )
    # Hits 13, 15 and 12 keep the order of their slots 2, 5, 3; misses 1 and 0 take slots 6 and 0, in column order.
    assert ask(bench, [13, 1, 15, 0, 12], n=19) == [3, 6, 5, 0, 2]
    assert order(bench) == [4, 1, 6, 0, 2, 5, 3]
    assert held(bench) == [0, 11, 12, 13, 14, 15, 1, -1]
    assert bench.loads(0) == [(49, 6), (50, 0)]


@pytest.mark.parametrize(
    ("lru", "after"),
    [
        # Repeated slot 2: its later place counts, 3 comes back as the oldest.
        ([2, 0, 1, 2], [0, 1, 2, 3]),
        ([4, -1, 32767, -32768], [1, 2, 3, 0]),
        ([-1] * 4, [1, 2, 3, 0]),
        ([2] * 4, [1, 3, 2, 0]),
        ([3, 99, 3, 1], [2, 3, 1, 0]),
    ],
)
def test_corrupt_lru_is_repaired(lru: list[int], after: list[int]) -> None:
    """One miss: it takes the oldest slot of the repaired row, which becomes the newest."""
    bench = bench_of(worked_case(), lru=lru)
    out = ask(bench, [6, -1, -1], n=12)
    assert order(bench) == after
    assert out == [int(bench.case.device_buffer_locs[0, after[-1]]), -1, -1]
    assert held(bench)[after[-1]] == 6


def test_corrupt_lru_keeps_hits_in_their_order() -> None:
    bench = bench_of(worked_case(), WORKED_TOKENS, lru=[2, 2, 0, -7])
    # Repaired: 1 and 3 come back, then 2 and 0. Token 1 sits in slot 0, 2 in slot 2; 8 takes slot 1.
    assert ask(bench, [1, 8, 2], n=12) == [9, 7, 3]
    assert order(bench) == [3, 1, 2, 0]


def test_a_token_in_several_slots_is_found_in_the_newest() -> None:
    bench = bench_of(worked_case(), [6, 6, 6, 5, -1], lru=[1, 2, 0, 3])
    assert ask(bench, [6, -1, -1], n=12) == [9, -1, -1]
    assert order(bench) == [1, 2, 3, 0]
    assert held(bench) == [6, 6, 6, 5, -1]
    # The other copies are ordinary victims.
    assert ask(bench, [6, 7, 8], n=12) == [9, 7, 3]
    assert held(bench) == [6, 7, 8, 5, -1]


def test_a_row_that_needs_no_lru_is_not_repaired() -> None:
    bench = bench_of(worked_case(), WORKED_TOKENS, lru=[3, 3, 3, 3])
    before = state(bench)
    assert ask(bench, [-1, 8, 7], n=8) == [-1, -1, 11]
    assert ask(bench, [0, 1, 2], n=3) == [9, 7, 3]
    assert_kept(bench, before)
    # A token that exists is looked up, so the LRU is needed, even if the token cannot be loaded.
    bench.host_cache_locs[0, 6] = -1
    assert ask(bench, [6, -1, -1], n=8) == [-1, -1, -1]
    assert order(bench) == [0, 1, 2, 3]
    assert held(bench) == WORKED_TOKENS


def test_names_that_cannot_be_are_victims() -> None:
    bench = bench_of(worked_case(), [-5, 20, INT32_MAX, -1, -1])
    assert ask(bench, [0, 1, 2], n=12) == [9, 7, 3]
    assert held(bench) == [0, 1, 2, -1, -1]


# ----------------------------------------------------------------------------------------------------
# Blocks


def test_blocks_are_resolved_token_by_token() -> None:
    case = worked_case("blocks", top_k=2, block_tokens=2)
    bench = bench_of(case, [1, 4, 2, 5, -1])
    bench.swap_in(device_buffer, step_of(case, [2, 0], lengths=[10]))
    # Tokens 4, 5 and 0, 1: only 0 is missing, and slot 2 is the only one without one of the others.
    assert bench.out()[0, 0].tolist() == [7, 5, 3, 9]
    assert held(bench) == [1, 4, 0, 5, -1]
    assert order(bench) == [2, 0, 1, 3]
    for pool in range(2):
        np.testing.assert_array_equal(row_bytes(bench, 3, pool), host_item(bench, 50, pool))
    assert (host_item(bench, 50, 0) != host_item(bench, 50, 1)).any()


def test_columns_behind_the_blocks_are_not_written() -> None:
    case = make_case("blocks", rows=2, top_k=2, block_tokens=3, hot_slots=6)
    bench = Bench(case, strided=True)
    step = random_step(case, np.random.default_rng(0), lengths=np.array([4, 20]))
    step.num_real = 1
    bench.run(device_buffer, step)
    assert bench.top_k_device_locs.shape == (2, 8)
    assert bench.top_k_device_locs[:, 6:].unique().tolist() == [POISON]
    assert (bench.top_k_device_locs[:, :6] != POISON).all()


@pytest.mark.parametrize("block_tokens", [1, 2, 5, 16])
def test_blocks_that_fill_the_slots(block_tokens: int) -> None:
    case = make_case("blocks", seed=1, rows=2, top_k=3, block_tokens=block_tokens, hot_slots=1)
    assert case.hot_slots == 3 * block_tokens
    bench = Bench(case, strided=True)
    for seed in range(3):
        step = random_step(case, np.random.default_rng(seed), short=0.0)
        bench.run(device_buffer, step)
        bench.assert_contract(step, clean=True)


# ----------------------------------------------------------------------------------------------------
# Several steps


def steps_bench(tokens: list[int] | None = None, lru: list[int] | None = None, **changes: Any) -> Bench:
    """Two steps of K 3 on 4 slots, one extra slot, two scratch rows; slot order 0 to 3 unless told."""
    return bench_of(worked_case("steps", **changes), tokens, lru if lru is not None else [0, 1, 2, 3])


def test_steps_are_one_set() -> None:
    bench = steps_bench(WORKED_TOKENS)
    # In (step, column) order: 6, 2 (a hit), 8, 9. Slots 0, 1 and 3 are the victims.
    assert ask(bench, [6, 2, -1, 8, 6, 9], n=[12, 13]) == [9, 3, -1, 7, 9, 5]
    assert bench.loads(0) == [(44, 9), (42, 7), (41, 5)]
    assert held(bench) == [6, 8, 2, 9, -1]
    assert order(bench) == [0, 1, 3, 2]
    assert bench.scratch_state[0, 0] == bench.miss_count[0] == 3


def test_every_step_has_its_own_length() -> None:
    bench = steps_bench(WORKED_TOKENS)
    # Token 12 is there from the second step on.
    assert ask(bench, [12, 4, -1, 12, 4, -1], n=[12, 13]) == [-1, 7, -1, 9, 7, -1]
    case = worked_case("steps", rows=2)
    case.device_buffer_locs = np.concatenate([case.device_buffer_locs, case.device_buffer_locs + 20])
    case.host_cache_locs = np.concatenate([case.host_cache_locs, case.host_cache_locs - 20])
    case.scratch_locs = np.concatenate([case.scratch_locs, case.scratch_locs + 30])
    bench = Bench(case)
    ask(bench, [9, -1, -1] * 2, [9, -1, -1] * 2, n=[9, 10, 10, 9])
    assert bench.out()[:, :, 0].tolist() == [[-1, 7], [27, -1]]


def test_initial_zeros_are_an_lru() -> None:
    case = worked_case("steps")
    bench = Bench(case)
    assert order(bench) == [0] * 4
    assert ask(bench, [6, -1, -1] * 2, n=[12, 13]) == [7, -1, -1] * 2
    assert order(bench) == [2, 3, 0, 1]


def test_only_the_lru_rows_of_the_policy_are_used() -> None:
    case = make_case("steps", rows=2, spare_requests=1, top_k=3, hot_slots=8, extra=2)
    bench = Bench(case, strided=True)
    bench.cache_policy[0] = 7777
    scratch = bench.memory["scratch_state"].clone()
    step = random_step(case, np.random.default_rng(0), lengths=np.array([20, 25]))
    step.req_pool_indices[:] = [2, 0]
    bench.run(device_buffer, step)
    bench.assert_contract(step, clean=True)
    assert (bench.cache_policy[0] == 7777).all()
    assert bench.cache_policy[2].tolist() == [0] * 8
    scratch[0, [2, 0]] = bench.miss_count[:2]
    assert torch.equal(bench.memory["scratch_state"], scratch)


def test_the_index_of_tokens_may_be_anything() -> None:
    bench = steps_bench(WORKED_TOKENS)
    for index in (None, "nothing", torch.zeros(3)):
        step = step_of(bench.case, [4, 2, 1] * 2, lengths=[12, 13])
        arguments = bench.arguments(step)
        device_buffer.load_cache_to_device_buffer_spec_mla(
            **arguments | {"state": device_buffer.HiSparseSpecState(index, *arguments["state"][1:])}
        )
        assert bench.out()[0].tolist() == [[7, 3, 9]] * 2


def test_several_steps_have_no_short_requests() -> None:
    bench = steps_bench([2, 0, -1, 1, -1])
    # Slots need not hold tokens in order; 3 is loaded like any other token.
    assert ask(bench, [0, 1, 2, 3, 1, 0], n=[3, 4]) == [7, 5, 9, 3, 5, 7]
    assert bench.loads(0) == [(47, 3)]
    assert held(bench) == [2, 0, 3, 1, -1]


def extra_case(**changes: Any) -> Case:
    """Slots 4, 5 and 6 are extra, rows 11, 12 and 13."""
    locs = np.array([[9, 7, 3, 5, 11, 12, 13]], dtype=np.int32)
    return worked_case("steps", **({"device_buffer_locs": locs} | changes))


def test_tokens_in_the_extra_slots() -> None:
    bench = bench_of(extra_case(), [-1] * 4 + [9, 10, 8], lru=[9, 9, 9, 9])
    before = state(bench)
    # All answers come from the extra slots, so not even the LRU is repaired.
    assert ask(bench, [8, 9, -1, 10, 9, 9], n=[10, 11]) == [13, 11, -1, 12, 11, 11]
    before[2][0, 0] = 0
    assert_kept(bench, before)
    assert bench.loads(0) == []


def test_extra_slots_hold_the_last_tokens_only() -> None:
    bench = bench_of(extra_case(), [-1] * 4 + [7, -1, -1], lru=[0, 1, 2, 3])
    # Three extra slots: token 7 is one of the last three of 10 tokens, not of 11. There it is loaded like others.
    assert ask(bench, [7, -1, -1, 7, -1, -1], n=[10, 11]) == [11, -1, -1, 9, -1, -1]
    assert bench.loads(0) == [(43, 9)]
    # A token that the step does not see yet is not there either.
    assert ask(bench, [7, -1, -1, 7, -1, -1], n=[7, 8]) == [-1, -1, -1, 11, -1, -1]


def test_the_first_extra_slot_with_a_token_counts() -> None:
    bench = bench_of(extra_case(), [-1] * 4 + [5, 9, 9], lru=[0, 1, 2, 3])
    assert ask(bench, [9, -1, -1] * 2, n=[10, 11]) == [12, -1, -1] * 2
    # It has no row: then the token is looked up like others, though a later slot names it, too.
    bench = bench_of(
        extra_case(device_buffer_locs=np.array([[9, 7, 3, 5, 11, 64, 13]], dtype=np.int32)),
        [-1] * 4 + [5, 9, 9],
        lru=[0, 1, 2, 3],
    )
    assert ask(bench, [9, -1, -1] * 2, n=[10, 11]) == [9, -1, -1] * 2
    assert bench.loads(0) == [(41, 9)]


def test_extra_tokens_need_no_host_table() -> None:
    bench = bench_of(extra_case(), [-1] * 5 + [25, -1])
    assert ask(bench, [25, 24, -1] * 2, n=[26, 27]) == [12, -1, -1] * 2


def test_misses_without_a_slot_get_scratch_rows() -> None:
    bench = steps_bench([3, -1, -1, -1, -1])
    # One hit leaves three slots: 5, 6, 7 take them, 8 and 9 get the scratch rows.
    assert ask(bench, [5, 6, 7, 8, 3, 9], n=[12, 13]) == [7, 3, 5, 20, 9, 21]
    assert bench.loads(0) == [(45, 7), (44, 3), (43, 5), (42, 20), (41, 21)]
    assert held(bench) == [3, 5, 6, 7, -1]
    assert order(bench) == [1, 2, 3, 0]
    assert bench.scratch_state[0, 0] == 5
    np.testing.assert_array_equal(row_bytes(bench, 20), host_item(bench, 42))
    np.testing.assert_array_equal(row_bytes(bench, 21), host_item(bench, 41))
    bench.assert_contract(step_of(bench.case, [5, 6, 7, 8, 3, 9], lengths=[12, 13]), clean=True)
    # They enter no table: the next call knows nothing of 8.
    assert ask(bench, [8, -1, -1] * 2, n=[13, 14]) == [7, -1, -1] * 2


def test_misses_behind_the_last_scratch_row() -> None:
    bench = steps_bench(scratch_locs=np.array([[20]], dtype=np.int32))
    assert ask(bench, [5, 6, 7, 8, 9, 4], n=[12, 13]) == [9, 7, 3, 5, 20, -1]
    assert len(bench.loads(0)) == bench.scratch_state[0, 0] == 5
    none = steps_bench(scratch_locs=np.zeros((1, 0), dtype=np.int32))
    assert ask(none, [5, 6, 7, 8, 9, 4], n=[12, 13]) == [9, 7, 3, 5, -1, -1]
    assert len(none.loads(0)) == none.scratch_state[0, 0] == 4
    assert (none.device_bytes()[0].reshape(-1, 16)[[20, 21]] == UNTOUCHED).all()


@pytest.mark.parametrize("loc", [-1, 64, INT32_MAX])
def test_scratch_without_a_device_row(loc: int) -> None:
    bench = steps_bench(scratch_locs=np.array([[loc, 21]], dtype=np.int32))
    assert ask(bench, [5, 6, 7, 8, 9, 4], n=[12, 13]) == [9, 7, 3, 5, -1, 21]
    assert bench.loads(0)[4:] == [(41, -1), (46, 21)]
    assert bench.scratch_state[0, 0] == 6


def test_ownership_of_rows_never_moves() -> None:
    case = make_case("steps", seed=3, rows=3, top_k=9, hot_slots=10, steps=4, extra=4)
    bench = Bench(case)
    rng = np.random.default_rng(3)
    for _ in range(5):
        bench.run(device_buffer, random_step(case, rng, short=0.0))
    np.testing.assert_array_equal(bench.array("device_buffer_locs"), case.device_buffer_locs)
    np.testing.assert_array_equal(bench.array("scratch_locs"), case.scratch_locs)


@pytest.mark.parametrize("steps", [2, 3, 4])
def test_contract_of_several_steps(steps: int) -> None:
    """Served proportions: four steps that agree for the most part, lengths that grow, hits that last."""
    case = make_case("steps", seed=steps, rows=3, top_k=16, hot_slots=40, extra=5, steps=steps, max_tokens=90)
    bench = Bench(case, strided=True)
    rng = np.random.default_rng(steps)
    lengths = np.array([40, 41, 70])
    misses = []
    for number in range(6):
        step = random_step(case, rng, spread=0.5, lengths=lengths + number)
        step.req_pool_indices[:] = [2, 0, 1]
        # Steps share most of their tokens.
        step.top_k[:, 1:, ::2] = step.top_k[:, :1, ::2]
        bench.run(device_buffer, step)
        bench.assert_contract(step, clean=False)
        misses.append(int(bench.miss_count[:3].sum()))
        bench.replay(device_buffer)
    assert misses[0] > misses[-1] > 0


# ----------------------------------------------------------------------------------------------------
# Plans and planned copies


def test_plan_tensors_may_be_larger() -> None:
    case = make_case(seed=6, rows=2, top_k=3)
    step = random_step(case, np.random.default_rng(6), short=0.0)
    exact, larger, none = Bench(case), Bench(case, strided=True), Bench(case)
    exact.run(device_buffer, step)
    larger.run(device_buffer, step)
    none.run(device_buffer, step, plan=False)
    assert larger.miss_src.shape == (4, 5)
    assert larger.miss_src.stride(0) == larger.miss_dst.stride(0) == 8
    for row in range(2):
        assert exact.loads(row) == larger.loads(row)
    larger.assert_contract(step, clean=True)
    none.assert_equal(exact, names=("top_k_device_locs", *exact.state_names))
    assert (none.miss_count == POISON).all()


@pytest.mark.parametrize("kind", ["linear", "dsv4", "steps"])
@pytest.mark.parametrize("num_real", [None, 0, 2, 9])
def test_planned_copies(kind: str, num_real: int | None) -> None:
    case = make_case(kind, seed=7, rows=3, top_k=5, item_bytes=132)
    bench = Bench(case, strided=True)
    for number in range(3):
        step = random_step(case, np.random.default_rng(number), short=0.0, spread=0.6)
        step.num_real = num_real
        bench.run(device_buffer, step)
        bench.replay(device_buffer, num_blocks=number + 1, block_size=1)
    assert bench.planned is not None
    assert bool((bench.planned[1] != UNTOUCHED).any()) == (num_real != 0)


def planned_call(**changes: Any) -> dict[str, Any]:
    host = torch.from_numpy(pool_bytes(9, 16, False, 0)).view(9, 16)
    call = {
        "miss_src": torch.tensor([[0, 8, 9, 5], [-1, 2, 3, 4], [2**40, 7, 6, 1]]),
        "miss_dst": torch.tensor([[0, 4, 5, 6], [7, -1, 12, 2], [8, 9, 10, 11]], dtype=torch.int32),
        "miss_count": torch.tensor([3, 99, 4], dtype=torch.int32),
        "num_real_reqs": torch.tensor([2], dtype=torch.int32),
        "host_cache": host,
        "device_buffer": torch.full((12, 16), UNTOUCHED, dtype=torch.uint8),
        "item_size_bytes": 16,
    }
    return call | changes


def copied(call: dict[str, Any]) -> dict[int, int]:
    """Device row -> host row, for all rows that changed."""
    device_buffer.copy_cache_planned_mla(**call)
    rows = [bytes(row.tolist()) for row in call["host_cache"]]
    got = [bytes(row.tolist()) for row in call["device_buffer"]]
    return {at: rows.index(row) for at, row in enumerate(got) if row != bytes([UNTOUCHED] * 16)}


def test_planned_copies_skip_what_is_no_row() -> None:
    # Row 0 lists three, of which host row 9 does not exist; row 1's count is clamped, and only its last entry is a
    # copy; row 2 is padding.
    assert copied(planned_call()) == {0: 0, 4: 8, 2: 4}
    assert copied(planned_call(num_real_reqs=None)) == {0: 0, 4: 8, 2: 4, 9: 7, 10: 6, 11: 1}
    counts = torch.tensor([-1, 0, POISON, 77], dtype=torch.int32)
    assert copied(planned_call(miss_count=counts, num_real_reqs=None)) == {}
    assert copied(planned_call(num_real_reqs=torch.tensor([-3], dtype=torch.int32))) == {}
    assert copied(planned_call(skip_io=True)) == {}


# ----------------------------------------------------------------------------------------------------
# Transfers and translation


@pytest.mark.parametrize("layers", [0, 1, 3])
@pytest.mark.parametrize("count", [0, 1, 50, 128])
def test_transfers(layers: int, count: int) -> None:
    transfer = Transfer(layers=layers, count=count, seed=count)
    transfer.run(device_buffer, block_size=32)
    transfer.assert_copied()
    assert count == 0 or all((pool != UNTOUCHED).any() for pool in transfer.dst)


@pytest.mark.parametrize("mapping_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("stride", [0, 1, 3])
def test_translation(mapping_dtype: torch.dtype, dtype: torch.dtype, stride: int) -> None:
    mapping = torch.tensor([40, -7, 42, 2**31 - 1], dtype=mapping_dtype)
    values = [2, -1, 0, 3, 4, INT32_MAX, -5, 1, -(2**31)]
    expected = [42, -1, 40, INT32_MAX, -1, -1, -5, -7, -(2**31)]
    if stride == 0:
        locations, expected = torch.tensor([2], dtype=dtype).expand(5), [42] * 5
    else:
        locations = torch.full((len(values) * stride,), 1, dtype=dtype)[::stride]
        locations.copy_(torch.tensor(values))
    before = locations.clone()
    out = device_buffer.translate_padded_hisparse_locations(mapping, locations)
    assert out.tolist() == expected
    assert out.dtype == torch.promote_types(mapping_dtype, dtype)
    assert out.is_contiguous()
    assert torch.equal(locations, before)


def test_translation_of_nothing() -> None:
    empty = torch.zeros(0, dtype=torch.int32)
    out = device_buffer.translate_padded_hisparse_locations(empty, torch.tensor([0, -3, 2**40]))
    assert out.tolist() == [-1, -3, -1]
    out = device_buffer.translate_padded_hisparse_locations(torch.tensor([1]), empty)
    assert (out.dtype, out.shape) == (torch.int64, (0,))


# ----------------------------------------------------------------------------------------------------
# Types, hints, sizes


@pytest.mark.parametrize("kind", KINDS)
def test_lengths_and_requests_in_either_type(kind: str) -> None:
    case = make_case(kind, seed=8, rows=3, top_k=4, block_tokens=2)
    benches = [Bench(case, wide=wide) for wide in ((True, True), (True, False), (False, True), (False, False))]
    for number in range(2):
        step = random_step(case, np.random.default_rng(number), wild=0.2)
        for bench in benches:
            bench.run(device_buffer, step)
            bench.assert_equal(benches[0])


@pytest.mark.parametrize("kind", ["linear", "dsv4", "blocks"])
def test_hints_change_nothing(kind: str) -> None:
    case = make_case(kind, seed=9, rows=2, top_k=4, block_tokens=2)
    step = random_step(case, np.random.default_rng(9), short=0.0)
    plain, hinted = Bench(case), Bench(case)
    plain.run(device_buffer, step)
    hinted.run(device_buffer, step, page_size=64, block_size=7)
    plain.assert_equal(hinted)


@pytest.mark.parametrize(("top_k", "hot_slots"), EDGES)
def test_sizes_at_the_edges(top_k: int, hot_slots: int) -> None:
    for kind in ("linear", "steps"):
        case = make_case(kind, seed=top_k, top_k=top_k, hot_slots=hot_slots, rows=2)
        bench = Bench(case, strided=top_k % 2 == 0)
        rng = np.random.default_rng(hot_slots)
        for _ in range(2):
            step = random_step(case, rng, spread=0.7, short=0.0)
            bench.run(device_buffer, step)
            bench.assert_contract(step, clean=True)


def test_largest_device_buffer() -> None:
    """Slots 0 .. 32767 fill an int16."""
    case = make_case(rows=1, spare_requests=0, top_k=2, hot_slots=32768, max_tokens=32780)
    bench = Bench(case)
    bench.set_lru(np.roll(np.arange(32768), 1)[None])
    out = ask(bench, [7, 32769], n=32770)
    assert out == case.device_buffer_locs[0, [32767, 32768]].tolist()
    assert order(bench)[-2:] == [32766, 32767]


# ----------------------------------------------------------------------------------------------------
# Properties


@PROPERTY
@given(sequences(hostile=False))
def test_contract_holds_for_clean_steps(sequence: Sequence) -> None:
    bench = sequence.bench()
    for step in sequence.steps:
        bench.run(device_buffer, step)
        bench.assert_contract(step, clean=True)
        if sequence.case.kind != "blocks":
            bench.replay(device_buffer)


@PROPERTY
@given(sequences(hostile=True))
def test_contract_holds_for_hostile_steps(sequence: Sequence) -> None:
    bench = sequence.bench()
    for number, step in enumerate(sequence.steps):
        corrupt_before_step(sequence, number, [bench])
        bench.run(device_buffer, step)
        bench.assert_contract(step)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_state_heals(kind: str, seed: int) -> None:
    """Enough distinct tokens replace everything that corruption left behind."""
    case = make_case(kind, seed=seed, top_k=6, block_tokens=2, rows=2, hot_slots=20, spare_requests=0)
    bench = Bench(case)
    rng = np.random.default_rng(seed)
    bench.set_lru(rng.integers(-3, 30, (2, case.hot_slots)))
    for request in range(2):
        bench.set_tokens(request, dict(enumerate(rng.integers(-2, 6, case.hot_slots).tolist())))
    entries = case.top_k
    for start in range(0, case.hot_slots + entries, entries):
        blocks = (np.arange(entries) + start) % ((case.max_tokens - 8) // case.block_tokens)
        step = step_of(case, *[np.tile(blocks, case.steps).tolist()] * 2, lengths=[case.max_tokens] * 2 * case.steps)
        bench.run(device_buffer, step)
    for request in range(2):
        assert sorted(order(bench, request)) == list(range(case.hot_slots))
        names = held(bench, request)[: case.hot_slots]
        assert len(set(names)) == case.hot_slots
        assert min(names) >= 0


# ----------------------------------------------------------------------------------------------------
# Arguments


def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def meta(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device="meta")


UINT8, INT16, INT64 = torch.uint8, torch.int16, torch.int64


def call_of(kind: str) -> tuple[Any, dict[str, Any], Bench]:
    """The operator and its arguments: 2 rows, K 4 (blocks: 2 of 2), H 8, one extra slot, 3 requests, L 31, 16-byte
    items."""
    top_k = 2 if kind == "blocks" else 4
    case = make_case(kind, top_k=top_k, block_tokens=2, hot_slots=8, rows=2, spare_requests=1, scratch_rows=2)
    step = random_step(case, np.random.default_rng(0), lengths=np.array([20, 30]))
    step.num_real = 2
    bench = Bench(case)
    return bench.operator(device_buffer), bench.arguments(step), bench


ONE_STEP = [
    ("top_k_tokens", None, TypeError, "expected a torch.Tensor, got NoneType"),
    ("top_k_tokens", zeros(2, 4, dtype=INT64), TypeError, "expected int32, got int64"),
    ("top_k_tokens", zeros(2, 2, 4), ValueError, r"2 dimension\(s\), got shape \(2, 2, 4\)"),
    ("top_k_tokens", zeros(2, 8)[:, ::2], ValueError, r"a column stride of 1, got strides \(8, 2\)"),
    ("top_k_tokens", meta(2, 4), ValueError, r"device cpu \(that of device_buffer\), got device meta"),
    ("device_buffer_tokens", None, TypeError, "expected a torch.Tensor, got NoneType"),
    ("device_buffer_tokens", zeros(3, 9, dtype=INT64), TypeError, "expected int32, got int64"),
    ("device_buffer_tokens", zeros(27), ValueError, "2 dimension"),
    ("device_buffer_tokens", zeros(3, 8), ValueError, r"more than H = 8 columns, got shape \(3, 8\)"),
    ("device_buffer_tokens", zeros(3, 18)[:, ::2], ValueError, "a column stride of 1"),
    ("device_buffer_tokens", zeros(9).expand(3, 9), ValueError, "a row stride of at least 9"),
    ("device_buffer_tokens", meta(3, 9), ValueError, "got device meta"),
    ("host_cache_locs", None, TypeError, "expected a torch.Tensor, got NoneType"),
    ("host_cache_locs", zeros(3, 31), TypeError, "expected int64, got int32"),
    ("host_cache_locs", zeros(93, dtype=INT64), ValueError, "2 dimension"),
    ("host_cache_locs", zeros(2, 31, dtype=INT64), ValueError, r"shape \(3, 31\) = \[reqs, L\], got shape \(2, 31\)"),
    ("host_cache_locs", zeros(3, 62, dtype=INT64)[:, :31], ValueError, "a contiguous tensor"),
    ("host_cache_locs", meta(3, 31, dtype=INT64), ValueError, "got device meta"),
    ("device_buffer_locs", None, TypeError, "expected a torch.Tensor, got NoneType"),
    ("device_buffer_locs", zeros(3, 9, dtype=INT64), TypeError, "expected int32, got int64"),
    ("device_buffer_locs", zeros(3, 10), ValueError, r"shape \(3, 9\) = \[reqs, H \+ extra\], got shape \(3, 10\)"),
    ("device_buffer_locs", zeros(2, 9), ValueError, r"got shape \(2, 9\)"),
    ("device_buffer_locs", zeros(3, 18)[:, ::2], ValueError, "a column stride of 1"),
    ("device_buffer_locs", zeros(3, 10)[:, :9], ValueError, r"a row stride of 9 \(that of device_buffer_tokens\), got 10"),
    ("device_buffer_locs", meta(3, 9), ValueError, "got device meta"),
    ("top_k_device_locs", None, TypeError, "expected a torch.Tensor, got NoneType"),
    ("top_k_device_locs", zeros(2, 4, dtype=INT64), TypeError, "expected int32, got int64"),
    ("top_k_device_locs", zeros(2, 3), ValueError, r"at least 4 columns, got shape \(2, 3\)"),
    ("top_k_device_locs", zeros(3, 4), ValueError, r"shape \(2, 4\) = \[bs, >= columns\], got shape \(3, 4\)"),
    ("top_k_device_locs", zeros(8), ValueError, "2 dimension"),
    ("top_k_device_locs", zeros(2, 8)[:, ::2], ValueError, "a column stride of 1"),
    ("top_k_device_locs", zeros(4).expand(2, 4), ValueError, "a row stride of at least 4"),
    ("top_k_device_locs", meta(2, 4), ValueError, "got device meta"),
    ("req_pool_indices", None, TypeError, "expected a torch.Tensor, got NoneType"),
    ("req_pool_indices", zeros(2, dtype=INT16), TypeError, "expected int32 or int64, got int16"),
    ("req_pool_indices", zeros(3), ValueError, r"shape \(2,\) = \[bs\], got shape \(3,\)"),
    ("req_pool_indices", zeros(2, 1), ValueError, "1 dimension"),
    ("req_pool_indices", zeros(4)[::2], ValueError, "a contiguous tensor"),
    ("req_pool_indices", meta(2), ValueError, "got device meta"),
    ("seq_lens", None, TypeError, "expected a torch.Tensor, got NoneType"),
    ("seq_lens", zeros(2, dtype=torch.float32), TypeError, "expected int32 or int64, got float32"),
    ("seq_lens", zeros(1), ValueError, r"shape \(2,\) = \[bs\], got shape \(1,\)"),
    ("seq_lens", zeros(4)[::2], ValueError, "a contiguous tensor"),
    ("seq_lens", meta(2), ValueError, "got device meta"),
    ("lru_slots", None, TypeError, "expected a torch.Tensor, got NoneType"),
    ("lru_slots", zeros(3, 8), TypeError, "expected int16, got int32"),
    ("lru_slots", zeros(2, 8, dtype=INT16), ValueError, r"shape \(3, 8\) = \[reqs, H\], got shape \(2, 8\)"),
    ("lru_slots", zeros(3, 3, dtype=INT16), ValueError, "columns <= H <= 32768 with 4 columns, got H = 3"),
    ("lru_slots", zeros(3, 32769, dtype=INT16), ValueError, "got H = 32769"),
    ("lru_slots", zeros(3, 16, dtype=INT16)[:, ::2], ValueError, "a column stride of 1"),
    ("lru_slots", zeros(8, dtype=INT16).expand(3, 8), ValueError, "a row stride of at least 8"),
    ("lru_slots", meta(3, 8, dtype=INT16), ValueError, "got device meta"),
    ("num_real_reqs", 2, TypeError, "expected a torch.Tensor, got int"),
    ("num_real_reqs", zeros(1, dtype=INT64), TypeError, "expected int32, got int64"),
    ("num_real_reqs", zeros(2), ValueError, r"shape \(1,\) = \[1\], got shape \(2,\)"),
    ("num_real_reqs", torch.tensor(2, dtype=torch.int32), ValueError, "1 dimension"),
    ("num_real_reqs", meta(1), ValueError, "got device meta"),
    ("item_size_bytes", 0, ValueError, r"an int in \[1, 2147483647\], got 0"),
    ("item_size_bytes", 2**31, ValueError, "got 2147483648"),
    ("item_size_bytes", 16.0, TypeError, "expected an int, got float"),
    ("hot_buffer_size", 9, ValueError, r"8 \(columns of lru_slots\), got 9"),
    ("hot_buffer_size", None, TypeError, "expected an int, got NoneType"),
    ("page_size", 0, ValueError, "an int >= 1, got 0"),
    ("page_size", "1", TypeError, "expected an int, got str"),
    ("block_size", 0, ValueError, "an int >= 1, got 0"),
    ("block_size", True, TypeError, "expected an int, got bool"),
    ("skip_io", None, TypeError, "expected a bool, got NoneType"),
]  # fmt: skip

PLANS = [
    ("miss_src", None, ValueError, "all of miss_src, miss_dst, miss_count, or none, got None"),
    ("miss_dst", None, ValueError, "all of miss_src, miss_dst, miss_count, or none, got None"),
    ("miss_count", None, ValueError, "or none, got None"),
    ("miss_src", zeros(2, 8), TypeError, "expected int64, got int32"),
    ("miss_src", zeros(1, 8, dtype=INT64), ValueError, r"at least 2 rows of \d columns, got shape \(1, 8\)"),
    ("miss_src", zeros(2, 3, dtype=INT64), ValueError, r"at least 2 rows of \d columns, got shape \(2, 3\)"),
    ("miss_src", zeros(16, dtype=INT64), ValueError, "2 dimension"),
    ("miss_src", zeros(2, 16, dtype=INT64)[:, ::2], ValueError, "a column stride of 1"),
    ("miss_src", zeros(8, dtype=INT64).expand(2, 8), ValueError, "a row stride of at least 8"),
    ("miss_src", meta(2, 8, dtype=INT64), ValueError, "got device meta"),
    ("miss_dst", zeros(2, 8, dtype=INT64), TypeError, "expected int32, got int64"),
    ("miss_dst", zeros(2, 3), ValueError, r"at least 2 rows of \d columns, got shape \(2, 3\)"),
    ("miss_dst", zeros(2, 99), ValueError, r"a row stride of \d \(that of miss_src\), got 99"),
    ("miss_dst", meta(2, 8), ValueError, "got device meta"),
    ("miss_count", zeros(2, dtype=INT64), TypeError, "expected int32, got int64"),
    ("miss_count", zeros(1), ValueError, "at least 2 elements, got 1"),
    ("miss_count", zeros(2, 1), ValueError, "1 dimension"),
    ("miss_count", zeros(4)[::2], ValueError, "a contiguous tensor"),
    ("miss_count", meta(2), ValueError, "got device meta"),
]

POOLS = [
    ("host_cache", None, TypeError, "expected a torch.Tensor, got NoneType"),
    ("host_cache", torch.tensor(1.0), ValueError, r"got shape \(\)"),
    ("host_cache", meta(64, 16, dtype=UINT8), ValueError, r"device cpu \(that of device_buffer\), got device meta"),
    ("device_buffer", None, TypeError, "expected a torch.Tensor, got NoneType"),
    ("device_buffer", torch.tensor(1.0), ValueError, r"a tensor of at least 1 dimension, got shape \(\)"),
    ("device_buffer", zeros(64, 32, dtype=UINT8)[:, :16], ValueError, "a contiguous tensor"),
]

PAGED = [
    ("item_size_bytes", 576, ValueError, "584, DeepSeek-V4's, got 576"),
    ("host_cache", zeros(PAGE_BYTES + 1, dtype=UINT8), ValueError, "whole pages of 37440 bytes, got 37441 bytes"),
    ("host_cache", zeros(PAGE_BYTES + 4, dtype=UINT8)[4:], ValueError, "aligned to 8 bytes, got an address 4 bytes"),
    ("device_buffer", zeros(64, 584, dtype=UINT8), ValueError, "whole pages of 37440 bytes, got 37376 bytes"),
    ("device_buffer", zeros(PAGE_BYTES + 1, dtype=UINT8)[1:], ValueError, "aligned to 8 bytes"),
]

BLOCKS = [
    ("top_k_blocks", None, TypeError, "expected a torch.Tensor, got NoneType"),
    ("top_k_blocks", zeros(2, 2, dtype=INT64), TypeError, "expected int32, got int64"),
    ("top_k_blocks", zeros(2, 5), ValueError, "lru_slots: .*with 10 columns, got H = 8"),
    ("sparse_block_size", 0, ValueError, "got 0"),
    ("sparse_block_size", None, TypeError, "expected an int, got NoneType"),
    ("sparse_block_size", 2.0, TypeError, "expected an int, got float"),
    ("sparse_block_size", 5, ValueError, "lru_slots: .*with 10 columns, got H = 8"),
    ("top_k_device_locs", zeros(2, 3), ValueError, "at least 4 columns"),
    ("host_cache_k", None, TypeError, "expected a torch.Tensor, got NoneType"),
    ("host_cache_k", zeros(64, 32, dtype=UINT8), ValueError, "rows of item_size_bytes = 16 bytes, got 32 bytes"),
    ("host_cache_k", zeros(1024, dtype=UINT8), ValueError, "rows of item_size_bytes = 16 bytes, got 1 bytes"),
    ("host_cache_v", zeros(128, 8, dtype=UINT8), ValueError, "rows of item_size_bytes = 16 bytes, got 8 bytes"),
    ("host_cache_v", zeros(77, 16, dtype=UINT8), ValueError, r"\d+ rows \(those of host_cache_k\), got 77 rows"),
    ("host_cache_v", zeros(64, 32, dtype=UINT8)[:, :16], ValueError, "a contiguous tensor"),
    ("host_cache_v", meta(128, 16, dtype=UINT8), ValueError, r"\(that of device_buffer_k\), got device meta"),
    ("device_buffer_k", zeros(64, 32, dtype=UINT8)[:, :16], ValueError, "a contiguous tensor"),
    ("device_buffer_v", None, TypeError, "expected a torch.Tensor, got NoneType"),
    ("device_buffer_v", zeros(77, 16, dtype=UINT8), ValueError, r"\d+ rows \(those of device_buffer_k\), got 77 rows"),
    ("device_buffer_v", meta(64, 16, dtype=UINT8), ValueError, r"\(that of device_buffer_k\), got device meta"),
]

# What differs for several steps. The state's tensors are named with a dot.
STEPS = [
    ("top_k_tokens", zeros(2, 4), ValueError, r"3 dimension\(s\), got shape \(2, 4\)"),
    ("top_k_tokens", zeros(2, 1, 4), ValueError, r"2 to 4 steps, got shape \(2, 1, 4\)"),
    ("top_k_tokens", zeros(2, 5, 4), ValueError, "2 to 4 steps"),
    ("top_k_tokens", zeros(2, 2, 8)[:, :, ::2], ValueError, "a column stride of 1"),
    ("top_k_device_locs", zeros(2, 2, 5), ValueError, r"shape \(2, 2, 4\) = \[bs, steps, K\], got shape \(2, 2, 5\)"),
    ("top_k_device_locs", zeros(2, 8), ValueError, "3 dimension"),
    ("top_k_device_locs", zeros(2, 4, 2).transpose(1, 2), ValueError, "a column stride of 1, and steps and rows apart"),
    ("top_k_device_locs", zeros(2, 4)[:, None].expand(2, 2, 4), ValueError, "steps and rows apart"),
    ("top_k_device_locs", zeros(2, 4)[None].expand(2, 2, 4), ValueError, "steps and rows apart"),
    ("seq_lens", zeros(2), ValueError, r"shape \(4,\) = \[bs \* steps\], got shape \(2,\)"),
    ("seq_lens", zeros(2, 2), ValueError, "1 dimension"),
    ("miss_src", zeros(2, 7, dtype=INT64), ValueError, r"at least 2 rows of 8 columns, got shape \(2, 7\)"),
    ("host_cache", zeros(64, 0, dtype=UINT8), ValueError, r"rows of at least 1 byte, got shape \(64, 0\)"),
    ("host_cache", zeros(64, 32, dtype=UINT8)[:, :16], ValueError, "a contiguous tensor"),
    ("num_real_reqs", zeros(1, dtype=INT64), TypeError, "expected int32, got int64"),
    ("device_buffer_tokens", zeros(3, 8), ValueError, "more than H = 8 columns"),
    ("state", None, TypeError, "a HiSparseSpecState, got NoneType"),
    ("state", (1, 2, 3, 4), TypeError, "a HiSparseSpecState, got tuple"),
    ("state.cache_policy", None, TypeError, "expected a torch.Tensor, got NoneType"),
    ("state.cache_policy", zeros(4, 8, dtype=INT16), TypeError, "expected int32, got int16"),
    ("state.cache_policy", zeros(3, 8), ValueError, r"at least reqs \+ 1 = 4 rows, got shape \(3, 8\)"),
    ("state.cache_policy", zeros(4, 3), ValueError, "with 4 columns, got H = 3"),
    ("state.cache_policy", zeros(4, 16)[:, ::2], ValueError, "a column stride of 1"),
    ("state.cache_policy", meta(4, 8), ValueError, "got device meta"),
    ("state.scratch_locs", zeros(3, 2, dtype=INT64), TypeError, "expected int32, got int64"),
    ("state.scratch_locs", zeros(2, 2), ValueError, "at least 3 rows, got 2"),
    ("state.scratch_locs", zeros(6), ValueError, "2 dimension"),
    ("state.scratch_locs", zeros(3, 4)[:, ::2], ValueError, "a column stride of 1"),
    ("state.scratch_locs", meta(3, 2), ValueError, "got device meta"),
    ("state.scratch_state", zeros(4, 3, dtype=INT64), TypeError, "expected int32, got int64"),
    ("state.scratch_state", zeros(4, 2), ValueError, r"at least 1 row of 3 columns, got shape \(4, 2\)"),
    ("state.scratch_state", zeros(0, 3), ValueError, r"at least 1 row of 3 columns, got shape \(0, 3\)"),
    ("state.scratch_state", zeros(3), ValueError, "2 dimension"),
    ("state.scratch_state", meta(4, 3), ValueError, "got device meta"),
]

NUM_TOP_K = [
    ("num_top_k", 5, ValueError, r"4 \(columns of top_k_tokens\), got 5"),
    ("num_top_k", -1, ValueError, "an int >= 0, got -1"),
    ("num_top_k", 4.0, TypeError, "expected an int, got float"),
]

BAD_ARGUMENTS = [
    *(("linear", *bad) for bad in ONE_STEP + PLANS + POOLS + NUM_TOP_K),
    ("linear", "host_cache", zeros(64, 32, dtype=UINT8)[:, :16], ValueError, "a contiguous tensor"),
    *(("dsv4", *bad) for bad in PLANS + POOLS + NUM_TOP_K + PAGED),
    *(("dsv4", *bad) for bad in ONE_STEP if bad[0] != "item_size_bytes"),
    *(("blocks", *bad) for bad in BLOCKS),
    # The same checks of the same arguments; messages about pools name the pool of keys.
    *(
        ("blocks", *bad)
        for bad in ONE_STEP
        if bad[0] != "top_k_tokens" and not (bad[0] == "lru_slots" and "with 4" in bad[3])
    ),
    *(("steps", *bad) for bad in STEPS + PLANS + POOLS),
    *(
        ("steps", *bad)
        for bad in ONE_STEP
        if bad[0] in ("device_buffer_tokens", "host_cache_locs", "device_buffer_locs", "req_pool_indices")
    ),
]


@pytest.mark.parametrize(
    ("kind", "name", "value", "error", "message"),
    BAD_ARGUMENTS,
    ids=[f"{i}-{bad[0]}-{bad[1]}" for i, bad in enumerate(BAD_ARGUMENTS)],
)
def test_bad_arguments(kind: str, name: str, value: object, error: type[Exception], message: str) -> None:
    operator, call, bench = call_of(kind)
    before = state(bench)
    part, _, field = name.partition(".")
    bad = call | {part: call[part]._replace(**{field: value}) if field else value}
    where = message if ": " in message else rf"{name}: .*{message}"
    with pytest.raises(error, match=f"^{where}"):
        operator(**bad)
    assert_kept(bench, before)
    assert (bench.top_k_device_locs == POISON).all()
    assert (bench.miss_count == POISON).all()


@pytest.mark.parametrize("kind", KINDS)
def test_arguments_of_the_table_are_valid_but_for_one(kind: str) -> None:
    operator, call, bench = call_of(kind)
    operator(**call)
    assert (bench.top_k_device_locs != POISON).all()


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("miss_src", None, TypeError, "expected a torch.Tensor, got NoneType"),
        ("miss_src", zeros(3, 4), TypeError, "expected int64, got int32"),
        ("miss_src", zeros(12, dtype=INT64), ValueError, "2 dimension"),
        ("miss_src", zeros(3, 8, dtype=INT64)[:, ::2], ValueError, "a column stride of 1"),
        ("miss_src", meta(3, 4, dtype=INT64), ValueError, "got device meta"),
        ("miss_dst", zeros(3, 4, dtype=INT64), TypeError, "expected int32, got int64"),
        ("miss_dst", zeros(2, 4), ValueError, r"at least 3 rows of 4 columns, got shape \(2, 4\)"),
        ("miss_dst", zeros(5, 4), ValueError, r"shape \(3, 4\) = \[rows, capacity\] .* got shape \(5, 4\)"),
        ("miss_dst", zeros(3, 5)[:, :4], ValueError, r"a row stride of 4 \(that of miss_src\), got 5"),
        ("miss_count", zeros(3, dtype=INT64), TypeError, "expected int32, got int64"),
        ("miss_count", zeros(2), ValueError, "at least 3 elements, got 2"),
        ("num_real_reqs", zeros(2), ValueError, r"shape \(1,\)"),
        ("num_real_reqs", 2, TypeError, "expected a torch.Tensor, got int"),
        ("host_cache", zeros(9, 32, dtype=UINT8)[:, :16], ValueError, "a contiguous tensor"),
        ("host_cache", meta(9, 16, dtype=UINT8), ValueError, "got device meta"),
        ("device_buffer", None, TypeError, "expected a torch.Tensor, got NoneType"),
        ("item_size_bytes", 0, ValueError, "got 0"),
        ("num_blocks", 0, ValueError, "an int >= 1, got 0"),
        ("num_blocks", 1.5, TypeError, "expected an int, got float"),
        ("block_size", -1, ValueError, "an int >= 1, got -1"),
        ("is_dsv4_layout", None, TypeError, "expected a bool, got NoneType"),
        ("skip_io", "no", TypeError, "expected a bool, got str"),
    ],
)
def test_bad_arguments_of_planned_copies(name: str, value: object, error: type[Exception], message: str) -> None:
    call = planned_call()
    with pytest.raises(error, match=rf"^{name}: .*{message}"):
        device_buffer.copy_cache_planned_mla(**(call | {name: value}))
    assert (call["device_buffer"] == UNTOUCHED).all()


def test_bad_pages_of_planned_copies() -> None:
    with pytest.raises(ValueError, match=r"^item_size_bytes: expected 584, DeepSeek-V4's, got 16"):
        device_buffer.copy_cache_planned_mla(**planned_call(is_dsv4_layout=True))
    with pytest.raises(ValueError, match=r"^host_cache: expected whole pages of 37440 bytes, got 144 bytes"):
        device_buffer.copy_cache_planned_mla(**planned_call(is_dsv4_layout=True, item_size_bytes=584))


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("src_ptrs", None, TypeError, "expected a torch.Tensor, got NoneType"),
        ("src_ptrs", zeros(3, dtype=INT64), TypeError, "expected uint64, got int64"),
        ("src_ptrs", zeros(3, 1, dtype=torch.uint64), ValueError, "1 dimension"),
        ("src_ptrs", meta(3, dtype=torch.uint64), ValueError, "a CPU tensor, .* got meta"),
        ("src_ptrs", zeros(6, dtype=torch.uint64)[::2], ValueError, "a contiguous tensor"),
        ("dst_ptrs", zeros(3), TypeError, "expected uint64, got int32"),
        ("dst_ptrs", zeros(2, dtype=torch.uint64), ValueError, r"shape \(3,\) = \[layers\]"),
        ("src_indices", zeros(50), TypeError, "expected int64, got int32"),
        ("src_indices", zeros(100, dtype=INT64)[::2], ValueError, "a contiguous tensor"),
        ("dst_indices", zeros(49, dtype=INT64), ValueError, r"shape \(50,\) = \[N\]"),
        ("dst_indices", None, TypeError, "expected a torch.Tensor, got NoneType"),
        ("block_size", 0, ValueError, "an int >= 1, got 0"),
        ("block_size", 8.0, TypeError, "expected an int, got float"),
    ],
)
def test_bad_arguments_of_transfers(name: str, value: object, error: type[Exception], message: str) -> None:
    transfer = Transfer()
    with pytest.raises(error, match=rf"^{name}: .*{message}"):
        device_buffer.transfer_cache_dsv4_mla(**(transfer.arguments() | {name: value}))
    assert all((pool == UNTOUCHED).all() for pool in transfer.dst)


@pytest.mark.parametrize(
    ("mapping", "locations", "error", "message"),
    [
        (None, zeros(2), TypeError, "mapping: expected a torch.Tensor, got NoneType"),
        (zeros(3, dtype=INT16), zeros(2), TypeError, "mapping: expected int32 or int64, got int16"),
        (zeros(3, 1), zeros(2), ValueError, "mapping: .*1 dimension"),
        (zeros(6)[::2], zeros(2), ValueError, "mapping: expected a contiguous tensor"),
        (zeros(3), [1], TypeError, "locations: expected a torch.Tensor, got list"),
        (zeros(3), zeros(2, dtype=torch.float32), TypeError, "locations: expected int32 or int64, got float32"),
        (zeros(3), zeros(1, 2), ValueError, "locations: .*1 dimension"),
        (zeros(3), meta(2), ValueError, r"locations: expected device cpu \(that of mapping\), got device meta"),
    ],
)
def test_bad_arguments_of_translation(mapping: Any, locations: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}"):
        device_buffer.translate_padded_hisparse_locations(mapping, locations)
