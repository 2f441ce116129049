"""The training step of each variant against the baseline's, interleaved in one process.

    python scripts/speed/parts.py                                          # on this CPU
    python scripts/speed/parts.py --what=step --dtype=bfloat16 --n_embd=256 --n_layer=8 --n_head=16 \\
        --vocab_size=10000 --block_size=512
    python scripts/speed/parts.py --what=protocols --n_embd=128 --batch_size=16 --block_size=128   # GPT-2's
    python scripts/speed/parts.py --what=adapters --n_embd=1024 --n_layer=1 --n_head=16 --adapter_rank=256

Each round runs every alternative once; a ratio is the median over rounds of (first / alternative), with its
quartiles: above 1 the alternative is faster.
"""

import itertools
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from config import Config  # not found? pip install -e .
from data.sampling import train_batch
from model import NORMS, Transformer
from nanonorm.adapters import adapted, put_on
from nanonorm.cli import parse_flags
from nanonorm.errors import needed, one_line_errors
from nanonorm.machine import keep_freed_memory
from nanonorm.ranks import Ranks
from nanonorm.typed import Count, Some
from scripts.speed.tables import Shape, table
from train import Step


@dataclass
class Parts(Shape):
    """What is timed. The shape of the step is the demo's."""

    what: Some[Literal["step", "protocols", "adapters"]] = ("step",)  # tables to print
    n_embd: Some[Count] = (64,)  # widths
    n_layer: Count = 4  # blocks
    n_head: Count = 4  # attention heads
    vocab_size: Count = 2048  # token ids
    block_size: Count = 256  # tokens of a window
    dtype: Literal["float32", "bfloat16"] = "float32"  # of autocast in the step
    adapter_rank: Count = 64  # of LoRA and DoRA
    compiled: bool = False  # the step through torch.compile (half a minute a variant first)
    iters: Count = 9  # timed rounds, after one to warm up


FAR = 2**30  # steps: beyond what is timed
GATES = {"norm": (FAR, FAR), "blend": (-FAR, FAR), "scale": (0, 0)}  # phase -> (gate_start, gate_end)


def training_step(model, tokens, batch_size: int, dtype, compiled=False, lr=0.0, phase="norm", **run):
    """A function that does the next optimizer step of train.py, from gathering its one micro-batch to AdamW.

    tokens: 1-D int16; dtype: bfloat16 is by autocast; phase: of all steps, "blend" with the gate at 1/2. At
    lr 0 the weights stay, so that all rounds do the same work. run: more knobs of config.Config. Raises:
    ModelError if a taper must calibrate and has seen nothing.
    """
    gate_start, gate_end = GATES[phase]
    cfg = Config(block_size=model.config.block_size, batch_size=batch_size, max_iters=FAR, compile=compiled,
                 learning_rate=lr, decay_lr=False, warmup_iters=0, gate_start=gate_start,
                 gate_end=gate_end, **run)  # fmt: skip
    step, counter = Step(model, cfg, torch.device("cpu"), dtype, Ranks()), itertools.count()

    def run():
        k = next(counter)
        step.at(k)
        step(*train_batch(tokens, cfg, k, [0], "cpu"))

    return run


def make_step(k: Parts, width: int, phase="norm", run=None, change=None, **knobs):
    """A whole optimizer step of the model with that width, in that phase. run: knobs of the run; change: what
    is called with the model first."""
    torch.manual_seed(0)
    tokens = torch.randint(k.vocab_size, (1_000_000,)).to(torch.int16)
    model = Transformer(k.config(width, **knobs)).train()
    if phase != "norm":
        window = tokens[None, : k.block_size].long()
        model(window, window)
        model.update_statistics()  # to calibrate on
    if change is not None:
        change(model)
    model.end_token = 0
    dtype = getattr(torch, k.dtype)
    return training_step(model, tokens, k.batch_size, dtype, k.compiled, phase=phase, **run or {})


FAKE = {
    "norm": "layernorm", "taper": "all", "calibration": "mean_scale", "aux_weight": 0.1,
    "anchor_target": "batch",
}  # fmt: skip


def variant_steps(k: Parts, width: int) -> dict:
    """{name: a whole optimizer step} of the model with that width."""
    make, taper = partial(make_step, k, width), {"taper": "internal", "aux_weight": 0.1}
    steps = {"baseline": make(), "baseline again": make()}
    steps |= {f"taper, {phase}": make(phase, **taper) for phase in ("norm", "blend", "scale")}
    steps |= {f"FakeLN, {phase}": make(phase, **FAKE) for phase in ("norm", "blend", "scale")}
    return steps | {norm: make(norm=norm) for norm in NORMS if norm != "rmsnorm"}


GPT2 = {"norm": "layernorm", "positions": "learned", "mlp": "gelu", "bias": True, "dropout": 0.1}
PROTOCOLS = {
    "FakeLN": FAKE,
    "Internal-TaperLN": {"taper": "internal", "aux_weight": 0.1, "calib_skip_first": True},
    "All-TaperLN": {"taper": "all", "aux_weight": 0.1, "calib_skip_first": True},
}


def protocol_steps(k: Parts, width: int) -> dict:
    """{name: a whole optimizer step} of fine-tuning a GPT-2 with that width, by protocol and phase."""
    make = partial(make_step, k, width, run={"mask_end": True, "dropout": GPT2["dropout"]})
    steps = {"vanilla": make(**GPT2), "vanilla again": make(**GPT2)}
    return steps | {
        f"{name}, {phase}": make(phase, **GPT2 | knobs)
        for name, knobs in PROTOCOLS.items()
        for phase in ("norm", "blend", "scale")
    }


def take_pefts_forward(model: Transformer):
    """Have a network's DoRA computed as peft computes it."""
    variants = needed("peft.tuners.lora.variants", "peft")
    for layer in adapted(model).values():
        layer.lora_variant["default"] = variants.DoraLinearVariant


def adapter_steps(k: Parts, width: int) -> dict:
    """{name: a whole optimizer step} of adapters on every matrix of the blocks, whose weights are frozen,
    without a teacher."""
    rank = k.adapter_rank
    lora, dora = (partial(put_on, kind=kind, rank=rank, alpha=2.0 * rank) for kind in ("lora", "dora"))

    def dora_by_peft(model):
        dora(model)
        take_pefts_forward(model)

    changes = {"LoRA": lora, "LoRA again": lora, "DoRA": dora, "DoRA by peft": dora_by_peft}
    return {name: make_step(k, width, change=change) for name, change in changes.items()}


def main():
    k, _ = parse_flags(Parts, __doc__)
    keep_freed_memory()
    # dynamo counts the variants as recompilations of one forward, and would give up after 8
    torch._dynamo.config.recompile_limit = 64
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, medians of {k.iters} rounds")
    shape = f"{k.batch_size} x {k.block_size} tokens, n_layer {k.n_layer}, n_head {k.n_head}, {k.dtype}"
    shape += ", compiled" if k.compiled else ""
    tables = {
        "step": ("training step", variant_steps),
        "protocols": ("fine-tuning step of GPT-2", protocol_steps),
        "adapters": (f"step of adapters of rank {k.adapter_rank}", adapter_steps),
    }
    for d in k.n_embd:
        for what in k.what:
            title, steps_of = tables[what]
            table(f"{title}, {shape}, n_embd {d}", steps_of(k, d), k.iters)


if __name__ == "__main__":
    with one_line_errors():
        main()
