"""The architectures of Hugging Face that are settings of our model: GPT-2, Llama, Qwen2 and Qwen3.

A family is a table of names, a row a tensor of ours, and a Family: the keys of its config.json and what is
fixed about it. Both serve both directions. No file is read or written here.
"""

import re
from pathlib import Path
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field, ValidationError

from nanonorm.errors import BadFile, ModelError
from nanonorm.typed import Count, Positive, Range, Record

# ---------------------------------------------------------------------------------------------------------
# tensors: our name, theirs, the shape of theirs; several of theirs stand one below the other in ours
#
# V vocabulary, P positions, D width, Q and K widths of all query and all key heads, E = Q + 2K, C width of a
# head, F width of the MLP. `transposed`: GPT-2's Conv1D is (in, out). Any other word: the row is there if one
# of these settings is on.

GPT2_NAMES = """
tok_emb.weight               transformer.wte.weight                           VD
pos_emb.weight               transformer.wpe.weight                           PD
blocks.*.norm_attn.weight    transformer.h.*.ln_1.weight                      D
blocks.*.norm_attn.bias      transformer.h.*.ln_1.bias                        D
blocks.*.attn.qkv.weight     transformer.h.*.attn.c_attn.weight               DE        transposed
blocks.*.attn.qkv.bias       transformer.h.*.attn.c_attn.bias                 E
blocks.*.attn.proj.weight    transformer.h.*.attn.c_proj.weight               QD        transposed
blocks.*.attn.proj.bias      transformer.h.*.attn.c_proj.bias                 D
blocks.*.norm_mlp.weight     transformer.h.*.ln_2.weight                      D
blocks.*.norm_mlp.bias       transformer.h.*.ln_2.bias                        D
blocks.*.mlp.up.weight       transformer.h.*.mlp.c_fc.weight                  DF        transposed
blocks.*.mlp.up.bias         transformer.h.*.mlp.c_fc.bias                    F
blocks.*.mlp.down.weight     transformer.h.*.mlp.c_proj.weight                FD        transposed
blocks.*.mlp.down.bias       transformer.h.*.mlp.c_proj.bias                  D
norm_final.weight            transformer.ln_f.weight                          D
norm_final.bias              transformer.ln_f.bias                            D
lm_head.weight               lm_head.weight                                   VD        untied
"""

LLAMA_NAMES = """
tok_emb.weight               model.embed_tokens.weight                        VD
blocks.*.norm_attn.weight    model.layers.*.input_layernorm.weight            D
blocks.*.attn.qkv.weight     model.layers.*.self_attn.{q,k,v}_proj.weight     QD,KD,KD
blocks.*.attn.qkv.bias       model.layers.*.self_attn.{q,k,v}_proj.bias       Q,K,K     bias qkv_bias
blocks.*.attn.norm_q.weight  model.layers.*.self_attn.q_norm.weight           C         qk_norm
blocks.*.attn.norm_k.weight  model.layers.*.self_attn.k_norm.weight           C         qk_norm
blocks.*.attn.proj.weight    model.layers.*.self_attn.o_proj.weight           DQ
blocks.*.attn.proj.bias      model.layers.*.self_attn.o_proj.bias             D         bias
blocks.*.norm_mlp.weight     model.layers.*.post_attention_layernorm.weight   D
blocks.*.mlp.gate_up.weight  model.layers.*.mlp.{gate,up}_proj.weight         FD,FD
blocks.*.mlp.gate_up.bias    model.layers.*.mlp.{gate,up}_proj.bias           F,F       bias
blocks.*.mlp.down.weight     model.layers.*.mlp.down_proj.weight              DF
blocks.*.mlp.down.bias       model.layers.*.mlp.down_proj.bias                D         bias
norm_final.weight            model.norm.weight                                D
lm_head.weight               lm_head.weight                                   VD        untied
"""


class Piece(NamedTuple):
    """A tensor of theirs: all of one of ours, or some of its rows."""

    name: str
    shape: tuple[int, ...]  # of theirs
    transposed: bool

    @property
    def rows(self) -> int:
        return self.shape[-1 if self.transposed else 0]

    def turned(self, t: torch.Tensor) -> torch.Tensor:
        return t.t() if self.transposed else t


def pieces_of(names: str, c: dict) -> dict[str, list[Piece]]:
    """Our name -> what it is made of, for every tensor of a model with the settings `c`."""
    Q, K = c["n_head"] * c["head_dim"], c["n_kv_head"] * c["head_dim"]
    sizes = {"V": c["vocab_size"], "P": c["block_size"], "D": c["n_embd"], "F": c["hidden"]}
    sizes |= {"Q": Q, "K": K, "E": Q + 2 * K, "C": c["head_dim"]}
    switches = {**c, "untied": not c["tie_embeddings"]}
    pieces = {}
    for ours, theirs, shapes, *words in (line.split() for line in names.strip().splitlines()):
        wanted = [word for word in words if word != "transposed"]
        if wanted and not any(switches[word] for word in wanted):
            continue
        head, choices, tail = re.fullmatch(r"([^{]*)\{?([^}]*)\}?(.*)", theirs).groups()
        several = [head + choice + tail for choice in choices.split(",")]
        for i in map(str, range(c["n_layer"] if "*" in ours else 1)):
            pieces[ours.replace("*", i)] = [
                Piece(name.replace("*", i), tuple(sizes[letter] for letter in shape), "transposed" in words)
                for name, shape in zip(several, shapes.split(","), strict=True)
            ]
    return pieces


def check_fit(found: dict, pieces: dict[str, list[Piece]], path: Path, says: str, beside: dict):
    """Raises: ModelError for a tensor without a place, BadFile for one that is missing or misshapen.

    found: name -> shape of the tensors in `path`; says: what gave the settings; beside: name -> shape of
    those that belong to none of ours.
    """
    wanted = {piece.name: piece.shape for parts in pieces.values() for piece in parts} | beside
    if unknown := sorted(found.keys() - wanted.keys()):
        raise ModelError(f"{path} holds a tensor {unknown[0]:.100}, for which our model has no place")
    for name, shape in wanted.items():
        if name not in found:
            raise BadFile(f"{path} is not whole: tensor {name} is missing")
        if found[name] != shape:
            raise BadFile(f"{path} does not fit its {says}: {name} is {found[name]}, not {shape}")


# ---------------------------------------------------------------------------------------------------------
# settings: a field of ours, its key in config.json, and what the class takes where config.json lacks it


def demand(default):
    """A key that is no setting of ours, and must be what one of our models computes."""
    return Field(default, exclude=True)


Zero, One = Annotated[float, Range(0.0, 0.0)], Annotated[float, Range(1.0, 1.0)]
Dropout = Annotated[float, Range(0.0, 0.999)]
GELUS = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_erf"}  # their activation -> our `mlp`
SWIGLU = {"silu": "swiglu", "swish": "swiglu"}
BIASED = {"bias": True, "qkv_bias": False, "qk_norm": False}
ROTARY = {"norm": "rmsnorm", "positions": "rope"}
LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


class Family(Record):
    """A class of transformers that is a setting of our model."""

    model_type: ClassVar[str]
    names: ClassVar[str]
    prefix: ClassVar[str]  # of its names; a file of the bare model lacks it
    fixed: ClassVar[dict]  # our settings that come with the class
    activations: ClassVar[dict]
    twins: ClassVar[dict] = {}  # a key of theirs -> the field that it must equal
    quantization_config: None = demand(None)


class GPT2(Family):
    model_type, names, prefix = "gpt2", GPT2_NAMES, "transformer."
    fixed: ClassVar[dict] = {"norm": "layernorm", "norm_bias": True, "positions": "learned", **BIASED}
    activations, twins = GELUS, {"attn_pdrop": "dropout", "embd_pdrop": "dropout"}

    vocab_size: Count = 50257
    block_size: Count = Field(1024, alias="n_positions")
    n_layer: Count = 12
    n_head: Count = 12
    n_embd: Count = 768
    hidden: Count | None = Field(None, alias="n_inner")
    mlp: Literal[*GELUS] = Field("gelu_new", alias="activation_function")
    tie_embeddings: bool = Field(True, alias="tie_word_embeddings")
    norm_eps: Positive = Field(1e-5, alias="layer_norm_epsilon")
    dropout: Dropout = Field(0.1, alias="resid_pdrop")
    attn_pdrop: Dropout = demand(0.1)
    embd_pdrop: Dropout = demand(0.1)
    scale_attn_weights: Literal[True] = demand(True)
    scale_attn_by_inverse_layer_idx: Literal[False] = demand(False)
    reorder_and_upcast_attn: Literal[False] = demand(False)
    add_cross_attention: Literal[False] = demand(False)


class Rotary(Family):
    """What Llama, Qwen2 and Qwen3 share."""

    names, prefix, activations = LLAMA_NAMES, "model.", SWIGLU

    vocab_size: Count = 151936
    block_size: Count = Field(32768, alias="max_position_embeddings")
    n_layer: Count = Field(32, alias="num_hidden_layers")
    n_head: Count = Field(32, alias="num_attention_heads")
    n_kv_head: Count | None = Field(32, alias="num_key_value_heads")
    n_embd: Count = Field(4096, alias="hidden_size")
    head_dim: Count | None = None
    hidden: Count = Field(22016, alias="intermediate_size")
    mlp: Literal[*SWIGLU] = Field("silu", alias="hidden_act")
    tie_embeddings: bool = Field(False, alias="tie_word_embeddings")
    norm_eps: Positive = Field(1e-6, alias="rms_norm_eps")
    rope_base: Positive = Field(10000.0, alias="rope_theta")
    rope_scaling: tuple[Positive, Positive, Positive, Positive] | None = None  # the values of LLAMA3
    rope_type: Literal["default", "llama3"] = demand("default")
    partial_rotary_factor: One = demand(1.0)
    attention_dropout: Zero = demand(0.0)


class Llama(Rotary):
    model_type, twins = "llama", {"attention_bias": "bias"}
    fixed: ClassVar[dict] = {**ROTARY, "qkv_bias": False, "qk_norm": False}

    vocab_size: Count = 32000
    block_size: Count = Field(2048, alias="max_position_embeddings")
    n_kv_head: Count | None = Field(None, alias="num_key_value_heads")
    hidden: Count = Field(11008, alias="intermediate_size")
    bias: bool = Field(False, alias="mlp_bias")
    attention_bias: bool = demand(False)


class Qwen2(Rotary):
    model_type = "qwen2"
    fixed: ClassVar[dict] = {**ROTARY, "bias": False, "qkv_bias": True, "qk_norm": False}

    use_sliding_window: Literal[False] = demand(False)
    layer_types: list[Literal["full_attention"]] | None = demand(None)


class Qwen3(Qwen2):
    model_type = "qwen3"
    fixed: ClassVar[dict] = {**ROTARY, "bias": False, "qkv_bias": False, "qk_norm": True}

    head_dim: Count | None = 128
    attention_bias: Literal[False] = demand(False)


FAMILIES: dict[str, type[Family]] = {
    "GPT2LMHeadModel": GPT2,
    "LlamaForCausalLM": Llama,
    "Qwen2ForCausalLM": Qwen2,
    "Qwen3ForCausalLM": Qwen3,
}


def architecture_of(config: dict, path: Path) -> str:
    """The class that a config.json names. Raises: ModelError for a foreign one."""
    by_type = {family.model_type: name for name, family in FAMILIES.items()}
    listed = config.get("architectures") or [by_type.get(str(config.get("model_type")))]
    name = str(listed[0] if isinstance(listed, list) else listed)
    if str(config.get("model_type")).startswith("nanonorm_"):
        remedy = "name the run it was made of"
        raise ModelError(f"{path} is an export with code of its own, which evaluate.py alone reads; {remedy}")
    if name not in FAMILIES:
        raise ModelError(f"{path} is of architecture {name!r:.60}; this project takes {', '.join(FAMILIES)}")
    return name


def flattened(config: dict, path: Path) -> dict:
    """config.json with its rotary settings as fields of Rotary: transformers 5 keeps them in rope_parameters,
    earlier ones in rope_theta and rope_scaling. Raises: ModelError."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise ModelError(f"{path} gives rope_parameters by layer, which no setting of this project holds")
    kind = rope.get("rope_type", rope.get("type", "default"))
    numbers = {LLAMA3[-1]: config.get("max_position_embeddings"), **rope}
    scaling = tuple(map(numbers.get, LLAMA3)) if kind == "llama3" else None
    moved = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    return {**config, **moved, "rope_type": kind, "rope_scaling": scaling}


def sizes_unless_named(c: dict) -> dict:
    """What a class takes for a size that it has no key for, or that is None."""
    return {"n_kv_head": c["n_head"], "head_dim": c["n_embd"] // c["n_head"], "hidden": 4 * c["n_embd"]}


def to_ours(config: dict, family: type[Family], path: Path) -> dict:
    """Our settings for a config.json. Raises: ModelError that names the key which none of them holds."""
    try:
        keys = family.model_validate(flattened(config, path))
    except ValidationError as e:
        first = e.errors()[0]
        key, reason = ".".join(map(str, first["loc"])), first["msg"].lower()
        said = f"{path} says {key}={first['input']!r:.60}"
        raise ModelError(f"{said}, which no setting of this project holds ({reason})") from None
    for twin, name in family.twins.items():
        key, values = family.model_fields[name].alias, (getattr(keys, twin), getattr(keys, name))
        if values[0] != values[1]:
            said = f"{path} says {twin}={values[0]} and {key}={values[1]}"
            raise ModelError(f"{said}; one setting, {name}, is both here: make them equal")
    ours = {**keys.model_dump(), **family.fixed}
    ours["mlp"] = family.activations[ours["mlp"]]
    return ours | {n: size for n, size in sizes_unless_named(ours).items() if ours.get(n) is None}


def to_theirs(config: dict, family: type[Family]) -> dict:
    """The keys of config.json, spelled as before transformers 5: every version reads those."""
    fields = {n: field for n, field in family.model_fields.items() if not field.exclude}
    keys = {field.alias or n: config[n] for n, field in fields.items()}
    keys |= {twin: config[n] for twin, n in family.twins.items()}
    keys[fields["mlp"].alias] = next(k for k, mlp in family.activations.items() if mlp == config["mlp"])
    if keys.get("rope_scaling") is not None:
        *factors, length = keys["rope_scaling"]
        keys["rope_scaling"] = dict(zip(LLAMA3, (*factors, int(length)), strict=True), rope_type="llama3")
    return keys


def misfits(config: dict, family: type[Family]) -> list[str]:
    """The settings that a class of transformers cannot hold."""
    sizes = {n: size for n, size in sizes_unless_named(config).items() if n not in family.model_fields}
    wanted = {"form": "trained", "taper": "none", "sink_token": None, **family.fixed, **sizes}
    wrong = [n for n, value in wanted.items() if config.get(n, value) != value]
    if config["mlp"] not in family.activations.values():
        wrong.append("mlp")
    if family in (GPT2, Llama) and config["n_embd"] % config["n_head"]:
        wrong.append("n_embd")  # both want a multiple, LlamaConfig whatever head_dim is
    return [f"{n}={config[n]}" for n in wrong]
