# Llama 3.2 3B, as the 1B, in the same tokens.
#   python scripts/couple.py meta-llama/Llama-3.2-3B-Instruct --data=nemotron_llama --alpha=1.1 --keep=4 \
#       --out=out/llama_3b_coupled
from config.distill_llama_1b import *

dataset = "nemotron_llama"
init_from = "out/llama_3b_coupled"
teacher = "meta-llama/Llama-3.2-3B-Instruct"
