#!/usr/bin/env bash
# lm-evaluation-harness on a model of this project or on an export folder:
#
#     bash scripts/lm_eval.sh out/taper_30m                 # HellaSwag, MMLU, GPQA; their data are on the hub
#     LOCAL=1 bash scripts/lm_eval.sh out/taper_30m         # what needs no hub: see scripts/lm_eval_tasks
#     LOCAL=1 TEXT=book.txt bash scripts/lm_eval.sh DIR     # bits a byte of a text of yours
#     bash scripts/lm_eval.sh DIR --limit 100 --device cuda # any flag of lm_eval
#
# A run folder or a model file is first exported with convert.py --to=hf, into a folder that is removed again.
# DTYPE is float32 unless given. Five examples of MMLU want a context of about 4,000 tokens: lm_eval cuts what is
# longer from the left, and how often it did is said. GPQA is gated: `hf auth login`, and accept its terms.
# HF_HUB_OFFLINE=1 takes the data from the cache. Needs the packages of requirements-export.txt.
set -euo pipefail
path=${1:?name a run folder, a model file or an export folder}
shift
if [ -e "$path" ]; then path=$(realpath "$path"); fi # else convert.py says what is wrong, or it is a hub id
text=$(realpath "${TEXT:-$(dirname "$0")/../LICENSE}")
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

fail() {
    echo "$*" >&2
    exit 2
}
command -v python >/dev/null || fail "there is no python on the PATH: activate an environment that has one"
python -c "import lm_eval" 2>/dev/null || fail "lm_eval is missing: pip install -r requirements-export.txt"
if [ -z "${LOCAL:-}" ] && [ -z "${HF_HUB_OFFLINE:-}" ]; then
    python -c "from huggingface_hub import HfApi; HfApi().dataset_info('Rowan/hellaswag', timeout=20)" 2>/dev/null ||
        fail "the Hugging Face hub is out of reach, and the tasks' data with it; LOCAL=1 runs the local tasks"
fi
export HF_MODULES_CACHE="$work/modules" # transformers keeps a copy of a model's code there
# under fixed names, since lm_eval and sed have characters of their own
if grep -qs '"model_type"' "$path/config.json"; then # a run folder has a config.json of its own
    ln -s "$path" "$work/model"
else
    python scripts/convert.py "$path" --to=hf --out="$work/model" >"$work/log" || exit 2
fi
ln -s "$text" "$work/text"
ln -s "$PWD/scripts/lm_eval_tasks" "$work/tasks"

evaluate() { # task, examples, flags
    echo "== $1, $2 examples before the question"
    if ! python -m lm_eval --model hf --model_args "pretrained=$work/model,trust_remote_code=True,dtype=${DTYPE:-float32}" \
        --tasks "$1" --num_fewshot "$2" "${@:3}" 2>"$work/log"; then
        echo "lm_eval did not finish $1: $(tail -n 1 "$work/log")" >&2
        status=2
    fi
    cut=$(grep -c "exceeds model's maximum length" "$work/log" || true)
    echo "$1: $cut inputs were longer than the model's context and lost their beginning"
}
status=0
if [ -n "${LOCAL:-}" ]; then
    for task in scripts/lm_eval_tasks/*.yaml; do
        sed "s|HERE|$work/tasks|; s|TEXT|$work/text|" "$task" >"$work/$(basename "$task")"
    done
    export HF_HUB_OFFLINE=1
    evaluate local_choice,local_text 0 --include_path "$work" --device cpu --batch_size 4 "$@"
else
    for task in hellaswag mmlu gpqa_diamond_n_shot; do
        evaluate $task 5 "$@"
    done
fi
exit $status
