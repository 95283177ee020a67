"""vLLM's operator names: schemas, results, what is there already. Each test has a process of its own to register in."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

UNIT = Path(__file__).resolve().parent.parent / "unit"

PRELUDE = """
import numpy as np
import torch
from hisparse_cases import Bench, golden_cases, golden_expectation, make_case, random_ids
from hotplan import hisparse
from hotplan.integrations import vllm

ops = torch.ops._C_cache_ops
NAMES = ("resolve_residency", "gather_plan", "gather_compact", "invalidate_written_slots")


def names(operator):
    return [argument.name for argument in operator.default._schema.arguments]


class Caller:
    '''What vLLM does, as a module of our operators: all arguments by position.'''

    union_rows = None  # the additional argument of the newer generation

    def resolve_residency(self, host, hot, table, ids, out, dgi, lru, *, max_union_rows=None, **options):
        union = () if self.union_rows is None else (self.union_rows,)
        ops.hisparse_resolve_residency(
            host, hot, table, ids, out, dgi, lru, options.get("request_state_indices"), dgi.shape[1], *union,
            options.get("miss_mask"), options.get("stats"), options.get("attention_indices"),
            options.get("attention_block_stride", 0), options.get("request_ids"), options.get("source_block_table"),
            options.get("source_block_size", 0), options.get("resolved_global_indices"), options.get("valid_counts"),
            options.get("swap_host_physical_rows"), options.get("swap_device_physical_rows"),
            options.get("swap_counts"), options.get("resident_block_table"), options.get("resident_block_size", 0),
            options.get("resident_null_block", 0),
        )


caller = Caller()
"""


def run(body: str) -> None:
    """Runs the code in a new process; a failed assertion there is one here."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(UNIT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(body)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


# An operator of vLLM's own: for CUDA, with its own ideas of names and defaults.
VLLM_HAS = """
theirs = torch.library.Library("_C_cache_ops", "DEF")
calls = []


def vllm_has(name, schema, backend="CUDA"):
    theirs.define(f"{name}({schema}) -> ()")
    theirs.impl(name, lambda *args, **kwargs: calls.append(name), backend)

"""


@pytest.mark.parametrize("generation", [1, 2])
def test_recorded_outputs_by_vllms_names(generation: int) -> None:
    run(f"""
        vllm.install(generation={generation})
        assert ("max_union_rows" in names(ops.hisparse_resolve_residency)) is ({generation} == 2)
        assert "Tensor(c!) lru_slots" in str(ops.hisparse_resolve_residency.default._schema)
        count = 0
        for case in golden_cases():
            caller.union_rows = case.top_k if {generation} == 2 else None
            bench = Bench(case)
            for step in range(len(case.steps)):
                bench.resolve(caller, case.steps[step]["ids"])
                for name, expected in golden_expectation(case, step).items():
                    got = bench.array(name)[tuple(slice(0, size) for size in expected.shape)]
                    np.testing.assert_array_equal(got, expected, err_msg=f"step {{step}} {{name}}")
                count += 1
        assert count > 20
    """)


def test_unions_are_counted_in_ids_or_in_launch_rows() -> None:
    run("""
        vllm.install()
        case = make_case(seed=3, top_k=8, hot_slots=32, rows=6, mode="tables", steps_per_request=3, union=True)
        rng = np.random.default_rng(1)
        steps = [random_ids(case, rng, spread=0.5) for _ in range(4)]
        expected = Bench(case)
        benches = {union_rows: Bench(case) for union_rows in (3 * 8, 3 * 8 - 1, 3)}
        for ids in steps:
            expected.resolve(hisparse, ids)
            for caller.union_rows, bench in benches.items():
                bench.resolve(caller, ids)
                bench.assert_equal(expected, f"max_union_rows {caller.union_rows}")
        # One row's worth of ids is no union: then every row is resolved by itself.
        plain, bench = Bench(case), Bench(case)
        caller.union_rows = 8
        case.max_union_rows = None
        plain.resolve(hisparse, steps[0])
        bench.resolve(caller, steps[0])
        bench.assert_equal(plain)
    """)


def test_copies_and_invalidation() -> None:
    run("""
        vllm.install()
        host = torch.arange(40 * 16, dtype=torch.int32).view(40, 16)
        ids = torch.tensor([[3, 5, -1, 39], [7, 50, 2, 0]], dtype=torch.int32)
        rows = torch.tensor([[0, 9, 4, 7], [2, 3, 1, 100]], dtype=torch.int32)
        mask = torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1]], dtype=torch.int32)
        counts = torch.tensor([2, 9], dtype=torch.int32)
        def hot():
            return torch.full((3, 4, 16), -1, dtype=torch.int32)

        mine, its = hot(), hot()
        hisparse.gather_plan(host, its, ids, rows, mask)
        ops.hisparse_gather_plan(host, mine, ids, rows, mask, None)
        assert torch.equal(mine, its) and not torch.equal(mine, hot())

        mine, its, flat = hot(), hot(), torch.full((2, 4), -9, dtype=torch.int32)
        state = torch.tensor([0, -1], dtype=torch.int32)
        hisparse.gather_plan(host, its, ids, rows, mask, request_state_indices=state)
        ops.hisparse_gather_plan(host, mine, ids, rows, mask, state, flat, 6)
        assert torch.equal(mine, its) and flat.tolist() == [[0, 13, 6, 9], [-1] * 4]

        mine, its = hot(), hot()
        hisparse.gather_compact(host, its, ids, rows, counts)
        ops.hisparse_gather_compact(host, mine, ids, rows, counts)
        assert torch.equal(mine, its) and not torch.equal(mine, hot())

        dgi = torch.tensor([[4, 5, 4], [4, -1, 6]], dtype=torch.int32)
        ops.hisparse_invalidate_written_slots(
            dgi, torch.tensor([1, 0], dtype=torch.int32), torch.tensor([1], dtype=torch.int32), torch.tensor([4])
        )
        assert dgi.tolist() == [[-1, 5, -1], [4, -1, 6]]
    """)


def test_what_vllm_has_keeps_its_schema_and_its_kernel() -> None:
    run(
        VLLM_HAS
        + textwrap.dedent("""
        old = vllm._SCHEMAS["hisparse_resolve_residency"].replace("int max_union_rows, ", "")
        vllm_has("hisparse_resolve_residency", old)
        served = vllm.install()
        assert served["hisparse_resolve_residency"] == {"CPU": "hotplan", "CUDA": "vLLM"}
        assert served["hisparse_gather_plan"] == {"CPU": "hotplan", "CUDA": "hotplan"}
        assert "max_union_rows" not in names(ops.hisparse_resolve_residency)

        case = make_case(seed=1)
        ids = random_ids(case, np.random.default_rng(1))
        bench, expected = Bench(case), Bench(case)
        bench.resolve(caller, ids)
        expected.resolve(hisparse, ids)
        bench.assert_equal(expected)
        assert not calls

        assert vllm.install() == served  # nothing new
        try:
            vllm.install(generation=2)
        except ValueError as error:
            assert "expected 1, that of the operator which is there, got 2" in str(error)
        else:
            raise AssertionError
        served = vllm.install(replace=True)
        assert served["hisparse_resolve_residency"] == {"CPU": "hotplan", "CUDA": "hotplan"}
        assert vllm.install() == served  # what is replaced stays so
        """)
    )


def test_replacing_takes_the_place_of_a_kernel() -> None:
    run(
        VLLM_HAS
        + textwrap.dedent("""
        vllm_has("hisparse_gather_compact", vllm._SCHEMAS["hisparse_gather_compact"], "CPU")
        host, hot = torch.arange(64.0).view(4, 16), torch.zeros(1, 4, 16)
        one = torch.ones(1, 1, dtype=torch.int32)
        assert vllm.install()["hisparse_gather_compact"] == {"CPU": "vLLM", "CUDA": "hotplan"}
        ops.hisparse_gather_compact(host, hot, one, one, one[0])
        assert calls == ["hisparse_gather_compact"] and not hot.any()
        assert vllm.install(replace=True)["hisparse_gather_compact"] == {"CPU": "hotplan", "CUDA": "hotplan"}
        ops.hisparse_gather_compact(host, hot, one, one, one[0])
        assert len(calls) == 1 and torch.equal(hot[0, 1], host[1])
        """)
    )


def test_schemas_that_are_not_ours() -> None:
    run(
        VLLM_HAS
        + textwrap.dedent("""
        vllm_has("hisparse_gather_compact", vllm._SCHEMAS["hisparse_gather_compact"] + ", int row_value_bytes=0")
        vllm.install()
        host, hot = torch.arange(64.0).view(4, 16), torch.zeros(1, 4, 16)
        one = torch.ones(1, 1, dtype=torch.int32)
        ops.hisparse_gather_compact(host, hot, one, one, one[0], 0)
        assert torch.equal(hot[0, 1], host[1])
        try:
            ops.hisparse_gather_compact(host, hot, one, one, one[0], 512)
        except ValueError as error:
            assert "row_value_bytes: expected 0 or None" in str(error) and "got 512" in str(error)
        else:
            raise AssertionError
        """)
    )
    run(
        VLLM_HAS
        + textwrap.dedent("""
        vllm_has("hisparse_gather_compact", "Tensor host_cache, Tensor(a!) hot_cache, Tensor rows")
        try:
            vllm.install()
        except ValueError as error:
            assert "hisparse_gather_compact" in str(error)
            assert "without miss_global_indices, miss_hot_indices, miss_counts" in str(error)
        else:
            raise AssertionError
        assert not hasattr(ops, "hisparse_gather_plan")  # nothing was done
        for generation in (0, 3, "2"):
            try:
                vllm.install(generation=generation)
            except ValueError as error:
                assert f"generation: expected 1 or 2, or None, got {generation!r}" in str(error)
            else:
                raise AssertionError
        """)
    )


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_in_a_compiled_function(backend: str) -> None:
    run(f"""
        vllm.install()
        def step(host, hot, ids, rows, counts):
            ops.hisparse_gather_compact(host, hot, ids, rows, counts)
            return hot + 1

        host, hot = torch.arange(64).view(4, 16), torch.zeros(1, 4, 16, dtype=torch.int64)
        one = torch.ones(1, 1, dtype=torch.int32)
        got = torch.compile(step, backend={backend!r}, fullgraph=True)(host, hot, one, one, one[0])
        assert torch.equal(hot[0, 1], host[1]) and torch.equal(got, hot + 1)
    """)
