#!/usr/bin/env bash
# CoupledNorm in a network that is trained already, at 2.3 M parameters: pre-training, what each choice of
# alpha and kept blocks does untrained, DoRA distillation of three choices by three seeds, with the gradient
# stopped at the statistic and through it, and the report of it, in one call:
#
#     STORIES=DIR bash scripts/coupled_posthoc.sh results/coupled_posthoc
#     TRY=1 bash scripts/coupled_posthoc.sh /tmp/try     # at toy sizes, on text of this repository
#
# The DIR holds train.txt and valid.txt, in which a line <|endoftext|> follows every story. The choices are
# "none 0" and the two of the least KL untrained. JOBS (2) distillations at a time, THREADS (1) for each;
# PRETRAIN are flags of the pre-training alone, such as "--compile=True --dtype=bfloat16" for a CPU with AMX.
# All is kept in data/ and out/ (with TRY in the folder WORK, if that is given): the same call goes on after an
# interruption.
set -euo pipefail
out=$(mkdir -p "${1:?name a folder for the report}" && cd "$1" && pwd)
here=$(cd "$(dirname "$0")/.." && pwd)
work=$here seeds=1,2,3 vocab=2048 base="" more="" tokens=65536 data=tinystories_2k
if [ -n "${TRY:-}" ]; then
    if [ -z "${WORK:-}" ]; then
        WORK=$(mktemp -d)
        trap 'rm -rf "$WORK"' EXIT
    fi
    work=$WORK data=$WORK/data/tinystories_2k
    mkdir -p "$work/text" "$work/data"
    STORIES=$work/text
    cat "$here"/nanonorm/*.py >"$work/text/train.txt"
    cp "$here/model.py" "$work/text/valid.txt"
    seeds=1,2 vocab=400 tokens=500
    base="--n_layer=5 --n_embd=16 --n_head=2 --n_kv_head=1 --hidden=24 --block_size=32 --batch_size=2
        --max_iters=30 --warmup_iters=3 --lr_decay_iters=20 --eval_interval=6 --log_interval=5"
    more="--batch_size=2 --block_size=32 --max_iters=4 --warmup_iters=1 --eval_interval=2 --log_interval=1
        --adapter_rank=8"
fi
STORIES=$(realpath "${STORIES:?name a folder}")
cd "$work"
corpus=$work/data/tinystories_2k runs=out/coupled_posthoc

if [ ! -e "$corpus/meta.json" ]; then
    dir=$(basename "$STORIES") # the corpus's record names the text by a relative path
    (cd "$(dirname "$STORIES")" && python "$here/data/tinystories/prepare.py" --text="$dir/train.txt" \
        --val_text="$dir/valid.txt" --vocab_size=$vocab --out_dir="$corpus")
fi
# shellcheck disable=SC2086  # the flags are words
python "$here/train.py" "$here/config/llama_tiny.py" --init_from=auto --out_dir=out/llama_tiny --dataset="$data" \
    $base ${PRETRAIN:-}

start() { # alpha, kept blocks: a network to distil, and the config file that begins with it
    name=$1_$2
    if [ ! -e "$runs/start/$name/couple.json" ]; then
        python "$here/scripts/couple.py" out/llama_tiny --data="$data" --alpha="$1" --keep="$2" \
            --window=256 --tokens=$tokens --compared=$tokens \
            --out="$runs/start/$name"
    fi
    echo "init_from = \"$runs/start/$name\"" >"$runs/start/$name.py"
}
start none 0
python - "$runs/start/none_0/couple.json" >"$runs/start/best" <<'PYTHON'
import json
import sys
from pathlib import Path

choices = json.loads(Path(sys.argv[1]).read_bytes())["choices"]
others = [c for c in choices if (c["alpha"], c["kept"]) != ("none", 0)]
for choice in sorted(others, key=lambda c: c["kl"])[:2]:
    print(choice["alpha"], choice["kept"])
PYTHON
while read -r alpha kept; do start "$alpha" "$kept"; done <"$runs/start/best"

distil() { # alpha, kept blocks, where the gradient goes, flags: all seeds
    # shellcheck disable=SC2086
    python "$here/scripts/sweep.py" "$here/config/distill_tiny.py" "$runs/start/$1_$2.py" \
        --out="$runs/$1_$2_$3" --seed=$seeds --dataset="$data" --threads="${THREADS:-1}" $more "${@:4}"
}
export -f distil
export here runs data seeds more
while read -r alpha kept; do
    printf '%s\n' "$alpha $kept stopped" "$alpha $kept through --coupled_grad=True"
done <<<"none 0
$(cat "$runs/start/best")" | xargs -P "${JOBS:-2}" -I{} bash -c "distil {}"
python "$here/scripts/report.py" couple "$runs" --base=out/llama_tiny --out="$out"
