"""--to=hf: a folder for transformers. A network that is one of its classes goes out as that, any other as the
nearest class, in which modeling_nanonorm.py exchanges the norms, and the layers that folding gave a bias.
"""

import json
import re
import runpy
from contextlib import suppress
from dataclasses import asdict, replace
from operator import attrgetter
from pathlib import Path

import torch

from data.tokenizer_json import token_ids, write_files
from forms import export_files
from model import ModelConfig, RMSNorm, Transformer
from nanonorm.errors import ModelError
from nanonorm.families import FAMILIES, Family, Piece, misfits, pieces_of, to_theirs
from nanonorm.files import ROOT
from nanonorm.hub import TOKEN_IDS, write_weights
from scripts.exports import AS_TRAINED, Job, name_of, needed_transformers, prove
from scripts.exports.stock import HEADS, HOW, plain, write_class

NEEDS = ("transformers", "safetensors")
CODE = Path(__file__).with_name("modeling_nanonorm.py")
IN_GPT2 = {  # what the code calls it -> its name in GPT-2
    "LlamaForCausalLM": "GPT2LMHeadModel", "LlamaDecoderLayer": "GPT2Block", "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2", "rms_norm_eps": "layer_norm_epsilon",
}  # fmt: skip
AUTOS = {"AutoConfig": "Config", "AutoModel": "Model", "AutoModelForCausalLM": "ForCausalLM"}
SINK = ("sink_k", "sink_v")  # of all layers; theirs are each attention's own
FILLED = {"RMSNorm": {"weight": 1.0}, "LayerNorm": {"weight": 1.0, "bias": 0.0}}  # where we have none
RUNS = "transformers 4.57 and 5, with Trainer, PEFT and lm_eval"
OWN_HOW = (
    HOW.replace("(FOLDER", "(FOLDER, trust_remote_code=True")
    + """

Written for transformers 4.57 and 5.23. `modeling_nanonorm.py` is all of its code; read it before you trust it
(MIT licence, `LICENSE.nanonorm`). transformers 4 keeps such code by the name of its folder: give each export
a name of its own."""
)
SUNK = """

Token {token} stands in front of every text already, as constants that attention reads: do not give it again,
and where the tokenizer adds it say `add_special_tokens=False`. Only attention by sdpa reads them, so any
other is refused, vLLM's and TransformerLens's too. Give it texts of one length, or one at a time: where rows
are padded with end tokens, these can overflow, and spoil their row."""
LENS = """

In TransformerLens 4:

```python
from transformer_lens.model_bridge import TransformerBridge

bridge = TransformerBridge.boot_transformers(FOLDER, trust_remote_code=True)
{gpt2}logits, cache = bridge.run_with_cache(ids)
```

Without a norm before the unembedding, direct logit attribution is exact: what the unembedding reads of each
component's write, and its bias, sum to the logits. With one, its scale still has to be frozen."""
LENS_GPT2 = """\
for part in bridge.modules():
    if hasattr(part, "use_native_layernorm_autograd"):  # else it computes the norms that a GPT-2 has
        part.use_native_layernorm_autograd = True
"""
SAVES = {
    "none": AS_TRAINED,
    "scales": "Nothing: norms that change nothing are still computed.",
    "all": "No norm is computed any more. On a GPU, or compiled, most of what that saves is launches: see"
    " results/speed.md of nanonorm.",
    "some": "What is named above is not computed any more; the rest is.",
}


def form_for(c: ModelConfig) -> str:
    """The form that is exported: a shift goes into the next layer, as no RMSNorm of theirs has one."""
    return "weightless" if c.norm == "cbwc" and c.norm_bias else "folded"


def nearest(c: ModelConfig) -> tuple[str, dict]:
    """(a class of transformers, the settings of a network of this shape that it is). Raises: ModelError."""
    twin = {**asdict(c), "form": "trained", "taper": "none", "norm": "rmsnorm", "sink_token": None}
    if c.positions == "learned":
        twin |= {"norm": "layernorm", "norm_bias": True, "bias": True, "qkv_bias": False}
    wrong = {name: misfits(twin, family) for name, family in FAMILIES.items()}
    name = min(wrong, key=lambda candidate: len(wrong[candidate]))
    if wrong[name]:
        why = f"{name}, the nearest, has no {', '.join(wrong[name])}"
        raise ModelError(f"no class of transformers has this shape: {why}; use --to=onnx")
    return name, twin


def names_for(family: type[Family], twin: dict, ours) -> dict[str, list[Piece]]:
    """The names of tensors of ours -> what each is made of. Where theirs has no place for a bias, or for what
    else stands beside a weight, it stands beside theirs."""
    every = {**twin, "bias": True, "qkv_bias": True, "qk_norm": True, "tie_embeddings": False}
    pieces, found = pieces_of(family.names, every), {}
    for name in ours:
        if name in SINK:
            writers = [pieces[f"blocks.{i}.attn.proj.weight"][0].name for i in range(twin["n_layer"])]
            shape = (1, twin["n_kv_head"], 1, twin["head_dim"])
            theirs = [writer.rsplit(".", 2)[0] for writer in writers]
            found[name] = [Piece(f"{attention}.{name}", shape, False) for attention in theirs]
            continue
        stem, _, leaf = name.rpartition(".")
        owner = f"{stem}.norm_mlp.weight" if leaf == "floor" else f"{stem}.weight"  # a floor is a block's
        beside = [piece._replace(name=piece.name.replace("weight", leaf)) for piece in pieces[owner]]
        found[name] = pieces.get(name, beside)
    return found


def kinds_of(model: Transformer, stock: dict) -> dict[str, str]:
    """Our name of each norm that the stock class has -> the class that stands there in our network."""
    stems = [name.removesuffix(".weight") for name in stock if "norm" in name and name.endswith(".weight")]
    found = {stem: attrgetter(stem)(model) for stem in stems}
    return {stem: "Identity" if norm is None else type(norm).__name__ for stem, norm in found.items()}


def completed(state: dict, stock: dict, kinds: dict[str, str]) -> dict:
    """The weights, with gains of 1 and biases of 0 where the stock class, or torch's norm, must have some."""
    like, new = state["tok_emb.weight"], dict(state)
    for stem, kind in kinds.items():
        for leaf, value in FILLED.get(kind, {}).items():
            new.setdefault(f"{stem}.{leaf}", like.new_full(stock[f"{stem}.weight"][0].shape, value))
    for name in [name for name in stock if name.endswith(".bias") and "norm" not in name]:
        new.setdefault(name, like.new_zeros(stock[name][0].shape))  # of a GPT-2
    return new


def translated(model: Transformer, family: type[Family], twin: dict) -> tuple[dict, dict[str, str]]:
    """({name of theirs: tensor}, config.modules). Raises: ModelError for a module that CODE does not have."""
    stock = pieces_of(family.names, twin)
    kinds, tensors, modules = kinds_of(model, stock), {}, {}
    for stem, kind in kinds.items():
        name = stock[f"{stem}.weight"][0].name.removesuffix(".weight")
        if kind == "CoupledNorm":  # of two norms, which their layer has
            name, kind = name.rpartition(".")[0], "CoupledLayer"
        if f'"{kind}"' not in CODE.read_text():
            raise ModelError(f"{CODE.name} has no {kind}; write it there, or use --to=onnx")
        modules[name] = kind
    state, known = completed(model.state_dict(), stock, kinds), {p.name for ps in stock.values() for p in ps}
    for ours, parts in names_for(family, twin, state).items():
        split = state[ours].split([p.rows for p in parts]) if len(parts) > 1 else [state[ours]]
        for piece, rows in zip(parts, split, strict=True):
            tensors[piece.name] = piece.turned(rows.detach()).contiguous()
            module, _, leaf = piece.name.rpartition(".")
            if leaf == "bias" and piece.name not in known and module not in modules:
                modules[module] = "Linear"
    return tensors, {name.removeprefix(family.prefix): kind for name, kind in modules.items()}


def code_for(name: str) -> str:
    """modeling_nanonorm.py for a class of transformers."""
    family = re.sub("(LMHeadModel|ForCausalLM)$", "", name)
    words = {**(IN_GPT2 if family == "GPT2" else {}), "Llama": family, "llama": family.lower()}
    text = CODE.read_text()
    for word, theirs in words.items():
        text = text.replace(word, theirs)
    return text


def load(folder: Path, dtype: torch.dtype):
    """The model of a folder, by its own code, of which transformers would keep a copy in its cache."""
    code = runpy.run_path(str(folder / CODE.name))
    return code["NanonormForCausalLM"].from_pretrained(folder, dtype=dtype).eval()


def stock_file(model: Transformer) -> dict | None:
    """The network as a file, if it is one of transformers' classes as it stands, no norm removed."""
    if model.config.taper != "none":
        return None
    with suppress(ModelError):  # a norm that no class has
        file = plain(model)
        if not all(misfits(file["config"], family) for family in FAMILIES.values()):
            return file
    return None


def saves(model: Transformer) -> str:
    """What the network saves, by what was removed from it."""
    c = model.config
    if c.norm_eps > 1:
        return SAVES["scales"]
    if len(export_files(replace(c, form="trained"))) == 1:
        return SAVES["none"]
    kept = any(isinstance(m, RMSNorm) for m in model.modules())
    return SAVES["all" if c.taper == "all" and not kept else "some"]


def write(job: Job) -> dict:
    """The folder of a class of transformers where the network is one, else with modeling_nanonorm.py."""
    needed_transformers()
    c, file = job.model.config, stock_file(job.model)
    if file is not None:
        errors, name = write_class(job, file)
        how, runs = HOW.format(dtype=name_of(job.dtype)), f"{RUNS}, and in whatever else runs a {name}"
        return {"errors": errors, "runs": runs, "how": how, "saves": saves(job.model)}
    name, twin = nearest(c)
    family, sunk = FAMILIES[name], c.sink_token is not None
    tensors, modules = translated(job.model, family, twin)
    config = {
        **to_theirs(twin | {"block_size": c.longest_text}, family),  # a sink has a position of its own
        "model_type": f"nanonorm_{family.model_type}",
        "architectures": ["NanonormForCausalLM"],
        "original_architecture": name,  # which TransformerLens asks for
        "auto_map": {auto: f"modeling_nanonorm.Nanonorm{what}" for auto, what in AUTOS.items()},
        "modules": modules,
        "coupled_grad": c.coupled_grad,
        "coupled_floor": c.coupled_floor,
        "sink": (twin["n_kv_head"], 1, twin["head_dim"]) if sunk else None,  # the shape of a layer's keys
        **dict.fromkeys(TOKEN_IDS),  # else what it does not say is the class's
        **token_ids(job.tokenizer),
        "torch_dtype": name_of(job.dtype),  # transformers 5 reads it too
    }
    texts = {"config.json": json.dumps(config, indent=1) + "\n", CODE.name: code_for(name)}
    texts["LICENSE.nanonorm"] = (ROOT / "LICENSE").read_text()
    for file, text in texts.items():
        (job.folder / file).write_text(text)
    write_weights(tensors, job.folder)
    write_files(job.tokenizer, c.longest_text, job.folder, begins=not sunk)
    errors = {}
    for dtype in dict.fromkeys((torch.float64, job.dtype) if job.exact else (job.dtype,)):
        wide = torch.promote_types(dtype, torch.float32)
        logits = load(job.folder, dtype)(input_ids=job.sample).logits.to(wide)
        errors[name_of(dtype)] = prove(job.logits(wide), logits, dtype, "the folder loaded again")
    how, runs = OWN_HOW.format(dtype=name_of(job.dtype)), RUNS
    how += SUNK.format(token=c.sink_token) if sunk else ""
    if c.positions == "rope" and c.head_dim in HEADS and not sunk:  # vLLM loads no GPT-2 that way
        runs += "; vLLM's transformers backend"
    if not sunk and {*modules.values()} <= {"Identity", "RMSNorm", "LayerNorm", "Linear"}:
        runs += "; TransformerLens 4"
        how += LENS.format(gpt2=LENS_GPT2 if c.positions == "learned" else "")
    return {"errors": errors, "runs": runs, "how": how, "saves": saves(job.model)}
