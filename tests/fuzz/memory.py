"""Tensor arguments as descriptions, and the guarded memory that a call gets for them.

A `Leaf` says what a tensor holds and how it lies in memory. An `Arena` makes the tensors: each in a storage of its own
with guard bytes before and behind, so that a write beside a tensor, between its rows or into an input shows afterwards.
Two arenas of the same leaves have the same bytes, guards included.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch

Kind = TypeVar("Kind")

GUARD = 128
"""Bytes before and behind a tensor; a multiple of all alignments that operators ask for."""
TIGHT = os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING", "0") not in ("", "0")
"""Every tensor is an allocation of its own, which ends with it: a tool that knows allocations sees reads behind it."""


@dataclass(eq=False)
class Leaf:
    """A tensor argument that has no memory yet.

    Attributes:
        array: its values.
        written: the operator may write it.
        place: "device", "host" (pinned where the device is a GPU), or "cpu" (pageable).
        gap: elements between its rows, by dimension but the last.
        shift: elements before its first one, beside the guard.
        trusted: its values are a promise of the caller, so they are never made hostile.
        views: what is done to the tensor before it is passed: (description, function).
        shares: the leaf whose memory it has in place of its own.
        pool: its bytes are nobody's indices, and two copies into one row leave those of either.
        pointers: it holds the addresses of these leaves.
    """

    array: np.ndarray
    written: bool = False
    place: str = "device"
    gap: tuple[int, ...] = ()
    shift: int = 0
    trusted: bool = False
    pool: bool = False
    views: list[tuple[str, Callable[[torch.Tensor], Any]]] = field(default_factory=list)
    shares: Leaf | None = None
    pointers: list[Leaf] | None = None

    def strides(self) -> tuple[int, ...]:
        strides, extent = [], 1
        for dim in reversed(range(self.array.ndim)):
            strides.append(extent)
            extent = extent * self.array.shape[dim] + (self.gap[dim - 1] if 0 < dim <= len(self.gap) else 0)
        return tuple(reversed(strides))

    def __repr__(self) -> str:
        shown = [f"{self.array.dtype}{list(self.array.shape)}"]
        shown += [f"{name}={value}" for name in ("place", "gap", "shift") if (value := getattr(self, name))]
        shown += ["shared"] if self.shares is not None else []
        shown += [what for what, _ in self.views]
        return f"<{' '.join(shown)}>"


def leaves(value: Any, kind: type[Kind] = Leaf) -> Iterator[Kind]:
    """All leaves, or things of another kind, in a tree of tuples, lists and dictionaries."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from leaves(item, kind)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from leaves(item, kind)


def rebuilt(value: Any, of: Callable[[Leaf], Any]) -> Any:
    """The tree with something else in the place of each leaf; named tuples stay what they are."""
    if isinstance(value, Leaf):
        return of(value)
    if isinstance(value, dict):
        return {key: rebuilt(item, of) for key, item in value.items()}
    if isinstance(value, tuple):
        items = [rebuilt(item, of) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [rebuilt(item, of) for item in value]
    return value


@dataclass
class _Block:
    """A storage: its bytes on their device, and as they were before the call."""

    base: torch.Tensor
    before: torch.Tensor
    views: list[tuple[torch.Tensor, bool]] = field(default_factory=list)

    def mask(self, written: bool) -> torch.Tensor:
        """The bytes that belong to tensors: to all of them, or to those that may be written."""
        mask = torch.zeros(self.before.numel(), dtype=torch.bool)
        for view, may_write in self.views:
            if may_write or not written:
                _fill(mask, view)
        return mask


def _fill(mask: torch.Tensor, view: torch.Tensor) -> None:
    """True for every byte of a strided view into the storage that `mask` stands for."""
    if view.numel() == 0:
        return
    size = view.element_size()
    # A dimension of stride 0 is the same bytes again and may be longer than any memory.
    shape = [1 if stride == 0 else length for length, stride in zip(view.shape, view.stride(), strict=True)]
    strides = [stride * size for stride in view.stride()]
    mask.as_strided([*shape, size], [*strides, 1], view.storage_offset() * size).fill_(True)


class Arena:
    """The memory of one call."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = torch.device(device)
        self.blocks: dict[int, _Block] = {}
        self.tensors: dict[int, torch.Tensor] = {}
        self.kept: list[Leaf] = []  # ids stay unique while they live

    def build(self, value: Any) -> Any:
        """The tree with tensors in the place of leaves. Raises what torch raises for a view that cannot be."""
        return rebuilt(value, self._passed)

    def _passed(self, leaf: Leaf) -> Any:
        tensor: Any = self._tensor(leaf)
        block = self.blocks[id(leaf.shares or leaf)]
        inside = tensor
        for _, view in leaf.views:
            tensor = view(tensor)
            if isinstance(tensor, torch.Tensor) and _in(tensor, block.base):
                inside = tensor.detach()
        block.views.append((inside, leaf.written))
        return tensor

    def _tensor(self, leaf: Leaf) -> torch.Tensor:
        if leaf.shares is not None:
            return self._tensor(leaf.shares)
        if id(leaf) not in self.tensors:
            self.kept.append(leaf)
            self.tensors[id(leaf)], self.blocks[id(leaf)] = self._placed(leaf)
        return self.tensors[id(leaf)]

    def _address(self, pool: Leaf) -> int:
        tensor = self._tensor(pool)
        self.blocks[id(pool)].views.append((tensor, pool.written))
        return tensor.data_ptr()

    def _placed(self, leaf: Leaf) -> tuple[torch.Tensor, _Block]:
        array = leaf.array
        if leaf.pointers is not None:
            array = np.resize(np.array([self._address(pool) for pool in leaf.pointers], array.dtype), array.shape)
        strides = leaf.strides()
        elements = 1 + sum((n - 1) * s for n, s in zip(array.shape, strides, strict=True)) if array.size else 0
        size = GUARD + (leaf.shift + elements) * array.itemsize
        if not TIGHT:
            size = -(-size // 16) * 16 + GUARD
        # Not all alike, and no byte 0: a copy from the wrong place, or of zeros, changes something.
        poison = (np.arange(size, dtype=np.uint32) * 37 % 251 + 3).astype(np.uint8)
        base = torch.from_numpy(poison).clone()

        def view(memory: torch.Tensor) -> torch.Tensor:
            dtype = torch.from_numpy(np.zeros(0, array.dtype)).dtype
            offset = GUARD // array.itemsize + leaf.shift
            return memory.view(dtype).as_strided(array.shape, strides, offset)

        view(base).copy_(torch.from_numpy(np.ascontiguousarray(array)).reshape(array.shape))
        before = base.clone()
        if self.device.type == "cuda" and leaf.place != "cpu":
            # From pageable memory: the copy is one that a tool for uninitialised memory sees.
            base = base.pin_memory() if leaf.place == "host" else base.to(self.device)
        block = _Block(base, before)
        block.views.append((view(base), False))
        return view(base), block

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Addresses and sizes of what lies in the storages but in no tensor (CPU)."""
        for block in self.blocks.values():
            outside = (~block.mask(written=False)).numpy().astype(np.int8)
            edges = np.flatnonzero(np.diff(outside, prepend=0, append=0))
            for begin, end in edges.reshape(-1, 2).tolist():
                yield block.base.data_ptr() + begin, end - begin

    def now(self, leaf: Leaf) -> torch.Tensor:
        """The bytes of a leaf's storage."""
        return self.blocks[id(leaf.shares or leaf)].base.cpu()

    def changed(self, *, outputs_too: bool) -> Iterator[tuple[Leaf, int]]:
        """Leaves whose storage changed where it must not, and the offset in bytes from the tensor's guard."""
        for leaf in self.kept:
            block = self.blocks[id(leaf)]
            differs = block.base.cpu() != block.before
            if not outputs_too:
                differs &= ~block.mask(written=True)
            if differs.any():
                yield leaf, int(differs.nonzero()[0]) - GUARD


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes on the CPU: unlike numbers, they are equal to themselves."""
    # Not contiguous(): one element may keep any stride.
    whole = tensor.detach().cpu().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return whole.view(-1).view(torch.uint8)


def _in(tensor: torch.Tensor, base: torch.Tensor) -> bool:
    try:
        return tensor.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse, meta and the like
        return False
