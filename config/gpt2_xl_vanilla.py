# GPT-2 XL (48 blocks, 1,558 M parameters) fine-tuned with its norms. Code: gpt2-xl_aux, on 180 GB.
from config.gpt2 import *

out_dir = "out/gpt2_xl_vanilla"
init_from = "gpt2-xl"

batch_size = 18  # Code
gradient_accumulation_steps = 28  # Code: 28 * 18 * 1024 = 516,096 tokens a step
grad_checkpoint = True  # for 80 GB: weights, gradients and averages take 25, all activations would not fit
max_iters = 800  # Paper, and the published checkpoint: 413 M tokens
learning_rate = 1e-4  # Code
min_lr = 2e-5  # Code
warmup_iters = 20  # Code, Paper
lr_decay_iters = 1200  # Code: the published checkpoint is from the middle of the cosine, at 4.1e-5
