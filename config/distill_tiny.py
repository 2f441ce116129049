# A coupled network of llama_tiny.py's shape, brought back to what that could do. As published: DoRA, alpha
# twice the rank, KL to the teacher alone; the rank is a quarter of the width, as 1024 is of Qwen 8B's. Steps,
# rate and batch are chosen here.
# The study coupled_posthoc runs it for several choices of alpha and kept blocks. Before it:
#   python scripts/couple.py out/llama_tiny --data=tinystories_2k --alpha=layer --keep=2 \
#       --out=out/llama_tiny_coupled

dataset = "tinystories_2k"
init_from = "out/llama_tiny_coupled"
teacher = "out/llama_tiny"

adapter = "dora"
adapter_rank = 32
adapter_alpha = 64

block_size = 256
batch_size = 4  # 4 * 256 = 1,024 tokens a step
max_iters = 300  # 0.3 M tokens
learning_rate = 1e-4
warmup_iters = 15

eval_interval = 150
log_interval = 5
ckpt_interval = 150
