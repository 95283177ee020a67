"""Ten million rows, or HOTPLAN_NIGHTLY_STEPS; HOTPLAN_NIGHTLY_SEED chooses others. Progress shows with -s."""

from __future__ import annotations

import os

import pytest
from long_run import Tally, long_run


@pytest.mark.timeout(0)
def test_ten_million_rows() -> None:
    steps = int(os.environ.get("HOTPLAN_NIGHTLY_STEPS", 10_000_000))
    seed = int(os.environ.get("HOTPLAN_NIGHTLY_SEED", 0))

    def progress(tally: Tally, episode: int) -> None:
        print(f"episode {episode}: {tally.total:,} of {steps:,} rows", flush=True)

    tally = long_run(steps, seed, progress=progress)
    assert tally.total >= steps
