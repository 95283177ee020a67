"""Looking after a cache directory: what is in it, what of it is still good, and taking the rest away."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from hotplan.jit import cache, key
from hotplan.jit.key import Recipe, make_recipe
from hotplan.jit.toolchain import Memo
from hotplan.jit.trust import refuse_foreign

_ENTRY = re.compile(r"(\w+)-(cpu|cuda)-[0-9a-f]{16}(\.log)?")
_WORK = re.compile(r"\.build-(\w+-(?:cpu|cuda))-.+")  # what `cache.building` works in
_DRAFT = re.compile(r"\.(compilers|manifest)\.json\.[-\d]+")

# Another of these is another version of hotplan or of what it is built against. Other compilers, machines or variables
# are another setting, which a cache that several machines share is right to keep.
_VERSION_PARTS = {"format", "family", "sources", "flags", "tvm_ffi"}

SECONDS_PER_DAY = 86400
# Longer than any build. Another machine's lock may not be seen here; if its clock is another, too, what it can lose
# is a build.
_ABANDONED_DAYS = 1.0


@dataclass(frozen=True)
class Entry:
    """Something in a cache that may be removed: a built module, the log of a failed compile, or the working directory
    of a build that was killed.

    `why_not` is "" where this installation can load the module; `outdated` if no setting of it could.
    """

    path: Path
    what: str  # <family>-<backend>, the name of its lock
    kind: str  # "module", "log" or "leftover"
    archs: tuple[str, ...]
    bytes: int
    built: float  # seconds since 1970
    version: str
    why_not: str
    outdated: bool

    @property
    def days(self) -> float:
        return _days_since(self.built)

    def as_dict(self) -> dict[str, Any]:
        usable = self.kind == "module" and not self.why_not
        return {**asdict(self), "path": str(self.path), "days": round(self.days, 3), "usable": usable}


def _days_since(moment: float) -> float:
    """At least 0: a clock elsewhere may be ahead, and what comes from the future is not old."""
    return max(0.0, time.time() - moment) / SECONDS_PER_DAY


def survey(root: Path, shipped: bool = False) -> list[Entry]:
    """All entries of a cache directory, by name. Other files are nobody's business here.

    `shipped`: by the rules of HOTPLAN_PREBUILT_DIR. Raises RuntimeError like `trust.refuse_foreign`.
    """
    if not root.is_dir():
        return []
    refuse_foreign(root)
    memo = Memo(root / cache.COMPILERS)
    recipes = {
        f"{family}-{backend}": make_recipe(family, backend, memo, archs=())  # for whatever GPUs
        for family in key.families()
        for backend in key.UNITS
    }
    found = []
    for path in sorted(root.iterdir()):
        name = _ENTRY.fullmatch(path.name)
        work = _WORK.fullmatch(path.name)
        with contextlib.suppress(FileNotFoundError):  # somebody removed it just now
            if work and not cache.is_locked(root, work[1]):
                found.append(_leftover(path, work[1]))
            elif name and name[3] and path.is_file():
                stat = path.stat()
                what = f"{name[1]}-{name[2]}"
                found.append(Entry(path, what, "log", (), stat.st_size, stat.st_mtime, "", "a failed compile", False))
            elif name and not name[3] and path.is_dir():
                found.append(_look(path, f"{name[1]}-{name[2]}", recipes, shipped))
    return found


def _leftover(path: Path, what: str) -> Entry:
    changed = path.stat().st_mtime
    abandoned = path.name.startswith(cache.work_prefix(what)) or _days_since(changed) > _ABANDONED_DAYS
    return Entry(path, what, "leftover", (), _size(path), changed, "", "left by a build that was killed", abandoned)


def _size(directory: Path) -> int:
    total = 0
    for where, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(where, name)).st_size
    return total


def _look(path: Path, what: str, recipes: dict[str, Recipe], shipped: bool) -> Entry:
    size, built, version, archs = _size(path), 0.0, "", ()
    why_not, outdated = "", False
    try:
        built = path.stat().st_mtime
        manifest = cache.read_manifest(path)
        built = float(manifest.get("built", built))
        version = str(manifest.get("hotplan", ""))
        archs = tuple(manifest["parts"]["archs"])
        cache.refuse_damaged(path / manifest["library"], manifest)
        if what in recipes:
            differences = recipes[what].differences(manifest["parts"], shipped)
            why_not, outdated = ", ".join(differences.values()), not _VERSION_PARTS.isdisjoint(differences)
        else:
            why_not, outdated = "this version has no such family", True
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why_not, outdated = f"damaged: {error}", True
    return Entry(path, what, "module", archs, size, built, version, why_not, outdated)


def remove(root: Path, entries: Iterable[Entry], keep: Callable[[str], object]) -> list[Entry]:
    """Takes entries out of a cache, and gives those that are gone.

    What another process is building, it has locked: entries of that family and backend stay, and `keep` is called with
    its name. A process that has loaded an entry does not notice, since the library stays mapped. An entry disappears
    by one rename, so nobody finds half of it. Raises OSError where `root` cannot be written.
    """
    gone = []
    for what, group in groupby(sorted(entries, key=lambda entry: entry.what), key=lambda entry: entry.what):
        with cache.locked(root, what, busy=None) as mine:
            if not mine:
                keep(what)
                continue
            bin_ = Path(tempfile.mkdtemp(prefix=cache.work_prefix(what), dir=root))
            try:
                for entry in group:
                    with contextlib.suppress(FileNotFoundError):  # somebody else removed it
                        os.rename(entry.path, bin_ / entry.path.name)
                        gone.append(entry)
            finally:
                shutil.rmtree(bin_, ignore_errors=True)
    if gone and (root / cache.MANIFEST).exists():
        cache.write_index(root)
    return gone


def remove_drafts(root: Path) -> None:
    """Takes files away that somebody was killed over while writing them, which takes a moment: those of another day."""
    for path in root.glob(".*.json.*"):
        with contextlib.suppress(FileNotFoundError):
            if _DRAFT.fullmatch(path.name) and _days_since(path.stat().st_mtime) > _ABANDONED_DAYS:
                path.unlink()
