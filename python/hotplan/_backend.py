"""Which backend a call runs on: that of the tensor that decides the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

Operators = TypeVar("Operators")


def by_device(load: Callable[[str], Operators]) -> Callable[[str, Any], Operators]:
    """A function of an argument's name and its tensor, which gives what ``load`` made of the backend, once for each.

    What is no tensor meets the CPU backend's checks. Where a tracer runs the caller (torch.compile, torch.export) torch
    operators stand in, since it cannot see into ours; an eager call asks for that and goes past torch's dispatcher.
    """
    loaded: dict[str, Operators] = {}
    module = load.__module__

    def operators(name: str, tensor: Any) -> Operators:
        # Not torch.compiler.is_compiling(): that is true in every thread while one of them compiles.
        if is_dynamo_compiling() or (type(tensor) is not Tensor and _is_traced(tensor)):
            from hotplan.integrations.torch_library import traced  # the way up: only a tracer goes it

            stand_in: Operators = traced(module)
            return stand_in
        if getattr(tensor, "is_cuda", False):
            backend = "cuda"
        elif getattr(tensor, "is_cpu", True):
            backend = "cpu"
        else:
            raise ValueError(f"{name}: expected device cpu or cuda, got {tensor.device}")
        found = loaded.get(backend)
        return loaded.setdefault(backend, load(backend)) if found is None else found

    return operators


def require_no_capture(name: str) -> None:
    """Before a check of what lies on the GPU."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            f"{name}: expected no check of what lies on the GPU (check=True, HOTPLAN_CHECK) while a CUDA graph is "
            "captured, because it waits for the GPU"
        )


def _is_traced(tensor: Any) -> bool:
    """Whether a tensor only stands for one, as torch's fake and functional tensors do."""
    kind = type(tensor)
    return issubclass(kind, Tensor) and kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl
