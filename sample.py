"""Text from any checkpoint or export.

    python sample.py out/demo --prompt="def main("          # a run folder: folded.pt, model.pt or ckpt.pt
    python sample.py out/demo/unfused.pt --temperature=0    # a model file
    printf "Once upon a time" | python sample.py out/tiny   # the prompt from stdin

Whatever tapers runs at gate 0. The tokenizer is the one the file names: tokenizer.model in its folder.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch

from data.tokenizer import Tokenizer, load_tokenizer
from model import Transformer
from nanonorm.cli import parse
from nanonorm.errors import BadInput, one_line_errors
from nanonorm.machine import pick_device
from nanonorm.run import model_file
from nanonorm.typed import Count, NonNegative, Range, Whole


@dataclass
class Sample:
    """What to generate."""

    prompt: str | None = None  # text to continue; None: stdin if it is piped, else an empty document
    num_samples: Count = 1  # continuations to print
    max_new_tokens: Whole = 200  # tokens to add at most; an end token ends a sample earlier
    temperature: NonNegative = 0.8  # 0: always the likeliest token
    top_k: Count | None = 200  # keep the k likeliest tokens; None: all
    top_p: Annotated[float, Range(1e-9, 1.0)] = 1.0  # keep the fewest tokens with this much probability
    seed: Whole = 1337  # of the sampling
    device: str = "cpu"  # cpu, cuda, ...
    compile: bool = False  # compile the step to the next token: half a minute once, up to 2x for small models
    tokenizer: str | None = None  # a SentencePiece model to use instead of the run's own


def tokenizer_of(model: Transformer, path: Path, override: str | None) -> Tokenizer:
    """The tokenizer that `model`, read from `path`, was trained with. Raises: BadInput if it is not."""
    file = override or path.parent / "tokenizer.model"
    tokenizer = load_tokenizer(file)
    named = model.meta.get("corpus", {}).get("tokenizer_sha256", tokenizer.sha256)
    if tokenizer.sha256 != named:
        raise BadInput(f"{file} is not the tokenizer of {path}; give the right one with --tokenizer=")
    if tokenizer.vocab_size > model.config.vocab_size:
        ids = f"the tokenizer has {tokenizer.vocab_size} ids, {path} only {model.config.vocab_size}"
        raise BadInput(f"{ids}; give its own with --tokenizer=")
    return tokenizer


def read_prompt(prompt: str | None) -> str:
    """The prompt, or what is piped in. Raises: BadInput if it is not UTF-8."""
    piped = prompt is None and sys.stdin is not None and not sys.stdin.isatty()
    try:  # bytes first: what the locale makes of them does not matter
        text = sys.stdin.buffer.read() if piped else os.fsencode(prompt or "")
        return text.decode()
    except UnicodeDecodeError as e:
        raise BadInput(f"the prompt is not UTF-8 at byte {e.start}") from None


def main():
    if sys.stdout is not None:
        sys.stdout.reconfigure(encoding="utf-8", errors="replace")
    cfg, _, words = parse(Sample, sys.argv[1:], usage=__doc__)
    if len(words) != 1:
        raise BadInput(
            "name one run folder or model file: python sample.py out/demo (--help lists the options)"
        )
    path = model_file(words[0])
    model = Transformer.load(path)
    device = pick_device(cfg.device)
    model.to(device)
    tokenizer = tokenizer_of(model, path, cfg.tokenizer)
    prompt = read_prompt(cfg.prompt)
    ids = tokenizer.encode(prompt) or [tokenizer.eot_id]  # documents follow an end token
    idx = torch.tensor([ids], device=device)
    for i in range(cfg.num_samples):
        out = model.generate(
            idx, cfg.max_new_tokens, cfg.temperature, cfg.top_k, cfg.top_p, cfg.seed + i,
            stop_id=tokenizer.eot_id, compile=cfg.compile,
        )  # fmt: skip
        new = [t for t in out[0, len(ids) :].tolist() if t < tokenizer.vocab_size and t != tokenizer.eot_id]
        print(prompt + tokenizer.decode(new))
        if i + 1 < cfg.num_samples:
            print("-" * 40)


if __name__ == "__main__":
    with one_line_errors():
        main()
