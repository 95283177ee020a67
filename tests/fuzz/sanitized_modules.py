"""The CPU backend with the address and undefined-behaviour sanitizers, and the guards around tensors forbidden to it.

A tensor's neighbourhood is ordinary memory of the arena, so the address sanitizer is told about it: what lies before,
behind and between the rows of tensors is poisoned while an operator runs. A read there ends the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import sanitized

from fuzz.memory import Arena
from fuzz.oracle import Guarded
from hotplan.jit import loader

FAMILIES = ("compress", "device_buffer", "hisparse")
FLAGS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g", "-O1")


def environment() -> dict[str, str]:
    """What a process needs to load such modules: the sanitizer's library before all others."""
    compiler = os.environ.get("CXX", "g++")
    # The C++ library as well: the sanitizer looks for its functions before anybody has loaded it.
    asked = [[compiler, f"-print-file-name={name}"] for name in ("libasan.so", "libstdc++.so")]
    found = [subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip() for words in asked]
    options = "detect_leaks=0:abort_on_error=0:exitcode=99:allocator_may_return_null=1:detect_stack_use_after_return=0"
    return {"LD_PRELOAD": " ".join(found), "ASAN_OPTIONS": options, "UBSAN_OPTIONS": "print_stacktrace=1"}


def load() -> Guarded:
    """Compiles the families, lets the package use them, and gives what forbids guards."""
    with tempfile.TemporaryDirectory() as directory:
        for family in FAMILIES:
            where = Path(directory, family)
            sources = [sanitized.ROOT / "csrc" / family / unit for unit in ("entry.cpp", "cpu.cpp")]
            module = sanitized.load_sanitized(where, *sources, flags=FLAGS)
            loader._modules[family, "cpu", None] = module
    runtime = ctypes.CDLL(None)
    poison, unpoison = runtime.__asan_poison_memory_region, runtime.__asan_unpoison_memory_region
    for function in (poison, unpoison):
        function.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        function.restype = None

    @contextlib.contextmanager
    def guarded(arena: Arena) -> Iterator[None]:
        ranges = list(arena.ranges())
        for address, size in ranges:
            poison(address, size)
        try:
            yield
        finally:
            for address, size in ranges:
                unpoison(address, size)

    return guarded
