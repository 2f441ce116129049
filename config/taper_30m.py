# Internal-Taper with the scale anchor, 30 M parameters, on TinyStories: the paper's setting (arXiv
# 2602.10408), but for the gate. Theirs ends with the run: --gate_end_ratio=1, here as at the other sizes.

dataset = "tinystories"  # 10k vocabulary

n_layer = 8
n_head = 16
n_embd = 512
block_size = 512

taper = "internal"  # the norms in the blocks go, the one before the head stays
aux_weight = 0.1  # lambda
ema_rate = 0.01  # mu
gate_end_ratio = 0.5  # down at half of the run; the paper's gate cost more (results/NOTES.md)

batch_size = 16  # 16 * 512 = 8,192 tokens a step
max_iters = 1_000_000  # 8.2 G tokens
learning_rate = 3e-4  # 5% warmup, then cosine to zero: the defaults
beta1, beta2 = 0.9, 0.95
weight_decay = 0.0
grad_clip = 1.0

eval_interval = 5000
log_interval = 100
ckpt_interval = 5000
