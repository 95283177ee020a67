"""Readable views of packed plans: structured numpy rows, valid-row masks and text tables.

A plan is a small ``uint8`` tensor whose rows kernels read as packed structs. Nothing here copies a plan that
lies on the CPU: ``compress_rows(t)["seq_len"]`` is a window into the tensor's own memory, and writing to it
writes the plan.

Compress, write and decode rows are those that SGLang 0.5.23's compressor kernels read
(``kernels/jit/csrc/deepseek_v4/c_plan.cuh``); swap rows are hotplan's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

__all__ = [
    "COMPRESS_ROW",
    "DECODE_ROW",
    "SWAP_ROW",
    "WRITE_ROW",
    "PrefillPlan",
    "SwapPlan",
    "compress_rows",
    "decode_rows",
    "describe",
    "invalid_rows",
    "swap_rows",
    "valid",
    "valid_compress",
    "valid_write",
    "write_rows",
]


class PrefillPlan(NamedTuple):
    """The two packed plans of one compression ratio for one forward pass.

    Attributes:
        compress: ``uint8 [n, 16]``, the tokens that close a window (:data:`COMPRESS_ROW`).
        write: ``uint8 [m, 8]``, the tokens whose raw state goes to the ring (:data:`WRITE_ROW`). The online
            c128 plans have segments here instead, in the 16-byte layout of :data:`COMPRESS_ROW`.
    """

    compress: torch.Tensor
    write: torch.Tensor


class SwapPlan(NamedTuple):
    """The copies of one HiSparse step.

    Attributes:
        plan: ``uint8 [R, K, 16]``, one list of :data:`SWAP_ROW` per launch row, invalid rows past its count. The rows
            of a union are one list that begins in the first of its launch rows.
        counts: ``int32 [R]``, copies listed in each launch row.
        hot_indices: ``int32 [R, K]``, the hot row of every top-k column, or -1.
    """

    plan: torch.Tensor
    counts: torch.Tensor
    hot_indices: torch.Tensor


COMPRESS_ROW = np.dtype(
    [
        ("seq_len", "<u4"),  # position of the closing token + 1
        ("ragged_id", "<u2"),  # its row in this forward's input
        ("buffer_len", "<u2"),  # rows of the window that come from the ring (online: tokens of the segment)
        ("read_page_0", "<i4"),
        ("read_page_1", "<i4"),
    ]
)
"""One closing window, 16 bytes. An invalid row has seq_len 0xFFFFFFFF, ragged_id and buffer_len 0 and pages
-1."""

WRITE_ROW = np.dtype([("ragged_id", "<u4"), ("write_loc", "<i4")])
"""One token to store, 8 bytes. An invalid row has ragged_id 0xFFFFFFFF and write_loc -1."""

DECODE_ROW = np.dtype([("seq_len", "<u4"), ("write_loc", "<i4"), ("read_page_0", "<i4"), ("read_page_1", "<i4")])
"""One request of a decode batch, 16 bytes. There are no invalid rows."""

SWAP_ROW = np.dtype([("host_row", "<i8"), ("hot_row", "<i4"), ("column", "<u4")])
"""One row to copy from the host pool, 16 bytes. An invalid row has host_row and hot_row -1 and column
0xFFFFFFFF."""

_ALL_ONES = 0xFFFFFFFF
_LAYOUTS = {"compress": COMPRESS_ROW, "write": WRITE_ROW, "decode": DECODE_ROW, "swap": SWAP_ROW}
_KINDS = {dtype: kind for kind, dtype in _LAYOUTS.items()}
_INVALID = {
    COMPRESS_ROW: (_ALL_ONES, 0, 0, -1, -1),
    WRITE_ROW: (_ALL_ONES, -1),
    SWAP_ROW: (-1, -1, _ALL_ONES),
}
_INVALID_MARK = {COMPRESS_ROW: "seq_len", WRITE_ROW: "ragged_id", SWAP_ROW: "column"}

_Packed = torch.Tensor | np.ndarray


def compress_rows(plan: _Packed) -> np.ndarray:
    """View a compress plan as structured rows.

    Args:
        plan: contiguous ``uint8 [n, 16]``, a tensor on any device or a numpy array. An array that already has
            :data:`COMPRESS_ROW` is returned as it is.

    Returns:
        ``[n]`` of :data:`COMPRESS_ROW`, sharing the memory of ``plan`` (a copy where ``plan`` is on a GPU,
        which waits for the current stream).

    Raises:
        TypeError: ``plan`` is no tensor or array, or not uint8.
        ValueError: another shape, or not contiguous.
    """
    return _rows("plan", plan, COMPRESS_ROW, ndim=2)


def write_rows(plan: _Packed) -> np.ndarray:
    """View a write plan, contiguous ``uint8 [n, 8]``, as ``[n]`` of :data:`WRITE_ROW`.

    Everything else is as for :func:`compress_rows`.
    """
    return _rows("plan", plan, WRITE_ROW, ndim=2)


def decode_rows(plan: _Packed) -> np.ndarray:
    """View a decode plan, contiguous ``uint8 [B, 16]``, as ``[B]`` of :data:`DECODE_ROW`.

    Everything else is as for :func:`compress_rows`.
    """
    return _rows("plan", plan, DECODE_ROW, ndim=2)


def swap_rows(plan: _Packed) -> np.ndarray:
    """View a swap plan, contiguous ``uint8 [..., 16]``, as ``[...]`` of :data:`SWAP_ROW`.

    A swap plan has one list of copies per launch row, hence ``[R, K, 16]`` gives ``[R, K]``. Everything else
    is as for :func:`compress_rows`.
    """
    return _rows("plan", plan, SWAP_ROW, ndim=None)


def _rows(name: str, plan: _Packed, dtype: np.dtype, ndim: int | None) -> np.ndarray:
    if isinstance(plan, np.ndarray) and plan.dtype == dtype:
        return plan
    size = dtype.itemsize
    expected = f"contiguous uint8 [n, {size}]" if ndim == 2 else f"contiguous uint8 [..., {size}]"
    if isinstance(plan, torch.Tensor):
        is_uint8, contiguous = plan.dtype == torch.uint8, plan.is_contiguous()
    elif isinstance(plan, np.ndarray):
        is_uint8, contiguous = plan.dtype == np.uint8, plan.flags.c_contiguous
    else:
        raise TypeError(f"{name}: expected {expected}, got {type(plan).__name__}")
    if not is_uint8:
        raise TypeError(f"{name}: expected {expected}, got dtype {plan.dtype}")
    shape = tuple(plan.shape)
    if not shape or shape[-1] != size or (ndim is not None and len(shape) != ndim):
        raise ValueError(f"{name}: expected {expected}, got shape {list(shape)}")
    if not contiguous:
        strides = plan.stride() if isinstance(plan, torch.Tensor) else plan.strides
        raise ValueError(f"{name}: expected {expected}, got shape {list(shape)} with strides {list(strides)}")
    if isinstance(plan, torch.Tensor):
        plan = plan.detach().cpu().numpy()
    return plan.view(dtype).reshape(shape[:-1])


def valid(rows: np.ndarray) -> np.ndarray:
    """Say which rows stand for something and which only fill the plan up.

    Args:
        rows: an array of :data:`COMPRESS_ROW`, :data:`WRITE_ROW`, :data:`DECODE_ROW` or :data:`SWAP_ROW`, as
            the ``*_rows`` functions give it.

    Returns:
        A bool array of the same shape. Every decode row is valid.

    Raises:
        TypeError: ``rows`` has none of these dtypes.
    """
    kind = _KINDS.get(rows.dtype) if isinstance(rows, np.ndarray) else None
    if kind is None:
        got = f"dtype {rows.dtype}" if isinstance(rows, np.ndarray) else type(rows).__name__
        raise TypeError(f"rows: expected an array of plan rows ({', '.join(_LAYOUTS)}), got {got}")
    if rows.dtype not in _INVALID_MARK:
        return np.ones(rows.shape, dtype=bool)
    mask: np.ndarray = rows[_INVALID_MARK[rows.dtype]] != _ALL_ONES
    return mask


def valid_compress(plan: _Packed) -> np.ndarray:
    """Return the valid-row mask, bool ``[n]``, of a compress plan or of its rows."""
    return valid(compress_rows(plan))


def valid_write(plan: _Packed) -> np.ndarray:
    """Return the valid-row mask, bool ``[n]``, of a write plan or of its rows."""
    return valid(write_rows(plan))


def invalid_rows(dtype: np.dtype, count: int) -> np.ndarray:
    """Make ``count`` invalid rows of a layout that has them.

    Raises:
        TypeError: ``dtype`` is not :data:`COMPRESS_ROW`, :data:`WRITE_ROW` or :data:`SWAP_ROW`.
    """
    if dtype not in _INVALID:
        raise TypeError(f"dtype: expected COMPRESS_ROW, WRITE_ROW or SWAP_ROW, got {dtype}")
    return np.full(count, np.array(_INVALID[dtype], dtype=dtype), dtype=dtype)


def describe(plan: PrefillPlan | _Packed, kind: str | None = None, limit: int = 20) -> str:
    """Write a plan as a text table.

    Args:
        plan: a :class:`PrefillPlan`, a packed tensor or array, or structured rows.
        kind: "compress", "write", "decode" or "swap". Needed for packed 16-byte rows, which may be any of
            three layouts; not used for a :class:`PrefillPlan`.
        limit: at most so many rows per plan are shown, half of them from the head and half from the tail.

    Returns:
        Lines without a trailing newline, which are a title with the counts of valid and invalid rows, the names of the
        fields, the rows. A row that is no entry is shown as "invalid".

    Raises:
        TypeError, ValueError: as :func:`compress_rows`, or an unknown or missing ``kind``, or a negative
            ``limit``.
    """
    if limit < 0:
        raise ValueError(f"limit: expected 0 or more, got {limit}")
    if isinstance(plan, PrefillPlan):
        if kind is not None:
            raise ValueError(f"kind: expected None for a PrefillPlan, got {kind!r}")
        # The online plans hold segments in both tensors, so the width of the second one tells its layout.
        segments = _width(plan.write) == COMPRESS_ROW.itemsize
        write = _rows("plan.write", plan.write, COMPRESS_ROW if segments else WRITE_ROW, ndim=2)
        compress = _rows("plan.compress", plan.compress, COMPRESS_ROW, ndim=2)
        titles = ("compress plan", "write plan (open segments)" if segments else "write plan")
        return "\n\n".join(_table(t, r, limit) for t, r in zip(titles, (compress, write), strict=True))
    if kind is None:
        kind = _guess_kind(plan)
    if kind not in _LAYOUTS:
        raise ValueError(f"kind: expected one of {', '.join(_LAYOUTS)}, got {kind!r}")
    rows = _rows("plan", plan, _LAYOUTS[kind], ndim=None if kind == "swap" else 2)
    return _table(f"{kind} plan", rows, limit)


def _width(plan: _Packed) -> int | None:
    """Bytes of a row; None where that cannot be said (the caller's own checks then word the error)."""
    if isinstance(plan, np.ndarray) and plan.dtype in _KINDS:
        return plan.dtype.itemsize
    shape: Sequence[int] = getattr(plan, "shape", ())
    return int(shape[-1]) if len(shape) else None


def _guess_kind(plan: _Packed) -> str:
    if isinstance(plan, np.ndarray) and plan.dtype in _KINDS:
        return _KINDS[plan.dtype]
    if not isinstance(plan, torch.Tensor | np.ndarray):
        got = type(plan).__name__
        raise TypeError(f"plan: expected a PrefillPlan, a uint8 tensor or plan rows, got {got}")
    if _width(plan) == WRITE_ROW.itemsize:
        return "write"
    raise ValueError(
        f"kind: expected one of {', '.join(_LAYOUTS)} for a plan of shape {list(plan.shape)}, got None"
        " (16-byte rows have more than one layout)"
    )


def _table(title: str, rows: np.ndarray, limit: int) -> str:
    mask = valid(rows)
    count = int(mask.sum())
    title = f"{title}: {rows.size} rows" + (f" {list(rows.shape)}" if rows.ndim > 1 else "")
    lines = [f"{title}, {count} valid, {rows.size - count} invalid"]
    flat, mask = rows.reshape(-1), mask.reshape(-1)

    if flat.size <= limit:
        head, tail = flat.size, 0
    else:
        head, tail = limit - limit // 2, limit // 2
    shown = [*range(head), *range(flat.size - tail, flat.size)]
    names = rows.dtype.names
    assert names is not None  # `valid` knows the layout
    cells = [["row", *names]]
    for i in shown:
        label = str(i) if rows.ndim == 1 else ",".join(str(int(k)) for k in np.unravel_index(i, rows.shape))
        cells.append([label, *(str(x) for x in flat[i].tolist())] if mask[i] else [label, "invalid"])
    if not shown:
        return lines[0]

    widths = [max(len(row[c]) for row in cells if len(row) > c) for c in range(len(names) + 1)]
    text = ["  " + "  ".join(x.rjust(w) for x, w in zip(row, widths, strict=False)) for row in cells]
    hidden = flat.size - len(shown)
    if hidden:
        text.insert(1 + head, f"  ... {hidden} more rows ...")
    return "\n".join(lines + text)
