"""lm-evaluation-harness on a network of this project, or on an export.

    python scripts/harness/run.py out/taper_30m                       # HellaSwag, MMLU, GPQA, from the hub
    python scripts/harness/run.py out/taper_30m --local               # what needs no hub: harness/tasks
    python scripts/harness/run.py DIR --local --text=book.txt         # bits a byte of a text of yours
    python scripts/harness/run.py DIR --local --choices=FILE --tasks local_choice  # see continuations.py
    python scripts/harness/run.py DIR --tasks mmlu --num_fewshot 5    # without it their own, often 0
    python scripts/harness/run.py DIR --limit 100 --device cuda       # any other flag is lm_eval's

A run folder or a model file is first exported with convert.py --to=hf, into a folder that is removed again.
Five examples of MMLU want a context of about 4,000 tokens: lm_eval cuts what is longer from the left, and how
often it did is said, and how many items have a score that is not finite, which lm_eval counts as any other:
so --log_samples is always on. GPQA is gated: `hf auth login`, and accept its terms. HF_HUB_OFFLINE=1 takes
the data from the cache. Code that a stranger's folder brings runs only with lm_eval's --trust_remote_code.
Needs the packages of requirements-export.txt.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass, fields
from fnmatch import fnmatch
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Literal

import torch

from data.tokenizer import load_tokenizer  # not found? pip install -e .
from nanonorm.cli import parse
from nanonorm.errors import BadInput, exit_on_signals, one_line_errors
from nanonorm.files import ROOT
from nanonorm.hub import read_config
from scripts.exports.stock import EPS

TASKS = Path(__file__).with_name("tasks")
ON_THE_HUB = ("hellaswag", "mmlu", "gpqa_diamond_n_shot")
# what lm_eval says of an input that it cuts, and of a batch of inputs from which it generates text
CUT = ("exceeds model's maximum length", "Left truncation applied")
LOCAL = {"choices": "local_choice", "text": "local_text"}  # whose data a flag names
# flags of lm_eval that this reads, too, abbreviated as there
READ_HERE = argparse.ArgumentParser(add_help=False)
READ_HERE.add_argument("--tasks", "-t", nargs="+", action="extend")
READ_HERE.add_argument("--num_fewshot", "-f")
READ_HERE.add_argument("--output_path", "-o")


@dataclass
class Harness:
    """What is evaluated beside the model."""

    local: bool = False  # the tasks that need no hub, on the CPU
    text: str = str(ROOT / "LICENSE")  # file for the local bits a byte
    choices: str = str(TASKS / "choices.jsonl")  # file for the local choices, as continuations.py makes them
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # of the weights


def read_command(argv: list[str]) -> tuple[Harness, str, list[str]]:
    """(our knobs, the model, the flags of lm_eval). Raises: BadInput."""
    own = {f.name for f in fields(Harness)} | {"help"}
    mine = [word for word in argv if word.startswith("--") and word[2:].partition("=")[0] in own]
    others = [word for word in argv if word not in mine]
    words = ["--local=True" if word == "--local" else word for word in mine]
    k, explicit, _ = parse(Harness, words, usage=__doc__)
    if not others or others[0].startswith("-"):
        raise BadInput("name a run folder, a model file or an export folder, and then the flags of lm_eval")
    if not k.local and (of_local := sorted({"text", "choices"} & explicit)):
        raise BadInput(f"--{of_local[0]} is of the local tasks; add --local")
    named = READ_HERE.parse_known_args(others)[0].tasks
    asked = ",".join(named or LOCAL.values()).split(",")
    for name in sorted(LOCAL.keys() & explicit):
        if not any(fnmatch(LOCAL[name], pattern) for pattern in asked):
            raise BadInput(f"--{name} is of {LOCAL[name]}, which --tasks leaves out; leave out one of them")
    return k, others[0], others[1:]


def refuse(k: Harness):
    """Raises: BadInput if lm_eval, or the data of its tasks, cannot be had."""
    if find_spec("lm_eval") is None:
        raise BadInput("lm_eval is missing: pip install -r requirements-export.txt")
    if k.local or os.environ.get("HF_HUB_OFFLINE"):
        return
    from huggingface_hub import HfApi

    try:
        HfApi().dataset_info("Rowan/hellaswag", timeout=20)
    except Exception as e:  # whatever the network raises
        said = f"the Hugging Face hub is out of reach ({type(e).__name__}), and the tasks' data with it"
        raise BadInput(f"{said}; --local runs the local tasks") from None


def put_model(path: str, folder: Path):
    """An export folder linked as `folder`, anything else exported there. Exits with status 2 if convert.py
    fails, which has then said why."""
    with suppress(OSError):
        if '"model_type"' in Path(path, "config.json").read_text():  # a run folder has one of its own
            folder.symlink_to(Path(path).resolve())
            return
    source = Path(path).resolve() if Path(path).exists() else path  # else a hub id
    command = [sys.executable, "-m", "scripts.convert", str(source), "--to=hf", f"--out={folder}"]
    if subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL).returncode:
        sys.exit(2)


def model_args(folder: Path, dtype: str) -> str:
    """What lm_eval is told of a folder. Code of its own runs if the folder says that it is ours. Raises:
    BadInput.

    A sink is the begin token of each text, so the tokenizer gives none. lm_eval wants a token in front of a
    long text's first all the same: there it is the end of a line.
    """
    config, args = read_config(folder), [f"pretrained={folder}", f"dtype={dtype}"]
    eps = max(config.get(name) or 0 for name in ("rms_norm_eps", "layer_norm_epsilon"))
    if dtype == "float16" and eps > EPS[torch.float16]:
        why = "its gains, as large as its eps, overflow in float16"
        raise BadInput(f"{why}; export it with convert.py --dtype=float16, or take --dtype=bfloat16")
    if config["model_type"].startswith("nanonorm_"):
        args.append("trust_remote_code=True")
    if config.get("sink"):
        end_of_line = load_tokenizer(folder).encode("\n")[-1]
        args += ["add_bos_token=False", f"prefix_token_id={end_of_line}"]
    return ",".join(args)


def batch_size(folder: Path) -> str:
    """Of an export on a CPU: one text beside a sink. lm_eval pads by ends of text there, which can run away,
    and a weight of 0 times infinity then spoils the row."""
    return "1" if read_config(folder).get("sink") else "4"


def reason(said: list[str]) -> str:
    """The last error among lines; the last line of all may be a progress bar."""
    return ([line for line in said if re.match(r"[\w.]*(Error|Exception)\b", line)] or said)[-1]


def not_finite(path: Path) -> tuple[int, int]:
    """Of a samples file of lm_eval: items with a log-likelihood that is not finite, and all. Text that was
    generated has none."""
    items, bad = set(), set()
    with path.open(encoding="utf-8") as f:
        for item in map(json.loads, f):  # texts hold ends of line that only str.splitlines takes for such
            items.add(item["doc_id"])  # comes once a filter
            if any(isinstance(asked.get("arg_1"), dict) for asked in item["arguments"].values()):
                continue  # how to generate
            for answer in chain(*item["resps"]):  # (log-likelihood, whether greedy), or one string
                if (answer[0] if isinstance(answer, list) else answer) in ("nan", "inf", "-inf"):
                    bad.add(item["doc_id"])
    return len(bad), len(items)


def evaluate(task: str, shots: list[str], args: str, flags: list[str], out: Path, log: Path) -> bool:
    """Run lm_eval, which writes into `out`, and say how many inputs it has cut and how many items have no
    finite score; whether it came to its end. shots: the flag and how many, or nothing: the task's own."""
    examples = shots[-1] if shots else "as many as it asks for"
    print(f"== {task}, examples before the question: {examples}", flush=True)
    command = [sys.executable, "-P", "-m", "lm_eval", "--model", "hf", "--model_args", args]
    command += ["--tasks", task, *shots, "--output_path", str(out), "--log_samples", *flags]
    folder, written = (out.parent, "") if out.suffix == ".json" else (out, "**/")
    written += "samples_*.jsonl"
    before = set(folder.glob(written))
    with log.open("w") as f:
        status = subprocess.run(command, stderr=f).returncode
    said = log.read_text(errors="replace").splitlines() or [f"status {status}"]
    if status:
        print(f"lm_eval did not finish {task}: {reason(said)}", file=sys.stderr)
    cut, batches = (sum(words in line for line in said) for words in CUT)
    print(f"{task}: {cut} inputs were longer than the model's context and lost their beginning", flush=True)
    if batches:
        print(f"{task}: so did inputs in {batches} batches from which text was generated", flush=True)
    samples = sorted(set(folder.glob(written)) - before)
    if not (status or samples):
        print(f"{task}: no samples in {folder}, so scores that are not finite were not counted", flush=True)
    for path in samples:
        bad, items = not_finite(path)
        if bad:
            print(
                f"{path.stem}: {bad} of {items} items have a score that is not finite, and count all the same"
            )
    return status == 0


def main() -> int:
    k, path, flags = read_command(sys.argv[1:])
    exit_on_signals()  # the folder of the export is put away
    for name in ("text", "choices"):
        if not Path(getattr(k, name)).is_file():
            raise BadInput(f"{name}={getattr(k, name)} is no file")
    refuse(k)
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        os.environ["HF_MODULES_CACHE"] = str(work / "modules")  # transformers keeps a model's code there
        put_model(path, work / "model")
        # links, since lm_eval takes some characters of a path for its own
        (work / "text").symlink_to(Path(k.text).resolve())
        (work / "choices").symlink_to(Path(k.choices).resolve())
        args = model_args(work / "model", k.dtype)
        named, flags = READ_HERE.parse_known_args(flags)
        tasks, examples = ON_THE_HUB, 5
        if k.local:
            for task in TASKS.glob("*.yaml"):
                text = task.read_text().replace("CHOICES", f"{work}/choices").replace("TEXT", f"{work}/text")
                (work / task.name).write_text(text)
            os.environ["HF_HUB_OFFLINE"] = "1"
            tasks, examples = (",".join(LOCAL.values()),), 0
            flags = ["--batch_size", batch_size(work / "model"), *flags]
            flags = ["--include_path", str(work), "--device", "cpu", *flags]
        tasks = (",".join(named.tasks),) if named.tasks else tasks
        examples = named.num_fewshot or (None if named.tasks else examples)
        shots = [] if examples is None else ["--num_fewshot", str(examples)]
        out = Path(named.output_path or work / "out")
        finished = [evaluate(task, shots, args, flags, out, work / "log") for task in tasks]
    return 0 if all(finished) else 2


if __name__ == "__main__":
    with one_line_errors():
        sys.exit(main())
