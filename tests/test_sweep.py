"""The sweep: the grid of a command line, refusals, and what it does when runs end, fail, hang or are killed.

Most runs here are a stand-in for train.py that writes the same files in no time; one test uses the real one.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest
import torch
from running import exit_status, metrics, refused, said_by, wait_for

import data
from config import Config
from data import open_corpus, prepare
from model import ModelConfig, Transformer
from nanonorm.cli import parse
from nanonorm.files import FORMAT, ROOT, hold_folder, is_held
from scripts import sweep
from scripts.studies import runs

TINY = ["--n_layer=1", "--n_embd=8", "--n_head=2", "--block_size=16", "--batch_size=2", "--max_iters=40"]
TINY += ["--device=cpu"]

# Writes what train.py writes, with the settings that `stand_in` hands it, so that it need not import torch;
# takes .05 s a step after the first, and fails with seed 13.
STAND_IN = """
import json, os, shutil, signal, sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
from nanonorm.errors import one_line_errors
from nanonorm.files import hold_folder
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
asked = dict(word[2:].split("=") for word in sys.argv[1:] if word.startswith("--"))
with one_line_errors(), hold_folder(asked["out_dir"]) as out:
    ckpt = out / "ckpt.pt"
    resumed = ckpt.exists()
    assert resumed == (asked.get("init_from") == "resume")
    settings = json.loads(ckpt.read_text() if resumed else os.environ["SETTINGS"])
    for path in (ckpt, out / "config.json"):
        path.write_text(json.dumps(settings))
    for step in range(1, settings["max_iters"] + 1):
        with open(out / "metrics.jsonl", "a") as f:
            last = {{"val/loss": 2.5}} if step == settings["max_iters"] else {{}}
            said = {{"went_on": resumed, "pid": os.getpid(), "threads": os.environ["OMP_NUM_THREADS"]}}
            f.write(json.dumps({{"iter": step, **said, **last}}) + "\\n")
        if settings["seed"] == 13:
            print("all is well")
            print("train.py: step 1: the sky fell", file=sys.stderr)
            sys.exit(3)
        time.sleep(0.05 * (step < settings["max_iters"]))
    for name in ("model.pt", "unfused.pt", "folded.pt"):
        shutil.copy(Path(__file__).parent / "export.pt", out / name)
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch) -> Path:
    """A train.py that takes no time, in a repository root of its own."""
    path = tmp_path / "root/train.py"
    (path.parent / "data/tinystories").mkdir(parents=True)
    for name in ("meta.json", "train.bin"):  # as good as prepared: no download
        (path.parent / "data/tinystories" / name).touch()
    path.write_text(STAND_IN.format(root=str(ROOT)))
    file = {"config": {}, "state": {"tok_emb.weight": torch.zeros(1)}, "meta": {"format": FORMAT}}
    torch.save(file, path.parent / "export.pt")
    monkeypatch.setattr(sweep, "ROOT", path.parent)
    monkeypatch.setattr(data, "ROOT", path.parent)
    monkeypatch.setattr(sweep, "POLL_S", 0.02)
    start = sweep.start

    def start_with_settings(run, *how):
        monkeypatch.setenv("SETTINGS", json.dumps(run.settings))
        return start(run, *how)

    monkeypatch.setattr(sweep, "start", start_with_settings)
    return path


run_sweep = partial(exit_status, sweep.main, "scripts/sweep.py")  # in this process


def launch(*argv, train: Path | None = None) -> subprocess.Popen:
    """sweep.py in a process of its own, over `train` if given."""
    change = f"data.ROOT = sweep.ROOT = sweep.Path({str(train.parent)!r}); " if train else ""
    code = f"import sys, data; from scripts import sweep; {change}sweep.POLL_S = .05; sys.exit(sweep.main())"
    command = [sys.executable, "-c", code, *map(str, argv)]
    return subprocess.Popen(command, cwd=ROOT, text=True, stderr=subprocess.PIPE)


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or a zombie."""
    if not Path(f"/proc/{pid}").exists():
        return True
    return "Z" in Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1].split()[0]


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def runs_of(*argv, variants=None, out="out") -> dict[str, runs.PlannedRun]:
    _, _, axes = sweep.read_command(list(argv))
    return {r.name: r for r in sweep.grid(sweep.Sweep(out=out, variants=variants), [], axes)}


# --- the grid


def test_every_variant_with_every_seed():
    runs = runs_of("--seed=1,2", variants=tuple(sweep.PAPER_ROWS))
    assert set(runs) == {f"{v}-seed{s}" for v in sweep.PAPER_ROWS for s in (1, 2)}
    for variant, (norm, taper, anchored) in sweep.PAPER_ROWS.items():
        s = runs[f"{variant}-seed2"].settings
        weight = 0.1 if anchored else 0.0
        assert (s["norm"], s["taper"], s["aux_weight"], s["seed"]) == (norm, taper, weight, 2)


def test_the_commands_give_the_settings():
    axes = ["--n_embd=32,64", "--learning_rate=1e-3,0.01"]
    for run in runs_of(*axes, variants=("internal_aux", "cbwc")).values():
        got = parse(Config, sweep.command(run, "new")[2:], files=True)[0].resolve()
        assert {**run.settings, "out_dir": str(run.folder)} == vars(got)


def test_lambda_is_an_axis_of_the_anchored_variants_alone():
    runs = runs_of("--aux_weight=0.1,1,10", "--seed=1", variants=("baseline", "all", "all_aux"))
    assert {n: r.settings["aux_weight"] for n, r in runs.items()} == {
        "baseline-seed1": 0, "all-seed1": 0, "all_aux-aux_weight0.1-seed1": 0.1,
        "all_aux-aux_weight1.0-seed1": 1, "all_aux-aux_weight10.0-seed1": 10,
    }  # fmt: skip


def test_a_knob_that_a_variant_does_not_read_makes_no_second_run():
    rows = ("baseline", "baseline_aux", "final", "coupled")
    runs = runs_of("--gate_end=500,1000", "--max_iters=1000", variants=rows)
    assert sorted(runs) == ["baseline", "baseline_aux", "coupled", "final-gate_end1000", "final-gate_end500"]
    runs = runs_of("--anchor_unit=absolute,relative", variants=("baseline", "internal", "internal_aux"))
    assert len(runs) == 2 + 2


def test_flags_take_back_what_a_file_sets(tmp_path):
    file = tmp_path / "limited.py"
    file.write_text("taper = 'internal'\ntaper_ceiling = 2.0\nsite_weight = 1.0\nsite_far = 5.0\n")

    def planned(*argv):
        (run,) = sweep.grid(sweep.Sweep(), [str(file)], sweep.read_command(list(argv))[2])
        return [run.settings[name] for name in ("taper", "taper_ceiling", "site_weight", "site_far")]

    assert planned("--seed=1") == ["internal", 2.0, 1.0, 5.0]
    assert planned("--taper=none", "--taper_ceiling=None") == ["none", None, 1.0, 5.0]
    assert planned("--site_weight=0", "--site_far=0") == ["internal", 2.0, 0.0, 0.0]


def test_plain_knobs_make_a_grid_without_variants():
    """Equal values are one run, and of a flag that is given twice the last counts."""
    runs = runs_of("--taper=internal,all", "--aux_weight=0,0.1", "--batch_size=4").values()
    found = [(s["taper"], s["aux_weight"], s["batch_size"]) for s in (run.settings for run in runs)]
    assert sorted(found) == [(t, a, 4) for t in ("all", "internal") for a in (0, 0.1)]
    (last,) = runs_of("--seed=1,2", "--seed=3").values()
    assert last.settings["seed"] == 3 and len(runs_of("--learning_rate=1e-3,0.001")) == 1


def test_a_value_with_commas_stands_in_brackets():
    runs = runs_of("--dyt_alpha=None,(1,1,1),(0.5, 0.2,0.2)", "--seed=1,2", variants=("baseline", "dyt"))
    alphas = [r.settings["dyt_alpha"] for r in runs.values() if r.settings["seed"] == 2]
    assert alphas == [None, None, (1, 1, 1), (0.5, 0.2, 0.2)]  # the baseline reads none
    run = runs["dyt-dyt_alpha_0.5_0.2_0.2_-seed1"]
    assert parse(Config, sweep.command(run, "new")[2:], files=True)[0].dyt_alpha == (0.5, 0.2, 0.2)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--lerning_rate=1"], "did you mean 'learning_rate'"),
        (["--seed=1,"], "seed must be an int"),
        (["--norm=dyt", "--dyt_alpha=1,1,1"], "as in --dyt_alpha='(1,1,1)'"),
        (["--seed"], "written --key=value"),
        (["--variants=baseline,intrenal"], "variants must be"),
        (["--out_dir=x"], "--out"),
        (["--init_from=resume"], "weights to start from"),
        (["--grad_checkpoint=True,False"], "--grad_checkpoint tells no two runs apart: give it one value"),
        (["--variants=baseline", "--norm=rmsnorm"], "leave one of them out"),
        (["--variants=baseline,all", "--aux_weight=1"], "has none"),
        (["--variants=all_aux", "--aux_weight=(0.0)"], "--aux_weight=0"),
        (["--taper=all", "--gate_end=900", "--gate_end_ratio=0.5,1"], "sweep gate_end instead"),
        (["--taper=all", "--gate_schedule=sequential", "--gate_gaps=(2,2,3)", "--gate_end_ratio=0.5,1"],
         "gate_gaps=(2, 2, 3) says where the gates are down, whatever the ratio; sweep gate_gaps instead"),
        (["--n_head=16,7"], "n_head=7: n_embd=512 must be a multiple"),
        (["no_such_file.py"], "no config file"),
    ],
)  # fmt: skip
def test_refused_before_anything_starts(argv, says, tmp_path, capsys):
    error = refused(capsys, *argv, f"--out={tmp_path / 'out'}", program="scripts/sweep.py")
    assert says in error and not (tmp_path / "out").exists()


def test_print_writes_commands_a_shell_can_run(tmp_path, capsys):
    out = tmp_path / "it's a folder"
    argv = [*TINY, "--variants=baseline,all", "--seed=1,2", f"--dataset={out}", f"--out={out}"]
    assert run_sweep(*argv, "--print", "--threads=3") == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 4 and not out.exists()
    split = subprocess.check_output(["sh", "-c", f"printf '%s\\n' {printed[0]}"], text=True)
    assert split.splitlines() == shlex.split(printed[0])
    *before, train = split.splitlines()[:4]
    assert before == ["env", "OMP_NUM_THREADS=3", sys.executable] and Path(train) == ROOT / "train.py"
    assert Path(parse(Config, split.splitlines()[4:])[0].out_dir) == out / "baseline-seed1"


# --- runs that end, fail, hang on


def test_runs_once_and_reports_a_failure(stand_in, tmp_path, capsys):
    grid = [*TINY, "--max_iters=2", "--variants=baseline,internal"]
    how = [f"--out={tmp_path / 'out'}", "--jobs=2", "--threads=1"]
    assert run_sweep(*grid, "--seed=13,1", *how) == 1
    said = capsys.readouterr()
    for name in ("baseline-seed13", "internal-seed13"):
        log = tmp_path / f"out/{name}.log"
        assert f"{name} failed with exit status 3: train.py: step 1: the sky fell ({log})" in said.err
        assert f"not {name}" in said.out
        assert "all is well" in log.read_text()
    assert "2 of 4 runs are finished" in said.out and "internal-seed1 finished, val/loss 2.5" in said.err
    done = lines(tmp_path / "out/baseline-seed1")
    assert [x["iter"] for x in done] == [1, 2] and {x["threads"] for x in done} == {"1"}

    assert run_sweep(*grid, "--seed=1,2", *how) == 0  # one more seed, one fewer
    assert lines(tmp_path / "out/baseline-seed1") == done and lines(tmp_path / "out/baseline-seed2")


def test_a_run_whose_log_ends_early_is_not_finished(stand_in, tmp_path, capsys):
    stand_in.write_text(stand_in.read_text().replace('{"val/loss": 2.5}', "{}"))
    for _ in ("new", "resumed"):
        assert run_sweep(*TINY, "--max_iters=1", "--variants=baseline", f"--out={tmp_path}/out") == 1
        said = capsys.readouterr()
        assert f"baseline ended, but its log does not: move {tmp_path}/out/baseline away" in said.err
        assert "0 of 1 runs are finished" in said.out


def test_a_run_is_known_under_the_name_of_an_earlier_grid(stand_in, tmp_path):
    argv = [*TINY, f"--out={tmp_path}/out", "--variants=baseline"]
    assert run_sweep(*argv, "--max_iters=1") == 0
    assert run_sweep(*argv, "--max_iters=1,2") == 0
    assert sorted(p.name for p in (tmp_path / "out").glob("*/")) == ["baseline", "baseline-max_iters2"]


def test_other_runs_folders_are_left_alone(stand_in, tmp_path, capsys):
    argv = [*TINY, "--variants=baseline,internal,all,final", f"--out={tmp_path}/out"]
    no_room = ["--max_iters=1", "--gate_start=1", "--gate_end=1"]  # for a gate: nothing runs
    assert run_sweep(*argv, *no_room) == 2
    assert run_sweep(*argv[:-2], "--variants=baseline", argv[-1], "--max_iters=1") == 0
    before = (tmp_path / "out/baseline/metrics.jsonl").read_bytes()
    (tmp_path / "out/all").mkdir()
    (tmp_path / "out/all/config.json").write_text("{}")
    with hold_folder(tmp_path / "out/internal"):
        (tmp_path / "out/internal/ckpt.pt").touch()
        assert run_sweep(*argv, "--max_iters=2") == 1
    said = capsys.readouterr()
    assert "baseline holds a run of other settings (max_iters=1, not 2)" in said.err
    assert "internal is running elsewhere" in said.err
    assert "all holds a run of other settings (written by another version)" in said.err
    assert "final finished" in said.err and "1 of 4" in said.out
    assert (tmp_path / "out/baseline/metrics.jsonl").read_bytes() == before


def test_a_damaged_log_is_refused(stand_in, tmp_path, capsys):
    argv = [*TINY, "--max_iters=2", "--variants=baseline,internal", f"--out={tmp_path}/out"]
    assert run_sweep(*argv) == 0
    metrics = tmp_path / "out/baseline/metrics.jsonl"
    whole = metrics.read_text()
    metrics.write_text(whole + "[]\n")
    assert run_sweep(*argv) == 1
    said = capsys.readouterr()
    assert f"baseline has a log that cannot be continued: {metrics}:3 is damaged" in said.err
    assert "1 of 2" in said.out and metrics.read_text() == whole + "[]\n"
    metrics.write_text(whole + "[]")  # what a kill cuts, train.py drops
    grid = runs_of(*TINY, "--max_iters=2", variants=("baseline",), out=str(tmp_path / "out"))
    assert runs.look(grid["baseline"])[0] == "resume"


def test_a_config_that_is_none_is_as_good_as_gone(stand_in, tmp_path, capsys):
    argv = [*TINY, "--max_iters=2", "--variants=baseline", f"--out={tmp_path}/out"]
    assert run_sweep(*argv) == 0
    (tmp_path / "out/baseline/config.json").write_text("3")
    (tmp_path / "out/baseline/ckpt.pt").unlink()
    assert run_sweep(*argv) == 1 and "has no ckpt.pt to go on with" in capsys.readouterr().err


def test_the_previous_checkpoint_alone_is_a_run_to_resume(tmp_path):
    run = runs_of(*TINY, variants=("baseline",), out=str(tmp_path / "out"))["baseline"]
    run.folder.mkdir(parents=True)
    assert runs.look(run) == ("new", "")
    (run.folder / "ckpt.prev.pt").touch()
    assert runs.look(run) == ("resume", "")


def test_a_gate_has_one_identity_however_its_end_is_said():
    """At a step or as a share of the run; a gate that ends with the run is another."""
    identities = []
    for flag in ("--gate_end=30", "--gate_end_ratio=0.75", "--gate_end_ratio=1"):
        (run,) = sweep.grid(*sweep.read_command([*TINY, "--variants=internal", flag]))
        identities.append(runs.identity(run.settings))
    assert identities[0] == identities[1] != identities[2]


def test_what_runs_differ_in_is_what_they_read():
    tapers = (runs_of(f"--gate_end={end}", *TINY, variants=("internal",)) for end in (20, 30))
    then, now = (planned["internal"].settings for planned in tapers)
    assert runs.identity(then) != runs.identity(now)
    assert runs.difference(then, now) == "gate_end=20, not 30"
    (dyt,) = runs_of("--dyt_alpha=(1,1,1)", *TINY, variants=("dyt",)).values()
    read = json.loads(json.dumps(dyt.settings)) | {"min_lr": 1e-5}  # as a run's config.json has it
    assert runs.difference(read, dyt.settings) == "min_lr=1e-05, not 0.0"
    assert runs.difference({"norm": "rmsnorm", "gone": 1}, then) == "written by another version"


def test_a_run_goes_on_under_a_file_that_differs_in_what_it_does_not_read(stand_in, tmp_path):
    """train.py would refuse the file's gate, which is not the run's; how often it logs may change."""
    files = {ratio: tmp_path / f"gate_{ratio}.py" for ratio in (0.5, 0.75)}
    for ratio, file in files.items():
        file.write_text(f"gate_end_ratio = {ratio}\nlog_interval = {round(20 * ratio)}\n")
    argv = [*TINY, "--max_iters=2", "--variants=baseline", f"--out={tmp_path}/out"]
    assert run_sweep(files[0.5], *argv) == 0
    (tmp_path / "out/baseline/model.pt").unlink()
    (run,) = sweep.grid(*sweep.read_command([str(files[0.75]), *argv]))
    assert runs.look(run) == ("resume", "")
    asked, explicit, rest = parse(Config, sweep.command(run, "resume")[2:], files=True)
    went_on = asked.resumed(explicit, Config(**runs.settings_in(run.folder)))
    assert not rest and (went_on.gate_end_ratio, went_on.log_interval) == (0.5, 15)
    assert run_sweep(files[0.75], *argv) == 0 and lines(run.folder)[-1]["went_on"]


def test_weights_are_part_of_a_run(tmp_path):
    """A config file may name them; what a variant does not read is left out as from new weights."""
    model = ModelConfig(vocab_size=64, block_size=16, n_layer=1, n_head=2, n_embd=8)
    identities = set()
    for name in ("a", "b"):
        torch.save(Transformer(model).to_file({}), tmp_path / f"{name}.pt")
        (tmp_path / f"{name}.py").write_text(f"init_from = '{tmp_path / name}.pt'\n")
        argv = ["--variants=baseline,internal", "--gate_schedule=sequential", "--gate_gaps=(2,2,3)"]
        for run in sweep.grid(*sweep.read_command([str(tmp_path / f"{name}.py"), *argv, "--max_iters=40"])):
            identities.add(runs.identity(run.settings))
            assert ("--gate_schedule=sequential" in run.argv) == (run.name == "internal")
    assert len(identities) == 4
    begun = ("scratch", "resume", "auto", "out/a")
    settings = {how: asdict(Config(init_from=how).resolve()) for how in begun}
    assert len({runs.identity(s) for s in settings.values()}) == 2


def test_a_corpus_that_was_prepared_anew_makes_other_runs(stand_in, tmp_path, capsys):
    text, corpus = Path(argparse.__file__).read_text(), tmp_path / "corpus"

    def prepared(text: str) -> dict:
        corpus.mkdir(exist_ok=True)
        prepare(lambda: [(text, True)], lambda: [(text[:3000], True)], corpus, 400, "a module")
        return open_corpus(corpus, 16)[0]

    argv = [*TINY, "--max_iters=4", f"--dataset={corpus}", "--variants=baseline", f"--out={tmp_path / 'out'}"]
    of = prepared(text)
    assert run_sweep(*argv) == 0
    log = tmp_path / "out/baseline/metrics.jsonl"
    steps = log.read_text()
    for recorded in (7, {}, of):  # what is damaged or missing tells nothing
        log.write_text(json.dumps({"corpus": recorded}) + "\n" + steps)
        assert run_sweep(*argv) == 0
        assert "was finished before" in capsys.readouterr().err
    prepared(text.replace("argument", "argumemt"))
    assert run_sweep(*argv) == 1
    said = capsys.readouterr().err
    assert f"is of another text than the corpus {corpus} holds now; move {log.parent} away" in said
    prepared(text)
    assert run_sweep(*argv) == 0


def test_a_corpus_is_prepared_as_train_py_would(stand_in, tmp_path, monkeypatch, capsys):
    """What is large is not fetched unasked; one for given weights is in their tokens."""
    for name, knobs in (("openwebtext", ""), ("stdlib", f"init_from = '{tmp_path / 'm.pt'}'")):
        (stand_in.parent / "data" / name).mkdir()
        (stand_in.parent / f"data/{name}/prepare.py").touch()
        (tmp_path / f"{name}.py").write_text(f"dataset = '{name}'\n{knobs}")
    model = ModelConfig(vocab_size=64, block_size=16, n_layer=1, n_head=2, n_embd=8)
    torch.save(Transformer(model).to_file({}), tmp_path / "m.pt")
    out = f"--out={tmp_path / 'out'}"
    assert run_sweep(tmp_path / "openwebtext.py", *TINY, out) == 2
    assert "which takes 54 GB" in capsys.readouterr().err
    asked, failed = [], argparse.Namespace(returncode=1)
    monkeypatch.setattr(data.subprocess, "run", lambda argv, env: asked.append((*argv, env)) or failed)
    assert run_sweep(tmp_path / "stdlib.py", "--max_iters=40", out) == 2
    *argv, env = asked[0]
    assert argv[1:] == [stand_in.parent / "data/stdlib/prepare.py", f"--tokenizer={tmp_path / 'm.pt'}"]
    assert env["PYTHONPATH"].split(os.pathsep)[0] == str(data.ROOT)  # whatever is installed
    with pytest.raises(SystemExit):  # for no weights, in tokens of its own
        data.prepare_if_missing(stand_in.parent / "data/stdlib")
    assert asked[1][1:-1] == (stand_in.parent / "data/stdlib/prepare.py",)
    assert sweep.weights.cache_info().currsize == 0  # they are not kept in memory


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_nothing_outlives_the_sweep(signum, stand_in, tmp_path, monkeypatch):
    monkeypatch.setenv("SETTINGS", json.dumps({"max_iters": 1000, "seed": 1}))
    argv = [*TINY, "--max_iters=1000", "--variants=baseline,internal", "--jobs=2", f"--out={tmp_path}/out"]
    process, folders = launch(*argv, train=stand_in), [tmp_path / "out/baseline", tmp_path / "out/internal"]
    logs = [folder / "metrics.jsonl" for folder in folders]
    wait_for(lambda: all(log.exists() and log.read_text() for log in logs))
    assert all(map(is_held, folders))
    process.send_signal(signum)
    error = process.communicate(timeout=20)[1]
    if signum == signal.SIGINT:
        assert process.returncode == 130 and "Go on with: python" in error
    elif not sys.platform.startswith("linux"):
        pytest.skip("elsewhere a killed sweep cannot take its runs with it")
    wait_for(lambda: not any(map(is_held, folders)))
    for pid in {lines(f)[0]["pid"] for f in folders}:
        wait_for(lambda pid=pid: has_ended(pid))


# --- with the real train.py


@pytest.mark.slow
def test_stopped_and_gone_on_with_is_the_uninterrupted_run(corpus, tmp_path, capsys):
    common = [*TINY, f"--dataset={corpus}", "--log_interval=10", "--ckpt_interval=1000", "--threads=1"]
    argv = [*common, "--variants=internal_aux", "--seed=1", f"--out={tmp_path / 'out'}", "--max_iters=300"]
    assert run_sweep(*argv, "--print") == 0
    (begin,) = capsys.readouterr().out.splitlines()
    process, run = launch(*argv), tmp_path / "out/internal_aux-seed1"
    planned = runs.PlannedRun("", run, [], {})
    wait_for(lambda: planned.last_line().get("iter", 0) >= 10)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130 and 10 <= planned.last_line()["iter"] < 300
    assert not (run / "folded.pt").exists()
    assert run_sweep(*argv, "--print") == 0
    (resume,) = capsys.readouterr().out.splitlines()
    assert resume.endswith("--init_from=resume")
    assert run_sweep(*argv) == 0
    assert run_sweep(*argv) == 0
    assert "was finished before" in capsys.readouterr().err

    whole, env = tmp_path / "whole", os.environ | {"OMP_NUM_THREADS": "1"}
    said_by(*shlex.split(begin)[3:], f"--out_dir={whole}", env=env)
    assert metrics(run) == metrics(whole)
