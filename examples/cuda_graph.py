"""A decode step in a CUDA graph: plans and the hot buffer, captured once and replayed with new inputs.

    python examples/cuda_graph.py

Needs a GPU. What makes it work: lengths and ids lie on the GPU, outputs are given, and nothing synchronises. Modules
are loaded (or compiled) by the warm-up, never during the capture.
"""

import sys

import torch

import hotplan

if not torch.cuda.is_available():
    print("no CUDA device here, and a CUDA graph needs one: nothing done")
    sys.exit()

BATCH, TOP_K, WIDTH, CONTEXT = 8, 64, 656, 1024
device = torch.device("cuda")

# Inputs, filled in place before each replay.
rid = torch.arange(BATCH, device=device)
seq_lens = torch.full((BATCH,), 512, device=device)
ids = torch.zeros((BATCH, TOP_K), dtype=torch.int32, device=device)
requests = torch.full((BATCH,), -1, dtype=torch.int32, device=device)  # -1: padding

req_to_token = torch.arange(BATCH * CONTEXT, dtype=torch.int32, device=device).view(BATCH, CONTEXT)
full_to_state = torch.arange(BATCH * CONTEXT, device=device)
pool = torch.randint(256, (1, BATCH * CONTEXT, WIDTH), dtype=torch.uint8).pin_memory()
buffer = hotplan.HotBuffer(pool, max_requests=BATCH, top_k=TOP_K, hot_slots=256, device=device)


def plan(out: dict[int, torch.Tensor] | None = None) -> dict[int, torch.Tensor]:
    return hotplan.plan_step_decode(rid, req_to_token, full_to_state, seq_lens, swa_page_size=256, out=out)


# Warm-up on a side stream, as torch asks for before a capture. The requests are padding: it leaves no state behind.
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    plans = plan()
    rows = buffer.resolve(ids, requests)
    buffer.gather(0)
torch.cuda.current_stream().wait_stream(side)

graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    plan(plans)
    rows = buffer.resolve(ids, requests)
    hot = buffer.gather(0)

admitted = [buffer.admit() for _ in range(BATCH - 1)]  # admission writes state, so it stays outside the graph
requests[: len(admitted)] = torch.tensor(admitted, dtype=torch.int32)
for step in range(4):
    seq_lens.fill_(513 + step)
    ids.copy_(torch.arange(TOP_K, device=device) + 7 * step + CONTEXT * torch.arange(BATCH, device=device)[:, None])
    graph.replay()
    live = rows[: len(admitted)].long()
    assert torch.equal(hot.view(-1, WIDTH)[live].cpu(), pool[0, ids[: len(admitted)].cpu().long()])
    assert (rows[len(admitted) :] == -1).all()
    eager = plan()
    assert all(torch.equal(plans[ratio], eager[ratio]) for ratio in plans)
print(f"4 replays, equal to eager calls; {buffer.stats().hit_rate:.1%} hits")
