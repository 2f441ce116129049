"""Networks on held-out texts: mean and standard deviation over seeds of what evaluate.py measured.

    python scripts/evaluate.py TEACHER START OUT/*/seed*/folded.pt --data=... --kl=True --out=held_out.json
    python scripts/report.py held_out held_out.json --pairs=lora-dora,lora-full --out=results/smollm2

The first network is the one that gaps and KL are to. Those in NAME/seed1/, NAME/seed2/ are one row, NAME,
if their files are called alike; where that name is another's too, a row has its path. --pairs=A-B,... gives
row A less row B, by pairs of a seed, with the 95% interval of the mean. Writes held_out.md.

Where windows were left out (evaluate.py --finite=True), a network's losses are over other windows than
another's. So pairs are of gaps, each of which is over one set of windows, and such a network is in no pair of
another measure.
"""

import re
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path

from nanonorm.errors import BadInput
from nanonorm.log import say
from nanonorm.tables import markdown, report_folder, write_markdown
from scripts.studies.runs import read_json
from scripts.studies.stats import differences, interval, spread

SEED = r"(?:^|/)seed(\d+)(?=/|$)"  # in a network's path
# what pairs are compared in -> its key in a row of evaluate.py; a difference of gaps is one of losses
MEASURES = {"Cross-entropy": "gap", "The 99.9% percentile": "p99.9", "KL to the first network": "kl"}


@dataclass
class Knobs:
    """What is reported."""

    out: str = "out/held_out"  # folder to write
    pairs: tuple[str, ...] = ()  # A-B: two rows, of which B's values are taken from A's of the same seed


def name_of(model: str) -> str:
    """NAME of "NAME/seed1/folded.pt", "." without one; of any other path its folder, or its last part."""
    path = Path(model)
    folder = path.parent if path.suffix == ".pt" else path
    return folder.parent.name or "." if re.fullmatch(r"seed\d+", folder.name) else folder.name


def names_of(models: list[str]) -> dict[str, str]:
    """{model: its row}: NAME, and where others than its seeds are NAME as well, the path but for the seed."""
    paths = {model: re.sub(SEED, "", model) for model in models}
    alike = {name: {paths[m] for m in models if name_of(m) == name} for name in map(name_of, models)}
    return {m: name_of(m) if len(alike[name_of(m)]) == 1 else paths[m] for m in models}


def by_seed(rows: list[dict], names: dict[str, str], key: str) -> dict[str, dict[str, dict]]:
    """{network: {text: {seed: value}}} of the rows of evaluate.py, without the values that are None."""
    found = {}
    for row in rows:
        values = found.setdefault(names[row["model"]], {}).setdefault(row["data"], {})
        if row.get(key) is not None:
            values[tuple(re.findall(SEED, row["model"]))] = row[key]
    return found


def row_of(name: str, cells: list[tuple[int, str]]) -> list:
    """A row of a table: the most seeds of a cell, and the cells, with their seeds where those are fewer.
    cells: (number of seeds, text) of each text."""
    most = max(n for n, _ in cells)
    return [name, most, *(cell if n in (0, most) else f"{cell} (n = {n})" for n, cell in cells)]


def table(found: dict[str, dict[str, dict]], sign: str = "", digits: int = 4) -> str:
    """A row a network, by its name, a column a text. found: what by_seed gives."""
    lines = []
    for name, of_texts in found.items():
        cells = [(len(values), spread(list(values.values()), digits, sign)) for values in of_texts.values()]
        lines.append(row_of(name, cells))
    return markdown(lines, ["network", "n", *(Path(text).name for text in of_texts)])


def pairs_of(asked: tuple[str, ...], names: list[str]) -> list[tuple[str, str]]:
    """The two rows of each A-B; a name may have a dash itself. A pair that is not there, as where a
    study left runs out, is said and left out."""
    known = {f"{a}-{b}": (a, b) for a, b in permutations(names, 2)}
    for pair in asked:
        if pair not in known:
            say(f"--pairs={pair} is left out: no two rows have these names; there are {', '.join(names)}")
    return [known[pair] for pair in asked if pair in known]


def pair_table(found: dict[str, dict[str, dict]], pairs: list[tuple[str, str]]) -> str:
    """A row a pair, a column a text: the first less the second, over the seeds that both have."""
    lines, texts = [], next(iter(found.values()))
    for a, b in pairs:
        gaps = [interval(differences(found[a][text], found[b][text]).values()) for text in texts]
        lines.append(row_of(f"{a} less {b}", [(gap.n, str(gap)) for gap in gaps]))
    return markdown(lines, ["pair", "n", *(Path(text).name for text in texts)])


def main(k: Knobs, words: list[str], command: str) -> str:
    if len(words) != 1:
        raise BadInput("name the file of evaluate.py: python scripts/report.py held_out held_out.json")
    found = read_json(Path(words[0]), "scripts/evaluate.py")
    try:
        rows, first = found["rows"], found["rows"][0]
        names = names_of([row["model"] for row in rows])
        if not all(isinstance(row[key], int | float | None) for row in rows for key in ("ce", "gap")):
            raise TypeError("a loss is no number")
        if not all(isinstance(row["data"], str) for row in rows):
            raise TypeError("data is no path")
        losses = by_seed(rows, names, "ce")
        size, text = f"{first['targets']:,} tokens", Path(first["data"]).name
        how = f"Nats a token, over {size} of {text} and alike, in windows of {first['block_size']}; ± is a "
        how += f"standard deviation over seeds. {found['machine']}, torch {found['torch']}."
    except (LookupError, TypeError, ValueError) as e:
        what = f"name what scripts/evaluate.py --out= writes ({e!r})"
        raise BadInput(f"{words[0]} has no losses; {what}") from None
    others = [row for row in rows if row["model"] != first["model"]]
    if not others:
        raise BadInput(f"{words[0]} has no other network to compare the first with; evaluate two or more")
    remarks = {row["model"]: row["remark"] for row in rows if row.get("remark")}
    notes = [f"{model}: {remark}." for model, remark in remarks.items()]
    text = ["# Networks on held-out texts", command, how, *notes, "Cross-entropy", table(losses)]
    text += ["Cross-entropy above the first network's", table(by_seed(others, names, "gap"), "+")]
    if any(row.get("kl") is not None for row in others):
        text += ["KL to the first network", table(by_seed(others, names, "kl"))]
    if any("not_finite" in row for row in others):
        head = "Windows in which a loss or KL is not finite, left out above"
        text += [head, table(by_seed(others, names, "not_finite"), digits=1)]
    if pairs := pairs_of(k.pairs, list(losses)):
        by_pairs = "by pairs of a seed: the mean and half of its 95% interval by Student's t"
        for title, key in MEASURES.items():
            alike = [row if key == "gap" or not row.get("not_finite") else row | {key: None} for row in rows]
            if any(row.get(key) is not None for row in alike if row["model"] != first["model"]):
                text += [f"{title}, {by_pairs}", pair_table(by_seed(alike, names, key), pairs)]
    write_markdown(report_folder(k.out) / "held_out.md", text)
    return "\n\n".join(text)
