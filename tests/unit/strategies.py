"""Batches, tables and Hypothesis strategies for tests of the compress plans, on the CPU and on the GPU alike.

Everything is made from a seed: ``build_case`` gives the same numbers on every machine and for every device.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

DATA = Path(__file__).resolve().parent.parent / "data"

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
MAX_TOKENS = 65536
MAX_BATCH = 65535


def load_golden(name: str) -> list[dict[str, Any]]:
    """Recorded outputs of the peers' kernels: "plans_a" or "online_a"."""
    with gzip.open(DATA / f"{name}.json.gz", "rt") as file:
        return json.load(file)


def seed_of(name: str) -> int:
    """A seed from a test's name, so that tests are independent of each other's order."""
    return zlib.crc32(name.encode())


def words(plan: torch.Tensor, signed: bool = True) -> list[list[int]]:
    """A packed plan as lists of 32-bit words, the form of the golden files."""
    return plan.cpu().numpy().view("<i4" if signed else "<u4").tolist()


# -------------------------------------------------------------------------------------------------- lengths


@dataclass(frozen=True)
class Lengths:
    """The lengths of one forward. ``num_q_tokens`` is the sum of ``extend`` unless the batch is hostile."""

    seq: tuple[int, ...]
    extend: tuple[int, ...]
    num_q_tokens: int

    @property
    def batch(self) -> int:
        return len(self.seq)

    @property
    def width(self) -> int:
        """Columns that req_to_token needs, bounded because hostile lengths are."""
        return max(1, min(max(self.seq, default=1), 2 * MAX_TOKENS))

    @staticmethod
    def of(prefix: list[int], extend: list[int]) -> Lengths:
        return Lengths(tuple(p + e for p, e in zip(prefix, extend, strict=True)), tuple(extend), sum(extend))


def uniform(batch: int, extend: int, prefix: int = 0) -> Lengths:
    return Lengths.of([prefix] * batch, [extend] * batch)


def ragged(seed: int, batch: int, max_extend: int, max_prefix: int = 1000) -> Lengths:
    """Random lengths, at least one of each, cut so that they fit a forward."""
    rng = np.random.default_rng(seed)
    extend = np.minimum(rng.integers(1, max_extend + 1, batch), max(1, MAX_TOKENS // max(batch, 1)))
    return Lengths.of(rng.integers(0, max_prefix + 1, batch).tolist(), extend.tolist())


def near_multiples(seed: int, batch: int, multiples: tuple[int, ...] = (4, 128, 256)) -> Lengths:
    """Prefixes and ends within 2 of multiples: where one-off mistakes live."""
    rng = np.random.default_rng(seed)

    def near() -> int:
        return int(rng.choice(multiples)) * int(rng.integers(1, 4)) + int(rng.integers(-2, 3))

    prefix, extend = [], []
    for _ in range(batch):
        a, b = near(), near()
        prefix.append(min(a, b))
        extend.append(max(1, abs(a - b)))
    return Lengths.of(prefix, extend)


def empty() -> list[Lengths]:
    """Forwards without tokens: an idle rank, and a micro-batch whose requests all went to the other half."""
    return [
        Lengths((), (), 0),
        Lengths((7,), (3,), 0),
        Lengths((0, -1, 300), (0, 0, 5), 0),
    ]


def huge() -> list[Lengths]:
    """The largest forwards that a ragged id can name, in few and in many requests."""
    return [
        uniform(1, MAX_TOKENS),
        uniform(1, MAX_TOKENS - 1, prefix=1),
        uniform(8, 8191, prefix=5),
        uniform(256, 255, prefix=257),
        uniform(1000, 65, prefix=64),
        uniform(16000, 4, prefix=126),
        uniform(MAX_BATCH, 1, prefix=3),
        ragged(1, 1000, 65),
    ]


def far() -> list[Lengths]:
    """Valid lengths at the end of the int32 range."""
    return [
        Lengths((INT32_MAX,), (300,), 300),
        Lengths((INT32_MAX, INT32_MAX - 1, 5), (1, 130, 5), 136),
    ]


def hostile() -> list[Lengths]:
    """Lengths that no server sends and that a kernel must survive: it cannot look at them before it runs."""
    big = 2**62
    return [
        Lengths((0, 0, 0), (0, 0, 0), 8),
        Lengths((10, 10), (-5, 10), 10),
        Lengths((-10, 20), (5, 8), 16),
        Lengths((8, 100), (8, 50), 20),  # more tokens than the input has rows
        Lengths((8, 9), (8, 9), 40),  # fewer
        Lengths((5,), (12,), 12),  # more new tokens than tokens: positions -7 .. 4
        Lengths((4, 300), (2**40, 200), 64),
        Lengths((INT64_MAX, -INT64_MAX - 1), (INT64_MAX, INT64_MAX), 64),
        Lengths((-INT64_MAX - 1, 12), (1, 12), 16),
        Lengths((big + 40, 9), (big + 30, 9), 256),  # prefix 10 once the two are subtracted exactly
        Lengths((big + 2**31, 9), (big + 5, 9), 256),
        Lengths((INT32_MAX + 3, 12), (9, 4), 16),  # positions up to and past 2^31 - 2
        Lengths((INT32_MAX + 200, 12), (200, 4), 256),
        Lengths((2**40, 12), (4, 12), 16),
        Lengths((MAX_TOKENS + 9,), (MAX_TOKENS + 9,), MAX_TOKENS),
        Lengths((200,) * 300, (200,) * 300, 1000),
        Lengths((INT64_MAX,) * 4, (INT64_MAX,) * 4, 1000),
        Lengths((3, 3, 3, 200), (-INT64_MAX - 1, -1, 0, 150), 150),
    ]


def _around(*values: int) -> st.SearchStrategy[int]:
    return st.builds(lambda value, shift: value + shift, st.sampled_from(values), st.integers(-2, 2))


def new_tokens(most: int = 700) -> st.SearchStrategy[int]:
    """Extends: single tokens, verify batches, chunks, and the neighbours of multiples."""
    near = _around(4, 8, 16, 128, 256, 384, 512).filter(lambda n: 1 <= n <= most)
    return st.one_of(st.integers(1, 12), near, st.integers(1, most))


def prefixes(most: int = 2000) -> st.SearchStrategy[int]:
    near = _around(4, 8, 128, 252, 256, 512, 1024).filter(lambda n: 0 <= n <= most)
    return st.one_of(st.just(0), st.integers(0, 16), near, st.integers(0, most))


@st.composite
def length_batches(draw: st.DrawFn, max_batch: int = 12, max_extend: int = 700) -> Lengths:
    """Valid lengths of one forward; a third of them uniform, because kernels have fast paths for those."""
    batch = draw(st.integers(1, max_batch))
    if draw(st.integers(0, 2)) == 0:
        return uniform(batch, draw(new_tokens(max_extend)), draw(prefixes()))
    return Lengths.of([draw(prefixes()) for _ in range(batch)], [draw(new_tokens(max_extend)) for _ in range(batch)])


def int64s() -> st.SearchStrategy[int]:
    """Any int64, with the edges of every type on the way more often than chance would have them."""
    signs = st.sampled_from([1, -1])
    edges = st.sampled_from([0, 1, 127, 128, 2**16, 2**31, 2**32, 2**40, 2**62, INT64_MAX])
    near = st.builds(lambda edge, shift, sign: sign * edge + shift, edges, st.integers(-9, 9), signs)
    anything = st.integers(-INT64_MAX - 1, INT64_MAX)
    return st.one_of(st.integers(-20, 300), near, anything).map(lambda n: max(-INT64_MAX - 1, min(n, INT64_MAX)))


@st.composite
def hostile_batches(draw: st.DrawFn, max_batch: int = 8, max_tokens: int = 400) -> Lengths:
    """Lengths without any promise. Some requests are valid, so that bad ones have neighbours to damage."""
    seq, extend = [], []
    for _ in range(draw(st.integers(1, max_batch))):
        kind = draw(st.sampled_from(["valid", "free", "short prefix"]))
        e = draw(st.integers(1, 40)) if kind == "valid" else draw(int64s())
        s = draw(int64s()) if kind == "free" else e + draw(st.integers(0 if kind == "valid" else -200, 200))
        seq.append(max(-INT64_MAX - 1, min(s, INT64_MAX)))
        extend.append(e)
    return Lengths(tuple(seq), tuple(extend), draw(st.integers(0, max_tokens)))


# ------------------------------------------------------------------------------------------------- geometry


@dataclass(frozen=True)
class Geometry:
    """What a server fixes for one ratio."""

    compress_ratio: int
    swa_page_size: int
    ring_size: int
    use_req_ring: bool = False
    write_pad: int | None = None

    @property
    def window(self) -> int:
        return 8 if self.compress_ratio == 4 else 128

    @property
    def paged(self) -> bool:
        return self.compress_ratio == 4 and not self.use_req_ring

    def decode_options(self) -> dict[str, Any]:
        return {
            "compress_ratio": self.compress_ratio,
            "swa_page_size": self.swa_page_size,
            "ring_size": self.ring_size,
            "use_req_ring": self.use_req_ring,
        }

    def prefill_options(self) -> dict[str, Any]:
        return {**self.decode_options(), "write_pad": self.write_pad}


SERVER_GEOMETRIES = (
    Geometry(4, 256, 8),
    Geometry(4, 256, 16),
    Geometry(4, 256, 8, use_req_ring=True),
    Geometry(4, 256, 16, use_req_ring=True),
    Geometry(128, 256, 128),
    Geometry(128, 256, 256),
)
"""Those that servers run: without and with speculation."""


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    """Any legal geometry: also pages as small as a ring, sizes that are no power of two, explicit pads."""
    ratio = draw(st.sampled_from([4, 128]))
    ring = ratio * draw(st.sampled_from([1, 2, 3, 4, 8]))
    page = ring * draw(st.sampled_from([1, 2, 3, 5, 32]))
    pad = draw(st.one_of(st.none(), st.integers(0, 2 * ring), st.just(INT32_MAX)))
    return Geometry(ratio, page, ring, ratio == 4 and draw(st.booleans()), pad)


# --------------------------------------------------------------------------------------------------- tables


def affine_tables(
    num_reqs: int, width: int, a: int, b: int, c: int, num_full_slots: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tables of the golden files: ``(r * width + p) * a % F`` and ``(x * b + c) % F``."""
    token = np.arange(num_reqs * width, dtype=np.int64).reshape(num_reqs, width)
    slots = np.arange(num_full_slots, dtype=np.int64)
    return (
        torch.from_numpy((token * a % num_full_slots).astype(np.int32)),
        torch.from_numpy((slots * b + c) % num_full_slots),
    )


def spec_tables(num_reqs: int, width: int = 4096) -> tuple[torch.Tensor, torch.Tensor]:
    """The tables of the contract's worked values: ``4096 r + p`` and the identity."""
    token = np.arange(num_reqs, dtype=np.int64)[:, None] * 4096 + np.arange(width)
    return torch.from_numpy(token.astype(np.int32)), torch.arange(4096 * num_reqs)


def random_tables(seed: int, num_reqs: int, width: int, row_padding: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Injective tables: every (request, position) has its own full slot and its own SWA slot.

    Small ones are permutations; large ones are odd multiples modulo a power of two, which are injective too
    and do not take a second to make. ``row_padding`` columns of poison lie between the rows of req_to_token.
    """
    rng = np.random.default_rng(seed)
    count = num_reqs * width
    size = 1 << (count + 7).bit_length()
    if size <= 1 << 16:
        full = rng.permutation(size)[:count]
        state = rng.permutation(size)
    else:
        odd = lambda: 2 * int(rng.integers(size // 4, size // 2)) + 1  # noqa: E731
        full = np.arange(count, dtype=np.int64) * odd() % size
        state = (np.arange(size, dtype=np.int64) * odd() + int(rng.integers(size))) % size
    wide = np.full((num_reqs, width + row_padding), -(2**31), np.int32)
    wide[:, :width] = full.reshape(num_reqs, width)
    return torch.from_numpy(wide)[:, :width], torch.from_numpy(state.astype(np.int64))


def hostile_tables(seed: int, num_reqs: int, width: int, row_padding: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Tables half of whose entries point nowhere: negative, past the end, or too far for an int32."""
    rng = np.random.default_rng(seed)
    req_to_token, full_to_state = random_tables(seed, num_reqs, width, row_padding)
    size = len(full_to_state)
    shared = torch.from_numpy(rng.random((num_reqs, width)) < 0.2)
    req_to_token[shared] = 0  # one slot for many tokens
    bad = torch.from_numpy(rng.random((num_reqs, width)) < 0.3)
    nowhere = torch.from_numpy(rng.choice([-1, -(2**31), size, size + 1, INT32_MAX], (num_reqs, width)))
    req_to_token[bad] = nowhere[bad].to(torch.int32)
    far = torch.from_numpy(rng.random(size) < 0.4)
    slots = rng.choice([-1, -INT64_MAX - 1, 2**31, 2**33 + 5, 2**36 + 77, INT64_MAX], size)
    return req_to_token, full_to_state.where(~far, torch.from_numpy(slots))


def hostile_requests(seed: int, batch: int, num_reqs: int) -> list[int]:
    """Request pool indices half of which have no row in the table."""
    rng = np.random.default_rng(seed)
    bad = [-1, -INT64_MAX - 1, num_reqs, 2**23, 2**24 - 1, 2**28, 2**31 - 1, 2**31, 2**40, 2**57, INT64_MAX]
    return [
        int(rng.integers(num_reqs)) if rng.random() < 0.5 else bad[int(rng.integers(len(bad)))] for _ in range(batch)
    ]


# ---------------------------------------------------------------------------------------------------- cases

FUNCTIONS = {
    "prefill": "plan_compress_prefill",
    "decode": "plan_compress_decode",
    "prefill_legacy": "plan_compress_prefill_legacy",
    "decode_legacy": "plan_compress_decode_legacy",
    "online_prefill": "plan_online_prefill",
    "online_decode": "plan_online_decode",
    "step_prefill": "plan_step_prefill",
    "step_decode": "plan_step_decode",
}
"""Methods of a case, and the function of `hotplan` and of the reference that each calls."""


@dataclass(frozen=True)
class Case:
    """One forward: all its tensors on their devices, and how each operator is called with them.

    The methods take the operator (a public function or its reference) and further keyword arguments.
    """

    lengths: Lengths
    geometry: Geometry
    req_pool_indices: torch.Tensor
    req_to_token: torch.Tensor
    full_to_state: torch.Tensor
    seq_lens: torch.Tensor
    extend_lens: torch.Tensor
    state_slot_offset: int = 0

    def to(self, device: str | torch.device, lengths_device: str | torch.device | None = None) -> Case:
        """The same case elsewhere. Without ``lengths_device`` the lengths go along."""
        at = device if lengths_device is None else lengths_device
        return replace(
            self,
            req_pool_indices=self.req_pool_indices.to(device),
            req_to_token=_moved_rows(self.req_to_token, device),
            full_to_state=self.full_to_state.to(device),
            seq_lens=self.seq_lens.to(at),
            extend_lens=self.extend_lens.to(at),
        )

    @property
    def tables(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.req_pool_indices, self.req_to_token, self.full_to_state

    def prefill(self, plan: Callable[..., Any], **options: Any) -> Any:
        options = {"num_q_tokens": self.lengths.num_q_tokens, **self.geometry.prefill_options(), **options}
        return plan(*self.tables, self.seq_lens, self.extend_lens, **options)

    def decode(self, plan: Callable[..., Any], **options: Any) -> Any:
        return plan(*self.tables, self.seq_lens, **{**self.geometry.decode_options(), **options})

    def prefill_legacy(self, plan: Callable[..., Any], **options: Any) -> Any:
        options = {
            "num_q_tokens": self.lengths.num_q_tokens,
            "compress_ratio": self.geometry.compress_ratio,
            **options,
        }
        return plan(self.req_pool_indices, self.seq_lens, self.extend_lens, **options)

    def decode_legacy(self, plan: Callable[..., Any], **options: Any) -> Any:
        options = {"compress_ratio": self.geometry.compress_ratio, **options}
        return plan(self.req_pool_indices, self.seq_lens, **options)

    def online_prefill(self, plan: Callable[..., Any], **options: Any) -> Any:
        options = {
            "num_q_tokens": self.lengths.num_q_tokens,
            "state_slot_offset": self.state_slot_offset,
            **options,
        }
        return plan(self.req_pool_indices, self.seq_lens, self.extend_lens, **options)

    def online_decode(self, plan: Callable[..., Any], **options: Any) -> Any:
        return plan(self.req_pool_indices, self.seq_lens, **{"state_slot_offset": self.state_slot_offset, **options})

    def step_prefill(self, plan: Callable[..., Any], **options: Any) -> Any:
        options = {
            "num_q_tokens": self.lengths.num_q_tokens,
            "swa_page_size": self.geometry.swa_page_size,
            **options,
        }
        return plan(*self.tables, self.seq_lens, self.extend_lens, **options)

    def step_decode(self, plan: Callable[..., Any], **options: Any) -> Any:
        return plan(*self.tables, self.seq_lens, **{"swa_page_size": self.geometry.swa_page_size, **options})


def _moved_rows(table: torch.Tensor, device: str | torch.device) -> torch.Tensor:
    """``table.to(device)`` that keeps the stride between rows, poison included."""
    if table.is_contiguous() or table.device == torch.device(device):
        return table.to(device)
    wide = torch.full((table.shape[0], table.stride(0)), -(2**31), dtype=table.dtype, device=device)
    wide[:, : table.shape[1]] = table.to(device)
    return wide[:, : table.shape[1]]


def build_case(
    lengths: Lengths,
    geometry: Geometry,
    *,
    seed: int = 0,
    device: str | torch.device = "cpu",
    lengths_device: str | torch.device | None = None,
    tables: str = "random",
    requests: list[int] | None = None,
    max_width: int | None = None,
    row_padding: int = 3,
    state_slot_offset: int = 0,
) -> Case:
    """Make the tensors of one forward.

    Args:
        tables: "random" (injective, rows strided by ``row_padding``), "hostile" (entries and request indices
            that point nowhere) or "spec" (those of the contract's worked values).
        requests: request pool indices; by default distinct ones in random order, never row 0.
        max_width: bounds the columns of req_to_token, so that late positions lie outside.
        device, lengths_device: as :meth:`Case.to`.
    """
    rng = np.random.default_rng(seed)
    num_reqs = lengths.batch + 3 if requests is None else max([0, *requests]) + 1
    width = lengths.width if max_width is None else min(lengths.width, max_width)
    if tables == "spec":
        req_to_token, full_to_state = spec_tables(num_reqs)
    elif tables == "random":
        req_to_token, full_to_state = random_tables(seed, num_reqs, width, row_padding)
    elif tables == "hostile":
        num_reqs = min(num_reqs, 6)
        requests = hostile_requests(seed, lengths.batch, num_reqs) if requests is None else requests
        req_to_token, full_to_state = hostile_tables(seed, num_reqs, min(width, 600), row_padding)
    else:
        raise ValueError(f"tables: expected random, hostile or spec, got {tables!r}")
    if requests is None:
        requests = (1 + rng.permutation(num_reqs - 1)[: lengths.batch]).tolist()
    case = Case(
        lengths,
        geometry,
        torch.tensor(requests, dtype=torch.int64),
        req_to_token,
        full_to_state,
        torch.tensor(lengths.seq, dtype=torch.int64),
        torch.tensor(lengths.extend, dtype=torch.int64),
        state_slot_offset,
    )
    return case.to(device, lengths_device)


@st.composite
def cases(draw: st.DrawFn, **options: Any) -> Case:
    """Valid forwards on the CPU with random geometry and tables."""
    seed = draw(st.integers(0, 2**32 - 1))
    offset = draw(st.sampled_from([0, 1, 64, 1000]))
    return build_case(draw(length_batches(**options)), draw(geometries()), seed=seed, state_slot_offset=offset)


@st.composite
def hostile_cases(draw: st.DrawFn, **options: Any) -> Case:
    """Forwards without any promise, on the CPU: lengths, request indices and tables."""
    seed = draw(st.integers(0, 2**32 - 1))
    offset = draw(st.sampled_from([0, 5, INT32_MAX]))
    lengths = draw(hostile_batches(**options))
    return build_case(lengths, draw(geometries()), seed=seed, tables="hostile", state_slot_offset=offset)
