"""The CUDA backend of the compress plans: the reference's bytes from every route, as plain launch and as replay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from graphs import captured
from hypothesis import given, settings
from strategies import (
    SERVER_GEOMETRIES,
    Case,
    Geometry,
    Lengths,
    build_case,
    cases,
    far,
    hostile,
    hostile_cases,
    huge,
    near_multiples,
    ragged,
    seed_of,
    uniform,
)
from strategies import empty as empty_lengths
from test_compress import OPERATORS, assert_same, ours, poisoned, theirs
from threads import run_in_threads

import hotplan
from hotplan import PrefillPlan, jit, reference

pytestmark = pytest.mark.gpu

STEP = {"swa_page_size": 256, "ratios": (4, 128), "ring_sizes": (16, 256)}


def on_cpu(plan):
    if isinstance(plan, dict):
        return {ratio: on_cpu(p) for ratio, p in plan.items()}
    if isinstance(plan, PrefillPlan):
        return PrefillPlan(plan.compress.cpu(), plan.write.cpu())
    return plan.cpu()


def on_gpu(plan):
    if isinstance(plan, dict):
        return {ratio: on_gpu(p) for ratio, p in plan.items()}
    if isinstance(plan, PrefillPlan):
        return PrefillPlan(plan.compress.cuda(), plan.write.cuda())
    return plan.cuda()


def is_prefill(operator: str) -> bool:
    return "prefill" in operator


def replayed(call: Callable[[], object]):
    """The result of `call` when it is captured into a graph and replayed."""
    call()  # compile, load and warm up outside the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    graph.replay()
    torch.cuda.synchronize()
    return result


def assert_gpu_routes(case: Case, operator: str, *, graph: bool = True, **options) -> None:
    """Plain launch, poisoned `out` and graph replay, with the lengths on the GPU."""
    unchecked = theirs(case, operator, unchecked=True, **options)
    gpu = case.to("cuda")
    assert_same(on_cpu(ours(gpu, operator, **options)), unchecked)
    out = on_gpu(poisoned(unchecked))
    assert_same(on_cpu(ours(gpu, operator, out=out, **options)), unchecked)
    if graph:
        out = on_gpu(poisoned(unchecked))
        assert_same(on_cpu(replayed(lambda: ours(gpu, operator, out=out, **options))), unchecked)


def assert_host_routes(case: Case, operator: str, **options) -> None:
    """Valid lengths on the CPU with everything else on the GPU: exact sizes, and padded."""
    split = case.to("cuda", lengths_device="cpu")
    assert_same(on_cpu(ours(split, operator, **options)), theirs(case, operator, **options))
    if is_prefill(operator):
        padded = theirs(case, operator, use_cuda_graph=True, **options)
        assert_same(on_cpu(ours(split, operator, use_cuda_graph=True, **options)), padded)
        out = on_gpu(poisoned(padded, more=5))
        expected = theirs(case, operator, out=poisoned(padded, more=5), **options)
        assert_same(on_cpu(ours(split, operator, out=out, **options)), expected)


@pytest.mark.parametrize("operator", OPERATORS)
@given(case=cases())
@settings(max_examples=40, deadline=None)
def test_random_batches(operator: str, case: Case) -> None:
    assert_gpu_routes(case, operator, graph=False)
    assert_host_routes(case, operator)


@given(case=hostile_cases())
@settings(max_examples=150, deadline=None)
def test_hostile_values(case: Case) -> None:
    for operator in OPERATORS:
        assert_gpu_routes(case, operator, graph=False)


@pytest.mark.parametrize("lengths", hostile(), ids=lambda x: f"B{x.batch}q{x.num_q_tokens}")
@pytest.mark.parametrize("geometry", [SERVER_GEOMETRIES[i] for i in (1, 2, 5)], ids=["c4", "ring", "c128"])
def test_hostile_examples(lengths: Lengths, geometry: Geometry) -> None:
    case = build_case(lengths, geometry, tables="hostile", seed=3)
    for operator in OPERATORS:
        assert_gpu_routes(case, operator)


@pytest.mark.parametrize("batch", [1, 31, 32, 33, 255, 256, 257, 511, 512, 513, 1023, 1024, 1025, 2048, 2049, 4097])
@pytest.mark.parametrize("kind", ["uniform", "ragged"])
def test_batch_sizes_at_every_edge(batch: int, kind: str) -> None:
    """±1 of a warp, of each block size, of a block's scan, of the inline lengths (256, 3840)."""
    lengths = uniform(batch, 5, prefix=126) if kind == "uniform" else ragged(batch, batch, max(2, 60000 // batch))
    for geometry in (SERVER_GEOMETRIES[0], SERVER_GEOMETRIES[5]):
        case = build_case(lengths, geometry, seed=batch, max_width=400)
        for operator in OPERATORS:
            assert_gpu_routes(case, operator)
            assert_host_routes(case, operator)
        assert_gpu_routes(case, "step_prefill", **STEP)
        assert_host_routes(case, "step_prefill", **STEP)
        assert_gpu_routes(case, "step_decode", **STEP)


@pytest.mark.parametrize("batch", [3839, 3840, 3841, 7681, 16000])
def test_lengths_on_the_cpu_past_one_launch(batch: int) -> None:
    for lengths in (uniform(batch, 4, prefix=3), near_multiples(batch, min(batch, 100)), ragged(batch, batch, 8)):
        case = build_case(lengths, SERVER_GEOMETRIES[1], seed=batch, max_width=300)
        for operator in ("prefill", "online_prefill", "decode"):
            assert_host_routes(case, operator)
        assert_host_routes(case, "step_prefill", **STEP)


@pytest.mark.parametrize("tokens", [1, 255, 256, 257, 1023, 1024, 1025, 4095, 4096, 4097])
@pytest.mark.parametrize("batch", [1, 1500])
def test_token_counts_at_tile_edges(tokens: int, batch: int) -> None:
    """Rows ±1 of the tiles, with fewer, exactly, and more rows than tokens."""
    lengths = Lengths.of([7] * batch, [max(tokens // batch, 1)] * batch)
    case = build_case(lengths, SERVER_GEOMETRIES[0], seed=tokens, max_width=500)
    for rows in (max(1, tokens - 3), tokens, tokens + 9):
        for operator in ("prefill", "prefill_legacy", "online_prefill"):
            assert_gpu_routes(case, operator, num_q_tokens=rows)


@pytest.mark.parametrize("lengths", [*huge(), *far()], ids=lambda x: f"{x.batch}x{max(x.extend)}")
@pytest.mark.parametrize("geometry", [SERVER_GEOMETRIES[1], SERVER_GEOMETRIES[4]], ids=["c4", "c128"])
def test_large_batches(lengths: Lengths, geometry: Geometry) -> None:
    case = build_case(lengths, geometry, seed=11, max_width=600)
    for operator in ("prefill", "online_prefill", "decode"):
        assert_gpu_routes(case, operator)
        assert_host_routes(case, operator)
    assert_gpu_routes(case, "step_prefill", **STEP)


@pytest.mark.parametrize("lengths", empty_lengths(), ids=lambda x: f"B{x.batch}")
def test_no_tokens(lengths: Lengths) -> None:
    case = build_case(lengths, Geometry(4, 256, 8), max_width=8)
    for lengths_device in ("cuda", "cpu"):
        split = case.to("cuda", lengths_device)
        assert ours(split, "prefill").compress.shape == (0, 16)
        assert ours(split, "step_prefill")[128].write.shape == (0, 8)
        assert ours(split, "online_prefill").write.shape == (0, 16)


def test_replay_follows_changed_lengths() -> None:
    """One captured graph serves every batch of its bucket, also smaller ones, and leaves no old row behind."""
    batch, tokens = 64, 512
    captured = build_case(uniform(batch, 8, prefix=100), SERVER_GEOMETRIES[1], seed=5, device="cuda", max_width=4000)
    captured = build_case(Lengths.of([3000] * batch, [8] * batch), SERVER_GEOMETRIES[1], seed=5, device="cuda")
    call = lambda: ours(captured, "step_prefill", num_q_tokens=tokens, **STEP)  # noqa: E731
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plans = call()
        decode = ours(captured, "step_decode", **STEP)
    generator = torch.Generator().manual_seed(seed_of("replay"))
    for trial in range(20):
        extend = torch.randint(-1, 9, (batch,), generator=generator)
        seq = torch.randint(1, 2900, (batch,), generator=generator) + extend.clamp(min=0)
        captured.seq_lens.copy_(seq)
        captured.extend_lens.copy_(extend)
        captured.req_pool_indices.copy_(torch.randperm(batch, generator=generator) + trial % 3)
        graph.replay()
        torch.cuda.synchronize()
        cpu = captured.to("cpu")
        options = {"num_q_tokens": tokens, "unchecked": True, **STEP}
        assert_same(on_cpu(plans), theirs(cpu, "step_prefill", **options))
        assert_same(on_cpu(decode), theirs(cpu, "step_decode", unchecked=True, **STEP))


def test_verify_follows_the_active_batch_size() -> None:
    batch = 300
    generator = torch.Generator().manual_seed(seed_of("verify"))
    prefix = torch.randint(-2, 900, (batch,), generator=generator, dtype=torch.int32)
    rid = torch.randint(-1, 400, (batch,), generator=generator)
    for dtype in (torch.int32, torch.int64):
        active = torch.zeros(1, dtype=dtype, device="cuda")
        options = {"num_draft_tokens": 9, "state_slot_offset": 77}
        gpu = (rid.cuda(), prefix.cuda())
        hotplan.plan_online_verify(*gpu, active_batch_size=active, **options)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            plan = hotplan.plan_online_verify(*gpu, active_batch_size=active, **options)
        for count in (0, 1, 127, 128, 129, 300, 1000):
            active.fill_(count)
            graph.replay()
            torch.cuda.synchronize()
            expected = reference.plan_online_verify(rid, prefix, active_batch_size=min(count, batch), **options)
            assert_same(on_cpu(plan), expected)


def test_the_same_bytes_every_time() -> None:
    case = build_case(ragged(9, 1000, 65), SERVER_GEOMETRIES[1], seed=9, device="cuda", max_width=500)
    first = ours(case, "step_prefill", **STEP)
    for _ in range(50):
        assert_same(ours(case, "step_prefill", **STEP), first)


def test_side_stream() -> None:
    """The kernel runs on the caller's stream: behind the copies that fill its inputs, before those that read it."""
    case = build_case(ragged(2, 200, 40), SERVER_GEOMETRIES[0], seed=2)
    expected = theirs(case, "prefill", unchecked=True)
    gpu = case.to("cuda")
    true_seq = gpu.seq_lens.clone()
    ours(gpu, "prefill")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    busy = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    for _ in range(5):
        gpu.seq_lens.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for _ in range(20):
                busy.fill_(1)
            gpu.seq_lens.copy_(true_seq)
            plan = ours(gpu, "prefill")
        stream.synchronize()
        assert_same(on_cpu(plan), expected)


def test_many_threads_and_streams() -> None:
    batches = [build_case(ragged(i, 60, 50), SERVER_GEOMETRIES[i % 6], seed=i) for i in range(6)]
    expected = [theirs(case, "prefill", unchecked=True) for case in batches]
    gpu = [case.to("cuda") for case in batches]
    torch.cuda.synchronize()

    def work(i: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(30):
                assert_same(on_cpu(ours(gpu[i], "prefill")), expected[i])

    run_in_threads(len(gpu), work)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
def test_second_device() -> None:
    case = build_case(ragged(4, 100, 30), SERVER_GEOMETRIES[1], seed=4)
    for lengths_device in ("cuda:1", "cpu"):
        far_case = case.to("cuda:1", lengths_device)
        with torch.cuda.device(0):
            plan = ours(far_case, "prefill", use_cuda_graph=True)
        assert plan.compress.device == torch.device("cuda:1")
        assert_same(on_cpu(plan), theirs(case, "prefill", use_cuda_graph=True))
    mixed = case.to("cuda:1", "cuda:0")
    with pytest.raises(ValueError, match="seq_lens: expected device cuda:1, got cuda:0"):
        ours(mixed, "prefill")


def test_checked_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    good = build_case(Lengths((8, 9), (8, 2), 10), SERVER_GEOMETRIES[0], device="cuda")
    bad = build_case(Lengths((8, 9), (8, 10), 18), SERVER_GEOMETRIES[0], device="cuda")
    expected = "got extend=10, seq=9 for request 1"
    for operator in ("prefill", "prefill_legacy", "online_prefill", "step_prefill"):
        ours(good, operator, check=True)
        ours(bad, operator)
        with pytest.raises(ValueError, match=expected):
            ours(bad, operator, check=True)
    zero = build_case(Lengths((8, 0), (8, 2), 10), SERVER_GEOMETRIES[0], device="cuda")
    for operator in ("decode", "decode_legacy", "online_decode", "step_decode"):
        ours(zero, operator)
        with pytest.raises(ValueError, match="got seq=0 for request 1"):
            ours(zero, operator, check=True)
    monkeypatch.setenv("HOTPLAN_CHECK", "1")
    with pytest.raises(ValueError, match=expected):
        ours(bad, "prefill")
    ours(bad, "prefill", check=False)
    with pytest.raises(ValueError, match=r"check: expected no check .* while a CUDA graph is captured"):
        captured(lambda: ours(good, "prefill"))
    monkeypatch.setenv("HOTPLAN_CHECK", "off")
    ours(bad, "prefill")


def test_device_errors() -> None:
    case = build_case(Lengths((8, 9), (8, 2), 10), SERVER_GEOMETRIES[0])
    gpu = case.to("cuda")
    options = {"num_q_tokens": 10, **SERVER_GEOMETRIES[0].prefill_options()}
    rid, r2t, f2s = gpu.tables
    lengths = (gpu.seq_lens, gpu.extend_lens)
    with pytest.raises(ValueError, match="req_to_token: expected device cuda:0, got cpu"):
        hotplan.plan_compress_prefill(rid, case.req_to_token, f2s, *lengths, **options)
    with pytest.raises(ValueError, match="full_to_state: expected device cuda:0, got cpu"):
        hotplan.plan_compress_prefill(rid, r2t, case.full_to_state, *lengths, **options)
    with pytest.raises(ValueError, match="req_to_token: expected device cpu, got cuda:0"):
        hotplan.plan_compress_prefill(case.req_pool_indices, r2t, f2s, *lengths, **options)
    with pytest.raises(ValueError, match="extend_lens: expected device cuda:0, got cpu"):
        hotplan.plan_compress_prefill(*gpu.tables, gpu.seq_lens, case.extend_lens, **options)
    with pytest.raises(ValueError, match="out.compress: expected device cuda:0, got cpu"):
        ours(gpu, "prefill", out=poisoned(theirs(case, "prefill", use_cuda_graph=True)))


def test_pinned_lengths_count_as_cpu_lengths() -> None:
    case = build_case(ragged(3, 20, 30), SERVER_GEOMETRIES[0], seed=3)
    split = case.to("cuda", lengths_device="cpu")
    pinned = Case(*[getattr(split, f) for f in ("lengths", "geometry", "req_pool_indices", "req_to_token")],
                  split.full_to_state, split.seq_lens.pin_memory(), split.extend_lens.pin_memory())  # fmt: skip
    assert_same(on_cpu(ours(pinned, "prefill")), theirs(case, "prefill"))


def test_module_stands_in_for_sglangs() -> None:
    module = jit.load("compress", "cuda")
    case = build_case(ragged(6, 30, 40), SERVER_GEOMETRIES[1], seed=6)
    gpu = case.to("cuda")
    n = case.lengths.num_q_tokens
    pin_buffer = torch.empty(0, dtype=torch.uint8)
    plan = module.plan_prefill(*gpu.tables, gpu.seq_lens, gpu.extend_lens, pin_buffer, n, 4, 256, 16, False, False)
    assert_same(on_cpu(PrefillPlan(*map(torch.from_dlpack, plan))), theirs(case, "prefill", use_cuda_graph=True))
    decode = module.plan_decode(*gpu.tables, gpu.seq_lens, 4, 256, 16, False)
    assert_same(on_cpu(torch.from_dlpack(decode)), theirs(case, "decode"))
