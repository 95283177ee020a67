"""docs/add_a_kernel.md: its files compile and do what it says, as they stand."""

from __future__ import annotations

import functools
import importlib.util
import re
import shutil
import sys
import types
from pathlib import Path

import pytest

import hotplan
from hotplan import jit, reference
from hotplan.jit.key import source_root
from hotplan.jit.toolchain import Memo, MissingTool, find_cuda

PAGE = Path(__file__).resolve().parents[2] / "docs" / "add_a_kernel.md"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The package's headers and the page's files."""
    shutil.copytree(source_root() / "include", tmp_path / "root" / "include")
    for name, text in re.findall(r"^```\w+\n(?://|#) (\S+)\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE):
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "root"


def module_at(path: Path, name: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_files_work(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert jit.families(root) == ["windows"]
    monkeypatch.setattr(jit, "load", functools.partial(jit.load, root=root))
    ours = module_at(root / "python/hotplan/windows.py", "hotplan.windows")
    slow = module_at(root / "python/hotplan/reference/windows.py", "hotplan.reference.windows")
    for package, module in ((hotplan, ours), (reference, slow)):
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(package, "windows", module, raising=False)
    tests = module_at(root / "tests/unit/test_windows.py", "page_tests")
    for ratio in (4, 128):
        tests.test_count_closed(ratio, "cpu")
    tests.test_errors()


def test_the_kernel_compiles(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        find_cuda(Memo(None))
    except MissingTool:
        pytest.skip("no CUDA toolkit")
    assert jit.build("windows", "cuda", "9.0a", root=root).seconds > 0
