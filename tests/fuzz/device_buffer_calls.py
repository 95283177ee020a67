"""Valid calls of HiSparse with SGLang's addressing."""

from __future__ import annotations

from typing import Any

import device_buffer_cases
import numpy as np

from fuzz.calls import Call, builds, chance, leaf, pick
from fuzz.memory import Leaf
from hotplan import hisparse
from hotplan.reference import device_buffer as reference

LOADS = {
    "load_cache_to_device_buffer_mla": "linear",
    "load_cache_to_device_buffer_dsv4_mla": "dsv4",
    "load_blocks_to_device_buffer_mha": "blocks",
    "load_cache_to_device_buffer_spec_mla": "steps",
}
SHAPES = ((1, 1), (2, 3), (5, 8), (8, 16), (31, 32), (32, 33), (33, 65))
WRITTEN = (
    "device_buffer_tokens", "top_k_device_locs", "lru_slots", "miss_src", "miss_dst", "miss_count",
    "device_buffer", "device_buffer_k", "device_buffer_v", "cache_policy", "scratch_state",
)  # fmt: skip
HOST = ("host_cache", "host_cache_k", "host_cache_v")
POOLS = (*HOST, "device_buffer", "device_buffer_k", "device_buffer_v")
# Tensors that share one row stride have one gap.
GAPS = {
    "top_k_tokens": "asked", "top_k_blocks": "asked", "top_k_device_locs": "out", "device_buffer_tokens": "tables",
    "device_buffer_locs": "tables", "lru_slots": "lru", "miss_src": "plan", "miss_dst": "plan",
    "cache_policy": "policy", "scratch_locs": "scratch",
}  # fmt: skip


def _call(name: str, arguments: dict[str, Any]) -> Call:
    return Call(name, getattr(hisparse, name), getattr(reference, name), arguments)


def random_case(rng: np.random.Generator, kind: str) -> device_buffer_cases.Case:
    edge = chance(rng, 0.03)
    top_k, hot_slots = pick(rng, device_buffer_cases.EDGES if edge else SHAPES)
    block_tokens = pick(rng, (1, 2, 3, 8))
    if kind == "blocks":
        top_k = max(1, min(top_k, 8))
    return device_buffer_cases.make_case(
        kind,
        seed=int(rng.integers(2**31)),
        top_k=top_k,
        hot_slots=hot_slots,
        extra=pick(rng, (1, 1, 2, 7)),
        rows=1 if edge else int(rng.integers(1, 5)),
        spare_requests=int(rng.integers(0, 3)),
        item_bytes=pick(rng, (7, 16, 132, 576)),
        steps=pick(rng, (2, 3, 4)),
        block_tokens=block_tokens,
        scratch_rows=pick(rng, (None, 0, 3)),
        lost_slots=pick(rng, (0.0, 0.1)),
        holes=pick(rng, (0.0, 0.2)),
    )


def _load(name: str, rng: np.random.Generator) -> Call:
    case = random_case(rng, LOADS[name])
    wide = (chance(rng, 0.5), chance(rng, 0.5))
    bench = device_buffer_cases.Bench(case, wide=wide, strided=chance(rng, 0.4))
    step = device_buffer_cases.random_step(case, rng, spread=pick(rng, (0.3, 1.0)), invalid=0.1, padding=0.3)
    _use(rng, case, bench)
    raw = bench.arguments(step, plan=chance(rng, 0.6), skip_io=chance(rng, 0.1))
    gaps = {group: pick(rng, (0, 0, 3)) for group in set(GAPS.values())}

    def of(key: str, value: Any) -> Any:
        if hasattr(value, "_fields"):
            return hisparse.HiSparseSpecState(*(of(n, v) for n, v in zip(value._fields, value, strict=True)))
        if not hasattr(value, "numpy"):
            return value
        place = "host" if key in HOST else "device"
        gap = gaps.get(GAPS.get(key, ""), 0)
        return leaf(value, gap=gap, written=key in WRITTEN, place=place, pool=key in POOLS)

    arguments = {key: of(key, value) for key, value in raw.items()}
    if not case.paged and chance(rng, 0.3):
        for key in (key for key in POOLS if key in arguments):
            arguments[key].shift = pick(rng, (1, 4, 8))
    return _call(name, arguments)


def _use(rng: np.random.Generator, case: device_buffer_cases.Case, bench: device_buffer_cases.Bench) -> None:
    """State as some steps leave it."""
    filled = pick(rng, (0.0, 0.6, 1.0))
    for request in range(case.requests):
        slots = np.flatnonzero(rng.random(case.hot_slots + case.extra) < filled)
        tokens = rng.permutation(case.max_tokens + case.extra)[: len(slots)]
        bench.set_tokens(request, dict(zip(slots.tolist(), tokens.tolist(), strict=False)))
    bench.set_lru(np.stack([rng.permutation(case.hot_slots) for _ in range(case.requests)]))


@builds("copy_cache_planned_mla")
def _copy_planned(rng: np.random.Generator, device: str) -> Call:
    paged = chance(rng, 0.4)
    case = random_case(rng, "dsv4" if paged else "linear")
    bench = device_buffer_cases.Bench(case)
    shape = (case.rows, case.top_k + pick(rng, (0, 2)))
    rows = np.resize(rng.permutation(case.device_rows), shape).astype(np.int32)
    rows[rng.random(shape) < 0.1] = -1
    gap = pick(rng, (0, 3))
    arguments = {
        "miss_src": Leaf(rng.integers(-1, case.host_rows + 1, shape).astype(np.int64), gap=(gap,)),
        "miss_dst": Leaf(rows, gap=(gap,)),
        "miss_count": Leaf(rng.integers(-1, shape[1] + 2, case.rows + pick(rng, (0, 2))).astype(np.int32)),
        "num_real_reqs": pick(rng, (None, Leaf(np.array([rng.integers(-1, case.rows + 2)], np.int32)))),
        "host_cache": leaf(bench.host_pools[0], place="host", pool=True),
        "device_buffer": leaf(bench.device_pools[0], written=True, pool=True),
        "item_size_bytes": case.item_bytes,
        "num_blocks": pick(rng, (1, 4, 16)),
        "is_dsv4_layout": paged,
        "skip_io": chance(rng, 0.1),
    }
    call = _call("copy_cache_planned_mla", arguments)
    call.racy = rows.size > case.device_rows  # two copies with one destination
    return call


@builds("transfer_cache_dsv4_mla")
def _transfer(rng: np.random.Generator, device: str) -> Call:
    layers, count = pick(rng, (0, 1, 3)), pick(rng, (0, 1, 9, 64))
    pages = 2
    size = pages * device_buffer_cases.PAGE_BYTES
    to_host = chance(rng, 0.5)

    def pools(written: bool) -> list[Leaf]:
        place = "host" if written == to_host else "device"
        arrays = (rng.integers(0, 256, size, dtype=np.uint8) for _ in range(layers))
        return [Leaf(array, written=written, place=place) for array in arrays]

    def rows() -> Leaf:
        chosen = rng.permutation(pages * device_buffer_cases.PAGE_SLOTS)[:count].astype(np.int64)
        chosen[rng.random(count) < 0.1] = -1
        return Leaf(chosen, trusted=True)

    def addresses(of: list[Leaf]) -> Leaf:
        return Leaf(np.zeros(layers, np.uint64), trusted=True, pointers=of)

    arguments = {
        "src_ptrs": addresses(pools(False)),
        "dst_ptrs": addresses(pools(True)),
        "src_indices": rows(),
        "dst_indices": rows(),
    }
    call = _call("transfer_cache_dsv4_mla", arguments)
    if device != "cpu":
        call.reference = None  # it follows addresses itself
    return call


@builds("translate_padded_hisparse_locations")
def _translate(rng: np.random.Generator, device: str) -> Call:
    size, count = pick(rng, (0, 1, 9, 300)), pick(rng, (0, 1, 5, 257))
    limit = 2**31 - 1
    arguments = {
        "mapping": Leaf(rng.integers(-1, limit, size).astype(pick(rng, (np.int32, np.int64)))),
        "locations": Leaf(rng.integers(-3, size + 3, count).astype(pick(rng, (np.int32, np.int64)))),
    }
    return _call("translate_padded_hisparse_locations", arguments)


for _name in LOADS:
    builds(_name)(lambda rng, device, name=_name: _load(name, rng))
