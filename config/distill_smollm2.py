# SmolLM2-135M-Instruct with CoupledNorm, brought back to what it could do. It is a trained Llama that a
# package index has (docs/pretrained.md gets the file). As published: DoRA on all projections, alpha twice the
# rank, KL to the teacher alone. The rank is a quarter of the width, like 1024 for Qwen3 8B. Steps, rates and
# batch are chosen here, for two cores. The study smollm2 runs it, prepares the texts and couples before:
# python scripts/study.py smollm2 --jobs=1 --threads=2 --network=/ABSOLUTE/FILE.gguf --texts=DIR

dataset = "smollm2"
init_from = "out/smollm2/start"
teacher = "HuggingFaceTB/SmolLM2-135M-Instruct"

coupled_grad = True  # stopped at the statistic, all 9 runs went away from the teacher (results/smollm2)

adapter = "dora"
adapter_rank = 144  # 576 / 4; qkv gets 432 and gate_up 288: 65.7 M numbers beside 134.5 M
adapter_alpha = 288

block_size = 256
batch_size = 8  # 8 * 256 = 2,048 tokens a step
max_iters = 600  # 1.2 M tokens, each of the corpus about once
learning_rate = 5e-5
warmup_iters = 30
dtype = "float32"  # val/kl ended at 0.0076 in TF32 on an H200 (n = 3), at 0.0087 in bfloat16 on a CPU (n = 1)

eval_interval = 100
log_interval = 10
ckpt_interval = 100
