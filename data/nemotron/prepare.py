"""The STEM part of Nemotron-Post-Training-Dataset-v2, or local text, in the tokens of a checkpoint.

    python data/nemotron/prepare.py --tokenizer=meta-llama/Llama-3.2-1B-Instruct --out_dir=data/nemotron_llama
    python data/nemotron/prepare.py --tokenizer=PATH --text=train.txt --val_text=valid.txt

What CoupledNorm's students are distilled on. The first streams conversations from the Hugging Face hub (which
may ask for a log-in: HF_TOKEN) and writes each as the checkpoint's own chat template does, special tokens and
all, with an end token behind it; without a template, as plain text. The second reads UTF-8 files in which a
line that holds only <|endoftext|> follows every document. train.py never runs this unasked.
"""

import itertools
from dataclasses import dataclass
from pathlib import Path

from data import prepare  # not found? pip install -e .
from data.hub import HubSet
from data.local import check_splits, local_splits
from data.tokenizer import Tokenizer, TokenizerJson, open_tokenizer, render
from nanonorm.cli import parse_flags
from nanonorm.errors import BadInput, one_line_errors
from nanonorm.files import hold_folder
from nanonorm.typed import Count

HUB_NAME = "nvidia/Nemotron-Post-Training-Dataset-v2"


@dataclass
class Knobs:
    tokenizer: str | None = None  # file, folder or hub id: the checkpoint's own
    text: str | None = None  # local file of training documents; None: the hub
    val_text: str | None = None  # local file of validation documents; goes with --text
    split: str = "stem"  # of the hub's data set
    conversations: Count = 100_000  # to train on
    val_conversations: Count = 500  # the first of the split
    revision: str | None = None  # of the data set; None: the newest
    out_dir: str | None = None  # folder to write; None: the folder of this file


class Rendered(Tokenizer):
    """A tokenizer for conversations that its chat template has written: special tokens are what they spell,
    and the template has put the begin token where it belongs."""

    def __init__(self, own: TokenizerJson):
        super().__init__(own.files, own.name)
        self.own, self.core, self.vocab_size = own, own.core, own.vocab_size
        self.eot_id, self.end_token, self.end_ids = own.eot_id, own.end_token, own.end_ids

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        self.core.encode_special_tokens = False
        try:
            return [row.ids for row in self.core.encode_batch_fast(texts, add_special_tokens=False)]
        finally:
            self.core.encode_special_tokens = True

    def keeps(self, text: str, ids: list[int]) -> bool:
        found = self.core.decode(ids, skip_special_tokens=False)
        if self.core.normalizer is None:
            return found == text
        normal = self.core.normalizer.normalize_str
        return normal(found) == normal(text)


def written(messages: list[dict], tokenizer: Tokenizer) -> str:
    """A conversation as one text."""
    template = getattr(tokenizer, "template", None)
    if template is None:
        return "\n\n".join(message["content"] for message in messages)
    return render(template, tokenizer.name, reply=False, messages=messages, **tokenizer.special)


def conversations(rows, tokenizer: Tokenizer, first: int, last: int):
    """Yield some of the conversations in rows {"messages": [{"role", "content"}, ...]} as parts."""
    for row in itertools.islice(rows, first, last):
        messages = [{"role": m["role"], "content": m["content"]} for m in row["messages"]]
        yield written(messages, tokenizer), True


def main():
    knobs, explicit = parse_flags(Knobs, usage=__doc__)
    if knobs.tokenizer is None:
        raise BadInput("name the checkpoint whose tokens are wanted: --tokenizer=PATH or a hub id")
    of_hub = {"split", "conversations", "val_conversations", "revision"}
    check_splits(knobs.text, knobs.val_text, explicit & of_hub)
    if knobs.text is None:
        hub = HubSet(HUB_NAME, "give local files with --text=... --val_text=...", knobs.revision)
    own = writer = open_tokenizer(knobs.tokenizer)
    with hold_folder(knobs.out_dir or Path(__file__).resolve().parent) as out_dir:
        if knobs.text is None:
            n_val, last = knobs.val_conversations, knobs.val_conversations + knobs.conversations
            streams = (
                lambda: conversations(hub.rows(knobs.split), own, n_val, last),
                lambda: conversations(hub.rows(knobs.split), own, 0, n_val),
            )
            source = f"{knobs.split} of {hub.source}"
            if getattr(own, "template", None) is not None:
                writer = Rendered(own)
        else:
            streams, source = local_splits(knobs.text, knobs.val_text)
        prepare(*streams, out_dir, own.vocab_size, source, writer)


if __name__ == "__main__":
    with one_line_errors():
        main()
