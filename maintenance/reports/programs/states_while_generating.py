"""The hidden states of each token while a model generates.

Report: https://github.com/TransformerLensOrg/TransformerLens/issues/697
Command: amanda run -t capture:modules=transformer.h.1 states_while_generating.py
Right: [value.shape[1] for value in values("capture")] == [3, 1, 1, 1]
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
sizes = {"vocab_size": 16, "n_positions": 16, "n_embd": 8, "n_layer": 2, "n_head": 2}
model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=None)).eval()
prompt = torch.tensor([[1, 2, 3]])
model.generate(
    prompt,
    attention_mask=torch.ones_like(prompt),
    max_new_tokens=4,
    do_sample=False,
    pad_token_id=0,
)
