"""The cache key: every input changes it, and nothing else does."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import tvm_ffi
from compile_support import HEADER, CountingCompiler, Family, script

from hotplan.jit import key
from hotplan.jit.toolchain import Memo


def key_of(root: Path, backend: str = "cpu", archs: tuple[str, ...] = ("9.0a",)) -> str:
    return key.make_recipe("fake", backend, Memo(None), archs, root).key


def _edit(name: str, text: str) -> Callable[[Family, pytest.MonkeyPatch, Path], object]:
    return lambda family, patch, tmp: family.write(name, text)


CHANGES: dict[str, Callable[[Family, pytest.MonkeyPatch, Path], object]] = {
    "byte of a header": _edit(HEADER, "inline int value() { return 42; }\n"),
    "byte of a source": _edit("csrc/fake/cpu.cpp", "int backend() { return 3; }\n"),
    "new header": _edit("include/fake/more.h", ""),
    "new source": _edit("csrc/fake/detail/more.h", ""),
    "removed header": lambda family, patch, tmp: (family.root / HEADER).unlink(),
    "renamed header": lambda family, patch, tmp: (family.root / HEADER).rename(family.root / "include/fake/other.h"),
    "C++ flag": lambda family, patch, tmp: patch.setattr(key, "CXX_FLAGS", (*key.CXX_FLAGS, "-O3")),
    "nvcc flag": lambda family, patch, tmp: patch.setattr(key, "CUDA_FLAGS", (*key.CUDA_FLAGS, "-O3")),
    "flags from nvcc's variable": lambda family, patch, tmp: patch.setenv("NVCC_APPEND_FLAGS", "-O3"),
    "C++ compiler": lambda family, patch, tmp: patch.setenv("CXX", str(script(tmp / "other-c++", "echo other 1.0"))),
    "nvcc": lambda family, patch, tmp: script(tmp / "toolkit/bin/nvcc", "echo 'release 13.1'"),
    "tvm-ffi": lambda family, patch, tmp: patch.setattr(tvm_ffi, "__version__", "0.1.99"),
    "machine": lambda family, patch, tmp: patch.setattr(platform, "machine", lambda: "riscv64"),
    "layout of the build": lambda family, patch, tmp: patch.setattr(key, "FORMAT", 0),
}


@pytest.fixture(autouse=True)
def toolkit(make_toolkit: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(make_toolkit()))


@pytest.mark.parametrize("change", CHANGES)
def test_every_input_changes_the_key(
    change: str, family: Family, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = key_of(family.root, "cuda")
    assert key_of(family.root, "cuda") == before
    CHANGES[change](family, monkeypatch, tmp_path)
    assert key_of(family.root, "cuda") != before


def test_backend_family_and_architectures_change_the_key(family: Family) -> None:
    shutil.copytree(family.root / "csrc/fake", family.root / "csrc/twin")
    keys = {key_of(family.root, "cpu"), key_of(family.root, "cuda"), key_of(family.root, "cuda", ("9.0a", "10.0a"))}
    keys |= {key_of(family.root, "cuda", ("10.0a",))}
    keys |= {key.make_recipe("twin", "cpu", Memo(None), None, family.root).key}
    assert len(keys) == 5


def test_bytes_that_move_from_one_file_to_the_next_change_the_key(family: Family) -> None:
    family.write("include/fake/a.h", "12")
    family.write("include/fake/b.h", "3")
    before = key_of(family.root)
    family.write("include/fake/a.h", "1")
    family.write("include/fake/b.h", "23")
    assert key_of(family.root) != before


def test_mtime_place_and_other_families_do_not_change_the_key(family: Family, tmp_path: Path) -> None:
    before = key_of(family.root, "cuda")
    os.utime(family.root / HEADER, (1, 1))
    family.write("csrc/other/entry.cpp", "")
    family.write("include/fake/.value.h.swp", "an editor's")
    family.write("include/fake/value.h~", "an editor's")
    assert key_of(family.root, "cuda") == before
    assert key_of(Path(shutil.copytree(family.root, tmp_path / "moved")), "cuda") == before


def test_the_place_of_the_compiler_does_not_change_the_key(
    family: Family, compiler: CountingCompiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = key_of(family.root)
    monkeypatch.setenv("CXX", str(shutil.copy(compiler.path, tmp_path / "same-c++")))
    assert key_of(family.root) == before


def test_cpu_builds_do_not_depend_on_cuda(family: Family, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = key_of(family.root)
    script(tmp_path / "toolkit/bin/nvcc", "echo 'release 13.1'")
    assert key_of(family.root, archs=("12.0a",)) == before


def test_unknown_names(family: Family) -> None:
    with pytest.raises(ValueError, match=r"family: expected one of fake \(in .*csrc\), got 'nothing'"):
        key.make_recipe("nothing", "cpu", Memo(None), None, family.root)
    with pytest.raises(ValueError, match="backend: expected one of cpu, cuda, got 'rocm'"):
        key.make_recipe("fake", "rocm", Memo(None), None, family.root)
