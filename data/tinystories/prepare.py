"""TinyStories (Eldan and Li 2023, arXiv 2305.07759), or local text in its format, as a corpus.

    python data/tinystories/prepare.py [--vocab_size=10000] [--out_dir=PATH]
    python data/tinystories/prepare.py --text=train.txt --val_text=valid.txt [--tokenizer=PATH]

The first reads roneneldan/TinyStories from the Hugging Face hub. The second reads UTF-8 files in which every
story is followed by a line that holds only <|endoftext|>.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

from data import chosen_tokenizer, prepare  # not found? pip install -e .
from data.hub import HubSet
from data.local import check_splits, local_splits
from data.tokenizer import check_vocab_size
from nanonorm.cli import parse_flags
from nanonorm.errors import one_line_errors
from nanonorm.files import hold_folder
from nanonorm.typed import Count

HUB_NAME = "roneneldan/TinyStories"


@dataclass
class Knobs:
    text: str | None = None  # local file of training stories; None: the hub
    val_text: str | None = None  # local file of validation stories; goes with --text
    vocab_size: Count = 10_000  # token ids, 65536 at most
    tokenizer: str | None = None  # file, folder or hub id of a tokenizer to use; None: train one on the text
    out_dir: str | None = None  # folder to write; None: the folder of this file


def download(hub: HubSet, out_dir: Path) -> tuple[Path, Path]:
    """Write the hub's splits to local files, since the training split is read twice.

    Returns: their paths (train, val).
    """
    folder = out_dir / "download.tmp"
    folder.mkdir(exist_ok=True)
    for split in ("train", "validation"):
        hub.save_texts(split, folder / f"{split}.txt")
    return folder / "train.txt", folder / "validation.txt"


def main():
    knobs, explicit = parse_flags(Knobs, usage="python data/tinystories/prepare.py [--key=value ...]")
    check_vocab_size(knobs.vocab_size)
    check_splits(knobs.text, knobs.val_text)
    tokenizer = chosen_tokenizer(knobs.tokenizer, explicit)

    hub = None if knobs.text else HubSet(HUB_NAME, "give local files with --text=... --val_text=...")
    with hold_folder(knobs.out_dir or Path(__file__).resolve().parent) as out_dir:
        try:
            texts = download(hub, out_dir) if hub else (knobs.text, knobs.val_text)
            splits, source = local_splits(*texts)
            prepare(*splits, out_dir, knobs.vocab_size, hub.source if hub else source, tokenizer)
        finally:
            if hub:
                shutil.rmtree(out_dir / "download.tmp", ignore_errors=True)


if __name__ == "__main__":
    with one_line_errors():
        main()
