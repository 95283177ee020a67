"""Who could have put code at a path. Loading a library runs it, so whoever can write it, or replace it, is its author.

docs/security.md says what is checked, and what is not.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_OTHERS_SEARCH = stat.S_IXGRP | stat.S_IXOTH
_MAX_LINKS = 40  # as in Linux


def refuse_foreign(path: Path) -> None:
    """Raises RuntimeError if somebody else could have put code at `path`: loading it would run that code.

    `path` itself must belong to the user or root and be writable by nobody else. On the way to it, nobody else may be
    able to put something in its place: each directory must be theirs, too, and writable by nobody else, unless its
    sticky bit protects what is in it or nobody else gets that far. So what was checked stays what is loaded. Raises
    OSError where there is nothing.
    """
    *way, (real, status) = _walk(path)
    hidden: dict[Path, bool] = {}  # of every directory, whether others cannot reach what is in it
    for where, entry in way:
        # A link may lead out of a hidden place, so this goes by where a directory is, not by what came before it.
        unreachable = where.parent != where and hidden[where.parent]
        hidden[where] = unreachable or not entry.st_mode & _OTHERS_SEARCH
        if where != real and not unreachable:
            _check_on_the_way(path, where, entry)
    if status.st_uid not in (0, os.geteuid()):
        raise RuntimeError(
            f"{path} belongs to user id {status.st_uid}, not to you ({os.geteuid()}) or root, and hotplan "
            "would load code from it. Change the owner, or set HOTPLAN_CACHE_DIR to a directory of yours."
        )
    if status.st_mode & _OTHERS_WRITE:
        raise RuntimeError(
            f"{path} can be written by other users (mode {stat.S_IMODE(status.st_mode):o}), and hotplan would load "
            f"code from it. Run `chmod go-w {path}`, or set HOTPLAN_CACHE_DIR to a directory of yours."
        )


def make_directory(path: Path) -> None:
    """`path` and what it lies in, none of it writable by others whatever the umask. Raises OSError."""
    missing = [part for part in (path, *path.parents) if not part.exists()]
    for part in reversed(missing):
        try:
            os.mkdir(part, 0o755)
        except FileExistsError:
            if not part.is_dir():  # else somebody was faster
                raise


def replace_text(path: Path, text: str) -> None:
    """Writes a whole file. Raises OSError.

    It is not writable by others for a moment: whoever opened it then could go on writing.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_native_id()}")
    try:
        with open(draft, "w", opener=lambda name, flags: os.open(name, flags, 0o644)) as file:
            file.write(text)
        os.replace(draft, path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def _check_on_the_way(path: Path, where: Path, entry: os.stat_result) -> None:
    kind = "link" if stat.S_ISLNK(entry.st_mode) else "directory"
    if entry.st_uid not in (0, os.geteuid()) and entry.st_uid != _unmapped():
        raise RuntimeError(
            f"{path} can be replaced by user id {entry.st_uid}, to whom the {kind} {where} belongs, and hotplan would "
            "load code from it. Set HOTPLAN_CACHE_DIR to a directory that only you and root can replace."
        )
    if kind == "directory" and entry.st_mode & _OTHERS_WRITE and not entry.st_mode & stat.S_ISVTX:
        raise RuntimeError(
            f"{path} can be replaced by other users, who can write to {where} (mode {stat.S_IMODE(entry.st_mode):o}), "
            f"and hotplan would load code from it. Run `chmod go-w {where}` (or `chmod +t {where}`, if they have to "
            "write there), or set HOTPLAN_CACHE_DIR to a directory that only you and root can replace."
        )


def _walk(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """All that decides what `path` names: every directory and symbolic link from / on, and at last what is there."""
    here, links = Path("/"), 0
    ahead = list(reversed(path.absolute().parts[1:]))
    yield here, os.lstat(here)
    while ahead:
        part = ahead.pop()
        if part == "..":
            here = here.parent  # no link is in it
            continue
        entry = os.lstat(here / part)
        yield here / part, entry
        if not stat.S_ISLNK(entry.st_mode):
            here = here / part
            continue
        links += 1
        if links > _MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        target = Path(os.readlink(here / part))
        here = Path("/") if target.is_absolute() else here
        ahead += reversed(target.parts[target.is_absolute() :])
    yield here, os.lstat(here)


def _unmapped() -> int | None:
    """The id that all users show as whom this process's user namespace does not know: as root of the host does in a
    container of an ordinary user, to whom / belongs there. None where every user is known."""
    try:
        ranges = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
        overflow = int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return None
    return None if any(int(count) >= 2**32 - 1 for _, _, count in ranges) else overflow
