"""A study is data: each can be planned and rehearsed, and goes on where it was interrupted."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path, PurePath
from types import SimpleNamespace

import pytest
import torch
from conftest import slow
from running import ROOT, exit_status, refused, said_by, wait_for

from config import Config
from nanonorm.cli import parse
from nanonorm.errors import BadInput
from nanonorm.files import hold_folder
from scripts import study, sweep

NAMES = study.names_of_studies()


@pytest.fixture
def command(monkeypatch, tmp_path):
    """Runs study.py in this process: exit status; toy: a study of one's own, by that name."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def run(*argv, toy: str | None = None) -> int:
        if toy is not None:
            (tmp_path / "toy.toml").write_text('question = "?"\nabout = "!"\n' + toy)
            monkeypatch.setattr(study, "STUDIES", tmp_path)
        return exit_status(study.main, "scripts/study.py", *argv)

    return run


def planned(name: str, *argv: str) -> list[study.StudyStep]:
    """The steps of a study at its real size, with any files for its inputs."""
    text = study.load(name)
    given = {key: str(ROOT / ("LICENSE" if key == "wikitext" else "data")) for key in text.get("inputs", {})}
    k, _, more = study.read_command([name, *argv])
    fixed = {"runs": "out", "data": str(ROOT / "data"), "out": "out/report"}
    return study.steps_of(text, study.values_of(text, k, given | more, fixed), k)


@pytest.mark.parametrize("name", NAMES)
def test_every_step_is_a_command_that_is_there(name):
    """Every config file and every knob of a run, and every script, at the size that is meant."""
    for step in planned(name):
        if step.kind == "run":
            assert (ROOT / step.words[0]).is_file() and "{" not in " ".join(step.words), step
            assert step.makes or step.stdout or step.unless, step
        elif step.kind in ("train", "sweep"):
            k, files, axes = sweep.read_command(step.words)
            flags = [f"--{name}={value}" for name, values in axes.items() for value in values]
            parse(Config, files + flags, files=True)
            assert all((ROOT / file.partition(":")[0]).is_file() for file in files)
            assert files or step.kind == "train", step
            assert (step.kind == "sweep") == ("out_dir" not in axes) == (k.out != "out/sweep")


def test_nothing_is_trained_before_the_published_losses_are_found():
    steps = planned("gpu_gpt2")
    first = next(i for i, step in enumerate(steps) if step.kind == "train")
    (check,) = [step for step in steps[:first] if step.words[0] == "scripts/evaluate.py"]
    assert "--within=0.005" in check.words and not check.optional


@pytest.fixture(scope="module")
def small():
    """The steps of the study of the small config, and {a sweep's step: its command, and its runs of two
    seeds at most, as the others only take time}."""
    steps, grids = planned("tinystories_small", "--flags=--compile=True --dtype=bfloat16"), {}
    for step in steps:
        if step.kind == "sweep":
            k, files, axes = sweep.read_command(step.words)
            axes |= {"seed": axes["seed"][:2]} if "seed" in axes else {}
            grids[step.key] = (k, files, axes), sweep.grid(k, files, axes)
    return steps, grids


def test_every_grid_of_the_small_config_can_be_planned(small):
    folders = set()
    for (k, _, axes), runs in small[1].values():
        assert axes["dtype"] == ["bfloat16"] and k.out not in folders
        folders.add(k.out)
        for run in runs:
            c = run.settings
            ends = c["taper"] != "none" or (c["site_weight"] > 0 and c["site_until"] == "blend")
            assert ends == any(flag.startswith("--gate_end_ratio=") for flag in run.argv), run.argv
    assert len(folders) == len(study.load("tinystories_small")["values"]["grid"])


def test_the_commands_of_the_results_make_the_runs_that_their_tables_read(small):
    """Of the small config, in each row the linked tables that its command makes: every folder that they name;
    of a star runs alone, not the logs beside them."""
    steps = [step for step in small[0] if step.name]
    runs = {}  # a grid's key -> its folder, those of its runs, and their logs
    for key, ((k, *_), planned_runs) in small[1].items():
        folders = [str(run.folder) for run in planned_runs]
        runs[key] = [k.out, *folders, *(f"{folder}.log" for folder in folders)]
    read = set()  # tables
    for row in (ROOT / "results/README.md").read_text().splitlines():
        for only in re.findall(r"tinystories_small [^`]*?--only=([\w,]+)", row):
            chosen = [step for step in steps if step.name in only.split(",")]
            there = [path for step in chosen for path in runs.get(step.key, [])]
            links = {f"out/report/{link}" for link in re.findall(r"\]\(([\w/.-]+gaps\.md)\)", row)}
            for step in (step for step in chosen if step.makes in links):
                read.add(step.makes)
                for word in (word for word in step.words if word.startswith("out/small/")):
                    found = [path for path in there if PurePath(path).match(word)]
                    assert found, f"--only={only} does not make {word} of {step.makes}"
                    assert not [path for path in found if path.endswith(".log")], f"{word} is also of logs"
    assert len(read) > 25


def test_every_pair_of_gpt2_small_is_of_two_of_its_protocols():
    values = study.load("gpt2_small")["values"]
    pairs = [pair.split("-") for pair in values["pairs"].split(",")]
    assert len(pairs) > 12 and {name for pair in pairs for name in pair} == set(values["protocol"])


def test_a_name_that_is_always_there_is_not_a_studys_own():
    fixed = {"out": "o", "runs": "r", "data": "d"}
    for study_of in ({"values": {"data": "x"}}, {"inputs": {"text": "a folder"}}, {"values": {"jobs": "2"}}):
        with pytest.raises(BadInput, match="of its own, which is always there"):
            study.values_of(study_of, study.StudyKnobs(), {}, fixed)


def test_a_path_is_one_word_of_its_folder_and_a_named_input_is_taken_in_a_rehearsal(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts, net, fixed = tmp_path / "my texts", tmp_path / "a b.gguf", {"data": "/d ata", "text": "/toy text"}
    texts.mkdir()
    net.touch()
    values = {"net": "hub/x", "both": "{given}/x {data}/y", "none": "", "flags": "'--a=(1, 2)' {both}"}
    run = "say.py {net} {both} {none} {data} {given} --z={both} {row.how} {given.name}"
    text = {"inputs": {"given": "?"}, "values": values | {"row": {"r": {"how": "{flags} {net}"}}}}
    text |= {"try": {"given": "{text}"}, "steps": [{"for": "row", "makes": "m", "run": run}]}
    k = study.StudyKnobs(rehearse=True)
    found = study.values_of(text, k, {"given": "my texts", "net": "a b.gguf"}, fixed)
    both = [f"{texts}/x", "/d ata/y"]
    words = ["say.py", str(net), *both, "/d ata", str(texts), "--z=" + " ".join(both)]
    words += ["--a=(1, 2)", *both, str(net), texts.name]
    assert study.steps_of(text, found | {"data": "/d ata"}, k)[-1].words == words
    for flags, wanted in (("", []), ("--a=1 " * 60, ["--a=1"] * 60)):  # of a command line, too
        again = study.values_of({"values": {"flags": "--b=2"}}, study.StudyKnobs(), {"flags": flags}, {})
        assert study.words_of("{flags}", again) == wanted


def test_a_whole_axis_in_a_word_is_all_of_its_values():
    """So a step is of what the steps before it were done for, whatever a call leaves out."""
    names = {"d": "/d ata", "a": [study.Row("x", {"k": "1"}), study.Row("y", {"k": "2"})], "b": ["p", "q"]}
    words = study.words_of(
        "go.py {d}/{a.k} {a.k} --to={d}/{a}/{b} --as={d} --no={c}", names | {"b": "p", "c": []}
    )
    assert words == ["go.py", "/d ata/1", "/d ata/2", "1", "2", "--to=/d ata/x/p,/d ata/y/p", "--as=/d ata"]
    assert study.words_of("{a}{b}", names) == ["xp", "xq", "yp", "yq"]
    for name, some in (("norm_free", "--held=code"), ("smollm2", "--held=code"),
                       ("gpt2_small", "--genre=books"), ("gpu_gpt2", "--set=openwebtext")):  # fmt: skip
        steps, made = planned(name, some), set()
        for step in steps:
            read = re.findall(rf"(?<!out_dir=){ROOT}/data/(\w+)(?=[ ,]|$)", " ".join(step.words))
            made |= set(re.findall(r"out_dir=\S+/data/(\w+)", " ".join(step.words)))
            made |= {"openwebtext"} if "data/openwebtext/prepare.py" in step.words else set()
            assert not set(read) - made, (name, some, step.words)


def test_what_a_study_asks_is_listed(command, capsys):
    assert command() == 0
    said = capsys.readouterr().out.splitlines()
    assert said[::3] == NAMES and all(line.startswith("    ") for line in said[1::3])


@pytest.mark.parametrize(
    "argv, said",
    [
        (["gates"], "no study gates; there are coupled_posthoc,"),
        (["tinystories_small"], "name --stories=PATH: a folder of train.txt"),
        (["tinystories_small", "--stories=nowhere"], "stories=nowhere does not exist"),
        (["folding", "--only=gates"], "no step 'gates'; there are time, report"),
        (["gpu_gpt2", "--sizes=s"], "--sizes is not of this study, which has protocol,"),
        (["gpu_gpt2", "--size=xs"], "--size=xs: there are s, m, l, xl"),
        (["gpu_gpt2", "gpu_speed"], "one study at a time"),
        (["folding", "--try", "--shape={x}"], "names what is not there, or has odd quotes or braces: 'x'"),
        (["folding", "--try", "--shape=it's"], "has odd quotes or braces"),
        (["gpu_gpt2", "--work=x"], "--work goes with --try"),
        (["folding", "--try", "--work=w[1]"], "a study takes *, ? and [ for patterns; name another folder"),
        (["gpu_gpt2", "--try", "-x"], "-x: flags are written --key=value"),
        (["gpu_speed"], "gpu_speed wants a GPU, and there is none; --try rehearses it"),
    ],
)
@pytest.mark.usefixtures("command")
def test_bad_input_is_one_line(argv, said, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert said in refused(capsys, *argv, program="scripts/study.py")


# --- going on

JOIN = """
import sys
text = "".join(open(path).read() for path in sys.argv[2:])
open(sys.argv[1], "w").write(text)
"""
CHAIN = """
[values]
more = ""
[[steps]]
unless = "{tmp}/a"
run = "{say} {tmp}/a {tmp}/x {tmp}/y"
[[steps]]
name = "second"
makes = "{out}/b"
run = "{say} {out}/b {tmp}/a {tmp}/x {more}"
[[steps]]
name = "third"
makes = "{out}/c"
run = "{say} {out}/c {out}/b {tmp}/y"
"""


@pytest.fixture
def toy(command, tmp_path, capfd):
    """Runs a study of one's own in tmp_path, of these steps; {tmp} and {say} in them stand for the folder and
    for a script: the lines on stderr. `ends` is its exit status."""

    def run(steps: str, *argv, say: str = JOIN, ends: int = 0) -> list[str]:
        made = tmp_path / "work/data/toy/meta.json"
        made.parent.mkdir(parents=True, exist_ok=True)
        made.touch()  # a rehearsal's corpus, which nothing here reads
        (tmp_path / "say.py").write_text(say)
        steps = steps.replace("{tmp}", str(tmp_path)).replace("{say}", f"{tmp_path}/say.py")
        how = ("--try", f"--work={tmp_path}/work", f"--out={tmp_path}/out")
        capfd.readouterr()
        assert command("toy", *how, *argv, toy=steps) == ends
        run.printed, said = capfd.readouterr()
        return said.splitlines()

    return run


MAKES_B = """
[[steps]]
name = "first"
makes = "{tmp}/b"
run = "{say} {tmp}/b {tmp}/toy.toml {tmp}/toy.toml"
"""


@pytest.fixture
def chain(toy, tmp_path):
    """Runs a study of three steps, each made of the one before: the files that this call has made."""
    for name in "xy":
        (tmp_path / name).write_text(name)

    def run(*argv) -> set[str]:
        paths = [tmp_path / "a", tmp_path / "out/b", tmp_path / "out/c"]
        before = {path: path.stat().st_mtime_ns for path in paths if path.exists()}
        toy(CHAIN, *argv)
        now = {path: path.stat().st_mtime_ns for path in paths if path.exists()}
        return {path.name for path in now if now[path] != before.get(path)}

    return run


def test_a_package_that_a_later_step_needs_is_asked_for_before_any_work(toy, tmp_path, monkeypatch):
    later = '[[steps]]\nname = "tasks"\nmakes = "{tmp}/c"\nrun = "scripts/harness/run.py {tmp}/b"'
    monkeypatch.setattr(study, "find_spec", lambda name: None)
    (error,) = toy(MAKES_B + later, ends=2)
    assert "needs lm_eval: pip install" in error and error.endswith("--only= without tasks leaves it out")
    assert not (tmp_path / "b").exists()
    toy(MAKES_B + later, "--only=first")
    assert (tmp_path / "b").exists()


def test_what_is_made_of_a_step_is_made_again_with_it_and_nothing_else(chain, tmp_path):
    assert chain() == {"a", "b", "c"} and chain() == set()
    assert (tmp_path / "out/c").read_text() == "xyxy"
    (tmp_path / "out/b").unlink()
    assert chain() == {"b", "c"}
    assert chain(f"--more={tmp_path}/y") == {"b", "c"}  # by other words
    (tmp_path / "a").unlink()
    assert chain(f"--more={tmp_path}/y") == {"a", "b", "c"}


def test_a_run_that_gets_no_further_makes_nothing_anew(toy, tmp_path, monkeypatch):
    """A run that can never be finished: what follows is made again only when its log has gone on, or when a
    finished one was trained anew."""
    at = [7]
    run = SimpleNamespace(folder="run", last_line=lambda: {"iter": at[0]})
    fake = {"read_command": lambda words: (None, [], {}), "look": lambda of: ("resume", "")}
    fake |= dict.fromkeys(("grid", "run_grid"), lambda *of: [run])
    for name, function in fake.items():
        monkeypatch.setattr(study.sweep, name, function)
    made = []
    for at[0], ended in ((7, 0), (7, 0), (9, 0), (9, 0), (9, 1), (9, 1), (9, 2), (9, 2)):
        line, state = {"iter": at[0], "perf/tok_s": ended}, "finished" if ended else "resume"
        run.last_line, study.sweep.look = partial(dict, line), lambda of, state=state: (state, "")
        toy(f'[[steps]]\nsweep = "any"\n{MAKES_B}', ends=1)
        made.append((tmp_path / "b").stat().st_mtime_ns)
    assert made[::2] == made[1::2] and len(set(made)) == 4  # made anew from nothing it is another run


def test_what_a_step_printed_is_shown_where_it_fails_and_written_again_where_it_is_gone(toy, tmp_path):
    steps = """
[[steps]]
unless = "{tmp}/there"
stdout = "{out}/said"
run = "{say}"
[[steps]]
stdout = "{out}/never"
run = "{say} fails"
"""
    say = f"import sys\nopen({str(tmp_path / 'there')!r}, 'w')\nprint('a row', *sys.argv[1:])\n"
    say += "sys.exit(len(sys.argv) - 1)"
    toy(steps, say=say, ends=2)
    assert toy.printed.splitlines()[-2:] == ["a row", "a row fails"]
    (tmp_path / "out/said").unlink()
    toy(steps, say=say, ends=2)
    assert (tmp_path / "out/said").read_text() == "a row\n" and not (tmp_path / "out/never").exists()


def test_only_some_steps(chain, tmp_path):
    assert chain("--only=second") == {"a", "b"}
    assert chain("--only=third") == {"c"} and chain() == set()
    assert chain("--only=second", f"--more={tmp_path}/y") == {"b"}
    assert chain(f"--more={tmp_path}/y") == {"c"}  # it was made of another b


def test_what_a_call_leaves_out_is_made_again_if_what_it_is_made_of_was(toy, tmp_path):
    steps = """
[values]
base = "1"
x = ["a", "b"]
[[steps]]
stdout = "{out}/base"
run = "{say} {base}"
[[steps]]
for = "x"
stdout = "{out}/of_{x}"
run = "{say} {x} {out}/base"
"""
    say = "import sys\nprint(*[open(p).read() for p in sys.argv[2:]], sys.argv[1])"
    for some in ((), ("--x=a", "--base=2"), ("--base=2",)):
        toy(steps, *some, say=say)
    assert (tmp_path / "out/of_b").read_text().split() == ["2", "b"]


WORDS = """
[values]
word = ["no", "such", "run"]
[[steps]]
for = "word"
optional = true
stdout = "{out}/said.txt"
run = "{say} {word}"
"""


def test_steps_follow_each_other_in_one_file_whatever_interrupts_them(toy, tmp_path):
    for some in ("--word=run", "--word=no,such,run"):
        toy(WORDS, some, say="import sys\nsys.argv[1] == 'such' and sys.exit(2)\nprint(sys.argv[1])")
    said = (tmp_path / "out/said.txt").read_text().splitlines()
    assert said == ["no", "not all of it was done", "run"]
    toy(WORDS, "--word=no,such,run", say="import sys\nprint(sys.argv[1])")  # what failed is tried again
    assert (tmp_path / "out/said.txt").read_text().split() == ["no", "such", "run"]


def test_a_value_that_a_call_leaves_out_keeps_its_lines_in_a_shared_file(toy, tmp_path):
    say, said = "import sys\nprint(sys.argv[1])", tmp_path / "out/said.txt"
    for some in ("--word=one", "--word=two"):
        toy(WORDS, some, say=say)
    assert said.read_text().split() == ["one", "two"]
    toy(WORDS, "--word=two,one,six", say=say)
    assert said.read_text().split() == ["two", "one", "six"]


EXITS = """
import sys, time
from pathlib import Path
from nanonorm.errors import exit_on_signals
exit_on_signals()
"""
CLEANS_UP = f"""{EXITS}
try:
    Path(sys.argv[1]).touch()
    time.sleep(60)
finally:
    time.sleep(0.5)
    Path(sys.argv[2]).touch()
"""
WORKS = f"""{EXITS}
from scripts import study
step = study.StudyStep("run", sys.argv[2:], "1 run")
study.Study([step], study.StudyKnobs(), Path(sys.argv[1])).work()
"""


@pytest.mark.parametrize("name", ["SIGTERM", slow("SIGINT"), "SIGKILL"])
def test_a_study_that_is_stopped_lets_its_step_clean_up(name, tmp_path):
    """SIGTERM is handed on; a Ctrl-C, which a terminal sends to both, reaches the step once; a killed one
    cannot wait for its step."""
    if name == "SIGKILL" and not sys.platform.startswith("linux"):
        pytest.skip("elsewhere a killed study cannot take its step with it")
    begun, cleaned, number = tmp_path / "begun", tmp_path / "cleaned", getattr(signal, name)
    (tmp_path / "slow.py").write_text(CLEANS_UP)
    words = [tmp_path / "record", tmp_path / "slow.py", begun, cleaned]
    argv = [sys.executable, "-c", WORKS, *map(str, words)]
    child = subprocess.Popen(argv, cwd=ROOT, start_new_session=True)
    while not begun.exists() and child.poll() is None:
        time.sleep(0.02)
    (os.killpg if name == "SIGINT" else os.kill)(child.pid, number)
    if name == "SIGKILL":
        assert child.wait() == -number
        wait_for(cleaned.exists)
    else:
        assert child.wait() == 128 + number and cleaned.exists()


def test_two_calls_of_a_study_do_not_work_at_once(toy, tmp_path):
    with hold_folder(tmp_path / "work/runs/toy.study") as held:
        assert toy(MAKES_B, ends=2)[-1].endswith(f"another process is at work in {held}; wait for it")
    assert not (tmp_path / "b").exists()


def test_a_step_that_says_what_no_step_has_is_refused(toy):
    assert "a step has fro, which steps do not have: " in toy(f'{MAKES_B}fro = "x"', ends=2)[-1]


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ('[[steps]]\nsay = "x"\n', "a step has one of sweep, train, run; this one has say"),
        (f"{MAKES_B}[values]\nvocab = 400\n", "vocab = 400 is no text, list or table; put it in quotes"),
        (f"[values]\n[[step]]\n{MAKES_B.replace('steps', 'step')}", "toy.toml lacks steps; --help says"),
    ],
)
def test_a_study_of_ones_own_is_refused_with_what_it_lacks(steps, said, toy):
    assert said in toy(steps, ends=2)[-1]


def test_a_step_may_write_to_the_folder_of_the_studys_name(toy):
    """It is not what keeps a second call out."""
    holds = "import sys\nfrom nanonorm.files import hold_folder\nwith hold_folder(sys.argv[1]): print('held')"
    toy('[[steps]]\nrun = "{say} {runs}/toy"\n', say=holds)
    assert "held" in toy.printed


def test_a_damaged_record_is_one_line(toy, tmp_path):
    toy(MAKES_B)
    (tmp_path / "work/runs/toy.study.json").write_text('{"x": ')
    assert "cannot read" in toy(MAKES_B, ends=2)[-1]


def test_a_step_that_fails_ends_the_study_with_its_reason(toy, tmp_path):
    error = toy('[[steps]]\nunless = "{tmp}/a"\nrun = "{say} {tmp}/a {tmp}/absent"\n' + MAKES_B, ends=2)
    assert "absent" in error[-2] and "a step failed, its reason is above: " in error[-1]
    assert not (tmp_path / "b").exists()


def test_what_a_step_that_failed_has_left_is_not_taken_for_another_values(toy, tmp_path):
    steps = '[values]\nw = "A"\n[[steps]]\nmakes = "{out}/f"\nrun = "{say} {w} {out}/f"\n'
    say = "import sys\nw, path = sys.argv[1:]\nopen(path, 'w').write(w)\nsys.exit(w == 'B')"
    for argv, ends in (((), 0), (("--w=B",), 2), ((), 0)):
        toy(steps, *argv, say=say, ends=ends)
    assert (tmp_path / "out/f").read_text() == "A"


def test_a_star_that_matches_nothing_is_said(toy, tmp_path):
    steps = MAKES_B.replace("toy.toml {tmp}/toy.toml", "*.toml {tmp}/*.toml {tmp}/*.txt")
    without = f"study.py: nothing matches {tmp_path}/*.txt: what this step makes is made without it"
    assert [line for line in toy(steps) if "nothing matches" in line] == [without]
    assert (tmp_path / "b").exists()
    (tmp_path / "x.txt").write_text("x")
    anew = f"--work={tmp_path}/anew"
    assert not [line for line in toy(steps, anew) if "nothing matches" in line]
    assert (tmp_path / "b").read_text().endswith("x")


@pytest.mark.parametrize("bad, ends", [(0, 0), (2, 1)])
def test_a_run_that_fails_keeps_no_next_step_from_its_work(bad, ends, toy, tmp_path, monkeypatch):
    grid = "config/tinystories_small.py --out={tmp}/runs --seed=1,2,3 --n_embd=16 --n_head=2"
    monkeypatch.setattr(sweep, "run_grid", lambda k, runs: runs[:bad])
    toy(f'[[steps]]\nsweep = "{grid}"\n{MAKES_B}', ends=ends)
    assert (tmp_path / "b").exists()


# --- rehearsals: the whole of each study, at toy size

TAKES = {"folding": 1, "norm_free": 5, "tinystories_small": 4}  # minutes
WRITTEN = {
    "coupled_posthoc": {"start", "distilled.csv", "distilled.png", "held_out.md"},
    "folding": {"what_does_folding_gain"},
    "gpt2_small": {"evaluation.json", "held_out.md", "before", "report.md"},
    "gpu_couple": {"decode.txt", "decode_llama.json", "toy", "pretraining_1.png"},
    "gpu_gpt2": {"check.json", "s.json"},
    "gpu_speed": {"ways.txt", "gpt2.txt", "prefill.txt", "decode.txt", "train.txt"},
    "norm_free": {"amplify.md", "course.png", "held_out.md"},
    "smollm2": {"couple.md", "choices", "held_out.md"},
    "tinystories_small": {"does_removal_cost", "when_should_the_taper_begin", "which_learning_rate"},
}


@pytest.mark.parametrize("name", [slow(name, minutes=TAKES.get(name, 3)) for name in NAMES])
def test_a_study_is_rehearsed_offline_on_a_cpu(name, tmp_path):
    for package in ("peft", "matplotlib", "pandas", "transformers"):
        pytest.importorskip(package)
    flags = ["--try", f"--work={tmp_path}", f"--out={tmp_path}/report"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    rehearse = partial(said_by, "scripts/study.py", name, *flags, env=env, timeout=None)
    rehearse()
    out = tmp_path / "report"
    assert {path.name for path in out.iterdir()} >= WRITTEN[name]
    made = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.pt")}
    tables = {path: path.read_text() for path in out.rglob("*.md")}
    rehearse()
    assert made == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.pt")}
    assert tables == {path: path.read_text() for path in out.rglob("*.md")}
    check(name, out)


def check(name: str, out: Path):
    """What stands in the report of a rehearsal."""
    if name == "tinystories_small":
        table = (out / "which_learning_rate/early_start/gaps.md").read_text()
        assert all(f"| internal_aux | {start} | 2 |" in table for start in (4, 10))
        logs = (out / "which_learning_rate/early_start/logs.jsonl").read_text().splitlines()
        assert sum('"settings"' in line for line in logs) == 2 * 5  # the plain baseline has no start
    if name == "gpu_gpt2":
        rows = json.loads((out / "s.json").read_text())["rows"]
        assert len(rows) == 5 * 3  # the network before and four protocols, on three texts
    if name == "gpt2_small":
        lines = (out / "held_out.md").read_text().splitlines()
        for pair in study.load(name)["values"]["pairs"].replace("-", " less ").split(","):
            assert sum(line.startswith(f"| {pair} | 2 |") for line in lines) == 2, pair
    if name == "coupled_posthoc":
        said = (out / "held_out.md").read_text()
        assert said.count("_through | 2 |") >= 3 and "| layer_2 | 1 |" in said
        assert "none_0_through less none_0_stopped" in said
