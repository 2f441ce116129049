# Llama 3.2 1B with CoupledNorm, brought back to what it could do by DoRA. What is published: alpha 1.1 for
# both Llamas, the first four blocks as they were, rank 1024, alpha 2048, KL to the teacher alone, and the
# STEM part of Nemotron's data. Not published, and chosen here: the checkpoint (the paper does not say whether
# Instruct or Base; 46.0 on MMLU before would fit Instruct), steps, rate, batch, temperature, and whether the
# gradient stops at the reused statistic. Before it:
#   python data/nemotron/prepare.py --tokenizer=meta-llama/Llama-3.2-1B-Instruct --out_dir=data/nemotron_llama
#   python scripts/couple.py meta-llama/Llama-3.2-1B-Instruct --data=nemotron_llama --alpha=1.1 --keep=4 \
#       --out=out/llama_1b_coupled

dataset = "nemotron_llama"
init_from = "out/llama_1b_coupled"
teacher = "meta-llama/Llama-3.2-1B-Instruct"

coupled_grad = True  # with it stopped, all 9 runs of SmolLM2 went away from the teacher (results/smollm2)

# All projections. qkv as one matrix has rank min(3072, 2048), gate_up 2048: more than the published rank of
# each of their parts, 1.0 G numbers in all.
adapter = "dora"
adapter_rank = 1024
adapter_alpha = 2048

block_size = 1024
batch_size = 4
gradient_accumulation_steps = 8  # 8 * 4 * 1024 = 32,768 tokens a step
max_iters = 2000  # 66 M tokens
learning_rate = 2e-5
warmup_iters = 100
dtype = "bfloat16"  # of the frozen weights too

eval_interval = 250
log_interval = 10
ckpt_interval = 250
