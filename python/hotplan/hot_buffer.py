"""The hot buffer of one group of layers as an object: who owns a pinned host pool and top-k ids needs nothing else."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import NamedTuple, TypedDict

import torch

from hotplan import hisparse

__all__ = ["HitStats", "HotBuffer"]


def _check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    """NumPy's ints are fine; a tensor of one is not, since it indexes otherwise and may lie on the GPU."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or isinstance(value, (bool, torch.Tensor)):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    if number < low or (high is not None and number > high):
        expected = f"at least {low}" if high is None else f"a number in [{low}, {high}]"
        raise ValueError(f"{name}: expected {expected}, got {value}")


def _check_tensor(name: str, tensor: object, dtype: torch.dtype, shape: tuple[int | None, ...]) -> None:
    """None in the shape: any size."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
    if tensor.dtype != dtype:
        raise TypeError(f"{name}: expected dtype {dtype}, got {tensor.dtype}")
    got = tuple(tensor.shape)
    if len(got) != len(shape) or any(n is not None and n != m for n, m in zip(shape, got, strict=True)):
        expected = ", ".join("*" if n is None else str(n) for n in shape)
        raise ValueError(f"{name}: expected shape ({expected}), got {got}")


def _tensor_of(name: str, values: torch.Tensor | Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """One-dimensional: the tensor itself, or the numbers of a sequence on the CPU."""
    if not isinstance(values, torch.Tensor):
        try:
            values = torch.tensor(list(values), dtype=dtype)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise TypeError(f"{name}: expected a tensor or a sequence of ints, got {values!r:.80} ({error})") from None
    _check_tensor(name, values, dtype, (None,))
    return values


def _pools_of(host_pool: torch.Tensor | Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """One pool per layer, all alike."""
    if isinstance(host_pool, torch.Tensor):
        if host_pool.dim() not in (2, 3):
            raise ValueError(f"host_pool: expected 2 or 3 dimensions, got shape {tuple(host_pool.shape)}")
        pools = [host_pool] if host_pool.dim() == 2 else list(host_pool)
    elif isinstance(host_pool, (tuple, list)):
        pools = list(host_pool)
    else:
        raise TypeError(f"host_pool: expected a tensor or one per layer, got {type(host_pool).__name__}")
    for pool in pools:
        if not isinstance(pool, torch.Tensor):
            raise TypeError(f"host_pool: expected tensors, got {type(pool).__name__}")
    shapes = {tuple(pool.shape) for pool in pools}
    if len(shapes) != 1 or len(next(iter(shapes))) != 2:
        raise ValueError(f"host_pool: expected layers of one shape [host_rows, width], got shapes {sorted(shapes)}")
    for pool in pools:
        if pool.dtype != pools[0].dtype:
            raise TypeError(f"host_pool: expected layers of one dtype, got {pools[0].dtype} and {pool.dtype}")
        if pool.device.type != "cpu" or pool.layout != torch.strided:
            raise ValueError(f"host_pool: expected dense layers on the CPU, got {pool.layout} on {pool.device}")
        if not pool.is_contiguous():
            raise ValueError(f"host_pool: expected contiguous layers, got strides {pool.stride()}")
    row_bytes = pools[0].shape[1] * pools[0].element_size()
    if row_bytes == 0 or row_bytes % 16:
        raise ValueError(f"host_pool: expected rows of a positive multiple of 16 bytes, got {row_bytes} bytes")
    return pools


class _Options(TypedDict, total=False):
    """What a step asks of :func:`hotplan.hisparse.resolve_residency`, by the names there."""

    miss_mask: torch.Tensor
    stats: torch.Tensor
    resolved_global_indices: torch.Tensor
    valid_counts: torch.Tensor
    swap_host_physical_rows: torch.Tensor
    swap_device_physical_rows: torch.Tensor
    swap_counts: torch.Tensor
    attention_indices: torch.Tensor
    attention_block_stride: int
    request_ids: torch.Tensor
    source_block_table: torch.Tensor
    source_block_size: int
    max_union_rows: int | None


class HitStats(NamedTuple):
    """Top-k references since the last reset: hits found their id in the hot buffer, misses had it copied."""

    hits: int
    misses: int

    @property
    def hit_rate(self) -> float:
        """Share of hits, 0.0 before the first reference."""
        total = self.hits + self.misses
        return self.hits / total if total else 0.0


class HotBuffer:
    """Hot rows, state and tables of a group of layers that share their top-k ids.

    ::

        hot = HotBuffer(pool, max_requests=64, top_k=2048, hot_slots=4096)  # pool: pinned [layers, host_rows, width]
        request = hot.admit()
        rows = hot.resolve(ids, [request])                       # int32 [R, K] ids -> hot rows, once per step
        for layer in range(hot.layers):
            hot.gather(layer)                                    # then attention over hot.caches[layer] at `rows`
        hot.release(request)

    Every tensor is allocated once and keeps its address, so a step can be captured into a CUDA graph: pass ``ids`` and
    ``requests`` as tensors, fill them before each replay, and pad ``requests`` with -1. ``admit`` and ``release``
    write state on the current stream and stay outside the graph.

    Attributes:
        layers: layers of the group.
        max_requests, max_rows, top_k, hot_slots, block_size, attention_block_stride, device: as given when it was made,
            ``max_rows`` and ``device`` resolved.
        caches: ``[layers, blocks, BS, width]`` on the device, the hot rows; ``caches[i]`` is what layer i's attention
            reads.
        block_table: int32 ``[max_requests, ceil(H / BS)]``, the hot pages of each request.
        device_global_indices, lru_slots: the state, int32 and int16 ``[max_requests, H]``.
        states: int32 ``[max_requests]``, the state row of an admitted request, -1 for a free one.
        hot_indices, miss_mask, resolved_global_indices: int32 ``[max_rows, K]``, results of the last step.
        attention_indices: likewise; None without ``attention_block_stride``.
        swap_host_physical_rows, swap_device_physical_rows: likewise.
        valid_counts, swap_counts: int32 ``[max_rows]``, likewise.
    """

    def __init__(
        self,
        host_pool: torch.Tensor | Sequence[torch.Tensor],
        *,
        max_requests: int,
        top_k: int,
        hot_slots: int,
        max_rows: int | None = None,
        block_size: int = 64,
        attention_block_stride: int | None = None,
        device: str | torch.device = "cuda",
    ) -> None:
        """Allocate for ``max_requests`` requests.

        Args:
            host_pool: ``[layers, host_rows, width]``, or one ``[host_rows, width]`` per layer, on the CPU, each layer
                contiguous; pinned where ``device`` is a GPU. Host row g holds id g.
            max_requests: requests that can be admitted at once.
            top_k: K, ids per launch row.
            hot_slots: H, hot rows per request, K <= H <= 32,768.
            max_rows: launch rows of a step at the most; None: ``max_requests``.
            block_size: BS, rows per hot page.
            attention_block_stride: also write attention indices, for pages so many rows apart.
            device: where the hot rows are, a CUDA device or "cpu".

        Raises:
            TypeError, ValueError: a pool or a size that does not fit.
        """
        pools = _pools_of(host_pool)
        for name, value in (("max_requests", max_requests), ("top_k", top_k), ("block_size", block_size)):
            _check_int(name, value, 1)
        _check_int("hot_slots", hot_slots, top_k, 32768)
        if max_rows is not None:
            _check_int("max_rows", max_rows, 1)
        if attention_block_stride is not None:
            _check_int("attention_block_stride", attention_block_stride, block_size)
        try:
            self.device = torch.device(device)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise ValueError(f"device: expected a CUDA device or cpu, got {device!r} ({error})") from None
        if self.device.type not in ("cpu", "cuda"):
            raise ValueError(f"device: expected a CUDA device or cpu, got {device!r}")
        self.layers = len(pools)
        self.top_k = top_k
        self.hot_slots = hot_slots
        self.block_size = block_size
        self.max_requests = max_requests
        self.max_rows = max_requests if max_rows is None else max_rows
        self.attention_block_stride = attention_block_stride
        self._pools = pools

        pages = -(-hot_slots // block_size)
        width = pools[0].shape[1]
        self.caches = torch.zeros(
            (self.layers, max_requests * pages, block_size, width), dtype=pools[0].dtype, device=self.device
        )
        self.block_table = self._int32(torch.arange(max_requests * pages).view(max_requests, pages))
        self.states = self._int32(torch.full((max_requests,), -1))
        self.device_global_indices = self._int32(torch.full((max_requests, hot_slots), -1))
        self._fresh_lru = torch.arange(hot_slots, dtype=torch.int16, device=self.device)
        self.lru_slots = self._fresh_lru.repeat(max_requests, 1)
        self._stats = torch.zeros(2, dtype=torch.int64, device=self.device)

        shape = (self.max_rows, top_k)
        self.hot_indices = self._int32(torch.full(shape, -1))
        self.attention_indices = None if attention_block_stride is None else self._int32(torch.full(shape, -1))
        self.miss_mask = self._int32(torch.zeros(shape))
        self.resolved_global_indices = self._int32(torch.full(shape, -1))
        self.swap_host_physical_rows = self._int32(torch.full(shape, -1))
        self.swap_device_physical_rows = self._int32(torch.full(shape, -1))
        self.valid_counts = self._int32(torch.zeros(self.max_rows))
        self.swap_counts = self._int32(torch.zeros(self.max_rows))
        # The tables of a step's rows, where rows are not simply requests 0, 1, 2, ...
        self._row_states = self._int32(torch.full((self.max_rows,), -1))
        self._row_tables = self._int32(torch.zeros((self.max_rows, pages)))
        self._rows = 0
        self._free = list(range(max_requests - 1, -1, -1))

    def _int32(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(device=self.device, dtype=torch.int32)

    # ------------------------------------------------------------------------------------------------ requests

    def admit(self) -> int:
        """Give a new request an empty hot buffer.

        Returns:
            Its number, for ``requests`` of the other methods, free for another one after :meth:`release`.

        Raises:
            RuntimeError: ``max_requests`` requests are admitted.
        """
        if not self._free:
            raise RuntimeError(f"all {self.max_requests} requests of this hot buffer are admitted; release one first")
        request = self._free.pop()
        self.device_global_indices[request].fill_(-1)
        self.lru_slots[request].copy_(self._fresh_lru)
        self.states[request].fill_(request)
        return request

    def release(self, request: int) -> None:
        """Take the hot buffer of a finished request back. Its rows in a later step are padding.

        Args:
            request: what :meth:`admit` returned.

        Raises:
            TypeError, ValueError: it is not admitted.
        """
        _check_int("request", request, 0, self.max_requests - 1)
        if request in self._free:
            raise ValueError(f"request: expected an admitted request, got {request}")
        self.states[request].fill_(-1)
        self._free.append(request)

    @property
    def admitted(self) -> int:
        """How many requests are admitted."""
        return self.max_requests - len(self._free)

    # ------------------------------------------------------------------------------------------------ a step

    def resolve(
        self,
        ids: torch.Tensor,
        requests: torch.Tensor | Sequence[int] | None = None,
        *,
        source_block_table: torch.Tensor | None = None,
        source_block_size: int = 0,
        max_union_rows: int | None = None,
        layer: int | None = None,
    ) -> torch.Tensor:
        """Find or place every id of a step; :meth:`gather` makes the copies.

        Args:
            ids: int32 ``[R, K]`` on the device: host rows, or positions where ``source_block_table`` is given; -1:
                none.
            requests: the request of each row, int32 ``[R]`` on the device or a sequence of ints; -1: padding. None:
                row r is request r. A request may have several rows only under ``max_union_rows``.
            source_block_table: int32 ``[max_requests, pages]``, the host page of every ``source_block_size``
                positions of a request; pages <= 0: none.
            source_block_size: positions per page.
            max_union_rows: adjacent rows of one request, up to so many, are one set; needs ``source_block_table``.
            layer: also copy for this layer in the same launch; :meth:`gather` serves the others.

        Returns:
            int32 ``[R, K]``: the row of every column in ``caches[i].view(-1, width)``, or -1. It is part of
            ``hot_indices`` and valid until the next step.

        Raises:
            TypeError, ValueError: more rows than ``max_rows``, an unknown request in a sequence, and what
                :func:`hotplan.hisparse.resolve_residency` raises.
        """
        _check_tensor("ids", ids, torch.int32, (None, self.top_k))
        self._check_device("ids", ids)
        if ids.numel() and ids.stride(1) != 1 and self.top_k > 1:
            raise ValueError(f"ids: expected a column stride of 1, got strides {ids.stride()}")
        if layer is not None:
            self._check_layer(layer)
        rows = ids.shape[0]
        if rows > self.max_rows:
            raise ValueError(f"ids: expected at most max_rows={self.max_rows} rows, got {rows}")
        numbers = self._requests(requests, rows)
        options: _Options = {
            "miss_mask": self.miss_mask[:rows],
            "stats": self._stats,
            "resolved_global_indices": self.resolved_global_indices[:rows],
            "valid_counts": self.valid_counts[:rows],
            "swap_host_physical_rows": self.swap_host_physical_rows[:rows],
            "swap_device_physical_rows": self.swap_device_physical_rows[:rows],
            "swap_counts": self.swap_counts[:rows],
        }
        if self.attention_indices is not None and self.attention_block_stride is not None:
            options["attention_indices"] = self.attention_indices[:rows]
            options["attention_block_stride"] = self.attention_block_stride
        table, states = self.block_table, self.states
        if source_block_table is not None:
            if numbers is None:
                numbers = torch.arange(rows, dtype=torch.int32, device=self.device)
            options |= {
                "request_ids": numbers,
                "source_block_table": source_block_table,
                "source_block_size": source_block_size,
                "max_union_rows": max_union_rows,
            }
        elif max_union_rows is not None:
            raise ValueError("source_block_table: expected a tensor, because max_union_rows is given, got None")
        elif numbers is not None:
            table, states = self._row_tables[:rows], self._row_states[:rows]
            known = numbers.clamp(0, self.max_requests - 1)
            torch.index_select(self.block_table, 0, known, out=table)
            torch.index_select(self.states, 0, known, out=states)
            states.masked_fill_(numbers != known, -1)
        run = hisparse.resolve_residency if layer is None else hisparse.swap_in
        which = 0 if layer is None else layer
        hot_indices = self.hot_indices[:rows]
        run(
            self._pools[which], self.caches[which], table, ids, hot_indices,
            self.device_global_indices, self.lru_slots, request_state_indices=states, **options,
        )  # fmt: skip
        self._rows = rows
        return hot_indices

    def gather(self, layer: int = 0) -> torch.Tensor:
        """Copy what the last step misses into ``caches[layer]``, and return that.

        Args:
            layer: in ``[0, layers)``.

        Returns:
            ``[blocks, BS, width]`` on the device, of the pool's dtype.

        Raises:
            TypeError, ValueError: there is no such layer.
        """
        self._check_layer(layer)
        cache, rows = self.caches[layer], self._rows
        hisparse.gather_compact(
            self._pools[layer],
            cache,
            self.swap_host_physical_rows[:rows],
            self.swap_device_physical_rows[:rows],
            self.swap_counts[:rows],
        )
        return cache

    def invalidate(self, requests: torch.Tensor | Sequence[int], host_rows: torch.Tensor | Sequence[int]) -> None:
        """Forget the hot copies of host rows that were rewritten: ``host_rows[t]``, by request ``requests[t]``.

        Args:
            requests: int32 ``[T]`` on the device, or a sequence of ints.
            host_rows: int64 ``[T]`` on the device, or a sequence of ints; negative: skipped.

        Raises:
            TypeError, ValueError: no tensors or sequences of ints, or lengths differ.
        """
        wanted = _tensor_of("requests", requests, torch.int32)
        rows = _tensor_of("host_rows", host_rows, torch.int64)
        if len(wanted) != len(rows):
            raise ValueError(f"host_rows: expected one for each of {len(wanted)} requests, got {len(rows)}")
        given = [("requests", requests, wanted), ("host_rows", host_rows, rows)]
        moved = [tensor if tensor is value else tensor.to(self.device) for _, value, tensor in given]
        for (name, _, _), tensor in zip(given, moved, strict=True):
            self._check_device(name, tensor)
            if not tensor.is_contiguous():
                raise ValueError(f"{name}: expected a contiguous tensor, got strides {tensor.stride()}")
        hisparse.invalidate_written_slots(self.device_global_indices, self.states, *moved)

    def _check_layer(self, layer: int) -> None:
        _check_int("layer", layer, 0, self.layers - 1)

    def _check_device(self, name: str, tensor: torch.Tensor) -> None:
        if tensor.device != self.states.device or tensor.layout != torch.strided:
            device = self.states.device
            raise ValueError(f"{name}: expected a dense tensor on {device}, got {tensor.layout} on {tensor.device}")

    def _requests(self, requests: torch.Tensor | Sequence[int] | None, rows: int) -> torch.Tensor | None:
        if requests is None:
            if rows > self.max_requests:
                raise ValueError(f"requests: expected one per row, because there are {rows} rows, got None")
            return None
        given = _tensor_of("requests", requests, torch.int32)
        if len(given) != rows:
            raise ValueError(f"requests: expected shape ({rows},), got {tuple(given.shape)}")
        if given is not requests:
            for request in given.tolist():
                if not -1 <= request < self.max_requests:
                    raise ValueError(f"requests: expected numbers in [-1, {self.max_requests - 1}], got {request}")
            given = given.to(self.device)
        self._check_device("requests", given)
        if not given.is_contiguous():
            raise ValueError(f"requests: expected a contiguous tensor, got strides {given.stride()}")
        return given

    # ------------------------------------------------------------------------------------------------ statistics

    def stats(self) -> HitStats:
        """Hits and misses of all steps since the last reset. Waits for the device."""
        hits, misses = self._stats.tolist()
        return HitStats(hits, misses)

    def reset_stats(self) -> None:
        """Count from zero again."""
        self._stats.zero_()
