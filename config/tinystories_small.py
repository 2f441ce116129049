# A TinyStories run for two CPU cores, minutes long: Internal-Taper with the anchor on 0.33 M parameters. The
# study tinystories_small starts from it. The corpus has 2,048 token ids:
#   python data/tinystories/prepare.py --vocab_size=2048 --out_dir=data/tinystories_2k
# with --text=... --val_text=... where the hub cannot be reached.

from config.taper_30m import *

dataset = "tinystories_2k"

n_layer = 4
n_head = 4
n_embd = 64
block_size = 128

max_iters = 2000  # 16 * 128 = 2,048 tokens a step, 4.1 M in all
learning_rate = 4e-3  # level with 1e-2, as the plain baseline is; the anchored one is best at 1e-2

eval_interval = 500
log_interval = 10
ckpt_interval = 500
