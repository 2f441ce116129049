"""--to=gguf: model.gguf, for llama.cpp and what is built on it; llama.cpp itself is the proof.

A network without norms goes in as a Llama, Qwen3 or GPT-2 whose norms do nothing (stock.py says how), one
with all of its norms as it is. The file holds float32; llama.cpp's own tools make smaller ones of it. Needs
gguf, and xllamacpp for the proof.
"""

import copy
import json
import re
import subprocess
import sys
from pathlib import Path

import torch

from data.gguf import PRE_TOKENIZERS
from data.tokenizer import SPACE_MARK, SentencePiece
from model import ModelConfig
from nanonorm.errors import ModelError, needed
from nanonorm.families import pieces_of
from nanonorm.gguf import (
    FREQUENCIES,
    ORIGINAL,
    frequency_divisors,
    keys_of,
    names_of,
    to_pairs,
    turned_heads,
)  # fmt: skip
from scripts.exports import AS_TRAINED, Job, spread
from scripts.exports.stock import CENTRING, IDLE, plain

NEEDS = ("gguf", "xllamacpp")
TOP = 100  # next tokens that are compared at a position
# Largest error, of the logits' spread. llama.cpp looks a GELU up in a table of half-precision numbers.
BY_LLAMA_CPP = {"swiglu": 1e-4, "gelu": 2e-3}
HOW = "`llama-cli -m model.gguf`, or any program that is built on llama.cpp; its architecture is `{}`."
LEFT_OUT = "\n\nGGUF has room for three end tokens. These end a text too, and are left out: {}."
SAVES = """Nothing: where norms are gone llama.cpp still computes norms, which change nothing. What is faster
without norms is the network itself: `--to=hf` or `--to=onnx`."""


def architecture(c: ModelConfig) -> str:
    """llama.cpp's name for a plain network of this shape. Raises: ModelError if it has none."""
    kind = (c.norm, c.positions, c.mlp)
    if kind == ("rmsnorm", "rope", "swiglu") and not c.qk_norm:
        return "llama"
    if kind == ("rmsnorm", "rope", "swiglu") and not (c.bias or c.qkv_bias or c.rope_scaling):
        return "qwen3"
    if kind == ("layernorm", "learned", "gelu") and c.bias and c.norm_bias and not c.qk_norm:
        return "gpt2"
    knobs = ("norm", "norm_bias", "positions", "rope_scaling", "mlp", "bias", "qkv_bias", "qk_norm")
    shape = ", ".join(f"{knob}={getattr(c, knob)}" for knob in knobs)
    raise ModelError(f"llama.cpp has no architecture with {shape}; try --to=hf or --to=onnx")


def tensors(c: dict, state: dict, arch: str):
    """Yields (GGUF's name, float32 tensor) of every tensor of a plain network."""
    pieces = pieces_of(names_of(arch), c)
    for name, t in state.items():
        parts = pieces[name]
        for part, rows in zip(parts, t.float().split([p.rows for p in parts]), strict=True):
            heads = turned_heads(arch, part.name, c)
            yield part.name, to_pairs(rows, heads) if heads else rows
    if c["rope_scaling"] is not None:
        yield FREQUENCIES, frequency_divisors(c, c["rope_scaling"])


def add_shape(writer, c: dict, arch: str):
    """Write the architecture's numbers."""
    for key, setting in keys_of(arch).items():
        add = writer.add_float32 if isinstance(c[setting], float) else writer.add_uint32
        add(f"{arch}.{key}", c[setting])
    if c["rope_scaling"] is not None:
        writer.add_uint32(f"{arch}.{ORIGINAL}", int(c["rope_scaling"][-1]))
    writer.add_file_type(needed("gguf").LlamaFileType.ALL_F32)


def sentencepiece_tokens(writer, tokenizer) -> dict:
    """{id: (piece, type, score)} of a SentencePiece model."""
    p, kinds = tokenizer.processor, needed("gguf").TokenType
    tests = [(p.is_unknown, kinds.UNKNOWN), (p.is_control, kinds.CONTROL), (p.is_byte, kinds.BYTE)]
    found = {}
    for i in range(p.vocab_size()):
        kind = next((kind for holds, kind in tests if holds(i)), kinds.NORMAL)
        found[i] = (p.id_to_piece(i), kind, p.get_score(i))
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_unk_token_id(p.unk_id())
    return found


def bpe_tokens(writer, tokenizer) -> dict:
    """{id: (token, type, score)} of a tokenizer.json; what else it holds is written.

    Raises: ModelError if it is no byte-pair encoding, or splits text as llama.cpp does not.
    """
    file, kinds = json.loads(tokenizer.files["tokenizer.json"]), needed("gguf").TokenType
    model = file["model"]
    if "merges" not in model:
        raise ModelError(f"{tokenizer.name} is no byte-pair encoding; use --to=stock or --to=hf")
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    tokens = {i: token for token, i in model["vocab"].items()}
    scores, types = dict.fromkeys(tokens, 0.0), dict.fromkeys(tokens, kinds.NORMAL)
    if model.get("byte_fallback"):  # was SentencePiece's: a piece's score is when it is made
        made = {"".join(merge): -float(i) for i, merge in reversed(list(enumerate(merges)))}
        scores = {i: made.get(token, 0.0) for i, token in tokens.items()}
        types |= {i: kinds.BYTE for i, token in tokens.items() if re.fullmatch("<0x[0-9A-F]{2}>", token)}
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre_tokenizer(file, tokenizer.name))
        writer.add_token_merges([" ".join(merge) for merge in merges])
    for added in file["added_tokens"]:
        tokens[added["id"]] = added["content"]
        types[added["id"]] = kinds.CONTROL if added["special"] else kinds.USER_DEFINED
    return {i: (token, types[i], scores.get(i, 0.0)) for i, token in tokens.items()}


def pre_tokenizer(file: dict, name: str) -> str:
    """llama.cpp's name for how a tokenizer.json splits text. Raises: ModelError if it has none."""
    steps = file.get("pre_tokenizer") or {}
    *before, last = steps.get("pretokenizers") or [steps]
    bytewise = last.get("type") == "ByteLevel" and not last.get("add_prefix_space", True)
    normal = (file.get("normalizer") or {}).get("type")  # llama.cpp has none, which text in NFC cannot tell
    for known, wanted in PRE_TOKENIZERS.items():
        if bytewise and normal in (None, "NFC") and (before, last.get("use_regex", True)) == wanted:
            return known
    known = ", ".join(PRE_TOKENIZERS)
    raise ModelError(f"{name} splits text differently from llama.cpp's {known}; use --to=stock or --to=hf")


def add_tokenizer(writer, tokenizer, vocab_size: int) -> list[str]:
    """Write the tokenizer, with a name for every id that the network has beyond it. Returns the end tokens
    for which there is no room."""
    read = sentencepiece_tokens if isinstance(tokenizer, SentencePiece) else bpe_tokens
    known, unused = read(writer, tokenizer), needed("gguf").TokenType.UNUSED
    listed = [known.get(i, (f"[PAD{i}]", unused, 0.0)) for i in range(vocab_size)]
    tokens, types, scores = map(list, zip(*listed, strict=True))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_scores(scores)
    writer.add_add_space_prefix(tokens[tokenizer.encode("a")[0]].startswith(SPACE_MARK))
    writer.add_add_bos_token(tokenizer.bos_id is not None)
    writer.add_bos_token_id(tokenizer.eot_id if tokenizer.bos_id is None else tokenizer.bos_id)
    own = tokenizer.special_id("eos_token")
    ends = dict.fromkeys([tokenizer.eot_id if own is None else own, tokenizer.eot_id])  # in this order
    ends |= dict.fromkeys(sorted(tokenizer.end_ids))
    rooms = (writer.add_eos_token_id, writer.add_eot_token_id, writer.add_eom_token_id)
    for add, end in zip(rooms, ends, strict=False):
        add(end)
    if template := getattr(tokenizer, "template", None):
        writer.add_chat_template(template)
    return [tokens[end] for end in list(ends)[len(rooms) :]]


def llama_cpp(asked: dict) -> dict:
    """What llama_cpp.py answers. Raises: ModelError if llama.cpp does not run the file."""
    command = [sys.executable, "-P", str(Path(__file__).with_name("llama_cpp.py"))]
    run = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True)
    if run.returncode:
        lines = [line for line in run.stderr.splitlines() if "rror" in line]  # the first names the cause
        raise ModelError(f"llama.cpp does not run the file: {[*lines, f'status {run.returncode}'][0]}")
    return json.loads(run.stdout.splitlines()[-1])


@torch.no_grad()
def proof(path: Path, job: Job, mlp: str) -> float:
    """max |difference of log-probabilities| / spread of the logits, between llama.cpp and the network, over
    the TOP likeliest next tokens at the first and last positions of the job's sample.

    Raises: ModelError if that is too much, if llama.cpp does not run the file, or if it cuts the sample's
    text into other tokens.
    """
    sample, tokenizer = job.sample, job.tokenizer
    T = min(sample.shape[1], job.model.config.block_size - 1)  # it must have room for one more
    at = sorted({*range(min(T, 16)), *range(max(0, T - 32), T)})
    texts = [tokenizer.decode(row).replace(SPACE_MARK, " ") for row in sample.tolist()]
    top = min(TOP, job.model.config.vocab_size)
    asked = {"path": str(path), "rows": sample.tolist(), "positions": at, "texts": texts, "top": top}
    asked |= {"choice": tokenizer.encode("a")[-1], "threads": torch.get_num_threads()}
    said = llama_cpp(asked)
    if said["tokens"] != [tokenizer.encode(text) for text in texts]:
        remedy = "use --to=stock or --to=hf"
        raise ModelError(f"llama.cpp splits text differently from {tokenizer.name}; {remedy}")
    logits = job.logits(torch.float32)[:, at].double()  # (B, positions, V)
    ids, theirs = torch.tensor(said["logprobs"], dtype=torch.float64).unbind(-1)  # (B, positions, TOP)
    ours = logits.log_softmax(-1).gather(-1, ids.long())
    least = -80.0  # of probabilities below the smallest float32 llama.cpp gives no logarithm
    error = ((ours.clamp_min(least) - theirs.clamp_min(least)).abs().max() / spread(logits)).item()
    if not error <= BY_LLAMA_CPP[mlp]:
        raise ModelError(f"llama.cpp differs by {error:.1e} of the logit scale; not exported")
    return error


def write(job: Job) -> dict:
    """model.gguf, which llama.cpp proves."""
    gguf = needed("gguf")
    if job.model.config.block_size < 2:
        raise ModelError("llama.cpp runs no context of one token; use --to=hf or --to=onnx")
    file = plain(job.model if job.dtype == torch.float32 else copy.deepcopy(job.model).float())
    config, path = file["config"], job.folder / "model.gguf"
    arch = architecture(ModelConfig(**config))
    writer = gguf.GGUFWriter(path, arch)
    base = job.meta.get("base")
    writer.add_name(base["name"] if base else job.path.parent.name)
    if base:
        writer.add_base_model_count(1)
        writer.add_base_model_name(0, base["name"])
        if base.get("license"):
            writer.add_license(base["license"])
    add_shape(writer, config, arch)
    left_out = add_tokenizer(writer, job.tokenizer, config["vocab_size"])
    for name, t in tensors(config, file["state"], arch):
        writer.add_tensor(name, t.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    error = proof(path, job, config["mlp"])
    how = HOW.format(arch) + (LEFT_OUT.format(", ".join(f"`{t}`" for t in left_out)) if left_out else "")
    runs, saves = "llama.cpp and what is built on it", AS_TRAINED
    if config["norm_eps"] > 1:
        runs, saves = runs + IDLE, SAVES
    elif job.model.config.norm == "cbwc":
        saves = CENTRING
    return {"errors": {"float32": error}, "dtype": "float32", "runs": runs, "how": how, "saves": saves}
