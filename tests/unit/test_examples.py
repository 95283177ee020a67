"""The scripts of examples/ run as they stand, each in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import hotplan

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PACKAGE = Path(hotplan.__file__).parents[1]
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py"))

# What each prints among other things.
SAYS = {
    "plan_a_step.py": r"c128: 2 windows close, 8 tokens are kept for later[\s\S]*decode plan: 2 rows, 2 valid",
    "decode_with_hot_buffer.py": r"20 steps on \w+: \d+ hits, \d+ misses, hit rate [5-9]\d\.\d%",
    "cuda_graph.py": r"4 replays, equal to eager calls; [5-9]\d\.\d% hits",
    "replay_own_trace.py": r"6 requests in [\s\S]*\d+ plans equal the reference's[\s\S]*enough: \d+",
}
WITHOUT_GPU = {"cuda_graph.py": "^no CUDA device here, and a CUDA graph needs one: nothing done$"}


@pytest.mark.parametrize("name", SCRIPTS)
def test_example(name: str, tmp_path: Path) -> None:
    path = os.pathsep.join(filter(None, [str(PACKAGE), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, EXAMPLES / name],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    expected = SAYS[name] if torch.cuda.is_available() else WITHOUT_GPU.get(name, SAYS[name])
    assert re.search(expected, done.stdout, re.MULTILINE), done.stdout
    assert list(tmp_path.iterdir()) == []  # an example leaves nothing behind


def test_the_list_of_examples_is_complete() -> None:
    listed = re.findall(r"\]\((\w+\.py)\)", (EXAMPLES / "README.md").read_text())
    assert sorted(listed) == SCRIPTS == sorted(SAYS)
