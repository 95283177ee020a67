"""Clocks that are wrong, differ between machine and file system, or jump: nothing is rebuilt, lost or stuck for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from compile_support import HEADER, CountingCompiler, Family, answer, build, in_child, published, script, wait_for

import hotplan
from hotplan.cli.main import main
from hotplan.jit import cache, key
from hotplan.jit.key import make_recipe

EPOCH, FUTURE = 0, 4102444800  # 2100


def set_times(root: Path, moment: int) -> None:
    for path in (*root.rglob("*"), root):
        os.utime(path, (moment, moment))


@pytest.mark.parametrize("moment", [EPOCH, FUTURE])
def test_no_time_of_a_file_matters(
    moment: int, family: Family, compiler: CountingCompiler, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries, locks and sources from 1970 and from the next century are what they were; edits count all the same."""
    build(family)
    for root in (cache_dir, family.root):
        set_times(root, moment)
    assert answer(family) == 42
    assert compiler.compiles() == 1
    os.utime(family.write(HEADER, "inline int value() { return 6; }\n"), (moment, moment))
    assert answer(family) == 7
    assert compiler.compiles() == 2
    # Prune goes by content: the entry of the older header is of no use, whatever its date.
    monkeypatch.setattr(key, "source_root", lambda: family.root)
    set_times(cache_dir, moment)
    assert CliRunner().invoke(main, ["cache", "prune"]).exit_code == 0
    assert answer(family) == 7
    assert len(published(cache_dir)) == 1
    assert compiler.compiles() == 2


@pytest.mark.parametrize("built", [FUTURE, EPOCH, time.time() + 3600])
def test_what_comes_from_the_future_is_not_old(
    built: float, family: Family, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = build(family).path.parent
    monkeypatch.setattr(key, "source_root", lambda: family.root)
    manifest = json.loads((entry / "manifest.json").read_text())
    (entry / "manifest.json").write_text(json.dumps(manifest | {"built": built}))
    (listed,) = json.loads(CliRunner().invoke(main, ["cache", "info", "--json"]).output)[0]["entries"]
    assert listed["usable"]
    assert (listed["days"] == 0.0) is (built != EPOCH)
    for days in ("0", "10000"):
        assert CliRunner().invoke(main, ["cache", "prune", "--days", days]).exit_code == 0
    assert (published(cache_dir) == []) is (built == EPOCH)


def test_a_file_system_with_a_clock_of_its_own(family: Family, compiler: CountingCompiler, cache_dir: Path) -> None:
    """A server's: what a compiler writes is of 1970, or of the next century, before and after what it reads."""
    for moment in ("1970-01-01", "2100-01-01"):
        script(
            compiler.path,
            f'echo "$@" >> {compiler.log}\nc++ "$@" || exit\n'
            'while [ $# -gt 1 ]; do [ "$1" != -o ] || out=$2; shift; done\n'
            f'[ -z "$out" ] || touch -d {moment} "$out"',
        )
        family.write(HEADER, f"inline int value() {{ return {moment[:4]}; }}\n")
        assert answer(family) == int(moment[:4]) + 1
        assert build(family).seconds == 0.0


# A clock that is years ahead in one call and years back in the next, for all of a process and what it starts. Files get
# their times from the kernel, so they differ from it as those of a server do.
_SHIM = r"""
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>
static long offset() {
  static __thread unsigned calls;
  return (calls++ % 2 ? 1 : -1) * 86400L * 365 * 20;
}
extern "C" int clock_gettime(clockid_t which, timespec* at) noexcept {
  static int (*real)(clockid_t, timespec*) = (int (*)(clockid_t, timespec*))dlsym(RTLD_NEXT, "clock_gettime");
  const int result = real(which, at);
  if (which == CLOCK_REALTIME) at->tv_sec += offset();
  return result;
}
extern "C" int gettimeofday(timeval* at, void*) noexcept {
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  at->tv_sec = now.tv_sec;
  at->tv_usec = now.tv_nsec / 1000;
  return 0;
}
extern "C" time_t time(time_t* at) noexcept {
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (at) *at = now.tv_sec;
  return now.tv_sec;
}
"""

_PROGRAM = """
import sys, time
sys.path.insert(0, sys.argv[2])
times = [time.time() for _ in range(4)]
assert max(times) - min(times) > 86400 * 365, "the clock does not jump"
from pathlib import Path
import hotplan.jit
print("starts", flush=True)
assert hotplan.jit.load("fake", "cpu", root=Path(sys.argv[1])).answer() == 42
"""


def test_a_wall_clock_that_jumps_during_builds_and_waits(
    family: Family, compiler: CountingCompiler, cache_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "shim.cpp").write_text(_SHIM)
    shim = tmp_path / "shim.so"
    subprocess.run(["c++", "-shared", "-fPIC", "-O1", "-o", shim, tmp_path / "shim.cpp", "-ldl"], check=True)
    started, release = tmp_path / "started", tmp_path / "release"
    compiler.set(f'case "$*" in *" -c "*) touch {started}; while [ ! -e {release} ]; do sleep 0.02; done;; esac')
    command = [sys.executable, "-c", _PROGRAM, str(family.root), str(Path(hotplan.__file__).parents[1])]
    environment = os.environ | {"LD_PRELOAD": str(shim)}
    processes = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for process in processes:
        assert process.stdout
        assert process.stdout.readline() == "starts\n"
    wait_for(started.exists)
    time.sleep(0.3)  # one builds and one waits
    release.touch()
    assert [process.wait(30) for process in processes] == [0, 0]
    assert compiler.compiles() == 1
    assert len(published(cache_dir)) == 1
    for process in processes:
        process.stdout.close()


def test_a_lock_file_from_the_future_is_no_lock(family: Family, cache_dir: Path) -> None:
    recipe = make_recipe("fake", "cpu", None, None, family.root)
    with cache.building(cache_dir, recipe):
        pass
    set_times(cache_dir, FUTURE)
    child = in_child(lambda: answer(family) == 42 or os._exit(1))
    child.join(20)
    assert child.exitcode == 0
