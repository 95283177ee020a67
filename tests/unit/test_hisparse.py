"""The HiSparse operators on the CPU backend: the reference's results from every route, every byte, every error."""

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
    clustered_ids,
    corrupt_before_step,
    golden_cases,
    golden_expectation,
    host_bytes,
    make_case,
    random_ids,
    sequences,
    worked_case,
)
from hypothesis import HealthCheck, given, settings

from hotplan import hisparse, plans
from hotplan.hot_buffer import HotBuffer
from hotplan.reference import hisparse as reference

PROPERTY = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def run_both(sequence: Sequence, operator: str, strided: bool) -> None:
    ours, theirs = Bench(sequence.case, strided=strided), Bench(sequence.case, strided=strided)
    for step, ids in enumerate(sequence.ids):
        corrupt_before_step(sequence, step, [ours, theirs])
        ours.resolve(hisparse, ids, operator)
        theirs.resolve(reference, ids, operator)
        ours.assert_equal(theirs, f"step {step}")


# ------------------------------------------------------------------------------------------------- against the reference


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("case", list(golden_cases()), ids=lambda c: f"K{c.top_k}H{c.hot_slots}R{c.rows}")
def test_recorded_outputs(case: Case, strided: bool) -> None:
    bench = Bench(case, strided=strided)
    for step, record in enumerate(case.steps):
        bench.resolve(hisparse, np.array(record["ids"]))
        for name, expected in golden_expectation(case, step).items():
            got = bench.array(name)[: len(expected)]
            np.testing.assert_array_equal(got.astype(np.int64), expected, err_msg=f"step {step} {name}")


def test_worked_values() -> None:
    bench = Bench(worked_case())
    steps = [
        ([10, 3, 7, 12], [20, 21, 22, 23], [60, 61, 62, 63], [0, 4], [4, 5, 6, 7, 0, 1, 2, 3]),
        ([7, 50, 3, -1], [22, 8, 21, -1], [62, 24, 61, -1], [2, 5], [5, 6, 7, 0, 3, 4, 1, 2]),
        ([7, 50, 3, 100], [22, 8, 21, -1], [62, 24, 61, -1], [5, 5], [5, 6, 7, 0, 3, 4, 1, 2]),
        ([-1, -1, 100, -1], [-1] * 4, [-1] * 4, [5, 5], [5, 6, 7, 0, 3, 4, 1, 2]),
    ]
    for ids, hot, attention, stats, lru in steps:
        bench.resolve(hisparse, np.array([ids]))
        assert bench.hot_indices[0].tolist() == hot
        assert bench.attention_indices[0].tolist() == attention
        assert bench.stats.tolist() == stats
        assert bench.lru_slots[0].tolist() == lru


@PROPERTY
@given(sequences())
def test_sequences_of_steps(sequence: Sequence) -> None:
    run_both(sequence, "resolve_residency", strided=sequence.seed % 2 == 1)


@PROPERTY
@given(sequences(union=True))
def test_sequences_of_unions(sequence: Sequence) -> None:
    run_both(sequence, "resolve_residency", strided=sequence.seed % 2 == 1)


@PROPERTY
@given(sequences())
def test_swap_in(sequence: Sequence) -> None:
    run_both(sequence, "swap_in", strided=False)


@PROPERTY
@given(sequences(union=True))
def test_plans_of_unions(sequence: Sequence) -> None:
    ours, theirs = Bench(sequence.case), Bench(sequence.case)
    names = tuple(n for n in Bench.OUTPUTS if not n.startswith("swap_")) + Bench.STATE
    for step, ids in enumerate(sequence.ids):
        corrupt_before_step(sequence, step, [ours, theirs])
        plan, expected = ours.plan(hisparse, ids), theirs.plan(reference, ids)
        ours.assert_equal(theirs, f"step {step}", names)
        np.testing.assert_array_equal(plans.swap_rows(plan.plan), plans.swap_rows(expected.plan))
        assert torch.equal(plan.counts, expected.counts)
        for bench, module, packed in ((ours, hisparse, plan), (theirs, reference, expected)):
            module.gather_planned(bench.host_cache, bench.hot_cache, packed.plan, packed.counts)
        assert torch.equal(ours.hot_pool, theirs.hot_pool)


@pytest.mark.parametrize(("top_k", "hot_slots"), [(2048, 4096), (2048, 10240), (512, 32768), (2048, 2048), (1, 1)])
def test_served_sizes(top_k: int, hot_slots: int) -> None:
    case = make_case(
        seed=top_k, top_k=top_k, hot_slots=hot_slots, block_size=64, rows=2, host_rows=3 * hot_slots, mode="state"
    )
    ours, theirs = Bench(case), Bench(case)
    rng = np.random.default_rng(hot_slots)
    for _ in range(3):
        ids = random_ids(case, rng, spread=0.5, invalid=0.01)
        ours.resolve(hisparse, ids, "swap_in")
        theirs.resolve(reference, ids, "swap_in")
        ours.assert_equal(theirs)


def test_clustered_ids() -> None:
    """Ids that share their low bits: a table that keeps low bits would walk its whole length for each."""
    case = make_case(top_k=2048, hot_slots=4096, block_size=64, rows=1, host_rows=1)
    ours, theirs = Bench(case), Bench(case)
    ours.host_cache = theirs.host_cache = torch.empty((2049 * 4096, 16), dtype=torch.uint8)
    for start in (0, 1, 0):
        ids = clustered_ids(1, 2048) + start
        ours.resolve(hisparse, ids)
        theirs.resolve(reference, ids)
        ours.assert_equal(theirs)
    assert ours.stats.tolist() == [2048, 4096]


def test_stats_in_either_type_and_absent_outputs() -> None:
    case = make_case(seed=5)
    ids = random_ids(case, np.random.default_rng(5))
    bench, bare = Bench(case, stats_dtype=torch.uint64), Bench(case)
    bench.resolve(hisparse, ids)
    hisparse.resolve_residency(*bare.arguments(ids))
    assert bench.array("stats").tolist() == [0, bench.swap_counts[:2].sum()]
    bench.assert_equal(bare, names=("hot_indices", "lru_slots", "device_global_indices"))
    assert (bare.swap_counts == POISON).all()
    assert bench.swap_counts[2] == POISON


@pytest.mark.parametrize(("rows", "top_k"), [(0, 3), (2, 0), (0, 0)])
def test_empty_launches(rows: int, top_k: int) -> None:
    case = make_case(rows=2, top_k=4, hot_slots=8)
    bench = Bench(case)
    arguments = list(bench.arguments(np.zeros((2, 4))))
    arguments[3] = torch.zeros((rows, top_k), dtype=torch.int32)
    counts = torch.full((2,), POISON, dtype=torch.int32)
    arguments[4] = torch.zeros((rows, top_k), dtype=torch.int32)
    lists = {f"swap_{side}_physical_rows": torch.zeros_like(arguments[4]) for side in ("host", "device")}
    for operator in (hisparse.resolve_residency, hisparse.swap_in):
        operator(*arguments, **lists, swap_counts=counts)
    assert (counts == POISON).all()
    del arguments[4]
    plan = hisparse.plan_swap_in(*arguments)
    assert plan.plan.shape == (rows, top_k, 16)
    assert plan.counts.tolist() == [0] * rows
    if top_k == 0:
        for module in (hisparse, reference):
            old = hisparse.SwapPlan(plan.plan, torch.full((rows,), POISON, dtype=torch.int32), plan.hot_indices)
            assert module.plan_swap_in(*arguments, out=old).counts.tolist() == [0] * rows
    hisparse.gather_planned(bench.host_cache, bench.hot_cache, plan.plan, plan.counts)


# -------------------------------------------------------------------------------------------------------------- copies

ROW_BYTES = [16, 32, 48, 496, 512, 528, 576, 592, 656, 1008, 1152, 2064, 4096]


def copy_bench(row_bytes: int, gap: int, offset: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Host pool, hot cache and the memory behind the cache, whose base and page stride are as aligned as they say."""
    host = torch.from_numpy(host_bytes(50, row_bytes))
    page = 4 * row_bytes + gap
    memory = torch.full((offset + 6 * page,), 0xA5, dtype=torch.uint8)
    return host, memory[offset:].as_strided((6, 4, row_bytes), (page, row_bytes, 1)), memory


@pytest.mark.parametrize("row_bytes", ROW_BYTES)
@pytest.mark.parametrize(("gap", "offset"), [(0, 0), (16, 32), (4, 8), (1, 0), (0, 3)])
def test_gathers_copy_every_byte(row_bytes: int, gap: int, offset: int) -> None:
    rng = np.random.default_rng(row_bytes + gap)
    host_rows = torch.from_numpy(rng.integers(-3, 56, (3, 7)).astype(np.int32))
    hot_rows = torch.from_numpy(rng.permutation(27)[:21].reshape(3, 7).astype(np.int32)) - 1
    counts = torch.tensor([9, -1, 4, POISON], dtype=torch.int32)
    mask = torch.from_numpy(rng.integers(-1, 2, (3, 7)).astype(np.int32))
    states = torch.tensor([4, 0, -1], dtype=torch.int32)
    packed = plans.invalid_rows(plans.SWAP_ROW, 21).reshape(3, 7)
    packed["host_row"], packed["hot_row"] = host_rows, hot_rows
    plan = torch.from_numpy(packed.view(np.uint8).reshape(3, 7, 16))
    results = []
    for module in (hisparse, reference):
        host, hot, memory = copy_bench(row_bytes, gap, offset)
        module.gather_compact(host, hot, host_rows, hot_rows, counts)
        results.append(memory.clone())
        host, hot, memory = copy_bench(row_bytes, gap, offset)
        module.gather_planned(host, hot, plan, counts)
        results.append(memory.clone())
        host, hot, memory = copy_bench(row_bytes, gap, offset)
        attention = torch.full((3, 7), POISON, dtype=torch.int32)
        module.gather_plan(
            host, hot, host_rows, hot_rows, mask, request_state_indices=states, attention_indices=attention,
            attention_block_stride=9,
        )  # fmt: skip
        results.append(memory.clone())
        results.append(attention)
    for ours, theirs in zip(results[:4], results[4:], strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(results[0], results[1])
    assert (results[0] != 0xA5).sum() > 4 * row_bytes // 2


def test_gather_plan_into_a_flat_cache() -> None:
    host = torch.from_numpy(host_bytes(9, 1168)).view(torch.float16)
    index = torch.arange(6, dtype=torch.int32).view(2, 3)
    results = []
    for module in (hisparse, reference):
        hot = torch.zeros((6, 584), dtype=torch.float16)
        attention = torch.zeros((2, 3), dtype=torch.int32)
        module.gather_plan(
            host, hot, index + 2, 5 - index, (index != 1).int(), attention_indices=attention, attention_block_stride=7
        )
        results.append((hot.view(torch.uint8), attention))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.int64, torch.complex64])
def test_rows_of_any_type(dtype: torch.dtype) -> None:
    host = torch.from_numpy(host_bytes(20, 32)).view(dtype)
    hot = torch.zeros((3, 4, 32), dtype=torch.uint8).view(dtype)
    one = lambda x: torch.tensor([[x]], dtype=torch.int32)  # noqa: E731
    hisparse.gather_compact(host, hot, one(7), one(6), torch.ones(1, dtype=torch.int32))
    assert torch.equal(hot.view(torch.uint8)[1, 2], host.view(torch.uint8)[7])


def test_invalidate_written_slots() -> None:
    rng = np.random.default_rng(0)
    ours = torch.from_numpy(rng.integers(-2, 30, (5, 40)).astype(np.int32))
    theirs = ours.clone()
    states = torch.tensor([2, -1, 5, 4, 0, 2**31 - 1], dtype=torch.int32)
    requests = torch.from_numpy(rng.integers(-2, 8, 200).astype(np.int32))
    written = torch.from_numpy(rng.integers(-3, 30, 200))
    written[:3] = torch.tensor([2**32 + 5, -(2**31) - 1, 2**63 - 1])
    hisparse.invalidate_written_slots(ours, states, requests, written)
    reference.invalidate_written_slots(theirs, states, requests, written)
    assert torch.equal(ours, theirs)
    before = ours.clone()
    hisparse.invalidate_written_slots(ours, states, requests[:0], written[:0])
    assert torch.equal(ours, before)


# -------------------------------------------------------------------------------------------------------------- errors


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


UINT8, INT64 = torch.uint8, torch.int64
BAD_ARGUMENTS = [
    ("hot_cache", None, TypeError, "expected a tensor, got None"),
    ("hot_cache", zeros(6, 4, dtype=UINT8), ValueError, r"expected shape \[\*, \*, \*\], got \[6, 4\]"),
    ("hot_cache", zeros(6, 4, 24, dtype=UINT8), ValueError, "positive multiple of 16 bytes, got 24 bytes"),
    ("hot_cache", zeros(6, 4, 0, dtype=UINT8), ValueError, "positive multiple of 16 bytes, got 0 bytes"),
    ("hot_cache", zeros(6, 0, 16, dtype=UINT8), ValueError, "block size of at least 1, got 0"),
    (
        "hot_cache",
        zeros(6, 4, 32, dtype=UINT8)[:, :, :16],
        ValueError,
        r"contiguous rows inside .*strides \[128, 32, 1\]",
    ),
    ("hot_cache", zeros(4, 16, dtype=UINT8).expand(6, 4, 16), ValueError, "blocks that do not overlap"),
    ("hot_cache", zeros(6, 4, 32, dtype=UINT8)[:, :, ::2], ValueError, r"expected strides \[\*, \*, 1\]"),
    ("hot_cache", zeros(6, 4, 16, dtype=UINT8).to("meta"), ValueError, "expected device cpu or cuda, got meta"),
    ("host_cache", zeros(9, 32, dtype=UINT8), ValueError, r"rows of 16 bytes \(those of hot_cache\), got 32"),
    ("host_cache", zeros(9, 32, dtype=UINT8)[:, :16], ValueError, "expected a contiguous tensor, got strides"),
    ("host_cache", zeros(16, dtype=UINT8), ValueError, r"expected shape \[\*, \*\], got \[16\]"),
    ("hot_block_table", zeros(2, 2, dtype=INT64), TypeError, "expected dtype int32, got int64"),
    ("hot_block_table", zeros(2, 1), ValueError, "at least 2 columns for H=8 slots in blocks of 4, got 1"),
    ("hot_block_table", zeros(2, 4)[:, ::2], ValueError, "expected strides"),
    ("global_indices", zeros(2, 4, dtype=INT64), TypeError, "expected dtype int32, got int64"),
    ("global_indices", zeros(8), ValueError, r"expected shape \[R, K\], got \[8\]"),
    ("global_indices", zeros(2, 8)[:, ::2], ValueError, "expected strides"),
    ("hot_indices", zeros(2, 5), ValueError, r"expected shape \[R=2, K=4\], got \[2, 5\]"),
    ("hot_indices", zeros(2, 8)[:, :4], ValueError, "expected a contiguous tensor"),
    ("device_global_indices", zeros(2, 3), ValueError, "K <= H <= 32768 with K=4, got H=3"),
    ("device_global_indices", zeros(1, 32769), ValueError, "got H=32769"),
    ("device_global_indices", zeros(2, 16)[:, :8], ValueError, "expected a contiguous tensor"),
    ("lru_slots", zeros(2, 8), TypeError, "expected dtype int16, got int32"),
    ("lru_slots", zeros(3, 8, dtype=torch.int16), ValueError, r"shape \[S=\d+, H=8\], got \[3, 8\]"),
    ("request_state_indices", zeros(2, dtype=INT64), TypeError, "expected dtype int32, got int64"),
    ("request_state_indices", zeros(4)[::2], ValueError, "expected a contiguous tensor"),
    ("region_stride", 9, ValueError, "expected H=8 or None, got 9"),
    ("region_stride", 8.0, TypeError, "expected an int or None, got float"),
    ("max_union_rows", 0, ValueError, "expected None or at least 1, got 0"),
    ("max_union_rows", True, TypeError, "expected an int or None, got bool"),
    ("miss_mask", zeros(2, 4, dtype=torch.bool), TypeError, "expected dtype int32, got bool"),
    ("miss_mask", zeros(1, 4), ValueError, r"shape \[R=2, K=4\], got \[1, 4\]"),
    ("stats", zeros(2), TypeError, "expected dtype int64 or uint64, got int32"),
    ("stats", zeros(3, dtype=INT64), ValueError, r"expected shape \[2\], got \[3\]"),
    ("attention_indices", zeros(4).expand(2, 4), ValueError, "row stride of at least 4, got 0"),
    ("attention_indices", zeros(2, 3), ValueError, r"got \[2, 3\]"),
    ("attention_block_stride", 3, ValueError, r"at least 4 \(the block size of hot_cache\), got 3"),
    ("request_ids", None, ValueError, "a tensor, because source_block_table is given, got None"),
    ("request_ids", zeros(1), ValueError, "at least 2 elements, got 1"),
    ("source_block_table", None, ValueError, "a tensor, because request_ids is given, got None"),
    ("source_block_table", zeros(2, 8)[:, ::2], ValueError, "expected strides"),
    ("source_block_size", 0, ValueError, "at least 1, got 0"),
    ("source_block_size", "4", TypeError, "expected an int, got another type"),
    ("resolved_global_indices", zeros(2, 4, dtype=torch.int16), TypeError, "expected dtype int32, got int16"),
    ("valid_counts", zeros(3), ValueError, r"expected shape \[R=2\], got \[3\]"),
    ("valid_counts", zeros(1).expand(2), ValueError, "a stride of at least 1, got 0"),
    ("swap_host_physical_rows", None, ValueError, "or none of .*, got None"),
    ("swap_device_physical_rows", None, ValueError, "or none of .*, got None"),
    ("swap_counts", None, ValueError, "or none of .*, got None"),
    ("swap_counts", zeros(1), ValueError, "at least 2 elements, got 1"),
    ("swap_device_physical_rows", zeros(4, 2), ValueError, r"got \[4, 2\]"),
    ("resident_block_table", zeros(2, 8, dtype=torch.int16), TypeError, "expected dtype int32, got int16"),
    ("resident_block_size", 8, ValueError, r"expected 4 \(the block size of hot_cache\), got 8"),
    ("resident_null_block", -1, ValueError, "at least 0, got -1"),
]


@pytest.mark.parametrize(
    ("name", "value", "error", "message"), BAD_ARGUMENTS, ids=[f"{i}-{b[0]}" for i, b in enumerate(BAD_ARGUMENTS)]
)
def test_bad_arguments(name: str, value: object, error: type[Exception], message: str) -> None:
    call = valid_call()
    hisparse.resolve_residency(**call)
    before = call["lru_slots"].clone(), call["hot_indices"].clone()
    for operator in (hisparse.resolve_residency, hisparse.swap_in):
        with pytest.raises(error, match=rf"^{name}: .*{message}"):
            operator(**(call | {name: value}))
    assert torch.equal(call["lru_slots"], before[0])
    assert torch.equal(call["hot_indices"], before[1])


def test_arguments_that_need_others() -> None:
    call = valid_call()
    call["request_ids"] = call["source_block_table"] = None
    with pytest.raises(ValueError, match="^source_block_table: .*because resident_block_table is given, got None"):
        hisparse.resolve_residency(**call)
    call["resident_block_table"] = None
    call["hot_block_table"] = zeros(1, 2)
    with pytest.raises(ValueError, match="^hot_block_table: expected at least 2 rows, got 1"):
        hisparse.resolve_residency(**call)


def test_unions_that_break_the_rule() -> None:
    case = make_case(
        seed=1, top_k=4, hot_slots=6, rows=4, host_rows=400, mode="tables", steps_per_request=2, union=True
    )
    bench = Bench(case)
    ids = random_ids(case, np.random.default_rng(1))
    ids[1] = ids[0]
    for operator in ("resolve_residency", "swap_in", "plan"):
        call = (lambda i: bench.plan(hisparse, i)) if operator == "plan" else (
            lambda i, name=operator: bench.resolve(hisparse, i, name)
        )  # fmt: skip
        with pytest.raises(
            ValueError, match="^global_indices: expected at most H=6 .* got 8 in rows 2 to 3 of request 1"
        ):
            call(ids)
        assert (bench.hot_indices == POISON).all()
        bench.tables["request_ids"].fill_(1)
        with pytest.raises(ValueError, match="^request_ids: .*max_union_rows=2 .* got 4 rows of request 1 from row 0"):
            call(ids)
        bench.tables["request_ids"].copy_(torch.tensor([0, 0, 1, 1]))
    assert bench.stats.tolist() == [0, 0]


def test_checked_mode_looks_at_unions(monkeypatch: pytest.MonkeyPatch) -> None:
    """What HOTPLAN_CHECK=1 does before a launch on a GPU, with CPU tensors in the place of the GPU's."""
    monkeypatch.setattr(
        hisparse.residency, "_checks_unions", lambda hot_cache, max_union_rows: max_union_rows is not None
    )
    case = make_case(
        seed=1, top_k=4, hot_slots=6, rows=4, host_rows=400, mode="tables", steps_per_request=2, union=True
    )
    ids = random_ids(case, np.random.default_rng(1))
    bench = Bench(case)
    with pytest.raises(ValueError, match="^global_indices: .* got 8 in rows 0 to 1 of request 0"):
        bench.plan(hisparse, ids)
    ids[1], ids[3] = ids[0], ids[2]
    other = Bench(case)
    for operator in ("resolve_residency", "swap_in"):
        bench.resolve(hisparse, ids, operator)
        other.resolve(reference, ids, operator)
        bench.assert_equal(other)


def test_bad_arguments_of_the_other_operators() -> None:
    host, hot, _ = copy_bench(32, 0, 0)
    plan, counts = zeros(2, 3, 16, dtype=UINT8), zeros(2)
    index = (zeros(2, 3), zeros(2, 3))
    for call, error, message in (
        (lambda: hisparse.gather_compact(host, hot, index[0], zeros(3, 2), counts), ValueError, "miss_hot_indices: .*R=2"),
        (lambda: hisparse.gather_compact(host, hot, *index, zeros(1)), ValueError, "miss_counts: expected at least 2"),
        (lambda: hisparse.gather_compact(host, hot.view(-1, 32), *index, counts), ValueError, r"hot_cache: .*\[24, 32\]"),
        (lambda: hisparse.gather_planned(host, hot, zeros(2, 3, 4), counts), TypeError, "plan: .*uint8, got int32"),
        (lambda: hisparse.gather_planned(host, hot, plan[:, :, :8], counts), ValueError, r"plan: .*, 16\], got"),
        (lambda: hisparse.gather_planned(host, hot, plan, zeros(1)), ValueError, "counts: expected at least 2 elements"),
        (lambda: hisparse.gather_plan(host, hot[0, 0], *index, zeros(2, 3)), ValueError, r"hot_cache: .*got \[32\]"),
        (lambda: hisparse.gather_plan(host, zeros(9, 64, dtype=UINT8)[:, :32], *index, zeros(2, 3)), ValueError, "hot_cache: expected contiguous rows"),
        (lambda: hisparse.gather_plan(host, hot, zeros(2, 6)[:, ::2], index[1], zeros(2, 3)), ValueError, "global_indices: .*contiguous"),
        (lambda: hisparse.gather_plan(host, hot, *index, zeros(2, 3, dtype=UINT8)), TypeError, "miss_mask: .*int32, got uint8"),
        (lambda: hisparse.gather_plan(host, hot, *index, zeros(2, 3), request_state_indices=zeros(1)), ValueError, "request_state_indices: expected at least 2"),
        (lambda: hisparse.gather_plan(host, hot, *index, zeros(2, 3), attention_indices=zeros(2, 3)), ValueError, "attention_block_stride: expected at least 4 .*, got 0"),
        (lambda: hisparse.invalidate_written_slots(zeros(2, 8), zeros(2), zeros(3), zeros(3)), TypeError, "written_slots: .*int64, got int32"),
        (lambda: hisparse.invalidate_written_slots(zeros(2, 8), zeros(2), zeros(3), zeros(4, dtype=INT64)), ValueError, "req_id_per_token: .*T=4"),
        (lambda: hisparse.invalidate_written_slots(zeros(2, 16)[:, :8], zeros(2), zeros(3), zeros(3, dtype=INT64)), ValueError, "device_global_indices: .*contiguous"),
    ):  # fmt: skip
        with pytest.raises(error, match=f"^{message}"):
            call()


def test_bad_outputs_of_a_plan() -> None:
    bench = Bench(worked_case())
    arguments = list(bench.arguments(np.array([[1, 2, 3, 4]])))
    del arguments[4]
    good = hisparse.plan_swap_in(*arguments)
    again = hisparse.plan_swap_in(*arguments, out=good)
    assert all(a is b for a, b in zip(again, good, strict=True))
    assert again.counts.tolist() == [0]
    for bad, error, message in (
        (good._replace(plan=zeros(1, 4, 8, dtype=UINT8)), ValueError, r"out.plan: .*, 16\], got \[1, 4, 8\]"),
        (good._replace(plan=zeros(65, dtype=UINT8)[1:].view(1, 4, 16)), ValueError, "out.plan: .*aligned to 16"),
        (good._replace(counts=zeros(2)), ValueError, r"out.counts: expected shape \[R=1\], got \[2\]"),
        (good._replace(hot_indices=zeros(1, 3)), ValueError, "out.hot_indices: "),
        (good._replace(counts=zeros(1, dtype=INT64)), TypeError, "out.counts: .*int32, got int64"),
    ):
        with pytest.raises(error, match=f"^{message}"):
            hisparse.plan_swap_in(*arguments, out=bad)
    for bad, error in (
        (7, TypeError),
        (zeros(1), TypeError),
        (good[:2], ValueError),
        ((*good, None), ValueError),
        ((None,) * 3, TypeError),
    ):
        with pytest.raises(error, match=r"^out: expected \(plan, counts, hot_indices\), got "):
            hisparse.plan_swap_in(*arguments, out=bad)


def test_first_seven_arguments_are_positional() -> None:
    case = make_case(seed=4)
    ids = random_ids(case, np.random.default_rng(4))
    bench = Bench(case)
    hisparse.resolve_residency(*bench.arguments(ids))
    with pytest.raises(TypeError):
        hisparse.resolve_residency(*bench.arguments(ids), None)


# ---------------------------------------------------------------------------------------------------------- HotBuffer


def hot_buffer(**changes: Any) -> tuple[torch.Tensor, HotBuffer]:
    pool = torch.stack([torch.from_numpy(host_bytes(300, 64, generation=i)) for i in range(3)])
    options = {"max_requests": 4, "top_k": 8, "hot_slots": 20, "block_size": 6, "device": "cpu"}
    return pool, HotBuffer(pool, **(options | changes))


def assert_holds(pool: torch.Tensor, hot: HotBuffer, ids: torch.Tensor, rows: torch.Tensor) -> None:
    for layer in range(hot.layers):
        flat = hot.caches[layer].view(-1, pool.shape[-1])
        assert torch.equal(flat[rows.long()], pool[layer][ids.long()])


def test_hot_buffer_serves_requests_that_come_and_go() -> None:
    pool, hot = hot_buffer(attention_block_stride=10)
    generator = torch.Generator().manual_seed(0)
    requests: list[int] = []
    for step in range(60):
        if hot.admitted < 4 and step % 3 != 2:
            requests.append(hot.admit())
        elif requests and step % 7 == 0:
            hot.release(requests.pop(0))
        order = torch.randperm(len(requests), generator=generator).tolist()
        ids = torch.stack([torch.randperm(60, generator=generator)[:8] for _ in order]).int()
        rows = hot.resolve(ids, [requests[i] for i in order], layer=1 if step % 2 else None)
        for layer in range(3):
            if not (step % 2 and layer == 1):
                hot.gather(layer)
        assert_holds(pool, hot, ids, rows)
        assert torch.equal(hot.attention_indices[: len(order)], rows // 6 * 10 + rows % 6)
        own = torch.tensor([[requests[i]] for i in order]) * hot.block_table.shape[1]
        assert ((rows // 6 >= own) & (rows // 6 < own + hot.block_table.shape[1])).all()
        # A third of the rows is rewritten: what was hot must come again.
        changed = torch.randperm(60, generator=generator)[:20]
        pool[:, changed] += 1
        for request in requests:
            hot.invalidate([request] * 20, changed)
    stats = hot.stats()
    assert stats.hits > 100
    assert stats.misses > 100
    assert stats.hit_rate == stats.hits / (stats.hits + stats.misses)
    hot.reset_stats()
    assert hot.stats() == (0, 0)
    assert hot.stats().hit_rate == 0.0


def test_hot_buffer_rows_are_requests_by_default() -> None:
    pool, hot = hot_buffer()
    ids = torch.arange(32, dtype=torch.int32).view(4, 8)
    assert (hot.resolve(ids) == -1).all(), "nobody is admitted"
    assert [hot.admit() for _ in range(3)] == [0, 1, 2]
    rows = hot.resolve(ids)
    for layer in range(3):
        assert hot.gather(layer) is not None
    assert_holds(pool, hot, ids[:3], rows[:3])
    assert (rows[3] == -1).all()
    again = hot.resolve(ids, torch.tensor([2, -1, 7, 0], dtype=torch.int32))
    assert (again[1:3] == -1).all()
    assert hot.swap_counts.tolist() == [8, 0, 0, 8]
    assert again.data_ptr() == rows.data_ptr() == hot.hot_indices.data_ptr()


def test_hot_buffer_with_pages_and_verify_rows() -> None:
    pool, hot = hot_buffer(max_rows=8, hot_slots=24)
    source = torch.arange(1, 13, dtype=torch.int32).view(4, 3)
    requests = [hot.admit() for _ in range(4)]
    ids = torch.stack([torch.randperm(24)[:8] for _ in range(8)]).int()
    rows = hot.resolve(
        ids, [r for r in requests for _ in range(2)], source_block_table=source, source_block_size=8, max_union_rows=2
    )
    for layer in range(3):
        hot.gather(layer)
    owner = torch.arange(4).repeat_interleave(2)[:, None]
    assert_holds(pool, hot, source[owner, ids // 8] * 8 + ids % 8, rows)
    assert hot.stats().misses == sum(len(set(ids[2 * r : 2 * r + 2].flatten().tolist())) for r in range(4))
    plain = hot.resolve(ids[:4], source_block_table=source, source_block_size=8)
    assert (plain >= 0).all()


def test_hot_buffer_errors() -> None:
    pool, hot = hot_buffer()
    ids = torch.zeros((2, 8), dtype=torch.int32)
    for call, error, message in (
        (lambda: hot.resolve(torch.zeros((5, 8), dtype=torch.int32)), ValueError, "ids: expected at most max_rows=4"),
        (lambda: hot.resolve(ids, [0]), ValueError, r"requests: expected shape \(2,\), got \(1,\)"),
        (lambda: hot.resolve(ids, [0, 4]), ValueError, r"requests: expected numbers in \[-1, 3\], got 4"),
        (lambda: hot.resolve(ids, [0, 1], max_union_rows=2), ValueError, "source_block_table: .*max_union_rows is given"),
        (lambda: hot.resolve(ids.long()), TypeError, "ids: expected dtype torch.int32, got torch.int64"),
        (lambda: hot.resolve([0] * 8), TypeError, "ids: expected a tensor, got list"),
        (lambda: hot.resolve(ids[:, :7]), ValueError, r"ids: expected shape \(\*, 8\), got \(2, 7\)"),
        (lambda: hot.resolve(ids.expand(8, 2, 8)[0].t().contiguous().t()), ValueError, "ids: expected a column stride of 1"),
        (lambda: hot.resolve(ids.to("meta")), ValueError, "ids: expected a dense tensor on cpu, got .* on meta"),
        (lambda: hot.resolve(ids, ids[:, 0].to(torch.uint16)), TypeError, "requests: expected dtype torch.int32"),
        (lambda: hot.resolve(ids, ids[:, 0]), ValueError, "requests: expected a contiguous tensor"),
        (lambda: hot.resolve(ids, 3), TypeError, "requests: expected a tensor or a sequence of ints, got 3"),
        (lambda: hot.resolve(ids, [0, "x"]), TypeError, "requests: expected a tensor or a sequence of ints, got "),
        (lambda: hot.resolve(ids, layer=3), ValueError, r"layer: expected a number in \[0, 2\], got 3"),
        (lambda: hot.gather(3), ValueError, r"layer: expected a number in \[0, 2\], got 3"),
        (lambda: hot.gather("0"), TypeError, "layer: expected an int, got str"),
        (lambda: hot.gather(torch.tensor([1])), TypeError, "layer: expected an int, got Tensor"),
        (lambda: hot.invalidate([0, 1], [5]), ValueError, "host_rows: expected one for each of 2 requests, got 1"),
        (lambda: hot.invalidate([0], [2**70]), TypeError, "host_rows: expected a tensor or a sequence of ints"),
        (lambda: hot.invalidate(None, [5]), TypeError, "requests: expected a tensor or a sequence of ints, got None"),
        (lambda: hot.release(0), ValueError, "request: expected an admitted request, got 0"),
        (lambda: hot.release([0]), TypeError, "request: expected an int, got list"),
        (lambda: hot.release(4), ValueError, r"request: expected a number in \[0, 3\], got 4"),
        (lambda: hot_buffer(top_k=True), TypeError, "top_k: expected an int, got bool"),
        (lambda: hot_buffer(max_rows=0), ValueError, "max_rows: expected at least 1, got 0"),
        (lambda: hot_buffer(attention_block_stride=1), ValueError, "attention_block_stride: expected at least "),
        (lambda: hot_buffer(device="nowhere"), ValueError, "device: expected a CUDA device or cpu, got 'nowhere'"),
        (lambda: hot_buffer(device="meta"), ValueError, "device: expected a CUDA device or cpu, got 'meta'"),
        (lambda: HotBuffer(7, max_requests=1, top_k=1, hot_slots=1), TypeError, "host_pool: expected a tensor or one per layer"),
        (lambda: HotBuffer([7], max_requests=1, top_k=1, hot_slots=1), TypeError, "host_pool: expected tensors, got int"),
        (lambda: HotBuffer([pool[0], pool[1].float()], max_requests=1, top_k=1, hot_slots=1), TypeError, "host_pool: .*one dtype"),
        (lambda: HotBuffer(pool[..., :-1], max_requests=1, top_k=1, hot_slots=1), ValueError, "host_pool: expected contiguous"),
        (lambda: HotBuffer(pool[..., :5].contiguous(), max_requests=1, top_k=1, hot_slots=1), ValueError, "host_pool: .*16 bytes"),
        (lambda: HotBuffer(pool.to("meta"), max_requests=1, top_k=1, hot_slots=1), ValueError, "host_pool: expected dense layers on the CPU"),
        (lambda: hot_buffer(hot_slots=7), ValueError, r"hot_slots: expected a number in \[8, 32768\], got 7"),
        (lambda: hot_buffer(max_requests=0), ValueError, "max_requests: expected at least 1, got 0"),
        (lambda: HotBuffer([pool[0], pool[1][:3]], max_requests=1, top_k=1, hot_slots=1), ValueError, "host_pool: "),
        (lambda: hot_buffer(max_rows=9)[1].resolve(torch.zeros((9, 8), dtype=torch.int32)), ValueError, "requests: .*9 rows"),
    ):  # fmt: skip
        with pytest.raises(error, match=f"^{message}"):
            call()
    for _ in range(4):
        hot.admit()
    hot.resolve(ids, [np.int32(0), np.int64(3)], layer=np.int64(0))  # what counts as an int
    with pytest.raises(RuntimeError, match="all 4 requests"):
        hot.admit()
