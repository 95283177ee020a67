"""hotplan in the place of SGLang's functions, on a GPU: plans in front of SGLang's compressor, a decode loop as its HiSparse
coordinator runs it, the plugin's hooks under graph capture; and the operators under vLLM's names.

What needs SGLang's kernels and Python runs with HOTPLAN_SGLANG_SOURCES, the directory of an installed or unpacked SGLang.
Times are printed (`-s`), and with HOTPLAN_RESULTS=DIR written to DIR/h200_sglang.jsonl.
"""

from __future__ import annotations

import ctypes
import json
import os
import pkgutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import device_buffer_cases as db
import hisparse_cases as hs
import numpy as np
import pytest
import sglang_modules
import torch
from graphs import captured
from ring_model import OnlineModel, RingModel
from strategies import Geometry, Lengths, build_case, ragged

import hotplan
import report
import timing
from hot_measure import without
from hotplan import PrefillPlan, hisparse, jit, plans, reference
from hotplan.integrations import sglang as plugin
from hotplan.integrations import vllm
from hotplan.reference import device_buffer as reference_device_buffer
from hotplan.reference import hisparse as reference_hisparse

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
SPARE_ROWS = 5
"""What a captured verify batch has beyond the tokens that come."""


@pytest.fixture(scope="module")
def wheel() -> sglang_modules.Wheel:
    wheel = sglang_modules.Wheel(sglang_modules.sources())
    ask_for_kernels(wheel)
    wheel.kernels.build()
    return wheel


def ask_for_kernels(wheel: sglang_modules.Wheel) -> None:
    """All of them before the first one is used, so that they are compiled side by side."""
    wheel.compress._jit_compress_plan_module()
    wheel.compress._jit_compress_128_online_module(512, torch.float32)
    for ring in RINGS.values():
        wheel.compress._jit_compress_module(
            ring.head_dim, ring.state, torch.float32, torch.float32, ring.geometry.compress_ratio
        )
    for layout in LAYOUTS.values():
        for record in (False, True):
            wheel.hisparse._jit_sparse_module(
                layout.item_bytes, THREADS, TOP_K, HOT_SLOTS, is_mla=True, is_dsv4_layout=layout.paged,
                record_miss_plan=record, skip_io=False,
            )  # fmt: skip
        wheel.hisparse._jit_copy_planned_module(1024, True, layout.paged, False)
    wheel.hisparse._jit_sparse_module(
        BLOCKS_ITEM, THREADS, BLOCKS, HOT_SLOTS, top_k_block_size=BLOCK_TOKENS, top_k_is_blocks=True
    )


RESULTS: list[report.Row] = []
LOOP, HOOKS = "Inside SGLang's loop, GPU time of a call", "Host time of a call through a hook"
CPU_LENGTHS = "Host time of a call with lengths on the CPU, where SGLang wants them"


def record(section: str, target: str, case: str, ours: timing.Stats, peer: timing.Stats, peer_name: str) -> None:
    """One line for a reader, and a row of the results."""
    RESULTS.append(
        report.make_row(
            section, target, case, "graph" if section == LOOP else "wall", ours.as_dict(), peer.as_dict(),
            peer_name=peer_name, checked="reference" if section == HOOKS else "SGLang", columns=["function", "case"],
        )
    )  # fmt: skip
    print(f"\n{target}, {case}: {ours.median:.2f} us, {peer_name} {peer.median:.2f}", end="")


@pytest.fixture(scope="module", autouse=True)
def results() -> Iterator[None]:
    yield
    if os.environ.get("HOTPLAN_RESULTS") and RESULTS:
        path = Path(os.environ["HOTPLAN_RESULTS"]) / "h200_sglang.jsonl"
        report.write_results(path, RESULTS, report.collect_meta("tests/gpu/test_sglang_cuda.py"))


# --------------------------------------------------------------------------------------------- plans in front of kernels

Plans = dict[str, Callable[..., Any]]
"""The six functions of SGLang's plan classes, as "Prefill.generate" and so on."""


def no_original(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError(f"SGLang's own function was called with {args} {kwargs}")


def both_plans(wheel: sglang_modules.Wheel) -> dict[str, Plans]:
    """SGLang's functions, and the plugin's hooks around an original that must not be called."""
    found: dict[str, Plans] = {"SGLang": {}, "hotplan": {}}
    for target in plugin._TARGETS["compress"]:
        *_, kind, function = target.split(".")
        name = f"{kind.removeprefix('Compressor').removesuffix('Plan')}.{function}"
        found["SGLang"][name] = getattr(getattr(wheel.compress, kind), function)
        found["hotplan"][name] = partial(wheel.hooks[target], no_original)
    return found


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """To compare numbers, NaN among them, bit by bit."""
    return tensor.contiguous().view(torch.int32 if tensor.element_size() == 4 else torch.int16)


def unused(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Memory that nothing may be taken from."""
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


def compressed(rows: torch.Tensor, ape: torch.Tensor, head_dim: int) -> torch.Tensor:
    """One window's entry in double precision: a softmax over the window in every component, weighing the values.

    rows: those of the window that exist, oldest first: values, then scores. Ratio 4 (ape has eight rows) has two of
    each: the first for the windows that end after the token's own group of four, the second for that which ends with it.
    """
    values, scores = rows.double().chunk(2, dim=1)
    if len(ape) == 8:
        older = torch.arange(len(rows))[:, None] < len(rows) - 4
        values, scores = (torch.where(older, t[:, :head_dim], t[:, head_dim:]) for t in (values, scores))
    weights = torch.softmax(scores + ape[-len(rows) :].double(), dim=0)
    return (weights * values).sum(dim=0)


class Inputs:
    """Random rows of values and scores, by number."""

    def __init__(self, head_dim: int, parts: int, window: int, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.head_dim, self.width = head_dim, parts * head_dim
        self.ape = self.random(window, head_dim)
        self.rows: list[torch.Tensor] = []

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def add(self, count: int) -> None:
        new = self.random(count, self.width)
        new[:, self.width // 2 :] *= 3  # scores that make some tokens matter more than others
        self.rows += list(new)

    def newest(self, count: int, rows: int) -> torch.Tensor:
        """The last so many on the device, in a tensor with more rows."""
        tensor = unused((rows, self.width))
        if count:
            tensor[:count] = torch.stack(self.rows[-count:]).to(DEVICE)
        return tensor

    def assert_entry(self, got: torch.Tensor, numbers: list[int], rounded: int = 0, state: Any = torch.float32) -> None:
        """An output against the window of these rows, of which the first `rounded` went through the state's dtype."""
        rows = torch.stack([self.rows[number] for number in numbers])
        rows[:rounded] = rows[:rounded].to(state).float()
        # Single precision with a fast exponential: a few units in the sixth place.
        torch.testing.assert_close(got.double(), compressed(rows, self.ape, self.head_dim), rtol=2e-5, atol=2e-5)


class Compressor(RingModel):
    """The ring model with SGLang's compressor behind it: one ring fed by SGLang's plans, one by hotplan's.

    After every forward both rings and all outputs are equal bit by bit, and every closed window is what its tokens give.
    Decode steps are replays of captured graphs. Prefill has its lengths on the CPU, verify batches on the GPU.
    """

    def __init__(self, wheel: sglang_modules.Wheel, ring: Ring, *, max_tokens: int, seed: int) -> None:
        super().__init__(
            reference,
            ring.geometry,
            num_requests=4,
            max_tokens=max_tokens,
            seed=seed,
            legacy=ring.legacy,
            device=DEVICE,
        )
        self.plans, self.forward = both_plans(wheel), wheel.compress.compress_forward
        ratio = self.geometry.compress_ratio
        self.inputs = Inputs(ring.head_dim, 4 if ratio == 4 else 2, self.geometry.window, seed)
        self.ape = self.inputs.ape.to(DEVICE)
        self.state = ring.state
        shape = (len(self.ring) // ratio, ratio, self.inputs.width)
        self.rings = {who: unused(shape, ring.state) for who in self.plans}
        self.decoders: dict[int, Decoder] = {}
        self.verifies = False
        self.order: list[int] = []
        self.outputs = torch.empty(0)
        self.values_checked = 0

    def extend(self, new: dict[int, int], accepted: dict[int, int] | None = None) -> None:
        self.verifies = accepted is not None
        super().extend(new, accepted)

    def compress(self, who: str, inputs: torch.Tensor, plan: Any, out: torch.Tensor) -> None:
        self.forward(
            kv_score_buffer=self.rings[who], kv_score_input=inputs, ape=self.ape, plan=plan,
            head_dim=self.inputs.head_dim, compress_ratio=self.geometry.compress_ratio, out=out,
        )  # fmt: skip

    def tables(self) -> dict[str, Any]:
        options = {"req_to_token": self.req_to_token, "full_to_state": self.full_to_state}
        return options | self.geometry.decode_options()

    def assert_rings_equal(self) -> None:
        assert torch.equal(bits(self.rings["SGLang"]), bits(self.rings["hotplan"])), "rings differ"

    def _numbers(self, count: int) -> list[int]:
        self.inputs.add(count)
        return super()._numbers(count)

    def _prefill_plan(self, requests: list[int], seq: list[int], extend: list[int]) -> PrefillPlan:
        count = sum(extend)
        num_q_tokens = count + SPARE_ROWS if self.verifies else count
        inputs = self.inputs.newest(count, num_q_tokens)
        on = DEVICE if self.verifies else "cpu"
        common = {
            "compress_ratio": self.geometry.compress_ratio,
            "req_pool_indices": torch.tensor([self.rid[r] for r in requests], device=DEVICE),
            "seq_lens": torch.tensor(seq, device=on),
            "extend_lens": torch.tensor(extend, device=on),
            "num_q_tokens": num_q_tokens,
        }
        if self.legacy:
            name, options = "Prefill.generate_legacy", {"device": torch.device(DEVICE)}
        else:
            name, options = "Prefill.generate", self.tables() | {"use_cuda_graph": self.verifies}
        made, by_token = {}, {}
        for who, functions in self.plans.items():
            plan = made[who] = functions[name](**(options | common))
            out = unused((len(plan.plan_c), self.inputs.head_dim))
            self.compress(who, inputs, plan, out)
            by_token[who] = self.by_token(plan.plan_c, out, num_q_tokens)
        self.assert_same_plans(*made.values())
        assert torch.equal(bits(by_token["SGLang"]), bits(by_token["hotplan"])), "outputs differ"
        self.assert_rings_equal()
        self.outputs = by_token["hotplan"].cpu()
        compress, write = made["hotplan"].plan_c.cpu(), made["hotplan"].plan_w.cpu()
        return PrefillPlan(compress[plans.valid_compress(compress)], write[plans.valid_write(write)])

    def by_token(self, compress: torch.Tensor, out: torch.Tensor, num_q_tokens: int) -> torch.Tensor:
        """Outputs, which are in the order of the plan's rows, at the last tokens of their windows."""
        rows = plans.compress_rows(compress)
        kept = plans.valid(rows)
        assert out[torch.from_numpy(~kept).to(DEVICE)].isnan().all(), "an invalid row was written"
        table = unused((num_q_tokens, self.inputs.head_dim))
        tokens = torch.from_numpy(rows["ragged_id"][kept].astype(np.int64))
        table[tokens.to(DEVICE)] = out[torch.from_numpy(kept).to(DEVICE)]
        return table

    def assert_same_plans(self, theirs: Any, ours: Any) -> None:
        assert type(ours) is type(theirs)
        for their, our in zip(theirs[1:3], ours[1:3], strict=True):
            if self.verifies:  # SGLang's order is that in which its threads came
                assert sorted(map(bytes, our.cpu().numpy())) == sorted(map(bytes, their.cpu().numpy()))
            else:
                assert torch.equal(our, their)

    def _decode_plan(self, rid: list[int], seq: list[int]) -> torch.Tensor:
        batch = len(rid)
        if batch not in self.decoders:
            self.decoders[batch] = Decoder(self, batch)
        decoder = self.decoders[batch]
        plan = decoder.run(rid, seq, self.inputs.newest(batch, batch))
        self.assert_rings_equal()
        self.order = rid
        self.outputs = decoder.outputs["hotplan"].cpu()
        return plan

    def _check_window(
        self, request: int, row: np.void, from_ring: int, inputs: list[int], ragged_id: int | None
    ) -> None:
        super()._check_window(request, row, from_ring, inputs, ragged_id)
        last = int(row["seq_len"]) - 1
        positions = np.arange(last - self.geometry.window + 1, last + 1)
        numbers = [self.history[request][p] for p in positions[positions >= 0]]
        rounded = int((positions[:from_ring] >= 0).sum())
        at = self.order.index(self.rid[request]) if ragged_id is None else ragged_id
        self.inputs.assert_entry(self.outputs[at], numbers, rounded, self.state)
        self.values_checked += self.inputs.head_dim


class Decoder:
    """A decode step of one batch size: for SGLang's plans and for ours, a graph of the plan and of the compressor."""

    def __init__(self, model: Compressor, batch: int) -> None:
        self.rid = torch.zeros(batch, dtype=torch.int64, device=DEVICE)
        self.seq = torch.ones(batch, dtype=torch.int64, device=DEVICE)
        self.inputs = torch.full((batch, model.inputs.width), 0.5, device=DEVICE)
        self.outputs = {who: unused((batch, model.inputs.head_dim)) for who in model.plans}
        self.made: dict[str, Any] = {}
        common = {
            "compress_ratio": model.geometry.compress_ratio, "req_pool_indices": self.rid, "seq_lens": self.seq,
        }  # fmt: skip
        name, options = ("Decode.generate_legacy", {}) if model.legacy else ("Decode.generate", model.tables())

        def step(who: str) -> None:
            self.made[who] = model.plans[who][name](**(options | common))
            # SGLang's compressor reads its plan before it waits for the kernel in front of it, with which it may overlap.
            # In a server other kernels lie between the two, as this one does here.
            self.outputs[who].fill_(float("nan"))
            model.compress(who, self.inputs, self.made[who], self.outputs[who])

        self.replays = []
        for who in model.plans:
            step(who)  # a step of padding alone
            self.replays.append(captured(partial(step, who)))

    def run(self, rid: list[int], seq: list[int], inputs: torch.Tensor) -> torch.Tensor:
        self.rid.copy_(torch.tensor(rid))
        self.seq.copy_(torch.tensor(seq))
        # All padding goes to one place, so it must be the same for the place to be.
        self.inputs.copy_(torch.where((self.rid == 0)[:, None], 0.5, inputs))
        for replay in self.replays:
            replay()
        theirs, ours = self.made["SGLang"], self.made["hotplan"]
        assert type(ours) is type(theirs)
        assert torch.equal(ours.plan_d, theirs.plan_d)
        assert torch.equal(bits(self.outputs["SGLang"]), bits(self.outputs["hotplan"])), "outputs differ"
        return ours.plan_d.cpu()


class Ring(NamedTuple):
    geometry: Geometry
    drafts: int = 0
    head_dim: int = 512
    state: torch.dtype = torch.float32
    legacy: bool = False

    @property
    def shares_pages(self) -> bool:
        """Whether a request can go on behind another one's pages: not where its own ring must hold what is before."""
        return not self.geometry.use_req_ring and not self.legacy


RINGS = {
    "c4": Ring(Geometry(4, 256, 8)),
    "c4, drafts": Ring(Geometry(4, 256, 16), drafts=10),
    "c4, drafts, small pages": Ring(Geometry(4, 32, 16), drafts=6),
    "c4, ring of the request": Ring(Geometry(4, 256, 16, use_req_ring=True), drafts=4),
    "c4 of the indexer": Ring(Geometry(4, 256, 16), drafts=4, head_dim=128),
    "c4, state in bfloat16": Ring(Geometry(4, 256, 16), drafts=4, state=torch.bfloat16),
    "c4, legacy": Ring(Geometry(4, 256, 8), legacy=True),
    "c128": Ring(Geometry(128, 256, 128)),
    "c128, drafts": Ring(Geometry(128, 256, 256), drafts=9),
    "c128, state in bfloat16": Ring(Geometry(128, 256, 256), drafts=4, state=torch.bfloat16),
    "c128, legacy": Ring(Geometry(128, 256, 128), legacy=True),
}


def serve(model: Compressor, ring: Ring) -> None:
    """Prompts in one piece and in chunks, decode steps with padding, verify batches, a prefix that is reused."""
    model.extend({0: 131, 1: 6})
    model.extend({2: 300, 0: 119})
    for _ in range(6):
        model.decode([0, 2, 1], padding=2)
    model.extend({2: 81, 1: 250})
    for kept in range(1, 8 if ring.drafts else 1):
        who = [0, 1, 2]
        model.extend(dict.fromkeys(who, ring.drafts), {r: 1 + (kept + 3 * r) % ring.drafts for r in who})
    if ring.shares_pages:
        model.share_prefix(2, 3, num_pages=256 // ring.geometry.swa_page_size)
        model.extend({3: 3})
        model.extend({3: 140, 0: 1})
    for _ in range(9):
        model.decode([r for r in (3, 1, 2) if model.history[r]], padding=1)
    # To where the next window of 128 closes, by decode steps.
    model.extend({2: 126 - len(model.history[2]) % 128 + 128})
    for _ in range(3):
        model.decode([2, 0])


@pytest.mark.parametrize("name", RINGS)
def test_sglangs_compressor_behind_our_plans(name: str, wheel: sglang_modules.Wheel) -> None:
    ring = RINGS[name]
    model = Compressor(wheel, ring, max_tokens=1024, seed=len(name))
    serve(model, ring)
    windows = {4: 250, 128: 8}[ring.geometry.compress_ratio]
    assert model.windows_checked >= windows
    assert model.values_checked == model.windows_checked * ring.head_dim
    assert model.ring_rows_read > 100


class OnlineCompressor(OnlineModel):
    """As `Compressor`, for the online c128 compressor, whose state is one row per request: maximum, sum and value."""

    def __init__(self, wheel: sglang_modules.Wheel, *, lengths_on: str, seed: int) -> None:
        super().__init__(self, num_requests=3, seed=seed)
        self.plans, self.forward, self.lengths_on = both_plans(wheel), wheel.compress.compress_forward, lengths_on
        self.inputs = Inputs(512, 2, 128, seed)
        self.ape = self.inputs.ape.to(DEVICE)
        self.states = {who: unused((len(self.slots), 1, 3 * 512)) for who in self.plans}
        self.closed: list[torch.Tensor] = []

    def _feed(self, requests: list[int], extend: list[int]) -> tuple[list[int], list[int], list[int]]:
        self.inputs.add(sum(extend))
        return super()._feed(requests, extend)

    def plan_online_prefill(
        self, rid: torch.Tensor, seq: torch.Tensor, extend: torch.Tensor, *, num_q_tokens: int
    ) -> PrefillPlan:
        lengths = {"seq_lens": seq.to(self.lengths_on), "extend_lens": extend.to(self.lengths_on)}
        return self._run("Prefill.generate_online", rid, num_q_tokens, **lengths, num_q_tokens=num_q_tokens)

    def plan_online_decode(self, rid: torch.Tensor, seq: torch.Tensor) -> torch.Tensor:
        return self._run("Decode.generate_online", rid, len(rid), seq_lens=seq.to(DEVICE))

    def _run(self, name: str, rid: torch.Tensor, count: int, **lengths: Any) -> Any:
        inputs = self.inputs.newest(count, count)
        made, outs = {}, {}
        for who, functions in self.plans.items():
            unread = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)
            plan = made[who] = functions[name](req_pool_indices=rid.to(DEVICE), req_to_token=unread, **lengths)
            outs[who] = unused((len(plan[1]), 512))
            self.forward(
                kv_score_buffer=self.states[who], kv_score_input=inputs, ape=self.ape, plan=plan, head_dim=512,
                compress_ratio=128, out=outs[who], is_online=True,
            )  # fmt: skip
        theirs, ours = made["SGLang"], made["hotplan"]
        assert type(ours) is type(theirs)
        # Where lengths are on the GPU ours has invalid rows behind those that SGLang counted on the CPU.
        shorter = len(theirs[1])
        assert torch.equal(ours[1][:shorter], theirs[1])
        assert torch.equal(bits(outs["hotplan"][:shorter]), bits(outs["SGLang"])), "outputs differ"
        assert outs["hotplan"][shorter:].isnan().all(), "an invalid row was written"
        assert torch.equal(bits(self.states["hotplan"]), bits(self.states["SGLang"])), "states differ"
        out = outs["hotplan"].cpu()
        self.closed = list(out[~out.isnan().any(dim=1)])
        return ours.plan_d.cpu() if name.startswith("Decode") else PrefillPlan(ours.plan_c.cpu(), ours.plan_w.cpu())

    def _check_window(self, request: int, state: list[int], expected: list[int] | None = None) -> None:
        super()._check_window(request, state, expected)
        self.inputs.assert_entry(self.closed.pop(0), state)


@pytest.mark.parametrize("lengths_on", ["the CPU", "the GPU"])
def test_sglangs_online_compressor_behind_our_plans(lengths_on: str, wheel: sglang_modules.Wheel) -> None:
    model = OnlineCompressor(wheel, lengths_on=DEVICE if lengths_on == "the GPU" else "cpu", seed=1)
    for new in ({0: 3, 1: 128, 2: 300}, {2: 81, 0: 124}, {1: 127, 0: 260}):
        model.extend(new)
        assert not model.closed  # every output was one of the model's windows
        for _ in range(3):
            model.decode([1, 0, 2])
            assert not model.closed
    assert model.windows_checked >= 8


# ------------------------------------------------------------------------------------------------------ the decode loop

TOP_K, HOT_SLOTS, THREADS, EXTRA = 512, 1024, 960, 64
BATCH, POOL_ROWS, CONTEXT = 8, 12, 2600
BLOCKS, BLOCK_TOKENS, BLOCKS_ITEM = 32, 16, 512


class Layout(NamedTuple):
    item_bytes: int
    paged: bool = False

    @property
    def words(self) -> int:
        return self.item_bytes // 8

    def at(self, rows: torch.Tensor) -> torch.Tensor:
        """Where the 8-byte words of items lie in a pool: [..., words]."""
        count = torch.arange(self.words, device=rows.device)
        rows = rows.long()[..., None]
        if not self.paged:
            return rows * self.words + count
        page, slot = rows // db.PAGE_SLOTS * (db.PAGE_BYTES // 8), rows % db.PAGE_SLOTS
        values = db.VALUE_BYTES // 8
        return page + torch.where(count < values, slot * values + count, db.PAGE_SLOTS * values + slot)


LAYOUTS = {"576 bytes": Layout(576), "656 bytes": Layout(656), "pages": Layout(584, paged=True)}

SHARED = [False, True, True, True, False, False, True, True]
"""Which layers use the top-k of the one before: groups of four, one and three."""
GROUPS = {
    layer: [skip for skip in range(layer + 1, len(SHARED)) if all(SHARED[layer + 1 : skip + 1])]
    for layer, shared in enumerate(SHARED)
    if not shared
}


class Batch:
    """What both sides read: host pools, rows of the requests, and the inputs of a step at fixed addresses."""

    def __init__(self, layout: Layout, rng: np.random.Generator, wide: tuple[bool, bool]) -> None:
        self.layout, self.rng = layout, rng
        self.host_rows = -(-POOL_ROWS * CONTEXT // db.PAGE_SLOTS) * db.PAGE_SLOTS
        self.device_rows = -(-POOL_ROWS * (HOT_SLOTS + EXTRA) // db.PAGE_SLOTS) * db.PAGE_SLOTS
        words = db.pool_size(self.host_rows, layout.item_bytes, layout.paged) // 8
        # Every word of every layer says where it comes from.
        self.host_pools = [torch.arange(layer * words, (layer + 1) * words) for layer in range(len(SHARED))]
        self.first_words = [layer * words for layer in range(len(SHARED))]
        if DEVICE == "cuda":
            self.host_pools = [pool.pin_memory() for pool in self.host_pools]
        self.host_locs = torch.full((POOL_ROWS, CONTEXT), -1, dtype=torch.int64, device=DEVICE)
        self.device_locs = torch.full((POOL_ROWS, HOT_SLOTS + EXTRA), -1, dtype=torch.int32, device=DEVICE)
        self.free_host = rng.permutation(self.host_rows).reshape(-1)[: POOL_ROWS * CONTEXT].reshape(POOL_ROWS, -1)
        self.lengths: dict[int, int] = {}
        self.recent: dict[tuple[int, int], np.ndarray] = {}
        integers = [torch.int64 if w else torch.int32 for w in wide]
        self.req_pool_indices = torch.zeros(BATCH, dtype=integers[0], device=DEVICE)
        self.seq_lens = torch.ones(BATCH, dtype=integers[1], device=DEVICE)
        self.top_k = {layer: torch.full((BATCH, TOP_K), -1, dtype=torch.int32, device=DEVICE) for layer in GROUPS}
        self.num_real_reqs = torch.zeros(1, dtype=torch.int32, device=DEVICE)

    def admit(self, request: int, length: int) -> None:
        """A request after its prefill, in rows that another one may have had."""
        self.lengths[request] = length
        self.host_locs[request] = torch.from_numpy(self.rng.permutation(self.free_host[request])).to(DEVICE)
        size = HOT_SLOTS + EXTRA
        rows = self.rng.permutation(np.arange(request * size, (request + 1) * size)).astype(np.int32)
        self.device_locs[request] = torch.from_numpy(rows).to(DEVICE)
        for layer in GROUPS:
            self.recent[layer, request] = self.rng.permutation(length)[:TOP_K]

    def next_step(self, requests: list[int]) -> None:
        """One more token for each of these requests; the other rows are padding."""
        real = len(requests)
        indices, lengths = np.zeros(BATCH, dtype=np.int64), np.ones(BATCH, dtype=np.int64)
        entries = {layer: np.full((BATCH, TOP_K), -1, dtype=np.int32) for layer in GROUPS}
        for row, request in enumerate(requests):
            self.lengths[request] += 1
            indices[row], lengths[row] = request, self.lengths[request]
            for layer in GROUPS:
                chosen = self.choose(layer, request)
                entries[layer][row, : len(chosen)] = chosen
        self.num_real_reqs.fill_(real)
        self.req_pool_indices.copy_(torch.from_numpy(indices))
        self.seq_lens.copy_(torch.from_numpy(lengths))
        for layer, top_k in self.top_k.items():
            top_k.copy_(torch.from_numpy(entries[layer]))

    def choose(self, layer: int, request: int) -> np.ndarray:
        """Most of what the layer chose before, most often the newest token, and some that it did not."""
        length, before = self.lengths[request], self.recent[layer, request]
        kept = self.rng.permutation(before)[: int(len(before) * self.rng.choice([0.5, 0.9, 1.0]))]
        if self.rng.random() < 0.8:
            kept = np.append(kept[: TOP_K - 1], length - 1)
        others = np.setdiff1d(np.arange(length), kept)
        chosen = self.rng.permutation(np.concatenate([kept, self.rng.permutation(others)[: TOP_K - len(kept)]]))
        self.recent[layer, request] = chosen
        return chosen

    def expected(self, layer: int) -> torch.Tensor:
        """The words that attention must see in a layer: [BATCH, TOP_K, words], zeros where there is no token."""
        anchor = max(first for first in GROUPS if first <= layer)
        tokens = self.top_k[anchor].long()
        real = torch.arange(BATCH, device=DEVICE)[:, None] < self.num_real_reqs
        rows = self.host_locs[self.req_pool_indices.long()[:, None], tokens.clamp(min=0)]
        words = self.first_words[layer] + self.layout.at(rows)
        return torch.where(((tokens >= 0) & real)[..., None], words, 0)


class Coordinator:
    """The part of SGLang's coordinator that runs in a decode step, on the functions of either side."""

    def __init__(self, operators: Any, batch: Batch) -> None:
        self.operators, self.batch = operators, batch
        layout, layers = batch.layout, len(SHARED)
        words = db.pool_size(batch.device_rows, layout.item_bytes, layout.paged) // 8
        self.device_pools = [torch.full((words,), -1, dtype=torch.int64, device=DEVICE) for _ in range(layers)]
        shape = (layers, POOL_ROWS, HOT_SLOTS + EXTRA)
        self.tokens = torch.full(shape, -1, dtype=torch.int32, device=DEVICE)
        self.slots = torch.arange(HOT_SLOTS, dtype=torch.int16, device=DEVICE)
        self.lru = self.slots.repeat(layers, POOL_ROWS, 1)
        self.out = torch.full((POOL_ROWS, TOP_K), -1, dtype=torch.int32, device=DEVICE)
        self.miss_src = torch.zeros(POOL_ROWS, TOP_K, dtype=torch.int64, device=DEVICE)
        self.miss_dst = torch.zeros(POOL_ROWS, TOP_K, dtype=torch.int32, device=DEVICE)
        self.miss_count = torch.zeros(POOL_ROWS, dtype=torch.int32, device=DEVICE)
        self.stream = torch.cuda.Stream()
        self.events = [torch.cuda.Event() for _ in range(max(map(len, GROUPS.values())))]
        self.locs = torch.zeros(layers, BATCH, TOP_K, dtype=torch.int32, device=DEVICE)
        self.plans = torch.zeros(layers, BATCH, dtype=torch.int32, device=DEVICE)
        self.seen = torch.zeros(layers, BATCH, TOP_K, layout.words, dtype=torch.int64, device=DEVICE)
        self.names = ("tokens", "lru", "out", "miss_src", "miss_dst", "miss_count", "locs", "plans", "seen")

    # What a server does outside the graph.

    def admit(self, request: int) -> None:
        """The device buffer of a new request: its first tokens, in order."""
        self.tokens[:, request] = -1
        self.tokens[:, request, :HOT_SLOTS] = torch.arange(HOT_SLOTS, device=DEVICE)
        self.lru[:, request] = self.slots
        tokens = torch.arange(min(self.batch.lengths[request], HOT_SLOTS), device=DEVICE)
        self.write(request, tokens, tokens)

    def store_newest(self, request: int) -> None:
        """The token whose turn it is, where this step's attention wants it."""
        newest = torch.tensor([self.batch.lengths[request] - 1], device=DEVICE)
        self.write(request, newest, newest.clamp(max=HOT_SLOTS))

    def write(self, request: int, tokens: torch.Tensor, slots: torch.Tensor) -> None:
        batch = self.batch
        source = batch.layout.at(batch.host_locs[request, tokens])
        target = batch.layout.at(batch.device_locs[request, slots])
        for pool, first in zip(self.device_pools, batch.first_words, strict=True):
            pool[target] = first + source

    # What is captured.

    def decode_step(self, attend: bool = True) -> None:
        for layer in range(len(SHARED)):
            locs = self.swap_in(layer)
            if attend:
                self.locs[layer] = locs
                self.plans[layer] = self.miss_count[:BATCH]
                rows = self.batch.layout.at(locs.clamp(min=0))
                self.seen[layer] = torch.where((locs >= 0)[..., None], self.device_pools[layer][rows], 0)

    def swap_in(self, layer: int) -> torch.Tensor:
        if SHARED[layer]:
            anchor = max(first for first in GROUPS if first <= layer)
            self.events[GROUPS[anchor].index(layer)].wait(torch.cuda.current_stream())
            return self.out[:BATCH]
        self.load(layer)
        if GROUPS[layer]:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                for event, skip in zip(self.events, GROUPS[layer], strict=False):
                    self.copy_planned(skip)
                    event.record(self.stream)
        return self.out[:BATCH]

    def load(self, layer: int) -> None:
        batch, operators = self.batch, self.operators
        paged = batch.layout.paged
        load = operators.load_cache_to_device_buffer_dsv4_mla if paged else operators.load_cache_to_device_buffer_mla
        plan = {name: getattr(self, name)[:BATCH] for name in ("miss_src", "miss_dst", "miss_count")}
        load(
            top_k_tokens=batch.top_k[layer],
            device_buffer_tokens=self.tokens[layer],
            host_cache_locs=batch.host_locs,
            device_buffer_locs=batch.device_locs,
            host_cache=batch.host_pools[layer],
            device_buffer=self.device_pools[layer],
            top_k_device_locs=self.out[:BATCH],
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            lru_slots=self.lru[layer],
            item_size_bytes=batch.layout.item_bytes,
            num_top_k=TOP_K,
            hot_buffer_size=HOT_SLOTS,
            page_size=1,
            block_size=THREADS,
            num_real_reqs=batch.num_real_reqs,
            skip_io=False,
            **(plan if GROUPS[layer] else {}),
        )

    def copy_planned(self, layer: int) -> None:
        self.operators.copy_cache_planned_mla(
            miss_src=self.miss_src[:BATCH],
            miss_dst=self.miss_dst[:BATCH],
            miss_count=self.miss_count[:BATCH],
            num_real_reqs=self.batch.num_real_reqs,
            host_cache=self.batch.host_pools[layer],
            device_buffer=self.device_pools[layer],
            item_size_bytes=self.batch.layout.item_bytes,
            num_blocks=4,
            is_dsv4_layout=self.batch.layout.paged,
            skip_io=False,
        )

    def assert_equal(self, other: Coordinator, where: str) -> None:
        for name in self.names:
            assert torch.equal(getattr(self, name), getattr(other, name)), f"{where}: {name}"
        for layer, (mine, its) in enumerate(zip(self.device_pools, other.device_pools, strict=True)):
            assert torch.equal(mine, its), f"{where}: device pool of layer {layer}"


# Lengths of the first requests. Five fit their slots, of which two outgrow them in the test.
LENGTHS = (300, HOT_SLOTS - 3, HOT_SLOTS - 1, HOT_SLOTS, 700, HOT_SLOTS + 1, 1500, 2000, 2400, 1100)
REAL = (8, 8, 3, 8, 0, 5, 8, 1, 7, 8)
"""Rows that are real, by step. What an earlier, fuller batch left in the plan is behind those of a later one."""


class Loop:
    """Both sides of a decode loop on the same requests. `run` makes a step on both and compares everything."""

    def __init__(self, theirs: Any, ours: Any, layout: Layout, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.batch = Batch(layout, self.rng, wide=(seed % 2 == 0, seed % 3 == 0))
        self.sides = {"SGLang": Coordinator(theirs, self.batch), "hotplan": Coordinator(ours, self.batch)}
        for request, length in enumerate(LENGTHS, start=1):
            self.admit(request, length)
        self.replays: list[Callable[[], None]] = []
        self.copied = 0

    def admit(self, request: int, length: int) -> None:
        self.batch.admit(request, length)
        for side in self.sides.values():
            side.admit(request)

    def capture(self) -> None:
        for side in self.sides.values():
            side.decode_step()  # no row is real yet: outputs alone
        self.replays = [captured(side.decode_step) for side in self.sides.values()]

    def prepare(self, real: int) -> None:
        requests = self.rng.permutation(np.arange(1, len(LENGTHS) + 1))[:real].tolist()
        self.batch.next_step(requests)
        for side in self.sides.values():
            for request in requests:
                side.store_newest(request)

    def run(self, number: int, real: int) -> None:
        self.prepare(real)
        for replay in self.replays:
            replay()
        ours = self.sides["hotplan"]
        ours.assert_equal(self.sides["SGLang"], f"step {number}")
        for layer in range(len(SHARED)):
            assert torch.equal(ours.seen[layer], self.batch.expected(layer)), f"step {number}: bytes in layer {layer}"
        self.copied += int(ours.plans[list(GROUPS), :real].clamp(min=0).sum())


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_decode_loop_as_the_coordinator_runs_it(name: str, wheel: sglang_modules.Wheel) -> None:
    """Captured once and replayed for other requests, lengths, top-k and numbers of real rows: outputs, state, plans and
    every byte of every layer are SGLang's, and what attention sees are the tokens' bytes."""
    loop = Loop(wheel.hisparse, hisparse, LAYOUTS[name], seed=list(LAYOUTS).index(name))
    loop.capture()
    for number, real in enumerate(REAL):
        if number == 6:  # two requests are done, others take their places
            loop.admit(3, 1900)
            loop.admit(9, 800)
        loop.run(number, real)
    assert loop.copied > 2000


# ----------------------------------------------------------------------------------------------------------------- times


def record_gpu_times(
    target: str,
    case: str,
    calls: dict[str, Callable[[], object]],
    resets: dict[str, Callable[[], object]] | None = None,
) -> None:
    """Times on the GPU for both sides, in a graph of many calls. resets: what puts the state back before every call,
    whose own time is subtracted."""
    found: dict[str, timing.Stats] = {}
    for who, call in calls.items():
        if resets is None:
            found[who] = timing.graph_time(call)
        else:
            together = timing.graph_time(partial(in_turn, resets[who], call))
            found[who] = without(together, timing.graph_time(resets[who]).median)
    record(LOOP, target, case, found["hotplan"], found["SGLang"], "SGLang")


def in_turn(*calls: Callable[[], object]) -> None:
    for call in calls:
        call()


@pytest.mark.parametrize("name", LAYOUTS)
def test_times_inside_the_loop(name: str, wheel: sglang_modules.Wheel) -> None:
    """The swap-in and the planned copy of one layer, and all calls of a step, on the state of a loop that has run."""
    loop = Loop(wheel.hisparse, hisparse, LAYOUTS[name], seed=7)
    loop.capture()
    for number in range(4):
        loop.run(number, BATCH)
    loop.prepare(BATCH)
    sides = loop.sides
    before = {who: (side.tokens.clone(), side.lru.clone()) for who, side in sides.items()}

    def reset(who: str, layers: slice) -> None:
        sides[who].tokens[layers] = before[who][0][layers]
        sides[who].lru[layers] = before[who][1][layers]

    def times(target: str, case: str, layers: slice, call: Callable[[Coordinator], None]) -> None:
        record_gpu_times(
            target,
            f"{name}, batch {BATCH}{case}",
            {who: partial(call, side) for who, side in sides.items()},
            {who: partial(reset, who, layers) for who in sides},
        )
        for who, side in sides.items():
            reset(who, layers)
            call(side)
        sides["hotplan"].assert_equal(sides["SGLang"], "after the timed calls")

    load = f"load_cache_to_device_buffer_{'dsv4_mla' if loop.batch.layout.paged else 'mla'}"
    for side in sides.values():
        side.load(0)
    misses = int(sides["hotplan"].miss_count[:BATCH].sum())
    assert misses > 100
    times(load, f", {misses} misses, with a plan", slice(0, 1), lambda side: side.load(0))
    calls = {who: partial(side.copy_planned, 1) for who, side in sides.items()}
    record_gpu_times("copy_cache_planned_mla", f"{name}, batch {BATCH}, {misses} misses", calls)
    sides["hotplan"].assert_equal(sides["SGLang"], "after the timed copies")
    for who in sides:
        reset(who, slice(None))
    times(f"a step of {len(SHARED)} layers", "", slice(None), lambda side: side.decode_step(attend=False))


def test_what_sglangs_translation_gives(wheel: sglang_modules.Wheel) -> None:
    if wheel.slot_mapping is None:
        pytest.skip("no Triton")
    rng = np.random.default_rng(1)
    sides = {
        who: module.translate_padded_hisparse_locations
        for who, module in (("SGLang", wheel.slot_mapping), ("hotplan", hisparse))
    }
    for mapping_dtype in (torch.int32, torch.int64):
        for dtype in (torch.int32, torch.int64):
            mapping = torch.from_numpy(rng.permutation(5000)).to(DEVICE, mapping_dtype)
            dense = torch.from_numpy(rng.integers(-9, 5000, 3 * 300)).to(DEVICE, dtype)
            for locations in (dense, dense[:1], dense[:0], dense[::3], dense[1:258]):
                theirs, ours = (translate(mapping, locations) for translate in sides.values())
                assert ours.dtype == theirs.dtype
                assert torch.equal(ours, theirs)
    calls = {who: partial(translate, mapping, dense[:BATCH]) for who, translate in sides.items()}
    record_gpu_times("translate_padded_hisparse_locations", f"{BATCH} locations", calls)


def test_times_of_blocks(wheel: sglang_modules.Wheel) -> None:
    """The swap-in of multi-head attention's blocks, of which a quarter are missed."""
    rng = np.random.default_rng(11)
    case = db.make_case(
        "blocks", seed=11, top_k=BLOCKS, block_tokens=BLOCK_TOKENS, hot_slots=HOT_SLOTS, rows=BATCH, spare_requests=0,
        max_tokens=3 * HOT_SLOTS, item_bytes=BLOCKS_ITEM,
    )  # fmt: skip
    first = db.random_step(case, rng, lengths=np.full(BATCH, case.max_tokens))
    top_k = first.top_k.copy()
    for chosen in top_k:
        others = np.setdiff1d(np.arange(case.max_tokens // BLOCK_TOKENS), chosen)
        chosen[::4] = rng.permutation(others)[: len(chosen[::4])]
    second = replace(first, top_k=top_k)
    benches, calls, resets, saved = {}, {}, {}, {}
    for who, operators in (("SGLang", wheel.hisparse), ("hotplan", hisparse)):
        benches[who] = bench = db.Bench(case, DEVICE)
        bench.run(operators, first, block_size=THREADS)
        saved = {name: getattr(bench, name).clone() for name in ("device_buffer_tokens", "lru_slots")}
        arguments = bench.arguments(second) | {"num_real_reqs": bench.num_real_reqs, "block_size": THREADS}
        calls[who], resets[who] = partial(bench.operator(operators), **arguments), partial(put_back, bench, saved)
    misses = sum(len(chosen[::4]) for chosen in top_k) * BLOCK_TOKENS
    case_name = f"2 x {BLOCKS_ITEM} bytes, batch {BATCH}, {misses} misses"
    record_gpu_times("load_blocks_to_device_buffer_mha", case_name, calls, resets)
    for who, call in calls.items():
        resets[who]()
        call()
    benches["hotplan"].assert_equal(benches["SGLang"], "after the timed calls")
    assert int((benches["hotplan"].device_buffer_tokens != saved["device_buffer_tokens"]).sum()) == misses


def put_back(bench: db.Bench, saved: dict[str, torch.Tensor]) -> None:
    for name, tensor in saved.items():
        getattr(bench, name).copy_(tensor)


PLAN_BATCHES = {"verify": (8, 4), "chunks": (8, 1024), "decode of 8": (8, 1), "decode of 128": (128, 1)}


@pytest.mark.parametrize("name", PLAN_BATCHES)
@pytest.mark.parametrize("function", ["generate", "generate_legacy", "generate_online"])
@pytest.mark.parametrize("ring", ["c4, drafts", "c128, drafts"])
def test_times_of_plans(ring: str, function: str, name: str, wheel: sglang_modules.Wheel) -> None:
    if function == "generate_online" and ring.startswith("c4"):
        pytest.skip("the online compressor has one ratio, 128")
    batch, extend = PLAN_BATCHES[name]
    lengths = Lengths.of(np.random.default_rng(3).integers(0, 4000, batch).tolist(), [extend] * batch)
    case = build_case(lengths, RINGS[ring].geometry, seed=3, device=DEVICE)
    call: dict[str, Any] = {"req_pool_indices": case.req_pool_indices, "seq_lens": case.seq_lens}
    if function != "generate_legacy":
        call["req_to_token"] = case.req_to_token.contiguous()  # SGLang's launcher takes no other
    if function == "generate":
        call |= {"full_to_state": case.full_to_state, **case.geometry.decode_options()}
    if function == "generate_legacy":
        call["compress_ratio"] = case.geometry.compress_ratio
    kind = "Decode" if extend == 1 else "Prefill"
    # SGLang's legacy plans take no lengths on the GPU, and its online plans wait for them.
    on_cpu = kind == "Prefill" and function != "generate"
    if kind == "Prefill":
        call |= {"extend_lens": case.extend_lens, "num_q_tokens": lengths.num_q_tokens}
        if function == "generate":
            call["use_cuda_graph"] = True
        if function == "generate_legacy":
            call["device"] = torch.device(DEVICE)
    if on_cpu:
        call |= {name: call[name].cpu() for name in ("seq_lens", "extend_lens")}
    calls = {who: partial(functions[f"{kind}.{function}"], **call) for who, functions in both_plans(wheel).items()}
    # SGLang's rows are in the order in which its threads came.
    theirs, ours = ([sorted(map(bytes, rows.cpu().numpy())) for rows in made()[1:3]] for made in calls.values())
    assert ours == theirs
    target, name = f"Compressor{kind}Plan.{function}", f"{ring.partition(',')[0]}, {name}, {extend} tokens each"
    if not on_cpu:
        record_gpu_times(target, name, calls)
        return
    wall = {who: timing.wall_time(call, sync=torch.cuda.synchronize) for who, call in calls.items()}
    record(CPU_LENGTHS, target, name, wall["hotplan"], wall["SGLang"], "SGLang")


# ------------------------------------------------------------------------------------------------- processes of their own


def run_alone(function: Callable[[], None], **environment: str) -> str:
    """Runs a function of this file in a new process, and gives what it printed. A failure there is one here."""
    names = ("HOTPLAN_CUDA_ARCHS", "TVM_FFI_CUDA_ARCH_LIST", "HOTPLAN_SGLANG", "HOTPLAN_CHECK")
    inherited = {name: value for name, value in os.environ.items() if name not in names}
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", f"import {Path(__file__).stem} as tests; tests.{function.__name__}()"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        env=inherited | {"PYTHONPATH": path} | environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def driver_says(function: str, *arguments: Any) -> None:
    status = getattr(ctypes.CDLL("libcuda.so.1"), function)(*arguments)
    assert status == 0, f"{function}: error {status}"


def active_contexts() -> list[bool]:
    """For every GPU, whether this process has its primary context, which the CUDA runtime makes for its first use."""
    driver_says("cuInit", 0)
    count = ctypes.c_int()
    driver_says("cuDeviceGetCount", ctypes.byref(count))
    found = []
    for index in range(count.value):
        device, flags, active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
        driver_says("cuDeviceGet", ctypes.byref(device), index)
        driver_says("cuDevicePrimaryCtxGetState", device, ctypes.byref(flags), ctypes.byref(active))
        found.append(bool(active.value))
    return found


def load_everything() -> None:
    modules, _ = sglang_modules.originals()
    with sglang_modules.installed(modules):
        plugin.register()
        sglang_modules.HookRegistry.apply_hooks()
        assert all(row.served for row in plugin.status())
    for family in jit.families():
        jit.load(family, "cuda")
    assert not any(active_contexts())
    assert not torch.cuda.is_initialized()
    # What follows shows that the question can be answered with yes, and that what was loaded works.
    rid = torch.tensor([2], device="cuda")
    assert hotplan.plan_online_decode(rid, rid).cpu().shape == (1, 16)
    assert active_contexts()[0]
    assert not any(active_contexts()[1:])


def test_loading_makes_no_context() -> None:
    """SGLang loads plugins in processes that never use a GPU, and in some before they choose theirs."""
    run_alone(load_everything)


# ----------------------------------------------------------------------------------------------------------------- hooks


class Target(NamedTuple):
    """One call, what is wrong with another one, and what the reference says about the first one's result."""

    arguments: dict[str, Any]
    wrong: dict[str, Any]
    check: Callable[[Any], None]


def compress_targets() -> dict[str, Target]:
    case = build_case(ragged(4, 9, 40), Geometry(4, 256, 16), seed=4, state_slot_offset=3)
    gpu = case.to(DEVICE)
    rid, req_to_token, full_to_state = gpu.tables
    rows = {"num_q_tokens": case.lengths.num_q_tokens, "use_cuda_graph": True}
    batch = {"req_pool_indices": rid, "seq_lens": gpu.seq_lens}
    extend = {"extend_lens": gpu.extend_lens}
    ratio = {"compress_ratio": 4}
    paged = {"req_to_token": req_to_token, "full_to_state": full_to_state, **case.geometry.decode_options()}
    online = {"req_to_token": req_to_token, "state_slot_offset": 3}
    legacy = {"device": rid.device}
    calls = {
        "CompressorPrefillPlan.generate": (batch | extend | rows | paged, case.prefill),
        "CompressorPrefillPlan.generate_legacy": (batch | extend | rows | ratio | legacy, case.prefill_legacy),
        "CompressorPrefillPlan.generate_online": (batch | extend | rows | online, case.online_prefill),
        "CompressorDecodePlan.generate": (batch | paged, case.decode),
        "CompressorDecodePlan.generate_legacy": (batch | ratio, case.decode_legacy),
        "CompressorDecodePlan.generate_online": (batch | online, case.online_decode),
    }
    references = {
        "generate": ("plan_compress_prefill", "plan_compress_decode"),
        "generate_legacy": ("plan_compress_prefill_legacy", "plan_compress_decode_legacy"),
        "generate_online": ("plan_online_prefill", "plan_online_decode"),
    }

    def target(name: str) -> Target:
        kind, _, function = name.partition(".")
        arguments, run = calls[name]
        decodes = kind == "CompressorDecodePlan"
        expected = run(
            getattr(reference, references[function][decodes]), **({} if decodes else {"use_cuda_graph": True})
        )

        def check(plan: Any) -> None:
            assert type(plan) is pkgutil.resolve_name(f"{plugin._COMPRESS}.{kind}")
            assert plan.is_decode is decodes
            assert plan.compress_ratio == (128 if function == "generate_online" else 4)
            tensors = [plan.plan_d] if decodes else [plan.plan_c, plan.plan_w]
            for tensor, wanted in zip(tensors, [expected] if decodes else expected, strict=True):
                assert tensor.device == rid.device
                assert torch.equal(tensor.cpu(), wanted), name
            assert decodes or plan.pin_buffer is None

        return Target(arguments, {"req_pool_indices": rid[None]}, check)

    return {f"{plugin._COMPRESS}.{name}": target(name) for name in calls}


def hisparse_targets() -> dict[str, Target]:
    rng = np.random.default_rng(5)
    found: dict[str, Target] = {}
    for kind in db.KINDS:
        case = db.make_case(kind, seed=5, top_k=40, hot_slots=200, rows=5, extra=4, item_bytes=576)
        step = db.random_step(case, rng, short=0.2)
        step.num_real = 4
        ours, theirs = db.Bench(case, DEVICE), db.Bench(case)
        ours.prepare(step)
        arguments = ours.arguments(step)
        theirs.run(reference_device_buffer, step)

        def check(result: Any, ours: db.Bench = ours, theirs: db.Bench = theirs, kind: str = kind) -> None:
            assert result is None
            ours.assert_equal(theirs, kind)

        name = ours.operator(hisparse).__name__
        wrong = {"req_pool_indices": arguments["req_pool_indices"].float()}
        found[f"{plugin._HISPARSE}.{name}"] = Target(arguments, wrong, check)
        if kind != "linear":
            continue
        host, pool = ours.host_pool(), ours.device_pool()
        theirs.replay(reference_device_buffer)

        def check_copy(result: Any, pool: torch.Tensor = pool, theirs: db.Bench = theirs) -> None:
            assert theirs.planned is not None
            assert torch.equal(pool.cpu(), theirs.planned[1]), "planned copy"

        plan = {name: getattr(ours, name) for name in ("miss_src", "miss_dst", "miss_count", "num_real_reqs")}
        pools = {"host_cache": host, "device_buffer": pool, "item_size_bytes": case.item_bytes}
        wrong = {"miss_dst": ours.miss_dst.long()}
        found[f"{plugin._HISPARSE}.copy_cache_planned_mla"] = Target(plan | pools, wrong, check_copy)
    transfer = db.Transfer(DEVICE)
    indices = transfer.arguments()
    found[f"{plugin._HISPARSE}.transfer_cache_dsv4_mla"] = Target(
        indices, {"src_indices": indices["src_indices"].int()}, lambda _: transfer.assert_copied()
    )
    mapping = torch.from_numpy(rng.permutation(100))
    locations = torch.from_numpy(rng.integers(-3, 110, 50)).int()
    expected = reference_device_buffer.translate_padded_hisparse_locations(mapping, locations)

    def check_translation(result: torch.Tensor) -> None:
        assert torch.equal(result.cpu(), expected)

    name = "translate_padded_hisparse_locations"
    arguments = {"mapping": mapping.to(DEVICE), "locations": locations.to(DEVICE)}
    found[f"{plugin._SLOT_MAPPING}.{name}"] = Target(arguments, {"locations": locations.float()}, check_translation)
    return found


def first_calls_under_capture() -> None:
    modules, calls = sglang_modules.originals()
    with sglang_modules.installed(modules):
        plugin.register()
        sglang_modules.HookRegistry.apply_hooks()
        assert [row for row in plugin.status() if not row.served] == []
        functions = {row.target: pkgutil.resolve_name(row.target) for row in plugin.status()}
        targets = compress_targets() | hisparse_targets()
        assert set(targets) == set(functions)
        order = list(functions)  # the plugin's, where the planned copy comes after a swap-in that records its plan
        results: dict[str, Any] = {}

        def call_all() -> None:
            for name in order:
                results[name] = functions[name](**targets[name].arguments)

        replay = captured(call_all)
        replay()
        for name in order:
            targets[name].check(results[name])
        assert not calls, "SGLang's own functions were called"

        def call_wrongly() -> None:
            for name in order:
                for change in (targets[name].wrong, {"an_option_of_a_newer_sglang": 1}):
                    arguments = targets[name].arguments | change
                    if name == plugin._SPEC:  # whose state is hotplan's by now
                        with pytest.raises(RuntimeError, match="SGLang's own kernel cannot take over"):
                            functions[name](**arguments)
                    else:
                        assert functions[name](**arguments) == "SGLang's result", name

        captured(call_wrongly)  # does no harm to a capture
        calls.clear()
        call_wrongly()
        assert calls == [name for name in order for _ in range(2) if name != plugin._SPEC]
        for name in plugin._TARGETS["hisparse"]:
            if not name.endswith("locations"):
                targets[name].check(None)  # nothing was written
        overheads(functions, targets)


def overheads(functions: dict[str, Callable[..., Any]], targets: dict[str, Target]) -> None:
    """Prints a line for each function, for the process that keeps the results."""
    served = {target: call for family in plugin.FAMILIES for target, call in plugin._served_functions(family).items()}
    for name, target in targets.items():
        times = [
            timing.wall_time(partial(call, **target.arguments), sync=torch.cuda.synchronize).as_dict()
            for call in (functions[name], served[name])
        ]
        print(OVERHEAD, json.dumps([".".join(name.split(".")[-2:]), *times]))


OVERHEAD = "overhead:"


def test_the_first_calls_of_all_hooks_under_graph_capture() -> None:
    for line in run_alone(first_calls_under_capture).splitlines():
        if line.startswith(OVERHEAD):
            name, hook, bare = json.loads(line.removeprefix(OVERHEAD))
            record(HOOKS, name, "one call", timing.Stats(**hook), timing.Stats(**bare), "without the hook")
        else:
            print(line)


# ------------------------------------------------------------------------------------------------------------------ vLLM


def by_vllms_name(bench: hs.Bench, ids: np.ndarray) -> Callable[[], None]:
    """The call that vLLM makes, older schema, with everything by position."""
    host, hot, table, top_k, out, cached, lru = bench.arguments(ids)
    options = bench.options()
    names = (
        "miss_mask", "stats", "attention_indices", "attention_block_stride", "request_ids", "source_block_table",
        "source_block_size", "resolved_global_indices", "valid_counts", "swap_host_physical_rows",
        "swap_device_physical_rows", "swap_counts", "resident_block_table", "resident_block_size",
        "resident_null_block",
    )  # fmt: skip
    rest = [options.get(name, 0 if name.endswith(("stride", "size", "null_block")) else None) for name in names]
    states = options.get("request_state_indices")
    return partial(
        torch.ops._C_cache_ops.hisparse_resolve_residency,
        host, hot, table, top_k, out, cached, lru, states, cached.shape[1], *rest,
    )  # fmt: skip


def vllms_operators() -> None:
    """A hot cache on the GPU with its pool in pinned host memory, in the place of kernels that vLLM registered."""
    calls: list[str] = []
    theirs = torch.library.Library("_C_cache_ops", "DEF")
    for name, schema in vllm._SCHEMAS.items():
        older = schema.replace("int max_union_rows, ", "")
        theirs.define(f"{name}({older}) -> ()")
        theirs.impl(name, lambda *_, name=name: calls.append(name), "CUDA")
    ops = torch.ops._C_cache_ops
    case = hs.make_case(seed=2, top_k=40, hot_slots=200, rows=6, block_size=16, host_rows=3000, row_bytes=576,
                        mode="tables", resident=0.2, padding=0.2)  # fmt: skip
    rng = np.random.default_rng(2)
    ours, expected = hs.Bench(case, DEVICE), hs.Bench(case)
    assert ours.host_cache.is_pinned() or DEVICE == "cpu"

    vllm.install()
    by_vllms_name(ours, hs.random_ids(case, rng))()
    assert calls == ["hisparse_resolve_residency"] or DEVICE == "cpu"
    served = vllm.install(replace=True)
    assert all(by == {"CPU": "hotplan", "CUDA": "hotplan"} for by in served.values()), served
    calls.clear()

    if DEVICE == "cpu":
        ours = hs.Bench(case)
    for number in range(4):
        ids = hs.random_ids(case, rng, spread=0.3, invalid=0.05)
        expected.resolve(reference_hisparse, ids)
        ours.poison()
        call = by_vllms_name(ours, ids)
        call = captured(call) if number % 2 else call
        call()
        ours.assert_equal(expected, f"step {number}")
        before = ours.hot_pool.clone()
        listed = "swap_host_physical_rows", "swap_device_physical_rows", "swap_counts"
        ops.hisparse_gather_compact(ours.host_cache, ours.hot_cache, *(getattr(ours, name) for name in listed))
        rows = [getattr(expected, name) for name in listed]
        reference_hisparse.gather_compact(expected.host_cache, expected.hot_cache, *rows)
        ours.assert_equal(expected, f"copies of step {number}")
        assert not torch.equal(ours.hot_pool, before), "nothing was copied"
    tokens, slots = torch.tensor([0, 2, 1]), torch.tensor([5, 7, -1])
    states = torch.arange(case.state_rows, dtype=torch.int32)
    for bench, function in ((ours, ops.hisparse_invalidate_written_slots),
                            (expected, reference_hisparse.invalidate_written_slots)):  # fmt: skip
        on = bench.device
        function(bench.device_global_indices, states.to(on), tokens.int().to(on), slots.to(on))
    ours.assert_equal(expected, "invalidated")
    assert not calls


def test_vllms_names_reach_ours_for_a_pool_in_host_memory() -> None:
    run_alone(vllms_operators)
