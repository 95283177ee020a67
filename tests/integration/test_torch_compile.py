"""torch.compile around our functions: one graph, the same bytes as eager calls; and torch.ops.hotplan by itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import device_buffer_cases as db
import hisparse_cases as hs
import numpy as np
import pytest
import torch
from strategies import FUNCTIONS as COMPRESS
from strategies import Geometry, build_case, ragged
from torch._subclasses.fake_tensor import FakeTensorMode

import hotplan
from hotplan import PrefillPlan, hisparse
from hotplan.integrations import torch_library

BACKENDS = ["eager", "aot_eager"]
HISPARSE = [name for name in hisparse.__all__ if inspect.isfunction(getattr(hisparse, name))]


@pytest.fixture(autouse=True)
def nothing_compiled_yet() -> None:
    torch._dynamo.reset()


def compiled(function: Callable[..., Any], backend: str | Callable[..., Any], **options: Any) -> Callable[..., Any]:
    def caller(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return torch.compile(caller, backend=backend, fullgraph=True, **options)


def call_of(operator: str, seed: int = 1, batch: int = 5) -> tuple[tuple[Any, ...], dict[str, Any]]:
    case = build_case(ragged(seed, batch, 200), Geometry(4, 256, 16), seed=seed, state_slot_offset=64)
    return getattr(case, operator)(lambda *args, **kwargs: (args, kwargs))


def flat(plan: Any) -> list[torch.Tensor]:
    if isinstance(plan, torch.Tensor):
        return [plan]
    return [tensor for part in (plan.values() if isinstance(plan, dict) else plan) for tensor in flat(part)]


def assert_same(got: Any, expected: Any) -> None:
    assert type(got) is type(expected)
    if isinstance(got, dict):
        assert list(got) == list(expected)
    for mine, its in zip(flat(got), flat(expected), strict=True):
        assert mine.dtype == its.dtype
        assert torch.equal(mine, its)


# ----------------------------------------------------------------------------------------------------
# Compress plans


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("operator", COMPRESS)
def test_plans(operator: str, backend: str) -> None:
    plan = getattr(hotplan, COMPRESS[operator])
    args, kwargs = call_of(operator)
    if "num_q_tokens" in kwargs:
        kwargs["use_cuda_graph"] = True  # else their size depends on lengths
    expected = plan(*args, **kwargs)
    assert_same(compiled(plan, backend)(*args, **kwargs), expected)

    def into(values: Any) -> Any:
        if isinstance(values, dict):
            return {ratio: into(value) for ratio, value in values.items()}
        if isinstance(values, PrefillPlan):
            return PrefillPlan(*(into(value) for value in values))
        return torch.full_like(values, 0xA5)

    out = into(expected)
    got = compiled(plan, backend)(*args, **kwargs, out=out)
    assert_same(out, expected)
    assert_same(got, expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("active", [2, torch.tensor([2])], ids=["int", "tensor"])
def test_online_verify(active: Any, backend: str) -> None:
    args = torch.tensor([3, 5, 7]), torch.tensor([120, 124, 128], dtype=torch.int32)
    kwargs = {"num_draft_tokens": 8, "state_slot_offset": 16, "active_batch_size": active}
    expected = hotplan.plan_online_verify(*args, **kwargs)
    assert_same(compiled(hotplan.plan_online_verify, backend)(*args, **kwargs), expected)
    out = PrefillPlan(torch.zeros(3, 16, dtype=torch.uint8), torch.zeros(3, 16, dtype=torch.uint8))
    assert_same(compiled(hotplan.plan_online_verify, backend)(*args, **kwargs, out=out), expected)
    assert_same(out, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_plans_whose_size_depends_on_lengths(backend: str) -> None:
    plan = hotplan.plan_compress_prefill
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for seed in (1, 2):
            args, kwargs = call_of("prefill", seed)
            got = compiled(plan, backend)(*args, **kwargs)
            assert_same(got, plan(*args, **kwargs))
            assert got.compress.shape[0] < kwargs["num_q_tokens"]
            assert got.compress.untyped_storage().data_ptr() != got.write.untyped_storage().data_ptr()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_call_between_two_graphs(backend: str) -> None:
    # Without fullgraph torch splits the graph where sizes are unknown, and calls the operator between the halves.
    args, kwargs = call_of("prefill")

    def step(*args: Any) -> Any:
        plan = hotplan.plan_compress_prefill(*args, **kwargs)
        return plan.compress + 1, plan.write + 1

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=False):
        assert_same(torch.compile(step, backend=backend)(*args), step(*args))


def test_eager_calls_while_something_compiles() -> None:
    args, kwargs = call_of("decode")
    expected, seen = hotplan.plan_compress_decode(*args, **kwargs), []

    def backend(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        seen.append(hotplan.plan_compress_decode(*args, **kwargs))
        return module.forward

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(1))
    assert_same(*seen, expected)


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict: bool) -> None:
    args, kwargs = call_of("step_decode")

    class Model(torch.nn.Module):
        def forward(self, *args: Any) -> Any:
            plans = hotplan.plan_step_decode(*args, **kwargs)
            return plans[4], plans[128]

    program = torch.export.export(Model(), args, strict=strict)
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert torch.ops.hotplan.plan_step_decode.default in targets
    assert_same(program.module()(*args), Model()(*args))


def test_one_graph_for_all_batch_sizes() -> None:
    graphs = []

    def backend(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.append([node.target for node in module.graph.nodes if node.op == "call_function"])
        return module.forward

    def step(req_pool_indices: Any, req_to_token: Any, full_to_state: Any, seq_lens: Any, extend_lens: Any) -> Any:
        prefill = hotplan.plan_compress_prefill(
            req_pool_indices, req_to_token, full_to_state, seq_lens, extend_lens, num_q_tokens=3 * len(seq_lens),
            compress_ratio=4, swa_page_size=256, ring_size=8, use_cuda_graph=True,
        )  # fmt: skip
        decode = hotplan.plan_step_decode(req_pool_indices, req_to_token, full_to_state, seq_lens, swa_page_size=256)
        return prefill, decode[4], decode[128]

    run = torch.compile(step, backend=backend, fullgraph=True, dynamic=True)
    for batch in (2, 7, 30):
        case = build_case(ragged(batch, batch, 1), Geometry(4, 256, 8), seed=batch)
        # A table of one size: what varies here is the batch.
        req_to_token = torch.arange(40 * 1500, dtype=torch.int32).view(40, 1500)
        args = (case.req_pool_indices, req_to_token, torch.arange(60000), case.seq_lens + 3, case.extend_lens + 2)
        for got, expected in zip(run(*args), step(*args), strict=True):
            assert_same(got, expected)
    assert len(graphs) == 1
    assert torch.ops.hotplan.plan_compress_prefill in {getattr(t, "overloadpacket", t) for t in graphs[0]}


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_checked_mode_is_in_the_graph(backend: str) -> None:
    def step(lengths: torch.Tensor) -> torch.Tensor:
        torch.ops.hotplan.check_lengths(lengths, None, 0)
        return lengths + 1

    run = torch.compile(step, backend=backend, fullgraph=True)
    assert run(torch.tensor([1, 2])).tolist() == [2, 3]
    with pytest.raises(ValueError, match="seq_lens"):
        run(torch.tensor([1, -2]))


def test_lengths_on_a_gpu_are_checked_in_the_graph() -> None:
    graphs = []

    def backend(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(module)
        return module.forward

    def step(rid: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return hotplan.plan_compress_decode_legacy(rid, lengths, compress_ratio=4, check=True)

    with FakeTensorMode():
        rid, lengths = (torch.empty(3, dtype=torch.int64, device="cuda") for _ in range(2))
        plan = torch.compile(step, backend=backend, fullgraph=True)(rid, lengths)
    assert (plan.shape, plan.device.type) == ((3, 16), "cuda")
    (graph,) = graphs
    called = [node.target for node in graph.graph.nodes if node.op in ("call_function", "call_method")]
    assert called == ["cpu", torch.ops.hotplan.check_lengths, torch.ops.hotplan.plan_compress_decode_legacy]


# ----------------------------------------------------------------------------------------------------
# HiSparse


def module_of(backend: str) -> SimpleNamespace:
    return SimpleNamespace(**{name: compiled(getattr(hisparse, name), backend) for name in HISPARSE})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("operator", ["resolve_residency", "swap_in"])
def test_residency(operator: str, backend: str) -> None:
    case = hs.make_case(seed=2, top_k=8, hot_slots=32, rows=4, mode="tables", resident=0.3, steps_per_request=2)
    rng = np.random.default_rng(2)
    mine, its, module = hs.Bench(case), hs.Bench(case), module_of(backend)
    for _ in range(3):
        ids = hs.random_ids(case, rng, spread=0.5)
        mine.resolve(module, ids, operator)
        its.resolve(hisparse, ids, operator)
        mine.assert_equal(its)


@pytest.mark.parametrize("backend", BACKENDS)
def test_swap_plans_and_copies(backend: str) -> None:
    case = hs.make_case(seed=3, top_k=8, hot_slots=32, rows=3, mode="state", padding=0.3)
    rng = np.random.default_rng(3)
    mine, its, module = hs.Bench(case), hs.Bench(case), module_of(backend)
    for _ in range(2):
        ids = hs.random_ids(case, rng, spread=0.5)
        plan, expected = mine.plan(module, ids), its.plan(hisparse, ids)
        assert_same(plan, expected)
        mine.assert_equal(its, names=hs.Bench.STATE)
        module.gather_planned(mine.host_cache, mine.hot_cache, plan.plan, plan.counts)
        hisparse.gather_planned(its.host_cache, its.hot_cache, expected.plan, expected.counts)
        mine.assert_equal(its, names=())
    out = tuple(torch.zeros_like(tensor) for tensor in expected)
    arguments, options = list(mine.arguments(ids)), mine.options("stats")
    del arguments[4]
    got = module.plan_swap_in(*arguments, **options, out=out)
    arguments = list(its.arguments(ids))
    del arguments[4]
    assert_same(got, hisparse.plan_swap_in(*arguments, **its.options("stats")))
    assert_same(out, tuple(got))
    assert got.counts.sum() == 0  # all of them are hits by now


@pytest.mark.parametrize("backend", BACKENDS)
def test_gathers_and_invalidation(backend: str) -> None:
    module = module_of(backend)
    host = torch.arange(40 * 16, dtype=torch.int32).view(40, 16)
    ids = torch.tensor([[3, 5, -1, 39], [7, 50, 2, 0]], dtype=torch.int32)
    rows = torch.tensor([[0, 9, 4, 7], [2, 3, 1, 100]], dtype=torch.int32)
    mask = torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1]], dtype=torch.int32)
    results = []
    for operators in (module, hisparse):
        hot, compact = torch.full((2, 3, 4, 16), -1, dtype=torch.int32)
        attention = torch.full((2, 4), -9, dtype=torch.int32)
        operators.gather_plan(host, hot, ids, rows, mask, attention_indices=attention, attention_block_stride=6)
        operators.gather_compact(host, compact, ids, rows, torch.tensor([2, 9], dtype=torch.int32))
        dgi = ids.clone()
        one = torch.tensor([1], dtype=torch.int32)
        operators.invalidate_written_slots(dgi, torch.tensor([0, 1], dtype=torch.int32), one, torch.tensor([50]))
        results.append((hot, compact, attention, dgi))
    assert_same(*results)
    assert results[0][3].tolist() == [[3, 5, -1, 39], [7, -1, 2, 0]]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", db.KINDS)
def test_device_buffers(kind: str, backend: str) -> None:
    case = db.make_case(kind, seed=4, top_k=6, hot_slots=32, rows=3, extra=4)
    rng = np.random.default_rng(4)
    mine, its, module = db.Bench(case), db.Bench(case), module_of(backend)
    for _ in range(3):
        step = db.random_step(case, rng, spread=0.7)
        mine.run(module, step)
        its.run(hisparse, step)
        mine.assert_equal(its)
        mine.assert_contract(step, clean=True)
        if kind != "blocks":
            mine.replay(module)


@pytest.mark.parametrize("backend", BACKENDS)
def test_translation_and_transfer(backend: str) -> None:
    def step(mapping: Any, locations: Any, src: Any, dst: Any) -> torch.Tensor:
        rows = hisparse.translate_padded_hisparse_locations(mapping, locations)
        hisparse.transfer_cache_dsv4_mla(src, dst, torch.clamp(rows, min=-1), locations)
        return rows + 1

    pools = torch.zeros(2, 1, db.PAGE_BYTES, dtype=torch.uint8)
    pools[0] = torch.arange(db.PAGE_BYTES) % 251
    src, dst = (torch.tensor([pool.data_ptr()], dtype=torch.uint64) for pool in pools)
    mapping, locations = torch.tensor([5, 9, 2], dtype=torch.int32), torch.tensor([2, -1, 0, 1])
    got = torch.compile(step, backend=backend, fullgraph=True)(mapping, locations, src, dst)
    assert got.tolist() == [3, 0, 6, 10]
    for row, of in ((2, 2), (0, 5), (1, 9)):
        assert torch.equal(pools[1, 0, row * 576 : (row + 1) * 576], pools[0, 0, of * 576 : (of + 1) * 576])
    assert not pools[1, 0, 3 * 576 : 64 * 576].any()


# ----------------------------------------------------------------------------------------------------
# torch.ops.hotplan


def test_every_public_function_is_an_operator_with_its_arguments() -> None:
    different = {
        "plan_online_verify": {"active_batch_tensor"},
        "plan_step_prefill": {"write_pad_1"},
        "load_cache_to_device_buffer_spec_mla": {"cache_policy", "scratch_locs", "scratch_state"},
    }
    for name in (*COMPRESS.values(), "plan_online_verify", *HISPARSE):
        assert name in torch_library.OPERATORS
        public = inspect.signature(
            getattr(hotplan if name.startswith("plan_") and name not in HISPARSE else hisparse, name)
        )
        schema = {argument.name: argument for argument in getattr(torch.ops.hotplan, name).default._schema.arguments}
        more = different.get(name, set())
        assert set(schema) - more == set(public.parameters) - {"out", "state"}, name
        for argument in set(schema) - more:
            default = public.parameters[argument].default
            if isinstance(default, tuple):
                default = list(default)
            if default is not inspect.Parameter.empty:
                assert schema[argument].default_value == default, (name, argument)


@pytest.mark.parametrize("operator", COMPRESS)
def test_plan_operators_by_torchs_own_check(operator: str) -> None:
    name = COMPRESS[operator]
    args, kwargs = call_of(operator, batch=3)
    if "num_q_tokens" in kwargs:
        kwargs["use_cuda_graph"] = True
    torch.library.opcheck(getattr(torch.ops.hotplan, name), args, kwargs)
    made = getattr(torch.ops.hotplan, name)(*args, **kwargs)
    made = (made,) if isinstance(made, torch.Tensor) else made
    assert len({tensor.untyped_storage().data_ptr() for tensor in made}) == len(made)
    filled = getattr(torch.ops.hotplan, f"{name}_out").default
    outputs = [a.name for a in filled._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    torch.library.opcheck(filled, args, kwargs | dict(zip(outputs, map(torch.zeros_like, made), strict=True)))


def test_residency_operators_by_torchs_own_check() -> None:
    case = hs.make_case(seed=5, top_k=4, hot_slots=16, rows=2, mode="tables", resident=0.3)
    ids = hs.random_ids(case, np.random.default_rng(5))
    for operator in ("resolve_residency", "swap_in"):
        bench = hs.Bench(case)
        torch.library.opcheck(getattr(torch.ops.hotplan, operator), bench.arguments(ids), bench.options())


@pytest.mark.parametrize("kind", ["linear", "dsv4", "blocks"])
def test_device_buffer_operators_by_torchs_own_check(kind: str) -> None:
    case = db.make_case(kind, seed=6, top_k=3, hot_slots=16, rows=2)
    bench = db.Bench(case)
    arguments = bench.arguments(db.random_step(case, np.random.default_rng(6), short=0.0))
    torch.library.opcheck(bench.operator(torch.ops.hotplan), (), arguments)


def test_sizes_with_lengths_on_a_gpu() -> None:
    with FakeTensorMode(), torch.device("cuda"):
        rid, lengths = torch.empty(3, dtype=torch.int64), torch.empty(3, dtype=torch.int64)
        tables = torch.empty(9, 100, dtype=torch.int32), torch.empty(900, dtype=torch.int64)
        options = {"num_q_tokens": 40, "compress_ratio": 4, "swa_page_size": 256, "ring_size": 8}
        compress, write = torch.ops.hotplan.plan_compress_prefill(rid, *tables, lengths, lengths, **options)
        assert (compress.shape, write.shape, compress.device.type) == ((40, 16), (40, 8), "cuda")
        compress, write = hotplan.plan_compress_prefill(rid, *tables, lengths, lengths, **options)
        assert (compress.shape, write.shape, compress.device.type) == ((40, 16), (40, 8), "cuda")
        plan = torch.ops.hotplan.plan_compress_decode_legacy(rid, lengths, compress_ratio=4)
        assert (plan.shape, plan.dtype, plan.device.type) == ((3, 16), torch.uint8, "cuda")
        ids = torch.empty(3, 8, dtype=torch.int32)
        host = torch.empty(50, 16, dtype=torch.uint8, device="cpu")
        hot, state = torch.empty(4, 4, 16, dtype=torch.uint8), torch.empty(3, 16, dtype=torch.int32)
        lru = torch.empty(3, 16, dtype=torch.int16)
        plan, counts, rows = torch.ops.hotplan.plan_swap_in(host, hot, ids, ids, state, lru)
        assert (plan.shape, counts.shape, rows.shape) == ((3, 8, 16), (3,), (3, 8))
        assert {plan.device.type, counts.device.type, rows.device.type} == {"cuda"}
