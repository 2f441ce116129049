"""A corpus of prepared ones, cut into windows that begin with the tokenizer's begin token.

    python data/windows.py data/stories data/books --block_size=256 --out_dir=data/mixed

A trained network treats the first position unlike any other, and one that learned with a begin token there
expects it. train.py and scripts/couple.py read such a corpus window by window, with this block_size and no
other; scripts/evaluate.py and stream.py read it in blocks of any other as one stream, and say so.

Each corpus gives as much, from all over its text: --train_tokens of its training split and --val_tokens of
its validation split, or all that it has. The last target of a window is the begin token of the next one,
which `val/loss` counts and evaluate.py does not. Without a begin token the end-of-text token stands there.
Of a character that the edge of a window cuts, each half counts as the three bytes of U+FFFD in `val/bpb`.

With --sink=True it is for a run with sink_token, which brings that token itself and can bear no other sink in
the text: stretches of 16 windows, without begin and end tokens and not cut any further.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data import (  # not found? pip install -e .
    Manifest,
    corpus_folder,
    described,
    dtype_of,
    holds_corpus,
    open_corpus,
    token_files,
    write_tokenizer,
)
from data.tokenizer import load_tokenizer
from nanonorm.cli import parse
from nanonorm.errors import BadInput, one_line_errors
from nanonorm.files import hold_folder, write_json
from nanonorm.typed import Count


@dataclass
class Knobs:
    block_size: Count = 256  # tokens of a window, the begin token among them
    sink: bool = False  # not cut, without begin and end tokens: for a run with sink_token
    train_tokens: Count = 1 << 40  # of each corpus
    val_tokens: Count = 1 << 40  # of each corpus
    out_dir: str | None = None  # folder to write


def cut(tokens: np.ndarray, block_size: int, limit: int, begin: int | None) -> np.ndarray:
    """Windows (n, block_size), the token `begin` in front of each (None: nothing), from all over a text (N,);
    n block_size is at most `limit`, or else n is 1."""
    own = block_size - (begin is not None)
    rows = tokens[: len(tokens) - len(tokens) % own].reshape(-1, own)
    count = max(1, min(len(rows), limit // block_size))
    rows = rows[np.linspace(0, len(rows) - 1, count).astype(int)]
    return rows if begin is None else np.insert(rows, 0, begin, axis=1)


def stretches(tokens: np.ndarray, length: int, limit: int, special: list[int]) -> np.ndarray:
    """A text (N,) without its `special` tokens, in pieces of `length` tokens as `cut` takes them, or whole if
    it is shorter. (n, at most length)"""
    tokens = tokens[~np.isin(tokens, special)]
    if not len(tokens):
        raise BadInput("a split holds nothing but begin and end tokens; name another corpus")
    return cut(tokens, min(length, len(tokens)), limit, None)


def main():
    knobs, _, names = parse(Knobs, sys.argv[1:], usage=__doc__)
    if not names or not knobs.out_dir or knobs.block_size < 2:
        raise BadInput(
            "name prepared corpora, a folder to write, --out_dir=PATH, and a block_size of 2 or more"
        )
    folders = list(map(corpus_folder, names))
    metas, trains, vals = zip(*(open_corpus(folder, knobs.block_size) for folder in folders), strict=True)
    for folder, meta in zip(folders, metas, strict=True):
        if "block_size" in meta:
            raise BadInput(f"{folder} is cut already; name the corpora that it was made of")
        if meta["tokenizer_sha256"] != metas[0]["tokenizer_sha256"]:
            raise BadInput(f"{folder} is in other tokens than {folders[0]}; prepare it with that tokenizer")
    tokenizer = load_tokenizer(folders[0] / metas[0]["tokenizer"])
    begin = tokenizer.special_id("bos_token")
    begin, dtype = tokenizer.eot_id if begin is None else begin, dtype_of(tokenizer.vocab_size)
    letter = tokenizer.encode("a")
    own = len(tokenizer.decode(letter).encode())

    def pieces(text, limit: int) -> np.ndarray:
        if knobs.sink:
            return stretches(text, 16 * knobs.block_size, limit, [begin, tokenizer.eot_id])
        return cut(text, knobs.block_size, limit, begin)

    if Path(knobs.out_dir).resolve() in [folder.resolve() for folder in folders]:
        raise BadInput(f"--out_dir={knobs.out_dir} is a corpus that is read; name another folder")
    known, made, limits = {}, {}, (knobs.train_tokens, knobs.val_tokens)
    for split, texts, limit in zip(("train", "val"), (trains, vals), limits, strict=True):
        texts = [text.view(text.dtype.str.replace("i", "u")) for text in texts]  # each in its own width
        rows = [row for text in texts for row in pieces(text, limit)]
        made[split] = np.concatenate(rows).astype(dtype)
        known |= {f"{split}_tokens": sum(map(len, rows)), f"{split}_documents": len(rows)}
        # behind a letter, or some tokenizers take the space away that a window begins with
        texts = (tokenizer.decode(letter + row.tolist()) for row in rows)
        known[f"{split}_bytes"] = sum(len(text.encode()) - own for text in texts)
        if not knobs.sink and len(made[split]) <= knobs.block_size:
            one = f"the {split} split would be one window of {knobs.block_size}, and a run needs two"
            raise BadInput(f"{one}; name more text, raise --{split}_tokens, or lower --block_size")
    with hold_folder(knobs.out_dir) as out_dir:
        again = holds_corpus(out_dir)
        with token_files(out_dir) as files:
            for tokens, file in zip(made.values(), files, strict=True):
                file.write(tokens.tobytes())
        write_tokenizer(out_dir, tokenizer, again)
        meta = Manifest(
            **described(tokenizer),
            source="; ".join(meta["source"] for meta in metas),
            block_size=None if knobs.sink else knobs.block_size,
            **known,
        )
        write_json(out_dir / "meta.json", meta.model_dump(exclude_none=True), indent=2)
    kind = "stretches" if knobs.sink else f"windows of {knobs.block_size}"
    sizes = f"{known['train_documents']:,} and {known['val_documents']:,} {kind}"
    print(f"wrote {sizes}, train and val, to {knobs.out_dir}")


if __name__ == "__main__":
    with one_line_errors():
        main()
