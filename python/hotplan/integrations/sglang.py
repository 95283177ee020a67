"""hotplan inside an SGLang server: a plugin that serves SGLang's own functions with our operators.

SGLang calls :func:`register` in each of its processes (entry-point group ``sglang.srt.plugins``). It compiles or loads
the modules, so that nothing is compiled in the first request or under CUDA-graph capture, and asks SGLang to lay a hook
around each target. A call that we cannot serve (another device, a keyword of a newer SGLang, a shape that the operators
refuse) goes to SGLang's own function, with one warning for each reason. :func:`status` says what is really served.

``HOTPLAN_SGLANG`` names the families that are served, ``compress`` and ``hisparse`` (default: both), or ``off``.

SGLang is imported by nothing here but the functions that need it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import json
import logging
import os
import pkgutil
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any, NamedTuple

from hotplan.jit.log import say

__all__ = ["ENABLE_VAR", "FAMILIES", "Row", "enabled", "register", "status"]

ENABLE_VAR = "HOTPLAN_SGLANG"
"""The variable that names the families to serve."""

FAMILIES = {"compress": "compress", "hisparse": "device_buffer"}
"""What the variable can name, and the module of :mod:`hotplan.jit` behind it."""

logger = logging.getLogger("hotplan.sglang")

_GROUP = "sglang.srt.plugins"
_PLUGIN = "hotplan"
_COMPRESS = "sglang.kernels.ops.attention.dsv4.compress"
_HISPARSE = "sglang.kernels.ops.kvcache.hisparse"
_SLOT_MAPPING = "sglang.kernels.ops.kvcache.hisparse_slot_mapping"
_SPEC = f"{_HISPARSE}.load_cache_to_device_buffer_spec_mla"

# SGLang's names, in the order in which they are reported.
_TARGETS: dict[str, tuple[str, ...]] = {
    "compress": tuple(
        f"{_COMPRESS}.{plan}.{function}"
        for plan in ("CompressorPrefillPlan", "CompressorDecodePlan")
        for function in ("generate", "generate_legacy", "generate_online")
    ),
    "hisparse": (
        f"{_HISPARSE}.load_cache_to_device_buffer_mla",
        f"{_HISPARSE}.load_cache_to_device_buffer_dsv4_mla",
        f"{_HISPARSE}.load_blocks_to_device_buffer_mha",
        f"{_HISPARSE}.copy_cache_planned_mla",
        f"{_HISPARSE}.transfer_cache_dsv4_mla",
        _SPEC,
        f"{_SLOT_MAPPING}.translate_padded_hisparse_locations",
    ),
}


class Row(NamedTuple):
    """One target: its dotted name, whether SGLang has it, whether a call reaches hotplan, and if not, why not."""

    target: str
    found: bool
    served: bool
    why_not: str
    family: str


class _Plugin:
    """What this process knows about its hooks."""

    def __init__(self) -> None:
        self.registered = False
        self.off: dict[str, str] = {}  # family -> why it is not served
        self.hooks: dict[str, Callable[..., Any]] = {}
        self.refused: set[tuple[str, str]] = set()
        self.spec_owner = ""  # who keeps the LRU of several speculative steps: "hotplan" or "SGLang"


_plugin = _Plugin()
_register_lock = threading.Lock()


def enabled() -> tuple[str, ...]:
    """The families that ``HOTPLAN_SGLANG`` names. ValueError for a word that it does not know."""
    words = [word.strip().lower() for word in os.environ.get(ENABLE_VAR, "").split(",") if word.strip()]
    if not words:
        return tuple(FAMILIES)
    if words == ["off"]:
        return ()
    unknown = [word for word in words if word not in FAMILIES]
    if unknown:
        raise ValueError(
            f"{ENABLE_VAR}: expected {' and '.join(FAMILIES)}, separated by a comma, or off alone,"
            f" got {', '.join(unknown)} in {os.environ[ENABLE_VAR]!r}"
        )
    return tuple(family for family in FAMILIES if family in words)


# ----------------------------------------------------------------------------------------------------
# The plugin


def register() -> None:
    """Load the modules and register the hooks: what the entry point names. Later calls do nothing.

    A family that cannot be built, or whose functions this SGLang does not have, is off, with one warning. Nothing is
    raised but ValueError for ``HOTPLAN_SGLANG``, which SGLang logs.
    """
    with _register_lock:
        if _plugin.registered:
            return
        _plugin.registered = True
        try:
            families = enabled()
        except ValueError as error:
            _plugin.off = dict.fromkeys(FAMILIES, str(error))
            raise
        _plugin.off = dict.fromkeys(FAMILIES, f"{ENABLE_VAR}={os.environ.get(ENABLE_VAR, '')}")
        backend, start, ready = _backend(), time.perf_counter(), []
        for family in families:
            try:
                _prepare(family, backend)
            except Exception as error:  # whatever it is, the server has kernels of its own
                _plugin.off[family] = str(error) or type(error).__name__
                say(f"SGLang keeps its own {family} functions: {error}", warning=True, to=logger)
            else:
                del _plugin.off[family]
                ready.append(FAMILIES[family])
        if ready:
            modules, seconds = " and ".join(ready), time.perf_counter() - start
            say(f"{modules} ({backend}) ready for SGLang in {seconds:.1f} s", to=logger)


def _backend() -> str:
    """What this process will use. SGLang asks torch the same question when it is imported."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _prepare(family: str, backend: str) -> None:
    import torch
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from hotplan import jit

    if torch.version.hip is not None:
        raise RuntimeError("this is a ROCm build of torch, hotplan has CUDA kernels")
    functions = _served_functions(family)
    found = [target for target in _TARGETS[family] if not isinstance(_live(target), Exception)]
    if not found:
        raise RuntimeError(f"SGLang {_version('sglang')} has none of them: {_live(_TARGETS[family][0])}")
    jit.load(FAMILIES[family], backend)
    for target in found:
        hook = _around_spec(functions[target]) if target == _SPEC else _around(target, functions[target])
        HookRegistry.register(target, hook, HookType.AROUND)
        _plugin.hooks[target] = hook


def _around(target: str, serve: Callable[..., Any]) -> Callable[..., Any]:
    # All operators check everything before they write anything, so a refused call can be made again by another.
    def hook(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return serve(*args, **kwargs)
        except (TypeError, ValueError) as error:
            _report_refusal(target, error)
        return original(*args, **kwargs)

    return hook


def _around_spec(serve: Callable[..., Any]) -> Callable[..., Any]:
    """Several speculative steps: the two implementations keep different things in the state, so only one may use it."""

    def hook(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if _plugin.spec_owner != "SGLang":
            try:
                result = serve(*args, **kwargs)
            except (TypeError, ValueError) as error:
                if _plugin.spec_owner:
                    raise RuntimeError(
                        f"{error}; SGLang's own kernel cannot take over, since earlier steps left hotplan's LRU in the"
                        f" state (to serve without hotplan, set {ENABLE_VAR}=compress)"
                    ) from error
                _report_refusal(_SPEC, error)
            else:
                _plugin.spec_owner = "hotplan"
                return result
            _plugin.spec_owner = "SGLang"
        return original(*args, **kwargs)

    return hook


def _report_refusal(target: str, error: Exception) -> None:
    # Errors are "argument: expected ..., got ...": what comes after the name varies from call to call.
    reason = str(error).split(":", 1)[0]
    if (target, reason) not in _plugin.refused:
        _plugin.refused.add((target, reason))
        name = ".".join(target.split(".")[-2:])
        say(f"SGLang's own {name} serves this call and the next ones like it: {error}", warning=True, to=logger)


# ----------------------------------------------------------------------------------------------------
# What serves each target, with SGLang's signatures


def _served_functions(family: str) -> dict[str, Callable[..., Any]]:
    if family == "hisparse":
        from hotplan import hisparse

        return {target: getattr(hisparse, target.rpartition(".")[2]) for target in _TARGETS[family]}
    return dict(zip(_TARGETS[family], _compress_functions(), strict=True))


def _compress_functions() -> tuple[Callable[..., Any], ...]:
    import torch

    from hotplan import compress

    # The class is looked up at each call: another plugin may have replaced it.
    sglang = importlib.import_module(_COMPRESS)

    def tensor(maybe_proxy: Any) -> Any:
        # The pool hands out a weak proxy of its mapping; the server unpacks it itself, other callers may not.
        return maybe_proxy.detach() if type(maybe_proxy) is weakref.ProxyType else maybe_proxy

    def int64(lengths: Any) -> Any:
        # As upstream: the online functions take any integers.
        return lengths.to(torch.int64) if isinstance(lengths, torch.Tensor) else lengths

    # No plan has a pin_buffer: lengths travel as kernel parameters, so there is no pinned memory to keep alive.

    def prefill(
        compress_ratio: Any,
        req_pool_indices: Any,
        seq_lens: Any,
        extend_lens: Any,
        req_to_token: Any,
        full_to_state: Any,
        swa_page_size: Any,
        ring_size: Any,
        num_q_tokens: Any,
        use_cuda_graph: Any = False,
        use_req_ring: Any = False,
    ) -> Any:
        plan = compress.plan_compress_prefill(
            req_pool_indices, req_to_token, tensor(full_to_state), seq_lens, extend_lens,
            num_q_tokens=int(num_q_tokens), compress_ratio=int(compress_ratio), swa_page_size=int(swa_page_size),
            ring_size=int(ring_size), use_req_ring=bool(use_req_ring), use_cuda_graph=bool(use_cuda_graph),
        )  # fmt: skip
        return sglang.CompressorPrefillPlan(compress_ratio, plan.compress, plan.write)

    def prefill_legacy(
        compress_ratio: Any,
        req_pool_indices: Any,
        seq_lens: Any,
        extend_lens: Any,
        num_q_tokens: Any,
        device: Any,  # not used upstream either: that of req_pool_indices decides
        use_cuda_graph: Any = False,
    ) -> Any:
        plan = compress.plan_compress_prefill_legacy(
            req_pool_indices, seq_lens, extend_lens,
            num_q_tokens=int(num_q_tokens), compress_ratio=int(compress_ratio), use_cuda_graph=bool(use_cuda_graph),
        )  # fmt: skip
        return sglang.CompressorPrefillPlan(compress_ratio, plan.compress, plan.write)

    def prefill_online(
        seq_lens: Any,
        extend_lens: Any,
        req_pool_indices: Any,
        req_to_token: Any,  # not used upstream either
        num_q_tokens: Any,
        use_cuda_graph: Any = False,
        state_slot_offset: Any = 0,
    ) -> Any:
        plan = compress.plan_online_prefill(
            int64(req_pool_indices), int64(seq_lens), int64(extend_lens),
            num_q_tokens=int(num_q_tokens), state_slot_offset=int(state_slot_offset),
            use_cuda_graph=bool(use_cuda_graph),
        )  # fmt: skip
        return sglang.CompressorPrefillPlan(128, plan.compress, plan.write)

    def decode(
        compress_ratio: Any,
        req_pool_indices: Any,
        req_to_token: Any,
        full_to_state: Any,
        seq_lens: Any,
        swa_page_size: Any,
        ring_size: Any,
        use_req_ring: Any = False,
    ) -> Any:
        plan = compress.plan_compress_decode(
            req_pool_indices, req_to_token, tensor(full_to_state), seq_lens, compress_ratio=int(compress_ratio),
            swa_page_size=int(swa_page_size), ring_size=int(ring_size), use_req_ring=bool(use_req_ring),
        )  # fmt: skip
        return sglang.CompressorDecodePlan(compress_ratio, plan)

    def decode_legacy(compress_ratio: Any, req_pool_indices: Any, seq_lens: Any) -> Any:
        plan = compress.plan_compress_decode_legacy(req_pool_indices, seq_lens, compress_ratio=int(compress_ratio))
        return sglang.CompressorDecodePlan(compress_ratio, plan)

    def decode_online(seq_lens: Any, req_pool_indices: Any, req_to_token: Any, state_slot_offset: Any = 0) -> Any:
        plan = compress.plan_online_decode(
            int64(req_pool_indices), int64(seq_lens), state_slot_offset=int(state_slot_offset)
        )
        return sglang.CompressorDecodePlan(128, plan)

    return prefill, prefill_legacy, prefill_online, decode, decode_legacy, decode_online


# ----------------------------------------------------------------------------------------------------
# What is served


def status() -> list[Row]:
    """Look at this process's live SGLang modules and say of each target whether its calls reach hotplan.

    SGLang only logs a hook that does not apply, and goes on with its own kernels; another plugin may have replaced a
    function later; a module may have kept a reference from before. Such rows are not served, and say why.

    Raises:
        ModuleNotFoundError: SGLang is not installed.
    """
    if importlib.util.find_spec("sglang") is None:
        raise ModuleNotFoundError("SGLang is not installed in this environment", name="sglang")
    return [_row(family, target) for family, targets in _TARGETS.items() for target in targets]


def _row(family: str, target: str) -> Row:
    live = _live(target)
    if isinstance(live, Exception):
        return Row(target, False, False, f"SGLang {_version('sglang')} has no such function: {live}", family)
    hook = _plugin.hooks.get(target)
    if hook is not None and any(layer is hook for layer in _layers(live)):
        original = inspect.unwrap(live)
        stale = [name for name, module in list(sys.modules.items()) if _holds(name, module, original)]
        why_not = f"{', '.join(stale)} still has the function from before" if stale else ""
        if target == _SPEC and _plugin.spec_owner == "SGLang":
            why_not = why_not or "its first call was not one that hotplan serves: see the warning in the log"
        return Row(target, True, not why_not, why_not, family)
    return Row(target, True, False, _why_unhooked(family, hook is not None), family)


def _live(target: str) -> Any:
    """The function that a call of ``target`` reaches now, or the error that looking for it gave."""
    try:
        return pkgutil.resolve_name(target)
    except Exception as error:  # its module may need what this machine does not have
        return error


def _layers(function: Any) -> Iterator[Any]:
    """A function, what its hooks' wrappers hold, and so on down to the original."""
    seen: set[int] = set()
    while function is not None and id(function) not in seen:
        seen.add(id(function))
        yield function
        for cell in getattr(function, "__closure__", None) or ():
            with contextlib.suppress(ValueError):  # an empty cell
                yield cell.cell_contents
        function = getattr(function, "__wrapped__", None)


def _holds(name: str, module: Any, function: Any) -> bool:
    if not name.startswith("sglang.") or not isinstance(module, types.ModuleType):
        return False
    return any(value is function for value in list(vars(module).values()))


def _why_unhooked(family: str, registered: bool) -> str:
    if family in _plugin.off:
        return _plugin.off[family]
    if registered:
        return "SGLang did not apply the hook (its log has the error), or another plugin took the function over"
    if _plugin.registered:
        return "it was not there when the plugin was loaded"
    if not any(point.name == _PLUGIN for point in entry_points(group=_GROUP)):
        return f"no entry point {_PLUGIN!r} in group {_GROUP}: install hotplan into this environment (pip install)"
    allowed = os.environ.get("SGLANG_PLUGINS", "")
    if allowed.strip() and _PLUGIN not in [name.strip() for name in allowed.split(",")]:
        return f"SGLANG_PLUGINS={allowed} leaves {_PLUGIN} out"
    return "SGLang has not loaded its plugins in this process"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def write_report(path: str) -> None:
    """Load SGLang's plugins and write what :func:`status` then says to ``path``: for `hotplan doctor --sglang`."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    try:
        families: list[str] | None = list(enabled())
    except ValueError:
        families = None  # the rows say why
    report = {"version": _version("sglang"), "families": families, "targets": [row._asdict() for row in status()]}
    Path(path).write_text(json.dumps(report))
