"""scripts/plan.py counts what a network that is really built holds."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from running import refused

from model import Transformer
from nanonorm.adapters import learning, put_on
from nanonorm.distill import Distilled, share_weights
from nanonorm.optimizer import make_optimizer
from scripts import plan

TEACHER = "teacher, the student's base"
SMALL = ("--n_layer=3", "--n_embd=64", "--n_head=4", "--vocab_size=501", "--block_size=32", "--batch_size=2")
SMALL += ("--dtype=float32", "--device=cpu", "--dataset=no/corpus", "--shard=True", "--max_iters=10")


def planned(capsys, monkeypatch, *argv) -> dict:
    monkeypatch.setattr(sys, "argv", ["plan.py", *argv])
    plan.main()
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_weights_and_averages_of_a_network_that_is_there(ranks, capsys, monkeypatch):
    """After a step of AdamW, a third of every matrix a rank, whole rows."""
    argv = (*SMALL, f"--ranks={ranks}", "--gradient_accumulation_steps=3")
    found = planned(capsys, monkeypatch, *argv)["parts"]
    cfg = plan.parse(plan.Plan, list(SMALL))[0].resolve()
    model = Transformer(cfg.model_config())
    optimizer = make_optimizer(list(model.parameters()), cfg, torch.device("cpu"))
    x = torch.zeros(2, 32, dtype=torch.long)
    model(x, x).total.backward()
    optimizer.step()

    def rows(t):
        return len(t.chunk(ranks)[0]) * t[0].nbytes if t.dim() == 2 else t.nbytes

    assert found["weights"] == sum(map(rows, model.parameters()))
    assert found["gradients"] == sum(rows(p.grad) for p in model.parameters())
    averages = [optimizer.state[p][k] for p in model.parameters() for k in ("exp_avg", "exp_avg_sq")]
    assert found["AdamW's averages"] == sum(map(rows, averages))


def test_ranks_that_add_micro_batches_up_hold_gradients_twice(capsys, monkeypatch):
    def gradients(*argv):
        argv = (*SMALL, "--gradient_accumulation_steps=4", *argv)
        return planned(capsys, monkeypatch, *argv)["parts"]["gradients"]

    once = gradients("--ranks=1", "--shard=False")
    assert gradients("--ranks=4", "--shard=False") == once
    assert gradients("--ranks=2", "--shard=False") == 2 * once


def test_a_beginning_is_what_the_run_would_begin_from(tmp_path, capsys, monkeypatch):
    """--init_from=auto without a run yet: what the config file names; resume names no run."""
    network = Transformer(plan.parse(plan.Plan, list(SMALL))[0].resolve().model_config())
    torch.save(network.to_file({}), tmp_path / "weights.pt")
    (tmp_path / "own.py").write_text(f"init_from = '{tmp_path / 'weights.pt'}'\n")
    own = (str(tmp_path / "own.py"), "--dataset=no/corpus", "--device=cpu")
    assert planned(capsys, monkeypatch, *own, "--init_from=auto") == planned(capsys, monkeypatch, *own)
    assert "the run's own config" in refused(capsys, *SMALL, "--init_from=resume", program="scripts/plan.py")


TAPERED = ("--norm=rmsnorm", "--taper=all", "--taper_ceiling=2")


@pytest.mark.parametrize("norm", [("--norm=layernorm",), TAPERED])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_what_autograd_keeps(checkpointed, norm, capsys, monkeypatch):
    """Of a forward pass on a CPU without its fast paths, of a taper in its blend; tensors by their memory."""
    argv = (*SMALL, *norm, "--mlp=gelu", f"--grad_checkpoint={checkpointed}")
    found = planned(capsys, monkeypatch, *argv)["parts"]["activations"]
    cfg = plan.parse(plan.Plan, list(argv))[0].resolve()
    model = Transformer(cfg.model_config()).train()
    if model.taper_norms():
        model.set_phase("blend")
    model.grad_checkpoint, of_parameters, sizes, kept = checkpointed, set(), {}, []
    of_parameters |= {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(t):
        kept.append(t)
        if t.untyped_storage().data_ptr() not in of_parameters:
            sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with plan.turned_off(), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        model.stream(torch.zeros(2, 32, dtype=torch.long))
    kept = sum(sizes.values())
    if checkpointed:  # the inputs of the blocks, and one block whole while it is done again
        one = planned(capsys, monkeypatch, *argv, "--grad_checkpoint=False", "--n_layer=1")["parts"]
        assert 0.9 < (found - kept) / one["activations"] <= 1
    else:
        assert found == pytest.approx(kept, rel=0.02)


def test_dropout_keeps_no_weights_of_attention(capsys, monkeypatch):
    """They would grow as the square of the text, which all else that is kept does not."""
    found = []
    for block_size in (64, 128):
        argv = (*SMALL, "--dropout=0.1", f"--block_size={block_size}")
        found.append(planned(capsys, monkeypatch, *argv)["parts"]["activations"])
    assert found[1] == 2 * found[0]


def test_gathered_matrices_are_no_activations(capsys, monkeypatch):
    """In bfloat16 autocast copies a matrix and autograd keeps the copy; a sharded run lets go of it."""
    argv = [word for word in SMALL if not word.startswith(("--dtype", "--shard"))]
    argv.append("--dtype=bfloat16")
    both = (f"--shard={shard}" for shard in (False, True))
    alone, spread = (planned(capsys, monkeypatch, *argv, shard)["parts"] for shard in both)
    model = Transformer(plan.parse(plan.Plan, list(SMALL))[0].resolve().model_config())
    matrices = sum(p.numel() for name, p in model.blocks.named_parameters() if p.dim() == 2)
    assert alone["activations"] - spread["activations"] == pytest.approx(2 * matrices, rel=0.02)


@pytest.mark.parametrize("tokens", [64, 4096])
def test_the_logits_of_a_step(tokens, capsys, monkeypatch):
    """Whole, three of them in float32: log-probabilities, their gradient and the logits'. Else pieces of two,
    and the head's gradient."""
    monkeypatch.setattr(plan, "WHOLE_LOGITS", 501 * 64)
    monkeypatch.setattr(plan, "LOGITS_AT_ONCE", 501 * 16)
    found = planned(capsys, monkeypatch, *SMALL, f"--batch_size={tokens // 32}")["parts"]
    assert found["logits"] == (3 * 4 * 501 * 64 if tokens == 64 else 2 * 4 * 501 * 16 + 4 * 501 * 64)
    assert found["corpus, not prepared"] == 0


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_adapters_and_a_base_that_is_the_teachers(kind, capsys, monkeypatch):
    pytest.importorskip("peft")
    size = {"n_layer": 2, "n_embd": 64, "n_head": 4, "block_size": 32, "vocab_size": 501}
    shape = plan.ModelConfig(**size, tie_embeddings=False)
    monkeypatch.setattr(plan, "shape_of", lambda name: shape)
    argv = ("--init_from=a", "--teacher=a", f"--adapter={kind}", "--adapter_rank=8", "--dataset=no/corpus")
    found = planned(capsys, monkeypatch, *argv, "--dtype=bfloat16", "--batch_size=2")["parts"]
    teacher, student = Transformer(shape), Transformer(shape)
    student.load_state_dict(teacher.state_dict())
    share_weights(student, teacher, "")
    for network in (student, teacher):
        network._apply(lambda t: t.to(torch.bfloat16) if t.dim() >= 2 else t)
    put_on(student, kind, 8, 16.0)
    pair = Distilled(student, teacher, {})
    adapters = sum(p.nbytes for p in learning(student).values())
    assert found["adapters"] == found["gradients"] == adapters and found["AdamW's averages"] == 2 * adapters
    kept = sum(p.nbytes for p in pair.parameters())
    theirs = sum(size for name, size in found.items() if name.startswith(("teacher", "frozen")))
    assert theirs == kept - adapters


@pytest.mark.slow
def test_the_8b_distillation_needs_two_cards(capsys, monkeypatch):
    """As its file says, with every figure that the plan prints; one card does not hold it."""
    pytest.importorskip("peft")
    path = str(ROOT / "config/distill_qwen_8b.py")
    said = " ".join(Path(path).read_text().replace("\n#", "").split())
    spread = planned(capsys, monkeypatch, path, "--ranks=2", "--shard=True")
    alone = planned(capsys, monkeypatch, path)
    assert spread["fits"] and not alone["fits"]
    parts = alone["parts"]
    adapters = sum(parts[name] for name in ("adapters", "gradients", "AdamW's averages")) / 1e9
    assert f"{parts['adapters'] / 4e9:.2f} G numbers: with gradients" in said
    assert f"float32 {adapters:.1f} GB, and {parts[TEACHER] / 1e9:.1f} of frozen weights" in said
    assert f"counts {spread['bytes'] / 1e9:.1f} GB each" in said
    assert f"on one card {alone['bytes'] / 1e9:.1f} GB" in said


@pytest.mark.slow
def test_gpt2_xl_fits_one_card(capsys, monkeypatch):
    """By what docs/sharding.md says of it, on one card and on each of two; of logits too."""
    said = " ".join((ROOT / "docs/sharding.md").read_text().split())
    path = str(ROOT / "config/gpt2.py") + ":xl_fakeln"
    two = ("--ranks=2", "--shard=True")
    alone, spread = (planned(capsys, monkeypatch, path, *more) for more in ((), two))
    narrow = planned(capsys, monkeypatch, path, "--optimizer=adamw_8bit")
    assert f"counts {narrow['bytes'] / 1e9:.1f} GB for GPT-2 XL (the averages" in said
    assert alone["fits"] and spread["fits"]
    takes = f"takes {alone['bytes'] / 1e9:.1f} GB of one card, and {spread['bytes'] / 1e9:.1f} of each of two"
    assert takes in said
    assert f"holds {alone['parts']['logits'] / 1e9:.1f} GB of them" in said
    (command,) = re.findall(r"train\.py (--dataset=fineweb_edu .*?) ```", said)
    flags = [word for word in command.split() if word not in ("\\", "--dataset=fineweb_edu")]
    asked = ("--ranks=8", "--vocab_size=50257", "--dataset=no/corpus")
    assert f"counts {planned(capsys, monkeypatch, *flags, *asked)['bytes'] / 1e9:.1f} GB a card" in said


def test_a_folder_that_is_no_corpus_is_refused(corpus, tmp_path, capsys):
    """A set to evaluate on has no training text; a damaged one; and a file."""
    meta = json.loads((corpus / "meta.json").read_text())
    held_out = {key: value for key, value in meta.items() if not key.startswith("train")}
    for text in (json.dumps(held_out), json.dumps(meta)[:40]):
        (tmp_path / "meta.json").write_text(text)
        said = refused(capsys, *SMALL, f"--dataset={tmp_path}", program="scripts/plan.py")
        assert f"{tmp_path / 'meta.json'} describes no corpus to train on" in said
    (tmp_path / "text.txt").write_text("Once upon a time")
    said = refused(capsys, *SMALL, f"--dataset={tmp_path / 'text.txt'}", program="scripts/plan.py")
    assert "text.txt/meta.json describes no corpus to train on" in said


def test_what_a_run_would_refuse_is_not_planned(corpus, capsys):
    said = refused(capsys, *SMALL, f"--dataset={corpus}", "--vocab_size=100", program="scripts/plan.py")
    assert f"of {corpus}; leave it out or raise it" in said


def test_the_context_of_weights_that_are_not_there_is_their_own(capsys, monkeypatch):
    """As train.py has it: windows up to it, and a length to be asked for where it is long."""
    argv = ("--init_from=Qwen/Qwen3-0.6B", "--dataset=no/corpus", "--device=cpu")
    assert planned(capsys, monkeypatch, *argv, "--block_size=2048")["parts"]["activations"]
    said = refused(capsys, *argv, program="scripts/plan.py")
    assert "has a context of 40,960 tokens; say how much of it a window takes" in said


def test_ranks_that_do_not_divide_a_step_are_refused(capsys):
    said = refused(capsys, *SMALL, "--ranks=3", program="scripts/plan.py")
    assert "must be a multiple of the 3 ranks" in said


def test_a_corpus_and_a_tenth_of_the_card_count(corpus, capsys, monkeypatch):
    argv = [word for word in SMALL if not word.startswith(("--dataset", "--vocab"))] + [f"--dataset={corpus}"]
    found = planned(capsys, monkeypatch, *argv)
    assert found["parts"]["corpus"] == sum(
        (corpus / f"{split}.bin").stat().st_size for split in ("train", "val")
    )
    for part, fits in ((0.95, False), (0.85, True)):
        more = planned(capsys, monkeypatch, *argv, f"--memory={found['bytes'] / part / 1e9}")
        assert more["fits"] == fits and more["bytes"] == found["bytes"]


def test_gathered_is_two_blocks_and_a_gradient(capsys, monkeypatch):
    found = planned(capsys, monkeypatch, *SMALL)["parts"]
    model = Transformer(plan.parse(plan.Plan, list(SMALL))[0].resolve().model_config())
    matrices, learned = (
        sum(p.nbytes for p in model.blocks[-1].parameters() if p.dim() >= dim) for dim in (2, 1)
    )
    assert found["gathered"] == 2 * matrices + learned + 2 * model.tok_emb.weight.nbytes
