# Qwen3 8B, as the 0.6B. Its adapters have 4.15 G numbers: with gradients and AdamW's averages in float32 66.5
# GB, and 16.4 of frozen weights. So it takes cards together:
#   torchrun --nproc_per_node=2 train.py config/distill_qwen_8b.py --shard=True
# python scripts/plan.py config/distill_qwen_8b.py --ranks=2 --shard=True counts 56.4 GB each, activations
# and all; on one card 102.2 GB. Never run.
# Before it:
#   python scripts/couple.py Qwen/Qwen3-8B --data=nemotron_qwen --alpha=1.09 --keep=1 \
#       --out=out/qwen_8b_coupled
from config.distill_llama_1b import *

dataset = "nemotron_qwen"
init_from = "out/qwen_8b_coupled"
teacher = "Qwen/Qwen3-8B"

batch_size = 1
gradient_accumulation_steps = 32
