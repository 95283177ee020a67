"""A family's CPU backend with the undefined-behaviour sanitizer and the library's own assertions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tvm_ffi

ROOT = Path(__file__).resolve().parents[2]
UNDEFINED = ("-fsanitize=undefined", "-fno-sanitize-recover")


def load_sanitized(directory: Path, *sources: Path, flags: tuple[str, ...] = UNDEFINED) -> tvm_ffi.Module:
    """Compiles `sources` in `directory` (empty). What the sanitizer sees ends the process, with a message."""
    import tvm_ffi.cpp

    library = tvm_ffi.cpp.build(
        name="sanitized",
        cpp_files=[str(source) for source in sources],
        extra_cflags=["-std=c++20", "-DHOTPLAN_BACKEND_CUDA=0", "-D_GLIBCXX_ASSERTIONS", *flags],
        extra_ldflags=[*flags[:1]],
        extra_include_paths=[str(ROOT / "include")],
        build_directory=str(directory),
    )
    return tvm_ffi.load_module(library)
