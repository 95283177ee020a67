"""`load` and `build`: the module of a (family, backend), from this process, the cache, or a compile."""

from __future__ import annotations

import atexit
import errno
import os
import shlex
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hotplan._switches import is_on
from hotplan.jit import cache
from hotplan.jit.compile import CompileError, compile_library
from hotplan.jit.key import Recipe, make_recipe
from hotplan.jit.log import say
from hotplan.jit.toolchain import Memo, MissingTool, parse_archs
from hotplan.jit.trust import refuse_foreign

if TYPE_CHECKING:
    import tvm_ffi

_modules: dict[tuple[str, str, Path | None], tvm_ffi.Module] = {}
_modules_lock = threading.Lock()


def _renew_lock() -> None:
    """In a forked child: the parent's thread that had it, for as long as a compile takes, is not there to let it go."""
    global _modules_lock
    _modules_lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


class Built(NamedTuple):
    """A library in the cache.

    Attributes:
        path: of the shared library.
        seconds: what its compile took just now, 0.0 if it was there.
    """

    path: Path
    seconds: float


def load(family: str, backend: str, *, root: Path | None = None) -> tvm_ffi.Module:
    """The module of a kernel family, compiled on first use; a dictionary hit from the second call on.

    Args:
        family: one of :func:`families`.
        backend: "cpu" or "cuda".
        root: a directory with other sources (``include/`` and ``csrc/``) than the package's.

    Returns:
        A tvm-ffi module; its functions take torch tensors.

    Raises:
        ValueError: an unknown name, or a variable of architectures that names none.
        RuntimeError: no compiler, a failed compile, strict mode, no architecture to compile for, a directory that
            others can write.
    """
    module = _modules.get((family, backend, root))
    if module is None:
        with _modules_lock:
            module = _modules.get((family, backend, root))
            if module is None:
                module = _modules[family, backend, root] = _load(family, backend, root)
    return module


def build(
    family: str,
    backend: str,
    archs: str | Iterable[str] | None = None,
    out: str | os.PathLike[str] | None = None,
    *,
    root: Path | None = None,
) -> Built:
    """Makes sure that the cache holds the library, without loading it.

    ``hotplan build`` does so for all modules at once.

    Args:
        family: one of :func:`families`.
        backend: "cpu" or "cuda".
        archs: like "9.0a,10.0a", or a list; then no GPU is needed. None: as in :func:`load`.
        out: a directory to use in place of the cache; where the library is wanted, HOTPLAN_PREBUILT_DIR (or
            HOTPLAN_CACHE_DIR) has to name it.
        root: as for :func:`load`.

    Raises:
        ValueError, RuntimeError: as :func:`load`.
        OSError: ``out`` cannot be written.
    """
    parsed = None if archs is None else parse_archs(archs, "archs")
    if out is None:
        return _ensure(cache.cache_root(), family, backend, parsed, root)
    return _ensure(Path(out).expanduser().absolute(), family, backend, parsed, root, fallback=False)


def strict() -> bool:
    return is_on("HOTPLAN_STRICT")


def build_command(recipe: Recipe, cache_dir: Path) -> str:
    """The shell command that compiles `recipe` into `cache_dir`."""
    words = [sys.executable or "python", "-m", "hotplan", "build", "--family", recipe.family]
    words += ["--no-cpu", "--arch", ",".join(recipe.archs)] if recipe.backend == "cuda" else ["--no-cuda"]
    return shlex.join([*words, "--out", str(cache_dir)])


def _load(family: str, backend: str, root: Path | None) -> tvm_ffi.Module:
    import tvm_ffi

    while True:
        shipped = _shipped(family, backend, root)
        path = shipped or _ensure(cache.cache_root(), family, backend, None, root).path
        try:
            return tvm_ffi.load_module(path)
        except Exception as error:
            if path.exists():  # else somebody pruned the cache since
                origin = f"is in {cache.PREBUILT_VAR}" if shipped else "was built for this machine"
                raise RuntimeError(f"{path} {origin} but cannot be loaded: {error}") from error


def _shipped(family: str, backend: str, root: Path | None) -> Path | None:
    """What HOTPLAN_PREBUILT_DIR has. It goes before the cache: what was shipped is what runs."""
    if not cache.prebuilt_dirs():
        return None
    return cache.find_shipped(make_recipe(family, backend, None, None, root))


def _ensure(
    cache_dir: Path,
    family: str,
    backend: str,
    archs: tuple[str, ...] | None,
    root: Path | None,
    fallback: bool = True,
) -> Built:
    if cache_dir.is_dir():
        refuse_foreign(cache_dir)  # before the memo in it is believed
    memo = Memo(cache_dir / cache.COMPILERS)
    recipe = make_recipe(family, backend, memo, archs, root)
    found = cache.find(cache_dir, recipe)
    if found:
        memo.save()
        return Built(found, 0.0)
    if strict():
        near = cache.near_misses(cache_dir, recipe)
        raise RuntimeError(
            f"HOTPLAN_STRICT is set, so nothing is compiled, and {recipe.label} is not in {cache_dir} "
            f"(key {recipe.key}{'; ' if near else ''}{near}). Build it with:\n  {build_command(recipe, cache_dir)}"
        )
    if recipe.missing:
        raise MissingTool(f"{recipe.label} is not in {cache_dir} and cannot be compiled: {recipe.missing}")
    try:
        built = _compile_into(cache_dir, recipe)
        memo.save()
        return built
    except OSError as error:
        if not fallback:
            raise
        try:
            private = Path(tempfile.mkdtemp(prefix="hotplan-"))
            atexit.register(_remove_unless_failed, private, os.getpid())
            say(
                f"cannot build in {cache_dir} ({error}); this process compiles for itself, into {private}. "
                "Set HOTPLAN_CACHE_DIR to a directory that can be written.",
                warning=True,
            )
            return _compile_into(private, recipe)
        except OSError as second:
            places = f"neither in {cache_dir} ({error}) nor in {tempfile.gettempdir()} ({second})"
            raise RuntimeError(f"{recipe.label} can be built {places}") from second


def _compile_into(cache_dir: Path, recipe: Recipe) -> Built:
    with cache.building(cache_dir, recipe) as staging:
        found = cache.find(cache_dir, recipe)  # built while we waited
        if found:
            return Built(found, 0.0)
        start = time.perf_counter()
        try:
            library = compile_library(recipe, staging)
        except CompileError as error:
            if error.disk_is_full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
            log = _keep_log(cache_dir, recipe, error.output)
            raise RuntimeError(
                f"compiling {recipe.label} failed; the full log is in {log}\n{error.excerpt()}"
            ) from None
        seconds = time.perf_counter() - start
        path = cache.publish(cache_dir, staging, library, recipe, seconds)
    say(f"compiled {recipe.label} in {seconds:.1f} s -> {path}")
    return Built(path, seconds)


def _keep_log(cache_dir: Path, recipe: Recipe, output: str) -> Path:
    log = cache_dir / f"{recipe.name}.log"
    log.write_text(output)
    return log


def _remove_unless_failed(private: Path, owner: int) -> None:
    if owner == os.getpid() and not any(private.glob("*.log")):
        shutil.rmtree(private, ignore_errors=True)
