# Qwen3 8B, as the 0.6B. Its adapters have 4.1 G numbers, in float32 and with AdamW's two averages 66 GB.
#   python scripts/couple.py Qwen/Qwen3-8B --data=nemotron_qwen --alpha=1.09 --keep=1 \
#       --out=out/qwen_8b_coupled
from config.distill_llama_1b import *

dataset = "nemotron_qwen"
init_from = "out/qwen_8b_coupled"
teacher = "Qwen/Qwen3-8B"

batch_size = 1
gradient_accumulation_steps = 32
