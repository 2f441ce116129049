#!/usr/bin/env bash
# What a GPT-2 of 1 M parameters loses with its LayerNorms: pre-training, four fine-tunings (vanilla, FakeLN,
# Internal- and All-TaperLN) of three seeds each, three held-out texts, and the report of it, in one call:
#
#     STORIES=DIR BOOKS=DIR WIKITEXT=FILE bash scripts/gpt2_small.sh results/gpt2_small
#     TRY=1 bash scripts/gpt2_small.sh /tmp/try     # at toy sizes, on text of this repository
#
# A DIR holds train.txt and valid.txt, in which a line <|endoftext|> follows every document. The network
# learns from both; WIKITEXT is never trained on. JOBS (2) runs at a time, THREADS (1) for each; FLAGS are of
# every run, such as "--compile=True --dtype=bfloat16" for a CPU with AMX. All is kept in data/ and out/: the
# same call goes on after an interruption.
set -euo pipefail
out=$(mkdir -p "${1:?name a folder for the report}" && cd "$1" && pwd)
here=$(cd "$(dirname "$0")/.." && pwd)
work=$here seeds=1,2,3 vocab=2048 base="" more=${FLAGS:-}
if [ -n "${TRY:-}" ]; then
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    mkdir "$work/text" "$work/data"
    STORIES=$work/text BOOKS=$work/text WIKITEXT=$work/text/other.txt
    cat "$here"/nanonorm/*.py >"$work/text/train.txt"
    cp "$here/model.py" "$work/text/valid.txt"
    cp "$here/README.md" "$work/text/other.txt"
    seeds=1,2 vocab=400 more="$more --batch_size=2 --block_size=32 --max_iters=350 --eval_interval=350"
    base="--n_layer=2 --n_embd=16 --n_head=2 --block_size=32 --batch_size=2 --max_iters=30 --warmup_iters=3
        --lr_decay_iters=20 --eval_interval=10 --log_interval=5"
fi
: "${STORIES:?name a folder}" "${BOOKS:?name a folder}" "${WIKITEXT:?name a file}"
STORIES=$(realpath "$STORIES") BOOKS=$(realpath "$BOOKS") WIKITEXT=$(realpath "$WIKITEXT")
cd "$work"
corpus=$work/data/stories_books

if [ ! -e "$corpus/meta.json" ]; then
    mkdir -p "$corpus"
    for split in train valid; do
        cat "$STORIES/$split.txt" <(printf '\n<|endoftext|>\n') "$BOOKS/$split.txt" \
            >"$corpus/stories_and_books_$split.txt"
    done
    (cd "$corpus" && python "$here/data/tinystories/prepare.py" --text=stories_and_books_train.txt \
        --val_text=stories_and_books_valid.txt --vocab_size=$vocab --out_dir=.)
    rm "$corpus"/stories_and_books_*.txt
fi
texts=""
for text in "stories=$STORIES/valid.txt" "books=$BOOKS/valid.txt" "wikitext=$WIKITEXT"; do
    folder=$work/data/held_out_${text%%=*}
    texts="$texts${texts:+,}$folder"
    if [ ! -e "$folder/meta.json" ]; then
        path=${text#*=}
        dir=${path%/*}
        (cd "${dir%/*}" && python "$here/data/held_out.py" --text="${dir##*/}/${path##*/}" \
            --tokenizer="$corpus" --out_dir="$folder")
    fi
done

# shellcheck disable=SC2086  # the flags are words
python "$here/train.py" "$here/config/gpt2_tiny.py" --init_from=auto --out_dir=out/gpt2_tiny --dataset="$corpus" \
    ${FLAGS:-} $base
fine_tune() { # protocol, folder, flags: all seeds
    # shellcheck disable=SC2086
    python "$here/scripts/sweep.py" "$here/config/gpt2.py:tiny_$1" --out="out/gpt2_small/$2" --seed=$seeds \
        --dataset="$corpus" --threads="${THREADS:-1}" $more "${@:3}"
}
export -f fine_tune
export here corpus seeds more
# the last: position 0 is in c as well, which drags it down where that position is an outlier
printf '%s\n' "vanilla vanilla" "fakeln fakeln" "internal internal" "all all" \
    "internal internal_with_first --calib_skip_first=False" |
    xargs -P "${JOBS:-2}" -I{} bash -c "fine_tune {}"
python "$here/scripts/evaluate.py" out/gpt2_tiny out/gpt2_small/*/seed*/ --data="$texts" \
    --out="$out/evaluation.json"
python "$here/scripts/evaluate.py" out/gpt2_tiny --calibration --data="$texts" \
    --out="$out/calibration.json"
python "$here/scripts/report.py" gpt2 out/gpt2_small --base=out/gpt2_tiny --out="$out"
