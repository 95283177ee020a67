"""A model of what the compressor kernels do with a plan, to show that plans are right and not merely equal.

The model keeps no keys and values, only names: every input row of every forward gets a new number. A ring row
holds the number that was stored there last. Whenever a plan closes a window, each row of the window must turn
out to be the number that the request's accepted history has at that position, whether the plan takes it from
the ring or from the input. Nothing here knows the rules behind a plan; it reads the fields as consumers do.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import torch
from strategies import Geometry

from hotplan import plans

_NOTHING = -1


class RingError(AssertionError):
    """A plan made a window from something else than the request's last tokens, or wrote where it must not."""


class RingModel:
    """State rings of one layer, fed by the plans of ``operators``.

    Args:
        operators: a module with the ``plan_*`` functions.
        geometry: of the ratio under test.
        num_requests: requests that live at the same time.
        max_tokens: per request.
        legacy: use the older layout's operators.
        device: of all tensors; lengths are on the CPU.
    """

    def __init__(
        self,
        operators: ModuleType,
        geometry: Geometry,
        *,
        num_requests: int,
        max_tokens: int,
        seed: int,
        legacy: bool = False,
        device: str = "cpu",
    ) -> None:
        rng = np.random.default_rng(seed)
        self.operators, self.geometry, self.legacy = operators, geometry, legacy
        self.max_tokens, self.device = max_tokens, torch.device(device)
        page = geometry.swa_page_size
        pages_each = -(-max_tokens // page)
        num_pages = num_requests * pages_each
        # SWA pages are private and in any order. Page 0 and pool row 0 are the server's: padding goes there.
        swa_page = 1 + rng.permutation(num_pages).reshape(num_requests, pages_each)
        token = np.arange(pages_each * page)
        swa = swa_page[:, token // page] * page + token % page
        full = 1 + rng.permutation(swa.size).reshape(swa.shape)
        self.rid = (1 + rng.permutation(num_requests)).tolist()
        req_to_token = np.zeros((num_requests + 1, pages_each * page), np.int32)
        req_to_token[self.rid] = full
        full_to_state = np.zeros(swa.size + 1, np.int64)
        full_to_state[full.reshape(-1)] = swa.reshape(-1)
        self.req_to_token = torch.from_numpy(req_to_token).to(self.device)
        self.full_to_state = torch.from_numpy(full_to_state).to(self.device)

        num_rows = max((num_pages + 1) * geometry.ring_size, (num_requests + 1) * 256)
        self.ring = np.full(num_rows, _NOTHING)
        self.history: list[list[int]] = [[] for _ in range(num_requests)]  # accepted numbers by position
        self.windows_checked = 0
        self.ring_rows_read = 0
        self._next = 0

    # ------------------------------------------------------------------------------------------- the server

    def room(self, request: int) -> int:
        return self.max_tokens - len(self.history[request])

    def extend(self, new: dict[int, int], accepted: dict[int, int] | None = None) -> None:
        """A forward of ``new[request]`` tokens each: prefill chunks, or drafts that keep ``accepted``."""
        requests = list(new)
        extend = [new[r] for r in requests]
        prefix = [len(self.history[r]) for r in requests]
        inputs = self._numbers(sum(extend))
        starts = np.cumsum([0, *extend]).tolist()
        for r, start, count in zip(requests, starts, extend, strict=False):
            self.history[r] += inputs[start : start + count]

        seq = [p + e for p, e in zip(prefix, extend, strict=True)]
        plan = self._prefill_plan(requests, seq, extend)
        rows = plans.compress_rows(plan.compress)
        self._check_closed(rows, requests, prefix, starts)
        # Consumers read all windows of a forward before any of its rows is stored.
        for row in rows:
            request = requests[int(np.searchsorted(starts, row["ragged_id"], side="right")) - 1]
            self._check_window(request, row, int(row["buffer_len"]), inputs, int(row["ragged_id"]))
        write = plans.write_rows(plan.write)
        if len(write) > len(inputs):
            raise RingError(f"{len(write)} write rows for {len(inputs)} input rows")
        if len(np.unique(write["write_loc"])) != len(write):
            raise RingError("two tokens of one forward are stored to the same ring row, in no order")
        self._store(write["write_loc"], [inputs[i] for i in write["ragged_id"]])

        for r, keep in (accepted or {}).items():
            at = requests.index(r)
            assert 1 <= keep <= extend[at], "a verify batch keeps at least one token"
            del self.history[r][prefix[at] + keep :]

    def decode(self, requests: list[int], padding: int = 0) -> None:
        """One new token each, and ``padding`` rows as a captured graph has them: pool row 0, length 1."""
        inputs = self._numbers(len(requests) + padding)
        for r, number in zip(requests, inputs, strict=False):
            self.history[r].append(number)
        seq = [len(self.history[r]) for r in requests] + [1] * padding
        rows = plans.decode_rows(self._decode_plan([self.rid[r] for r in requests] + [0] * padding, seq))
        if rows["seq_len"].tolist() != seq:
            raise RingError(f"decode rows for lengths {rows['seq_len'].tolist()}, expected {seq}")
        # A decode kernel stores its token first and takes the whole window from the ring.
        self._store(rows["write_loc"], inputs)
        for r, row in zip(requests, rows, strict=False):
            if row["seq_len"] % self.geometry.compress_ratio == 0:
                self._check_window(r, row, self.geometry.window, inputs, None)

    def share_prefix(self, source: int, target: int, num_pages: int) -> None:
        """Start ``target`` on the first pages of ``source``, as a prefix cache does: same slots, no copy."""
        tokens = num_pages * self.geometry.swa_page_size
        assert tokens <= len(self.history[source])
        assert not self.history[target]
        self.history[target] = self.history[source][:tokens]
        self.req_to_token[self.rid[target], :tokens] = self.req_to_token[self.rid[source], :tokens]

    # -------------------------------------------------------------------------------------------- the kernels

    def _numbers(self, count: int) -> list[int]:
        self._next += count
        return list(range(self._next - count, self._next))

    def _prefill_plan(self, requests: list[int], seq: list[int], extend: list[int]) -> plans.PrefillPlan:
        rid = torch.tensor([self.rid[r] for r in requests], dtype=torch.int64, device=self.device)
        lengths = (torch.tensor(seq, dtype=torch.int64), torch.tensor(extend, dtype=torch.int64))
        if self.legacy:
            options: dict[str, Any] = {"compress_ratio": self.geometry.compress_ratio}
            plan = self.operators.plan_compress_prefill_legacy
            return plan(rid, *lengths, num_q_tokens=sum(extend), **options)
        plan = self.operators.plan_compress_prefill
        tables = (self.req_to_token, self.full_to_state)
        return plan(rid, *tables, *lengths, num_q_tokens=sum(extend), **self.geometry.prefill_options())

    def _decode_plan(self, rid: list[int], seq: list[int]) -> torch.Tensor:
        pool = torch.tensor(rid, dtype=torch.int64, device=self.device)
        lengths = torch.tensor(seq, dtype=torch.int64)
        if self.legacy:
            ratio = self.geometry.compress_ratio
            return self.operators.plan_compress_decode_legacy(pool, lengths, compress_ratio=ratio)
        plan = self.operators.plan_compress_decode
        return plan(pool, self.req_to_token, self.full_to_state, lengths, **self.geometry.decode_options())

    def _store(self, rows: np.ndarray, numbers: list[int]) -> None:
        if len(rows) and not 0 <= rows.min() <= rows.max() < len(self.ring):
            raise RingError(f"a token is stored to a row outside the ring: {rows.tolist()}")
        self.ring[rows] = numbers

    def _check_closed(self, rows: np.ndarray, requests: list[int], prefix: list[int], starts: list[int]) -> None:
        """Every window that ends among the new tokens is there once, in the order of the input."""
        ratio = self.geometry.compress_ratio
        expected = [
            (position + 1, start + position - before)
            for r, before, start in zip(requests, prefix, starts, strict=False)
            for position in range(before, len(self.history[r]))
            if position % ratio == ratio - 1
        ]
        got = list(zip(rows["seq_len"].tolist(), rows["ragged_id"].tolist(), strict=True))
        if got != expected:
            raise RingError(f"closed windows (seq_len, ragged_id): expected {expected}, got {got}")

    def _check_window(
        self, request: int, row: np.void, from_ring: int, inputs: list[int], ragged_id: int | None
    ) -> None:
        ratio, window = self.geometry.compress_ratio, self.geometry.window
        last = int(row["seq_len"]) - 1
        positions = np.arange(last - window + 1, last + 1)
        in_ring = np.arange(window) < from_ring
        # The older half of a c4 window has a page of its own, a c128 window has one page in all.
        page = np.where(positions <= last - ratio, int(row["read_page_0"]), int(row["read_page_1"]))
        exists = positions >= 0
        ring_rows = (page * ratio + positions % ratio)[exists & in_ring]
        if len(ring_rows) and not 0 <= ring_rows.min() <= ring_rows.max() < len(self.ring):
            raise RingError(f"request {request}: window at {last} reads outside the ring, {row}")
        got = np.full(window, _NOTHING)
        got[exists & in_ring] = self.ring[ring_rows]
        if ragged_id is not None:
            fresh = ragged_id - (last - positions[~in_ring])
            got[~in_ring] = np.array(inputs)[fresh]
        expected = np.array(self.history[request])[positions[exists]]
        if not np.array_equal(got[exists], expected):
            wrong = positions[exists][got[exists] != expected].tolist()
            raise RingError(f"request {request}: window at {last} has other rows than it should at {wrong}")
        self.windows_checked += 1
        self.ring_rows_read += len(ring_rows)


class OnlineModel:
    """The online c128 compressor: one state per request, here the list of numbers that went into it."""

    def __init__(self, operators: ModuleType, *, num_requests: int, seed: int) -> None:
        self.operators = operators
        self.offset = num_requests + 1  # committed states first, then those that a verify batch writes
        self.rid = (1 + np.random.default_rng(seed).permutation(num_requests)).tolist()
        self.slots: list[list[int]] = [[] for _ in range(2 * self.offset)]
        self.history: list[list[int]] = [[] for _ in range(num_requests)]
        self.windows_checked = 0
        self._next = 0

    def extend(self, new: dict[int, int]) -> None:
        """One forward with new tokens, all accepted."""
        requests, extend = list(new), list(new.values())
        prefix, inputs, starts = self._feed(requests, extend)
        seq = torch.tensor([p + e for p, e in zip(prefix, extend, strict=True)], dtype=torch.int64)
        plan = self.operators.plan_online_prefill(
            torch.tensor([self.rid[r] for r in requests], dtype=torch.int64),
            seq,
            torch.tensor(extend, dtype=torch.int64),
            num_q_tokens=len(inputs),
        )
        self._follow(plan, requests, starts, inputs)
        self._check_states(requests, offset=0)

    def verify(self, requests: list[int], drafts: int, padding: int = 0) -> None:
        """One verify batch, accepted in full, with ``padding`` requests at the tail."""
        prefix, inputs, starts = self._feed(requests, [drafts] * len(requests))
        plan = self.operators.plan_online_verify(
            torch.tensor([self.rid[r] for r in requests] + [0] * padding, dtype=torch.int64),
            torch.tensor([*prefix, *[0] * padding], dtype=torch.int32),
            num_draft_tokens=drafts,
            state_slot_offset=self.offset,
            active_batch_size=len(requests),
        )
        self._follow(plan, requests, starts, inputs)
        self._check_states(requests, offset=self.offset)
        for r in requests:  # the accepted state becomes the committed one
            self.slots[self.rid[r]] = self.slots[self.rid[r] + self.offset]

    def decode(self, requests: list[int]) -> None:
        _, inputs, _ = self._feed(requests, [1] * len(requests))
        seq = [len(self.history[r]) for r in requests]
        plan = self.operators.plan_online_decode(
            torch.tensor([self.rid[r] for r in requests], dtype=torch.int64),
            torch.tensor(seq, dtype=torch.int64),
        )
        rows = plans.decode_rows(plan)
        for r, row, number in zip(requests, rows, inputs, strict=True):
            before = self.slots[row["read_page_0"]] if (row["seq_len"] - 1) % 128 else []
            self.slots[row["write_loc"]] = [*before, number]
            if row["seq_len"] % 128 == 0:
                self._check_window(r, self.slots[row["write_loc"]])
        self._check_states(requests, offset=0)

    def _feed(self, requests: list[int], extend: list[int]) -> tuple[list[int], list[int], list[int]]:
        prefix = [len(self.history[r]) for r in requests]
        inputs = list(range(self._next, self._next + sum(extend)))
        self._next += len(inputs)
        starts = np.cumsum([0, *extend]).tolist()
        for r, start, count in zip(requests, starts, extend, strict=False):
            self.history[r] += inputs[start : start + count]
        return prefix, inputs, starts

    def _follow(self, plan: plans.PrefillPlan, requests: list[int], starts: list[int], inputs: list[int]) -> None:
        closed, stored = [], []
        for is_write, packed in enumerate(plan):
            rows = plans.compress_rows(packed)
            for row in rows[plans.valid(rows)]:
                last, count = int(row["ragged_id"]), int(row["buffer_len"])
                segment = inputs[last - count + 1 : last + 1]
                goes_on = (int(row["seq_len"]) - count) % 128 != 0
                state = [*(self.slots[row["read_page_1"]] if goes_on else []), *segment]
                if is_write:
                    stored.append((int(row["read_page_0"]), state))
                else:
                    closed.append((requests[int(np.searchsorted(starts, last, side="right")) - 1], row, state))
        for request, row, state in closed:
            end = int(row["seq_len"])
            self._check_window(request, state, self.history[request][end - 128 : end])
        for slot, state in stored:
            self.slots[slot] = state

    def _check_window(self, request: int, state: list[int], expected: list[int] | None = None) -> None:
        if expected is None:
            expected = self.history[request][-128:]
        if state != expected or len(state) != 128:
            raise RingError(f"request {request}: a closed window holds other tokens than its 128 last")
        self.windows_checked += 1

    def _check_states(self, requests: list[int], offset: int) -> None:
        for r in requests:
            open_tokens = len(self.history[r]) % 128
            if open_tokens and self.slots[self.rid[r] + offset] != self.history[r][-open_tokens:]:
                raise RingError(f"request {r}: the state after the forward is not its {open_tokens} open tokens")
