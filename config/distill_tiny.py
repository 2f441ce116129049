# A coupled network of llama_tiny.py's shape, brought back to what that could do. As published: DoRA of half
# the width's rank, alpha twice that, KL to the teacher alone. Steps, rate and batch are chosen here.
# scripts/coupled_posthoc.sh runs it for several choices of alpha and kept blocks. Before it:
#   python scripts/couple.py out/llama_tiny --data=tinystories_2k --out=out/llama_tiny_coupled

out_dir = "out/distill_tiny"
dataset = "tinystories_2k"
init_from = "out/llama_tiny_coupled"
teacher = "out/llama_tiny"

adapter = "dora"
adapter_rank = 64
adapter_alpha = 128

block_size = 256
batch_size = 8  # 8 * 256 = 2,048 tokens a step
max_iters = 600  # 1.2 M tokens
learning_rate = 1e-3
warmup_iters = 30

eval_interval = 100
log_interval = 5
ckpt_interval = 100
