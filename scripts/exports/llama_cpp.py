"""What llama.cpp makes of a GGUF file: a process of its own, since llama.cpp aborts where others raise.

    python -P scripts/exports/llama_cpp.py < asked.json

asked.json holds {"path": of the file, "rows": of ids, equally long, "positions": in a row, "texts", "top",
"choice": id of a printable token, "threads"}. The last line printed is {"tokens": ids of each text,
"logprobs": for each row and position the `top` likeliest next tokens, each as (id, natural logarithm)}. All
is float32: the keys and values too, and no flash attention. Needs xllamacpp. -P keeps the other files of this
folder from standing in for packages.
"""

import http.client
import json
import sys

import xllamacpp


def serve(path: str, length: int, threads: int) -> xllamacpp.Server:
    """llama.cpp's server of one file, heard on this machine alone; its context is `length` tokens."""
    params = xllamacpp.CommonParams()
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.model.path, params.n_ctx = path, length
    params.hostnames, params.port = ["127.0.0.1"], 0  # any free one
    params.n_parallel, params.n_gpu_layers, params.warmup, params.fit_params = 1, 0, False, False
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.verbosity = 1  # errors alone
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    return xllamacpp.Server(params)


def main():
    asked = json.load(sys.stdin)
    server = serve(asked["path"], len(asked["rows"][0]) + 1, asked["threads"])
    connection = http.client.HTTPConnection(server.listening_address.removeprefix("http://"), timeout=600)

    def post(route: str, **body) -> dict:
        connection.request("POST", route, json.dumps(body), {"Content-Type": "application/json"})
        answer = json.load(connection.getresponse())
        if "error" in answer:
            raise RuntimeError(answer["error"]["message"])
        return answer

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
    print("\n" + json.dumps({"tokens": tokens, "logprobs": logprobs}))


if __name__ == "__main__":
    main()
