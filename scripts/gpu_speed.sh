#!/usr/bin/env bash
# Every speed table that wants a GPU, in one call:
#
#     bash scripts/gpu_speed.sh results/speed_h200
#     TRY=1 bash scripts/gpu_speed.sh /tmp/try      # the same commands at toy sizes, on a CPU too
#
# Writes to the folder: prefill.txt and decode.txt (bench.py's tables, the paper's shape) with their .json,
# and train.txt: tok/s and the share of the card's measured matrix rate in training at 30 M parameters, a line
# for each variant, without and with --cuda_graph. Check that the two end with the same loss but for rounding.
set -euo pipefail
out=$(mkdir -p "${1:?name a folder for the tables}" && cd "$1" && pwd)
cd "$(dirname "$0")/.."
if [ -n "${TRY:-}" ]; then
    shape="--n_embd=32 --n_layer=2 --n_head=2 --vocab_size=500 --block_size=64 --iters=3 --warmup=1"
    prefill="--batch=1 --seq=16,32" decode="--batch=1,2 --seq=16"
    train="--n_embd=32 --n_layer=2 --n_head=2 --block_size=64 --batch_size=2 --max_iters=40 --log_interval=10"
    graphs=False
else
    shape="--n_embd=512 --n_layer=8 --n_head=16 --vocab_size=10000 --iters=100"
    prefill="--batch=1,4 --seq=128,256,512" decode="--batch=1,4,16,64 --seq=512"
    train="--max_iters=400 --log_interval=50" graphs="False True"
fi

# shellcheck disable=SC2086  # the flags are words
{
    python bench.py $shape $prefill --out="$out/prefill.json" | sed '$d' | tee "$out/prefill.txt"
    python bench.py $shape $decode --mode=decode --variants=baseline,weightless,coupled,coupled_folded \
        --out="$out/decode.json" | sed '$d' | tee "$out/decode.txt"
    : >"$out/train.txt"
    runs=$(mktemp -d)
    trap 'rm -rf "$runs"' EXIT
    for norm in rmsnorm coupled layernorm cbwc dyt derf; do
        for taper in none $([ $norm = rmsnorm ] && echo internal); do
            for graph in $graphs; do
                run="$runs/$norm-$taper-$graph"
                python train.py config/baseline_30m.py --dataset=stdlib --vocab_size=10000 $train \
                    --norm=$norm --taper=$taper --cuda_graph=$graph --out_dir="$run" \
                    --eval_interval=1000000 --ckpt_interval=1000000 >"$runs/log" 2>&1 ||
                    { cat "$runs/log"; exit 1; }
                python - "$run" <<'PYTHON' | tee -a "$out/train.txt"
import statistics, sys
from pathlib import Path

from nanonorm.log import read_log

folder = Path(sys.argv[1])
log = read_log(folder / "metrics.jsonl")
lines = [line for line in log.lines if "perf/tok_s" in line][1:]  # the first holds the compilation
speed, mfu = (statistics.median(line[key] for line in lines) for key in ("perf/tok_s", "perf/mfu"))
norm, taper, graph = folder.name.split("-")
rate = f"{speed:,.0f} tok/s, {mfu:.1%} of the matrix rate, medians of {len(lines)} log lines"
how = f"norm {norm}, taper {taper}, CUDA graph {graph}"
print(f"{how}: {rate}, last loss {lines[-1]['train/loss']:.4f}, {log.header['versions']['device']}")
PYTHON
            done
        done
    done
}
