"""The README's Python runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import torch

README = Path(__file__).resolve().parents[2] / "README.md"


def test_examples_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) == 3
    scope: dict = {}
    exec("\n".join(blocks), scope)
    assert set(scope["plans"]) == {4, 128}
    assert scope["rows"].shape == (1, 64)
    for layer, hot in enumerate(scope["hot_rows"]):
        assert torch.equal(hot.view(-1, 656)[scope["rows"][0].long()], scope["host_pool"][layer, :64])
    held = scope["found"] >= 0
    assert held.tolist() == [[True, True, True, False], [True] * 4]
    tokens = scope["top_k"] + torch.tensor([[0], [64]])
    assert torch.equal(scope["held_rows"], scope["host"][tokens[held].long()])
