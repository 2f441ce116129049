"""scripts/speed/serving.py: what it asks for, what it makes, and its tables; a timing is made up here."""

import csv
import json
import random
import sys
from contextlib import suppress
from dataclasses import replace
from unittest.mock import Mock

import pytest
from conftest import refuses, tiny

from forms import from_file
from nanonorm.run import open_model
from scripts.speed import serving

VLLM = "with norms in vLLM's class"


def row(mode: str, contestant: str, turn: int, batch: int, seconds: float, tokens: int = 10) -> dict:
    return dict(zip(serving.COLUMNS, (mode, contestant, turn, batch, tokens, 0, seconds), strict=True))


def test_a_ratio_is_the_median_over_turns_of_the_best_rounds():
    """Of the reference's of the same turn; a turn that one of the two lacks has none."""
    rows = [row("compiled", "with norms", turn, 1, s) for turn, s in enumerate((1.0, 2.0, 4.0))]
    rows += [row("compiled", "none", turn, 1, s) for turn, s in enumerate((0.5, 2.0, 2.5, 1.0))]
    rows += [row("compiled", who, 0, 1, 9.0) for who in ("with norms", "none")]  # a round that was slower
    rows += [row("compiled", "none", 0, 4, 1.0)]
    rows += [row("eager", "with norms", 0, 1, 5.0), row("eager", VLLM, 0, 1, 4.0)]
    random.Random(0).shuffle(rows)
    first, second, eager = serving.tables(rows).split("\n\n")
    assert first.splitlines()[0] == "| compiled, batch 1 | tok/s | least-most | ratio | to |"
    assert f"| with norms | 5.0 | 2.5-10.0 |  | {VLLM} |" in first  # to what has no row there
    assert "| none | 7.5 | 4.0-20.0 | 1.600x 1.000-2.000 | with norms |" in first  # 2, 1 and 1.6
    assert "compiled, batch 4" in second and "| none | 40.0 | 40.0-40.0 |  | with norms |" in second
    assert "eager, batch 1" in eager and "none" not in eager
    assert f"| {VLLM} | 2.5 | 2.5-2.5 | 1 | {VLLM} |" in eager
    assert f"| with norms | 2.0 | 2.0-2.0 | 0.800x 0.800-0.800 | {VLLM} |" in eager


def test_the_rounds_of_a_process():
    """Of each batch one to warm up, which is not counted; the same prompts for all who have this seed."""
    k = serving.Serving(batch=(1, 3, 1), prompt=5, new_tokens=9, rounds=2)
    asked = serving.rounds_of(k, 50)
    sizes = [(len(each["prompts"]), each["tokens"]) for each in asked]
    assert sizes == [(size, tokens) for size in (1, 3) for tokens in (8, 9, 9)]
    prompts = [tuple(prompt) for each in asked for prompt in each["prompts"]]
    assert {len(prompt) for prompt in prompts} == {5} and len(set(prompts)) == len(prompts)
    assert asked == serving.rounds_of(k, 50) != serving.rounds_of(replace(k, seed=1), 50)


def test_the_seconds_are_of_the_rounds_behind_the_warm_up(tmp_path, monkeypatch):
    """By batch; another number of tokens than was asked for, and a crash, are one line."""
    (tmp_path / "nanonorm.json").write_text('{"network": {"vocab_size": 50}}')
    k, said = serving.Serving(batch=(1, 2), rounds=2, new_tokens=9), []
    for size, seconds in ((1, (9.0, 1.0, 2.0)), (2, (9.0, 3.0, 4.0))):
        for tokens, s in zip((8, 9, 9), seconds, strict=True):
            said.append({"tokens": [[0] * tokens] * size, "seconds": s})

    def found(rounds, rc=0, error="") -> dict:
        done = Mock(returncode=rc, stdout="a log line\n" + json.dumps({"rounds": rounds}), stderr=error)
        monkeypatch.setattr(serving.subprocess, "run", Mock(return_value=done))
        return serving.seconds_of(k, serving.CONTESTANTS["none"], tmp_path)

    assert found(said) == {1: [1.0, 2.0], 2: [3.0, 4.0]}
    said[-1]["tokens"][1] = [0] * 8
    with refuses("vllm gave another number of tokens"):
        found(said)
    with refuses("does not run in vllm: out of memory"):
        found([], 1, "a traceback\nout of memory")


def test_networks_without_norms_are_made_of_one_that_has_them(saved, tmp_path):
    given = saved(tiny("rmsnorm", vocab_size=400))
    for name, (norm, taper) in serving.CHANGES.items():
        serving.make_network(str(given), name, tmp_path / "made.pt")
        made = from_file(*open_model(tmp_path / "made.pt"))
        assert (made.config.norm, made.config.taper) == (norm, taper)
        assert bool(made.taper_norms()) == (taper == "all") and made.gate.max() == 0


@pytest.fixture
def serve(saved, tmp_path, monkeypatch):
    """A function that runs the command, but times nothing, and stops it by Ctrl-C after `most` processes;
    returns what they were started for."""
    given = saved(tiny("rmsnorm", vocab_size=400))

    def run(*flags, path=given, most=99):
        asked = []

        def seconds_of(k, contestant, folder):
            assert json.loads((folder / "nanonorm.json").read_text())["to"] == contestant.to
            if len(asked) == most:
                raise KeyboardInterrupt
            asked.append(contestant)
            return {size: [1.0 / size] * k.rounds for size in k.batch}

        monkeypatch.setattr(serving, "seconds_of", seconds_of)
        command = ["serving.py", path, f"--out={tmp_path / 'out'}", "--who=none,coupled", "--batch=1,2"]
        command.append(f"--vllm={sys.executable}")
        monkeypatch.setattr("sys.argv", list(map(str, [*command, *flags])))
        with suppress(KeyboardInterrupt):
            serving.main()
        return asked

    return run


def test_it_goes_on_where_it_was_stopped(serve, tmp_path, capsys):
    """Whatever was timed is timed once, and the table is printed in the end; an empty one gets its head."""
    serve(most=0)
    (tmp_path / "out/serving.csv").touch()
    whole = serve("--processes=3", most=4) + serve("--processes=3", most=1)
    assert len(whole) == 5 and "tok/s" not in capsys.readouterr().out
    whole += serve("--processes=3")
    assert sorted(whole) == sorted([serving.CONTESTANTS[name] for name in ("none", "coupled")] * 3)
    said = capsys.readouterr().out
    assert said.count("tok/s") == 2 and ", 2 threads, torch" in said and serve("--processes=3") == []
    rows = list(csv.DictReader((tmp_path / "out/serving.csv").open()))
    assert len(rows) == 3 * 2 * 2 * 2 and len({tuple(row.values()) for row in rows}) == len(rows)
    assert len(serve("--processes=4", "--mode=eager")) == 8  # rows of their own


def test_what_is_missing_is_said_before_anything_is_made(serve, tmp_path):
    for flag in ("--vllm=None", f"--vllm={tmp_path / 'python'}"):
        with refuses("--vllm names the interpreter that has it"):
            serve(flag)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "variant, knobs, said",
    [
        ("layernorm", {}, "has norm=layernorm"),
        ("rmsnorm-all-aux", {}, "has begun to taper"),
        ("rmsnorm", {"norm_eps": 2.0**60}, "has norms that only scale"),
    ],
)
def test_a_network_without_its_norms_is_not_the_one_with_them(variant, knobs, said, serve, saved, tmp_path):
    given = saved(tiny(variant, vocab_size=400, **knobs), "other.pt")
    with refuses(said):
        serve("--who=with norms", path=given)
    assert not (tmp_path / "out").exists()


def test_a_folder_has_rows_of_the_same_settings(serve, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "settings.json").write_text('{"--seed": 1}')  # nothing is made yet, so another start may differ
    serve(most=1)
    kept = (out / "serving.csv").read_text()
    for flag in ("--batch=2", "--prompt=8", "--new_tokens=8", "--rounds=1", "--threads=1", "--seed=1"):
        with refuses(f"{out} was begun with {flag.partition('=')[0]}="):
            serve(flag)
    with refuses(f"was begun with PATH={tmp_path / 'source/model.pt'}, not {tmp_path / 'source'}"):
        serve(path=tmp_path / "source")
    assert (out / "serving.csv").read_text() == kept and len(serve("--processes=1")) == 1
    (out / "settings.json").unlink()  # as an earlier version left it
    with refuses("was begun with PATH=unknown, not"):
        serve()
