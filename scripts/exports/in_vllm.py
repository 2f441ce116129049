"""What vLLM makes of a folder: a process of its own, in the environment that scripts/vllm.sh makes.

    out/vllm/bin/python -P scripts/exports/in_vllm.py < asked.json

asked.json holds {"folder", "options": of vllm.LLM, "rounds": [{"prompts": rows of ids, "tokens": how many
are to follow each, "logprobs": of how many candidates}]}. The last line printed is {"model": vLLM's class,
"version", "compiled": whether it compiled that, "rounds": [{"tokens": of each prompt, "logprobs": for each of
them the natural logarithms by id, "cached": prompt tokens that the prefix cache held, "seconds"}]}. All is
greedy, and no token ends a text. -P keeps the other files of this folder from standing in for packages.
"""

import json
import os
import sys
import time


def answer(llm, asked: dict) -> dict:
    """One round: what follows each of the prompts, which are given at once."""
    from vllm import SamplingParams

    wanted = {"max_tokens": asked["tokens"], "logprobs": asked.get("logprobs"), "ignore_eos": True}
    prompts = [{"prompt_token_ids": row} for row in asked["prompts"]]
    began = time.perf_counter()
    said = llm.generate(prompts, SamplingParams(temperature=0, **wanted), use_tqdm=False)
    seconds = time.perf_counter() - began
    found = [one.outputs[0] for one in said]
    logs = [[{i: lp.logprob for i, lp in at.items()} for at in one.logprobs or []] for one in found]
    tokens, cached = [list(one.token_ids) for one in found], sum(one.num_cached_tokens for one in said)
    return {"tokens": tokens, "logprobs": logs, "cached": cached, "seconds": seconds}


def main():
    # the engine in this process, where its class is seen, and its threads are OMP_NUM_THREADS: one of its own
    # keeps a core back
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import vllm

    asked = json.load(sys.stdin)
    llm = vllm.LLM(asked["folder"], trust_remote_code=True, skip_tokenizer_init=True, **asked["options"])
    (model,) = llm.apply_model(lambda model: type(model).__name__)
    compiled = bool(llm.llm_engine.vllm_config.compilation_config.mode)
    found = {"model": model, "version": vllm.__version__, "compiled": compiled}
    print("\n" + json.dumps(found | {"rounds": [answer(llm, each) for each in asked["rounds"]]}))


if __name__ == "__main__":
    main()
