"""The benchmark runs from end to end without a GPU, and its numbers mean what they say."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import bench_compress
import bench_hisparse
import hotplan
import peers
import report
import timing

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmark"


def test_cpu_run_writes_checked_rows_and_report_prints_them(tmp_path):
    out = tmp_path / "run.jsonl"
    run = subprocess.run(
        [
            sys.executable,
            str(BENCHMARK / "bench_compress.py"),
            "--device=cpu",
            "--quick",
            "--sections=prefill-graph,prefill-wall,decode",
            f"--out={out}",
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    meta, *rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert (meta["kind"], meta["benchmark"], meta["peer"]) == ("meta", "bench_compress", None)
    assert meta["versions"]["torch"] == torch.__version__
    assert str(tmp_path) not in out.read_text(), "a machine's paths do not belong into saved results"
    by_key = {(r["case"], r["plans"], r["metric"]): r for r in rows if "CPU" in r["section"]}
    assert set(by_key) == {("1 x 8192", plans, "wall") for plans in ("c4", "c128", "c4 + c128")}
    for row in rows:
        if row["metric"] == "wall":
            assert row["checked"] == "reference"
            assert 0 < row["ours"]["min"] <= row["ours"]["median"]
        else:
            assert (row["ours"], row["checked"]) == (None, None)
    assert any("Decode" in row["section"] for row in rows)

    shown = subprocess.run(
        [sys.executable, str(BENCHMARK / "report.py"), str(out)], capture_output=True, text=True, timeout=60
    )
    assert shown.returncode == 0, shown.stderr
    assert "### Prefill plans, lengths on the CPU" in shown.stdout
    line = next(line for line in shown.stdout.splitlines() if line.startswith("| 1 x 8192 | c4 + c128 | - |"))
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
    command = [sys.executable, str(BENCHMARK / "bench_hisparse.py"), "--device=cpu", "--quick", f"--out={out}"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    meta, *rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert (meta["benchmark"], meta["peer"], meta["top_k"]) == ("bench_hisparse", None, 2048)
    assert str(tmp_path) not in out.read_text(), "a machine's paths do not belong into saved results"
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
    rate = meta["gather_gb_per_s"]["576"]
    bytes_us = by_key["1, 100 %", "host rows", "bytes at the ceiling"]["ours"]["median"]
    assert bytes_us == pytest.approx(2048 * 576 / rate / 1e3, rel=0.01)
    clustered = [r for r in rows if r["plans"] == "multiples of 4096"]
    assert [r["checked"] for r in clustered] == ["reference", "reference"]

    shown = subprocess.run(
        [sys.executable, str(BENCHMARK / "report.py"), str(out)], capture_output=True, text=True, timeout=60
    )
    assert shown.returncode == 0, shown.stderr
    assert "| requests, misses | ids |" in shown.stdout
    assert "### Subtracted: the reset of the state" in shown.stdout


@pytest.mark.parametrize(
    ("operator", "fault", "message"),
    [
        ("swap_in", lambda a: a[1].view(-1)[a[4][0, 7] * 576 + 13 :][:1].bitwise_xor_(1), "entry 7: hot row"),
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
    pool = bench_hisparse.Pool(1 << 25, pinned=False)
    bench = bench_hisparse.Bench(torch.device("cpu"), pool, None, row_bytes=[576], quick=True)
    case = bench_hisparse.Case(1, 10)
    timed = bench.swap_in(case, 576)
    timed.spoil(0)
    timed.calls[0]()
    timed.check(0, {"hot": bench.steps(case)[0].hot})
    timed.spoil(0)
    monkeypatch.setattr(bench_hisparse.hisparse, "swap_in", bench_hisparse.hisparse.resolve_residency)
    timed.calls[0]()
    with pytest.raises(AssertionError, match="does not hold host row"):
        timed.check(0, {"hot": bench.steps(case)[0].hot})


def test_hisparse_inputs_of_both_sides_name_the_same_rows():
    case = bench_hisparse.Case(3, 10)
    requests = bench_hisparse.random_requests(case, 64 * 300, 0, torch.device("cpu"))
    step = bench_hisparse.Step(requests, case.misses, 0)
    for ids, cached, missing in zip(step.ids.tolist(), requests.cached.tolist(), step.missing, strict=True):
        assert len(set(ids)) == len(ids) == 2048
        assert 64 <= min(ids) <= max(ids) < 64 * 300
        assert [i not in set(cached) for i in ids] == missing.tolist()
    assert step.missing.sum(dim=1).tolist() == [205] * 3
    theirs = requests.theirs
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
    left = bench_hisparse.without(stats, 2.5)
    assert (left.median, left.min, left.max, left.calls) == (5.5, 4.5, 6.5, 10)
    with pytest.raises(AssertionError, match="without the call"):
        bench_hisparse.without(stats, 8.0)
    case = bench_hisparse.Case(1, 100, 35)
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
