"""Top-k ids of decode steps: drawn from a model of locality, or read from a recording.

The model. An indexer picks K of a request's tokens for every new one. Here they are, of a context of n tokens:

* the newest ``recent`` x K tokens, the new one included;
* heavy hitters: ids out of a set that is ``heavy_set`` times as large as what a step takes of it. Popularity within the
  set falls off as rank^-0.7 and is capped at "in every step"; each step takes its share anew. The set drifts: a
  share ``drift`` of it is replaced in every step by tokens drawn uniformly from the context;
* ``uniform`` x K other tokens, spread evenly over the rest of the context and drawn anew in every step. Where the
  context is too short to fill the heavy set, what is missing is taken here too.

A context of at most K tokens is picked whole. Every request draws from a generator of its own, seeded by (seed,
request), so its ids do not depend on which other requests run. The defaults give misses of the order that hot buffers
were built for; they are no measurement of a model. Whoever has a model should record its ids.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hotplan.replay.trace import TraceRecord

_SKEW = 0.7


class TopKSource(Protocol):
    """Where top-k ids come from."""

    top_k: int

    def follows(self, request: int) -> bool:
        """Whether there are ids for this request at all."""

    def ids(self, request: int, position: int) -> np.ndarray | None:
        """int32 [K]: the positions <= `position` that its token attends to, -1 for none. None: nothing is known."""

    def forget(self, request: int) -> None:
        """The request is finished."""

    def describe(self) -> str: ...


# -- the model ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Locality:
    """See the module's description; shares are of `top_k`. Raises ValueError naming the setting and what came."""

    top_k: int = 2048
    recent: float = 0.25
    uniform: float = 0.05
    heavy_set: float = 2.0
    drift: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        def need(ok: bool, name: str, expected: str) -> None:
            if not ok:
                raise ValueError(f"{name}: expected {expected}, got {getattr(self, name)}")

        need(1 <= self.top_k <= 32768, "top_k", "1..32768")
        for name in ("recent", "uniform", "drift"):
            need(0.0 <= getattr(self, name) <= 1.0, name, "0..1")
        need(self.recent + self.uniform <= 1.0, "uniform", f"at most {1 - self.recent:g} with recent={self.recent:g}")
        need(1.0 <= self.heavy_set <= 1000.0, "heavy_set", "1..1000")

    @property
    def recent_ids(self) -> int:
        return round(self.recent * self.top_k)

    @property
    def heavy_ids(self) -> int:
        """Ids that a step takes of the heavy set."""
        return max(self.top_k - self.recent_ids - round(self.uniform * self.top_k), 0)

    @property
    def set_size(self) -> int:
        return round(self.heavy_set * self.heavy_ids)


def inclusion(size: int, chosen: int) -> np.ndarray:
    """float64 [size]: chances of being chosen, by rank: min(1, c * rank^-0.7), with c such that they add up to
    `chosen` <= size."""
    weights = np.arange(1, size + 1, dtype=np.float64) ** -_SKEW
    # The head that is capped at 1 grows until the rest, scaled to what is left, fits under 1.
    capped = 0
    tails = np.cumsum(weights[::-1])[::-1]
    while capped < chosen and weights[capped] * (chosen - capped) > tails[capped]:
        capped += 1
    chances = np.ones(size)
    if capped < size:
        chances[capped:] = weights[capped:] * ((chosen - capped) / tails[capped])
    return chances


class LocalityModel:
    """Ids by the model, for any request and position; a request's positions are asked for in the order of its steps."""

    def __init__(self, settings: Locality) -> None:
        self.settings = settings
        self.top_k = settings.top_k
        chances = inclusion(settings.set_size, settings.heavy_ids)
        self._cumulated = np.concatenate([[0.0], np.cumsum(chances)])
        self._cumulated[-1] = settings.heavy_ids  # exactly, whatever rounding did
        self._walks: dict[int, _Walk] = {}

    def follows(self, request: int) -> bool:
        return True

    def ids(self, request: int, position: int) -> np.ndarray:
        walk = self._walks.get(request)
        if walk is None:
            walk = self._walks[request] = _Walk(self.settings, self._cumulated, request)
        return walk.ids(position)

    def forget(self, request: int) -> None:
        self._walks.pop(request, None)

    def describe(self) -> str:
        s = self.settings
        heavy = f"{s.heavy_ids:,} of {s.set_size:,} heavy hitters ({100 * s.drift:g} % replaced a step)"
        uniform = s.top_k - s.recent_ids - s.heavy_ids
        return f"model: {s.recent_ids:,} recent, {heavy}, {uniform:,} uniform; seed {s.seed}"


class _Walk:
    """One request's heavy set on its way."""

    def __init__(self, settings: Locality, cumulated: np.ndarray, request: int) -> None:
        self._settings = settings
        self._cumulated = cumulated
        self._rng = np.random.default_rng((settings.seed, request))
        self._heavy = np.empty(0, dtype=np.int64)  # positions, the most popular first
        self._member = np.zeros(0, dtype=bool)  # by position

    def ids(self, position: int) -> np.ndarray:
        top_k, count = self._settings.top_k, position + 1
        if count <= top_k:
            whole = np.full(top_k, -1, dtype=np.int32)
            whole[:count] = np.arange(count)
            return whole
        old = count - self._settings.recent_ids
        self._drift(old)
        marked = np.zeros(count, dtype=bool)
        marked[old:] = True
        marked[self._take(old)] = True
        rest = np.flatnonzero(~marked)
        missing = top_k - (count - len(rest))
        if missing:
            # One out of each of `missing` parts of the rest: evenly spread, and never the same one twice.
            edges = np.arange(missing + 1) * len(rest) // missing
            offsets = self._rng.random(missing) * np.diff(edges)
            marked[rest[edges[:-1] + offsets.astype(np.int64)]] = True
        return np.flatnonzero(marked).astype(np.int32)

    def _take(self, old: int) -> np.ndarray:
        """This step's share of the set, by systematic sampling: every rank with its chance, and exactly so many."""
        ranks = np.flatnonzero(np.diff(np.floor(self._cumulated + self._rng.random())))
        taken = self._heavy[ranks[ranks < len(self._heavy)]]
        return taken[taken < old]  # undone drafts move the context's end back

    def _drift(self, old: int) -> None:
        if old > len(self._member):
            self._member = np.concatenate([self._member, np.zeros(old + 4096, dtype=bool)])
        lacking = min(self._settings.set_size, old) - len(self._heavy)
        if lacking > 0:
            candidates = np.flatnonzero(~self._member[:old])
            fresh = self._rng.permutation(candidates)[:lacking]
            self._heavy = np.concatenate([self._heavy, fresh])
            self._member[fresh] = True
        replaced = int(self._settings.drift * len(self._heavy) + self._rng.random())
        if replaced:
            fresh = np.unique(self._rng.integers(old, size=replaced))
            fresh = fresh[~self._member[fresh]]
            ranks = self._rng.choice(len(self._heavy), len(fresh), replace=False)
            self._member[self._heavy[ranks]] = False
            self._heavy[ranks] = fresh
            self._member[fresh] = True


# -- recordings --------------------------------------------------------------------------------------------------------


class RecordingError(ValueError):
    """A recording that cannot be used; the message names the file and what is wrong."""


class Recording:
    """Ids out of an .npz file, as `numpy.savez(path, request=..., step=..., ids=...)` writes it.

    Integer arrays, row i of each belonging together:

    * ``request`` [N]: the request's place in the trace, from 0;
    * ``step`` [N]: which of its generated tokens, from 0: token `step` has position ``input_length + step``;
    * ``ids`` [N, K]: the positions that this token attends to, its own included, -1 for none.

    Only requests that occur are followed, and of those only the steps that occur. Raises RecordingError for anything
    else: not an .npz, arrays missing or of the wrong shape or type, a request or step that the trace does not have, a
    pair that occurs twice, a position after the token's own.
    """

    def __init__(self, path: str | os.PathLike[str], trace: Sequence[TraceRecord], draft_tokens: int = 0) -> None:
        self._path = Path(path)
        request, step, ids = self._load()
        self.top_k = int(ids.shape[1])
        self._ids = ids
        records = len(trace)
        known = (request >= 0) & (request < records)
        self._need(known, lambda i: f"request: expected 0..{records - 1}, got {request[i]}")
        self._lengths = np.array([r.input_length for r in trace], dtype=np.int64)
        # The last token is generated, but never an input; drafts may reach beyond it.
        steps = np.array([r.output_length for r in trace], dtype=np.int64)[request] - 1 + draft_tokens
        self._need(
            (step >= 0) & (step < steps),
            lambda i: f"step: expected 0..{steps[i] - 1} for request {request[i]}, got {step[i]}",
        )
        position = self._lengths[request] + step
        for start in range(0, len(ids), 4096):  # bounds the memory of the comparison's results
            part = ids[start : start + 4096]
            last = position[start : start + 4096, None]
            wrong = np.flatnonzero(((part < -1) | (part > last)).any(axis=1))
            if len(wrong):
                i = start + int(wrong[0])
                bad = ids[i][(ids[i] < -1) | (ids[i] > position[i])][0]
                self._fail(i, f"ids: expected -1..{position[i]} (request {request[i]}, step {step[i]}), got {bad}")
        self._row: dict[tuple[int, int], int] = {}
        for i, key in enumerate(zip(request.tolist(), step.tolist(), strict=True)):
            if self._row.setdefault(key, i) != i:
                self._fail(i, f"request {key[0]}, step {key[1]} is in row {self._row[key]} already")
        self._requests = frozenset(request.tolist())

    def _load(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        try:
            file = np.load(self._path, allow_pickle=False)
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise RecordingError(f"{self._path}: expected an .npz file, got a single array")
            with file:
                missing = [name for name in ("request", "step", "ids") if name not in file.files]
                if missing:
                    raise RecordingError(f"{self._path}: missing {', '.join(missing)}")
                arrays = {name: file[name] for name in ("request", "step", "ids")}
        except RecordingError:
            raise
        except (ValueError, EOFError, OSError, zipfile.BadZipFile) as error:
            raise RecordingError(f"{self._path}: not an .npz of plain arrays: {error}") from None
        for name, array in arrays.items():
            if array.dtype.kind not in "iu":
                raise RecordingError(f"{self._path}: {name}: expected integers, got {array.dtype}")
        request, step, ids = (arrays[name] for name in ("request", "step", "ids"))
        shapes = {name: list(array.shape) for name, array in arrays.items()}
        fits = request.ndim == step.ndim == 1 and ids.ndim == 2 and len(request) == len(step) == len(ids)
        if not fits or 0 in ids.shape:
            raise RecordingError(f"{self._path}: expected request [N], step [N] and ids [N, K], got shapes {shapes}")
        return request.astype(np.int64), step.astype(np.int64), ids

    def _need(self, ok: np.ndarray, message: Any) -> None:
        if not ok.all():
            i = int(np.flatnonzero(~ok)[0])
            self._fail(i, message(i))

    def _fail(self, row: int, message: str) -> None:
        raise RecordingError(f"{self._path}: row {row}: {message}")

    def follows(self, request: int) -> bool:
        return request in self._requests

    def ids(self, request: int, position: int) -> np.ndarray | None:
        row = self._row.get((request, position - int(self._lengths[request])))
        return None if row is None else self._ids[row].astype(np.int32)

    def forget(self, request: int) -> None:
        pass

    def describe(self) -> str:
        return f"{self._path.name}: {len(self._row):,} rows of {len(self._requests):,} requests"
