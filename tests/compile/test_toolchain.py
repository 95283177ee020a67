"""Finding compilers, ninja, the CUDA toolkit and the architectures to compile for."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compile_support import CountingCompiler, Family, script

from hotplan.jit import build, toolchain
from hotplan.jit.toolchain import Memo, MissingTool, find_cuda, find_cxx, find_ninja, parse_archs, target_archs

# --- architectures ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["9.0a,10.0a", "10.0a 9.0a", "9.0a;10.0a;9.0a", " 9.0a , 10.0a ", ["10.0a", "9.0a"]])
def test_archs_are_sorted_by_number_and_unique(text: str | list[str]) -> None:
    assert parse_archs(text, "archs") == ("9.0a", "10.0a")


@pytest.mark.parametrize("text", ["sm_90a", "90a", "9", "9.0b", "9.0a+PTX", "9.0a,,10", "native", "", "9.0a,-10.0"])
def test_bad_archs_name_the_variable(text: str) -> None:
    with pytest.raises(ValueError, match=r"^HOTPLAN_CUDA_ARCHS: expected architectures like 9\.0a,10\.0a, got "):
        parse_archs(text, "HOTPLAN_CUDA_ARCHS")


def test_no_archs_at_all() -> None:
    with pytest.raises(ValueError, match=r"archs: expected architectures like 9\.0a,10\.0a, got none"):
        parse_archs([], "archs")


def _see_gpus(monkeypatch: pytest.MonkeyPatch, *capabilities: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: capabilities[i])


def test_archs_come_from_the_variables_then_from_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    _see_gpus(monkeypatch, (9, 0), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0))
    assert target_archs() == (("8.9", "9.0a", "10.0a", "10.3a", "12.0a"), "visible GPUs")
    monkeypatch.setenv("TVM_FFI_CUDA_ARCH_LIST", "8.0 9.0")
    assert target_archs() == (("8.0", "9.0"), "TVM_FFI_CUDA_ARCH_LIST")
    monkeypatch.setenv("HOTPLAN_CUDA_ARCHS", "10.0a")
    assert target_archs() == (("10.0a",), "HOTPLAN_CUDA_ARCHS")


class Driver:
    """libcuda with so many devices, of which `broken` names the call that fails."""

    capabilities = ((9, 0), (10, 3), (9, 0))

    def __init__(self, broken: str = "") -> None:
        self.broken = broken
        self.ready = False

    def cuInit(self, flags: int) -> int:
        self.ready = flags == 0
        return 100 * (self.broken == "cuInit")

    def cuDeviceGetCount(self, count: Any) -> int:
        return self.answer("cuDeviceGetCount", count, len(self.capabilities))

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        return self.answer("cuDeviceGet", device, 70 + ordinal)

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: int) -> int:
        part = {75: 0, 76: 1}[attribute]
        return self.answer("cuDeviceGetAttribute", value, self.capabilities[device - 70][part])

    def answer(self, function: str, out: Any, value: int) -> int:
        assert self.ready
        out._obj.value = value
        return 3 * (self.broken == function)


ask_driver = toolchain._ask_driver  # before a fixture silences it


def test_the_driver_is_asked_before_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    _see_gpus(monkeypatch, (8, 0))
    monkeypatch.setattr(toolchain, "_ask_driver", ask_driver)
    monkeypatch.setattr(ctypes, "CDLL", {"libcuda.so.1": Driver()}.__getitem__)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", None)
        assert target_archs() == (("9.0a", "10.3a"), "visible GPUs")
    for broken in ("cuInit", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetAttribute"):
        monkeypatch.setattr(ctypes, "CDLL", {"libcuda.so.1": Driver(broken)}.__getitem__)
        assert target_archs() == (("8.0",), "visible GPUs"), broken

    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file: No such file or directory")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert target_archs() == (("8.0",), "visible GPUs")


def test_without_variable_and_gpu_the_error_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    _see_gpus(monkeypatch)
    with pytest.raises(RuntimeError, match=r"no GPU is visible to torch.*set HOTPLAN_CUDA_ARCHS"):
        target_archs()


# --- C++ compiler and ninja -------------------------------------------------------------------------------------------


def test_cxx_is_the_variable_then_the_first_on_path(
    only_path: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = only_path()
    script(path / "clang++", "true")
    assert find_cxx().path == str(path / "clang++")
    script(path / "g++", "true")
    assert find_cxx().path == str(path / "g++")
    script(path / "c++", "true")
    assert (find_cxx().command, find_cxx().how) == ("c++", "PATH")
    monkeypatch.setenv("CXX", f"{script(path / 'ccache', 'true')} g++ -m64")
    assert (find_cxx().path, find_cxx().how) == (str(path / "ccache"), "CXX")


def test_missing_cxx_says_where_it_looked_and_what_to_do(
    only_path: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = only_path()
    with pytest.raises(MissingTool) as error:
        find_cxx()
    for part in ("CXX (not set)", "c++, g++ and clang++", f"PATH={path}", "apt-get install g++", "set CXX"):
        assert part in str(error.value)
    monkeypatch.setenv("CXX", "/nowhere/g++-99")
    with pytest.raises(MissingTool, match=r"looked for CXX='/nowhere/g\+\+-99'"):
        find_cxx()


def test_ninja_of_the_python_package_is_found_off_path(only_path: Callable[..., Path]) -> None:
    only_path()
    assert os.access(find_ninja(), os.X_OK)


def test_the_directory_of_ninja_does_not_change_which_compiler_runs(
    family: Family, compiler: CountingCompiler, only_path: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = only_path("sh", "as", "ld")
    real = shutil.which("c++", path=os.defpath)
    if real is None:
        pytest.skip("no c++ in the system's directories")
    script(path / "c++", f'echo "$@" >> {compiler.log}\nexec {real} "$@"')
    other = script(path.parent / "elsewhere/c++", "exit 1").parent
    (other / "ninja").symlink_to(find_ninja())
    monkeypatch.setenv("PATH", os.pathsep.join([str(path), str(other)]))
    monkeypatch.delenv("CXX")
    build("fake", "cpu", root=family.root)
    assert compiler.compiles() == 1


def test_missing_ninja(only_path: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    only_path()
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingTool, match=r"no ninja.*pip install ninja"):
        find_ninja()


# --- CUDA toolkit -----------------------------------------------------------------------------------------------------


@pytest.fixture
def bare(only_path: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No toolkit anywhere; returns the one directory on PATH."""
    for var in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(var, raising=False)
    monkeypatch.setattr(toolchain, "_SYSTEM", tmp_path / "usr/local")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    return only_path("sh")


def test_toolkits_in_their_order(
    bare: Path, make_toolkit: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def found() -> tuple[str, str]:
        cuda = find_cuda(Memo(None))
        return os.path.relpath(cuda.home, bare.parent), cuda.how

    make_toolkit("site/nvidia/cu13", "lib", "libcudart.so.13")
    assert found() == ("site/nvidia/cu13", "Python packages nvidia-*")
    make_toolkit("usr/local/cuda-9.2")
    make_toolkit("usr/local/cuda-12.9")
    make_toolkit("usr/local/cuda-12.10")
    assert found() == ("usr/local/cuda-12.10", "newest /usr/local/cuda-*")
    (bare.parent / "usr/local/cuda").symlink_to("cuda-9.2")
    assert found() == ("usr/local/cuda", "/usr/local/cuda")
    wrapped = make_toolkit("opt/wrapped")
    script(wrapped / "bin/nvcc", f"echo '#$ _HERE_={wrapped}/bin'")
    script(bare / "nvcc", f'exec {wrapped}/bin/nvcc "$@"')
    assert found() == ("opt/wrapped", f"the toolkit that {bare / 'nvcc'} runs")
    (bare / "nvcc").unlink()
    (bare / "nvcc").symlink_to(make_toolkit("opt/linked") / "bin/nvcc")
    assert found() == ("opt/linked", "nvcc on PATH")
    monkeypatch.setenv("CUDA_PATH", str(make_toolkit("opt/path")))
    assert found() == ("opt/path", "CUDA_PATH")
    monkeypatch.setenv("CUDA_HOME", str(make_toolkit("opt/home")))
    assert found() == ("opt/home", "CUDA_HOME")


@pytest.mark.parametrize("missing", ["bin/nvcc", "include/cuda_runtime.h", "lib64/libcudart.so"])
def test_an_incomplete_toolkit_does_not_count(
    missing: str, bare: Path, make_toolkit: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    home = make_toolkit()
    monkeypatch.setenv("CUDA_HOME", str(home))
    assert find_cuda(Memo(None)).home == str(home)
    (home / missing).unlink()
    with pytest.raises(MissingTool) as error:
        find_cuda(Memo(None))
    for part in (f"{home} (CUDA_HOME)", f"{bare.parent}/usr/local/cuda", f"PATH={bare}", "set CUDA_HOME"):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("lib", "cudart"),
    [("lib64", "libcudart.so"), ("lib", "libcudart.so.13"), (f"targets/{toolchain._target_dir()}/lib", "libcudart.so")],
)
def test_places_of_libcudart(
    lib: str, cudart: str, bare: Path, make_toolkit: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    home = make_toolkit("toolkit", lib, cudart)
    monkeypatch.setenv("CUDA_HOME", str(home))
    assert find_cuda(Memo(None)).cudart == str(home / lib / cudart)


@pytest.mark.skipif(not shutil.which("nvcc"), reason="no nvcc on PATH")
def test_a_wrapper_of_the_real_nvcc_is_seen_through(
    tmp_path: Path, only_path: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = find_cuda(Memo(None))
    for var in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(var, raising=False)
    path = only_path("sh", "gcc", "g++")
    script(path / "nvcc", f'exec {real.nvcc} "$@"')
    found = find_cuda(Memo(None))
    assert Path(found.home).resolve() == Path(real.home).resolve()
    assert found.how == f"the toolkit that {path / 'nvcc'} runs"


# --- memo -------------------------------------------------------------------------------------------------------------


def test_versions_are_asked_once_and_again_when_the_compiler_changes(
    compiler: CountingCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version() -> str:
        memo = Memo(tmp_path / "compilers.json")
        text = find_cxx().version(memo)
        memo.save()
        return text

    first = version()
    assert re.search(r"\d+\.\d+", first)
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", None)
        assert version() == first
    assert compiler.log.read_text().count("--version") == 1
    script(compiler.path, "echo upgraded 2.0")
    assert version() == "upgraded 2.0"
    script(compiler.path, "echo upgraded 2.1")  # the same size; another mtime
    os.utime(compiler.path, ns=(1, 1))
    assert version() == "upgraded 2.1"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"--version X": 7}'])
def test_a_damaged_memo_is_no_memo(content: str, compiler: CountingCompiler, tmp_path: Path) -> None:
    file = tmp_path / "compilers.json"
    file.write_text(content.replace("X", str(compiler.path)))
    memo = Memo(file)
    text = find_cxx().version(memo)
    memo.save()
    assert text in Memo(file).ask("--version", str(compiler.path), lambda: "asked again")
