"""One cache under several Pythons and several versions of tvm-ffi, all at the same time.

HOTPLAN_TEST_PYTHONS names interpreters that have apache-tvm-ffi, ninja and numpy, as PATH names directories; torch is not
needed. Beside this one, that is: without it, or with none that is another, these tests are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import pytest
from compile_support import CountingCompiler, Family, build, published

import hotplan

_PROGRAM = """
import json, platform, sys
import tvm_ffi
sys.path.insert(0, sys.argv[2])
import hotplan.jit
from pathlib import Path
root = Path(sys.argv[1])
mode = sys.argv[3]
found = {"python": platform.python_version(), "tvm_ffi": tvm_ffi.__version__, "torch": "torch" in sys.modules}
if mode == "load":
    found["answer"] = hotplan.jit.load("fake", "cpu", root=root).answer()
found["path"], found["seconds"] = map(str, hotplan.jit.build("fake", "cpu", root=root))
if mode == "prune":
    from hotplan.jit import cache, key, upkeep
    key.source_root = lambda: root
    survey = upkeep.survey(cache.cache_root())
    found["survey"] = {entry.path.name: [entry.why_not, entry.outdated] for entry in survey}
    upkeep.remove(cache.cache_root(), [entry for entry in survey if entry.outdated], lambda what: None)
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Interpreter:
    path: str
    python: str
    tvm_ffi: str


def _ask(path: str) -> Interpreter:
    code = "import platform, tvm_ffi; print(platform.python_version(), tvm_ffi.__version__)"
    done = subprocess.run([path, "-c", code], capture_output=True, text=True, check=True)
    return Interpreter(path, *done.stdout.split())


@pytest.fixture(scope="module")
def interpreters() -> list[Interpreter]:
    """This one first."""
    named = [path for path in os.environ.get("HOTPLAN_TEST_PYTHONS", "").split(os.pathsep) if path]
    return [_ask(path) for path in (sys.executable, *named)]


def differing(interpreters: list[Interpreter], by: Callable[[Interpreter], str], what: str) -> list[Interpreter]:
    """One interpreter of every kind."""
    kinds = {by(one): one for one in reversed(interpreters)}
    if len(kinds) < 2:
        pytest.skip(f"HOTPLAN_TEST_PYTHONS names no Python with another {what} than {', '.join(kinds)}")
    return list(kinds.values())


def start(interpreter: Interpreter, family: Family, mode: str = "load") -> subprocess.Popen[str]:
    package = str(Path(hotplan.__file__).parents[1])
    command = [interpreter.path, "-c", _PROGRAM, str(family.root), package, mode]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def result(process: subprocess.Popen[str]) -> dict:
    out, error = process.communicate(timeout=60)
    assert process.returncode == 0, error
    return json.loads(out)


def test_pythons_share_what_is_built(
    interpreters: list[Interpreter], family: Family, compiler: CountingCompiler, cache_dir: Path
) -> None:
    """A library does not know of Python, so its version is not part of the key: one compile serves all."""
    by_version = sorted(interpreters, key=lambda one: one.tvm_ffi)
    same = max((list(group) for _, group in groupby(by_version, lambda one: one.tvm_ffi)), key=len)
    pythons = differing(same, lambda one: one.python, "version of Python")
    processes = [start(one, family) for one in pythons * 2]
    found = [result(process) for process in processes]
    assert {one["python"] for one in found} == {one.python for one in pythons}
    assert {one["answer"] for one in found} == {42}
    assert len({one["path"] for one in found}) == 1
    assert compiler.compiles() == 1
    assert len(published(cache_dir)) == 1


def test_versions_of_tvm_ffi_do_not(
    interpreters: list[Interpreter], family: Family, compiler: CountingCompiler, cache_dir: Path
) -> None:
    versions = differing(interpreters, lambda one: one.tvm_ffi, "version of tvm-ffi")
    processes = [start(one, family) for one in versions * 2]
    found = [result(process) for process in processes]
    assert {one["answer"] for one in found} == {42}
    entries = {one["tvm_ffi"]: one["path"] for one in found}
    assert len(set(entries.values())) == len(versions) == compiler.compiles()
    assert [one["path"] == entries[one["tvm_ffi"]] for one in found] == [True] * len(found)
    for version, path in entries.items():
        manifest = json.loads((Path(path).parent / "manifest.json").read_text())
        assert manifest["parts"]["tvm_ffi"] == version

    again = [result(start(one, family)) for one in versions]
    assert [one["seconds"] for one in again] == ["0.0"] * len(versions)

    # Prune takes what this installation cannot load: the entries of the others. Who comes next builds its own again.
    pruned = result(start(versions[0], family, "prune"))
    mine = Path(entries[versions[0].tvm_ffi]).parent.name
    for name, (why_not, outdated) in pruned["survey"].items():
        assert (name == mine) is (why_not == "") is not outdated
        assert name == mine or why_not.startswith("tvm_ffi is ")
    assert published(cache_dir) == [mine]
    other = result(start(versions[1], family, "build"))
    assert other["seconds"] != "0.0"
    assert other["path"] == entries[versions[1].tvm_ffi]


def test_this_python_is_asked_in_the_same_way(family: Family, compiler: CountingCompiler) -> None:
    """So that the program above runs where there is no other."""
    path = build(family).path
    found = result(start(Interpreter(sys.executable, "", ""), family))
    assert (found["answer"], found["seconds"], found["path"]) == (42, "0.0", str(path))
    assert compiler.compiles() == 1
