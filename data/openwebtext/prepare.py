"""OpenWebText (Gokaslan and Cohen 2019), or local text, as a corpus in GPT-2's tokens.

    python data/openwebtext/prepare.py [--tokenizer=gpt2] [--out_dir=PATH]
    python data/openwebtext/prepare.py --text=train.txt --val_text=valid.txt [--tokenizer=PATH]

The first fetches the data set from the Hugging Face hub: 54 GB in the hub client's cache, which HF_HOME
moves, and 18 GB of tokens. So train.py never runs it unasked. The second reads UTF-8 files in which a line
that holds only <|endoftext|> follows every document.

About 0.05% of the documents, 4,007, are the validation split, by the very call with which FakeLN's recipe and
nanoGPT choose them. Each document is followed by an end-of-text token, and a split is one stream from which
training draws random windows: a departure from that recipe, which cuts the stream into fixed blocks of 1,024
and visits them in random order. data/held_out.py cuts the validation split as the recipe does.
"""

from dataclasses import dataclass
from pathlib import Path

from data import prepare  # not found? pip install -e .
from data.hub import HubSet
from data.local import check_splits, local_splits
from data.tokenizer import open_tokenizer
from nanonorm.cli import parse_flags
from nanonorm.errors import one_line_errors
from nanonorm.files import hold_folder
from nanonorm.log import say

# The recipe names `openwebtext`, a script that today's `datasets` does not run; this is the same data set by
# its author, without the script. The split is drawn by row number, so it is the recipe's only if the rows
# are as many and in the same order as the script gave them. Not known for every revision: it is checked.
HUB_NAME = "Skylion007/openwebtext"
ROWS, VAL_TOKENS = 8_013_769, 4_434_897  # of the recipe's, the second as nanoGPT's README counts them
SPLIT = {"test_size": 0.0005, "seed": 2357, "shuffle": True}
AT_ONCE = 1000  # rows read from the disk together


@dataclass
class Knobs:
    text: str | None = None  # local file of training documents; None: the hub
    val_text: str | None = None  # local file of validation documents; goes with --text
    tokenizer: str = "gpt2"  # file, folder or hub id of the tokenizer to use
    hub: str = HUB_NAME  # the data set's id on the hub
    revision: str | None = None  # of that data set; None: the newest
    out_dir: str | None = None  # folder to write; None: the folder of this file


def split_of(hub: HubSet) -> dict:
    """{"train", "test"} of the hub's data set, each a datasets.Dataset, split as the recipe does.

    Raises: BadInput.
    """
    rows = hub.whole("train")
    if len(rows) != ROWS:
        say(f"{hub.source} has {len(rows):,} rows, not {ROWS:,}: its split is not that of FakeLN's recipe")
    return rows.train_test_split(**SPLIT)


def texts(rows):
    """Yield the documents of a datasets.Dataset as parts."""
    for some in rows.iter(batch_size=AT_ONCE):
        for text in some["text"]:
            yield text, True


def main():
    knobs, explicit = parse_flags(Knobs, usage=__doc__)
    check_splits(knobs.text, knobs.val_text, explicit & {"hub", "revision"})
    if knobs.text is None:
        hub = HubSet(knobs.hub, "give local files with --text=... --val_text=...", knobs.revision)
    tokenizer = open_tokenizer(knobs.tokenizer)
    with hold_folder(knobs.out_dir or Path(__file__).resolve().parent) as out_dir:
        if knobs.text is None:
            split, source = split_of(hub), hub.source
            streams = (lambda: texts(split["train"])), (lambda: texts(split["test"]))
        else:
            streams, source = local_splits(knobs.text, knobs.val_text)
        meta = prepare(*streams, out_dir, tokenizer.vocab_size, source, tokenizer)
    if knobs.text is None and tokenizer.vocab_size == 50257 and meta["val_tokens"] != VAL_TOKENS:
        said = f"the validation split has {meta['val_tokens']:,} tokens, nanoGPT's {VAL_TOKENS:,}"
        say(f"{said}: the rows are in another order, so losses on it do not compare with FakeLN's")


if __name__ == "__main__":
    with one_line_errors():
        main()
