"""Text from any checkpoint, export or pretrained model.

    python sample.py out/demo --prompt="def main("          # a run folder: folded.pt, model.pt or ckpt.pt
    python sample.py out/demo/unfused.pt --temperature=0    # a model file
    printf "Once upon a time" | python sample.py out/tiny   # the prompt from stdin
    python sample.py Qwen/Qwen3-0.6B --chat=True --prompt=Hi  # a Hugging Face folder, or a model of the hub
    python sample.py model.gguf --chat=True --prompt=Hi     # a GGUF file: llama.cpp's, Ollama's

Whatever tapers runs at gate 0. The tokenizer is the one in the same folder. A begin token and a chat template
are used where the tokenizer has them, and any of its end tokens ends a sample.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch

from data.tokenizer import Tokenizer, home_of, load_tokenizer, open_tokenizer
from forms import from_file, types_of
from model import Transformer
from nanonorm.cli import parse
from nanonorm.errors import BadInput, one_line_errors
from nanonorm.log import say
from nanonorm.machine import compiler_works, pick_device
from nanonorm.run import checkpoint_step, open_model
from nanonorm.typed import Count, NonNegative, Range, Seed, Whole


@dataclass
class Sample:
    """What to generate."""

    prompt: str | None = None  # text to continue; None: stdin if it is piped, else an empty document
    num_samples: Count = 1  # continuations to print
    max_new_tokens: Whole = 200  # tokens to add at most; an end token ends a sample earlier
    temperature: NonNegative = 0.8  # 0: always the likeliest token
    top_k: Count | None = 200  # keep the k likeliest tokens; None: all
    top_p: Annotated[float, Range(1e-9, 1.0)] = 1.0  # keep the fewest tokens with this much probability
    seed: Seed = 1337  # of all samples, drawn together: the first of three is not that of a single draw
    device: str = "auto"  # cpu, cuda, ...; auto: a GPU if there is one
    compile: bool = False  # compile the step to the next token: half a minute once, up to 2x for small models
    tokenizer: str | None = None  # file, folder or hub id of a tokenizer to use instead of the model's own
    chat: bool = False  # the prompt is a user's turn in the chat template, and the reply alone is printed


def tokenizer_of(model: Transformer, path: Path, override: str | None) -> Tokenizer:
    """The tokenizer that `model`, read from `path`, was trained with. Raises: BadInput if it is not."""
    tokenizer = load_tokenizer(home_of(path)) if override is None else open_tokenizer(override)
    named = model.meta.get("corpus", {}).get("tokenizer_sha256", tokenizer.sha256)
    if tokenizer.sha256 != named:
        remedy = "give the right one with --tokenizer="
        if override is not None:
            remedy += ", or leave that out"
        raise BadInput(f"{tokenizer.name} is not the tokenizer of {path}; {remedy}")
    if tokenizer.vocab_size > model.config.vocab_size:
        ids = f"the tokenizer has {tokenizer.vocab_size} ids, {path} only {model.config.vocab_size}"
        raise BadInput(f"{ids}; give its own with --tokenizer=")
    return tokenizer


def prompt_ids(tokenizer: Tokenizer, prompt: str, chat: bool, sink_token: int | None = None) -> list[int]:
    """What the model continues; a sink_token is in front of it already. Raises: BadInput for a chat without a
    template."""
    begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    ids = begin + tokenizer.encode(prompt)
    if chat:
        ids = tokenizer.chat([{"role": "user", "content": prompt}])
    ids = ids[1:] if ids[:1] == [sink_token] else ids
    return ids or [tokenizer.eot_id]  # documents follow an end token


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
    device = pick_device(cfg.device)
    if cfg.compile:
        compiler_works(device)
    file, path = open_model(words[0])
    model = from_file(file, path).to(device)
    if len(types := types_of(model)) > 1:  # which a product with a bias does not take
        model = model.to(types[0])
    tokenizer = tokenizer_of(model, path, cfg.tokenizer)
    prompt = read_prompt(cfg.prompt)
    ids = prompt_ids(tokenizer, prompt, cfg.chat, model.config.sink_token)
    before = len(tokenizer.decode(ids))
    rows = model.generate(
        torch.tensor([ids] * cfg.num_samples), cfg.max_new_tokens, cfg.temperature, cfg.top_k, cfg.top_p,
        cfg.seed, stop_id=tuple(sorted(tokenizer.end_ids)), compile=cfg.compile,
        vocab_size=tokenizer.vocab_size,
    )  # fmt: skip
    if (step := checkpoint_step(model.meta)) is not None:
        say(f"{path} is a checkpoint, at step {step:,}")
    for i, row in enumerate(rows.tolist()):
        if i:
            print("-" * 40)
        new = [t for t in row[len(ids) :] if t not in tokenizer.end_ids]  # they add no text
        reply = tokenizer.decode(ids + new)[before:]  # some take the space off the first word of a text
        print(reply if cfg.chat else prompt + reply)


if __name__ == "__main__":
    with one_line_errors():
        main()
