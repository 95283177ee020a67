"""The long run's own code for a few seconds, and that it finds what is planted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from compress_run import CompressRun
from device_buffer_run import DeviceBufferRun
from hot_sets import Broken, resolve
from long_run import RUNS, Failure, Run, long_run, run_episode
from residency_run import ResidencyRun

from hotplan import plans
from hotplan.replay.scheduler import Step
from hotplan.replay.steps import Built
from hotplan.replay.verify import CheckError


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("episode", range(6))
def test_a_short_run(name: str, episode: int) -> None:
    rows, launches = run_episode(name, seed=1, episode=episode, rows=2_000)
    assert rows >= 2_000
    assert launches > 1


def test_worked_values() -> None:
    """Those of hotplan.reference.device_buffer."""
    held, lru = np.array([[1, 4, 2, 5]]), np.array([[0, 1, 2, 3]])
    first = resolve(held, lru, np.array([[4, 2, -1]]), 8)
    assert (first.slot.tolist(), first.lru.tolist(), first.counts.tolist()) == ([[1, 2, -1]], [[0, 3, 1, 2]], [0])
    second = resolve(first.held, first.lru, np.array([[6]]), 8)
    assert (second.held.tolist(), second.lru.tolist()) == ([[6, 4, 2, 5]], [[3, 1, 2, 0]])
    assert (second.slot.tolist(), second.wanted.tolist(), second.victim.tolist()) == ([[0]], [6], [0])
    many = resolve(held, lru, np.array([[4, 7, 6, 7, 3, 0]]), 8)
    assert many.slot.tolist() == [[1, 0, 2, 0, 3, -1]]
    assert (many.wanted.tolist(), many.victim.tolist()) == ([7, 6, 3, 0], [0, 2, 3, -1])
    assert many.first.tolist() == [[False, True, True, False, True, True]]


# -- planted errors ----------------------------------------------------------------------------------------------------


def after(launches: int, damage: Callable[[Any], object]) -> Callable[[Any], None]:
    """Calls `damage` once, after so many launches."""
    count = 0

    def at_launch(run: Any) -> None:
        nonlocal count
        count += 1
        if count == launches:
            damage(run)

    return at_launch


def walk(run: Run, launches: int) -> None:
    for _ in range(launches):
        run.step()


def found(kind: type, damage: Callable[[Any], object], fits: Callable[[Any], bool] = lambda run: True) -> str:
    """What the checks say of damage after five launches of the first run with fitting sizes."""
    for seed in range(100):
        run = kind(seed, after(5, damage))
        if fits(run):
            with pytest.raises(Broken) as error:
                walk(run, 6)
            return str(error.value)
    raise AssertionError("no such sizes")


def swap(tensor: torch.Tensor) -> None:
    """The first two entries of row 3 change places."""
    tensor[3, :2] = tensor[3, :2].flip(0).clone()


def add(tensor: torch.Tensor, amount: int = 1) -> None:
    tensor.view(-1)[3] += amount


RESIDENCY: dict[str, tuple[Callable[[ResidencyRun], object], str]] = {
    "LRU in another order": (lambda run: swap(run.hot.lru_slots), "lru_slots"),
    "a slot twice in the LRU": (lambda run: run.hot.lru_slots[3, :2].fill_(0), "no permutation"),
    "an id in two slots": (lambda run: run.hot.device_global_indices[3, :2].fill_(77), "an id in two slots"),
    "an id of another slot": (lambda run: swap(run.hot.device_global_indices), "device_global_indices"),
    "another row": (lambda run: add(run.hot.hot_indices), "hot_indices"),
    "a copy listed elsewhere": (lambda run: run.hot.swap_device_physical_rows.add_(1), "swap_device_physical_rows"),
    "a copy from elsewhere": (lambda run: run.hot.swap_host_physical_rows.add_(1), "swap_host_physical_rows"),
    "a lost hit": (lambda run: run.hot._stats[0].sub_(1), "stats"),
    "a hit counted as a miss": (lambda run: run.hot._stats.add_(torch.tensor([-1, 1])), "stats"),
    "a byte of a hot row": (lambda run: run.hot.caches[0].view(-1, 16)[:, 5].add_(1), "rows at hot_indices"),
    "a copy count": (lambda run: add(run.hot.swap_counts), "swap_counts"),
    "a first column": (lambda run: add(run.hot.miss_mask), "miss_mask"),
}


@pytest.mark.parametrize("what", RESIDENCY)
def test_planted_errors_of_residency_are_found(what: str) -> None:
    damage, message = RESIDENCY[what]
    assert message in found(ResidencyRun, damage)


DEVICE_BUFFER: dict[str, tuple[Callable[[DeviceBufferRun], object], str]] = {
    "LRU in another order": (lambda run: swap(run.lru), "lru["),
    "a slot twice in the LRU": (lambda run: run.lru[3, :2].fill_(0), "no permutation"),
    "a token in two slots": (lambda run: run.tokens[3, :2].fill_(3), "an id in two slots"),
    "a token of another slot": (lambda run: swap(run.tokens), "device_buffer_tokens"),
    "another row": (lambda run: add(run.out), "top_k_device_locs"),
    "a copy listed elsewhere": (lambda run: run.miss_dst.add_(1), "miss_dst"),
    "a copy from elsewhere": (lambda run: run.miss_src.add_(1), "miss_src"),
    "a copy count": (lambda run: add(run.miss_count), "miss_count"),
    "the newest token's name": (lambda run: run.tokens[3, run.slots].add_(1), "tokens behind the LRU"),
    "the newest token's row": (lambda run: run.device[int(run.locs[3, run.slots])].add_(1), "device_buffer["),
    "a row that nobody asked for": (lambda run: run.device[int(run.locs[3, 0])].add_(1), "device_buffer["),
}


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("what", DEVICE_BUFFER)
def test_planted_errors_of_the_device_buffer_are_found(what: str, several: bool) -> None:
    damage, message = DEVICE_BUFFER[what]
    assert message in found(DeviceBufferRun, damage, lambda run: (run.steps > 1) == several)


class PlanDamage:
    """Changes the plan of one step: the first from the 30th on that has two rows of its kind."""

    def __init__(self, kind: str, ratio: int, change: Callable[[np.ndarray], object]) -> None:
        self.kind, self.ratio, self.change = kind, ratio, change
        self.steps = 0
        self.done = False

    def __call__(self, step: Step, built: Built) -> None:
        self.steps += 1
        if self.done or self.steps < 30 or (self.kind == "decode") != (step.kind == "decode"):
            return
        plan = built.plans[self.ratio]
        view = {"compress": plans.compress_rows, "write": plans.write_rows, "decode": plans.decode_rows}[self.kind]
        rows = view(plan if self.kind == "decode" else getattr(plan, self.kind))
        used = rows[: len(step.rows)] if self.kind == "decode" else rows[plans.valid(rows)]
        if len(used) < 2:
            return
        self.done = True
        self.change(rows)  # a view of the plan's memory; what is valid comes first


def lengthen(rows: np.ndarray) -> None:
    rows["seq_len"][0] += 4


def write_together(rows: np.ndarray) -> None:
    rows["write_loc"][0] = rows["write_loc"][1]


def repeat(rows: np.ndarray) -> None:
    rows[1] = rows[0]


def drop(rows: np.ndarray) -> None:
    """The last valid row."""
    rows[int(plans.valid(rows).sum()) - 1] = plans.invalid_rows(rows.dtype, 1)[0]


PLANS = {
    "a window is not closed": ("compress", 4, drop, "not closed exactly once"),
    "a window is closed twice": ("compress", 4, repeat, "two rows"),
    "two tokens are written to one place": ("write", 4, write_together, "two tokens are written to one ring row"),
    "a token is not written": ("write", 4, drop, "the ring holds"),
    "a decode row of another length": ("decode", 4, lengthen, "not its request's"),
    "two decoded tokens are written to one place": ("decode", 4, write_together, "two tokens are written"),
    "the same of c128": ("decode", 128, write_together, "two tokens are written"),
}


@pytest.mark.parametrize("what", PLANS)
def test_planted_errors_of_plans_are_found(what: str) -> None:
    kind, ratio, change, message = PLANS[what]
    damage = PlanDamage(kind, ratio, change)
    runs = (CompressRun(seed, damage) for seed in range(100))
    run = next(run for run in runs if run.settings.draft_tokens == 0 and not run.settings.mixed)
    with pytest.raises(CheckError, match=message):
        walk(run, 5_000)
    assert damage.done


def test_a_failure_says_how_to_repeat_it(monkeypatch: pytest.MonkeyPatch) -> None:
    damage = after(3, lambda run: swap(run.lru))
    monkeypatch.setitem(RUNS, "device_buffer", lambda seed: DeviceBufferRun(seed, damage))
    with pytest.raises(Failure, match=r"(?s)device_buffer, episode 4, launch 2 \(.*lru.*--seed 9 --episode 4"):
        long_run(10**6, seed=9, names=["device_buffer"], first=4)
