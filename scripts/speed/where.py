"""Where the time of a training step goes, by kind of operator, as a table and as stacked bars.

    python scripts/speed/where.py --figure=where.png                     # this code, and Hugging Face's Llama
    python scripts/speed/where.py --norm=rmsnorm,layernorm,coupled,cbwc  # a bar for each norm

Self time of each operator from torch.profiler, one step after three to warm up, the median over --iters
profiles; contestants take turns. The kinds are told from the operators' names, so a product inside the
chunked loss counts as a product, and norms, RoPE, SwiGLU and residuals, which share operators, are one kind.
"""

import tempfile
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch.profiler import profile

from model import NORMS  # not found? pip install -e .
from nanonorm.errors import one_line_errors
from nanonorm.files import atomic_write
from nanonorm.machine import keep_freed_memory, pick_dtype
from nanonorm.plots import COLOURS, GREY, pyplot
from nanonorm.typed import Count
from scripts.speed.parts import Parts, make_step
from scripts.speed.peers import Peers, llama_of, train_hf, write_checkpoint
from scripts.speed.turns import Shape, finish, read_flags, take_turns
from scripts.studies.tables import markdown

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
class Where(Shape):
    """What is profiled."""

    n_embd: tuple[Count, ...] = (64, 256)  # widths
    norm: tuple[Literal[*NORMS], ...] = ("rmsnorm",)  # of this code's bars
    llama: bool = True  # a bar for transformers' Llama in a plain loop
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of autocast; auto: as train.py chooses
    iters: Count = 5  # profiled steps
    figure: str | None = None  # .png for the stacked bars (needs matplotlib)


def step_of(k: Where, who: str, width: int):
    """() that does one step of "llama", or of this code with the norm `who`."""
    dtype = str(pick_dtype(k.dtype, torch.device("cpu"), width)).removeprefix("torch.")
    shape = {f.name: getattr(k, f.name) for f in fields(Shape)}
    if who != "llama":
        keep_freed_memory()
        return make_step(Parts(**shape, dtype=dtype), width, norm=who)
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), *llama_of(k, width), seed=0)
        return train_hf(Peers(**shape), Path(folder), dtype, "")


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
    if k.figure:
        pyplot()  # if it is missing, say so now and not after minutes
    contestants = {"Hugging Face Llama": "llama"} if k.llama else {}
    contestants |= {norm: norm for norm in k.norm}
    results = {}
    for width in k.n_embd:
        rows = results[width] = measure(k, contestants, width)
        cells = [[kind, *(f"{r[kind]:.0f}" for r in rows.values())] for kind in KINDS]
        cells.append(["total", *(f"{sum(r.values()):.0f}" for r in rows.values())])
        print(f"\n{markdown(cells, [f'n_embd {width}, ms', *rows])}")
    if k.figure:
        draw(k.figure, results)
    finish(results)


if __name__ == "__main__":
    with one_line_errors():
        main()
