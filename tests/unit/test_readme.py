"""The Python of the README and of the quickstart runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


def run_blocks(page: str, count: int) -> dict:
    """What the page's Python blocks, read as one script, leave behind."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert len(blocks) == count
    scope: dict = {}
    exec("\n".join(blocks), scope)
    return scope


def test_readme() -> None:
    scope = run_blocks("README.md", 3)
    assert set(scope["plans"]) == {4, 128}
    assert scope["rows"].shape == (1, 64)
    for layer, hot in enumerate(scope["hot_rows"]):
        assert torch.equal(hot.view(-1, 656)[scope["rows"][0].long()], scope["host_pool"][layer, :64])
    held = scope["found"] >= 0
    assert held.tolist() == [[True, True, True, False], [True] * 4]
    tokens = scope["top_k"] + torch.tensor([[0], [64]])
    assert torch.equal(scope["held_rows"], scope["host"][tokens[held].long()])


def test_quickstart(capsys: pytest.CaptureFixture[str]) -> None:
    scope = run_blocks("docs/quickstart.md", 6)  # it asserts what it says
    assert scope["decode"][128].shape == (2, 16)
    said = re.findall(r"print\(.*\)  # (HitStats.*)", (ROOT / "docs/quickstart.md").read_text())
    assert said == [capsys.readouterr().out.splitlines()[-1]]
