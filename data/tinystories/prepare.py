"""TinyStories (Eldan and Li 2023, arXiv 2305.07759), or local text in its format, as a corpus.

    python data/tinystories/prepare.py [--vocab_size=10000] [--out_dir=PATH]
    python data/tinystories/prepare.py --text=train.txt --val_text=valid.txt

The first reads roneneldan/TinyStories from the Hugging Face hub. The second reads UTF-8 files in which every
story is followed by a line that holds only <|endoftext|>.
"""

import codecs
import itertools
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from config import BadInput, Count, atomic_write, hold_folder, one_line_errors, parse
from data import END, check_vocab_size, prepare, progress

HUB_NAME = "roneneldan/TinyStories"
HUB_TIMEOUT_S = 10  # of the first question to the hub only; reading the stories keeps the client's own patience
WAYS_OUT = "run this where the hub can be reached, or give local files with --text=... --val_text=..."
CUT = 1 << 16  # bytes, about, of a story held at once; tokenizing is 2.3 times as fast as in stretches of 1 MiB


@dataclass
class Knobs:
    text: str | None = None  # local file of training stories; None: the hub
    val_text: str | None = None  # local file of validation stories; goes with --text
    vocab_size: Count = 10_000  # token ids, 65536 at most
    out_dir: str | None = None  # folder to write; None: the one of this file


def stories(path: str | Path):
    """Yield the stories of a file as parts (text, ends), without the white space at their ends.

    A story longer than CUT comes in several, cut after line ends, so a file without a single END is read in
    bounded memory too. Raises: BadInput.
    """
    lines, size, is_cut, number = [], 0, False, 1
    decoder = codecs.getincrementaldecoder("utf-8")()  # a very long line may be read up to the middle of a character
    try:
        with open(path, "rb") as f:  # in bytes, so that an error can name its line
            for raw in itertools.chain(iter(lambda: f.readline(CUT), b""), [END.encode()]):  # the file's end ends a story too
                line = decoder.decode(raw)
                number += raw.endswith(b"\n")
                if line.strip() != END:
                    lines.append(line)
                    size += len(raw)
                    if size >= CUT:
                        yield "".join(lines), False
                        lines, size, is_cut = [], 0, True
                    continue
                text = "".join(lines).rstrip()
                if text or is_cut:
                    yield text, True
                lines, size, is_cut = [], 0, False
    except UnicodeDecodeError:
        raise BadInput(f"{path} is not UTF-8 in line {number}; convert it, for instance with iconv") from None
    except OSError as e:
        raise BadInput(f"cannot read {path}: {e.strerror}") from None


def hub_stories():
    """Ask the hub for the data set. Returns: (its revision, a function from split to a stream of stories).

    Raises: BadInput, which names the ways out, also while streaming.
    """
    try:
        import datasets
        import huggingface_hub
    except ImportError as e:
        raise BadInput(
            f"reading the hub needs the package datasets ({e}); pip install datasets, or give --text=... --val_text=..."
        ) from None
    try:
        # Left alone, the client retries for half a minute where there is no network. One question first tells at once.
        revision = huggingface_hub.HfApi().dataset_info(HUB_NAME, timeout=HUB_TIMEOUT_S).sha
    except Exception as e:  # which type depends on the client's version and on what is between here and the hub
        raise BadInput(f"cannot reach {HUB_NAME} on the Hugging Face hub ({type(e).__name__}: {str(e)[:100]}); {WAYS_OUT}") from None

    def stream(split: str):
        try:
            for row in datasets.load_dataset(HUB_NAME, split=split, revision=revision, streaming=True):
                yield row["text"], True
        except Exception as e:  # likewise
            raise BadInput(f"lost {HUB_NAME} on the hub ({type(e).__name__}: {str(e)[:100]}); try again, or {WAYS_OUT}") from None

    return revision, stream


def download(out_dir: Path, stream) -> tuple[Path, Path]:
    """Write both splits of the hub to local files, since the training split is read twice. Returns: (train, val)."""
    folder = out_dir / "download.tmp"
    folder.mkdir(exist_ok=True)
    for split in ("train", "validation"):
        with atomic_write(folder / f"{split}.txt") as f:
            for text, _ in progress(stream(split), f"download {split}"):
                f.write(f"{text}\n{END}\n".encode())
    return folder / "train.txt", folder / "validation.txt"


def main():
    knobs, _, words = parse(Knobs, sys.argv[1:], usage="python data/tinystories/prepare.py [--key=value ...]")
    if words:
        raise BadInput(f"unexpected word {words[0]!r}; flags are written --key=value")
    if (knobs.text is None) != (knobs.val_text is None):
        raise BadInput("--text and --val_text go together: give both for local files, neither for the hub")
    check_vocab_size(knobs.vocab_size)
    for path in (knobs.text, knobs.val_text):
        if path is not None and not os.path.isfile(path):
            raise BadInput(f"{path!r} is no file; give UTF-8 text in which a line {END} follows every story")

    if knobs.text is None:
        revision, stream = hub_stories()
        source = f"{HUB_NAME} on the Hugging Face hub, revision {revision}"
    else:
        source = f"{knobs.text} (train) and {knobs.val_text} (val)"
    with hold_folder(knobs.out_dir or Path(__file__).resolve().parent) as out_dir:
        try:
            train, val = (knobs.text, knobs.val_text) if knobs.text else download(out_dir, stream)
            prepare(lambda: stories(train), lambda: stories(val), out_dir, knobs.vocab_size, source)
        finally:
            shutil.rmtree(out_dir / "download.tmp", ignore_errors=True)


if __name__ == "__main__":
    with one_line_errors():
        main()
