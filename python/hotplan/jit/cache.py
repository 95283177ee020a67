"""The cache on disk: where it is, who may write it, finding and publishing entries, one builder at a time.

An entry is a directory <family>-<backend>-<16 digits of the key>/ with the library and manifest.json. It
comes into being by one rename of a finished directory, so what is there under that name was complete once.

What `hotplan build --out` made has the same form. HOTPLAN_PREBUILT_DIR names such directories, which are only read.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import glob
import hashlib
import json
import os
import platform
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hotplan.jit.key import Recipe
from hotplan.jit.log import say
from hotplan.jit.trust import make_directory, refuse_foreign, replace_text
from hotplan.version import __version__

MANIFEST = "manifest.json"
COMPILERS = "compilers.json"
LOCKS = ".locks"
PREBUILT_VAR = "HOTPLAN_PREBUILT_DIR"


def cache_root() -> Path:
    """HOTPLAN_CACHE_DIR, else $SGLANG_CACHE_DIR/hotplan, $XDG_CACHE_HOME/hotplan or ~/.cache/hotplan."""
    choices = (
        (os.environ.get("HOTPLAN_CACHE_DIR"), ""),
        (os.environ.get("SGLANG_CACHE_DIR"), "hotplan"),
        (os.environ.get("XDG_CACHE_HOME"), "hotplan"),
        ("~/.cache", "hotplan"),
    )
    base, name = next((base, name) for base, name in choices if base)
    path = os.path.expanduser(base)
    if path.startswith("~"):
        raise RuntimeError(f"the home directory in {base!r} is unknown: set HOTPLAN_CACHE_DIR")
    return Path(os.path.abspath(path), name)


def prebuilt_dirs() -> list[Path]:
    """The directories that HOTPLAN_PREBUILT_DIR names, separated as in PATH, in the order of the search."""
    names = filter(None, os.environ.get(PREBUILT_VAR, "").split(os.pathsep))
    return [Path(os.path.abspath(os.path.expanduser(name))) for name in names]


def _library(entry: Path, recipe: Recipe, shipped: bool = False) -> Path:
    """The library in `entry`; ValueError if it does not serve `recipe` or the entry is damaged."""
    try:
        for path in (entry, entry / MANIFEST):
            refuse_foreign(path)
        manifest = read_manifest(entry)
        if wrong := recipe.differences(manifest["parts"], shipped):
            raise ValueError(", ".join(wrong.values()))
        library: Path = entry / manifest["library"]
        if library.parent != entry:
            raise ValueError(f"damaged, it names a library elsewhere: {manifest['library']}")
        refuse_foreign(library)
        refuse_damaged(library, manifest)
    except (OSError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"damaged, {type(error).__name__}: {error}") from error
    return library


def refuse_damaged(library: Path, manifest: dict[str, Any]) -> None:
    """Raises ValueError if it is not what was built, and OSError or KeyError."""
    # It is paged in anyway; hashing 1 MB takes 1 ms, and running a truncated library is a SIGBUS.
    if hashlib.sha256(library.read_bytes()).hexdigest() != manifest["sha256"]:
        raise ValueError(f"{library.name} is not what was built")


def read_manifest(entry: Path) -> dict[str, Any]:
    """Raises OSError or ValueError."""
    manifest: dict[str, Any] = json.loads((entry / MANIFEST).read_bytes())
    return manifest


def _candidates(root: Path, recipe: Recipe) -> list[Path]:
    return sorted(root.glob(f"{recipe.family}-{recipe.backend}-{'[0-9a-f]' * 16}"))


def near_misses(root: Path, recipe: Recipe, shipped: bool = False) -> str:
    """Why the entries of this family and backend in `root` do not serve `recipe`; "" if there are none."""
    reasons = []
    for entry in _candidates(root, recipe):
        try:
            _library(entry, recipe, shipped)
        except ValueError as error:
            reasons.append(f"{entry.name}: {error}")
    return "; ".join(reasons)


@functools.cache  # once, though find() runs again under the lock
def _report_damage(entry: Path, error: str) -> None:
    say(f"cache entry {entry} is damaged and not used: {error}", warning=True)


def find(root: Path, recipe: Recipe) -> Path | None:
    """The library to load for `recipe`, or None. Writes nothing. Raises RuntimeError like refuse_foreign."""
    if not root.is_dir():
        return None
    refuse_foreign(root)
    exact = root / recipe.name
    if exact.is_dir():
        try:
            return _library(exact, recipe)
        except ValueError as error:
            if exact.is_dir():  # else somebody removed it just now
                _report_damage(exact, str(error))
    for other in _candidates(root, recipe):
        with contextlib.suppress(ValueError):
            return _library(other, recipe)
    return None


@functools.cache  # once: a process asks for each of its modules again when it is strict
def _report_shipped(message: str) -> None:
    say(message, warning=True)


def find_shipped(recipe: Recipe) -> Path | None:
    """The library for `recipe` in HOTPLAN_PREBUILT_DIR, or None; says why not, because somebody meant it to be there.

    A directory's entry for the very architectures is preferred to one that only runs here. Raises RuntimeError
    like refuse_foreign.
    """
    for root in prebuilt_dirs():
        if not root.is_dir():
            _report_shipped(f"{PREBUILT_VAR} names {root}, which is no directory")
            continue
        refuse_foreign(root)
        candidates = _candidates(root, recipe)
        for entry in sorted(candidates, key=lambda entry: not _names_archs(entry, recipe)):
            with contextlib.suppress(ValueError):
                return _library(entry, recipe, shipped=True)
        why = near_misses(root, recipe, shipped=True) or "there is none of this family and backend"
        _report_shipped(f"{PREBUILT_VAR}: nothing in {root} serves {recipe.label} ({why})")
    return None


def _names_archs(entry: Path, recipe: Recipe) -> bool:
    try:
        return set(recipe.archs) <= set(read_manifest(entry)["parts"]["archs"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


@contextlib.contextmanager
def locked(root: Path, what: str, busy: Callable[[], object] | None) -> Iterator[bool]:
    """Holds the lock of `what` in `root`. Where another process has it: calls `busy` and waits, or, with None, yields
    False at once.

    The lock is the kernel's (flock): it ends with its holder, however that dies.
    """
    make_directory(root / LOCKS)
    # Whoever can open it can lock it, and keep everybody waiting.
    lock = os.open(root / LOCKS / what, os.O_RDWR | os.O_CREAT, 0o600)
    _open_locks.add(lock)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if busy is None:
                yield False
                return
            busy()
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield True
    finally:
        if lock in _open_locks:  # else this is a child, forked in between
            _open_locks.remove(lock)
            fcntl.flock(lock, fcntl.LOCK_UN)  # a child that was forked just after os.open has it, too
            os.close(lock)


_open_locks: set[int] = set()


def _close_locks_of_the_parent() -> None:
    """A forked child shares the parent's locks, and would keep them when the parent is done or dead."""
    while _open_locks:
        os.close(_open_locks.pop())


os.register_at_fork(after_in_child=_close_locks_of_the_parent)


def is_locked(root: Path, what: str) -> bool:
    """Whether a process holds the lock of `what` just now. Writes nothing."""
    try:
        lock = os.open(root / LOCKS / what, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def work_prefix(what: str) -> str:
    """How this machine's working directories begin: a network file system may keep locks to each machine."""
    return f".build-{what}-{platform.node()}-"


@contextlib.contextmanager
def building(root: Path, recipe: Recipe) -> Iterator[Path]:
    """A new private directory in `root` to build in, while no other process builds this family and backend.

    What a dead builder left is removed. Raises OSError where `root` cannot be written or built in.
    """
    what = f"{recipe.family}-{recipe.backend}"
    if not re.fullmatch(r"[\w./+@%~-]+", str(root.resolve())):
        raise OSError("tvm-ffi's builds do not take such a name")  # flags and paths are not quoted
    make_directory(root)
    refuse_foreign(root)
    with locked(root, what, lambda: say(f"waiting for another process that builds {recipe.label} in {root}")):
        prefix = work_prefix(what)
        for orphan in root.glob(f"{glob.escape(prefix)}*"):
            shutil.rmtree(orphan, ignore_errors=True)
        staging = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
        try:
            yield staging
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def publish(root: Path, staging: Path, library: Path, recipe: Recipe, seconds: float) -> Path:
    """Moves the finished library in `staging` to its place in the cache and returns the path there."""
    entry = root / recipe.name
    draft = staging / "entry"
    draft.mkdir()
    shutil.move(library, draft / library.name)
    data = (draft / library.name).read_bytes()
    manifest = {
        "library": library.name,
        "sha256": hashlib.sha256(data).hexdigest(),
        "bytes": len(data),
        "seconds": round(seconds, 3),
        "built": int(time.time()),
        "hotplan": __version__,
        "key": recipe.key,
        "parts": recipe.parts,
        "c++": recipe.cxx and recipe.cxx.path,
        "nvcc": recipe.cuda and recipe.cuda.nvcc,
    }
    (draft / MANIFEST).write_text(json.dumps(manifest, indent=1))
    # As readable as the cache itself, and writable by the owner alone whatever the umask.
    mode = root.stat().st_mode & 0o755
    for path, bits in ((draft, mode), (draft / library.name, mode), (draft / MANIFEST, mode & 0o644)):
        path.chmod(bits)
    winner = find(root, recipe)
    if winner:  # of another machine, perhaps, and others may be loading it already
        return winner
    if entry.exists():  # damaged
        os.rename(entry, staging / "damaged")
    os.rename(draft, entry)
    return entry / library.name


def entries(root: Path) -> list[dict[str, Any]]:
    """The manifests of all readable entries, with their `path`; for people to look at."""
    found = []
    for path in sorted(root.glob(f"*/{MANIFEST}")):
        with contextlib.suppress(OSError, ValueError):
            found.append({"path": str(path.parent), **json.loads(path.read_bytes())})
    return found


def _release(text: str) -> str:
    """The line of `--version` that says it: nvcc's is not the first."""
    lines = text.split("\n")
    return next((line for line in lines if "release" in line), lines[0])


def write_index(root: Path) -> Path:
    """Writes root/manifest.json, which lists what a directory that is shipped holds. For people and image builds."""
    modules = []
    for entry in entries(root):
        parts = entry["parts"]
        modules.append(
            {
                "entry": Path(entry["path"]).name,
                "family": parts["family"],
                "backend": parts["backend"],
                "archs": parts["archs"],
                "compilers": {name: _release(text) for name, text in parts["compilers"].items()},
                "tvm_ffi": parts["tvm_ffi"],
                "machine": parts["machine"],
                **{name: entry.get(name) for name in ("key", "library", "bytes", "sha256", "built", "hotplan")},
            }
        )
    replace_text(root / MANIFEST, json.dumps({"hotplan": __version__, "modules": modules}, indent=1) + "\n")
    return root / MANIFEST
