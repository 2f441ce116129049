"""CoupledNorm for networks that are trained already: calibrated, written, folded, decoded."""

import csv
import json
import math
import os
import shutil
import signal
from collections import Counter

import pytest
import torch
from conftest import batch, refuses, scale_of_difference, tiny, tokens
from running import refused, train
from test_distill import every_family, student_of, taught_step, teacher_of

from begin import untapered
from data.sampling import spread_starts
from forms import fold, load_model
from model import CoupledBlock, Transformer
from nanonorm.cache import KVCache
from nanonorm.divergence import Divergence, divergence, divergences
from nanonorm.run import open_model
from scripts.couple import (
    Couple,
    as_json,
    choices_table,
    chosen,
    coupled,
    fit,
    measure,
    numbers_of,
    rms_table,
)
from scripts.studies import alphas


def rms(h, eps: float):
    return (h.square().sum(-1) / h.shape[-1] + eps).sqrt()


@every_family
@torch.no_grad()
def test_alpha_and_floor_are_the_least_squares(family):
    """As lstsq has them, the first position left out; batches of different sizes. And the means of r and of
    r(h)/r(x)."""
    model, batches = teacher_of(family), [tokens(3, 16), tokens(1, 16, seed=1), tokens(2, 7, seed=2)]
    later, firsts = ([[] for _ in model.blocks] for _ in range(2))
    for idx in batches:
        x = model.tok_emb(idx)
        for i, block in enumerate(model.blocks):
            h = x + block.attn.proj(block.attn(block.norm_attn(x), model.rope[:, : idx.shape[1]]))
            r = torch.stack((rms(x, 1e-6), rms(h, 1e-6)))  # (2, B, T)
            later[i].append(r[..., 1:].flatten(1))
            firsts[i].append(r[..., 0])
            x = h + block.mlp(block.norm_mlp(h))
    (found, own), floors = measure(model, batches), 0
    for i in range(len(model.blocks)):
        x, h = torch.cat(later[i], 1).square()
        terms, ones = torch.stack((x / h, 1 / h), 1), torch.ones_like(h)
        a, (beside, b) = (torch.linalg.lstsq(terms[:, :n], ones).solution for n in (1, 2))
        scaled, expected = (a.sqrt().item(), 0.0), (beside.sqrt().item(), (b / beside).item())
        fits = b >= 0 and beside > 0
        floors += fits.item()
        assert own["layer"][:, i].tolist() == pytest.approx(scaled, rel=1e-8)
        assert own["floor"][:, i].tolist() == pytest.approx(expected if fits else scaled, rel=1e-6)
        assert own["ratio"][:, i].tolist() == pytest.approx(((h / x).sqrt().mean().item(), 0.0), rel=1e-9)
        for position, r in enumerate((firsts, later)):
            torch.testing.assert_close(found[position, i], torch.cat(r[i], 1).mean(1), rtol=1e-12, atol=0)
    assert floors  # else the second fit was never looked at
    for way in own:
        torch.testing.assert_close(numbers_of(own, 1, way), own[way][:, 1:], rtol=0, atol=0)
    mean = own["layer"][0, 1:].mean().expand(2)
    torch.testing.assert_close(numbers_of(own, 1, "mean")[0], mean, rtol=1e-15, atol=0)
    assert numbers_of(own, 0, "none").tolist() == [[1.0] * 3, [0.0] * 3]
    assert numbers_of(own, 2, 1.5).tolist() == [[1.5], [0.0]]
    assert all(not block._forward_pre_hooks for block in model.blocks)


def test_a_fit_is_never_below_zero():
    """What attention adds shrinks as the stream grows; the stream is the same everywhere."""
    x = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    for r_x2, r_h2 in ((x, 2 * x - 0.5), (torch.ones_like(x), x)):
        terms = torch.stack((r_x2 / r_h2, 1 / r_h2, torch.ones_like(x)))
        (alpha, floor), without = (fit(terms @ terms.T, floor) for floor in (True, False))
        assert alpha > 0 and floor >= 0 and without[1] == 0
        assert r_x2[0] == r_x2[1] or (alpha, floor) == tuple(without)


@every_family
@torch.no_grad()
def test_a_coupled_block_divides_by_what_alpha_and_floor_make_of_the_attentions_rms(family):
    teacher = teacher_of(family)
    student, x = student_of(teacher), torch.randn(2, 16, 24, dtype=torch.float64)
    assert [type(block) is CoupledBlock for block in student.blocks] == [False, True, True]
    for i, alpha, floor in ((1, 1.3, 0.5), (2, 0.8, 0.0)):
        block, rope = teacher.blocks[i], teacher.rope[:, :16]
        sigma = rms(x, 1e-6)[..., None]
        second = alpha * (sigma.square() + floor).sqrt()
        h = x + block.attn.proj(block.attn(x / sigma * block.norm_attn.weight, rope))
        out = h + block.mlp(h / second * block.norm_mlp.weight)
        assert scale_of_difference(student.blocks[i](x, rope), out) < 1e-12


def test_a_floor_that_a_step_takes_below_0_trains_on():
    """After the step it is 0, where it has its gradient; below, it has none."""
    student, (x, y) = student_of(teacher_of()).train(), batch(T=16)
    step = taught_step(student, student)
    floors = [name for name in step.trained if name.endswith(".floor")]
    for name in floors:
        step.trained[name].data.fill_(-0.1)
    step.at(0)
    for trains in (False, True):
        _, norms = step(x[None], y[None])
        sizes = dict(zip(step.trained, norms.tolist(), strict=True))
        assert [sizes[name] > 0 for name in floors] == 2 * [trains]
        assert trains or all(step.trained[name] == 0 for name in floors)


@every_family
@torch.no_grad()
def test_the_folded_student_is_the_student_and_decodes_as_it(family):
    """Token by token with the cache, as all at once; the student, which couples, is not its teacher."""
    teacher, idx = teacher_of(family), tokens(2, 16)
    student = student_of(teacher)
    logits = student(idx)
    assert scale_of_difference(logits, teacher(idx)) > 1e-2
    for model in (student, fold(student)):
        assert scale_of_difference(model(idx), logits) < 1e-9
        cache = KVCache(model, 2, 16)
        steps = [model(piece, cache=cache) for piece in idx.split([5] + 11 * [1], 1)]
        assert scale_of_difference(torch.cat(steps, 1), logits) < 1e-9


SMOLLM2 = {  # KL by (kept blocks, alpha), as once measured
    (0, "mean"): 0.142, (0, "layer"): 0.079, (1, "mean"): 0.064, (1, "layer"): 0.0251,
    (2, "mean"): 0.0363, (2, "layer"): 0.02004, (4, "mean"): 0.0378, (4, "layer"): 0.0199,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kl", "asked", "choice"),
    [
        (SMOLLM2, {}, (2, "layer")),  # within a tenth of four kept blocks
        (SMOLLM2, {"alpha": "mean"}, (2, "mean")),
        (SMOLLM2, {"keep": 1}, (1, "layer")),
        (SMOLLM2, {"keep": 0, "alpha": "mean"}, (0, "mean")),
        ({(0, "layer"): 0.1101, (1, "layer"): 0.1}, {}, (1, "layer")),
        ({(0, "layer"): math.nan, (1, "layer"): 0.1, (2, "layer"): math.inf}, {}, (1, "layer")),
        # rounding, of a network that nothing changes: it is coupled throughout
        ({(0, "layer"): -1e-9, (1, "layer"): -1e-9}, {}, (0, "layer")),
    ],
)
def test_what_is_left_open_is_chosen_by_its_kl(kl, asked, choice):
    assert chosen(kl, Couple(**asked)) == choice
    with refuses("of no choice is the KL to the original finite"):
        chosen(dict.fromkeys(kl, math.nan), Couple(**asked))


def test_the_script_measures_writes_and_refuses(base, corpus, tmp_path, capsys, monkeypatch):
    out = tmp_path / "coupled"
    argv = [base, f"--data={corpus}", "--tokens=1000", "--window=32"]
    train(*argv, f"--out={out}", "--alpha=1.2", "--keep=1", program="scripts/couple.py")
    said = capsys.readouterr().out
    every = [f"| {kept} | {alpha} | " for kept in (0, 1, 2) for alpha in ("mean", "layer", "floor", "1.2")]
    rows = [row for row in said.splitlines() if row.startswith(tuple(every))]
    assert len(rows) == len(every) and all(map(str.startswith, rows, every))
    assert [row[:11] for row in rows if "written" in row] == ["| 1 | 1.2 |"]
    written = {"model.pt", "tokenizer.model", "couple.md", "couple.json", "rms.png"}
    assert {p.name for p in out.iterdir()} == written
    assert said.split("\n\n")[0] in (out / "couple.md").read_text()
    student, teacher = load_model(out / "model.pt"), load_model(base / "ckpt.pt")
    assert (student.config.norm, student.config.coupled_from_layer) == ("coupled", 1)
    assert student.meta["coupled"]["alpha"] == [1.2, 1.2] and not student.config.coupled_floor
    gains = [m.blocks[1].norm_mlp.weight for m in (student, teacher)]
    torch.testing.assert_close(1.2 * gains[0], gains[1])
    assert torch.equal(student.blocks[0].norm_mlp.weight, teacher.blocks[0].norm_mlp.weight)
    train(out, "--prompt=import ", "--max_new_tokens=5", program="sample.py")

    tapered = tiny("rmsnorm-internal", vocab_size=400)
    for form, model in (("scale", tapered), ("folded", fold(tapered))):
        torch.save(model.to_file({"phase": "scale", "gate": 0.0}), tmp_path / f"{form}.pt")
    idle = tiny("rmsnorm", vocab_size=400, norm_eps=2.0**60)
    torch.save(idle.to_file({}), tmp_path / "idle.pt")
    own = {"corpus": json.loads((corpus / "meta.json").read_text())}
    far = tiny("rmsnorm", dtype=torch.float32, vocab_size=400).to_file(own)
    far["state"]["blocks.0.mlp.down.weight"].mul_(1e30)
    torch.save(far, tmp_path / "far.pt")
    for words, says in (
        ([*argv, f"--out={out}"], "is not an empty folder"),
        ([*argv, "--keep=3"], "keep=3"),
        ([*argv, "--window=1"], "window must be an int >= 2"),
        ([base], "name a network, a prepared corpus"),
        ([out, *argv[1:]], "has norm=coupled"),
        ([tmp_path / "far.pt", *argv[1:]], "stream is not finite"),
        ([tmp_path / "idle.pt", *argv[1:]], "has norms that only scale: eps is 1e+18"),
        ([tmp_path / "scale.pt", *argv[1:]], "has begun to taper"),
        ([tmp_path / "folded.pt", *argv[1:]], "has begun to taper"),
    ):
        assert says in refused(capsys, f"--out={tmp_path / 'x'}", *words, program="scripts/couple.py")
        assert not (tmp_path / "x").exists()
    assert json.loads((base / "config.json").read_text())["norm"] == "rmsnorm"

    monkeypatch.setattr("nanonorm.divergence.divergences", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    before, handler = set(tmp_path.iterdir()), signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        train(*argv, f"--out={tmp_path / 'x'}", program="scripts/couple.py", expect=128 + signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert set(tmp_path.iterdir()) == before, "a signal has left something"


def test_the_original_is_run_once(base, corpus, tmp_path, capsys, monkeypatch):
    """Of all choices together: it reads the measured tokens, then the compared ones, each once; so does what
    every choice makes of it read those that are compared."""
    read, forward = Counter(), Transformer.forward

    def watched(model, idx, *args, **how):
        read[model.config.norm] += idx.numel()
        return forward(model, idx, *args, **how)

    monkeypatch.setattr(Transformer, "forward", watched)
    sizes = ("--tokens=320", "--window=32", "--compared=64", "--keep=1")
    train(base, f"--data={corpus}", f"--out={tmp_path / 'out'}", *sizes, program="scripts/couple.py")
    choices = len(json.loads((tmp_path / "out/couple.json").read_text())["choices"])
    assert choices == 9 and read == {"rmsnorm": 320 + 64, "coupled": 64 * choices}


def test_divergences_are_those_of_one_pair_after_another():
    """As the definition has them, in float64."""
    before, afters = tiny().eval(), [tiny(seed=seed).eval() for seed in (1, 2)]
    pairs = [(tokens(2, 16, seed=i), tokens(2, 16, seed=9 + i)) for i in range(3)]
    found = divergences(before, afters, pairs)
    assert found == [divergence(before, after, pairs) for after in afters]
    x, y = (torch.cat(part) for part in zip(*pairs, strict=True))
    with torch.no_grad():
        old, *new = (model(x).log_softmax(-1) for model in (before, *afters))
    for d, log_q in zip(found, new, strict=True):
        costs = [-log_p.gather(2, y[..., None]).mean().item() for log_p in (old, log_q)]
        kl = (old.exp() * (old - log_q)).sum(-1).mean().item()
        assert d == pytest.approx((*costs, kl), rel=1e-5)  # float32


def test_alphas_are_fitted_to_the_kl(base, corpus, tmp_path, capsys):
    """From what least squares gives: nearer to the original on the text that they are fitted on."""
    out = tmp_path / "out"
    how = ("--tokens=512", "--compared=64", "--steps=3", "--kept=0,1", "--kl_kept=1")
    deep = refused(capsys, base, f"--data={corpus}", f"--out={out}", program="scripts/studies/alphas.py")
    assert "has 3 blocks: 4 cannot be kept; lower --kept, --kl_kept" in deep
    torch.save(tiny("rmsnorm").to_file({"corpus": {"tokenizer_sha256": "another"}}), tmp_path / "other.pt")
    words = (tmp_path / "other.pt", f"--data={corpus}", f"--out={out}", "--kept=0", "--kl_kept=0")
    assert "is not in the tokens of" in refused(capsys, *words, program="scripts/studies/alphas.py")
    train(base, f"--data={corpus}", f"--out={out}", *how, program="scripts/studies/alphas.py")
    rows = list(csv.DictReader((out / "choices.csv").open()))
    made = [("0", alphas.STATISTIC), ("1", (*alphas.STATISTIC, *alphas.KL))]
    assert [(row["kept"], row["way"]) for row in rows] == [(kept, way) for kept, ways in made for way in ways]
    assert "(choices.png)" in (out / "choices.md").read_text() and (out / "choices.png").exists()
    file, path = open_model(base)
    network, idx = untapered(file, path, block_size=32), tokens(4, 32, vocab=400)
    _, own = measure(network, [idx])
    fitted = alphas.statistic_numbers(own, "least squares, each", keep=1)
    for way, each in (("ratio, one", "ratio"), ("least squares, one", "layer")):
        alpha, floor = alphas.statistic_numbers(own, way, keep=1)
        assert torch.equal(alpha, own[each][0, 1:].mean().expand_as(alpha)) and not floor.any()
    start = fitted * torch.tensor([1.5, 0.5])  # wrong either way; further down the first has a plateau
    how = alphas.Knobs(steps=20, rate=0.1)
    found = alphas.kl_numbers(file, path, network, start, "each", [idx] * 20, how)
    far, near = (divergence(network, coupled(file, path, 1, n), [(idx, idx)]).kl for n in (start, found))
    assert near < far / 4 and not found[1].any()


def test_windows_of_a_cut_corpus_begin_where_it_is_cut(base, corpus, tmp_path, capsys, monkeypatch):
    """And the command that is printed reads it so."""
    cut, meta = shutil.copytree(corpus, tmp_path / "cut"), json.loads((corpus / "meta.json").read_text())
    (cut / "meta.json").write_text(json.dumps(meta | {"block_size": 16}))
    asked = []
    monkeypatch.setattr(
        "data.sampling.spread_starts", lambda *args: asked.append(spread_starts(*args)) or asked[-1]
    )
    words = [base, f"--data={cut}", "--tokens=64", "--window=16", "--compared=64", "--alpha=mean", "--keep=0"]
    train(*words, f"--out={tmp_path / 'out'}", program="scripts/couple.py")
    assert [len(starts) for starts in asked] == [4, 4] and not any((starts % 16).any() for starts in asked)
    assert capsys.readouterr().out.splitlines()[-1].endswith(f"--dataset={cut} --block_size=16")


def test_the_table_by_block_has_each_number_in_its_place():
    rms = torch.tensor([[[5.0, 6.0]], [[2.0, 3.0]]])  # first, later; by block; before attention, the MLP
    own = {"layer": torch.tensor([[1.5], [0.0]]), "floor": torch.tensor([[1.25], [0.5]])}
    row = rms_table(rms, own).splitlines()[-1].replace(" ", "").strip("|").split("|")
    assert row == ["0", "2", "3", "1.5", "1.25", "0.125", "5", "6"]


def test_the_table_and_the_file_of_choices_say_what_was_found():
    numbers = torch.tensor([[1.25, 1.5], [0.5, 0.0]])  # alphas, floors
    found = {(1, "floor"): (numbers, Divergence(2.0, 3.0, 0.5))}
    row = choices_table(found, (1, "floor")).splitlines()[-1].replace(" ", "")
    assert row == "|1|floor|1.2500to1.5000|3.0000|+1.0000|0.50000|written|"
    own = {"layer": numbers, "floor": numbers}
    (told,) = as_json(torch.zeros(2, 3, 2), own, found, (1, "floor"))["choices"]
    assert told == {
        "kept": 1, "alpha": "floor", "original": 2.0, "cross_entropy": 3.0, "kl": 0.5,
        "alphas": [1.25, 1.5], "floors": [0.5, 0.0],
    }  # fmt: skip


def test_numbers_are_fitted_to_the_kl_of_each_batch(capsys):
    network, batches = teacher_of(dtype=torch.float32), [tokens(2, 16, seed=s) for s in (0, 1)]
    start = torch.tensor([[1.6, 0.6], [0.5, 0.2]], dtype=torch.float64)
    how, of = alphas.Knobs(steps=2, rate=1e-3), (network.to_file({}), "file", network, start)
    floor, one = (alphas.kl_numbers(*of, way, batches, how) for way in ("floor", "one"))
    said = [float(line.split()[-1]) for line in capsys.readouterr().err.splitlines()]
    student = coupled(*of[:2], 1, start)
    assert said[:2] == pytest.approx([divergence(network, student, [(x, x)]).kl for x in batches], rel=5e-3)
    assert (floor != start).all() and torch.allclose(*(one / start).T, rtol=1e-6)


def test_what_has_one_alpha_is_fitted_from_one(base, corpus, tmp_path):
    sizes = ("--tokens=512", "--compared=64", "--steps=3", "--kept=1", "--kl_kept=1")
    train(base, f"--data={corpus}", f"--out={tmp_path}", *sizes, program="scripts/studies/alphas.py")
    rows = list(csv.DictReader((tmp_path / "choices.csv").open()))
    for row in rows:
        assert (row["alpha_low"] == row["alpha_high"]) == ("one" in row["way"])
        assert "floor" in row["way"] or not float(row["floor_high"])


def test_a_row_has_each_number_of_a_choice():
    numbers = torch.tensor([[1.0, 2.0, 6.0], [0.0, 0.5, 0.25]])  # alphas, floors
    (row,) = alphas.as_rows({(1, "KL, floor"): (numbers, Divergence(2.5, 2.75, 0.125))})
    assert [*row.values()] == [1, "KL, floor", 1, 3, 6, 0.5, 2.5, 2.75, 0.125]
