"""Fixtures of the JIT's tests: every test has an empty cache, and sources and compilers of its own."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from compile_support import CountingCompiler, Family, script

from hotplan.jit import cache, loader, toolchain


@pytest.fixture
def family(tmp_path: Path) -> Family:
    return Family(tmp_path / "sources")


@pytest.fixture(autouse=True)
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, no other settings, and a process that has loaded nothing yet."""
    for var in ("HOTPLAN_STRICT", "HOTPLAN_CUDA_ARCHS", "TVM_FFI_CUDA_ARCH_LIST", "SGLANG_CACHE_DIR", "CXX"):
        monkeypatch.delenv(var, raising=False)
    monkeypatch.delenv("HOTPLAN_PREBUILT_DIR", raising=False)
    monkeypatch.setenv("HOTPLAN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(loader, "_modules", {})
    monkeypatch.setattr(toolchain, "_ask_driver", list)  # GPUs are those that a test lets torch see
    cache._report_damage.cache_clear()
    cache._report_shipped.cache_clear()
    return tmp_path / "cache"


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CountingCompiler:
    compiler = CountingCompiler(tmp_path)
    monkeypatch.setenv("CXX", str(compiler.path))
    return compiler


@pytest.fixture
def make_toolkit(tmp_path: Path) -> Callable[..., Path]:
    """Makes directories that look like a CUDA toolkit to the search."""

    def make(name: str = "toolkit", lib: str = "lib64", cudart: str = "libcudart.so", version: str = "13.0") -> Path:
        home = tmp_path / name
        script(home / "bin" / "nvcc", f"echo 'release {version}'")
        for file in ("include/cuda_runtime.h", f"{lib}/{cudart}"):
            (home / file).parent.mkdir(parents=True, exist_ok=True)
            (home / file).touch()
        return home

    return make


@pytest.fixture
def only_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Reduces PATH to one directory that holds links to the named programs of the real PATH."""

    def reduce(*programs: str) -> Path:
        directory = tmp_path / "bin"
        directory.mkdir(exist_ok=True)
        for program in programs:
            found = shutil.which(program)
            assert found, program
            (directory / program).symlink_to(found)
        monkeypatch.setenv("PATH", os.fspath(directory))
        return directory

    return reduce
