"""`hotplan doctor`: the findings, the remedies and the exit status."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from compile_support import Family, script

import hotplan.jit.key
from hotplan.cli import doctor as module
from hotplan.cli.doctor import doctor


@pytest.fixture(autouse=True)
def a_machine_without_gpu(family: Family, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hotplan.jit.key, "source_root", lambda: family.root)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(module, "_DRIVER", tmp_path / "driver")


def run(status: int) -> dict[str, Any]:
    result = CliRunner().invoke(doctor, ["--json"])
    assert result.exit_code == status, result.output
    found = json.loads(result.output)
    assert found["ok"] is (status == 0)
    # The table says the same.
    text = CliRunner().invoke(doctor, [])
    assert text.exit_code == status
    squeezed = "".join(text.output.split())
    for problem in found["problems"]:
        assert "".join(problem["problem"].split()) in squeezed
        assert "".join(problem["remedy"].split()) in squeezed
    return found


def problems(found: dict[str, Any]) -> str:
    return "\n".join(f"{p['problem']} -> {p['remedy']}" for p in found["problems"])


def see_gpu(monkeypatch: pytest.MonkeyPatch, major: int, minor: int) -> None:
    gpu = SimpleNamespace(name="Some GPU", major=major, minor=minor, total_memory=1 << 30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: (major, minor))


def test_a_machine_with_a_compiler_is_fine(cache_dir: Path) -> None:
    found = run(0)
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["python"] == sys.version.split()[0]
    assert found["tools"]["c++"]["found_by"] == "PATH"
    assert found["cache"] == {
        "directory": str(cache_dir), "exists": False, "writable": True, "strict": False, "entries": 0, "bytes": 0,
        "prebuilt": [],
    }  # fmt: skip
    assert found["modules"] == {"fake cpu": "will be built on first use", "fake cuda": "not needed without a GPU"}
    assert found["gpus"] == []
    assert not cache_dir.exists()  # a look leaves nothing behind


def test_built_modules_are_seen(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    path = hotplan.jit.build("fake", "cpu").path
    monkeypatch.setenv("HOTPLAN_STRICT", "1")
    found = run(0)
    assert found["modules"]["fake cpu"] == "built"
    assert (found["cache"]["entries"], found["cache"]["bytes"]) == (1, path.stat().st_size)
    assert found["cache"]["strict"] is True


def test_prebuilt_modules_are_seen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, only_path: Callable[..., Path], cache_dir: Path
) -> None:
    path = hotplan.jit.build("fake", "cpu", out=tmp_path / "shipped").path
    monkeypatch.setenv("HOTPLAN_PREBUILT_DIR", str(tmp_path / "shipped"))
    monkeypatch.setenv("HOTPLAN_STRICT", "1")
    script(only_path("ninja") / "c++", "echo 'another compiler'")
    found = run(0)
    assert found["modules"]["fake cpu"] == f"prebuilt: {path.parent}"
    assert found["cache"]["prebuilt"] == [str(tmp_path / "shipped")]
    assert not cache_dir.exists()


def test_no_compiler(only_path: Callable[..., Path]) -> None:
    path = only_path()
    found = run(1)
    assert found["tools"]["c++"] is None
    assert "no C++ compiler" in problems(found)
    assert f"PATH={path} -> install one with C++20" in problems(found)


def test_a_compiler_that_is_too_old(only_path: Callable[..., Path]) -> None:
    script(only_path("ninja") / "c++", "echo \"c++: error: unrecognized option '-std=c++20'\"; exit 1")
    found = run(1)
    assert "c++ does not compile C++20: c++: error: unrecognized option" in problems(found)
    assert found["modules"]["fake cpu"] == "cannot be used: the C++ compiler does not work"


def test_no_ninja(monkeypatch: pytest.MonkeyPatch, only_path: Callable[..., Path]) -> None:
    only_path("c++", "as", "ld")
    monkeypatch.setattr("hotplan.jit.toolchain.importlib.util.find_spec", lambda name: None)
    assert "no ninja -> pip install ninja" in problems(run(1))


def test_no_nvcc_while_a_gpu_is_visible(
    monkeypatch: pytest.MonkeyPatch, only_path: Callable[..., Path], tmp_path: Path
) -> None:
    only_path("c++", "as", "ld", "ninja")
    for var in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(var, raising=False)
    monkeypatch.setattr("hotplan.jit.toolchain._SYSTEM", tmp_path)
    monkeypatch.setattr("hotplan.jit.toolchain.importlib.util.find_spec", lambda name: None)
    assert run(0)["problems"] == []
    see_gpu(monkeypatch, 9, 0)
    found = run(1)
    assert "no CUDA toolkit with bin/nvcc" in problems(found)
    assert found["modules"]["fake cuda"].startswith("cannot be used: no CUDA toolkit")


@pytest.mark.parametrize(
    ("archs", "capability", "runs"),
    [("9.0a", (9, 0), True), ("9.0", (9, 0), True), ("8.0", (8, 9), True), ("8.9", (8, 0), False),
     ("10.0a", (9, 0), False), ("10.0a", (10, 3), False), ("9.0a,10.0a", (10, 0), True)],
)  # fmt: skip
def test_architectures_that_the_gpu_does_not_run(
    archs: str,
    capability: tuple[int, int],
    runs: bool,
    monkeypatch: pytest.MonkeyPatch,
    make_toolkit: Callable[..., Path],
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(make_toolkit()))
    monkeypatch.setenv("HOTPLAN_CUDA_ARCHS", archs)
    see_gpu(monkeypatch, *capability)
    assert ("HOTPLAN_CUDA_ARCHS says" in problems(run(0 if runs else 1))) is not runs


def test_bad_architectures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTPLAN_CUDA_ARCHS", "90")
    assert "HOTPLAN_CUDA_ARCHS: expected architectures like 9.0a,10.0a, got '90' -> correct it" in problems(run(0))
    see_gpu(monkeypatch, 9, 0)
    run(1)


def test_a_driver_older_than_the_toolkit(monkeypatch: pytest.MonkeyPatch, make_toolkit: Callable[..., Path]) -> None:
    monkeypatch.setenv("CUDA_HOME", str(make_toolkit(version="13.0")))
    see_gpu(monkeypatch, 9, 0)
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: 12080, raising=False)
    assert "nvcc is of CUDA 13.0, the driver knows CUDA 12.8: no kernel would start" in problems(run(1))
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: 13010)
    assert "the driver knows" not in problems(run(0))


def test_a_driver_and_a_cpu_build_of_torch(tmp_path: Path) -> None:
    assert run(0)["problems"] == []
    (tmp_path / "driver").touch()
    assert "there is an NVIDIA driver, but torch is a build without CUDA" in problems(run(0))


def test_a_cuda_build_of_torch_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "torch is built for CUDA 13.0 but sees no GPU" in problems(run(0))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "(CUDA_VISIBLE_DEVICES='')" in problems(run(0))


@pytest.mark.parametrize(
    ("version", "fits"),
    [("0.1.10", False), ("0.1.11", True), ("0.1.15.post2", True), ("0.2.0", False), (None, False)],
)
def test_versions_of_tvm_ffi(version: str | None, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    real = module._version
    monkeypatch.setattr(module, "_version", lambda name: version if name == "apache-tvm-ffi" else real(name))
    said = problems(run(0))
    assert (f"apache-tvm-ffi is {version or 'not installed'}" in said) is not fits
    assert ("pip install 'apache-tvm-ffi>=0.1.11,<0.2'" in said) is not fits


def test_strict_mode_without_a_module(monkeypatch: pytest.MonkeyPatch, cache_dir: Path) -> None:
    monkeypatch.setenv("HOTPLAN_STRICT", "1")
    command = f"{sys.executable} -m hotplan build --family fake --no-cuda --out {cache_dir}"
    assert f"HOTPLAN_STRICT forbids it; to build: {command}" in problems(run(1))


def test_a_cache_that_others_can_write(cache_dir: Path) -> None:
    cache_dir.mkdir()
    cache_dir.chmod(0o777)
    assert f"{cache_dir} can be written by other users (mode 777)" in problems(run(1))


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOTPLAN_CACHE_DIR", str(tmp_path / "file/cache"))
    found = run(0)  # it works, at the price that is named
    assert found["cache"]["writable"] is False
    assert "every process compiles for itself" in problems(found)


def test_an_unknown_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTPLAN_CACHE_DIR", "~nobody-of-that-name/cache")
    assert "set HOTPLAN_CACHE_DIR" in problems(run(1))


def test_it_is_a_command_of_hotplan() -> None:
    from hotplan.cli.main import main

    result = CliRunner().invoke(main, ["doctor", "--json"], env=dict(os.environ))
    assert json.loads(result.output)["ok"] is (result.exit_code == 0)
