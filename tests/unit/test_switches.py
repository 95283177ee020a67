"""What switches of the environment mean, and what `check` may be."""

from __future__ import annotations

import pytest
import torch

import hotplan
from hotplan import reference
from hotplan._switches import is_on, wants_check


@pytest.mark.parametrize("value", ["", "0", "false", "False", "no", "OFF"])
def test_off(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTPLAN_CHECK", value)
    assert not is_on("HOTPLAN_CHECK")
    assert not wants_check(None)
    assert wants_check(True)


@pytest.mark.parametrize("value", ["1", "true", "yes", "on"])
def test_on(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTPLAN_CHECK", value)
    assert is_on("HOTPLAN_CHECK")
    assert wants_check(None)
    assert not wants_check(False)


def test_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOTPLAN_CHECK", raising=False)
    assert not is_on("HOTPLAN_CHECK")


@pytest.mark.parametrize("module", [hotplan, reference])
def test_check_is_no_number(module: object) -> None:
    rid = torch.tensor([0])
    with pytest.raises(TypeError, match=r"check: expected True, False or None, got 1"):
        module.plan_compress_decode_legacy(rid, rid + 1, compress_ratio=4, check=1)
