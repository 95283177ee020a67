"""SIGKILL in the middle of compiles: nothing broken is loaded, nobody waits, and what is left goes."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from compile_support import (
    FORK,
    CountingCompiler,
    Family,
    answer,
    build,
    in_child,
    leftovers,
    published,
    wait_for,
)

from hotplan.cli.main import main
from hotplan.jit import cache, key, upkeep

MOMENTS = 10


@pytest.fixture(autouse=True)
def the_fake_family_alone(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key, "source_root", lambda: family.root)


def moments(family: Family, cache_dir: Path) -> Iterator[float]:
    """Seconds after the start of a build, spread over a whole one and a little more."""
    start = time.perf_counter()
    build(family)
    whole = time.perf_counter() - start
    clear()
    rng = random.Random(7)
    return (whole * 1.1 * (i + rng.random()) / MOMENTS for i in range(MOMENTS))


def clear() -> None:
    result = CliRunner().invoke(main, ["cache", "clear"])
    assert result.exit_code == 0, result.output


def assert_sound(cache_dir: Path) -> None:
    """What is published is complete, byte for byte."""
    for entry in upkeep.survey(cache_dir):
        assert entry.kind == "leftover" or entry.why_not == ""


@pytest.mark.parametrize("whom", ["the process alone", "its group"])
def test_killed_at_any_moment(whom: str, family: Family, cache_dir: Path, compiler: CountingCompiler) -> None:
    """Alone: ninja and the compilers live on, and go on writing."""
    killed_while_building = 0
    for moment in moments(family, cache_dir):

        def work() -> None:
            os.setsid()
            build(family)

        victim = in_child(work)
        time.sleep(moment)
        assert victim.pid is not None
        try:
            (os.kill if whom == "the process alone" else os.killpg)(victim.pid, signal.SIGKILL)
        except ProcessLookupError:  # not yet a group, or done
            victim.kill()
        victim.join()
        assert_sound(cache_dir)
        killed_while_building += bool(leftovers(cache_dir))
        heir = in_child(lambda: answer(family) == 42 or os._exit(1))
        heir.join(30)
        assert heir.exitcode == 0
        assert len(published(cache_dir)) == 1
        assert_sound(cache_dir)
        wait_for(lambda: not leftovers(cache_dir) or not clear_leftovers())
        clear()
        assert published(cache_dir) == []
    assert killed_while_building >= 3


def clear_leftovers() -> list[str]:
    """Prunes, and gives the working directories that there still are: a compiler that lives on may make files."""
    result = CliRunner().invoke(main, ["cache", "prune"])
    assert result.exit_code == 0, result.output
    return [path.name for path in leftovers(cache.cache_root())]


def test_sixteen_racing_processes_of_which_some_are_killed(
    family: Family, compiler: CountingCompiler, cache_dir: Path
) -> None:
    compiler.set("sleep 0.15")
    barrier = FORK.Barrier(17)

    def race() -> None:
        barrier.wait()
        assert answer(family) == 42

    processes = [in_child(race) for _ in range(16)]
    barrier.wait()
    rng = random.Random(3)
    killed = 0
    for victim in rng.sample(processes, 8):  # one after the other; each time, another may be the builder
        time.sleep(0.1 * rng.random())
        killed += victim.is_alive()
        victim.kill()
    for process in processes:
        process.join(60)
    assert killed >= 4
    assert {process.exitcode for process in processes} <= {0, -signal.SIGKILL}
    assert sum(process.exitcode == 0 for process in processes) >= 8
    assert 1 <= compiler.compiles() <= 1 + killed
    assert len(published(cache_dir)) == 1
    assert_sound(cache_dir)


def test_loaders_race_with_prune_and_clear(family: Family, cache_dir: Path) -> None:
    """Whoever asks gets the module, whatever is taken away meanwhile."""
    build(family)
    end = time.monotonic() + 2.0

    def load() -> None:
        while time.monotonic() < end:
            assert answer(family) == 42
        assert cache._report_damage.cache_info().currsize == 0  # nobody met half an entry

    def take_away() -> None:
        while time.monotonic() < end:
            upkeep.remove(cache_dir, upkeep.survey(cache_dir), keep=lambda what: None)

    processes = [in_child(work) for work in (load, load, load, take_away, take_away)]
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * len(processes)
    assert_sound(cache_dir)
    clear()
    assert published(cache_dir) == []
    assert leftovers(cache_dir) == []


# --- what is left -----------------------------------------------------------------------------------------------------


def test_prune_takes_what_dead_builders_left(family: Family, cache_dir: Path) -> None:
    good = build(family).path.parent
    mine = cache_dir / f"{cache.work_prefix('fake-cpu')}abcdefgh"
    theirs, recent = (cache_dir / f".build-fake-cpu-other-{name}" for name in ("12345678", "87654321"))
    for path in (mine, theirs, recent):
        path.mkdir()
        (path / "x.o").write_bytes(bytes(1000))
    os.utime(theirs, (0, 0))
    listed = {Path(entry["path"]): entry for entry in json.loads(run("info", "--json"))[0]["entries"]}
    assert {path: (entry["kind"], entry["usable"]) for path, entry in listed.items()} == {
        good: ("module", True), mine: ("leftover", False), theirs: ("leftover", False), recent: ("leftover", False)
    }  # fmt: skip
    assert f"would remove {mine.name}" in run("prune", "--dry-run")
    output = run("prune")
    assert f"removed {mine.name}\n" in output
    assert f"removed {theirs.name}\n" in output
    # Another machine's lock may not be seen here, so what it may be building stays for a day.
    assert leftovers(cache_dir) == [recent]
    assert good.is_dir()
    run("clear")
    assert leftovers(cache_dir) == []


def run(*arguments: str) -> str:
    result = CliRunner().invoke(main, ["cache", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_what_is_being_built_is_no_leftover(family: Family, cache_dir: Path) -> None:
    recipe = key.make_recipe("fake", "cpu", None)
    with cache.building(cache_dir, recipe) as staging:
        assert json.loads(run("info", "--json"))[0]["entries"] == []
        assert run("clear") == f"{cache_dir}: freed 0.0 MB\n"
        assert staging.is_dir()


def test_prune_takes_drafts_of_killed_writers(family: Family, cache_dir: Path) -> None:
    build(family)
    old, new = cache_dir / ".compilers.json.99-99", cache_dir / ".manifest.json.1-1"
    for path in (old, new):
        path.write_text("{")
    os.utime(old, (0, 0))
    run("prune")
    assert (old.exists(), new.exists()) == (False, True)
