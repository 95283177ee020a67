"""The plugin in the real SGLang: loaded as SGLang loads it, called by SGLang's own names and callers, on the CPU."""

from __future__ import annotations

import importlib.util
import json
import os
import pkgutil
import subprocess
import sys
import textwrap
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import device_buffer_cases as db
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from strategies import affine_tables, load_golden, words

from hotplan import hisparse, reference
from hotplan.cli.doctor import doctor
from hotplan.integrations import sglang as plugin

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed", allow_module_level=True)

TARGETS = [target for targets in plugin._TARGETS.values() for target in targets]


@pytest.fixture(scope="module")
def server() -> SimpleNamespace:
    """SGLang's modules, imported before the plugins are loaded, as in a scheduler process."""
    os.environ.pop("HOTPLAN_SGLANG", None)
    import sglang.srt.layers.attention.dsv4.compressor_v2 as compressor
    import sglang.srt.managers.hisparse_coordinator as coordinator
    import sglang.srt.mem_cache.hisparse_memory_pool as device_pool
    import sglang.srt.mem_cache.memory_pool_host as host_pool
    from sglang.srt.plugins import load_plugins

    originals = {target: pkgutil.resolve_name(target) for target in TARGETS}
    load_plugins()
    return SimpleNamespace(
        compressor=compressor,
        coordinator=coordinator,
        device_pool=device_pool,
        host_pool=host_pool,
        originals=originals,
        Prefill=compressor.CompressorPrefillPlan,
        Decode=compressor.CompressorDecodePlan,
    )


# ----------------------------------------------------------------------------------------------------
# Hooks


def test_everything_is_served(server: SimpleNamespace) -> None:
    rows = plugin.status()
    assert [row.target for row in rows] == TARGETS
    assert [row for row in rows if not row.found or not row.served or row.why_not] == []


def test_names_that_were_imported_earlier_are_served_too(server: SimpleNamespace) -> None:
    for target in TARGETS:
        assert pkgutil.resolve_name(target) is not server.originals[target]
    name = "load_cache_to_device_buffer_mla"
    live = pkgutil.resolve_name(f"{plugin._HISPARSE}.{name}")
    assert getattr(server.coordinator, name) is live
    for module, name in (
        (server.coordinator, "load_cache_to_device_buffer_dsv4_mla"),
        (server.coordinator, "load_blocks_to_device_buffer_mha"),
        (server.coordinator, "copy_cache_planned_mla"),
        (server.coordinator, "load_cache_to_device_buffer_spec_mla"),
        (server.host_pool, "transfer_cache_dsv4_mla"),
        (server.device_pool, "translate_padded_hisparse_locations"),
    ):
        assert getattr(module, name).__wrapped__ in server.originals.values()


def test_a_reference_from_before_is_reported(server: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    target = f"{plugin._HISPARSE}.copy_cache_planned_mla"
    monkeypatch.setattr(server.coordinator, "copy_cache_planned_mla", server.originals[target])
    (row,) = [row for row in plugin.status() if not row.served]
    assert row.target == target
    assert row.why_not == "sglang.srt.managers.hisparse_coordinator still has the function from before"


def test_a_function_that_another_takes_over_is_reported(
    server: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = pkgutil.resolve_name(plugin._SLOT_MAPPING)
    monkeypatch.setattr(module, "translate_padded_hisparse_locations", lambda mapping, locations: locations)
    (row,) = [row for row in plugin.status() if not row.served]
    assert row.target.endswith("translate_padded_hisparse_locations")
    assert "another plugin took the function over" in row.why_not


def test_an_unknown_keyword_reaches_the_original(
    server: SimpleNamespace, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin._plugin, "refused", set())
    one = torch.ones(1, dtype=torch.int64)
    for _ in range(2):
        with pytest.raises(TypeError, match=r"CompressorDecodePlan\.generate_legacy.*'new_option'"):
            server.Decode.generate_legacy(4, one, one, new_option=1)
    assert sum("CompressorDecodePlan.generate_legacy serves" in r.getMessage() for r in caplog.records) == 1


# ----------------------------------------------------------------------------------------------------
# Compress plans


@pytest.mark.parametrize("number", range(60))
def test_recorded_plans(number: int, server: SimpleNamespace) -> None:
    c = load_golden("plans_a")[number]
    t = c["tables"]
    req_to_token, full_to_state = affine_tables(t["nreq"], t["width"], t["A"], t["B"], t["C"], t["F"])
    rid, seq, ext = (torch.tensor(c[k], dtype=torch.int64) for k in ("rid", "seq", "ext"))
    common = {
        "compress_ratio": c["ratio"], "req_pool_indices": rid, "req_to_token": req_to_token,
        "full_to_state": weakref.proxy(full_to_state), "swa_page_size": c["swa"], "ring_size": c["ring"],
        "use_req_ring": c["use_req_ring"], "seq_lens": seq,
    }  # fmt: skip
    plan = server.Prefill.generate(extend_lens=ext, num_q_tokens=c["num_q"], **common)
    assert type(plan) is server.Prefill
    assert not plan.is_decode
    assert plan.compress_ratio == c["ratio"]
    assert words(plan.plan_c) == c["compress"]
    assert words(plan.plan_w) == c["write"]
    assert plan.pin_buffer is None

    decode = server.Decode.generate(**common)
    assert type(decode) is server.Decode
    assert decode.is_decode
    assert words(decode.plan_d) == c["decode"]

    legacy = server.Prefill.generate_legacy(c["ratio"], rid, seq, ext, c["num_q"], torch.device("cpu"))
    assert type(legacy) is server.Prefill
    assert words(legacy.plan_c) == c["legacy_compress"]
    assert words(legacy.plan_w) == c["legacy_write"]
    assert words(server.Decode.generate_legacy(c["ratio"], rid, seq).plan_d) == c["legacy_decode"]

    padded = server.Prefill.generate(extend_lens=ext, num_q_tokens=c["num_q"], use_cuda_graph=True, **common)
    assert padded.plan_c.shape == (c["num_q"], 16)
    assert padded.plan_w.shape == (c["num_q"], 8)
    assert words(padded.plan_c)[: len(c["compress"])] == c["compress"]
    assert all(row == [-1, 0, -1, -1] for row in words(padded.plan_c)[len(c["compress"]) :])
    # As a graph's plan is renewed.
    again = server.Prefill.generate(extend_lens=ext, num_q_tokens=c["num_q"], use_cuda_graph=True, **common)
    padded.plan_c.zero_()
    padded.plan_w.zero_()
    padded.copy_(again)
    assert torch.equal(padded.plan_w, again.plan_w)
    assert torch.equal(padded.plan_c, again.plan_c)
    decode.copy_(decode)


@pytest.mark.parametrize("number", range(40))
def test_recorded_online_plans(number: int, server: SimpleNamespace) -> None:
    c = load_golden("online_a")[number]
    rid, seq, ext = (torch.tensor(c[k], dtype=torch.int64) for k in ("rid", "seq", "ext"))
    unused = torch.zeros(1, 1, dtype=torch.int32)
    plan = server.Prefill.generate_online(
        seq_lens=seq.to(torch.int32), extend_lens=ext.to(torch.int32), req_pool_indices=rid, req_to_token=unused,
        num_q_tokens=c["num_q"], state_slot_offset=c["offset"],
    )  # fmt: skip
    assert type(plan) is server.Prefill
    assert (plan.compress_ratio, words(plan.plan_c), words(plan.plan_w)) == (128, c["compress"], c["write"])
    decode = server.Decode.generate_online(seq, rid, unused, c["offset"])
    assert type(decode) is server.Decode
    assert (decode.compress_ratio, words(decode.plan_d)) == (128, c["decode"])


@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize("unified", [False, True])
def test_the_servers_own_caller(ratio: int, unified: bool, server: SimpleNamespace) -> None:
    mapping = torch.arange(4 * 600)
    pool = SimpleNamespace(
        swa_page_size=256,
        get_ring_size=lambda compress_ratio: {4: 16, 128: 256}[compress_ratio],
        _unified_kv=unified,
        full_to_swa_index_mapping=weakref.proxy(mapping),
    )
    req_to_token = torch.arange(4 * 600, dtype=torch.int32).view(4, 600)
    rid, seq, ext = torch.tensor([2, 1], dtype=torch.int32), [300, 40], [130, 40]
    common = {
        "compress_ratio": ratio, "token_to_kv_pool": pool, "req_to_token": req_to_token, "req_pool_indices": rid,
        "seq_lens": torch.tensor(seq, dtype=torch.int32),
    }  # fmt: skip
    options = {"compress_ratio": ratio, "swa_page_size": 256, "ring_size": {4: 16, 128: 256}[ratio]}
    options["use_req_ring"] = unified and ratio == 4
    tables = rid.long(), req_to_token, mapping
    got = server.compressor.create_paged_compressor_data(
        is_prefill=True, extend_lens=torch.tensor(ext), seq_lens_cpu=seq, extend_lens_cpu=ext, **common
    )
    expected = reference.plan_compress_prefill(
        *tables, torch.tensor(seq), torch.tensor(ext), num_q_tokens=170, **options
    )
    assert torch.equal(got.plan_c, expected.compress)
    assert torch.equal(got.plan_w, expected.write)
    got = server.compressor.create_paged_compressor_data(is_prefill=False, **common)
    assert torch.equal(got.plan_d, reference.plan_compress_decode(*tables, torch.tensor(seq), **options))


# ----------------------------------------------------------------------------------------------------
# HiSparse


@pytest.mark.parametrize("case", list(db.golden_cases()), ids=lambda c: f"K{c.top_k}H{c.hot_slots}bs{c.rows}")
def test_recorded_swap_ins(case: Any, server: SimpleNamespace) -> None:
    db.assert_recorded(db.Bench(case), server.coordinator)


@pytest.mark.parametrize("kind", db.KINDS)
def test_swap_ins_of_every_kind(kind: str, server: SimpleNamespace) -> None:
    case = db.make_case(kind, seed=7, top_k=6, hot_slots=32, rows=3, extra=4)
    rng = np.random.default_rng(7)
    bench, expected = db.Bench(case), db.Bench(case)
    for _ in range(4):
        step = db.random_step(case, rng, spread=0.7, padding=0.5)
        bench.run(server.coordinator, step)
        expected.run(hisparse, step)
        bench.assert_equal(expected)
        bench.assert_contract(step, clean=True)
        if kind != "blocks":
            bench.replay(server.coordinator)


def test_the_coordinators_own_calls(server: SimpleNamespace) -> None:
    """An anchor layer that records its plan, and a layer that replays it, by the methods that a forward calls."""
    case = db.make_case("linear", seed=8, top_k=8, hot_slots=24, rows=3)
    rng = np.random.default_rng(8)
    bench, expected = db.Bench(case), db.Bench(case)
    second_host, second_device = bench.host_pool(), bench.device_pool()
    coordinator = SimpleNamespace(
        _miss_src=torch.zeros(5, case.top_k, dtype=torch.int64),
        _miss_dst=torch.zeros(5, case.top_k, dtype=torch.int32),
        _miss_count=torch.zeros(5, dtype=torch.int32),
        top_k_device_locs_buffer=torch.full((5, case.top_k), -9, dtype=torch.int32),
        top_k=case.top_k,
        is_dsv4_hisparse=False,
        skip_io=False,
        req_device_buffer_tokens=bench.device_buffer_tokens[None],
        req_to_host_pool=bench.host_cache_locs,
        req_device_buffer_token_locs=bench.device_buffer_locs[None],
        mem_pool_host=SimpleNamespace(kv_buffer=[bench.host_pools[0], second_host]),
        mem_pool_device=SimpleNamespace(kv_buffer=[bench.device_pools[0], second_device]),
        lru_slots=bench.lru_slots[None],
        item_size_bytes=case.item_bytes,
        device_buffer_size=case.hot_slots,
        swap_in_block_size=960,
        num_real_reqs=bench.num_real_reqs,
        _prefetch_copy_blocks=4,
    )
    methods = server.coordinator.HiSparseCoordinator
    for _ in range(3):
        step = db.random_step(case, rng, spread=0.7, short=0.0)
        bench.prepare(step)
        expected.run(hisparse, step)
        arguments = bench.arguments(step)
        got = methods._run_swap_in_kernel(
            coordinator, arguments["req_pool_indices"], arguments["seq_lens"], arguments["top_k_tokens"], 0, True
        )
        assert torch.equal(got, expected.top_k_device_locs)
        bench.assert_equal(expected, names=bench.state_names)
        methods._run_copy_only_kernel(coordinator, case.rows, 1)
        for row in range(case.rows):
            count = int(coordinator._miss_count[row])
            assert count == int(expected.miss_count[row])
            src, dst = coordinator._miss_src[row, :count], coordinator._miss_dst[row, :count].long()
            assert torch.equal(second_device[dst], second_host[src])


def test_translation_and_transfer(server: SimpleNamespace) -> None:
    mapping, locations = torch.tensor([5, 9, 2]), torch.tensor([2, -1, 0, -3], dtype=torch.int32)
    assert server.device_pool.translate_padded_hisparse_locations(mapping, locations).tolist() == [2, -1, 5, -3]
    pools = torch.zeros(2, 1, db.PAGE_BYTES, dtype=torch.uint8)
    pools[0] = torch.arange(db.PAGE_BYTES) % 251
    src, dst = (torch.tensor([pool.data_ptr()], dtype=torch.uint64) for pool in pools)
    server.host_pool.transfer_cache_dsv4_mla(
        src_ptrs=src, dst_ptrs=dst, src_indices=torch.tensor([3]), dst_indices=torch.tensor([7])
    )
    assert torch.equal(pools[1, 0, 7 * 576 : 8 * 576], pools[0, 0, 3 * 576 : 4 * 576])


# ----------------------------------------------------------------------------------------------------
# Processes of their own


def run_python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **environment}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def diagnose(status: int, monkeypatch: pytest.MonkeyPatch, **environment: str) -> dict[str, Any]:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(doctor, ["--sglang", "--json"])
    assert result.exit_code == status, result.output
    found = json.loads(result.output)
    assert found["ok"] is (status == 0)
    return found


def test_off_leaves_sglang_alone() -> None:
    run_python(
        """
        import pkgutil
        from hotplan.integrations import sglang as plugin
        from sglang.srt.plugins import load_plugins
        from sglang.srt.plugins.hook_registry import HookRegistry

        targets = [target for targets in plugin._TARGETS.values() for target in targets]
        before = [pkgutil.resolve_name(target) for target in targets]
        load_plugins()
        assert [pkgutil.resolve_name(target) for target in targets] == before
        assert not HookRegistry._hooks
        for row in plugin.status():
            assert row.found and not row.served and row.why_not == "HOTPLAN_SGLANG=off", row
        """,
        HOTPLAN_SGLANG="off",
    )


def test_doctor_says_that_everything_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOTPLAN_SGLANG", raising=False)
    result = CliRunner().invoke(doctor, ["--sglang"])
    assert result.exit_code == 0, result.output
    assert "SGLang 0." in result.output
    assert result.output.count("hotplan") > len(TARGETS)
    assert "everything that is enabled is served by hotplan" in result.output


def test_doctor_for_one_family(monkeypatch: pytest.MonkeyPatch) -> None:
    found = diagnose(0, monkeypatch, HOTPLAN_SGLANG="compress")
    assert found["families"] == ["compress"]
    for row in found["targets"]:
        assert row["served"] is (row["family"] == "compress")
        assert row["why_not"] == ("" if row["served"] else "HOTPLAN_SGLANG=compress")


def test_doctor_for_a_wrong_word(monkeypatch: pytest.MonkeyPatch) -> None:
    found = diagnose(1, monkeypatch, HOTPLAN_SGLANG="hisprase")
    assert all("got hisprase in 'hisprase'" in row["why_not"] for row in found["targets"])


def test_doctor_where_the_plugin_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    found = diagnose(1, monkeypatch, SGLANG_PLUGINS="other,third")
    assert {row["why_not"] for row in found["targets"]} == {"SGLANG_PLUGINS=other,third leaves hotplan out"}


def test_doctor_where_nothing_can_be_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = diagnose(1, monkeypatch, HOTPLAN_STRICT="1", HOTPLAN_CACHE_DIR=str(tmp_path))
    for row in found["targets"]:
        assert row["found"]
        assert not row["served"]
        assert "HOTPLAN_STRICT is set" in row["why_not"]
    for family in ("compress", "hisparse"):
        assert found["log"].count(f"SGLang keeps its own {family} functions") == 1


def test_doctor_beside_a_plugin_that_breaks_hooks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # A function that this SGLang does not have, and a target whose hooks SGLang cannot apply.
    (tmp_path / "breaker.py").write_text(
        textwrap.dedent("""
        from hotplan.integrations import sglang as plugin

        def register():
            import importlib
            from sglang.srt.plugins.hook_registry import HookRegistry

            del importlib.import_module(plugin._HISPARSE).copy_cache_planned_mla
            HookRegistry._hooks[f"{plugin._COMPRESS}.CompressorPrefillPlan.generate"].append(("odd", print, None))
        """)
    )
    info = tmp_path / "breaker-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: breaker\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nbreaker = breaker:register\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    found = diagnose(1, monkeypatch, PYTHONPATH=path)
    wrong = {row["target"].rpartition(".")[2]: row for row in found["targets"] if not row["served"]}
    assert set(wrong) == {"generate", "copy_cache_planned_mla"}
    assert "SGLang did not apply the hook" in wrong["generate"]["why_not"]
    assert not wrong["copy_cache_planned_mla"]["found"]
    assert "has no such function" in wrong["copy_cache_planned_mla"]["why_not"]
