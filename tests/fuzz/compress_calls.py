"""Valid calls of the compress plans."""

from __future__ import annotations

from typing import Any

import numpy as np
import strategies

import hotplan
from fuzz.calls import Call, builds, chance, leaf, pick
from fuzz.memory import Leaf
from hotplan import reference
from hotplan.plans import PrefillPlan

PREFILLS = {
    "plan_compress_prefill": ("prefill", 8),
    "plan_compress_prefill_legacy": ("prefill_legacy", 8),
    "plan_online_prefill": ("online_prefill", 16),
    "plan_step_prefill": ("step_prefill", 8),
}
DECODES = {
    "plan_compress_decode": "decode",
    "plan_compress_decode_legacy": "decode_legacy",
    "plan_online_decode": "online_decode",
    "plan_step_decode": "step_decode",
}
LENGTHS = ("seq_lens", "extend_lens")


def random_lengths(rng: np.random.Generator) -> strategies.Lengths:
    """Mostly a handful of requests; now and then a batch at an edge of the kernels' dispatch."""
    seed = int(rng.integers(2**31))
    kind = pick(rng, ("ragged", "ragged", "near", "near", "uniform", "edge", "empty", "far"))
    if kind == "ragged":
        return strategies.ragged(seed, int(rng.integers(1, 13)), pick(rng, (1, 5, 200, 700)))
    if kind == "near":
        return strategies.near_multiples(seed, int(rng.integers(1, 9)))
    if kind == "uniform":
        return strategies.uniform(int(rng.integers(1, 9)), int(rng.integers(1, 300)), int(rng.integers(0, 300)))
    if kind == "edge":
        return strategies.ragged(seed, pick(rng, (31, 32, 33, 255, 256, 257, 1023, 1024, 1025)), 2, 300)
    return pick(rng, strategies.empty() if kind == "empty" else strategies.far())


def random_geometry(rng: np.random.Generator) -> strategies.Geometry:
    if chance(rng, 0.5):
        return pick(rng, strategies.SERVER_GEOMETRIES)
    ratio = pick(rng, (4, 128))
    ring = ratio * pick(rng, (1, 2, 3, 4, 8))
    pad = pick(rng, (None, 0, 1, ring, 2 * ring, strategies.INT32_MAX))
    return strategies.Geometry(ratio, ring * pick(rng, (1, 2, 3, 5, 32)), ring, ratio == 4 and chance(rng, 0.5), pad)


def random_case(rng: np.random.Generator) -> strategies.Case:
    return strategies.build_case(
        random_lengths(rng),
        random_geometry(rng),
        seed=int(rng.integers(2**31)),
        tables="hostile" if chance(rng, 0.3) else "random",
        max_width=1024,
        state_slot_offset=pick(rng, (0, 1, 64, 1000, strategies.INT32_MAX)),
    )


def _captured(case: strategies.Case, method: str) -> dict[str, Any]:
    """The arguments that the case's method passes, by name."""
    names = ("req_pool_indices", "req_to_token", "full_to_state", "seq_lens", "extend_lens")
    if "legacy" in method or "online" in method:
        names = ("req_pool_indices", "seq_lens", "extend_lens")
    found: dict[str, Any] = {}
    getattr(case, method)(lambda *tensors, **options: found.update(zip(names, tensors, strict=False), **options))
    return found


def _arguments(rng: np.random.Generator, case: strategies.Case, method: str, device: str) -> dict[str, Any]:
    lengths_place = "cpu" if device == "cpu" or chance(rng, 0.4) else "device"
    arguments = _captured(case, method)
    for name in [n for n, value in arguments.items() if hasattr(value, "numpy")]:
        gap = pick(rng, (0, 0, 3)) if name == "req_to_token" else 0
        arguments[name] = leaf(arguments[name], gap=gap, place=lengths_place if name in LENGTHS else "device")
    return arguments


def _rows(rows: int, bytes_: int) -> Leaf:
    return Leaf(np.full((rows, bytes_), 0xEE, np.uint8), written=True)


def _call(name: str, arguments: dict[str, Any]) -> Call:
    # Those of one ratio among several are named as where there is one.
    return Call(
        name, getattr(hotplan, name), getattr(reference, name), arguments, extra_names={"compress_ratio", "ring_size"}
    )


def _ratios(rng: np.random.Generator, arguments: dict[str, Any], prefill: bool) -> tuple[int, ...]:
    ratios = pick(rng, ((4, 128), (128, 4), (4,), (128,)))
    rings = {4: pick(rng, (8, 16)), 128: pick(rng, (128, 256))}
    arguments |= {"swa_page_size": pick(rng, (256, 512)), "use_req_ring": chance(rng, 0.3)}
    arguments |= {"ratios": ratios, "ring_sizes": tuple(rings[ratio] for ratio in ratios)}
    if prefill and chance(rng, 0.5):
        arguments["write_pad"] = pick(rng, (None, 0, 7, tuple(pick(rng, (None, 0, 9)) for _ in ratios)))
    return ratios


def _prefill(name: str, rng: np.random.Generator, device: str) -> Call:
    method, write_bytes = PREFILLS[name]
    case = random_case(rng)
    arguments = _arguments(rng, case, method, device)
    arguments["use_cuda_graph"] = chance(rng, 0.3)
    if chance(rng, 0.3):
        arguments["check"] = pick(rng, (None, False))
    tokens = case.lengths.num_q_tokens + pick(rng, (0, 0, 1, 9))
    keys = _ratios(rng, arguments, prefill=True) if name == "plan_step_prefill" else ()
    if chance(rng, 0.4):
        plans = [PrefillPlan(_rows(tokens, 16), _rows(tokens, write_bytes)) for _ in keys or (0,)]
        if chance(rng, 0.5):
            plans = [tuple(plan) for plan in plans]
        arguments["out"] = dict(zip(keys, plans, strict=True)) if keys else plans[0]
    return _call(name, arguments)


def _decode(name: str, rng: np.random.Generator, device: str) -> Call:
    case = random_case(rng)
    arguments = _arguments(rng, case, DECODES[name], device)
    if chance(rng, 0.3):
        arguments["check"] = pick(rng, (None, False))
    keys = _ratios(rng, arguments, prefill=False) if name == "plan_step_decode" else ()
    if chance(rng, 0.4):
        plans = [_rows(case.lengths.batch, 16) for _ in keys or (0,)]
        arguments["out"] = dict(zip(keys, plans, strict=True)) if keys else plans[0]
    return _call(name, arguments)


@builds("plan_online_verify")
def _verify(rng: np.random.Generator, device: str) -> Call:
    batch = pick(rng, (0, 1, 2, 5, 8, 31, 32, 33, 257))
    active: Any = int(rng.integers(0, batch + 1))
    if chance(rng, 0.5):
        active = Leaf(np.array([active], pick(rng, (np.int32, np.int64))))
    arguments = {
        "req_pool_indices": Leaf(rng.permutation(batch + 3)[:batch].astype(np.int64)),
        "prefix_lens": Leaf(rng.choice([0, 1, 126, 127, 128, 129, 1000, 2**31 - 200], batch).astype(np.int32)),
        "num_draft_tokens": pick(rng, (1, 2, 4, 127, 128)),
        "state_slot_offset": pick(rng, (0, 1, 1000, 2**31 - 1)),
        "active_batch_size": active,
    }
    if chance(rng, 0.4):
        arguments["out"] = PrefillPlan(_rows(batch, 16), _rows(batch, 16))
    return _call("plan_online_verify", arguments)


for _name in PREFILLS:
    builds(_name)(lambda rng, device, name=_name: _prefill(name, rng, device))
for _name in DECODES:
    builds(_name)(lambda rng, device, name=_name: _decode(name, rng, device))
