"""The families of the package: each compiles, loads and exports what the Python functions call."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import tvm_ffi
from compile_support import Family, script

import hotplan.jit
from hotplan.jit.key import source_root
from hotplan.jit.toolchain import Memo, MissingTool, find_cuda

FAMILIES = hotplan.jit.families()

# What SGLang's module of the same purpose exports: ours can stand in its place.
UPSTREAM = {"compress": {"plan_prefill", "plan_decode", "plan_prefill_legacy", "plan_decode_legacy"}}


def exports(family: str) -> set[str]:
    """The names that the family's entry.cpp exports."""
    text = (source_root() / "csrc" / family / "entry.cpp").read_text()
    return set(re.findall(r"^SGL_EXPORT\((\w+)", text, re.MULTILINE))


def assert_exports(module: tvm_ffi.Module, family: str) -> None:
    expected = exports(family)
    assert expected >= UPSTREAM.get(family, set())
    assert expected
    for name in expected:
        assert module.get_function(name) is not None
    with pytest.raises(AttributeError):
        module.get_function("no_such_function")


def cuda_missing() -> bool:
    try:
        find_cuda(Memo(None))
    except MissingTool:
        return True
    return False


def test_families_of_the_package() -> None:
    assert set(FAMILIES) == {"compress", "device_buffer", "hisparse"}


@pytest.mark.parametrize("family", FAMILIES)
def test_cpu_module(family: str) -> None:
    assert_exports(hotplan.jit.load(family, "cpu"), family)


@pytest.mark.skipif(cuda_missing(), reason="no CUDA toolkit")
@pytest.mark.parametrize("arch", ["9.0a", "10.0a"])
@pytest.mark.parametrize("family", FAMILIES)
def test_cuda_module(family: str, arch: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOTPLAN_CUDA_ARCHS", arch)
    library = hotplan.jit.build(family, "cuda").path
    assert_exports(hotplan.jit.load(family, "cuda"), family)
    dump = Path(find_cuda(Memo(None)).nvcc).with_name("cuobjdump")
    if dump.exists():
        listed = subprocess.run([dump, "-lelf", library], capture_output=True, text=True, check=True).stdout
        assert set(re.findall(r"\.(sm_\w+)\.cubin", listed)) == {"sm_" + arch.replace(".", "")}


@pytest.mark.skipif(cuda_missing(), reason="no CUDA toolkit")
@pytest.mark.parametrize("layout", ["wrapper script on PATH", "pip's: lib/libcudart.so.N alone"])
def test_a_cuda_module_builds_with_toolkits_that_tvm_ffi_does_not_link_with(
    layout: str, family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = find_cuda(Memo(None))
    monkeypatch.setenv("HOTPLAN_CUDA_ARCHS", "9.0a")
    for var in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(var, raising=False)
    if layout.startswith("wrapper"):
        wrapper = script(tmp_path / "wrapped/bin/nvcc", f'exec {real.nvcc} "$@"')
        monkeypatch.setenv("PATH", os.pathsep.join([str(wrapper.parent), os.environ["PATH"]]))
    else:
        home = tmp_path / "nvidia/cu"
        (home / "lib").mkdir(parents=True)
        for entry in Path(real.home).iterdir():
            if not entry.name.startswith(("lib", "targets")):
                (home / entry.name).symlink_to(entry)
        (home / "lib/libcudart.so.13").symlink_to(Path(real.cudart).resolve())
        monkeypatch.setenv("CUDA_HOME", str(home))
    assert hotplan.jit.load("fake", "cuda", root=family.root).answer() == 43


@pytest.mark.skipif(cuda_missing(), reason="no CUDA toolkit")
def test_one_library_for_two_architectures_serves_each_of_them(family: Family) -> None:
    built = hotplan.jit.build("fake", "cuda", "10.0a,9.0a", root=family.root)
    assert built.seconds > 0
    for arch in ("9.0a", "10.0a"):
        assert hotplan.jit.build("fake", "cuda", [arch], root=family.root) == (built.path, 0.0)


def test_the_command_of_strict_mode_builds(monkeypatch: pytest.MonkeyPatch, cache_dir: Path) -> None:
    monkeypatch.setenv("HOTPLAN_STRICT", "1")
    with pytest.raises(RuntimeError) as error:
        hotplan.jit.load("compress", "cpu")
    command = str(error.value).splitlines()[-1].strip()
    package = Path(hotplan.jit.__file__).parents[2]
    subprocess.run(command, shell=True, check=True, env={**os.environ, "PYTHONPATH": str(package)})
    assert [path.name.rsplit("-", 1)[0] for path in cache_dir.glob("*-*")] == ["compress-cpu"]
    assert_exports(hotplan.jit.load("compress", "cpu"), "compress")


def test_sources_are_found_in_a_wheel_and_in_a_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    root = source_root()
    for package in (tmp_path / "site/hotplan", tmp_path / "checkout/python/hotplan"):
        (package / "jit").mkdir(parents=True)
        monkeypatch.setattr("hotplan.jit.key.__file__", str(package / "jit/key.py"))
        with pytest.raises(RuntimeError, match="hotplan's sources"):
            source_root()
        holder = package if "site" in package.parts else package.parents[1]
        for folder in ("include", "csrc"):
            shutil.copytree(root / folder, holder / folder)
        assert source_root() == holder
        assert hotplan.jit.families() == FAMILIES
