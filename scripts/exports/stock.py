"""--to=stock: a network without norms as a checkpoint of a class that transformers has.

A norm with an enormous eps only scales: x / sqrt(mean(x^2) + 2^60) * (2^30 w) is x w to the last bits of
float32 while mean(x^2) is below 2^36. So a network whose norms have all tapered is a plain Llama, Qwen2,
Qwen3 or GPT-2, and runs wherever those run. All norms of a network share one eps: none of them may be real.
"""

from dataclasses import asdict, replace

import torch

from data.tokenizer_json import token_ids, write_files
from forms import fold, from_file
from model import NORMS, ModelConfig, Transformer, statistic
from nanonorm.errors import ModelError
from nanonorm.hub import read_pretrained, write_pretrained
from nanonorm.knobs import off
from scripts.exports import ALLOWED, Job, name_of, needed_transformers, prove, spread

NEEDS = ("transformers", "safetensors")
EPS = {torch.float16: 2.0**20}  # in float16 x / 2^30 would be 0
ENORMOUS = 2.0**60
LARGEST = 1e-3  # mean(x^2) / eps of a norm that is to do nothing: a half of it is what it shrinks x by
SAVES = """Nothing: the norms are still computed, and change nothing. It runs where the stock class
runs{seen}.{overflows} What is without norms is the network itself: `--to=hf` or `--to=onnx`."""
OVERFLOWS = """ In float16 its gains overflow and every logit is NaN: load it in bfloat16 or float32, or
export it with `--dtype=float16`."""
HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # widths that vLLM 0.32 has on a CPU
SEEN = {"LlamaForCausalLM": ("vLLM 0.32", "MLX"), "GPT2LMHeadModel": ("vLLM 0.32",)}  # to run such a class
IDLE = " (its norms are computed, and change nothing)"
CENTRING = "The centring is not computed any more; the norms are, as the stock class's own."
HOW = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype="{dtype}")
tokenizer = AutoTokenizer.from_pretrained(FOLDER)
```"""


def wants_folding(c: ModelConfig) -> bool:
    """Whether a stock class takes the folded form alone: where the centring moves into the matrices."""
    return not c.norm_bias and (c.norm == "cbwc" or (c.norm == "layernorm" and c.positions == "rope"))


def plain(model: Transformer, eps: float = ENORMOUS) -> dict:
    """{"config", "state", "meta"} of a network with the same logits that has norms everywhere: its own where
    none was changed, and norms of an enormous eps where all have tapered.

    eps: a power of 4. Raises: ModelError, naming the export that would work.
    """
    c = model.config
    if c.sink_token is not None:
        why = f"a stock class has no place for the keys and values of sink_token={c.sink_token}"
        raise ModelError(f"{why}; use --to=hf or --to=onnx")
    if c.norm == "cbwc" and c.form in ("folded", "unfused") and not c.norm_bias:
        model = model if c.form == "folded" else fold(model)  # its matrices are centred for good
        c = replace(model.config, norm="rmsnorm", norm_bias=True)
    if c.taper == "none" and c.norm in ("rmsnorm", "layernorm") and c.form != "weightless":
        return {"config": asdict(replace(c, form="trained")), "state": model.state_dict(), "meta": model.meta}
    refuse(model)
    norm = "layernorm" if c.positions == "learned" and c.norm == "layernorm" else "rmsnorm"
    if norm == "rmsnorm" and statistic(c).centres:
        model = model if c.form == "folded" else fold(model)  # the centring moves into the matrices
    state, root = model.state_dict(), eps**0.5
    parts = {"": (("norm_final", c.n_embd),)}
    qk = [("attn.norm_q", c.head_dim), ("attn.norm_k", c.head_dim)] if c.qk_norm else []
    for i in range(c.n_layer):
        parts[f"blocks.{i}."] = (("norm_attn", c.n_embd), ("norm_mlp", c.n_embd), *qk)
    for prefix, sites in parts.items():
        for name, width in sites:
            gain = state.get(f"{prefix}{name}.weight", torch.ones(width, dtype=model.tok_emb.weight.dtype))
            state[f"{prefix}{name}.weight"] = gain * root  # a power of 2: exact
            if norm == "layernorm" and c.norm_bias:
                state.setdefault(f"{prefix}{name}.bias", torch.zeros_like(gain))
    config = replace(
        c, form="trained", norm=norm, norm_eps=eps, norm_bias=c.norm_bias or norm == "rmsnorm",
        tie_embeddings=model.lm_head is None, **off(ModelConfig, "taper", "aux_weight"),
    )  # fmt: skip
    return {"config": asdict(config), "state": state, "meta": model.meta}


def refuse(model: Transformer):
    """Raises: ModelError for a network in which a norm, or what stands for one, does more than scale."""
    c = model.config
    if not NORMS[c.norm].tapers:
        raise ModelError(f"no stock class computes norm={c.norm}; use --to=hf or --to=onnx")
    if c.form == "trained" and c.taper == "none":
        raise ModelError(f"no stock class computes norm={c.norm}; taper=all, or use --to=hf or --to=onnx")
    if c.form not in ("folded", "unfused"):
        raise ModelError(f"form={c.form} has norms that no stock class has; give the file it was folded from")
    if c.taper != "all" or c.taper_from_layer:
        kept = "the output norm" if c.taper == "internal" else "the blocks' norms"
        kept = f"the norms of blocks below {c.taper_from_layer}" if c.taper_from_layer else kept
        why = f"taper={c.taper} keeps {kept}, and a stock class has one eps for all of its norms"
        everywhere = ", taper_from_layer=0" if c.taper_from_layer else ""
        raise ModelError(f"{why}; train with taper=all{everywhere}, or use --to=hf or --to=onnx")
    if c.qk_norm and not c.taper_qk:
        why = "the norms of queries and keys are kept, and a stock class has one eps for all of its norms"
        raise ModelError(f"{why}; train with taper_qk=True, or use --to=hf or --to=onnx")
    shifted = c.norm == "layernorm" and c.norm_bias
    if shifted and c.positions == "rope":
        why = "the last LayerNorm's shift would be a bias of the output head, which a stock Llama lacks"
        raise ModelError(f"{why}; train with norm_bias=False, or use --to=hf or --to=onnx")
    if model.lm_head is not None and model.lm_head.bias is not None:
        why = "its output head has a bias, which a stock class lacks"
        raise ModelError(f"{why}: give the unfused.pt or the ckpt.pt that it was folded with")


@torch.no_grad()
def write_class(job: Job, file: dict) -> tuple[dict[str, float], str]:
    """Write the folder of a stock class, and read it again: by our own reader in float64, and by transformers
    in its own type. Returns the errors of both, and the name of their class."""
    transformers = needed_transformers()
    base = (job.meta.get("base") or {}) | token_ids(job.tokenizer)
    write_pretrained({**file, "meta": {"base": base}}, job.folder)
    write_files(job.tokenizer, job.model.config.longest_text, job.folder)
    errors = {"float64": proved_exact(job)} if job.exact else {}
    dtype = torch.float32 if job.dtype == torch.float64 else job.dtype  # their norms are float32 at most
    try:
        theirs = transformers.AutoModelForCausalLM.from_pretrained(job.folder, dtype=dtype).eval()
    except ValueError as e:  # a shape that its class refuses
        raise ModelError(f"transformers refuses the file: {' '.join(str(e).split()):.200}") from None
    ours, logits = job.logits(torch.float32), theirs(input_ids=job.sample, use_cache=False).logits.float()
    name = type(theirs).__name__
    return errors | {name_of(dtype): prove(ours, logits, dtype, name)}, name


@torch.no_grad()
def proved_exact(job: Job) -> float:
    """The error of the file read again, in float64. Raises: ModelError if its eps does not explain it."""
    again = from_file(read_pretrained(job.folder), job.folder).double()
    ours, ratios, eps = job.logits(), [0.0], again.config.norm_eps
    if eps >= min(EPS.values()):  # of norms that only scale: each shrinks x by a half of mean(x^2) / eps
        for part in again.modules():
            if hasattr(part, "eps"):
                part.register_forward_pre_hook(
                    lambda _, inputs: ratios.append((inputs[0].square().mean(-1).max() / eps).item())
                )
    theirs = again(job.sample)
    if not max(ratios) <= LARGEST:
        why = f"its values are too large for {name_of(job.dtype)}: a norm of eps {eps:.0e} would not be idle"
        raise ModelError(f"{why}; use --dtype=bfloat16 or --dtype=float32")
    error = ((theirs - ours).abs().max() / spread(ours)).item()
    if not error <= ALLOWED[torch.float64] + sum(ratios):
        much = f"{error:.1e} of the logit scale in float64"
        raise ModelError(f"the file read again differs by {much}; not exported")
    return error


def write(job: Job) -> dict:
    """A stock class's folder of a network without norms. Raises: ModelError."""
    if job.model.config.taper == "none" and job.model.config.norm in ("rmsnorm", "layernorm"):
        remedy = "--to=hf writes the class it is, if there is one"
        raise ModelError(f"it has all its norms, so there is nothing to take out; {remedy}")
    file = plain(job.model, EPS.get(job.dtype, ENORMOUS))
    c, eps = job.model.config, file["config"]["norm_eps"]
    errors, name = write_class(job, file)
    runs = f"whatever runs a {name}{IDLE if eps > 1 else ''}"
    seen = [engine for engine in SEEN.get(name, ()) if engine == "MLX" or c.head_dim in HEADS]
    others = f", as {' and '.join(seen)} did with others" if seen else ""
    saves = SAVES.format(seen=others, overflows=OVERFLOWS if eps == ENORMOUS else "")
    saves = CENTRING if c.norm == "cbwc" else saves
    how = HOW.format(dtype=name_of(job.dtype))
    return {"errors": errors, "runs": runs, "how": how, "saves": saves}
