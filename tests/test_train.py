"""The training loop as a user runs it: resumed, killed, spread over ranks, misused; on real text."""

import dataclasses
import json
import math
import os
import random
import re
import shlex
import shutil
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import ROOT, batch, slow, tiny
from kills import killed
from running import (
    assert_goes_on_from,
    assert_same,
    assert_same_log,
    assert_same_run,
    cut_back,
    final,
    flags,
    metrics,
    ran,
    refused,
    said_by,
    train,
)  # fmt: skip
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from forms import load_model
from nanonorm import machine
from nanonorm.files import read_file
from nanonorm.machine import pick_dtype
from nanonorm.nonfinite import first_nonfinite
from nanonorm.optimizer import grad_norms
from nanonorm.ranks import Ranks
from scripts.studies.runs import identity, read_finished


def test_what_a_run_writes(reference, corpus):
    names = {p.name for p in reference.iterdir()}
    models = {"ckpt.pt", "ckpt.prev.pt", "unfused.pt", "folded.pt"}
    assert names == models | {"config.json", "metrics.jsonl", "tokenizer.model"}
    header = json.loads((reference / "metrics.jsonl").read_text().splitlines()[0])
    assert header["settings"] == json.loads((reference / "config.json").read_text())
    assert {"torch", "commit", "python"} <= header["versions"].keys()
    lines = metrics(reference)
    assert [line["iter"] for line in lines] == list(range(5, 61, 5))
    want = {"train/loss", "train/ce", "train/aux", "gate", "lr", "s/mean", "s/max", "s/target", "logits/l2",
            "grad/total", "grad/qkv", "grad/proj", "grad/gate_up", "grad/down", "grad/emb", "grad/norm",
            "taper/c.0.attn", "taper/c.1.mlp"}  # fmt: skip
    evaluated = {"val/loss", "val/bpb", "val/loss_gated"}
    for line in lines:
        assert ("taper/residual.0.attn" in line) == (line["iter"] <= 15) and "taper/sinks.0.attn" not in line
        assert want <= line.keys() and (evaluated <= line.keys()) == (line["iter"] % 20 == 0)
    gates = {line["iter"]: line["gate"] for line in lines}
    assert gates[15] == 1.0 and gates[45] == gates[60] == 0.0 and abs(gates[30] - 0.5) < 1e-12
    assert all(line["train/aux"] == 0 for line in lines if line["iter"] <= 15) and lines[-1]["train/aux"] > 0
    cs = [line["taper/c.0.attn"] for line in lines if line["iter"] >= 20]
    assert len(set(cs)) == 1, "c moved after calibration"
    assert lines[-1]["train/ce"] < lines[0]["train/ce"] - 0.3, "it did not learn"
    for line, same in ((lines[-1], True), (lines[3], False)):  # at gate 0 both are of the same function
        assert (line["val/loss"] == line["val/loss_gated"]) == same


def test_validation_is_the_whole_split(reference, corpus):
    """val/loss is the mean over every token of the split but the first, each predicted once."""
    model = load_model(reference / "folded.pt").double()
    split = torch.from_numpy(np.fromfile(corpus / "val.bin", "<u2").astype(np.int64))
    total = 0.0
    with torch.no_grad():
        for i in range(0, len(split) - 1, 32):
            window = split[i : i + 33][None]
            total += model(window[:, :-1], window[:, 1:]).ce.item() * (window.shape[1] - 1)
    nats, last = total / (len(split) - 1), metrics(reference)[-1]
    assert abs(last["val/loss"] - nats) < 1e-5  # float32 against float64
    assert abs(last["val/bpb"] - total / np.log(2) / 6000) < 1e-4
    assert model.meta["val/loss"] == last["val/loss"] and max(model.meta["fold_error"].values()) < 1e-4


@pytest.mark.parametrize("native", [False, True])
def test_bfloat16_by_default_only_where_it_pays(monkeypatch, native):
    """A CPU without instructions for it computes it several times slower than float32."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: native)
    computes = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    wide = torch.bfloat16 if native and computes else torch.float32
    assert pick_dtype("auto", torch.device("cpu"), 256) == wide
    assert pick_dtype("auto", torch.device("cpu"), 128) == torch.float32


def test_a_run_in_bfloat16_prints_no_warning(corpus, tmp_path):
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this CPU has no bfloat16 arithmetic")
    knobs = {"dtype": "bfloat16", "qk_norm": True, "max_iters": 2, "gate_start": 1, "gate_end": 2}
    assert "Warning" not in ran(*flags(tmp_path / "run", corpus, **knobs))


def test_norm_phase_is_the_baseline(reference, corpus, tmp_path):
    train(*flags(tmp_path / "run", corpus, taper="none", aux_weight=0.0, max_iters=60, eval_interval=60))
    baseline, taper = metrics(tmp_path / "run"), metrics(reference)
    for a, b in zip(baseline, taper, strict=True):
        same = a["train/ce"] == b["train/ce"] and a["grad/total"] == b["grad/total"]
        assert same == (b["iter"] <= 15), f"at step {b['iter']}"


def test_looking_changes_nothing(reference, corpus, tmp_path):
    train(*flags(tmp_path / "run", corpus, eval_interval=10, log_interval=3, ckpt_interval=60))
    assert_same(final(reference)["state"], final(tmp_path / "run")["state"])


PHASES = (1, 14), (16, 44), (46, 55)  # the reference's steps


@pytest.mark.parametrize("phases, writes", [((), 3500), slow(PHASES, 100, minutes=0.5)])  # a run has 4700
def test_killed_and_resumed_is_the_same_run(reference, corpus, tmp_path, phases, writes):
    """SIGKILL before or after an update of each phase, then in a write: moments that no two runs share. Each
    process has an order of hashes of its own."""
    out, step, seed = tmp_path / "run", 0, int(os.environ.get("NANONORM_KILLS", time.time_ns()))
    print(f"NANONORM_KILLS={seed}")  # pytest shows it where the test fails
    rng, argv = random.Random(seed), flags(out, corpus, init_from="auto")
    for first, last in phases:
        killed(argv, rng.choice(["before", "after"]), rng.randint(first, last) - step)
        step = final(out)["progress"]["iter"]
    killed(argv, "write", rng.randint(1, writes))
    ran(*argv)
    assert not list(out.glob("*.tmp"))
    assert_same_run(reference, out)
    for name in ("unfused.pt", "folded.pt"):
        assert_same(*(read_file(run / name)["state"] for run in (reference, out)))


@pytest.mark.parametrize("start, checkpoint", [(8, True), slow(16, False)])
def test_a_run_that_watches_its_norms_goes_on_amid_a_phase(start, checkpoint, corpus, tmp_path, capsys):
    """To the bit, from the middle of the norm phase and of the blend: with sinks left out of c, a ceiling and
    a site loss; their logs last as long as they do, and what is exported has none of them."""
    knobs = dict(taper="all", sink_multiple=1.2, taper_ceiling=0.5, site_weight=0.7, site_far=3.0)
    knobs |= dict(max_iters=24, gate_start=start, gate_end=20, ckpt_interval=12, log_interval=1)
    knobs |= dict(gradient_accumulation_steps=2, grad_checkpoint=checkpoint)
    train(*flags(tmp_path / "run", corpus, **knobs))
    assert "taper_ceiling=0.5 still limited" in capsys.readouterr().out
    assert_goes_on_from(12, tmp_path / "run", tmp_path / "again")
    lines = metrics(tmp_path / "again")
    shares = [line["taper/sinks.1.mlp"] for line in lines[:start]]
    assert 0 < max(shares) <= 0.5 and all(line["taper/residual.1.mlp"] > 0 for line in lines[:start])
    assert not [k for line in lines[start:] for k in line if k.startswith(("taper/sinks", "taper/residual"))]
    assert all((line.get("taper/limited", 0) > 0.5) == (step >= start) for step, line in enumerate(lines))
    assert all((line.get("train/site", 0) > 0) == (0 < step < 20) for step, line in enumerate(lines))
    folded = load_model(tmp_path / "run/folded.pt")
    assert folded.config.taper_ceiling is None and folded.config.site_weight == 0
    assert not any("ceiling" in name or "site" in name for name in folded.state_dict())
    # what became of it is trained on without them
    more = {"init_from": tmp_path / "run", "out_dir": tmp_path / "more", "dataset": corpus, "max_iters": 2}
    train(*(f"--{name}={value}" for name, value in more.items()), "--device=cpu", "--batch_size=4")
    assert not {"taper/limited", "train/site"} & metrics(tmp_path / "more")[-1].keys()


RANKS = [(2, "rmsnorm", 0.0), slow(2, "rmsnorm", 0.2), slow(2, "layernorm", 0.0), slow(4, "layernorm", 0.0)]


@pytest.mark.parametrize("ranks, norm, dropout", RANKS)
def test_ranks_equal_one(corpus, tmp_path, ranks, norm, dropout):
    """The same global batch in float64, through both boundaries; the sums only change their order. Dropout's
    masks are those of a micro-batch, whoever computes it."""
    knobs = dict(norm=norm, taper="all", gradient_accumulation_steps=4, dtype="float64", max_iters=30,
                 gate_start=8, gate_end=22, batch_size=4, eval_interval=10, sink_multiple=1.2,
                 site_weight=1.0, dropout=dropout)  # fmt: skip
    train(*flags(tmp_path / "one", corpus, **knobs))
    ran(*flags(tmp_path / "more", corpus, **knobs), ranks=ranks)
    one, more = final(tmp_path / "one"), final(tmp_path / "more")
    torch.testing.assert_close(more["state"], one["state"], rtol=1e-8, atol=1e-10)
    assert_same_log(tmp_path / "one", tmp_path / "more", 1e-8)


@pytest.fixture(scope="module")
def two_by_four(corpus, tmp_path_factory) -> Path:
    """A run of 2 x 4 windows a step, with checkpoints of its steps 16, between two log lines, and 30."""
    out, knobs = tmp_path_factory.mktemp("two_by_four") / "run", {"batch_size": 4, "dtype": "float64"}
    knobs |= {"gradient_accumulation_steps": 2, "taper": "all", "max_iters": 30, "ckpt_interval": 16}
    knobs["site_weight"] = 1.0  # its gradient goes by the number of micro-batches
    train(*flags(out, corpus, **knobs, gate_start=18, gate_end=25))
    return out


@pytest.mark.parametrize("accumulated, ranks", [(8, 1), slow(1, 1), slow(2, 2), slow(4, 4)])
def test_a_resumed_run_may_split_its_steps_otherwise(two_by_four, tmp_path, capfd, accumulated, ranks):
    """In float64 it goes on as the same run, through both boundaries."""
    again, size = tmp_path / "again", 8 // accumulated
    cut_back(16, two_by_four, again)
    argv = ["--init_from=resume", f"--out_dir={again}", f"--batch_size={size}"]
    argv.append(f"--gradient_accumulation_steps={accumulated}")
    if ranks > 1:
        said = ran(*argv, ranks=ranks)
    else:
        train(*argv)
        said = "".join(capfd.readouterr())
    same = size == 4
    assert (f"as {accumulated} x {size}, not 2 x 4: the run goes on equal to rounding" in said) != same
    assert final(again)["run"]["draw_size"] == (None if same else 4)
    torch.testing.assert_close(final(again)["state"], final(two_by_four)["state"], rtol=1e-8, atol=1e-10)
    assert_same_log(two_by_four, again, 1e-8)


def test_the_first_steps_may_be_split_otherwise_too(corpus, tmp_path):
    """When no mean is known yet."""
    knobs = dict(site_weight=1.0, dtype="float64", max_iters=4, gate_start=2, gate_end=4, draw_size=4)
    for name, size in (("one", 4), ("more", 1)):
        split = {"batch_size": size, "gradient_accumulation_steps": 4 // size}
        train(*flags(tmp_path / name, corpus, **knobs, **split))
    one, more = (final(tmp_path / name)["state"] for name in ("one", "more"))
    torch.testing.assert_close(more, one, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("compiles, n_layer", [slow(True, 1), slow("regional", 2)])
def test_a_compiled_run_agrees_and_is_resumed_as_the_same_run(compiles, n_layer, corpus, tmp_path):
    """Up to rounding, and to the bit. Across a taper it compiles once a phase: never once a gate value, nor
    once a block. Validation is compiled too, at gate 0 and as it is; not its last windows, which are fewer or
    shorter."""
    if shutil.which("g++") is None:
        pytest.skip("torch.compile needs a C++ compiler on a CPU")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    knobs = dict(n_layer=n_layer, dtype="float64", max_iters=50, eval_interval=50, sink_multiple=1.2)
    train(*flags(tmp_path / "eager", corpus, **knobs))
    train(*flags(run := tmp_path / "run", corpus, compile=compiles, ckpt_interval=30, **knobs))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1 + 3 + 2  # the first is the trial
    assert not torch._dynamo.utils.counters["graph_break"]
    for a, b in zip(metrics(run), metrics(tmp_path / "eager"), strict=True):
        assert abs(a["train/loss"] - b["train/loss"]) < 1e-9  # float64 rounding, grown over 50 steps of AdamW
        assert a.get("taper/sinks.0.mlp") == b.get("taper/sinks.0.mlp")
    cut_back(30, run, again := tmp_path / "again")  # amid the blend
    train("--init_from=resume", f"--out_dir={again}")
    assert_same_run(run, again)


class Recorded(TorchDispatchMode):
    """What a CUDA graph is to train.py, on a CPU: the operators of what ran inside it, done again by replay()
    with what their tensors hold by then. Reading a value on the host is refused, as in a capture."""

    def __init__(self):
        super().__init__()
        self.calls, self.replays = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        reads = torch.ops.aten._local_scalar_dense.default, torch.ops.aten.lift_fresh.default
        assert func not in reads, func
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    @torch.no_grad()
    def replay(self):
        self.replays += 1
        if self.replays == 1:
            return  # recording has done the work, which a capture does not
        for func, args, kwargs, out in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


FAKE = dict(calibration="mean_scale", anchor_target="batch", gate_schedule="sequential", gate_gaps="2,2,3",
            mask_end=True, grad_checkpoint=True, sink_multiple=1.2)  # fmt: skip


@pytest.mark.parametrize(
    "norm, taper, accumulated, more",
    [
        slow("layernorm", "internal", 2, {}),
        slow("layernorm", "internal", 2, FAKE),
        ("rmsnorm", "all", 1, {"gate_budget": 1e9}),
        slow("cbwc", "none", 1, {}),
    ],
)
def test_a_step_can_be_one_graph(corpus, tmp_path, monkeypatch, norm, taper, accumulated, more):
    """The operators of the fourth step of a phase, done again, are all that its later ones need, through
    schedules, calibration, logging and a checkpoint in between: only what tensors hold changes."""
    end = 26 if "gate_gaps" in more else 30  # by the gaps the last of six gates falls at step 26
    knobs = {"norm": norm, "taper": taper, "max_iters": 40, "gate_end": end, **more}
    knobs["gradient_accumulation_steps"] = accumulated
    train(*flags(tmp_path / "eager", corpus, **knobs))
    graphs, plain = [], machine.set_up
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graphs.append(Recorded()) or graphs[-1])
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, stream: graph)
    for name in ("Stream", "set_stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    eager = partial(dataclasses.replace, cuda_graph=False)
    monkeypatch.setattr(machine, "set_up", lambda cfg, ranks: plain(eager(cfg), ranks))
    train(*flags(tmp_path / "graph", corpus, **knobs, cuda_graph=True))
    # three steps of each phase are not replayed: 15 in the first, 15 or 11 in the second, then the rest
    assert [g.replays for g in graphs] == [12, end - 15 - 3, 40 - end - 3]
    for a, b in zip(metrics(tmp_path / "eager"), metrics(tmp_path / "graph"), strict=True):
        # AdamW's learning rate is in float32, as a tensor; taper/residual is a difference of ones
        assert a == pytest.approx(b, rel=1e-5, abs=1e-6)
    states = [final(tmp_path / name)["state"] for name in ("graph", "eager")]
    torch.testing.assert_close(*states, rtol=1e-4, atol=1e-5)
    whole = metrics(tmp_path / "graph")
    for graph in (True, False):  # gone on with from step 35, five before the end
        again = tmp_path / f"again-{graph}"
        cut_back(35, tmp_path / "graph", again)
        train("--init_from=resume", f"--out_dir={again}", f"--cuda_graph={graph}")
        assert metrics(again)[-1] == pytest.approx(whole[-1], rel=1e-5) and metrics(again)[-1]["iter"] == 40
    assert graphs[-1].replays == 2 and len(graphs) == 4


def test_a_run_of_before_a_knob_was_added_has_its_default(reference, tmp_path):
    run = shutil.copytree(reference, tmp_path / "run")
    head, *lines = (run / "metrics.jsonl").read_text().splitlines()
    settings = json.loads((run / "config.json").read_text())
    del settings["cuda_graph"]
    head = json.dumps(json.loads(head) | {"settings": settings})
    (run / "metrics.jsonl").write_text("\n".join([head, *lines]) + "\n")
    same, other = (identity(settings | {"cuda_graph": graph}) for graph in (False, True))
    assert identity(settings) == same != other
    assert read_finished(run)[0]["settings"]["cuda_graph"] is False  # as report.py sees it


@pytest.mark.slow
def test_subnormal_numbers_are_zero_in_every_thread_of_a_step(corpus, tmp_path):
    (tmp_path / "looking.py").write_text(f"""
import runpy, sys, torch
step = torch.optim.AdamW.step
def look(*args, **more):
    print("subnormal" if (torch.full((1 << 20,), 1e-39) * 1.0).any() else "zero")
    step(*args, **more)
torch.optim.AdamW.step = look
sys.argv[0], sys.path[0] = {str(ROOT / "train.py")!r}, {str(ROOT)!r}
runpy.run_path(sys.argv[0], run_name="__main__")
""")
    argv, env = flags(tmp_path / "run", corpus, max_iters=16, gate_end=16), {"OMP_NUM_THREADS": "2"}
    lines = said_by(tmp_path / "looking.py", *argv, env=os.environ | env).splitlines()
    assert lines.count("zero") == 16 and "subnormal" not in lines


@pytest.mark.parametrize("again", [False, True])
def test_non_finite_before_two_gates_is_one_line(again, corpus, tmp_path):
    """FakeLN's norm before queries, keys and values puts out two. again: blocks run in the backward, too."""
    knobs = dict(norm="layernorm", taper="all", calibration="mean_scale", anchor_target="batch", max_iters=12)
    knobs |= dict(learning_rate=1e30, grad_clip=0, warmup_iters=1, gate_start=1, gate_end=8)
    knobs["grad_checkpoint"] = again
    status = train(*flags(tmp_path / "run", corpus, **knobs), expect=None)
    assert len(status.splitlines()) == 1
    assert re.search(r"step \d+: (non-finite (output|gradient) of|its update left) \w+", status)


def test_compiled_blocks_that_run_again_in_the_backward_are_looked_into():
    model = tiny(dtype=torch.float32)
    model.grad_checkpoint = True
    for block in model.blocks:
        block.compile(backend="aot_eager")
    model(*batch()).total.backward()
    with torch.no_grad():
        model.blocks[1].mlp.down.weight[0, 0] = math.inf
    assert first_nonfinite(model, [batch()], nullcontext(), Ranks()) == "output of blocks.1.mlp.down"


def test_a_norm_that_overflows_is_named():
    """Of one gradient, or of all together, where every entry is finite."""
    model, found = tiny(dtype=torch.float32), []
    ours = [model.tok_emb.weight, model.blocks[0].mlp.down.weight]
    sizes = {p: torch.autograd.grad(model(*batch()).total, p)[0].norm() for p in ours}
    for size in (1e25, 1.5e19):
        hooks = [p.register_hook(lambda g, p=p, size=size: g / sizes[p] * size) for p in ours]
        found.append(first_nonfinite(model, [batch()], nullcontext(), Ranks()))
        for hook in hooks:
            hook.remove()
    assert found[0].startswith("norm of the gradient of ")
    assert found[1] == "norm of all gradients together, each of which is finite"
    p, said = ours[0], ["gradient of that on another rank", ""]
    p.register_hook(lambda g: g / sizes[p] * 1e25)
    ranks = Mock(first_word=lambda *words: words[0] if words else said.pop())
    assert first_nonfinite(model, [batch()], nullcontext(), ranks) == "gradient of that on another rank"


def test_what_is_not_finite_is_said_where_memory_does_not_last_to_see_where():
    """It is not the model or the batch that is too large: that step has run."""
    model = Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    model.named_modules.return_value, model.named_parameters.return_value = [], []
    assert "takes too much memory" in first_nonfinite(model, [batch()], nullcontext(), Ranks())
    with pytest.raises(SystemExit, match=r"non-finite value; where is not known: .* too much memory"):
        first_nonfinite(model, [batch()], nullcontext(), Mock(size=2))
    model.side_effect = RuntimeError("a bug")
    with pytest.raises(RuntimeError, match="a bug"):
        first_nonfinite(model, [batch()], nullcontext(), Ranks())


def test_sample_from_every_file(reference, capsys):
    texts = []
    for name in ("", "ckpt.pt", "unfused.pt", "folded.pt"):
        how = ("--prompt=def ", "--temperature=0", "--max_new_tokens=12")
        train(reference / name, *how, program="sample.py")
        texts.append(capsys.readouterr().out)
    assert len(set(texts)) == 1 and texts[0].startswith("def ") and len(texts[0]) > 5


# --- bad input


def test_refusals_before_anything_is_written(corpus, tmp_path, capsys):
    run = tmp_path / "run"
    for knobs, words in (
        (dict(norm="dyt"), ["taper", "rmsnorm"]),
        (dict(n_head=5), ["n_embd", "n_head"]),
        (dict(block_size=10**6), ["tokens", "block_size"]),
        (dict(vocab_size=200), ["vocab_size", "400"]),
        (dict(dataset="nosuch"), ["nosuch", "stdlib", "tinystories"]),
        (dict(device="cuda:77"), ["device"]),
        (dict(cuda_graph=True), ["cuda_graph=True needs a GPU", "--cuda_graph=False"]),
        (dict(cuda_graph=True, dropout=0.1), ["dropout draws anew"]),
        (dict(init_from="resum"), ["did you mean resume"]),
        (dict(form="folded"), ["form=folded is not for new weights"]),
        (dict(init_from="resume"), ["resume", "ckpt.pt"]),
        (dict(n_embd=10**8, n_head=4), ["memory"]),
    ):
        line = refused(capsys, *flags(run, corpus, **knobs))
        assert all(word in line for word in words) and not run.exists(), line
    assert "config/demo.py" in refused(capsys, "config/dem.py")


def test_refused_run_folders(reference, corpus, tmp_path, capsys):
    assert "holds a run" in refused(capsys, *flags(reference, corpus))
    before = {p.name: p.read_bytes() for p in reference.iterdir()}
    assert "n_embd=64" in refused(capsys, "--init_from=resume", f"--out_dir={reference}", "--n_embd=64")
    assert "seed" in refused(capsys, "--init_from=resume", f"--out_dir={reference}", "--seed=1")
    assert "seed" in refused(capsys, *flags(reference, corpus, init_from="auto", seed=3))
    assert before == {p.name: p.read_bytes() for p in reference.iterdir()}
    (tmp_path / "file").write_text("")
    assert "out_dir" in refused(capsys, *flags(tmp_path / "file" / "run", corpus))
    (tmp_path / "run/ckpt.pt.tmp").mkdir(parents=True)  # a temporary file that cannot go
    assert "ckpt.pt.tmp" in refused(capsys, *flags(tmp_path / "run", corpus))
    (tmp_path / "ckpt.pt").write_bytes(before["folded.pt"])
    assert "not a training checkpoint" in refused(capsys, "--init_from=resume", f"--out_dir={tmp_path}")


def test_refused_samples(reference, tmp_path, capsys):
    assert "holds no run" in refused(capsys, tmp_path, program="sample.py")
    assert "name one" in refused(capsys, program="sample.py")
    (tmp_path / "folded.pt").write_bytes((reference / "folded.pt").read_bytes())
    assert "tokenizer" in refused(capsys, tmp_path, "--prompt=a", program="sample.py")


def test_damaged_checkpoints_are_one_line(reference, tmp_path, capsys):
    whole, first = final(reference), "blocks.0.attn.qkv.weight"
    short, bad, totals = (final(reference)[k] for k in ("optimizer", "state", "progress"))
    totals["totals"] *= torch.nan
    short["state"][0]["exp_avg"] = torch.zeros(3)  # the fused AdamW would read past its end
    bad[first][3, 3] = float("nan")
    for key, value, said in (
        ("optimizer", {"x": 1}, "ckpt.pt is damaged (KeyError"),
        ("optimizer", whole["optimizer"] | {"state": {}}, "ckpt.pt is damaged"),
        ("progress", {}, "it does not say its step"),
        ("progress", totals, "ckpt.pt is damaged"),
        ("run", {"n_layer": 2}, "its settings are those of another version"),
        ("optimizer", short, "optimizer state"),
        ("state", bad, first),
    ):
        torch.save({**whole, key: value}, tmp_path / "ckpt.pt")
        assert said in refused(capsys, "--init_from=resume", f"--out_dir={tmp_path}")


@pytest.mark.parametrize("norm", ["rmsnorm", slow("dyt"), slow("cbwc")])
def test_what_a_run_says_next_works(corpus, tmp_path, capsys, norm):
    """The commands that train.py prints at its end, for runs with one export and with two."""
    out = tmp_path / "a run"
    train(*flags(out, corpus, norm=norm, taper="none", aux_weight=0, max_iters=4, eval_interval=4))
    last = capsys.readouterr().out.splitlines()[-1]
    for command in last.removeprefix("next: ").split("    or    "):
        program, path = shlex.split(command)[1:3]
        assert Path(path) == out
        few = {"bench.py": ["--iters=1", "--warmup=0", "--seq=8", "--batch=1"],
               "sample.py": ["--prompt=x", "--max_new_tokens=2"]}  # fmt: skip
        train(path, *few[program], program=program)


def test_a_norms_gain_and_shift_have_one_gradient():
    names = [
        f"blocks.{i}.norm_{kind}.{part}"
        for i, kind in ((0, "mlp"), (1, "attn"))
        for part in ("weight", "bias")
    ]
    found = grad_norms(names, torch.tensor([3.0, 4.0, 5.0, 12.0]))
    assert found["grad/norm"] == 9 and found["grad/total"] == pytest.approx(194**0.5)
