"""Hugging Face folder <-> {"config", "state", "meta"}, and the one door by which every model comes in.

    config.json                                        the architecture
    model.safetensors, or model.safetensors.index.json with the shards that it names

A family is a table of names, a row a tensor of ours, and a Family: the keys of its config.json and what is
fixed about it. Both serve both directions. Files are read by safetensors and json alone.
"""

import json
import os
import re
from contextlib import ExitStack, suppress
from functools import partial, reduce
from pathlib import Path
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field, ValidationError

from nanonorm.errors import BadFile, BadInput, ModelError
from nanonorm.files import atomic_write, json_object, read_file, writing
from nanonorm.run import model_file
from nanonorm.typed import Count, Positive, Range, Record

HUB_TIMEOUT_S = 10  # for the first question to the hub; fetching keeps the client's own timeouts
FETCHED = (
    "config.json", "generation_config.json", "model.safetensors", "model-*.safetensors",
    "model.safetensors.index.json", "tokenizer*", "vocab.json", "merges.txt", "special_tokens_map.json",
    "added_tokens.json", "chat_template*", "README.md", "LICENSE*",
)  # fmt: skip
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")  # carried through, so that a way back has them
BUFFERS = r"(\.attn\.(masked_)?bias|rotary_emb\.inv_freq)$"  # masks and frequencies in older files
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


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


# ---------------------------------------------------------------------------------------------------------
# settings: a field of ours, its key in config.json, and what the class takes where config.json lacks it


def demand(default):
    """A key that is no setting of ours, and must be what one of our models computes."""
    return Field(default, exclude=True)


Zero, One = Annotated[float, Range(0.0, 0.0)], Annotated[float, Range(1.0, 1.0)]
Rate = Annotated[float, Range(0.0, 0.999)]
GELU = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_erf"}  # their activation -> our `mlp`
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
    activations, twins = GELU, {"attn_pdrop": "dropout", "embd_pdrop": "dropout"}

    vocab_size: Count = 50257
    block_size: Count = Field(1024, alias="n_positions")
    n_layer: Count = 12
    n_head: Count = 12
    n_embd: Count = 768
    hidden: Count | None = Field(None, alias="n_inner")
    mlp: Literal[*GELU] = Field("gelu_new", alias="activation_function")
    tie_embeddings: bool = Field(True, alias="tie_word_embeddings")
    norm_eps: Positive = Field(1e-5, alias="layer_norm_epsilon")
    dropout: Rate = Field(0.1, alias="resid_pdrop")
    attn_pdrop: Rate = demand(0.1)
    embd_pdrop: Rate = demand(0.1)
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
    wanted = {"form": "trained", "taper": "none", **family.fixed, **sizes}
    wrong = [n for n, value in wanted.items() if config.get(n, value) != value]
    if config["mlp"] not in family.activations.values():
        wrong.append("mlp")
    if family is Llama and config["n_embd"] % config["n_head"]:
        wrong.append("n_embd")  # LlamaConfig wants a multiple, whatever head_dim is
    return [f"{n}={config[n]}" for n in wrong]


# ---------------------------------------------------------------------------------------------------------
# reading


def read_pretrained(folder: str | Path, dtype: torch.dtype | None = None) -> dict:
    """{"config", "state", "meta"} of a Hugging Face folder, in the file's type or `dtype`.

    Each tensor is memory of its own, filled from the mapped files. All is checked before the first is made,
    but for finite values, which Transformer.from_file looks for.
    Raises: BadFile for what is damaged or missing, ModelError for what our model cannot be.
    """
    folder = Path(folder)
    config, path = read_config(folder), folder / "config.json"
    name = architecture_of(config, path)
    family = FAMILIES[name]
    ours = to_ours(config, family, path)
    with ExitStack() as held:
        tensors = open_tensors(folder, family.prefix, held)
        if ours["n_layer"] > len(tensors):
            raise BadFile(f"{path} says {ours['n_layer']} layers, the files hold {len(tensors)} tensors")
        pieces = pieces_of(family.names, ours)
        types = check_tensors(tensors, pieces, folder)
        if ours["tie_embeddings"] and "lm_head.weight" in tensors:
            check_tied(tensors, pieces["tok_emb.weight"][0].name, path)
        dtype = dtype or reduce(torch.promote_types, types)
        state = {n: assembled(parts, tensors, dtype) for n, parts in pieces.items()}
    base = {"name": published_name(folder), "architecture": name, "license": license_of(folder)}
    base |= {key: config[key] for key in TOKEN_IDS if key in config}
    return {"config": ours, "state": state, "meta": {"base": base}}


def read_config(folder: Path) -> dict:
    """What config.json holds. Raises: BadFile."""
    path = folder / "config.json"
    try:
        return json_object(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise BadFile(f"{folder} is no Hugging Face folder: it has no config.json") from None
    except ValueError as e:
        raise BadFile(f"{path} is damaged: {str(e)[:100]}") from None


def shards_of(folder: Path) -> list[Path]:
    """The files that hold the weights. Raises: BadFile, with the remedy if they are pickles."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.exists():
        return [whole]
    if index.exists():
        try:
            names = set(json_object(index.read_bytes())["weight_map"].values())
            if not names or any(Path(name).name != name for name in names):
                raise ValueError("its weight_map must name files beside it")
        except (ValueError, LookupError, TypeError, AttributeError) as e:
            raise BadFile(f"{index} is damaged: {str(e)[:100]}") from None
        return [folder / name for name in sorted(names)]
    if pickles := sorted(folder.glob("pytorch_model*.bin")):
        said = f"{pickles[0]} is a pickle, which can run code, and nothing is unpickled here"
        remedy = (
            "if you trust it, load and save_pretrained it with transformers: that writes model.safetensors"
        )
        raise BadFile(f"{said}; {remedy}")
    raise BadFile(f"{folder} holds no weights: no model.safetensors, no model.safetensors.index.json")


def open_tensors(folder: Path, prefix: str, held: ExitStack) -> dict:
    """Name, with its prefix -> (open file, name in it); the files are mapped as long as `held` is open.
    Buffers that older files carry are left out. Raises: BadFile."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise BadInput("a Hugging Face folder needs safetensors: pip install safetensors") from None
    tensors = {}
    for path in shards_of(folder):
        try:
            file = held.enter_context(safe_open(path, framework="pt"))
        except FileNotFoundError:
            raise BadFile(f"{path} is missing: model.safetensors.index.json names it") from None
        except SafetensorError as e:
            raise BadFile(f"{path} is damaged or cut short ({str(e)[:100]}); fetch it again") from None
        for name in file.keys():  # noqa: SIM118, a file is no dict
            full = name if name.startswith((prefix, "lm_head.")) else prefix + name
            if not re.search(BUFFERS, full):
                tensors[full] = file, name
    return tensors


def values(tensors: dict, name: str) -> torch.Tensor:
    """A view of the mapped file."""
    file, own = tensors[name]
    return file.get_tensor(own)


def check_tensors(tensors: dict, pieces: dict, folder: Path) -> list[torch.dtype]:
    """The types of the tensors, which are named and shaped as `pieces` says. Raises: BadFile, ModelError."""
    wanted = {piece.name: piece.shape for parts in pieces.values() for piece in parts}
    if unknown := sorted(tensors.keys() - wanted.keys() - {"lm_head.weight"}):
        raise ModelError(f"{folder} holds a tensor {unknown[0]:.100}, for which our model has no place")
    types = []
    for name, shape in wanted.items():
        if name not in tensors:
            raise BadFile(f"{folder} is not whole: tensor {name} is missing")
        file, own = tensors[name]
        header = file.get_slice(own)
        found, kind = tuple(header.get_shape()), header.get_dtype()
        if found != shape:
            raise BadFile(f"{folder} does not fit its config.json: {name} is {found}, not {shape}")
        if kind not in DTYPES:
            raise ModelError(f"{folder}: {name} is of type {kind}; weights must be {', '.join(DTYPES)}")
        types.append(DTYPES[kind])
    return types


def check_tied(tensors: dict, embedding: str, path: Path):
    """Raises: ModelError for a head of its own, which transformers 5 would use and 4 would not."""
    head, table = values(tensors, "lm_head.weight"), values(tensors, embedding)
    if head.dtype != table.dtype or not torch.equal(head, table):
        said = f"{path} says tie_word_embeddings=True, but lm_head.weight is not {embedding}"
        raise ModelError(f"{said}; say false there if the head is another matrix")


def assembled(pieces: list[Piece], tensors: dict, dtype: torch.dtype) -> torch.Tensor:
    """One of our tensors, in memory of its own."""
    parts = [piece.turned(values(tensors, piece.name)) for piece in pieces]
    whole = torch.empty(sum(map(len, parts)), *parts[0].shape[1:], dtype=dtype)
    for rows, part in zip(whole.split([len(part) for part in parts]), parts, strict=True):
        rows.copy_(part)
    return whole


def published_name(folder: Path) -> str:
    """The hub id, where the folder is one of the hub's cache, else the folder's name."""
    path = folder.resolve().as_posix()
    cached = re.search(r"/models--([^/]+)/snapshots/[^/]+$", path)
    return cached[1].replace("--", "/") if cached else Path(path).name


def license_of(folder: Path) -> str | None:
    """The licence that README.md names in its front matter."""
    try:
        text = (folder / "README.md").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    named = re.match(r"---\n(?:(?!---).*\n)*?license:[ \t]*[\"']?([\w.+-]+)", text)
    return named[1] if named else None


# ---------------------------------------------------------------------------------------------------------
# writing


def write_pretrained(file: dict, folder: str | Path):
    """Write config.json and model.safetensors of the stock class that holds this model exactly.

    file: as read_pretrained returns it, or {"config": asdict(model.config), "state", "meta"}. A gelu goes out
    as gelu_new; dropout goes where the class has it, the scale anchor's averages nowhere.
    Raises: ModelError that names what no stock class holds, BadInput if it cannot be written.
    """
    config = file["config"]
    wrong = {name: misfits(config, family) for name, family in FAMILIES.items()}
    name = min(wrong, key=lambda candidate: len(wrong[candidate]))
    if wrong[name]:
        nearest = f"{name}, the nearest, has no {', '.join(wrong[name])}"
        raise ModelError(f"no stock class of transformers holds this model: {nearest}")
    family = FAMILIES[name]
    pieces = pieces_of(family.names, config)
    state = {n: t.detach() for n, t in file["state"].items() if not n.startswith("anchor.")}
    if odd := sorted(state.keys() ^ pieces.keys()):
        what = "has no place for" if odd[0] in state else "needs"
        raise ModelError(f"no stock class of transformers holds this model: {name} {what} {odd[0]}")
    tensors = {}
    for ours, parts in pieces.items():
        for piece, rows in zip(parts, state[ours].split([p.rows for p in parts]), strict=True):
            tensors[piece.name] = piece.turned(rows).contiguous()
    base = file["meta"].get("base", {})
    keys = {"architectures": [name], "model_type": family.model_type, **to_theirs(config, family)}
    keys |= {key: base.get(key) for key in TOKEN_IDS}
    keys["torch_dtype"] = str(state["tok_emb.weight"].dtype).removeprefix("torch.")
    write_weights(tensors, Path(folder))
    with atomic_write(Path(folder) / "config.json", "w") as f:
        f.write(json.dumps(keys, indent=2) + "\n")


def write_weights(tensors: dict, folder: Path):
    """Write model.safetensors, whole or not at all. Raises: BadInput."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path, tmp = folder / "model.safetensors", folder / "model.safetensors.tmp"
    try:
        with writing(path):
            folder.mkdir(parents=True, exist_ok=True)
            save_file(tensors, tmp, metadata={"format": "pt"})
            os.replace(tmp, path)
    except SafetensorError as e:
        raise BadInput(f"cannot write {path}: {str(e)[:100]}; free the disk or name another folder") from None
    finally:
        with suppress(OSError):
            tmp.unlink()


# ---------------------------------------------------------------------------------------------------------
# finding


def find(name: str | Path, weights: bool = True) -> Path:
    """The path that `name` is, or the folder in the hub's cache that holds the model of this id, fetched if
    need be, without its weights if so told. Raises: BadInput, which names the local way out."""
    name = str(name)
    if os.path.exists(name):
        return Path(name)
    said, is_file = f"no such file or folder: {name}", name.endswith((".pt", ".safetensors", ".bin"))
    if is_file or not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name):  # else it may be a hub id
        raise BadInput(said)
    way_out = f"fetch it where the hub can be reached (hf download {name} --local-dir=DIR) and give DIR"
    try:
        from huggingface_hub import HfApi, snapshot_download
    except ImportError:
        remedy = f"pip install huggingface_hub, or {way_out}"
        raise BadInput(f"{said}, and the hub cannot be asked for it; {remedy}") from None
    wanted = [pattern for pattern in FETCHED if weights or not pattern.startswith("model")]
    fetch = partial(snapshot_download, name, allow_patterns=wanted)
    try:
        # Without a network the client would retry for half a minute. One question first tells at once.
        HfApi().model_info(name, timeout=HUB_TIMEOUT_S)
        return Path(fetch())
    except Exception as e:  # its type depends on the client's version and on the network in between
        reason = f"{type(e).__name__}: {' '.join(str(e).split()):.100}"
    with suppress(Exception):  # what an earlier call fetched
        return Path(fetch(local_files_only=True))
    remedy = f"{way_out}; a model behind a log-in needs HF_TOKEN too"
    raise BadInput(f"{said}, nor does the Hugging Face hub give it ({reason}); {remedy}")


def open_model(name: str | Path, dtype: torch.dtype | None = None) -> tuple[dict, Path]:
    """(file, its path) of a model file, a run folder, a Hugging Face folder or a hub id; in `dtype` if one is
    given. Raises: BadInput, ModelError."""
    path = find(name)
    if is_pretrained(path):
        return read_pretrained(path, dtype), path
    path = model_file(path)
    file = read_file(path)
    if dtype is not None:
        file["state"] = {n: t.to(dtype) for n, t in file["state"].items()}
    return file, path


def is_pretrained(path: Path) -> bool:
    """True for a Hugging Face folder: a run's folder has a config.json of its own, which is another."""
    if not path.is_dir():
        return False
    try:
        return bool({"model_type", "architectures"} & read_config(path).keys())
    except BadFile:  # no config.json, or one that read_pretrained is to complain about
        weights = [*path.glob("*.safetensors"), *path.glob("pytorch_model*.bin")]
        return bool(weights) and not list(path.glob("*.pt"))
