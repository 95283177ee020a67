"""Device-buffer test material: cases with tables, steps, benches, Hypothesis sequences, recorded outputs.

A `Case` is plain NumPy, so that one case can run through the reference, the CPU backend and the GPU:

    case = make_case("linear", seed=1, top_k=33, hot_slots=64, rows=3)
    bench = Bench(case, device="cuda")          # pools, tables, fresh state and poisoned outputs as tensors
    step = random_step(case, np.random.default_rng(1))
    bench.run(hotplan.hisparse, step)           # any module with the operators' names
    bench.assert_contract(step, clean=True)     # what the contract says, computed without the reference
    bench.assert_equal(other_bench)             # outputs, plans, state and device bytes; a failure names the argument

`run` first does what a server does before the call: it puts tokens that the operators never load (those of a short
request, the newest one, those of the extra slots) into their slots. So every answer has bytes that can be checked.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from hisparse_cases import corrupt_lru
from hypothesis import strategies as st

DATA = Path(__file__).resolve().parent.parent / "data"
POISON = -999
"""Outputs are filled with it before every call: what keeps it was not written."""
UNTOUCHED = 0xA5
"""Likewise for the bytes of device pools, once, before the first call."""

INT32_MAX = 2**31 - 1

KINDS = ("linear", "dsv4", "blocks", "steps")
ITEM_BYTES = (16, 132, 576, 584, 656, 1152, 7, 4096)

PAGE_SLOTS, PAGE_BYTES, VALUE_BYTES, SCALE_BYTES, PAGED_ITEM = 64, 37440, 576, 8, 584

EDGES = [
    (31, 31), (31, 32), (32, 32), (32, 33), (33, 63), (33, 64), (33, 65), (1, 1),
    (2047, 2047), (2048, 2048), (2048, 2049), (2049, 4095), (2048, 4096), (2048, 4097), (4095, 4096), (4096, 4096),
]  # fmt: skip
"""(K, H) at the edges of warps and tiles."""


# ----------------------------------------------------------------------------------------------------
# Bytes


def item_index(rows: np.ndarray, item_bytes: int, paged: bool) -> np.ndarray:
    """Where the bytes of items lie in a flat pool: [len(rows), item_bytes]."""
    rows = np.asarray(rows, dtype=np.int64)[:, None]
    if not paged:
        return rows * item_bytes + np.arange(item_bytes)
    page, slot = rows // PAGE_SLOTS * PAGE_BYTES, rows % PAGE_SLOTS
    values = page + slot * VALUE_BYTES + np.arange(VALUE_BYTES)
    scales = page + PAGE_SLOTS * VALUE_BYTES + slot * SCALE_BYTES + np.arange(SCALE_BYTES)
    return np.concatenate([values, scales], axis=1)


def pool_size(rows: int, item_bytes: int, paged: bool) -> int:
    return rows // PAGE_SLOTS * PAGE_BYTES if paged else rows * item_bytes


def pool_bytes(rows: int, item_bytes: int, paged: bool, salt: int) -> np.ndarray:
    """A flat pool whose items are all different, and different again for another salt. Items begin with their row."""
    rng = np.random.default_rng((salt, rows, item_bytes))
    data = rng.integers(0, 256, pool_size(rows, item_bytes, paged), dtype=np.uint8)
    named = min(item_bytes, 4)
    number = np.arange(rows, dtype=np.uint32)[:, None].view(np.uint8)[:, :named]
    data[item_index(np.arange(rows), item_bytes, paged)[:, :named]] = number
    return data


# ----------------------------------------------------------------------------------------------------
# Cases and steps


@dataclass
class Case:
    """Sizes and tables of one layer; what is asked comes step by step. top_k counts entries, tokens or blocks."""

    kind: str
    top_k: int
    hot_slots: int
    rows: int
    device_buffer_locs: np.ndarray  # int32 [requests, H + extra]
    host_cache_locs: np.ndarray  # int64 [requests, L]
    device_rows: int
    host_rows: int
    item_bytes: int = 16
    steps: int = 1
    block_tokens: int = 1
    scratch_locs: np.ndarray | None = None  # int32 [requests, capacity], several steps
    recorded: list[dict[str, Any]] = field(default_factory=list)

    @property
    def paged(self) -> bool:
        return self.kind == "dsv4"

    @property
    def several(self) -> bool:
        return self.kind == "steps"

    @property
    def columns(self) -> int:
        """Outputs of a step."""
        return self.top_k * self.block_tokens

    @property
    def requests(self) -> int:
        return len(self.device_buffer_locs)

    @property
    def extra(self) -> int:
        return self.device_buffer_locs.shape[1] - self.hot_slots

    @property
    def max_tokens(self) -> int:
        return self.host_cache_locs.shape[1]

    def is_device_row(self, loc: int) -> bool:
        return 0 <= loc < self.device_rows

    def has_host_row(self, request: int, token: int) -> bool:
        return 0 <= token < self.max_tokens and 0 <= self.host_cache_locs[request, token] < self.host_rows


@dataclass
class Step:
    """What one call asks for. top_k is [rows, K], or [rows, steps, K] for several steps."""

    req_pool_indices: np.ndarray
    seq_lens: np.ndarray  # [rows * steps]
    top_k: np.ndarray
    num_real: int | None = None

    def tokens(self, case: Case) -> np.ndarray:
        """The token of every column, int64 [rows, steps, columns]; -1 where a block is none."""
        entries = self.top_k.astype(np.int64).reshape(case.rows, case.steps, case.top_k)
        if case.kind != "blocks":
            return entries
        tokens = entries[..., None] * case.block_tokens + np.arange(case.block_tokens)
        tokens[(entries[..., None] < 0) | (tokens > INT32_MAX)] = -1
        return tokens.reshape(case.rows, 1, case.columns)

    def lengths(self, case: Case) -> np.ndarray:
        return self.seq_lens.reshape(case.rows, case.steps)

    def real_requests(self, case: Case) -> dict[int, int]:
        """Launch row -> request, without padding and requests that do not exist."""
        real = case.rows if self.num_real is None else max(0, min(self.num_real, case.rows))
        rows = enumerate(self.req_pool_indices[:real].tolist())
        return {row: request for row, request in rows if 0 <= request < case.requests}


class SpecState(NamedTuple):
    """Not the class of any module: a server brings SGLang's own."""

    cache_index: torch.Tensor
    cache_policy: torch.Tensor
    scratch_locs: torch.Tensor
    scratch_state: torch.Tensor


class Bench:
    """A case as tensors on one device: state lasts over steps, outputs are poisoned before every call.

    strided: every tensor whose stride is free gets an odd one, and outputs are larger than they must be. wide:
    whether req_pool_indices and seq_lens are int64. pool_offset: bytes by which linear pools are misaligned.
    host_on_device: the host pool lies on the device too.
    """

    def __init__(
        self,
        case: Case,
        device: str = "cpu",
        *,
        strided: bool = False,
        wide: tuple[bool, bool] = (True, True),
        pool_offset: int = 0,
        host_on_device: bool = False,
    ) -> None:
        self.case = case
        self.strided = strided
        self.wide = wide
        self.device = torch.device(device)
        self.pool_offset = pool_offset
        self.host_on_device = host_on_device
        self.memory: dict[str, torch.Tensor] = {}
        self.host_bytes: list[np.ndarray] = []
        pools = 2 if case.kind == "blocks" else 1
        self.host_pools = [self.host_pool() for _ in range(pools)]
        self.device_pools = [self.device_pool() for _ in range(pools)]
        self.planned: tuple[torch.Tensor, torch.Tensor] | None = None

        requests, slots = case.requests, case.hot_slots
        gap = 3 if strided else 0
        self.device_buffer_tokens = self.place(
            "device_buffer_tokens", np.full((requests, slots + case.extra), -1, dtype=np.int32), gap
        )
        self.device_buffer_locs = self.place("device_buffer_locs", case.device_buffer_locs.astype(np.int32), gap)
        self.host_cache_locs = self.place("host_cache_locs", case.host_cache_locs.astype(np.int64))
        if case.several:
            self.cache_index = self.place("cache_index", np.full((requests, 2, 8), -1, dtype=np.int64))
            self.cache_policy = self.place("cache_policy", np.zeros((requests + 1, slots), dtype=np.int32), gap)
            scratch = case.scratch_locs if case.scratch_locs is not None else np.zeros((requests, 0))
            self.scratch_locs = self.place("scratch_locs", scratch.astype(np.int32), gap)
            shape = (requests + 1, requests + gap)
            self.scratch_state = self.place("scratch_state", np.full(shape, POISON, dtype=np.int32), gap)
        else:
            order = np.tile(np.arange(slots), (requests, 1)).astype(np.int16)
            self.lru_slots = self.place("lru_slots", order, 1 if strided else 0)
        self.num_real_reqs = torch.tensor([case.rows], dtype=torch.int32, device=self.device)
        self.poison()

    # ------------------------------------------------------------------------------------------------ tensors

    def place(self, name: str, array: np.ndarray, gap: int = 0) -> torch.Tensor:
        """The array on the device, `gap` poisoned elements between rows; its memory is compared as a whole."""
        shape = list(array.shape)
        if gap and array.ndim == 3:
            shape[1] += 1
        shape[-1] += gap
        base = torch.from_numpy(np.full(shape, POISON, dtype=array.dtype)).to(self.device)
        view = base[tuple(slice(0, size) for size in array.shape)]
        view.copy_(torch.from_numpy(array.copy()))
        self.memory[name] = base
        return view

    def host_pool(self) -> torch.Tensor:
        """A new one, with bytes of its own, which host_bytes remembers."""
        case = self.case
        salt = len(self.host_bytes)
        self.host_bytes.append(pool_bytes(case.host_rows, case.item_bytes, case.paged, salt))
        data = torch.from_numpy(self.host_bytes[salt])
        base = torch.empty(self.pool_offset + len(data), dtype=torch.uint8)
        if self.host_on_device:
            base = base.to(self.device)
        elif self.device.type == "cuda":
            base = base.pin_memory()
        base[self.pool_offset :] = data
        return self.shaped(base, case.host_rows)

    def device_pool(self) -> torch.Tensor:
        case = self.case
        size = pool_size(case.device_rows, case.item_bytes, case.paged)
        base = torch.full((self.pool_offset + size,), UNTOUCHED, dtype=torch.uint8, device=self.device)
        return self.shaped(base, case.device_rows)

    def shaped(self, base: torch.Tensor, rows: int) -> torch.Tensor:
        pool = base[self.pool_offset :]
        return pool.view(-1, PAGE_BYTES) if self.case.paged else pool.view(rows, self.case.item_bytes)

    def poison(self) -> None:
        case = self.case
        more, gap = (2, 3) if self.strided else (0, 0)
        if case.several:
            shape: tuple[int, ...] = (case.rows, case.steps, case.top_k)
        else:
            shape = (case.rows, case.columns + more)
        self.top_k_device_locs = self.place("top_k_device_locs", np.full(shape, POISON, dtype=np.int32), gap)
        plan = (case.rows + more, case.steps * case.columns + more)
        self.miss_src = self.place("miss_src", np.full(plan, POISON, dtype=np.int64), gap)
        self.miss_dst = self.place("miss_dst", np.full(plan, POISON, dtype=np.int32), gap)
        self.miss_count = self.place("miss_count", np.full(plan[:1], POISON, dtype=np.int32))

    @property
    def state_names(self) -> tuple[str, ...]:
        own = ("cache_policy", "scratch_state") if self.case.several else ("lru_slots",)
        return ("device_buffer_tokens", *own)

    @property
    def output_names(self) -> tuple[str, ...]:
        plan = () if self.case.kind == "blocks" else ("miss_src", "miss_dst", "miss_count")
        return ("top_k_device_locs", *plan)

    def array(self, name: str) -> np.ndarray:
        return getattr(self, name).cpu().numpy()

    def out(self) -> np.ndarray:
        """Outputs as [rows, steps, columns]."""
        case = self.case
        return self.array("top_k_device_locs")[..., : case.columns].reshape(case.rows, case.steps, case.columns)

    def lru(self) -> np.ndarray:
        """LRU rows by request."""
        return self.array("cache_policy")[1:] if self.case.several else self.array("lru_slots")

    def device_bytes(self) -> list[np.ndarray]:
        return [pool.reshape(-1).cpu().numpy().copy() for pool in self.device_pools]

    # ------------------------------------------------------------------------------------------------ state

    def set_tokens(self, request: int, tokens: dict[int, int], *, names: bool = True) -> None:
        """Put tokens into slots: their bytes wherever both ends exist, and their names."""
        case = self.case
        if names:
            held = self.array("device_buffer_tokens").copy()
            held[request, list(tokens)] = list(tokens.values())
            self.device_buffer_tokens.copy_(torch.from_numpy(held))
        locs = case.device_buffer_locs[request]
        placed = [(s, t) for s, t in tokens.items() if case.is_device_row(locs[s]) and case.has_host_row(request, t)]
        if not placed:
            return
        src = item_index(case.host_cache_locs[request, [t for _, t in placed]], case.item_bytes, case.paged)
        dst = item_index(locs[[s for s, _ in placed]], case.item_bytes, case.paged)
        for host, pool in zip(self.host_bytes, self.device_pools, strict=False):
            pool.view(-1)[torch.from_numpy(dst).to(self.device)] = torch.from_numpy(host[src]).to(self.device)

    def set_lru(self, order: np.ndarray) -> None:
        """LRU rows of all requests, [requests, H]."""
        target = self.cache_policy[1:] if self.case.several else self.lru_slots
        target.copy_(torch.from_numpy(np.ascontiguousarray(order)).to(target.dtype))

    def prepare(self, step: Step) -> None:
        """What a server has done before the call; see the module's docstring."""
        case, slots = self.case, self.case.hot_slots
        for row, request in step.real_requests(case).items():
            length = int(step.lengths(case)[row].max())
            if case.several:
                # Some extra slots keep what they had, so that answers come from both places.
                newest = {slots + j: length - 1 - j for j in range(case.extra) if (length + j) % 3 and length > j}
                self.set_tokens(request, newest)
            elif length > slots:
                self.set_tokens(request, {slots: length - 1}, names=False)
            elif length > 0:
                self.set_tokens(request, {t: t for t in range(length)})

    # ------------------------------------------------------------------------------------------------ calls

    def arguments(self, step: Step, *, plan: bool = True, skip_io: bool = False) -> dict[str, Any]:
        """Keyword arguments of the operator that belongs to the case."""
        case = self.case
        if step.num_real is not None:
            self.num_real_reqs.fill_(step.num_real)
        else:
            self.num_real_reqs.fill_(case.rows)
        integers = [torch.int64 if wide else torch.int32 for wide in self.wide]
        arguments: dict[str, Any] = {
            "top_k_tokens": self.place("top_k", step.top_k.astype(np.int32), 3 if self.strided else 0),
            "device_buffer_tokens": self.device_buffer_tokens,
            "host_cache_locs": self.host_cache_locs,
            "device_buffer_locs": self.device_buffer_locs,
            "top_k_device_locs": self.top_k_device_locs,
            "req_pool_indices": torch.from_numpy(step.req_pool_indices).to(self.device, integers[0]),
            "seq_lens": torch.from_numpy(step.seq_lens).to(self.device, integers[1]),
        }
        if case.kind == "blocks":
            arguments["top_k_blocks"] = arguments.pop("top_k_tokens")
            arguments["host_cache_k"], arguments["host_cache_v"] = self.host_pools
            arguments["device_buffer_k"], arguments["device_buffer_v"] = self.device_pools
            arguments["sparse_block_size"] = case.block_tokens
        else:
            arguments["host_cache"], arguments["device_buffer"] = self.host_pools[0], self.device_pools[0]
            if plan:
                arguments |= {name: getattr(self, name) for name in ("miss_src", "miss_dst", "miss_count")}
        if case.several:
            arguments["state"] = SpecState(self.cache_index, self.cache_policy, self.scratch_locs, self.scratch_state)
            arguments["num_real_reqs"] = self.num_real_reqs
            return arguments
        arguments |= {
            "lru_slots": self.lru_slots,
            "item_size_bytes": case.item_bytes,
            "hot_buffer_size": case.hot_slots,
            "skip_io": skip_io,
            "num_real_reqs": None if step.num_real is None else self.num_real_reqs,
        }
        if case.kind != "blocks":
            arguments["num_top_k"] = case.top_k
        return arguments

    def operator(self, operators: ModuleType) -> Any:
        names = {
            "linear": "load_cache_to_device_buffer_mla",
            "dsv4": "load_cache_to_device_buffer_dsv4_mla",
            "blocks": "load_blocks_to_device_buffer_mha",
            "steps": "load_cache_to_device_buffer_spec_mla",
        }
        return getattr(operators, names[self.case.kind])

    def swap_in(
        self,
        operators: ModuleType,
        step: Step,
        *,
        plan: bool = True,
        skip_io: bool = False,
        **options: Any,
    ) -> None:
        """One call on poisoned outputs. plan: record one (where the operator can). options: further arguments."""
        self.poison()
        self.before = {name: self.memory[name].cpu().numpy().copy() for name in self.state_names}
        self.lru_before = self.lru().copy()
        self.tokens_before = self.array("device_buffer_tokens").copy()
        self.bytes_before = self.device_bytes()
        arguments = self.arguments(step, plan=plan, skip_io=skip_io) | options
        self.operator(operators)(**arguments)

    def run(self, operators: ModuleType, step: Step, **options: Any) -> None:
        self.prepare(step)
        self.swap_in(operators, step, **options)

    def replay(self, operators: ModuleType, **options: Any) -> None:
        """Copy the recorded plan for another layer, whose pools are made at the first call, and check its bytes."""
        case = self.case
        if self.planned is None:
            self.planned = self.host_pool(), self.device_pool()
        host, target = self.planned
        expected = target.reshape(-1).cpu().numpy().copy()
        real = max(0, min(case.rows, int(self.num_real_reqs.item())))
        self.apply(expected, self.host_bytes[-1], [load for row in range(real) for load in self.loads(row)])
        plan = {name: getattr(self, name)[: case.rows] for name in ("miss_src", "miss_dst", "miss_count")}
        recorded = {name: tensor.clone() for name, tensor in plan.items()}
        # Padding rows still have what an earlier, fuller batch left there.
        for name, value in (("miss_src", 0), ("miss_dst", 0), ("miss_count", 1)):
            plan[name][real:] = value
        operators.copy_cache_planned_mla(
            **plan,
            num_real_reqs=self.num_real_reqs,
            host_cache=host,
            device_buffer=target,
            item_size_bytes=case.item_bytes,
            is_dsv4_layout=case.paged,
            **options,
        )
        np.testing.assert_array_equal(target.reshape(-1).cpu().numpy(), expected, err_msg="planned copy")
        for name, tensor in recorded.items():
            plan[name].copy_(tensor)

    # ------------------------------------------------------------------------------------------------ checks

    def loads(self, row: int) -> list[tuple[int, int]]:
        """The plan of a launch row."""
        count = int(self.miss_count[row])
        return list(zip(self.miss_src[row, :count].tolist(), self.miss_dst[row, :count].tolist(), strict=True))

    def apply(self, pool: np.ndarray, host: np.ndarray, loads: list[tuple[int, int]]) -> None:
        """Copy items from a flat host pool to a flat device pool."""
        case = self.case
        loads = [(src, dst) for src, dst in loads if 0 <= src < case.host_rows and case.is_device_row(dst)]
        if loads:
            src, dst = np.array(loads).T
            pool[item_index(dst, case.item_bytes, case.paged)] = host[item_index(src, case.item_bytes, case.paged)]

    def assert_equal(self, other: Bench, where: str = "", names: tuple[str, ...] | None = None) -> None:
        """Outputs and state, with what lies between their rows, and the device pools."""
        for name in names or (*self.output_names, *self.state_names):
            mine, its = self.memory[name].cpu().numpy(), other.memory[name].cpu().numpy()
            np.testing.assert_array_equal(mine, its, err_msg=f"{where} {name}")
        for mine, its in zip(self.device_bytes(), other.device_bytes(), strict=True):
            np.testing.assert_array_equal(mine, its, err_msg=f"{where} device pool")

    def assert_contract(self, step: Step, *, clean: bool = False, plan: bool = True) -> None:
        """What the last call must have done, found out without an LRU and without the reference.

        clean: tables and ids are such that every valid column must have a row. plan: a plan was recorded.
        """
        self.assert_inputs_kept()
        case = self.case
        real = step.real_requests(case)
        out, tokens, lengths = self.out(), step.tokens(case), step.lengths(case)
        loads: list[tuple[int, int]] = []
        touched: set[int] = set()
        for row in range(case.rows):
            padded = step.num_real is not None and row >= step.num_real
            if row in real:
                asked = self.check_columns(real[row], out[row], tokens[row], lengths[row], clean)
                loads += self.check_state(real[row], asked, row if plan and case.kind != "blocks" else None)
                if asked:
                    touched.add(real[row])
            else:
                assert (out[row] == (0 if padded and case.several else -1)).all(), f"row {row} is padding"
                if plan and case.kind != "blocks":
                    untouched = padded and not case.several
                    assert self.miss_count[row] == (POISON if untouched else 0), f"miss_count of row {row}"
        kept = [r for r in range(case.requests) if r not in touched]
        np.testing.assert_array_equal(self.lru()[kept], self.lru_before[kept])
        np.testing.assert_array_equal(self.array("device_buffer_tokens")[kept], self.tokens_before[kept])
        # Nothing but the loaded items changed in the pools, down to the unused bytes of a page.
        for before, host, now in zip(self.bytes_before, self.host_bytes, self.device_bytes(), strict=False):
            expected = before.copy()
            self.apply(expected, host, loads)
            np.testing.assert_array_equal(now, expected, err_msg="device pool")

    def assert_inputs_kept(self) -> None:
        """Tables and host pools are as they were, and what lies between the rows of outputs and state is poison."""
        case = self.case
        np.testing.assert_array_equal(self.array("device_buffer_locs"), case.device_buffer_locs)
        np.testing.assert_array_equal(self.array("host_cache_locs"), case.host_cache_locs)
        if case.scratch_locs is not None:
            np.testing.assert_array_equal(self.array("scratch_locs"), case.scratch_locs)
            assert (self.cache_index == -1).all()
        for host, data in zip(self.host_pools, self.host_bytes, strict=False):
            np.testing.assert_array_equal(host.reshape(-1).cpu().numpy(), data, err_msg="host pool")
        for name in (*self.output_names, *self.state_names):
            base = self.memory[name].clone()
            view = getattr(self, name)
            if name == "top_k_device_locs" and not case.several:
                view = view[:, : case.columns]
            base[tuple(slice(0, size) for size in view.shape)] = POISON
            assert (base == POISON).all(), f"{name}: written beside its rows"

    def check_columns(
        self, request: int, out: np.ndarray, tokens: np.ndarray, lengths: np.ndarray, clean: bool
    ) -> dict[int, int]:
        """Every column of a real row. Returns the tokens that the LRU answers for, with their rows, in miss order."""
        case, slots = self.case, self.case.hot_slots
        locs, held = case.device_buffer_locs[request], self.tokens_before[request]
        own = set(locs.tolist())
        if case.scratch_locs is not None:
            own |= set(case.scratch_locs[request].tolist())
        asked: dict[int, int] = {}
        given: dict[int, int] = {}
        checked: list[tuple[int, int]] = []
        for step in range(case.steps):
            length = int(lengths[step])
            short = not case.several and length <= slots
            for column, (token, where) in enumerate(zip(tokens[step].tolist(), out[step].tolist(), strict=True)):
                valid = 0 <= token < length and not (short and case.kind != "blocks" and column >= length)
                if not valid:
                    assert where == -1, f"token {token} of {length}, column {column}"
                    continue
                if short:
                    assert where == (locs[token] if case.is_device_row(locs[token]) else -1)
                elif not case.several and token == length - 1:
                    assert where == (locs[slots] if case.is_device_row(locs[slots]) else -1)
                else:
                    row = None
                    if case.several and token >= length - case.extra:
                        at = np.flatnonzero(held[slots:] == token)
                        row = int(locs[slots + at[0]]) if len(at) and case.is_device_row(locs[slots + at[0]]) else None
                    if row is not None:
                        assert where == row, f"token {token} is in an extra slot"
                    elif token >= case.max_tokens:
                        assert where == -1
                        continue
                    else:
                        assert asked.setdefault(token, where) == where, f"token {token} has two rows"
                assert where >= 0 or not clean, f"token {token} of {length} has no row"
                if where >= 0:
                    assert where in own, f"row {where} is not the request's"
                    assert given.setdefault(where, token) == token, f"row {where} for two tokens"
                    if case.has_host_row(request, token):
                        checked.append((token, where))
        if checked:
            numbers, rows = np.array(checked).T
            src = item_index(case.host_cache_locs[request, numbers], case.item_bytes, case.paged)
            dst = item_index(rows, case.item_bytes, case.paged)
            for host, now in zip(self.host_bytes, self.device_bytes(), strict=False):
                wrong = (host[src] != now[dst]).any(axis=1)
                assert not wrong.any(), f"bytes of (token, row) {np.array(checked)[wrong][:5].tolist()}"
        return asked

    def check_state(self, request: int, asked: dict[int, int], row: int | None) -> list[tuple[int, int]]:
        """State and plan (of launch row `row`, None: there is none) of a real row. Returns its copies."""
        case, slots = self.case, self.case.hot_slots
        locs, before = case.device_buffer_locs[request], self.tokens_before[request, :slots]
        now, lru = self.array("device_buffer_tokens")[request, :slots], self.lru()[request]
        held = set(before.tolist())
        missing = [token for token in asked if token not in held and case.has_host_row(request, token)]
        hits = [token for token in asked if token in held]
        room = slots - len(hits)
        scratch = [] if case.scratch_locs is None else case.scratch_locs[request].tolist()
        loaded, beyond = missing[:room], missing[room : room + len(scratch)]
        loads = [(int(case.host_cache_locs[request, token]), asked[token]) for token in loaded + beyond]
        np.testing.assert_array_equal(
            self.array("device_buffer_tokens")[request, slots:], self.tokens_before[request, slots:]
        )
        for token in missing[room + len(scratch) :]:
            assert asked[token] == -1
        for token, loc in zip(beyond, scratch, strict=False):
            assert asked[token] == (loc if case.is_device_row(loc) else -1)
        if asked:
            assert sorted(lru.tolist()) == list(range(slots)), "the LRU is no permutation"
            # The newest positions: loaded slots in miss order, then hits.
            newest = lru[slots - len(hits) :].tolist()
            assert {int(before[slot]) for slot in newest} == set(hits)
            fresh = lru[slots - len(hits) - len(loaded) : slots - len(hits)].tolist()
            for token, slot in zip(loaded, fresh, strict=True):
                usable = case.is_device_row(locs[slot])
                assert asked[token] == (locs[slot] if usable else -1)
                assert now[slot] == (token if usable else -1)
            kept = np.setdiff1d(np.arange(slots), fresh)
            np.testing.assert_array_equal(now[kept], before[kept])
        if row is not None:
            assert self.loads(row) == loads
            assert (self.miss_src[row, len(loads) :] == POISON).all()
            assert (self.miss_dst[row, len(loads) :] == POISON).all()
        if case.several:
            assert self.scratch_state[0, request] == len(loads)
        return loads


# ----------------------------------------------------------------------------------------------------
# Builders


def make_case(
    kind: str = "linear",
    *,
    seed: int = 0,
    top_k: int = 8,
    hot_slots: int = 16,
    extra: int = 1,
    rows: int = 2,
    spare_requests: int = 1,
    max_tokens: int | None = None,
    item_bytes: int = 16,
    steps: int = 2,
    block_tokens: int = 4,
    scratch_rows: int | None = None,
    lost_slots: float = 0.0,
    holes: float = 0.0,
) -> Case:
    """A valid case with shuffled rows. hot_slots is raised to what a step needs.

    scratch_rows: several steps; None: as many as the largest union can need. lost_slots, holes: shares of slots
    without a device row and of tokens without a host row.
    """
    rng = np.random.default_rng(seed)
    block_tokens = block_tokens if kind == "blocks" else 1
    steps = steps if kind == "steps" else 1
    columns = top_k * block_tokens
    hot_slots = max(hot_slots, columns)
    requests = rows + spare_requests
    max_tokens = 3 * hot_slots + 7 if max_tokens is None else max_tokens
    scratch = 0
    if kind == "steps":
        scratch = max(0, steps * columns - hot_slots) if scratch_rows is None else scratch_rows
        item_bytes = max(1, item_bytes)
    if kind == "dsv4":
        item_bytes = PAGED_ITEM
    per_request = hot_slots + extra + scratch
    device_rows = -(-(requests * per_request + 3) // PAGE_SLOTS) * PAGE_SLOTS
    host_rows = -(-(requests * max_tokens + 5) // PAGE_SLOTS) * PAGE_SLOTS
    device = rng.permutation(device_rows)[: requests * per_request].reshape(requests, per_request).astype(np.int32)
    host = rng.permutation(host_rows)[: requests * max_tokens].reshape(requests, max_tokens).astype(np.int64)
    lost = rng.random(device.shape) < lost_slots
    device[lost] = rng.choice([-1, -(2**31), device_rows, INT32_MAX], lost.sum())
    gone = rng.random(host.shape) < holes
    host[gone] = rng.choice([-1, -(2**63), host_rows, 2**32, 2**63 - 1], gone.sum())
    return Case(
        kind=kind,
        top_k=top_k,
        hot_slots=hot_slots,
        rows=rows,
        device_buffer_locs=device[:, : hot_slots + extra],
        host_cache_locs=host,
        device_rows=device_rows,
        host_rows=host_rows,
        item_bytes=item_bytes,
        steps=steps,
        block_tokens=block_tokens,
        scratch_locs=device[:, hot_slots + extra :] if kind == "steps" else None,
    )


def random_step(
    case: Case,
    rng: np.random.Generator,
    *,
    spread: float = 1.0,
    invalid: float = 0.0,
    duplicates: float = 0.0,
    short: float = 0.3,
    padding: float = 0.0,
    wild: float = 0.0,
    lengths: np.ndarray | None = None,
) -> Step:
    """Distinct requests; distinct tokens within a row and step, below its length.

    spread < 1 narrows the range of tokens, so that later steps hit. invalid, duplicates: shares of hostile and of
    repeated entries. short: share of rows that fit their slots. padding: chance of padding rows. wild: share of
    requests and lengths out of range. lengths: [rows], instead of random ones.
    """
    rows, steps, slots = case.rows, case.steps, case.hot_slots
    requests = rng.permutation(case.requests)[:rows].astype(np.int64)
    if lengths is None:
        few = np.array([0, 1, slots - 1, slots, int(rng.integers(0, slots + 1))])
        many = np.array([slots + 1, slots + 2, case.max_tokens, int(rng.integers(slots + 1, case.max_tokens + 1))])
        fits = rng.random(rows) < short
        lengths = np.where(fits, rng.choice(few, rows), rng.choice(many, rows))
    # The step before the last one sees one token less, and so on.
    per_step = np.maximum(lengths[:, None] - (steps - 1) + np.arange(steps), 0).astype(np.int64)
    strange = rng.random(rows) < wild
    requests[strange] = rng.choice([-1, case.requests, 2**31 - 1, -(2**31)], strange.sum())
    strange = rng.random(per_step.shape) < wild
    per_step[strange] = rng.choice([-1, -(2**31), case.max_tokens + 3, 2**31 - 1], strange.sum())

    entries = np.full((rows, steps, case.top_k), -1, dtype=np.int64)
    for row in range(rows):
        for step in range(steps):
            limit = min(int(per_step[row, step]), case.max_tokens)
            limit = min(-(-limit // case.block_tokens), max(1, int(limit * spread / case.block_tokens)))
            chosen = rng.permutation(limit)[: case.top_k] if limit > 0 else np.zeros(0, dtype=np.int64)
            if case.block_tokens == 1 and 0 < per_step[row, step] <= case.max_tokens and rng.random() < 0.5:
                # Attention always wants the newest token.
                newest = per_step[row, step] - 1
                if newest not in chosen:
                    chosen[int(rng.integers(len(chosen)))] = newest
            entries[row, step, : len(chosen)] = chosen
            again = rng.random(case.top_k) < duplicates
            entries[row, step, again] = rng.choice(entries[row, step], again.sum())
            bad = rng.random(case.top_k) < invalid
            hostile = [-1, -7, -(2**31), int(np.clip(per_step[row, step], 0, INT32_MAX)), case.max_tokens, INT32_MAX]
            entries[row, step, bad] = rng.choice(hostile, bad.sum())
    num_real = None
    if rng.random() < padding:
        num_real = int(rng.choice([-1, 0, rows - 1, rows, rows + 3, int(rng.integers(0, rows + 1))]))
    shape = (rows, steps, case.top_k) if case.several else (rows, case.top_k)
    return Step(requests, per_step.reshape(-1), entries.astype(np.int32).reshape(shape), num_real)


def step_of(
    case: Case, *rows: list[int], lengths: list[int], requests: list[int] | None = None, **options: Any
) -> Step:
    """A step by hand; for several steps a row lists the entries of all its steps."""
    entries = np.array(rows, dtype=np.int64).reshape(case.rows, -1)
    if case.several:
        entries = entries.reshape(case.rows, case.steps, case.top_k)
    indices = np.array(range(case.rows) if requests is None else requests, dtype=np.int64)
    return Step(indices, np.array(lengths, dtype=np.int64), entries.astype(np.int32), **options)


# ----------------------------------------------------------------------------------------------------
# Hypothesis


@dataclass
class Sequence:
    """A case, what is asked step by step, and whether state is corrupted before a step."""

    case: Case
    steps: list[Step]
    corrupt_lru_before: list[bool]
    corrupt_tokens_before: list[bool]
    seed: int
    strided: bool
    wide: tuple[bool, bool]
    pool_offset: int

    def bench(self, device: str = "cpu") -> Bench:
        return Bench(self.case, device, strided=self.strided, wide=self.wide, pool_offset=self.pool_offset)

    def __repr__(self) -> str:
        case = self.case
        sizes = {k: v for k, v in vars(case).items() if isinstance(v, (int, str))}
        return f"Sequence(seed={self.seed}, {sizes}, strided={self.strided}, wide={self.wide}, steps={self.steps})"


@st.composite
def sequences(draw: Any, kinds: tuple[str, ...] = KINDS, *, hostile: bool = True, max_steps: int = 4) -> Sequence:
    """Steps over small tables: short and long rows together, padding, sizes around multiples of 32, K = H.

    hostile: bad and repeated entries, requests and lengths out of range, slots and tokens without rows, too little
    scratch, corrupt LRU rows, tokens in several slots and tokens that cannot be.
    """
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    kind = draw(st.sampled_from(kinds))
    block_tokens = draw(st.sampled_from([1, 2, 3, 8])) if kind == "blocks" else 1
    top_k = draw(st.sampled_from([1, 2, 3, 5, 8, 31, 32, 33]))
    if block_tokens > 2:
        top_k = min(top_k, 8)
    columns = top_k * block_tokens
    steps = draw(st.sampled_from([2, 3, 4])) if kind == "steps" else 1
    hot_slots = draw(st.sampled_from([columns, columns + 1, columns + 3, 2 * columns, 2 * columns + 32]))
    case = make_case(
        kind,
        seed=seed,
        top_k=top_k,
        hot_slots=hot_slots,
        extra=draw(st.sampled_from([1, 2, 4, 7])),
        rows=draw(st.integers(1, 4)),
        spare_requests=draw(st.integers(0, 2)),
        max_tokens=hot_slots + draw(st.sampled_from([1, 5, hot_slots + 9])),
        item_bytes=draw(st.sampled_from([7, 16, 132])),
        steps=steps,
        block_tokens=block_tokens,
        scratch_rows=draw(st.sampled_from([None, 0, 3])) if hostile else None,
        lost_slots=draw(st.sampled_from([0.0, 0.1])) if hostile else 0.0,
        holes=draw(st.sampled_from([0.0, 0.2])) if hostile else 0.0,
    )
    count = draw(st.integers(1, max_steps))
    asked = [
        random_step(
            case,
            rng,
            spread=draw(st.sampled_from([0.3, 0.7, 1.0])),
            invalid=0.15 if hostile else 0.0,
            duplicates=0.2 if hostile else 0.0,
            padding=0.3,
            wild=0.1 if hostile else 0.0,
        )
        for _ in range(count)
    ]
    flags = st.lists(st.booleans() if hostile else st.just(False), min_size=count, max_size=count)
    return Sequence(
        case,
        asked,
        draw(flags),
        draw(flags),
        seed,
        strided=draw(st.booleans()),
        wide=(draw(st.booleans()), draw(st.booleans())),
        pool_offset=0 if kind == "dsv4" else draw(st.sampled_from([0, 0, 1, 4, 8])),
    )


def corrupt_before_step(sequence: Sequence, number: int, benches: list[Bench]) -> None:
    """Put the same corruption into the state of every bench. A token that is named in a slot is there, too."""
    case = sequence.case
    rng = np.random.default_rng((sequence.seed, number))
    if sequence.corrupt_lru_before[number]:
        lru = benches[0].lru().copy()
        corrupt_lru(lru, rng)
        for bench in benches:
            bench.set_lru(lru)
    if sequence.corrupt_tokens_before[number]:
        for request in range(case.requests):
            slots = np.flatnonzero(rng.random(case.hot_slots + case.extra) < 0.3)
            tokens = rng.integers(0, min(case.max_tokens, case.hot_slots + 1), len(slots))
            wild = rng.random(len(slots)) < 0.2
            tokens[wild] = rng.choice([-1, -5, case.max_tokens, INT32_MAX], wild.sum())
            for bench in benches:
                bench.set_tokens(request, dict(zip(slots.tolist(), tokens.tolist(), strict=True)))


# ----------------------------------------------------------------------------------------------------
# Transfers


class Transfer:
    """Pools of several layers in pages, named by their addresses: from pinned host memory to the device, or back."""

    def __init__(
        self, device: str = "cpu", *, layers: int = 3, count: int = 50, seed: int = 0, to_host: bool = False
    ) -> None:
        rng = np.random.default_rng(seed)
        self.device = torch.device(device)
        sizes = {"src": 2 * PAGE_SLOTS, "dst": 3 * PAGE_SLOTS}
        self.src = [torch.from_numpy(pool_bytes(sizes["src"], PAGED_ITEM, True, salt)) for salt in range(layers)]
        self.dst = [torch.full((3 * PAGE_BYTES,), UNTOUCHED, dtype=torch.uint8) for _ in range(layers)]
        if self.device.type == "cuda":
            near, far = (self.src, self.dst) if to_host else (self.dst, self.src)
            near[:] = [pool.to(self.device) for pool in near]
            far[:] = [pool.pin_memory() for pool in far]
        self.rows = {
            side: rng.permutation(size)[:count] if count <= size else rng.integers(0, size, count)
            for side, size in sizes.items()
        }
        # Padding: a negative index on either side, or on both.
        for side, at in (("src", slice(3, 5)), ("dst", slice(4, 7))):
            self.rows[side][at] = -1 - np.arange(len(self.rows[side][at]))

    def tensor(self, values: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def arguments(self) -> dict[str, torch.Tensor]:
        return {
            "src_ptrs": self.tensor([pool.data_ptr() for pool in self.src], torch.uint64),
            "dst_ptrs": self.tensor([pool.data_ptr() for pool in self.dst], torch.uint64),
            "src_indices": self.tensor(self.rows["src"].tolist(), torch.int64),
            "dst_indices": self.tensor(self.rows["dst"].tolist(), torch.int64),
        }

    def run(self, operators: ModuleType, **options: Any) -> None:
        operators.transfer_cache_dsv4_mla(**self.arguments(), **options)

    def assert_copied(self) -> None:
        """Every item of every layer, and not a byte more."""
        wanted = (self.rows["src"] >= 0) & (self.rows["dst"] >= 0)
        src = item_index(self.rows["src"][wanted], PAGED_ITEM, True)
        dst = item_index(self.rows["dst"][wanted], PAGED_ITEM, True)
        for source, target in zip(self.src, self.dst, strict=True):
            expected = np.full(target.numel(), UNTOUCHED, dtype=np.uint8)
            expected[dst] = source.cpu().numpy()[src]
            np.testing.assert_array_equal(target.cpu().numpy(), expected)


# ----------------------------------------------------------------------------------------------------
# Recorded outputs and worked values


def golden_cases() -> Iterator[Case]:
    """The recorded cases of SGLang's kernel; `case.recorded` has their steps as in the file."""
    for record in json.loads(gzip.decompress((DATA / "swapin_a.json.gz").read_bytes())):
        device = np.array(record["device_buffer_locs"], dtype=np.int32)
        host = np.array(record["host_cache_locs"], dtype=np.int64)
        assert device.shape[1] == record["H"] + record["page"]
        assert host.shape == (record["nreq"], record["L"])
        yield Case(
            kind="linear",
            top_k=record["K"],
            hot_slots=record["H"],
            rows=record["bs"],
            device_buffer_locs=device,
            host_cache_locs=host,
            device_rows=int(device.max()) + 1,
            host_rows=int(host.max()) + 1,
            recorded=[record | step for step in record["steps"]],
        )


def golden_step(case: Case, number: int) -> Step:
    record = case.recorded[number]
    return Step(
        np.array(record["req_pool_indices"], dtype=np.int64),
        np.array(record["seq_lens"], dtype=np.int64),
        np.array(record["ids"], dtype=np.int32),
        record["num_real_reqs"],
    )


def golden_expectation(case: Case, number: int) -> dict[str, np.ndarray]:
    """What a step must give, by argument name. Upstream leaves the output of a -1 entry of a long row; ours is -1."""
    record = case.recorded[number]
    out = np.array(record["out"])
    out[(np.array(record["ids"]) == -1) & (out == POISON)] = -1

    def plan(rows: list[list[int]]) -> np.ndarray:
        return np.array([row + [POISON] * (case.top_k - len(row)) for row in rows])

    return {
        "top_k_device_locs": out,
        "miss_count": np.array(record["miss_count"]),
        "miss_src": plan(record["miss_src"]),
        "miss_dst": plan(record["miss_dst"]),
        "lru_slots": np.array(record["lru"]),
        "device_buffer_tokens": np.array(record["tokens"]),
    }


def assert_recorded(bench: Bench, operators: ModuleType) -> None:
    """Every step of a recorded case gives what SGLang's kernel gave."""
    for number in range(len(bench.case.recorded)):
        bench.swap_in(operators, golden_step(bench.case, number))
        for name, expected in golden_expectation(bench.case, number).items():
            got = bench.array(name)[tuple(slice(0, size) for size in expected.shape)]
            np.testing.assert_array_equal(got, expected, err_msg=f"step {number} {name}")


def worked_case(kind: str = "linear", **changes: Any) -> Case:
    """K 3, H 4, one request: slots 0 to 3 are rows 9, 7, 3 and 5, the slot behind them is row 11; token t is host row
    50 - t of 64."""
    case = Case(
        kind=kind,
        top_k=3,
        hot_slots=4,
        rows=1,
        device_buffer_locs=np.array([[9, 7, 3, 5, 11]], dtype=np.int32),
        host_cache_locs=50 - np.arange(20, dtype=np.int64)[None],
        device_rows=64,
        host_rows=64,
        item_bytes=PAGED_ITEM if kind == "dsv4" else 16,
        steps=2 if kind == "steps" else 1,
        scratch_locs=np.array([[20, 21]], dtype=np.int32) if kind == "steps" else None,
    )
    for name, value in changes.items():
        setattr(case, name, value)
    return case
