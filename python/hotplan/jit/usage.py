"""What kernels need of a GPU's processors, as ptxas counts it: registers, shared memory, spills."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hotplan.jit.compile import CompileError, host_compiler, write_sources
from hotplan.jit.key import CUDA_FLAGS, UNITS, Recipe
from hotplan.jit.toolchain import MissingTool

_ENTRY = re.compile(r"Compiling entry function '(\w+)' for 'sm_\w+'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True)
class KernelUsage:
    """One kernel on one architecture. `shared` is static shared memory of a block; what a launch adds is not in it.

    Registers are per thread, the rest in bytes; stack and spills per thread.
    """

    family: str
    kernel: str
    arch: str
    registers: int
    shared: int
    stack: int
    spill_stores: int
    spill_loads: int

    @property
    def spills(self) -> bool:
        return self.spill_stores > 0 or self.spill_loads > 0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def kernel_usage(recipes: Sequence[Recipe], jobs: int = 1) -> list[KernelUsage]:
    """The kernels of CUDA recipes on each of their architectures, by compiling them once more for ptxas alone.

    A finished library tells registers but not spills, and only where cuobjdump is installed. Raises MissingTool
    without nvcc and CompileError if it fails.
    """
    work = [(recipe, arch) for recipe in recipes for arch in recipe.archs]
    with ThreadPoolExecutor(max(1, jobs)) as pool:
        parts = list(pool.map(lambda one: list(_compile(*one)), work))
    return [kernel for part in parts for kernel in part]


def _compile(recipe: Recipe, arch: str) -> Iterator[KernelUsage]:
    if recipe.cuda is None:
        raise MissingTool(recipe.missing or "no CUDA toolkit")
    with tempfile.TemporaryDirectory(prefix="hotplan-usage-") as directory:
        write_sources(recipe, Path(directory))
        target = "sm_" + arch.replace(".", "")
        for unit in UNITS["cuda"]:
            if unit.endswith(".cu"):
                source = Path(directory, "csrc", recipe.family, unit)
                includes = [f"-I{directory}/include", f"-I{recipe.cuda.include}"]
                flags = [*CUDA_FLAGS, "-DHOTPLAN_BACKEND_CUDA=1", "-Xptxas", "-v", "-cubin", f"-arch={target}"]
                done = subprocess.run(
                    [recipe.cuda.nvcc, *flags, *includes, str(source), "-o", f"{directory}/{unit}bin"],
                    env={**os.environ, **host_compiler(recipe)},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    check=False,
                )
                if done.returncode:
                    raise CompileError(done.stdout)
                yield from parse(done.stdout, recipe.family, arch)


def parse(output: str, family: str, arch: str) -> list[KernelUsage]:
    """The kernels in what `ptxas -v` prints, by name."""
    found = []
    # Functions that are called, not inlined, have a stack line of their own before or after the kernel's registers.
    for name, text in _sections(output):
        stack = [tuple(map(int, numbers)) for numbers in _STACK.findall(text)]
        registers, shared = _USED.search(text), _SHARED.search(text)
        if not stack or not registers:
            raise ValueError(f"cannot read what ptxas says about {name}:\n{text}")
        frame, stores, loads = (sum(column) for column in zip(*stack, strict=True))
        found.append((name, int(registers[1]), int(shared[1]) if shared else 0, frame, stores, loads))
    names = _readable([row[0] for row in found])
    kernels = [KernelUsage(family, name, arch, *row[1:]) for name, row in zip(names, found, strict=True)]
    return sorted(kernels, key=lambda kernel: kernel.kernel)


def _sections(output: str) -> Iterator[tuple[str, str]]:
    starts = list(_ENTRY.finditer(output))
    for index, start in enumerate(starts):
        end = starts[index + 1].start() if index + 1 < len(starts) else len(output)
        yield start[1], output[start.end() : end]


def _readable(names: list[str]) -> list[str]:
    """C++ names without return type, parameters and our namespace; as they are where nothing demangles."""
    tool = shutil.which("c++filt") or shutil.which("cu++filt")
    if tool is None or not names:
        return names
    done = subprocess.run([tool], input="\n".join(names), stdout=subprocess.PIPE, text=True, check=False)
    lines = done.stdout.splitlines()
    return [_short(line) for line in lines] if done.returncode == 0 and len(lines) == len(names) else names


def _short(text: str) -> str:
    text = text.removeprefix("void ")
    depth = 0
    for index, letter in enumerate(text):
        if letter == "(" and depth == 0:
            text = text[:index]
            break
        depth += {"<": 1, ">": -1}.get(letter, 0)
    return re.sub(r"\bhotplan::", "", text)
