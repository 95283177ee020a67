"""HiSparse in the replay: locality, recordings, hot buffers over the replay's slots, and that the checker notices."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from hotplan import hisparse
from hotplan.cli import main as cli
from hotplan.hot_buffer import HotBuffer
from hotplan.reference import hisparse as reference
from hotplan.replay import device as replay_device
from hotplan.replay import residency_report
from hotplan.replay.host_rows import HostRows
from hotplan.replay.locality import Locality, LocalityModel, Recording, RecordingError, inclusion
from hotplan.replay.residency import HiSparse, HiSparseSettings, spread
from hotplan.replay.runner import Replay, ReplayResult
from hotplan.replay.settings import Settings
from hotplan.replay.trace import TraceRecord, generate_trace, write_trace
from hotplan.replay.verify import CheckError

CPU = torch.device("cpu")
SMALL = generate_trace(8, seed=2, max_input=1500, mean_output=60)
FEW_SLOTS = 2**14  # so that pages are used again


# -- the model of locality ---------------------------------------------------------------------------------------------


@st.composite
def localities(draw: st.DrawFn) -> Locality:
    recent = draw(st.sampled_from([0.0, 0.25, 0.5, 1.0]))
    return Locality(
        top_k=draw(st.sampled_from([1, 2, 7, 64])),
        recent=recent,
        uniform=draw(st.sampled_from([0.0, 0.05, 1.0])) * (1 - recent),
        heavy_set=draw(st.sampled_from([1.0, 2.0, 9.5])),
        drift=draw(st.sampled_from([0.0, 0.01, 1.0])),
        seed=draw(st.integers(0, 3)),
    )


@settings(max_examples=40, deadline=None, derandomize=True)
@given(localities(), st.integers(0, 400), st.lists(st.integers(-9, 12), max_size=12))
def test_ids_are_exactly_top_k_different_tokens_of_the_context(
    locality: Locality, position: int, moves: list[int]
) -> None:
    """Whatever the shares, also where undone drafts move the position back."""
    model = LocalityModel(locality)
    for move in [0, *moves]:
        position = max(position + move, 0)
        ids = model.ids(0, position)
        count = min(position + 1, locality.top_k)
        assert ids.dtype == np.int32
        assert ids.shape == (locality.top_k,)
        assert (ids[count:] == -1).all()
        assert len(set(ids[:count].tolist())) == count
        assert 0 <= ids[:count].min() <= ids[:count].max() <= position
        newest = range(max(position + 1 - locality.recent_ids, 0), position + 1)
        assert set(newest) <= set(ids.tolist())


def overlaps(**options: Any) -> float:
    """The share of ids that a step has in common with the one before, in a context of 3000 tokens and more."""
    model = LocalityModel(Locality(top_k=200, **options))
    steps = [set(model.ids(5, position).tolist()) for position in range(3000, 3040)]
    return float(np.mean([len(a & b) / 200 for a, b in pairwise(steps)]))


def test_each_part_of_the_model_does_what_it_says() -> None:
    # The whole set in every step, nothing replaced, nothing uniform: only the newest token comes and the oldest goes.
    assert overlaps(uniform=0.0, heavy_set=1.0, drift=0.0) == pytest.approx(199 / 200)
    # A tenth of the 150 heavy hitters is replaced in a step (less what is drawn from the set itself).
    assert 1 - 0.1 * 150 / 200 - 0.01 < overlaps(uniform=0.0, heavy_set=1.0, drift=0.1) < 1 - 0.085 * 150 / 200
    # Uniform ids hardly ever come back: 40 of 3000.
    assert overlaps(uniform=0.2, heavy_set=1.0, drift=0.0) == pytest.approx(0.8, abs=0.01)
    # The larger the set, the less two steps take the same out of it.
    larger = [overlaps(uniform=0.0, heavy_set=size, drift=0.0) for size in (1.0, 2.0, 4.0)]
    assert larger[0] > larger[1] + 0.1 > larger[2] + 0.2


def test_popular_heavy_hitters_are_picked_more_often() -> None:
    model = LocalityModel(Locality(top_k=200, recent=0.0, uniform=0.0, heavy_set=4.0, drift=0.0))
    counts = np.zeros(6000)
    for position in range(5000, 5300):
        counts[model.ids(0, position)] += 1
    heavy = np.sort(counts[counts > 0])[::-1]
    assert len(heavy) == 800
    np.testing.assert_allclose(heavy / 300, inclusion(800, 200), atol=0.12)


@pytest.mark.parametrize(("size", "chosen"), [(1, 1), (10, 3), (10, 9), (10, 10), (2868, 1434), (5000, 1)])
def test_chances_of_the_heavy_set(size: int, chosen: int) -> None:
    chances = inclusion(size, chosen)
    assert chances.sum() == pytest.approx(chosen)
    assert (chances <= 1 + 1e-12).all()
    assert (np.diff(chances) <= 1e-12).all()


def test_ids_depend_on_seed_and_request_alone() -> None:
    def ids(seed: int, request: int, others: bool) -> list[list[int]]:
        model = LocalityModel(Locality(top_k=32, seed=seed))
        found = []
        for position in range(500, 510):
            if others:
                model.ids(request + 1, position)
            found.append(model.ids(request, position).tolist())
        return found

    assert ids(0, 3, False) == ids(0, 3, True)
    assert ids(0, 3, False) != ids(1, 3, False)
    assert ids(0, 3, False) != ids(0, 4, False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 0}, "top_k: expected 1..32768, got 0"),
        ({"recent": -0.1}, "recent: expected 0..1, got -0.1"),
        ({"recent": float("nan")}, "recent: expected 0..1, got nan"),
        ({"recent": 0.7, "uniform": 0.5}, "uniform: expected at most 0.3 with recent=0.7, got 0.5"),
        ({"drift": 2.0}, "drift: expected 0..1, got 2.0"),
        ({"heavy_set": 0.5}, "heavy_set: expected 1..1000, got 0.5"),
    ],
)
def test_models_that_cannot_be(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Locality(**options)  # type: ignore[arg-type]


# -- recordings --------------------------------------------------------------------------------------------------------

TWO = [TraceRecord(0.0, 10, 4, (1,)), TraceRecord(1.0, 20, 1, (2,))]
GOOD: dict[str, Any] = {"request": [0, 0], "step": [0, 2], "ids": [[0, 10, -1], [12, 3, 5]]}


def save(path: Path, **arrays: Any) -> Path:
    np.savez(path, **{name: np.asarray(value) for name, value in arrays.items()})
    return path


def test_a_recording_gives_the_ids_of_its_steps(tmp_path: Path) -> None:
    source = Recording(save(tmp_path / "r.npz", **GOOD), TWO)
    assert source.top_k == 3
    assert [source.follows(request) for request in (0, 1)] == [True, False]
    np.testing.assert_array_equal(source.ids(0, 10), np.array([0, 10, -1], dtype=np.int32))
    assert source.ids(0, 12).dtype == np.int32
    assert source.ids(0, 11) is None
    assert source.ids(1, 20) is None
    assert source.describe() == "r.npz: 2 rows of 1 requests"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": None}, "missing ids"),
        ({"request": None, "step": None}, "missing request, step"),
        ({"request": [0.0, 0.0]}, "request: expected integers, got float64"),
        ({"step": [0]}, "expected request [N], step [N] and ids [N, K], got shapes {'request': [2], 'step': [1]"),
        ({"ids": [1, 2]}, "expected request [N], step [N] and ids [N, K]"),
        ({"ids": np.zeros((2, 0), dtype=np.int32)}, "expected request [N], step [N] and ids [N, K]"),
        ({"request": [0, 2]}, "row 1: request: expected 0..1, got 2"),
        ({"request": [-1, 0]}, "row 0: request: expected 0..1, got -1"),
        ({"step": [0, 3]}, "row 1: step: expected 0..2 for request 0, got 3"),
        ({"request": [0, 1]}, "row 1: step: expected 0..-1 for request 1, got 2"),
        ({"step": [2, 2]}, "row 1: request 0, step 2 is in row 0 already"),
        ({"ids": [[0, 11, -1], [1, 2, 3]]}, "row 0: ids: expected -1..10 (request 0, step 0), got 11"),
        ({"ids": [[0, 1, -1], [1, -2, 3]]}, "row 1: ids: expected -1..12 (request 0, step 2), got -2"),
        ({"ids": np.array([[0, 2**63], [1, 2]], dtype=np.uint64)}, f"got {2**63}"),
    ],
)
def test_a_bad_recording_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    arrays = {name: value for name, value in (GOOD | change).items() if value is not None}
    path = save(tmp_path / "r.npz", **arrays)
    with pytest.raises(RecordingError) as error:
        Recording(path, TWO)
    assert str(error.value).startswith(f"{path}: ")
    assert message in str(error.value)


@pytest.mark.parametrize("content", [b"", b"nonsense", b"PK\x03\x04 nonsense"])
def test_files_that_are_no_recording(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "r.npz").write_bytes(content)
    with pytest.raises(RecordingError, match="not an .npz of plain arrays"):
        Recording(tmp_path / "r.npz", TWO)
    np.save(tmp_path / "r.npy", np.zeros(3))
    with pytest.raises(RecordingError, match="expected an .npz file, got a single array"):
        Recording(tmp_path / "r.npy", TWO)
    np.savez(tmp_path / "o.npz", request=np.array([object()]), step=np.zeros(1), ids=np.zeros((1, 1)))
    with pytest.raises(RecordingError, match="not an .npz of plain arrays"):
        Recording(tmp_path / "o.npz", TWO)


def test_drafts_may_reach_beyond_the_last_token(tmp_path: Path) -> None:
    path = save(tmp_path / "r.npz", request=[0], step=[5], ids=[[15]])
    with pytest.raises(RecordingError, match="step: expected 0..2"):
        Recording(path, TWO)
    assert Recording(path, TWO, draft_tokens=3).ids(0, 15).tolist() == [15]


# -- the host pool -----------------------------------------------------------------------------------------------------


def test_host_rows_say_whose_they_are_and_how_old() -> None:
    host = HostRows(50, 48, 2, CPU, patterned=True)
    seen = {host.pools[0][7].numpy().tobytes()}  # zeros
    for _ in range(3):
        host.write(np.array([7, 9]))
        for pool in host.pools:
            assert pool[8].sum() == 0
            for slot in (7, 9):
                row = pool[slot].numpy().tobytes()
                words = np.frombuffer(row, dtype=np.int64)
                assert row not in seen
                assert len(set(words.tolist())) == 6
                seen.add(row)
    slots = torch.tensor([9, 8])
    for layer, pool in enumerate(host.pools):
        assert torch.equal(host.expected(slots, layer), pool.view(torch.int64)[slots])
    before = host.expected(torch.tensor([7]), 1, writes_ago=1)[0]
    assert host.explain(before, 7, 1) == "the row from before the last write"
    assert host.explain(before, 7, 0) == "another row"
    assert host.explain(host.expected(torch.tensor([7]), 1, writes_ago=2)[0], 7, 1).endswith("before the last 2 writes")
    assert host.explain(torch.zeros(6, dtype=torch.int64), 9, 0) == "the row from before the last 3 writes"
    assert host.explain(torch.zeros(6, dtype=torch.int64), 8, 0) == "zeros"


# -- hot buffers beside a replay ---------------------------------------------------------------------------------------


def serve(
    server: Settings | None = None,
    options: HiSparseSettings | None = None,
    locality: Locality | None = None,
    trace: list[TraceRecord] = SMALL,
    check: bool = True,
    source: Any = None,
) -> tuple[ReplayResult, HiSparse]:
    server = server or Settings(slots=FEW_SLOTS)
    source = source or LocalityModel(locality or Locality(top_k=32))
    served = Replay(trace, server, check=False)
    observer = HiSparse(served.scheduler, trace, options or HiSparseSettings(block_size=16), source, check)
    return served.run([observer]), observer


def decode_steps(result: ReplayResult) -> int:
    return sum(kind != "prefill" for kind in result.log.kind)


@pytest.mark.parametrize(
    ("server", "options", "hot_size"),
    [
        (Settings(slots=FEW_SLOTS), HiSparseSettings(block_size=16), 64),
        (Settings(slots=FEW_SLOTS, pad_decode=False), HiSparseSettings(hot_sizes=(33,), layers_per_group=3), 33),
        (Settings(slots=FEW_SLOTS, draft_tokens=3), HiSparseSettings(block_size=64), 160),
        (
            Settings(slots=FEW_SLOTS, draft_tokens=2, mixed=True, token_budget=300, accept_rate=0.3),
            HiSparseSettings(block_size=7, pool_row_bytes=32),
            128,
        ),
    ],
)
def test_checked_replays(server: Settings, options: HiSparseSettings, hot_size: int) -> None:
    result, observer = serve(server, options)
    log = observer.log
    assert result.counters.finished == len(SMALL)
    assert len(log) == decode_steps(result)
    assert [size.hot_size for size in log.sizes] == [hot_size]
    assert sum(log.rows) == sum(result.log.of("decode", "tokens")) or server.draft_tokens
    assert log.checked_rows >= sum(log.rows)
    assert log.checked_bytes == options.layers_per_group * log.pool_row_bytes * sum(log.rows) * 32
    size = log.sizes[0]
    assert sum(size.hits) + sum(size.misses) == 32 * sum(log.rows)
    assert 0 < sum(size.cold_misses) < sum(size.misses)


def test_retracted_requests_begin_with_an_empty_hot_buffer() -> None:
    """So few slots that requests are retracted, prefilled again, and get each other's pages."""
    trace = [TraceRecord(0.0, 250, 400, (i,)) for i in range(3)]
    result, observer = serve(Settings(slots=6 * 256, max_running=3), trace=trace)
    assert result.counters.retractions > 0
    cold = np.array(observer.log.sizes[0].cold_misses)
    assert cold.sum() == 32 * (3 + result.counters.retractions)


class Remembered:
    """A source that keeps what it gave."""

    def __init__(self, source: LocalityModel) -> None:
        self._source = source
        self.top_k = source.top_k
        self.given: dict[int, list[tuple[int, list[int]]]] = {}

    def ids(self, request: int, position: int) -> np.ndarray:
        ids = self._source.ids(request, position)
        self.given.setdefault(request, []).append((position, ids.tolist()))
        return ids

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


def misses_of(steps: list[tuple[int, list[int]]], hot_size: int) -> int:
    """Misses of one request, counted over positions: a list from the least to the most recently used."""
    hot: list[int | None] = [None] * hot_size
    total = 0
    for position, ids in steps:
        wanted = [i for i in ids if i >= 0]
        hits = [i for i in hot if i in wanted]
        missing = [i for i in wanted if i not in hot]
        victims = [i for i in hot if i not in wanted]
        hot = victims[len(missing) :] + missing + hits
        hot[hot.index(position)] = None  # its row is written after the step
        total += len(missing)
    return total


def test_misses_are_those_of_a_list_of_positions() -> None:
    source = Remembered(LocalityModel(Locality(top_k=24)))
    _, observer = serve(source=source, options=HiSparseSettings(hot_sizes=(24, 48, 100)), check=False)
    for size in observer.log.sizes:
        assert sum(size.misses) == sum(misses_of(steps, size.hot_size) for steps in source.given.values())
    assert len(source.given) == sum(record.output_length > 1 for record in SMALL)


def test_larger_hot_buffers_miss_less() -> None:
    _, observer = serve(options=HiSparseSettings(hot_sizes=(512, 32, 48, 128, 64)), check=False)
    log = observer.log
    assert [size.hot_size for size in log.sizes] == [32, 48, 64, 128, 512]
    misses = [sum(size.misses) for size in log.sizes]
    assert misses == sorted(misses, reverse=True)
    assert misses[0] > 2 * misses[-1]
    # A cold start has to load everything, whatever the size.
    assert len({tuple(size.cold_misses) for size in log.sizes}) == 1
    assert residency_report.enough(log) in (128, 512)


def test_bytes_time_and_memory() -> None:
    options = HiSparseSettings(row_bytes=1152, layers_per_group=2, groups=3, pcie_gbps=50.0, block_size=64)
    assert options.step_bytes(np.array([0, 10])).tolist() == [0, 10 * 1152 * 6]
    assert options.pcie_ms(np.array([50_000])).tolist() == pytest.approx([50_000 * 1152 * 6 / 50e6])
    assert options.gpu_bytes(100) == 3 * (2 * 128 * 1152 + 6 * 100 + 4 * 2)
    _, observer = serve(options=options, check=False)
    summary = json.loads(json.dumps(residency_report.as_dict(observer.log)))
    (size,) = summary["sizes"]
    assert size["bytes_per_step"]["mean"] == pytest.approx(size["misses"] * 1152 * 6 / summary["steps"], abs=0.01)
    assert size["pcie_ms_per_step"]["max"] == pytest.approx(size["bytes_per_step"]["max"] / 50e6, abs=1e-6)
    assert size["hit_rate"] == pytest.approx(size["hits"] / (size["hits"] + size["misses"]), abs=1e-6)
    assert summary["rows"] * 32 == size["hits"] + size["misses"]
    assert summary["checked_rows"] is summary["enough"] is None


def test_following_some_requests_changes_nothing_for_them() -> None:
    sources = [Remembered(LocalityModel(Locality(top_k=24))) for _ in range(2)]
    serve(source=sources[0])
    _, some = serve(source=sources[1], options=HiSparseSettings(requests=3))
    assert some.log.followed == 3
    assert set(sources[1].given) <= {0, 1, 2}
    assert all(sources[0].given[request] == steps for request, steps in sources[1].given.items())


def test_requests_are_spread_in_groups() -> None:
    assert spread(5, 9) == spread(5, 5) == frozenset(range(5))
    assert spread(100, 3) == {0, 1, 2}
    assert sorted(spread(100, 12)) == [*range(8), *range(52, 56)]
    for total in range(1, 40):
        for wanted in range(1, total + 1):
            chosen = spread(total, wanted)
            assert len(chosen) == wanted
            assert chosen <= set(range(total))


def test_a_checked_replay_follows_what_a_minute_allows() -> None:
    trace = [TraceRecord(float(i), 5, 1000, (i,)) for i in range(64)]
    for server, sizes, expected in (
        (Settings(), (), 12),  # 25 million ids are 12 requests of 1000 tokens with 2048 ids
        (Settings(), (2048, 4096), 6),
        (Settings(draft_tokens=3, accept_rate=1.0), (), 12),
        (Settings(draft_tokens=3, accept_rate=0.0), (), 3),  # all four rows of a step for one token
    ):
        served = Replay(trace, server)
        source = LocalityModel(Locality())
        for check, followed in ((True, expected), (False, 64)):
            options = HiSparseSettings(hot_sizes=sizes, pool_row_bytes=16)
            assert HiSparse(served.scheduler, trace, options, source, check).log.followed == followed


def test_recorded_ids_are_resolved_and_gaps_are_counted(tmp_path: Path) -> None:
    trace = [TraceRecord(0.0, 600, 6, (1, 2)), TraceRecord(0.0, 300, 5, (3,))]
    steps = [(0, 0), (0, 1), (0, 3)]
    ids = [[1, 2, 3, 600], [1, 2, 3, 601], [-1, 3, 4, 603]]
    source = Recording(
        save(tmp_path / "r.npz", request=[r for r, _ in steps], step=[s for _, s in steps], ids=ids), trace
    )
    _, observer = serve(source=source, trace=trace, options=HiSparseSettings(hot_sizes=(4,)))
    log = observer.log
    assert log.followed == 1
    assert log.rows == [1, 1, 1]
    assert log.unknown_rows == 2  # steps 2 and 4
    assert log.sizes[0].hits == [0, 3, 1]
    assert log.sizes[0].misses == [4, 1, 2]
    assert log.sizes[0].cold_misses == [4, 0, 0]


@pytest.mark.parametrize(
    ("options", "server", "message"),
    [
        ({"hot_sizes": (31,)}, {}, "hot_sizes: expected 32..32768 with top_k=32, got 31"),
        ({"hot_sizes": (64, 32769)}, {}, "hot_sizes: expected 32..32768 with top_k=32, got 32769"),
        ({"hot_sizes": (64,)}, {"draft_tokens": 3}, "hot_sizes: expected 128..32768 with top_k=32 for 4 tokens a step"),
        ({"hot_sizes": (64, 64)}, {}, "hot_sizes: expected every size once, got (64, 64)"),
        ({"block_size": 0}, {}, "block_size: expected 1..32768, got 0"),
        ({"row_bytes": 650}, {}, "row_bytes: expected a multiple of 16 in 16..1048576, got 650"),
        ({"pool_row_bytes": 8}, {}, "pool_row_bytes: expected a multiple of 16 in 16..1048576, got 8"),
        ({"layers_per_group": 0}, {}, "layers_per_group: expected 1..1024, got 0"),
        ({"groups": 0}, {}, "groups: expected 1..1024, got 0"),
        ({"pcie_gbps": 0.0}, {}, "pcie_gbps: expected GB/s above 0, got 0.0"),
        ({"pcie_gbps": float("nan")}, {}, "pcie_gbps: expected GB/s above 0, got nan"),
        ({"requests": 0}, {}, "requests: expected at least 1, got 0"),
    ],
)
def test_settings_that_cannot_work_are_named(options: dict[str, Any], server: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        serve(Settings(**server), HiSparseSettings(**options))


def test_too_many_ids_for_the_largest_hot_buffer() -> None:
    message = "top_k: expected at most 3276 with 10 tokens a step, which share 32768 hot slots at most, got 4000"
    with pytest.raises(ValueError, match=message):
        serve(Settings(draft_tokens=9), locality=Locality(top_k=4000))


# -- the checker -------------------------------------------------------------------------------------------------------


def wrapped(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, change: Callable[..., Any]) -> None:
    original = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *a, **k: change(original, *a, **k))


def after(calls: int) -> Callable[[], bool]:
    """True from the call of that number on."""
    count = iter(range(10**9))
    return lambda: next(count) >= calls


def test_a_wrong_hot_row_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    late = after(20)

    def wrong(resolve: Any, *args: Any, **kwargs: Any) -> None:
        resolve(*args, **kwargs)
        if late():
            args[4][0, 5] += 1

    wrapped(monkeypatch, hisparse, "resolve_residency", wrong)
    message = r"step \d+ \(decode, .*\): hot size 64: hot_indices differs from the reference: row 0, column 5 \(request"
    with pytest.raises(CheckError, match=message):
        serve()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("swap_host_physical_rows", "swap_host_physical_rows differs from the reference: row 0, column 0"),
        ("swap_counts", "swap_counts differs from the reference: row 0"),
        ("stats", r"stats: got \[\d+, \d+\], expected"),
        ("lru_slots", "lru_slots differs from the reference after resolve_residency: state row 0, entry 3"),
    ],
)
def test_every_result_is_compared(monkeypatch: pytest.MonkeyPatch, name: str, message: str) -> None:
    def wrong(resolve: Any, *args: Any, **kwargs: Any) -> None:
        resolve(*args, **kwargs)
        if name == "lru_slots":
            args[6][0, 3] = args[6][0, 2]
        else:
            kwargs[name].view(-1)[0] += 1

    wrapped(monkeypatch, hisparse, "resolve_residency", wrong)
    with pytest.raises(CheckError, match=message):
        serve()


def test_a_missing_copy_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    late = after(30)

    def without_the_last(gather: Any, host: Any, hot: Any, rows: Any, targets: Any, counts: Any) -> None:
        gather(host, hot, rows, targets, counts - 1 if late() else counts)

    wrapped(monkeypatch, hisparse, "gather_compact", without_the_last)
    message = r"layer 0: hot row \d+ holds (another row|zeros|the row from before .*), not that of slot \d+ \(position"
    with pytest.raises(CheckError, match=message):
        serve()


def test_another_layers_row_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def first_layer(gather: Any, buffer: HotBuffer, layer: int) -> None:
        buffer._pools = [buffer._pools[0]] * buffer.layers
        gather(buffer, layer)

    wrapped(monkeypatch, HotBuffer, "gather", first_layer)
    with pytest.raises(CheckError, match="layer 1: hot row .* holds another row"):
        serve(options=HiSparseSettings(layers_per_group=2))


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_hot_row_from_before_a_write_is_found(monkeypatch: pytest.MonkeyPatch, drafts: int) -> None:
    """Nobody invalidates anything, the reference neither: only the bytes can tell."""
    for module in (hisparse, reference):
        monkeypatch.setattr(module, "invalidate_written_slots", lambda *args: None)
    message = r"row \d+, column \d+ \(request \d+, token \d+\), layer 0: hot row \d+ holds .*, not that of slot"
    with pytest.raises(CheckError, match=message) as error:
        serve(Settings(slots=FEW_SLOTS, draft_tokens=drafts))
    assert re.search("holds the row from before the last (write|2 writes)", str(error.value))


def test_an_operator_that_does_not_invalidate_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hisparse, "invalidate_written_slots", lambda *args: None)
    with pytest.raises(CheckError, match="device_global_indices differs from the reference after invalidate_written"):
        serve()


def test_what_a_request_left_behind_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def dirty(self: HotBuffer) -> int:
        request = self._free.pop()
        self.states[request].fill_(request)
        return request

    monkeypatch.setattr(HotBuffer, "admit", dirty)
    with pytest.raises(CheckError, match="hot size 64: (device_global_indices|lru_slots) differs"):
        serve()


def test_pages_that_are_not_the_requests_own_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operator and reference alike go through a wrong page table; req_to_token says otherwise."""
    for module in (hisparse, reference):

        def shifted(resolve: Any, *args: Any, **kwargs: Any) -> None:
            resolve(*args, **kwargs | {"source_block_table": kwargs["source_block_table"].roll(1, 1)})

        wrapped(monkeypatch, module, "resolve_residency", shifted)
    with pytest.raises(CheckError, match=r"slots differs from the reference: row \d+, column \d+"):
        serve(Settings(slots=FEW_SLOTS, draft_tokens=2))


def test_without_check_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hisparse, "gather_compact", lambda *args: None)
    result, observer = serve(check=False)
    assert result.counters.finished == len(SMALL)
    assert observer.log.checked_rows == observer.log.checked_bytes == 0


# -- the command -------------------------------------------------------------------------------------------------------


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli.main, ["replay", *[str(a) for a in arguments]], env={"COLUMNS": "100"})


@pytest.fixture(scope="module")
def trace_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "small.jsonl"
    write_trace(path, SMALL)
    return path


QUICK = ("--device", "cpu", "--hisparse", "--top-k", 32, "--slots", FEW_SLOTS)


def test_a_sweep_with_check_json_and_plot(trace_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    summary, picture = tmp_path / "out.json", tmp_path / "out.png"
    options = [
        "--hot-sizes",
        "32,128,64",
        "--layers-per-group",
        2,
        "--groups",
        5,
        "--row-bytes",
        576,
        "--block-size",
        32,
    ]
    result = run(trace_file, *QUICK, *options, "--check", "--json", summary, "--plot", picture)
    assert result.exit_code == 0, result.output
    for text in ("Plans by kind of step", "5 groups of 2 layers, rows of 576 bytes", "how large", "(64 bytes a row)"):
        assert text in result.output
    written = json.loads(summary.read_text())["hisparse"]
    assert [size["hot_size"] for size in written["sizes"]] == [32, 64, 128]
    rates = [size["hit_rate"] for size in written["sizes"]]
    assert rates == sorted(rates)
    assert written["sizes"][1]["gpu_bytes_per_request"] == 5 * (64 * 576 * 2 + 64 * 6 + 2 * 4)
    assert written["checked_rows"] >= 3 * written["rows"] > 0
    assert written["settings"]["pcie_gbps"] == 48.0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_model_is_set_by_options_and_seed(trace_file: Path, tmp_path: Path) -> None:
    def hits(*options: object) -> tuple[str, list[int]]:
        result = run(trace_file, *QUICK, "--json", tmp_path / "out.json", *options)
        assert result.exit_code == 0, result.output
        written = json.loads((tmp_path / "out.json").read_text())["hisparse"]
        return written["source"], [size["misses"] for size in written["sizes"]]

    source, misses = hits("--top-k-recent", 0.5, "--top-k-uniform", 0.25, "--top-k-heavy-set", 3, "--top-k-drift", 0.1)
    assert source == "model: 16 recent, 8 of 24 heavy hitters (10 % replaced a step), 8 uniform; seed 0"
    assert hits("--seed", 1)[1] == hits("--seed", 1)[1] != hits("--seed", 2)[1]
    assert hits("--top-k-uniform", 0)[1] < hits()[1] < misses


def test_recorded_ids_on_the_command_line(trace_file: Path, tmp_path: Path) -> None:
    first = SMALL[0]
    ids = np.arange(5)[None] * 100 + np.arange(first.output_length - 1)[:, None]
    path = save(tmp_path / "r.npz", request=np.zeros(len(ids), dtype=int), step=np.arange(len(ids)), ids=ids)
    arguments = (trace_file, "--device", "cpu", "--hisparse", "--slots", FEW_SLOTS, "--top-k-from", path)
    result = run(*arguments, "--check", "--hot-size", 64)
    assert result.exit_code == 0, result.output
    assert "HiSparse, top-k 5: one layer" in result.output
    assert f"r.npz: {len(ids)} rows of 1 requests" in result.output
    assert "1 of 8 requests" in result.output
    result = run(*arguments, "--top-k-drift", 0.5)
    assert result.exit_code == 2
    assert "--top-k-drift: has no effect on recorded ids (--top-k-from)" in result.output
    save(path, request=[99], step=[0], ids=[[0]])
    result = run(*arguments)
    assert result.exit_code == 1
    assert "row 0: request: expected 0..7, got 99" in result.output


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--top-k", 32], 2, "--top-k: needs --hisparse"),
        (["--hot-sizes", "64"], 2, "--hot-sizes: needs --hisparse"),
        (["--pcie-gbps", 48], 2, "--pcie-gbps: needs --hisparse"),
        (["--hisparse", "--hot-size", 64, "--hot-sizes", "64"], 2, "--hot-size, --hot-sizes: expected one of them"),
        (["--hisparse", "--hot-sizes", "64,x"], 2, "expected numbers with commas between them, got '64,x'"),
        (["--hisparse", "--hisparse-requests", 0], 2, "0 is not in the range x>=1"),
        (["--hisparse", "--top-k-from", "none.npz"], 2, "File 'none.npz' does not exist"),
        (["--hisparse", "--top-k", 0], 1, "top_k: expected 1..32768, got 0"),
        (["--hisparse", "--hot-size", 100], 1, "hot_sizes: expected 2048..32768 with top_k=2048, got 100"),
        (["--hisparse", "--row-bytes", 100], 1, "row_bytes: expected a multiple of 16"),
        (["--hisparse", "--top-k-recent", 2], 1, "recent: expected 0..1, got 2.0"),
    ],
)
def test_bad_options_are_one_line_errors(trace_file: Path, options: list[object], code: int, message: str) -> None:
    result = run(trace_file, "--device", "cpu", *options)
    assert result.exit_code == code
    assert message in result.output
    assert "Traceback" not in result.output


def test_a_planted_fault_ends_the_command(trace_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hisparse, "gather_compact", lambda *args: None)
    result = run(trace_file, *QUICK, "--check")
    assert result.exit_code == 1
    assert "layer 0: hot row" in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize("steps", [0, 6])
def test_ctrl_c_prints_what_was_resolved(
    trace_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    pytest.importorskip("matplotlib")
    late = after(2 * steps)  # two hot sizes

    def interrupted(gather: Any, *args: Any) -> None:
        if late():
            raise KeyboardInterrupt
        gather(*args)

    wrapped(monkeypatch, hisparse, "gather_compact", interrupted)
    files = ("--json", tmp_path / "out.json", "--plot", tmp_path / "out.svg")
    result = run(trace_file, *QUICK, "--hot-sizes", "32,64", *files)
    assert result.exit_code == 130
    written = json.loads((tmp_path / "out.json").read_text())["hisparse"]
    assert written["steps"] == steps
    assert ("none came to a decode step" in result.output) == (steps == 0)
    assert (tmp_path / "out.svg").stat().st_size > 0


def test_both_families_are_loaded_before_a_device_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = []

    def load(family: str, backend: str) -> None:
        loaded.append((family, backend))
        if (family, backend) == ("hisparse", "cuda"):
            raise RuntimeError("no nvcc")

    monkeypatch.setattr(replay_device.jit, "load", load)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "zeros", lambda *args, **kwargs: None)
    families = ("compress", "hisparse")
    assert replay_device.choose_device("auto", families) == ("cpu", "the GPU cannot be used: no nvcc")
    assert loaded == [(family, backend) for backend in ("cuda", "cpu") for family in families]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "options",
    [
        ["--top-k", 64],
        ["--top-k", 256, "--hot-sizes", "256,512,2048", "--row-bytes", 1152],
        ["--top-k", 64, "--spec", 3, "--layers-per-group", 2, "--row-bytes", 576],
        ["--top-k", 64, "--spec", 2, "--mixed", "--budget", 300],
    ],
)
def test_hot_buffers_on_the_gpu(trace_file: Path, tmp_path: Path, options: list[object]) -> None:
    arguments = (trace_file, "--hisparse", "--slots", FEW_SLOTS, "--json", tmp_path / "out.json", *options)
    written = []
    for device in ("cuda", "cpu"):
        result = run(*arguments, "--device", device, "--check")
        assert result.exit_code == 0, result.output
        written.append(json.loads((tmp_path / "out.json").read_text())["hisparse"])
    on_gpu, on_cpu = written
    assert on_gpu["pool_row_bytes"] == on_gpu["settings"]["row_bytes"]
    assert on_gpu["checked_rows"] == on_cpu["checked_rows"] > 0
    for here, there in zip(on_gpu["sizes"], on_cpu["sizes"], strict=True):
        assert {k: here[k] for k in ("hits", "misses", "cold_misses")} == {
            k: there[k] for k in ("hits", "misses", "cold_misses")
        }
