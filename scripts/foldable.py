"""Which LayerNorms of a network can be RMSNorm without changing the function, by nanonorm.foldable.

    python scripts/foldable.py gpt2 bert bloom    # small networks of named architectures, random weights
    python scripts/foldable.py --all              # every architecture of scripts/foldables/zoo.py
    python scripts/foldable.py --checkpoint=DIR   # a pretrained model saved in DIR

"printed algorithm" in the table is the paper's (arXiv 2605.14521) as it is printed, which can be unsound.
"""

import sys
import time
from dataclasses import dataclass

import torch

from nanonorm.cli import parse  # not found? pip install -e .
from nanonorm.errors import BadInput, one_line_errors
from nanonorm.foldable import find, fold, prove
from nanonorm.foldable.search import FoldReport, count_of
from nanonorm.typed import Count, Seed
from scripts.foldables import zoo


@dataclass
class Foldable:
    """What the command does."""

    all: bool = False  # every architecture
    checkpoint: str | None = None  # a folder with a pretrained model, instead of names
    layers: Count | None = None  # depth of the networks; None: the default of their config class
    list: bool = False  # print every LayerNorm's verdict as well
    seed: Seed = 0  # of weights and inputs


# The percentages of the paper's Table 3. Which column the second one is of, the text does not say.
PRINTED = {"gpt2": "100%", "bert": "96.00%, 100%", "bloom": "83.33%, 100%"}
PRINTED |= dict.fromkeys(("opt", "phi", "vit"), "100%")


def counts(report: FoldReport) -> str:
    """A cell of the table: "5/6 + 1 op"."""
    found = f"{report.folded}/{len(report.norms)}"
    return f"{found} + {count_of(len(report.ops), 'op')}" if report.ops else found


def error_of(report: FoldReport) -> str:
    """A cell of the table: the largest error, and the precision if it is not float64."""
    worst = f"{max(report.errors.values()):.0e}"
    return worst if report.proved_in == "float64" else f"{worst} ({report.proved_in.partition(',')[0]})"


def table_row(name: str, e: zoo.Example, knobs: Foldable) -> str:
    """One line: counts and errors of the printed algorithm and of the sound one, and with tables untied."""
    printed = find(e.model, e.inputs, outputs=e.outputs, assume_centered_ln=True)
    prove(e.model, e.inputs, printed, e.outputs)
    begin = time.perf_counter()
    _, report = fold(e.model, e.inputs, outputs=e.outputs)
    seconds = time.perf_counter() - begin
    untied = find(e.model, e.inputs, outputs=e.outputs, untie=True)
    paper = PRINTED.get(name, "") if knobs.layers is None else ""
    cells = [name, paper, counts(printed), error_of(printed), counts(report), error_of(report)]
    cells += [counts(untied), f"{report.seconds:.1f}", f"{seconds:.1f}"]
    line = f"| {' | '.join(cells)} |"
    return f"{line}\n\n{report}\n" if knobs.list else line


def print_table(names: list[str], knobs: Foldable):
    """Fold small networks of the named architectures; one row each."""
    columns = "paper | printed algorithm | its error | sound | its error"
    columns += " | sound, tables untied | find, s | fold, s"
    for i, name in enumerate(names):
        e = zoo.build(name, knobs.layers)
        zoo.randomize(e.model, knobs.seed)
        if i == 0:
            print(f"\n| | {columns} |\n|---|{'---:|' * 8}")
        print(table_row(name, e, knobs), flush=True)


def main():
    argv = [f"{word}=True" if word in ("--all", "--list") else word for word in sys.argv[1:]]
    knobs, _, names = parse(Foldable, argv, usage=__doc__)
    if knobs.all:
        names = [*names, *zoo.NAMES]
    if not names and not knobs.checkpoint:
        raise BadInput(f"name architectures ({', '.join(zoo.NAMES)}), or give --all, or --checkpoint=DIR")
    if knobs.checkpoint and (names or knobs.layers):
        raise BadInput("--checkpoint=DIR is one model; name no architectures or --layers beside it")
    for name in names:
        zoo.check_name(name)
    torch.manual_seed(knobs.seed)
    if names:
        torch.set_num_threads(1)  # these are tiny: a second thread costs more than it brings
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    if knobs.checkpoint:
        e = zoo.load_checkpoint(knobs.checkpoint)
        _, report = fold(e.model, e.inputs, outputs=e.outputs)
        print(f"{report}\nfind took {report.seconds:.1f} s")
    else:
        print_table(names, knobs)


if __name__ == "__main__":
    with one_line_errors():
        main()
