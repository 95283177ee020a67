"""Millions of steps on the CPU, each followed by a check of all that must hold of state and plans.

    python tests/nightly/long_run.py --steps 10000000            # by hand, or: pytest tests/nightly
    python tests/nightly/long_run.py --only residency --seed 7 --episode 41   # again, from where it failed

A step here is a row of a launch: what one request asks for in one step. Families take turns in episodes. An episode begins
with fresh state and draws its sizes and all else from (seed, episode, family), so a failure is repeated by its episode alone.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from compress_run import CompressRun
from device_buffer_run import DeviceBufferRun
from residency_run import ResidencyRun

EPISODE_ROWS = 100_000


class Run(Protocol):
    def describe(self) -> str: ...

    def step(self) -> int: ...


RUNS: dict[str, Callable[[int], Run]] = {run.name: run for run in (CompressRun, ResidencyRun, DeviceBufferRun)}


class Failure(AssertionError):
    """An invariant that does not hold, with what repeats it."""


@dataclass
class Tally:
    rows: dict[str, int] = field(default_factory=dict)
    launches: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.rows.values())

    def add(self, name: str, rows: int, launches: int, seconds: float) -> None:
        for counts, more in ((self.rows, rows), (self.launches, launches), (self.seconds, seconds)):
            counts[name] = counts.get(name, 0) + more

    def lines(self) -> list[str]:
        return [
            f"{name}: {rows:,} rows in {self.launches[name]:,} launches, {rows / self.seconds[name]:,.0f} rows/s"
            for name, rows in self.rows.items()
        ]


def run_episode(name: str, seed: int, episode: int, rows: int = EPISODE_ROWS) -> tuple[int, int]:
    """Rows and launches of one episode, at least `rows`. Raises Failure."""
    drawn = int(np.random.default_rng((seed, episode, list(RUNS).index(name))).integers(2**31))
    run = RUNS[name](drawn)
    done = launches = 0
    while done < rows:
        try:
            done += run.step()
        except Exception as error:  # also what an operator raises
            raise Failure(
                f"{name}, episode {episode}, launch {launches} ({run.describe()}): {error}\n"
                f"again: python tests/nightly/long_run.py --only {name} --seed {seed} --episode {episode}"
            ) from error
        launches += 1
    return done, launches


def long_run(
    steps: int,
    seed: int = 0,
    names: Sequence[str] = tuple(RUNS),
    first: int = 0,
    progress: Callable[[Tally, int], object] = lambda tally, episode: None,
) -> Tally:
    """Episodes from `first` on until `steps` rows are done. Raises Failure at the first invariant that does not hold."""
    tally = Tally()
    for episode in itertools.count(first):
        for name in names:
            start = time.perf_counter()
            rows, launches = run_episode(name, seed, episode)
            tally.add(name, rows, launches, time.perf_counter() - start)
            progress(tally, episode)
            if tally.total >= steps:
                return tally
    raise AssertionError("unreachable")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000_000, help="rows to check in all (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=list(RUNS), default=list(RUNS), help="families (default: all)")
    parser.add_argument("--episode", type=int, help="this episode alone")
    parser.add_argument("--first-episode", type=int, default=0, help="go on from there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    began = last = time.monotonic()

    def progress(tally: Tally, episode: int) -> None:
        nonlocal last
        if time.monotonic() - last >= 10:
            last = time.monotonic()
            rate = tally.total / (last - began)
            left = max(options.steps - tally.total, 0) / rate / 60
            print(f"episode {episode}: {tally.total:,} rows, {rate:,.0f} rows/s, {left:.0f} min left", flush=True)

    try:
        if options.episode is not None:
            for name in options.only:
                print(name, "rows and launches:", *run_episode(name, options.seed, options.episode))
            return 0
        tally = long_run(options.steps, options.seed, options.only, options.first_episode, progress)
    except Failure as failure:
        print(f"FAILED: {failure}", file=sys.stderr)
        return 1
    print(f"{tally.total:,} rows, seed {options.seed}, {time.monotonic() - began:.0f} s: every invariant held")
    print("\n".join(tally.lines()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
