"""The benchmark of first use runs from end to end without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import bench_jit


def test_cpu_run_writes_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    out = tmp_path / "run.jsonl"
    assert bench_jit.main(["--families=compress", "--repeats=1", "--no-peer", f"--out={out}"]) == 0
    meta, *rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert meta["benchmark"] == "bench_jit"
    assert meta["compilers"]["c++"]
    assert str(tmp_path) not in out.read_text()
    measured = {(row["case"], row["metric"]): row["ours"]["median"] for row in rows}
    compiled, first, again = (measured["compress", name] for name in ("compile", "first load", "load again"))
    assert compiled > first / 1e3 > again / 1e6 > 0
    assert measured["torch", "import"] > 0
    assert "Compile from nothing" in capsys.readouterr().out
