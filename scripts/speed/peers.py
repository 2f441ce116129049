"""The same work here and in transformers, side by side: a training step, a prefill, decoding.

    python scripts/speed/peers.py                       # a training step of small Llamas, random weights
    python scripts/speed/peers.py --nanogpt=../nanoGPT  # ... and of the model.py of a nanoGPT checkout
    python scripts/speed/peers.py --mode=decode         # a token at a time; or --mode=prefill
    python scripts/speed/peers.py --mode=prefill --network=FOLDER     # a trained network's folder

Both read a folder as transformers writes it, of random weights unless one is given. Their logits, and
when decoding their greedy tokens, are compared before anything is timed. Each contestant is a process of its
own, with its own allocator settings and threads; they take turns of one step, or of as many as fill 0.2 s, in
a fresh random order each round. All are started anew several times, as a process can be lucky
(results/speed.md has a case). A ratio is the median over all rounds of (this / ours), both of the same round,
with its quartiles: above 1 it takes longer than ours. "Ours" is of the same type, and compiled if this is.

"HF" is a plain loop around the class of transformers: its own attention ("sdpa"), torch's AdamW as it comes,
gradient clipping. "HF tuned" is the same with this repository's settings outside the model:
`keep_freed_memory`, and the compiler's `cpp_wrapper` where generate() has it. Each holds the network by
itself, one of 1.2 billion parameters in 5 GB: --who leaves some out.
"""

import importlib.util
import tempfile
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from bench import agree, hardware, random_model  # not found? pip install -e .
from forms import from_file
from model import ModelConfig, Transformer
from nanonorm.cli import check_out, parse_flags, print_report
from nanonorm.errors import BadInput, one_line_errors
from nanonorm.hub import write_pretrained
from nanonorm.machine import keep_freed_memory, release_garbage
from nanonorm.run import open_model
from nanonorm.tables import markdown
from nanonorm.timing import ratio, take_turns, tensor_peak, timed_turns
from nanonorm.typed import Count, Seed, Some
from scripts.exports import needed_transformers
from scripts.speed.parts import training_step
from scripts.speed.tables import Shape, in_words

WHO = ("nanonorm", "HF tuned", "HF", "nanoGPT")  # a longer name before what it begins with


@dataclass
class Peers(Shape):
    """What is compared."""

    mode: Literal["train", "prefill", "decode"] = "train"  # a step; a prompt's last logits; one more token
    n_embd: Some[Count] | None = None  # widths; None: 64 and 256 to train, 64 and 512 else
    network: str | None = None  # instead of those, a folder of transformers, whose weights stay as they are
    who: Some[Literal[*WHO]] | None = None  # None: all
    dtype: Some[Literal["float32", "bfloat16"]] = ("float32", "bfloat16")  # to train by autocast
    compiled: bool = True  # torch.compile as well, ours and theirs (needs a C++ compiler; half a minute each)
    nanogpt: str | None = None  # folder of a nanoGPT checkout, for mode=train
    prompts: Count = 1  # at a time, for prefill and decode
    seq: Count = 128  # tokens of a prompt, for prefill; decode starts from 8
    new_tokens: Count = 32  # tokens that one round of decode adds
    iters: Count = 5  # timed rounds, after one to warm up
    processes: Count = 3  # times that everyone is started anew, for so many rounds each
    seed: Seed = 1337  # of weights, tokens and the order in a round
    out: str | None = None  # .json file for the numbers


def write_checkpoint(folder: Path, config: ModelConfig, seed: int):
    """A folder as transformers reads it, float32, random weights and gains."""
    torch.manual_seed(seed)
    write_pretrained(random_model(config, "cpu").to_file({}), folder)


def ours(folder: Path) -> Transformer:
    return from_file(*open_model(str(folder)))


def theirs(folder: Path):
    kind = needed_transformers().AutoModelForCausalLM
    return kind.from_pretrained(folder, dtype=torch.float32)


def random_ids(rows: int, length: int, vocab_size: int, seed: int) -> torch.Tensor:
    return torch.randint(vocab_size, (rows, length), generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------------------------------------------------
# contestants: (k, folder, dtype, how) -> () that does the work once; how: "", or begins with "compiled"


def corpus(vocab_size: int, seed: int) -> torch.Tensor:
    """A million random token ids."""
    return random_ids(1, 1_000_000, min(vocab_size, 2**15), seed)[0].to(torch.int16)


def plain_step(model, loss, k: Peers, dtype: str, vocab_size: int, optimizer=None):
    """The loop that tutorials show. loss(x, y): of inputs and targets (B, T)."""
    tokens, T, rng = corpus(vocab_size, k.seed).numpy(), k.block_size, np.random.default_rng(k.seed)
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-4)

    def windows_at(starts):
        return torch.stack([torch.from_numpy(tokens[i : i + T].astype(np.int64)) for i in starts])

    def step():
        starts = rng.integers(len(tokens) - T, size=k.batch_size)
        x, y = windows_at(starts), windows_at(starts + 1)
        with torch.autocast("cpu", torch.bfloat16) if dtype == "bfloat16" else nullcontext():
            value = loss(x, y)
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def train_ours(k, folder, dtype, how):
    model = ours(folder).train()
    model.config.block_size = k.block_size
    tokens = corpus(model.config.vocab_size, k.seed)
    return training_step(model, tokens, k.batch_size, getattr(torch, dtype), compiled=bool(how), lr=1e-4)


def train_hf(k, folder, dtype, how):
    model = theirs(folder).train()
    forward = torch.compile(model) if how else model
    vocab_size = model.config.vocab_size
    return plain_step(model, lambda x, y: forward(input_ids=x, labels=x).loss, k, dtype, vocab_size)


def train_nanogpt(k, folder, dtype, how):
    spec = importlib.util.spec_from_file_location("nanogpt_model", Path(k.nanogpt) / "model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    c = ours(folder).config
    shape = dict(vocab_size=c.vocab_size, block_size=k.block_size, n_layer=c.n_layer, n_head=c.n_head)
    gpt = module.GPT(module.GPTConfig(**shape, n_embd=c.n_embd, dropout=0.0, bias=False))
    optimizer = gpt.configure_optimizers(0.1, 1e-4, (0.9, 0.95), "cpu")
    forward = torch.compile(gpt) if how else gpt
    return plain_step(gpt, lambda x, y: forward(x, y)[1], k, dtype, c.vocab_size, optimizer)


def infer_ours(k, folder, dtype, how):
    model = ours(folder).to(getattr(torch, dtype)).eval().requires_grad_(False)
    if k.mode == "decode":
        idx = random_ids(k.prompts, 8, model.config.vocab_size, k.seed)
        return lambda: model.generate(idx, k.new_tokens, temperature=0, compile=bool(how))
    idx = random_ids(k.prompts, k.seq, model.config.vocab_size, k.seed)
    forward = torch.compile(model, fullgraph=True, dynamic=False) if how else model
    return torch.inference_mode()(lambda: forward(idx, last_only=True))


def infer_hf(k, folder, dtype, how):
    model = theirs(folder).to(getattr(torch, dtype)).eval()
    if k.mode == "decode":
        return decode_hf(model, random_ids(k.prompts, 8, model.config.vocab_size, k.seed), k.new_tokens, how)
    idx = random_ids(k.prompts, k.seq, model.config.vocab_size, k.seed)
    forward = torch.compile(model, dynamic=False) if how else model
    return torch.inference_mode()(lambda: forward(idx, logits_to_keep=1, use_cache=False).logits)


def decode_hf(model, idx, new_tokens: int, how: str):
    """() -> idx (B, T) and the likeliest tokens after it. how: "", or "[compiled ]static cache"."""
    options = {"attention_mask": torch.ones_like(idx), "do_sample": False, "max_new_tokens": new_tokens}
    options |= {"pad_token_id": 0, "eos_token_id": None}  # no token ends it, as here
    if how:
        options |= {"cache_implementation": "static"}
    if "compiled" in how:  # by generate itself, which on a CPU wants to be told
        options |= {"compile_config": needed_transformers().CompileConfig(mode="default")}
        options["compile_config"]._compile_all_devices = True
    return lambda: model.generate(idx, **options)


def contestants(k: Peers) -> dict[str, tuple]:
    """{name: (function that makes the step, dtype, how, whether freed memory is kept)}; ours first."""
    hows = hf_hows = ("", "compiled")
    if k.mode == "train":
        players = {"nanonorm": (train_ours, True), "HF": (train_hf, False), "HF tuned": (train_hf, True)}
        players |= {"nanoGPT": (train_nanogpt, False)} if k.nanogpt else {}
    else:
        players = {"nanonorm": (infer_ours, True), "HF": (infer_hf, False), "HF tuned": (infer_hf, True)}
    if k.mode == "decode":
        hf_hows = ("", "static cache", "compiled static cache")
    found = {}
    for who, (make, keeps) in players.items():
        for how in hf_hows if make is infer_hf else hows:
            for dtype in k.dtype:
                name = " ".join(word for word in (who, how, dtype) if word)
                if (k.compiled or "compiled" not in how) and (k.who is None or who in k.who):
                    found[name] = (make, dtype, how, keeps)
    return found


# ---------------------------------------------------------------------------------------------------------
# measuring


def work(k: Peers, name: str, folder: Path):
    """A contestant: yields, in training, the bytes that the tensors of a step hold at most at once; then the
    median ms of each turn."""
    make, dtype, how, keeps = contestants(k)[name]
    if keeps:
        keep_freed_memory()  # first of all, as a program does: it decides where the weights come to lie
        torch._inductor.config.cpp_wrapper = k.mode == "decode"  # as generate() has it
    step = make(k, folder, dtype, how)
    release_garbage()
    step()  # which compiles
    yield tensor_peak(step) if k.mode == "train" else None
    yield from timed_turns(step)


def compare(k: Peers, folder: Path):
    """Print how far the logits of transformers are from ours with the same weights, and when decoding whether
    the greedy tokens are the same. Raises: BadInput if rounding does not explain it."""
    a, b = ours(folder).eval(), theirs(folder).eval()
    idx = random_ids(1, min(k.seq, a.config.block_size), a.config.vocab_size, k.seed)
    with torch.inference_mode():
        logits, wanted = a(idx), b(idx).logits
    found, pair = {}, "ours = transformers"
    agree(found, pair, logits, wanted, "the same weights")
    size = sum(p.numel() for p in a.parameters()) / 1e6
    same = f"the same logits in float32, to {found[pair]:.0e} of their scale"
    print(f"{size:.2f} M parameters; {same}", flush=True)
    if k.mode == "decode":
        tokens = [make(k, folder, "float32", "")() for make in (infer_ours, infer_hf)]
        if not torch.equal(*tokens):
            raise BadInput("greedy tokens differ, so the speeds of decoding cannot be compared")
        print("the same greedy tokens", flush=True)


def measure(k: Peers, title: str, folder: Path) -> list[dict]:
    """Time all contestants on this network. One dict of figures for each."""
    times, memory = defaultdict(list), {}
    players = {name: (work, k, name, folder) for name in contestants(k)}
    for start in range(k.processes):
        for name, (peak, _, *turns) in take_turns(players, 1 + k.iters, k.seed + start).items():
            times[name] += turns  # but the one to warm up
            memory[name] = peak
    times = {name: np.array(t) for name, t in times.items()}
    kinds = {name: (dtype, "compiled" in how) for name, (_, dtype, how, _) in contestants(k).items()}
    first = {}  # of a kind, nanonorm as long as --who has it
    for name, kind in kinds.items():
        first.setdefault(kind, name)
    units = {"train": k.batch_size * k.block_size, "prefill": k.seq, "decode": k.new_tokens}[k.mode]
    units *= 1 if k.mode == "train" else k.prompts
    rows = []
    for name, t in times.items():
        beside = first[kinds[name]]
        middle, low, high = ratio(t, times[beside])
        ms = float(np.median(t))
        of_each = np.median(t.reshape(k.processes, -1), 1).tolist()
        rows.append(dict(network=title, name=name, ms=ms, tok_s=units / ms * 1e3, ratio=middle, ratio_q1=low,
                         ratio_q3=high, beside=beside, of_each_process=of_each,
                         tensor_bytes=memory[name]))  # fmt: skip
    return rows


def print_table(k: Peers, title: str, rows: list[dict]):
    """The rows of measure() as Markdown."""
    unit = {"train": "step", "prefill": "prefill", "decode": f"{k.new_tokens} tokens"}[k.mode]
    who = next(name for name in WHO if rows[0]["beside"].startswith(name))
    heads, cells = [title, f"ms a {unit}", "tok/s", f"this / {who}, quartiles"], []
    for r in rows:
        beside = in_words((r["ratio"], r["ratio_q1"], r["ratio_q3"]), digits=2)
        cells.append([r["name"], f"{r['ms']:.1f}", f"{r['tok_s']:,.0f}", beside])
        if k.mode == "train":
            cells[-1].append(f"{r['tensor_bytes'] / 1e6:.0f}")
    if k.mode == "train":
        heads.append("a step's tensors, MB")
    print(f"\n{markdown(cells, heads)}\n", flush=True)


def own_shape(k: Peers) -> tuple[str, ...]:
    """Knobs that a given network has no use for."""
    shape = ("n_layer", "n_head", "vocab_size", "n_embd")
    return () if k.network is None else shape if k.mode == "train" else (*shape, "block_size")


def refuse(k: Peers, explicit: set[str] = frozenset()):
    """Refuse what cannot be compared, before minutes are spent. explicit: knobs that were named. Raises:
    BadInput."""
    if k.nanogpt and not (Path(k.nanogpt) / "model.py").exists():
        raise BadInput(f"--nanogpt={k.nanogpt} holds no model.py; clone nanoGPT there, or leave it out")
    if k.nanogpt and k.mode != "train":
        raise BadInput(f"--nanogpt is timed in mode=train alone, not {k.mode}; leave it out")
    if k.network and not (Path(k.network) / "config.json").exists():
        raise BadInput(f"--network={k.network} is no folder of transformers: it holds no config.json")
    if ignored := sorted(explicit.intersection(own_shape(k))):
        raise BadInput(f"{k.network} has its own shape: leave out --{ignored[0]}, or --network")
    check_out("out", k.out, ".json")
    longest = {"train": k.block_size, "prefill": k.seq, "decode": 8 + k.new_tokens}[k.mode]
    fit = open_model(k.network, hollow=True)[0]["config"]["block_size"] if k.network else k.block_size
    if longest > fit:
        lower = {"train": "block_size", "prefill": "seq", "decode": "new_tokens"}[k.mode]
        raise BadInput(f"{longest} tokens do not fit into {fit}; lower --{lower}")
    if "nanoGPT" in (k.who or ()) and not k.nanogpt:
        raise BadInput("--who=nanoGPT wants --nanogpt=FOLDER, a clone of it, and --mode=train")


def main():
    k, explicit = parse_flags(Peers, __doc__)
    widths = k.n_embd or ((64, 256) if k.mode == "train" else (64, 512))
    refuse(k, explicit)
    networks = {f"n_embd {width}": k.config(width) for width in widths}
    if k.network:
        networks = {Path(k.network).name: None}
    keep_freed_memory()
    transformers, machine = needed_transformers(), hardware(torch.device("cpu"))
    shape = {"train": f"{k.batch_size} x {k.block_size} tokens", "prefill": f"{k.prompts} x {k.seq} tokens",
             "decode": f"after {k.prompts} x 8 tokens"}[k.mode]  # fmt: skip
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(f"machine  {machine}; " + ", ".join(f"{name} {version}" for name, version in versions.items()))
    rounds = f"{k.processes} processes of each, {k.iters} rounds each"
    print(f"measure  {k.mode}, {shape}; {rounds}, {torch.get_num_threads()} threads\n")
    figures = []
    for title, config in networks.items():
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(k.network or temporary)
            if config:
                write_checkpoint(folder, config, k.seed)
            compare(k, folder)
            rows = measure(k, title, folder)
        print_table(k, title, rows)
        figures += rows
    settings = {knob: value for knob, value in asdict(k).items() if knob not in own_shape(k)}
    print_report({"settings": settings, "machine": machine, **versions, "rows": figures}, k.out)


if __name__ == "__main__":
    with one_line_errors():
        main()
