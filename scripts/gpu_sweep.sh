#!/usr/bin/env bash
# The paper's 1 M and 9 M models, every variant, six seeds, on one GPU, and the report of it, in one call. The
# tapers are there with the gate down at half and, as in the paper, at the end of the run:
#
#     bash scripts/gpu_sweep.sh results/tinystories_h200   # TinyStories as data/tinystories fetches it
#     STEPS=8000 JOBS=4 bash scripts/gpu_sweep.sh FOLDER   # fewer steps, for a corpus of a few megabytes
#     TRY=1 bash scripts/gpu_sweep.sh /tmp/try             # the same commands at toy sizes, on a CPU too
#
# The runs are kept in out/gpu_sweep: the same call goes on after an interruption.
set -euo pipefail
out=$(mkdir -p "${1:?name a folder for the report}" && cd "$1" && pwd)
cd "$(dirname "$0")/.."
if [ -n "${TRY:-}" ]; then
    runs=$(mktemp -d)
    trap 'rm -rf "$runs"' EXIT
    flags="--dataset=stdlib --n_embd=16,32 --n_layer=2 --n_head=2 --block_size=32 --batch_size=2 --seed=1,2
        --max_iters=40 --eval_interval=40 --log_interval=2 --variants=baseline,baseline_aux,internal_aux,coupled
        --gate_end_ratio=0.5,1"
else
    runs=out/gpu_sweep
    flags="--n_embd=64,256 --max_iters=${STEPS:-60000} --eval_interval=2000 --log_interval=20
        --ckpt_interval=2000 --seed=1,2,3,4,5,6 --gate_end_ratio=0.5,1
        --variants=baseline,baseline_aux,internal,internal_aux,final,all,all_aux,coupled,layernorm,cbwc,dyt,derf"
fi
# shellcheck disable=SC2086  # the flags are words
python scripts/sweep.py config/taper_1m.py --out="$runs" --jobs="${JOBS:-4}" $flags || failed=$?
python scripts/report.py papers "$runs" --out="$out"  # of what is finished, whatever failed
exit "${failed:-0}"
