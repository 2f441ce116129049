#!/usr/bin/env bash
# Studies on the small TinyStories config: what each variant costs, when a taper's gate should be down, and what
# that depends on. In one call, or study by study:
#
#     STORIES=DIR bash scripts/tinystories_small.sh                # all of it: half a day on two cores
#     STORIES=DIR bash scripts/tinystories_small.sh gate dyt       # some
#
# The DIR holds train.txt and valid.txt, in which a line <|endoftext|> follows every story. JOBS (2) runs at a
# time, THREADS (1) for each; FLAGS go to every run, such as "--compile=True --dtype=bfloat16" for a CPU with
# AMX. All is kept in data/ and out/small/: the same call goes on after an interruption.
set -euo pipefail
cd "$(dirname "$0")/.."
corpus=$PWD/data/tinystories_2k
if [ ! -e "$corpus/meta.json" ]; then
    STORIES=$(realpath "${STORIES:?name a folder}")
    dir=$(basename "$STORIES") # the corpus's record names the text by a relative path
    prepare=$PWD/data/tinystories/prepare.py
    (cd "$(dirname "$STORIES")" && python "$prepare" --text="$dir/train.txt" --val_text="$dir/valid.txt" \
        --vocab_size=2048 --out_dir="$corpus")
fi

sweep() { # a study's folder, the grid: runs that look at the validation split at their end alone
    # shellcheck disable=SC2086  # the flags are words
    python scripts/sweep.py config/tinystories_small.py --out="out/small/$1" "${@:2}" \
        --jobs="${JOBS:-2}" --threads="${THREADS:-1}" --eval_interval=1000000 ${FLAGS:-}
}

anchored=internal_aux,all_aux

rate() { # the learning rate, the baseline's and the tapers'
    sweep rate --seed=1,2 --variants=baseline,$anchored --learning_rate=1e-3,3e-3,4e-3,6e-3,1e-2
}

rate_long() {
    sweep rate_long --seed=1 --max_iters=8000 --variants=baseline --learning_rate=2e-3,6e-3
}

gate() { # when the gate is down
    sweep gate --seed=1,2,3 --variants=baseline,$anchored --gate_end_ratio=0.125,0.25,0.5,0.75,1
}

gate_long() {
    sweep gate_long --seed=1,2,3 --max_iters=8000 --variants=baseline,$anchored --gate_end_ratio=0.25,0.75,1
}

curve() { # by which curve, and with a learning rate that does not end at 0
    sweep curve --seed=1,2 --variants=$anchored --gate_schedule=linear --gate_end_ratio=0.5,0.75,1
    sweep floor --seed=1,2 --variants=baseline,$anchored --min_lr=1e-3 --gate_end_ratio=0.75,1
}

recipe() { # on seeds that chose nothing
    sweep recipe --seed=9,10,11,12,13,14,15,16,17,18,19,20 --variants=baseline,$anchored
}

recipe_long() {
    sweep recipe_long --seed=9,10,11,12,13,14,15,16 --max_iters=8000 --variants=baseline,$anchored
}

width() { # twice as wide
    sweep width --seed=1,2,3 --n_embd=128 --variants=baseline,$anchored
}

variants() { # every row of the tables
    sweep variants --seed=9,10,11,12,13,14 --variants=layernorm,cbwc,internal,final,all --gate_end_ratio=0.75,1
    sweep coupled --seed=9,10,11,12,13,14 --variants=coupled --coupled_grad=False,True
    sweep paper --seed=9,10,11,12,13,14 --variants=$anchored --gate_end_ratio=1
}

dyt() { # the grid, one seed and half the steps: the first weights as for the others, then DyT's
    sweep dyt --seed=1 --max_iters=1000 --variants=baseline,dyt --init=gpt2,fan_in --emb_scale=None,8 \
        --learning_rate=1e-3,3e-3 --dyt_alpha="None,(1,1,1),(2,2,2)"
}

[ $# -gt 0 ] || set -- rate rate_long gate gate_long curve recipe recipe_long width variants dyt
for study in "$@"; do
    case $study in
        rate | rate_long | gate | gate_long | curve | recipe | recipe_long | width | variants | dyt) "$study" ;;
        *) echo "no study $study" >&2; exit 2 ;;
    esac
done
