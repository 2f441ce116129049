"""The same work in this repository and in its peers, side by side: a training step, a prefill, decoding.

    python scripts/speed/peers.py                       # a training step against Hugging Face's Llama
    python scripts/speed/peers.py --nanogpt=../nanoGPT  # ... and against the model.py of a nanoGPT checkout
    python scripts/speed/peers.py --mode=decode         # a token at a time, same weights; or --mode=prefill

Needs transformers; litgpt takes part where it is installed. Each contestant is a process of its own, with its
own allocator settings, threads and peak memory; they take turns of one step, or of as many as fill 0.2 s, in
a fresh random order each round. All are started anew several times, as a process can be lucky
(results/speed.md has a case). A ratio is the median over all rounds of (this / our best), both of the same
round, with its quartiles: above 1 it takes longer than ours. Before anything is timed, logits, loss and
greedy tokens of the same weights are compared.

"HF" is a plain loop around transformers' LlamaForCausalLM: its own attention ("sdpa"), torch's AdamW as it
comes, gradient clipping. "HF tuned" is the same with this repository's settings outside the model:
`keep_freed_memory`, and the compiler's `cpp_wrapper` where generate() has it.
"litgpt" is its GPT in the same plain loop with its own chunked loss, and its own `generate`; its prefill
computes the logits of all positions. Its pins contradict requirements-dev.txt; what was measured is 0.5.13,
installed with --no-deps.
"""

import importlib.metadata
import importlib.util
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F

from bench import hardware  # not found? pip install -e .
from forms import FOLD_TOLERANCE
from model import ModelConfig, Transformer
from nanonorm.errors import BadInput, one_line_errors
from nanonorm.machine import keep_freed_memory
from nanonorm.typed import Count, Whole
from scripts.exports import needed_transformers
from scripts.speed.parts import training_step
from scripts.speed.turns import (
    finish,
    ratios,
    read_flags,
    release_garbage,
    resident_peak,
    take_turns,
    tensor_peak,
    timed_turns,
)

LITGPT = importlib.metadata.version("litgpt") if importlib.util.find_spec("litgpt") else None


@dataclass
class Peers:
    """What is compared."""

    mode: Literal["train", "prefill", "decode"] = "train"  # a step; a prompt's last logits; one more token
    n_embd: tuple[Count, ...] | None = None  # widths; None: 64 and 256 to train, 64 and 512 else
    dtype: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16")  # to train by autocast
    compiled: bool = True  # torch.compile as well, ours and theirs (needs a C++ compiler; half a minute each)
    nanogpt: str | None = None  # folder of a nanoGPT checkout, for mode=train
    n_layer: Count = 8  # blocks
    n_head: Count = 16  # attention heads
    vocab_size: Count = 10_000  # token ids
    block_size: Count = 512  # tokens of a training window
    batch_size: Count = 8  # windows of a training step
    seq: Count = 128  # tokens of the prompt, for prefill; decode starts from 8
    new_tokens: Count = 32  # tokens that one round of decode adds
    iters: Count = 5  # timed rounds, after one to warm up
    processes: Count = 3  # times that everyone is started anew, for so many rounds each
    seed: Whole = 1337  # of weights, tokens and the order in a round
    out: str | None = None  # .json file for the numbers


def as_llama(model: Transformer, attention: str = "sdpa"):
    """transformers' LlamaForCausalLM with the weights of a plain RMSNorm model, in eval mode."""
    transformers, c = needed_transformers(), model.config
    rope = {"rope_type": "default", "rope_theta": c.rope_base}
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.n_embd, intermediate_size=c.hidden,
        num_hidden_layers=c.n_layer, num_attention_heads=c.n_head, num_key_value_heads=c.n_kv_head,
        rms_norm_eps=c.norm_eps,
        rope_parameters=rope, max_position_embeddings=c.block_size, tie_word_embeddings=c.tie_embeddings,
        attention_bias=False, mlp_bias=False, hidden_act="silu", bos_token_id=None, eos_token_id=None,
        pad_token_id=0, attn_implementation=attention)).eval()  # fmt: skip
    state = {"model.embed_tokens": model.tok_emb.weight, "model.norm": model.norm_final.weight,
             "lm_head": model.head()[0]}  # fmt: skip
    for i, b in enumerate(model.blocks):
        q, k, v = b.attn.qkv.weight.split([n * c.head_dim for n in (c.n_head, c.n_kv_head, c.n_kv_head)])
        gate, up = b.mlp.gate_up.weight.chunk(2)
        ours = {"self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v,
                "self_attn.o_proj": b.attn.proj.weight, "mlp.gate_proj": gate, "mlp.up_proj": up,
                "mlp.down_proj": b.mlp.down.weight, "input_layernorm": b.norm_attn.weight,
                "post_attention_layernorm": b.norm_mlp.weight}  # fmt: skip
        state |= {f"model.layers.{i}.{name}": w for name, w in ours.items()}
    with torch.no_grad():
        theirs = llama.state_dict()
        if set(theirs) != {f"{name}.weight" for name in state}:
            version = transformers.__version__
            remedy = "install the release in requirements-dev.txt"
            raise BadInput(f"transformers {version} has other names for Llama's weights; {remedy}")
        for name, w in state.items():
            theirs[f"{name}.weight"].copy_(w)
    return llama


def as_litgpt(model: Transformer):
    """litgpt's GPT with the weights of a plain RMSNorm model, in eval mode."""
    import litgpt

    c = model.config
    gpt = litgpt.GPT(litgpt.Config(
        block_size=c.block_size, vocab_size=c.vocab_size, padded_vocab_size=c.vocab_size, n_layer=c.n_layer,
        n_head=c.n_head, n_query_groups=c.n_kv_head, n_embd=c.n_embd, intermediate_size=c.hidden,
        rotary_percentage=1.0, rope_base=c.rope_base, parallel_residual=False, bias=False,
        norm_class_name="RMSNorm", norm_eps=c.norm_eps, mlp_class_name="LLaMAMLP")).eval()  # fmt: skip
    state = {"lm_head": model.head()[0], "transformer.wte": model.tok_emb.weight,
             "transformer.ln_f": model.norm_final.weight}  # fmt: skip
    for i, b in enumerate(model.blocks):
        gate, up = b.mlp.gate_up.weight.chunk(2)
        ours = {"norm_1": b.norm_attn.weight, "attn.qkv": b.attn.qkv.weight, "attn.proj": b.attn.proj.weight,
                "norm_2": b.norm_mlp.weight, "mlp.fc_1": gate, "mlp.fc_2": up,
                "mlp.proj": b.mlp.down.weight}  # fmt: skip
        state |= {f"transformer.h.{i}.{name}": w for name, w in ours.items()}
    try:
        gpt.load_state_dict({f"{name}.weight": w for name, w in state.items()})
    except RuntimeError as e:
        reason = str(e).splitlines()[-1].strip()
        raise BadInput(f"this litgpt has other names for its weights ({reason}); install 0.5.13") from None
    if c.tie_embeddings:
        gpt.lm_head.weight = gpt.transformer.wte.weight
    return gpt


# ---------------------------------------------------------------------------------------------------------
# contestants: name -> () that does the work once


def config_of(k: Peers, width: int) -> ModelConfig:
    shape = dict(vocab_size=k.vocab_size, block_size=k.block_size, n_layer=k.n_layer, n_head=k.n_head)
    return ModelConfig(**shape, n_embd=width)


def seeded(k: Peers, width: int) -> Transformer:
    torch.manual_seed(k.seed)
    return Transformer(config_of(k, width))


def autocast(dtype: str):
    return torch.autocast("cpu", torch.bfloat16) if dtype == "bfloat16" else nullcontext()


def corpus(k: Peers) -> torch.Tensor:
    """A million random token ids."""
    rng = torch.Generator().manual_seed(k.seed)
    return torch.randint(k.vocab_size, (1_000_000,), generator=rng).to(torch.int16)


def plain_step(model, loss, optimizer, k: Peers, dtype: str):
    """The loop that tutorials show. loss(x, y): of inputs and targets (B, T)."""
    tokens, T, rng = corpus(k).numpy(), k.block_size, np.random.default_rng(k.seed)

    def windows_at(starts):
        return torch.stack([torch.from_numpy(tokens[i : i + T].astype(np.int64)) for i in starts])

    def step():
        starts = rng.integers(len(tokens) - T, size=k.batch_size)
        x, y = windows_at(starts), windows_at(starts + 1)
        with autocast(dtype):
            value = loss(x, y)
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def train_ours(k, width, dtype, how):
    model = seeded(k, width).train()
    return training_step(model, corpus(k), k.batch_size, getattr(torch, dtype), compiled=bool(how), lr=1e-4)


def train_hf(k, width, dtype, how):
    llama = as_llama(seeded(k, width)).train()
    forward = torch.compile(llama) if how else llama
    optimizer = torch.optim.AdamW(llama.parameters(), lr=1e-4)
    return plain_step(llama, lambda x, y: forward(input_ids=x, labels=x).loss, optimizer, k, dtype)


def train_litgpt(k, width, dtype, how):
    from litgpt.utils import chunked_cross_entropy

    gpt = as_litgpt(seeded(k, width)).train()
    forward = torch.compile(gpt) if how else gpt
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=1e-4)
    return plain_step(gpt, lambda x, y: chunked_cross_entropy(forward(x), y), optimizer, k, dtype)


def train_nanogpt(k, width, dtype, how):
    spec = importlib.util.spec_from_file_location("nanogpt_model", Path(k.nanogpt) / "model.py")
    theirs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(theirs)
    shape = dict(vocab_size=k.vocab_size, block_size=k.block_size, n_layer=k.n_layer, n_head=k.n_head)
    gpt = theirs.GPT(theirs.GPTConfig(**shape, n_embd=width, dropout=0.0, bias=False))
    optimizer = gpt.configure_optimizers(0.1, 1e-4, (0.9, 0.95), "cpu")
    forward = torch.compile(gpt) if how else gpt
    return plain_step(gpt, lambda x, y: forward(x, y)[1], optimizer, k, dtype)


def prompt(k: Peers, length: int) -> torch.Tensor:
    return torch.randint(k.vocab_size, (1, length), generator=torch.Generator().manual_seed(k.seed))


def prefill_of_ours(model: Transformer, idx, how: str):
    """() -> logits of the last token of idx (B, T)."""
    forward = torch.compile(model, fullgraph=True, dynamic=False) if how else model
    return torch.inference_mode()(lambda: forward(idx, last_only=True))


def prefill_of_hf(model, idx, how: str):
    forward = torch.compile(model, dynamic=False) if how else model
    return torch.inference_mode()(lambda: forward(idx, logits_to_keep=1, use_cache=False).logits)


def prefill_ours(k, width, dtype, how):
    return prefill_of_ours(seeded(k, width).to(getattr(torch, dtype)).eval(), prompt(k, k.seq), how)


def prefill_hf(k, width, dtype, how):
    return prefill_of_hf(as_llama(seeded(k, width)).to(getattr(torch, dtype)), prompt(k, k.seq), how)


def prefill_litgpt(k, width, dtype, how):
    gpt, idx = as_litgpt(seeded(k, width)).to(getattr(torch, dtype)), prompt(k, k.seq)
    forward = torch.compile(gpt, dynamic=False) if how else gpt
    return torch.inference_mode()(lambda: forward(idx)[:, -1:])


def decode_ours(k, width, dtype, how):
    model, idx = seeded(k, width).to(getattr(torch, dtype)).eval(), prompt(k, 8)
    return lambda: model.generate(idx, k.new_tokens, temperature=0, compile=bool(how))


def decode_hf(k, width, dtype, how):
    llama = as_llama(seeded(k, width)).to(getattr(torch, dtype))
    return decode_of_hf(llama, prompt(k, 8), k.new_tokens, how)


def decode_of_hf(llama, idx, new_tokens: int, how: str):
    """() -> idx (B, T) and the likeliest tokens after it. how: "", or "[compiled ]static cache"."""
    options = dict(attention_mask=torch.ones_like(idx), do_sample=False, max_new_tokens=new_tokens,
                   min_new_tokens=new_tokens)  # fmt: skip
    if how:
        options |= {"cache_implementation": "static"}
    if "compiled" in how:  # by generate itself, which on a CPU wants to be told
        options |= {"compile_config": needed_transformers().CompileConfig(mode="default")}
        options["compile_config"]._compile_all_devices = True
    return lambda: llama.generate(idx, **options)


def decode_litgpt(k, width, dtype, how):
    from litgpt.generate import base

    gpt, idx = as_litgpt(seeded(k, width)).to(getattr(torch, dtype)), prompt(k, 8)
    gpt.max_seq_length = idx.shape[1] + k.new_tokens
    gpt.set_kv_cache(1, dtype=getattr(torch, dtype))
    if "compiled" in how:  # as its own generate script does
        base.next_token = torch.compile(base.next_token, mode="reduce-overhead")
    return lambda: base.generate(gpt, idx[0], gpt.max_seq_length, temperature=0.0)[None]


def contestants(k: Peers) -> dict[str, tuple]:
    """{name: (function that makes the step, dtype, how, whether freed memory is kept)}; ours first."""
    ours, hf, litgpt = {
        "train": (train_ours, train_hf, train_litgpt),
        "prefill": (prefill_ours, prefill_hf, prefill_litgpt),
        "decode": (decode_ours, decode_hf, decode_litgpt),
    }[k.mode]
    hows = hf_hows = ("", "compiled") if k.compiled else ("",)
    if k.mode == "decode":
        hf_hows = ("", "static cache", "compiled static cache") if k.compiled else ("", "static cache")
    cases = [("nanonorm", ours, how, True) for how in hows]
    for how in hf_hows:
        cases += [("HF", hf, how, False), ("HF tuned", hf, how, True)]
    if LITGPT:
        cases += [("litgpt", litgpt, how, False) for how in hows]
    if k.nanogpt and k.mode == "train":
        cases += [("nanoGPT", train_nanogpt, how, False) for how in hows]
    found = {}
    for name, make, how, keeps in cases:
        for dtype in k.dtype:
            words = (name, how, dtype) if how else (name, dtype)
            found[" ".join(words)] = (make, dtype, how, keeps)
    return found


# ---------------------------------------------------------------------------------------------------------
# measuring


def work(k: Peers, name: str, width: int):
    """A contestant: yields its memory, then the median ms of each turn.

    Memory is measured in training: (bytes that its first step adds to the process at the peak, None where the
    compiler's would be among them or nobody counts; bytes that the tensors of a step hold at most at once).
    """
    make, dtype, how, keeps = contestants(k)[name]
    if keeps:
        keep_freed_memory()  # first of all, as a program does: it decides where the weights come to lie
        torch._inductor.config.cpp_wrapper = k.mode == "decode"  # as generate() has it
    step = make(k, width, dtype, how)
    release_garbage()
    first = tensors = None
    if "compiled" in how:
        step()  # which compiles
    elif k.mode == "train":
        first = resident_peak(step)
    if k.mode == "train":
        tensors = tensor_peak(step)
    yield first, tensors
    yield from timed_turns(step)


def compare(k: Peers, width: int):
    """Print how far the peers' logits, loss and greedy tokens are from ours with the same weights.

    Raises: BadInput if rounding does not explain it.
    """
    model, idx = seeded(k, width).eval(), prompt(k, k.seq + 1)
    few = replace(k, new_tokens=min(k.new_tokens, 32))
    tokens = decode_ours(few, width, "float32", "")()
    size = sum(p.numel() for p in model.parameters()) / 1e6
    print(f"\nn_embd {width}: {size:.2f} M parameters. The same weights in float32, beside ours:")
    with torch.no_grad():
        ours, loss, llama = model(idx), model(idx[:, :-1], idx[:, 1:]).ce, as_llama(model)
        peers = {"HF": (llama(idx).logits, llama(idx, labels=idx).loss, decode_hf)}
        if LITGPT:
            logits = as_litgpt(model)(idx)
            peers["litgpt"] = (logits, F.cross_entropy(logits[0, :-1], idx[0, 1:]), decode_litgpt)
    for name, (logits, theirs, decode) in peers.items():
        error, off = ((ours - logits).abs().max() / logits.abs().max()).item(), (loss - theirs).abs().item()
        same = torch.equal(tokens, decode(few, width, "float32", "")())
        greedy = "greedy tokens are the same" if same else "greedy tokens DIFFER"
        print(f"{name}: logits {error:.0e} of their scale away, loss {off:.0e} nats away, {greedy}")
        if error > FOLD_TOLERANCE[torch.float32] or off > 1e-4 or not same:
            raise BadInput(f"{name} and ours compute different functions, so their speeds cannot be compared")


def measure(k: Peers, width: int) -> list[dict]:
    """Time all contestants at this width. One dict of figures for each."""
    names, times, memory = list(contestants(k)), defaultdict(list), defaultdict(list)
    players = {name: (work, k, name, width) for name in names}
    for start in range(k.processes):
        for name, (peaks, _, *turns) in take_turns(players, 1 + k.iters, k.seed + start).items():
            times[name] += turns  # but the one to warm up
            memory[name].append(peaks)
    times = {name: np.array(t) for name, t in times.items()}
    best = min(
        (name for name in names if name.startswith("nanonorm")), key=lambda name: np.median(times[name])
    )
    units = {"train": k.batch_size * k.block_size, "prefill": k.seq, "decode": k.new_tokens}[k.mode]
    rows = []
    for name, (ms, middle, low, high) in ratios(times, to=best).items():
        resident, tensors = zip(*memory[name], strict=True)
        of_each = np.median(times[name].reshape(k.processes, -1), 1).tolist()
        peak = None if None in resident else float(np.median(resident))
        rows.append(dict(name=name, n_embd=width, ms=ms, tok_s=units / ms * 1e3,
                         ratio=middle, ratio_q1=low, ratio_q3=high, best=best, of_each_process=of_each,
                         peak_bytes=peak, tensor_bytes=tensors[0]))  # fmt: skip
    return rows


def print_table(k: Peers, width: int, rows: list[dict]):
    """The rows of measure() as Markdown."""
    unit = {"train": "step", "prefill": "prompt", "decode": f"{k.new_tokens} tokens"}[k.mode]
    heads = [f"n_embd {width}", f"ms a {unit}", "tok/s", f"this / {rows[0]['best']}, quartiles"]
    if k.mode == "train":
        heads += ["first step's peak, MB", "a step's tensors, MB"]
    print(f"\n| {' | '.join(heads)} |\n|---|{'---:|' * (len(heads) - 1)}")
    for r in rows:
        ratio = f"{r['ratio']:.2f}x {r['ratio_q1']:.2f}-{r['ratio_q3']:.2f}"
        cells = [r["name"], f"{r['ms']:.1f}", f"{r['tok_s']:,.0f}", ratio]
        if k.mode == "train":
            peaks = (r["peak_bytes"], r["tensor_bytes"])
            cells += ["-" if peak is None else f"{peak / 1e6:.0f}" for peak in peaks]
        print(f"| {' | '.join(cells)} |", flush=True)


def refuse(k: Peers):
    """Refuse what cannot be compared, before minutes are spent. Raises: BadInput, ModelError."""
    if k.nanogpt and not (Path(k.nanogpt) / "model.py").exists():
        raise BadInput(f"--nanogpt={k.nanogpt} holds no model.py; clone nanoGPT there, or leave it out")
    if k.out and not Path(k.out).resolve().parent.is_dir():
        raise BadInput(f"out={k.out} is in a folder that does not exist")
    longest = max(k.seq + 1, 8 + k.new_tokens)
    if longest > k.block_size:
        remedy = "lower --seq or --new_tokens"
        raise BadInput(f"{longest} tokens do not fit into block_size={k.block_size}; {remedy}")
    for width in k.n_embd:
        config_of(k, width)


def main():
    k = read_flags(Peers, __doc__)
    if k.n_embd is None:
        k.n_embd = (64, 256) if k.mode == "train" else (64, 512)
    refuse(k)
    keep_freed_memory()
    transformers, machine = needed_transformers(), hardware(torch.device("cpu"))
    shape = {"train": f"{k.batch_size} x {k.block_size} tokens", "prefill": f"batch 1, prompt of {k.seq}",
             "decode": "batch 1, prompt of 8"}[k.mode]  # fmt: skip
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "litgpt": LITGPT}
    print(f"machine  {machine}; " + ", ".join(f"{name} {version}" for name, version in versions.items()))
    print(f"measure  {k.mode}, {shape}, n_layer {k.n_layer}, n_head {k.n_head}, vocabulary {k.vocab_size}")
    print(f"         {k.processes} processes of each, {k.iters} rounds each, taking turns")
    figures = []
    for width in k.n_embd:
        compare(k, width)
        rows = measure(k, width)
        print_table(k, width, rows)
        figures += rows
    finish({"settings": asdict(k), "machine": machine, **versions, "rows": figures}, k.out)


if __name__ == "__main__":
    with one_line_errors():
        main()
