"""SGLang's module names without SGLang: what stands in for its modules, and those of its files that run without the rest.

    modules = stand_ins()                            # empty packages and a registry that hooks can be laid with
    with installed(modules): ...

    wheel = Wheel(root)                              # its compress plans and HiSparse functions, from its own files
    wheel.compress.CompressorDecodePlan.generate(...)

Kernels come through SGLang's own `load_jit` calls, whose arguments say what to compile; all that was asked for so far is
compiled side by side when the first function is needed.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

import peers
from hotplan.integrations import sglang as plugin


def module(name: str, directory: Path | None = None, **contents: Any) -> ModuleType:
    """A module with these contents: a package, and one whose submodules are files where a directory is given."""
    spec = ModuleSpec(name, None, is_package=True)
    spec.submodule_search_locations = [] if directory is None else [str(directory)]
    made = importlib.util.module_from_spec(spec)
    vars(made).update(contents)
    return made


class HookType(Enum):
    AROUND = "around"


class HookRegistry:
    """What the plugin uses of SGLang's registry."""

    hooks: dict[str, Callable[..., Any]] = {}  # noqa: RUF012 (one for the process, as SGLang's)

    @classmethod
    def register(cls, target: str, hook: Callable[..., Any], hook_type: HookType) -> None:
        assert hook_type is HookType.AROUND
        cls.hooks[target] = hook

    @classmethod
    def apply_hooks(cls) -> None:
        for target, hook in cls.hooks.items():
            path, _, name = target.rpartition(".")
            owner = pkgutil.resolve_name(path)
            wrapped = _wrapped(getattr(owner, name), hook)
            setattr(owner, name, staticmethod(wrapped) if isinstance(owner, type) else wrapped)


def _wrapped(original: Callable[..., Any], hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return hook(original, *args, **kwargs)

    return wrapper


def stand_ins(*more: ModuleType) -> list[ModuleType]:
    """The registry, the given modules, and the packages above all of them."""
    registry = module("sglang.srt.plugins.hook_registry", HookRegistry=HookRegistry, HookType=HookType)
    found = {made.__name__: made for made in (registry, *more)}
    for name in list(found):
        while "." in name:
            name = name.rpartition(".")[0]
            found.setdefault(name, module(name))
    return list(found.values())


def originals() -> tuple[list[ModuleType], list[str]]:
    """Modules with a function for every target of the plugin, of SGLang's classes; and the list of their calls."""
    calls: list[str] = []

    def original(target: str) -> Callable[..., str]:
        def function(*args: Any, **kwargs: Any) -> str:
            calls.append(target)
            return "SGLang's result"

        return function

    def static(plan: str) -> list[staticmethod]:
        names = ("generate", "generate_legacy", "generate_online")
        return [staticmethod(original(f"{plugin._COMPRESS}.{plan}.{name}")) for name in names]

    class CompressorPrefillPlan(NamedTuple):
        compress_ratio: int
        plan_c: torch.Tensor
        plan_w: torch.Tensor
        pin_buffer: torch.Tensor | None = None
        is_decode = False
        generate, generate_legacy, generate_online = static("CompressorPrefillPlan")

    class CompressorDecodePlan(NamedTuple):
        compress_ratio: int
        plan_d: torch.Tensor
        is_decode = True
        generate, generate_legacy, generate_online = static("CompressorDecodePlan")

    contents: dict[str, dict[str, Any]] = {
        plugin._COMPRESS: {
            "CompressorPrefillPlan": CompressorPrefillPlan,
            "CompressorDecodePlan": CompressorDecodePlan,
        }
    }
    for target in plugin._TARGETS["hisparse"]:
        owner, _, name = target.rpartition(".")
        contents.setdefault(owner, {})[name] = original(target)
    return stand_ins(*(module(name, **functions) for name, functions in contents.items())), calls


@contextmanager
def installed(modules: list[ModuleType]) -> Iterator[None]:
    """Imports find these modules. Afterwards no module of SGLang's names is left but those that were there before."""
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "sglang"}
    sys.modules.update({made.__name__: made for made in modules})
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
            del sys.modules[name]
        sys.modules.update(before)


class Kernels:
    """What SGLang's Python asked its JIT for."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.known: dict[str, Compiled] = {}
        self.waiting: list[Compiled] = []

    def load_jit(
        self,
        *_: str,
        cuda_files: list[str],
        cuda_wrappers: list[tuple[str, str]],
        extra_cuda_cflags: tuple[str, ...] | list[str] = (),
    ) -> Compiled:
        # All units are compiled with it: those that do not ask for it have no floating-point arithmetic.
        assert set(extra_cuda_cflags) <= {"-use_fast_math"}
        key = f"{cuda_files} {cuda_wrappers}"
        if key not in self.known:
            self.known[key] = Compiled(self, f"unit{len(self.known)}", cuda_files, dict(cuda_wrappers))
            self.waiting.append(self.known[key])
        return self.known[key]

    def build(self) -> None:
        """Compile what waits, one compiler for each unit."""
        waiting, self.waiting = self.waiting, []
        if not waiting:
            return
        units = {f"{compiled.name}.cu": compiled.text(self.root) for compiled in waiting}
        with peers._environment(NVCC_APPEND_FLAGS="-use_fast_math"):
            build = peers._build(self.root, "hotplan_test_sglang_wheel", units, peers.COMPRESS_HEADER, None, None)
        library = build.load()
        for compiled in waiting:
            compiled.functions = {name: library.get_function(f"{compiled.name}_{name}") for name in compiled.wrappers}


class Compiled:
    """One of SGLang's JIT modules: a header and what it exports of it. Its functions are attributes."""

    def __init__(self, kernels: Kernels, name: str, files: list[str], wrappers: dict[str, str]) -> None:
        self.kernels, self.name, self.files, self.wrappers = kernels, name, files, wrappers
        self.functions: dict[str, Any] = {}

    def text(self, root: Path) -> str:
        sources = [root / "sglang/kernels/jit/csrc" / file for file in self.files]
        hashes = [f"// {source.name} {hashlib.sha256(source.read_bytes()).hexdigest()}" for source in sources]
        exports = [
            f"TVM_FFI_DLL_EXPORT_TYPED_FUNC({self.name}_{name}, ({function}));"
            for name, function in self.wrappers.items()
        ]
        includes = [f'#include "{file}"' for file in self.files]
        lines = [*hashes, *includes, "#include <tvm/ffi/function.h>", "namespace sglang {", *exports, "}", ""]
        return "\n".join(lines)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if not self.functions:
            self.kernels.build()
        try:
            function = self.functions[name]
        except KeyError:
            raise AttributeError(name) from None
        setattr(self, name, function)  # as fast as SGLang's from the second time on
        return function


class Wheel:
    """SGLang's `compress`, `hisparse` and (None without Triton) `slot_mapping` modules.

    hooks: the plugin's for compress plans, by target. The original that they fall back to is the caller's to give.
    """

    def __init__(self, root: Path) -> None:
        self.kernels = Kernels(root)
        directory = root / "sglang/kernels/ops"
        dsv4, kvcache = directory / "attention/dsv4", directory / "kvcache"

        def no() -> bool:
            return False

        helpers = module(
            "sglang.kernels.jit.utils",
            cache_once=functools.cache,
            is_arch_support_pdl=lambda: peers._arch_number(peers._current_arch()) >= 900,
            load_jit=self.kernels.load_jit,
            make_cpp_args=_file("cpp_args", root / "sglang/kernels/jit/utils/compile/cpp_args.py").make_cpp_args,
        )
        indexer = module(
            "sglang.srt.layers.attention.dsa.utils",
            INDEXER_K_CACHE_PRESHUFFLE_TILE=64,
            aiter_can_use_preshuffle_paged_mqa=no,
        )
        platform = module("sglang.srt.utils", is_gfx95_supported=no, is_hip=no, is_xpu=no)
        packages = (
            module(plugin._COMPRESS.rpartition(".")[0], dsv4),
            module(plugin._HISPARSE.rpartition(".")[0], kvcache),
        )
        with installed(stand_ins(helpers, indexer, platform, *packages)):
            self.compress = importlib.import_module(plugin._COMPRESS)
            self.hisparse = importlib.import_module(plugin._HISPARSE)
            self.slot_mapping: ModuleType | None = None
            if importlib.util.find_spec("triton") is not None:
                self.slot_mapping = importlib.import_module(plugin._SLOT_MAPPING)
            self.hooks = {
                target: plugin._around(target, serve) for target, serve in plugin._served_functions("compress").items()
            }


def _file(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"hotplan_test_sglang_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def sources() -> Path:
    """The directory that HOTPLAN_SGLANG_SOURCES names. A test without one is skipped, since SGLang with its dependencies
    takes gigabytes and is none of ours; a comparison needs a few MB of its sources, which whoever wants one unpacks."""
    path = os.environ.get("HOTPLAN_SGLANG_SOURCES")
    if not path:
        pytest.skip("HOTPLAN_SGLANG_SOURCES names no SGLang")
    root = peers.sglang_root(path)
    assert root is not None
    return root
