"""The cache on disk: what is compiled, what is found, who may write, and what is left when something dies."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import tvm_ffi
from compile_support import (
    FORK,
    HEADER,
    CountingCompiler,
    Family,
    answer,
    build,
    drop_power_over_files,
    in_child,
    published,
    wait_for,
)

import hotplan.jit
from hotplan.jit import cache, loader
from hotplan.jit.compile import compile_library
from hotplan.jit.key import make_recipe
from hotplan.jit.toolchain import Memo

# --- hits and misses --------------------------------------------------------------------------------------------------


def test_first_load_compiles_and_the_second_is_a_dictionary_hit(
    family: Family, compiler: CountingCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = hotplan.jit.load("fake", "cpu", root=family.root)
    assert isinstance(module, tvm_ffi.Module)
    assert module.answer() == 42
    assert module.hides_where_it_was_built() == 1
    monkeypatch.setattr(loader, "_load", None)
    assert hotplan.jit.load("fake", "cpu", root=family.root) is module
    assert compiler.compiles() == 1


def test_an_entry_holds_the_library_and_its_manifest_alone(family: Family, cache_dir: Path) -> None:
    path, seconds = build(family)
    recipe = make_recipe("fake", "cpu", Memo(None), None, family.root)
    assert path.parent == cache_dir / f"fake-cpu-{recipe.key[:16]}"
    assert sorted(os.listdir(path.parent)) == ["hotplan_fake_cpu.so", "manifest.json"]
    manifest = json.loads((path.parent / "manifest.json").read_text())
    assert manifest["key"] == recipe.key
    assert manifest["parts"] == recipe.parts
    assert manifest["bytes"] == path.stat().st_size
    assert manifest["seconds"] == pytest.approx(seconds, abs=0.001)
    assert os.listdir(cache_dir / ".locks") == ["fake-cpu"]
    assert not list(cache_dir.glob(".build-*"))
    assert [entry["path"] for entry in cache.entries(cache_dir)] == [str(path.parent)]


def test_warm_load_runs_no_program(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    build(family)

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError(f"started {args}")

    for module, name in ((subprocess, "Popen"), (os, "system"), (os, "posix_spawn"), (os, "fork")):
        monkeypatch.setattr(module, name, refuse)
    assert answer(family) == 42


def test_build_tells_a_compile_from_a_hit(family: Family, cache_dir: Path, tmp_path: Path) -> None:
    first = build(family)
    assert first.seconds > 0
    assert build(family) == (first.path, 0.0)
    elsewhere = hotplan.jit.build("fake", "cpu", out=tmp_path / "out", root=family.root)
    assert elsewhere.seconds > 0
    assert elsewhere.path == tmp_path / "out" / first.path.relative_to(cache_dir)


def test_an_edited_header_with_an_old_mtime_recompiles(family: Family) -> None:
    assert answer(family) == 42
    old = (family.root / HEADER).stat().st_mtime_ns - 10**12
    os.utime(family.write(HEADER, "inline int value() { return 99; }\n"), ns=(old, old))
    assert answer(family) == 100


def test_touched_and_moved_sources_do_not_recompile(family: Family, compiler: CountingCompiler, tmp_path: Path) -> None:
    first = build(family)
    os.utime(family.root / HEADER)
    assert build(family).path == first.path
    assert build(Family(tmp_path / "other place")) == (first.path, 0.0)
    assert compiler.compiles() == 1


def test_sources_may_lie_under_a_path_with_spaces(tmp_path: Path) -> None:
    assert answer(Family(tmp_path / "my sources")) == 42


def test_environment_is_as_before_after_a_build(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    before = dict(os.environ)
    build(family)
    assert dict(os.environ) == before
    family.write(HEADER, "#error no")
    with pytest.raises(RuntimeError):
        build(family)
    assert dict(os.environ) == before


# --- several at once --------------------------------------------------------------------------------------------------


def test_sixteen_racing_processes_compile_once(family: Family, compiler: CountingCompiler, cache_dir: Path) -> None:
    compiler.set("sleep 0.2")  # long enough for all of them to come
    barrier = FORK.Barrier(16)

    def race() -> None:
        barrier.wait()
        assert answer(family) == 42

    processes = [in_child(race) for _ in range(16)]
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 16
    assert compiler.compiles() == 1
    assert len(published(cache_dir)) == 1


def test_racing_threads_compile_once_and_get_one_module(family: Family, compiler: CountingCompiler) -> None:
    barrier = threading.Barrier(4)
    modules = []

    def race() -> None:
        barrier.wait()
        modules.append(hotplan.jit.load("fake", "cpu", root=family.root))

    threads = [threading.Thread(target=race) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(modules) == 4
    assert all(module is modules[0] for module in modules)
    assert compiler.compiles() == 1


def test_a_killed_compile_leaves_nothing_to_load_and_blocks_nobody(
    family: Family, compiler: CountingCompiler, cache_dir: Path, tmp_path: Path
) -> None:
    started, release = tmp_path / "started", tmp_path / "release"
    # The compiler outlives its Python process, as ninja's children do, until the end of the test.
    compiler.set(f'case "$*" in *" -c "*) touch {started}; while [ ! -e {release} ]; do sleep 0.05; done;; esac')
    victim = in_child(lambda: build(family))
    try:
        wait_for(started.exists)
        assert victim.pid is not None
        os.kill(victim.pid, signal.SIGKILL)
        victim.join()
        assert published(cache_dir) == []
        orphans = list(cache_dir.glob(".build-*"))
        assert len(orphans) == 1
        compiler.set("")
        assert answer(family) == 42
        assert not any(orphan.exists() for orphan in orphans)
    finally:
        release.touch()


def test_a_lost_race_uses_what_the_winner_published(
    family: Family, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe("fake", "cpu", Memo(None), None, family.root)
    with cache.building(cache_dir, recipe) as staging:
        loser = compile_library(recipe, staging)
        with monkeypatch.context() as other_machine:  # behind a file system whose locks do not reach it
            other_machine.setattr(platform, "node", lambda: "other")
            other_machine.setattr(fcntl, "flock", lambda *args: None)
            won = build(family)
        before = won.path.stat()
        assert won.seconds > 0
        assert cache.publish(cache_dir, staging, loser, recipe, 1.0) == won.path
    assert won.path.stat() == before
    assert published(cache_dir) == [won.path.parent.name]


def test_one_who_waits_says_so(family: Family, cache_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    recipe = make_recipe("fake", "cpu", Memo(None), None, family.root)
    caplog.set_level("INFO", "hotplan.jit")
    ready, go = FORK.Event(), FORK.Event()

    def hold() -> None:
        with cache.building(cache_dir, recipe):
            ready.set()
            go.wait(30)

    holder = in_child(hold)
    ready.wait()
    waiter = threading.Thread(target=build, args=(family,))
    waiter.start()
    wait_for(lambda: "waiting for another process that builds fake (cpu)" in caplog.text)
    assert published(cache_dir) == []
    go.set()
    waiter.join()
    holder.join()
    assert len(published(cache_dir)) == 1


# --- damage -----------------------------------------------------------------------------------------------------------


def _truncate(entry: Path) -> None:
    library = entry / "hotplan_fake_cpu.so"
    os.truncate(library, library.stat().st_size // 2)


def _flip(entry: Path) -> None:
    data = bytearray((entry / "hotplan_fake_cpu.so").read_bytes())
    data[len(data) // 2] ^= 1
    (entry / "hotplan_fake_cpu.so").write_bytes(data)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated library": _truncate,
    "flipped bit": _flip,
    "no library": lambda entry: (entry / "hotplan_fake_cpu.so").unlink(),
    "no manifest": lambda entry: (entry / "manifest.json").unlink(),
    "empty manifest": lambda entry: (entry / "manifest.json").write_text(""),
    "another manifest": lambda entry: (entry / "manifest.json").write_text('{"parts": {}}'),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_reported_and_rebuilt(
    damage: str, family: Family, compiler: CountingCompiler, cache_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    entry = build(family).path.parent
    DAMAGES[damage](entry)
    assert answer(family) == 42
    assert compiler.compiles() == 2
    assert caplog.text.count(f"cache entry {entry} is damaged and not used") == 1
    assert published(cache_dir) == [entry.name]
    assert build(family).seconds == 0.0


# --- directories that cannot be written -------------------------------------------------------------------------------


def test_an_entry_in_an_unwritable_cache_loads(family: Family, cache_dir: Path, compiler: CountingCompiler) -> None:
    build(family)
    for path in (cache_dir, cache_dir / ".locks"):
        path.chmod(0o555)

    def load_there() -> None:
        drop_power_over_files()
        with pytest.raises(PermissionError):
            (cache_dir / "probe").touch()
        assert answer(family) == 42

    child = in_child(load_there)
    child.join()
    assert child.exitcode == 0
    assert compiler.compiles() == 1


def test_a_compile_for_an_unwritable_cache_goes_to_a_private_directory(
    family: Family, cache_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache_dir.mkdir(mode=0o555)

    def load_there() -> None:
        drop_power_over_files()
        assert answer(family) == 42
        (message,) = [record for record in caplog.records if record.levelname == "WARNING"]
        assert message.getMessage().startswith(f"cannot build in {cache_dir} ([Errno 13]")
        private = build(family).path.parents[1]
        assert private.parent != cache_dir
        assert private.stat().st_mode & 0o777 == 0o700

    child = in_child(load_there)
    child.join()
    assert child.exitcode == 0
    assert published(cache_dir) == []


def test_a_cache_under_a_file_is_unwritable(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOTPLAN_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert answer(family) == 42
    assert f"cannot build in {tmp_path / 'file' / 'cache'} (" in caplog.text
    with pytest.raises(OSError, match="file"):  # an explicit target has no substitute
        hotplan.jit.build("fake", "cpu", out=tmp_path / "file" / "cache", root=family.root)


def test_a_full_disk_is_an_unwritable_cache(
    family: Family, compiler: CountingCompiler, cache_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    full = f'case "$PWD" in {cache_dir}/*) echo "fatal error: x.o: No space left on device" >&2; exit 1;; esac'
    compiler.set(full)
    assert answer(family) == 42
    assert f"cannot build in {cache_dir} ([Errno 28] No space left on device)" in caplog.text
    assert published(cache_dir) == []


def test_a_name_that_cannot_be_built_in(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    library = build(family).path
    monkeypatch.setenv("HOTPLAN_CACHE_DIR", str(tmp_path / "my cache"))
    assert answer(family) == 42
    assert f"cannot build in {tmp_path / 'my cache'} (" in caplog.text
    shutil.copytree(library.parents[1], tmp_path / "my cache")
    assert build(family) == (tmp_path / "my cache" / library.parent.name / library.name, 0.0)


# --- directories that others can write --------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777])
@pytest.mark.parametrize("what", ["cache", "entry", "library"])
def test_what_others_can_write_is_refused(what: str, mode: int, family: Family, cache_dir: Path) -> None:
    library = build(family).path
    path = {"cache": cache_dir, "entry": library.parent, "library": library}[what]
    path.chmod(mode)
    with pytest.raises(RuntimeError, match=f"{path} can be written by other users .*{mode:o}.*chmod go-w {path}"):
        answer(family)
    path.chmod(0o755)
    assert answer(family) == 42


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("what", ["cache", "entry", "library"])
def test_what_belongs_to_somebody_else_is_refused(what: str, family: Family, cache_dir: Path) -> None:
    library = build(family).path
    path = {"cache": cache_dir, "entry": library.parent, "library": library}[what]
    try:
        os.chown(path, 12345, -1)
    except OSError:
        pytest.skip("this container knows one user")
    with pytest.raises(RuntimeError, match=f"{path} belongs to user id 12345"):
        answer(family)


def test_a_generous_umask_does_not_open_the_cache(family: Family, cache_dir: Path) -> None:
    before = os.umask(0)
    try:
        build(family)
    finally:
        os.umask(before)
    assert answer(family) == 42
    for path in (cache_dir, *cache_dir.rglob("*")):
        assert path.stat().st_mode & 0o022 == 0, path


# --- strict mode ------------------------------------------------------------------------------------------------------


def test_strict_mode_names_key_directory_and_command(
    family: Family, cache_dir: Path, compiler: CountingCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOTPLAN_STRICT", "1")
    recipe = make_recipe("fake", "cpu", Memo(None), None, family.root)
    command = f"{sys.executable} -m hotplan build --family fake --no-cuda --out {cache_dir}"
    for attempt in (answer, build):
        with pytest.raises(RuntimeError) as error:
            attempt(family)
        for part in ("HOTPLAN_STRICT", "fake (cpu)", recipe.key, str(cache_dir), command):
            assert part in str(error.value)
    assert compiler.compiles() == 0
    assert not cache_dir.exists()
    monkeypatch.setenv("HOTPLAN_STRICT", "0")
    build(family)
    monkeypatch.setenv("HOTPLAN_STRICT", "1")
    assert answer(family) == 42


def test_strict_mode_for_cuda_names_the_architectures(
    family: Family, make_toolkit: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(make_toolkit()))
    monkeypatch.setenv("HOTPLAN_STRICT", "1")
    monkeypatch.setenv("HOTPLAN_CUDA_ARCHS", "10.0a 9.0a")
    with pytest.raises(RuntimeError, match=r"(?s)fake \(cuda 9\.0a 10\.0a\).* --no-cpu --arch 9\.0a,10\.0a --out "):
        hotplan.jit.load("fake", "cuda", root=family.root)


@pytest.mark.parametrize("value", ["", "0", "false", "No", "off"])
def test_strict_mode_is_off(value: str, family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTPLAN_STRICT", value)
    assert answer(family) == 42


# --- entries of other machines ----------------------------------------------------------------------------------------


def test_without_compilers_an_entry_of_the_same_sources_serves(
    family: Family, only_path: Callable[..., Path], compiler: CountingCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = build(family).path
    monkeypatch.delenv("CXX")
    only_path()
    assert build(family) == (path, 0.0)
    assert answer(family) == 42
    family.write(HEADER, "inline int value() { return 1; }\n")
    with pytest.raises(RuntimeError, match=r"fake \(cpu\) is not in .* and cannot be compiled: no C\+\+ compiler"):
        answer(family)


def test_an_entry_for_more_architectures_serves(family: Family, make_toolkit: Callable[..., Path],
                                                monkeypatch: pytest.MonkeyPatch, cache_dir: Path) -> None:  # fmt: skip
    monkeypatch.setenv("CUDA_HOME", str(make_toolkit()))

    def recipe(*archs: str) -> cache.Recipe:
        return make_recipe("fake", "cuda", Memo(None), archs, family.root)

    library = build(family).path  # any bytes do, nothing is loaded here
    with cache.building(cache_dir, recipe("9.0a", "10.0a")) as staging:
        copy = Path(shutil.copy(library, staging / "hotplan_fake_cuda.so"))
        path = cache.publish(cache_dir, staging, copy, recipe("9.0a", "10.0a"), 1.0)
    for archs in (("9.0a", "10.0a"), ("9.0a",), ("10.0a",)):
        assert cache.find(cache_dir, recipe(*archs)) == path
    for archs in (("9.0a", "12.0a"), ("9.0",)):
        assert cache.find(cache_dir, recipe(*archs)) is None


# --- messages ---------------------------------------------------------------------------------------------------------


def test_one_line_per_compile_on_stderr(
    family: Family, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hotplan.jit.log.logger.hasHandlers", lambda: False)  # pytest's own
    path, seconds = build(family)
    build(family)
    assert capfd.readouterr().err == f"hotplan: compiled fake (cpu) in {seconds:.1f} s -> {path}\n"


def test_one_line_per_compile_in_a_configured_log(
    family: Family, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level("INFO", "hotplan.jit")
    path, seconds = build(family)
    build(family)
    assert caplog.record_tuples == [("hotplan.jit", 20, f"compiled fake (cpu) in {seconds:.1f} s -> {path}")]
    assert capfd.readouterr().err == ""


def test_the_line_can_be_switched_off(
    family: Family, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hotplan.jit.log.logger.hasHandlers", lambda: False)
    monkeypatch.setattr("hotplan.jit.log.logger.level", 30)
    build(family)
    assert capfd.readouterr().err == ""


def test_a_failed_compile_shows_the_error_and_keeps_the_log(family: Family, cache_dir: Path) -> None:
    family.write(HEADER, "#error this header is wrong\n" + "int broken(\n" * 200)
    with pytest.raises(RuntimeError) as error:
        build(family)
    message = str(error.value)
    recipe = make_recipe("fake", "cpu", Memo(None), None, family.root)
    log = cache_dir / f"{recipe.name}.log"
    assert message.startswith(f"compiling fake (cpu) failed; the full log is in {log}\n")
    assert f"{family.root / HEADER}:1:2: error: #error this header is wrong" in message
    assert len(message.splitlines()) <= 42
    assert "FAILED: " in log.read_text()
    assert "FAILED: " not in message
    assert published(cache_dir) == [log.name]
    assert not list(cache_dir.glob(".build-*"))


def test_missing_compiler(family: Family, only_path: Callable[..., Path]) -> None:
    only_path()
    with pytest.raises(RuntimeError, match=r"no C\+\+ compiler: looked for .*c\+\+, g\+\+ and clang\+\+"):
        answer(family)


def test_an_undefined_function_is_an_error_of_the_build(family: Family) -> None:
    family.write("csrc/fake/cpu.cpp", "int missing();\nint backend() { return missing(); }\n")
    with pytest.raises(RuntimeError, match=r"(?s)compiling fake \(cpu\) failed.*undefined reference to `missing\(\)'"):
        answer(family)


def test_a_library_that_does_not_load(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    path = build(family).path

    def fail(path: Path) -> None:
        raise RuntimeError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr(tvm_ffi, "load_module", fail)
    with pytest.raises(RuntimeError, match=f"{path} .* cannot be loaded: libcudart.so.13: cannot open"):
        answer(family)


# --- where the cache is -----------------------------------------------------------------------------------------------


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for var in ("XDG_CACHE_HOME", "HOTPLAN_CACHE_DIR"):
        monkeypatch.delenv(var, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.cache_root() == tmp_path / ".cache/hotplan"
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache.cache_root() == Path("/xdg/hotplan")
    monkeypatch.setenv("SGLANG_CACHE_DIR", "~/sglang")
    assert cache.cache_root() == tmp_path / "sglang/hotplan"
    monkeypatch.setenv("HOTPLAN_CACHE_DIR", "~/mine")
    assert cache.cache_root() == tmp_path / "mine"
    monkeypatch.setenv("HOTPLAN_CACHE_DIR", "relative")
    assert cache.cache_root() == Path.cwd() / "relative"
    monkeypatch.setenv("HOTPLAN_CACHE_DIR", "~nobody-of-that-name/cache")
    with pytest.raises(RuntimeError, match="set HOTPLAN_CACHE_DIR"):
        cache.cache_root()
