"""The plugin's own rules, without SGLang: which families, what goes to the original, what is said about it."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from hotplan.cli.doctor import doctor
from hotplan.integrations import sglang


@pytest.fixture(autouse=True)
def plugin(monkeypatch: pytest.MonkeyPatch) -> Any:
    plugin = sglang._Plugin()
    monkeypatch.setattr(sglang, "_plugin", plugin)
    return plugin


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.INFO, "hotplan.sglang")
    return lambda: [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize(
    ("value", "families"),
    [
        (None, ("compress", "hisparse")),
        ("", ("compress", "hisparse")),
        (" , ", ("compress", "hisparse")),
        ("compress", ("compress",)),
        ("Hisparse", ("hisparse",)),
        ("hisparse, compress", ("compress", "hisparse")),
        ("off", ()),
        (" OFF ", ()),
    ],
)
def test_families(value: str | None, families: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOTPLAN_SGLANG", raising=False)
    if value is not None:
        monkeypatch.setenv("HOTPLAN_SGLANG", value)
    assert sglang.enabled() == families


@pytest.mark.parametrize(
    ("value", "named"), [("hisprase", "hisprase"), ("compress,on", "on"), ("off,compress", "off"), ("1,0", "1, 0")]
)
def test_words_that_mean_nothing(value: str, named: str, plugin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTPLAN_SGLANG", value)
    message = f"HOTPLAN_SGLANG: expected compress and hisparse.*or off alone, got {named} in '{value}'"
    with pytest.raises(ValueError, match=message):
        sglang.enabled()
    with pytest.raises(ValueError, match=message):
        sglang.register()
    assert set(plugin.off) == set(sglang.FAMILIES)


def serve(length: int, *, mode: str = "plain") -> str:
    if not isinstance(length, int):
        raise TypeError(f"length: expected int, got {type(length).__name__}")
    if length < 0:
        raise ValueError(f"length: expected 0 or more, got {length}")
    if mode not in ("plain", "broken"):
        raise ValueError(f"mode: expected plain, got {mode!r}")
    if mode == "broken":
        raise RuntimeError("the kernel failed to launch")
    return f"hotplan {length}"


def original(*args: Any, **kwargs: Any) -> str:
    return f"SGLang {args} {kwargs}"


def test_what_is_refused_goes_to_the_original(warnings: Callable[[], list[str]]) -> None:
    hook = sglang._around("sglang.some.module.Plan.generate", serve)
    assert hook(original, 3) == "hotplan 3"
    assert not warnings()
    # A keyword of a newer SGLang.
    for _ in range(3):
        assert hook(original, 3, new_option=1) == "SGLang (3,) {'new_option': 1}"
    assert len(warnings()) == 1
    assert "SGLang's own Plan.generate serves this call" in warnings()[0]
    assert "'new_option'" in warnings()[0]
    # One warning for each argument, whatever the values are.
    for length in (-1, -2, "4"):
        assert hook(original, length) == f"SGLang ({length!r},) {{}}"
    assert len(warnings()) == 2
    assert warnings()[1].endswith("length: expected 0 or more, got -1")
    assert hook(original, 3, mode="other") == "SGLang (3,) {'mode': 'other'}"
    assert len(warnings()) == 3
    # The same reason at another target is said again.
    sglang._around("sglang.some.module.other", serve)(original, -1)
    assert len(warnings()) == 4
    assert hook(original, 4) == "hotplan 4"


def test_what_fails_does_not() -> None:
    with pytest.raises(RuntimeError, match="failed to launch"):
        sglang._around("sglang.some.module.other", serve)(original, 3, mode="broken")


def test_the_original_does_not_hide_its_error_behind_ours() -> None:
    def failing(*args: Any, **kwargs: Any) -> None:
        raise KeyError("upstream")

    with pytest.raises(KeyError) as caught:
        sglang._around("sglang.some.module.other", serve)(failing, -1)
    assert caught.value.__context__ is None


def test_several_steps_stay_with_who_began(warnings: Callable[[], list[str]], plugin: Any) -> None:
    hook = sglang._around_spec(serve)
    assert hook(original, 3) == "hotplan 3"
    with pytest.raises(RuntimeError, match=r"length: expected 0 or more, got -1; SGLang's own kernel cannot take over"):
        hook(original, -1)
    assert hook(original, 4) == "hotplan 4"
    assert not warnings()

    plugin.spec_owner = ""
    assert hook(original, -1) == "SGLang (-1,) {}"
    assert hook(original, 3) == "SGLang (3,) {}"
    assert len(warnings()) == 1


def test_without_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None)
    with pytest.raises(ModuleNotFoundError, match="SGLang is not installed"):
        sglang.status()
    result = CliRunner().invoke(doctor, ["--sglang"])
    assert result.exit_code == 1
    assert "SGLang is not installed" in result.output
    result = CliRunner().invoke(doctor, ["--sglang", "--json"])
    assert result.exit_code == 1
    assert '"ok": false' in result.output


def test_layers_of_a_wrapped_function() -> None:
    def hook() -> None: ...

    def wrap(function: Any, held: Any) -> Any:
        def wrapper() -> Any:
            return held, function

        wrapper.__wrapped__ = function
        return wrapper

    twice = wrap(wrap(original, hook), None)
    assert any(layer is hook for layer in sglang._layers(twice))
    assert original in list(sglang._layers(twice))
    assert not any(layer is hook for layer in sglang._layers(wrap(original, None)))
    loop = SimpleNamespace()
    loop.__wrapped__ = loop
    assert len(list(sglang._layers(loop))) == 1
