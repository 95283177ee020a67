"""Compress plans over many steps of a replayed server, with all that must hold of each step and no reference beside."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from hotplan.plans import compress_rows, decode_rows, valid, write_rows
from hotplan.replay.pool import check
from hotplan.replay.runner import Replay
from hotplan.replay.scheduler import Step
from hotplan.replay.settings import RATIOS, Settings
from hotplan.replay.steps import Built
from hotplan.replay.trace import generate_trace
from hotplan.replay.verify import StepChecker


class WindowChecker(StepChecker):
    """What `hotplan replay --check` checks, with running counters in the place of the reference.

    The ring model behind it fails if a ring row was overwritten that a window still needs. Here: every window of every
    request is closed by exactly one row, once; every row of a decode plan is its request's; rows past a plan's end are
    invalid.
    """

    def __init__(self, replay: Replay) -> None:
        width = replay.scheduler.tables.host_req_to_token.shape[1]
        super().__init__(replay.scheduler, replay.builder, width)
        rows = replay.scheduler.settings.max_running + 1
        self._position = np.zeros(rows, dtype=np.int64)  # tokens of the request in a row of req_to_token that stay
        self._closed = {ratio: np.zeros(rows, dtype=np.int64) for ratio in RATIOS}
        self._sitting = np.full((rows, 2), -1)  # request and admission

    def _compare(self, step: Step, built: Built) -> None:
        rows, prefix, kept = step.rows, step.prefix, step.prefix + step.accepted
        sitting = np.array([(request.index, request.admissions) for request in step.requests]).reshape(-1, 2)
        new = (self._sitting[rows] != sitting).any(axis=1)
        self._sitting[rows[new]] = sitting[new]
        # A cached prefix brings its windows.
        self._position[rows[new]] = prefix[new]
        for ratio in RATIOS:
            self._closed[ratio][rows[new]] = prefix[new] // ratio
        check((self._position[rows] == prefix).all(), "a request computes a token twice, or skips one")
        for ratio in RATIOS:
            self.plans += 1
            request, end = self._windows(step, built, ratio)
            check((end % ratio == 0).all(), f"c{ratio}: a row closes no window")
            keys = request * 2**40 + end
            check(len(np.unique(keys)) == len(keys), f"c{ratio}: a window is closed by two rows")
            inside = (end > prefix[request]) & (end <= step.seq[request])
            check(inside.all(), f"c{ratio}: a row closes a window of another step")
            # What a rejected draft closed is closed again later.
            self._closed[ratio][rows] += np.bincount(request[end <= kept[request]], minlength=len(rows))
            check((self._closed[ratio][rows] == kept // ratio).all(), f"c{ratio}: a window is not closed exactly once")
        self._position[rows] = kept

    def _windows(self, step: Step, built: Built, ratio: int) -> tuple[np.ndarray, np.ndarray]:
        """The request (of the step) of every window that a plan closes, and the position behind the window."""
        if step.kind == "decode":
            plan = decode_rows(built.plans[ratio])
            seq = plan["seq_len"][: len(step.rows)].astype(np.int64)
            check((seq == step.seq).all(), f"c{ratio}: a decode row is not its request's")
            closes = np.flatnonzero(seq % ratio == 0)
            return closes, seq[closes]
        compress, write = (view(t) for view, t in zip((compress_rows, write_rows), built.plans[ratio], strict=True))
        for plan in (compress, write):
            used = valid(plan)
            check(not used[int(used.sum()) :].any(), f"c{ratio}: an invalid row lies between valid ones")
        compress = compress[valid(compress)]
        request = np.repeat(np.arange(len(step.rows)), step.extend)
        token = compress["ragged_id"].astype(np.int64)
        check((token < len(request)).all(), f"c{ratio}: a row is of a token behind the step")
        return request[token], compress["seq_len"].astype(np.int64)


class CompressRun:
    """Replays of generated traces, one after the other. `damage` is called between plans and checks."""

    name = "compress"

    def __init__(self, seed: int, damage: Callable[[Step, Built], object] | None = None) -> None:
        rng = np.random.default_rng(seed)
        self._seed, self._damage = seed, damage
        ring = bool(rng.random() < 0.3)
        self.settings = Settings(
            token_budget=int(rng.choice([768, 2048])),
            max_running=int(rng.choice([16, 64, 128])),
            page_size=int(rng.choice([256, 512])),
            slots=int(rng.choice([2**17, 2**19])),
            draft_tokens=int(rng.choice([0, 0, 1, 3])),
            mixed=bool(rng.random() < 0.3),
            req_ring=ring,
            prefix_cache=not ring,
            seed=seed,
        )
        self._steps = self._run()

    def describe(self) -> str:
        s = self.settings
        return (
            f"max_running={s.max_running}, token_budget={s.token_budget}, page_size={s.page_size}, slots={s.slots}, "
            f"draft_tokens={s.draft_tokens}, mixed={s.mixed}, req_ring={s.req_ring}"
        )

    def step(self) -> int:
        """One step of the server; how many rows it has: tokens of a decode or verify step, requests of a prefill."""
        return next(self._steps)

    def _run(self) -> Iterator[int]:
        number = 0
        while True:
            trace = generate_trace(
                200, seed=self._seed + number, mean_gap_ms=5.0, mean_input=400, max_input=4000, mean_output=200
            )
            replay = Replay(trace, self.settings)
            checker = WindowChecker(replay)
            while (step := replay.scheduler.next_step()) is not None:
                built = replay.builder.build(step)
                if self._damage:
                    self._damage(step, built)
                checker.before(step, built)
                replay.scheduler.commit(step)
                checker.after(step)
                yield step.tokens if step.kind in ("decode", "verify") else len(step.requests)
            checker.finish()
            number += 1
