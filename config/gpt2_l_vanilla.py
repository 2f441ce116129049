# GPT-2 Large (36 blocks, 774 M parameters) fine-tuned with its norms. Code: gpt2-large_aux, on 180 GB.
from config.gpt2 import *

out_dir = "out/gpt2_l_vanilla"
init_from = "gpt2-large"

batch_size = 28  # Code
gradient_accumulation_steps = 18  # Code: 18 * 28 * 1024 = 516,096 tokens a step
grad_checkpoint = True  # for 80 GB, as XL; never tried there
max_iters = 600  # Paper, and the published checkpoint: 310 M tokens
learning_rate = 3e-4  # Code
min_lr = 4e-5  # Code
warmup_iters = 15  # Code
lr_decay_iters = 1200  # Code: the published checkpoint is from the middle of the cosine, at 1.7e-4
