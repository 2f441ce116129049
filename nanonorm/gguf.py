"""GGUF file -> {"config", "state", "meta"}: the format of llama.cpp and all that is built on it. The names,
keys and layouts here serve the way out too (scripts/exports/gguf.py).

Any quantization that the package gguf knows is read; the weights come out as float32. A Llama's queries and
keys are stored for a rotation of adjacent pairs, ours turns pairs half a head apart.
"""

import math
import os
import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from nanonorm.errors import BadFile, ModelError, needed
from nanonorm.families import FAMILIES, check_fit, pieces_of, to_ours
from nanonorm.rotary import llama3_frequencies

LEARNED_NAMES = """
tok_emb.weight               token_embd.weight            VD
pos_emb.weight               position_embd.weight         PD
blocks.*.norm_attn.weight    blk.*.attn_norm.weight       D
blocks.*.norm_attn.bias      blk.*.attn_norm.bias         D
blocks.*.attn.qkv.weight     blk.*.attn_qkv.weight        ED
blocks.*.attn.qkv.bias       blk.*.attn_qkv.bias          E
blocks.*.attn.proj.weight    blk.*.attn_output.weight     DQ
blocks.*.attn.proj.bias      blk.*.attn_output.bias       D
blocks.*.norm_mlp.weight     blk.*.ffn_norm.weight        D
blocks.*.norm_mlp.bias       blk.*.ffn_norm.bias          D
blocks.*.mlp.up.weight       blk.*.ffn_up.weight          FD
blocks.*.mlp.up.bias         blk.*.ffn_up.bias            F
blocks.*.mlp.down.weight     blk.*.ffn_down.weight        DF
blocks.*.mlp.down.bias       blk.*.ffn_down.bias          D
norm_final.weight            output_norm.weight           D
norm_final.bias              output_norm.bias             D
lm_head.weight               output.weight                VD        untied
"""

ROTARY_NAMES = """
tok_emb.weight               token_embd.weight            VD
blocks.*.norm_attn.weight    blk.*.attn_norm.weight       D
blocks.*.attn.qkv.weight     blk.*.attn_{q,k,v}.weight    QD,KD,KD
blocks.*.attn.qkv.bias       blk.*.attn_{q,k,v}.bias      Q,K,K     bias qkv_bias
blocks.*.attn.norm_q.weight  blk.*.attn_q_norm.weight     C         qk_norm
blocks.*.attn.norm_k.weight  blk.*.attn_k_norm.weight     C         qk_norm
blocks.*.attn.proj.weight    blk.*.attn_output.weight     DQ
blocks.*.attn.proj.bias      blk.*.attn_output.bias       D         bias
blocks.*.norm_mlp.weight     blk.*.ffn_norm.weight        D
blocks.*.mlp.gate_up.weight  blk.*.ffn_{gate,up}.weight   FD,FD
blocks.*.mlp.gate_up.bias    blk.*.ffn_{gate,up}.bias     F,F       bias
blocks.*.mlp.down.weight     blk.*.ffn_down.weight        DF
blocks.*.mlp.down.bias       blk.*.ffn_down.bias          D         bias
norm_final.weight            output_norm.weight           D
lm_head.weight               output.weight                VD        untied
"""
FREQUENCIES = "rope_freqs.weight"  # what Llama 3 divides its rotary frequencies by

ARCHITECTURES = {  # GGUF's name -> the class of transformers
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}
KEYS = {  # behind the architecture's name and a dot -> our setting; some settings have several
    "context_length": "block_size",
    "embedding_length": "n_embd",
    "block_count": "n_layer",
    "feed_forward_length": "hidden",
    "attention.head_count": "n_head",
    "attention.head_count_kv": "n_kv_head",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "vocab_size": "vocab_size",
}
ROTARY_KEYS = KEYS | {
    "attention.layer_norm_rms_epsilon": "norm_eps",
    "rope.dimension_count": "head_dim",
    "rope.freq_base": "rope_base",
}
LEARNED_KEYS = KEYS | {"attention.layer_norm_epsilon": "norm_eps"}
ORIGINAL = "rope.scaling.original_context_length"
SAY_NOTHING = (ORIGINAL, "tensor_data_layout")  # ORIGINAL matters only beside FREQUENCIES
MAY_LACK = {"n_kv_head": None, "head_dim": None, "vocab_size": None, "rope_base": 10000.0}
PIECE = 1 << 22  # bytes that are dequantized at once
# what a value of metadata is: a number, as struct writes it; TEXT; an ARRAY
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT, ARRAY = 8, 9


def names_of(arch: str) -> str:
    return LEARNED_NAMES if arch == "gpt2" else ROTARY_NAMES


def keys_of(arch: str) -> dict[str, str]:
    return LEARNED_KEYS if arch == "gpt2" else ROTARY_KEYS


def turned_heads(arch: str, name: str, c: dict) -> int | None:
    """How many heads a tensor has whose rows stand as adjacent pairs; None for one whose rows are as ours."""
    stem = name.split(".")[-2]
    return {"attn_q": c["n_head"], "attn_k": c["n_kv_head"]}.get(stem) if arch == "llama" else None


def to_pairs(rows, heads: int):
    """Pairs half a head apart -> adjacent pairs. (heads C, ...) -> (heads C, ...)"""
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def to_halves(rows, heads: int):
    """Adjacent pairs -> pairs half a head apart. (heads C, ...) -> (heads C, ...)"""
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def frequency_divisors(c: dict, scaling: tuple) -> torch.Tensor:
    """What Llama 3's scaling divides each rotary frequency by. (C/2)"""
    at = torch.arange(0, c["head_dim"], 2, dtype=torch.float32) / c["head_dim"]
    frequency = 1.0 / c["rope_base"] ** at
    return frequency / llama3_frequencies(frequency, *scaling)


# ---------------------------------------------------------------------------------------------------------
# reading


class Stream:
    """The numbers and texts of an open file, one after another. Raises: ValueError where it is cut short,
    before memory is taken for what it lacks."""

    def __init__(self, file):
        self.file, self.left = file, os.fstat(file.fileno()).st_size

    def take(self, n: int) -> bytes:
        self.left -= n
        if self.left < 0:
            raise ValueError("cut short")
        return self.file.read(n)

    def numbers(self, form: str) -> tuple:
        return struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}")))

    def text(self) -> str:
        return self.take(*self.numbers("Q")).decode()

    def value(self, kind: int):
        """A value of metadata; of a fraction in float32 the shortest decimal number that it is: 1e-5."""
        if kind == TEXT:
            return self.text()
        if kind == ARRAY:
            kind, count = self.numbers("IQ")
            if kind in NUMBERS:
                return [*self.numbers(f"{count}{NUMBERS[kind]}")]
            return [self.value(kind) for _ in range(count)]
        (number,) = self.numbers(NUMBERS[kind])
        fraction = NUMBERS[kind] == "f" and not number.is_integer()
        return float(str(np.float32(number))) if fraction else number


class Stored(NamedTuple):
    """A tensor of a file."""

    shape: tuple[int, ...]
    kind: int  # how it is quantized, as GGUF numbers it
    offset: int  # bytes in the file


def header(path: Path) -> tuple[dict, dict[str, Stored]]:
    """(metadata, {name: tensor}) of a GGUF file. Raises: BadFile.

    The package's GGUFReader takes ten times as long, and 170 MB for a vocabulary of 49,152.
    """
    try:
        with open(path, "rb") as file:
            stream = Stream(file)
            magic, version, n_tensors, n_keys = stream.numbers("4sIQQ")
            if magic != b"GGUF" or version not in (2, 3):
                raise ValueError("it does not begin as one of version 2 or 3 does")
            said, tensors = {}, {}
            for _ in range(n_keys):
                key = stream.text()
                said[key] = stream.value(*stream.numbers("I"))
            for _ in range(n_tensors):
                name, (n_dims,) = stream.text(), stream.numbers("I")
                *sizes, kind, at = stream.numbers(f"{n_dims}QIQ")
                if not sizes or 0 in sizes:
                    raise ValueError(f"{name} has no values")
                tensors[name] = Stored(tuple(sizes[::-1]), kind, at)
            unit = said.get("general.alignment", 32)
            start = -(-file.tell() // unit) * unit
    except (OSError, MemoryError):
        raise
    except Exception as e:  # whatever follows from bytes that mean nothing
        reason = f"{type(e).__name__}: {' '.join(str(e).split()):.100}"
        raise BadFile(f"{path} is damaged, cut short or no GGUF file ({reason}); fetch it again") from None
    return said, {name: t._replace(offset=start + t.offset) for name, t in tensors.items()}


def read_gguf(path: Path, dtype: torch.dtype, hollow: bool = False) -> dict:
    """{"config", "state", "meta"} of a GGUF file, its weights as `dtype`. hollow: matrices are not read, and
    are on the meta device.

    All is checked before the first tensor is made, but for finite values, which from_file looks for. Beside
    the weights it takes the header and PIECE bytes, whatever the quantization.
    Raises: BadFile for what is damaged or missing, ModelError for what our model cannot be.
    """
    said, tensors = header(path)
    arch = said.get("general.architecture")
    if not isinstance(arch, str) or arch not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelError(f"{path} is of architecture {str(arch)!r:.60}; this project takes {known}")
    name, ours = settings(said, tensors, arch, path)
    pieces = pieces_of(names_of(arch), ours)
    half = (ours["head_dim"] // 2,)
    shapes = {name: t.shape for name, t in tensors.items()}
    check_fit(shapes, pieces, path, "metadata", {FREQUENCIES: half} if FREQUENCIES in tensors else {})
    check_stored(tensors, path)
    if FREQUENCIES in tensors:
        ours["rope_scaling"] = rope_scaling(said, tensors, arch, ours, path)
    state = {}
    for own, parts in pieces.items():
        shape = (sum(p.rows for p in parts), *parts[0].shape[1:])
        there = not hollow or len(shape) == 1
        whole = state[own] = torch.empty(shape, dtype=dtype, device="cpu" if there else "meta")
        for part, rows in zip(parts, whole.split([p.rows for p in parts]), strict=True):
            if there:
                fill(rows, tensors[part.name], path)
            if heads := turned_heads(arch, part.name, ours):
                rows.copy_(to_halves(rows, heads))
    base = {"name": path.name, "architecture": name, "license": said.get("general.license")}
    ids = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    ids = {ours: said.get(f"tokenizer.ggml.{theirs}_token_id") for ours, theirs in ids.items()}
    base |= {key: i for key, i in ids.items() if i is not None}
    return {"config": ours, "state": state, "meta": {"base": base}}


def settings(said: dict, tensors: dict, arch: str, path: Path) -> tuple[str, dict]:
    """(the class of transformers, our settings) of a file's metadata, Llama 3's scaling left out.
    Raises: BadFile, ModelError."""
    keys, found = keys_of(arch), {}
    own = {key.removeprefix(f"{arch}."): value for key, value in said.items() if key.startswith(f"{arch}.")}
    for key, setting in keys.items():
        if key not in own and setting not in found.keys() | MAY_LACK.keys():
            raise BadFile(f"{path} is not whole: its metadata lack {arch}.{key}")
        found.setdefault(setting, own.get(key, MAY_LACK.get(setting)))
    if "token_embd.weight" not in tensors:
        raise BadFile(f"{path} is not whole: tensor token_embd.weight is missing")
    found["vocab_size"] = tensors["token_embd.weight"].shape[0]
    bias, qkv_bias = (f"blk.0.{stem}.bias" in tensors for stem in ("attn_output", "attn_q"))
    qkv_alone = arch == "llama" and qkv_bias and not bias  # our own export of a Qwen2
    name = ARCHITECTURES["qwen2" if qkv_alone else arch]
    family = FAMILIES[name]
    config = {family.model_fields[n].alias or n: v for n, v in found.items() if n in family.model_fields}
    config |= {"tie_word_embeddings": "output.weight" not in tensors}
    if name == "LlamaForCausalLM":
        config |= {"attention_bias": bias, "mlp_bias": bias}
    if name == "GPT2LMHeadModel":  # a file says nothing of dropout
        config |= {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    ours = to_ours(config, family, path)
    if arch == "gpt2" and found["n_kv_head"] is not None:  # which its class in transformers has no place for
        ours["n_kv_head"] = found["n_kv_head"]
    for key, value in own.items():
        same = key in SAY_NOTHING or (key in keys and ours.get(keys[key]) == value)
        if not same:
            held = f"{path} says {arch}.{key}={value!r:.60}"
            raise ModelError(f"{held}, which no setting of this project holds")
    if ours["n_layer"] > len(tensors):
        raise BadFile(f"{path} says {ours['n_layer']} layers, and holds {len(tensors)} tensors")
    return name, ours


def check_stored(tensors: dict[str, Stored], path: Path):
    """Raises: ModelError for a type that the package cannot read, BadFile for values that are not there."""
    gguf, size = needed("gguf", "gguf", "a GGUF file"), path.stat().st_size
    for name, t in tensors.items():
        try:
            kind = gguf.GGMLQuantizationType(t.kind)
            block, width = gguf.GGML_QUANT_SIZES[kind]
            gguf.dequantize(np.zeros((1, width), np.uint8), kind)
        except (ValueError, NotImplementedError) as e:
            raise ModelError(f"{path}: the package gguf cannot read {name} ({e})") from None
        if t.shape[-1] % block:
            raise BadFile(f"{path} is damaged: {t.shape[-1]} columns of {name} are no blocks of {block}")
        if t.offset + math.prod(t.shape) // block * width > size:
            raise BadFile(f"{path} is cut short: {name} ends behind its {size} bytes; fetch it again")


def fill(rows: torch.Tensor, t: Stored, path: Path):
    """Read a tensor's values into `rows`, a few at a time: mapped, the whole file would count as memory."""
    gguf, flat, at = needed("gguf"), rows.view(-1, rows.shape[-1]), t.offset
    kind = gguf.GGMLQuantizationType(t.kind)
    block, width = gguf.GGML_QUANT_SIZES[kind]
    width *= t.shape[-1] // block
    for piece in flat.split(max(1, PIECE // width)):
        raw = np.fromfile(path, np.uint8, len(piece) * width, offset=at).reshape(len(piece), width)
        piece.copy_(torch.from_numpy(gguf.dequantize(raw, kind)))
        at += len(piece) * width


def rope_scaling(said: dict, tensors: dict, arch: str, ours: dict, path: Path) -> tuple:
    """The four numbers of Llama 3's scaling. A file holds the divisors that follow from them: the numbers of
    all published ones are tried, which differ in the factor. Raises: ModelError."""
    divisors = torch.empty(ours["head_dim"] // 2)
    fill(divisors, tensors[FREQUENCIES], path)
    factor, original = float(f"{divisors.max():.6g}"), said.get(f"{arch}.{ORIGINAL}", 8192)
    if not isinstance(original, int | float):
        raise ModelError(f"{path} says {arch}.{ORIGINAL}={str(original)!r:.40}, which is no number")
    scaling = (factor, 1.0, 4.0, float(original))
    if not torch.allclose(divisors, frequency_divisors(ours, scaling), rtol=1e-5, atol=0.0):
        raise ModelError(f"{path} scales its rotary frequencies as no Llama 3 does; no setting holds that")
    return scaling
