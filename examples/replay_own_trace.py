"""Own traffic through the serving loop: from a log of requests to plans per step, and to the size of a hot buffer.

    python examples/replay_own_trace.py

`hotplan replay FILE --hisparse --hot-sizes 128,256,512` does the same for a file; this is the Python under it.
"""

import tempfile
from pathlib import Path

import torch

from hotplan.replay.locality import Locality, LocalityModel
from hotplan.replay.residency import HiSparse, HiSparseSettings
from hotplan.replay.residency_report import enough, hit_rate
from hotplan.replay.runner import Replay
from hotplan.replay.settings import Settings
from hotplan.replay.trace import BLOCK_TOKENS, TraceRecord, read_trace, write_trace

# A server's log: seconds, prompt tokens, number of generated tokens. Here six turns of two chats, whose prompts repeat
# what was said before.
rng = torch.Generator().manual_seed(0)
chats = [torch.randint(32000, (5000,), generator=rng).tolist() for _ in range(2)]
log = [(0.4 * turn, chats[turn % 2][: 700 * (1 + turn)], 24) for turn in range(6)]

# The trace names every block of the prompt: the same id for two requests where all tokens up to its end are the same.
known: dict[tuple[int, ...], int] = {}
records = []
for seconds, prompt, generated in log:
    ends = range(BLOCK_TOKENS, len(prompt) + BLOCK_TOKENS, BLOCK_TOKENS)
    hash_ids = tuple(known.setdefault(tuple(prompt[:end]), len(known)) for end in ends)
    records.append(TraceRecord(1000 * seconds, len(prompt), generated, hash_ids))

with tempfile.TemporaryDirectory() as directory:
    path = Path(directory, "trace.jsonl")
    write_trace(path, records)
    trace = read_trace(path)  # checked, with the line named if something is wrong

served = Replay(trace, Settings(max_running=8), "cpu", check=True)  # check: every plan against the reference
ids = LocalityModel(Locality(top_k=128))  # a model of what an indexer picks; better: `Recording` of a real one's ids
buffers = HiSparse(served.scheduler, trace, HiSparseSettings(hot_sizes=(128, 256, 512)), ids)
result = served.run((buffers,))

steps = {kind: result.log.kind.count(kind) for kind in dict.fromkeys(result.log.kind)}
print(f"{result.counters.finished} requests in {steps}, prefix hits {result.prefix_hit_rate:.0%}")
print(f"{result.checked_plans} plans equal the reference's")
for size in buffers.log.sizes:
    print(f"hot buffer of {size.hot_size:4d} slots: {hit_rate(size):.1%} of top-k ids are hits")
print(f"enough: {enough(buffers.log)}")
