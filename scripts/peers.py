"""The same work in this repository and in its peers, side by side: a training step, a prefill, decoding.

    python scripts/peers.py                                  # a training step against Hugging Face's Llama
    python scripts/peers.py --nanogpt=../nanoGPT             # ... and against the model.py of a nanoGPT checkout
    python scripts/peers.py --mode=decode                    # a token at a time, the same weights; or --mode=prefill

Needs transformers; litgpt takes part where it is installed. Each contestant is a process of its own, so that each has its own
allocator settings, threads and peak memory; they take turns of one step, or of as many as fill 0.2 s, one at work at a time, in
a fresh random order each round. All are started anew several times: a process can have a luck of its own (results/speed.md has a
case). A ratio is the median over all rounds of (this / our best), both of the same round, with its quartiles: above 1 it takes
longer than ours. Before anything is timed, logits, loss and greedy tokens of the same weights are compared.

"HF" is a plain loop around transformers' LlamaForCausalLM: its own attention ("sdpa"), torch's AdamW as it comes,
gradient clipping. "HF tuned" is the same with this repository's settings outside the model: `keep_freed_memory`, and
the compiler's `cpp_wrapper` where generate() has it.
"litgpt" is its GPT in the same plain loop with its own chunked loss, and its own `generate`; a prefill computes the logits
of all positions there. Its pins do not agree with requirements-dev.txt; what was measured is 0.5.13, installed with --no-deps.
"""

import importlib.metadata
import importlib.util
import json
import sys
import time
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import machine
from config import BadInput, Count, Whole, atomic_write, keep_freed_memory, one_line_errors, parse
from model import TOLERANCE, ModelConfig, ModelError, Transformer
from scripts.parts import training_step
from scripts.turns import release_garbage, resident_peak, take_turns, tensor_peak

LITGPT = importlib.metadata.version("litgpt") if importlib.util.find_spec("litgpt") else None
TURN_MS = 200  # a turn lasts at least so long: the first step after the others' finds cold caches and sleeping threads


@dataclass
class Peers:
    """What is compared."""

    mode: Literal["train", "prefill", "decode"] = "train"  # an optimizer step; last-token logits of a prompt; one more token
    n_embd: tuple[Count, ...] | None = None  # widths; None: 64 and 256 to train, 64 and 512 else
    dtype: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16")  # to train: of autocast; else of the weights
    compiled: bool = True  # time torch.compile as well, ours and theirs (needs a C++ compiler; half a minute each)
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


def transformers_or_refuse():
    try:
        import transformers
    except ImportError:
        raise BadInput("this compares with Hugging Face's Llama: pip install transformers") from None
    transformers.logging.set_verbosity_error()
    return transformers


def as_llama(model: Transformer, attention: str = "sdpa"):
    """transformers' LlamaForCausalLM with the weights of a plain RMSNorm model, in eval mode."""
    transformers, c = transformers_or_refuse(), model.config
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.n_embd, intermediate_size=c.hidden, num_hidden_layers=c.n_layer,
        num_attention_heads=c.n_head, num_key_value_heads=c.n_kv_head, rms_norm_eps=c.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_base}, max_position_embeddings=c.block_size,
        tie_word_embeddings=c.tie_embeddings, attention_bias=False, mlp_bias=False, hidden_act="silu",
        bos_token_id=None, eos_token_id=None, pad_token_id=0, attn_implementation=attention)).eval()  # fmt: skip
    state = {"model.embed_tokens": model.tok_emb.weight, "model.norm": model.norm_final.weight, "lm_head": model.head()[0]}
    for i, b in enumerate(model.blocks):
        q, k, v = b.attn.qkv.weight.split([n * c.head_dim for n in (c.n_head, c.n_kv_head, c.n_kv_head)])
        gate, up = b.mlp.gate_up.weight.chunk(2)
        ours = {"self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v, "self_attn.o_proj": b.attn.proj.weight,
                "mlp.gate_proj": gate, "mlp.up_proj": up, "mlp.down_proj": b.mlp.down.weight,
                "input_layernorm": b.norm_attn.weight, "post_attention_layernorm": b.norm_mlp.weight}  # fmt: skip
        state |= {f"model.layers.{i}.{name}": w for name, w in ours.items()}
    with torch.no_grad():
        theirs = llama.state_dict()
        if set(theirs) != {f"{name}.weight" for name in state}:
            raise BadInput(
                f"transformers {transformers.__version__} names Llama's weights otherwise; install the release in requirements-dev.txt"
            )
        for name, w in state.items():
            theirs[f"{name}.weight"].copy_(w)
    return llama


def as_litgpt(model: Transformer):
    """litgpt's GPT with the weights of a plain RMSNorm model, in eval mode."""
    import litgpt

    c = model.config
    gpt = litgpt.GPT(litgpt.Config(
        block_size=c.block_size, vocab_size=c.vocab_size, padded_vocab_size=c.vocab_size, n_layer=c.n_layer, n_head=c.n_head,
        n_query_groups=c.n_kv_head, n_embd=c.n_embd, intermediate_size=c.hidden, rotary_percentage=1.0, rope_base=c.rope_base,
        parallel_residual=False, bias=False, norm_class_name="RMSNorm", norm_eps=c.norm_eps, mlp_class_name="LLaMAMLP")).eval()  # fmt: skip
    state = {"lm_head": model.head()[0], "transformer.wte": model.tok_emb.weight, "transformer.ln_f": model.norm_final.weight}
    for i, b in enumerate(model.blocks):
        gate, up = b.mlp.gate_up.weight.chunk(2)
        ours = {"norm_1": b.norm_attn.weight, "attn.qkv": b.attn.qkv.weight, "attn.proj": b.attn.proj.weight,
                "norm_2": b.norm_mlp.weight, "mlp.fc_1": gate, "mlp.fc_2": up, "mlp.proj": b.mlp.down.weight}  # fmt: skip
        state |= {f"transformer.h.{i}.{name}": w for name, w in ours.items()}
    try:
        gpt.load_state_dict({f"{name}.weight": w for name, w in state.items()})
    except RuntimeError as e:
        raise BadInput(f"this litgpt names its weights otherwise ({str(e).splitlines()[-1].strip()}); install 0.5.13") from None
    if c.tie_embeddings:
        gpt.lm_head.weight = gpt.transformer.wte.weight
    return gpt


# ---------------------------------------------------------------------------------------------------------
# contestants: name -> () that does the work once


def config_of(k: Peers, width: int) -> ModelConfig:
    return ModelConfig(vocab_size=k.vocab_size, block_size=k.block_size, n_layer=k.n_layer, n_head=k.n_head, n_embd=width)


def seeded(k: Peers, width: int) -> Transformer:
    torch.manual_seed(k.seed)
    return Transformer(config_of(k, width))


def autocast(dtype: str):
    return torch.autocast("cpu", torch.bfloat16) if dtype == "bfloat16" else nullcontext()


def corpus(k: Peers) -> torch.Tensor:
    """A million random token ids."""
    return torch.randint(k.vocab_size, (1_000_000,), generator=torch.Generator().manual_seed(k.seed)).to(torch.int16)


def plain_step(model, loss, optimizer, k: Peers, dtype: str):
    """The loop that tutorials show. loss(x, y): of inputs and targets (B, T)."""
    tokens, rng = corpus(k).numpy(), np.random.default_rng(k.seed)

    def step():
        starts = rng.integers(len(tokens) - k.block_size, size=k.batch_size)
        x, y = (torch.stack([torch.from_numpy(tokens[i + j : i + j + k.block_size].astype(np.int64)) for i in starts]) for j in (0, 1))
        with autocast(dtype):
            value = loss(x, y)
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def train_ours(k, width, dtype, how):
    model = seeded(k, width).train()
    return training_step(model, corpus(k), k.batch_size, autocast(dtype), torch.compile(model) if how else model, lr=1e-4)


def train_hf(k, width, dtype, how):
    llama = as_llama(seeded(k, width)).train()
    forward = torch.compile(llama) if how else llama
    return plain_step(llama, lambda x, y: forward(input_ids=x, labels=x).loss, torch.optim.AdamW(llama.parameters(), lr=1e-4), k, dtype)


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
    gpt = theirs.GPT(theirs.GPTConfig(block_size=k.block_size, vocab_size=k.vocab_size, n_layer=k.n_layer, n_head=k.n_head,
                                      n_embd=width, dropout=0.0, bias=False))  # fmt: skip
    optimizer = gpt.configure_optimizers(0.1, 1e-4, (0.9, 0.95), "cpu")
    forward = torch.compile(gpt) if how else gpt
    return plain_step(gpt, lambda x, y: forward(x, y)[1], optimizer, k, dtype)


def prompt(k: Peers, length: int) -> torch.Tensor:
    return torch.randint(k.vocab_size, (1, length), generator=torch.Generator().manual_seed(k.seed))


def prefill_ours(k, width, dtype, how):
    model, idx = seeded(k, width).to(getattr(torch, dtype)).eval(), prompt(k, k.seq)
    forward = torch.compile(model, fullgraph=True, dynamic=False) if how else model
    return torch.inference_mode()(lambda: forward(idx, last_only=True))


def prefill_hf(k, width, dtype, how):
    llama, idx = as_llama(seeded(k, width)).to(getattr(torch, dtype)), prompt(k, k.seq)
    forward = torch.compile(llama, dynamic=False) if how else llama
    return torch.inference_mode()(lambda: forward(idx, logits_to_keep=1, use_cache=False).logits)


def prefill_litgpt(k, width, dtype, how):
    gpt, idx = as_litgpt(seeded(k, width)).to(getattr(torch, dtype)), prompt(k, k.seq)
    forward = torch.compile(gpt, dynamic=False) if how else gpt
    return torch.inference_mode()(lambda: forward(idx)[:, -1:])


def decode_ours(k, width, dtype, how):
    model, idx = seeded(k, width).to(getattr(torch, dtype)).eval(), prompt(k, 8)
    return lambda: model.generate(idx, k.new_tokens, temperature=0, compile=bool(how))


def decode_hf(k, width, dtype, how):
    llama, idx = as_llama(seeded(k, width)).to(getattr(torch, dtype)), prompt(k, 8)
    options = dict(attention_mask=torch.ones_like(idx), max_new_tokens=k.new_tokens, min_new_tokens=k.new_tokens, do_sample=False)
    if how:
        options |= {"cache_implementation": "static"}
    if "compiled" in how:  # by generate itself, which on a CPU wants to be told
        options |= {"compile_config": transformers_or_refuse().CompileConfig(mode="default")}
        options["compile_config"]._compile_all_devices = True
    return lambda: llama.generate(idx, **options)


def decode_litgpt(k, width, dtype, how):
    from litgpt.generate import base

    gpt, idx = as_litgpt(seeded(k, width)).to(getattr(torch, dtype)), prompt(k, 8)
    gpt.max_seq_length = idx.shape[1] + k.new_tokens
    gpt.set_kv_cache(1, dtype=getattr(torch, dtype))
    if "compiled" in how:
        base.next_token = torch.compile(base.next_token, mode="reduce-overhead")  # as its own generate script does
    return lambda: base.generate(gpt, idx[0], gpt.max_seq_length, temperature=0.0)[None]


def contestants(k: Peers) -> dict[str, tuple]:
    """{name: (function that makes the step, dtype, how, whether freed memory is kept)}; ours first."""
    hows = ("", "compiled") if k.compiled else ("",)
    ours, hf, lit, theirs = {
        "train": (train_ours, train_hf, train_litgpt, hows),
        "prefill": (prefill_ours, prefill_hf, prefill_litgpt, hows),
        "decode": (decode_ours, decode_hf, decode_litgpt, ("", "static cache", "compiled static cache")[: 3 if k.compiled else 2]),
    }[k.mode]
    cases = [("nanonorm", ours, how, True) for how in hows]
    cases += [(f"HF{' tuned' * tuned}", hf, how, tuned) for how in theirs for tuned in (False, True)]
    cases += [("litgpt", lit, how, False) for how in hows if LITGPT]
    cases += [("nanoGPT", train_nanogpt, how, False) for how in hows if k.nanogpt and k.mode == "train"]
    return {" ".join(filter(None, (name, how, dtype))): (make, dtype, how, keeps) for name, make, how, keeps in cases for dtype in k.dtype}


# ---------------------------------------------------------------------------------------------------------
# measuring


def work(k: Peers, name: str, width: int):
    """A contestant: yields its memory, then the median ms of each turn. Memory, of training: the bytes that its first step added to the
    process at the peak (None where the compiler's would be among them), and those that the tensors of a step hold at most at once."""
    make, dtype, how, keeps = contestants(k)[name]
    if keeps:
        keep_freed_memory()  # first of all, as a program does: it decides where the weights come to lie
        torch._inductor.config.cpp_wrapper = k.mode == "decode"  # as generate() has it
    step = make(k, width, dtype, how)
    release_garbage()
    if "compiled" in how:
        step()  # which compiles
    first = resident_peak(step) if k.mode == "train" and "compiled" not in how else None
    yield first, tensor_peak(step) if k.mode == "train" else None
    while True:
        times = []
        while sum(times) < TURN_MS:
            begin = time.perf_counter()
            step()
            times.append((time.perf_counter() - begin) * 1e3)
        yield float(np.median(times))


def compare(k: Peers, width: int):
    """Print how far logits, loss and greedy tokens of the peers with the same weights are from ours. BadInput if further than rounding."""
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
        error, same = ((ours - logits).abs().max() / logits.abs().max()).item(), torch.equal(tokens, decode(few, width, "float32", "")())
        off, greedy = (loss - theirs).abs().item(), "are the same" if same else "DIFFER"
        print(f"{name}: logits {error:.0e} of their scale away, loss {off:.0e} nats away, greedy tokens {greedy}")
        if error > TOLERANCE[torch.float32] or off > 1e-4 or not same:
            raise BadInput("the two are not the same function, so their speeds mean nothing together")


def measure(k: Peers, width: int) -> list[dict]:
    """Time all contestants at this width. One dict of figures for each."""
    names, times, memory = list(contestants(k)), defaultdict(list), defaultdict(list)
    for start in range(k.processes):
        for name, (peaks, _, *turns) in take_turns({name: (work, k, name, width) for name in names}, 1 + k.iters, k.seed + start).items():
            times[name] += turns  # but the one to warm up
            memory[name].append(peaks)
    times = {name: np.array(t) for name, t in times.items()}
    best = min((n for n in names if n.startswith("nanonorm")), key=lambda n: np.median(times[n]))
    units = {"train": k.batch_size * k.block_size, "prefill": k.seq, "decode": k.new_tokens}[k.mode]
    rows = []
    for name in names:
        resident, tensors = zip(*memory[name], strict=True)
        low, middle, high = np.percentile(times[name] / times[best], (25, 50, 75)).tolist()
        rows.append(dict(name=name, n_embd=width, ms=float(np.median(times[name])), tok_s=units / float(np.median(times[name])) * 1e3,
                         ratio=middle, ratio_q1=low, ratio_q3=high, best=best,
                         of_each_process=np.median(times[name].reshape(k.processes, -1), 1).tolist(),
                         peak_bytes=None if None in resident else float(np.median(resident)), tensor_bytes=tensors[0]))  # fmt: skip
    return rows


def main():
    k, _, words = parse(Peers, sys.argv[1:], usage=__doc__)
    if words:
        raise BadInput(f"{words[0]}: there is nothing to name here but --key=value")
    if k.nanogpt and not (Path(k.nanogpt) / "model.py").exists():
        raise BadInput(f"--nanogpt={k.nanogpt} holds no model.py; clone nanoGPT there, or leave it out")
    if k.out and not Path(k.out).resolve().parent.is_dir():
        raise BadInput(f"out={k.out} is in a folder that does not exist")
    if (longest := max(k.seq + 1, 8 + k.new_tokens)) > k.block_size:
        raise BadInput(f"{longest} tokens do not fit into block_size={k.block_size}; lower --seq or --new_tokens")
    for width in k.n_embd or ():
        config_of(k, width)
    keep_freed_memory()
    transformers = transformers_or_refuse()
    unit = {"train": "step", "prefill": "prompt", "decode": f"{k.new_tokens} tokens"}[k.mode]
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, litgpt {LITGPT or 'not installed'}"
    print(f"machine  {machine(torch.device('cpu'))}; {versions}")
    shape = f"{k.batch_size} x {k.block_size} tokens" if k.mode == "train" else f"batch 1, prompt of {k.seq if k.mode == 'prefill' else 8}"
    print(f"measure  {k.mode}, {shape}, n_layer {k.n_layer}, n_head {k.n_head}, vocabulary {k.vocab_size}")
    print(f"         {k.processes} processes of each, {k.iters} rounds each, taking turns")
    figures = []
    for width in k.n_embd or ((64, 256) if k.mode == "train" else (64, 512)):
        compare(k, width)
        rows = measure(k, width)
        heads = [f"n_embd {width}", f"ms a {unit}", "tok/s", f"this / {rows[0]['best']}, quartiles"]
        heads += ["first step's peak, MB", "a step's tensors, MB"] if k.mode == "train" else []
        print(f"\n| {' | '.join(heads)} |\n|---|{'---:|' * (len(heads) - 1)}")
        for r in rows:
            cells = [r["name"], f"{r['ms']:.1f}", f"{r['tok_s']:,.0f}", f"{r['ratio']:.2f}x {r['ratio_q1']:.2f}-{r['ratio_q3']:.2f}"]
            if k.mode == "train":
                cells += ["-" if r[peak] is None else f"{r[peak] / 1e6:.0f}" for peak in ("peak_bytes", "tensor_bytes")]
            print(f"| {' | '.join(cells)} |", flush=True)
        figures += rows
    report = json.dumps(dict(settings=asdict(k), machine=machine(torch.device("cpu")), torch=torch.__version__,
                             transformers=transformers.__version__, litgpt=LITGPT, rows=figures))  # fmt: skip
    if k.out:
        with atomic_write(k.out, "w") as f:
            f.write(report + "\n")
    print(f"\n{report}")


if __name__ == "__main__":
    with one_line_errors(ModelError):
        main()
