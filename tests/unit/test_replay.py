"""The replay room: traces, the scheduler's honesty, and that the checker notices what it is there for."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hotplan
from hotplan import reference
from hotplan.replay import report
from hotplan.replay.prefix import PrefixCache
from hotplan.replay.runner import Replay
from hotplan.replay.scheduler import Scheduler
from hotplan.replay.settings import CostModel, Settings
from hotplan.replay.steps import PlanBuilder, padded_size
from hotplan.replay.trace import BLOCK_TOKENS, TraceError, TraceRecord, generate_trace, read_trace, write_trace
from hotplan.replay.verify import CheckError, TokenIds

GOOD = {"timestamp": 5, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}


# -- traces ------------------------------------------------------------------------------------------------------------


def write_lines(path: Path, *lines: object) -> Path:
    path.write_bytes(b"".join((x if isinstance(x, bytes) else json.dumps(x).encode()) + b"\n" for x in lines))
    return path


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (b"{", "not JSON: Expecting property name enclosed in double quotes at column 2"),
        (b"\xff{}", "not UTF-8: invalid start byte at byte 0"),
        (b"[" * 100_000, "brackets are nested too deeply"),
        ([1, 2], "expected an object, got [1, 2]"),
        ({"timestamp": 6, "hash_ids": []}, "missing input_length, output_length"),
        (GOOD | {"timestamp": "6"}, 'timestamp: expected milliseconds >= 0, got "6"'),
        (GOOD | {"timestamp": -1}, "timestamp: expected milliseconds >= 0, got -1"),
        (GOOD | {"timestamp": float("nan")}, "timestamp: expected milliseconds >= 0, got NaN"),
        (GOOD | {"timestamp": True}, "timestamp: expected milliseconds >= 0, got true"),
        (GOOD | {"timestamp": 4}, "timestamp: expected at least 5 as before, got 4"),
        (GOOD | {"input_length": 0}, "input_length: expected an integer in 1..2147483647, got 0"),
        (GOOD | {"input_length": 600.0}, "input_length: expected an integer in 1..2147483647, got 600.0"),
        (GOOD | {"output_length": 0}, "output_length: expected an integer in 1..2147483647, got 0"),
        (GOOD | {"output_length": 2**31 - 1}, "input_length + output_length: expected at most 2147483647"),
        (GOOD | {"hash_ids": "12"}, 'hash_ids: expected a list of integers, got "12"'),
        (GOOD | {"hash_ids": [1, None]}, "hash_ids: expected a list of integers, got [1, null]"),
        (GOOD | {"hash_ids": [1]}, "hash_ids: expected 2 ids (one per 512 of 600 prompt tokens), got 1"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: object, fault: str) -> None:
    path = write_lines(tmp_path / "t.jsonl", GOOD, b"", line)
    with pytest.raises(TraceError) as error:
        read_trace(path)
    assert str(error.value).startswith(f"{path}:3: ")
    assert fault in str(error.value)
    assert len(read_trace(path, limit=1)) == 1  # lines beyond the limit are not read


def test_an_empty_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no requests in 2 lines"):
        read_trace(write_lines(tmp_path / "t.jsonl", b"", b"  "))
    with pytest.raises(FileNotFoundError):
        read_trace(tmp_path / "none.jsonl")


def test_a_generated_trace_is_one_that_can_be_read(tmp_path: Path) -> None:
    records = generate_trace(40, seed=3)
    assert records == generate_trace(40, seed=3) != generate_trace(40, seed=4)
    write_trace(tmp_path / "t.jsonl", records)
    assert read_trace(tmp_path / "t.jsonl") == records
    shared = sum(records[0].hash_ids[0] == r.hash_ids[0] for r in records)
    assert shared == 40  # the system prompt
    assert len({r.hash_ids[:2] for r in records}) < 35  # turns of one conversation
    with pytest.raises(ValueError, match="max_input: expected at least 512"):
        generate_trace(1, max_input=511)
    with pytest.raises(ValueError, match="requests: expected at least 1, got 0"):
        generate_trace(0)


# -- the scheduler -----------------------------------------------------------------------------------------------------


@st.composite
def traces(draw: st.DrawFn) -> list[TraceRecord]:
    """A few requests out of a few conversations, so that prefixes are shared, extended and computed twice at once."""
    now = 0.0
    records = []
    for i in range(draw(st.integers(1, 8))):
        now += draw(st.sampled_from([0.0, 0.0, 1.0, 50.0, 1000.0]))
        length = draw(st.one_of(st.integers(1, 2100), st.sampled_from([511, 512, 513, 1024, 1025, 1536])))
        conversation = draw(st.integers(0, 2))
        common = draw(st.integers(0, 4))  # blocks taken from the conversation
        ids = [conversation * 100 + k if k < common else 1000 + i * 10 + k for k in range(-(-length // BLOCK_TOKENS))]
        records.append(TraceRecord(now, length, draw(st.integers(1, 24)), tuple(ids)))
    return records


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[TraceRecord], Settings]:
    trace = draw(traces())
    drafts = draw(st.sampled_from([0, 0, 1, 3, 9]))
    page = draw(st.sampled_from([256, 512] if drafts else [128, 256, 512]))
    running = draw(st.integers(1, 5))
    budget = draw(st.sampled_from([64, 100, 700, 4096]))
    window = draw(st.sampled_from([8, 128, 130, 600]))
    cache = draw(st.sampled_from([True, True, False]))
    longest = max(r.input_length + r.output_length for r in trace) + drafts
    # From just enough for the longest request (evictions, retractions) to plenty.
    slots = (-(-longest // page) + 2 + draw(st.sampled_from([0, 1, 5, 60]))) * page
    least_state = -(-budget // page) + -(-window // page) + 3 + 2 * (drafts + 1)
    state = (least_state + draw(st.sampled_from([0, 3, 60]))) * page
    return trace, Settings(
        token_budget=budget,
        max_running=running,
        page_size=page,
        slots=slots,
        state_slots=state,
        window=window,
        draft_tokens=drafts,
        accept_rate=draw(st.sampled_from([0.0, 0.5, 1.0])),
        mixed=draw(st.booleans()) and budget > running * (drafts + 1),
        pad_decode=draw(st.booleans()),
        prefix_cache=cache,
        req_ring=not cache and draw(st.booleans()),
        cost=CostModel(1.0, draw(st.sampled_from([0.0, 0.1]))),
    )


QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)


@QUICK
@given(cases())
def test_every_token_is_computed_once_in_a_slot_of_its_own(case: tuple[list[TraceRecord], Settings]) -> None:
    """Counted here from the steps and the tables alone, without the checker."""
    trace, options = case
    scheduler = Scheduler(trace, options)
    table = scheduler.tables.host_req_to_token
    state = scheduler.tables.host_full_to_state
    kept: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    admission_of: dict[int, int] = {}
    while (step := scheduler.next_step()) is not None:
        assert 0 < step.tokens <= max(options.token_budget, options.max_running * options.step_tokens)
        assert 0 < len(step.requests) <= options.max_running
        assert len(set(step.rows.tolist())) == len(step.rows)
        assert step.rows.min() > 0  # row 0 is padding's
        written: set[int] = set()
        for request, row, prefix, extend, accepted in zip(
            step.requests,
            step.rows.tolist(),
            step.prefix.tolist(),
            step.extend.tolist(),
            step.accepted.tolist(),
            strict=True,
        ):
            slots = table[row, prefix : prefix + extend].tolist()
            assert min(slots) >= options.page_size  # page 0 is padding's
            assert written.isdisjoint(slots)
            written.update(slots)
            # What the rules look up, the newest tokens of the prefix included, has a live SWA slot.
            reach = table[row, max(prefix - options.window, 0) : prefix + extend].long()
            live = state[reach]
            assert int(live.min()) >= options.page_size
            assert len(set(live.tolist())) == len(live)
            kept[request.index, request.admissions].append((prefix, prefix + accepted))
            admission_of[request.index] = request.admissions
        # Nobody else reaches a slot that is written in this step.
        for other in scheduler.running:
            own = {int(r) for r, q in zip(step.rows, step.requests, strict=True) if q is other}
            if not own:
                reached = table[other.row, : other.computed].tolist()
                assert written.isdisjoint(reached)
        scheduler.commit(step)
        scheduler.audit()
    assert scheduler.counters.finished == len(trace)
    assert scheduler.counters.generated == sum(r.output_length for r in trace)
    for index, record in enumerate(sorted(trace, key=lambda r: r.timestamp)):
        last = admission_of[index]
        for admission in range(1, last + 1):
            spans = kept[index, admission]
            assert not spans or spans[0][0] % BLOCK_TOKENS == 0
            assert all(a[1] == b[0] for a, b in pairwise(spans))
        # The token generated last is never computed.
        assert kept[index, last][-1][1] == record.input_length + record.output_length - 1
    assert not scheduler.running
    assert not scheduler.waiting
    scheduler.drain()
    # Nothing but padding's page has SWA slots left.
    assert (state >= 0).sum() == options.page_size


@QUICK
@given(cases())
def test_plans_of_random_traces_pass_the_check(case: tuple[list[TraceRecord], Settings]) -> None:
    trace, options = case
    result = Replay(trace, options, check=True).run()
    assert result.counters.finished == len(trace)
    plans_per_step = {"decode": 2, "prefill": 4, "mixed": 4, "verify": 4}
    assert result.checked_plans == sum(plans_per_step[kind] for kind in result.log.kind)
    assert not {"verify"} & set(result.log.kind) or options.draft_tokens


def record(length: int, output: int, *ids: int, at: float = 0.0) -> TraceRecord:
    return TraceRecord(at, length, output, ids)


def prefixes(trace: list[TraceRecord], **options: object) -> list[int]:
    """The prefix that each request found in the cache."""
    scheduler = Scheduler(trace, Settings(**options))  # type: ignore[arg-type]
    found: dict[int, int] = {}
    while (step := scheduler.next_step()) is not None:
        for request, prefix in zip(step.requests, step.prefix.tolist(), strict=True):
            found.setdefault(request.index, prefix)
        scheduler.commit(step)
    return [found[i] for i in range(len(trace))]


def test_prefixes_are_whole_blocks_and_leave_one_token() -> None:
    trace = [
        record(1300, 2, 1, 2, 3),
        record(1300, 2, 1, 2, 3, at=1e5),  # the partial block has a hash id too, but is computed
        record(1024, 2, 1, 2, at=2e5),  # all of it is cached; its last token is computed all the same
        record(1025, 2, 1, 2, 9, at=3e5),
        record(1025, 2, 1, 8, 9, at=4e5),  # parts after one block
        record(1536, 2, 2, 2, 3, at=5e5),  # a block in another place is another block
    ]
    assert prefixes(trace) == [0, 1024, 512, 1024, 512, 0]
    assert prefixes(trace, prefix_cache=False) == [0] * 6


def test_requests_that_compute_a_block_at_once_share_it_afterwards() -> None:
    trace = [record(1100, 2, 1, 2, 3), record(1700, 2, 1, 2, 4, 5), record(1700, 1, 1, 2, 4, 6, at=1e5)]
    assert prefixes(trace) == [0, 0, 1536]


def test_least_recently_used_prefixes_go_first() -> None:
    trace = [
        record(1025, 1, 1, 2, 3),
        record(1025, 1, 4, 5, 6, at=1e5),
        record(1025, 1, 1, 2, 7, at=2e5),  # uses 1, 2 again
        record(3000, 1, *range(10, 16), at=3e5),  # 12 pages, 10 are free
        record(1025, 1, 1, 2, 8, at=4e5),
        record(1025, 1, 4, 5, 9, at=5e5),
    ]
    # Of the prefix that was not used again, the end goes.
    assert prefixes(trace, slots=18 * 256, state_slots=64 * 256) == [0, 0, 1024, 0, 1024, 512]


def test_a_prefix_without_state_is_not_continued() -> None:
    # The state of the first prompt's blocks makes room for the second one's chunks, its slots need not.
    trace = [record(1025, 1, 1, 2, 3), record(8192, 1, *range(10, 26), at=1e5), record(1025, 1, 1, 2, 4, at=2e5)]
    assert prefixes(trace, token_budget=4096, state_slots=22 * 256)[2] == 0
    assert prefixes(trace, token_budget=4096, state_slots=64 * 256)[2] == 1024


def test_requests_are_retracted_where_slots_run_out_and_still_finish() -> None:
    trace = [record(250, 400, 1), record(250, 400, 2), record(250, 400, 3)]
    result = Replay(trace, Settings(slots=6 * 256, max_running=3), check=True).run()
    assert result.counters.retractions > 0
    assert result.counters.generated == 1200


def test_arrivals_interleave_with_steps_in_virtual_time() -> None:
    trace = [record(100, 50, 1), record(100, 1, 2, at=20.0), record(100, 1, 3, at=1e6)]
    scheduler = Scheduler(trace, Settings(cost=CostModel(5.0, 0.0)))
    kinds = []
    starts = []
    while (step := scheduler.next_step()) is not None:
        kinds.append(step.kind)
        starts.append(step.start_ms)
        scheduler.commit(step)
    assert kinds[:5] == ["prefill", "decode", "decode", "decode", "prefill"]  # the second one comes at 20 ms
    assert starts[:5] == [0.0, 5.0, 10.0, 15.0, 20.0]
    assert starts[-1] == 1e6
    assert scheduler.now_ms == 1e6 + 5.0


def test_mixed_steps_take_decodes_along() -> None:
    trace = [record(100, 5, 1), record(3000, 1, *range(2, 8), at=1.0)]
    result = Replay(trace, Settings(mixed=True, token_budget=1024), check=True).run()
    assert result.log.kind == ["prefill", "mixed", "mixed", "mixed", "decode"]
    assert result.log.tokens == [100, 1024, 1024, 955, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"token_budget": 0}, "token_budget: expected 1..65536, got 0"),
        ({"token_budget": 65537}, "token_budget: expected 1..65536, got 65537"),
        ({"draft_tokens": 10}, "draft_tokens: expected 0..9, got 10"),
        ({"max_running": 0}, "max_running: expected 1..65528 at 1 tokens a step, got 0"),
        ({"max_running": 7000, "draft_tokens": 9}, "max_running: expected 1..6545 at 10 tokens a step, got 7000"),
        ({"mixed": True, "token_budget": 64}, "token_budget: expected more than 64"),
        ({"page_size": 64}, "page_size: expected one of [128, 256, 512], got 64"),
        ({"page_size": 128, "draft_tokens": 1}, "page_size: expected one of [256, 512], got 128"),
        ({"slots": 10}, "slots: expected 256..2147483647 tokens, got 10"),
        ({"window": 7}, "window: expected at least 8, got 7"),
        ({"accept_rate": 1.5}, "accept_rate: expected 0..1, got 1.5"),
        ({"req_ring": True}, "req_ring: expected prefix_cache off, got on"),
        ({"slots": 1024}, "slots: expected at least 2048 for this trace, got 1024"),
        ({"state_slots": 1024}, "state_slots: expected at least 9728 for this trace, got 1024"),
        ({"max_running": 60_000, "slots": 2**30}, "max_running: expected at most 32 GiB of tables"),
    ],
)
def test_settings_that_cannot_work_are_named(options: dict[str, int], message: str) -> None:
    big = record(1300, 150, 1, 2, 3) if "slots" in message or "state" in message else record(200_000, 1, *range(391))
    with pytest.raises(ValueError, match=re.escape(message)):
        Scheduler([big], Settings(**options))  # type: ignore[arg-type]


def test_an_empty_trace_cannot_be_replayed() -> None:
    with pytest.raises(ValueError, match="trace: expected at least one request, got none"):
        Replay([], Settings())


def test_padded_sizes() -> None:
    assert [padded_size(n) for n in (1, 2, 3, 4, 5, 8, 9, 16, 17, 64)] == [1, 2, 4, 4, 8, 8, 16, 16, 24, 64]


def test_tables_reach_a_device_that_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies that a GPU would have, here on the CPU: plans read them, the reference reads the host's."""
    trace = generate_trace(12, seed=1, max_input=4000, mean_output=12)
    served = Replay(trace, Settings(draft_tokens=2, slots=2**14, max_running=4), check=True)
    tables = served.scheduler.tables
    tables.on_host = False
    tables.req_to_token, tables.full_to_state = tables.req_to_token.clone(), tables.full_to_state.clone()
    assert served.run().counters.finished == 12
    assert torch.equal(tables.req_to_token, tables.host_req_to_token)

    other = Replay(trace, Settings(slots=2**14, max_running=4), check=True)
    other.scheduler.tables.on_host = False
    for name in ("req_to_token", "full_to_state"):
        setattr(other.scheduler.tables, name, getattr(other.scheduler.tables, name).clone())
    monkeypatch.setattr(type(tables), "flush", lambda self: None)
    with pytest.raises(CheckError, match="plan differs from the reference"):
        other.run()


# -- the checker -------------------------------------------------------------------------------------------------------

SMALL = generate_trace(10, seed=2, max_input=3000, mean_output=40)


def broken(monkeypatch: pytest.MonkeyPatch, function: str, change: object) -> None:
    """Replaces an operator and the reference alike, so that only what the plans do can give it away."""
    for module in (hotplan, reference):
        monkeypatch.setattr(module, function, change(getattr(module, function)))  # type: ignore[operator]


def test_a_changed_byte_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*args: object, **kwargs: object) -> object:
        plans = hotplan.reference.plan_step_decode(*args, **kwargs)
        plans[128][-1, 4] ^= 1
        return plans

    monkeypatch.setattr(hotplan, "plan_step_decode", wrong)
    message = r"step \d+ \(decode, .*\): c128 decode plan differs from the reference: 1 of \d+ rows, first row \d+"
    with pytest.raises(CheckError, match=message):
        Replay(SMALL, Settings(), check=True).run()


def test_missing_rows_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def shorter(*args: object, **kwargs: object) -> object:
        plans = reference.plan_step_prefill(*args, **kwargs)
        return plans | {4: plans[4]._replace(write=plans[4].write[:-1])}

    monkeypatch.setattr(hotplan, "plan_step_prefill", shorter)
    with pytest.raises(CheckError, match=r"c4 write plan differs from the reference: shape \[\d+, 8\], expected"):
        Replay(SMALL, Settings(), check=True).run()


def test_too_small_a_write_pad_is_found_though_the_reference_has_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Public report 34189: rows that the next verify step needs are not in the ring."""
    broken(monkeypatch, "plan_step_prefill", lambda f: lambda *a, **k: f(*a, **k, write_pad=4))
    message = r"verify.*the window that ends at position \d+ of row \d+ needs position \d+, the ring holds"
    with pytest.raises(CheckError, match=message):
        Replay(SMALL, Settings(draft_tokens=5, accept_rate=0.3), check=True).run()


def test_a_ring_that_is_too_short_for_the_drafts_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Settings, "ring_sizes", property(lambda self: (8, 128)))
    with pytest.raises(CheckError, match="the ring holds"):
        Replay(SMALL, Settings(draft_tokens=4, accept_rate=0.3), check=True).run()


def test_state_freed_too_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "_window_page", lambda self, computed: -(-computed // self.settings.page_size))
    with pytest.raises(CheckError, match="a token is written nowhere"):
        Replay(SMALL, Settings(prefix_cache=False), check=True).run()


def test_another_prompts_prefix_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = [record(1025, 1, 1, 2, 3), record(1025, 1, 4, 5, 6, at=1e5)]

    def any_prefix(self: PrefixCache, hash_ids: object, most: int) -> list[object]:
        nodes = sorted(self.nodes(), key=lambda node: node.key)
        return nodes[:1] if most else []

    monkeypatch.setattr(PrefixCache, "match", any_prefix)
    with pytest.raises(CheckError, match="request 1: its cached prefix holds another prompt's tokens"):
        Replay(trace, Settings(), check=True).run()


def test_a_page_that_is_never_given_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    release = Scheduler._release
    monkeypatch.setattr(Scheduler, "_release", lambda self, request: (request.pages.pop(), release(self, request)))
    with pytest.raises(CheckError, match="after the last step: full pages: counted holders differ"):
        Replay([record(100, 9, 1)], Settings(prefix_cache=False), check=True).run()


def test_token_ids_are_shared_exactly_by_shared_prefixes() -> None:
    trace = [record(1100, 5, 1, 2, 3), record(1100, 5, 1, 2, 3), record(1100, 5, 2, 1, 3)]
    scheduler = Scheduler(trace, Settings())
    step = scheduler.next_step()
    assert step is not None
    ids = TokenIds(1200, 65, scheduler.settings)
    ids.place(step.requests)
    a, b, c = (ids.of(np.full(1105, row), np.arange(1105)) for row in step.rows)
    assert (a[:1024] == b[:1024]).all()
    assert not set(a[1024:]) & set(b)
    assert not set(a) & set(c)
    assert len(set(a)) == 1105


# -- the runner and the report -----------------------------------------------------------------------------------------


def test_observers_see_every_step_and_the_log_adds_up() -> None:
    seen = []
    served = Replay(SMALL, Settings(draft_tokens=2, slots=2**14))
    result = served.run(observers=[lambda step, built: seen.append((step.kind, step.tokens, built.rows))])
    assert seen == list(zip(result.log.kind, result.log.tokens, result.log.rows, strict=True))
    assert sum(result.log.tokens) == (
        result.counters.prompt
        - result.counters.prefix_hits
        + result.counters.generated
        - result.counters.finished  # a prompt's last token gives the first generated one
        + result.counters.rejected
    )
    assert all(call <= ready for call, ready in zip(result.log.call_us, result.log.ready_us, strict=True))
    summary = json.loads(json.dumps(report.as_dict(result, "small")))
    assert summary["finished"] == 10
    assert summary["steps"] == sum(kind["steps"] for kind in summary["kinds"].values())
    assert summary["tokens"] == sum(kind["tokens"] for kind in summary["kinds"].values())
    assert summary["checked_plans"] is None
    assert 0 < summary["prefix_hit_rate"] < 1
    assert summary["slots"]["full"]["peak"] <= summary["slots"]["full"]["peak_with_cache"] <= 2**14


def test_seeds_repeat_a_replay() -> None:
    def tokens(seed: int) -> list[int]:
        options = Settings(draft_tokens=3, accept_rate=0.5, seed=seed)
        scheduler = Scheduler(SMALL, options)
        accepted = []
        while (step := scheduler.next_step()) is not None:
            accepted += step.accepted.tolist()
            scheduler.commit(step)
        return accepted

    assert tokens(1) == tokens(1) != tokens(2)


def test_an_interrupt_gives_the_result_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    build = PlanBuilder.build

    def interrupted(self: PlanBuilder, step: object) -> object:
        if step.index == 7:  # type: ignore[attr-defined]
            raise KeyboardInterrupt
        return build(self, step)  # type: ignore[arg-type]

    monkeypatch.setattr(PlanBuilder, "build", interrupted)
    result = Replay(SMALL, Settings()).run()
    assert result.interrupted
    assert len(result.log) == 7
    assert report.as_dict(result)["interrupted"] is True
