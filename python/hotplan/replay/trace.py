"""Request traces in Mooncake's JSON lines format: read, checked, or generated.

A line is ``{"timestamp": ms, "input_length": n, "output_length": m, "hash_ids": [...]}`` with one hash id for every
block of 512 prompt tokens, the last block possibly partial. Requests whose leading hash ids agree share that prefix.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BLOCK_TOKENS = 512
"""Prompt tokens behind one hash id."""

_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")
_MAX_LENGTH = 2**31 - 1  # positions are int32 in the tables


class TraceError(ValueError):
    """A trace that cannot be used; the message names the file, the line and what is wrong."""


@dataclass(frozen=True)
class TraceRecord:
    """One request: arrival in milliseconds, prompt and output lengths in tokens, hash ids of the prompt's blocks."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _parse(line: str) -> TraceRecord:
    """One line as a record. Raises ValueError with what is wrong, without file and line."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise ValueError("not a request: brackets are nested too deeply") from None
    if not isinstance(row, dict):
        raise ValueError(f"expected an object, got {_shown(row)}")
    missing = [name for name in _FIELDS if name not in row]
    if missing:
        raise ValueError(f"missing {', '.join(missing)}")
    timestamp = row["timestamp"]
    number = isinstance(timestamp, (int, float)) and not isinstance(timestamp, bool)
    if not number or not 0 <= timestamp < 2**53:  # also refuses NaN and infinity, which json accepts
        raise ValueError(f"timestamp: expected milliseconds >= 0, got {_shown(timestamp)}")
    for name in ("input_length", "output_length"):
        if not _is_int(row[name]) or not 1 <= row[name] <= _MAX_LENGTH:
            raise ValueError(f"{name}: expected an integer in 1..{_MAX_LENGTH}, got {_shown(row[name])}")
    length, ids = row["input_length"], row["hash_ids"]
    if length + row["output_length"] > _MAX_LENGTH:
        raise ValueError(
            f"input_length + output_length: expected at most {_MAX_LENGTH}, got {length + row['output_length']}"
        )
    if not isinstance(ids, list) or not all(_is_int(value) for value in ids):
        raise ValueError(f"hash_ids: expected a list of integers, got {_shown(ids)}")
    blocks = -(-length // BLOCK_TOKENS)
    if len(ids) != blocks:
        raise ValueError(
            f"hash_ids: expected {blocks} ids (one per {BLOCK_TOKENS} of {length} prompt tokens), got {len(ids)}"
        )
    return TraceRecord(timestamp, length, row["output_length"], tuple(ids))


def read_trace(path: str | os.PathLike[str], limit: int | None = None) -> list[TraceRecord]:
    """The first `limit` requests of a JSON lines file, blank lines skipped.

    Raises TraceError naming file, line and fault: not UTF-8, not JSON, a missing or impossible value, a wrong number of
    hash ids, a timestamp before the one above it, or no request at all. OSError if the file cannot be opened.
    """
    path = Path(path)
    records: list[TraceRecord] = []
    number = 0
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if limit is not None and len(records) >= limit:
                break
            if not raw.strip():
                continue
            try:
                record = _parse(raw.rstrip().decode("utf-8"))
                if records and record.timestamp < records[-1].timestamp:
                    before = records[-1].timestamp
                    raise ValueError(f"timestamp: expected at least {before} as before, got {record.timestamp}")
            except UnicodeDecodeError as error:
                raise TraceError(f"{path}:{number}: not UTF-8: {error.reason} at byte {error.start}") from None
            except ValueError as error:
                raise TraceError(f"{path}:{number}: {error}") from None
            records.append(record)
    if not records:
        raise TraceError(f"{path}: no requests in {number} lines")
    return records


def write_trace(path: str | os.PathLike[str], records: Iterable[TraceRecord]) -> None:
    """Writes records in the format that `read_trace` reads."""
    with Path(path).open("w", encoding="utf-8") as file:
        for record in records:
            row = {name: getattr(record, name) for name in _FIELDS}
            file.write(json.dumps(row | {"hash_ids": list(record.hash_ids)}) + "\n")


def generate_trace(
    requests: int,
    *,
    seed: int = 0,
    mean_gap_ms: float = 120.0,
    mean_input: int = 1800,
    max_input: int = 12_000,
    mean_output: int = 48,
) -> list[TraceRecord]:
    """A chat-like trace: requests of a few conversations that share a system prompt and grow turn by turn.

    Gaps are exponential, prompt growth and output lengths are log-normal around the given means (tokens, milliseconds).
    The same arguments give the same trace on every machine with the same NumPy generator. Raises ValueError where
    `requests` is below 1 or `max_input` below one block.
    """
    import numpy as np

    if requests < 1:
        raise ValueError(f"requests: expected at least 1, got {requests}")
    if max_input < BLOCK_TOKENS:
        raise ValueError(f"max_input: expected at least {BLOCK_TOKENS} (one block), got {max_input}")

    rng = np.random.default_rng(seed)
    fresh = iter(range(1, 2**31))

    def grow(tokens: int) -> int:
        return min(max_input, tokens + 1 + int(rng.lognormal(np.log(max(mean_input, 2)) - 0.5, 1.0)))

    conversations: list[tuple[int, list[int]]] = []  # (prompt tokens of the last turn, ids of its full blocks)
    records: list[TraceRecord] = []
    now = 0.0
    for _ in range(requests):
        now += float(rng.exponential(mean_gap_ms))
        if conversations and rng.random() < 0.5:
            chosen = int(rng.integers(len(conversations)))
        else:
            conversations.append((BLOCK_TOKENS, [0]))  # block 0 is everybody's system prompt
            chosen = len(conversations) - 1
        length, ids = conversations[chosen]
        length = grow(length)
        full = length // BLOCK_TOKENS
        ids = ids + [next(fresh) for _ in range(full - len(ids))]
        conversations[chosen] = (length, ids)
        partial = [next(fresh)] if length % BLOCK_TOKENS else []
        output = 1 + int(rng.lognormal(np.log(max(mean_output, 2)) - 0.3, 0.8))
        records.append(TraceRecord(round(now, 3), length, output, tuple(ids + partial)))
    return records
