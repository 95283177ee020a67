"""Caches on real file systems of which nothing more can be had: read-only ones, and full ones, at every moment."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

import pytest
from click.testing import CliRunner
from compile_support import HEADER, CountingCompiler, Family, Mounts, answer, build, leftovers, published, with_mounts

import hotplan.jit
from hotplan.cli.main import main
from hotplan.jit import cache, key, loader, upkeep
from hotplan.jit.key import make_recipe


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_a_read_only_cache_serves_what_it_has(
    family: Family,
    compiler: CountingCompiler,
    cache_dir: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    build(family)
    before = {path: path.stat() for path in (cache_dir, *cache_dir.rglob("*"))}

    def work(mounts: Mounts) -> None:
        mounts.read_only(cache_dir)
        with pytest.raises(OSError, match="Read-only"):
            (cache_dir / "probe").touch()
        assert answer(family) == 42
        monkeypatch.setenv("HOTPLAN_STRICT", "1")
        assert answer(family) == 42
        assert compiler.compiles() == 1
        monkeypatch.delenv("HOTPLAN_STRICT")
        assert warnings(caplog) == []
        # What it does not have is compiled, for this process alone.
        family.write(HEADER, "inline int value() { return 7; }\n")
        assert answer(family) == 8
        (message,) = warnings(caplog)
        assert message.startswith(f"cannot build in {cache_dir} ([Errno 30] Read-only file system")
        monkeypatch.setattr(key, "source_root", lambda: family.root)
        for command in ("info", "clear"):
            result = CliRunner().invoke(main, ["cache", command])
            assert "Traceback" not in result.output
        assert result.exit_code == 1
        assert "Read-only file system" in result.output

    with_mounts(work)
    assert {path: path.stat() for path in (cache_dir, *cache_dir.rglob("*"))} == before


def fill(directory: Path) -> None:
    with contextlib.suppress(OSError):
        for number in range(100):
            (directory / f"filler {number}").write_bytes(bytes(10**4))


def assert_as_good_as_new(cache_dir: Path, root: Path) -> None:
    """No broken entry, and none that a build worked in."""
    assert leftovers(cache_dir) == []
    for entry in published(cache_dir):
        assert cache.find(cache_dir, make_recipe("fake", "cpu", None, None, root)), entry


@pytest.mark.parametrize("limit", ["pages", "inodes"])
def test_a_disk_that_fills_up_at_any_moment(
    limit: str, family: Family, compiler: CountingCompiler, cache_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """From nothing at all to enough for everything: making directories, sources, objects, the library, the manifest."""
    sizes = (3, 5, 8, 11, 14, 17, 20, 24, 28, 64) if limit == "pages" else (2, 4, 7, 10, 13, 16, 18, 20, 22, 64)

    def work(mounts: Mounts) -> None:
        places = []
        for size in sizes:
            mounts.small(cache_dir, f"size={4 * size}k" if limit == "pages" else f"nr_inodes={size}")
            caplog.clear()
            before = compiler.compiles()
            assert answer(family) == 42
            said = warnings(caplog)
            if said:
                (message,) = said
                assert message.startswith(f"cannot build in {cache_dir} ([Errno 28] No space left on device")
                assert published(cache_dir) == []
            else:
                assert len(published(cache_dir)) == 1
                assert compiler.compiles() == before + 1
            places.append(not said)
            assert_as_good_as_new(cache_dir, family.root)
            # A full disk is no reason not to serve what is there.
            fill(cache_dir)
            assert answer(family) == 42
            mounts.end(cache_dir)
        assert places[0] is False
        assert places[-1] is True
        assert places == sorted(places)

    with_mounts(work)


def test_when_no_place_is_left_the_error_says_so(
    family: Family, cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(mounts: Mounts) -> None:
        mounts.small(tmp_path / "full", "size=48k")
        monkeypatch.setenv("HOTPLAN_CACHE_DIR", str(tmp_path / "full" / "cache"))
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "full"))
        with pytest.raises(RuntimeError) as error:
            answer(family)
        assert str(error.value).startswith(
            f"fake (cpu) can be built neither in {tmp_path / 'full' / 'cache'} ([Errno 28] "
        )
        assert f" nor in {tmp_path / 'full'} ([Errno 28] No space left on device" in str(error.value)
        assert_as_good_as_new(tmp_path / "full" / "cache", family.root)
        with pytest.raises(OSError, match="No space left on device"):  # an explicit target has no substitute
            hotplan.jit.build("fake", "cpu", out=tmp_path / "full" / "out", root=family.root)

    with_mounts(work)


def test_a_full_disk_is_known_in_any_language(
    family: Family, compiler: CountingCompiler, cache_dir: Path, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Compilers are asked to speak English."""
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    compiler.set(
        f'case "$PWD" in {cache_dir}/*) if [ "$LC_ALL" = C ]; then echo "x.o: No space left on device" >&2; '
        'else echo "x.o: Auf dem Geraet ist kein Speicherplatz mehr verfuegbar" >&2; fi; exit 1;; esac'
    )
    assert answer(family) == 42
    assert "No space left on device" in caplog.text
    assert os.environ["LC_ALL"] == "de_DE.UTF-8"


def test_a_full_disk_under_the_compilers_temporary_files(
    family: Family, cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(mounts: Mounts) -> None:
        mounts.small(tmp_path / "full", "nr_inodes=2")
        monkeypatch.setenv("TMPDIR", str(tmp_path / "full"))
        (tmp_path / "full" / "filler").touch()
        with pytest.raises(RuntimeError, match="No space left on device"):
            answer(family)
        assert published(cache_dir) == []
        monkeypatch.delenv("TMPDIR")
        assert answer(family) == 42

    with_mounts(work)


def test_the_private_directory_goes_with_its_process_alone(
    family: Family, cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child that is forked has its parent's exit handlers, too."""
    registered = []
    monkeypatch.setattr(loader.atexit, "register", lambda *call: registered.append(call))
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOTPLAN_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert answer(family) == 42
    ((remove, private, owner),) = registered
    monkeypatch.setattr(os, "getpid", lambda: owner + 1)
    remove(private, owner)
    assert private.is_dir()
    monkeypatch.undo()
    remove(private, owner)
    assert not private.exists()


def test_prune_on_a_full_disk(family: Family, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taking away needs a directory to move things into; where there is no place for that, the error is one line."""
    monkeypatch.setattr(key, "source_root", lambda: family.root)

    def work(mounts: Mounts) -> None:
        mounts.small(cache_dir, "size=200k")
        build(family)
        fill(cache_dir)
        result = CliRunner().invoke(main, ["cache", "clear"])
        assert "Traceback" not in result.output
        assert (result.exit_code, upkeep.survey(cache_dir) == []) in ((0, True), (1, False))

    with_mounts(work)
