"""Directories of `hotplan build` that are shipped: what in them serves, where, and what is said of the rest."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from compile_support import HEADER, CountingCompiler, Family

import hotplan.jit
from hotplan.jit import cache, loader
from hotplan.jit.key import make_recipe, runs_on
from hotplan.jit.toolchain import Memo


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOTPLAN_PREBUILT_DIR", str(tmp_path / "shipped"))
    return tmp_path / "shipped"


def answer(family: Family, backend: str = "cpu") -> int:
    """What a process that has loaded nothing yet gets."""
    loader._modules.clear()
    return hotplan.jit.load("fake", backend, root=family.root).answer()


def ship_cuda(family: Family, directory: Path, *archs: str) -> Path:
    """An entry for `archs` whose library is the CPU's: it loads without a CUDA runtime, and gives 42."""
    recipe = make_recipe("fake", "cuda", Memo(None), archs, family.root)
    library = hotplan.jit.build("fake", "cpu", root=family.root).path
    with cache.building(directory, recipe) as staging:
        return cache.publish(directory, staging, Path(shutil.copy(library, staging / "fake.so")), recipe, 1.0)


def see_gpus(monkeypatch: pytest.MonkeyPatch, *capabilities: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capabilities[index])


def test_a_shipped_module_goes_before_the_cache_and_is_only_read(
    family: Family, shipped: Path, cache_dir: Path, compiler: CountingCompiler
) -> None:
    hotplan.jit.build("fake", "cpu", out=shipped, root=family.root)
    before = {path: path.stat().st_mtime_ns for path in (shipped, *shipped.rglob("*"))}
    assert answer(family) == 42
    assert compiler.compiles() == 1
    assert not cache_dir.exists()
    assert {path: path.stat().st_mtime_ns for path in (shipped, *shipped.rglob("*"))} == before


def test_it_serves_beside_other_compilers_and_variables(
    family: Family, shipped: Path, compiler: CountingCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    hotplan.jit.build("fake", "cpu", out=shipped, root=family.root)
    compiler.set("[ $1 != --version ] || { echo another compiler; exit; }")
    monkeypatch.setenv("CPATH", "/somewhere")
    monkeypatch.setenv("HOTPLAN_STRICT", "1")
    assert answer(family) == 42
    # As a cache it does not: the compilers are part of its key, and the error says that they are what differs.
    monkeypatch.delenv("HOTPLAN_PREBUILT_DIR")
    monkeypatch.setenv("HOTPLAN_CACHE_DIR", str(shipped))
    with pytest.raises(RuntimeError, match=r"fake-cpu-[0-9a-f]{16}: other compilers, other environment"):
        answer(family)


def test_other_sources_do_not_serve_and_are_said(
    family: Family, shipped: Path, cache_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    entry = hotplan.jit.build("fake", "cpu", out=shipped, root=family.root).path.parent
    family.write(HEADER, "inline int value() { return 1; }\n")
    assert answer(family) == answer(family) == 2
    message = f"HOTPLAN_PREBUILT_DIR: nothing in {shipped} serves fake (cpu) ({entry.name}: other sources)"
    assert caplog.text.count(message) == 1
    assert len(list(cache_dir.glob("fake-cpu-*"))) == 1


def test_damage_and_missing_directories_are_said(
    family: Family, shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    library = hotplan.jit.build("fake", "cpu", out=shipped, root=family.root).path
    os.truncate(library, 100)
    monkeypatch.setenv("HOTPLAN_PREBUILT_DIR", os.pathsep.join([str(tmp_path / "nowhere"), str(shipped), ""]))
    assert answer(family) == 42
    assert f"HOTPLAN_PREBUILT_DIR names {tmp_path / 'nowhere'}, which is no directory" in caplog.text
    assert f"{library.parent.name}: {library.name} is not what was built" in caplog.text


def test_the_first_directory_that_serves_is_taken(
    family: Family, shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hotplan.jit.build("fake", "cpu", out=shipped, root=family.root)
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("HOTPLAN_PREBUILT_DIR", f"{tmp_path / 'empty'}:{shipped}")
    path = loader._shipped("fake", "cpu", family.root)
    assert path
    assert path.parents[1] == shipped
    assert "there is none of this family and backend" in caplog.text


@pytest.mark.parametrize("what", ["directory", "library"])
def test_what_others_can_write_is_refused(what: str, family: Family, shipped: Path) -> None:
    library = hotplan.jit.build("fake", "cpu", out=shipped, root=family.root).path
    path = {"directory": shipped, "library": library}[what]
    path.chmod(0o777)
    with pytest.raises(RuntimeError, match=f"{path} can be written by other users"):
        answer(family)


@pytest.mark.parametrize(
    ("built", "wanted", "runs"),
    [
        ("9.0a", "9.0a", True), ("9.0", "9.0a", True), ("9.0a", "9.0", False), ("8.0", "8.9", True),
        ("8.9", "8.0", False), ("8.0", "9.0a", False), ("10.0a", "10.3a", False), ("10.0f", "10.3a", True),
        ("10.0", "10.3a", True), ("12.0a", "10.0a", False),
    ],
)  # fmt: skip
def test_what_runs_where(built: str, wanted: str, runs: bool) -> None:
    assert runs_on(built, wanted) is runs


@pytest.mark.parametrize(
    ("gpus", "serves"),
    [
        ([(9, 0)], True),
        ([(10, 0)], True),
        ([(8, 9)], True),  # runs the code for 8.0
        ([(9, 0), (10, 0)], True),
        ([(10, 3)], False),
        ([(9, 0), (12, 0)], False),  # each of the GPUs counts
    ],
)
def test_a_module_for_several_architectures_is_found_beside_each_of_their_gpus(
    gpus: list[tuple[int, int]],
    serves: bool,
    family: Family,
    shipped: Path,
    make_toolkit: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(make_toolkit()))
    ship_cuda(family, shipped, "8.0", "9.0a", "10.0a")
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setenv("HOTPLAN_STRICT", "1")
    see_gpus(monkeypatch, *gpus)
    if serves:
        assert answer(family, "cuda") == 42
    else:
        with pytest.raises(RuntimeError, match=r"HOTPLAN_STRICT is set.*\n.* --no-cpu --arch "):
            answer(family, "cuda")


def test_the_very_architecture_is_preferred(
    family: Family, shipped: Path, make_toolkit: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(make_toolkit()))
    libraries = {archs: ship_cuda(family, shipped, *archs) for archs in (("8.0",), ("8.6", "9.0a"), ("8.9", "9.0a"))}
    for capability, archs in (((8, 0), ("8.0",)), ((8, 6), ("8.6", "9.0a")), ((8, 9), ("8.9", "9.0a"))):
        see_gpus(monkeypatch, capability)
        assert loader._shipped("fake", "cuda", family.root) == libraries[archs]


def test_the_variable_for_architectures_counts_for_what_is_shipped_too(
    family: Family, shipped: Path, make_toolkit: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(make_toolkit()))
    ship_cuda(family, shipped, "9.0a", "10.0a")
    see_gpus(monkeypatch, (9, 0))
    monkeypatch.setenv("HOTPLAN_CUDA_ARCHS", "9.0a,10.0a")
    assert answer(family, "cuda") == 42
    monkeypatch.setenv("HOTPLAN_CUDA_ARCHS", "9.0a,12.0a")
    assert loader._shipped("fake", "cuda", family.root) is None


def test_an_entry_that_is_pruned_under_a_loader_is_built_again(
    family: Family, compiler: CountingCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tvm_ffi

    load_module, path = tvm_ffi.load_module, hotplan.jit.build("fake", "cpu", root=family.root).path

    def pruned_first(path: Path) -> tvm_ffi.Module:
        monkeypatch.setattr(tvm_ffi, "load_module", load_module)
        shutil.rmtree(path.parent)
        return load_module(path)

    monkeypatch.setattr(tvm_ffi, "load_module", pruned_first)
    assert answer(family) == 42
    assert compiler.compiles() == 2
    assert path.exists()


def test_the_index_of_a_directory(family: Family, shipped: Path, make_toolkit: Callable[..., Path],
                                  monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setenv("CUDA_HOME", str(make_toolkit()))
    hotplan.jit.build("fake", "cpu", out=shipped, root=family.root)
    library = ship_cuda(family, shipped, "9.0a", "10.0a")
    index = json.loads(cache.write_index(shipped).read_text())
    assert index["hotplan"] == hotplan.__version__
    cpu, cuda = index["modules"]
    assert (cpu["backend"], cuda["backend"], cuda["archs"]) == ("cpu", "cuda", ["9.0a", "10.0a"])
    assert cuda["compilers"]["nvcc"] == "release 13.0"
    assert cuda["bytes"] == library.stat().st_size
    assert shipped / cuda["entry"] / cuda["library"] == library
    assert set(cpu) == set(cuda) >= {"key", "family", "sha256", "tvm_ffi", "machine", "built", "hotplan"}
