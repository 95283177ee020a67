"""One call of every public operator, as a function of a seed that gives a hash of all that the call wrote.

For tests of where calls are made: in threads, in children. What they must give, others test.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import device_buffer_cases as buffers
import hisparse_cases as residency
import numpy as np
import torch
from strategies import SERVER_GEOMETRIES, build_case, ragged

import hotplan
from hotplan import hisparse


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)


def _digest(*written: Any) -> str:
    digest = hashlib.sha256()
    for tensor in _tensors(written):
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _plan(method: str, function: str) -> Callable[[int], str]:
    def call(seed: int) -> str:
        case = build_case(ragged(seed, 20, 30), SERVER_GEOMETRIES[seed % 6], seed=seed)
        return _digest(getattr(case, method)(getattr(hotplan, function)))

    return call


def _verify(seed: int) -> str:
    rng = np.random.default_rng(seed)
    rid, prefix = torch.from_numpy(rng.permutation(64)), torch.from_numpy(rng.integers(1, 700, 64).astype(np.int32))
    options = {"num_draft_tokens": 1 + seed % 8, "state_slot_offset": 70, "active_batch_size": 60}
    return _digest(hotplan.plan_online_verify(rid, prefix, **options))


def _residency(operator: str) -> Callable[[int], str]:
    def call(seed: int) -> str:
        case = residency.make_case(seed=seed, top_k=40, hot_slots=60, rows=6, host_rows=300)
        bench = residency.Bench(case)
        rng = np.random.default_rng(seed)
        written: list[Any] = []
        for _ in range(3):
            ids = residency.random_ids(case, rng)
            if operator == "plan_swap_in":
                written.append(bench.plan(hisparse, ids))
            else:
                bench.resolve(hisparse, ids, operator)
        names = (*bench.OUTPUTS, *bench.STATE)
        return _digest(written, [getattr(bench, name) for name in names], bench.hot_pool)

    return call


def _copies(operator: str) -> Callable[[int], str]:
    """Copies of what a resolution or a plan before them says."""

    def call(seed: int) -> str:
        case = residency.make_case(seed=seed, top_k=40, hot_slots=60, rows=6, host_rows=300)
        bench = residency.Bench(case)
        ids = residency.random_ids(case, np.random.default_rng(seed))
        pools = (bench.host_cache, bench.hot_cache)
        if operator == "gather_planned":
            packed = bench.plan(hisparse, ids)
            hisparse.gather_planned(*pools, packed.plan, packed.counts)
        else:
            bench.resolve(hisparse, ids)
            lists = (bench.swap_host_physical_rows, bench.swap_device_physical_rows)
            if operator == "gather_compact":
                hisparse.gather_compact(*pools, *lists, bench.swap_counts[: case.rows])
            else:
                hisparse.gather_plan(*pools, bench.resolved_global_indices, bench.hot_indices, bench.miss_mask)
        return _digest(bench.hot_pool)

    return call


def _invalidate(seed: int) -> str:
    rng = np.random.default_rng(seed)
    state = torch.from_numpy(rng.integers(-1, 50, (8, 100)).astype(np.int32))
    requests = torch.from_numpy(rng.integers(0, 8, 200).astype(np.int32))
    rows = torch.from_numpy(rng.integers(0, 50, 200))
    hisparse.invalidate_written_slots(state, torch.arange(8, dtype=torch.int32), requests, rows)
    return _digest(state)


def _device_buffer(kind: str, replay: bool = False) -> Callable[[int], str]:
    def call(seed: int) -> str:
        case = buffers.make_case(kind, seed=seed, top_k=32, hot_slots=128, rows=4)
        bench = buffers.Bench(case)
        rng = np.random.default_rng(seed)
        for _ in range(3):
            bench.run(hisparse, buffers.random_step(case, rng, spread=0.5))
            if replay:
                bench.replay(hisparse)
        names = (*bench.state_names, *bench.output_names)
        return _digest([getattr(bench, name) for name in names], bench.device_pools, bench.planned)

    return call


def _transfer(seed: int) -> str:
    transfer = buffers.Transfer(seed=seed)
    transfer.run(hisparse)
    return _digest(transfer.dst)


def _translate(seed: int) -> str:
    rng = np.random.default_rng(seed)
    mapping, at = (torch.from_numpy(rng.integers(-3, 500, 500)) for _ in range(2))
    return _digest(hisparse.translate_padded_hisparse_locations(mapping, at))


CALLS: dict[str, Callable[[int], str]] = {
    "plan_compress_prefill": _plan("prefill", "plan_compress_prefill"),
    "plan_compress_decode": _plan("decode", "plan_compress_decode"),
    "plan_compress_prefill_legacy": _plan("prefill_legacy", "plan_compress_prefill_legacy"),
    "plan_compress_decode_legacy": _plan("decode_legacy", "plan_compress_decode_legacy"),
    "plan_online_prefill": _plan("online_prefill", "plan_online_prefill"),
    "plan_online_decode": _plan("online_decode", "plan_online_decode"),
    "plan_online_verify": _verify,
    "plan_step_prefill": _plan("step_prefill", "plan_step_prefill"),
    "plan_step_decode": _plan("step_decode", "plan_step_decode"),
    "resolve_residency": _residency("resolve_residency"),
    "swap_in": _residency("swap_in"),
    "plan_swap_in": _residency("plan_swap_in"),
    "gather_plan": _copies("gather_plan"),
    "gather_compact": _copies("gather_compact"),
    "gather_planned": _copies("gather_planned"),
    "invalidate_written_slots": _invalidate,
    "load_cache_to_device_buffer_mla": _device_buffer("linear"),
    "load_cache_to_device_buffer_dsv4_mla": _device_buffer("dsv4"),
    "load_blocks_to_device_buffer_mha": _device_buffer("blocks"),
    "load_cache_to_device_buffer_spec_mla": _device_buffer("steps"),
    "copy_cache_planned_mla": _device_buffer("linear", replay=True),
    "transfer_cache_dsv4_mla": _transfer,
    "translate_padded_hisparse_locations": _translate,
}


# -- long calls --------------------------------------------------------------------------------------------------------


class LongCalls:
    """Calls of about a millisecond, prepared so that little else happens between them: those of several threads overlap.

    `run` makes them; `digest` is of the state that they leave.
    """

    def __init__(self, family: str, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self._calls: list[Callable[[], Any]] = []
        self._written: list[Any] = []
        if family == "compress":
            case = build_case(ragged(seed, 1000, 20), SERVER_GEOMETRIES[seed % 6], seed=seed)
            plan = case.prefill(hotplan.plan_compress_prefill)
            self._calls = [lambda: case.prefill(hotplan.plan_compress_prefill, out=plan)]
            self._written = [plan]
        elif family == "hisparse":
            sets = residency.make_case(seed=seed, top_k=1024, hot_slots=1500, rows=8, host_rows=6000)
            bench = residency.Bench(sets)
            for _ in range(3):
                arguments, options = bench.arguments(residency.random_ids(sets, rng)), bench.options()
                self._calls.append(lambda a=arguments, o=options: hisparse.swap_in(*a, **o))
            self._written = [getattr(bench, name) for name in (*bench.OUTPUTS, *bench.STATE)] + [bench.hot_pool]
        else:
            buffer = buffers.make_case(family, seed=seed, top_k=512, hot_slots=1200, rows=4)
            holder = buffers.Bench(buffer)
            for _ in range(3):
                step = buffers.random_step(buffer, rng, spread=0.8)
                step.num_real = None
                arguments = holder.arguments(step)
                operator = holder.operator(hisparse)
                self._calls.append(lambda o=operator, a=arguments: o(**a))
            names = (*holder.state_names, *holder.output_names)
            self._written = [getattr(holder, name) for name in names] + holder.device_pools

    def run(self, rounds: int) -> None:
        for _ in range(rounds):
            for call in self._calls:
                call()

    def digest(self) -> str:
        return _digest(self._written)
