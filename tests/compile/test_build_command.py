"""`hotplan build`: which modules, where to, what it prints, and what it says of errors."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from compile_support import CountingCompiler, Family
from test_families import cuda_missing

import hotplan.jit
from hotplan.cli.main import main
from hotplan.jit import key, loader, prebuild


@pytest.fixture(autouse=True)
def a_machine_without_gpu(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key, "source_root", lambda: family.root)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["build", *map(str, arguments)])


def test_into_the_cache_and_again(cache_dir: Path, compiler: CountingCompiler) -> None:
    result = run("--no-cuda", "--json")
    assert result.exit_code == 0, result.output
    assert re.search(r"^\[1/1\] fake \(cpu\): \d+\.\d s, 0\.0 MB$", result.stderr, re.MULTILINE)
    assert f"1 of 1 modules in {cache_dir}" in result.stderr
    found = json.loads(result.stdout)
    (module,) = found["modules"]
    assert Path(module["path"]).parents[1] == cache_dir
    assert module["compiled_s"] > 0
    assert found["manifest"] is None
    assert hotplan.jit.load("fake", "cpu").answer() == 42
    assert "[1/1] fake (cpu): was there, 0.0 MB" in run("--no-cuda").stderr
    assert compiler.compiles() == 1


def test_into_a_directory_that_is_then_shipped(
    tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOTPLAN_STRICT", "1")  # an explicit build is no surprise
    result = run("--no-cuda", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    index = json.loads((tmp_path / "out/manifest.json").read_text())
    assert [module["family"] for module in index["modules"]] == ["fake"]
    assert not cache_dir.exists()
    monkeypatch.setenv("HOTPLAN_PREBUILT_DIR", str(tmp_path / "out"))
    assert hotplan.jit.load("fake", "cpu").answer() == 42


@pytest.mark.skipif(cuda_missing(), reason="no CUDA toolkit")
def test_one_cuda_module_for_all_architectures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run("--arch", "10.0a,9.0a", "--out", tmp_path / "out", "--report")
    assert result.exit_code == 0, result.output
    assert "fake (cuda 9.0a 10.0a): " in result.stderr
    assert re.search(r"^nothing\(?\)? +0 +\d+ +\d+$", result.stdout, re.MULTILINE), result.stdout
    assert "1 kernels; no spills" in result.stdout
    names = {"cpu": ("answer", 42), "cuda": ("answer", 43)}
    monkeypatch.setenv("HOTPLAN_PREBUILT_DIR", str(tmp_path / "out"))
    monkeypatch.setenv("HOTPLAN_STRICT", "1")
    monkeypatch.setenv("HOTPLAN_CUDA_ARCHS", "9.0a")
    for backend, (function, value) in names.items():
        assert hotplan.jit.load("fake", backend).get_function(function)() == value


def test_families_and_order(family: Family) -> None:
    cuda, cpu = "cuda", "cpu"
    wanted = prebuild.modules(["a", "b"], ("9.0a",), cpu=True)
    assert [(one.family, one.backend) for one in wanted] == [("a", cuda), ("b", cuda), ("a", cpu), ("b", cpu)]
    assert [one.archs for one in wanted] == [("9.0a",), ("9.0a",), (), ()]
    assert prebuild.modules(["a"], (), cpu=False) == []


def test_an_error_of_one_module_does_not_stop_the_others(family: Family, tmp_path: Path) -> None:
    for unit in ("entry.cpp", "cpu.cpp"):
        text = (family.root / "csrc/fake" / unit).read_text()
        family.write(f"csrc/twin/{unit}", text)
    family.write("csrc/fake/cpu.cpp", "#error not this one\n")
    result = run("--no-cuda", "--out", tmp_path / "out", "--jobs", 2, "--json")
    assert result.exit_code == 1
    assert "[2/2]" in result.stderr
    assert "fake (cpu): failed" in result.stderr
    assert "1 of 2 modules in" in result.stderr
    assert "Error: fake (cpu): compiling fake (cpu) failed; the full log is in" in result.stderr
    assert "Traceback" not in result.stderr
    fake, twin = json.loads(result.stdout)["modules"]
    assert "not this one" in fake["error"]
    assert Path(twin["path"]).exists()
    index = json.loads((tmp_path / "out/manifest.json").read_text())
    assert [module["family"] for module in index["modules"]] == ["twin"]


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ([], 2, "no GPU is visible to torch"),
        (["--arch", "90"], 1, "--arch: expected architectures like 9.0a,10.0a, got '90'"),
        (["--family", "fake,none"], 2, "--family: expected some of fake, got 'fake,none'"),
        (["--family", ","], 2, "--family: expected some of fake"),
        (["--no-cpu", "--no-cuda"], 2, "leave nothing to build"),
        (["--no-cuda", "--out", "/dev/null/x"], 1, "Error: fake (cpu): [Errno 20]"),
    ],
)
def test_bad_options(options: list[str], code: int, message: str) -> None:
    result = run(*options)
    assert result.exit_code == code, result.output
    assert message in result.output
    assert "Traceback" not in result.output


def test_the_default_architectures_are_those_of_load(monkeypatch: pytest.MonkeyPatch,
                                                     make_toolkit: Callable[..., Path]) -> None:  # fmt: skip
    seen: list[prebuild.Module] = []

    def build_all(wanted: list[prebuild.Module], *args: object) -> list[prebuild.Outcome]:
        seen.extend(wanted)
        return []

    monkeypatch.setattr(prebuild, "build_all", build_all)
    monkeypatch.setenv("HOTPLAN_CUDA_ARCHS", "10.0a,9.0a")
    assert run("--no-cpu").exit_code == 0
    assert [one.archs for one in seen] == [("9.0a", "10.0a")]


def test_a_command_for_a_directory_with_spaces_is_quoted(family: Family) -> None:
    recipe = key.make_recipe("fake", "cuda", None, ("9.0a", "10.0a"))
    command = f"{sys.executable} -m hotplan build --family fake --no-cpu --arch 9.0a,10.0a --out '/my cache'"
    assert loader.build_command(recipe, Path("/my cache")) == command


class Deadly(prebuild.Module):
    """Ends the process that receives it, as the kernel may where memory is short."""

    def __reduce__(self) -> tuple[Callable[[int], object], tuple[int]]:
        return os._exit, (9,)


def test_a_dead_worker_is_an_error_of_its_module(tmp_path: Path) -> None:
    ended: list[prebuild.Outcome] = []
    outcomes = prebuild.build_all([Deadly("fake", "cpu", ())], tmp_path / "out", 1, ended.append)
    assert outcomes == ended
    assert "terminated abruptly" in outcomes[0].error
    assert outcomes[0].path == ""
