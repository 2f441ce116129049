"""FineWeb-Edu, its sample of 10 billion tokens (Penedo et al. 2024), or local text, in GPT-2's tokens.

    python data/fineweb_edu/prepare.py [--tokenizer=gpt2] [--out_dir=PATH]
    python data/fineweb_edu/prepare.py --text=train.txt --val_text=valid.txt [--tokenizer=PATH]

The first streams sample-10BT of HuggingFaceFW/fineweb-edu from the hub and writes 20 GB of GPT-2's tokens
(of a vocabulary above 65,536 about twice that), so train.py never runs it unasked. Its first documents are
the validation split, the others the training split. The second reads UTF-8 files in which a line that holds
only <|endoftext|> follows every document.
"""

import itertools
from dataclasses import dataclass
from pathlib import Path

from data import prepare  # not found? pip install -e .
from data.hub import HubSet
from data.local import check_splits, local_splits
from data.tokenizer import open_tokenizer
from nanonorm.cli import parse_flags
from nanonorm.errors import BadInput, one_line_errors
from nanonorm.files import hold_folder
from nanonorm.typed import Count

HUB_NAME, SUBSET = "HuggingFaceFW/fineweb-edu", "sample-10BT"


@dataclass
class Knobs:
    text: str | None = None  # local file of training documents; None: the hub
    val_text: str | None = None  # local file of validation documents; goes with --text
    tokenizer: str = "gpt2"  # file, folder or hub id of the tokenizer to use
    val_documents: Count = 10_000  # of the hub's, at the beginning: about 10 million tokens
    documents: Count | None = None  # of the hub's, in all; None: all
    revision: str | None = None  # of the data set; None: the newest
    out_dir: str | None = None  # folder to write; None: the folder of this file


def texts(hub: HubSet, first: int, last: int | None):
    """Yield some of the hub's documents as parts."""
    for row in itertools.islice(hub.rows("train"), first, last):
        yield row["text"], True


def main():
    knobs, explicit = parse_flags(Knobs, usage=__doc__)
    check_splits(knobs.text, knobs.val_text, explicit & {"documents", "val_documents", "revision"})
    n_val, n = knobs.val_documents, knobs.documents
    if n is not None and n <= n_val:
        raise BadInput(f"documents={n} leaves none to train on beside val_documents={n_val}; raise it")
    if knobs.text is None:
        way_out = "give local files with --text=... --val_text=..."
        hub = HubSet(HUB_NAME, way_out, knobs.revision, SUBSET)
    tokenizer = open_tokenizer(knobs.tokenizer)
    with hold_folder(knobs.out_dir or Path(__file__).resolve().parent) as out_dir:
        if knobs.text is None:
            streams, source = ((lambda: texts(hub, n_val, n)), (lambda: texts(hub, 0, n_val))), hub.source
        else:
            streams, source = local_splits(knobs.text, knobs.val_text)
        prepare(*streams, out_dir, tokenizer.vocab_size, source, tokenizer)


if __name__ == "__main__":
    with one_line_errors():
        main()
