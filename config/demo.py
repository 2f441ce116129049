# Two minutes on two cores, no network: a 0.5 M parameter model learns the Python standard library's source,
# keeps its norms for 60 steps, loses them over the next 440, and trains on without for the last 100.

out_dir = "out/demo"
dataset = "stdlib"  # train.py prepares it

n_layer = 4
n_head = 4
n_embd = 64
block_size = 256
batch_size = 8  # 8 * 256 = 2048 tokens a step

taper = "internal"
aux_weight = 0.1

max_iters = 600
learning_rate = 3e-3
warmup_iters = 60
gate_start = 60
gate_end = 500

eval_interval = 200
log_interval = 10
ckpt_interval = 100
