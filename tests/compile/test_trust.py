"""Who may have put code at a path: docs/security.md, case by case, with real owners, modes, links and namespaces."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from compile_support import CountingCompiler, Family, answer, build, in_child

import hotplan.jit
from hotplan.cli.main import main
from hotplan.jit import loader
from hotplan.jit.toolchain import Memo
from hotplan.jit.trust import make_directory, refuse_foreign, replace_text

SOMEBODY = 12345
NOBODY = int(Path("/proc/sys/kernel/overflowuid").read_text())

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away and become others")


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory that all can reach. pytest's own are below one that they cannot."""
    directory = Path(tempfile.mkdtemp(prefix="hotplan-test-", dir="/tmp"))
    directory.chmod(0o755)
    monkeypatch.setenv("HOTPLAN_CACHE_DIR", str(directory / "up" / "cache"))
    yield directory
    directory.chmod(0o755)
    shutil.rmtree(directory)


def give(path: Path, uid: int = SOMEBODY) -> None:
    try:
        os.chown(path, uid, -1, follow_symlinks=False)
    except OSError:
        pytest.skip("this container knows one user")


def nested(place: Path, names: str = "up/cache") -> Path:
    path = place / names
    path.mkdir(parents=True)
    return path


# --- directories on the way -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o2775, 0o757])
def test_a_directory_above_that_others_can_write_is_refused(mode: int, place: Path) -> None:
    path = nested(place)
    path.parent.chmod(mode)
    expected = (
        f"{path} can be replaced by other users, who can write to {path.parent} .*{mode:o}.*chmod go-w {path.parent}"
    )
    with pytest.raises(RuntimeError, match=expected):
        refuse_foreign(path)
    path.parent.chmod(0o755)
    refuse_foreign(path)


def test_a_sticky_bit_protects_what_is_in_it(place: Path) -> None:
    path = nested(place)
    path.parent.chmod(0o1777)
    refuse_foreign(path)
    path.chmod(0o1777)  # but not what others put into the directory itself
    with pytest.raises(RuntimeError, match=f"{path} can be written by other users"):
        refuse_foreign(path)


def test_what_others_cannot_reach_they_cannot_write(place: Path) -> None:
    path = nested(place, "home/shared/cache")
    path.parent.chmod(0o777)
    for mode, reachable in ((0o755, True), (0o711, True), (0o750, True), (0o744, False), (0o700, False)):
        (place / "home").chmod(mode)
        if reachable:
            with pytest.raises(RuntimeError, match="can be replaced"):
                refuse_foreign(path)
        else:
            refuse_foreign(path)


def test_a_hidden_directory_hides_nothing_but_what_is_in_it(place: Path) -> None:
    """A link leads out of it, and `..` does."""
    path = nested(place, "open/cache")
    path.parent.chmod(0o777)
    hidden = nested(place, "hidden")
    hidden.chmod(0o700)
    (hidden / "absolute").symlink_to(path)
    (hidden / "relative").symlink_to("../open/cache")
    (hidden / "after").symlink_to("../open/cache/..")
    for name in ("absolute", "relative"):
        with pytest.raises(RuntimeError, match=f"who can write to {path.parent} "):
            refuse_foreign(hidden / name)
    with pytest.raises(RuntimeError, match=f"{hidden / 'after'} can be written by other users"):
        refuse_foreign(hidden / "after")
    with pytest.raises(RuntimeError, match="can be replaced"):
        refuse_foreign(hidden / ".." / "open" / "cache")
    path.parent.chmod(0o755)
    for name in ("absolute", "relative", "after"):
        refuse_foreign(hidden / name)


@as_root
@pytest.mark.parametrize("mode", [0o755, 0o700, 0o1777])
def test_a_directory_above_of_somebody_else_is_refused(mode: int, place: Path) -> None:
    path = nested(place)
    give(path.parent)
    path.parent.chmod(mode)
    with pytest.raises(
        RuntimeError, match=f"{path} can be replaced by user id {SOMEBODY}, to whom the directory {path.parent}"
    ):
        refuse_foreign(path)


@as_root
def test_a_link_of_somebody_else_is_refused(place: Path) -> None:
    path = nested(place)
    link = place / "sticky" / "link"
    link.parent.mkdir()
    link.parent.chmod(0o1777)
    link.symlink_to(path)
    refuse_foreign(link)
    give(link)
    with pytest.raises(
        RuntimeError, match=f"{link} can be replaced by user id {SOMEBODY}, to whom the link {link} belongs"
    ):
        refuse_foreign(link)


def test_links_in_a_circle_and_into_nothing(place: Path) -> None:
    (place / "a").symlink_to("b")
    (place / "b").symlink_to("a")
    (place / "c").symlink_to("nothing")
    for name in ("a", "c", "nothing"):
        with pytest.raises(OSError, match=name if name != "c" else "nothing"):
            refuse_foreign(place / name)


@as_root
def test_the_hosts_root_is_nobody_in_a_container_of_an_ordinary_user(place: Path) -> None:
    path = nested(place)
    for directory in (path, path.parent):
        give(directory)

    def inside(alone: bool) -> None:
        os.setgroups([])
        os.setresgid(SOMEBODY, SOMEBODY, SOMEBODY)
        os.setresuid(SOMEBODY, SOMEBODY, SOMEBODY)
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: else /proc/self is root's
        if alone:
            if libc.unshare(0x10000000) != 0:  # CLONE_NEWUSER
                os._exit(77)
            Path("/proc/self/uid_map").write_text(f"{SOMEBODY} {SOMEBODY} 1")
            assert os.stat("/").st_uid == NOBODY
        assert os.geteuid() == SOMEBODY
        refuse_foreign(path)

    for alone in (False, True):
        child = in_child(lambda alone=alone: inside(alone))
        child.join()
        if child.exitcode == 77:
            pytest.skip("no user namespaces here")
        assert child.exitcode == 0
    # Where every user is known, nobody is one of them.
    give(path.parent, NOBODY)
    with pytest.raises(RuntimeError, match=f"can be replaced by user id {NOBODY}"):
        refuse_foreign(path)


# --- everything that a load reads -------------------------------------------------------------------------------------


def test_nothing_is_built_loaded_listed_or_removed_where_others_can_replace_it(
    family: Family, place: Path, compiler: CountingCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "up").mkdir()
    (place / "up").chmod(0o777)
    for attempt in (answer, build):
        with pytest.raises(RuntimeError, match="can be replaced by other users"):
            attempt(family)
    assert compiler.compiles() == 0
    (place / "up").chmod(0o755)
    assert answer(family) == 42
    (place / "up").chmod(0o777)
    with pytest.raises(RuntimeError, match="can be replaced by other users"):
        answer(family)
    for command in ("info", "prune", "clear"):
        result = CliRunner().invoke(main, ["cache", command])
        assert result.exit_code == 1
        assert "can be replaced by other users" in result.output
    monkeypatch.setenv("HOTPLAN_PREBUILT_DIR", str(place / "up" / "cache"))
    monkeypatch.setenv("HOTPLAN_CACHE_DIR", str(place / "cache"))
    with pytest.raises(RuntimeError, match="can be replaced by other users"):
        answer(family)


@pytest.mark.parametrize("name", ["manifest.json", "compilers.json"])
def test_files_that_others_can_write_are_refused(name: str, family: Family, cache_dir: Path) -> None:
    library = build(family).path
    path = {"manifest.json": library.parent, "compilers.json": cache_dir}[name] / name
    path.chmod(0o666)
    with pytest.raises(RuntimeError, match=f"{path} can be written by other users"):
        answer(family)
    path.chmod(0o644)
    assert answer(family) == 42


def test_a_manifest_names_no_library_elsewhere(family: Family, cache_dir: Path, tmp_path: Path) -> None:
    library = build(family).path
    elsewhere = Path(shutil.copy(library, tmp_path / "elsewhere.so"))
    manifest = json.loads((library.parent / "manifest.json").read_text())
    for name in (str(elsewhere), f"../../{elsewhere.name}"):
        (library.parent / "manifest.json").write_text(json.dumps(manifest | {"library": name}))
        loader._modules.clear()
        assert build(family).path == library  # built anew
        assert build(family).seconds == 0.0


def test_links_and_hard_links_of_ones_own_serve(family: Family, place: Path, tmp_path: Path) -> None:
    """A hard link has the owner and the mode of the file; what others can write is refused under any name."""
    library = build(family).path
    os.link(library, place / "another name")
    assert build(family).seconds == 0.0
    moved = shutil.move(library.parent, place / "elsewhere")
    library.parent.symlink_to(moved)
    assert build(family).seconds == 0.0
    (place / "another name").chmod(0o666)
    with pytest.raises(RuntimeError, match=f"{library} can be written by other users"):
        build(family)
    (place / "another name").chmod(0o755)
    place.chmod(0o777)
    with pytest.raises(RuntimeError, match=f"can be replaced by other users, who can write to {place} "):
        build(family)


# --- what is written --------------------------------------------------------------------------------------------------


@pytest.fixture
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def test_directories_are_nobody_elses_whatever_the_umask(place: Path, no_umask: None, family: Family) -> None:
    assert answer(family) == 42
    assert answer(family) == 42  # it refuses nothing that it made
    for path in (place / "up", place / "up" / "cache", *(place / "up" / "cache").rglob("*")):
        assert path.stat().st_mode & 0o022 == 0, path
    make_directory(place / "up" / "cache")
    (place / "file").touch()
    with pytest.raises(OSError, match="file"):
        make_directory(place / "file" / "below")


def test_files_are_never_writable_by_others(place: Path, no_umask: None, monkeypatch: pytest.MonkeyPatch) -> None:
    modes = []
    replace = os.replace

    def watched(draft: Path, path: Path) -> None:
        modes.append(os.stat(draft).st_mode & 0o777)
        replace(draft, path)

    monkeypatch.setattr(os, "replace", watched)
    replace_text(place / "file", "text")
    memo = Memo(place / "compilers.json")
    memo.ask("--version", "/bin/sh", lambda: "1")
    memo.save()
    assert modes == [0o644, 0o644]
    assert (place / "file").read_text() == "text"


def test_a_lock_is_its_owners_alone(family: Family, cache_dir: Path) -> None:
    """Who can open a file can lock it."""
    build(family)
    assert (cache_dir / ".locks" / "fake-cpu").stat().st_mode & 0o777 == 0o600


def test_an_explicit_target_is_no_exception(family: Family, place: Path) -> None:
    place.chmod(0o777)
    refused: Callable[[], object] = lambda: hotplan.jit.build("fake", "cpu", out=place / "out", root=family.root)  # noqa: E731
    with pytest.raises(RuntimeError, match="can be replaced by other users"):
        refused()


# --- the document -----------------------------------------------------------------------------------------------------


def message(path: Path) -> str:
    with pytest.raises(RuntimeError) as error:
        refuse_foreign(path)
    return str(error.value)


@as_root
def test_the_document_shows_what_is_said(place: Path) -> None:
    text = " ".join((Path(__file__).parents[2] / "docs" / "security.md").read_text().split())
    path = nested(place)
    path.chmod(0o777)
    assert message(path).replace(str(path), "/tmp/scratch/hotplan") in text
    path.chmod(0o755)
    path.parent.chmod(0o777)
    assert message(path).replace(str(path), "/scratch/hotplan").replace(str(path.parent), "/scratch") in text
    path.parent.chmod(0o755)
    give(path.parent, 1001)
    assert message(path).replace(str(path), "/srv/alice/hotplan").replace(str(path.parent), "/srv/alice") in text
