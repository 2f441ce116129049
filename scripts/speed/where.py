"""Where the time of a training step goes, by kind of operator.

    python scripts/speed/where.py                                        # this code, and Hugging Face's Llama
    python scripts/speed/where.py --norm=rmsnorm,layernorm,coupled,cbwc  # a column for each norm

Self time of each operator from torch.profiler, one step after three to warm up, the median over --iters
profiles; contestants take turns. The kinds are read off the operators' names, so a product inside the
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
from nanonorm.cli import finish, parse_flags
from nanonorm.errors import one_line_errors
from nanonorm.machine import keep_freed_memory, pick_dtype
from nanonorm.tables import markdown
from nanonorm.timing import take_turns
from nanonorm.typed import Count
from scripts.speed.parts import Parts, make_step
from scripts.speed.peers import Peers, train_hf, write_checkpoint
from scripts.speed.tables import Shape

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
    norm: tuple[Literal[*NORMS], ...] = ("rmsnorm",)  # of this code
    llama: bool = True  # transformers' Llama in a plain loop as well
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of autocast; auto: as train.py chooses
    iters: Count = 5  # profiled steps


def step_of(k: Where, who: str, width: int):
    """() that does one step of "HF Llama", or of this code with the norm `who`."""
    dtype = str(pick_dtype(k.dtype, torch.device("cpu"), width)).removeprefix("torch.")
    shape = {f.name: getattr(k, f.name) for f in fields(Shape)}
    if who != "HF Llama":
        keep_freed_memory()
        return make_step(Parts(**shape, dtype=dtype), width, norm=who)
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), k.config(width), seed=0)
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


def measure(k: Where, width: int) -> dict[str, dict[str, float]]:
    """{who: {kind: median ms}}."""
    players = {who: (work, k, who, width) for who in (*(["HF Llama"] if k.llama else []), *k.norm)}
    medians = {}
    for who, (_, *steps) in take_turns(players, k.iters, seed=0).items():
        medians[who] = {kind: float(np.median([t[kind] for t in steps])) for kind in KINDS}
    return medians


def main():
    k, _ = parse_flags(Where, __doc__)
    results = {}
    for width in k.n_embd:
        rows = results[width] = measure(k, width)
        cells = [[kind, *(f"{r[kind]:.0f}" for r in rows.values())] for kind in KINDS]
        cells.append(["total", *(f"{sum(r.values()):.0f}" for r in rows.values())])
        print(f"\n{markdown(cells, [f'n_embd {width}, ms', *rows])}")
    finish(results)


if __name__ == "__main__":
    with one_line_errors():
        main()
