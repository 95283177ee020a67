"""One compile: a recipe's sources in a private directory, through tvm_ffi.cpp.build, to a shared library."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path

from hotplan.jit.key import CUDA_FLAGS, CXX_FLAGS, UNITS, Recipe
from hotplan.jit.toolchain import MissingTool, find_ninja

_SHOWN_LINES = 40
# Command lines that ninja repeats, and what every build prints (tvm-ffi asks for C++17 first).
_NOISE = re.compile(r"\[\d+/\d+\] |ninja exited|stdout:|nvcc warning : incompatible redefinition for option 'std'")

# tvm_ffi.cpp.build takes compilers and architectures from os.environ, which the whole process shares.
_environment_lock = threading.Lock()
_environment_before: dict[str, str | None] = {}


class CompileError(RuntimeError):
    """The compiler said no. `output` is all it printed."""

    def __init__(self, output: str) -> None:
        super().__init__(output)
        self.output = output

    @property
    def disk_is_full(self) -> bool:
        return "No space left on device" in self.output or "Disk quota exceeded" in self.output

    def excerpt(self) -> str:
        """The output from just before the first error on."""
        text = re.sub(r"^FAILED: .*\n.*\n", "", self.output, flags=re.MULTILINE)
        lines = [line for line in text.splitlines() if not _NOISE.match(line)]
        first = next((i for i, line in enumerate(lines) if re.search(r"\berror\b|fatal", line)), 0)
        shown = lines[max(0, first - 3) :][:_SHOWN_LINES]
        return "\n".join(shown)


@contextlib.contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    """os.environ with `changes`, and tvm-ffi's remembered CUDA home forgotten before and after."""
    from tvm_ffi.cpp import extension

    forget = getattr(getattr(extension, "_find_cuda_home", None), "cache_clear", lambda: None)
    with _environment_lock:
        _environment_before.update({var: os.environ.get(var) for var in changes})
        os.environ.update(changes)
        forget()
        try:
            yield
        finally:
            _restore_environment()
            forget()


def _restore_environment() -> None:
    for var, value in _environment_before.items():
        if value is None:
            os.environ.pop(var, None)
        else:
            os.environ[var] = value
    _environment_before.clear()


def _forget_the_parents_build() -> None:
    """In a forked child, where the thread that would end it does not exist."""
    global _environment_lock
    _environment_lock = threading.Lock()
    _restore_environment()


os.register_at_fork(after_in_child=_forget_the_parents_build)


def host_compiler(recipe: Recipe) -> dict[str, str]:
    """What tells nvcc its host compiler: a compiler that the user names is meant for both halves of a module, because
    the default may be too new for nvcc."""
    nvcc_vars = "".join(os.environ.get(var, "") for var in ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"))
    chosen = recipe.cxx if recipe.cxx is not None and recipe.cxx.how == "CXX" else None
    if chosen is None or "NVCC_CCBIN" in os.environ or "ccbin" in nvcc_vars:
        return {}
    return {"NVCC_CCBIN": chosen.path}


def write_sources(recipe: Recipe, directory: Path) -> None:
    for name, data in recipe.sources.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def compile_library(recipe: Recipe, directory: Path) -> Path:
    """Builds `recipe` in `directory` (empty, private) and returns the library's path there.

    The sources compiled are the bytes that were hashed, not the files as they are by now. Raises MissingTool,
    CompileError, or OSError where `directory` cannot be written.
    """
    import tvm_ffi.cpp

    if recipe.missing or recipe.cxx is None:
        raise MissingTool(recipe.missing)
    ninja = find_ninja()
    directory = directory.resolve()
    sources = directory / "src"
    write_sources(recipe, sources)
    # tvm-ffi takes a lock file that it cannot make for one that somebody has, and waits for ever: on a full disk.
    (directory / "lock").touch()

    # __FILE__ and std::source_location in messages: csrc/..., not a directory that is gone by then.
    mapped = f"-ffile-prefix-map={sources}/="
    define = f"-DHOTPLAN_BACKEND_CUDA={int(recipe.backend == 'cuda')}"
    # A symbol that is nowhere is an error of the linker here, not the end of the process at the first call.
    ldflags = ["-Wl,--no-undefined"]
    # One architecture after the other is nvcc's default. Not in the key: the code is the same.
    threads = ["--threads=0"] if len(recipe.archs) > 1 else []
    includes = [str(sources / "include")]
    # Last in PATH: where ninja lies may be a compiler, too, and not the one that the key is about.
    search = os.pathsep.join([os.environ.get("PATH", os.defpath), os.path.dirname(ninja)])
    # In English: a full disk and the first error are found in what compilers say.
    environment = {"CXX": recipe.cxx.command, "PATH": search, "LC_ALL": "C"}
    if recipe.cuda:
        # tvm-ffi's link line knows only $CUDA_HOME/lib64/libcudart.so; a symbolic link covers all layouts.
        # The run path serves a process whose torch brings no CUDA runtime, or one of another major version.
        (directory / "libcudart.so").symlink_to(recipe.cuda.cudart)
        ldflags += [f"-L{directory}", f"-Wl,-rpath,{os.path.dirname(recipe.cuda.cudart)}"]
        includes.append(recipe.cuda.include)
        environment |= {"CUDA_HOME": recipe.cuda.home, "TVM_FFI_CUDA_ARCH_LIST": " ".join(recipe.archs)}
        environment |= host_compiler(recipe)

    units = [str(sources / "csrc" / recipe.family / unit) for unit in UNITS[recipe.backend]]
    with _environment(environment):
        try:
            built = tvm_ffi.cpp.build(
                name=f"hotplan_{recipe.family}_{recipe.backend}",
                cpp_files=[unit for unit in units if not unit.endswith(".cu")],
                cuda_files=[unit for unit in units if unit.endswith(".cu")],
                extra_cflags=[*CXX_FLAGS, define, mapped],
                extra_cuda_cflags=[*CUDA_FLAGS, *threads, define, "-Xcompiler", mapped],
                extra_ldflags=ldflags,
                extra_include_paths=includes,
                build_directory=str(directory),
                backend="cuda" if recipe.cuda else None,
            )
        except RuntimeError as error:
            raise CompileError(str(error).replace(str(sources), str(recipe.root))) from None
    return Path(built)
