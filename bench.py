"""Time the variants on this machine in tok/s: the papers' speed table, and what makes it a fair one.

    python bench.py out/demo                 a run folder (its exports are timed), or what sample.py takes
    python bench.py --n_embd=256             no checkpoint: random weights of that shape, calibrated, folded
    python bench.py out/demo --mode=decode   one token at a time with the KV cache

One process, one clock. In every timed round each variant runs once, in a fresh random order, so drift and
neighbours hit all alike; a speedup is the median over rounds of (baseline's time / variant's time), both of
the same round. Before anything is timed, variants that must agree are compared: a benchmark of a wrong fold
is worth nothing. The floor is the same matrix products and attention calls and nothing else: what a variant
takes above it is norms, element-wise work and launches. Prints tables, then a line of JSON, which
--out=x.json keeps; --speedups=x.png draws each speedup by batch size.
"""

import copy
import itertools
import platform
import random
import sys
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from forms import FOLD_TOLERANCE, FORMS, changed_by_fold, from_file, load_model
from model import NORMS, ModelConfig, ModelKnobs, Transformer, attend
from nanonorm.cache import KVCache
from nanonorm.cli import check_out, parse, print_report
from nanonorm.errors import BadInput, one_line_errors
from nanonorm.knobs import changed, off
from nanonorm.machine import keep_freed_memory, pick_device, processor
from nanonorm.onnx import need_onnx
from nanonorm.plots import draw_speedups, pyplot
from nanonorm.run import EXPORTS, checkpoint_step, open_model
from nanonorm.scale import drop_held
from nanonorm.timing import OnnxStep, count_work, in_runtime, ratio, time_rounds
from nanonorm.typed import Count, Seed, Some, Whole

# name -> (norm, taper, form)
# norm "plain": the run's, or the RMSNorm or LayerNorm that it competes with; taper "own": the run's
VARIANTS = {
    "baseline": ("plain", "none", "trained"),
    "weightless": ("plain", "none", "weightless"),
    "unfused": ("plain", "own", "unfused"),
    "folded": ("plain", "own", "folded"),
    "all_unfused": ("plain", "all", "unfused"),
    "all_folded": ("plain", "all", "folded"),
    **{norm: (norm, "none", "trained") for norm in NORMS},
    **{f"{n}_weightless": (n, "none", "weightless") for n, v in NORMS.items() if v.tapers or v.centred},
    **{f"{n}_folded": (n, "none", "folded") for n, v in NORMS.items() if changed_by_fold(v)},
}
FLOOR = "floor"
RUNTIMES = ("eager", "compiled", "graph", "onnx")  # onnx: prefill on the CPU, under onnxruntime


@dataclass
class Bench(ModelKnobs):
    """What is timed, and how. The model's knobs are for runs without PATH; a file brings its own."""

    # what is timed
    mode: Literal["prefill", "decode"] = "prefill"  # last-token logits of a prompt; or one token, KV cache
    variants: Some[Literal[*VARIANTS]] | None = None  # columns, speedups over the first; None: by norm
    runtimes: Some[Literal[*RUNTIMES]] | None = None  # None: eager; on a GPU all but onnx
    batch: Some[Count] = (1, 4)  # sequences at a time
    seq: Some[Count] | None = None  # tokens of context; None: 512 or block_size, its half and quarter
    # how
    warmup: Whole = 10  # untimed rounds
    iters: Count = 50  # timed rounds
    device: str = "auto"  # cpu, cuda, cuda:1; auto: a GPU if there is one
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of the weights; auto: bfloat16 on a GPU
    seed: Seed = 1337  # of random weights, tokens and the order in a round
    out: str | None = None  # .json file for the numbers
    speedups: str | None = None  # .png file for the speedups by batch size, for one seq (needs matplotlib)


# ---------------------------------------------------------------------------------------------------------
# the models


def load_models(name: str) -> dict[str, Transformer]:
    """{form: model} of a run's exports, or of whatever else sample.py takes: a model file, a Hugging Face
    folder, a hub id. In the file's type, on the CPU. Raises: BadInput, ModelError."""
    files = [file for file in (Path(name) / export for export in EXPORTS) if file.exists()]
    models = [load_model(file) for file in files] or [from_file(*open_model(name))]
    return {m.config.form: m for m in models}


def random_model(config: ModelConfig, device) -> Transformer:
    """A model in eval mode, weights and gains random; what tapers is calibrated on a random batch, gate 0."""
    model = Transformer(config).to(device)
    for name, p in model.named_parameters():
        if p.dim() == 1:  # a gain of 1 or a shift of 0 would hide a wrong fold
            nn.init.normal_(p, std=0.1) if name.endswith("bias") else nn.init.uniform_(p, 0.5, 1.5)
    if model.taper_norms():
        T = min(64, config.longest_text)
        taper_untrained(model, torch.randint(config.vocab_size, (4, T), device=device))
    return model.eval()


def taper_untrained(model: Transformer, idx):
    """Calibrate a network's tapers on ids (B, T), and take the gate to 0, in place."""
    model.train()(idx, last_only=True)
    model.update_statistics()
    model.calibrate()
    for norm in model.taper_norms().values():
        norm.c *= 0.1  # nothing trained this network to hold its scale: at gate 0 it would overflow
    model.set_phase("scale")


def with_norm(shape: ModelConfig, norm: str, taper: str) -> ModelConfig:
    """The same shape with another norm and taper, without the options that mean nothing there."""
    of_blocks = {"taper_qk": shape.taper_qk, "taper_from_layer": shape.taper_from_layer}
    plain = off(ModelConfig, "aux_weight", "taper") | {
        "form": "trained",
        "dropout": 0.0,
        "coupled_grad": False,
    }
    kept = of_blocks if taper in ("internal", "all") else {}
    return changed(shape, **plain | kept | {"norm": norm, "taper": taper})


def build(names, shape: ModelConfig, run: dict, device, dtype, seed: int) -> dict[str, Transformer]:
    """{variant: model} on `device` in `dtype`: the run's own if they have that norm and taper, else random.

    Variants that differ in form alone share weights; forms are made before the cast. Raises: BadInput.
    """
    plain = shape.norm
    if not NORMS[plain].tapers:
        plain = "layernorm" if NORMS[plain].shift else "rmsnorm"
    own_taper = "internal" if shape.taper == "none" else shape.taper
    for model in run.values():  # a fold is done in the wider of the file's type and `dtype`
        model.to(torch.promote_types(model.tok_emb.weight.dtype, dtype))
    known = {(shape.norm, shape.taper): run} if run else {}  # (norm, taper) -> {form: model}
    models = {}
    for name in names:
        norm, taper, form = VARIANTS[name]
        key = plain if norm == "plain" else norm, own_taper if taper == "own" else taper
        if key not in known:
            torch.manual_seed(seed)
            known[key] = {"trained": random_model(with_norm(shape, *key), device)}
        source = next((f for f in (form, "trained", "unfused") if f in known[key]), None)
        if source is None:
            remedy = "name the run folder, or leave it out of --variants"
            raise BadInput(f"{name} cannot be made from the {shape.form} form alone; {remedy}")
        if form == "trained" and shape.sink_token is not None:
            form = "unfused"  # the same, but for the sink, which it would compute in each prefill
        models[name] = known[key][source] if source == form else FORMS[form](known[key][source])
    columns = any(in_columns(model) for model in run.values())
    copies = {name: laid_out(copy.deepcopy(m).to(device, dtype), columns) for name, m in models.items()}
    for model in copies.values():
        drop_held(model)  # site losses and ceilings, which training alone has a use for
    return {name: m.requires_grad_(False).eval() for name, m in copies.items()}


def in_columns(model: Transformer) -> bool:
    """Whether the matrices of the blocks lie in memory as (in, out), as those of a loaded GPT-2 do."""
    return not model.blocks[0].attn.qkv.weight.is_contiguous()


def laid_out(model: Transformer, columns: bool) -> Transformer:
    """The model with the matrices of its blocks in one layout: products of two would not compare."""
    for p in model.blocks.parameters():
        if p.dim() == 2:
            p.data = p.data.t().contiguous().t() if columns else p.data.contiguous()
    return model


class Floor(nn.Module):
    """The matrix products and attention calls of one forward, back to back, and nothing else.

    Each product reads the one before it, as in the model, so a compiler can drop none and the caches see the
    same traffic. Weights keep the size of what passes (std 1/sqrt(fan in)): no denormals, however deep. With
    `columns` they lie as in_columns() says.
    """

    def __init__(self, c: ModelConfig, mode: str, batch: int, seq: int, device, dtype, columns=False):
        super().__init__()
        D, H, K, C = c.n_embd, c.n_head, c.n_kv_head, c.head_dim
        like = partial(torch.randn, device=device, dtype=dtype)
        read = 2 * c.hidden if c.mlp == "swiglu" else c.hidden
        shapes = ((H + 2 * K) * C, D), (D, H * C), (read, D), (D, c.hidden)

        def matrix(out, width):
            weight = like(out, width) * width**-0.5
            return weight.t().contiguous().t() if columns else weight

        self.layers = [[matrix(*shape) for shape in shapes] for _ in range(c.n_layer)]
        self.head = like(c.vocab_size, D) * D**-0.5
        self.heads, self.decode = (H, K, C), mode == "decode"
        self.x = like(batch, 1 if self.decode else seq, D)
        self.cache = like(2, batch, K, seq, C) if self.decode else None
        self.mask = torch.ones(1, seq, device=device, dtype=torch.bool) if self.decode else None

    def forward(self, x, last_only=True):
        """The stream (B, T, D) -> (B, 1, V)"""
        H, K, C = self.heads
        B, T, _ = x.shape
        for qkv, proj, up, down in self.layers:
            heads = F.linear(x, qkv).view(B, T, H + 2 * K, C).split((H, K, K), 2)
            q, k, v = (t.transpose(1, 2) for t in heads)  # (B, heads, T, C)
            if self.decode:
                k, v = self.cache
            y = attend(q, k, v, self.mask)
            x = F.linear(y.transpose(1, 2).reshape(B, T, H * C), proj)
            x = F.linear(F.linear(x, up)[..., : down.shape[1]], down)
        return F.linear(x[:, -1:], self.head)


# ---------------------------------------------------------------------------------------------------------
# compare, then time


def prompt(model: nn.Module, batch: int, length: int, seed: int):
    """What a step reads: random tokens (batch, length); the floor its stream."""
    if isinstance(model, Floor):
        return model.x
    device = model.tok_emb.weight.device
    rng = torch.Generator(device).manual_seed(seed)
    return torch.randint(model.config.vocab_size, (batch, length), device=device, generator=rng)


def make_step(model: nn.Module, mode: str, batch: int, seq: int, seed: int):
    """(reset, step): step() is timed and returns logits (B, 1, V); reset() comes before it, untimed."""
    x = prompt(model, batch, 1 if mode == "decode" else seq, seed)
    if mode == "prefill" or isinstance(model, Floor):
        return (lambda: None), (lambda: model(x, last_only=True))
    rng = torch.Generator(x.device).manual_seed(seed)
    cache = KVCache(model, batch, seq)  # seq - 1 tokens seen; the new one makes seq
    cache.empty = False
    for t in cache.k + cache.v:
        t.normal_(generator=rng)
    return (lambda: cache.pos.fill_(seq - 1)), (lambda: model(x, cache=cache, last_only=True))


def agree(differences: dict, pair: str, ours, theirs, what: str):
    """Keep in differences[pair] the largest max |ours - theirs| / max |theirs| so far.

    Raises: BadInput if that is more than rounding explains.
    """
    error = ((ours - theirs).float().abs().max() / theirs.abs().max()).item()
    if not error <= FOLD_TOLERANCE[ours.dtype]:  # nan, which logits that are not finite give, fails as well
        found, allowed = f"logits differ by {error:.1e} of their scale", f"{FOLD_TOLERANCE[ours.dtype]:.0e}"
        raise BadInput(f"{what}: {pair} does not hold: {found}, more than {allowed} in {ours.dtype}")
    differences[pair] = max(error, differences.get(pair, 0.0))


def first_call(reset, step, runtime: str, what: str):
    """(step in its runtime, its first logits (B, 1, V)). Raises: BadInput if it does not compile."""
    try:
        step = in_runtime(runtime, reset, step)
        reset()
        return step, step().clone()
    except Exception as e:
        if runtime != "compiled" or isinstance(e, torch.OutOfMemoryError):
            raise
        if "CxxCompiler" in f"{type(e).__name__} {e}":
            remedy = "install g++, or use --runtimes=eager"
            raise BadInput(f"torch.compile needs a C++ compiler on a CPU and found none: {remedy}") from None
        reason = str(e).splitlines()[0][:200]
        raise BadInput(f"{what}: torch.compile fails ({reason}); leave compiled out of --runtimes") from e


def measure(models: dict, k: Bench, runtime: str, batch: int, seq: int, device, differences: dict) -> list:
    """One row of the table: compare, then time. A dict of figures for each variant and the floor.

    differences: what agree() has found so far. Raises: BadInput.
    """
    if runtime == "compiled":
        torch.compiler.reset()  # drop the programs of the row before: shapes are static
    steps, logits, work = {}, {}, {}
    first, dtype = next(iter(models.values())), getattr(torch, k.dtype)
    floor = Floor(first.config, k.mode, batch, seq, device, dtype, in_columns(first))
    for name, model in {**models, FLOOR: floor}.items():
        what = f"{name}, {k.mode} {batch} x {seq}, {runtime}"
        reset, step = make_step(model, k.mode, batch, seq, k.seed)
        with torch.inference_mode():
            _, eager = first_call(reset, step, "eager", what)
        if runtime == "onnx":
            step = OnnxStep(model, prompt(model, batch, seq, k.seed))
        with torch.inference_mode():
            step, own = first_call(reset, step, runtime, what)
        if not own.isfinite().all():
            raise BadInput(f"{what}: the logits are not finite, so a comparison of speed means nothing")
        if runtime != "eager":
            agree(differences, f"{runtime} = eager", own, eager, what)
        same = VARIANTS.get(name, ())[:2]  # norm and taper: another form of it must give the same
        for twin in (n for n in logits if VARIANTS[n][:2] == same):
            agree(differences, f"{name} = {twin}", eager, logits[twin], what)
        steps[name], logits[name] = (reset, step), eager
        work[name] = count_work(reset, step, runtime, device)
    with torch.inference_mode():
        times = time_rounds(steps, k.warmup, k.iters, device, random.Random(k.seed))
    row, base, tokens = [], times[next(iter(models))], batch * (seq if k.mode == "prefill" else 1)
    for name, t in times.items():
        ms, ms_q1, ms_q3 = np.percentile(t, (50, 25, 75)).tolist()
        speedup, speedup_q1, speedup_q3 = ratio(base, t)
        above_floor_ms = float(np.median(t - times[FLOOR]))
        row.append(dict(variant=name, runtime=runtime, batch=batch, seq=seq, tok_s=tokens / ms * 1e3,
                        ms=ms, ms_q1=ms_q1, ms_q3=ms_q3, speedup=speedup, speedup_q1=speedup_q1,
                        speedup_q3=speedup_q3, above_floor_ms=above_floor_ms, work=work[name]))  # fmt: skip
    return row


# ---------------------------------------------------------------------------------------------------------
# tables


def print_line(label: str, cells, widths):
    cells = [f"{c:>{w}}" for c, w in zip(cells, widths, strict=True)]
    print(f"| {label:>11} | " + " | ".join(cells) + " |", flush=True)


def print_table(title: str, names, rows, cell, widths):
    """Print `rows`, lists with a dict of figures for each of `names`, as they come, and yield them."""
    print(f"\n{title}\n")
    print_line("batch x seq", names, widths)
    print("|" + "|".join("-" * (w + 1) + ":" for w in (11, *widths)) + "|")
    for row in rows:
        print_line(f"{row[0]['batch']} x {row[0]['seq']}", map(cell, row), widths)
        yield row


def print_runtime(runtime: str, rows, names, unit: str) -> list[dict]:
    """Print both tables of one runtime. rows: an iterable of measure()'s. Returns all figures in one list."""

    def speed(r):
        ratio = f" {r['speedup']:.3f}x {r['speedup_q1']:.3f}-{r['speedup_q3']:.3f}"
        return f"{r['tok_s']:,.0f}{'' if r['variant'] == names[0] else ratio}"

    def cost(r):
        above = f" {r['above_floor_ms']:+#.3g}"
        return f"{r['ms']:#.4g} {r['ms_q1']:#.4g}-{r['ms_q3']:#.4g}{'' if r['variant'] == FLOOR else above}"

    def span(counts):
        if None in counts:
            return "-"
        return f"{min(counts)}-{max(counts)}" if min(counts) < max(counts) else f"{counts[0]}"

    widths = [max(w, len(name)) for w, name in zip([9] + [27] * (len(names) - 1), names, strict=True)]
    title = f"{runtime}: tok/s, speedup over {names[0]}, its quartiles"
    rows = list(print_table(title, names, rows, speed, widths))
    widths = [max(26, len(name)) for name in names]
    title = f"{runtime}: ms a forward, quartiles, ms above the floor"
    rows = list(print_table(title, names, rows, cost, widths))
    print_line(unit, [span([r["work"] for r in column]) for column in zip(*rows, strict=True)], widths)
    return [r for row in rows for r in row]


# ---------------------------------------------------------------------------------------------------------
# the command


def hardware(device: torch.device) -> str:
    """The processor's name, and how much of it is used."""
    return processor(device) + (f", {torch.get_num_threads()} threads" if device.type == "cpu" else "")


def resolve(k: Bench, shape: ModelConfig) -> torch.device:
    """Fill in the knobs left to choose and refuse what cannot run. Returns the device. Raises: BadInput."""
    device = pick_device(k.device)
    if device.type not in ("cpu", "cuda"):
        raise BadInput(f"device={k.device}: bench.py times cpu and cuda only; use --device=cpu")
    gpu, longest = device.type == "cuda", min(512, shape.longest_text)
    rivals = ["unfused", "folded"]
    if not NORMS[shape.norm].tapers:
        rivals = [name for name in VARIANTS if name.startswith(shape.norm)]
    if shape.form in ("folded", "weightless"):  # its other forms are gone
        rivals = [name for name in rivals if VARIANTS[name][2] == shape.form]
    runtimes = ("eager", "compiled", "graph") if gpu else ("eager",)
    usual = ["baseline", "weightless", *rivals]
    if shape.form == "weightless" and shape.taper == "none" and NORMS[shape.norm].tapers:
        usual.remove("baseline")  # it is this network with its gains, which are gone
    k.variants = tuple(dict.fromkeys(k.variants or usual))
    k.runtimes = tuple(dict.fromkeys(k.runtimes or runtimes))
    k.batch = tuple(dict.fromkeys(k.batch))
    k.seq = tuple(dict.fromkeys(k.seq or (max(1, longest // 4), max(1, longest // 2), longest)))
    if k.dtype == "auto":
        k.dtype = "bfloat16" if gpu else "float32"
    if max(k.seq) > shape.longest_text:
        behind = " has room for behind its sink" if shape.ahead else ""
        raise BadInput(f"seq={max(k.seq)} is longer than the model's block_size={shape.block_size}{behind}")
    if not gpu and "graph" in k.runtimes:
        raise BadInput("CUDA graphs need a GPU; on a CPU there are eager, compiled and onnx")
    if "onnx" in k.runtimes:
        for wrong, remedy in (
            (k.mode == "decode", "here it has no KV cache; use --mode=prefill, or scripts/speed/runtimes.py"),
            (gpu, "it runs on the CPU; use --device=cpu"),
            (k.dtype != "float32", "onnxruntime's CPU multiplies no bfloat16; use --dtype=float32"),
        ):
            if wrong:
                raise BadInput(f"the runtime onnx cannot do this: {remedy}, or leave onnx out")
        need_onnx()
    check_out("out", k.out, ".json")
    check_out("speedups", k.speedups, ".png")
    if k.speedups is not None and len(k.seq) > 1:
        remedy = f"there are {len(k.seq)} of --seq; name one, as --seq={k.seq[0]}"
        raise BadInput(f"speedups={k.speedups} is over batch sizes: {remedy}")
    if k.speedups is not None:
        pyplot()  # if it is missing, say so now and not after minutes
    return device


def main(argv: list[str]):
    usage = "python bench.py [PATH] [--key=value ...]  "
    usage += "PATH: a run, a model file, a GGUF file, a Hugging Face folder, a hub id"
    k, explicit, words = parse(Bench, argv, usage=usage)
    if len(words) > 1:
        raise BadInput(f"one PATH at a time, not {' '.join(words)}")
    path, run = (words[0] if words else None), {}
    knobs = {f.name: getattr(k, f.name) for f in fields(ModelKnobs)}
    if path and explicit & knobs.keys():
        raise BadInput(f"{path} has its own shape: leave out --{min(explicit & knobs.keys())}, or the path")
    if path:
        run = load_models(path)
        shape = next(iter(run.values())).config
        if shape.norm_eps > 1:
            why = f"with eps {shape.norm_eps:.0e} its norms are fixed scalings, computed for nothing"
            raise BadInput(f"{path}: {why}; name the network that it was exported from")
    else:
        shape = ModelConfig(**{name: value for name, value in knobs.items() if value is not None})
    device = resolve(k, shape)
    models = build(k.variants, shape, run, device, getattr(torch, k.dtype), k.seed)
    unit = "kernels" if device.type == "cuda" else "operators"
    units = {runtime: "nodes" if runtime == "onnx" else unit for runtime in k.runtimes}
    counted = " and ".join(dict.fromkeys(units.values()))
    what = "batch x seq / time, last-token logits, no KV cache"
    if k.mode == "decode":
        what = "batch / time, one token, KV cache of seq"
    size = sum(p.numel() for p in models[k.variants[0]].parameters()) / 1e6
    form = f"n_layer {shape.n_layer}, n_embd {shape.n_embd}"

    print(f"machine  {hardware(device)}; torch {torch.__version__}; {k.dtype}")
    steps = [step for m in run.values() if (step := checkpoint_step(m.meta)) is not None]
    source = path or "random weights"
    if steps:
        source += f", a checkpoint at step {steps[0]:,}"
    print(f"model    {source}: {size:.2f} M parameters, {form}")
    print(f"measure  {k.mode}: tok/s = {what}; medians of {k.iters} interleaved rounds after {k.warmup}")
    print(f"floor    the matrix products and attention calls alone; {counted}: of one forward")
    if device.type == "cpu" and "compiled" not in k.runtimes:
        price = "needs a C++ compiler and minutes: each shape is compiled"
        print(f"compiled not timed; --runtimes=eager,compiled adds it ({price})")

    figures, differences = [], {}
    for runtime in k.runtimes:
        shapes = itertools.product(k.batch, k.seq)
        rows = (measure(models, k, runtime, batch, seq, device, differences) for batch, seq in shapes)
        figures += print_runtime(runtime, rows, [*models, FLOOR], units[runtime])
    found = ", ".join(f"{pair} {e:.0e}" for pair, e in differences.items())
    agreed = f"logits agree; largest difference over largest logit: {found}"
    print("\n" + (agreed if found else "no logits compared: no two columns are forms of one network"))
    spread = float(np.median([(r["ms_q3"] - r["ms_q1"]) / r["ms"] for r in figures]))
    if spread > 0.1:
        print(f"noisy: quartiles lie {spread:.0%} of the median apart, typically; is something else running?")
    settings = {name: value for name, value in asdict(k).items() if name not in knobs}
    report = dict(settings=settings, path=path, model=asdict(shape), machine=hardware(device),
                  torch=torch.__version__, cuda=torch.version.cuda, python=platform.python_version(),
                  work=counted, differences=differences, rows=figures)  # fmt: skip
    print_report(report, k.out)
    title = f"{k.mode}, {k.dtype}, {form}, {hardware(device)}"
    if k.speedups:
        draw_speedups(k.speedups, figures, FLOOR, f"{title}, seq {k.seq[0]}")


if __name__ == "__main__":
    keep_freed_memory()
    with one_line_errors(torch.OutOfMemoryError):
        main(sys.argv[1:])
