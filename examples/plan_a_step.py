"""The smallest plan: what the c4 and c128 compressors of DeepSeek-V4 have to do in one prefill and one decode step.

    python examples/plan_a_step.py

Tensors on the CPU are planned on the CPU; the same calls with CUDA tensors plan on the GPU and give the same bytes.
"""

import torch

import hotplan

# The server's tables: the full slot of each token of each request, and the sliding-window slot of each full slot.
req_to_token = torch.arange(4 * 512, dtype=torch.int32).view(4, 512)
full_to_state = torch.arange(4 * 512)

# Two requests, in rows 1 and 2 of the tables. The first brings its whole prompt of 261 tokens; of the second five
# tokens are there already and three come now.
rid = torch.tensor([1, 2])
seq_lens = torch.tensor([261, 8])
extend_lens = torch.tensor([261, 3])

plans = hotplan.plan_step_prefill(
    rid, req_to_token, full_to_state, seq_lens, extend_lens, num_q_tokens=264, swa_page_size=256
)
for ratio, plan in plans.items():
    print(f"c{ratio}: {len(plan.compress)} windows close, {len(plan.write)} tokens are kept for later")
print(hotplan.plans.describe(plans[128]))

# The next token of each.
decode = hotplan.plan_step_decode(rid, req_to_token, full_to_state, seq_lens + 1, swa_page_size=256)
print(hotplan.plans.describe(decode[4], "decode"))
