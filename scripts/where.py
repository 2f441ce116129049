"""Where the time of a training step goes, by kind of operator, as a table and as stacked bars.

    python scripts/where.py                                             # this code, both widths, and Hugging Face's Llama
    python scripts/where.py --before=../nanonorm-before --figure=where.png    # beside another checkout of this repository
    python scripts/where.py --norm=rmsnorm,layernorm,coupled,cbwc       # a bar for each norm

Self time of each operator from torch.profiler, one step after three to warm up, the median over --iters profiles; contestants
take turns. The kinds are told from the operators' names, so a product inside the chunked loss counts as a product, and
norms, RoPE, SwiGLU and residuals, which share operators, are one kind.
"""

import importlib.util
import json
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch.profiler import profile

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from config import ROOT, BadInput, Count, atomic_write, bfloat16_pays, one_line_errors, parse
from model import ModelError
from scripts.turns import take_turns

KINDS = {  # kind -> how its operators' names begin, after "aten::"; what matches none is element-wise
    "attention": ("_scaled_dot_product", "_flash_attention"),
    "matrix products": ("mm", "addmm", "bmm", "baddbmm", "linear"),
    "softmax and loss": ("_log_softmax", "nll_loss", "exp_", "gather", "scatter", "logsumexp", "amax"),
    "optimizer": ("_fused_adam", "_foreach", "addcdiv", "lerp"),
    "copies, casts, padding": ("copy_", "cat", "fill_", "constant_pad", "zero_", "index", "embedding", "slice_backward", "select_backward"),
    "norms and element-wise": (),
}


@dataclass
class Where:
    """What is profiled."""

    n_embd: tuple[Count, ...] = (64, 256)  # widths
    norm: tuple[Literal["rmsnorm", "layernorm", "coupled", "cbwc", "dyt", "derf"], ...] = ("rmsnorm",)  # of this code's bars
    before: str | None = None  # another checkout of this repository, for a bar
    llama: bool = True  # a bar for transformers' Llama in a plain loop
    n_layer: Count = 8  # blocks
    n_head: Count = 16  # attention heads
    vocab_size: Count = 10_000  # token ids
    block_size: Count = 512  # tokens of a window
    batch_size: Count = 8  # windows
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of autocast; auto: as train.py chooses
    iters: Count = 5  # profiled steps
    figure: str | None = None  # .png for the stacked bars (needs matplotlib)


def load(path: Path, name: str):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def step_of(k: Where, who: str, width: int):
    """() that does one step of `who`: "llama", or "root:norm" for a checkout and a norm."""
    low = k.dtype == "bfloat16" or (k.dtype == "auto" and bfloat16_pays("cpu", width))
    peers = load(ROOT / "scripts/peers.py", "peers")
    shape = dict(vocab_size=k.vocab_size, block_size=k.block_size, n_layer=k.n_layer, n_head=k.n_head, batch_size=k.batch_size)
    if who == "llama":
        return peers.train_hf(peers.Peers(**shape), width, "bfloat16" if low else "float32", "")
    root, norm = who.rsplit(":", 1)
    if hasattr(load(Path(root) / "config/__init__.py", "theirs"), "keep_freed_memory"):
        peers.keep_freed_memory()
    model = load(Path(root) / "model.py", "their_model")
    del shape["batch_size"]
    net = model.Transformer(model.ModelConfig(n_embd=width, norm=norm, **shape)).train()
    autocast = torch.autocast("cpu", torch.bfloat16) if low else nullcontext()
    return peers.training_step(net, peers.corpus(peers.Peers(vocab_size=k.vocab_size)), k.batch_size, autocast)


def kind_of(operator: str) -> str:
    name = operator.removeprefix("aten::")
    return next((kind for kind, starts in KINDS.items() if name.startswith(starts)), "norms and element-wise")


def work(k: Where, who: str, width: int):
    """Yields when it is warm, then {kind: ms} of one step each time."""
    step = step_of(k, who, width)
    for _ in range(3):
        step()
    yield
    while True:
        with profile() as recorded:
            step()
        times = dict.fromkeys(KINDS, 0.0)
        for event in recorded.key_averages():
            times[kind_of(event.key)] += event.self_cpu_time_total / 1e3
        yield times


def measure(k: Where, contestants: dict[str, str], width: int) -> dict[str, dict[str, float]]:
    """{label: {kind: median ms}}."""
    said = take_turns({label: (work, k, who, width) for label, who in contestants.items()}, k.iters, seed=0)
    return {label: {kind: float(np.median([t[kind] for t in steps])) for kind in KINDS} for label, (_, *steps) in said.items()}


def draw(path: str, results: dict[int, dict]):
    """Stacked bars, a panel for each width."""
    try:
        import matplotlib
    except ImportError:
        raise BadInput("--figure needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    colours = ["#0072B2", "#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#999999"]  # Okabe and Ito: told apart by everyone
    bars = max(map(len, results.values()))
    figure, panels = plt.subplots(
        len(results), 1, figsize=(6.5, 1.1 + len(results) * (0.6 + 0.38 * bars)), squeeze=False, layout="constrained"
    )
    for panel, (width, rows) in zip(panels[:, 0], results.items(), strict=True):
        labels, left = list(rows)[::-1], np.zeros(len(rows))
        for kind, colour in zip(KINDS, colours, strict=True):
            values = np.array([rows[label][kind] for label in labels])
            panel.barh(labels, values, left=left, color=colour, label=kind, height=0.7, edgecolor="white", linewidth=0.5)
            left += values
        for y, total in enumerate(left):
            panel.text(total, y, f" {total:,.0f}", va="center", fontsize=9)
        panel.set_title(f"n_embd {width}", loc="left", fontsize=10)
        panel.set_xlim(0, left.max() * 1.1)
        panel.spines[["top", "right"]].set_visible(False)
    panels[-1, 0].set_xlabel("time of a training step (ms)")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    with atomic_write(path) as f:
        figure.savefig(f, dpi=200, format="png")


def main():
    k, _, words = parse(Where, sys.argv[1:], usage=__doc__)
    if words:
        raise BadInput(f"{words[0]}: there is nothing to name here but --key=value")
    if k.before and not (Path(k.before) / "model.py").exists():
        raise BadInput(f"--before={k.before} holds no model.py; name a checkout of this repository")
    if k.figure and not Path(k.figure).resolve().parent.is_dir():
        raise BadInput(f"figure={k.figure} is in a folder that does not exist")
    contestants = {"Hugging Face Llama": "llama"} if k.llama else {}
    contestants |= {"before": f"{Path(k.before).resolve()}:{k.norm[0]}"} if k.before else {}
    contestants |= {"now" if len(k.norm) == 1 else norm: f"{ROOT}:{norm}" for norm in k.norm}
    results = {}
    for width in k.n_embd:
        rows = results[width] = measure(k, contestants, width)
        print(f"\n| n_embd {width}, ms | {' | '.join(rows)} |\n|---|{'---:|' * len(rows)}")
        for kind in (*KINDS, "total"):
            values = [sum(r.values()) if kind == "total" else r[kind] for r in rows.values()]
            print(f"| {kind} | {' | '.join(f'{v:.0f}' for v in values)} |")
    if k.figure:
        draw(k.figure, results)
    print(f"\n{json.dumps(results)}")


if __name__ == "__main__":
    with one_line_errors(ModelError):
        main()
