"""What folding gains against the width: the speedups of bench.py at several widths, in each runtime.

    python scripts/report.py widths out/folding/*.json --out=results/what_does_folding_gain

Each file is what bench.py wrote with --out, for one batch and context; all are of one machine. Writes
gains.md, gains.csv and gains.png, a panel for each mode: medians over rounds, and quartiles. Needs
matplotlib.
"""

from dataclasses import dataclass
from pathlib import Path

from bench import FLOOR
from nanonorm.errors import BadInput
from nanonorm.plots import COLOURS
from nanonorm.tables import markdown, write_csv, write_markdown
from scripts.studies.figures import Figures
from scripts.studies.runs import check_speeds, read_json

COLUMNS = ["mode", "n_embd", "runtime", "variant", "tok_s", "speedup", "speedup_q1", "speedup_q3", "work"]


@dataclass
class Knobs:
    """What is reported."""

    out: str = "out/widths"  # folder to write


def rows_of(paths: list[str]) -> tuple[list[dict], str]:
    """(rows of COLUMNS, by mode and width; what they were measured on). Raises: BadInput."""
    rows, places = [], set()
    for path in paths:
        report = read_json(Path(path), "python bench.py --out=")
        try:
            here = {"mode": report["settings"]["mode"], "n_embd": report["model"]["n_embd"]}
            how = f"{report['settings']['dtype']}, {report['settings']['iters']} rounds"
            how += f", to {report['settings']['variants'][0]}"
            if not report["rows"]:
                raise LookupError("no rows")
            for shape in {f"{row['batch']} x {row['seq']} tokens" for row in report["rows"]}:
                size = f"{report['model']['n_layer']} blocks, {shape}, {how}"
                places.add(f"{report['machine']}, torch {report['torch']}; {size}")
            for row in report["rows"]:
                check_speeds(row)
            rows += [{name: (here | row)[name] for name in COLUMNS} for row in report["rows"]]
        except (LookupError, TypeError, ValueError) as e:
            raise BadInput(f"{path} is not a report of bench.py ({e!r}); name another") from None
    if len(places) != 1:
        alike = "of one machine, depth, shape, type and reference"
        raise BadInput(f"name reports of bench.py, {alike}, not {sorted(places)}")
    points = [tuple(row[name] for name in COLUMNS[:4]) for row in rows]
    if twice := [point for point in points if points.count(point) > 1]:
        raise BadInput(f"two reports have {', '.join(map(str, twice[0]))}; name one of them")
    if not {row["variant"] for row in rows} - {rows[0]["variant"], FLOOR}:
        raise BadInput(f"the reports have {rows[0]['variant']} alone; time another variant beside it")
    return sorted(rows, key=lambda row: (row["mode"] != "prefill", row["n_embd"])), places.pop()


def table(rows: list[dict], baseline: str) -> str:
    """Of one mode: a row a width, a column for each runtime and variant but the first."""
    cells, heads = {}, {}
    for row in (row for row in rows if row["variant"] != baseline):
        value = f"{row['speedup']:.3f}x {row['speedup_q1']:.3f}-{row['speedup_q3']:.3f}"
        head = f"{row['variant']}, {row['runtime']}"
        heads[head] = None
        cells.setdefault(row["n_embd"], {})[head] = value
    lines = [[width, *(of.get(head, "-") for head in heads)] for width, of in cells.items()]
    return markdown(lines, ["n_embd", *heads])


def draw(ax, rows: list[dict], variant: str):
    """Of one mode: a variant's speedup against the width, a line a runtime."""
    for i, runtime in enumerate(dict.fromkeys(row["runtime"] for row in rows)):
        own = [row for row in rows if (row["runtime"], row["variant"]) == (runtime, variant)]
        y = [row["speedup"] for row in own]
        ends = [[abs(row["speedup"] - row[end]) for row in own] for end in ("speedup_q1", "speedup_q3")]
        x = [row["n_embd"] * 1.04**i for row in own]  # side by side, so that no bar hides another
        ax.errorbar(x, y, ends, label=runtime, color=COLOURS[2 * i], marker="os^v"[i], capsize=2)
    widths = sorted({row["n_embd"] for row in rows})
    ax.set_xscale("log", base=2)
    ax.set_xticks(widths, map(str, widths))
    ax.minorticks_off()
    ax.axhline(1, color="#000000", linewidth=0.8)
    ax.set(title=rows[0]["mode"], xlabel="width (n_embd)")


def main(k: Knobs, words: list[str], command: str) -> str:
    rows, where = rows_of(words)
    baseline, variant, *_ = dict.fromkeys(row["variant"] for row in rows)
    modes, figures = list(dict.fromkeys(row["mode"] for row in rows)), Figures(k.out)
    fig, axes = figures.axes(1, len(modes), 2.8, sharey=True)
    text = [f"# Speedup over {baseline} by width", command, f"{where}. Medians over rounds, and quartiles."]
    for ax, mode in zip(axes, modes, strict=True):
        of = [row for row in rows if row["mode"] == mode]
        draw(ax, of, variant)
        text += [f"## {mode}", table(of, baseline)]
    what = variant.replace("_", " norms ")  # all norms folded
    axes[0].set_ylabel(f"{what}: speedup over\n{baseline}, median and quartiles")
    axes[0].legend()
    fig.supxlabel(where, fontsize=7)
    shown = figures.save(fig, "gains")
    write_csv(figures.out / "gains.csv", COLUMNS, ([row[name] for name in COLUMNS] for row in rows))
    write_markdown(figures.out / "gains.md", [*text, shown])
    return "\n\n".join(text)
