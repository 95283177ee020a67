"""Views of packed plans: layouts, memory, masks, errors and tables."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch

from hotplan import plans
from hotplan.plans import PrefillPlan

INVALID_COMPRESS = struct.pack("<IHHii", 0xFFFFFFFF, 0, 0, -1, -1)
INVALID_WRITE = struct.pack("<Ii", 0xFFFFFFFF, -1)
INVALID_SWAP = struct.pack("<qiI", -1, -1, 0xFFFFFFFF)


def packed(*rows: bytes) -> torch.Tensor:
    """Rows as a plan tensor that owns its memory."""
    return torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8).reshape(len(rows), -1)


COMPRESS = packed(struct.pack("<IHHii", 2**31 - 1, 65535, 127, -1, 7), INVALID_COMPRESS)
WRITE = packed(struct.pack("<Ii", 65535, 2**31 - 1), INVALID_WRITE, struct.pack("<Ii", 3, -1))
DECODE = packed(struct.pack("<Iiii", 0xFFFFFFFF, 1, 2, 3), struct.pack("<Iiii", 1, -1, -1, -1))
SWAP = packed(struct.pack("<qiI", 2**40, 77, 2047), INVALID_SWAP).reshape(1, 2, 16)


def test_fields_of_every_layout() -> None:
    assert plans.compress_rows(COMPRESS).tolist() == [
        (2**31 - 1, 65535, 127, -1, 7),
        (0xFFFFFFFF, 0, 0, -1, -1),
    ]
    assert plans.write_rows(WRITE).tolist() == [(65535, 2**31 - 1), (0xFFFFFFFF, -1), (3, -1)]
    assert plans.decode_rows(DECODE).tolist() == [(0xFFFFFFFF, 1, 2, 3), (1, -1, -1, -1)]
    assert plans.swap_rows(SWAP).tolist() == [[(2**40, 77, 2047), (-1, -1, 0xFFFFFFFF)]]
    assert plans.COMPRESS_ROW.names == ("seq_len", "ragged_id", "buffer_len", "read_page_0", "read_page_1")
    assert plans.WRITE_ROW.names == ("ragged_id", "write_loc")
    assert plans.DECODE_ROW.names == ("seq_len", "write_loc", "read_page_0", "read_page_1")
    assert plans.SWAP_ROW.names == ("host_row", "hot_row", "column")
    sizes = [d.itemsize for d in (plans.COMPRESS_ROW, plans.WRITE_ROW, plans.DECODE_ROW, plans.SWAP_ROW)]
    assert sizes == [16, 8, 16, 16]


@pytest.mark.parametrize(("view", "width"), [(plans.compress_rows, 16), (plans.write_rows, 8), (plans.decode_rows, 16)])
def test_views_share_memory(view, width: int) -> None:
    tensor = torch.zeros(5, width, dtype=torch.uint8)
    rows = view(tensor)
    field = rows.dtype.names[-1]
    rows[field][3] = 258
    assert tensor[3].tolist() == [0] * (width - 4) + [2, 1, 0, 0]
    assert view(tensor[2:4])[field].tolist() == [0, 258]  # a run of rows is a plan too
    array = np.zeros((2, width), np.uint8)
    view(array)[field][0] = 1
    assert array[0, width - 4] == 1
    assert view(rows) is rows
    assert view(torch.zeros(0, width, dtype=torch.uint8)).shape == (0,)


def test_swap_rows_of_any_rank() -> None:
    tensor = torch.zeros(3, 4, 16, dtype=torch.uint8)
    rows = plans.swap_rows(tensor)
    assert rows.shape == (3, 4)
    rows["host_row"][2, 1] = 2**33
    assert tensor[2, 1].tolist() == [0, 0, 0, 0, 2, 0, 0, 0] + [0] * 8
    assert plans.swap_rows(tensor[1]).shape == (4,)
    assert plans.swap_rows(torch.zeros(0, 4, 16, dtype=torch.uint8)).shape == (0, 4)


def test_valid_rows() -> None:
    assert plans.valid_compress(COMPRESS).tolist() == [True, False]
    assert plans.valid_compress(plans.compress_rows(COMPRESS)).tolist() == [True, False]
    assert plans.valid_write(WRITE).tolist() == [True, False, True]
    assert plans.valid(plans.decode_rows(DECODE)).tolist() == [True, True]
    assert plans.valid(plans.swap_rows(SWAP)).tolist() == [[True, False]]
    assert plans.valid_write(torch.zeros(0, 8, dtype=torch.uint8)).shape == (0,)


def test_invalid_rows_are_those_of_the_contract() -> None:
    for dtype, expected in (
        (plans.COMPRESS_ROW, INVALID_COMPRESS),
        (plans.WRITE_ROW, INVALID_WRITE),
        (plans.SWAP_ROW, INVALID_SWAP),
    ):
        rows = plans.invalid_rows(dtype, 3)
        assert rows.tobytes() == expected * 3
        assert not plans.valid(rows).any()
        assert plans.invalid_rows(dtype, 0).shape == (0,)
    with pytest.raises(TypeError, match="dtype: expected COMPRESS_ROW, WRITE_ROW or SWAP_ROW"):
        plans.invalid_rows(plans.DECODE_ROW, 1)


@pytest.mark.parametrize(("view", "width"), [(plans.compress_rows, 16), (plans.write_rows, 8), (plans.decode_rows, 16)])
def test_view_errors(view, width: int) -> None:
    expected = rf"plan: expected contiguous uint8 \[n, {width}\], got "
    with pytest.raises(TypeError, match=expected + "list"):
        view([[0] * width])
    with pytest.raises(TypeError, match=expected + "dtype torch.int32"):
        view(torch.zeros(2, width, dtype=torch.int32))
    with pytest.raises(TypeError, match=expected + "dtype int8"):
        view(np.zeros((2, width), np.int8))
    with pytest.raises(ValueError, match=expected + rf"shape \[2, {width + 1}\]"):
        view(torch.zeros(2, width + 1, dtype=torch.uint8))
    with pytest.raises(ValueError, match=expected + rf"shape \[{width}\]"):
        view(torch.zeros(width, dtype=torch.uint8))
    with pytest.raises(ValueError, match=expected + rf"shape \[1, 2, {width}\]"):
        view(torch.zeros(1, 2, width, dtype=torch.uint8))
    with pytest.raises(ValueError, match=expected + rf"shape \[2, {width}\] with strides \[{2 * width}, 1\]"):
        view(torch.zeros(4, width, dtype=torch.uint8)[::2])
    with pytest.raises(ValueError, match=expected + rf"shape \[2, {width}\] with strides \[{2 * width}, 1\]"):
        view(np.zeros((2, 2 * width), np.uint8)[:, :width])


def test_other_errors() -> None:
    with pytest.raises(ValueError, match=r"plan: expected contiguous uint8 \[\.\.\., 16\], got shape \[2, 8\]"):
        plans.swap_rows(torch.zeros(2, 8, dtype=torch.uint8))
    with pytest.raises(TypeError, match=r"rows: expected an array of plan rows .* got dtype uint8"):
        plans.valid(np.zeros((2, 16), np.uint8))
    with pytest.raises(TypeError, match=r"rows: expected an array of plan rows .* got Tensor"):
        plans.valid(COMPRESS)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="kind: expected one of compress, write, decode, swap, got 'prefill'"):
        plans.describe(COMPRESS, "prefill")
    with pytest.raises(ValueError, match=r"kind: expected one of .* for a plan of shape \[2, 16\], got None"):
        plans.describe(COMPRESS)
    with pytest.raises(TypeError, match="plan: expected a PrefillPlan, a uint8 tensor or plan rows, got int"):
        plans.describe(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="kind: expected None for a PrefillPlan, got 'write'"):
        plans.describe(PrefillPlan(COMPRESS, WRITE), "write")
    with pytest.raises(ValueError, match="limit: expected 0 or more, got -1"):
        plans.describe(WRITE, limit=-1)
    with pytest.raises(ValueError, match=r"plan.write: expected contiguous uint8 \[n, 8\], got shape \[2, 9\]"):
        plans.describe(PrefillPlan(COMPRESS, torch.zeros(2, 9, dtype=torch.uint8)))
    with pytest.raises(TypeError, match=r"plan.compress: expected contiguous uint8 \[n, 16\], got dtype"):
        plans.describe(PrefillPlan(COMPRESS.int(), WRITE))


def test_describe_prefill() -> None:
    assert plans.describe(PrefillPlan(COMPRESS, WRITE)).splitlines() == [
        "compress plan: 2 rows, 1 valid, 1 invalid",
        "  row     seq_len  ragged_id  buffer_len  read_page_0  read_page_1",
        "    0  2147483647      65535         127           -1            7",
        "    1     invalid",
        "",
        "write plan: 3 rows, 2 valid, 1 invalid",
        "  row  ragged_id   write_loc",
        "    0      65535  2147483647",
        "    1    invalid",
        "    2          3          -1",
    ]
    online = plans.describe(PrefillPlan(COMPRESS, COMPRESS)).splitlines()
    assert online[5] == "write plan (open segments): 2 rows, 1 valid, 1 invalid"
    assert online[6:] == online[1:4]


def test_describe_kinds() -> None:
    assert plans.describe(DECODE, "decode").splitlines() == [
        "decode plan: 2 rows, 2 valid, 0 invalid",
        "  row     seq_len  write_loc  read_page_0  read_page_1",
        "    0  4294967295          1            2            3",
        "    1           1         -1           -1           -1",
    ]
    assert plans.describe(SWAP, "swap").splitlines() == [
        "swap plan: 2 rows [1, 2], 1 valid, 1 invalid",
        "  row       host_row  hot_row  column",
        "  0,0  1099511627776       77    2047",
        "  0,1        invalid",
    ]
    assert plans.describe(WRITE) == plans.describe(WRITE, "write") == plans.describe(WRITE.numpy(), "write")
    rows = plans.decode_rows(DECODE)
    assert plans.describe(rows) == plans.describe(DECODE, "decode")


def test_describe_excerpt() -> None:
    tensor = torch.zeros(100, 8, dtype=torch.uint8)
    plans.write_rows(tensor)["ragged_id"] = np.arange(100)
    lines = plans.describe(tensor, limit=5).splitlines()
    assert lines[0] == "write plan: 100 rows, 100 valid, 0 invalid"
    assert [line.split()[0] for line in lines[2:]] == ["0", "1", "2", "...", "98", "99"]
    assert lines[5] == "  ... 95 more rows ..."
    assert len(plans.describe(tensor, limit=100).splitlines()) == 102
    assert plans.describe(tensor, limit=0) == lines[0]
    assert plans.describe(tensor[:0]) == "write plan: 0 rows, 0 valid, 0 invalid"
    assert [line.split()[0] for line in plans.describe(tensor, limit=1).splitlines()[2:]] == ["0", "..."]
