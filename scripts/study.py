"""A study, from its corpora to its tables and figures, in one call that goes on after an interruption.

    python scripts/study.py                                          # the studies, and what each one asks
    python scripts/study.py gpu_speed --out=results/speed_h200
    python scripts/study.py tinystories_small --stories=DIR --only=rate,gate
    python scripts/study.py coupled_posthoc --try                    # a rehearsal at toy size, offline

A study is a file in scripts/studies/. It names the steps, one after the other, and the values in them:

    question       what the study asks; about: what it takes; gpu = true: without one only --try runs it
    [inputs]       what a user must name, with a remark: {stories} in a step, --stories=DIR in a command
    [values]       defaults of more names: a text, a list (an axis), or a table of rows ({model.teacher});
                   --name=value sets another, and with commas between them some of an axis
    [try]          what --try sets instead

Each of [[steps]] is a sweep = "words of sweep.py", a train = "words of train.py", or a run = "a command of
this checkout", with {names} in the words: an axis that the step is not `for` gives a word for each of its
values, or one --flag with commas between them. Beside it

    name           for --only; a step without one is always done
    for            names of axes: the step is done for each value, or for each pair of values
    stdout         the file for what the command prints; lines of JSON are left out
    makes          a file (or it is stdout): the step is done already if that exists, was made by the same
                   words, and no step before it has been done again since
    unless         a file: the step is done already if that exists, whoever made it
    within         the folder in which the command runs, if not the checkout
    when           "real": not with --try; "try": with it alone
    optional       true: if the command fails, go on all the same

Names that are always there: {out}, for tables and figures, {runs} and {data}, and with --try {text}, a folder
of this project's own text, of which {data}/toy is prepared. A run that fails stops neither its sweep nor the
next step; any other ends the study. A starred word that matches no path is named and left out.
"""

import glob
import itertools
import os
import re
import shlex
import signal
import string
import subprocess
import sys
import tempfile
import tomllib
from contextlib import ExitStack
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path

import torch

from nanonorm.cli import parse  # not found? pip install -e .
from nanonorm.errors import BadInput, exit_on_signals, one_line_errors
from nanonorm.files import ROOT, atomic_write, hold_folder, write_json
from nanonorm.log import say
from nanonorm.typed import Count
from scripts import sweep
from scripts.studies.runs import read_json

PACKAGES = {  # what a step's script needs that requirements.txt does not have, and may need only after hours
    "scripts/report.py": "matplotlib",
    "scripts/stream.py": "matplotlib",
    "scripts/harness/run.py": "lm_eval",
}
STUDIES = Path(__file__).with_name("studies")
KINDS = ("sweep", "train", "run")
TOY_CORPUS = {
    "when": "try",
    "unless": "{data}/toy/meta.json",
    "run": "data/tinystories/prepare.py --text={text}/train.txt --val_text={text}/valid.txt --vocab_size=400 "
    "--out_dir={data}/toy",
}


@dataclass
class StudyKnobs:
    """How a study is run."""

    out: str | None = None  # folder for tables and figures; None: out/<the study's name>
    only: tuple[str, ...] | None = None  # names of steps; None: all
    jobs: Count = 2  # runs at a time
    threads: Count = 1  # CPU threads a run
    rehearse: bool = False  # what --try means: toy sizes, in a temporary folder
    work: str | None = None  # with --try a folder that stays, to go on in


class Filled(str):
    """A value with its names filled in. words: what a step has where the value stands alone: one for each of
    its template's, none of them parted by a space of a name's value; a path of the command line is one."""

    def __new__(cls, template: str, names: dict, path: bool = False):
        value = super().__new__(cls, template if path else template.format_map(names))
        value.words = [template] if path else words_of(template, names)
        return value


class Row(str):
    """A key of a table of rows, with the row's columns as attributes: {model} and {model.teacher}."""

    def __new__(cls, key: str, columns: dict):
        row = super().__new__(cls, key)
        row.__dict__.update(columns)
        return row


# ---------------------------------------------------------------------------------------------------------
# a study's file


def load(name: str) -> dict:
    """A study by its name. Raises: BadInput."""
    path = STUDIES / f"{name}.toml"
    if not path.exists():
        raise BadInput(f"no study {name}; there are {', '.join(names_of_studies())}")
    try:
        study = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as e:
        raise BadInput(f"{path}: {e}") from None
    if lacking := [key for key in ("question", "about", "steps") if key not in study]:
        raise BadInput(f"{path} lacks {', '.join(lacking)}; --help says what a study has")
    return study


def names_of_studies() -> list[str]:
    return sorted(path.stem for path in STUDIES.glob("*.toml"))


def values_of(study: dict, k: StudyKnobs, given: dict[str, str], fixed: dict) -> dict:
    """Every {name} of a study's steps: a text, a Path (an input), or a list (an axis).
    given: of the command line. Raises: BadInput for what is missing, or not known."""
    values = study.get("values", {}) | (study.get("try", {}) if k.rehearse else {})
    inputs, found = study.get("inputs", {}), dict(fixed)
    for name in given:
        if name not in values | inputs:
            raise BadInput(f"--{name} is not of this study, which has {', '.join(inputs | values)}")
    always = {*fixed, "text", *(f.name for f in fields(k))}  # {text} is there with --try
    if taken := [name for name in [*inputs, *values] if name in always]:
        raise BadInput(f"the study has a name {taken[0]} of its own, which is always there; rename it")
    for name, remark in inputs.items():
        default = values.pop(name, "")  # of [try]
        text = given.get(name) or default.format_map(fixed)
        if not text:
            raise BadInput(f"name --{name}=PATH: {remark}")
        if not Path(text).exists():
            raise BadInput(f"{name}={text} does not exist: {remark}")
        found[name] = Path(text).resolve()
    for name, value in values.items():
        if isinstance(value, str):
            path = name in given and os.path.exists(given[name])  # "" is none, nor is what is too long
            text = os.path.abspath(given[name]) if path else given.get(name, value)
            found[name] = Filled(text, found, path)
            continue
        if not isinstance(value, list | dict):
            raise BadInput(f"{name} = {value} is no text, list or table; put it in quotes")
        rows = value if isinstance(value, dict) else {key: {} for key in value}
        chosen = [key for key in given[name].split(",") if key] if name in given else rows
        if unknown := [key for key in chosen if key not in rows and rows is value]:
            raise BadInput(f"--{name}={unknown[0]}: there are {', '.join(rows)}")
        columns = [{c: Filled(text, found) for c, text in rows.get(key, {}).items()} for key in chosen]
        found[name] = list(map(Row, chosen, columns))
    return found


@dataclass
class StudyStep:
    """One step of a study, with its names filled in."""

    kind: str  # of KINDS
    words: list[str]
    key: str  # what tells it from the others in the record
    name: str | None = None
    stdout: str | None = None
    makes: str | None = None
    unless: str | None = None
    within: str = str(ROOT)
    optional: bool = False


def steps_of(study: dict, values: dict, k: StudyKnobs) -> list[StudyStep]:
    """All steps, in their order. Raises: BadInput for a name in --only that no step has."""
    found = []
    for number, step in enumerate(map(dict, [TOY_CORPUS, *study["steps"]])):
        if step.pop("when", None) == ("real" if k.rehearse else "try"):
            continue
        kinds = [kind for kind in KINDS if kind in step]
        if len(kinds) != 1:
            raise BadInput(f"a step has one of {', '.join(KINDS)}; this one has {', '.join(step)}")
        (kind,) = kinds
        if unknown := step.keys() - {kind, "for", *(f.name for f in fields(StudyStep))}:
            raise BadInput(f"a step has {min(unknown)}, which steps do not have: {step[kind][:60]}")
        template = step.pop(kind)
        axes = [name.strip() for name in step.pop("for", "").split(",") if name]
        for point in itertools.product(*(values[axis] for axis in axes)):
            names = values | dict(zip(axes, point, strict=True))
            texts = {n: v.format_map(names) if isinstance(v, str) else v for n, v in step.items()}
            key = " ".join([str(number), kind, *point])
            found.append(StudyStep(kind, words_of(template, names), key, **texts))
    named = list(dict.fromkeys(step.name for step in found if step.name))
    if unknown := [name for name in k.only or () if name not in named]:
        raise BadInput(f"no step {unknown[0]!r}; there are {', '.join(named) or 'none with a name'}")
    return found


def words_of(text: str, names: dict) -> list[str]:
    """The words of a command. A word that is a {name} alone becomes as many as its value has, or none; one
    with a whole axis in it, one for each value, or one flag."""
    words = []
    for word in shlex.split(text):
        alone = re.fullmatch(r"\{([\w.]+)\}", word)
        named = {re.split(r"\W", field)[0] for _, field, *_ in string.Formatter().parse(word) if field}
        axes = {name: names[name] for name in sorted(named) if isinstance(names[name], list)}
        value = string.Formatter().get_field(alone[1], (), names)[0] if alone and not axes else None
        if isinstance(value, Filled):
            words += value.words
            continue
        points = (dict(zip(axes, point, strict=True)) for point in itertools.product(*axes.values()))
        each = [word.format_map(names | point) for point in points]
        if each and axes and word.startswith("--"):
            flag, _, _ = word.partition("=")
            each = [f"{flag}={','.join(one.removeprefix(f'{flag}=') for one in each)}"]
        words += each
    return words


# ---------------------------------------------------------------------------------------------------------
# doing the steps


class Study:
    """The steps of a study at work, and the record of what was done: {step's key: {"words", "said", ...}}."""

    def __init__(self, steps: list[StudyStep], k: StudyKnobs, record: Path):
        self.steps, self.k, self.path = steps, k, record
        found = read_json(record, "study.py") if record.exists() else {}
        self.record = {key: done for key, done in found.items() if re.match(r"\d+ ", key)}
        self.unfinished = 0

    def work(self) -> int:
        """Do what is left. Returns the exit status: 1 if a run is not finished. Raises: BadInput, before the
        first step if a package is missing that a later one needs."""
        steps = [step for step in self.steps if not self.k.only or step.name in (None, *self.k.only)]
        for step in steps:
            package = PACKAGES.get(step.words[0])
            if package and not self.is_done(step) and find_spec(package) is None:
                needs = f"{step.words[0]} needs {package}: pip install -e '.[dev,export]'"
                without = f"; --only= without {step.name} leaves it out" if step.name else ""
                if not step.optional:
                    raise BadInput(needs + without)
                say(f"{needs}, or a step will not be done: {shlex.join(step.words)[:90]}")
        for step in steps:
            if self.is_done(step):
                if step.stdout and step.key in self.record and not Path(step.stdout).exists():
                    self.write_said(step.stdout)
                why = f"{step.unless} is there, and taken as it is" if step.unless else "done before"
                say(f"{why}: {shlex.join(step.words)[:90]}")
            else:
                getattr(self, step.kind)(step)
        return 1 if self.unfinished else 0

    def is_done(self, step: StudyStep) -> bool:
        if step.unless and Path(step.unless).exists():
            return True
        made = step.makes or step.stdout
        same = self.record.get(step.key, {}).get("words") == step.words
        return made is not None and same and Path(made).exists()

    def sweep(self, step: StudyStep):
        flags = [f"--jobs={self.k.jobs}", f"--threads={self.k.threads}"]
        s, files, axes = sweep.read_command([*step.words, *flags])
        runs = sweep.grid(s, files, axes)
        before = self.record.get(step.key, {}).get("runs")
        there = [state_of(run) for run in runs]
        self.unfinished += len(sweep.run_grid(s, runs))
        now = [state_of(run) for run in runs]
        # the next steps are of these runs; what another version made of runs that were finished stays
        if now != (there if before is None else before):
            self.forget_what_follows(step)
        self.record[step.key] = {"runs": now}
        write_json(self.path, self.record, indent=1)

    def train(self, step: StudyStep):
        run = sweep.one_run(step.words)
        if sweep.look(run)[0] == "finished":
            return
        self.forget_what_follows(step)
        sweep.prepare_corpora([run])
        run.folder.parent.mkdir(parents=True, exist_ok=True)
        if sweep.Crew([run], 1, self.k.threads).work():
            raise BadInput(f"{run.folder}, which the next steps need, is not finished; the reason is above")

    def run(self, step: StudyStep):
        """A command of this checkout, as a process of its own."""
        self.record.pop(step.key, None)
        self.forget_what_follows(step)
        for path in filter(None, (step.makes, step.stdout)):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        say(shlex.join(["python", *step.words]))
        script, *words = itertools.chain(*(matches(word) for word in step.words))
        command, env = [sys.executable, str(ROOT / script), *words], os.environ | {"PYTHONPATH": str(ROOT)}
        how = dict(env=env, text=True, stdout=subprocess.PIPE if step.stdout else None)
        how["preexec_fn"] = sweep.ends_with_its_parent()
        with subprocess.Popen(command, cwd=step.within, **how) as child:
            try:
                said = child.communicate()[0] or ""
            except SystemExit as e:  # it may clean up, where a kill would leave parts of files
                if e.code != 128 + signal.SIGINT:  # a Ctrl-C has reached it too
                    child.terminate()
                raise
        print(said, end="", flush=True)
        if child.returncode and not step.optional:
            raise BadInput(f"a step failed, its reason is above: {shlex.join(step.words)}")
        if child.returncode:
            print("not all of it was done", flush=True)
            said += "not all of it was done\n"
        text = "".join(line for line in said.splitlines(True) if not line.startswith("{"))
        words = None if child.returncode else step.words  # None: not done, the next call tries again
        self.record[step.key] = {"words": words, "said": text, "stdout": step.stdout}
        write_json(self.path, self.record, indent=1)
        if step.stdout:
            self.write_said(step.stdout)

    def write_said(self, stdout: str):
        """Write a file for what is printed: the steps that share it follow each other, done now or before."""
        numbers = {number_of(s.key) for s in self.steps if s.stdout == stdout}
        shared = [k for k in self.record if number_of(k) in numbers and self.stdout_of(k) == stdout]
        order = {s.key: i for i, s in enumerate(self.steps)}
        shared.sort(key=lambda key: order.get(key, -1))  # not of this call's values: first
        Path(stdout).parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(stdout, "w") as f:
            f.write("".join(self.record[key]["said"] for key in shared))

    def stdout_of(self, key: str) -> str | None:
        """The file of what a step printed: of this call, or as a call with other values recorded it."""
        now = {s.key: s.stdout for s in self.steps}
        return now.get(key, self.record.get(key, {}).get("stdout"))

    def forget_what_follows(self, step: StudyStep):
        """Later steps, whatever their values, may be made of what this one makes: they are done again."""
        later = {s.key for s in self.steps[self.steps.index(step) + 1 :]}
        later |= {key for key in self.record if number_of(key) > number_of(step.key)}
        for key in later:
            if "runs" in self.record.get(key, ()):  # of a sweep, which is asked anew
                continue
            if step.stdout is None or self.stdout_of(key) != step.stdout:
                self.record.pop(key, None)
        write_json(self.path, self.record, indent=1)


def state_of(run) -> list:
    """Where a run is: the whole last line of one that is finished, which another making of it would not have;
    the step of any other, which may come to the same one again in every call."""
    state, line = sweep.look(run)[0], run.last_line()
    return [str(run.folder), state, line if state == "finished" else line.get("iter")]


def number_of(key: str) -> int:
    """The place of a step's table in its study."""
    return int(key.split()[0])


def matches(word: str) -> list[str]:
    """The paths that a word with a star in it stands for, which may be none; any other word is itself."""
    found = sorted(glob.glob(word)) if "*" in word else [word]
    if not found:
        say(f"nothing matches {word}: what this step makes is made without it")
    return found


# ---------------------------------------------------------------------------------------------------------
# the command


def read_command(argv: list[str]) -> tuple[StudyKnobs, list[str], dict[str, str]]:
    """(knobs, the study's name if one is given, values of the study's own names). Raises: BadInput."""
    argv = ["--rehearse=True" if word == "--try" else word for word in argv]
    mine, names, given = sweep.split_words(argv, StudyKnobs)
    k, _, _ = parse(StudyKnobs, mine, usage=__doc__)
    if len(names) > 1:
        raise BadInput(f"one study at a time, not {' and '.join(names)}")
    if k.work and not k.rehearse:
        raise BadInput("--work goes with --try")
    return k, names, given


def toy_text(folder: Path):
    """Text of this project to rehearse on, as a folder of stories is laid out."""
    folder.mkdir(parents=True, exist_ok=True)
    train = "".join(path.read_text() for path in sorted((ROOT / "nanonorm").glob("*.py")))
    valid, other = ((ROOT / name).read_text() for name in ("model.py", "README.md"))
    for name, text in {"train.txt": train, "valid.txt": valid, "other.txt": other}.items():
        (folder / name).write_text(text)


def main() -> int:
    k, names, given = read_command(sys.argv[1:])
    if not names:
        for name in names_of_studies():
            study = load(name)
            print(f"{name}\n    {study['question']}\n    {study['about']}")
        return 0
    study, fixed = load(names[0]), {"runs": "out", "data": str(ROOT / "data")}
    with ExitStack() as stack:
        if k.rehearse:
            temporary = k.work or stack.enter_context(tempfile.TemporaryDirectory())
            work = Path(temporary).resolve()
            os.environ["HF_HUB_OFFLINE"] = "1"
            fixed = {name: str(work / name) for name in ("runs", "data", "text")}
        fixed["out"] = str(Path(k.out).resolve()) if k.out else f"{fixed['runs']}/{names[0]}"
        named = [k.work, k.out]  # by the user, and read with a step's own star
        for path in (os.path.abspath(path) for path in named if path):
            if glob.has_magic(path):
                raise BadInput(f"{path}: a study takes *, ? and [ for patterns; name another folder")
        if k.rehearse:
            toy_text(Path(fixed["text"]))
        try:
            values = values_of(study, k, given, fixed)
            steps = steps_of(study, values, k)
        except (LookupError, AttributeError, ValueError) as e:
            what = "names what is not there, or has odd quotes or braces"
            raise BadInput(f"a value or a step of {names[0]} {what}: {e}") from None
        if study.get("gpu") and not k.rehearse and not torch.cuda.is_available():
            raise BadInput(f"{names[0]} wants a GPU, and there is none; --try rehearses it at toy size")
        os.chdir(ROOT)
        Path(fixed["out"]).mkdir(parents=True, exist_ok=True)
        try:  # the record is beside it, and what steps make is in it, whatever --out says
            stack.enter_context(hold_folder(Path(fixed["runs"], f"{names[0]}.study")))
        except BadInput as e:
            raise BadInput(str(e).replace(", or name another --out_dir", "")) from None
        if k.rehearse and not k.work:
            stack.callback(say, "what this rehearsal made is deleted; --work=DIR keeps it, to go on in")
        exit_on_signals()
        return Study(steps, k, Path(fixed["runs"], f"{names[0]}.study.json")).work()


if __name__ == "__main__":
    with one_line_errors():
        sys.exit(main())
