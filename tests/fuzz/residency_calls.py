"""Valid calls of HiSparse residency."""

from __future__ import annotations

from typing import Any

import hisparse_cases
import numpy as np

from fuzz.calls import Call, builds, chance, leaf, pick
from fuzz.memory import Leaf
from hotplan import hisparse
from hotplan.plans import SWAP_ROW
from hotplan.reference import hisparse as reference

SHAPES = ((1, 1), (2, 3), (5, 8), (8, 16), (31, 32), (32, 32), (33, 65), (33, 200))
EDGES = ((256, 512), (1023, 1024), (1025, 2049), (2048, 4096), (2049, 4100))
GAPS = ("hot_block_table", "global_indices", "attention_indices", "source_block_table", "resident_block_table")


def _call(name: str, arguments: dict[str, Any]) -> Call:
    return Call(name, getattr(hisparse, name), getattr(reference, name), arguments)


def random_case(rng: np.random.Generator) -> hisparse_cases.Case:
    edge = chance(rng, 0.03)
    top_k, hot_slots = pick(rng, EDGES if edge else SHAPES)
    union = chance(rng, 0.3) and not edge
    steps = int(rng.integers(1, 4)) if union else 1
    return hisparse_cases.make_case(
        seed=int(rng.integers(2**31)),
        top_k=top_k,
        hot_slots=max(hot_slots, top_k * steps),
        block_size=pick(rng, (1, 3, 4, 16, 64)),
        rows=pick(rng, (1, 2, 3, 5)) * steps,
        spare_states=int(rng.integers(0, 3)),
        host_rows=pick(rng, (1, 7, 3 * top_k + 1, 4 * hot_slots + 5)),
        row_bytes=pick(rng, (16, 16, 48, 272)),
        mode="tables" if union else pick(rng, ("plain", "state", "tables")),
        padding=pick(rng, (0.0, 0.3)),
        resident=pick(rng, (0.0, 0.4)),
        holes=pick(rng, (0.0, 0.2)),
        steps_per_request=steps,
        union=union,
        attention_gap=int(rng.integers(0, 6)),
        page_gap_bytes=pick(rng, (0, 0, 16, 4, 1)),
    )


def _pools(rng: np.random.Generator, case: hisparse_cases.Case, *, flat: bool = False) -> dict[str, Leaf]:
    host = hisparse_cases.host_bytes(case.host_rows, case.row_bytes)
    hot = rng.integers(0, 256, (case.hot_blocks, case.block_size, case.row_bytes), dtype=np.uint8)
    gap = (case.page_gap_bytes,)
    if flat:
        hot, gap = hot.reshape(-1, case.row_bytes), ()
    return {
        "host_cache": Leaf(host, place="host", pool=True),
        "hot_cache": Leaf(hot, written=True, gap=gap, pool=True),
    }


def _used_state(rng: np.random.Generator, case: hisparse_cases.Case) -> dict[str, Leaf]:
    """State as some steps leave it: slots hold different ids, or none yet, in any order."""
    shape = (case.state_rows, case.hot_slots)
    dgi = np.full(shape, -1, np.int32)
    lru = np.empty(shape, np.int16)
    filled = pick(rng, (0.0, 0.5, 1.0))
    for row in range(case.state_rows):
        ids = rng.permutation(max(case.host_rows, case.hot_slots))[: case.hot_slots]
        kept = (rng.random(case.hot_slots) < filled) & (ids < case.host_rows)
        dgi[row, kept] = ids[kept]
        lru[row] = rng.permutation(case.hot_slots)
    return {"device_global_indices": Leaf(dgi, written=True), "lru_slots": Leaf(lru, written=True)}


def _resolve(name: str, rng: np.random.Generator) -> Call:
    case = random_case(rng)
    bench = hisparse_cases.Bench(case)
    ids = hisparse_cases.random_ids(case, rng, spread=pick(rng, (0.3, 1.0)), invalid=0.1, duplicates=0.1)
    tensors = dict(
        zip(
            ("host_cache", "hot_cache", "hot_block_table", "global_indices", "hot_indices"),
            bench.arguments(ids),
            strict=False,
        )
    )
    optional = ("miss_mask", "resolved_global_indices", "valid_counts", "attention_indices", "stats")
    wanted = [name for name in optional if chance(rng, 0.6)]
    if chance(rng, 0.6):
        wanted += ["swap_host_physical_rows", "swap_device_physical_rows", "swap_counts"]
    options = bench.options(*wanted, "hot_indices")
    tensors["hot_indices"] = options.pop("hot_indices")
    arguments: dict[str, Any] = {}
    for key, value in {**tensors, **options}.items():
        if not hasattr(value, "numpy"):
            arguments[key] = value
            continue
        gap = pick(rng, (0, 0, 3)) if key in GAPS else 0
        arguments[key] = leaf(value, gap=gap, written=key in hisparse_cases.Bench.OUTPUTS or key == "stats")
    arguments |= _pools(rng, case) | _used_state(rng, case)
    if name != "swap_in":
        arguments["hot_cache"].written = False
    if chance(rng, 0.3):
        arguments["region_stride"] = case.hot_slots
    if name == "plan_swap_in":
        for absent in ("hot_indices", "swap_host_physical_rows", "swap_device_physical_rows", "swap_counts"):
            arguments.pop(absent, None)
        if chance(rng, 0.4):
            arguments["out"] = _plan_out(case.rows, case.top_k)
    return _call(name, arguments)


def _plan_out(rows: int, top_k: int) -> hisparse.SwapPlan:
    plan = np.full((rows, top_k, SWAP_ROW.itemsize), 0xEE, np.uint8)
    counts, hot = np.full(rows, -9, np.int32), np.full((rows, top_k), -9, np.int32)
    return hisparse.SwapPlan(*(Leaf(array, written=True) for array in (plan, counts, hot)))


def _copies(rng: np.random.Generator, case: hisparse_cases.Case) -> tuple[np.ndarray, np.ndarray]:
    """Host rows and different hot rows, [R, K]; some of either are none."""
    shape = (case.rows, case.top_k)
    count = case.rows * case.top_k
    hot = np.full(count, -1, np.int32)
    rows = rng.permutation(case.hot_blocks * case.block_size)[:count]
    hot[: len(rows)] = rows
    host = rng.integers(-1, case.host_rows + 2, count).astype(np.int32)
    return host.reshape(shape), rng.permutation(hot).reshape(shape)


@builds("gather_plan")
def _gather_plan(rng: np.random.Generator, device: str) -> Call:
    case = random_case(rng)
    host, hot = _copies(rng, case)
    arguments: dict[str, Any] = {
        **_pools(rng, case, flat=(flat := chance(rng, 0.3))),
        "global_indices": Leaf(host),
        "hot_indices": Leaf(hot),
        "miss_mask": Leaf(rng.integers(0, 2, host.shape).astype(np.int32)),
    }
    if chance(rng, 0.5):
        states = rng.integers(-1, 3, case.rows + pick(rng, (0, 2)))
        arguments["request_state_indices"] = Leaf(states.astype(np.int32))
    if chance(rng, 0.5):
        arguments["attention_indices"] = Leaf(np.full(host.shape, -9, np.int32), written=True)
        arguments["attention_block_stride"] = (1 if flat else case.block_size) + int(rng.integers(0, 5))
    return _call("gather_plan", arguments)


@builds("gather_compact")
def _gather_compact(rng: np.random.Generator, device: str) -> Call:
    case = random_case(rng)
    host, hot = _copies(rng, case)
    counts = rng.integers(-1, case.top_k + 3, case.rows + pick(rng, (0, 2))).astype(np.int32)
    arguments = {
        **_pools(rng, case),
        "miss_global_indices": Leaf(host),
        "miss_hot_indices": Leaf(hot),
        "miss_counts": Leaf(counts),
    }
    return _call("gather_compact", arguments)


@builds("gather_planned")
def _gather_planned(rng: np.random.Generator, device: str) -> Call:
    case = random_case(rng)
    host, hot = _copies(rng, case)
    plan = np.zeros(host.shape, SWAP_ROW)
    plan["host_row"], plan["hot_row"] = host, hot
    counts = rng.integers(-1, case.top_k + 3, case.rows + pick(rng, (0, 2))).astype(np.int32)
    packed = plan.view(np.uint8).reshape(*host.shape, SWAP_ROW.itemsize)
    return _call("gather_planned", {**_pools(rng, case), "plan": Leaf(packed), "counts": Leaf(counts)})


@builds("invalidate_written_slots")
def _invalidate(rng: np.random.Generator, device: str) -> Call:
    case = random_case(rng)
    tokens = pick(rng, (0, 1, 3, 33))
    arguments = {
        "device_global_indices": _used_state(rng, case)["device_global_indices"],
        "request_state_indices": Leaf(rng.integers(-1, case.state_rows + 1, 5).astype(np.int32)),
        "req_id_per_token": Leaf(rng.integers(-1, 6, tokens).astype(np.int32)),
        "written_slots": Leaf(rng.integers(-1, case.host_rows + 1, tokens).astype(np.int64)),
    }
    return _call("invalidate_written_slots", arguments)


for _name in ("resolve_residency", "swap_in", "plan_swap_in"):
    builds(_name)(lambda rng, device, name=_name: _resolve(name, rng))
