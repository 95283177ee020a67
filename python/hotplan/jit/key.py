"""The cache key: a hash of everything that decides what a build makes, and of nothing else.

In it: the bytes of every source, flags, architectures, compiler versions, tvm-ffi's version, the machine.
Not in it: mtimes, where the sources lie, the Python version (the library does not link against Python).
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotplan.jit.toolchain import Cuda, Cxx, Memo, MissingTool, find_cuda, find_cxx, target_archs

# A change in how a build directory is laid out or made that no other part of the key shows.
FORMAT = 1

# Which files of csrc/<family>/ a backend compiles. g++ takes the .cpp, nvcc the .cu; they run side by side.
UNITS = {"cpu": ("entry.cpp", "cpu.cpp"), "cuda": ("entry.cpp", "launch.cu")}

# Hidden visibility keeps templates and inline statics of the cpu and the cuda module of a family apart:
# default visibility makes them unique per process, and the module loaded second would use the first one's.
CXX_FLAGS = ("-std=c++20", "-O2", "-fvisibility=hidden")
CUDA_FLAGS = ("-std=c++20", "-O2", "-Xcompiler", "-fvisibility=hidden")

# Variables that the compilers read themselves.
COMPILER_VARS = ("CPATH", "CPLUS_INCLUDE_PATH", "NVCC_CCBIN", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")


def source_root() -> Path:
    """Where include/ and csrc/ are: in the package (a wheel) or in the checkout (an editable install)."""
    package = Path(__file__).resolve().parents[1]
    roots = (package, package.parents[1])
    for root in roots:
        if (root / "csrc").is_dir() and (root / "include").is_dir():
            return root
    raise RuntimeError(f"hotplan's sources (include/ and csrc/) are neither in {roots[0]} nor in {roots[1]}")


def families(root: Path | None = None) -> list[str]:
    """The names of csrc/*/, sorted."""
    return sorted(unit.parent.name for unit in ((root or source_root()) / "csrc").glob("*/entry.cpp"))


def read_sources(root: Path, family: str) -> dict[str, bytes]:
    """All files that a build of `family` may read, by path relative to `root`, in sorted order."""
    found: dict[str, bytes] = {}
    for top in ("csrc/" + family, "include"):
        for directory, folders, names in os.walk(root / top):
            folders[:] = [f for f in folders if not f.startswith(".")]
            for name in names:
                if not name.startswith(".") and not name.endswith("~"):  # editors' files
                    path = Path(directory, name)
                    found[path.relative_to(root).as_posix()] = path.read_bytes()
    return dict(sorted(found.items()))


@dataclass(frozen=True)
class Recipe:
    """One build, decided but not made. `missing` holds the message about a compiler that is not there."""

    family: str
    backend: str
    root: Path
    sources: dict[str, bytes]
    archs: tuple[str, ...]
    cxx: Cxx | None
    cuda: Cuda | None
    missing: str | None
    parts: dict[str, Any]

    @property
    def key(self) -> str:
        return hashlib.sha256(json.dumps(self.parts, sort_keys=True).encode()).hexdigest()

    @property
    def name(self) -> str:
        """The entry's directory in the cache."""
        return f"{self.family}-{self.backend}-{self.key[:16]}"

    @property
    def label(self) -> str:
        return f"{self.family} ({' '.join([self.backend, *self.archs])})"

    def accepts(self, parts: dict[str, Any]) -> bool:
        """Whether a library built from `parts` serves: the same build, or one for more architectures.

        On a machine without compilers there are no versions to compare; then what another machine built from
        the same sources serves.
        """
        waived = ("archs", "compilers") if self.missing else ("archs",)
        same = {**parts, **{name: self.parts[name] for name in waived}} == self.parts
        return same and set(self.archs) <= set(parts["archs"])


def make_recipe(
    family: str, backend: str, memo: Memo, archs: tuple[str, ...] | None = None, root: Path | None = None
) -> Recipe:
    """Reads the sources and asks for compilers and architectures. Raises ValueError for an unknown name."""
    import tvm_ffi

    root = root or source_root()
    if backend not in UNITS:
        raise ValueError(f"backend: expected one of {', '.join(UNITS)}, got {backend!r}")
    if family not in (known := families(root)):
        raise ValueError(f"family: expected one of {', '.join(known)} (in {root / 'csrc'}), got {family!r}")
    if backend == "cpu":
        archs = ()
    elif archs is None:
        archs, _ = target_archs()

    cxx, cuda, missing, compilers = None, None, None, {}
    try:
        cxx = find_cxx()
        compilers["cxx"] = cxx.version(memo)
        if backend == "cuda":
            cuda = find_cuda(memo)
            compilers["nvcc"] = cuda.version(memo)
    except MissingTool as error:
        missing = str(error)

    sources = read_sources(root, family)
    digest = hashlib.sha256()
    for path, data in sources.items():
        digest.update(f"{path}\0{len(data)}\0".encode())
        digest.update(data)
    parts = {
        "format": FORMAT,
        "family": family,
        "backend": backend,
        "sources": digest.hexdigest(),
        "flags": {"c++": list(CXX_FLAGS), "nvcc": list(CUDA_FLAGS) if backend == "cuda" else []},
        "archs": list(archs),
        "compilers": compilers,
        "environment": {var: os.environ[var] for var in COMPILER_VARS if os.environ.get(var)},
        "tvm_ffi": tvm_ffi.__version__,
        "machine": platform.machine(),
    }
    return Recipe(family, backend, root, sources, archs, cxx, cuda, missing, parts)
