"""Documents of a local text file: UTF-8, a line that holds only <|endoftext|> after each."""

import codecs
import itertools
import os
from collections.abc import Callable
from pathlib import Path

from data.tokenizer import END
from nanonorm.errors import BadInput

CUT = 1 << 16  # about so many bytes of a document at once; tokenizing is 2.3 times as fast as with 1 MiB


def check_files(*paths: str | None):
    """Raises: BadInput for a path that is no file; None stands for the hub."""
    for path in paths:
        if path is not None and not os.path.isfile(path):
            said = f"{path!r} is not a file"
            raise BadInput(f"{said}; give UTF-8 text in which a line {END} ends every document")


def check_splits(text: str | None, val_text: str | None, of_hub: set[str] = frozenset()):
    """Raises: BadInput for one split without the other, for a path that is no file (None: the hub), and for
    flags given that only the hub's text reads."""
    if (text is None) != (val_text is None):
        raise BadInput("--text and --val_text go together: give both for local files, neither for the hub")
    if text is not None and of_hub:
        raise BadInput(f"local files do not read --{min(of_hub)}; leave it out")
    check_files(text, val_text)


def documents(path: str | Path):
    """Yield the documents of a file as parts (text, ends), without the white space behind the last part.

    A document longer than CUT comes in several parts, cut after line ends: so even a file without a single
    END is read in bounded memory. Raises: BadInput.
    """
    lines, size, is_cut, number, starts = [], 0, False, 1, True
    # a piece of a long line may end inside a character; -sig: without a mark of the encoding in front
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    try:
        with open(path, "rb") as f:  # in bytes, so that an error can name its line
            lines_of_file = iter(lambda: f.readline(CUT), b"")
            for raw in itertools.chain(lines_of_file, [b""]):  # the end of the file ends one too
                line = decoder.decode(raw, final=not raw)
                number += raw.endswith(b"\n")
                ends = not raw or (starts and line.strip() == END)  # a piece of a long line is no line
                starts = raw.endswith(b"\n")
                if not ends:
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


def local_splits(text: str | Path, val_text: str | Path) -> tuple[tuple[Callable, Callable], str]:
    """(the documents of both files, each a call that reads them anew; what text this is)."""
    splits = (lambda: documents(text)), (lambda: documents(val_text))
    return splits, f"{text} (train) and {val_text} (val)"
