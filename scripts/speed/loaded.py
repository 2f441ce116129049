"""Checkpoints of GPT-2's and Llama's shapes, loaded here and by transformers: prefill and decoding in turns.

    python scripts/speed/loaded.py                        # GPT-2 small and Llama 3.2 1B, random weights
    python scripts/speed/loaded.py --shape=gpt2 --iters=20

transformers writes a folder with random weights; both read it. "folded" is the same network with every norm
tapered, at gate 0 and folded, as a run would leave it. A contestant is a process of its own; they take turns,
in a fresh random order each round, first everyone eager, then everyone compiled. A ratio is the median over
rounds of (this / nanonorm of the same runtime), both of the same round, with its quartiles: above 1 it takes
longer than ours. Logits are compared before anything is timed. Llama needs 25 GB of disk and 17 of memory.
"""

import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from begin import begun_from  # not found? pip install -e .
from bench import hardware
from forms import FOLD_TOLERANCE, fold, from_file
from model import Transformer
from nanonorm.errors import BadInput, one_line_errors
from nanonorm.run import open_model
from nanonorm.typed import Count, Whole
from scripts.exports import needed_transformers
from scripts.speed.peers import decode_of_hf, prefill_of_hf, prefill_of_ours
from scripts.speed.turns import finish, ratios, read_flags, release_garbage, take_turns, timed_turns

LLAMA3 = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 32.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip
SHAPES = {  # name -> (class of transformers, its configuration)
    "gpt2": ("GPT2LMHeadModel", {}),
    "llama": ("LlamaForCausalLM", {
        "vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    "tiny": ("LlamaForCausalLM", {
        "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}),
}  # fmt: skip


@dataclass
class Loaded:
    """What is compared."""

    shape: tuple[Literal[*SHAPES], ...] = ("gpt2", "llama")  # tiny: for a try
    mode: tuple[Literal["prefill", "decode"], ...] = (
        "prefill",
        "decode",
    )  # a prompt's last logits; new tokens
    runtime: tuple[Literal["eager", "compiled"], ...] = ("eager", "compiled")  # compiled needs a C++ compiler
    seq: Count = 128  # tokens of the prompt, for prefill; decode starts from 8
    new_tokens: Count = 8  # tokens that one round of decode adds
    iters: Count = 12  # timed rounds, after one to warm up
    seed: Whole = 1337  # of weights, tokens and the order in a round
    out: str | None = None  # .json file for the numbers


def make_checkpoint(folder: Path, shape: str, seed: int):
    """A folder as transformers writes it, float32, random weights and gains."""
    transformers, (name, config) = needed_transformers(), SHAPES[shape]
    torch.manual_seed(seed)
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**config))
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p.add_(0.1 * torch.randn_like(p))
    model.save_pretrained(folder)


def prompt_of(length: int) -> torch.Tensor:
    return torch.randint(300, (1, length), generator=torch.Generator().manual_seed(0))


def ours(folder: Path, folded: bool) -> Transformer:
    """The checkpoint loaded here; folded: with every norm tapered away."""
    file, path = open_model(str(folder))
    model = from_file(file, path)
    if folded:
        model = begun_from(file, replace(model.config, taper="all"), path)
        model.train()(prompt_of(64), last_only=True)
        model.update_statistics()
        model.calibrate()
        for norm in model.taper_norms().values():
            norm.c *= 0.1  # nothing trained this network to hold its scale
        model.set_phase("scale")
        model = fold(model)
    return model.eval().requires_grad_(False)


def theirs(folder: Path):
    return needed_transformers().AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def step_of(k: Loaded, name: str, folder: Path, mode: str, runtime: str):
    """() that does the work of a contestant once."""
    how = "" if runtime == "eager" else "compiled"
    idx = prompt_of(k.seq if mode == "prefill" else 8)
    if name == "HF":
        model = theirs(folder)
        if mode == "prefill":
            return prefill_of_hf(model, idx, how)
        return decode_of_hf(model, idx, k.new_tokens, how and "compiled static cache")
    model = ours(folder, folded=name != "nanonorm")
    if mode == "prefill":
        return prefill_of_ours(model, idx, how)
    return lambda: model.generate(idx, k.new_tokens, temperature=0, compile=bool(how))


def work(k: Loaded, name: str, folder: Path, mode: str, runtime: str):
    """A contestant: yields once when it is ready, then the median ms of each turn."""
    torch._inductor.config.cpp_wrapper = mode == "decode"  # as generate() has it
    step = step_of(k, name, folder, mode, runtime)
    step()
    release_garbage()
    yield "ready"
    yield from timed_turns(step)


def compare(folder: Path, shape: str):
    """Raises: BadInput unless both give the same logits."""
    idx = prompt_of(64)
    with torch.inference_mode():
        a, b = ours(folder, folded=False)(idx), theirs(folder)(idx).logits
    error = ((a - b).abs().max() / b.abs().max()).item()
    if not error <= FOLD_TOLERANCE[torch.float32]:
        raise BadInput(f"{shape}: logits differ by {error:.1e} of their scale, so a time means nothing")
    print(f"{shape}: the same logits, to {error:.0e} of their scale", flush=True)


def measure(k: Loaded, folder: Path, shape: str, mode: str, runtime: str) -> list[dict]:
    """The rows of one shape, mode and runtime, printed as they come."""
    names = ("nanonorm", "nanonorm folded", "HF")
    said = take_turns({n: (work, k, n, folder, mode, runtime) for n in names}, 1 + k.iters, k.seed)
    times = {name: np.array(turns[2:]) for name, turns in said.items()}
    rows = []
    for name, (ms, middle, low, high) in ratios(times, to="nanonorm").items():
        row = dict(shape=shape, mode=mode, runtime=runtime, name=name, ms=ms,
                   ratio=middle, ratio_q1=low, ratio_q3=high)  # fmt: skip
        rows.append(row)
        cells = (shape, mode, runtime, name, f"{row['ms']:.1f}", f"{middle:.2f}x {low:.2f}-{high:.2f}")
        print(f"| {' | '.join(cells)} |", flush=True)
    return rows


def main():
    k = read_flags(Loaded, __doc__)
    transformers, machine = needed_transformers(), hardware(torch.device("cpu"))
    print(f"machine  {machine}; torch {torch.__version__}, transformers {transformers.__version__}; float32")
    work = f"prefill: a prompt of {k.seq}; decode: {k.new_tokens} tokens after 8"
    print(f"measure  batch 1; {work}; {k.iters} rounds\n")
    figures = []
    with tempfile.TemporaryDirectory() as temporary:
        for shape in k.shape:
            folder = Path(temporary) / shape
            make_checkpoint(folder, shape, k.seed)
            compare(folder, shape)
            print("\n| shape | mode | runtime | who | ms | this / nanonorm, quartiles |")
            print("|---|---|---|---|---:|---:|")
            for mode in k.mode:
                for runtime in k.runtime:
                    figures += measure(k, folder, shape, mode, runtime)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    finish({"settings": asdict(k), "machine": machine, **versions, "rows": figures}, k.out)


if __name__ == "__main__":
    with one_line_errors():
        main()
