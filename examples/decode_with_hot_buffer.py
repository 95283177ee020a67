"""A decode loop with a hot buffer: all tokens' KV rows in host memory, the few that attention reads on the device.

    python examples/decode_with_hot_buffer.py

On a GPU the pool is pinned and misses cross PCIe; without one the same loop runs on the CPU.
"""

import torch

import hotplan

LAYERS, WIDTH = 2, 656  # layers that share an indexer, bytes of a token's row in each
TOP_K, HOT_SLOTS = 64, 256  # tokens that attention reads per step, tokens that a request keeps on the device
CONTEXT, STEPS = 2048, 20

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)

# Host row = the token's number in the pool; the first request has tokens 0..CONTEXT-1, the second the rest.
pool = torch.randint(256, (LAYERS, 2 * CONTEXT, WIDTH), dtype=torch.uint8)
if device == "cuda":
    pool = pool.pin_memory()

buffer = hotplan.HotBuffer(pool, max_requests=4, top_k=TOP_K, hot_slots=HOT_SLOTS, device=device)
requests = [buffer.admit(), buffer.admit()]
first_row = torch.tensor([[0], [CONTEXT]])

# What an indexer would give: each step drops an eighth of the tokens it picked before, and picks others.
picked = torch.stack([torch.randperm(CONTEXT)[:TOP_K] for _ in requests])
for _ in range(STEPS):
    for row in picked:
        others = torch.randperm(CONTEXT)
        others = others[~torch.isin(others, row)]
        row[torch.randperm(TOP_K)[: TOP_K // 8]] = others[: TOP_K // 8]
    ids = (picked + first_row).to(dtype=torch.int32, device=device)

    rows = buffer.resolve(ids, requests)  # once per step: where each id is, or where it goes
    for layer in range(LAYERS):
        hot = buffer.gather(layer).view(-1, WIDTH)  # the layer's misses are copied in
        keys = hot[rows.long()]  # attention reads these rows; here they are compared with the pool
        assert torch.equal(keys.cpu(), pool[layer, ids.cpu().long()])

stats = buffer.stats()
print(f"{STEPS} steps on {device}: {stats.hits} hits, {stats.misses} misses, hit rate {stats.hit_rate:.1%}")
for request in requests:
    buffer.release(request)
