"""The device-buffer operators on the CPU backend: the reference's results, every byte, every error."""

from __future__ import annotations

import inspect
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from device_buffer_cases import (
    EDGES,
    ITEM_BYTES,
    KINDS,
    PAGE_BYTES,
    POISON,
    Bench,
    Sequence,
    Step,
    Transfer,
    assert_recorded,
    corrupt_before_step,
    golden_cases,
    make_case,
    pool_bytes,
    random_step,
    sequences,
    step_of,
    worked_case,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sanitized import ROOT, load_sanitized
from threads import run_in_threads

from hotplan import hisparse
from hotplan.hisparse import device_buffer
from hotplan.reference import device_buffer as reference

PROPERTY = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
FUNCTIONS = [name for name in device_buffer.__all__ if name != "HiSparseSpecState"]


def run_both(case: Any, steps: list[Step], **options: Any) -> None:
    ours, theirs = Bench(case, **options), Bench(case, **options)
    for number, step in enumerate(steps):
        ours.run(hisparse, step)
        theirs.run(reference, step)
        ours.assert_equal(theirs, f"step {number}")


def run_sequence(sequence: Sequence, ours: Any = hisparse, *, extremes: bool = False) -> None:
    benches = sequence.bench(), sequence.bench()
    for number, step in enumerate(sequence.steps):
        corrupt_before_step(sequence, number, list(benches))
        if extremes:
            to_extremes(step, np.random.default_rng((sequence.seed, number)))
        for bench, operators in zip(benches, (ours, reference), strict=True):
            if extremes:  # no server has prepared such a call
                bench.swap_in(operators, step)
            else:
                bench.run(operators, step)
        benches[0].assert_equal(benches[1], f"step {number}")
        if sequence.case.kind != "blocks":
            benches[0].replay(ours)


def to_extremes(step: Step, rng: np.random.Generator) -> None:
    """Some requests, lengths and entries to the ends of their types."""
    for array, share in ((step.req_pool_indices, 0.1), (step.seq_lens, 0.3), (step.top_k.reshape(-1), 0.1)):
        limits = np.iinfo(array.dtype)
        chosen = rng.random(array.shape) < share
        array[chosen] = rng.choice([limits.min, limits.min + 1, limits.max - 1, limits.max], chosen.sum())


# ------------------------------------------------------------------------------------------------- against the reference


@pytest.mark.parametrize("name", FUNCTIONS)
def test_names_order_and_defaults_are_those_of_the_reference(name: str) -> None:
    def parameters(module: Any) -> list[tuple]:
        signature = inspect.signature(getattr(module, name))
        return [(p.name, p.kind, p.default) for p in signature.parameters.values()]

    assert parameters(hisparse) == parameters(reference)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("case", list(golden_cases()), ids=lambda c: f"K{c.top_k}H{c.hot_slots}bs{c.rows}")
def test_recorded_outputs(case: Any, strided: bool) -> None:
    assert_recorded(Bench(case, strided=strided), hisparse)


@pytest.mark.parametrize("kind", ["linear", "dsv4"])
def test_worked_values(kind: str) -> None:
    case = worked_case(kind)
    bench = Bench(case)
    bench.device_buffer_tokens.copy_(torch.tensor([[1, 4, 2, 5, -1]]))
    for entries, length, out, lru, tokens, loads in (
        ([4, 2, 7], 8, [7, 3, 11], [0, 3, 1, 2], [1, 4, 2, 5, -1], []),
        ([6, -1, 6], 8, [9, -1, 9], [3, 1, 2, 0], [6, 4, 2, 5, -1], [(44, 9)]),
        ([8, 3, -5], 8, [-1, 5, -1], [1, 2, 0, 3], [6, 4, 2, 3, -1], [(47, 5)]),
        ([2, 1, 0], 3, [3, 7, 9], [1, 2, 0, 3], [6, 4, 2, 3, -1], []),
        ([1, -1, 0], 2, [7, -1, -1], [1, 2, 0, 3], [6, 4, 2, 3, -1], []),
    ):
        bench.swap_in(hisparse, step_of(case, entries, lengths=[length]))
        assert bench.out()[0, 0].tolist() == out
        assert bench.lru()[0].tolist() == lru
        assert bench.device_buffer_tokens[0].tolist() == tokens
        assert bench.loads(0) == loads


def test_worked_values_of_several_steps() -> None:
    """H 4 and a first LRU of zeros, that is 1, 2, 3, 0. Five misses: four slots, then a scratch row."""
    case = worked_case("steps")
    bench = Bench(case)
    bench.swap_in(hisparse, step_of(case, [0, 1, 2, 1, 3, 4], lengths=[5, 9]))
    assert bench.out()[0].tolist() == [[7, 3, 5], [3, 9, 20]]
    assert bench.loads(0) == [(50, 7), (49, 3), (48, 5), (47, 9), (46, 20)]
    assert bench.device_buffer_tokens[0].tolist() == [3, 0, 1, 2, -1]
    assert bench.lru()[0].tolist() == [1, 2, 3, 0]
    assert bench.scratch_state[0, 0] == 5
    # Of scratch_state one row is written, so its rows may lie upon each other.
    for operators in (hisparse, reference):
        upon_each_other = Bench(case)
        upon_each_other.scratch_state = torch.zeros(1, dtype=torch.int32).expand(2, 1)
        upon_each_other.swap_in(operators, step_of(case, [0, 1, 2, 1, 3, 4], lengths=[5, 9]))
        assert upon_each_other.scratch_state[0, 0] == 5
    bench.device_buffer_tokens[0, 4] = 8
    bench.swap_in(hisparse, step_of(case, [8, 0, 3, 8, 9, -1], lengths=[8, 9]))
    assert bench.out()[0].tolist() == [[-1, 7, 9], [11, -1, -1]]
    assert bench.lru()[0].tolist() == [2, 3, 1, 0]
    assert bench.scratch_state[0, 0] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_hold_the_contract(kind: str) -> None:
    @PROPERTY
    @given(sequences((kind,), hostile=False))
    def check(sequence: Sequence) -> None:
        bench = sequence.bench()
        for step in sequence.steps:
            bench.run(hisparse, step)
            bench.assert_contract(step, clean=True)

    check()


@pytest.mark.parametrize("kind", KINDS)
def test_hostile_sequences(kind: str) -> None:
    @PROPERTY
    @given(sequences((kind,)))
    def check(sequence: Sequence) -> None:
        run_sequence(sequence)

    check()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("columns", "hot_slots"), [*EDGES, (2048, 10240), (512, 32768)])
def test_sizes(kind: str, columns: int, hot_slots: int) -> None:
    if kind == "blocks":
        blocks = next(n for n in (8, 7, 5, 3, 1) if columns % n == 0)
        sizes = {"top_k": columns // blocks, "block_tokens": blocks}
    else:
        sizes = {"top_k": columns, "steps": 2 + hot_slots % 3}
    case = make_case(
        kind, seed=hot_slots, hot_slots=hot_slots, rows=2, item_bytes=8, spare_requests=0, max_tokens=2 * hot_slots + 5,
        **sizes,
    )  # fmt: skip
    assert (case.columns, case.hot_slots) == (columns, hot_slots)
    rng = np.random.default_rng(columns)
    run_both(case, [random_step(case, rng, spread=0.7, invalid=0.01, duplicates=0.01, short=0.2) for _ in range(2)])


def test_tokens_that_share_their_low_bits() -> None:
    """A table that keeps low bits would walk its whole length for each."""
    case = make_case("linear", top_k=512, hot_slots=1024, rows=1, spare_requests=0, max_tokens=512 * 512)
    steps = [
        step_of(case, list(range(first, first + 512 * 511, 511)), lengths=[case.max_tokens]) for first in (0, 1, 0)
    ]
    run_both(case, steps)


# -------------------------------------------------------------------------------------------------------------- bytes


@pytest.mark.parametrize("offset", [0, 1, 4, 8])
@pytest.mark.parametrize("item_bytes", [1, *ITEM_BYTES])
@pytest.mark.parametrize("kind", ["linear", "blocks", "steps"])
def test_every_byte_of_an_item(kind: str, item_bytes: int, offset: int) -> None:
    case = make_case(kind, seed=item_bytes, top_k=5, hot_slots=24, block_tokens=3, item_bytes=item_bytes)
    bench = Bench(case, pool_offset=offset)
    rng = np.random.default_rng(offset)
    for _ in range(2):
        step = random_step(case, rng)
        bench.run(hisparse, step)
        bench.assert_contract(step, clean=True)
        if kind != "blocks":
            bench.replay(hisparse)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.int64, torch.complex64])
def test_pools_of_any_dtype_and_shape(dtype: torch.dtype) -> None:
    case = make_case("linear", seed=1, item_bytes=48)
    plain, other = Bench(case), Bench(case)
    rng = np.random.default_rng(1)
    for _ in range(3):
        step = random_step(case, rng)
        plain.run(hisparse, step)
        other.prepare(step)
        pools = {
            "host_cache": other.host_pools[0].view(dtype).view(-1, 2, 1, 24 // dtype.itemsize),
            "device_buffer": other.device_pools[0].view(dtype).view(-1),
        }
        other.swap_in(hisparse, step, **pools)
        other.assert_equal(plain)


def test_an_item_that_does_not_fit_is_no_row() -> None:
    """Pools that end inside an item: the last whole one is the last row."""
    case = make_case("linear", seed=2, top_k=4, hot_slots=4, rows=1, item_bytes=10, spare_requests=0, max_tokens=12)
    step = step_of(case, [0, 1, 2, 3], lengths=[9])
    results = []
    for module in (hisparse, reference):
        bench = Bench(case)
        bench.host_cache_locs[0, :4] = torch.tensor([5, 6, 7, 0])
        bench.device_buffer_locs[0] = torch.tensor([2, 3, 0, 1, 4])
        pools = {
            "host_cache": bench.host_pools[0].view(-1)[:69].clone(),
            "device_buffer": bench.device_pools[0].view(-1)[:39].clone(),
        }
        bench.swap_in(module, step, **pools)
        results.append((bench.out()[0, 0].tolist(), bench.loads(0), pools["device_buffer"]))
    assert results[0][:2] == results[1][:2]
    assert results[0][0] == [2, -1, -1, -1]
    assert results[0][1] == [(5, 2), (0, -1)]
    assert torch.equal(results[0][2], results[1][2])


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_plan(kind: str) -> None:
    case = make_case(kind, seed=3)
    planned, plain = Bench(case), Bench(case)
    rng = np.random.default_rng(3)
    for _ in range(3):
        step = random_step(case, rng)
        planned.run(hisparse, step)
        plain.run(hisparse, step, plan=False)
        plain.assert_equal(planned, names=("top_k_device_locs", *plain.state_names))
        assert (plain.miss_count == POISON).all()


@pytest.mark.parametrize("kind", ["linear", "dsv4", "blocks"])
def test_skip_io(kind: str) -> None:
    case = make_case(kind, seed=4)
    full, probe = Bench(case), Bench(case)
    rng = np.random.default_rng(4)
    for _ in range(3):
        step = random_step(case, rng, short=0.0)
        full.run(hisparse, step)
        probe.prepare(step)
        before = probe.device_bytes()
        probe.swap_in(hisparse, step, skip_io=True)
        for now, then in zip(probe.device_bytes(), before, strict=True):
            np.testing.assert_array_equal(now, then)
        for name in (*full.output_names, *full.state_names):
            assert torch.equal(full.memory[name], probe.memory[name]), name


@pytest.mark.parametrize("kind", ["linear", "dsv4"])
def test_tables_that_the_call_overwrites_lead_nowhere(kind: str) -> None:
    """An LRU in the memory of the host's rows: what they say has changed once the LRU is written."""
    case = make_case(kind, seed=1, top_k=32, hot_slots=33, rows=1)
    bench = Bench(case)
    step = random_step(case, np.random.default_rng(1), lengths=np.array([case.max_tokens]))
    bench.prepare(step)
    arguments = bench.arguments(step)
    shape = arguments["lru_slots"].shape
    slots = arguments["host_cache_locs"].view(torch.int16).flatten()[: shape.numel()].view(shape)
    bench.operator(hisparse)(**arguments | {"lru_slots": slots})
    assert slots.sort(dim=1).values[int(step.req_pool_indices[0])].tolist() == list(range(case.hot_slots))


def test_hints_change_nothing() -> None:
    case = make_case("linear", seed=5)
    step = random_step(case, np.random.default_rng(5), short=0.0)
    plain, hinted = Bench(case), Bench(case)
    plain.run(hisparse, step)
    hinted.run(hisparse, step, page_size=64, block_size=2**40)
    hinted.assert_equal(plain)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "top_k"), [(0, 3), (2, 0), (0, 0)])
def test_empty_launches(kind: str, rows: int, top_k: int) -> None:
    case = make_case(kind, top_k=3, hot_slots=16)
    bench = Bench(case)
    arguments = bench.arguments(random_step(case, np.random.default_rng(6)))
    name = "top_k_blocks" if kind == "blocks" else "top_k_tokens"
    shape = (rows, 2, top_k) if kind == "steps" else (rows, top_k)
    arguments[name] = torch.zeros(shape, dtype=torch.int32)
    arguments["top_k_device_locs"] = arguments["top_k_device_locs"][:rows]
    if kind == "steps":
        arguments["top_k_device_locs"] = arguments["top_k_device_locs"][:, :, :top_k]
    arguments["req_pool_indices"] = arguments["req_pool_indices"][:rows]
    arguments["seq_lens"] = arguments["seq_lens"][: rows * case.steps]
    if "num_top_k" in arguments:
        arguments["num_top_k"] = top_k
    for plan in arguments.keys() & {"miss_src", "miss_dst"}:
        arguments[plan] = arguments[plan][:rows, : case.steps * top_k]
    before = {name: memory.clone() for name, memory in bench.memory.items()}
    for module in (hisparse, reference):
        bench.operator(module)(**arguments)
        for name, memory in bench.memory.items():
            assert torch.equal(memory, before[name]), name


def test_no_requests_at_all() -> None:
    case = make_case("linear", rows=2, spare_requests=0)
    bench = Bench(case)
    arguments = bench.arguments(random_step(case, np.random.default_rng(7)))
    for name in ("device_buffer_tokens", "device_buffer_locs", "host_cache_locs", "lru_slots"):
        arguments[name] = arguments[name][:0].clone()
    hisparse.load_cache_to_device_buffer_mla(**arguments)
    assert (bench.top_k_device_locs == -1).all()
    assert bench.miss_count.tolist() == [0, 0]


def test_state_of_sglang_itself() -> None:
    """Any tuple with SGLang's names serves, and its hash of tokens may be anything."""
    case = make_case("steps", seed=8)
    ours, theirs = Bench(case), Bench(case)
    step = random_step(case, np.random.default_rng(8))
    ours.run(hisparse, step)
    foreign = namedtuple("HiSparseSpecState", hisparse.HiSparseSpecState._fields)
    hash_banks = torch.full((case.requests, 2, 64), -1)
    state = (theirs.cache_policy, theirs.scratch_locs, theirs.scratch_state)
    theirs.run(hisparse, step, state=foreign(hash_banks, *state))
    theirs.assert_equal(ours)
    again = Bench(case)
    state = (again.cache_policy, again.scratch_locs, again.scratch_state)
    again.run(hisparse, step, state=hisparse.HiSparseSpecState(hash_banks, *state), num_real_reqs=None)
    again.assert_equal(ours)
    assert (hash_banks == -1).all()


# ------------------------------------------------------------------------------------------ planned copies, transfers


def planned_copy(module: Any, paged: bool, seed: int, offset: int = 0, **options: Any) -> torch.Tensor:
    """The target pool after a plan with every kind of entry."""
    rng = np.random.default_rng(seed)
    rows, capacity, item_bytes = 5, 6, 584 if paged else int(rng.choice(ITEM_BYTES))
    host = torch.from_numpy(pool_bytes(128, item_bytes, paged, 1))
    target = torch.full((offset + len(pool_bytes(64, item_bytes, paged, 2)),), 0xA5, dtype=torch.uint8)[offset:]
    src = torch.full((rows, capacity + 2), POISON, dtype=torch.int64)
    dst = torch.full((rows, capacity + 2), POISON, dtype=torch.int32)
    src[:, :capacity] = torch.from_numpy(rng.choice([*range(128), -1, 128, 2**40, -(2**63)], (rows, capacity)))
    dst[:, :capacity] = torch.from_numpy(rng.permutation(64)[: rows * capacity].reshape(rows, capacity))
    wild = torch.from_numpy(rng.random((rows, capacity)) < 0.2)
    dst[:, :capacity][wild] = torch.tensor(rng.choice([-1, 64, 2**31 - 1, -(2**31)], int(wild.sum()))).int()
    counts = torch.from_numpy(rng.choice([0, 1, capacity, capacity + 3, -2, 2**31 - 1], rows + 1).astype(np.int32))
    real = torch.tensor([int(rng.choice([0, 3, rows, rows + 2, -1]))], dtype=torch.int32)
    module.copy_cache_planned_mla(
        miss_src=src[:, :capacity], miss_dst=dst[:, :capacity], miss_count=counts, num_real_reqs=real,
        host_cache=host, device_buffer=target, item_size_bytes=item_bytes, is_dsv4_layout=paged, **options,
    )  # fmt: skip
    return target


@pytest.mark.parametrize("paged", [False, True])
def test_planned_copies(paged: bool) -> None:
    copied = 0
    for seed in range(60):
        offset = 0 if paged else seed % 5
        ours = planned_copy(hisparse, paged, seed, offset)
        assert torch.equal(ours, planned_copy(reference, paged, seed, offset))
        copied += int((ours != 0xA5).any())
        assert (planned_copy(hisparse, paged, seed, skip_io=True) == 0xA5).all()
    assert copied > 20


def test_planned_copies_without_padding() -> None:
    host, target = torch.arange(64, dtype=torch.uint8).view(16, 4), torch.zeros((8, 4), dtype=torch.uint8)
    src, dst = torch.tensor([[9], [3]]), torch.tensor([[1], [6]], dtype=torch.int32)
    arguments = {
        "miss_src": src, "miss_dst": dst, "miss_count": torch.ones(2, dtype=torch.int32), "num_real_reqs": None,
        "host_cache": host, "device_buffer": target, "item_size_bytes": 4, "num_blocks": 2**40, "block_size": 7,
    }  # fmt: skip
    hisparse.copy_cache_planned_mla(**arguments)
    assert torch.equal(target[[1, 6]], host[[9, 3]])
    assert target.count_nonzero() == 8
    target.zero_()
    hisparse.copy_cache_planned_mla(**(arguments | {"miss_src": src[:, :0], "miss_dst": dst[:, :0]}))
    assert target.count_nonzero() == 0


@pytest.mark.parametrize(("layers", "count"), [(1, 1), (3, 50), (2, 0), (0, 5)])
def test_transfers(layers: int, count: int) -> None:
    ours, theirs = Transfer(layers=layers, count=count), Transfer(layers=layers, count=count)
    ours.run(hisparse)
    ours.assert_copied()
    theirs.run(reference, block_size=64)
    for mine, its in zip(ours.dst, theirs.dst, strict=True):
        assert torch.equal(mine, its)


INTEGERS = (torch.int32, torch.int64)


@pytest.mark.parametrize("mapping_dtype", INTEGERS)
@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("stride", [1, 3])
@pytest.mark.parametrize("count", [0, 1, 127, 129])
def test_translation(mapping_dtype: torch.dtype, dtype: torch.dtype, stride: int, count: int) -> None:
    rng = np.random.default_rng(count)
    mapping = torch.from_numpy(rng.integers(-5, 1000, 100)).to(mapping_dtype)
    limits = torch.iinfo(dtype)
    special = [-1, -7, 99, 100, limits.max, limits.min]
    locations = torch.from_numpy(rng.choice([*range(100), *special], count * stride)).to(dtype)[::stride]
    before = locations.clone()
    result = hisparse.translate_padded_hisparse_locations(mapping, locations)
    expected = reference.translate_padded_hisparse_locations(mapping, locations)
    assert result.dtype == expected.dtype == torch.promote_types(mapping_dtype, dtype)
    assert result.is_contiguous()
    assert torch.equal(result, expected)
    assert torch.equal(locations, before)


def test_translation_by_an_empty_mapping() -> None:
    result = hisparse.translate_padded_hisparse_locations(torch.zeros(0).long(), torch.tensor([0, -3, 5]))
    assert result.tolist() == [-1, -3, -1]


# -------------------------------------------------------------------------------------------------------------- errors


def valid_call(kind: str) -> tuple[Bench, dict[str, Any]]:
    """Every argument of the kind's function, valid: two rows, three requests, H 8 and two slots behind it, L 20."""
    case = make_case(
        kind, top_k=4, hot_slots=8, rows=2, spare_requests=1, extra=2, max_tokens=20, steps=2, block_tokens=2
    )
    bench = Bench(case)
    step = random_step(case, np.random.default_rng(0), short=0.0)
    bench.prepare(step)
    arguments = bench.arguments(step) | {"num_real_reqs": bench.num_real_reqs}
    if kind != "steps":
        arguments |= {"page_size": 1, "block_size": 256}
    return bench, arguments


def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


UINT8, INT16, INT64 = torch.uint8, torch.int16, torch.int64
STRIDED = r"expected strides \[.*\], got \[.*, 2\]"
BAD_ARGUMENTS = [
    ("linear", {"device_buffer": None}, TypeError, "expected a tensor, got None"),
    ("linear", {"device_buffer": zeros(4, 16).to("meta")}, ValueError, "expected device cpu or cuda, got meta"),
    ("linear", {"device_buffer": torch.tensor(0)}, ValueError, "expected at least one dimension, got none"),
    ("linear", {"device_buffer": zeros(8, 32, dtype=UINT8)[:, :16]}, ValueError, r"contiguous tensor, got strides \[32, 1\]"),
    ("linear", {"host_cache": "pool"}, TypeError, "expected a tensor, got another type"),
    ("linear", {"host_cache": zeros(8, 16, dtype=UINT8).t()}, ValueError, r"contiguous tensor, got strides \[1, 16\]"),
    ("linear", {"item_size_bytes": 0}, ValueError, "items of 1 to 2147483647 bytes, got 0 bytes"),
    ("linear", {"item_size_bytes": 2**31}, ValueError, "got 2147483648 bytes"),
    ("linear", {"item_size_bytes": 16.0}, TypeError, "expected an int, got float"),
    ("linear", {"top_k_tokens": zeros(2, 4, dtype=INT64)}, TypeError, "expected dtype int32, got int64"),
    ("linear", {"top_k_tokens": zeros(8)}, ValueError, r"expected shape \[bs, K\], got \[8\]"),
    ("linear", {"top_k_tokens": zeros(2, 8)[:, ::2]}, ValueError, STRIDED),
    ("linear", {"num_top_k": 5}, ValueError, r"expected 4 \(the columns of top_k_tokens\), got 5"),
    ("linear", {"num_top_k": None}, TypeError, "expected an int, got None"),
    ("linear", {"device_buffer_tokens": zeros(3, 10, dtype=INT64)}, TypeError, "expected dtype int32, got int64"),
    ("linear", {"device_buffer_tokens": zeros(10).expand(3, 10)}, ValueError, "row stride of at least 10, got 0"),
    ("linear", {"device_buffer_tokens": zeros(3, 8), "device_buffer_locs": zeros(3, 8)}, ValueError, "more than H=8 columns, got 8"),
    ("linear", {"device_buffer_locs": zeros(3, 11)}, ValueError, r"\[reqs=3, H \+ page=10\], got \[3, 11\]"),
    ("linear", {"device_buffer_locs": zeros(3, 12)[:, :10]}, ValueError, r"\[row stride=10, 1\], got \[12, 1\]"),
    ("linear", {"device_buffer_locs": zeros(3, 10, dtype=INT64)}, TypeError, "expected dtype int32, got int64"),
    ("linear", {"host_cache_locs": zeros(3, 20)}, TypeError, "expected dtype int64, got int32"),
    ("linear", {"host_cache_locs": zeros(2, 20, dtype=INT64)}, ValueError, r"\[reqs=3, \*\], got \[2, 20\]"),
    ("linear", {"host_cache_locs": zeros(3, 24, dtype=INT64)[:, :20]}, ValueError, "a contiguous tensor"),
    ("linear", {"top_k_device_locs": zeros(2, 3)}, ValueError, "at least 4 columns, got 3"),
    ("linear", {"top_k_device_locs": zeros(3, 4)}, ValueError, r"\[bs=2, \*\], got \[3, 4\]"),
    ("linear", {"top_k_device_locs": zeros(4).expand(2, 4)}, ValueError, "row stride of at least 4, got 0"),
    ("linear", {"top_k_device_locs": zeros(2, 8)[:, ::2]}, ValueError, STRIDED),
    ("linear", {"req_pool_indices": zeros(3)}, ValueError, r"\[bs=2\], got \[3\]"),
    ("linear", {"req_pool_indices": zeros(2, dtype=INT16)}, TypeError, "expected dtype int32 or int64, got int16"),
    ("linear", {"seq_lens": zeros(2, dtype=torch.float32)}, TypeError, "expected dtype int32 or int64, got float32"),
    ("linear", {"seq_lens": zeros(4)[::2]}, ValueError, "a contiguous tensor"),
    ("linear", {"lru_slots": zeros(3, 8)}, TypeError, "expected dtype int16, got int32"),
    ("linear", {"lru_slots": zeros(2, 8, dtype=INT16)}, ValueError, r"\[reqs=3, H\], got \[2, 8\]"),
    ("linear", {"lru_slots": zeros(8, dtype=INT16).expand(3, 8)}, ValueError, "row stride of at least 8, got 0"),
    ("linear", {"hot_buffer_size": 9}, ValueError, r"expected 8 \(the columns of lru_slots\), got 9"),
    ("linear", {"hot_buffer_size": 3, "lru_slots": zeros(3, 3, dtype=INT16)}, ValueError, "at least 4 slots .*, got 3"),
    ("linear", {"hot_buffer_size": 32769, "lru_slots": zeros(3, 32769, dtype=INT16)}, ValueError, "at most 32768, got 32769"),
    ("linear", {"page_size": 0}, ValueError, "at least 1, got 0"),
    ("linear", {"block_size": -1}, ValueError, "at least 1, got -1"),
    ("linear", {"block_size": True}, TypeError, "expected an int, got bool"),
    ("linear", {"num_real_reqs": zeros(1, dtype=INT64)}, TypeError, "expected dtype int32, got int64"),
    ("linear", {"num_real_reqs": zeros(2)}, ValueError, r"expected shape \[1\], got \[2\]"),
    ("linear", {"num_real_reqs": 2}, TypeError, "expected a tensor or None, got int"),
    ("linear", {"miss_src": None}, ValueError, "a tensor, or none of miss_src, miss_dst and miss_count, got None"),
    ("linear", {"miss_dst": None}, ValueError, "or none of"),
    ("linear", {"miss_count": None}, ValueError, "or none of"),
    ("linear", {"miss_src": zeros(2, 4)}, TypeError, "expected dtype int64, got int32"),
    ("linear", {"miss_src": zeros(2, 3, dtype=INT64)}, ValueError, r"at least 2 rows and 4 columns, got shape \[2, 3\]"),
    ("linear", {"miss_dst": zeros(2, 4, dtype=INT64)}, TypeError, "expected dtype int32, got int64"),
    ("linear", {"miss_dst": zeros(2, 6)}, ValueError, r"\[row stride=4, 1\], got \[6, 1\]"),
    ("linear", {"miss_dst": zeros(1, 4)}, ValueError, r"at least 2 rows and 4 columns, got shape \[1, 4\]"),
    ("linear", {"miss_src": zeros(4, dtype=INT64).expand(2, 4), "miss_dst": zeros(4).expand(2, 4)}, ValueError, "row stride of at least 4, got 0"),
    ("linear", {"miss_count": zeros(1)}, ValueError, "at least 2 elements, got 1"),
    ("linear", {"miss_count": zeros(2, dtype=INT64)}, TypeError, "expected dtype int32, got int64"),
    ("linear", {"skip_io": None}, TypeError, "expected a bool, got None"),
    ("dsv4", {"item_size_bytes": 576}, ValueError, "expected 584 bytes, .*, got 576"),
    ("dsv4", {"device_buffer": zeros(PAGE_BYTES + 8, dtype=UINT8)}, ValueError, "whole pages of 37440 bytes, got 37448 bytes"),
    ("dsv4", {"host_cache": zeros(64, 584, dtype=UINT8)}, ValueError, "whole pages of 37440 bytes, got 37376 bytes"),
    ("dsv4", {"host_cache": zeros(PAGE_BYTES + 4, dtype=UINT8)[4:]}, ValueError, "data aligned to 8 bytes"),
    ("dsv4", {"device_buffer": zeros(PAGE_BYTES + 4, dtype=UINT8)[4:]}, ValueError, "data aligned to 8 bytes"),
    ("blocks", {"top_k_blocks": zeros(2, 4, dtype=INT64)}, TypeError, "expected dtype int32, got int64"),
    ("blocks", {"host_cache_k": None}, TypeError, "expected a tensor, got None"),
    ("blocks", {"host_cache_v": None}, TypeError, "expected a tensor, got None"),
    ("blocks", {"device_buffer_k": None}, TypeError, "expected a tensor, got None"),
    ("blocks", {"device_buffer_v": None}, TypeError, "expected a tensor, got None"),
    ("blocks", {"host_cache_v": zeros(8, 16, dtype=UINT8)}, ValueError, r"expected \d+ rows \(those of the keys\), got 8"),
    ("blocks", {"device_buffer_v": zeros(8, 16, dtype=UINT8)}, ValueError, r"expected \d+ rows \(those of the keys\), got 8"),
    ("blocks", {"host_cache_k": zeros(128, 8, dtype=UINT8)}, ValueError, "rows of item_size_bytes=16, got 8 bytes"),
    ("blocks", {"host_cache_v": zeros(32, 32, dtype=UINT8)}, ValueError, "rows of item_size_bytes=16, got 32 bytes"),
    ("blocks", {"sparse_block_size": 0}, ValueError, "at least 1, got 0"),
    ("blocks", {"top_k_device_locs": zeros(2, 7)}, ValueError, "at least 8 columns, got 7"),
    ("blocks", {"hot_buffer_size": 7, "lru_slots": zeros(3, 7, dtype=INT16)}, ValueError, "at least 8 slots .*, got 7"),
    ("steps", {"host_cache": zeros(64, 0, dtype=UINT8)}, ValueError, "items of 1 to 2147483647 bytes, got 0 bytes"),
    ("steps", {"host_cache": zeros(64, 32, dtype=UINT8)[:, :16]}, ValueError, r"contiguous tensor, got strides \[32, 1\]"),
    ("steps", {"top_k_tokens": zeros(2, 1, 4)}, ValueError, "2 to 4 steps, got 1"),
    ("steps", {"top_k_tokens": zeros(2, 5, 4)}, ValueError, "2 to 4 steps, got 5"),
    ("steps", {"top_k_tokens": zeros(2, 8)}, ValueError, r"\[bs, steps, K\], got \[2, 8\]"),
    ("steps", {"top_k_device_locs": zeros(2, 2, 5)}, ValueError, r"\[bs=2, steps=2, K=4\], got \[2, 2, 5\]"),
    ("steps", {"top_k_device_locs": zeros(2, 4).unsqueeze(1).expand(2, 2, 4)}, ValueError, "steps and rows that do not overlap"),
    ("steps", {"top_k_device_locs": zeros(2, 4).expand(2, 2, 4)}, ValueError, "steps and rows that do not overlap"),
    ("steps", {"seq_lens": zeros(2)}, ValueError, r"expected shape \[4\], got \[2\]"),
    ("steps", {"state": None}, TypeError, "expected a HiSparseSpecState, got NoneType"),
    ("steps", {"num_real_reqs": zeros(0)}, ValueError, r"expected shape \[1\], got \[0\]"),
    ("steps", {"miss_src": zeros(2, 7, dtype=INT64)}, ValueError, r"at least 2 rows and 8 columns, got shape \[2, 7\]"),
    ("steps", {"miss_count": None}, ValueError, "or none of"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "changes", "error", "message"),
    BAD_ARGUMENTS,
    ids=[f"{i}-{b[0]}-{next(iter(b[1]))}" for i, b in enumerate(BAD_ARGUMENTS)],
)
def test_bad_arguments(kind: str, changes: dict[str, Any], error: type[Exception], message: str) -> None:
    """A named error, and nothing was written; where several arguments change, the first is to blame."""
    bench, arguments = valid_call(kind)
    call = bench.operator(hisparse)
    before = {name: memory.clone() for name, memory in bench.memory.items()}
    pools = bench.device_bytes()
    with pytest.raises(error, match=rf"^{next(iter(changes))}: .*{message}"):
        call(**(arguments | changes))
    for name, memory in bench.memory.items():
        assert torch.equal(memory, before[name]), name
    for now, then in zip(bench.device_bytes(), pools, strict=True):
        np.testing.assert_array_equal(now, then)
    call(**arguments)
    assert (bench.out() >= 0).any()


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("cache_policy", zeros(4, 8, dtype=INT16), TypeError, "expected dtype int32, got int16"),
        ("cache_policy", zeros(3, 8), ValueError, "at least 4 rows, got 3"),
        ("cache_policy", zeros(4, 3), ValueError, "at least 4 slots .*, got 3"),
        ("cache_policy", zeros(8).expand(4, 8), ValueError, "row stride of at least 8, got 0"),
        ("cache_policy", None, TypeError, "expected a tensor, got None"),
        ("scratch_locs", zeros(2, 5), ValueError, "at least 3 rows, got 2"),
        ("scratch_locs", zeros(3, 5, dtype=INT64), TypeError, "expected dtype int32, got int64"),
        ("scratch_state", zeros(0, 3), ValueError, r"at least 1 row and 3 columns, got shape \[0, 3\]"),
        ("scratch_state", zeros(1, 2), ValueError, r"at least 1 row and 3 columns, got shape \[1, 2\]"),
        ("scratch_state", zeros(1, 6)[:, ::2], ValueError, STRIDED),
    ],
)
def test_bad_state(name: str, value: Any, error: type[Exception], message: str) -> None:
    bench, arguments = valid_call("steps")
    state = arguments["state"]._replace(**{name: value})
    with pytest.raises(error, match=rf"^state\.{name}: .*{message}"):
        hisparse.load_cache_to_device_buffer_spec_mla(**(arguments | {"state": state}))
    assert (bench.out() == POISON).all()


def test_bad_arguments_of_the_other_operators() -> None:
    plan = {
        "miss_src": zeros(2, 3, dtype=INT64), "miss_dst": zeros(2, 3), "miss_count": zeros(2), "num_real_reqs": zeros(1),
        "host_cache": zeros(4, 16, dtype=UINT8), "device_buffer": zeros(4, 16, dtype=UINT8), "item_size_bytes": 16,
    }  # fmt: skip
    transfer = Transfer().arguments()
    mapping, locations = zeros(5), zeros(7, dtype=INT64)
    copy, move = hisparse.copy_cache_planned_mla, hisparse.transfer_cache_dsv4_mla
    translate = hisparse.translate_padded_hisparse_locations
    for call, arguments, name, value, error, message in (
        (copy, plan, "miss_src", zeros(2, 3), TypeError, "expected dtype int64, got int32"),
        (copy, plan, "miss_dst", zeros(2, 2), ValueError, r"\[bs=2, capacity=3\], got \[2, 2\]"),
        (copy, plan, "miss_dst", zeros(2, 5)[:, :3], ValueError, r"\[row stride=3, 1\], got \[5, 1\]"),
        (copy, plan, "miss_count", zeros(1), ValueError, "at least 2 elements, got 1"),
        (copy, plan, "num_real_reqs", zeros(3), ValueError, r"\[1\], got \[3\]"),
        (copy, plan, "host_cache", zeros(4, 32, dtype=UINT8)[:, ::2], ValueError, "a contiguous tensor"),
        (copy, plan, "device_buffer", None, TypeError, "expected a tensor, got None"),
        (copy, plan, "item_size_bytes", -1, ValueError, "items of 1 to 2147483647 bytes, got -1 bytes"),
        (copy, plan, "num_blocks", 0, ValueError, "at least 1, got 0"),
        (copy, plan, "block_size", 0, ValueError, "at least 1, got 0"),
        (copy, plan | {"is_dsv4_layout": True}, "item_size_bytes", 16, ValueError, "expected 584 bytes, .*, got 16"),
        (copy, plan | {"is_dsv4_layout": True}, "item_size_bytes", 16, ValueError, "expected 584 bytes, .*, got 16"),
        (move, transfer, "src_ptrs", zeros(3, dtype=INT64), TypeError, "expected dtype uint64, got int64"),
        (move, transfer, "dst_ptrs", zeros(2, dtype=torch.uint64), ValueError, r"\[layers=3\], got \[2\]"),
        (move, transfer, "src_indices", zeros(50), TypeError, "expected dtype int64, got int32"),
        (move, transfer, "dst_indices", zeros(49, dtype=INT64), ValueError, r"\[N=50\], got \[49\]"),
        (move, transfer, "dst_indices", zeros(100, dtype=INT64)[::2], ValueError, "a contiguous tensor"),
        (move, transfer, "block_size", 0, ValueError, "at least 1, got 0"),
        (translate, {"mapping": mapping, "locations": locations}, "mapping", zeros(5, dtype=INT16), TypeError, "int32 or int64, got int16"),
        (translate, {"mapping": mapping, "locations": locations}, "mapping", zeros(10)[::2], ValueError, "a contiguous tensor"),
        (translate, {"mapping": mapping, "locations": locations}, "mapping", [0, 1], TypeError, "a tensor, got another type"),
        (translate, {"mapping": mapping, "locations": locations}, "locations", zeros(2, 2), ValueError, r"\[\*\], got \[2, 2\]"),
        (translate, {"mapping": mapping, "locations": locations}, "locations", zeros(7, dtype=UINT8), TypeError, "int32 or int64, got uint8"),
    ):  # fmt: skip
        with pytest.raises(error, match=rf"^{name}: .*{message}"):
            call(**(arguments | {name: value}))


def test_names_that_are_positional_and_names_that_are_not() -> None:
    bench, arguments = valid_call("linear")
    names = inspect.signature(hisparse.load_cache_to_device_buffer_mla).parameters
    hisparse.load_cache_to_device_buffer_mla(*(arguments[name] for name in names))
    assert (bench.out() >= 0).any()
    with pytest.raises(TypeError, match="positional"):
        hisparse.copy_cache_planned_mla(zeros(2, 3, dtype=INT64))
    with pytest.raises(TypeError, match="positional"):
        hisparse.load_cache_to_device_buffer_spec_mla(zeros(2, 2, 4))


# -------------------------------------------------------------------------------------------------- threads, sanitizer


def test_many_threads() -> None:
    """Calls on tensors of their own do not know of each other."""
    cases = [make_case(KINDS[i % 4], seed=i, top_k=32, hot_slots=256, rows=4) for i in range(8)]
    steps = [[random_step(case, np.random.default_rng(i), spread=0.5) for i in range(5)] for case in cases]
    benches, expected = [Bench(case) for case in cases], [Bench(case) for case in cases]
    for bench, asked in zip(expected, steps, strict=True):
        for step in asked:
            bench.run(hisparse, step)

    def work(i: int) -> None:
        for step in steps[i]:
            benches[i].run(hisparse, step)

    run_in_threads(8, work)
    for ours, theirs in zip(benches, expected, strict=True):
        ours.assert_equal(theirs)


@pytest.fixture(scope="session")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """The public functions on a backend that does not forgive undefined behaviour."""
    family = ROOT / "csrc/device_buffer"
    directory: Path = tmp_path_factory.mktemp("device_buffer")
    module = load_sanitized(directory, family / "entry.cpp", family / "cpu.cpp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_buffer.jit, "load", lambda family, backend: module)
        operators = device_buffer._Operators("cpu")
    return SimpleNamespace(operators=operators, **{name: getattr(device_buffer, name) for name in FUNCTIONS})


@pytest.mark.parametrize("kind", KINDS)
def test_no_undefined_behaviour(kind: str, sanitized: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_buffer, "_operators", lambda name, tensor: sanitized.operators)

    @settings(PROPERTY, max_examples=60)
    @given(sequences((kind,)), st.booleans())
    def check(sequence: Sequence, extremes: bool) -> None:
        run_sequence(sequence, sanitized, extremes=extremes)

    check()


def test_no_undefined_behaviour_of_the_other_operators(
    sanitized: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_buffer, "_operators", lambda name, tensor: sanitized.operators)
    for seed in range(20):
        assert torch.equal(planned_copy(sanitized, seed % 2 == 0, seed), planned_copy(reference, seed % 2 == 0, seed))
    transfer = Transfer()
    transfer.run(sanitized)
    transfer.assert_copied()
    for dtype in INTEGERS:
        limits = torch.iinfo(dtype)
        locations = torch.tensor([limits.min, -1, 0, 4, 5, limits.max], dtype=dtype)
        mapping = torch.tensor([7, -(2**31), 2**31 - 1, 0, 5], dtype=torch.int32)
        translated = sanitized.translate_padded_hisparse_locations(mapping, locations)
        assert translated.tolist() == [limits.min, -1, 7, 5, -1, -1]
