# GPT-2 Medium (24 blocks, 355 M parameters) fine-tuned with its norms. Code: gpt2-medium_fasttune_aux.
from config.gpt2 import *

out_dir = "out/gpt2_m_vanilla"
init_from = "gpt2-medium"

batch_size = 22  # Code
gradient_accumulation_steps = 23  # Code: 23 * 22 * 1024 = 518,144 tokens a step
max_iters = 500  # Paper, and the published checkpoint: 259 M tokens
learning_rate = 6e-4  # Code
min_lr = 3e-4  # Code
warmup_iters = 10  # Code, Paper
