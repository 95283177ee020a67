"""The public functions on the CPU backend: every route gives the reference's bytes, every error names its argument."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from sanitized import ROOT, load_sanitized
from strategies import (
    FUNCTIONS,
    SERVER_GEOMETRIES,
    Case,
    Geometry,
    Lengths,
    affine_tables,
    build_case,
    cases,
    far,
    hostile,
    hostile_cases,
    huge,
    load_golden,
    near_multiples,
    ragged,
    seed_of,
    uniform,
    words,
)
from strategies import empty as empty_lengths
from threads import run_in_threads

import hotplan
from hotplan import PrefillPlan, jit, reference

OPERATORS = ["prefill", "decode", "prefill_legacy", "decode_legacy", "online_prefill", "online_decode"]


def ours(case: Case, operator: str, **options):
    return getattr(case, operator)(getattr(hotplan, FUNCTIONS[operator]), **options)


def theirs(case: Case, operator: str, **options):
    return getattr(case, operator)(getattr(reference, FUNCTIONS[operator]), **options)


def assert_same(got, expected) -> None:
    """Plans of any operator, byte for byte, type for type."""
    assert type(got) is type(expected)
    if isinstance(got, dict):
        assert list(got) == list(expected)
        for ratio in got:
            assert_same(got[ratio], expected[ratio])
    elif isinstance(got, PrefillPlan):
        assert_same(got.compress, expected.compress)
        assert_same(got.write, expected.write)
    else:
        assert got.dtype == torch.uint8
        assert got.device == expected.device
        assert got.shape == expected.shape
        assert torch.equal(got, expected), (words(got)[:8], words(expected)[:8])


def poisoned(plan, more: int = 0):
    """Outputs of the same shapes, or `more` rows longer, full of bytes that no plan has."""
    if isinstance(plan, dict):
        return {ratio: poisoned(p, more) for ratio, p in plan.items()}
    if isinstance(plan, PrefillPlan):
        return PrefillPlan(poisoned(plan.compress, more), poisoned(plan.write, more))
    return torch.full((plan.shape[0] + more, plan.shape[1]), 0xA5, dtype=torch.uint8, device=plan.device)


def assert_all_routes(case: Case, operator: str) -> None:
    expected = theirs(case, operator)
    assert_same(ours(case, operator), expected)
    out = poisoned(expected)
    returned = ours(case, operator, out=out)
    assert_same(returned, expected)
    assert_same(out, expected)
    if "prefill" not in operator:
        return
    padded = theirs(case, operator, use_cuda_graph=True)
    assert_same(ours(case, operator, use_cuda_graph=True), padded)
    out = poisoned(padded, more=3)
    assert_same(ours(case, operator, use_cuda_graph=True, out=out), theirs(case, operator, out=poisoned(out)))


@pytest.mark.parametrize("operator", OPERATORS)
@given(case=cases())
@settings(max_examples=60, deadline=None)
def test_routes_agree(operator: str, case: Case) -> None:
    assert_all_routes(case, operator)


@given(case=cases())
@settings(max_examples=60, deadline=None)
def test_step_is_the_separate_plans(case: Case) -> None:
    g = case.geometry
    options = {"ratios": (4, 128), "ring_sizes": (16, 128), "swa_page_size": 256}
    for use_req_ring in (False, True):
        assert_same(
            ours(case, "step_prefill", use_req_ring=use_req_ring, **options),
            theirs(case, "step_prefill", use_req_ring=use_req_ring, **options),
        )
        assert_same(
            ours(case, "step_decode", use_req_ring=use_req_ring, **options),
            theirs(case, "step_decode", use_req_ring=use_req_ring, **options),
        )
    single = {"ratios": (g.compress_ratio,), "ring_sizes": (g.ring_size,)}
    got = ours(case, "step_prefill", write_pad=g.write_pad, use_req_ring=g.use_req_ring, **single)
    assert_same(got, {g.compress_ratio: ours(case, "prefill")})
    expected = theirs(case, "step_prefill", write_pad=(3, None), **options)
    out = poisoned(expected)
    assert_same(ours(case, "step_prefill", write_pad=(3, None), out=out, **options), expected)
    expected = theirs(case, "step_decode", **options)
    assert_same(ours(case, "step_decode", out=poisoned(expected), **options), expected)


@pytest.mark.parametrize("geometry", SERVER_GEOMETRIES, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_server_geometries(geometry: Geometry, seed: int) -> None:
    for lengths in (ragged(seed, 40, 300), near_multiples(seed, 40), uniform(33, 4 + seed, prefix=125 + seed)):
        case = build_case(lengths, geometry, seed=seed)
        for operator in OPERATORS:
            assert_all_routes(case, operator)


@pytest.mark.parametrize("lengths", [*huge(), *far()], ids=lambda x: f"{x.batch}x{max(x.extend)}")
@pytest.mark.parametrize("geometry", [SERVER_GEOMETRIES[1], SERVER_GEOMETRIES[4]], ids=["c4", "c128"])
def test_large_batches(lengths: Lengths, geometry: Geometry) -> None:
    case = build_case(lengths, geometry, seed=7, max_width=600)
    for operator in ("prefill", "online_prefill", "decode"):
        assert_same(ours(case, operator), theirs(case, operator))


@pytest.mark.parametrize("lengths", empty_lengths(), ids=lambda x: f"B{x.batch}")
@pytest.mark.parametrize("operator", ["prefill", "prefill_legacy", "online_prefill", "step_prefill"])
def test_no_tokens_give_empty_plans(lengths: Lengths, operator: str) -> None:
    case = build_case(lengths, Geometry(4, 256, 8), max_width=8)
    got = ours(case, operator)
    for plan in got.values() if isinstance(got, dict) else [got]:
        assert plan.compress.shape == (0, 16)
        assert plan.write.shape == (0, 16 if operator == "online_prefill" else 8)


# ------------------------------------------------------------------------------------------- recorded outputs


@pytest.mark.parametrize("number", range(60))
def test_golden_plans(number: int) -> None:
    c = load_golden("plans_a")[number]
    t = c["tables"]
    r2t, f2s = affine_tables(t["nreq"], t["width"], t["A"], t["B"], t["C"], t["F"])
    rid, seq, ext = (torch.tensor(c[k], dtype=torch.int64) for k in ("rid", "seq", "ext"))
    options = {k: c[name] for k, name in (("compress_ratio", "ratio"), ("swa_page_size", "swa"), ("ring_size", "ring"))}
    options["use_req_ring"] = c["use_req_ring"]
    plan = hotplan.plan_compress_prefill(rid, r2t, f2s, seq, ext, num_q_tokens=c["num_q"], **options)
    assert words(plan.compress) == c["compress"]
    assert words(plan.write) == c["write"]
    assert words(hotplan.plan_compress_decode(rid, r2t, f2s, seq, **options)) == c["decode"]
    legacy = hotplan.plan_compress_prefill_legacy(rid, seq, ext, num_q_tokens=c["num_q"], compress_ratio=c["ratio"])
    assert words(legacy.compress) == c["legacy_compress"]
    assert words(legacy.write) == c["legacy_write"]
    decode = hotplan.plan_compress_decode_legacy(rid, seq, compress_ratio=c["ratio"])
    assert words(decode) == c["legacy_decode"]


@pytest.mark.parametrize("number", range(40))
def test_golden_online_plans(number: int) -> None:
    c = load_golden("online_a")[number]
    rid, seq, ext = (torch.tensor(c[k], dtype=torch.int64) for k in ("rid", "seq", "ext"))
    plan = hotplan.plan_online_prefill(rid, seq, ext, num_q_tokens=c["num_q"], state_slot_offset=c["offset"])
    assert words(plan.compress) == c["compress"]
    assert words(plan.write) == c["write"]
    assert words(hotplan.plan_online_decode(rid, seq, state_slot_offset=c["offset"])) == c["decode"]


@pytest.mark.parametrize("active", [3, torch.tensor([3]), torch.tensor([3], dtype=torch.int32)], ids=repr)
def test_online_verify_example(active) -> None:
    plan = hotplan.plan_online_verify(
        torch.tensor([3, 5, 7, 9]),
        torch.tensor([112, 120, 124, 128], dtype=torch.int32),
        num_draft_tokens=8,
        state_slot_offset=128,
        active_batch_size=active,
    )
    invalid = [-1, 0, -1, -1]
    assert words(plan.compress) == [invalid, [128, 8 << 16 | 15, 133, 5], [128, 4 << 16 | 19, 135, 7], invalid]
    assert words(plan.write) == [[120, 8 << 16 | 7, 131, 3], invalid, [132, 4 << 16 | 23, 135, 7], invalid]


@pytest.mark.parametrize("drafts", [1, 2, 7, 127, 128])
def test_online_verify_is_the_reference(drafts: int) -> None:
    generator = torch.Generator().manual_seed(seed_of(f"verify {drafts}"))
    prefix = torch.randint(-3, 700, (500,), generator=generator, dtype=torch.int32)
    prefix[:2] = torch.tensor([2**31 - 1, -(2**31)])
    rid = torch.randint(-2, 600, (500,), generator=generator)
    for active in (0, 1, 499, 500):
        arguments = {"num_draft_tokens": drafts, "state_slot_offset": 40, "active_batch_size": active}
        expected = reference.plan_online_verify(rid, prefix, **arguments)
        assert_same(hotplan.plan_online_verify(rid, prefix, **arguments), expected)
        assert_same(hotplan.plan_online_verify(rid, prefix, out=poisoned(expected), **arguments), expected)


# ---------------------------------------------------------------------------------- lengths that nobody checked


@pytest.fixture(scope="session")
def unchecked(tmp_path_factory: pytest.TempPathFactory):
    """The row functions as a GPU kernel uses them, on lengths without a promise, compiled for the CPU."""
    unit = Path(__file__).with_name("unchecked.cpp")
    return load_sanitized(tmp_path_factory.mktemp("unchecked"), unit, ROOT / "csrc/compress/cpu.cpp")


def assert_unchecked(case: Case, module) -> None:
    g, n = case.geometry, case.lengths.num_q_tokens
    if n == 0:
        return
    batch = (*case.tables, case.seq_lens, case.extend_lens, n)
    pad = (g.swa_page_size, g.ring_size, g.use_req_ring, g.write_pad)
    paged = PrefillPlan(*module.unchecked_prefill(0, *batch, g.compress_ratio, *pad))
    assert_same(paged, theirs(case, "prefill", unchecked=True))
    legacy = PrefillPlan(*module.unchecked_prefill(1, *batch, g.compress_ratio))
    assert_same(legacy, theirs(case, "prefill_legacy", unchecked=True))
    online = PrefillPlan(*module.unchecked_prefill(2, *batch, case.state_slot_offset))
    assert_same(online, theirs(case, "online_prefill", unchecked=True))
    decode = module.unchecked_decode(*case.tables, case.seq_lens, g.compress_ratio, *pad[:3])
    assert_same(decode, theirs(case, "decode", unchecked=True))


@given(case=hostile_cases())
@settings(max_examples=200, deadline=None)
def test_hostile_values(case: Case, unchecked) -> None:
    assert_unchecked(case, unchecked)


@pytest.mark.parametrize("lengths", hostile(), ids=lambda x: f"B{x.batch}q{x.num_q_tokens}")
@pytest.mark.parametrize("geometry", SERVER_GEOMETRIES, ids=str)
def test_hostile_examples(lengths: Lengths, geometry: Geometry, unchecked) -> None:
    assert_unchecked(build_case(lengths, geometry, tables="hostile", seed=3), unchecked)


# ------------------------------------------------------------------------------------------------------ errors


def example() -> dict:
    """Arguments of a correct plan_compress_prefill call."""
    case = build_case(Lengths.of([3, 0], [5, 8]), Geometry(4, 256, 8), row_padding=0)
    return {
        "req_pool_indices": case.req_pool_indices,
        "req_to_token": case.req_to_token,
        "full_to_state": case.full_to_state,
        "seq_lens": case.seq_lens,
        "extend_lens": case.extend_lens,
        "num_q_tokens": 13,
        "compress_ratio": 4,
        "swa_page_size": 256,
        "ring_size": 8,
    }


TENSORS = ("req_pool_indices", "req_to_token", "full_to_state", "seq_lens", "extend_lens")
VALUE_ERRORS = [
    ("num_q_tokens", 12, "num_q_tokens: expected the sum of extend_lens, 13, got 12"),
    ("num_q_tokens", -1, r"num_q_tokens: expected a number in \[0, 65536\], got -1"),
    ("num_q_tokens", 65537, r"num_q_tokens: expected a number in \[0, 65536\], got 65537"),
    ("compress_ratio", 8, "compress_ratio: expected 4 or 128, got 8"),
    ("ring_size", 6, "ring_size: expected a positive multiple of compress_ratio=4, got 6"),
    ("ring_size", 0, "ring_size: expected a positive multiple of compress_ratio=4, got 0"),
    ("ring_size", -8, "ring_size: expected a positive multiple of compress_ratio=4, got -8"),
    ("ring_size", 2**40, "ring_size: expected a positive multiple"),
    ("swa_page_size", 100, "swa_page_size: expected a positive multiple of ring_size=8, got 100"),
    ("swa_page_size", 0, "swa_page_size: expected a positive multiple of ring_size=8, got 0"),
    ("write_pad", -1, r"write_pad: expected None or a number in \[0, 2147483647\], got -1"),
    ("write_pad", 2**31, "write_pad: expected None or a number"),
    ("seq_lens", torch.tensor([8]), r"seq_lens: expected shape \[batch=2\], got \[1\]"),
    ("extend_lens", torch.tensor([[5, 8]]), r"extend_lens: expected shape \[batch=2\], got \[1, 2\]"),
    ("req_to_token", torch.zeros(8, dtype=torch.int32), r"req_to_token: expected shape \[\*, \*\], got \[8\]"),
    ("req_to_token", torch.zeros((8, 6), dtype=torch.int32).T, "req_to_token: expected strides"),
    ("full_to_state", torch.zeros(8, dtype=torch.int64)[::2], "full_to_state: expected a contiguous tensor"),
    ("seq_lens", torch.zeros(4, dtype=torch.int64)[::2], r"seq_lens: expected a contiguous tensor, got strides \[2\]"),
    ("req_pool_indices", torch.zeros(2, dtype=torch.int64, device="meta"), "req_pool_indices: expected device cpu"),
    ("seq_lens", torch.tensor([4, 8]), "got extend=5, seq=4 for request 0"),
    ("seq_lens", torch.tensor([8, 2**31]), "got extend=8, seq=2147483648 for request 1"),
    ("extend_lens", torch.tensor([13, 0]), "got extend=13, seq=8 for request 0"),
    ("extend_lens", torch.tensor([5, 0]), "got extend=0, seq=8 for request 1"),
    ("extend_lens", torch.tensor([5, -8]), "got extend=-8, seq=8 for request 1"),
    ("out", (torch.zeros((2, 16), dtype=torch.uint8), torch.zeros((13, 8), dtype=torch.uint8)), "out.compress: expected at least 4 rows, got 2"),
    ("out", (torch.zeros((4, 16), dtype=torch.uint8), torch.zeros((3, 8), dtype=torch.uint8)), "out.write: expected at least"),
    ("out", (torch.zeros((3, 8), dtype=torch.uint8), torch.zeros((13, 8), dtype=torch.uint8)), r"out.compress: expected shape \[\*, 16\], got \[3, 8\]"),
    ("out", (torch.zeros(65, dtype=torch.uint8)[1:].view(4, 16), torch.zeros((13, 8), dtype=torch.uint8)), "out.compress: expected data aligned to 16 bytes"),
]  # fmt: skip
TYPE_ERRORS = [
    *[(name, torch.int16, rf"{name}: expected dtype int(32|64), got int16") for name in TENSORS],
    ("num_q_tokens", "13", "num_q_tokens: expected an int, got another type"),
    ("num_q_tokens", 13.0, "num_q_tokens: expected an int, got float"),
    ("write_pad", 1.5, "write_pad: expected an int or None, got float"),
    ("use_cuda_graph", None, "use_cuda_graph: expected a bool, got None"),
    ("req_to_token", None, "req_to_token: expected a tensor, got None"),
    ("seq_lens", [8, 8], "seq_lens: expected a tensor, got another type"),
    (
        "out",
        (torch.zeros((3, 16), dtype=torch.int8), torch.zeros((13, 8), dtype=torch.uint8)),
        "out.compress: expected dtype uint8, got int8",
    ),
    ("out", (3, torch.zeros((13, 8), dtype=torch.uint8)), "out.compress: expected a tensor or None, got int"),
    ("out", (torch.zeros((4, 16), dtype=torch.uint8), None), r"out: expected \(compress, write\), got None for write"),
]


@pytest.mark.parametrize(("name", "value", "message"), VALUE_ERRORS, ids=lambda x: str(x)[:30])
def test_value_errors(name: str, value, message: str) -> None:
    out = PrefillPlan(torch.full((13, 16), 7, dtype=torch.uint8), torch.full((13, 8), 7, dtype=torch.uint8))
    arguments = {**example(), "out": out, name: value}
    with pytest.raises(ValueError, match=message):
        hotplan.plan_compress_prefill(**arguments)
    assert (out.compress == 7).all(), "written before the check"
    assert (out.write == 7).all(), "written before the check"


@pytest.mark.parametrize(("name", "value", "message"), TYPE_ERRORS, ids=lambda x: str(x)[:30])
def test_type_errors(name: str, value, message: str) -> None:
    arguments = example()
    arguments[name] = arguments[name].to(value) if isinstance(value, torch.dtype) else value
    with pytest.raises(TypeError, match=message):
        hotplan.plan_compress_prefill(**arguments)


def test_use_req_ring_is_for_ratio_4() -> None:
    with pytest.raises(ValueError, match="use_req_ring: expected False for compress_ratio=128, got True"):
        hotplan.plan_compress_prefill(**{**example(), "compress_ratio": 128, "ring_size": 128, "use_req_ring": True})


def test_too_many_requests() -> None:
    ones = torch.ones(65536, dtype=torch.int64)
    with pytest.raises(ValueError, match="req_pool_indices: expected at most 65535 requests, got 65536"):
        hotplan.plan_compress_prefill_legacy(ones, ones, ones, num_q_tokens=65536, compress_ratio=4)


def test_decode_errors() -> None:
    a = example()
    arguments = [a["req_pool_indices"], a["req_to_token"], a["full_to_state"]]
    options = {"compress_ratio": 4, "swa_page_size": 256, "ring_size": 8}
    with pytest.raises(
        ValueError, match="seq_lens: expected 0 < seq < 2\\^31 for every request, got seq=0 for request 1"
    ):
        hotplan.plan_compress_decode(*arguments, torch.tensor([1, 0]), **options)
    with pytest.raises(ValueError, match="out: expected 2 rows, got 3"):
        hotplan.plan_compress_decode(*arguments, a["seq_lens"], **options, out=torch.zeros((3, 16), dtype=torch.uint8))


def test_online_errors() -> None:
    one, prefix = torch.ones(1, dtype=torch.int64), torch.ones(1, dtype=torch.int32)
    arguments = {"num_draft_tokens": 4, "state_slot_offset": 0, "active_batch_size": 1}
    for name, value, message in (
        ("num_draft_tokens", 0, r"num_draft_tokens: expected a number in \[1, 128\], got 0"),
        ("num_draft_tokens", 129, r"num_draft_tokens: expected a number in \[1, 128\], got 129"),
        ("state_slot_offset", -1, "state_slot_offset: expected a number in .*, got -1"),
        ("active_batch_size", 2, r"active_batch_size: expected a number in \[0, batch=1\], got 2"),
        ("active_batch_size", torch.tensor([1, 1]), r"active_batch_size: expected shape \[1\], got \[2\]"),
    ):
        with pytest.raises(ValueError, match=message):
            hotplan.plan_online_verify(one, prefix, **{**arguments, name: value})
    with pytest.raises(TypeError, match="active_batch_size: expected dtype int32 or int64, got float32"):
        hotplan.plan_online_verify(one, prefix, **{**arguments, "active_batch_size": torch.ones(1)})
    with pytest.raises(TypeError, match="prefix_lens: expected dtype int32, got int64"):
        hotplan.plan_online_verify(one, one, **arguments)
    many = torch.ones(513, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"batch \* num_draft_tokens <= 65536, got 513 \* 128"):
        hotplan.plan_online_verify(many, many.int(), **{**arguments, "num_draft_tokens": 128})


def test_step_errors() -> None:
    a = example()
    arguments = [a[name] for name in TENSORS]
    options = {"num_q_tokens": 13, "swa_page_size": 256}
    for name, value, message in (
        ("ratios", (4, 4), "ratios: expected one or two different ratios"),
        ("ratios", (), "ratios: expected one or two different ratios"),
        ("ring_sizes", (8,), "ring_sizes: expected one per ratio, 2"),
        ("write_pad", (1,), "write_pad: expected one per ratio, 2"),
        ("ratios", 4, "ratios: expected a tuple or a list of ints, got int"),
        ("ring_sizes", "8", "ring_sizes: expected a tuple or a list of ints, got str"),
        ("write_pad", 1.5, "write_pad: expected an int or None, got float"),
        ("out", {4: None}, "out: expected a plan for ratio 4, got None"),
        ("out", {4: (None, None)}, "out: expected .*compress, write.*, got None for compress"),
        ("out", {4: (None,)}, "out: expected .*compress, write.*, got 1 tensors"),
        ("out", 5, "out: expected a plan by ratio, got int"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            hotplan.plan_step_prefill(*arguments, **{**options, name: value})
    for bad in ((None, None), (torch.zeros((13, 16), dtype=torch.uint8), None)):
        with pytest.raises(TypeError, match="out: expected .*, got None for "):
            hotplan.reference.plan_online_prefill(*arguments[:1], *arguments[3:], num_q_tokens=13, out=bad)
    plan = hotplan.plan_online_prefill(a["req_pool_indices"], a["seq_lens"], a["extend_lens"], num_q_tokens=13)
    # The ring rule of ratio 4 is no matter of the other one's plan, but what is no flag is refused there, too.
    one = {**options, "ratios": (128,), "ring_sizes": (128,)}
    assert hotplan.plan_step_prefill(*arguments, **one, use_req_ring=True).keys() == {128}
    with pytest.raises(TypeError, match="use_req_ring: expected a bool, got another type"):
        hotplan.plan_step_prefill(*arguments, **one, use_req_ring=torch.ones(2))
    for out in (7, torch.zeros((2, 16), dtype=torch.uint8), (None, None, None), (plan.compress, None)):
        with pytest.raises((TypeError, ValueError), match="out: expected .*compress, write.*, got "):
            hotplan.plan_online_prefill(
                a["req_pool_indices"], a["seq_lens"], a["extend_lens"], num_q_tokens=13, out=out
            )
    with pytest.raises(TypeError, match="out: expected a plan for ratio 4, got None"):
        hotplan.plan_step_decode(*arguments[:4], swa_page_size=256, out={4: None, 128: None})
    with pytest.raises(ValueError, match="out: expected a plan for ratio 128"):
        hotplan.plan_step_decode(*arguments[:4], swa_page_size=256, out={4: torch.zeros((2, 16), dtype=torch.uint8)})


# --------------------------------------------------------------------------------------------- the module itself


def test_module_stands_in_for_sglangs() -> None:
    """Upstream's export names, positional order and results, pin_buffer included."""
    module = jit.load("compress", "cpu")
    case = build_case(Lengths.of([3, 0], [5, 8]), Geometry(4, 256, 8), row_padding=0)
    pin_buffer = torch.empty(13 * 24, dtype=torch.uint8)
    lengths = (case.seq_lens, case.extend_lens)
    prefill = module.plan_prefill(*case.tables, *lengths, pin_buffer, 13, 4, 256, 8, False, False)
    assert_same(PrefillPlan(*map(torch.from_dlpack, prefill)), ours(case, "prefill"))
    prefill = module.plan_prefill(*case.tables, *lengths, pin_buffer, 13, 4, 256, 8, False, True)
    assert_same(PrefillPlan(*map(torch.from_dlpack, prefill)), ours(case, "prefill", use_cuda_graph=True))
    decode = module.plan_decode(*case.tables, case.seq_lens, 4, 256, 8, True)
    assert_same(torch.from_dlpack(decode), ours(case, "decode", use_req_ring=True))
    legacy = module.plan_prefill_legacy(case.req_pool_indices, *lengths, pin_buffer, 13, 128, False)
    assert_same(PrefillPlan(*map(torch.from_dlpack, legacy)), ours(case, "prefill_legacy", compress_ratio=128))
    decode = module.plan_decode_legacy(case.req_pool_indices, case.seq_lens, 4)
    assert_same(torch.from_dlpack(decode), ours(case, "decode_legacy"))
    with pytest.raises(TypeError, match="plan_decode_legacy: expected 3 arguments, got 4"):
        module.plan_decode_legacy(case.req_pool_indices, case.seq_lens, 4, 5)
    with pytest.raises(TypeError, match="plan_decode_legacy: argument compress_ratio is missing, got 2 arguments"):
        module.plan_decode_legacy(case.req_pool_indices, case.seq_lens)


def test_check_lengths_is_the_cpu_rule() -> None:
    module = jit.load("compress", "cpu")
    seq, extend = torch.tensor([8, 8]), torch.tensor([5, 9])
    with pytest.raises(ValueError, match="got extend=9, seq=8 for request 1"):
        module.check_lengths(seq, extend, 14)
    with pytest.raises(ValueError, match="got seq=0 for request 0"):
        module.check_lengths(torch.tensor([0]), None, 0)
    assert module.check_lengths(seq, torch.tensor([5, 8]), 13) is None


def test_many_threads() -> None:
    batches = [build_case(ragged(i, 50, 40), SERVER_GEOMETRIES[i % 6], seed=i) for i in range(8)]
    expected = [theirs(case, "prefill") for case in batches]

    def work(i: int) -> None:
        for _ in range(50):
            assert_same(ours(batches[i], "prefill"), expected[i])

    run_in_threads(8, work)
