"""vLLM says what our networks say. NANONORM_VLLM names the interpreter of an environment that has it, which
`bash scripts/vllm.sh DIR` makes."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from conftest import randomize
from test_convert import convert, network

from nanonorm.files import ROOT

PYTHON = os.environ.get("NANONORM_VLLM")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PYTHON is None, reason="NANONORM_VLLM names no interpreter with vLLM"),
]
SHAPE = dict(n_layer=3, n_head=4, n_embd=128, block_size=256)  # heads of 32: vLLM has none below
PREFIX = 140  # tokens that all prompts share: a block of the prefix cache is 128
NETWORKS = {  # name -> (shape, change, knobs, --to, vLLM's class)
    "stock": ("llama", "all", {}, "stock", "LlamaForCausalLM"),
    "internal": ("llama", "internal", {}, "hf", "TransformersForCausalLM"),
    "all": ("llama", "all", {}, "hf", "TransformersForCausalLM"),
    "coupled": ("llama", "coupled", {}, "hf", "TransformersForCausalLM"),
    "cbwc": ("ours", "cbwc", {}, "hf", "TransformersForCausalLM"),
    "qwen 2": ("qwen2", "all", {}, "hf", "TransformersForCausalLM"),
    "dyt": ("ours", "baseline", {"norm": "dyt"}, "hf", "TransformersForCausalLM"),
    "layernorm": ("ours", "all", {"norm": "layernorm"}, "hf", "TransformersForCausalLM"),
    "gpt 2, stock": ("gpt2", "all", {}, "stock", "GPT2LMHeadModel"),
    "qwen 3": ("qwen3", "internal", {"head_dim": 32}, "hf", "TransformersForCausalLM"),
}
OPTIONS = {
    "prefix cache": {"enforce_eager": True, "enable_prefix_caching": True},
    "none": {"enforce_eager": True, "enable_prefix_caching": False},
    "compiled": {"enforce_eager": False, "enable_prefix_caching": True},  # as vLLM comes, and slow to start
}
COMPILED = ("all", "coupled")
CASES = [(name, how) for name in NETWORKS for how in OPTIONS if how != "compiled" or name in COMPILED]


def ask(folder: Path, rounds: list[dict], **options) -> dict:
    """What scripts/exports/in_vllm.py says of a folder, in float32."""
    asked = {"folder": str(folder), "rounds": rounds, "options": {"dtype": "float32", **options}}
    env = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    command = [PYTHON, "-P", ROOT / "scripts/exports/in_vllm.py"]
    run = subprocess.run(command, input=json.dumps(asked), env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-5000:]
    return json.loads(run.stdout.splitlines()[-1])


@torch.no_grad()
def assert_says_what_we_say(ours, prompt: list[int], tokens: list[int], logprobs: list[dict]):
    """Each token is the likeliest after what stands before it, and the logarithms are ours."""
    logs = ours(torch.tensor([prompt + tokens[:-1]]))[0, len(prompt) - 1 :].double().log_softmax(-1)
    assert tokens == logs.argmax(-1).tolist()
    for at, theirs in zip(logs, logprobs, strict=True):
        assert len(theirs) >= 5
        for i, log in theirs.items():
            assert abs(log - at[int(i)].item()) < 1e-3 * (at.max() - at.min())


@pytest.mark.parametrize("name, how", CASES)
def test_vllm_agrees(name, how, saved, tmp_path):
    shape, change, knobs, to, theirs = NETWORKS[name]
    ours = randomize(network(shape, change, torch.float32, **SHAPE, **knobs), std=0.05)
    folder = convert(saved(ours), to, tmp_path / "export")
    text = torch.randint(2, 400, (190,), generator=torch.Generator().manual_seed(0)).tolist()
    prompts = [text[:n] for n in (190, PREFIX + 1, PREFIX + 17, 33, 1)]
    each = {"prompts": prompts, "tokens": 64, "logprobs": 5}
    impl = "transformers" if theirs == "TransformersForCausalLM" else "auto"
    said = ask(folder, [each, each], model_impl=impl, **OPTIONS[how])
    assert said["model"] == theirs and said["compiled"] == (how == "compiled")
    for found in said["rounds"]:
        for row in zip(prompts, found["tokens"], found["logprobs"], strict=True):
            assert_says_what_we_say(ours, *row)
    cached = [found["cached"] for found in said["rounds"]]
    assert (cached[1] >= 3 * 128) if OPTIONS[how]["enable_prefix_caching"] else cached == [0, 0]


def test_a_sink_is_refused(saved, tmp_path):
    """Its attention has no place for keys and values in front of the text's."""
    ours = network("llama", "all", torch.float32, **SHAPE, sink_token=3)
    folder = convert(saved(ours), "hf", tmp_path / "export")
    asked = {"prompts": [[5, 6]], "tokens": 2, "logprobs": 5}
    with pytest.raises(AssertionError, match="it runs with sdpa alone"):
        ask(folder, [asked], model_impl="transformers", **OPTIONS["none"])
