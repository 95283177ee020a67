"""HiSparse residency in plain Python, NumPy and PyTorch: what every operator means, written to be read.

State is one row per request: `device_global_indices` (dgi) names the id that each hot slot holds, `lru_slots`
lists the slots from the least to the most recently used. A step resolves the top-k ids of every launch row:
which hot row holds each, which must be copied from the host pool and over which slot, and the LRU order
afterwards. Names: R launch rows, K top-k, H hot slots, S state rows, BS hot block size, g the id of a token
in the host pool (host row g).

The functions take CPU tensors, or CUDA tensors with `host_cache` on the CPU (results are computed on the CPU
and copied back). They are slow, and users may import them. Outputs must not overlap inputs.

Decisions where the operators' public descriptions are silent or can be read in two ways. The compiled
backends follow them too.

Requests and padding

* A launch row belongs to request `request_ids[r]`, or r. It is padding if its state row is negative or >= S,
  if the request is outside `request_state_indices`, or if the request has no row in `hot_block_table` (a
  request that owns no hot rows cannot be resolved). Therefore `hot_block_table` needs R rows only where
  `request_ids` is not given.
* A padding row writes -1 to hot, attention and resolved, 0 to miss_mask, valid and swap counts; state and
  stats keep.
* `swap_counts`, `request_ids` and `request_state_indices` (gather_plan) may be longer than R; what lies
  beyond is neither read nor written. Swap lists past a count, and plan rows' padding, are not written by
  resolve_residency either.
* R == 0 or K == 0 writes nothing at all, not even counts.
* `region_stride` is an argument of vLLM's operator: the row stride of dgi in ids. State is contiguous, so it
  must be H (or None).
* Two launch rows with one state row and without the union rule are a caller's error: a GPU launch has no
  order between them. Nothing is read or written outside the tensors; the reference takes the rows in
  ascending order.

Ids

* A token is negative, or reaches outside a table, or names host row g >= host_rows, or g does not fit int32:
  resolved is -1 (exactly -1, whatever the negative token was).
* A resident row is accepted as given: it is not compared with the number of hot blocks, because resident
  pages may live in a larger pool than the `hot_cache` view. A resident row that does not fit int32 is no
  resident row; an attention index that does not fit int32 is -1 while the hot index stays.
* valid counts columns, duplicates each: it is what the attention kernel will look at, not what is copied. A
  column whose slot has no usable page (below) is still counted.

Duplicates within a row (or within a union)

* The first column that names an id owns it: it alone has miss_mask 1 and a place in the swap list; every
  other column gets the same row. Resident columns and -1 columns take no part: an id that is resident in one
  column and not in another is pending on account of the other.
* stats: misses counts ids that were not hot, hits counts all other pending columns; hits + misses = pending
  columns.

State repair

* Only a row with something pending reads its LRU, so only such a row is repaired; otherwise state stays as it
  is, corrupt or not.
* Of a slot that occurs several times the most recent occurrence counts. Slots outside [0, H) are dropped.
  Slots that are missing come back as the oldest, in ascending order. Then the step runs on the repaired order
  and writes the row back whole.
* If dgi holds a pending id several times, the copy latest in the (repaired) LRU is the hit. The others are
  ordinary victims: their entries stay until a miss takes the slot. Ids that are not pending are not
  inspected, ids below 0 or >= host_rows never match.

Hot pages out of range (negative, or >= blocks)

* A hit on such a slot stays a hit for LRU and stats; the column gets -1.
* A miss that draws such a slot keeps its place in the swap list with device row -1 (gathers skip it), and
  counts as a miss; its columns get -1 and miss_mask 0, and the slot's dgi entry becomes -1, since nothing is
  loaded there.

Union rule (`max_union_rows`)

* A run is a maximal sequence of launch rows that are adjacent, have equal request ids and are not padding;
  each run is one set. Without `request_ids` every row is its own run. Equal ids that are not adjacent are the
  caller's error above.
* References are ordered by (row, column). The m-th miss of a run is element m of its rows' swap segments read
  as one flat list.
* A run of more than `max_union_rows` rows, or with more distinct pending ids than H, is a ValueError before
  anything is written. Where lengths cannot be looked at before the launch (`strict=False` here, an unchecked
  GPU launch): a row whose `max_union_rows` predecessors all have its request id is treated as padding, and
  the misses after the first (H - hits) get no slot: -1, miss_mask 0, not in the swap list, though counted as
  misses.
* In a packed plan `column` is the flat reference: (row - first row of the run) * K + column, the plain column
  for a run of one.

Copies

* A copy whose host row is >= host_rows fills the destination with zeros; a negative host row or a destination
  outside the hot rows is skipped. Two copies with one destination in one call leave the bytes of either.
* gather_plan writes attention for every column: -1 for padding rows and negative rows, the formula for any
  other row, also beyond the hot rows (resident pages). A 2-D hot cache has blocks of one row.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from hotplan.plans import SWAP_ROW, SwapPlan, invalid_rows
from hotplan.reference._arrays import Arrays
from hotplan.reference._lru import partition
from hotplan.reference._tensor_checks import (
    check_at_least,
    check_contiguous,
    check_device,
    check_int,
    check_separate_rows,
    check_shape,
    check_tensor,
    check_unit_columns,
    wrong_value,
)

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
MAX_HOT_SLOTS = 32768


# ----------------------------------------------------------------------------------------------------
# Shapes and arguments


@dataclass
class _Caches:
    """The two pools as rows of bytes."""

    host_rows: int
    blocks: int
    block_size: int
    row_bytes: int
    device: torch.device

    @property
    def hot_rows(self) -> int:
        return self.blocks * self.block_size


@dataclass
class _Arguments(Arrays):
    """Everything resolve works on."""

    caches: _Caches
    top_k: int
    launch_rows: int
    max_union_rows: int | None
    attention_block_stride: int = 0
    source_block_size: int = 0
    resident_null_block: int = 0


def _check_caches(host_cache: torch.Tensor, hot_cache: torch.Tensor, *, ndims: tuple[int, ...] = (3,)) -> _Caches:
    check_tensor("host_cache", host_cache, ndims=(2,))
    check_tensor("hot_cache", hot_cache, ndims=ndims)
    if host_cache.device.type != "cpu":
        raise wrong_value(
            "host_cache", "a CPU tensor (pinned, where hot_cache is on a GPU)", f"device {host_cache.device}"
        )
    check_contiguous("host_cache", host_cache)
    row_bytes = hot_cache.shape[-1] * hot_cache.element_size()
    if row_bytes == 0 or row_bytes % 16 != 0:
        raise wrong_value("hot_cache", "rows of a positive multiple of 16 bytes", f"{row_bytes} bytes")
    host_row_bytes = host_cache.shape[1] * host_cache.element_size()
    if host_row_bytes != row_bytes:
        raise wrong_value("host_cache", f"rows of {row_bytes} bytes (those of hot_cache)", f"{host_row_bytes} bytes")
    blocks = hot_cache.shape[0]
    block_size = hot_cache.shape[1] if hot_cache.dim() == 3 else 1
    if block_size == 0:
        raise wrong_value("hot_cache", "a block size of at least 1", f"shape {tuple(hot_cache.shape)}")
    dense = hot_cache.stride(-1) == 1 or hot_cache.shape[-1] == 1
    if hot_cache.dim() == 3:
        dense = dense and (block_size == 1 or hot_cache.stride(1) == hot_cache.shape[2])
        dense = dense and (blocks <= 1 or hot_cache.stride(0) >= block_size * hot_cache.shape[2])
        expected = "contiguous rows inside a block and blocks that do not overlap"
    else:
        dense = dense and (blocks <= 1 or hot_cache.stride(0) == hot_cache.shape[1])
        expected = "contiguous rows"
    if not dense:
        raise wrong_value("hot_cache", expected, f"shape {tuple(hot_cache.shape)} with strides {hot_cache.stride()}")
    if blocks * block_size >= INT32_MAX:
        raise wrong_value("hot_cache", f"fewer than {INT32_MAX} rows", f"{blocks * block_size} rows")
    return _Caches(host_cache.shape[0], blocks, block_size, row_bytes, hot_cache.device)


def _check_matrix(
    name: str, tensor: torch.Tensor, shape: tuple[int, int], caches: _Caches, *, rows: str = "contiguous"
) -> None:
    """An int32 [R, K] tensor beside hot_cache.

    rows: "contiguous", "input" (row stride free) or "output" (free, but rows must not overlap).
    """
    check_tensor(name, tensor, (torch.int32,), (2,))
    check_device(name, tensor, caches.device, "hot_cache")
    check_shape(name, tensor, shape, "[R, K]")
    if rows == "contiguous":
        check_contiguous(name, tensor)
    elif rows == "input":
        check_unit_columns(name, tensor)
    else:
        check_separate_rows(name, tensor)


def _check_vector(
    name: str,
    tensor: torch.Tensor,
    caches: _Caches,
    *,
    at_least: int = 0,
    dtypes: tuple[torch.dtype, ...] = (torch.int32,),
) -> None:
    check_tensor(name, tensor, dtypes, (1,))
    check_device(name, tensor, caches.device, "hot_cache")
    check_at_least(name, tensor, at_least)
    check_contiguous(name, tensor)


def _check_table(name: str, tensor: torch.Tensor, caches: _Caches) -> None:
    check_tensor(name, tensor, (torch.int32,), (2,))
    check_device(name, tensor, caches.device, "hot_cache")
    check_unit_columns(name, tensor)


def _check_attention(
    name: str, tensor: torch.Tensor | None, stride: int, shape: tuple[int, int], caches: _Caches, rows: str
) -> None:
    if tensor is None:
        return
    _check_matrix(name, tensor, shape, caches, rows=rows)
    check_int("attention_block_stride", stride, caches.block_size, INT64_MAX)


def _check_resolve(
    host_cache: torch.Tensor,
    hot_cache: torch.Tensor,
    hot_block_table: torch.Tensor,
    global_indices: torch.Tensor,
    hot_indices: torch.Tensor,
    device_global_indices: torch.Tensor,
    lru_slots: torch.Tensor,
    *,
    request_state_indices: torch.Tensor | None,
    region_stride: int | None,
    max_union_rows: int | None,
    miss_mask: torch.Tensor | None,
    stats: torch.Tensor | None,
    attention_indices: torch.Tensor | None,
    attention_block_stride: int,
    request_ids: torch.Tensor | None,
    source_block_table: torch.Tensor | None,
    source_block_size: int,
    resolved_global_indices: torch.Tensor | None,
    valid_counts: torch.Tensor | None,
    swap_host_physical_rows: torch.Tensor | None,
    swap_device_physical_rows: torch.Tensor | None,
    swap_counts: torch.Tensor | None,
    resident_block_table: torch.Tensor | None,
    resident_block_size: int,
    resident_null_block: int,
) -> _Arguments:
    caches = _check_caches(host_cache, hot_cache)

    check_tensor("global_indices", global_indices, (torch.int32,), (2,))
    check_device("global_indices", global_indices, caches.device, "hot_cache")
    check_unit_columns("global_indices", global_indices)
    launch_rows, top_k = global_indices.shape
    shape = (launch_rows, top_k)
    _check_matrix("hot_indices", hot_indices, shape, caches)

    check_tensor("device_global_indices", device_global_indices, (torch.int32,), (2,))
    check_device("device_global_indices", device_global_indices, caches.device, "hot_cache")
    check_contiguous("device_global_indices", device_global_indices)
    hot_slots = device_global_indices.shape[1]
    if not top_k <= hot_slots <= MAX_HOT_SLOTS:
        expected = f"K <= H <= {MAX_HOT_SLOTS} with K = {top_k}"
        raise wrong_value("device_global_indices", expected, f"H = {hot_slots}")
    check_tensor("lru_slots", lru_slots, (torch.int16,), (2,))
    check_device("lru_slots", lru_slots, caches.device, "hot_cache")
    check_shape("lru_slots", lru_slots, tuple(device_global_indices.shape), "[S, H] (that of device_global_indices)")
    check_contiguous("lru_slots", lru_slots)
    if region_stride is not None and check_int("region_stride", region_stride, 0) != hot_slots:
        raise wrong_value("region_stride", f"H = {hot_slots} or None", region_stride)
    if max_union_rows is not None:
        max_union_rows = check_int("max_union_rows", max_union_rows, 1)

    _check_table("hot_block_table", hot_block_table, caches)
    pages = -(-hot_slots // caches.block_size)
    if hot_block_table.shape[1] < pages:
        expected = f"at least {pages} columns for {hot_slots} slots in blocks of {caches.block_size}"
        raise wrong_value("hot_block_table", expected, f"shape {tuple(hot_block_table.shape)}")
    if request_ids is None and hot_block_table.shape[0] < launch_rows:
        raise wrong_value("hot_block_table", f"at least {launch_rows} rows", f"shape {tuple(hot_block_table.shape)}")

    if request_state_indices is not None:
        _check_vector("request_state_indices", request_state_indices, caches)
    if miss_mask is not None:
        _check_matrix("miss_mask", miss_mask, shape, caches)
    if stats is not None:
        _check_vector("stats", stats, caches, dtypes=(torch.int64, torch.uint64))
        check_shape("stats", stats, (2,), "[hits, misses]")
    _check_attention("attention_indices", attention_indices, attention_block_stride, shape, caches, "output")

    if (request_ids is None) != (source_block_table is None):
        given, absent = ("request_ids", "source_block_table")
        if request_ids is None:
            given, absent = absent, given
        raise wrong_value(absent, f"a tensor, because {given} is given", "None")
    if request_ids is not None and source_block_table is not None:
        _check_vector("request_ids", request_ids, caches, at_least=launch_rows)
        _check_table("source_block_table", source_block_table, caches)
        source_block_size = check_int("source_block_size", source_block_size, 1, INT64_MAX)
    if resident_block_table is not None:
        if source_block_table is None:
            raise wrong_value("source_block_table", "a tensor, because resident_block_table is given", "None")
        _check_table("resident_block_table", resident_block_table, caches)
        if check_int("resident_block_size", resident_block_size, 1) != caches.block_size:
            raise wrong_value("resident_block_size", f"{caches.block_size} (that of hot_cache)", resident_block_size)
        resident_null_block = check_int("resident_null_block", resident_null_block, 0, INT64_MAX)

    if resolved_global_indices is not None:
        _check_matrix("resolved_global_indices", resolved_global_indices, shape, caches)
    if valid_counts is not None:
        check_tensor("valid_counts", valid_counts, (torch.int32,), (1,))
        check_device("valid_counts", valid_counts, caches.device, "hot_cache")
        check_shape("valid_counts", valid_counts, (launch_rows,), "[R]")
        if launch_rows > 1 and valid_counts.stride(0) < 1:
            raise wrong_value("valid_counts", "a stride of at least 1", f"strides {valid_counts.stride()}")
    swaps = {
        "swap_host_physical_rows": swap_host_physical_rows,
        "swap_device_physical_rows": swap_device_physical_rows,
        "swap_counts": swap_counts,
    }
    missing = [name for name, tensor in swaps.items() if tensor is None]
    if missing and len(missing) < len(swaps):
        raise wrong_value(missing[0], f"all of {', '.join(swaps)}, or none", "None")
    if swap_host_physical_rows is not None and swap_device_physical_rows is not None and swap_counts is not None:
        _check_matrix("swap_host_physical_rows", swap_host_physical_rows, shape, caches)
        _check_matrix("swap_device_physical_rows", swap_device_physical_rows, shape, caches)
        _check_vector("swap_counts", swap_counts, caches, at_least=launch_rows)

    arguments = _Arguments(
        caches,
        top_k,
        launch_rows,
        max_union_rows,
        attention_block_stride=attention_block_stride,
        source_block_size=source_block_size,
        resident_null_block=resident_null_block,
    )
    arguments.add_input("hot_block_table", hot_block_table)
    arguments.add_input("global_indices", global_indices)
    arguments.add_input("request_state_indices", request_state_indices)
    arguments.add_input("request_ids", request_ids)
    arguments.add_input("source_block_table", source_block_table)
    arguments.add_input("resident_block_table", resident_block_table)
    arguments.add_output("hot_indices", hot_indices)
    arguments.add_output("device_global_indices", device_global_indices)
    arguments.add_output("lru_slots", lru_slots)
    arguments.add_output("miss_mask", miss_mask)
    arguments.add_output("stats", stats)
    arguments.add_output("attention_indices", attention_indices)
    arguments.add_output("resolved_global_indices", resolved_global_indices)
    arguments.add_output("valid_counts", valid_counts)
    arguments.add_output("swap_host_physical_rows", swap_host_physical_rows)
    arguments.add_output("swap_device_physical_rows", swap_device_physical_rows)
    arguments.add_output("swap_counts", swap_counts)
    return arguments


# ----------------------------------------------------------------------------------------------------
# The rules


def attention_index(row: int, block_size: int, attention_block_stride: int) -> int:
    """Where the attention kernel finds a hot row: its pages lie `attention_block_stride` rows apart.

    -1 for a negative row and where the index does not fit int32.
    """
    if row < 0:
        return -1
    index = row // block_size * attention_block_stride + row % block_size
    return index if index <= INT32_MAX else -1


@dataclass(slots=True)
class _Column:
    """A top-k column after translation: its id g or -1, and the resident row that holds it already or -1."""

    g: int
    resident_row: int


@dataclass(slots=True)
class _Load:
    """A copy: host row, hot row (-1 where the slot has no usable page), flat reference that asked first."""

    host_row: int
    hot_row: int
    column: int


@dataclass
class _Run:
    """Launch rows resolved as one set."""

    request: int
    state_row: int
    rows: list[int]
    columns: list[list[_Column]] = field(default_factory=list)


def _request_and_state(arguments: _Arguments, row: int) -> tuple[int, int]:
    """The row's request and state row; the state row is -1 for padding."""
    request_ids = arguments.get("request_ids")
    request = row if request_ids is None else int(request_ids[row])
    state_row = request
    states = arguments.get("request_state_indices")
    if states is not None:
        state_row = int(states[request]) if 0 <= request < len(states) else -1
    if not 0 <= state_row < arguments.arrays["lru_slots"].shape[0]:
        state_row = -1
    if not 0 <= request < arguments.arrays["hot_block_table"].shape[0]:
        state_row = -1
    return request, state_row


def _table_entry(table: np.ndarray, request: int, page: int) -> int | None:
    rows, columns = table.shape
    return int(table[request, page]) if 0 <= request < rows and 0 <= page < columns else None


def _translate(arguments: _Arguments, request: int, token: int) -> _Column:
    """Rule 3: the id of a token in the host pool, and its resident row if there is one."""
    caches = arguments.caches
    source = arguments.get("source_block_table")
    g, resident_row = token, -1
    if source is not None:
        page = _table_entry(source, request, token // arguments.source_block_size) if token >= 0 else None
        g = -1
        if page is not None and page > 0:
            g = page * arguments.source_block_size + token % arguments.source_block_size
        resident = arguments.get("resident_block_table")
        if resident is not None and token >= 0:
            page = _table_entry(resident, request, token // caches.block_size)
            if page is not None and page >= 0 and page != arguments.resident_null_block:
                resident_row = page * caches.block_size + token % caches.block_size
    if not 0 <= g < min(caches.host_rows, INT32_MAX + 1):
        g = -1
    if resident_row > INT32_MAX:
        resident_row = -1
    return _Column(g, resident_row)


def _make_runs(arguments: _Arguments, strict: bool) -> tuple[list[_Run], list[int]]:
    """The launch rows as runs, and the rows that are padding."""
    runs: list[_Run] = []
    padding: list[int] = []
    most = arguments.max_union_rows
    union = most is not None
    for row in range(arguments.launch_rows):
        request, state_row = _request_and_state(arguments, row)
        if state_row < 0:
            padding.append(row)
            continue
        continues = union and runs and runs[-1].request == request and row - 1 == runs[-1].rows[-1]
        if continues:
            runs[-1].rows.append(row)
        else:
            runs.append(_Run(request, state_row, [row]))
    if most is not None:
        for run in runs:
            if len(run.rows) > most:
                if strict:
                    raise wrong_value(
                        "request_ids",
                        f"at most max_union_rows = {most} adjacent rows of one request",
                        f"{len(run.rows)} rows of request {run.request} from row {run.rows[0]}",
                    )
                padding.extend(run.rows[most:])
                del run.rows[most:]
    for run in runs:
        for row in run.rows:
            tokens = arguments.arrays["global_indices"][row].tolist()
            run.columns.append([_translate(arguments, run.request, token) for token in tokens])
    return runs, padding


def _pending_ids(run: _Run, top_k: int) -> tuple[dict[int, int], int]:
    """Ids to be found or loaded with their first flat references, in that order; and the reference count."""
    first: dict[int, int] = {}
    references = 0
    for index, columns in enumerate(run.columns):
        for column, entry in enumerate(columns):
            if entry.g >= 0 and entry.resident_row < 0:
                references += 1
                first.setdefault(entry.g, index * top_k + column)
    return first, references


def _write_padding(arguments: _Arguments, row: int) -> None:
    for name, value in (
        ("hot_indices", -1),
        ("attention_indices", -1),
        ("resolved_global_indices", -1),
        ("miss_mask", 0),
        ("valid_counts", 0),
        ("swap_counts", 0),
    ):
        array = arguments.get(name)
        if array is not None:
            array[row] = value


def _resolve_run(arguments: _Arguments, run: _Run) -> list[_Load]:
    """Rules 3 to 8 for one run; writes its outputs and its state row."""
    top_k = arguments.top_k
    block_size, blocks = arguments.caches.block_size, arguments.caches.blocks
    pages = arguments.arrays["hot_block_table"][run.request].tolist()

    def hot_row(slot: int) -> int:
        page = pages[slot // block_size]
        return page * block_size + slot % block_size if 0 <= page < blocks else -1

    first_reference, references = _pending_ids(run, top_k)
    row_of: dict[int, int] = {}
    loads: list[_Load] = []
    if references > 0:
        lru_row = arguments.arrays["lru_slots"][run.state_row]
        dgi_row = arguments.arrays["device_global_indices"][run.state_row]
        slots = partition(lru_row.tolist(), dgi_row.tolist(), first_reference)
        missing = [g for g in first_reference if g not in slots.slot_of]
        row_of = {g: hot_row(slot) for g, slot in slots.slot_of.items()}

        for g, slot in zip(missing, slots.victims, strict=False):
            row = hot_row(slot)
            row_of[g] = row
            loads.append(_Load(g, row, first_reference[g]))
            dgi_row[slot] = g if row >= 0 else -1
        lru_row[:] = slots.renewed(len(loads))

        stats = arguments.get("stats")
        if stats is not None:
            stats += np.array([references - len(missing), len(missing)], dtype=stats.dtype)

    _write_columns(arguments, run, row_of, {load.column for load in loads if load.hot_row >= 0})
    _write_swaps(arguments, run, loads)
    return loads


def _write_columns(arguments: _Arguments, run: _Run, row_of: dict[int, int], loaded: set[int]) -> None:
    block_size, stride = arguments.caches.block_size, arguments.attention_block_stride
    hot, resolved = arguments.arrays["hot_indices"], arguments.get("resolved_global_indices")
    attention, mask, valid = (arguments.get(n) for n in ("attention_indices", "miss_mask", "valid_counts"))
    for index, (row, columns) in enumerate(zip(run.rows, run.columns, strict=True)):
        rows = [c.resident_row if c.resident_row >= 0 else row_of.get(c.g, -1) for c in columns]
        hot[row] = rows
        if attention is not None:
            attention[row] = [attention_index(r, block_size, stride) for r in rows]
        if resolved is not None:
            resolved[row] = [c.g for c in columns]
        if mask is not None:
            mask[row] = [index * arguments.top_k + c in loaded for c in range(arguments.top_k)]
        if valid is not None:
            valid[row] = sum(c.g >= 0 or c.resident_row >= 0 for c in columns)


def _write_swaps(arguments: _Arguments, run: _Run, loads: list[_Load]) -> None:
    counts = arguments.get("swap_counts")
    if counts is None:
        return
    top_k, start = arguments.top_k, run.rows[0] * arguments.top_k
    host_rows = arguments.arrays["swap_host_physical_rows"].reshape(-1)
    device_rows = arguments.arrays["swap_device_physical_rows"].reshape(-1)
    host_rows[start : start + len(loads)] = [load.host_row for load in loads]
    device_rows[start : start + len(loads)] = [load.hot_row for load in loads]
    for index, row in enumerate(run.rows):
        counts[row] = min(max(len(loads) - index * top_k, 0), top_k)


def _resolve(arguments: _Arguments, strict: bool = True) -> list[tuple[int, list[_Load]]]:
    """All launch rows. Returns the first row and the loads of every run.

    strict: raise ValueError for runs that are too long or too large, before anything is written.
    """
    if arguments.launch_rows == 0 or arguments.top_k == 0:
        return []
    runs, padding = _make_runs(arguments, strict)
    hot_slots = arguments.arrays["lru_slots"].shape[1]
    if strict:
        for run in runs:
            distinct = len(_pending_ids(run, arguments.top_k)[0])
            if distinct > hot_slots:
                raise wrong_value(
                    "global_indices",
                    f"at most H = {hot_slots} distinct ids in a union",
                    f"{distinct} in rows {run.rows[0]} to {run.rows[-1]} of request {run.request}",
                )
    for row in padding:
        _write_padding(arguments, row)
    result = [(run.rows[0], _resolve_run(arguments, run)) for run in runs]
    arguments.write_back()
    return result


def _byte_rows(cache: torch.Tensor) -> torch.Tensor:
    return cache.view(torch.uint8)


def _copy_rows(
    host_cache: torch.Tensor,
    hot_cache: torch.Tensor,
    caches: _Caches,
    host_rows: np.ndarray,
    hot_rows: np.ndarray,
) -> None:
    """Copy host rows to hot rows under the rules of 'Copies' above; both arrays are 1-D int64."""
    keep = (host_rows >= 0) & (hot_rows >= 0) & (hot_rows < caches.hot_rows)
    host_rows, hot_rows = host_rows[keep], hot_rows[keep]
    if len(host_rows) == 0:
        return
    exists = host_rows < caches.host_rows
    data = torch.zeros((len(host_rows), caches.row_bytes), dtype=torch.uint8)
    data[torch.from_numpy(exists)] = _byte_rows(host_cache)[torch.from_numpy(host_rows[exists])]
    target = _byte_rows(hot_cache)
    data = data.to(target.device)
    pages = torch.from_numpy(hot_rows // caches.block_size).to(target.device)
    if target.dim() == 2:
        target[pages] = data
    else:
        target[pages, torch.from_numpy(hot_rows % caches.block_size).to(target.device)] = data


# ----------------------------------------------------------------------------------------------------
# The operators


def resolve_residency(
    host_cache: torch.Tensor,
    hot_cache: torch.Tensor,
    hot_block_table: torch.Tensor,
    global_indices: torch.Tensor,
    hot_indices: torch.Tensor,
    device_global_indices: torch.Tensor,
    lru_slots: torch.Tensor,
    *,
    request_state_indices: torch.Tensor | None = None,
    region_stride: int | None = None,
    max_union_rows: int | None = None,
    miss_mask: torch.Tensor | None = None,
    stats: torch.Tensor | None = None,
    attention_indices: torch.Tensor | None = None,
    attention_block_stride: int = 0,
    request_ids: torch.Tensor | None = None,
    source_block_table: torch.Tensor | None = None,
    source_block_size: int = 0,
    resolved_global_indices: torch.Tensor | None = None,
    valid_counts: torch.Tensor | None = None,
    swap_host_physical_rows: torch.Tensor | None = None,
    swap_device_physical_rows: torch.Tensor | None = None,
    swap_counts: torch.Tensor | None = None,
    resident_block_table: torch.Tensor | None = None,
    resident_block_size: int = 0,
    resident_null_block: int = 0,
) -> None:
    """Say where every top-k id is on the device and what must be copied where; renew the LRU. No bytes move.

    Index tensors lie on hot_cache's device; sizes are named as in the module's docstring.

    Args:
        host_cache: [host_rows, width], CPU, contiguous; its rows have as many bytes as hot_cache's.
        hot_cache: [blocks, BS, width], rows of a multiple of 16 bytes; the block stride is free.
        hot_block_table: int32 [requests, >= ceil(H / BS)], row stride free: the page of every BS slots.
        global_indices: int32 [R, K], row stride free: ids, or positions where source_block_table is given.
        hot_indices: int32 [R, K] (out): the hot row of every column, or -1.
        device_global_indices: int32 [S, H] (state), K <= H <= 32768.
        lru_slots: int16 [S, H] (state).
        request_state_indices: int32 [n], the state row of a request.
        region_stride: H or None.
        max_union_rows: resolve up to so many adjacent rows of one request as one set.
        miss_mask: int32 [R, K] (out): 1 at the column that owns a copy.
        stats: int64 or uint64 [2], hits and misses are added to it.
        attention_indices: int32 [R, K], row stride free (out).
        attention_block_stride: distance of pages for attention, in rows, >= BS.
        request_ids: int32 [>= R], with source_block_table.
        source_block_table: int32 [requests, pages], row stride free, with request_ids.
        source_block_size: tokens per source page, >= 1.
        resolved_global_indices: int32 [R, K] (out): the id of every column, or -1.
        valid_counts: int32 [R], stride free (out): columns with an id or a resident row.
        swap_host_physical_rows: int32 [R, K] (out), with the next two: host rows to copy, in miss order.
        swap_device_physical_rows: int32 [R, K] (out): where each goes.
        swap_counts: int32 [>= R] (out): copies listed in each row.
        resident_block_table: int32 [requests, pages], row stride free; needs source_block_table.
        resident_block_size: BS.
        resident_null_block: the entry that means "not resident", >= 0.

    Raises:
        TypeError: a wrong type or dtype.
        ValueError: a wrong device, shape, stride or number, or a union that is too long or too large.

    Source: vLLM's hisparse_resolve_residency, with the additions in the module's docstring.
    """
    options = dict(locals())
    _resolve(_check_resolve(**options))


def plan_swap_in(
    host_cache: torch.Tensor,
    hot_cache: torch.Tensor,
    hot_block_table: torch.Tensor,
    global_indices: torch.Tensor,
    device_global_indices: torch.Tensor,
    lru_slots: torch.Tensor,
    *,
    request_state_indices: torch.Tensor | None = None,
    region_stride: int | None = None,
    max_union_rows: int | None = None,
    miss_mask: torch.Tensor | None = None,
    stats: torch.Tensor | None = None,
    attention_indices: torch.Tensor | None = None,
    attention_block_stride: int = 0,
    request_ids: torch.Tensor | None = None,
    source_block_table: torch.Tensor | None = None,
    source_block_size: int = 0,
    resolved_global_indices: torch.Tensor | None = None,
    valid_counts: torch.Tensor | None = None,
    resident_block_table: torch.Tensor | None = None,
    resident_block_size: int = 0,
    resident_null_block: int = 0,
    out: SwapPlan | tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> SwapPlan:
    """resolve_residency that returns its copies as one packed tensor, for gather_planned.

    Arguments as there. out: tensors to write into, uint8 [R, K, 16], int32 [R] and int32 [R, K], contiguous,
    on hot_cache's device; the returned plan is made of them. Rows past a count are (-1, -1, 0xFFFFFFFF).
    Errors as there.
    """
    options = {name: value for name, value in locals().items() if name != "out"}
    check_tensor("global_indices", global_indices, (torch.int32,), (2,))
    shape = tuple(global_indices.shape)
    device = global_indices.device
    if out is None:
        out = SwapPlan(
            torch.zeros((*shape, SWAP_ROW.itemsize), dtype=torch.uint8, device=device),
            torch.zeros(shape[:1], dtype=torch.int32, device=device),
            torch.zeros(shape, dtype=torch.int32, device=device),
        )
    plan, counts, hot_indices = out
    check_tensor("out.plan", plan, (torch.uint8,), (3,))
    check_device("out.plan", plan, device, "global_indices")
    check_shape("out.plan", plan, (*shape, SWAP_ROW.itemsize), "[R, K, 16]")
    check_contiguous("out.plan", plan)
    check_tensor("out.counts", counts, (torch.int32,), (1,))
    check_shape("out.counts", counts, shape[:1], "[R]")
    lists = torch.zeros((2, *shape), dtype=torch.int32, device=device)
    arguments = _check_resolve(
        **options,
        hot_indices=hot_indices,
        swap_host_physical_rows=lists[0],
        swap_device_physical_rows=lists[1],
        swap_counts=counts,
    )
    if shape[1] == 0:
        counts.zero_()  # nothing is resolved, but a plan's counts are those of the plan
    rows = invalid_rows(SWAP_ROW, shape[0] * shape[1])
    for first_row, loads in _resolve(arguments):
        start = first_row * shape[1]
        listed = [(load.host_row, load.hot_row, load.column) for load in loads]
        rows[start : start + len(loads)] = np.array(listed, dtype=SWAP_ROW)
    plan.copy_(torch.from_numpy(rows.view(np.uint8).reshape(*shape, SWAP_ROW.itemsize)))
    return out if isinstance(out, SwapPlan) else SwapPlan(plan, counts, hot_indices)


def swap_in(
    host_cache: torch.Tensor,
    hot_cache: torch.Tensor,
    hot_block_table: torch.Tensor,
    global_indices: torch.Tensor,
    hot_indices: torch.Tensor,
    device_global_indices: torch.Tensor,
    lru_slots: torch.Tensor,
    *,
    request_state_indices: torch.Tensor | None = None,
    region_stride: int | None = None,
    max_union_rows: int | None = None,
    miss_mask: torch.Tensor | None = None,
    stats: torch.Tensor | None = None,
    attention_indices: torch.Tensor | None = None,
    attention_block_stride: int = 0,
    request_ids: torch.Tensor | None = None,
    source_block_table: torch.Tensor | None = None,
    source_block_size: int = 0,
    resolved_global_indices: torch.Tensor | None = None,
    valid_counts: torch.Tensor | None = None,
    swap_host_physical_rows: torch.Tensor | None = None,
    swap_device_physical_rows: torch.Tensor | None = None,
    swap_counts: torch.Tensor | None = None,
    resident_block_table: torch.Tensor | None = None,
    resident_block_size: int = 0,
    resident_null_block: int = 0,
) -> None:
    """resolve_residency and the copies of one layer in one call: afterwards hot_cache holds every miss.

    Arguments and errors as in resolve_residency.
    """
    options = dict(locals())
    arguments = _check_resolve(**options)
    loads = [load for _, run in _resolve(arguments) for load in run]
    host_rows = np.array([load.host_row for load in loads], dtype=np.int64)
    hot_rows = np.array([load.hot_row for load in loads], dtype=np.int64)
    _copy_rows(host_cache, hot_cache, arguments.caches, host_rows, hot_rows)


def gather_plan(
    host_cache: torch.Tensor,
    hot_cache: torch.Tensor,
    global_indices: torch.Tensor,
    hot_indices: torch.Tensor,
    miss_mask: torch.Tensor,
    *,
    request_state_indices: torch.Tensor | None = None,
    attention_indices: torch.Tensor | None = None,
    attention_block_stride: int = 0,
) -> None:
    """Copy the columns that a resolution marked as misses, for one layer; optionally write attention indices.

    hot_cache [rows, width] or [blocks, BS, width]; global_indices (resolved ids), hot_indices, miss_mask
    int32 [R, K] contiguous; request_state_indices int32 [>= R], indexed by launch row, negative = padding;
    attention_indices int32 [R, K] contiguous (out) with attention_block_stride >= BS. Errors as in
    resolve_residency. Source: vLLM's hisparse_gather_plan.
    """
    caches = _check_caches(host_cache, hot_cache, ndims=(2, 3))
    check_tensor("global_indices", global_indices, (torch.int32,), (2,))
    shape = (global_indices.shape[0], global_indices.shape[1])
    _check_matrix("global_indices", global_indices, shape, caches)
    _check_matrix("hot_indices", hot_indices, shape, caches)
    _check_matrix("miss_mask", miss_mask, shape, caches)
    if request_state_indices is not None:
        _check_vector("request_state_indices", request_state_indices, caches, at_least=shape[0])
    _check_attention("attention_indices", attention_indices, attention_block_stride, shape, caches, "contiguous")
    if 0 in shape:
        return
    g = global_indices.cpu().numpy().astype(np.int64)
    rows = hot_indices.cpu().numpy().astype(np.int64)
    copied = miss_mask.cpu().numpy() != 0
    padding = np.zeros(shape[0], dtype=bool)
    if request_state_indices is not None:
        padding = request_state_indices.cpu().numpy()[: shape[0]] < 0
    if attention_indices is not None:
        values = [
            [-1 if pad else attention_index(row, caches.block_size, attention_block_stride) for row in line]
            for pad, line in zip(padding, rows.tolist(), strict=True)
        ]
        attention_indices.copy_(torch.tensor(values, dtype=torch.int32))
    copied &= ~padding[:, None]
    _copy_rows(host_cache, hot_cache, caches, g[copied], rows[copied])


def gather_compact(
    host_cache: torch.Tensor,
    hot_cache: torch.Tensor,
    miss_global_indices: torch.Tensor,
    miss_hot_indices: torch.Tensor,
    miss_counts: torch.Tensor,
) -> None:
    """Copy columns 0 .. clamp(count, 0, K) - 1 of every row, for one layer.

    hot_cache [blocks, BS, width]; miss_global_indices, miss_hot_indices int32 [R, K] contiguous; miss_counts
    int32 [>= R]. Errors as in resolve_residency. Source: vLLM's hisparse_gather_compact.
    """
    caches = _check_caches(host_cache, hot_cache)
    check_tensor("miss_global_indices", miss_global_indices, (torch.int32,), (2,))
    shape = (miss_global_indices.shape[0], miss_global_indices.shape[1])
    _check_matrix("miss_global_indices", miss_global_indices, shape, caches)
    _check_matrix("miss_hot_indices", miss_hot_indices, shape, caches)
    _check_vector("miss_counts", miss_counts, caches, at_least=shape[0])
    if 0 in shape:
        return
    counts = miss_counts.cpu().numpy()[: shape[0]]
    listed = np.arange(shape[1])[None, :] < counts[:, None]
    host_rows = miss_global_indices.cpu().numpy().astype(np.int64)
    hot_rows = miss_hot_indices.cpu().numpy().astype(np.int64)
    _copy_rows(host_cache, hot_cache, caches, host_rows[listed], hot_rows[listed])


def gather_planned(host_cache: torch.Tensor, hot_cache: torch.Tensor, plan: torch.Tensor, counts: torch.Tensor) -> None:
    """Copy a packed swap plan for one layer: rows 0 .. clamp(count, 0, K) - 1 of every launch row.

    hot_cache [blocks, BS, width]; plan uint8 [R, K, 16] contiguous, as plan_swap_in returns it; counts int32
    [>= R]. Errors as in resolve_residency.
    """
    caches = _check_caches(host_cache, hot_cache)
    check_tensor("plan", plan, (torch.uint8,), (3,))
    check_device("plan", plan, caches.device, "hot_cache")
    check_shape("plan", plan, (*plan.shape[:2], SWAP_ROW.itemsize), "[R, K, 16]")
    check_contiguous("plan", plan)
    _check_vector("counts", counts, caches, at_least=plan.shape[0])
    if 0 in plan.shape:
        return
    rows = plan.cpu().numpy().view(SWAP_ROW)[:, :, 0]
    listed = np.arange(plan.shape[1])[None, :] < counts.cpu().numpy()[: plan.shape[0], None]
    _copy_rows(host_cache, hot_cache, caches, rows["host_row"][listed], rows["hot_row"][listed].astype(np.int64))


def invalidate_written_slots(
    device_global_indices: torch.Tensor,
    request_state_indices: torch.Tensor,
    req_id_per_token: torch.Tensor,
    written_slots: torch.Tensor,
) -> None:
    """Forget the hot copies of host rows that were rewritten, in the requests that wrote them.

    device_global_indices int32 [S, H] (state); request_state_indices int32 [n]; req_id_per_token int32 [T];
    written_slots int64 [T]; all contiguous and on one device. A token whose request or state row is out of
    range, or whose slot is negative, is skipped. The LRU keeps its order. Errors as in
    resolve_residency. Source: vLLM's hisparse_invalidate_written_slots.
    """
    check_tensor("device_global_indices", device_global_indices, (torch.int32,), (2,))
    check_contiguous("device_global_indices", device_global_indices)
    for name, tensor, dtype in (
        ("request_state_indices", request_state_indices, torch.int32),
        ("req_id_per_token", req_id_per_token, torch.int32),
        ("written_slots", written_slots, torch.int64),
    ):
        check_tensor(name, tensor, (dtype,), (1,))
        check_device(name, tensor, device_global_indices.device, "device_global_indices")
        check_contiguous(name, tensor)
    check_shape("req_id_per_token", req_id_per_token, tuple(written_slots.shape), "[T] (that of written_slots)")
    dgi = device_global_indices.detach().cpu().numpy()
    states = request_state_indices.tolist()
    for request, slot in zip(req_id_per_token.tolist(), written_slots.tolist(), strict=True):
        state_row = states[request] if 0 <= request < len(states) else -1
        if slot >= 0 and 0 <= state_row < dgi.shape[0]:
            dgi[state_row][dgi[state_row] == slot] = -1
    if device_global_indices.device.type != "cpu":
        device_global_indices.copy_(torch.from_numpy(dgi))
