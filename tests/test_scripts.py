"""The scripts run, on sizes that take no time."""

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict

import numpy as np
import pytest
import torch
from conftest import batch, state_of, tiny
from running import ROOT, exit_status, said_by, train
from turns import dying, steady

from config import Config
from nanonorm.errors import BadInput
from nanonorm.log import Log
from nanonorm.timing import take_turns, tensor_peak
from scripts.speed import peers, runtimes, tables, whole_run
from scripts.speed.parts import training_step


def test_parts_prints_its_tables(capsys):
    flags = ["--n_embd=16", "--block_size=16", "--batch_size=1", "--iters=2", "--what=step,protocols"]
    train(*flags, program="scripts/speed/parts.py")
    out, rows = capsys.readouterr().out, ("taper, blend", "cbwc", "vanilla again", "All-TaperLN, scale")
    assert out.count("n_embd 16 | ms") == 2 and all(f"\n| {row} | " in out for row in rows)
    pytest.importorskip("peft")
    train(*flags[:-1], "--what=adapters", "--adapter_rank=4", program="scripts/speed/parts.py")
    out, rows = capsys.readouterr().out, ("LoRA again", "DoRA", "DoRA by peft")
    assert "rank 4, " in out and all(f"\n| {row} | " in out for row in rows)


@pytest.mark.parametrize("phase, gate", [("norm", 1.0), ("blend", 0.5), ("scale", 0.0)])
def test_a_timed_step_is_a_training_step_that_stays_in_its_phase(phase, gate):
    """At learning rate 0 every round does the same work; at another it trains."""
    tokens = torch.randint(61, (200,)).to(torch.int16)
    for lr in (0.0, 1e-2):
        model = tiny("rmsnorm-all-aux", phase="norm", dtype=torch.float32)
        model(*batch())
        model.update_statistics()
        before = state_of(model)["tok_emb.weight"]
        step = training_step(model, tokens, 2, torch.float32, lr=lr, phase=phase)
        for _ in range(3):
            step()
        assert model.phase == phase and model.gate.tolist() == pytest.approx([gate] * 5, abs=1e-6)
        assert torch.equal(model.tok_emb.weight, before) == (lr == 0)


SHAPE = ["--n_embd=16", "--n_layer=2", "--n_head=4", "--vocab_size=50", "--block_size=32", "--batch_size=2"]
NETWORK = [*SHAPE[:-2], "--n_kv_head=2", "--hidden=32"]  # of runtimes.py


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["train", "prefill", "decode"])
def test_peers_times_transformers_beside_us(mode, tmp_path):
    pytest.importorskip("transformers", reason="compares with transformers' Llama; pip install transformers")
    how = [*SHAPE, f"--mode={mode}", "--dtype=float32", "--iters=2", "--compiled=False", "--processes=1"]
    how += ["--seq=16", "--new_tokens=4", f"--out={tmp_path / 'x.json'}"]
    said = said_by("scripts/speed/peers.py", *how)
    assert "the same logits" in said and ("greedy" in said) == (mode == "decode")
    rows = json.loads((tmp_path / "x.json").read_text())["rows"]
    names = {"nanonorm", "HF", "HF tuned"}
    names |= {"HF static cache", "HF tuned static cache"} if mode == "decode" else set()
    assert {r["name"] for r in rows} == {f"{name} float32" for name in names}
    assert all(r["ms"] > 0 and r["ratio_q1"] <= r["ratio"] <= r["ratio_q3"] for r in rows)
    assert all((r["tensor_bytes"] or 0) > 0 if mode == "train" else r["tensor_bytes"] is None for r in rows)


@pytest.mark.parametrize(
    "flag, said",
    [
        ("--n_embd=63", "multiple of n_head"),
        ("--nanogpt=nowhere", "clone nanoGPT"),
        ("--mode=prefill --block_size=64", "128 tokens do not fit into 64; lower --seq"),
        ("--who=nanonorm,nanoGPT", "wants --nanogpt=FOLDER"),
        ("--network=nowhere", "is no folder of transformers"),
        ("--nanogpt=FOLDER --mode=decode", "--nanogpt is timed in mode=train alone, not decode"),
        ("--network=FOLDER --n_layer=3", "has its own shape: leave out --n_layer, or --network"),
        ("--network=FOLDER --mode=prefill --block_size=64", "has its own shape: leave out --block_size"),
        ("runtimes --networks=()", "networks must be one or more of"),
        ("runtimes --runtimes=openvino", "pip install openvino"),
    ],
)
def test_bad_input_of_a_timing_is_one_line(flag, said, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "openvino", None)
    main = runtimes.main if flag.startswith("runtimes ") else peers.main
    for name in ("model.py", "config.json"):
        (tmp_path / name).touch()
    flag = flag.removeprefix("runtimes ").replace("FOLDER", str(tmp_path))
    status, told = exit_status(main, "timing.py", *flag.split()), capsys.readouterr()
    assert status == 2 and said in told.err and told.err.count("\n") == 1 and not told.out


def test_a_training_step_needs_no_room_for_a_prompt(tmp_path, capsys):
    pytest.importorskip("transformers", reason="compares with transformers' Llama; pip install transformers")
    k = peers.Peers(n_layer=1, n_head=2, vocab_size=50, block_size=16)
    peers.refuse(k)
    peers.write_checkpoint(tmp_path, k.config(16), seed=1)
    peers.compare(k, tmp_path)
    assert "the same logits" in capsys.readouterr().out
    for mode, longest in (("prefill", 128), ("train", 512)):
        with pytest.raises(BadInput, match=f"{longest} tokens do not fit into 16"):
            peers.refuse(peers.Peers(network=str(tmp_path), mode=mode))


def test_decoding_goes_on_behind_an_end_token(tmp_path, capsys):
    """Where the likeliest token is one, in transformers as here."""
    pytest.importorskip("transformers", reason="compares with transformers' Llama; pip install transformers")
    k = peers.Peers(n_layer=1, n_head=2, vocab_size=50, block_size=64, mode="decode", seq=16)
    peers.write_checkpoint(tmp_path, k.config(16), seed=1)
    first = peers.infer_ours(k, tmp_path, "float32", "")()[0, 8].item()
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": first}))
    peers.compare(k, tmp_path)
    assert "the same greedy tokens" in capsys.readouterr().out


def test_contestants_take_turns_until_one_dies(capfd):
    said = take_turns({"a": (steady, "a", 0.01), "b": (steady, "b", 0.0)}, rounds=3, seed=0)
    assert said == {"a": ["ready", "a", "a", "a"], "b": ["ready", "b", "b", "b"]}

    with pytest.raises(BadInput, match="b crashed; see its traceback above"):
        take_turns({"a": (steady, "a", 0.0), "b": (dying,)}, rounds=3, seed=0)
    assert "no more" in capfd.readouterr().err


def test_peaks_are_what_a_step_holds_at_once():
    def step():
        for _ in range(3):
            a = torch.ones(1000, 1000)
            b = a + 1
            del a, b

    assert 0 <= tensor_peak(step) - 2 * 4_000_000 < 100  # and the 1


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["torch", "onnxruntime", "openvino", "executorch"])
def test_runtimes_times_what_says_the_same(runtime, tmp_path):
    pytest.importorskip(runtime, reason=f"pip install {runtime}")
    how = [f"--runtimes={runtime}", f"--keep={tmp_path}", *NETWORK, "--seq=8"]
    how += ["--new_tokens=3", "--rounds=2", "--processes=1"]
    said = said_by("scripts/speed/runtimes.py", *how)
    assert float(re.search("of the largest logit: (.*)", said)[1]) < 1e-5
    rows = [line.split(" | ") for line in said.splitlines() if line.startswith("| ")][2:]
    assert [row[0].strip("| ") for row in rows] == ["with norms", "gains folded", "without", "coupled"]
    assert all(float(row[1]) > 0 and float(row[3]) > 0 for row in rows)
    assert len(list(tmp_path.glob("*.onnx"))) == (4 if runtime in ("onnxruntime", "openvino") else 0)


def test_what_takes_half_the_time_is_twice_as_fast(tmp_path, capsys, monkeypatch):
    """In the tables of steps and of runtimes: first / this, and tokens a second. 8 in 4 ms, and 1 in 2 ms."""
    monkeypatch.setattr(tables, "time_rounds", lambda *_: {"a": np.full(3, 4.0), "b": np.full(3, 2.0)})
    tables.table("step", {"a": None, "b": None}, 3)
    assert "| a | 4.0 | 1 |\n| b | 2.0 | 2.000x 2.000-2.000 |" in capsys.readouterr().out
    times = {"with norms": np.full((2, 2), (8.0, 4.0)), "without": np.full((2, 2), (4.0, 2.0))}
    monkeypatch.setattr(runtimes, "timed", lambda *_: times)
    how = ["--runtimes=torch", "--networks=with norms,without", f"--keep={tmp_path}", *NETWORK, "--seq=8"]
    assert exit_status(runtimes.main, "scripts/speed/runtimes.py", *how) == 0
    wanted = "| without | 2000 | 2.000x 2.000-2.000 | 500.0 | 2.000x 2.000-2.000 |"
    assert wanted in capsys.readouterr().out


def test_graphs_that_are_kept_are_of_one_shape(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(runtimes, "timed", lambda k, *_: {name: np.ones((2, 2)) for name in k.networks})

    def status(*flags) -> int:
        how = ["--runtimes=torch", f"--keep={tmp_path}", *NETWORK, "--seq=8", *flags]
        return exit_status(runtimes.main, "scripts/speed/runtimes.py", *how)

    assert status("--new_tokens=4") == 0 and status("--new_tokens=3") == 0  # nothing is kept yet
    (tmp_path / "without.onnx").touch()
    assert status("--new_tokens=3", "--rounds=1") == 0 and status("--new_tokens=4") == 2
    said = f"{tmp_path} was begun with new_tokens=3, not 4; give that, or name another --keep"
    assert said in capsys.readouterr().err
    (tmp_path / "settings.json").unlink()  # a graph of nobody knows what
    assert status("--new_tokens=3") == 2 and "begun with n_layer=unknown" in capsys.readouterr().err


def test_a_graph_that_was_not_finished_is_not_kept(tmp_path, monkeypatch):
    def stopped(model, path):
        path.write_bytes(b"part")
        raise KeyboardInterrupt

    monkeypatch.setattr(runtimes, "export_with_past", stopped)
    monkeypatch.setattr(runtimes, "needed", lambda *_: None)  # it comes no further than that
    how = ["--runtimes=onnxruntime", f"--keep={tmp_path}", *NETWORK]
    assert exit_status(runtimes.main, "scripts/speed/runtimes.py", *how) == 130
    assert [path.name for path in tmp_path.iterdir()] == ["settings.json"]


def test_a_run_whose_gates_wait_is_in_its_blend_for_as_long():
    """A log line n is of the step n - 1; speeds of a phase but the first are taken by the median."""
    schedule = {"max_iters": 20, "warmup_iters": 2, "gate_start": 4, "gate_end": 8, "gate_budget": 1.0}
    settings = Config(taper="internal", **schedule)
    speeds = {"norm": (0, 100.0, 102.0), "blend": (0, 50.0, 52.0, 54.0), "scale": (0, 80.0)}
    lines = [{"perf/tok_s": speed, "train/loss": 2.0, "phase": p} for p, of in speeds.items() for speed in of]
    for iter, line in zip((1, 2, 4, 5, 8, 9, 14, 15, 20), lines, strict=True):
        line |= {"iter": iter} | ({"gate/steps": 3.0} if line.pop("phase") != "scale" else {})
    versions = {"device": "cpu", "torch": torch.__version__}
    log = Log({"settings": asdict(settings.resolve()), "versions": versions}, lines, False)
    assert "tok/s norm 101, blend 52, scale 80;" in whole_run.line_of("x", log)
    log.header["settings"]["form"] = "folded"  # begun without norms, it has no gates
    log = log._replace(lines=[{k: v for k, v in line.items() if k != "gate/steps"} for line in lines])
    assert "tok/s norm 53;" in whole_run.line_of("x", log)


def test_without_the_install_a_command_shows_what_to_do():
    """The traceback shows the line that did not find the project, with its remark."""
    hidden = "import sys, runpy; sys.path[:] = [p for p in sys.path if p not in ('', sys.argv[1])]; "
    hidden += "sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in str(f)]; "
    hidden += "runpy.run_path(sys.argv[2], run_name='__main__')"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    argv = [sys.executable, "-c", hidden, str(ROOT), str(ROOT / "scripts/sweep.py")]
    run = subprocess.run(argv, env=env, cwd=ROOT.parent, capture_output=True, text=True)
    assert run.returncode and "pip install -e ." in run.stderr, run.stderr


def test_every_command_has_that_remark_at_its_first_import_of_the_project():
    rooms, checked = ("bench", "begin", "config", "data", "forms", "model", "nanonorm", "scripts"), 0
    for path in sorted((*(ROOT / "scripts").rglob("*.py"), *(ROOT / "data").rglob("*.py"))):
        text = path.read_text()
        first = re.search(rf"^from ({'|'.join(rooms)})\b.*", text, re.MULTILINE)
        if first and "__main__" in text:
            assert first[0].endswith("# not found? pip install -e ."), path
            checked += 1
    assert checked >= 25
