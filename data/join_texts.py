"""Several texts as one, with a line <|endoftext|> between them.

python data/join_texts.py OUT IN IN
"""

import shutil
import sys
from codecs import BOM_UTF8
from dataclasses import dataclass
from pathlib import Path

from nanonorm.cli import parse  # not found? pip install -e .
from nanonorm.errors import BadInput, one_line_errors
from nanonorm.files import atomic_write


@dataclass
class NoKnobs:
    """It has none."""


def main():
    *_, words = parse(NoKnobs, sys.argv[1:], usage=__doc__)
    if len(words) < 3:
        raise BadInput("name the file to write, and two to read")
    out, *texts = map(Path, words)
    files = [text.open("rb") for text in texts]
    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(out) as f:
        for i, file in enumerate(files):
            f.write(b"\n<|endoftext|>\n" if i else b"")
            head = file.read(len(BOM_UTF8))
            f.write(b"" if i and head == BOM_UTF8 else head)  # in the middle of a text it is no mark
            shutil.copyfileobj(file, f)


if __name__ == "__main__":
    with one_line_errors():
        main()
