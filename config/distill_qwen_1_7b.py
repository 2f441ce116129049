# Qwen3 1.7B, as the 0.6B.
#   python scripts/couple.py Qwen/Qwen3-1.7B --data=nemotron_qwen --alpha=1.09 --keep=1 \
#       --out=out/qwen_1_7b_coupled
from config.distill_llama_1b import *

dataset = "nemotron_qwen"
init_from = "out/qwen_1_7b_coupled"
teacher = "Qwen/Qwen3-1.7B"
