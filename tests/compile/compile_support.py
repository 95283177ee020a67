"""A kernel family small enough to compile in 0.2 s, so that tests can afford real builds, and a counting compiler."""

from __future__ import annotations

import stat
from pathlib import Path

HEADER = "include/fake/value.h"

_FILES = {
    HEADER: "inline int value() { return 41; }\n",
    # The C interface alone, without tvm-ffi's templates: they are what takes the time.
    "csrc/fake/entry.cpp": """
#include <tvm/ffi/c_api.h>
#include <fake/value.h>
int backend();
#define EXPORT(name, number)                                                                                     \\
  extern "C" __attribute__((visibility("default"))) int __tvm_ffi_##name(void*, const TVMFFIAny*, int32_t,       \\
                                                                         TVMFFIAny* result) {                    \\
    result->type_index = kTVMFFIInt;                                                                             \\
    result->zero_padding = 0;                                                                                    \\
    result->v_int64 = number;                                                                                    \\
    return 0;                                                                                                    \\
  }
EXPORT(answer, value() + backend())
EXPORT(hides_where_it_was_built, __FILE__[0] == 'c' && __FILE__[4] == '/')
""",
    "csrc/fake/cpu.cpp": "int backend() { return 1; }\n",
    "csrc/fake/launch.cu": "__global__ void nothing() {}\nint backend() { return 2; }\n",
}


class Family:
    """The sources of the family `fake` in a directory of their own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name, text in _FILES.items():
            self.write(name, text)

    def write(self, name: str, text: str) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path


def script(path: Path, text: str) -> Path:
    """An executable shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
    return path


class CountingCompiler:
    """A wrapper of c++ that notes every call; `before` is shell code that runs first."""

    def __init__(self, directory: Path) -> None:
        self.log = directory / "calls"
        self.path = directory / "counting-c++"
        self.set("")

    def set(self, before: str) -> None:
        script(self.path, f'echo "$@" >> {self.log}\n{before}\nexec c++ "$@"')

    def compiles(self) -> int:
        """How often entry.cpp was compiled."""
        return self.log.read_text().count(" -c ") // 2 if self.log.exists() else 0  # entry.cpp and cpu.cpp
