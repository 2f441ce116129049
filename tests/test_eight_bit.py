"""AdamW with averages of 8 bits: beside that of 32, in a checkpoint, after a bad step, and its bytes."""

import itertools

import pytest
import sharded
import torch
from conftest import batch
from running import assert_goes_on_from, compiling, final, flags, metrics, refused, train
from test_plan import planned

from config import Config
from model import ModelConfig, Transformer
from nanonorm.errors import BadInput
from nanonorm.optimizer import make_optimizer
from nanonorm.ranks import Ranks
from nanonorm.run import load_optimizer

pytest.importorskip("torchao")
RUN = {"optimizer": "adamw_8bit", "n_embd": 64, "max_iters": 24, "gate_start": 6, "gate_end": 16}
RUN |= {"ckpt_interval": 12, "log_interval": 1, "learning_rate": 1e-3}


@pytest.fixture(autouse=True)
def plain_python():
    """What torchao compiles is taken as it is written."""
    with torch.compiler.set_stance("force_eager"):
        yield


def begun(**knobs):
    """(a network whose averages are there, its optimizer)"""
    cfg = Config(**knobs).resolve()
    model = Transformer(ModelConfig(vocab_size=61, block_size=16, n_layer=2, n_head=4, n_embd=64))
    optimizer = make_optimizer(list(model.parameters()), cfg, torch.device("cpu"))
    for group in optimizer.param_groups:
        group["lr"] = group["lr"].fill_(0.01) if isinstance(group["lr"], torch.Tensor) else 0.01
    model(*batch()).total.backward()
    optimizer.step()
    return model, optimizer


def test_its_rates_and_decays_are_the_runs():
    groups = begun(optimizer="adamw_8bit", weight_decay=0.1, beta1=0.8, beta2=0.9)[1].param_groups
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert all(group["betas"] == (0.8, 0.9) for group in groups)


def test_a_run_goes_on_to_the_bit_and_ends_near_that_of_32_bits(corpus, tmp_path):
    train(*flags(tmp_path / "run", corpus, **RUN))
    assert_goes_on_from(12, tmp_path / "run", tmp_path / "again")
    train(*flags(tmp_path / "wide", corpus, **RUN | {"optimizer": "adamw"}))
    narrow, wide = (metrics(tmp_path / name)[-1]["val/loss"] for name in ("run", "wide"))
    assert narrow != wide and narrow == pytest.approx(wide, rel=0.01)
    kinds = {t.dtype for of in final(tmp_path / "run")["optimizer"]["state"].values() for t in packs(of)}
    assert kinds == {torch.uint8, torch.float32}


def packs(of: dict) -> list[torch.Tensor]:
    """The tensors of a parameter's state in a file."""
    return [t for kept in of.values() for t in (kept.values() if isinstance(kept, dict) else [kept])]


def test_a_step_that_is_not_finite_changes_nothing():
    """Nor do those after it; though torchao's AdamW by itself would take it."""
    knobs = {"optimizer": "adamw_8bit", "n_embd": 64, "vocab_size": 61}
    step = sharded.begun("rmsnorm", Ranks(), False, torch.float32, **knobs)

    def infinite(module, args, losses):
        return losses._replace(total=losses.total * torch.nan) if step.at_step == 3 else None

    step.module.register_forward_hook(infinite)
    kept = []
    for k in range(5):
        step.at(k)
        step(*sharded.batch_of(step, k))
        state = step.optimizer.state_dict()["state"]
        kept.append([p.detach().clone() for p in step.learns.values()])
        kept[-1] += [t.clone() for of in state.values() for t in packs(of)]
    same = [all(map(torch.equal, before, after)) for before, after in itertools.pairwise(kept)]
    assert same == [False, False, True, True] and step.first_bad() == 3
    step.optimizer.found_inf = torch.tensor(1.0)
    step.learns["tok_emb.weight"].grad = torch.ones_like(step.learns["tok_emb.weight"])
    step.optimizer.step()
    assert not torch.equal(kept[-1][0], next(iter(step.learns.values())))


@pytest.mark.slow(minutes=0.5)
def test_it_is_the_same_compiled(corpus, tmp_path):
    """As torchao has it outside these tests: a step is equal but for rounding, and a code that it turns."""
    with torch.compiler.set_stance("default"), compiling(more_than=2):  # both try the compiler
        train(*flags(tmp_path / "run", corpus, **RUN))
        assert_goes_on_from(12, tmp_path / "run", tmp_path / "again")
    train(*flags(tmp_path / "eager", corpus, **RUN))
    compiled, eager = (metrics(tmp_path / name)[-1]["val/loss"] for name in ("run", "eager"))
    assert compiled == pytest.approx(eager, rel=1e-3)


def test_averages_of_another_kind_are_refused(tmp_path):
    kinds = ("adamw", "adamw_8bit", "adamw_8bit")
    wide, narrow, short = (begun(optimizer=kind)[1].state_dict() for kind in kinds)
    short["state"][1]["exp_avg"]["codes"] = torch.zeros(1, dtype=torch.uint8)
    for state, other in ((wide, "adamw_8bit"), (narrow, "adamw"), (short, "adamw_8bit")):
        file = {"optimizer": state, "progress": {"iter": 1}}
        with pytest.raises(BadInput, match="damaged"):
            load_optimizer(begun(optimizer=other)[1], file, tmp_path / "ckpt.pt")


def test_they_take_the_bytes_that_are_planned(monkeypatch, capsys):
    """A byte a number, and 4 for a block of 256; what is small stays as it is."""
    shape = ("--n_layer=2", "--n_head=4", "--n_embd=64", "--block_size=16", "--vocab_size=61", "--device=cpu")
    plan = planned(capsys, monkeypatch, *shape, "--optimizer=adamw_8bit", "--dataset=no/corpus")
    state = begun(optimizer="adamw_8bit")[1].state_dict()["state"]
    held = sum(t.nbytes for of in state.values() for t in packs(of) if t.dim())
    assert plan["parts"]["AdamW's averages"] == held
    wide = begun(optimizer="adamw")[1].state_dict()["state"]
    assert held < 0.3 * sum(t.nbytes for of in wide.values() for t in packs(of) if t.dim())


@pytest.mark.parametrize(
    ("knobs", "reason"),
    [
        ({"shard": True}, "does not go with shard=True: another number of ranks would cut its blocks"),
        ({"dtype": "float64"}, "computes in float32; with dtype=float64 use optimizer=adamw"),
    ],
)
def test_what_does_not_go_with_it_is_refused(knobs, reason, corpus, tmp_path, capsys):
    said = refused(capsys, *flags(tmp_path / "run", corpus, **RUN, **knobs))
    assert f"optimizer=adamw_8bit {reason}" in said
