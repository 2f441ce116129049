# Llama's shape (grouped queries, RoPE, SwiGLU, RMSNorm, tied) at 2.3 M parameters, 12 * (128 * 128 * 2 +
# 2 * 128 * 64 + 3 * 128 * 320 + 2 * 128) + 2,048 * 128 + 128, pre-trained on stories: what
# the study coupled_posthoc takes half of the norms' statistics out of, where no pretrained Llama can be
# had. The corpus has 2,048 token ids:
#   python data/tinystories/prepare.py --vocab_size=2048 --out_dir=data/tinystories_2k
# with --text=... --val_text=... where the hub cannot be reached.

dataset = "tinystories_2k"

n_layer = 12
n_head = 4
n_kv_head = 2
n_embd = 128
hidden = 320
block_size = 256
norm = "rmsnorm"

batch_size = 16  # 16 * 256 = 4,096 tokens a step
max_iters = 8000  # 33 M tokens
learning_rate = 2e-3
min_lr = 1e-4
warmup_iters = 400
lr_decay_iters = 6400  # the last fifth is at min_lr, so that the network is done
beta1, beta2 = 0.9, 0.95
weight_decay = 0.1
grad_clip = 1.0

eval_interval = 400
log_interval = 20
ckpt_interval = 400
