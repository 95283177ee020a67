"""The benchmark runs from end to end without a GPU, and its numbers mean what they say."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import bench_compress
import bench_device_buffer
import bench_hisparse
import hot_inputs
import hot_measure
import hotplan
import peers
import report
import timing

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmark"


def program(name: str, *arguments: str) -> str:
    """What a benchmark's program prints, as users run it."""
    command = [sys.executable, str(BENCHMARK / f"{name}.py"), *arguments]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    return run.stdout


def run_on_cpu(name: str, out: Path, *arguments: str) -> list[dict]:
    """The records of a quick run without a GPU."""
    program(name, "--device=cpu", "--quick", f"--out={out}", *arguments)
    text = out.read_text()
    assert str(out.parent) not in text, "a machine's paths do not belong into saved results"
    return [json.loads(line) for line in text.splitlines()]


def test_cpu_run_writes_checked_rows_and_report_prints_them(tmp_path):
    out = tmp_path / "run.jsonl"
    meta, *rows = run_on_cpu("bench_compress", out, "--sections=prefill-graph,prefill-wall,decode")
    assert (meta["kind"], meta["benchmark"], meta["peer"]) == ("meta", "bench_compress", None)
    assert meta["versions"]["torch"] == torch.__version__
    by_key = {(r["case"], r["plans"], r["metric"]): r for r in rows if "CPU" in r["section"]}
    assert set(by_key) == {("1 x 8192", plans, "wall") for plans in ("c4", "c128", "c4 + c128")}
    for row in rows:
        if row["metric"] == "wall":
            assert row["checked"] == "reference"
            assert 0 < row["ours"]["min"] <= row["ours"]["median"]
        else:
            assert (row["ours"], row["checked"]) == (None, None)
    assert any("Decode" in row["section"] for row in rows)

    shown = program("report", str(out))
    assert "### Prefill plans, lengths on the CPU" in shown
    line = next(line for line in shown.splitlines() if line.startswith("| 1 x 8192 | c4 + c128 | - |"))
    assert line.endswith("| reference |")


def test_wrong_result_fails_the_run(monkeypatch, capsys, tmp_path):
    monkeypatch.delenv("HOTPLAN_CHECK", raising=False)  # main() drops it; this puts it back after the test
    right = hotplan.plan_step_decode

    def wrong(*args, **kwargs):
        plans = right(*args, **kwargs)
        plans[4][0, 5] ^= 1
        return plans

    monkeypatch.setattr(hotplan, "plan_step_decode", wrong)
    out = tmp_path / "run.jsonl"
    status = bench_compress.main(["--device=cpu", "--quick", "--sections=decode", f"--out={out}"])
    assert status == 1
    _, rows = report.read_results(out)
    measured = [row for row in rows if row["metric"] == "wall"]
    assert [report.is_wrong(row) for row in measured] == [True, True]
    assert "plan 0, row 0" in measured[0]["checked"]
    assert "WRONG" in capsys.readouterr().err


def test_row_ratio_goal_and_check():
    stats = {"median": 4.0, "min": 3.9, "p90": 4.2}
    row = report.make_row("s", "c", "p", "graph", stats, {"median": 8.0}, peer_name="SGLang", goal=4)
    assert (row["ratio"], row["met"]) == (0.5, True)
    assert report.make_row("s", "c", "p", "graph", stats, goal=3.9)["met"] is False
    assert report.make_row("s", "c", "p", "graph", stats, goal=5, checked="WRONG: row 3")["met"] is False
    assert report.make_row("s", "c", "p", "graph", None, goal=5)["met"] is None


def test_tables_pivot_metrics_and_show_refusals():
    stats = {"median": 4.0, "min": 3.9, "p90": 4.2}
    rows = [
        report.make_row("s", "a", "c4", "graph", stats, {"median": 160.0}, peer_name="SGLang", goal=5),
        report.make_row("s", "a", "c4", "wall", {"median": 250.0}),
        report.make_row("s", "b", "c4", "graph", stats, peer_name="SGLang", peer_note="refused", goal=3),
    ]
    ((title, header, body),) = report.tables(rows)
    assert title == "s"
    assert header == [
        "case",
        "plans",
        "graph us [min..p90]",
        "SGLang",
        "ratio",
        "goal",
        "met",
        "wall us [min..p90]",
    ]
    assert body == [
        ["a", "c4", "4.00 [3.90..4.20]", "160", "0.025", "5", "met", "250"],
        ["b", "c4", "4.00 [3.90..4.20]", "refused", "-", "3", "missed", "-"],
    ]


def test_results_round_trip_and_bad_line(tmp_path):
    path = tmp_path / "deep" / "r.jsonl"
    rows = [report.make_row("s", "a", "c4", "graph", {"median": 1.0})]
    report.write_results(path, rows, {"benchmark": "x"})
    meta, read = report.read_results(path)
    assert (meta, read) == ({"benchmark": "x", "kind": "meta"}, rows)
    path.write_text(path.read_text() + '{"kind": "other"}\n')
    with pytest.raises(ValueError, match=r"r\.jsonl:3: kind: expected 'meta' or 'row', got 'other'"):
        report.read_results(path)


def test_wall_time_rotates_and_reports_microseconds():
    seen: list[int] = []
    calls = [lambda: (seen.append(0), time.sleep(0.002)), lambda: (seen.append(1), time.sleep(0.002))]
    stats = timing.wall_time(calls, calls=4, repeats=3, warm_up=2)
    assert seen == [0, 1] * 7
    assert (stats.calls, stats.repeats) == (4, 3)
    assert 2000 <= stats.min <= stats.median <= stats.max
    with pytest.raises(ValueError, match="samples"):
        timing.Stats.of([], 1)


def test_sglang_is_found_without_importing_it(tmp_path, monkeypatch):
    root = tmp_path / "site"
    header = root / "sglang/kernels/jit/csrc/deepseek_v4/c_plan.cuh"
    header.parent.mkdir(parents=True)
    header.write_text("// stands for the peer's header")
    (root / "sglang/__init__.py").write_text("raise ImportError('must not be imported')")
    (root / "sglang-9.9.9.dist-info").mkdir()
    monkeypatch.delenv(peers.ENV_SGLANG, raising=False)
    for given in (root, root / "sglang", root / "sglang/kernels/jit"):
        assert peers.sglang_root(given) == root
    assert peers.sglang_version(root).startswith("9.9.9 (c_plan.cuh ")
    other = root / "sglang/kernels/jit/csrc" / peers.HISPARSE_HEADER
    other.parent.mkdir(parents=True)
    other.write_text("// stands for another header")
    assert peers.sglang_version(root, peers.HISPARSE_HEADER).startswith("9.9.9 (hisparse.cuh ")
    monkeypatch.setenv(peers.ENV_SGLANG, str(root))
    assert peers.sglang_root() == root
    monkeypatch.delenv(peers.ENV_SGLANG)
    monkeypatch.syspath_prepend(str(root))
    assert peers.sglang_root() == root
    assert "sglang" not in sys.modules
    with pytest.raises(ValueError, match="sglang/kernels/jit"):
        peers.sglang_root(tmp_path)


def test_peer_rows_are_compared_in_any_order_but_all_of_them():
    plan = torch.arange(64, dtype=torch.uint8).view(4, 16)
    bench_compress._same_rows([plan.flip(0)], [plan], "set 0")
    doubled = plan[[0, 1, 2, 2]]
    with pytest.raises(AssertionError, match="plan 0"):
        bench_compress._same_rows([doubled], [plan], "set 0")
    with pytest.raises(AssertionError, match="shapes"):
        bench_compress._same_rows([plan[:3]], [plan], "set 0")


# ------------------------------------------------------------------------------------------------------------- HiSparse


def test_hisparse_cpu_run_writes_checked_rows_and_report_prints_them(tmp_path):
    out = tmp_path / "run.jsonl"
    meta, *rows = run_on_cpu("bench_hisparse", out)
    assert (meta["benchmark"], meta["peer"], meta["top_k"]) == ("bench_hisparse", None, 2048)
    by_key = {(r["case"], r["plans"], r["metric"]): r for r in rows if r["section"].startswith("576-byte rows")}
    metrics = ("swap_in", "resolve", "resolve + gather_compact", "bytes at the ceiling")
    assert set(by_key) == {
        *((case, "host rows", metric) for case in ("1, 2 %", "1, 100 %") for metric in metrics),
        *(("1, 2 %", "positions and pages", metric) for metric in metrics[:2]),
    }
    for (_, _, metric), row in by_key.items():
        if metric != "bytes at the ceiling":
            assert row["checked"] == ("reference" if metric == "resolve" else "reference, bytes")
            assert row["reset_us"] > 0
            assert row["ours"]["median"] > 0
    rate = meta["gather_gb_per_s"]["576"]["1"]
    bytes_us = by_key["1, 100 %", "host rows", "bytes at the ceiling"]["ours"]["median"]
    assert bytes_us == pytest.approx(2048 * 576 / rate / 1e3, rel=0.01)
    gathers = [r["plans"] for r in rows if r["section"] == "Gather ceiling"]
    assert gathers == ["2048, batch of 1"] * 2, "its time and its rate, for the one batch of the table"
    clustered = [r for r in rows if r["plans"] == "multiples of 4096"]
    assert [r["checked"] for r in clustered] == ["reference", "reference"]

    shown = program("report", str(out))
    assert "| requests, misses | ids |" in shown
    assert "### Subtracted: the reset of the state" in shown


@pytest.mark.parametrize(
    ("operator", "fault", "message"),
    [
        ("swap_in", lambda a: a[1].view(-1)[a[4][0, 7] * 576 + 13 :][:1].fill_(1), "entry 7: hot row"),
        ("swap_in", lambda a: a[6][0, :2].copy_(a[6][0, :2].flip(0)), "lru[0, 0]"),
        ("resolve_residency", lambda a: a[4][0, 3:4].fill_(-1), "hot[0, 3]"),
    ],
)
def test_hisparse_wrong_result_fails_the_run(monkeypatch, capsys, tmp_path, operator, fault, message):
    monkeypatch.delenv("HOTPLAN_CHECK", raising=False)
    right = getattr(bench_hisparse.hisparse, operator)

    def wrong(*args, **kwargs):
        right(*args, **kwargs)
        fault(args)

    monkeypatch.setattr(bench_hisparse.hisparse, operator, wrong)
    out = tmp_path / "run.jsonl"
    arguments = ["--device=cpu", "--quick", "--sections=table", f"--out={out}"]
    assert bench_hisparse.main(arguments) == 1
    _, rows = report.read_results(out)
    metric = "swap_in" if operator == "swap_in" else "resolve"
    measured = [row for row in rows if row["metric"] == metric]
    assert [row["checked"].startswith("WRONG") for row in measured] == [True] * 3
    assert message in measured[0]["checked"]
    assert all(not report.is_wrong(row) for row in rows if not row["metric"].startswith(metric))
    assert "WRONG" in capsys.readouterr().err


def test_hisparse_a_copy_that_does_not_happen_is_found(monkeypatch):
    """The missing rows are overwritten after the calls that warm up, so their bytes do not pass for new ones."""
    pool = hot_inputs.Pool(1 << 25, pinned=False)
    bench = bench_hisparse.Bench(torch.device("cpu"), pool, None, row_bytes=[576], quick=True)
    case = hot_inputs.Case(1, 10)
    timed = bench.swap_in(case, 576)
    timed.prepare()
    timed.check(0, timed.whole(0))
    timed.prepare()
    monkeypatch.setattr(bench_hisparse.hisparse, "swap_in", bench_hisparse.hisparse.resolve_residency)
    with pytest.raises(AssertionError, match="does not hold host row"):
        timed.check(0, timed.whole(0))


def test_hisparse_inputs_of_both_sides_name_the_same_rows():
    case = hot_inputs.Case(3, 10)
    requests = hot_inputs.random_requests(case, 64 * 300, 0, torch.device("cpu"))
    step = hot_inputs.Step(requests, case.misses, 0)
    for ids, cached, missing in zip(step.ids.tolist(), requests.cached.tolist(), step.missing, strict=True):
        assert len(set(ids)) == len(ids) == 2048
        assert 64 <= min(ids) <= max(ids) < 64 * 300
        assert [i not in set(cached) for i in ids] == missing.tolist()
    assert step.missing.sum(dim=1).tolist() == [205] * 3
    theirs = requests.by_token
    assert torch.equal(theirs.host_locs.gather(1, step.positions.long()).int(), step.ids)
    held = theirs.tokens[:, : requests.hot_slots].long()
    assert torch.equal(theirs.host_locs.gather(1, held).int(), requests.dgi)
    assert torch.equal(theirs.lru, requests.lru)
    assert sorted(theirs.device_locs.flatten().tolist()) == list(range(3 * (4096 + 64)))
    requests.dgi.fill_(-7)
    requests.lru.fill_(-7)
    requests.state.reset()
    assert torch.equal(requests.dgi, requests.cached)
    assert torch.equal(requests.lru, requests.order)


def test_hisparse_subtraction_and_goals_of_other_row_sizes():
    stats = timing.Stats.of([7.0, 9.0, 8.0], 10)
    left = hot_measure.without(stats, 2.5)
    assert (left.median, left.min, left.max, left.calls) == (5.5, 4.5, 6.5, 10)
    with pytest.raises(AssertionError, match="without the call"):
        hot_measure.without(stats, 8.0)
    case = hot_inputs.Case(1, 100, 35)
    assert bench_hisparse.scaled_goal(35, case, 576, None) == 35
    assert bench_hisparse.scaled_goal(35, case, 1152, None) is None
    # 35 - 24.2 us of 576-byte rows + 46.4 us of 1152-byte rows
    assert bench_hisparse.scaled_goal(35, case, 1152, 50.9) == 57.1
    assert [c.goal for c in bench_hisparse.CASES if c.percent == 0] == [5, 7]


@pytest.mark.parametrize("arguments", [["--row-bytes=600"], ["--row-bytes=a"], ["--sections=none"], ["--pool-gib=0.1"]])
def test_hisparse_arguments_are_checked(arguments, capsys):
    with pytest.raises(SystemExit):
        bench_hisparse.parse(arguments)
    assert arguments[0].partition("=")[0] in capsys.readouterr().err


def test_hisparse_the_ceiling_is_measured_on_the_contexts_of_the_table(monkeypatch):
    bench = bench_hisparse.Bench(
        torch.device("cpu"), hot_inputs.Pool(1 << 25, pinned=False), None, row_bytes=[576], quick=True
    )
    lists = []
    right = bench_hisparse.hisparse.gather_compact
    monkeypatch.setattr(
        bench_hisparse.hisparse, "gather_compact", lambda *a: (lists.append((a[2], a[4].clone())), right(*a))
    )
    assert bench.rate(2, 576) > 0
    requests = bench.requests(hot_inputs.Case(2, 10))
    first = {ids.data_ptr(): (ids, counts) for ids, counts in lists}.values()
    assert len(first) == len(requests)
    for (ids, counts), of in zip(first, requests, strict=True):
        assert counts.tolist() == [2048, 2048]
        for row, pages in zip(ids.tolist(), of.source_table.tolist(), strict=True):
            assert len(set(row)) == 2048
            assert {i // 64 for i in row} <= set(pages)
    assert len(bench.rows) == 2
    bench.rate(2, 576)
    assert len(bench.rows) == 2, "measured once"


# -------------------------------------------------------------------------------------------------------- Device buffer


def test_device_buffer_cpu_run_writes_checked_rows_and_report_prints_them(tmp_path):
    out = tmp_path / "run.jsonl"
    meta, *rows = run_on_cpu("bench_device_buffer", out)
    assert (meta["benchmark"], meta["peer"], meta["full"]) == ("bench_device_buffer", None, False)
    resets = [r for r in rows if r["metric"] == "reset"]
    assert [r["plans"] for r in resets] == ["one step, 4160 slots", "hotplan, several steps, 4160 slots"]
    measured = [r for r in rows if r["metric"] == "wall"]
    assert [(r["case"], r["plans"], r["checked"]) for r in measured] == [
        ("1, 10 %", "576", "reference, bytes"),
        ("1, 10 %", "584, dsv4 pages", "reference, bytes"),
        ("1, 196", "576", "reference, bytes"),
        ("1, 784", "576", "reference, bytes"),
        ("8, 200 each", "576", "bytes"),
        ("8, 200 each", "584, dsv4 pages", "bytes"),
        ("256", "host to device", "bytes"),
        ("256", "device to host", "bytes"),
        ("4096", "int64", "mapping"),
        ("65536", "int64", "mapping"),
    ]
    assert all(r["ours"]["median"] > 0 for r in measured)
    assert [r["copied_bytes"] for r in measured[:3]] == [205 * 576, 205 * 584, 196 * 576]

    shown = program("report", str(out))
    assert "| requests, misses | bytes of an item |" in shown
    assert "| items of a layer | direction |" in shown


def _one_byte(pool, row, item_bytes=576):
    """No word of a pool has this byte set."""
    pool.view(-1)[int(row) * item_bytes + 13 :][:1].fill_(1)


@pytest.mark.parametrize(
    ("operator", "section", "fault", "message"),
    [
        ("load_cache_to_device_buffer_mla", "single", lambda a, k, r: _one_byte(a[5], a[6][0, 7]), "entry 7: hot row"),
        ("load_cache_to_device_buffer_mla", "single", lambda a, k, r: a[6][0, 3:4].fill_(-1), "out[0, 3]"),
        ("load_cache_to_device_buffer_mla", "single", lambda a, k, r: a[1][0, 3:4].fill_(-7), "tokens[0, 3]"),
        ("load_cache_to_device_buffer_dsv4_mla", "single", lambda a, k, r: a[9][0, :1].fill_(-7), "lru[0, 0]"),
        (
            "load_cache_to_device_buffer_spec_mla",
            "steps",
            lambda a, k, r: _one_byte(k["device_buffer"], k["top_k_device_locs"][0, 2, 5]),
            "does not hold host row",
        ),
        (
            "load_cache_to_device_buffer_spec_mla",
            "steps",
            lambda a, k, r: k["state"].cache_policy[1, 9:10].fill_(-7),
            "policy[0, 9]",
        ),
        (
            "load_cache_to_device_buffer_spec_mla",
            "steps",
            lambda a, k, r: k["state"].scratch_state[0, :1].fill_(3),
            "counts[0]: 3, wanted",
        ),
        (
            "copy_cache_planned_mla",
            "planned",
            lambda a, k, r: k["device_buffer"].view(-1)[100 * 576 :].fill_(0xA5),
            "does not hold host row",
        ),
        ("translate_padded_hisparse_locations", "translate", lambda a, k, r: r[5:6].fill_(-7), "out[5]: -7"),
    ],
)
def test_device_buffer_wrong_result_fails_the_run(monkeypatch, tmp_path, operator, section, fault, message):
    monkeypatch.delenv("HOTPLAN_CHECK", raising=False)
    right = getattr(bench_device_buffer.hisparse, operator)

    def wrong(*args, **kwargs):
        result = right(*args, **kwargs)
        fault(args, kwargs, result)
        return result

    monkeypatch.setattr(bench_device_buffer.hisparse, operator, wrong)
    out = tmp_path / "run.jsonl"
    assert bench_device_buffer.main(["--device=cpu", "--quick", f"--sections={section}", f"--out={out}"]) == 1
    _, rows = report.read_results(out)
    broken = [row for row in rows if report.is_wrong(row)]
    assert broken
    assert all(message in row["checked"] for row in broken)
    if operator.startswith("load_cache") and section == "single":
        assert len(broken) == 1, "the other layout has an operator of its own"


@pytest.mark.parametrize("to_device", [True, False])
def test_device_buffer_a_transfer_that_does_not_happen_is_found(to_device):
    pool = hot_inputs.Pool(1 << 26, pinned=False)
    options = bench_device_buffer.parse(["--device=cpu", "--quick"])
    bench = bench_device_buffer.Bench(torch.device("cpu"), pool, None, options=options)
    timed = bench.transfer(bench_device_buffer.hisparse, 100, to_device=to_device)
    timed.prepare()
    timed.check(1, timed.whole(1))
    timed.prepare()
    with pytest.raises(AssertionError, match="set 1: layer 0: items differ"):
        timed.check(1, None)


@pytest.mark.parametrize("misses", [196, 784])
def test_device_buffer_steps_overlap_and_miss_what_they_say(misses):
    case = bench_device_buffer.StepsCase(3, misses)
    requests = bench_device_buffer.StepsRequests(case, 64 * 300, 0, torch.device("cpu"))
    for row in range(3):
        cached = set(requests.table[row, :4096].tolist())
        assert len({token % 8192 for token in requests.positions[row].tolist()}) == 4096 + misses
        steps = requests.tokens[row].tolist()
        assert all(len(set(step)) == 2048 for step in steps)
        asked = set().union(*steps)
        assert len(asked - cached) == misses
        assert len(asked) <= 4096, "SGLang's kernel takes another path where the steps' tokens do not fit"
        new = misses // 4
        assert len(set(steps[0]) - cached) == new
        for before, after in pairwise(steps):
            changed = [a for b, a in zip(before, after, strict=True) if a != b]
            assert len(changed) == 204
            assert len(set(changed) - cached) == new
        lengths = requests.seq_lens.view(3, 4)[row].tolist()
        assert max(asked) < min(lengths) - 64, "none is looked for in the page of the newest tokens"
        assert requests.host_locs[row, requests.tokens[row].flatten().long()].tolist() == requests.ids[row].tolist()
    rows = torch.cat([requests.device_locs, requests.scratch_locs], dim=1).flatten().tolist()
    assert sorted(rows) == list(range(3 * (4096 + 64 + 4096)))


def test_device_buffer_index_of_hot_tokens_is_the_one_that_a_look_up_finds():
    tokens = torch.randperm(8192)[:4096][None] + 8192
    index = peers.steps_index(tokens)
    assert index.shape == (1, 2, 8192)
    for slot, token in enumerate(tokens[0].tolist()):
        entry = int(index[0, 0, token * 2654435761 % 2**32 % 8192])
        assert (entry & 0xFFFFFFFF, entry >> 32) == (token, slot)
    assert int((index >= 0).sum()) == 4096
    sizes = peers.steps_sizes(3)
    assert sizes["cache_index"] == (3, 2, 8192)
    assert sizes["scratch_locs"] == (3, 4096)
    assert sizes["scratch_state"] == (4, 40960)


def test_device_buffer_default_run_is_a_part_of_the_full_one():
    default = bench_device_buffer.cases(bench_device_buffer.parse([]))
    full = bench_device_buffer.cases(bench_device_buffer.parse(["--full"]))
    assert len(full) == len(set(full)) == 4 * 5 * 5 * 2
    assert len(default) == len(set(default)) == 62
    assert set(default) < set(full)
    goals = {(case.requests, case.percent): case.goal for _, case in full if case.goal is not None}
    assert goals == hot_inputs.GOALS, "they are for 576 bytes and 4096 slots"
    on_cpu = bench_device_buffer.cases(bench_device_buffer.parse(["--device=cpu", "--full"]))
    assert {(layout.item_bytes, case.requests) for layout, case in on_cpu} == {(576, 1), (576, 8), (584, 1), (584, 8)}


class _Built:
    """Stands for a built library: every exported function notes its calls."""

    arch = "9.0a"

    def __init__(self, exported):
        self.exported, self.calls = exported, []

    def load(self):
        return self

    def get_function(self, name):
        if name not in self.exported:
            raise AttributeError(name)
        return lambda *a: self.calls.append((name, a))


_WRAPPERS = """
from sglang.kernels.jit.utils import cache_once, is_arch_support_pdl, load_jit, make_cpp_args

class HiSparseSpecState: ...

@cache_once
def _module(threads):
    arguments = make_cpp_args(threads, True, is_arch_support_pdl(), False)
    wrappers = [("copy", f"copy_cache_planned<{arguments}>")]
    return load_jit("a_name", *arguments, cuda_files=["a.cuh"], cuda_wrappers=wrappers)

def copy_cache_planned_mla(x, threads=1024):
    _module(threads).copy(x)

load_cache_to_device_buffer_mla = load_cache_to_device_buffer_dsv4_mla = None
load_cache_to_device_buffer_spec_mla = transfer_cache_dsv4_mla = None
"""


def test_sglang_wrappers_run_without_sglang_on_what_was_built(tmp_path):
    with pytest.raises(RuntimeError, match="ops/kvcache"):
        peers.SGLangDeviceBuffer(_Built(()), tmp_path)
    assert "sglang.kernels.jit.utils" not in sys.modules
    wrappers = tmp_path / "sglang/kernels/ops/kvcache/hisparse.py"
    wrappers.parent.mkdir(parents=True)
    wrappers.write_text(_WRAPPERS)
    wrappers.with_name("hisparse_slot_mapping.py").write_text("import a_triton_that_is_not_there")
    built = _Built({"copy_cache_planned_1024_true_true_false"})
    peer = peers.SGLangDeviceBuffer(built, tmp_path)
    assert not {name for name in sys.modules if name.split(".")[0] == "sglang"}
    assert peer.translate_padded_hisparse_locations is None
    peer.copy_cache_planned_mla(7)
    peer.copy_cache_planned_mla(8)
    assert built.calls == [("copy_cache_planned_1024_true_true_false", (x,)) for x in (7, 8)]
    with pytest.raises(RuntimeError, match="not built: copy_cache_planned<512, true, true, false>"):
        peer.copy_cache_planned_mla(7, 512)


@pytest.mark.parametrize("arguments", [["--sections=none"], ["--pool-gib=0.001"]])
def test_device_buffer_arguments_are_checked(arguments, capsys):
    with pytest.raises(SystemExit):
        bench_device_buffer.parse(arguments)
    assert arguments[0].partition("=")[0] in capsys.readouterr().err
