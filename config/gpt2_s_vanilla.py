# GPT-2 Small (12 blocks, 124 M parameters) fine-tuned with its norms. Code: gpt2_aux.
from config.gpt2 import *

out_dir = "out/gpt2_s_vanilla"
init_from = "gpt2"

batch_size = 32  # Code
gradient_accumulation_steps = 16  # Code: 16 * 32 * 1024 = 524,288 tokens a step
max_iters = 300  # Paper, and the published checkpoint: 157 M tokens
learning_rate = 6e-4  # Code
min_lr = 3e-4  # Code
warmup_iters = 25  # Code, Paper
