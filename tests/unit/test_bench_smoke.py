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
