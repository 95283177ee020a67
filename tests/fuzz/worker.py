"""Runs cases one after the other and says on a pipe which one runs and what it found."""

from __future__ import annotations

import json
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Iterator
from typing import Any, TextIO

import numpy as np
import torch

from fuzz import operators
from fuzz.calls import Call
from fuzz.mutations import mutate
from fuzz.oracle import Finding, Guarded, Unbuildable, judge


def case_rng(seed: int, operator: str, number: int) -> np.random.Generator:
    """A case's random numbers: they depend on nothing else, so that any case can run alone."""
    return np.random.default_rng([seed, zlib.crc32(operator.encode()), number])


def make_case(seed: int, operator: str, number: int, device: str) -> tuple[Call, bool]:
    """The call of a case, and whether to capture it as well."""
    rng = case_rng(seed, operator, number)
    call = operators.REGISTRY[operator](rng, device)
    mutate(rng, call)
    return call, bool(rng.random() < 0.3)


def cases(only: str | None, case: int | None, count: int | None, begin: int) -> Iterator[tuple[int, str, int]]:
    """Index, operator and number of every case: the operators in turn."""
    names = [only] if only else sorted(operators.REGISTRY)
    if case is not None:
        for name in names:
            yield begin, name, case
        return
    index = begin
    while count is None or index < count:
        yield index, names[index % len(names)], index // len(names)
        index += 1


def run_case(seed: int, operator: str, number: int, device: str, guarded: Guarded | None) -> dict[str, Any]:
    """What came of a case: "outcome", and for a finding its "detail" and the "call"."""
    try:
        call, graph = make_case(seed, operator, number, device)
    except Exception as error:  # a mistake in a builder must not look like a quiet night
        return {"outcome": "broken", "detail": f"{type(error).__name__}: {error}", "call": operator}
    try:
        return {"outcome": judge(call, device, graph=graph, guarded=guarded)}
    except Unbuildable:
        return {"outcome": "unbuildable"}
    except Finding as finding:
        return {"outcome": "finding", "detail": str(finding), "call": call.describe()}


def run(options: Any, pipe: TextIO, guarded: Guarded | None) -> None:
    """Runs until the options' count or time is over. `pipe` takes one JSON object a line."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # tensors are small, and two drivers may share two cores

    def say(**record: Any) -> None:
        pipe.write(json.dumps(record) + "\n")
        pipe.flush()

    outcomes: Counter[str] = Counter()
    for index, operator, number in cases(options.only, options.case, options.cases, options.begin):
        if time.time() > options.until:
            break
        say(index=index, operator=operator, case=number)
        record = run_case(options.seed, operator, number, options.device, guarded)
        outcomes[record["outcome"]] += 1
        if "detail" in record:
            say(index=index, operator=operator, case=number, **record)
    say(done=True, outcomes=dict(outcomes))
