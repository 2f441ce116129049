"""Tokens a second in vLLM and in llama.cpp: a network with its norms, with one statistic a block, with none.

    python scripts/speed/serving.py out/smollm2 --vllm=out/vllm/bin/python --out=out/serving

PATH is a network with RMSNorm; `bash scripts/vllm.sh out/vllm` makes the environment. Two networks are made
of it, "coupled" (CoupledNorm) and "none" (every norm a fixed scaling: of 0.03, so that nothing overflows, and
before the head of 1). Neither is trained: their text means nothing, and their speed is that of a trained
one. scripts/convert.py exports them, which proves each export.

A contestant is a process: a warm-up of each batch, then --rounds of each. They take turns in a fresh order,
for --processes turns. OUT/serving.csv gets a line for each round; the command, given again, goes on where it
was stopped. Other settings need another OUT. A ratio is the median over turns of the contestant's tok/s (of
its best round) over the reference's of the same turn, with the smallest and the largest. tok/s counts new
tokens, and the time of the prompts is in it.
"""

import csv
import json
import random
import shutil
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch

from begin import begun_from  # not found? pip install -e .
from bench import with_norm
from forms import config_of
from nanonorm.cli import parse
from nanonorm.errors import BadInput, one_line_errors
from nanonorm.files import ROOT, write_file
from nanonorm.machine import processor
from nanonorm.run import given_weights
from nanonorm.tables import markdown, report_folder, write_csv
from nanonorm.typed import Count, Some, Whole
from scripts.convert import Convert, exported
from scripts.couple import whole_rmsnorm
from scripts.speed.tables import refuse_other_settings


class Contestant(NamedTuple):
    network: str  # of CHANGES, or "norms"
    to: str  # the kind of export
    engine: str
    backend: str = ""  # vLLM's --model-impl; auto is a class of its own
    against: str = ""  # the contestant that ratios refer to


CHANGES = {"coupled": ("coupled", "none"), "none": ("rmsnorm", "all")}  # name -> (norm, taper)
CONTESTANTS = {
    "with norms in vLLM's class": Contestant("norms", "hf", "vllm", "auto", "with norms in vLLM's class"),
    "with norms": Contestant("norms", "hf", "vllm", "transformers", "with norms in vLLM's class"),
    "coupled": Contestant("coupled", "hf", "vllm", "transformers", "with norms"),
    "none": Contestant("none", "hf", "vllm", "transformers", "with norms"),
    "none as stock in vLLM's class": Contestant(
        "none", "stock", "vllm", "auto", "with norms in vLLM's class"
    ),
    "with norms in llama.cpp": Contestant("norms", "gguf", "llama.cpp", "", "with norms in llama.cpp"),
    "none as stock in llama.cpp": Contestant("none", "gguf", "llama.cpp", "", "with norms in llama.cpp"),
}
SCALE = 0.03  # what c is in the blocks
COLUMNS = ["mode", "contestant", "turn", "batch", "new_tokens", "round", "seconds"]
SAME = ("batch", "prompt", "new_tokens", "rounds", "threads", "seed")  # in all rows of a folder


@dataclass
class Serving:
    """What is timed, and how often."""

    out: str | None = None  # the folder for networks, exports and serving.csv
    vllm: str | None = None  # an interpreter that has vLLM
    who: Some[Literal[*CONTESTANTS]] = tuple(CONTESTANTS)  # contestants
    mode: Literal["compiled", "eager"] = "compiled"  # in vLLM, whose default is compiled
    batch: Some[Count] = (1, 8, 32)  # texts at once
    prompt: Count = 128  # tokens
    new_tokens: Count = 128  # tokens that follow each
    rounds: Count = 2  # of each batch, timed, in each process
    processes: Count = 3  # turns
    threads: Count = 2  # of each process
    seed: Whole = 1337  # of prompts and order


def make_network(source: str, name: str, path: Path):
    """Write a network of CHANGES, made of one whose norms are whole, as a model file. Raises: BadInput,
    ModelError."""
    file, where = given_weights(source)
    model = begun_from(file, with_norm(config_of(file, where), *CHANGES[name]), where)
    if tapers := model.taper_norms():
        model.set_phase("scale")
        model.gate.fill_(0.0)
        for norm in tapers.values():
            norm.c.fill_(SCALE)
        model.norm_final.c.fill_(1.0)
    write_file(model.eval().to_file({**model.meta, "phase": model.phase, "gate": 0.0}), path)


def export_of(source: str, contestant: Contestant, out: Path) -> Path:
    """The folder of a contestant, made if it is not there. Raises: BadInput, ModelError."""
    folder = out / f"{contestant.network}-{contestant.to}"
    if folder.exists():
        return folder
    given = source
    if contestant.network in CHANGES:
        given = str(out / f"{contestant.network}.pt")
        if not Path(given).exists():
            make_network(source, contestant.network, Path(given))
    print(exported(given, Convert(tokenizer=source, dtype="float32"), contestant.to, folder), flush=True)
    return folder


def rounds_of(k: Serving, vocabulary: int) -> list[dict]:
    """For each batch a warm-up and the rounds."""
    draw, asked = random.Random(k.seed), []
    for size in dict.fromkeys(k.batch):
        for tokens in (8, *[k.new_tokens] * k.rounds):
            prompts = [[draw.randrange(vocabulary) for _ in range(k.prompt)] for _ in range(size)]
            asked.append({"prompts": prompts, "tokens": tokens})
    return asked


def seconds_of(k: Serving, contestant: Contestant, folder: Path) -> dict[int, list[float]]:
    """Start one process; the seconds of each round, by batch. Raises: BadInput."""
    facts = json.loads((folder / "nanonorm.json").read_text())
    rounds = rounds_of(k, facts["network"]["vocab_size"])
    if contestant.engine == "vllm":
        options = {"model_impl": contestant.backend, "dtype": "float32", "enable_prefix_caching": False}
        options |= {"max_model_len": k.prompt + k.new_tokens, "enforce_eager": k.mode == "eager"}
        asked, program = {"folder": str(folder), "options": options}, "in_vllm.py"
        python = [k.vllm]
    else:
        asked = {"path": str(folder / "model.gguf"), "threads": k.threads}
        python, program = [sys.executable], "llama_cpp.py"
    command = ["env", f"OMP_NUM_THREADS={k.threads}", "VLLM_CPU_KVCACHE_SPACE=2", *python, "-P"]
    command += [str(ROOT / "scripts/exports" / program)]
    asked = json.dumps(asked | {"rounds": rounds})
    run = subprocess.run(command, input=asked, capture_output=True, text=True)
    if run.returncode:
        last = (run.stderr.strip().splitlines() or ["no word"])[-1]
        raise BadInput(f"{folder} does not run in {contestant.engine}: {last}")
    said, found = json.loads(run.stdout.splitlines()[-1])["rounds"], defaultdict(list)
    for each, one in zip(rounds, said, strict=True):
        if {len(tokens) for tokens in one["tokens"]} != {each["tokens"]}:
            raise BadInput(f"{contestant.engine} gave another number of tokens than it was asked for")
        found[len(each["prompts"])].append(one["seconds"])
    return {size: seconds[1:] for size, seconds in found.items()}


def read_rows(path: Path) -> list[dict]:
    return list(csv.DictReader(path.read_text().splitlines())) if path.exists() else []


def tables(rows: list[dict]) -> str:
    """A table for each mode and batch: tok/s, and its ratio to the reference's."""
    speeds = defaultdict(lambda: defaultdict(float))  # (mode, batch) -> (contestant, turn) -> tok/s
    for row in rows:
        speed = int(row["batch"]) * int(row["new_tokens"]) / float(row["seconds"])
        of, who = speeds[row["mode"], int(row["batch"])], (row["contestant"], row["turn"])
        of[who] = max(of[who], speed)
    found = []
    for (mode, size), of in sorted(speeds.items()):
        lines = []
        for name, contestant in CONTESTANTS.items():
            own = {turn: speed for (who, turn), speed in of.items() if who == name}
            pairs = [v / of[contestant.against, t] for t, v in own.items() if (contestant.against, t) in of]
            if own:
                every = [*own.values()]
                values = f"{np.median(every):.1f}", f"{min(every):.1f}-{max(every):.1f}"
                told = f"{np.median(pairs):.3f}x {min(pairs):.3f}-{max(pairs):.3f}" if pairs else ""
                lines.append([name, *values, told if contestant.against != name else "1", contestant.against])
        head = [f"{mode}, batch {size}", "tok/s", "least-most", "ratio", "to"]
        found.append(markdown(lines, head))
    return "\n\n".join(found)


def main():
    k, _, words = parse(Serving, sys.argv[1:], usage=__doc__)
    if len(words) != 1 or k.out is None:
        raise BadInput("name a network and a folder: python scripts/speed/serving.py PATH --out=DIR")
    if any(CONTESTANTS[name].engine == "vllm" for name in k.who) and not shutil.which(k.vllm or ""):
        raise BadInput("--vllm names the interpreter that has it: bash scripts/vllm.sh DIR makes one")
    whole_rmsnorm(*given_weights(words[0], hollow=True))
    out, where = report_folder(k.out), Path(words[0])
    asked = {"PATH": str(where.resolve()) if where.exists() else words[0]}  # else a hub id
    asked |= {f"--{knob}": getattr(k, knob) for knob in SAME}
    refuse_other_settings(out, asked, "--out")
    folders = {name: export_of(words[0], CONTESTANTS[name], out) for name in k.who}
    path = out / "serving.csv"
    for turn in range(k.processes):
        for name in random.Random(k.seed + turn).sample(k.who, len(k.who)):
            mode = k.mode if CONTESTANTS[name].engine == "vllm" else "as it comes"
            key = (mode, name, str(turn))
            lines = [list(row.values()) for row in read_rows(path)]
            if list(key) in [line[:3] for line in lines]:
                continue
            found = seconds_of(k, CONTESTANTS[name], folders[name])
            for size, seconds in found.items():
                lines += [[*key, size, k.new_tokens, i, f"{s:.4f}"] for i, s in enumerate(seconds)]
            write_csv(path, COLUMNS, lines)
            print(*key, found, flush=True)
    machine = f"{processor(torch.device('cpu'))}, {k.threads} threads"
    print(f"{tables(read_rows(path))}\n\n{machine}, torch {torch.__version__}")


if __name__ == "__main__":
    with one_line_errors():
        main()
