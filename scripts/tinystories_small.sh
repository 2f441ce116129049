#!/usr/bin/env bash
# Studies on the small TinyStories config: when a taper's gate is down, and what DyT needs to train. In one
# call, or study by study:
#
#     STORIES=DIR bash scripts/tinystories_small.sh                # all of it: hours on two cores
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

tapers=internal,internal_aux,all,all_aux

gate() { # when the gate is down
    sweep gate --seed=1,2 --variants=baseline,$tapers --gate_end=250,500,1000,1500,2000
}

linear() { # by which curve
    sweep linear --seed=1,2 --variants=$tapers --gate_schedule=linear --gate_end=500,1000,2000
}

rate() { # with a learning rate that does not end at 0
    sweep rate --seed=1,2 --variants=baseline,internal,all --min_lr=3e-4 --gate_end=1000,2000
}

dyt() { # the grid, one seed and half the steps
    sweep dyt --seed=1 --max_iters=1000 --variants=baseline,dyt --init=gpt2,fan_in --emb_scale=None,8 \
        --learning_rate=1e-3,3e-3 --dyt_alpha="None,(1,1,1),(2,2,2)"
}

[ $# -gt 0 ] || set -- gate linear rate dyt
for study in "$@"; do
    case $study in
        gate | linear | rate | dyt) "$study" ;;
        *) echo "no study $study: gate, linear, rate, dyt" >&2; exit 2 ;;
    esac
done
