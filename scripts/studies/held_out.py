"""Distilled networks on held-out texts: mean and standard deviation over seeds of what evaluate.py measured.

    python scripts/evaluate.py TEACHER START OUT/*/seed*/folded.pt --data=... --kl=True --out=held_out.json
    python scripts/report.py held_out held_out.json --out=results/smollm2

The first network is the one that gaps and KL are to. Those in NAME/seed1/, NAME/seed2/ are one row, NAME,
if their files are called alike; where that name is another's too, a row has its path.
Writes held_out.md.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from nanonorm.errors import BadInput
from nanonorm.stats import spread
from nanonorm.tables import markdown, report_folder, write_markdown
from scripts.studies.runs import read_json


@dataclass
class Knobs:
    """What is reported."""

    out: str = "results/smollm2"  # folder to write


def name_of(model: str) -> str:
    """NAME of "NAME/seed1/folded.pt"; of any other path its folder, or its last part."""
    path = Path(model)
    folder = path.parent if path.suffix == ".pt" else path
    return folder.parent.name if re.fullmatch(r"seed\d+", folder.name) else folder.name


def names_of(models: list[str]) -> dict[str, str]:
    """{model: its row}: NAME, and where others than its seeds are NAME as well, the path but for the seed."""
    paths = {model: re.sub(r"/seed\d+(?=/|$)", "", model) for model in models}
    alike = {name: {paths[m] for m in models if name_of(m) == name} for name in map(name_of, models)}
    return {m: name_of(m) if len(alike[name_of(m)]) == 1 else paths[m] for m in models}


def table(rows: list[dict], names: dict[str, str], key: str, sign: str = "", digits: int = 4) -> str:
    """A row a network, by its name, a column a text, in the cells a value of the rows of evaluate.py."""
    found = {}  # name -> text -> values by seed
    for row in rows:
        values = found.setdefault(names[row["model"]], {}).setdefault(row["data"], [])
        values += [] if row[key] is None else [row[key]]
    texts = next(iter(found.values()))
    cells = {name: [spread(values, digits, sign) for values in of.values()] for name, of in found.items()}
    lines = [[name, max(map(len, found[name].values())), *line] for name, line in cells.items()]
    return markdown(lines, ["network", "n", *(Path(text).name for text in texts)])


def main(k: Knobs, words: list[str], command: str) -> str:
    if len(words) != 1:
        raise BadInput("name the file of evaluate.py: python scripts/report.py held_out held_out.json")
    found = read_json(Path(words[0]), "scripts/evaluate.py --kl=True")
    if "kl" not in (found.get("rows") or [{}])[0]:
        raise BadInput(f"{words[0]} has no losses; name what scripts/evaluate.py --kl=True --out= writes")
    first, names = found["rows"][0]["model"], names_of([row["model"] for row in found["rows"]])
    teacher, others = ([r for r in found["rows"] if (r["model"] == first) == of] for of in (True, False))
    if all(row["kl"] is None for row in others):
        raise BadInput(f"{words[0]} has no KL; evaluate two networks or more, with --kl=True")
    size, text = f"{teacher[0]['targets']:,} tokens", Path(teacher[0]["data"]).name
    how = f"Nats a token, over {size} of {text} and alike, in windows of {teacher[0]['block_size']}; ± is a "
    how += f"standard deviation over seeds. {found['machine']}, torch {found['torch']}."
    text = ["# Distilled, on held-out texts", command, how]
    text += ["Cross-entropy of the first network, the teacher", table(teacher, names, "ce")]
    text += ["Cross-entropy above the teacher's", table(others, names, "gap", "+")]
    text += ["KL to the teacher", table(others, names, "kl")]
    if any("not_finite" in row for row in others):
        head = "Windows in which a loss is not finite, left out above"
        text += [head, table(others, names, "not_finite", digits=1)]
    write_markdown(report_folder(k.out) / "held_out.md", text)
    return "\n\n".join(text)
