"""Processes that are forked while threads of their parent build and load."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
from compile_support import CountingCompiler, Family, answer, in_child, wait_for

import hotplan.jit
from hotplan.jit import cache, loader
from hotplan.jit.key import make_recipe


@pytest.fixture
def slow(compiler: CountingCompiler, tmp_path: Path) -> tuple[Path, Path]:
    """Two files: a compile makes the first and waits for the second."""
    started, release = tmp_path / "started", tmp_path / "release"
    compiler.set(f'case "$*" in *" -c "*) touch {started}; while [ ! -e {release} ]; do sleep 0.02; done;; esac')
    return started, release


def building_thread(family: Family, started: Path) -> threading.Thread:
    thread = threading.Thread(target=hotplan.jit.load, args=("fake", "cpu"), kwargs={"root": family.root})
    thread.start()
    wait_for(started.exists)
    return thread


def test_a_child_waits_for_its_parents_build_and_for_nothing_else(
    family: Family, slow: tuple[Path, Path], compiler: CountingCompiler, cache_dir: Path
) -> None:
    """The parent's thread has the loader's lock when the child is forked."""
    started, release = slow
    thread = building_thread(family, started)
    assert loader._modules_lock.locked()
    child = in_child(lambda: hotplan.jit.load("fake", "cpu", root=family.root).answer() == 42 or os._exit(1))
    time.sleep(0.3)
    assert child.is_alive()
    release.touch()
    child.join(20)
    thread.join()
    assert child.exitcode == 0
    assert compiler.compiles() == 1


def test_a_child_has_its_own_environment_and_builds_another_module(
    family: Family, slow: tuple[Path, Path], tmp_path: Path, cache_dir: Path
) -> None:
    started, release = slow
    before = dict(os.environ)
    thread = building_thread(family, started)
    assert dict(os.environ) != before
    other = Family(tmp_path / "other")
    other.write("include/fake/value.h", "inline int value() { return 6; }\n")

    def work() -> None:
        assert dict(os.environ) == before
        os.environ["CXX"] = "c++"
        out = tmp_path / "out"  # where nobody has a lock
        assert hotplan.jit.build("fake", "cpu", out=out, root=other.root).seconds > 0

    child = in_child(work)
    child.join(20)
    assert child.exitcode == 0
    release.touch()
    thread.join()
    assert dict(os.environ) == before


def test_a_child_keeps_no_lock_of_a_parent_that_dies(family: Family, slow: tuple[Path, Path], cache_dir: Path) -> None:
    started, release = slow
    seen = os.pipe()

    def parent() -> None:
        building_thread(family, started)
        child = os.fork()
        if child == 0:
            os.write(seen[1], str(os.getpid()).encode())  # not before fork has ended here
            time.sleep(60)
            os._exit(0)
        time.sleep(60)

    process = in_child(parent)
    wait_for(started.exists)
    child = int(os.read(seen[0], 20))
    try:
        assert cache.is_locked(cache_dir, "fake-cpu")
        process.kill()
        process.join()
        os.kill(child, 0)  # it is alive
        assert not cache.is_locked(cache_dir, "fake-cpu")
        release.touch()
        heir = in_child(lambda: answer(family) == 42 or os._exit(1))
        heir.join(20)
        assert heir.exitcode == 0
    finally:
        release.touch()
        os.kill(child, 9)
        for end in seen:
            os.close(end)


def test_a_child_forked_inside_a_build_ends_well(family: Family, cache_dir: Path) -> None:
    """It leaves the lock to its parent."""
    recipe = make_recipe("fake", "cpu", None, None, family.root)
    with cache.building(cache_dir, recipe):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                with cache.locked(cache_dir, "another", None) as mine:
                    status = 0 if mine and cache.is_locked(cache_dir, "fake-cpu") else 1
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert cache.is_locked(cache_dir, "fake-cpu")
    assert not cache.is_locked(cache_dir, "fake-cpu")


def test_children_of_children_use_what_their_parents_loaded(family: Family, compiler: CountingCompiler) -> None:
    module = hotplan.jit.load("fake", "cpu", root=family.root)

    def generation(left: int) -> None:
        """Exits with 0 if all is well in it and in those below."""
        child = os.fork() if left else 0
        if child or not left:
            status = os.waitpid(child, 0)[1] if child else 0
            again = hotplan.jit.load("fake", "cpu", root=family.root)
            os._exit(0 if status == 0 and again is module and module.answer() == 42 else 1)
        generation(left - 1)

    child = in_child(lambda: generation(3))
    child.join(20)
    assert child.exitcode == 0
    assert compiler.compiles() == 1
