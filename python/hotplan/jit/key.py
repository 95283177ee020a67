"""The cache key: a hash of everything that decides what a build makes, and of nothing else.

In it: the bytes of every source, flags, architectures, compiler versions, tvm-ffi's version, the machine.
Not in it: mtimes, where the sources lie, the Python version (the library does not link against Python).
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
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
    """The names of the kernel families, the directories of ``csrc/``, sorted."""
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


def runs_on(built: str, wanted: str) -> bool:
    """Whether code for the architecture `built` runs wherever code for `wanted` does.

    A GPU runs code for its own capability and for earlier minor ones of the same major (8.0 on an 8.9 GPU), but code
    for an "a" target on that one capability alone.
    """
    major, minor, kind = _split_arch(built)
    wanted_major, wanted_minor, _ = _split_arch(wanted)
    return built == wanted or (kind != "a" and major == wanted_major and minor <= wanted_minor)


def _split_arch(arch: str) -> tuple[int, int, str]:
    found = re.fullmatch(r"(\d+)\.(\d+)([a-z]?)", arch)
    if not found:
        raise ValueError(f"expected an architecture like 9.0a, got {arch!r}")
    return int(found[1]), int(found[2]), found[3]


def label_of(family: str, backend: str, archs: tuple[str, ...]) -> str:
    """A module as messages call it."""
    return f"{family} ({' '.join([backend, *archs])})"


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
        return label_of(self.family, self.backend, self.archs)

    def differences(self, parts: dict[str, Any], shipped: bool = False) -> dict[str, str]:
        """Why a library built from `parts` does not serve: the part -> what about it, in words.

        It serves if it is the same build, or one for more architectures. On a machine without compilers there are
        no versions to compare; then what another machine built from the same sources serves. Of what was `shipped` on
        purpose the compilers do not count at all, and code that was built for an earlier minor capability serves, too.
        """
        waived = {"archs"}
        if shipped:
            waived |= {"compilers", "environment"}
        elif self.missing:
            waived |= {"compilers"}
        found = {}
        for part in {**self.parts, **parts}:
            theirs, ours = parts.get(part), self.parts.get(part)
            if part not in waived and theirs != ours:
                readable = part in ("tvm_ffi", "machine", "family", "backend")
                found[part] = f"{part} is {theirs}, not {ours}" if readable else f"other {part}"
        lacking = [
            wanted
            for wanted in self.archs
            if not any(runs_on(built, wanted) if shipped else built == wanted for built in parts["archs"])
        ]
        if lacking:
            found["archs"] = f"no code for {' '.join(lacking)}"
        return found


def make_recipe(
    family: str, backend: str, memo: Memo | None, archs: tuple[str, ...] | None = None, root: Path | None = None
) -> Recipe:
    """Reads the sources and asks for compilers and architectures. Raises ValueError for an unknown name.

    Without a `memo` compilers are not looked for: the recipe finds what is built, and cannot be compiled.
    """
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
        if memo is None:
            raise MissingTool("compilers were not looked for")
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
