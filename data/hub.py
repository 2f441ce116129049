"""Data sets of the Hugging Face hub, as a prepare.py reads them.

One question comes first, so that a machine without a network hears at once. What fails is one line, which
names the ways out.
"""

from collections.abc import Iterator
from pathlib import Path

from data import with_bar
from data.tokenizer import END
from nanonorm.errors import BadInput, needed
from nanonorm.files import atomic_write

HUB_TIMEOUT_S = 10  # for the first question to the hub; reading the rows keeps the client's own timeouts


def brief(e: Exception) -> str:
    """An exception's type, and the beginning of what it says."""
    return f"{type(e).__name__}: {str(e)[:100]}"


class HubSet:
    """A data set of the hub, at the revision that the hub names now, or at a given one.

    way_out: what a user does who has no hub, as an error says it: "give local files with --text=...". subset:
    of a data set that has several.
    Raises: BadInput, in the constructor if the hub does not answer, later if it is lost.
    """

    def __init__(self, name: str, way_out: str, revision: str | None = None, subset: str | None = None):
        self.name, self.way_out = name, way_out
        self.which = (name,) if subset is None else (name, subset)
        self.package = needed("datasets", f"datasets, or {way_out}", "reading the hub")
        import huggingface_hub  # which comes with it

        of_one = {} if revision is None else {"revision": revision}
        try:
            # Without a network the client would retry for half a minute. One question first tells at once.
            self.revision = huggingface_hub.HfApi().dataset_info(name, timeout=HUB_TIMEOUT_S, **of_one).sha
        except Exception as e:  # its type depends on the client's version and on the network in between
            remedy = f"run this where the hub can be reached, or {way_out}"
            raise BadInput(f"cannot reach {name} on the Hugging Face hub ({brief(e)}); {remedy}") from None

    @property
    def source(self) -> str:
        """What meta.json calls it."""
        return f"{self.name} on the Hugging Face hub, revision {self.revision}"

    def lost(self, e: Exception) -> BadInput:
        remedy = f"try again, or run this where the hub can be reached, or {self.way_out}"
        return BadInput(f"lost {self.name} on the hub ({brief(e)}); {remedy}")

    def rows(self, split: str) -> Iterator[dict]:
        """Stream the rows of a split."""
        try:
            yield from self.package.load_dataset(
                *self.which, split=split, revision=self.revision, streaming=True
            )
        except Exception as e:  # as in the constructor
            raise self.lost(e) from None

    def whole(self, split: str):
        """Fetch all of a split into the hub client's cache. Returns: a datasets.Dataset."""
        try:
            return self.package.load_dataset(*self.which, split=split, revision=self.revision)
        except Exception as e:
            raise self.lost(e) from None

    def save_texts(self, split: str, path: Path):
        """Write the texts of a split to a local file, as data.local.documents reads it."""
        parts = ((row["text"], True) for row in self.rows(split))
        with atomic_write(path) as f:
            for text, _ in with_bar(parts, f"download {split}"):
                f.write(f"{text}\n{END}\n".encode())
