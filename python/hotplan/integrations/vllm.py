"""The four HiSparse operators under the names that vLLM calls: ``torch.ops._C_cache_ops.hisparse_*``.

::

    from hotplan.integrations import vllm
    vllm.install()               # define what vLLM does not have, add a CPU implementation to what it has
    vllm.install(replace=True)   # and take its CUDA kernels' place

Two generations of the schema are in use: in the newer one ``hisparse_resolve_residency`` has one more integer,
``max_union_rows``, after ``region_stride``. Where vLLM has the operator, its own schema counts, whichever it is, and
callers go on as they are. Where it does not, ``generation`` says which one to define (default: 2, the newer one).

vLLM's ``max_union_rows`` is how many *ids* the rows of one request can name together, ``top_k`` times the rows of a
verify step, since its kernel sizes shared memory by it; ours (:func:`hotplan.hisparse.resolve_residency`) counts the
launch rows. A number below ``top_k``, which no row could fill, is taken for launch rows. One launch row asks for no
union.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

from hotplan import hisparse

__all__ = ["install"]

_NAMESPACE = "_C_cache_ops"
_UNION = "max_union_rows"

_SCHEMAS = {
    "hisparse_resolve_residency": (
        "Tensor host_cache, Tensor hot_cache, Tensor hot_block_table, Tensor global_indices, Tensor(a!) hot_indices, "
        "Tensor(b!) device_global_indices, Tensor(c!) lru_slots, Tensor? request_state_indices, int region_stride, "
        f"int {_UNION}, Tensor(d!)? miss_mask, Tensor(e!)? stats, Tensor(f!)? attention_indices, "
        "int attention_block_stride, Tensor? request_ids, Tensor? source_block_table, int source_block_size, "
        "Tensor(g!)? resolved_global_indices, Tensor(h!)? valid_counts, Tensor(i!)? swap_host_physical_rows, "
        "Tensor(j!)? swap_device_physical_rows, Tensor(k!)? swap_counts, Tensor? resident_block_table, "
        "int resident_block_size, int resident_null_block"
    ),
    "hisparse_gather_plan": (
        "Tensor host_cache, Tensor(a!) hot_cache, Tensor global_indices, Tensor hot_indices, Tensor miss_mask, "
        "Tensor? request_state_indices=None, Tensor(b!)? attention_indices=None, int attention_block_stride=0"
    ),
    "hisparse_gather_compact": (
        "Tensor host_cache, Tensor(a!) hot_cache, Tensor miss_global_indices, Tensor miss_hot_indices, "
        "Tensor miss_counts"
    ),
    "hisparse_invalidate_written_slots": (
        "Tensor(a!) device_global_indices, Tensor request_state_indices, Tensor req_id_per_token, Tensor written_slots"
    ),
}

_BACKENDS = ("CPU", "CUDA")

_lock = threading.Lock()
_library: torch.library.Library | None = None  # registrations last as long as it does
_done: dict[str, dict[str, str]] = {name: {} for name in _SCHEMAS}


def install(replace: bool = False, generation: int | None = None) -> dict[str, dict[str, str]]:
    """Put our operators behind vLLM's names. Calling it again does nothing more than what is new in the arguments.

    Args:
        replace: also take the place of implementations that vLLM has. It cannot be undone in this process.
        generation: 1 or 2, the schema of ``hisparse_resolve_residency`` without or with ``max_union_rows``; None: that
            of vLLM's operator, or 2 where there is none.

    Returns:
        For every operator, who serves "CPU" and "CUDA" tensors, "hotplan" or "vLLM".

    Raises:
        ValueError: another ``generation``, also than that of an operator which is there; or an operator is there that
            does not have the arguments of either.
    """
    global _library
    if generation not in (None, 1, 2):
        raise ValueError(f"generation: expected 1 or 2, or None, got {generation!r}")
    with _lock:
        _let_vllm_register()
        wanted = {name: _arguments(name, generation) for name in _SCHEMAS}  # all checks before the first change
        if _library is None:
            _library = torch.library.Library(_NAMESPACE, "FRAGMENT")
        for name, (schema, arguments) in wanted.items():
            if schema is not None:
                _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
                torch.library.register_fake(f"{_NAMESPACE}::{name}", _nothing, lib=_library)
            for backend in _BACKENDS:
                if backend in _done[name] and (_done[name][backend] == "hotplan" or not replace):
                    continue
                theirs = torch._C._dispatch_has_kernel_for_dispatch_key(f"{_NAMESPACE}::{name}", backend)
                if theirs and not replace:
                    _done[name][backend] = "vLLM"
                    continue
                kernel = _kernel(getattr(hisparse, name.removeprefix("hisparse_")), arguments)
                _library.impl(name, kernel, backend, **({"allow_override": True} if theirs else {}))
                _done[name][backend] = "hotplan"
        return {name: dict(served) for name, served in _done.items()}


def _let_vllm_register() -> None:
    """vLLM could not define its operators after us."""
    if "vllm" in sys.modules or importlib.util.find_spec("vllm") is not None:
        with contextlib.suppress(ImportError):  # a build without these operators
            importlib.import_module("vllm._custom_ops")


def _nothing(*args: Any, **kwargs: Any) -> None:
    """The fake of an operator that only writes into its arguments."""


def _arguments(name: str, generation: int | None) -> tuple[str | None, list[torch._C.Argument]]:
    """The schema to define, or None for one that is there, and its arguments."""
    schema = f"{name}({_SCHEMAS[name]}) -> ()"
    operator = getattr(getattr(torch.ops, _NAMESPACE), name, None)
    if operator is None:
        if generation == 1:
            schema = schema.replace(f"int {_UNION}, ", "")
        return schema, torch._C.parse_schema(schema).arguments
    arguments = operator.default._schema.arguments
    names = [argument.name for argument in arguments]
    needed = [argument.name for argument in torch._C.parse_schema(schema).arguments if argument.name != _UNION]
    if missing := [argument for argument in needed if argument not in names]:
        raise ValueError(
            f"torch.ops.{_NAMESPACE}.{name}: expected arguments {', '.join(needed)}, got {', '.join(names)}"
            f" (without {', '.join(missing)}): this vLLM is older or newer than those hotplan knows"
        )
    there = 1 + (_UNION in names)
    if name == "hisparse_resolve_residency" and generation not in (None, there):
        raise ValueError(f"generation: expected {there}, that of the operator which is there, got {generation}")
    return None, arguments


def _kernel(function: Callable[..., None], arguments: list[torch._C.Argument]) -> Callable[..., None]:
    names = [argument.name for argument in arguments]
    # torch leaves out what has the schema's default.
    defaults = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    strange = [name for name in names if name not in inspect.signature(function).parameters]

    def kernel(*args: Any, **kwargs: Any) -> None:
        given = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        for name in strange:
            # Of a newer vLLM. Where it is not used, the call is one that we know.
            value = given.pop(name)
            if isinstance(value, torch.Tensor) or value:
                raise ValueError(f"{name}: expected 0 or None, since hotplan does not know this argument, got {value}")
        if _UNION in given:
            given[_UNION] = _launch_rows(given[_UNION], given["global_indices"].shape[1])
        function(**given)

    return kernel


def _launch_rows(union_rows: int, top_k: int) -> int | None:
    """Our ``max_union_rows`` for vLLM's; see the module's description."""
    rows = union_rows if union_rows < top_k or top_k == 0 else -(-union_rows // top_k)
    return rows if rows > 1 else None
