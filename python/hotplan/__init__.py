"""Planning and hot-buffer kernels of sparse-attention LLM serving.

Importing this package compiles nothing, makes no CUDA context and does not even import torch: names are looked up when
they are first used. The first call of an operator builds or loads its module (:mod:`hotplan.jit`).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hotplan.version import __version__

if TYPE_CHECKING:
    from hotplan import hisparse, jit, plans, reference
    from hotplan.compress import (
        plan_compress_decode,
        plan_compress_decode_legacy,
        plan_compress_prefill,
        plan_compress_prefill_legacy,
        plan_online_decode,
        plan_online_prefill,
        plan_online_verify,
        plan_step_decode,
        plan_step_prefill,
    )
    from hotplan.hot_buffer import HitStats, HotBuffer
    from hotplan.plans import PrefillPlan, SwapPlan

__all__ = [
    "HitStats",
    "HotBuffer",
    "PrefillPlan",
    "SwapPlan",
    "__version__",
    "hisparse",
    "jit",
    "plan_compress_decode",
    "plan_compress_decode_legacy",
    "plan_compress_prefill",
    "plan_compress_prefill_legacy",
    "plan_online_decode",
    "plan_online_prefill",
    "plan_online_verify",
    "plan_step_decode",
    "plan_step_prefill",
    "plans",
    "reference",
]

_SUBMODULES = ("hisparse", "jit", "plans", "reference")
_HOMES = {"HitStats": "hot_buffer", "HotBuffer": "hot_buffer", "PrefillPlan": "plans", "SwapPlan": "plans"}


if not TYPE_CHECKING:  # a checker would take it for a promise that every name exists

    def __getattr__(name: str) -> Any:
        if name in _SUBMODULES:
            return importlib.import_module(f"hotplan.{name}")
        if name not in __all__:
            raise AttributeError(f"module 'hotplan' has no attribute {name!r}")
        value = getattr(importlib.import_module(f"hotplan.{_HOMES.get(name, 'compress')}"), name)
        globals()[name] = value  # the next look-up finds it at once
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
