"""What a caller writes, for checkers; `test_types.py` runs mypy on it, nobody runs it.

Every public name is used and what it gives has to be of a known type. A line that ends in ``# error: CODE`` is a mistake
which has to be found, once or several times; all others must pass.
"""

from collections import namedtuple
from pathlib import Path

import numpy as np
import torch
import tvm_ffi
from typing_extensions import assert_type

import hotplan
import hotplan.reference.device_buffer
import hotplan.reference.hisparse
from hotplan import HitStats, HotBuffer, PrefillPlan, SwapPlan, hisparse, jit, plans, reference
from hotplan.integrations import sglang, torch_library, vllm

T = torch.Tensor


def compress_plans(rid: T, req_to_token: T, full_to_state: T, seq: T, extend: T) -> None:
    plan = hotplan.plan_compress_prefill(
        rid, req_to_token, full_to_state, seq, extend, num_q_tokens=8, compress_ratio=4, swa_page_size=256, ring_size=8,
        use_req_ring=True, use_cuda_graph=True, write_pad=3, check=False,
    )  # fmt: skip
    assert_type(plan, PrefillPlan)
    assert_type(plan.compress, torch.Tensor)
    compress, write = plan
    assert_type(write, torch.Tensor)
    assert_type(
        hotplan.plan_compress_prefill(
            rid, req_to_token, full_to_state, seq, extend, num_q_tokens=8, compress_ratio=4, swa_page_size=256,
            ring_size=8, out=(compress, write),
        ),
        PrefillPlan,
    )  # fmt: skip
    decode = hotplan.plan_compress_decode(
        rid, req_to_token, full_to_state, seq, compress_ratio=4, swa_page_size=256, ring_size=8, out=compress
    )
    assert_type(decode, torch.Tensor)
    legacy = hotplan.plan_compress_prefill_legacy(rid, seq, extend, num_q_tokens=8, compress_ratio=4, out=plan)
    assert_type(legacy, PrefillPlan)
    assert_type(hotplan.plan_compress_decode_legacy(rid, seq, compress_ratio=4, out=decode), torch.Tensor)


def online_plans(rid: T, seq: T, extend: T, active: T, plan: PrefillPlan) -> None:
    assert_type(hotplan.plan_online_prefill(rid, seq, extend, num_q_tokens=8, state_slot_offset=2), PrefillPlan)
    assert_type(
        hotplan.plan_online_prefill(rid, seq, extend, num_q_tokens=8, out=(plan.compress, plan.write)), PrefillPlan
    )
    assert_type(hotplan.plan_online_decode(rid, seq, state_slot_offset=2, check=True), torch.Tensor)
    for batch in (4, active):
        verify = hotplan.plan_online_verify(
            rid, seq, num_draft_tokens=3, state_slot_offset=2, active_batch_size=batch, out=plan
        )
        assert_type(verify, PrefillPlan)


def step_plans(rid: T, req_to_token: T, full_to_state: T, seq: T, extend: T, pads: list[int]) -> None:
    step = hotplan.plan_step_prefill(rid, req_to_token, full_to_state, seq, extend, num_q_tokens=8, swa_page_size=256)
    assert_type(step, dict[int, PrefillPlan])
    again = hotplan.plan_step_prefill(
        rid, req_to_token, full_to_state, seq, extend, num_q_tokens=8, swa_page_size=256, ratios=[4, 128],
        ring_sizes=(8, 128), write_pad=pads, out=step,
    )  # fmt: skip
    assert_type(again[128].write, torch.Tensor)
    mixed = {4: step[4], 128: (step[128].compress, step[128].write)}
    hotplan.plan_step_prefill(
        rid, req_to_token, full_to_state, seq, extend, num_q_tokens=8, swa_page_size=256, write_pad=(None, 4), out=mixed
    )
    tensors = hotplan.plan_step_decode(rid, req_to_token, full_to_state, seq, swa_page_size=256)
    assert_type(tensors, dict[int, torch.Tensor])
    hotplan.plan_step_decode(rid, req_to_token, full_to_state, seq, swa_page_size=256, out=tensors)


def views(packed: T, step: dict[int, PrefillPlan]) -> None:
    for read in (plans.compress_rows, plans.write_rows, plans.decode_rows, plans.swap_rows):
        assert_type(read(packed), np.ndarray)
        assert_type(read(packed.numpy()), np.ndarray)
    assert_type(plans.compress_rows(packed)["seq_len"], np.ndarray)
    rows = plans.invalid_rows(plans.SWAP_ROW, 3)
    assert_type(rows, np.ndarray)
    for mask in (plans.valid(rows), plans.valid_compress(packed), plans.valid_write(packed)):
        assert_type(mask, np.ndarray)
    assert_type(plans.COMPRESS_ROW.itemsize + plans.WRITE_ROW.itemsize + plans.DECODE_ROW.itemsize, int)
    assert_type(plans.describe(step[4], limit=6) + plans.describe(packed, "decode"), str)
    assert_type(plans.PrefillPlan(packed, packed), PrefillPlan)
    assert_type(plans.SwapPlan(packed, packed, packed), SwapPlan)


def residency(host: T, hot: T, table: T, ids: T, rows: T, held: T, lru: T, out: tuple[T, T, T]) -> None:
    hisparse.resolve_residency(host, hot, table, ids, rows, held, lru, miss_mask=ids, max_union_rows=2, stats=None)
    hisparse.swap_in(host, hot, table, ids, rows, held, lru, request_state_indices=rows, attention_block_stride=64)
    plan = hisparse.plan_swap_in(host, hot, table, ids, held, lru, source_block_table=table, source_block_size=64)
    assert_type(plan, SwapPlan)
    assert_type(plan.hot_indices, torch.Tensor)
    assert_type(hisparse.plan_swap_in(host, hot, table, ids, held, lru, out=plan), hisparse.SwapPlan)
    assert_type(hisparse.plan_swap_in(host, hot, table, ids, held, lru, out=out), SwapPlan)
    hisparse.gather_planned(host, hot, plan.plan, plan.counts)
    hisparse.gather_plan(host, hot, ids, rows, ids, attention_indices=ids, attention_block_stride=64)
    hisparse.gather_compact(host, hot, ids, rows, plan.counts)
    hisparse.invalidate_written_slots(held, rows, ids, ids)


ServerState = namedtuple("ServerState", "cache_index cache_policy scratch_locs scratch_state")
"""SGLang's is a tuple of its own, too."""


class OtherState:
    """The same three tensors, with types."""

    def __init__(self, tensor: T) -> None:
        self.cache_policy = self.scratch_locs = self.scratch_state = tensor


def device_buffer(t: T, n: T | None) -> None:
    hisparse.load_cache_to_device_buffer_mla(t, t, t, t, t, t, t, t, t, t, 656, 4, 8, num_real_reqs=n, skip_io=True)
    hisparse.load_cache_to_device_buffer_dsv4_mla(t, t, t, t, t, t, t, t, t, t, 584, 4, 8, 64, 256, n, t, t, t)
    hisparse.load_blocks_to_device_buffer_mha(t, t, t, t, t, t, t, t, t, t, t, t, 656, 8, 4, num_real_reqs=n)
    for state in (hisparse.HiSparseSpecState(t, t, t, t), OtherState(t), ServerState(t, t, t, t)):
        hisparse.load_cache_to_device_buffer_spec_mla(
            top_k_tokens=t, device_buffer_tokens=t, host_cache_locs=t, device_buffer_locs=t, host_cache=t,
            device_buffer=t, top_k_device_locs=t, req_pool_indices=t, seq_lens=t, state=state, num_real_reqs=n,
        )  # fmt: skip
    hisparse.copy_cache_planned_mla(
        miss_src=t, miss_dst=t, miss_count=t, num_real_reqs=n, host_cache=t, device_buffer=t, item_size_bytes=656
    )
    hisparse.transfer_cache_dsv4_mla(t, t, t, t, block_size=512)
    assert_type(hisparse.translate_padded_hisparse_locations(t, t), torch.Tensor)


def hot_buffer(pools: list[torch.Tensor], ids: T) -> None:
    buffer = HotBuffer(pools, max_requests=8, top_k=64, hot_slots=256, device=torch.device("cpu"))
    request = buffer.admit()
    assert_type(request, int)
    assert_type(buffer.resolve(ids, [request, -1]), torch.Tensor)
    assert_type(buffer.resolve(ids, ids, source_block_table=ids, source_block_size=64, layer=0), torch.Tensor)
    assert_type(buffer.gather(1), torch.Tensor)
    buffer.invalidate([request], ids)
    buffer.release(request)
    assert_type(buffer.stats(), HitStats)
    assert_type(buffer.stats().hit_rate, float)
    assert_type(buffer.stats().misses + buffer.admitted + buffer.layers, int)
    assert_type(buffer.caches, torch.Tensor)
    assert_type(buffer.attention_indices, torch.Tensor | None)
    buffer.reset_stats()


def reference_plans(t: T, pair: tuple[T, T], plan: PrefillPlan) -> None:
    r = reference
    prefill = r.plan_compress_prefill(
        t, t, t, t, t, num_q_tokens=8, compress_ratio=4, swa_page_size=256, ring_size=8, out=pair
    )
    assert_type(prefill, PrefillPlan)
    decode = r.plan_compress_decode(t, t, t, t, compress_ratio=4, swa_page_size=256, ring_size=8)
    assert_type(decode, torch.Tensor)
    legacy = r.plan_compress_prefill_legacy(t, t, t, num_q_tokens=8, compress_ratio=4, out=plan)
    assert_type(legacy, PrefillPlan)
    assert_type(r.plan_compress_decode_legacy(t, t, compress_ratio=4), torch.Tensor)
    assert_type(r.plan_online_prefill(t, t, t, num_q_tokens=8, out=pair), PrefillPlan)
    assert_type(r.plan_online_decode(t, t), torch.Tensor)
    verify = r.plan_online_verify(t, t, num_draft_tokens=3, state_slot_offset=0, active_batch_size=t)
    assert_type(verify, PrefillPlan)
    step = r.plan_step_prefill(t, t, t, t, t, num_q_tokens=8, swa_page_size=256, out={4: pair, 128: plan})
    assert_type(step, dict[int, PrefillPlan])
    assert_type(r.plan_step_decode(t, t, t, t, swa_page_size=256), dict[int, torch.Tensor])


def reference_hisparse(t: T) -> None:
    assert_type(reference.hisparse.plan_swap_in(t, t, t, t, t, t, out=(t, t, t)), SwapPlan)
    assert_type(reference.device_buffer.translate_padded_hisparse_locations(t, t), torch.Tensor)


def compiling() -> None:
    assert_type(jit.load(jit.families()[0], "cpu"), tvm_ffi.Module)
    built = jit.build("compress", "cuda", "9.0a,10.0a", out=Path("modules"))
    assert_type(built, jit.Built)
    assert_type(built.path, Path)
    assert_type(hotplan.__version__, str)


def integrations() -> None:
    assert_type(vllm.install(replace=True), dict[str, dict[str, str]])
    assert_type(sglang.status(), list[sglang.Row])
    assert_type(sglang.enabled(), tuple[str, ...])
    assert_type(sglang.FAMILIES[sglang.ENABLE_VAR], str)
    sglang.register()
    assert_type(torch_library.OPERATORS, list[str])


def mistakes(t: T, plan: PrefillPlan, buffer: HotBuffer) -> None:
    c, h = hotplan, hisparse
    # fmt: off
    c.plan_compress_prefill(t, t, t, t, t, num_q_tokens="8", compress_ratio=4, swa_page_size=4, ring_size=4)  # error: arg-type
    c.plan_compress_prefill(t, t, t, t, t, num_q_tokens=8, compress_ratio=4, swa_page_size=4)  # error: call-arg
    c.plan_compress_prefill(t, t, t, t, t, num_q_tokens=8, compress_ratio=4, swa_page_size=4, ring_size=4, out=t)  # error: arg-type
    c.plan_compress_decode(t, t, t, t, compress_ratio=4, swa_page_size=4, ring_size=4, out=plan)  # error: arg-type
    c.plan_compress_prefill_legacy(t, t, [8], num_q_tokens=8, compress_ratio=4)  # error: arg-type
    c.plan_compress_decode_legacy(t, t, compress_ratio=4.0)  # error: arg-type
    c.plan_online_prefill(t, t, t, num_q_tokens=t)  # error: arg-type
    c.plan_online_decode(t, None)  # error: arg-type
    c.plan_online_verify(t, t, num_draft_tokens=3, state_slot_offset=0, active_batch_size=None)  # error: arg-type
    c.plan_step_prefill(t, t, t, t, t, num_q_tokens=8, swa_page_size=4, ratios=range(4, 6))  # error: arg-type
    c.plan_step_prefill(t, t, t, t, t, num_q_tokens=8, swa_page_size=4, out=plan)  # error: arg-type
    c.plan_step_decode(t, t, t, t, swa_page_size=4, out={4: plan})  # error: dict-item
    c.plan_step_prefil(t)  # error: attr-defined
    h.resolve_residency(t, t, t, t, t, t, "lru")  # error: arg-type
    h.swap_in(t, t, t, t, t, t, t, max_union_row=2)  # error: call-arg
    h.plan_swap_in(t, t, t, t, t, t, out=(t, t))  # error: arg-type
    h.gather_planned(t, t, plan, t)  # error: arg-type
    h.gather_plan(t, t, t, t)  # error: call-arg
    h.gather_compact(t, t, t, t, 3)  # error: arg-type
    h.invalidate_written_slots(t, t, t, [1])  # error: arg-type
    h.load_cache_to_device_buffer_mla(t, t, t, t, t, t, t, t, t, t, 656, t, 8)  # error: arg-type
    h.load_cache_to_device_buffer_dsv4_mla(t, t, t, t, t, t, t, t, t, t, 584)  # error: call-arg
    h.load_blocks_to_device_buffer_mha(t, t, t, t, t, t, t, t, t, t, t, t, t, 8, 4)  # error: arg-type
    h.load_cache_to_device_buffer_spec_mla(state=t, num_real_reqs=None)  # error: arg-type call-arg
    h.copy_cache_planned_mla(miss_src=t, miss_dst=t, miss_count=t, num_real_reqs=t)  # error: call-arg
    h.transfer_cache_dsv4_mla(0, t, t, t)  # error: arg-type
    h.translate_padded_hisparse_locations(t, 3)  # error: arg-type
    plans.compress_rows(plan)  # error: arg-type
    plans.describe(1)  # error: arg-type
    buffer.resolve(t, "requests")  # error: arg-type
    buffer.release(None)  # error: arg-type
    HotBuffer(t, max_requests=8, top_k=64)  # error: call-arg
    reference.plan_online_decode(t, "lengths")  # error: arg-type
    jit.load("compress")  # error: call-arg
    plan.compress = t  # error: misc
