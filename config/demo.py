# A minute and a half on two cores, no network: 0.33 M parameters learn from the Python standard library's
# source, with RMSNorm for 80 steps, with the gate going down over the next 560, and without any norm in the
# blocks for the last 160.

dataset = "stdlib"  # train.py prepares it

n_layer = 4
n_head = 4
n_embd = 64
block_size = 256
batch_size = 8  # 8 * 256 = 2,048 tokens a step, 1.6 M in all: half of the corpus

taper = "internal"
aux_weight = 0.1

max_iters = 800
learning_rate = 3e-3
warmup_iters = 80
gate_end_ratio = 0.8

eval_interval = 400
log_interval = 10
ckpt_interval = 100
