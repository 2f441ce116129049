"""--to=transformer_lens: a network with norm-free blocks, for TransformerLens 4, which is also the proof.

The folder holds the weights by TransformerLens's own names, its settings, and load_lens.py, which makes the
bridge of them. TransformerLens turns adjacent pairs where we turn pairs half a head apart: the rows of
queries and keys stand in its order.
"""

import copy
import json
import shutil
from pathlib import Path

import torch

from model import Identity, ModelConfig, Transformer
from nanonorm.errors import ModelError
from nanonorm.gguf import adjacent
from nanonorm.hub import write_weights
from scripts.exports import Job, name_of, prove

NEEDS = ("transformer_lens", "safetensors")
ACTIVATIONS = {"swiglu": "silu", "gelu": "gelu_new", "gelu_erf": "gelu"}
LONGEST = 2048  # tokens; every layer of TransformerLens's network keeps a mask of their square

HOW = """\
    from load_lens import load_lens                     # load_lens.py, in this folder
    bridge = load_lens(".")                             # the folder
    logits, cache = bridge.run_with_cache(ids)          # (batch, length up to {length})"""
ALL = """\
Every component writes a residual stream that the unembedding reads as it is. So direct logit attribution is
exact: the components' contributions, with the unembedding's bias, sum to the logits."""
INTERNAL = """\
No norm stands inside the blocks; the one before the unembedding stays, so attribution to logits still has to
freeze its scale."""


def write(job: Job) -> dict:
    """model.safetensors, lens.json, load_lens.py and the tokenizer's files."""
    model = job.model
    refuse(model)
    config, final = settings(model.config), type(model.norm_final).__name__
    lens = {"config": config, "final_norm": None if final == "Identity" else final}
    lens["rope_scaling"] = scaling(model.config)
    (job.folder / "lens.json").write_text(json.dumps(lens, indent=1) + "\n")
    write_weights(tensors(model, config["n_ctx"]), job.folder)
    shutil.copy(Path(__file__).with_name("load_lens.py"), job.folder)
    for name, content in job.tokenizer.files.items():
        (job.folder / name).write_bytes(content)
    dtypes = [torch.float32, *([torch.float64] if job.exact else [])]
    return {
        "errors": {name_of(dtype): proved(job, dtype) for dtype in dtypes},
        "how": HOW.format(length=config["n_ctx"]),
        "saves": ALL if lens["final_norm"] is None else INTERNAL,
    }


def refuse(model: Transformer):
    """Raises: ModelError if a norm is left inside the blocks, naming what would work."""
    c, kept = model.config, None
    if c.form in ("trained", "unfused") and c.taper != "none":
        raise ModelError("TransformerLens takes the folded form; leave out --form")
    taper = "" if c.taper == "none" else f" with taper={c.taper}"
    for block in model.blocks:
        if c.norm == "coupled" or {type(block.norm_attn), type(block.norm_mlp)} != {Identity}:
            remedy = "train rmsnorm or layernorm with taper=internal or all"
            kept = f"norm={c.norm}{taper} keeps them; {remedy}"
        elif block.attn.norm_q is not None:
            kept = "qk_norm=True keeps those of queries and keys; taper them too, with taper_qk=True"
    if kept is not None:
        raise ModelError(f"this export writes no norms inside the blocks, and {kept}, or use --to=hf")


def settings(c: ModelConfig) -> dict:
    """TransformerLens's settings of a network of this shape."""
    config = dict(
        d_model=c.n_embd, d_head=c.head_dim, n_layers=c.n_layer, n_heads=c.n_head,
        n_key_value_heads=c.n_kv_head, d_vocab=c.vocab_size, d_mlp=c.hidden, eps=c.norm_eps,
        n_ctx=min(c.block_size, LONGEST), act_fn=ACTIVATIONS[c.mlp], gated_mlp=c.mlp == "swiglu",
        normalization_type=None, positional_embedding_type="standard",
    )  # fmt: skip
    if c.positions == "rope":
        rotary = {"rotary_base": c.rope_base, "rotary_dim": c.head_dim}
        config |= {"positional_embedding_type": "rotary", **rotary}
    return config


def scaling(c: ModelConfig) -> dict | None:
    """How the rotary angles are scaled, in Hugging Face's words."""
    if c.rope_scaling is None:
        return None
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    return {"rope_type": "llama3", **dict(zip(names, c.rope_scaling, strict=True))}


def tensors(model: Transformer, n_ctx: int) -> dict[str, torch.Tensor]:
    """The weights by TransformerLens's names. Attention and a plain MLP have biases there, if only zeros."""
    c, (head, head_bias), final = model.config, model.head(), model.norm_final
    parts = {"tok_embed": (model.tok_emb.weight, None), "head": (head.clone(), head_bias)}
    if model.pos_emb is not None:
        parts["pos"] = (model.pos_emb.weight[:n_ctx], None)
    if type(final) is not Identity:
        centred = c.norm == "layernorm" and final.bias is None
        parts["ln_out"] = (final.weight, torch.zeros_like(final.weight) if centred else final.bias)
    for i, block in enumerate(model.blocks):
        parts |= {f"layers.{i}.attn.{name}": pair for name, pair in attention(block.attn, c).items()}
        parts |= {f"layers.{i}.mlp.{name}": pair for name, pair in perceptron(block.mlp, c).items()}
    named = {}
    for name, (weight, bias) in parts.items():
        named |= {f"{name}.weight": weight} | ({} if bias is None else {f"{name}.bias": bias})
    return {name: t.detach().contiguous() for name, t in named.items()}


def attention(attn, c: ModelConfig) -> dict:
    """{name: (weight, bias)} of q, k, v and o."""
    heads, turned = (c.n_head, c.n_kv_head, c.n_kv_head), ("q", "k") if c.positions == "rope" else ()
    pieces = [t.split([n * c.head_dim for n in heads]) for t in with_bias(attn.qkv)]
    parts = {"o": with_bias(attn.proj)}
    for name, n, *pair in zip("qkv", heads, *pieces, strict=True):
        parts[name] = [adjacent(t, n) for t in pair] if name in turned else pair
    return parts


def perceptron(mlp, c: ModelConfig) -> dict:
    """{name: (weight, bias)} of an MLP, gated or not."""
    if c.mlp != "swiglu":
        return {"fc_in": with_bias(mlp.up), "fc_out": with_bias(mlp.down)}
    weights, bias = mlp.gate_up.weight.chunk(2), mlp.gate_up.bias
    biases = (None, None) if bias is None else bias.chunk(2)
    gate, up = zip(weights, biases, strict=True)
    return {"gate": gate, "in": up, "out": (mlp.down.weight, mlp.down.bias)}


def with_bias(linear: torch.nn.Linear):
    """(weight, bias), zeros where there is none."""
    zeros = linear.weight.new_zeros(linear.out_features)
    return linear.weight, zeros if linear.bias is None else linear.bias


@torch.no_grad()
def proved(job: Job, dtype: torch.dtype) -> float:
    """The largest error, in a type, of the bridge's logits and of the last value of its residual stream."""
    from scripts.exports.load_lens import load_lens

    model, streams = job.model if job.dtype == dtype else copy.deepcopy(job.model).to(dtype), []
    hook = model.norm_final.register_forward_pre_hook(lambda _, inputs: streams.append(inputs[0]))
    ours, last = model(job.sample), f"blocks.{model.config.n_layer - 1}.hook_resid_post"
    hook.remove()
    theirs, cache = load_lens(job.folder, dtype).run_with_cache(job.sample, names_filter=[last])
    pairs = {"logits": (ours, theirs), "last residual stream": (streams[0], cache[last])}
    return max(prove(*pair, dtype, f"TransformerLens's {what}") for what, pair in pairs.items())
