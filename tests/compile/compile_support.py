"""A kernel family small enough to compile in 0.2 s, so that tests can afford real builds, a counting compiler, and
processes to build, load, wait and die in."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import hotplan.jit
from hotplan.jit import loader

FORK = multiprocessing.get_context("fork")

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


def build(family: Family) -> hotplan.jit.Built:
    return hotplan.jit.build("fake", "cpu", root=family.root)


def answer(family: Family) -> int:
    """What a process that has loaded nothing yet gets."""
    loader._modules.clear()
    return hotplan.jit.load("fake", "cpu", root=family.root).answer()


def published(cache_dir: Path) -> list[str]:
    return sorted(path.name for path in cache_dir.glob("fake-*"))


def leftovers(cache_dir: Path) -> list[Path]:
    return sorted(cache_dir.glob(".build-*"))


def in_child(work: Callable[[], object]) -> multiprocessing.process.BaseProcess:
    """Runs `work` in a forked process; exit status 0 if it returned."""
    process = FORK.Process(target=work, daemon=True)
    process.start()
    return process


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "waited 30 s"
        time.sleep(0.01)


def drop_power_over_files() -> None:
    """Makes modes count for root as well: gives up CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    data = (ctypes.c_uint32 * 6)()
    assert libc.capget(header, data) == 0
    data[0] &= ~0b110
    assert libc.capset(header, data) == 0


class Mounts:
    """Mounts of one process that nobody else sees; for `with_mounts`."""

    _BIND, _REMOUNT, _READ_ONLY, _PRIVATE = 0x1000, 0x20, 0x1, 0x4C000  # private: with all below

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        user, group = os.geteuid(), os.getegid()
        everything = 0x20000  # CLONE_NEWNS
        if user != 0:
            everything |= 0x10000000  # CLONE_NEWUSER, to be allowed the other
        self._check(self._libc.unshare(everything))
        if user != 0:
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
            Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
        self._mount("none", Path("/"), None, self._PRIVATE)

    def _check(self, result: int) -> None:
        if result != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def _mount(self, source: str, target: Path, kind: bytes | None, flags: int, options: str = "") -> None:
        data = options.encode() or None
        self._check(self._libc.mount(source.encode(), os.fsencode(target), kind, ctypes.c_ulong(flags), data))

    def small(self, target: Path, options: str) -> None:
        """An empty file system of its own at `target`, with tmpfs's options: size=64k, nr_inodes=10."""
        target.mkdir(parents=True, exist_ok=True)
        self._mount("none", target, b"tmpfs", 0, f"mode=755,{options}")

    def end(self, target: Path) -> None:
        self._check(self._libc.umount2(os.fsencode(target), 2))  # MNT_DETACH

    def read_only(self, target: Path) -> None:
        self._mount(str(target), target, None, self._BIND)
        self._mount("none", target, None, self._BIND | self._REMOUNT | self._READ_ONLY)


def with_mounts(work: Callable[[Mounts], object]) -> None:
    """Runs `work` in a process with mounts of its own; skips the test where the system allows none."""
    refused = FORK.SimpleQueue()

    def child() -> None:
        try:
            mounts = Mounts()
        except OSError as error:
            refused.put(str(error))
            return
        refused.put(None)
        work(mounts)

    process = in_child(child)
    reason = refused.get()
    process.join()
    if reason:
        pytest.skip(f"no mounts here: {reason}")
    assert process.exitcode == 0
