"""Where the time of a training step goes, by kind of operator, as a table and as stacked bars.

    python scripts/speed/where.py                                        # this code, and Hugging Face's Llama
    python scripts/speed/where.py --before=../before --figure=where.png  # beside another checkout's model.py
    python scripts/speed/where.py --norm=rmsnorm,layernorm,coupled,cbwc  # a bar for each norm

Self time of each operator from torch.profiler, one step after three to warm up, the median over --iters
profiles; contestants take turns. The kinds are told from the operators' names, so a product inside the
chunked loss counts as a product, and norms, RoPE, SwiGLU and residuals, which share operators, are one kind.
"""

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch.profiler import profile

from model import NORMS  # not found? pip install -e .
from nanonorm.errors import BadInput, one_line_errors
from nanonorm.files import ROOT, atomic_write
from nanonorm.machine import keep_freed_memory, pick_dtype
from nanonorm.plots import COLOURS, GREY, pyplot
from nanonorm.typed import Count
from scripts.speed.parts import training_step
from scripts.speed.peers import Peers, corpus, train_hf
from scripts.speed.turns import finish, read_flags, take_turns

KINDS = {  # kind -> how its operators' names begin, after "aten::"; what matches none is element-wise
    "attention": ("_scaled_dot_product", "_flash_attention"),
    "matrix products": ("mm", "addmm", "bmm", "baddbmm", "linear"),
    "softmax and loss": ("_log_softmax", "nll_loss", "exp_", "gather", "scatter", "logsumexp", "amax"),
    "optimizer": ("_fused_adam", "_foreach", "addcdiv", "lerp"),
    "copies, casts, padding": ("copy_", "cat", "fill_", "constant_pad", "zero_", "index", "embedding",
                               "slice_backward", "select_backward"),
    "norms and element-wise": (),
}  # fmt: skip


@dataclass
class Where:
    """What is profiled."""

    n_embd: tuple[Count, ...] = (64, 256)  # widths
    norm: tuple[Literal[*NORMS], ...] = ("rmsnorm",)  # of this code's bars
    before: str | None = None  # another checkout of this repository; a bar for its model.py in the same step
    llama: bool = True  # a bar for transformers' Llama in a plain loop
    n_layer: Count = 8  # blocks
    n_head: Count = 16  # attention heads
    vocab_size: Count = 10_000  # token ids
    block_size: Count = 512  # tokens of a window
    batch_size: Count = 8  # windows
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of autocast; auto: as train.py chooses
    iters: Count = 5  # profiled steps
    figure: str | None = None  # .png for the stacked bars (needs matplotlib)


def model_of(root: Path):
    """The module model.py of a checkout. Another checkout's brings its own nanonorm/, where it has one."""
    if root != ROOT:
        for name in [name for name in sys.modules if name.partition(".")[0] in ("model", "nanonorm")]:
            del sys.modules[name]
        sys.path.insert(0, str(root))
    return importlib.import_module("model")


def keeps_freed_memory(root: Path) -> bool:
    """Whether training keeps freed memory in that checkout. Early ones do not; the function has moved."""
    homes = (root / "nanonorm/machine.py", root / "config/__init__.py")
    return any("def keep_freed_memory" in home.read_text() for home in homes if home.exists())


def step_of(k: Where, who: str, width: int):
    """() that does one step of `who`: "llama", or "root:norm" for a checkout and a norm."""
    dtype = str(pick_dtype(k.dtype, torch.device("cpu"), width)).removeprefix("torch.")
    shape = dict(vocab_size=k.vocab_size, block_size=k.block_size, n_layer=k.n_layer, n_head=k.n_head)
    if who == "llama":
        return train_hf(Peers(**shape, batch_size=k.batch_size), width, dtype, "")
    root, norm = who.rsplit(":", 1)
    if keeps_freed_memory(Path(root)):
        keep_freed_memory()
    theirs = model_of(Path(root))
    model = theirs.Transformer(theirs.ModelConfig(n_embd=width, norm=norm, **shape)).train()
    return training_step(model, corpus(Peers(vocab_size=k.vocab_size)), k.batch_size, getattr(torch, dtype))


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
    players = {label: (work, k, who, width) for label, who in contestants.items()}
    medians = {}
    for label, (_, *steps) in take_turns(players, k.iters, seed=0).items():
        medians[label] = {kind: float(np.median([t[kind] for t in steps])) for kind in KINDS}
    return medians


def draw(path: str, results: dict[int, dict]):
    """Stacked bars, a panel for each width."""
    bars = max(map(len, results.values()))
    size = (6.5, 1.1 + len(results) * (0.6 + 0.38 * bars))
    figure, panels = pyplot().subplots(len(results), 1, figsize=size, squeeze=False, layout="constrained")
    look = dict(height=0.7, edgecolor="white", linewidth=0.5)
    for panel, (width, rows) in zip(panels[:, 0], results.items(), strict=True):
        labels, left = list(rows)[::-1], np.zeros(len(rows))
        for kind, colour in zip(KINDS, (*COLOURS, GREY), strict=True):
            values = np.array([rows[label][kind] for label in labels])
            panel.barh(labels, values, left=left, color=colour, label=kind, **look)
            left += values
        for y, total in enumerate(left):
            panel.text(total, y, f" {total:,.0f}", va="center", fontsize=9)
        panel.set_title(f"n_embd {width}", loc="left", fontsize=10)
        panel.set_xlim(0, left.max() * 1.1)
        panel.spines[["top", "right"]].set_visible(False)
    panels[-1, 0].set_xlabel("time of a training step (ms)")
    handles = panels[0, 0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    with atomic_write(path) as f:
        figure.savefig(f, dpi=200, format="png")


def main():
    k = read_flags(Where, __doc__)
    if k.before and not (Path(k.before) / "model.py").exists():
        raise BadInput(f"--before={k.before} holds no model.py; name a checkout of this repository")
    if k.figure:
        if not Path(k.figure).resolve().parent.is_dir():
            raise BadInput(f"figure={k.figure} is in a folder that does not exist")
        pyplot()  # if it is missing, say so now and not after minutes
    contestants = {"Hugging Face Llama": "llama"} if k.llama else {}
    if k.before:
        contestants["before"] = f"{Path(k.before).resolve()}:{k.norm[0]}"
    contestants |= {"now" if len(k.norm) == 1 else norm: f"{ROOT}:{norm}" for norm in k.norm}
    results = {}
    for width in k.n_embd:
        rows = results[width] = measure(k, contestants, width)
        print(f"\n| n_embd {width}, ms | {' | '.join(rows)} |\n|---|{'---:|' * len(rows)}")
        for kind in KINDS:
            print(f"| {kind} | {' | '.join(f'{r[kind]:.0f}' for r in rows.values())} |")
        print(f"| total | {' | '.join(f'{sum(r.values()):.0f}' for r in rows.values())} |")
    if k.figure:
        draw(k.figure, results)
    finish(results)


if __name__ == "__main__":
    with one_line_errors():
        main()
