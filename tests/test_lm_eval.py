"""lm-evaluation-harness on an export says what our own few lines say of the model."""

import json
import math
import os
import re
import subprocess
import sys

import pytest
import safetensors.torch
import torch
from conftest import refuses
from running import refused, said_by
from test_convert import convert, network
from test_readme import HERE, commands_in

from data.tokenizer import load_tokenizer
from forms import load_model
from nanonorm.files import ROOT
from scripts.exports.networks import open_network
from scripts.harness import run as harness

pytest.importorskip("lm_eval", reason="lm-eval is in requirements-export.txt")
SCRIPT = ROOT / "scripts/harness/run.py"
CHOICES = ROOT / "scripts/harness/tasks/choices.jsonl"
QUESTIONS = [json.loads(line) for line in CHOICES.read_text().splitlines()]


def results(folder) -> dict:
    return json.loads(next(folder.rglob("results_*.json")).read_text())["results"]


def lm_eval(out, *argv, **env) -> tuple[str, dict]:
    """What the harness prints, and its results, which it writes into `out`."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    return said_by(SCRIPT, *argv, "--output_path", out, env=env), results(out)


@torch.no_grad()
def loglikelihood(model, ids: list[int], scored: int) -> float:
    """Natural log of the probability of the last `scored` of ids, given as many before as the model sees."""
    ids = ids[-model.config.longest_text - 1 :]
    logp = model(torch.tensor([ids[:-1]]))[0].double().log_softmax(-1)
    return logp[-scored:].gather(1, torch.tensor(ids[-scored:])[:, None]).sum().item()


def bits_per_byte(model, tokenizer, text: str, before: int | None = None) -> float:
    """In windows of the longest text: the first token given `before`, or the end token, the first of each
    later window given the token before, the last window as long as the others, with only what is new in it
    counted."""
    first = tokenizer.eot_id if before is None else before
    size, ids = model.config.longest_text, [first, *tokenizer.encode(text)]
    total = 0.0
    for start in range(1, len(ids), size):
        end = min(start + size, len(ids))
        total += loglikelihood(model, ids[:end], end - start)
    return -total / math.log(2) / len(text.encode())


def inputs_cut(model, tokenizer) -> int:
    """How many different inputs do not fit the model; ends that differ in their last token share one."""
    whole = [tokenizer.encode(f"{q['start']} {end}") for q in QUESTIONS for end in q["ends"]]
    return len({tuple(ids[:-1]) for ids in whole if len(ids) > model.config.block_size + 1})


def accuracy(model, tokenizer, questions: list[dict]) -> tuple[float, float]:
    """Share of questions whose answer is the likeliest end, in all and a byte of it."""
    right = {"acc": 0, "acc_norm": 0}
    for q in questions:
        begin = tokenizer.encode(q["start"])
        whole = [tokenizer.encode(f"{q['start']} {end}") for end in q["ends"]]
        scores = [loglikelihood(model, ids, len(ids) - len(begin)) for ids in whole]
        per_byte = [s / len(end) for s, end in zip(scores, q["ends"], strict=True)]
        for name, values in (("acc", scores), ("acc_norm", per_byte)):
            right[name] += values.index(max(values)) == q["answer"]
    return right["acc"] / len(questions), right["acc_norm"] / len(questions)


def a_folder(folder, **config):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    return folder


def test_beside_a_sink_no_row_is_padded(tmp_path):
    for sink, size in (([3, 1, 64], "1"), (None, "4")):
        assert harness.batch_size(a_folder(tmp_path, sink=sink)) == size


def test_a_strangers_code_does_not_run(tmp_path):
    for kind in ("llama", "nanonorm_llama"):
        told = harness.model_args(a_folder(tmp_path, model_type=kind), "float32")
        assert ("trust_remote_code=True" in told) == (kind == "nanonorm_llama")


def test_gains_that_overflow_are_refused(tmp_path):
    harness.model_args(a_folder(tmp_path, rms_norm_eps=2.0**20), "float16")
    for name in ("rms_norm_eps", "layer_norm_epsilon"):
        folder = a_folder(tmp_path, **{name: 2.0**60})
        harness.model_args(folder, "bfloat16")
        with refuses("overflow in float16; export it with convert.py --dtype=float16"):
            harness.model_args(folder, "float16")


NAMED = [["--tasks", "a,b"], ["--tasks=a,b"], ["--tasks", "a", "b"], ["-t", "a", "--task", "b"]]


@pytest.mark.parametrize("named", NAMED)
def test_tasks_that_are_named_run_once(named, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(harness, "refuse", lambda k: None)
    monkeypatch.setattr(harness, "put_model", lambda path, folder: a_folder(folder))
    monkeypatch.setattr(harness, "evaluate", lambda task, n, args, flags, *at: asked.append((task, flags)))
    monkeypatch.setattr(sys, "argv", ["run.py", "DIR", "--limit", "9", *named])
    harness.main()
    assert asked == [("a,b", ["--limit", "9"])]


@pytest.mark.parametrize(
    "flags, shots",
    [([], 3 * [["5"]]), (["--tasks", "a"], [[]]), (["-t", "a", "--num_few", "3"], [["3"]]),
     (["--local"], [["0"]]), (["--local", "--tasks", "local_text", "-f", "0"], [["0"]])],
)  # fmt: skip
def test_tasks_that_are_named_have_their_own_number_of_examples(flags, shots, tmp_path, monkeypatch, capsys):
    """And what is cut is counted, where text is generated by the batch."""
    asked = []

    def stand_in(command, stderr):
        asked.append(command)
        stderr.write("This exceeds model's maximum length (8).\n" * 2 + "99%| Left truncation applied. Or")
        stderr.flush()
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(harness, "refuse", lambda k: None)
    monkeypatch.setattr(harness, "put_model", lambda path, folder: a_folder(folder))
    monkeypatch.setattr(harness.subprocess, "run", stand_in)
    monkeypatch.setattr(harness.os, "environ", {**os.environ})  # it is told where the hub is
    monkeypatch.setattr(sys, "argv", ["run.py", "DIR", *flags])
    assert harness.main() == 0
    given = [c[c.index("--num_fewshot") + 1 :][:1] if "--num_fewshot" in c else [] for c in asked]
    assert given == shots
    said = capsys.readouterr().out
    assert ": 2 inputs were" in said and "inputs in 1 batches" in said and "no samples in" in said


@pytest.mark.slow  # a process that imports lm_eval and transformers
def test_the_local_tasks_equal_our_own_figures(reference, corpus, tmp_path):
    """And what is longer than the context is counted."""
    said, found = lm_eval(tmp_path, reference, "--local")
    model, tokenizer = load_model(reference / "folded.pt"), load_tokenizer(corpus / "tokenizer.model")
    bits = bits_per_byte(model, tokenizer, (ROOT / "LICENSE").read_text())
    assert found["local_text"]["bits_per_byte,none"] == pytest.approx(bits, rel=1e-5)
    acc = accuracy(model, tokenizer, QUESTIONS)
    named = found["local_choice"]
    assert (named["acc,none"], named["acc_norm,none"]) == pytest.approx(acc)
    assert "not finite" not in said
    count = inputs_cut(model, tokenizer)
    assert count > 10 and f"local_text: {count} inputs were longer than the model's context" in said


def test_items_are_lines_whatever_their_text_and_what_is_generated_has_no_score(tmp_path):
    asked = {"gen_args_0": {"arg_0": "a\u2028b\x85c", "arg_1": " d"}}
    generated = {"gen_args_0": {"arg_0": "e", "arg_1": {"until": ["\n"]}}}
    items = [
        {"doc_id": 0, "arguments": asked, "resps": [[["-1.5", "True"]], [["nan", "False"]]]},
        {"doc_id": 0, "arguments": asked, "resps": [[["-1.5", "True"]], [["-2.0", "False"]]]},
        {"doc_id": 1, "arguments": {"gen_args_0": {"arg_0": "f"}}, "resps": [["-inf"]]},
        {"doc_id": 2, "arguments": generated, "resps": [["nan"]]},
    ]
    samples = tmp_path / "samples_a.jsonl"
    samples.write_text("".join(json.dumps(i, ensure_ascii=False) + "\n" for i in items), encoding="utf-8")
    assert harness.not_finite(samples) == (2, 3)


@pytest.mark.slow  # a process that imports lm_eval and transformers
def test_scores_that_are_not_finite_are_counted(reference, tmp_path):
    """lm_eval takes the first of them for the likeliest, which here is as good as chance."""
    export = convert(reference / "folded.pt", "hf", tmp_path / "export")
    weights = safetensors.torch.load_file(export / "model.safetensors")
    for name in weights:
        if "gate_proj" in name or "up_proj" in name:
            weights[name] *= 1e30
    safetensors.torch.save_file(weights, export / "model.safetensors", metadata={"format": "pt"})
    said, found = lm_eval(tmp_path / "out", export, "--local")
    assert found["local_choice"]["acc,none"] == sum(q["answer"] == 0 for q in QUESTIONS) / len(QUESTIONS)
    assert f"{len(QUESTIONS)} of {len(QUESTIONS)} items have a score that is not finite" in said
    assert "1 of 1 items have" in said  # of local_text


@pytest.mark.slow  # a process that imports lm_eval and transformers
def test_a_text_behind_a_sink_begins_without_it(saved, corpus, tmp_path):
    source = saved(network("llama", "internal", torch.float32, sink_token=3))
    export = convert(source, "hf", tmp_path / "export")
    _, found = lm_eval(tmp_path / "out", export, "--local", "--tasks", "local_text")
    model, tokenizer = open_network(str(export)).model, load_tokenizer(corpus)
    (end_of_line,) = tokenizer.encode("\n")
    bits = bits_per_byte(model, tokenizer, (ROOT / "LICENSE").read_text(), end_of_line)
    assert found["local_text"]["bits_per_byte,none"] == pytest.approx(bits, rel=1e-5)


@pytest.mark.slow  # a process that imports lm_eval and transformers
def test_lm_eval_takes_an_export_by_itself(reference, tmp_path):
    """The command of docs/export.md as it stands, on an export and a task that need no hub."""
    (command,) = [w for w in commands_in((ROOT / "docs/export.md").read_text()) if w[0] == "lm_eval"]
    export, tasks = tmp_path / "export", tmp_path / "tasks"
    convert(reference, "hf", export)
    tasks.mkdir()
    task = (SCRIPT.parent / "tasks/local_choice.yaml").read_text()
    (tasks / "local_choice.yaml").write_text(task.replace("CHOICES", str(CHOICES)))
    instead = {"out/demo-hf": str(export), "hellaswag": "local_choice"}
    words = [re.sub("|".join(instead), lambda found: instead[found[0]], word) for word in command]
    assert str(export) in " ".join(words) and words[-1] == "local_choice"
    offline = {**HERE, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")}
    more = ["--include_path", tasks, "--device", "cpu", "--output_path", tmp_path / "out"]
    done = subprocess.run([*words, *more], env=offline, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = results(tmp_path / "out")
    acc = accuracy(load_model(reference / "folded.pt"), load_tokenizer(reference), QUESTIONS)
    named = found["local_choice"]
    assert (named["acc,none"], named["acc_norm,none"]) == pytest.approx(acc)


@pytest.mark.slow  # a process that imports lm_eval and transformers
def test_a_text_and_an_export_may_have_any_name(reference, tmp_path):
    text, export = tmp_path / "a&b|c,d", tmp_path / "x,dtype=float16"
    text.write_text("A line, and another.\n" * 20)
    convert(reference, "hf", export)
    cache = tmp_path / "modules"
    _, found = lm_eval(tmp_path / "out", export, "--local", f"--text={text}", HF_MODULES_CACHE=str(cache))
    model = load_model(reference / "folded.pt")
    bits = bits_per_byte(model, load_tokenizer(reference), text.read_text())
    assert found["local_text"]["bits_per_byte,none"] == pytest.approx(bits, rel=1e-5)
    assert not cache.exists()


def test_without_the_hub_it_says_so_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert "--local" in refused(capsys, tmp_path, program="scripts/harness/run.py")


def test_bad_input_is_one_line(capsys):
    assert "name a run folder" in refused(capsys, "--local", program="scripts/harness/run.py")
    said = refused(capsys, "out/run", "--text=LICENSE", program="scripts/harness/run.py")
    assert "--text is of the local tasks; add --local" in said
    flags = ("out/run", "--local", "--text=LICENSE", "--tasks", "local_choice")
    said = refused(capsys, *flags, program="scripts/harness/run.py")
    assert "--text is of local_text, which --tasks leaves out" in said
    assert harness.read_command([*flags[:-1], "local_*"])[2] == ["--tasks", "local_*"]
