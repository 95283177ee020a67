"""Valid lives of a HotBuffer: a constructor, then some of its methods in turn, as one call with all their arguments."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch

from fuzz.calls import Call, Misbehaved, builds, chance, pick
from fuzz.memory import Leaf, bytes_of
from hotplan import HotBuffer

METHODS = ("admit", "release", "resolve", "gather", "invalidate", "stats", "reset_stats")
STATE = ("device_global_indices", "lru_slots", "states", "caches", "hot_indices", "_stats")
SIZES = frozenset({"max_requests", "top_k", "hot_slots", "max_rows", "block_size"})


def _names() -> set[str]:
    functions = [HotBuffer.__init__, *(getattr(HotBuffer, name) for name in METHODS)]
    return {name for function in functions for name in inspect.signature(function).parameters}


def live(call: Call, arguments: dict[str, Any]) -> list[Any]:
    """Runs a life. What a method refuses must leave the buffer as it was, and what it gathers must be there."""
    steps = {name: value for name, value in arguments.items() if name.rpartition("_")[0] in METHODS}
    hot = HotBuffer(**{name: value for name, value in arguments.items() if name not in steps})
    found: list[Any] = []
    ids, by_position = None, False
    for name, given in steps.items():
        method = name.rpartition("_")[0]
        before = {attribute: getattr(hot, attribute).clone() for attribute in STATE}
        try:
            if isinstance(given, dict) and all(isinstance(key, str) for key in given):
                result = getattr(hot, method)(**given)
            else:
                result = getattr(hot, method)(given)
        except (TypeError, ValueError):
            for attribute, value in before.items():
                if not torch.equal(bytes_of(getattr(hot, attribute)), bytes_of(value)):
                    raise Misbehaved(f"{method} raised, but changed {attribute}") from None
            raise
        except RuntimeError:
            if method == "admit" and hot.admitted == hot.max_requests:
                continue  # its documented way to say so
            raise
        if method == "resolve":
            ids = given.get("ids") if isinstance(given, dict) else None
            by_position = isinstance(given, dict) and "source_block_table" in given
        if method == "gather" and not call.mutations and ids is not None and not by_position:
            _check_rows(hot, given["layer"], ids, arguments["host_pool"])
        found.append(result.clone() if isinstance(result, torch.Tensor) else result)
    found += [getattr(hot, attribute) for attribute in STATE]
    return found


def _check_rows(hot: HotBuffer, layer: int, ids: torch.Tensor, pools: Any) -> None:
    rows = hot.hot_indices[: len(ids)].cpu()
    there = rows >= 0
    have = hot.caches[layer].reshape(-1, hot.caches.shape[-1]).cpu()[rows[there].long()]
    if not torch.equal(have, pools[layer][ids.cpu()[there].long()]):
        raise Misbehaved("gathered rows are not those of the pool")


def _apart(pools: np.ndarray) -> list[Leaf]:
    return [Leaf(pool.copy(), place="host", pool=True) for pool in pools]


@builds("HotBuffer")
def _hot_buffer(rng: np.random.Generator, device: str) -> Call:
    layers, requests, top_k = int(rng.integers(1, 4)), int(rng.integers(1, 5)), pick(rng, (1, 3, 8, 33))
    hot_slots, host_rows, width = top_k + pick(rng, (0, 1, 30)), pick(rng, (5, 50, 300)), pick(rng, (16, 48))
    shape = (layers, host_rows, width)
    pools = rng.integers(0, 256, shape, dtype=np.uint8)
    arguments: dict[str, Any] = {
        "host_pool": Leaf(pools, place="host", pool=True) if chance(rng, 0.5) else [*_apart(pools)],
        "max_requests": requests,
        "top_k": top_k,
        "hot_slots": hot_slots,
        "block_size": pick(rng, (1, 4, 64)),
        "device": device,
    }
    if chance(rng, 0.3):
        arguments["max_rows"] = requests + pick(rng, (0, 1, 3))
    if chance(rng, 0.3):
        arguments["attention_block_stride"] = arguments["block_size"] + int(rng.integers(0, 4))
    admitted = int(rng.integers(1, requests + 1))
    for number in range(admitted):
        arguments[f"admit_{number}"] = {}
    for number in range(int(rng.integers(1, 5))):
        arguments |= _step(rng, number, requests, top_k, host_rows, layers)
    if chance(rng, 0.3):
        arguments["release_9"] = {"request": int(rng.integers(0, admitted))}
    arguments["stats_9"] = {}
    call = Call("HotBuffer", HotBuffer, None, arguments)
    call.run = lambda given: live(call, given)
    call.extra_names = _names()
    call.bounded = SIZES
    call.capturable = False
    return call


def _step(
    rng: np.random.Generator, number: int, requests: int, top_k: int, host_rows: int, layers: int
) -> dict[str, Any]:
    rows = int(rng.integers(1, requests + 1))
    ids = rng.integers(-1, host_rows + 1, (rows, top_k)).astype(np.int32)
    resolve: dict[str, Any] = {"ids": Leaf(ids)}
    chosen = rng.permutation(requests)[:rows].astype(np.int32)
    how = pick(rng, ("none", "list", "tensor", "source"))
    if how == "list":
        resolve["requests"] = chosen.tolist()
    elif how != "none":
        resolve["requests"] = Leaf(chosen)
    if how == "source":
        resolve["source_block_table"] = Leaf(rng.integers(-1, host_rows // 4 + 1, (requests, 6)).astype(np.int32))
        resolve["source_block_size"] = 4
        if chance(rng, 0.5):
            resolve["max_union_rows"] = 1
    if chance(rng, 0.3):
        resolve["layer"] = int(rng.integers(layers))
    steps: dict[str, Any] = {f"resolve_{number}": resolve}
    for layer in rng.permutation(layers).tolist():
        steps[f"gather_{number}{layer}"] = {"layer": layer}
    if chance(rng, 0.4):
        count = int(rng.integers(0, 4))
        requests_, slots = rng.integers(0, requests, count), rng.integers(-1, host_rows, count)
        as_lists = chance(rng, 0.5)
        steps[f"invalidate_{number}"] = {
            "requests": requests_.tolist() if as_lists else Leaf(requests_.astype(np.int32)),
            "host_rows": slots.tolist() if as_lists else Leaf(slots.astype(np.int64)),
        }
    return steps
