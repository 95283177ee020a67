"""``torch.ops.hotplan``: our operators as torch operators, so that ``torch.compile`` keeps the calls in its graph.

Nobody needs to call them: while a call is traced, the public functions of :mod:`hotplan.compress` and
:mod:`hotplan.hisparse` reach these operators by themselves, and only then. An eager call goes past torch's dispatcher,
which takes several microseconds. Importing this module defines them, for callers who want ``torch.ops.hotplan.X``.

An operator has the public function's name and arguments, with these differences:

* One that plans returns its tensors as a flat tuple, and there is a second operator ``X_out``, which takes them as
  arguments (``compress`` and ``write``; ``plan``; with a number behind the name for the second ratio of a step) and
  returns nothing.
* ``plan_step_prefill`` and ``plan_step_decode`` are for two ratios, with a write pad for each;
  ``plan_online_verify`` takes a tensor of the active batch size as ``active_batch_tensor``; the state of
  ``load_cache_to_device_buffer_spec_mla`` is three tensors.

What a compiler cannot know: how many rows a prefill plan has whose lengths lie on the CPU, without ``use_cuda_graph``.
Its graph then has sizes that are only known when it runs, which torch captures with ``fullgraph=True`` or
``torch._dynamo.config.capture_dynamic_output_shape_ops``, and else splits the graph. With lengths on the GPU, or
``use_cuda_graph``, a plan has ``num_q_tokens`` rows. And ``transfer_cache_dsv4_mla`` writes through addresses: a
compiler does not see that it touches the pools, so other uses of them do not belong into the same compiled function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hotplan import compress, hisparse

__all__ = ["OPERATORS", "traced"]

_library = torch.library.Library("hotplan", "DEF")

OPERATORS: list[str] = []
"""Names in ``torch.ops.hotplan``, in the order of their definition."""


def _define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """``run`` and ``fake`` get every argument by name, also those that torch leaves out since they have the default."""
    parsed = torch._C.parse_schema(schema)
    names = [argument.name for argument in parsed.arguments]
    defaults = {argument.name: argument.default_value for argument in parsed.arguments if argument.has_default_value()}

    def by_name(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: function(**{**defaults, **dict(zip(names, args, strict=False)), **kwargs})

    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    # An operator that is called between two graphs would else be traced again, into itself.
    _library.impl(parsed.name, torch.compiler.disable(by_name(run)), "CompositeExplicitAutograd")
    torch.library.register_fake(f"hotplan::{parsed.name}", by_name(fake), lib=_library)
    OPERATORS.append(parsed.name)


def _nothing(**arguments: Any) -> None:
    """The fake of an operator that only writes into its arguments."""


# ----------------------------------------------------------------------------------------------------
# Compress plans


def _define_plan(
    name: str,
    arguments: str,
    outputs: dict[str, int],
    rows: Callable[[dict[str, Any]], Any],
    run: Callable[..., Sequence[torch.Tensor]],
) -> None:
    """An operator that makes its outputs, and one that is given them.

    ``outputs`` has the bytes of a row of each. ``rows`` says how many rows the outputs have, None where that depends on
    lengths. ``run`` takes ``out``, all outputs or None.
    """

    def empty(counts: Sequence[Any], given: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        new, sizes = given["req_pool_indices"].new_empty, outputs.values()
        return tuple(new((count, size), dtype=torch.uint8) for count, size in zip(counts, sizes, strict=True))

    def result(made: Sequence[torch.Tensor]) -> Any:
        return tuple(made) if len(made) > 1 else made[0]

    def make(**given: Any) -> Any:
        count = rows(given)
        if count is None:
            # A call's new outputs are views of one allocation; a compiler relies on outputs that share nothing.
            first, *others = run(out=None, **given)
            return result([first, *(tensor.clone() for tensor in others)])
        made = empty([count] * len(outputs), given)
        run(out=made, **given)
        return result(made)

    def fake(**given: Any) -> Any:
        count = rows(given)
        if count is None:
            new_size = torch.library.get_ctx().new_dynamic_size
            return result(empty([new_size() for _ in outputs], given))
        return result(empty([count] * len(outputs), given))

    def fill(**given: Any) -> None:
        out = tuple(given.pop(output) for output in outputs)
        run(out=out, **given)

    returns = ", ".join(["Tensor"] * len(outputs))
    targets = ", ".join(f"Tensor({chr(97 + i)}!) {output}" for i, output in enumerate(outputs))
    _define(f"{name}({arguments}) -> ({returns})", make, fake)
    _define(f"{name}_out({arguments}, {targets}) -> ()", fill, _nothing)


def _batch(given: dict[str, Any]) -> Any:
    return given["req_pool_indices"].shape[0]


def _queries(given: dict[str, Any]) -> Any:
    return given["num_q_tokens"] if given["seq_lens"].is_cuda or given.get("use_cuda_graph") else None


def _single(function: Callable[..., torch.Tensor]) -> Callable[..., Sequence[torch.Tensor]]:
    return lambda out, **given: (function(out=None if out is None else out[0], **given),)


def _step_prefill(
    out: Sequence[torch.Tensor] | None,
    ratios: list[int],
    write_pad: int | None,
    write_pad_1: int | None,
    **given: Any,
) -> Sequence[torch.Tensor]:
    pairs = None if out is None else {ratios[0]: (out[0], out[1]), ratios[1]: (out[2], out[3])}
    plans = compress.plan_step_prefill(ratios=ratios, write_pad=(write_pad, write_pad_1), out=pairs, **given)
    return [tensor for ratio in ratios for tensor in plans[ratio]]


def _step_decode(out: Sequence[torch.Tensor] | None, ratios: list[int], **given: Any) -> Sequence[torch.Tensor]:
    plans = compress.plan_step_decode(
        ratios=ratios, out=None if out is None else dict(zip(ratios, out, strict=True)), **given
    )
    return [plans[ratio] for ratio in ratios]


def _online_verify(
    active_batch_size: int, active_batch_tensor: torch.Tensor | None, **given: Any
) -> Sequence[torch.Tensor]:
    active = active_batch_size if active_batch_tensor is None else active_batch_tensor
    return compress.plan_online_verify(active_batch_size=active, **given)


_TABLES = "Tensor req_pool_indices, Tensor req_to_token, Tensor full_to_state"
_LENGTHS = "Tensor seq_lens, Tensor extend_lens"
_PAGED = "int swa_page_size, int ring_size, bool use_req_ring=False"

_define_plan(
    "plan_compress_prefill",
    f"{_TABLES}, {_LENGTHS}, *, SymInt num_q_tokens, int compress_ratio, {_PAGED}, bool use_cuda_graph=False, "
    "int? write_pad=None, bool? check=None",
    {"compress": 16, "write": 8},
    _queries,
    compress.plan_compress_prefill,
)
_define_plan(
    "plan_compress_decode",
    f"{_TABLES}, Tensor seq_lens, *, int compress_ratio, {_PAGED}, bool? check=None",
    {"plan": 16},
    _batch,
    _single(compress.plan_compress_decode),
)
_define_plan(
    "plan_compress_prefill_legacy",
    f"Tensor req_pool_indices, {_LENGTHS}, *, SymInt num_q_tokens, int compress_ratio, bool use_cuda_graph=False, "
    "bool? check=None",
    {"compress": 16, "write": 8},
    _queries,
    compress.plan_compress_prefill_legacy,
)
_define_plan(
    "plan_compress_decode_legacy",
    "Tensor req_pool_indices, Tensor seq_lens, *, int compress_ratio, bool? check=None",
    {"plan": 16},
    _batch,
    _single(compress.plan_compress_decode_legacy),
)
_define_plan(
    "plan_online_prefill",
    f"Tensor req_pool_indices, {_LENGTHS}, *, SymInt num_q_tokens, int state_slot_offset=0, bool use_cuda_graph=False, "
    "bool? check=None",
    {"compress": 16, "write": 16},
    _queries,
    compress.plan_online_prefill,
)
_define_plan(
    "plan_online_decode",
    "Tensor req_pool_indices, Tensor seq_lens, *, int state_slot_offset=0, bool? check=None",
    {"plan": 16},
    _batch,
    _single(compress.plan_online_decode),
)
_define_plan(
    "plan_online_verify",
    "Tensor req_pool_indices, Tensor prefix_lens, *, int num_draft_tokens, int state_slot_offset, "
    "int active_batch_size=0, Tensor? active_batch_tensor=None",
    {"compress": 16, "write": 16},
    _batch,
    _online_verify,
)
_define_plan(
    "plan_step_prefill",
    f"{_TABLES}, {_LENGTHS}, *, SymInt num_q_tokens, int swa_page_size, int[] ratios=[4, 128], "
    "int[] ring_sizes=[8, 128], bool use_req_ring=False, bool use_cuda_graph=False, int? write_pad=None, "
    "int? write_pad_1=None, bool? check=None",
    {"compress": 16, "write": 8, "compress_1": 16, "write_1": 8},
    _queries,
    _step_prefill,
)
_define_plan(
    "plan_step_decode",
    f"{_TABLES}, Tensor seq_lens, *, int swa_page_size, int[] ratios=[4, 128], int[] ring_sizes=[8, 128], "
    "bool use_req_ring=False, bool? check=None",
    {"plan": 16, "plan_1": 16},
    _batch,
    _step_decode,
)


def _check_lengths(seq_lens: torch.Tensor, extend_lens: torch.Tensor | None, num_q_tokens: int) -> None:
    compress._operators("seq_lens", seq_lens).check_lengths(seq_lens, extend_lens, num_q_tokens)


_define("check_lengths(Tensor seq_lens, Tensor? extend_lens, SymInt num_q_tokens) -> ()", _check_lengths, _nothing)
# It gives nothing and writes nothing, but it can raise.
torch.fx.node.has_side_effect(torch.ops.hotplan.check_lengths.default)


# Short, for the lists of arguments below.
_T = torch.Tensor
_O = torch.Tensor | None


class _TracedCompress:
    """The module's exported functions (``hotplan.compress._Operators``) by means of torch operators."""

    # The public functions have made the checks that `check` asks for.

    @staticmethod
    def paged_prefill(
        rid: _T, req_to_token: _T, full_to_state: _T, seq: _T, extend: _T, compress: _O, write: _O, num_q: int,
        ratio: int, page: int, ring: int, req_ring: bool, pad: int | None, graph: bool,
    ) -> Any:  # fmt: skip
        tables = (rid, req_to_token, full_to_state, seq, extend)
        options = {
            "num_q_tokens": num_q, "compress_ratio": ratio, "swa_page_size": page, "ring_size": ring,
            "use_req_ring": req_ring, "use_cuda_graph": graph, "write_pad": pad, "check": False,
        }  # fmt: skip
        if compress is None:
            return torch.ops.hotplan.plan_compress_prefill(*tables, **options)
        return torch.ops.hotplan.plan_compress_prefill_out(*tables, **options, compress=compress, write=write)

    @staticmethod
    def paged_prefill_pair(
        rid: _T, req_to_token: _T, full_to_state: _T, seq: _T, extend: _T, c0: _O, w0: _O, c1: _O, w1: _O, num_q: int,
        page: int, req_ring: bool, ratio0: int, ring0: int, pad0: int | None, ratio1: int, ring1: int, pad1: int | None,
        graph: bool,
    ) -> Any:  # fmt: skip
        tables = (rid, req_to_token, full_to_state, seq, extend)
        options = {
            "num_q_tokens": num_q, "swa_page_size": page, "ratios": [ratio0, ratio1], "ring_sizes": [ring0, ring1],
            "use_req_ring": req_ring, "use_cuda_graph": graph, "write_pad": pad0, "write_pad_1": pad1, "check": False,
        }  # fmt: skip
        if c0 is None:
            return torch.ops.hotplan.plan_step_prefill(*tables, **options)
        return torch.ops.hotplan.plan_step_prefill_out(
            *tables, **options, compress=c0, write=w0, compress_1=c1, write_1=w1
        )

    @staticmethod
    def paged_decode(
        rid: _T, req_to_token: _T, full_to_state: _T, seq: _T, out: _O, ratio: int, page: int, ring: int,
        req_ring: bool,
    ) -> Any:  # fmt: skip
        tables = (rid, req_to_token, full_to_state, seq)
        options = {
            "compress_ratio": ratio, "swa_page_size": page, "ring_size": ring, "use_req_ring": req_ring, "check": False
        }  # fmt: skip
        if out is None:
            return torch.ops.hotplan.plan_compress_decode(*tables, **options)
        return torch.ops.hotplan.plan_compress_decode_out(*tables, **options, plan=out)

    @staticmethod
    def paged_decode_pair(
        rid: _T, req_to_token: _T, full_to_state: _T, seq: _T, d0: _O, d1: _O, page: int, req_ring: bool, ratio0: int,
        ring0: int, ratio1: int, ring1: int,
    ) -> Any:  # fmt: skip
        tables = (rid, req_to_token, full_to_state, seq)
        options = {
            "swa_page_size": page, "ratios": [ratio0, ratio1], "ring_sizes": [ring0, ring1],
            "use_req_ring": req_ring, "check": False,
        }  # fmt: skip
        if d0 is None:
            return torch.ops.hotplan.plan_step_decode(*tables, **options)
        return torch.ops.hotplan.plan_step_decode_out(*tables, **options, plan=d0, plan_1=d1)

    @staticmethod
    def legacy_prefill(
        rid: _T, seq: _T, extend: _T, compress: _O, write: _O, num_q: int, ratio: int, graph: bool,
    ) -> Any:  # fmt: skip
        options = {"num_q_tokens": num_q, "compress_ratio": ratio, "use_cuda_graph": graph, "check": False}
        if compress is None:
            return torch.ops.hotplan.plan_compress_prefill_legacy(rid, seq, extend, **options)
        return torch.ops.hotplan.plan_compress_prefill_legacy_out(
            rid, seq, extend, **options, compress=compress, write=write
        )

    @staticmethod
    def legacy_decode(rid: _T, seq: _T, out: _O, ratio: int) -> Any:
        if out is None:
            return torch.ops.hotplan.plan_compress_decode_legacy(rid, seq, compress_ratio=ratio, check=False)
        return torch.ops.hotplan.plan_compress_decode_legacy_out(rid, seq, compress_ratio=ratio, check=False, plan=out)

    @staticmethod
    def online_prefill(
        rid: _T, seq: _T, extend: _T, compress: _O, write: _O, num_q: int, offset: int, graph: bool,
    ) -> Any:  # fmt: skip
        options = {"num_q_tokens": num_q, "state_slot_offset": offset, "use_cuda_graph": graph, "check": False}
        if compress is None:
            return torch.ops.hotplan.plan_online_prefill(rid, seq, extend, **options)
        return torch.ops.hotplan.plan_online_prefill_out(rid, seq, extend, **options, compress=compress, write=write)

    @staticmethod
    def online_decode(rid: _T, seq: _T, out: _O, offset: int) -> Any:
        if out is None:
            return torch.ops.hotplan.plan_online_decode(rid, seq, state_slot_offset=offset, check=False)
        return torch.ops.hotplan.plan_online_decode_out(rid, seq, state_slot_offset=offset, check=False, plan=out)

    @staticmethod
    def online_verify(
        rid: _T, prefix: _T, active_tensor: _O, compress: _O, write: _O, active: int, drafts: int, offset: int,
    ) -> Any:  # fmt: skip
        options = {
            "num_draft_tokens": drafts, "state_slot_offset": offset, "active_batch_size": active,
            "active_batch_tensor": active_tensor,
        }  # fmt: skip
        if compress is None:
            return torch.ops.hotplan.plan_online_verify(rid, prefix, **options)
        return torch.ops.hotplan.plan_online_verify_out(rid, prefix, **options, compress=compress, write=write)

    @staticmethod
    def check_lengths(seq: _T, extend: _O, num_q: int) -> None:
        torch.ops.hotplan.check_lengths(seq, extend, num_q)

    @staticmethod
    def item(plans: Sequence[_T], index: int) -> _T:
        return plans[index]


# ----------------------------------------------------------------------------------------------------
# HiSparse, vLLM's addressing


_IDS = "Tensor hot_block_table, Tensor global_indices"
_STATE = (
    "Tensor(d!) device_global_indices, Tensor(l!) lru_slots, Tensor? request_state_indices=None, "
    "int? region_stride=None, int? max_union_rows=None, Tensor(m!)? miss_mask=None, Tensor(s!)? stats=None, "
    "Tensor(t!)? attention_indices=None, int attention_block_stride=0, Tensor? request_ids=None, "
    "Tensor? source_block_table=None, int source_block_size=0, Tensor(r!)? resolved_global_indices=None, "
    "Tensor(v!)? valid_counts=None"
)
_SWAPS = (
    "Tensor(x!)? swap_host_physical_rows=None, Tensor(y!)? swap_device_physical_rows=None, Tensor(z!)? swap_counts=None"
)
_RESIDENT = "Tensor? resident_block_table=None, int resident_block_size=0, int resident_null_block=0"


def _plan_swap_in_out(plan: torch.Tensor, counts: torch.Tensor, hot_indices: torch.Tensor, **given: Any) -> None:
    hisparse.plan_swap_in(out=(plan, counts, hot_indices), **given)


def _swap_plan(given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = given["global_indices"]
    rows, columns = ids.shape
    return (
        ids.new_empty((rows, columns, 16), dtype=torch.uint8),
        ids.new_empty((rows,), dtype=torch.int32),
        ids.new_empty((rows, columns), dtype=torch.int32),
    )


def _plan_swap_in(**given: Any) -> tuple[torch.Tensor, ...]:
    out = _swap_plan(given)
    hisparse.plan_swap_in(out=out, **given)
    if out[0].shape[1] == 0:
        out[1].zero_()  # no kernel ran
    return out


for _name, _hot_cache, _function in (
    ("resolve_residency", "Tensor hot_cache", hisparse.resolve_residency),
    ("swap_in", "Tensor(c!) hot_cache", hisparse.swap_in),
):
    _define(
        f"{_name}(Tensor host_cache, {_hot_cache}, {_IDS}, Tensor(h!) hot_indices, {_STATE}, {_SWAPS}, {_RESIDENT})"
        " -> ()",
        _function,
        _nothing,
    )
_PLANNED = f"Tensor host_cache, Tensor hot_cache, {_IDS}, {_STATE}, {_RESIDENT}"
_define(f"plan_swap_in({_PLANNED}) -> (Tensor, Tensor, Tensor)", _plan_swap_in, lambda **given: _swap_plan(given))
_define(
    f"plan_swap_in_out({_PLANNED}, *, Tensor(x!) plan, Tensor(y!) counts, Tensor(z!) hot_indices) -> ()",
    _plan_swap_in_out,
    _nothing,
)
_define(
    "gather_plan(Tensor host_cache, Tensor(a!) hot_cache, Tensor global_indices, Tensor hot_indices, Tensor miss_mask, "
    "Tensor? request_state_indices=None, Tensor(b!)? attention_indices=None, int attention_block_stride=0) -> ()",
    hisparse.gather_plan,
    _nothing,
)
_define(
    "gather_compact(Tensor host_cache, Tensor(a!) hot_cache, Tensor miss_global_indices, Tensor miss_hot_indices, "
    "Tensor miss_counts) -> ()",
    hisparse.gather_compact,
    _nothing,
)
_define(
    "gather_planned(Tensor host_cache, Tensor(a!) hot_cache, Tensor plan, Tensor counts) -> ()",
    hisparse.gather_planned,
    _nothing,
)
_define(
    "invalidate_written_slots(Tensor(a!) device_global_indices, Tensor request_state_indices, Tensor req_id_per_token, "
    "Tensor written_slots) -> ()",
    hisparse.invalidate_written_slots,
    _nothing,
)


class _TracedResidency:
    """``hotplan.hisparse.residency._Operators`` by means of torch operators, whose arguments have the same order."""

    resolve_residency = torch.ops.hotplan.resolve_residency
    swap_in = torch.ops.hotplan.swap_in
    gather_plan = torch.ops.hotplan.gather_plan
    gather_compact = torch.ops.hotplan.gather_compact
    gather_planned = torch.ops.hotplan.gather_planned
    invalidate_written_slots = torch.ops.hotplan.invalidate_written_slots

    @staticmethod
    def check_unions(*arguments: Any) -> None:
        """HOTPLAN_CHECK is looked at again when the graph runs: the operator calls the public function."""

    @staticmethod
    def plan_swap_in(*arguments: Any) -> Any:
        *given, plan, counts, hot_indices = arguments
        if plan is None:
            return torch.ops.hotplan.plan_swap_in(*given)
        return torch.ops.hotplan.plan_swap_in_out(*given, plan=plan, counts=counts, hot_indices=hot_indices)


# ----------------------------------------------------------------------------------------------------
# HiSparse, SGLang's addressing


_STEP = (
    "Tensor top_k_tokens, Tensor(a!) device_buffer_tokens, Tensor host_cache_locs, Tensor device_buffer_locs, "
    "Tensor host_cache, Tensor(b!) device_buffer, Tensor(c!) top_k_device_locs, Tensor req_pool_indices, "
    "Tensor seq_lens, "
)
_MISSES = "Tensor(x!)? miss_src=None, Tensor(y!)? miss_dst=None, Tensor(z!)? miss_count=None"
_LINEAR = (
    f"{_STEP}Tensor(d!) lru_slots, int item_size_bytes, int num_top_k, int hot_buffer_size, int page_size=1, "
    f"int block_size=256, Tensor? num_real_reqs=None, {_MISSES}, bool skip_io=False"
)


def _load_spec(
    cache_policy: torch.Tensor, scratch_locs: torch.Tensor, scratch_state: torch.Tensor, **given: Any
) -> None:
    state = hisparse.HiSparseSpecState(scratch_state, cache_policy, scratch_locs, scratch_state)
    hisparse.load_cache_to_device_buffer_spec_mla(state=state, **given)


def _translated(mapping: torch.Tensor, locations: torch.Tensor) -> torch.Tensor:
    dtype = torch.promote_types(mapping.dtype, locations.dtype)
    return locations.new_empty(locations.shape, dtype=dtype)


_define(f"load_cache_to_device_buffer_mla({_LINEAR}) -> ()", hisparse.load_cache_to_device_buffer_mla, _nothing)
_define(
    f"load_cache_to_device_buffer_dsv4_mla({_LINEAR}) -> ()", hisparse.load_cache_to_device_buffer_dsv4_mla, _nothing
)
_define(
    "load_blocks_to_device_buffer_mha(Tensor top_k_blocks, Tensor(a!) device_buffer_tokens, Tensor host_cache_locs, "
    "Tensor device_buffer_locs, Tensor host_cache_k, Tensor host_cache_v, Tensor(b!) device_buffer_k, "
    "Tensor(e!) device_buffer_v, Tensor(c!) top_k_device_locs, Tensor req_pool_indices, Tensor seq_lens, "
    "Tensor(d!) lru_slots, int item_size_bytes, int hot_buffer_size, int sparse_block_size, int page_size=1, "
    "int block_size=256, Tensor? num_real_reqs=None, bool skip_io=False) -> ()",
    hisparse.load_blocks_to_device_buffer_mha,
    _nothing,
)
_define(
    f"load_cache_to_device_buffer_spec_mla(*, {_STEP}Tensor(d!) cache_policy, Tensor scratch_locs, "
    f"Tensor(e!) scratch_state, Tensor? num_real_reqs, {_MISSES}) -> ()",
    _load_spec,
    _nothing,
)
_define(
    "copy_cache_planned_mla(*, Tensor miss_src, Tensor miss_dst, Tensor miss_count, Tensor? num_real_reqs, "
    "Tensor host_cache, Tensor(a!) device_buffer, int item_size_bytes, int num_blocks=4, int block_size=1024, "
    "bool is_dsv4_layout=False, bool skip_io=False) -> ()",
    hisparse.copy_cache_planned_mla,
    _nothing,
)
_define(
    # What it writes is no argument; that it writes at all is said of the addresses, so that the call is not dropped.
    "transfer_cache_dsv4_mla(Tensor src_ptrs, Tensor(a!) dst_ptrs, Tensor src_indices, Tensor dst_indices, "
    "int block_size=1024) -> ()",
    hisparse.transfer_cache_dsv4_mla,
    _nothing,
)
_define(
    "translate_padded_hisparse_locations(Tensor mapping, Tensor locations) -> Tensor",
    hisparse.translate_padded_hisparse_locations,
    _translated,
)


class _TracedDeviceBuffer:
    """``hotplan.hisparse.device_buffer._Operators`` by means of torch operators."""

    @staticmethod
    def load(blocks: bool, dsv4: bool, item_bytes: int, *arguments: Any) -> Any:
        if blocks:
            (
                host_k, host_v, device_k, device_v, top_k, block_tokens, tokens, host_locs, device_locs, out, rid, seq,
                lru, hot, page, block, real, _, _, _, skip_io,
            ) = arguments  # fmt: skip
            return torch.ops.hotplan.load_blocks_to_device_buffer_mha(
                top_k, tokens, host_locs, device_locs, host_k, host_v, device_k, device_v, out, rid, seq, lru,
                item_bytes, hot, block_tokens, page, block, real, skip_io,
            )  # fmt: skip
        (
            host, device, top_k, num_top_k, tokens, host_locs, device_locs, out, rid, seq, lru, hot, page, block, real,
            src, dst, count, skip_io,
        ) = arguments  # fmt: skip
        layout = "dsv4_mla" if dsv4 else "mla"
        return getattr(torch.ops.hotplan, f"load_cache_to_device_buffer_{layout}")(
            top_k, tokens, host_locs, device_locs, host, device, out, rid, seq, lru, item_bytes, num_top_k, hot, page,
            block, real, src, dst, count, skip_io,
        )  # fmt: skip

    @staticmethod
    def load_spec(
        host: _T, device: _T, top_k: _T, tokens: _T, host_locs: _T, device_locs: _T, out: _T, rid: _T, seq: _T,
        policy: _T, scratch_locs: _T, scratch_state: _T, real: _O, src: _O, dst: _O, count: _O,
    ) -> None:  # fmt: skip
        torch.ops.hotplan.load_cache_to_device_buffer_spec_mla(
            top_k_tokens=top_k, device_buffer_tokens=tokens, host_cache_locs=host_locs, device_buffer_locs=device_locs,
            host_cache=host, device_buffer=device, top_k_device_locs=out, req_pool_indices=rid, seq_lens=seq,
            cache_policy=policy, scratch_locs=scratch_locs, scratch_state=scratch_state, num_real_reqs=real,
            miss_src=src, miss_dst=dst, miss_count=count,
        )  # fmt: skip

    @staticmethod
    def copy_planned(
        dsv4: bool, item_bytes: int, host: _T, device: _T, src: _T, dst: _T, count: _T, real: _O, num_blocks: int,
        block: int, skip_io: bool,
    ) -> None:  # fmt: skip
        torch.ops.hotplan.copy_cache_planned_mla(
            miss_src=src, miss_dst=dst, miss_count=count, num_real_reqs=real, host_cache=host, device_buffer=device,
            item_size_bytes=item_bytes, num_blocks=num_blocks, block_size=block, is_dsv4_layout=dsv4, skip_io=skip_io,
        )  # fmt: skip

    transfer = torch.ops.hotplan.transfer_cache_dsv4_mla
    translate = torch.ops.hotplan.translate_padded_hisparse_locations


_TRACED = {
    "hotplan.compress": _TracedCompress,
    "hotplan.hisparse.residency": _TracedResidency,
    "hotplan.hisparse.device_buffer": _TracedDeviceBuffer,
}


def traced(module: str) -> Any:
    """What stands in for the operators of a module of public functions while its caller is traced."""
    return _TRACED[module]
