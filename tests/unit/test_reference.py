"""The reference against worked values, recorded kernels, a loop over tokens and a model of the rings."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import strategies as cases
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from ring_model import OnlineModel, RingError, RingModel
from strategies import Case, Geometry, Lengths, build_case, load_golden, seed_of, words

from hotplan import plans, reference

INVALID_COMPRESS = [-1, 0, -1, -1]
INVALID_WRITE = [-1, -1]


def few(examples: int):
    """Hypothesis settings: deterministic, because a failure on one machine should be one on every machine."""
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


def int64(values) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int64)


def rows_of(packed: torch.Tensor) -> list[tuple[int, ...]]:
    """Plan rows as tuples: C = (seq_len, ragged, buffer_len, page0, page1), W = (ragged, loc)."""
    view = plans.compress_rows if packed.shape[1] == 16 else plans.write_rows
    return [tuple(row) for row in view(packed).tolist()]


# ------------------------------------------------------------------------------------ the contract's values


def spec_prefill(requests: list[tuple[int, int]], geometry: Geometry) -> plans.PrefillPlan:
    lengths = Lengths(tuple(s for s, _ in requests), tuple(e for _, e in requests), sum(e for _, e in requests))
    case = build_case(lengths, geometry, tables="spec", requests=list(range(len(requests))))
    return case.prefill(reference.plan_compress_prefill)


C4, C4_SPEC, C4_REQ = Geometry(4, 256, 8), Geometry(4, 256, 16), Geometry(4, 256, 8, use_req_ring=True)
C128, C128_SPEC = Geometry(128, 256, 128), Geometry(128, 256, 256)

WORKED_PREFILL = {
    "1": (
        [(10, 10)],
        C4,
        [(4, 3, 4, 0, 0), (8, 7, 0, -1, 0)],
        [(4, 4), (5, 5), (6, 6), (7, 7), (8, 0), (9, 1)],
    ),
    "2": ([(10, 10)], C4_SPEC, [(4, 3, 4, 0, 0), (8, 7, 0, -1, 0)], [(i, i) for i in range(10)]),
    "3": ([(8, 3)], C4, [(8, 2, 5, 0, 1)], [(0, 5), (1, 6), (2, 7)]),
    "4": (
        [(5, 5), (8, 4), (9, 1)],
        C4,
        [(4, 3, 4, 0, 0), (8, 8, 4, 32, 33)],
        [(0, 0), (1, 1), (2, 2), (3, 3), (4, 4), (5, 132), (6, 133), (7, 134), (8, 135), (9, 256)],
    ),
    "5": (
        [(261, 261)],
        C4,
        [(4, 3, 4, 0, 0)] + [(4 * k, 4 * k - 1, 0, -1, 0) for k in range(2, 66)],
        [(252, 4), (253, 5), (254, 6), (255, 7), (256, 8), (257, 9), (258, 10), (259, 11), (260, 12)],
    ),
    "5, use_req_ring": (
        [(261, 261)],
        C4_REQ,
        [(4, 3, 4, 0, 0)] + [(4 * k, 4 * k - 1, 0, -1, 0) for k in range(2, 66)],
        [(256, 0), (257, 1), (258, 2), (259, 3), (260, 4)],
    ),
    "6": ([(100, 5)], C4_SPEC, None, [(0, 15), (1, 0), (2, 1), (3, 2), (4, 3)]),
    "7": ([(248, 128)], C128, [(128, 7, 120, 0, 0)], [(8 + i, i) for i in range(120)]),
    "8": ([(130, 130)], C128, [(128, 127, 0, -1, 0)], [(128, 0), (129, 1)]),
    "8, ring 256": ([(130, 130)], C128_SPEC, [(128, 127, 0, -1, 0)], [(i, i) for i in range(130)]),
    "9": ([(128, 128)], C128, [(128, 127, 0, -1, 0)], []),
}


@pytest.mark.parametrize("number", WORKED_PREFILL)
def test_worked_prefill(number: str) -> None:
    requests, geometry, compress, write = WORKED_PREFILL[number]
    plan = spec_prefill(requests, geometry)
    if compress is not None:
        assert rows_of(plan.compress) == compress
    assert rows_of(plan.write) == write


def test_worked_prefill_5_has_65_windows() -> None:
    assert len(spec_prefill([(261, 261)], C4).compress) == 65


@pytest.mark.parametrize(
    ("ratio", "seq", "extend", "compress", "write"),
    [
        (
            4,
            10,
            10,
            [(4, 3, 4, 6, 6), (8, 7, 0, 6, 7)],
            [(4, 28), (5, 29), (6, 30), (7, 31), (8, 24), (9, 25)],
        ),
        (128, 130, 5, [(128, 2, 125, 3, 3)], [(3, 384), (4, 385)]),
    ],
    ids=["10", "11"],
)
def test_worked_prefill_legacy(ratio: int, seq: int, extend: int, compress: list, write: list) -> None:
    plan = reference.plan_compress_prefill_legacy(
        int64([3]), int64([seq]), int64([extend]), num_q_tokens=extend, compress_ratio=ratio
    )
    assert rows_of(plan.compress) == compress
    assert rows_of(plan.write) == write


@pytest.mark.parametrize(
    ("geometry", "requests", "seqs", "expected"),
    [
        (
            C4,
            [0, 1, 2, 3, 4],
            [1, 4, 5, 8, 257],
            [[1, 0, 0, 0], [4, 131, 32, 32], [5, 260, 64, 65], [8, 391, 96, 97], [257, 520, 129, 130]],
        ),
        (
            C128,
            [2] * 5,
            [1, 127, 128, 129, 256],
            [[1, 256, 2, 2], [127, 382, 2, 2], [128, 383, 2, 2], [129, 256, 2, 2], [256, 383, 2, 2]],
        ),
        (
            Geometry(4, 256, 16, use_req_ring=True),
            [3] * 4,
            [1, 4, 17, 32],
            [[1, 48, 12, 12], [4, 51, 12, 12], [17, 48, 15, 12], [32, 63, 14, 15]],
        ),
    ],
    ids=["12", "13", "14"],
)
def test_worked_decode(geometry: Geometry, requests: list[int], seqs: list[int], expected: list) -> None:
    lengths = Lengths(tuple(seqs), (1,) * len(seqs), len(seqs))
    case = build_case(lengths, geometry, tables="spec", requests=requests)
    assert words(case.decode(reference.plan_compress_decode)) == expected


def test_worked_online_verify() -> None:
    arguments: dict[str, Any] = {"num_draft_tokens": 8, "state_slot_offset": 128}
    requests, prefix = int64([3, 5, 7, 9]), torch.tensor([112, 120, 124, 128], dtype=torch.int32)
    closed = [
        INVALID_COMPRESS,
        [128, 8 << 16 | 15, 133, 5],
        [128, 4 << 16 | 19, 135, 7],
        INVALID_COMPRESS,
    ]
    stored = [
        [120, 8 << 16 | 7, 131, 3],
        INVALID_COMPRESS,
        [132, 4 << 16 | 23, 135, 7],
        INVALID_COMPRESS,
    ]
    for active in (3, torch.tensor([3], dtype=torch.int32), torch.tensor([3], dtype=torch.int64)):
        plan = reference.plan_online_verify(requests, prefix, active_batch_size=active, **arguments)
        assert words(plan.compress) == closed
        assert words(plan.write) == stored
    none = reference.plan_online_verify(
        requests, prefix, active_batch_size=torch.tensor([-7], dtype=torch.int32), **arguments
    )
    assert words(none.compress) == words(none.write) == [INVALID_COMPRESS] * 4
    everyone = reference.plan_online_verify(
        requests, prefix, active_batch_size=torch.tensor([99], dtype=torch.int64), **arguments
    )
    assert words(everyone.write)[3] == [136, 8 << 16 | 31, 137, 9]


# --------------------------------------------------------------------------------------------- golden files


GOLDEN_PLANS = load_golden("plans_a")
GOLDEN_ONLINE = load_golden("online_a")


def golden_case(record: dict[str, Any]) -> Case:
    t = record["tables"]
    req_to_token, full_to_state = cases.affine_tables(t["nreq"], t["width"], t["A"], t["B"], t["C"], t["F"])
    return Case(
        Lengths(tuple(record["seq"]), tuple(record["ext"]), record["num_q"]),
        Geometry(record["ratio"], record["swa"], record["ring"], record["use_req_ring"]),
        int64(record["rid"]),
        req_to_token,
        full_to_state,
        int64(record["seq"]),
        int64(record["ext"]),
    )


@pytest.mark.parametrize("index", range(len(GOLDEN_PLANS)))
def test_golden_plans(index: int) -> None:
    record = GOLDEN_PLANS[index]
    case = golden_case(record)
    plan = case.prefill(reference.plan_compress_prefill)
    assert words(plan.compress) == record["compress"]
    assert words(plan.write) == record["write"]
    assert words(case.decode(reference.plan_compress_decode)) == record["decode"]
    legacy = case.prefill_legacy(reference.plan_compress_prefill_legacy)
    assert words(legacy.compress) == record["legacy_compress"]
    assert words(legacy.write) == record["legacy_write"]
    assert words(case.decode_legacy(reference.plan_compress_decode_legacy)) == record["legacy_decode"]


@pytest.mark.parametrize("index", range(len(GOLDEN_PLANS)))
def test_golden_plans_unchecked(index: int) -> None:
    """The GPU-length route had the same rows in no order; here they come in order, before the padding."""
    record = GOLDEN_PLANS[index]
    assert record["gpu_set_equal"]
    padded = record["padded"]
    plan = golden_case(record).prefill(reference.plan_compress_prefill, num_q_tokens=padded, unchecked=True)
    tail = padded - len(record["compress"])
    assert words(plan.compress) == record["compress"] + [INVALID_COMPRESS] * tail
    assert words(plan.write) == record["write"] + [INVALID_WRITE] * (padded - len(record["write"]))


@pytest.mark.parametrize("index", range(len(GOLDEN_ONLINE)))
def test_golden_online(index: int) -> None:
    record = GOLDEN_ONLINE[index]
    requests, seq, extend = int64(record["rid"]), int64(record["seq"]), int64(record["ext"])
    options = {"num_q_tokens": record["num_q"], "state_slot_offset": record["offset"]}
    plan = reference.plan_online_prefill(requests, seq, extend, **options)
    assert words(plan.compress) == record["compress"]
    assert words(plan.write) == record["write"]
    padded = reference.plan_online_prefill(requests, seq, extend, use_cuda_graph=True, **options)
    for name in plans.PrefillPlan._fields:
        rows = record[name]
        assert words(getattr(padded, name)) == rows + [INVALID_COMPRESS] * (record["num_q"] - len(rows))
    decode = reference.plan_online_decode(requests, seq, state_slot_offset=record["offset"])
    assert words(decode) == record["decode"]


# ------------------------------------------------------------------------ any values: a loop over the tokens


def token_loop(case: Case, layout: str) -> tuple[list[tuple], list[tuple]]:
    """The rules for unchecked lengths once more, one token at a time and in Python's integers only."""
    g, offset = case.geometry, case.state_slot_offset
    ratio = 128 if layout == "online" else g.compress_ratio
    window, keep = {4: (8, 4), 128: (128, 0)}[ratio]
    num_q = case.lengths.num_q_tokens
    pad = g.write_pad
    if pad is None:
        pad = g.ring_size - window + 2 if g.ring_size > window else 0
    paged = layout == "paged" and g.paged
    num_reqs, width = case.req_to_token.shape

    def field(value: int | None) -> int:
        return value if value is not None and 0 <= value < 2**31 else -1

    def location(rid: int, p: int) -> int | None:
        if rid < 0:
            return None
        if layout == "legacy":
            page = rid * 2 + p // 4 % 2 if ratio == 4 else rid
            return page * ratio + p % ratio
        if not paged:
            return rid * g.ring_size + p % g.ring_size
        if rid >= num_reqs or p >= width:
            return None
        full = int(case.req_to_token[rid, p])
        if not 0 <= full < len(case.full_to_state):
            return None
        swa = int(case.full_to_state[full])
        return None if swa < 0 else swa // g.swa_page_size * g.ring_size + swa % g.ring_size

    def page_of(rid: int, p: int) -> int:
        loc = location(rid, p)
        return field(None if loc is None else loc // ratio)

    compress, write = [], []
    start = 0
    rids = case.req_pool_indices.tolist()
    for i, (rid, seq, extend) in enumerate(zip(rids, case.lengths.seq, case.lengths.extend, strict=True)):
        count = min(max(extend, 0), num_q)
        for j in range(count):
            p, ragged = seq - extend + j, start + j
            if not 0 <= p < 2**31 - 1 or ragged >= num_q:
                continue
            closes = (p + 1) % ratio == 0
            if layout == "online":
                slot = field(rid + offset) if rid >= 0 else -1
                row = (p + 1, ragged, min(j + 1, p % 128 + 1), slot, field(rid))
                if closes:
                    compress.append(row)
                elif p == seq - 1:
                    write.append(row)
                continue
            if closes:
                buffer_len = window - min(j + 1, window)
                pages = (page_of(rid, max(p - ratio, 0)), page_of(rid, p))
                if buffer_len == 0 and layout == "paged":
                    pages = (-1, i)
                compress.append((p + 1, ragged, buffer_len, *pages))
            first_write = seq // ratio * ratio - keep
            if layout == "paged":
                first_write = min(first_write, seq - pad)
            if p >= first_write or (paged and p % g.swa_page_size >= g.swa_page_size - 4):
                write.append((ragged, field(location(rid, p))))
        start += count
    return compress, write


def check_token_loop(case: Case) -> None:
    num_q = case.lengths.num_q_tokens
    invalid_compress, invalid_write = (0xFFFFFFFF, 0, 0, -1, -1), (0xFFFFFFFF, -1)
    calls = {
        "paged": lambda: case.prefill(reference.plan_compress_prefill, unchecked=True),
        "legacy": lambda: case.prefill_legacy(reference.plan_compress_prefill_legacy, unchecked=True),
        "online": lambda: case.online_prefill(reference.plan_online_prefill, unchecked=True),
    }
    for layout, call in calls.items():
        compress, write = token_loop(case, layout)
        plan = call()
        assert rows_of(plan.compress) == compress + [invalid_compress] * (num_q - len(compress))
        invalid = invalid_compress if layout == "online" else invalid_write
        assert rows_of(plan.write) == write + [invalid] * (num_q - len(write))


@few(120)
@given(cases.hostile_cases())
def test_any_values(case: Case) -> None:
    check_token_loop(case)


@few(30)
@given(cases.cases(max_batch=5, max_extend=300))
def test_valid_values_unchecked(case: Case) -> None:
    check_token_loop(case)


@pytest.mark.parametrize("index", range(len(cases.hostile())))
def test_hostile_lengths(index: int) -> None:
    lengths = cases.hostile()[index]
    for geometry in (C4, C4_SPEC, C4_REQ, C128_SPEC):
        if lengths.num_q_tokens < cases.MAX_TOKENS:
            check_token_loop(build_case(lengths, geometry, seed=index, max_width=300))
        check_token_loop(build_case(Lengths(lengths.seq, lengths.extend, 50), geometry, seed=index, tables="hostile"))


def test_prefix_of_huge_lengths_is_exact() -> None:
    """seq and extend are far beyond an int32, their difference is 10: the tokens at 10, 11, .. exist."""
    lengths = Lengths((2**62 + 40,), (2**62 + 30,), 20)
    plan = build_case(lengths, C128, requests=[2]).prefill_legacy(
        reference.plan_compress_prefill_legacy, unchecked=True, compress_ratio=4
    )
    closed = [row for row in rows_of(plan.compress) if row[0] != 0xFFFFFFFF]
    assert closed == [
        (12, 1, 6, 5, 4),
        (16, 5, 2, 4, 5),
        (20, 9, 0, 5, 4),
        (24, 13, 0, 4, 5),
        (28, 17, 0, 5, 4),
    ]


def test_rows_past_the_input_are_dropped() -> None:
    case = build_case(Lengths((8, 8), (8, 8), 12), C4_REQ, requests=[0, 1])
    plan = case.prefill(reference.plan_compress_prefill, unchecked=True)
    assert rows_of(plan.compress)[:4] == [
        (4, 3, 4, 0, 0),
        (8, 7, 0, -1, 0),
        (4, 11, 4, 2, 2),
        (0xFFFFFFFF, 0, 0, -1, -1),
    ]
    assert rows_of(plan.write)[:5] == [(4, 4), (5, 5), (6, 6), (7, 7), (0xFFFFFFFF, -1)]


@few(60)
@given(case=cases.hostile_cases(max_batch=12))
@example(case=build_case(Lengths((0, -1, 2**31 - 1, 2**31, -(2**63), 2**63 - 1), (1,) * 6, 6), C4_REQ))
def test_decode_any_values(case: Case) -> None:
    ratio, ring = case.geometry.compress_ratio, case.geometry.ring_size
    paged = words(case.decode(reference.plan_compress_decode, unchecked=True), signed=False)
    legacy = words(case.decode_legacy(reference.plan_compress_decode_legacy, unchecked=True))
    online = words(case.online_decode(reference.plan_online_decode, unchecked=True))
    requests = case.req_pool_indices.tolist()
    for i, (rid, seq) in enumerate(zip(requests, case.lengths.seq, strict=True)):
        assert paged[i][0] == seq % 2**32
        assert online[i][3] == -1
        slot = rid + case.state_slot_offset
        assert online[i][1] == online[i][2] == (slot if rid >= 0 and slot < 2**31 else -1)
        if rid < 0 or not 1 <= seq < 2**31:
            assert paged[i][1:] == [0xFFFFFFFF] * 3
            assert legacy[i][1:] == [-1] * 3
            continue
        if case.geometry.paged and (rid >= len(case.req_to_token) or seq > case.req_to_token.shape[1]):
            assert paged[i][1] == paged[i][3] == 0xFFFFFFFF
        if not case.geometry.paged and rid < 2**31 // ring:
            p = seq - 1
            assert paged[i][1] == rid * ring + p % ring
            assert paged[i][2] == (rid * ring + max(p - ratio, 0) % ring) // ratio
            assert paged[i][3] == (rid * ring + p % ring) // ratio


@few(60)
@given(
    prefix=st.lists(
        st.one_of(st.integers(0, 600), st.integers(-300, 5), st.integers(2**31 - 300, 2**31 - 1)), max_size=8
    ),
    drafts=st.integers(1, 128),
    active=st.integers(0, 8),
)
def test_online_verify_any_values(prefix: list[int], drafts: int, active: int) -> None:
    """Verify is online prefill with every request in a row of its own."""
    batch = len(prefix)
    requests = int64(range(5, 5 + batch))
    plan = reference.plan_online_verify(
        requests,
        torch.tensor(prefix, dtype=torch.int32),
        num_draft_tokens=drafts,
        state_slot_offset=40,
        active_batch_size=min(active, batch),
    )
    expected = reference.plan_online_prefill(
        requests[:active],
        int64(p + drafts for p in prefix[:active]),
        int64([drafts] * batch)[:active],
        num_q_tokens=max(1, batch * drafts),
        state_slot_offset=40,
        unchecked=True,
    )
    for fixed, packed in zip(plan, expected, strict=True):
        assert len(fixed) == batch
        rows, want = plans.compress_rows(fixed), plans.compress_rows(packed)
        want = want[plans.valid(want)]
        at = np.full(batch, -1)
        at[want["ragged_id"] // drafts] = np.arange(len(want))
        assert np.array_equal(plans.valid(rows), at >= 0)
        assert np.array_equal(rows[at >= 0], want[at[at >= 0]])


# ----------------------------------------------------------------------------------------------- properties


@few(60)
@given(cases.cases())
def test_padding_and_routes(case: Case) -> None:
    """With use_cuda_graph and for unchecked lengths: the same rows, then invalid ones up to num_q_tokens."""
    num_q = case.lengths.num_q_tokens
    for call, plan in (
        (case.prefill, reference.plan_compress_prefill),
        (case.prefill_legacy, reference.plan_compress_prefill_legacy),
        (case.online_prefill, reference.plan_online_prefill),
    ):
        exact = call(plan)
        padded = call(plan, use_cuda_graph=True)
        unchecked = call(plan, unchecked=True)
        for rows, filled, other in zip(exact, padded, unchecked, strict=True):
            assert filled.shape == (num_q, rows.shape[1])
            assert torch.equal(filled[: len(rows)], rows)
            assert torch.equal(filled, other)
            view = plans.compress_rows if rows.shape[1] == 16 else plans.write_rows
            assert plans.valid(view(rows)).all()
            tail = view(filled)[len(rows) :]
            assert np.array_equal(tail, plans.invalid_rows(tail.dtype, len(tail)))


@few(40)
@given(
    case=cases.cases(),
    use_req_ring=st.booleans(),
    spec=st.booleans(),
    graph=st.booleans(),
    both=st.booleans(),
)
def test_step_equals_separate_plans(case: Case, use_req_ring: bool, spec: bool, graph: bool, both: bool) -> None:
    rings = {4: 16, 128: 256} if spec else {4: 8, 128: 128}
    ratios = (4, 128) if both else (128,)
    pads = {4: 3, 128: None}
    step = case.step_prefill(
        reference.plan_step_prefill,
        swa_page_size=256,
        ratios=ratios,
        ring_sizes=tuple(rings[r] for r in ratios),
        use_req_ring=use_req_ring,
        use_cuda_graph=graph,
        write_pad=tuple(pads[r] for r in ratios),
    )
    decode = case.step_decode(
        reference.plan_step_decode,
        swa_page_size=256,
        ratios=ratios,
        ring_sizes=tuple(rings[r] for r in ratios),
        use_req_ring=use_req_ring,
    )
    assert list(step) == list(decode) == list(ratios)
    for ratio in ratios:
        fixed = {"compress_ratio": ratio, "swa_page_size": 256, "ring_size": rings[ratio]}
        fixed["use_req_ring"] = use_req_ring and ratio == 4
        alone = case.prefill(reference.plan_compress_prefill, **fixed, use_cuda_graph=graph, write_pad=pads[ratio])
        assert torch.equal(step[ratio].compress, alone.compress)
        assert torch.equal(step[ratio].write, alone.write)
        assert torch.equal(decode[ratio], case.decode(reference.plan_compress_decode, **fixed))


def test_step_has_one_pad_for_all_or_one_each() -> None:
    case = build_case(Lengths.of([5, 90], [300, 20]), C4)
    same = case.step_prefill(reference.plan_step_prefill, write_pad=40)
    each = case.step_prefill(reference.plan_step_prefill, write_pad=[40, 40])
    for ratio in (4, 128):
        assert torch.equal(same[ratio].write, each[ratio].write)
    default = case.step_prefill(reference.plan_step_prefill)
    assert len(default[4].write) < len(same[4].write)


@few(60)
@given(cases.cases())
def test_windows_and_rows_are_in_order(case: Case) -> None:
    """Each closed window once, batch-major and ascending; ragged ids name input rows of their own request."""
    plan = case.prefill(reference.plan_compress_prefill)
    ratio, num_q = case.geometry.compress_ratio, case.lengths.num_q_tokens
    starts = list(itertools.accumulate(case.lengths.extend, initial=0))
    compress, write = plans.compress_rows(plan.compress), plans.write_rows(plan.write)
    closed = [
        (p + 1, start + p - (seq - extend))
        for seq, extend, start in zip(case.lengths.seq, case.lengths.extend, starts, strict=False)
        for p in range(seq - extend, seq)
        if p % ratio == ratio - 1
    ]
    assert list(zip(compress["seq_len"].tolist(), compress["ragged_id"].tolist(), strict=True)) == closed
    for ids in (compress["ragged_id"].astype(np.int64), write["ragged_id"].astype(np.int64)):
        assert (np.diff(ids) > 0).all()
        assert len(ids) == 0 or 0 <= ids[0] <= ids[-1] < num_q
    assert len(write) <= num_q
    # No row of a window that this forward brings itself is taken from the ring, and none is forgotten.
    since_start = np.array([i - max(s for s in starts if s <= i) for i in compress["ragged_id"].tolist()], int)
    window = case.geometry.window
    assert np.array_equal(compress["buffer_len"], np.maximum(window - 1 - since_start, 0))
    # The newest tokens of every request are in the ring afterwards, as many as its open window has.
    stored = set(write["ragged_id"].tolist())
    for seq, extend, start in zip(case.lengths.seq, case.lengths.extend, starts, strict=False):
        needed = min(extend, seq % ratio)
        assert stored.issuperset(range(start + extend - needed, start + extend))


@few(40)
@given(data=st.data(), geometry=cases.geometries(), total=st.integers(2, 900))
def test_chunking_closes_the_same_windows(data: st.DataObject, geometry: Geometry, total: int) -> None:
    """However a prompt is cut into forwards, the same windows are compressed."""
    cuts = sorted(data.draw(st.sets(st.integers(1, total - 1), max_size=6)))
    windows = []
    for before, after in itertools.pairwise([0, *cuts, total]):
        lengths = Lengths((after,), (after - before,), after - before)
        plan = build_case(lengths, geometry, seed=total).prefill(reference.plan_compress_prefill)
        windows += plans.compress_rows(plan.compress)["seq_len"].tolist()
    ratio = geometry.compress_ratio
    assert windows == list(range(ratio, total + 1, ratio))


def test_empty_forwards() -> None:
    for lengths in cases.empty():
        for graph in (False, True):
            case = build_case(lengths, C4)
            plan = case.prefill(reference.plan_compress_prefill, use_cuda_graph=graph)
            legacy = case.prefill_legacy(reference.plan_compress_prefill_legacy, use_cuda_graph=graph)
            online = case.online_prefill(reference.plan_online_prefill, use_cuda_graph=graph)
            assert plan.compress.shape == legacy.compress.shape == online.write.shape == (0, 16)
            assert plan.write.shape == legacy.write.shape == (0, 8)
            assert plan.compress.dtype == plan.write.dtype == torch.uint8
    nobody = build_case(Lengths((), (), 0), C128)
    assert nobody.decode(reference.plan_compress_decode).shape == (0, 16)
    assert nobody.online_decode(reference.plan_online_decode).shape == (0, 16)


@pytest.mark.parametrize("index", range(len(cases.huge())))
def test_huge_forwards(index: int) -> None:
    """The largest forwards, by counting: what each must hold follows from the lengths alone."""
    case = build_case(cases.huge()[index], C128, seed=seed_of(f"huge {index}"), max_width=64)
    plan = case.prefill(reference.plan_compress_prefill)
    windows = [
        seq // 128 - (seq - extend) // 128 for seq, extend in zip(case.lengths.seq, case.lengths.extend, strict=True)
    ]
    opened = [min(seq % 128, extend) for seq, extend in zip(case.lengths.seq, case.lengths.extend, strict=True)]
    assert (len(plan.compress), len(plan.write)) == (sum(windows), sum(opened))


@pytest.mark.parametrize("index", range(len(cases.far())))
def test_positions_at_the_end_of_int32(index: int) -> None:
    for geometry in (C4_REQ, C128_SPEC, C4):
        case = build_case(cases.far()[index], geometry, max_width=500)
        check_token_loop(case)
        assert case.prefill(reference.plan_compress_prefill).compress.shape[0] > 0


# ------------------------------------------------------------------------------------------------ the rings


@st.composite
def sessions(draw: st.DrawFn, most_drafts: int, most_tokens: int, num_requests: int = 3) -> list[tuple]:
    """A server's day: prefill chunks, decode steps and, where the ring allows drafts, verify batches."""
    kinds = ["prefill", "decode"] + (["verify"] * 3 if most_drafts else [])
    chunk = st.one_of(st.integers(1, 12), st.integers(1, most_tokens // 3))
    steps = []
    for _ in range(draw(st.integers(4, 14))):
        kind = draw(st.sampled_from(kinds))
        who = draw(st.lists(st.integers(0, num_requests - 1), min_size=1, max_size=num_requests, unique=True))
        if kind == "prefill":
            steps.append((kind, {r: draw(chunk) for r in who}))
        elif kind == "decode":
            steps.append((kind, who, draw(st.integers(1, 9)), draw(st.integers(0, 2))))
        else:
            drafts = draw(st.one_of(st.just(most_drafts), st.integers(1, most_drafts)))
            rounds = draw(st.lists(st.integers(1, drafts), min_size=1, max_size=6))
            steps.append((kind, who, drafts, rounds))
    return steps


def run(model: RingModel, steps: list[tuple]) -> None:
    for step in steps:
        if step[0] == "prefill":
            new = {r: min(n, model.room(r)) for r, n in step[1].items()}
            new = {r: n for r, n in new.items() if n > 0}
            if new:
                model.extend(new)
        elif step[0] == "decode":
            _, who, rounds, padding = step
            for _ in range(rounds):
                who = [r for r in who if model.room(r) > 0]
                model.decode(who, padding)
        else:
            _, who, drafts, rounds = step
            for keep in rounds:
                who = [r for r in who if model.room(r) >= drafts]
                if who:
                    # Requests keep different numbers of tokens, as they do in a batch.
                    kept = {r: 1 + (keep - 1 + r) % drafts for r in who}
                    model.extend(dict.fromkeys(who, drafts), kept)


def ring_model(geometry: Geometry, most_tokens: int, **options: Any) -> RingModel:
    return RingModel(reference, geometry, num_requests=3, max_tokens=most_tokens, seed=7, **options)


# geometry, most drafts of a verify batch, tokens per request
RINGS = {
    "c4, page 256": (Geometry(4, 256, 8), 0, 700),
    "c4, page 16": (Geometry(4, 16, 8), 0, 160),
    "c4, page 8": (Geometry(4, 8, 8), 0, 120),
    "c4, page 24": (Geometry(4, 24, 8), 0, 160),
    "c4, ring of the request": (Geometry(4, 256, 8, use_req_ring=True), 0, 160),
    "c4 spec, page 256": (Geometry(4, 256, 16), 10, 700),
    "c4 spec, page 16": (Geometry(4, 16, 16), 10, 160),
    "c4 spec, page 32": (Geometry(4, 32, 16), 10, 160),
    "c4 spec, ring of the request": (Geometry(4, 256, 16, use_req_ring=True), 10, 160),
    "c4 ring 32, page 32": (Geometry(4, 32, 32), 26, 200),
    "c4 ring 12, ring of the request": (Geometry(4, 12, 12, use_req_ring=True), 6, 160),
    "c128": (Geometry(128, 256, 128), 0, 900),
    "c128 spec": (Geometry(128, 256, 256), 130, 1200),
    "c128 spec, few drafts": (Geometry(128, 256, 256), 4, 600),
}


@pytest.mark.parametrize("name", RINGS)
def test_windows_are_made_of_the_last_tokens(name: str) -> None:
    """Whatever a server does, every closed window consists of the request's last tokens."""
    geometry, most_drafts, most_tokens = RINGS[name]
    read = []

    @few(20)
    @given(sessions(most_drafts, most_tokens))
    def check(steps: list[tuple]) -> None:
        model = ring_model(geometry, most_tokens)
        run(model, steps)
        read.append(model.ring_rows_read)

    check()
    assert sum(read) > 500  # the rings were used


@pytest.mark.parametrize("ratio", [4, 128])
def test_windows_of_the_legacy_layout(ratio: int) -> None:
    read = []

    @few(20)
    @given(sessions(0, 700))
    def check(steps: list[tuple]) -> None:
        model = ring_model(Geometry(ratio, 256, 8 if ratio == 4 else 128), 700, legacy=True)
        run(model, steps)
        read.append(model.ring_rows_read)

    check()
    assert sum(read) > 500


@pytest.mark.parametrize("kept", range(1, 11))
@pytest.mark.parametrize("geometry", [C4_SPEC, Geometry(4, 256, 16, use_req_ring=True)], ids=["paged", "req ring"])
def test_every_accept_length_at_every_offset(geometry: Geometry, kept: int) -> None:
    """The largest verify batch that a ring of 16 serves, from every position of a page."""
    model = RingModel(reference, geometry, num_requests=2, max_tokens=300, seed=kept)
    for start in range(13):
        model.extend({0: start + 1, 1: 7})
        model.extend({0: 10, 1: 10}, {0: kept, 1: 11 - kept})
        model.extend({0: 10, 1: 10}, {0: kept, 1: 1})
    assert model.ring_rows_read > 100


@pytest.mark.parametrize(
    ("geometry", "most_drafts", "most_tokens"),
    [(Geometry(4, 32, 8), 0, 200), (Geometry(4, 32, 16), 10, 200), (Geometry(128, 256, 256), 8, 800)],
    ids=["c4", "c4 spec", "c128 spec"],
)
def test_shared_prefix_of_whole_pages(geometry: Geometry, most_drafts: int, most_tokens: int) -> None:
    """A prefix cache hands out whole pages; the page-tail clause is what makes their last rows be there."""
    hits = []

    @few(20)
    @given(
        before=sessions(most_drafts, most_tokens, num_requests=2),
        after=sessions(most_drafts, most_tokens),
        first=st.integers(geometry.swa_page_size, most_tokens // 2),
    )
    def check(before: list[tuple], after: list[tuple], first: int) -> None:
        model = ring_model(geometry, most_tokens)
        model.extend({0: first})
        run(model, before)
        pages = len(model.history[0]) // geometry.swa_page_size
        model.share_prefix(0, 2, pages)
        seen = model.windows_checked
        run(model, after)
        if model.room(2) >= geometry.compress_ratio:
            model.extend({2: geometry.compress_ratio})
        hits.append(model.windows_checked - seen)

    check()
    assert sum(hits) > 20


# Reported on SGLang as lost rows after a verify batch: no pad at all, and a pad of 4 for every ring.
@pytest.mark.parametrize(
    ("geometry", "drafts", "keep", "prompt"),
    [
        (Geometry(4, 256, 16, write_pad=0), 5, 1, 7),
        (Geometry(4, 256, 16, write_pad=4), 8, 1, 9),
        (Geometry(128, 256, 256, write_pad=0), 4, 1, 126),
        (Geometry(128, 256, 256, write_pad=4), 8, 1, 121),
    ],
)
def test_the_model_notices_a_small_pad(geometry: Geometry, drafts: int, keep: int, prompt: int) -> None:
    def serve(geometry: Geometry) -> None:
        model = ring_model(geometry, 600)
        model.extend({0: prompt})
        for _ in range(12):
            model.extend({0: drafts}, {0: keep})

    with pytest.raises(RingError, match="other rows than it should"):
        serve(geometry)
    serve(Geometry(geometry.compress_ratio, 256, geometry.ring_size))


def test_the_model_notices_a_verify_batch_that_is_too_large() -> None:
    """One more draft than the ring has room for overwrites a row that is still needed."""

    def serve(drafts: int) -> None:
        model = ring_model(Geometry(4, 256, 16, use_req_ring=True), 200)
        for _ in range(8):
            model.extend({0: drafts}, {0: 1})

    serve(10)
    with pytest.raises(RingError):
        serve(11)


def test_the_model_notices_requests_that_share_a_page() -> None:
    """Two requests on the same slots write over each other's state; a ring per request is the cure."""

    def serve(geometry: Geometry) -> None:
        model = ring_model(geometry, 64)
        model.req_to_token[model.rid[1]] = model.req_to_token[model.rid[0]]
        model.extend({0: 6})
        model.extend({1: 6})
        model.decode([0])
        model.decode([0])

    with pytest.raises(RingError, match="other rows than it should"):
        serve(C4)
    serve(C4_REQ)


@few(30)
@given(sessions(128, 1000))
def test_online_states_follow_the_tokens(steps: list[tuple]) -> None:
    """The online state is always the request's tokens since the last multiple of 128."""
    model = OnlineModel(reference, num_requests=3, seed=3)
    for step in steps:
        if step[0] == "prefill":
            model.extend(step[1])
        elif step[0] == "decode":
            for _ in range(step[2]):
                model.decode(step[1])
        else:
            model.verify(step[1], step[2], padding=2)


def test_online_closes_windows() -> None:
    model = OnlineModel(reference, num_requests=2, seed=1)
    model.extend({0: 300, 1: 100})
    model.verify([1, 0], 60)
    model.decode([0])
    model.extend({1: 96})
    assert model.windows_checked == 2 + 1 + 1 + 0
    assert [len(h) for h in model.history] == [361, 256]


# ------------------------------------------------------------------------------------------------ arguments


def test_out_is_filled_to_its_end_and_returned() -> None:
    case = build_case(Lengths.of([3, 100], [9, 40]), C4)
    exact = case.prefill(reference.plan_compress_prefill)
    out = plans.PrefillPlan(torch.full((70, 16), 0xAB, dtype=torch.uint8), torch.full((60, 8), 0xAB, dtype=torch.uint8))
    plan = case.prefill(reference.plan_compress_prefill, out=out)
    assert plan.compress is out.compress
    assert plan.write is out.write
    for rows, filled in zip(exact, out, strict=True):
        assert torch.equal(filled[: len(rows)], rows)
    assert not plans.valid_compress(out.compress)[len(exact.compress) :].any()
    assert not plans.valid_write(out.write)[len(exact.write) :].any()

    decode = torch.full((2, 16), 0xAB, dtype=torch.uint8)
    assert case.decode(reference.plan_compress_decode, out=decode) is decode
    assert torch.equal(decode, case.decode(reference.plan_compress_decode))

    steps = {r: plans.PrefillPlan(out.compress.clone(), out.write.clone()) for r in (4, 128)}
    got = case.step_prefill(reference.plan_step_prefill, out=steps)
    assert all(got[r].compress is steps[r].compress and got[r].write is steps[r].write for r in (4, 128))
    decodes = {r: torch.empty(2, 16, dtype=torch.uint8) for r in (4, 128)}
    got = case.step_decode(reference.plan_step_decode, out=decodes)
    assert all(got[r] is decodes[r] for r in (4, 128))

    empty = build_case(Lengths((3,), (2,), 0), C4)
    plan = empty.prefill(reference.plan_compress_prefill, out=out)
    assert plan.write is out.write
    assert not plans.valid_write(out.write).any()
    assert not plans.valid_compress(out.compress).any()


def uint8(*shape: int) -> torch.Tensor:
    return torch.full(shape, 0xAB, dtype=torch.uint8)


def bad_pair(compress: torch.Tensor | None = None, write: torch.Tensor | None = None) -> plans.PrefillPlan:
    return plans.PrefillPlan(uint8(9, 16) if compress is None else compress, uint8(9, 8) if write is None else write)


PREFILL_ERRORS = [
    ({"compress_ratio": 8}, ValueError, "compress_ratio: expected 4 or 128, got 8"),
    ({"ring_size": 6}, ValueError, "ring_size: expected a multiple of the ratio 4, got 6"),
    ({"ring_size": 0}, ValueError, "ring_size: expected 1 .. "),
    ({"swa_page_size": 12}, ValueError, "swa_page_size: expected a multiple of ring_size 8, got 12"),
    ({"swa_page_size": 256.0}, TypeError, "swa_page_size: expected an int, got float"),
    (
        {"use_req_ring": True, "compress_ratio": 128, "ring_size": 128},
        ValueError,
        "use_req_ring: expected False",
    ),
    ({"write_pad": -1}, ValueError, "write_pad: expected 0 .. "),
    ({"write_pad": [1, 2]}, TypeError, "write_pad: expected an int, got list"),
    ({"num_q_tokens": -1}, ValueError, "num_q_tokens: expected 0 .. 65536, got -1"),
    ({"num_q_tokens": 65537}, ValueError, "num_q_tokens: expected 0 .. 65536, got 65537"),
    ({"num_q_tokens": 8}, ValueError, "num_q_tokens: expected the sum of extend_lens, 9, got 8"),
    (
        {"out": bad_pair(compress=uint8(1, 16))},
        ValueError,
        r"out.compress: expected at least 2 rows, got .*\[1, 16\]",
    ),
    (
        {"out": bad_pair(write=uint8(9, 16))},
        ValueError,
        r"out.write: expected shape \[\*, 8\], got \[9, 16\]",
    ),
    ({"out": bad_pair(write=torch.zeros(9, 8))}, TypeError, "out.write: expected dtype torch.uint8"),
    ({"out": bad_pair(write=uint8(9, 16)[:, ::2])}, ValueError, "out.write: expected a contiguous tensor"),
    ({"out": uint8(9, 16)}, TypeError, "out: expected a PrefillPlan"),
]


@pytest.mark.parametrize(("options", "error", "message"), PREFILL_ERRORS, ids=[e[2][:40] for e in PREFILL_ERRORS])
def test_prefill_argument_errors(options: dict[str, Any], error: type, message: str) -> None:
    case = build_case(Lengths.of([0, 3], [5, 4]), C4)
    out = options.get("out")
    with pytest.raises(error, match=message):
        case.prefill(reference.plan_compress_prefill, **options)
    if isinstance(out, plans.PrefillPlan) and out.compress.dtype == torch.uint8:
        assert (out.compress == 0xAB).all()  # nothing was written before the check


TENSOR_ERRORS = [
    ("req_pool_indices", lambda t: t.int(), TypeError, "expected dtype torch.int64, got torch.int32"),
    ("req_pool_indices", lambda t: t[None], ValueError, r"expected shape \[\*\], got \[1, 2\]"),
    ("req_pool_indices", lambda t: t.tolist(), TypeError, "expected a tensor, got list"),
    ("req_to_token", lambda t: t.long(), TypeError, "expected dtype torch.int32, got torch.int64"),
    ("req_to_token", lambda t: t[0], ValueError, r"expected shape \[\*, \*\]"),
    ("req_to_token", lambda t: t.to("meta"), ValueError, "expected device cpu, got meta"),
    ("full_to_state", lambda t: t.int(), TypeError, "expected dtype torch.int64, got torch.int32"),
    ("seq_lens", lambda t: t.int(), TypeError, "expected dtype torch.int64, got torch.int32"),
    ("seq_lens", lambda t: t[:1], ValueError, r"expected shape \[2\], got \[1\]"),
    ("seq_lens", lambda t: t.to("meta"), ValueError, "expected device cpu or cpu, got meta"),
    ("extend_lens", lambda t: t.int(), TypeError, "expected dtype torch.int64, got torch.int32"),
    ("extend_lens", lambda t: t[:1], ValueError, r"expected shape \[2\], got \[1\]"),
]


@pytest.mark.parametrize(("name", "change", "error", "message"), TENSOR_ERRORS)
def test_prefill_tensor_errors(name: str, change, error: type, message: str) -> None:
    case = build_case(Lengths.of([0, 3], [5, 4]), C4)
    tensors = {
        n: getattr(case, n) for n in ("req_pool_indices", "req_to_token", "full_to_state", "seq_lens", "extend_lens")
    }
    tensors[name] = change(tensors[name])
    with pytest.raises(error, match=f"{name}: {message}"):
        reference.plan_compress_prefill(**tensors, num_q_tokens=9, **C4.prefill_options())


@pytest.mark.parametrize(
    ("seq", "extend", "numbers"),
    [
        ((5, 4), (5, 0), "extend=0, seq=4 for request 1"),
        ((5, 4), (5, -2), "extend=-2, seq=4 for request 1"),
        ((5, 4, 7), (5, 6, 7), "extend=6, seq=4 for request 1"),
        ((2**31, 4), (5, 4), "extend=5, seq=2147483648 for request 0"),
    ],
)
def test_checked_lengths(seq: tuple, extend: tuple, numbers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same error where lengths are checked anyway, with check=True, and with HOTPLAN_CHECK."""
    case = build_case(Lengths(seq, extend, 9), C4, max_width=64)
    calls = [
        (case.prefill, reference.plan_compress_prefill),
        (case.prefill_legacy, reference.plan_compress_prefill_legacy),
        (case.online_prefill, reference.plan_online_prefill),
        (case.step_prefill, reference.plan_step_prefill),
    ]
    monkeypatch.delenv("HOTPLAN_CHECK", raising=False)
    for call, plan in calls:
        with pytest.raises(ValueError, match=numbers):
            call(plan)
        with pytest.raises(ValueError, match=numbers):
            call(plan, check=False)  # lengths on the CPU are checked in any case
        call(plan, unchecked=True)
        with pytest.raises(ValueError, match=numbers):
            call(plan, unchecked=True, check=True)
    monkeypatch.setenv("HOTPLAN_CHECK", "1")
    for call, plan in calls:
        with pytest.raises(ValueError, match=numbers):
            call(plan, unchecked=True)
        call(plan, unchecked=True, check=False)
    monkeypatch.setenv("HOTPLAN_CHECK", "0")
    for call, plan in calls:
        call(plan, unchecked=True)


def test_checked_decode_lengths() -> None:
    for seq, numbers in (
        (0, "seq=0 for request 1"),
        (-3, "seq=-3 for"),
        (2**31, "seq=2147483648 for request 1"),
    ):
        case = build_case(Lengths((5, seq), (1, 1), 2), C4, max_width=64)
        for call, plan in (
            (case.decode, reference.plan_compress_decode),
            (case.decode_legacy, reference.plan_compress_decode_legacy),
            (case.online_decode, reference.plan_online_decode),
            (case.step_decode, reference.plan_step_decode),
        ):
            with pytest.raises(ValueError, match=numbers):
                call(plan)
            assert call(plan, unchecked=True) is not None
            with pytest.raises(ValueError, match=numbers):
                call(plan, unchecked=True, check=True)


def test_step_argument_errors() -> None:
    case = build_case(Lengths.of([0, 3], [5, 4]), C4)
    plan = case.prefill(reference.plan_compress_prefill, use_cuda_graph=True)
    for options, error, message in (
        ({"ratios": ()}, ValueError, "ratios: expected different ratios, at least one"),
        ({"ratios": (4, 4)}, ValueError, "ratios: expected different ratios"),
        ({"ratios": (4, 16)}, ValueError, "ratios: expected 4 or 128, got 16"),
        ({"ring_sizes": (8,)}, ValueError, "ring_sizes: expected one per ratio"),
        ({"write_pad": [1]}, ValueError, "write_pad: expected one per ratio"),
        ({"out": {4: plan}}, ValueError, r"out\[128\]: expected a plan for every ratio"),
        ({"out": plan}, TypeError, "out: expected a mapping from ratio to plan, got PrefillPlan"),
        (
            {"out": {4: plan, 128: plans.PrefillPlan(uint8(0, 16), uint8(0, 8))}, "write_pad": 9},
            ValueError,
            r"out\[128\].write: expected at least 9 rows",
        ),
    ):
        with pytest.raises(error, match=message):
            case.step_prefill(reference.plan_step_prefill, **options)
    with pytest.raises(ValueError, match=r"out\[4\]: expected shape \[2, 16\], got \[3, 16\]"):
        case.step_decode(reference.plan_step_decode, out={4: uint8(3, 16), 128: uint8(2, 16)})


def test_batch_limit() -> None:
    requests = torch.zeros(65536, dtype=torch.int64)
    with pytest.raises(ValueError, match="req_pool_indices: expected at most 65535 requests, got 65536"):
        reference.plan_compress_prefill_legacy(
            requests, requests + 1, requests + 1, num_q_tokens=65536, compress_ratio=4
        )
    assert len(reference.plan_compress_decode_legacy(requests, requests + 1, compress_ratio=4)) == 65536


def test_verify_argument_errors() -> None:
    requests, prefix = int64([1, 2]), torch.tensor([5, 6], dtype=torch.int32)
    good: dict[str, Any] = {"num_draft_tokens": 4, "state_slot_offset": 9, "active_batch_size": 2}
    for options, error, message in (
        ({"num_draft_tokens": 0}, ValueError, "num_draft_tokens: expected 1 .. 128, got 0"),
        ({"num_draft_tokens": 129}, ValueError, "num_draft_tokens: expected 1 .. 128, got 129"),
        ({"state_slot_offset": -1}, ValueError, "state_slot_offset: expected 0 .. "),
        ({"active_batch_size": 3}, ValueError, "active_batch_size: expected 0 .. 2, got 3"),
        ({"active_batch_size": torch.tensor([2.0])}, TypeError, "active_batch_size: expected dtype"),
        ({"active_batch_size": torch.tensor([2, 2])}, ValueError, r"active_batch_size: expected shape \[1\]"),
        ({"out": bad_pair(uint8(2, 16), uint8(2, 8))}, ValueError, r"out.write: expected shape \[2, 16\]"),
        (
            {"out": bad_pair(uint8(3, 16), uint8(2, 16))},
            ValueError,
            r"out.compress: expected shape \[2, 16\]",
        ),
    ):
        with pytest.raises(error, match=message):
            reference.plan_online_verify(requests, prefix, **{**good, **options})
    with pytest.raises(TypeError, match=r"prefix_lens: expected dtype torch.int32, got torch.int64"):
        reference.plan_online_verify(requests, prefix.long(), **good)
    many = torch.zeros(1025, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"expected batch \* num_draft_tokens <= 65536, got 1025 \* 64"):
        reference.plan_online_verify(many, many.int(), **{**good, "num_draft_tokens": 64})
    out = plans.PrefillPlan(uint8(2, 16), uint8(2, 16))
    plan = reference.plan_online_verify(requests, prefix, **good, out=out)
    assert plan.compress is out.compress
    assert plan.write is out.write
    assert words(out.write) == [[9, 4 << 16 | 3, 10, 1], [10, 4 << 16 | 7, 11, 2]]
