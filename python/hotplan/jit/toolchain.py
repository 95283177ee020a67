"""What a build needs: a C++ compiler, ninja, a CUDA toolkit, and the GPU architectures to compile for.

Nothing here runs a program whose answer is already in the memo (see :class:`Memo`): a warm start must not
wait for nvcc or nvidia-smi.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotplan.jit.trust import refuse_foreign, replace_text

ARCHS_VAR = "HOTPLAN_CUDA_ARCHS"
ARCHS_VARS = (ARCHS_VAR, "TVM_FFI_CUDA_ARCH_LIST")

# Capabilities whose instructions (wgmma, tcgen05, ...) are only in the architecture-specific target.
_SPECIFIC_ARCHS = {(9, 0): "9.0a", (10, 0): "10.0a", (10, 3): "10.3a", (12, 0): "12.0a"}
_CAPABILITY = (75, 76)  # major and minor, as CUdevice_attribute numbers them
_SYSTEM = Path("/usr/local")


class MissingTool(RuntimeError):
    """A program that a build needs is not there. The message says where it was looked for and what to do."""


class Memo:
    """What programs answered before (`c++ --version`, where a wrapper leads), kept in a file in the cache. Raises
    RuntimeError if somebody else could have written that.

    An answer counts while the program's path, size and mtime are the same. A wrapper script keeps its answer
    when only its target changes: then what the older compiler built goes on being used, still a build of these
    sources for these architectures.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._changed = False
        try:
            if path:
                refuse_foreign(path)  # what a wrapper is said to lead to, is run
            known = json.loads(path.read_bytes()) if path else {}
        except (OSError, ValueError):
            known = {}
        self._known: dict[str, list[Any]] = known if isinstance(known, dict) else {}

    def ask(self, question: str, program: str, answer: Callable[[], str]) -> str:
        stat = os.stat(program)
        key, stamp = f"{question} {program}", [stat.st_size, stat.st_mtime_ns]
        known = self._known.get(key)
        if isinstance(known, list) and known[:2] == stamp:
            return str(known[2])
        text = answer()
        self._known[key] = [*stamp, text]
        self._changed = True
        return text

    def save(self) -> None:
        """Writes new answers. Where the cache directory cannot be written, the next process asks again."""
        if self._path is None or not self._changed:
            return
        with contextlib.suppress(OSError):
            replace_text(self._path, json.dumps(self._known, indent=1))


def _run(command: list[str]) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return done.stdout.strip()


@dataclass(frozen=True)
class Cxx:
    """A C++ compiler: `command` as CXX wants it (it may hold arguments), `path` of its first word."""

    command: str
    path: str
    how: str

    def version(self, memo: Memo) -> str:
        words = shlex.split(self.command)
        return memo.ask(" ".join([*words[1:], "--version"]), self.path, lambda: _run([*words, "--version"]))


def find_cxx() -> Cxx:
    """The compiler in CXX, else the first of c++, g++ and clang++ on PATH. Raises MissingTool."""
    command = os.environ.get("CXX", "").strip()
    names = (command,) if command else ("c++", "g++", "clang++")
    for name in names:
        path = shutil.which(shlex.split(name)[0])
        if path:
            return Cxx(name, os.path.abspath(path), "CXX" if command else "PATH")
    looked = f"CXX={command!r}" if command else "CXX (not set), then c++, g++ and clang++"
    raise MissingTool(
        f"no C++ compiler: looked for {looked} on PATH={os.environ.get('PATH', '')}. Install one with C++20 "
        "(Debian, Ubuntu: apt-get install g++; Fedora, RHEL: dnf install gcc-c++; conda: conda install "
        "cxx-compiler), or set CXX to its path."
    )


def find_ninja() -> str:
    """Path of ninja: on PATH, or in Python's ninja package, which a venv that is not activated hides."""
    path = shutil.which("ninja")
    if path is None and importlib.util.find_spec("ninja"):
        from ninja import BIN_DIR

        path = shutil.which("ninja", path=BIN_DIR)
    if path is None:
        raise MissingTool("no ninja on PATH and no Python package of it: pip install ninja.")
    return os.path.abspath(path)


@dataclass(frozen=True)
class Cuda:
    """A complete CUDA toolkit; `cudart` is the runtime library to link and `how` says what led here."""

    home: str
    nvcc: str
    include: str
    cudart: str
    how: str

    def version(self, memo: Memo) -> str:
        return memo.ask("--version", self.nvcc, lambda: _run([self.nvcc, "--version"]))


def _target_dir() -> str:
    return {"aarch64": "sbsa-linux"}.get(platform.machine(), f"{platform.machine()}-linux")


def toolkit_at(home: Path, how: str) -> Cuda | None:
    """The toolkit rooted at `home`, or None if nvcc, the headers or libcudart are missing there."""
    target = home / "targets" / _target_dir()
    nvcc = home / "bin" / "nvcc"
    includes = [d for d in (home / "include", target / "include") if (d / "cuda_runtime.h").is_file()]
    # pip's packages have libcudart.so.13 but not the libcudart.so that a linker looks for.
    names = ("libcudart.so", "libcudart.so.[0-9]*")
    libraries = [f for d in ("lib64", "lib", target / "lib") for n in names for f in sorted((home / d).glob(n))]
    if not includes or not libraries or not nvcc.is_file() or not os.access(nvcc, os.X_OK):
        return None
    return Cuda(str(home), str(nvcc), str(includes[0]), str(libraries[0]), how)


def _home_behind(nvcc: str) -> str:
    """The toolkit that runs when `nvcc`, maybe a wrapper script elsewhere, is called; "" if it does not say."""
    here = re.search(r"^#\$ _HERE_=(.+)$", _run([nvcc, "--dryrun", "-x", "cu", "/dev/null"]), re.MULTILINE)
    return str(Path(here[1]).resolve().parent) if here else ""


def _cuda_homes(memo: Memo) -> Iterator[tuple[Path, str]]:
    for var in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(var):
            yield Path(os.environ[var]).absolute(), var
    nvcc = shutil.which("nvcc")
    if nvcc:
        yield Path(nvcc).resolve().parent.parent, "nvcc on PATH"
        behind = memo.ask("home of", os.path.abspath(nvcc), lambda: _home_behind(nvcc))
        if behind:
            yield Path(behind), f"the toolkit that {nvcc} runs"
    yield _SYSTEM / "cuda", "/usr/local/cuda"
    newest_first = sorted(_SYSTEM.glob("cuda-*"), key=lambda p: _numbers(p.name), reverse=True)
    for home in newest_first:
        yield home, "newest /usr/local/cuda-*"
    nvidia = importlib.util.find_spec("nvidia")
    for site in (nvidia.submodule_search_locations or []) if nvidia else []:
        for home in sorted(Path(site).glob("cu[0-9][0-9]"), reverse=True):
            yield home, "Python packages nvidia-*"


def find_cuda(memo: Memo) -> Cuda:
    """The first complete toolkit of: CUDA_HOME, CUDA_PATH, nvcc on PATH (also through a wrapper script),
    /usr/local/cuda, the newest /usr/local/cuda-*, Python's nvidia packages. Raises MissingTool."""
    tried: list[str] = []
    for home, how in _cuda_homes(memo):
        found = toolkit_at(home, how)
        if found:
            return found
        tried.append(f"{home} ({how})")
    raise MissingTool(
        "no CUDA toolkit with bin/nvcc, include/cuda_runtime.h and libcudart: looked at "
        f"{', '.join(dict.fromkeys(tried))}; PATH={os.environ.get('PATH', '')}. Install one, from "
        "https://developer.nvidia.com/cuda-downloads or with conda install -c nvidia cuda-toolkit, or set "
        "CUDA_HOME."
    )


def _numbers(text: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", text)]


def parse_archs(entries: str | Iterable[str], name: str) -> tuple[str, ...]:
    """GPU architectures as tvm-ffi wants them ("9.0a"), sorted, each once.

    `entries` is a list, or a text separated by commas, semicolons or spaces; an error calls it `name`.
    Raises ValueError.
    """
    words = re.split(r"[\s,;]+", entries.strip()) if isinstance(entries, str) else list(entries)
    for word in words:
        if not re.fullmatch(r"[1-9]\d?\.\d[af]?", word):
            raise ValueError(f"{name}: expected architectures like 9.0a,10.0a, got {word!r}")
    if not words:
        raise ValueError(f"{name}: expected architectures like 9.0a,10.0a, got none")
    return tuple(sorted(set(words), key=lambda word: (_numbers(word), word)))


def _ask_driver() -> list[tuple[int, int]]:
    """The compute capabilities of the visible GPUs as the CUDA driver gives them; none where it gives none.

    torch would initialise itself for CUDA to say them, with a context that takes hundreds of megabytes of a GPU which
    the caller, who only wants to build or load a module, may never use. cuInit makes none. Like any use of CUDA it
    spoils CUDA in children that are forked later. By then torch has counted the GPUs, mostly through the same driver
    (PYTORCH_NVML_BASED_CUDA_CHECK=1 is the exception), and only a process that wants a CUDA module comes here.
    """

    def ask(function: str, *arguments: int) -> int:
        answer = ctypes.c_int()
        if getattr(driver, function)(ctypes.byref(answer), *arguments) != 0:
            raise OSError(function)
        return answer.value

    try:
        driver = ctypes.CDLL("libcuda.so.1")
        if driver.cuInit(0) != 0:
            raise OSError("cuInit")
        devices = [ask("cuDeviceGet", index) for index in range(ask("cuDeviceGetCount"))]
        major, minor = _CAPABILITY
        return [
            (ask("cuDeviceGetAttribute", major, device), ask("cuDeviceGetAttribute", minor, device))
            for device in devices
        ]
    except OSError:
        return []


def target_archs() -> tuple[tuple[str, ...], str]:
    """The architectures to compile for, and where they come from.

    These are HOTPLAN_CUDA_ARCHS, else TVM_FFI_CUDA_ARCH_LIST, else those of the GPUs that torch sees.

    Raises ValueError for a bad variable and RuntimeError where no GPU is visible either.
    """
    for var in ARCHS_VARS:
        if os.environ.get(var):
            return parse_archs(os.environ[var], var), var
    import torch

    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        seen = _ask_driver() or [torch.cuda.get_device_capability(i) for i in range(count)]
        archs = [_SPECIFIC_ARCHS.get(capability, "{}.{}".format(*capability)) for capability in seen]
        return parse_archs(archs, "torch.cuda"), "visible GPUs"
    raise RuntimeError(
        f"no GPU is visible to torch, so the architectures to compile for are unknown: set {ARCHS_VAR}, "
        f"for example {ARCHS_VAR}=9.0a,10.0a (H100 and H200: 9.0a, B200: 10.0a)."
    )
