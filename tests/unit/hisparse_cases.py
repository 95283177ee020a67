"""HiSparse test material: cases with tables and state, id sequences, Hypothesis strategies, recorded outputs.

A `Case` is plain NumPy, so that one case can run through the reference, the CPU backend and the GPU:

    case = make_case(seed=1, top_k=33, hot_slots=64, rows=3)
    bench = Bench(case, device="cuda")        # caches, tables, fresh state and poisoned outputs as tensors
    bench.resolve(hotplan.hisparse, ids)      # any module with the operators' names
    bench.assert_equal(other_bench)           # outputs, state and hot bytes; a failure names the argument
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

DATA = Path(__file__).resolve().parent.parent / "data"
POISON = -999
"""Outputs are filled with it before every call: what keeps it was not written."""


@dataclass
class Case:
    """Sizes, tables and options of one group of layers; ids come step by step."""

    top_k: int
    hot_slots: int
    block_size: int
    rows: int
    state_rows: int
    host_rows: int
    hot_blocks: int
    hot_block_table: np.ndarray
    row_bytes: int = 16
    request_state_indices: np.ndarray | None = None
    request_ids: np.ndarray | None = None
    source_block_table: np.ndarray | None = None
    source_block_size: int = 0
    resident_block_table: np.ndarray | None = None
    resident_null_block: int = 0
    attention_block_stride: int = 0
    max_union_rows: int | None = None
    page_gap_bytes: int = 0
    steps: list[dict[str, Any]] = field(default_factory=list)

    def request_of(self, row: int) -> int:
        return row if self.request_ids is None else int(self.request_ids[row])

    def state_of(self, row: int) -> int:
        """The state row of a launch row, -1 for padding."""
        request = self.request_of(row)
        state = request
        if self.request_state_indices is not None:
            in_range = 0 <= request < len(self.request_state_indices)
            state = int(self.request_state_indices[request]) if in_range else -1
        owns_hot_rows = 0 <= request < len(self.hot_block_table)
        return state if owns_hot_rows and 0 <= state < self.state_rows else -1


def host_bytes(host_rows: int, row_bytes: int, generation: int = 0) -> np.ndarray:
    """A host pool whose rows are all different, and different again in the next generation."""
    rng = np.random.default_rng(generation)
    data = rng.integers(0, 256, (host_rows, row_bytes), dtype=np.uint8)
    data[:, :8] = np.arange(host_rows, dtype=np.int64)[:, None].view(np.uint8)
    return data


class Bench:
    """A case as tensors on one device: state lasts over steps, outputs are poisoned before every call.

    strided: every tensor whose stride is free gets an odd one. `swap_counts` is always one element too long.
    """

    OUTPUTS = (
        "hot_indices",
        "attention_indices",
        "miss_mask",
        "resolved_global_indices",
        "valid_counts",
        "swap_host_physical_rows",
        "swap_device_physical_rows",
        "swap_counts",
    )
    STATE = ("device_global_indices", "lru_slots", "stats")

    def __init__(
        self,
        case: Case,
        device: str = "cpu",
        *,
        strided: bool = False,
        stats_dtype: torch.dtype = torch.int64,
    ) -> None:
        self.case = case
        self.strided = strided
        self.device = torch.device(device)
        pinned = self.device.type == "cuda"
        host = torch.from_numpy(host_bytes(case.host_rows, case.row_bytes))
        self.host_cache = host.pin_memory() if pinned else host
        # A gap between pages makes the block stride differ from the block's size; an odd one misaligns pages.
        page_bytes = case.block_size * case.row_bytes + case.page_gap_bytes
        pool = torch.zeros(case.hot_blocks * page_bytes, dtype=torch.uint8, device=self.device)
        self.hot_pool = pool
        self.hot_cache = pool.as_strided(
            (case.hot_blocks, case.block_size, case.row_bytes), (page_bytes, case.row_bytes, 1)
        )
        self.tables = {
            name: self.tensor(getattr(case, name))
            for name in ("request_state_indices", "request_ids", "source_block_table", "resident_block_table")
        }
        self.hot_block_table = self.tensor(case.hot_block_table)
        shape = (case.state_rows, case.hot_slots)
        self.device_global_indices = torch.full(shape, -1, dtype=torch.int32, device=self.device)
        slots = torch.arange(case.hot_slots, dtype=torch.int32).to(torch.int16)
        self.lru_slots = slots.repeat(case.state_rows, 1).to(self.device)
        self.stats = torch.zeros(2, dtype=stats_dtype, device=self.device)
        self.poison()

    def tensor(self, array: np.ndarray | None) -> torch.Tensor | None:
        if array is None:
            return None
        dense = torch.from_numpy(array.copy()).to(self.device)
        return self.spread(dense) if self.strided and dense.dim() == 2 else dense

    def spread(self, dense: torch.Tensor) -> torch.Tensor:
        """The same values with a free row stride (2-D) or stride (1-D); what lies between is poison."""
        if dense.dim() == 1:
            wide = torch.full((3 * len(dense),), POISON, dtype=dense.dtype, device=dense.device)[::3]
        else:
            wide = torch.full((len(dense), dense.shape[1] + 3), POISON, dtype=dense.dtype, device=dense.device)
            wide = wide[:, : dense.shape[1]]
        wide.copy_(dense)
        return wide

    def poison(self) -> None:
        rows, top_k = self.case.rows, self.case.top_k
        for name in self.OUTPUTS:
            shape = {"valid_counts": (rows,), "swap_counts": (rows + 1,)}.get(name, (rows, top_k))
            output = torch.full(shape, POISON, dtype=torch.int32, device=self.device)
            if self.strided and name in ("valid_counts", "attention_indices"):
                output = self.spread(output)
            setattr(self, name, output)

    def options(self, *names: str) -> dict[str, Any]:
        """Keyword arguments of resolve_residency; `names` selects optional outputs (none: all of them)."""
        case = self.case
        chosen = names or (*self.OUTPUTS[1:], "stats")
        options = {name: getattr(self, name) for name in chosen}
        options |= {name: tensor for name, tensor in self.tables.items() if tensor is not None}
        if case.source_block_table is not None:
            options["source_block_size"] = case.source_block_size
        if case.resident_block_table is not None:
            options["resident_block_size"] = case.block_size
            options["resident_null_block"] = case.resident_null_block
        if "attention_indices" in options:
            options["attention_block_stride"] = case.attention_block_stride
        if case.max_union_rows is not None:
            options["max_union_rows"] = case.max_union_rows
        return options

    def arguments(self, ids: np.ndarray) -> tuple[torch.Tensor, ...]:
        """The seven positional arguments of resolve_residency and swap_in."""
        return (
            self.host_cache,
            self.hot_cache,
            self.hot_block_table,
            self.tensor(np.asarray(ids, dtype=np.int32)),
            self.hot_indices,
            self.device_global_indices,
            self.lru_slots,
        )

    def resolve(self, operators: ModuleType, ids: np.ndarray, operator: str = "resolve_residency") -> None:
        self.poison()
        getattr(operators, operator)(*self.arguments(ids), **self.options())

    def plan(self, operators: ModuleType, ids: np.ndarray) -> Any:
        self.poison()
        names = [n for n in self.OUTPUTS[1:] if not n.startswith("swap_")]
        arguments = list(self.arguments(ids))
        del arguments[4]
        plan = operators.plan_swap_in(*arguments, **self.options(*names, "stats"))
        self.hot_indices = plan.hot_indices
        return plan

    def array(self, name: str) -> np.ndarray:
        return getattr(self, name).cpu().numpy()

    def hot_bytes(self) -> np.ndarray:
        """The hot cache as [hot_rows, row_bytes]."""
        return self.hot_cache.cpu().numpy().reshape(-1, self.case.row_bytes)

    def assert_equal(self, other: Bench, where: str = "", names: tuple[str, ...] = OUTPUTS + STATE) -> None:
        for name in names:
            mine, its = self.array(name), other.array(name)
            np.testing.assert_array_equal(mine.astype(np.int64), its.astype(np.int64), err_msg=f"{where} {name}")
        assert torch.equal(self.hot_pool.cpu(), other.hot_pool.cpu()), f"{where} hot_cache"


# ----------------------------------------------------------------------------------------------------
# Builders


def make_case(
    *,
    seed: int = 0,
    top_k: int = 8,
    hot_slots: int = 16,
    block_size: int = 4,
    rows: int = 2,
    spare_states: int = 0,
    host_rows: int = 100,
    row_bytes: int = 16,
    mode: str = "plain",
    padding: float = 0.0,
    resident: float = 0.0,
    holes: float = 0.0,
    steps_per_request: int = 1,
    union: bool = False,
    attention_gap: int = 3,
    page_gap_bytes: int = 0,
) -> Case:
    """A valid case with shuffled pages.

    mode: "plain" (row = state row), "state" (request_state_indices) or "tables" (request ids, source pages
    and, where resident > 0, resident pages). padding, resident, holes: shares of padding requests, resident
    pages and null source pages. steps_per_request: adjacent rows of every request (mode "tables").
    union: ask for the union rule.
    """
    rng = np.random.default_rng(seed)
    requests = -(-rows // steps_per_request)
    states = requests + spare_states
    pages = -(-hot_slots // block_size)
    hot_blocks = requests * pages + 2
    table = rng.permutation(hot_blocks)[: requests * pages].reshape(requests, pages).astype(np.int32)
    case = Case(
        top_k=top_k,
        hot_slots=hot_slots,
        block_size=block_size,
        rows=rows,
        state_rows=states,
        host_rows=host_rows,
        hot_blocks=hot_blocks,
        hot_block_table=table,
        row_bytes=row_bytes,
        attention_block_stride=block_size + attention_gap,
        page_gap_bytes=page_gap_bytes,
    )
    if mode in ("state", "tables"):
        indices = rng.permutation(states)[:requests].astype(np.int32)
        indices[rng.random(requests) < padding] = -1
        case.request_state_indices = indices
    if mode == "tables":
        case.request_ids = (np.arange(rows) // steps_per_request).astype(np.int32)
        if steps_per_request == 1:
            case.request_ids = rng.permutation(requests).astype(np.int32)
        case.source_block_size = int(rng.choice([1, 2, 4, 8]))
        source_pages = host_rows // case.source_block_size
        columns = max(1, source_pages // max(1, requests))
        # Page 0 is the null page; the last page may reach past host_rows.
        source = rng.permutation(np.arange(1, source_pages + 1))
        source = np.resize(source, (requests, columns)).astype(np.int32)
        source[rng.random(source.shape) < holes] = 0
        case.source_block_table = source
        if resident > 0:
            tokens = columns * case.source_block_size
            case.resident_null_block = int(rng.integers(0, 3))
            resident_pages = rng.integers(3, 50, (requests, -(-tokens // block_size))).astype(np.int32)
            resident_pages[rng.random(resident_pages.shape) >= resident] = case.resident_null_block
            case.resident_block_table = resident_pages
    if union:
        case.max_union_rows = steps_per_request
    return case


def token_limit(case: Case) -> int:
    """Ids (or positions) below it are in range."""
    if case.source_block_table is None:
        return case.host_rows
    return case.source_block_table.shape[1] * case.source_block_size


def random_ids(
    case: Case,
    rng: np.random.Generator,
    *,
    spread: float = 1.0,
    invalid: float = 0.0,
    duplicates: float = 0.0,
) -> np.ndarray:
    """Top-k ids [R, K], distinct in a row; spread < 1 narrows the range, so that later steps hit.

    invalid, duplicates: shares of hostile and of repeated ids. -1 fills a row where the range is too small.
    """
    limit = max(1, int(token_limit(case) * spread))
    ids = np.empty((case.rows, case.top_k), dtype=np.int64)
    for row in range(case.rows):
        ids[row] = np.resize(rng.permutation(limit), case.top_k)
        if limit < case.top_k:
            ids[row, limit:] = -1
        again = rng.random(case.top_k) < duplicates
        ids[row, again] = rng.choice(ids[row], again.sum()) if again.any() else ids[row, again]
        bad = rng.random(case.top_k) < invalid
        hostile = [-1, -7, -(2**31), case.host_rows, limit, 2**31 - 1]
        ids[row, bad] = rng.choice(hostile, bad.sum())
    return ids.astype(np.int32)


def clustered_ids(rows: int, top_k: int, period: int = 4096) -> np.ndarray:
    """Ids that share their low bits: the table of a hash that keeps low bits degrades to a list."""
    ids = np.arange(top_k, dtype=np.int64) * period % (2**31 - 1)
    return np.tile(ids, (rows, 1)).astype(np.int32)


def corrupt_lru(lru: np.ndarray, rng: np.random.Generator, share: float = 0.3) -> None:
    """Overwrite a share of the entries with repeated, negative and too large slots."""
    hot_slots = lru.shape[-1]
    bad = rng.random(lru.shape) < share
    values = rng.integers(0, hot_slots, lru.shape)
    wild = rng.random(lru.shape) < 0.4
    values[wild] = rng.choice([-1, -32768, 32767, min(hot_slots, 32767)], wild.sum())
    lru[bad] = values[bad].astype(np.int16)


def corrupt_dgi(dgi: np.ndarray, rng: np.random.Generator, host_rows: int, share: float = 0.3) -> None:
    """Overwrite a share of the entries with ids that other slots hold too, and with ids that cannot exist."""
    bad = rng.random(dgi.shape) < share
    values = rng.integers(0, max(1, min(host_rows, dgi.shape[-1])), dgi.shape)
    wild = rng.random(dgi.shape) < 0.2
    values[wild] = rng.choice([-5, host_rows, 2**31 - 1], wild.sum())
    dgi[bad] = values[bad].astype(np.int32)


# ----------------------------------------------------------------------------------------------------
# Hypothesis


@dataclass
class Sequence:
    """A case, one array of ids per step, and whether state is corrupted before a step."""

    case: Case
    ids: list[np.ndarray]
    corrupt_lru_before: list[bool]
    corrupt_dgi_before: list[bool]
    seed: int

    def __repr__(self) -> str:
        arrays = {k: v for k, v in vars(self.case).items() if v is not None and k != "steps"}
        return f"Sequence(seed={self.seed}, {arrays}, ids={[i.tolist() for i in self.ids]})"


@st.composite
def sequences(draw: Any, *, hostile: bool = True, union: bool = False, max_steps: int = 5) -> Sequence:
    """Steps over small tables: padding, resident pages, page gaps, sizes around multiples of 32, K = H.

    hostile: bad and repeated ids, hot pages out of range, corrupt LRU and dgi. union: more rows per request.
    """
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    top_k = draw(st.sampled_from([1, 2, 3, 5, 8, 31, 32, 33]))
    steps_per_request = draw(st.integers(1, 3)) if union else 1
    # A union must fit, whatever its rows ask for.
    least = top_k * steps_per_request
    hot_slots = draw(st.sampled_from([least, least + 1, least + 3, 2 * least, 2 * least + 32]))
    case = make_case(
        seed=seed,
        top_k=top_k,
        hot_slots=hot_slots,
        block_size=draw(st.sampled_from([1, 3, 4, 16])),
        rows=draw(st.integers(1, 4)) * (steps_per_request if union else 1),
        spare_states=draw(st.integers(0, 2)),
        host_rows=draw(st.sampled_from([1, 7, top_k, 3 * top_k + 1, 4 * hot_slots + 5])),
        row_bytes=16,
        mode="tables" if union else draw(st.sampled_from(["plain", "state", "tables"])),
        padding=draw(st.sampled_from([0.0, 0.3])),
        resident=draw(st.sampled_from([0.0, 0.4])),
        holes=draw(st.sampled_from([0.0, 0.2])),
        steps_per_request=steps_per_request,
        union=union,
        attention_gap=draw(st.integers(0, 5)),
        page_gap_bytes=draw(st.sampled_from([0, 16, 4, 1])),
    )
    if hostile and draw(st.booleans()):
        wild = rng.random(case.hot_block_table.shape) < 0.2
        case.hot_block_table[wild] = rng.choice([-1, -(2**31), case.hot_blocks, 2**31 - 1], wild.sum())
    count = draw(st.integers(1, max_steps))
    spread = draw(st.sampled_from([0.3, 0.7, 1.0]))
    flags = st.lists(st.booleans() if hostile else st.just(False), min_size=count, max_size=count)
    ids = [
        random_ids(
            case,
            rng,
            spread=spread,
            invalid=0.15 if hostile else 0.0,
            duplicates=0.2 if hostile else 0.0,
        )
        for _ in range(count)
    ]
    return Sequence(case, ids, draw(flags), draw(flags), seed)


def corrupt_before_step(sequence: Sequence, step: int, benches: list[Bench]) -> None:
    """Put the same corruption into the state of every bench."""
    rng = np.random.default_rng((sequence.seed, step))
    if sequence.corrupt_lru_before[step]:
        lru = benches[0].array("lru_slots").copy()
        corrupt_lru(lru, rng)
        for bench in benches:
            bench.lru_slots.copy_(torch.from_numpy(lru))
    if sequence.corrupt_dgi_before[step]:
        dgi = benches[0].array("device_global_indices").copy()
        corrupt_dgi(dgi, rng, sequence.case.host_rows)
        for bench in benches:
            bench.device_global_indices.copy_(torch.from_numpy(dgi))


# ----------------------------------------------------------------------------------------------------
# Recorded outputs


GOLDEN_NAMES = {
    "hot_indices": "hot",
    "attention_indices": "attention",
    "miss_mask": "miss_mask",
    "resolved_global_indices": "resolved",
    "valid_counts": "valid",
    "swap_counts": "swap_counts",
    "swap_host_physical_rows": "swap_host",
    "swap_device_physical_rows": "swap_device",
    "lru_slots": "lru",
    "device_global_indices": "dgi",
    "stats": "stats",
}


def golden_cases() -> Iterator[Case]:
    """The recorded cases of vLLM's kernel; `case.steps` as in the file (GOLDEN_NAMES maps its keys)."""
    for record in json.loads(gzip.decompress((DATA / "resolve_a.json.gz").read_bytes())):
        arrays = {
            name: None if record[name] is None else np.array(record[name], dtype=np.int32)
            for name in (
                "hot_block_table",
                "request_state_indices",
                "request_ids",
                "source_block_table",
                "resident_block_table",
            )
        }
        yield Case(
            top_k=record["K"],
            hot_slots=record["H"],
            block_size=record["BS"],
            rows=record["rows"],
            state_rows=record["nstate"],
            host_rows=record["host_rows"],
            hot_blocks=int(arrays["hot_block_table"].max()) + 1,
            source_block_size=record["source_block_size"],
            resident_null_block=record["resident_null_block"],
            attention_block_stride=record["attention_block_stride"],
            steps=record["steps"],
            **arrays,
        )


def golden_expectation(case: Case, step: int) -> dict[str, np.ndarray]:
    """What a step must give, by argument name. Upstream leaves the miss_mask of padding rows; ours is 0."""
    record = dict(case.steps[step])
    for key in ("swap_host", "swap_device"):  # recorded up to the count; the rest is not written
        record[key] = [row + [POISON] * (case.top_k - len(row)) for row in record[key]]
    expected = {name: np.array(record[key]) for name, key in GOLDEN_NAMES.items()}
    for row in range(case.rows):
        if case.state_of(row) < 0:
            expected["miss_mask"][row] = 0
    return expected


def worked_case() -> Case:
    """K 4, H 8, BS 4: slots 0-3 are rows 20-23, slots 4-7 rows 8-11; attention pages lie 12 rows apart."""
    return Case(
        top_k=4,
        hot_slots=8,
        block_size=4,
        rows=1,
        state_rows=1,
        host_rows=100,
        hot_blocks=6,
        hot_block_table=np.array([[5, 2]], dtype=np.int32),
        attention_block_stride=12,
    )
