"""What llama.cpp makes of a GGUF file: a process of its own, since llama.cpp aborts where others raise.

    python -P scripts/exports/llama_cpp.py < asked.json

asked.json holds {"path": of the file, "rows": of ids, equally long, "positions": in a row, "texts", "top",
"choice": id of a printable token, "threads"}. The last line printed is {"tokens": ids of each text,
"logprobs": for each row and position the `top` likeliest next tokens, each as (id, natural logarithm)}. All
is float32: the keys and values too, and no flash attention. Or it holds {"path", "threads", "rounds": as
for in_vllm.py}, to be answered with {"rounds"} as there; then all is as llama.cpp comes. Needs xllamacpp. -P
keeps the other files of this folder from standing in for packages.
"""

import http.client
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import xllamacpp


def settings(path: str, length: int, threads: int, slots: int = 1) -> xllamacpp.CommonParams:
    """Of a server of one file, heard on this machine alone; a context of `length` tokens for each slot."""
    params = xllamacpp.CommonParams()
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.model.path, params.n_ctx = path, length * slots
    params.hostnames, params.port = ["127.0.0.1"], 0  # any free one
    params.n_parallel, params.n_gpu_layers, params.warmup, params.fit_params = slots, 0, False, False
    params.verbosity = 1  # errors alone
    return params


def exact(params: xllamacpp.CommonParams) -> xllamacpp.CommonParams:
    """The same, in float32."""
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    return params


class Client:
    """Of a server."""

    def __init__(self, server: xllamacpp.Server):
        address = server.listening_address.removeprefix("http://")
        self.connection = http.client.HTTPConnection(address, timeout=600)

    def post(self, route: str, **body) -> dict:
        self.connection.request("POST", route, json.dumps(body), {"Content-Type": "application/json"})
        answer = json.load(self.connection.getresponse())
        if "error" in answer:
            raise RuntimeError(answer["error"]["message"])
        return answer


def compared(asked: dict) -> dict:
    """Tokens of texts, and logarithms."""
    server = xllamacpp.Server(exact(settings(asked["path"], len(asked["rows"][0]) + 1, asked["threads"])))
    post = Client(server).post

    def following(ids) -> list:
        # The logarithms are those of all tokens, whatever it chooses; one that ends a text, or is half a
        # character, it would choose in silence.
        choice = {"n_predict": 1, "temperature": -1, "logit_bias": [[asked["choice"], 1e6]]}
        answer = post("/completion", prompt=ids, n_probs=asked["top"], **choice)
        if "completion_probabilities" not in answer:
            raise RuntimeError("its logits are not finite")
        return [(t["id"], t["logprob"]) for t in answer["completion_probabilities"][0]["top_logprobs"]]

    tokens = [post("/tokenize", content=text, add_special=False)["tokens"] for text in asked["texts"]]
    logprobs = [[following(row[: at + 1]) for at in asked["positions"]] for row in asked["rows"]]
    return {"tokens": tokens, "logprobs": logprobs}


def continued(asked: dict) -> dict:
    """What follows the prompts of each round, which are given at once, and the seconds."""
    slots = max(len(each["prompts"]) for each in asked["rounds"])
    longest = max(len(row) + each["tokens"] for each in asked["rounds"] for row in each["prompts"])
    server = xllamacpp.Server(settings(asked["path"], longest + 8, asked["threads"], slots))
    clients, rounds = [Client(server) for _ in range(slots)], []
    how = {"temperature": 0, "ignore_eos": True, "cache_prompt": False, "return_tokens": True}
    for each in asked["rounds"]:
        with ThreadPoolExecutor(slots) as pool:
            began = time.perf_counter()
            runs = [
                pool.submit(client.post, "/completion", prompt=row, n_predict=each["tokens"], **how)
                for client, row in zip(clients, each["prompts"], strict=False)
            ]
            tokens = [run.result()["tokens"] for run in runs]
            rounds.append({"tokens": tokens, "seconds": time.perf_counter() - began})
    return {"rounds": rounds}


def main():
    asked = json.load(sys.stdin)
    print("\n" + json.dumps(continued(asked) if "rounds" in asked else compared(asked)))


if __name__ == "__main__":
    main()
