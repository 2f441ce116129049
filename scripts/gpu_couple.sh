#!/usr/bin/env bash
# The CoupledNorm paper's second half, and its pretraining half, on one GPU in one call:
#
#     bash scripts/gpu_couple.sh results/coupled_h200      # needs the Hugging Face hub
#     MODELS="qwen_0_6b" SEEDS="" bash scripts/gpu_couple.sh FOLDER
#     TRY=1 bash scripts/gpu_couple.sh /tmp/try            # the same commands at toy sizes, on a CPU, no hub
#
# Writes to the folder: decode.txt, .json and .png (Figure 2 on the shapes of Llama 1B and Qwen 0.6B, random
# weights), NAME.md and NAME.png (the stream by block, each choice before training) and NAME.txt (the
# distillation's validation, then Table 2's tasks before and after) of every model, pretraining.txt. The runs
# are kept in out/: the same call goes on after an interruption.
set -euo pipefail
out=$(mkdir -p "${1:?name a folder for the tables}" && cd "$1" && pwd)
cd "$(dirname "$0")/.."
decode="--mode=decode --variants=baseline,coupled,coupled_folded"
llama="--n_layer=16 --n_embd=2048 --n_head=32 --n_kv_head=8 --hidden=8192 --vocab_size=128256"
qwen="--n_layer=28 --n_embd=1024 --n_head=16 --n_kv_head=8 --head_dim=128 --hidden=3072 --qk_norm=True
    --vocab_size=151936"
if [ -n "${TRY:-}" ]; then
    runs=$(mktemp -d)
    trap 'rm -rf "$runs"' EXIT
    tiny="--dataset=stdlib --n_layer=3 --n_embd=32 --n_head=4 --block_size=32 --device=cpu"
    short="--max_iters=8 --warmup_iters=1 --eval_interval=8 --log_interval=2 --ckpt_interval=4 --batch_size=32
        --gradient_accumulation_steps=1 --device=cpu --compile=False --dtype=float32"
    llama="--n_layer=2 --n_embd=32 --n_head=4 --vocab_size=500" qwen="$llama --qk_norm=True"
    decode="$decode --batch=1,2 --seq=16 --iters=3 --warmup=1"
    models=${MODELS:-toy} seeds=${SEEDS:-1}
else
    runs=out tiny="" short=""
    decode="$decode --batch=1,2,4,8,16,32,64 --seq=128"
    models=${MODELS:-qwen_0_6b llama_1b qwen_1_7b llama_3b qwen_8b} seeds=${SEEDS-8 9 10}
fi

train() { # folder, flags: a new run, or the rest of one
    if [ -e "$1/model.pt" ] || [ -e "$1/folded.pt" ]; then return; fi
    if [ -e "$1/ckpt.pt" ] || [ -e "$1/ckpt.prev.pt" ]; then
        python train.py --init_from=resume --out_dir="$1"
    else
        python train.py "${@:2}" --out_dir="$1"
    fi
}

corpus_of() { # tokenizer, folder
    if [ ! -e "data/$2/meta.json" ]; then
        python data/nemotron/prepare.py --tokenizer="$1" --out_dir="data/$2"
    fi
}

evaluate() { # model, file: a task may be gated, or out of reach; the others count
    DTYPE=bfloat16 bash scripts/lm_eval.sh "$1" --device cuda --batch_size auto >>"$2" ||
        echo "$1: not every task was finished" >>"$2"
}

# shellcheck disable=SC2086  # the flags are words
posthoc() { # name, teacher, corpus, flags of couple.py, flags of train.py
    if [ ! -e "$runs/$1_coupled/model.pt" ]; then
        python scripts/couple.py "$2" --data="$3" --out="$runs/$1_coupled" $4
    fi
    cp "$runs/$1_coupled/couple.md" "$out/$1.md"
    sed -i "s/(rms.png)/($1.png)/" "$out/$1.md"
    cp "$runs/$1_coupled/rms.png" "$out/$1.png"
    train "$runs/distill_$1" $5 --init_from="$runs/$1_coupled" --teacher="$2" --dataset="$3"
    python - "$runs/distill_$1" >"$out/$1.txt" <<'PYTHON'
import sys
from pathlib import Path

from nanonorm.log import read_log

for line in read_log(Path(sys.argv[1]) / "metrics.jsonl").lines:
    if "val/kl" in line:
        print(f"step {line['iter']}: val/loss {line['val/loss']:.4f}, KL to the teacher {line['val/kl']:.5f}")
PYTHON
    if [ -z "${TRY:-}" ]; then
        for path in "$2" "$runs/distill_$1/folded.pt"; do
            evaluate "$path" "$out/$1.txt"
        done
    fi
}

# shellcheck disable=SC2086
{
    : >"$out/decode.txt"
    for name in llama qwen; do
        python bench.py ${!name} $decode --out="$out/decode_$name.json" --speedups="$out/decode_$name.png" |
            sed '$d' | tee -a "$out/decode.txt"
    done
    for name in $models; do
        how="config/distill_$name.py"
        case $name in
            llama_1b) teacher=meta-llama/Llama-3.2-1B-Instruct corpus=nemotron_llama how2="--alpha=1.1 --keep=4" ;;
            llama_3b) teacher=meta-llama/Llama-3.2-3B-Instruct corpus=nemotron_llama how2="--alpha=1.1 --keep=4" ;;
            qwen_0_6b) teacher=Qwen/Qwen3-0.6B corpus=nemotron_qwen how2="--alpha=1.09 --keep=1" ;;
            qwen_1_7b) teacher=Qwen/Qwen3-1.7B corpus=nemotron_qwen how2="--alpha=1.09 --keep=1" ;;
            qwen_8b) teacher=Qwen/Qwen3-8B corpus=nemotron_qwen how2="--alpha=1.09 --keep=1" ;;
            toy)
                train "$runs/toy" $short $tiny
                teacher=$runs/toy corpus=stdlib how2="--keep=1 --tokens=500 --device=cpu"
                how="$short --block_size=32 --adapter=dora --adapter_rank=4"
                ;;
            *) echo "no such model: $name" >&2 && exit 2 ;;
        esac
        if [ $name != toy ]; then corpus_of $teacher $corpus; fi
        posthoc $name "$teacher" $corpus "$how2" "$how"
    done
    if [ -z "${TRY:-}" ] && [ -n "$seeds" ] && [ ! -e data/fineweb_edu/meta.json ]; then
        python data/fineweb_edu/prepare.py
    fi
    : >"$out/pretraining.txt"
    for seed in $seeds; do
        for norm in baseline coupled; do
            run=$runs/gpt2_124m_${norm}_$seed
            train "$run" config/gpt2_124m_baseline.py --norm="${norm/baseline/rmsnorm}" --seed=$seed \
                ${TRY:+--vocab_size=2048 $tiny $short}
            echo "$norm, seed $seed: $(tail -n 1 "$run/metrics.jsonl")" >>"$out/pretraining.txt"
            if [ -z "${TRY:-}" ]; then
                evaluate "$run" "$out/pretraining.txt"
            fi
        done
    done
}
