#!/usr/bin/env bash
# Studies on the small TinyStories config: what each variant costs, when a taper's gate should be down, and what
# that depends on. In one call, or study by study:
#
#     STORIES=DIR bash scripts/tinystories_small.sh                # all of it: half a day on two cores
#     STORIES=DIR bash scripts/tinystories_small.sh gate dyt       # some
#
# The DIR holds train.txt and valid.txt, in which a line <|endoftext|> follows every story. JOBS (2) runs at a
# time, THREADS (1) for each; FLAGS go to every run, such as "--compile=True --dtype=bfloat16" for a CPU with
# AMX, and win over the study's own. All is kept in data/ and out/small/: the same call goes on after an
# interruption.
set -euo pipefail
cd "$(dirname "$0")/.."
all=(rate rate_long controls gate gate_long curve start start_fresh unit recipe recipe_long width variants dyt)
[ $# -gt 0 ] || set -- "${all[@]}"
for study in "$@"; do
    case " ${all[*]} " in
        *" $study "*) ;;
        *) echo "no study $study: ${all[*]}" >&2; exit 2 ;;
    esac
done

corpus=$PWD/data/tinystories_2k
if [ ! -e "$corpus/meta.json" ]; then
    STORIES=$(realpath "${STORIES:?name a folder}")
    dir=$(basename "$STORIES") # the corpus's record names the text by a relative path
    prepare=$PWD/data/tinystories/prepare.py
    (cd "$(dirname "$STORIES")" && python "$prepare" --text="$dir/train.txt" --val_text="$dir/valid.txt" \
        --vocab_size=2048 --out_dir="$corpus")
fi

status=0
sweep() { # a study's folder, the grid: runs that look at the validation split at their end alone
    local code=0
    # shellcheck disable=SC2086  # the flags are words
    python scripts/sweep.py config/tinystories_small.py --out="out/small/$1" "${@:2}" \
        --jobs="${JOBS:-2}" --threads="${THREADS:-1}" --eval_interval=1000000 ${FLAGS:-} || code=$?
    case $code in
        0) ;;
        1) status=1 ;;     # a run of it failed: the other studies go on
        *) exit "$code" ;; # wrong flags, or Ctrl-C
    esac
}

tapers=internal_aux,all_aux
anchored=baseline_aux,$tapers
fresh=9,10,11,12,13,14,15,16
half=--gate_end_ratio=0.5 # said in each study, whatever a config file has

rate() { # the learning rate, the baseline's and the tapers'
    sweep rate --seed=1,2,3 --variants=baseline,$anchored --learning_rate=1e-3,3e-3,4e-3,6e-3,1e-2 $half
    sweep rate_3e-4 --seed=1,2,3 --variants=baseline,$anchored --learning_rate=3e-4 $half # the paper's
}

rate_long() {
    sweep rate_long --seed=1,2 --max_iters=8000 --variants=baseline,$anchored --learning_rate=2e-3,4e-3,6e-3 $half
}

controls() { # what a critic would give the baseline: weight decay, other first weights
    sweep decay --seed=1,2 --variants=baseline,$anchored --weight_decay=0.1 $half
    sweep fan_in --seed=1,2 --variants=baseline,$anchored --init=fan_in --emb_scale=8 $half
}

gate() { # when the gate is down
    sweep gate --seed=1,2,3 --variants=baseline,$anchored --gate_end_ratio=0.125,0.25,0.5,0.75,1
    sweep gate_6e-3 --seed=1,2 --learning_rate=6e-3 --variants=baseline,$anchored --gate_end_ratio=0.25,0.5,0.75,1
}

gate_long() {
    sweep gate_long --seed=1,2,3 --max_iters=8000 --variants=baseline,$anchored --gate_end_ratio=0.25,0.5,0.75,1
}

curve() { # by which curve, and with a learning rate that does not end at 0
    sweep linear --seed=1,2 --variants=$tapers --gate_schedule=linear --gate_end_ratio=0.5,0.75,1
    sweep floor --seed=1,2 --variants=baseline,$anchored --min_lr=1e-3 --gate_end_ratio=0.75,1
}

start() { # when the taper begins, and the anchor's target freezes: within the warmup, and after it
    sweep start --seed=9,10,11,12,13,14 --variants=$anchored --gate_start=25 $half
    sweep start_6e-3 --seed=9,10,11,12,13,14 --learning_rate=6e-3 --variants=baseline_aux,internal_aux \
        --gate_start=25 $half
    sweep start_late --seed=9,10,11 --variants=baseline_aux,internal_aux --gate_start=400 $half
    sweep start_alone --seed=9,10,11 --variants=internal --gate_start=25 $half # no anchor: one is known to fail
    sweep start_long --seed=9,10 --max_iters=8000 --variants=baseline_aux,internal_aux --gate_start=100 $half
}

start_fresh() { # the early start on seeds that chose nothing, and at a higher rate
    sweep start_fresh --seed=15,16,17,18,19,20,21,22,23,24,25,26 --learning_rate=6e-3 \
        --variants=baseline_aux,internal_aux --gate_start=25 $half
    sweep start_fresh_8e-3 --seed=15,16,17,18,19,20 --learning_rate=8e-3 --variants=baseline_aux,internal_aux \
        --gate_start=25 $half
}

unit() { # one lambda for the anchor in the scale's own units, at three widths and at a high rate
    local relative="--variants=internal_aux --anchor_unit=relative --aux_weight=0.015 $half"
    # shellcheck disable=SC2086  # flags
    {
        sweep relative --seed=9,10,11 $relative
        sweep relative_128 --seed=1,2,3 --n_embd=128 $relative
        sweep relative_256 --seed=1,2 --n_embd=256 $relative
        sweep relative_1e-2 --seed=9,10,11 --learning_rate=1e-2 $relative
    }
    sweep unit_1e-2 --seed=9,10,11 --learning_rate=1e-2 --variants=baseline_aux,internal_aux $half
}

recipe() { # on fresh seeds, of which 9 to 14 chose half of the run over three quarters
    sweep recipe --seed=$fresh,17,18,19,20 --variants=baseline,$anchored $half
}

recipe_long() {
    sweep recipe_long --seed=$fresh --max_iters=8000 --variants=baseline,$anchored $half
}

width() { # twice and four times as wide; there also at half the rate, and from an earlier start
    local blocks="--variants=baseline_aux,internal_aux $half"
    sweep width --seed=1,2,3 --n_embd=128 --variants=$anchored $half
    # shellcheck disable=SC2086  # flags
    {
        sweep width_256 --seed=1,2 --n_embd=256 $blocks
        sweep width_256_2e-3 --seed=1,2 --n_embd=256 --learning_rate=2e-3 $blocks
        sweep width_256_early --seed=1 --n_embd=256 --gate_start=25 $blocks
    }
}

variants() { # the other rows of the tables, and the tapers with the paper's gate
    local seeds=9,10,11,12,13,14
    sweep variants --seed=$seeds --variants=internal,final,all,coupled,layernorm,cbwc $half
    sweep coupled_grad --seed=$seeds --variants=coupled --coupled_grad=True
    sweep dyt_best --seed=9,10,11 --variants=dyt --init=fan_in --emb_scale=32 --dyt_alpha="(2,2,2)" \
        --learning_rate=3e-3
    sweep derf_best --seed=9,10,11 --variants=derf --init=fan_in --emb_scale=64 --learning_rate=3e-3
    sweep paper --seed=$seeds --variants=internal,internal_aux,all,all_aux --gate_end_ratio=1
}

dyt() { # a grid, one seed and half the steps: first weights, the embedding's scale, alpha, learning rate
    sweep dyt_here --seed=1 --max_iters=1000 --variants=baseline,dyt --learning_rate=1e-3,3e-3 \
        --dyt_alpha="None,(1,1,1),(2,2,2)"
    sweep dyt --seed=1 --max_iters=1000 --variants=baseline,dyt --init=fan_in --emb_scale=8,32,64 \
        --learning_rate=1e-3,3e-3 --dyt_alpha="None,(1,1,1),(2,2,2)"
    sweep dyt_alpha --seed=1 --max_iters=1000 --variants=dyt --init=fan_in --emb_scale=32,64 \
        --learning_rate=3e-3,6e-3 --dyt_alpha="(4,4,4),(4,4,1)"
    sweep dyt_head --seed=1 --max_iters=1000 --variants=dyt --init=fan_in --emb_scale=32,64 \
        --learning_rate=3e-3 --dyt_alpha="(0.5,0.5,2),(1,1,4),(2,2,4)"
}

for study in "$@"; do "$study"; done
exit "$status"
