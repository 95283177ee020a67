"""What a valid call of each public operator looks like: the registry that the fuzzer draws from."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fuzz.memory import Leaf


class Misbehaved(Exception):
    """An operator broke its word in a way that only the call's own run can see."""


@dataclass
class Call:
    """One call: arguments are trees of leaves, and plain values."""

    operator: str
    function: Callable[..., Any]
    reference: Callable[..., Any] | None
    arguments: dict[str, Any]
    positional: bool = False
    racy: bool = False
    """Hostile values, shared memory or the like: a GPU's result depends on the order of its threads."""
    aliased: bool = False
    """Arguments share memory: results are nobody's promise."""
    capturable: bool = True
    bounded: frozenset[str] = frozenset()
    """Integers that ask for memory, and stay small."""
    run: Callable[[dict[str, Any]], Any] | None = None
    """What is done with the arguments, where that is more than passing them to the function."""
    extra_names: set[str] = field(default_factory=set)
    mutations: list[str] = field(default_factory=list)

    @property
    def names(self) -> set[str]:
        """Names that a message may use for an argument, or for a part of one."""
        parts = {part for value in self.arguments.values() for part in getattr(value, "_fields", ())}
        return {*inspect.signature(self.function).parameters, *self.extra_names, *parts}

    def __call__(self, arguments: dict[str, Any]) -> Any:
        return self.run(arguments) if self.run else self.invoke(self.function, arguments)

    def invoke(self, function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        if not self.positional:
            return function(**arguments)
        kinds = inspect.signature(function).parameters
        leading = []
        for name, parameter in kinds.items():
            if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD or name not in arguments:
                break
            leading.append(name)
        rest = {name: value for name, value in arguments.items() if name not in leading}
        return function(*[arguments[name] for name in leading], **rest)

    def describe(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self.arguments.items() if value is not None)
        return f"{self.operator}({shown}){'; mutations: ' + '; '.join(self.mutations) if self.mutations else ''}"


Builder = Callable[[np.random.Generator, str], Call]
REGISTRY: dict[str, Builder] = {}
"""A builder of valid calls, from random numbers and the device, by the operator's name."""


def builds(name: str) -> Callable[[Builder], Builder]:
    def register(builder: Builder) -> Builder:
        REGISTRY[name] = builder
        return builder

    return register


def leaf(tensor: torch.Tensor, *, gap: int = 0, **options: Any) -> Leaf:
    """The values of a CPU tensor, with `gap` elements between rows."""
    array = tensor.contiguous().numpy().copy()
    return Leaf(array, gap=(gap,) * max(0, array.ndim - 1) if gap else (), **options)


def chance(rng: np.random.Generator, share: float) -> bool:
    return bool(rng.random() < share)


def pick(rng: np.random.Generator, options: Any) -> Any:
    return options[int(rng.integers(len(options)))]
