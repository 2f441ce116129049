# gpt2_tiny.py trained on with its norms, on the schedule of gpt2_s_vanilla.py, 10/3 times as long.
from config.gpt2 import *

out_dir = "out/gpt2_tiny_vanilla"
init_from = "out/gpt2_tiny"
dataset = "stories_books"

block_size = 128
dtype = "float32"

batch_size = 16  # 16 * 128 = 2,048 tokens a step, half of what gpt2_tiny.py takes
max_iters = 1000
learning_rate = 6e-4
min_lr = 3e-4
warmup_iters = 83  # 25 of 300

eval_interval = 500
ckpt_interval = 250
