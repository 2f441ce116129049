"""What the tables of speed share: the shape of the networks, a table of steps, a folder to go on in.

Steps take turns (nanonorm/timing.py): whatever the machine does meanwhile falls on all. So a ratio of two
times of the same round is worth having; a millisecond alone is not.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from model import ModelConfig
from nanonorm.errors import BadInput
from nanonorm.files import json_object, write_json
from nanonorm.tables import markdown
from nanonorm.timing import ratio, time_rounds
from nanonorm.typed import Count


@dataclass
class Shape:
    """Of the networks that are timed, and of a training step."""

    n_layer: Count = 8  # blocks
    n_head: Count = 16  # attention heads
    vocab_size: Count = 10_000  # token ids
    block_size: Count = 512  # tokens of a training window
    batch_size: Count = 8  # windows of a training step

    def config(self, width: int, **knobs) -> ModelConfig:
        """Raises: ModelError."""
        shape = dict(vocab_size=self.vocab_size, block_size=self.block_size, n_layer=self.n_layer)
        return ModelConfig(**shape, n_head=self.n_head, n_embd=width, **knobs)


def refuse_other_settings(folder: Path, asked: dict, flag: str):
    """What a folder's files depend on stands in its settings.json from the first start on. flag: what names
    the folder. Raises: BadInput."""
    path = folder / "settings.json"
    if {each.name for each in folder.iterdir()} <= {path.name}:  # nothing is made yet
        write_json(path, asked)
    begun = json_object(path.read_bytes()) if path.exists() else {}
    for knob, value in json.loads(json.dumps(asked)).items():  # lists for tuples
        if begun.get(knob) != value:
            said = f"{folder} was begun with {knob}={begun.get(knob, 'unknown')}, not {value}"
            raise BadInput(f"{said}; give that, or name another {flag}")


def in_words(ratio: tuple[float, float, float], digits: int = 3) -> str:
    middle, low, high = (f"{value:.{digits}f}" for value in ratio)
    return f"{middle}x {low}-{high}"


def table(title: str, steps: dict, iters: int):
    """Time steps in this process, in turns, and print a row for each."""
    resets = {name: (lambda: None, step) for name, step in steps.items()}
    times, first = time_rounds(resets, 1, iters, torch.device("cpu"), random.Random(0)), next(iter(steps))
    rows = []
    for name, t in times.items():
        rows.append([name, f"{np.median(t):.1f}", "1" if name == first else in_words(ratio(times[first], t))])
    print(f"\n{markdown(rows, [title, 'ms', f'{first} / this, quartiles'])}", flush=True)
