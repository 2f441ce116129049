# Qwen3 0.6B: alpha 1.09 and one kept block, as published for the family. Its tokens:
#   python data/nemotron/prepare.py --tokenizer=Qwen/Qwen3-0.6B --out_dir=data/nemotron_qwen
#   python scripts/couple.py Qwen/Qwen3-0.6B --data=nemotron_qwen --alpha=1.09 --keep=1 \
#       --out=out/qwen_0_6b_coupled
from config.distill_llama_1b import *

dataset = "nemotron_qwen"
init_from = "out/qwen_0_6b_coupled"
teacher = "Qwen/Qwen3-0.6B"
