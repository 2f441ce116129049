# GPT-2 small from scratch: 12 * (12 * 768^2 + 13 * 768) + (50,257 + 1,024) * 768 + 2 * 768 = 124.4 M
# parameters, with GPT-2's own tokens and nanoGPT's recipe. The corpus, which may be another:
#   python data/tinystories/prepare.py --tokenizer=gpt2 --out_dir=data/tinystories_gpt2
# From OpenAI's weights instead: --init_from=gpt2. Without norms in the end: --taper=internal.

dataset = "tinystories_gpt2"  # 50,257 token ids

n_layer = 12
n_head = 12
n_embd = 768
block_size = 1024
positions = "learned"
mlp = "gelu"
bias = True
norm = "layernorm"
norm_eps = 1e-5

batch_size = 12
gradient_accumulation_steps = 40  # 40 * 12 * 1024 = 491,520 tokens a step
max_iters = 600_000  # 295 G tokens
learning_rate = 6e-4
min_lr = 6e-5
warmup_iters = 2000
beta1, beta2 = 0.9, 0.95
weight_decay = 0.1
grad_clip = 1.0

eval_interval = 1000
log_interval = 10
ckpt_interval = 1000
