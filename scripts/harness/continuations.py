"""Multiple choice made of held-out texts: how one goes on, among four ends from elsewhere in the same text.

    python scripts/harness/continuations.py OUT.jsonl stories.txt wiki.txt
    python scripts/harness/run.py DIR --local --choices=OUT.jsonl --tasks local_choice

The small stand-in for the tasks on the hub. An item is {"start": 24 words, "ends": five times 8 words,
"answer"}; every text gives as many, of passages that no item shares with another, within documents, which a
line <|endoftext|> ends. A network that knows nothing is right in a fifth.
"""

import json
import sys
from dataclasses import dataclass

import numpy as np

from data.local import documents  # not found? pip install -e .
from nanonorm.cli import check_out, parse
from nanonorm.errors import BadInput, one_line_errors
from nanonorm.files import atomic_write
from nanonorm.typed import Count, Seed

START, END, CHOICES = 24, 8, 5  # words, words, ends of an item


@dataclass
class Knobs:
    items: Count = 1000  # of all texts together; rounded down, as each gives as many
    seed: Seed = 0  # of the passages and their false ends


def passages(path: str) -> list[list[str]]:
    """Stretches of START + END words, one after another, none of which two documents share."""
    found, size = [], START + END
    text = "".join(part + "\0" * ends for part, ends in documents(path))
    for words in map(str.split, text.split("\0")):
        found += [words[i : i + size] for i in range(0, len(words) - size + 1, size)]
    return found


def items(path: str, count: int, rng) -> list[dict]:
    """Raises: BadInput for a text that is too short, or repeats itself."""
    found = passages(path)
    if len(found) < CHOICES * count:
        need = f"{count} items need {CHOICES * count}; give more text"
        raise BadInput(f"{path} has {len(found)} passages, {need}")
    made = []
    for passages_of_item in rng.permutation(len(found))[: CHOICES * count].reshape(count, CHOICES):
        words = [found[i] for i in passages_of_item]
        order = rng.permutation(CHOICES)
        ends = [" ".join(words[i][START:]) for i in order]
        if len(set(ends)) < CHOICES:
            raise BadInput(f"{path} repeats itself: an item would have an end twice; take another --seed")
        made.append({"start": " ".join(words[0][:START]), "ends": ends, "answer": int(order.argmin())})
    return made


def main():
    k, _, words = parse(Knobs, sys.argv[1:], usage=__doc__)
    if len(words) < 2:
        raise BadInput("name the file to write, OUT.jsonl, and held-out texts to make it of")
    out, *texts = words
    check_out("OUT", out, ".jsonl")
    if k.items < len(texts):
        raise BadInput(f"--items={k.items} leaves a text without; ask for {len(texts)} at least")
    rng = np.random.default_rng(k.seed)
    made = [item for path in texts for item in items(path, k.items // len(texts), rng)]
    with atomic_write(out, "w") as f:
        f.writelines(json.dumps(item) + "\n" for item in made)
    print(f"wrote {len(made):,} items to {out}")


if __name__ == "__main__":
    with one_line_errors():
        main()
