"""The tokenizer of a GGUF file, as a tokenizer.json and what stands beside one.

It splits text as llama.cpp does: `tokenizer.ggml.pre` names how, and an unknown name is refused. transformers
5.23 takes what it does not know, SmolLM2's among them, for GPT-2's: there two spaces before a digit become
other tokens.
"""

import json
from pathlib import Path

from data.tokenizer import SPACE_MARK, failing_as
from nanonorm.errors import BadInput
from nanonorm.gguf import header

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # types of a token
ROLES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
AROUND_NUMBERS = (  # what Llama 3 and Qwen split text at; how long a number is tells them apart
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


def split(number: str) -> dict:
    expression = number.join(AROUND_NUMBERS)
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}


PRE_TOKENIZERS = {  # llama.cpp's name -> the steps before a tokenizer.json's ByteLevel; does that split?
    "gpt-2": ([], True),
    "smollm": ([{"type": "Digits", "individual_digits": True}], True),
    "llama-bpe": ([split(r"\p{N}{1,3}")], False),
    "qwen2": ([split(r"\p{N}")], False),
}
SAME = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "deepseek-r1-qwen": "qwen2"}


def tokenizer_files(path: Path) -> dict[str, bytes]:
    """{name: bytes} of tokenizer.json, tokenizer_config.json and generation_config.json. Raises: BadInput."""
    said = {key.removeprefix("tokenizer.ggml."): value for key, value in header(path)[0].items()}
    kind, pre = said.get("model"), str(said.get("pre", "default"))
    pre, other = SAME.get(pre, pre), "name another tokenizer with --tokenizer="
    if kind not in ("gpt2", "llama"):
        holds = (
            "no tokenizer" if kind is None else f"a tokenizer of kind {str(kind)!r:.40}, not gpt2 or llama"
        )
        raise BadInput(f"{path} holds {holds}; {other}")
    if kind == "gpt2" and pre not in PRE_TOKENIZERS:
        known = ", ".join([*PRE_TOKENIZERS, *SAME])
        raise BadInput(f"{path} splits text as {str(pre)!r:.40} does, not as one of {known}; {other}")
    with failing_as(f"{path} holds a damaged tokenizer"):
        tokens = said["tokens"]
        types = said.get("token_type") or [NORMAL] * len(tokens)
        vocab = {token: i for i, token in enumerate(tokens) if types[i] != UNUSED}
        if kind == "gpt2":
            merges = [merge.split(" ") for merge in said["merges"]]
            parts = bytewise(vocab, merges, pre)
        else:
            scores = {i: said["scores"][i] for i in vocab.values() if types[i] == NORMAL}
            unknown = next((token for token, i in vocab.items() if types[i] == UNKNOWN), None)
            parts = by_score(vocab, scores, unknown, prefix=said.get("add_space_prefix", True))
        special = {i: types[i] != USER_DEFINED for i in vocab.values()}
        parts["added_tokens"] = [
            added(token, i, special[i])
            for token, i in vocab.items()
            if types[i] in (UNKNOWN, CONTROL, USER_DEFINED)
        ]
        settings = {role: tokens[said[key]] for role, key in ROLES.items() if key in said}
    settings["add_bos_token"] = said.get(
        "add_bos_token", kind == "llama" or pre == "llama-bpe"
    )  # as llama.cpp
    settings["chat_template"] = said.get("tokenizer.chat_template")
    ends = {"eos_token_id": [said[key] for key in ENDS if key in said]}
    made = {"tokenizer.json": parts, "tokenizer_config.json": settings, "generation_config.json": ends}
    return {name: json.dumps(value).encode() for name, value in made.items()}


def added(token: str, i: int, special: bool) -> dict:
    """A token of a tokenizer.json that is cut out of a text before all else."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": i, "content": token, "special": special, **flags}


def bytewise(vocab: dict[str, int], merges: list[list[str]], pre: str) -> dict:
    """A tokenizer.json that merges bytes. pre: of PRE_TOKENIZERS."""
    before, splits = PRE_TOKENIZERS[pre]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": splits}
    whole = pre == "llama-bpe"  # a word that is a token is that token, whatever merges would make of it
    return {
        "version": "1.0",
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*before, level]},
        "decoder": level,
        "model": {"type": "BPE", "ignore_merges": whole, "vocab": vocab, "merges": merges},
    }


def by_score(vocab: dict[str, int], scores: dict[int, float], unknown: str | None, prefix: bool) -> dict:
    """A tokenizer.json of SentencePiece's byte-pair encoding, which joins the best-scored pair first, of
    whatever two pieces.

    scores: of the tokens that are text; prefix: a text begins with a space that is not its own.
    """
    normal, joins = {token for token, i in vocab.items() if i in scores}, []
    for piece in normal:
        halves = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        known = [pair for pair in halves if normal.issuperset(pair)]
        joins += [(-scores[vocab[piece]], vocab[piece], *map(vocab.get, pair), pair) for pair in known]
    space, mark = {"String": " "}, {"String": SPACE_MARK}
    spaces = [{"type": "Replace", "pattern": space, "content": SPACE_MARK}]
    text = [{"type": "Replace", "pattern": mark, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if prefix:
        spaces.insert(0, {"type": "Prepend", "prepend": SPACE_MARK})
        text.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    model = {"type": "BPE", "unk_token": unknown, "fuse_unk": True, "byte_fallback": True, "vocab": vocab}
    return {
        "version": "1.0",
        "normalizer": {"type": "Sequence", "normalizers": spaces},
        "decoder": {"type": "Sequence", "decoders": text},
        "model": model | {"merges": [pair for *_, pair in sorted(joins)]},
    }
