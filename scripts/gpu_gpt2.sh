#!/usr/bin/env bash
# GPT-2 without LayerNorm: Table 4 of the TaperNorm paper in one call, where the Hugging Face hub is in reach:
#
#     bash scripts/gpu_gpt2.sh results/gpt2               # four sizes, four protocols, on a GPU of 80 GB
#     SIZES="s m" bash scripts/gpu_gpt2.sh results/gpt2   # some sizes
#     SHAPE=1 bash scripts/gpu_gpt2.sh results/gpt2       # no hub: GPT-2 Small's shape with random weights,
#                                                         # speed and memory of each protocol's steps
#     TRY=1 bash scripts/gpu_gpt2.sh /tmp/try             # the same at toy sizes, offline, on a CPU too
#
# First of all OpenAI's GPT-2 Small and the published FakeLN must have the losses on OpenWebText that were
# published, to 0.005: else the evaluation is another one, and nothing that follows could be compared. The
# runs are kept in out/gpt2_<size>_<protocol>: the same call goes on after an interruption.
set -euo pipefail
out=$(mkdir -p "${1:?name a folder for the tables}" && cd "$1" && pwd)
cd "$(dirname "$0")/.."
sizes=${SIZES:-s m l xl} runs=out sets=data corpus=data/openwebtext more="" vocab=50257
published=schaeff/gpt2-small_LNFree300
declare -A hub=([s]=gpt2 [m]=gpt2-medium [l]=gpt2-large [xl]=gpt2-xl)

# --- toys

if [ -n "${TRY:-}" ]; then
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    export HF_HUB_OFFLINE=1
    runs=$work sets=$work corpus=$work/openwebtext
    more="--device=cpu --block_size=32 --batch_size=8 --gradient_accumulation_steps=2 --max_iters=110
        --lr_decay_iters=110 --eval_interval=110 --dtype=float32"
    if [ -z "${SHAPE:-}" ]; then
        python - "$work/gpt2" <<'PYTHON'
import sys
from pathlib import Path

from tokenizers import ByteLevelBPETokenizer
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

folder, end = sys.argv[1], "<|endoftext|>"
bpe = ByteLevelBPETokenizer()
bpe.train(["README.md"], vocab_size=400, special_tokens=[end], show_progress=False)
PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, bos_token=end, eos_token=end).save_pretrained(folder)
size = dict(vocab_size=bpe.get_vocab_size(), n_layer=12, n_embd=16, n_head=2, n_positions=32)
GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0)).save_pretrained(folder)
PYTHON
        more="$more --dataset=$corpus"
        sizes=s hub=([s]=$work/gpt2) published=$work/gpt2
        python data/openwebtext/prepare.py --text=model.py --val_text=train.py --tokenizer="$work/gpt2" \
            --out_dir="$corpus"
        for set in openwebtext pile pile_filtered; do
            python data/held_out.py --text=bench.py --tokenizer="$work/gpt2" --out_dir="$sets/held_out_$set"
        done
    fi
fi

# --- what a protocol's steps cost

shape() { # protocol, flags: a line with the speed of each phase, and the memory at most
    python - "$@" <<'PYTHON' | tee -a "$out/shape.txt"
import contextlib, runpy, statistics, sys, tempfile
from pathlib import Path
from types import SimpleNamespace

import torch

from nanonorm.log import read_log
from nanonorm.schedules import phase_at

name, *flags = sys.argv[1:]
with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
    run = Path(folder) / "run"
    sys.argv = ["train.py", *flags, f"--out_dir={run}"]
    runpy.run_path("train.py", run_name="__main__")
    log = read_log(run / "metrics.jsonl")
settings, speeds = log.header["settings"], {}
for line in log.lines:
    phase = phase_at(line["iter"] - 1, SimpleNamespace(**settings)) if settings["taper"] != "none" else "norm"
    speeds.setdefault(phase, []).append(line["perf/tok_s"])
of_phase = ", ".join(f"{p} {statistics.median(s[1:]):,.0f}" for p, s in speeds.items())  # the first compiles
peak = "no GPU"
if torch.cuda.is_available():
    peak = f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB of tensors at most"
windows = settings["batch_size"], settings["gradient_accumulation_steps"], settings["block_size"]
print(f"{name}: tok/s {of_phase}; {peak}; a step is {windows[1]} x {windows[0]} x {windows[2]} tokens;",
      f"{log.header['versions']['device']}, torch {log.header['versions']['torch']}")
PYTHON
}

if [ -n "${SHAPE:-}" ]; then
    if [ ! -e data/stdlib/meta.json ]; then python data/stdlib/prepare.py; fi
    : >"$out/shape.txt"
    if [ -n "${TRY:-}" ]; then more="$more --n_layer=2 --n_embd=16 --n_head=2" vocab=2048; fi
    for protocol in vanilla fakeln internal all; do
        gate="--gate_start=4"
        case $protocol in
        fakeln) gate="$gate --gate_gaps=0,0,1 --max_iters=20" ;;
        internal | all) gate="$gate --gate_end=8" ;;
        esac
        # shellcheck disable=SC2086  # the flags are words
        shape $protocol config/gpt2_124m.py config/gpt2.py:s_$protocol --init_from=scratch --dataset=stdlib \
            --vocab_size=$vocab $more --max_iters=12 --warmup_iters=2 --lr_decay_iters=12 $gate \
            --ckpt_interval=1000000 --eval_interval=1000000
    done
    exit 0
fi

# --- the evaluation must be the published one

if [ ! -e "$corpus/meta.json" ]; then python data/openwebtext/prepare.py; fi
held_out() { # set
    if [ ! -e "$sets/held_out_$1/meta.json" ]; then
        python data/held_out.py --set="$1" --out_dir="$sets/held_out_$1"
    fi
}
held_out openwebtext
fail() {
    echo "evaluate.py did not find the published losses on OpenWebText; its reason is above" >&2
    echo "so nothing was trained" >&2
    exit 2
}
within=--within=0.005
if [ -n "${TRY:-}" ]; then within=""; fi # toys have no published loss
# shellcheck disable=SC2086  # one word or none
python scripts/evaluate.py "${hub[s]}" "$published" --data="$sets/held_out_openwebtext" $within \
    --out="$out/check.json" || fail

# --- the runs

data=""
for set in openwebtext pile pile_filtered; do
    held_out $set
    data="$data${data:+,}$sets/held_out_$set"
done
for size in $sizes; do
    done=""
    for protocol in vanilla fakeln internal all; do
        run=$runs/gpt2_${size}_$protocol from=${hub[$size]}
        done="$done $run"
        if [ -e "$run/folded.pt" ] || [ -e "$run/model.pt" ]; then continue; fi
        if [ -e "$run/ckpt.pt" ] || [ -e "$run/ckpt.prev.pt" ]; then from=resume; fi
        # shellcheck disable=SC2086
        python train.py "config/gpt2.py:${size}_$protocol" --init_from="$from" --out_dir="$run" $more
    done
    # shellcheck disable=SC2086
    python scripts/evaluate.py "${hub[$size]}" $done --vanilla="$runs/gpt2_${size}_vanilla" --data="$data" \
        --out="$out/$size.json"
done
