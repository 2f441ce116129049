"""The report of what folding gains by width."""

import csv
import json
from pathlib import Path

import pytest

from bench import FLOOR
from nanonorm.errors import BadInput
from scripts.studies import widths


def bench_file(path, mode="prefill", n_embd=64, speedups=(1.0, 1.2), machine="a machine", variants="ab"):
    names = ("variant", "runtime", "batch", "seq", "tok_s", "speedup", "speedup_q1", "speedup_q3", "work")
    both = zip(variants, speedups, strict=True)
    rows = [(v, "eager", 1, 8, 100.0, x, x - 0.1, x + 0.2, 9) for v, x in both]
    settings = {"mode": mode, "dtype": "float32", "iters": 9, "variants": list(variants)}
    report = {"settings": settings, "model": {"n_embd": n_embd, "n_layer": 4}}
    report |= {"machine": machine, "torch": "2", "rows": [dict(zip(names, row, strict=True)) for row in rows]}
    path.write_text(json.dumps(report))
    return str(path)


def test_gains_by_width(tmp_path):
    files = [bench_file(tmp_path / f"{mode}{n}.json", mode, n, (1.0, 1 + n / 100))
             for mode in ("decode", "prefill") for n in (32, 8)]  # fmt: skip
    said = widths.main(widths.Knobs(out=str(tmp_path / "out")), files, "    command")
    where = "a machine, torch 2; 4 blocks, 1 x 8 tokens, float32, 9 rounds, to a"
    assert where in said
    lines = [line for line in said.splitlines() if line.startswith(("##", "| "))]
    cells = ["| 8 | 1.080x 0.980-1.280 |", "| 32 | 1.320x 1.220-1.520 |"]
    assert [line for line in lines if "n_embd" not in line and ":---" not in line] == [
        "## prefill", *cells, "## decode", *cells,
    ]  # fmt: skip
    rows = list(csv.DictReader((tmp_path / "out/gains.csv").open()))
    assert len(rows) == 8 and {row["mode"] for row in rows} == {"prefill", "decode"}
    assert (tmp_path / "out/gains.png").stat().st_size > 1000


def test_a_cell_stands_under_its_own_runtime():
    row = {"variant": "b", "speedup": 1.5, "speedup_q1": 1.4, "speedup_q3": 1.6}
    rows = [row | {"n_embd": 8, "runtime": "eager"}, row | {"n_embd": 16, "runtime": "compiled"}]
    _, _, *cells = widths.table(rows, "a").splitlines()
    assert cells == ["| 8 | 1.500x 1.400-1.600 | - |", "| 16 | - | 1.500x 1.400-1.600 |"]


def test_reports_that_do_not_compare_are_refused(tmp_path):
    here, there = (bench_file(tmp_path / f"{m}.json", machine=m) for m in "ab")
    other = bench_file(tmp_path / "other.json", machine="a", n_embd=32, variants="ba")
    alone = bench_file(tmp_path / "alone.json", variants=("a", FLOOR))
    two = json.loads(Path(here).read_text())
    two["rows"][1]["batch"] = 4
    (tmp_path / "shapes.json").write_text(json.dumps(two))
    (tmp_path / "x.json").write_text('{"settings": {}}')
    two["rows"][1]["speedup"] = None
    (tmp_path / "null.json").write_text(json.dumps(two))
    for files, said in (
        ([here, there], "one machine"),
        ([here, here], "two reports have prefill, 64, eager, a"),
        ([here, other], "reference"),
        ([alone], "have a alone; time another variant beside it"),
        ([str(tmp_path / "shapes.json")], "shape"),
        ([str(tmp_path / "x.json")], "not a report of"),
        ([str(tmp_path / "null.json")], "is no number"),
        ([], "one machine"),
    ):
        with pytest.raises(BadInput, match=said):
            widths.rows_of(files)
