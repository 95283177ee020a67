"""What a checker says of the package, and of a caller who only sees what is installed."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hotplan

pytest.importorskip("mypy", reason="needs mypy, which is in hotplan[test]")

ROOT = Path(__file__).resolve().parents[2]
CALLER = Path(__file__).with_name("typed_caller.py")
MODULES = ("", ".hisparse", ".plans", ".reference", ".jit", ".integrations.sglang", ".integrations.vllm")


def mypy(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """mypy finds the package where an installed one would be: on this interpreter's path, outside of what it checks."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MYPY")}
    environment["PYTHONPATH"] = str(Path(hotplan.__file__).parents[1])
    command = [sys.executable, "-m", "mypy", f"--cache-dir={os.devnull}", *arguments]
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=300)


def test_the_package_is_clean() -> None:
    result = mypy(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "no issues found" in result.stdout


def test_a_caller_is_understood_and_mistakes_are_found(tmp_path: Path) -> None:
    expected = set()
    for number, line in enumerate(CALLER.read_text().splitlines(), 1):
        if marked := re.search(r"  # error: ([\w -]+)$", line):
            expected |= {(number, code) for code in marked[1].split()}
    assert len(expected) > 30
    result = mypy(tmp_path, "--strict", "--config-file=", str(CALLER))
    errors = re.findall(r"typed_caller\.py:(\d+): error: .*\[([\w-]+)\]$", result.stdout, re.MULTILINE)
    assert {(int(number), code) for number, code in errors} == expected, result.stdout + result.stderr
    assert f"Found {len(errors)} errors in 1 file" in result.stdout  # none elsewhere, none of another form


def test_the_caller_calls_everything() -> None:
    text = CALLER.read_text()
    for module in MODULES:
        for name in importlib.import_module(f"hotplan{module}").__all__:
            assert re.search(rf"\b{name}\b", text), (
                f"hotplan{module}.{name} is public, but {CALLER.name} does not use it"
            )
