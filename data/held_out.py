"""Text to evaluate on, cut as FakeLN's recipe cuts it: a folder of val.bin and meta.json, no train.bin.

    python data/held_out.py --set=openwebtext --out_dir=data/owt_held_out
    python data/held_out.py --set=pile --out_dir=data/pile_held_out           # or pile_filtered
    python data/held_out.py --text=FILE --out_dir=PATH [--tokenizer=PATH]

scripts/evaluate.py reads these, and the validation split of any prepared corpus.

openwebtext: the validation split of data/openwebtext, if that is prepared, else of the hub, by the same call
(54 GB). The recipe tokenizes it in 32 processes, each with a 32nd of the documents, in map batches of at most
512 documents; the stream of a batch is cut into blocks of 1,024 and the rest of it dropped, and so is what
does not fill a last batch of 8 blocks. So here: 4,312 blocks, as the recipe has them, but for documents that
spell <|endoftext|>, which it reads as the token and we as text.

pile, pile_filtered: the first 10,000 records of the hub's pre-tokenized sets, joined and cut into blocks of
1,024. The recipe shuffles the records before; where each is one block long that changes the order alone, and
a remark says so if they are not.

A local text (documents that a line <|endoftext|> follows) is one stream, not cut; evaluate.py cuts it.
"""

import io
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from data import (  # not found? pip install -e .
    HeldOut,
    described,
    dtype_of,
    holds_corpus,
    open_held_out,
    with_bar,
    write_tokenizer,
    write_tokens,
)
from data.hub import HubSet
from data.local import check_files, documents
from data.openwebtext.prepare import HUB_NAME, split_of, texts
from data.tokenizer import Tokenizer, load_tokenizer, open_tokenizer
from nanonorm.cli import parse_flags
from nanonorm.errors import BadInput, one_line_errors
from nanonorm.files import ROOT, atomic_write, hold_folder, sync, write_json
from nanonorm.log import say
from nanonorm.typed import Count

RECORDS = {  # sets that the hub has in GPT-2's tokens, `input_ids` of a row being a record
    "pile": "apollo-research/monology-pile-uncopyrighted-tokenizer-gpt2",
    "pile_filtered": "lucabaroni/apollo-pile-filtered-10k",
}
SETS = ("openwebtext", *RECORDS)
PROCESSES, MAP_BATCH, EVAL_BATCH = 32, 512, 8  # of the recipe: see above
# tokens of a block; how many the recipe evaluates on; ids of the tokenizer that they are of
RECIPE_BLOCK, OWT_BLOCKS, GPT2_IDS = 1024, 4312, 50257
WAY_OUT = "give local text with --text=FILE"


@dataclass
class Knobs:
    set: Literal[*SETS] | None = None  # which of the recipe's sets
    text: str | None = None  # local file of documents, in place of --set
    tokenizer: str | None = None  # file, folder or hub id; None: gpt2, or with --set that of --corpus
    corpus: str | None = None  # prepared OpenWebText; None: data/openwebtext, or the hub if that is missing
    block_size: Count = RECIPE_BLOCK  # tokens of a block of the recipe's sets
    records: Count = 10_000  # of the Pile sets, from the first on
    out_dir: str | None = None  # folder to write


def whole_blocks(tokens: np.ndarray, block_size: int) -> np.ndarray:
    """The stream (n,) without what fills no block at its end."""
    return tokens[: len(tokens) - len(tokens) % block_size]


def cut_in_batches(rows: list[np.ndarray], block_size: int) -> np.ndarray:
    """The documents' tokens (n,) joined within each of the recipe's map batches, in whole blocks, and as many
    of these as fill batches of EVAL_BATCH."""
    kept = [np.empty(0, np.int64)]
    for share in np.array_split(np.arange(len(rows)), PROCESSES):  # contiguous, the longer ones first
        for first in range(0, len(share), MAP_BATCH):
            batch = [rows[i] for i in share[first : first + MAP_BATCH]]
            kept.append(whole_blocks(np.concatenate(batch), block_size))
    return whole_blocks(np.concatenate(kept), EVAL_BATCH * block_size)


def tokens_of(tokenizer: Tokenizer, parts) -> tuple[np.ndarray, dict[str, int]]:
    """(the tokens of a stream (n,), what write_tokens counted). Raises: BadInput."""
    file = io.BytesIO()
    count = write_tokens(tokenizer, with_bar(parts, "tokenize"), file)
    return np.frombuffer(file.getvalue(), dtype_of(tokenizer.vocab_size)), count


def chosen_or_gpt2(knobs: Knobs) -> Tokenizer:
    """--tokenizer, or GPT-2's if none is named. Raises: BadInput, also for an empty name."""
    return open_tokenizer("gpt2" if knobs.tokenizer is None else knobs.tokenizer)


def openwebtext(knobs: Knobs) -> tuple[np.ndarray, Tokenizer, dict]:
    """(tokens (n,), their tokenizer, more for meta.json) of OpenWebText's validation split."""
    if knobs.corpus == "":
        raise BadInput("--corpus= names no folder; leave it out, or name one")
    folder = Path(knobs.corpus) if knobs.corpus else ROOT / "data/openwebtext"
    if knobs.corpus or (folder / "meta.json").exists():
        if knobs.tokenizer is not None:
            raise BadInput(f"{folder} is tokenized already: leave out --tokenizer, or prepare that anew")
        manifest, _, tokens = open_held_out(folder)
        if manifest.block_size:
            raise BadInput(f"{folder} is cut into windows; name the corpus that it was made of")
        tokenizer, source = load_tokenizer(folder / manifest.tokenizer), manifest.source
    else:
        hub = HubSet(HUB_NAME, WAY_OUT)
        tokenizer, source = chosen_or_gpt2(knobs), hub.source
        tokens, _ = tokens_of(tokenizer, texts(split_of(hub)["test"]))
    ends = np.flatnonzero(tokens == tokenizer.eot_id) + 1
    rows = [row for row in np.split(tokens, ends) if len(row)]
    cut = cut_in_batches(rows, knobs.block_size)
    blocks = len(cut) // knobs.block_size
    of_recipe = knobs.block_size == RECIPE_BLOCK and tokenizer.vocab_size == GPT2_IDS
    if of_recipe and blocks != OWT_BLOCKS:
        say(f"{blocks:,} blocks, not the recipe's {OWT_BLOCKS:,}: losses do not compare with FakeLN's")
    about = f"the validation split of {source}, cut as FakeLN's recipe cuts it"
    whole = {"set": knobs.set} if of_recipe and blocks == OWT_BLOCKS else {}
    return cut, tokenizer, {"source": about, "block_size": knobs.block_size, **whole}


def pile(knobs: Knobs) -> tuple[np.ndarray, Tokenizer, dict]:
    """(tokens (n,), their tokenizer, more for meta.json) of pre-tokenized records. Raises: BadInput."""
    hub = HubSet(RECORDS[knobs.set], WAY_OUT)
    tokenizer = chosen_or_gpt2(knobs)
    rows = []
    for row in itertools.islice(hub.rows("train"), knobs.records):
        rows.append(np.asarray(row["input_ids"], dtype=np.int64))
    tokens = np.concatenate([np.empty(0, np.int64), *rows])
    if (top := tokens.max(initial=-1)) >= tokenizer.vocab_size:
        ids = f"{hub.name} holds token id {top}, {tokenizer.name} has {tokenizer.vocab_size}"
        raise BadInput(f"{ids}; give GPT-2's with --tokenizer=")
    lengths = {len(row) for row in rows}
    if lengths != {knobs.block_size}:
        found = f"records have {min(lengths, default=0)} to {max(lengths, default=0)} tokens"
        say(f"{found}: the recipe shuffles them before it cuts, so blocks begin elsewhere than here")
    cut = whole_blocks(tokens, knobs.block_size)[: knobs.records * knobs.block_size]
    about = f"the first {len(rows):,} records of {hub.source}"
    of_recipe = len(rows) == Knobs.records and lengths == {knobs.block_size} == {RECIPE_BLOCK}
    whole = {"set": knobs.set} if of_recipe else {}
    return cut, tokenizer, {"source": about, "block_size": knobs.block_size, **whole}


def local(knobs: Knobs) -> tuple[np.ndarray, Tokenizer, dict]:
    """(tokens (n,), their tokenizer, more for meta.json) of a local text. Raises: BadInput."""
    check_files(knobs.text)
    tokenizer = chosen_or_gpt2(knobs)
    tokens, count = tokens_of(tokenizer, documents(knobs.text))
    known = {"val_bytes": count["bytes"] or None, "val_documents": count["documents"]}
    return tokens, tokenizer, {"source": knobs.text, **known}


def write_set(folder: Path, tokens: np.ndarray, tokenizer: Tokenizer, more: dict):
    """Write val.bin, the tokenizer's files and, last, meta.json. Raises: BadInput."""
    if not len(tokens):
        raise BadInput(f"{more['source']} holds no text, or not a batch of blocks; give more")
    if not more["source"].isprintable():
        raise BadInput(f"meta.json cannot hold the source {more['source']!a}; give it a printable name")
    if (folder / "train.bin").exists():
        raise BadInput(f"{folder} holds a corpus to train on; name another --out_dir")
    again = holds_corpus(folder)
    meta = HeldOut(**described(tokenizer), val_tokens=len(tokens), **more).model_dump(exclude_none=True)
    with atomic_write(folder / "val.bin") as f:
        f.write(tokens.astype(meta["dtype"]).tobytes())
        sync(f)
        (folder / "meta.json").unlink(missing_ok=True)  # from here on an old one would describe other files
    write_tokenizer(folder, tokenizer, again)
    write_json(folder / "meta.json", meta, indent=2)


def main():
    knobs, explicit = parse_flags(Knobs, usage=__doc__)
    if (knobs.set is None) == (knobs.text is None):
        raise BadInput(f"give either --set, one of {', '.join(SETS)}, or --text=FILE")
    reads = {None: set(), "openwebtext": {"corpus", "block_size"}}.get(knobs.set, {"block_size", "records"})
    for name in sorted(explicit & {"corpus", "block_size", "records"} - reads):
        source = "--text" if knobs.set is None else f"--set={knobs.set}"
        raise BadInput(f"{source} does not read --{name}; leave it out")
    if not knobs.out_dir:
        raise BadInput("name the folder to write: --out_dir=data/NAME")
    make = local if knobs.set is None else openwebtext if knobs.set == "openwebtext" else pile
    tokens, tokenizer, more = make(knobs)
    with hold_folder(knobs.out_dir) as folder:
        write_set(folder, tokens, tokenizer, more)
    blocks = f", {len(tokens) // knobs.block_size:,} blocks" if "block_size" in more else ""
    print(f"wrote {len(tokens):,} tokens{blocks}, of {more['source']}, to {knobs.out_dir}")


if __name__ == "__main__":
    with one_line_errors():
        main()
