"""Gates by site: their names and schedules, FakeLN's calibration and scale loss, targets that do not count,
and blocks that are computed twice."""

import json
import shutil
from collections import Counter
from dataclasses import fields, replace
from functools import partialmethod

import pytest
import torch
import torch.nn.functional as F
from conftest import batch, randomize, refuses, scale_of_difference, slow, state_of, tiny, tiny_config, tokens
from running import assert_same, assert_same_run, cut_back, final, flags, metrics, refused, train
from test_taper import EXACT, stream

from config import Config
from forms import load_model
from model import Block, ModelKnobs, SplitAttention, Taper, Transformer
from nanonorm import schedules
from nanonorm.ranks import Ranks
from nanonorm.schedules import gate_sites
from train import Step

FAKE = "layernorm-all-fake"
END = 7  # the end token of the tiny vocabulary
CPU = torch.device("cpu")
ONE_BY_ONE = {"gate_schedule": "sequential", "gate_gaps": (1, 2, 3)}

# --- names and schedules

SITES = {  # variant -> those of a block, those at the end
    "rmsnorm": ("", ""),
    "rmsnorm-final": ("", "norm_final"),
    "rmsnorm-internal": ("norm_attn norm_mlp", ""),
    "layernorm-all": ("norm_attn norm_mlp", "norm_final"),
    FAKE: ("norm_attn norm_attn.v norm_mlp", "norm_final"),
    "rmsnorm-internal qk": ("norm_attn attn.norm_q attn.norm_k norm_mlp", ""),
}


@pytest.mark.parametrize("variant", SITES)
def test_every_norm_that_tapers_knows_its_gate(variant):
    of_a_block, at_the_end = (names.split() for names in SITES[variant])
    name, _, qk = variant.partition(" ")
    model = tiny(name, phase="blend", qk_norm=bool(qk), taper_qk=bool(qk))
    sites = [f"blocks.{i}.{site}" for i in range(2) for site in of_a_block] + at_the_end
    assert model.gate_sites() == gate_sites(model.config) == sites
    assert len(model.gate) == max(1, len(sites))
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, Taper):
            views = {name: module.gate}
            if module.gate_values is not module.gate:
                views[f"{name}.v"] = module.gate_values
            found |= {site: view.data_ptr() for site, view in views.items()}
    assert found == {site: model.gate[i].data_ptr() for i, site in enumerate(sites)}
    # each gate moves what the model computes, and nothing else does
    model.gate.fill_(0.5)
    before = model(*batch()).ce
    for i in range(len(model.gate)):
        model.gate[i] = 0.4
        assert (model(*batch()).ce == before) == (not sites)
        model.gate[i] = 0.5


OF_THE_MODEL = {f.name for f in fields(ModelKnobs)}


def small_run(variant=FAKE, **knobs):
    """(settings, Step) of a run of a tiny model on the CPU in float64."""
    run = {name: value for name, value in knobs.items() if name not in OF_THE_MODEL}
    config = tiny_config(variant, **{name: knobs[name] for name in knobs.keys() & OF_THE_MODEL})
    model = randomize(Transformer(config).double(), std=0.1).train()
    model.end_token = END
    run = dict(max_iters=40, warmup_iters=2, gate_start=3, learning_rate=1e-2, compile=False) | run
    cfg = Config(**{name: getattr(config, name) for name in OF_THE_MODEL}, **run).resolve()
    return cfg, Step(model, cfg, CPU, torch.float64, Ranks())


def micro_batches(step: int, count: int, B: int = 2, T: int = 16):
    """(x, y) of an optimizer step: (count, B, T)"""
    text = tokens(count, B, T + 1, seed=1000 + step)
    return text[..., :-1], text[..., 1:]


def whole_run(step: Step, cfg: Config, look=lambda k: None) -> list[float]:
    """Every step of a run; `look(k)` after step k. The losses, a step each."""
    losses = []
    for k in range(cfg.max_iters):
        step.at(k)
        step(*micro_batches(k, cfg.gradient_accumulation_steps))
        losses.append((step.totals[0] / step.totals[-1]).item())
        step.totals.zero_()
        look(k)
    return losses


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_gates_that_go_down_alike(schedule):
    _, step = small_run("rmsnorm-all-aux", gate_schedule=schedule, gate_end=23)
    curve = {"cosine": lambda t: (1 + torch.cos(torch.pi * t)) / 2, "linear": lambda t: 1 - t}[schedule]
    for k in range(40):
        step.gates.set(k)
        t = torch.tensor((k - 3) / 20, dtype=torch.float64).clamp(0, 1)
        assert step.model.gate.tolist() == pytest.approx([curve(t).item()] * 5, abs=1e-15)


def test_gates_that_go_down_one_by_one():
    cfg, step = small_run(**ONE_BY_ONE)
    steps = schedules.drop_steps(cfg, step.model.gate_sites())
    assert len(steps) == 7 and max(steps) == cfg.gate_end == 3 + 2 * (1 + 2 + 3)
    assert replace(cfg, taper="internal", gate_end=None).resolve().gate_end == 12  # the last one of a block
    last = schedules.drop_steps(replace(cfg, gate_order="last"), step.model.gate_sites())
    blocks = len(steps) // 2  # sites of each of two
    assert last == [*steps[blocks:-1], *steps[:blocks], steps[-1]]
    place = step.model.gate.data_ptr()
    for k in range(40):
        step.gates.set(k)
        assert step.model.gate.tolist() == [float(k < drop) for drop in steps]
    assert step.model.gate.data_ptr() == place  # a CUDA graph reads the same memory


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"gate_schedule": "sequential"}, "gate_gaps"),
        ({"gate_gaps": (1, 1, 1)}, "gate_schedule=sequential"),
        ({"gate_order": "last"}, "needs gate_schedule=sequential"),
        ({**ONE_BY_ONE, "gate_gaps": (1, 1)}, "three numbers"),
        ({**ONE_BY_ONE, "gate_end": 17}, "at step 15; leave it out"),
        ({**ONE_BY_ONE, "max_iters": 14}, "beyond max_iters=14"),
        ({**ONE_BY_ONE, "taper": "final"}, "needs taper=internal or all"),
    ],
)
def test_schedules_that_contradict_themselves(knobs, words):
    run = dict(taper="all", calibration="mean_scale", n_layer=2, max_iters=40, gate_start=3, warmup_iters=1)
    Config(**{**run, **ONE_BY_ONE}).resolve()
    with refuses(words):
        Config(**{**run, **knobs}).resolve()


# --- FakeLN's calibration


def scale_of(h, centre: bool):
    return (h.var(-1, correction=0) if centre else h.square().mean(-1)).add(1e-6).sqrt()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("n_kv_head", [4, 2])
def test_an_attention_takes_two_inputs(bias, n_kv_head):
    """Queries and keys from the first, values from the second, with the rows of one matrix."""
    model = tiny(FAKE, bias=bias, n_kv_head=n_kv_head)
    attention, rope, a, b = model.blocks[0].attn, model.rope[:, :5], stream(2, 5), stream(2, 5, seed=1)
    assert type(attention) is SplitAttention
    weights = list(attention.qkv.parameters())
    by_hand = attention.mixed(attention.heads(a)[0], attention.heads(b)[1], rope)
    both = (attention(a, rope, values=b), by_hand)
    found = [[y, *torch.autograd.grad((y**2).sum(), weights)] for y in both]
    for ours, wanted in zip(*found, strict=True):
        assert scale_of_difference(ours, wanted) <= EXACT
    assert scale_of_difference(attention(a, rope, values=a), attention(a, rope)) <= EXACT
    assert scale_of_difference(attention(a, rope, values=b), attention(a, rope)) > 1e-2


def compiled_run(cfg: Config, step: Step, backend="aot_eager") -> list[float]:
    """The losses of a run that is compiled without a graph break."""
    torch._dynamo.reset()
    step.forward = torch.compile(step.model, backend=backend, fullgraph=True)
    step.enter("norm")
    try:
        return whole_run(step, cfg)
    finally:
        torch._dynamo.reset()


TOGETHER = {"gate_end": 14}
WITH_ALL = TOGETHER | {"block_size": 17, "sink_token": 3, "sink_multiple": 4.0, "taper_ceiling": 3.0}
WITH_ALL |= {"site_weight": 0.3, "site_rate": 1.0, "gate_budget": 9.0}
REMOVALS = [(FAKE, ONE_BY_ONE), slow("layernorm-all", ONE_BY_ONE), slow("rmsnorm-all-aux", TOGETHER),
            slow("rmsnorm-all-aux", WITH_ALL)]  # fmt: skip


@pytest.mark.parametrize("variant, more", REMOVALS)
def test_a_removal_compiles_once_a_phase_never_once_a_value(variant, more):
    """Of one gate after another, or of all alike; and nothing is wrapped anew either."""
    (eager_cfg, eager), (cfg, step) = (small_run(variant, **more, max_iters=18) for _ in range(2))
    compiled_at, entered, enter = [], [], step.enter
    step.enter = lambda phase: (entered.append(phase), enter(phase))
    losses = compiled_run(cfg, step, lambda graph, _: compiled_at.append(step.model.phase) or graph)
    assert compiled_at == ["norm", "blend", "scale"] == entered
    assert losses == pytest.approx(whole_run(eager, eager_cfg), rel=1e-9)  # float64, 18 steps of AdamW


# --- the scale loss


@pytest.mark.parametrize("variant", [FAKE, "rmsnorm", "layernorm"])
@pytest.mark.parametrize("unit", ["absolute", "relative"])
@pytest.mark.parametrize("phase", ["norm", "blend", "scale"])
def test_the_batchs_own_target(variant, unit, phase):
    """From the first step, over all tokens; the target is the mean without the first position and the ends of
    texts, and takes no gradient."""
    model = tiny(variant, phase=phase, aux_weight=0.37, anchor_target="batch", anchor_unit=unit)
    idx, targets = batch()
    idx[:, 5] = END

    def by_hand(h, end):
        s = scale_of(h, variant != "rmsnorm")
        counted = [s[b, t] for b in range(3) for t in range(1, 16) if end is None or idx[b, t] != END]
        target = (sum(counted) / len(counted)).item()
        gaps = s - target if unit == "absolute" else s / target - 1
        return target, gaps.square().mean()

    for end in (END, None):
        model.end_token = end
        losses = model(idx, targets)
        target, distance = by_hand(losses.stream, end)
        assert losses.aux.item() == pytest.approx(0.37 * distance.item(), rel=1e-10)
        assert losses.total.item() == pytest.approx((losses.ce + losses.aux).item(), rel=EXACT)
        assert model.anchor.target_now().item() == pytest.approx(target, rel=1e-12)
    assert "anchor" not in model.trackers() and not [n for n in model.state_dict() if "anchor" in n]
    # the gradient is of the distance alone
    h = losses.stream.clone().requires_grad_()
    ours, wanted = (torch.autograd.grad(y, h)[0] for y in (model.anchor(h, idx, None), by_hand(h, None)[1]))
    assert scale_of_difference(ours, wanted) <= 1e-10
    model.eval()
    model(idx[:, :4], targets[:, :4])
    assert model.anchor.target_now().item() == pytest.approx(target, rel=1e-12)  # of training's batches


# --- targets that do not count


def test_ends_of_texts_are_left_out_of_training_alone():
    model, (x, y) = small_run("layernorm", mask_end=True)[1].model, batch()
    y[:, 3:9] = END
    whole, counted = (F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=i) for i in (-1, END))
    assert model.eval()(x, y).ce.item() == pytest.approx(whole.item(), rel=EXACT)
    assert model.train()(x, y).ce.item() == pytest.approx(counted.item(), rel=EXACT)


def test_a_corpus_that_does_not_say_its_end_is_refused(corpus, tmp_path, capsys):
    folder = shutil.copytree(corpus, tmp_path / "silent")
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps({**meta, "end_token_id": None}))
    said = refused(capsys, *flags(tmp_path / "run", folder, mask_end=True))
    assert "end_token_id" in said and "mask_end" in said and not (tmp_path / "run").exists()


# --- blocks that are computed twice


def checkpointed_pair(variant, **knobs):
    return [small_run(variant, **knobs, grad_checkpoint=again) for again in (False, True)]


@pytest.mark.parametrize("variant", [FAKE, slow("rmsnorm-all-aux"), "coupled"])
def test_blocks_computed_twice_draw_and_observe_once(variant):
    """Losses, averages, gradients and weights to the bit, dropout on, through all phases."""
    more = ONE_BY_ONE if variant == FAKE else {}
    more |= {"sink_multiple": 1.2} if variant != "coupled" else {}
    runs = checkpointed_pair(variant, **more, dropout=0.2, gradient_accumulation_steps=2, max_iters=18)
    states = []
    for cfg, step in runs:
        kept, calls = [], []
        step.model.blocks[0].register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        losses = whole_run(step, cfg, lambda k, step=step, kept=kept: kept.append(step.last[1].clone()))
        states.append((losses, kept, state_of(step.model)))
        assert len(calls) == 18 * 2 * (1 + cfg.grad_checkpoint)  # it did compute twice
    assert_same(*states)


@pytest.mark.slow
def test_blocks_computed_twice_under_a_compiler_draw_once():
    """Both runs are compiled: a compiler draws other masks."""
    once, twice = checkpointed_pair("rmsnorm-all-aux", max_iters=12, n_layer=1, dropout=0.3)
    assert compiled_run(*twice) == pytest.approx(compiled_run(*once), rel=1e-9)


@pytest.mark.parametrize(
    "variant, more",
    [("rmsnorm-all-aux", TOGETHER), slow(FAKE, ONE_BY_ONE), slow("rmsnorm-all-aux", WITH_ALL)],
)
@pytest.mark.parametrize("again", [True, slow(False)])
def test_blocks_compiled_one_by_one_share_a_graph_a_phase(variant, more, again, monkeypatch):
    """Whether or not blocks are computed twice. The losses are those without a compiler."""
    graphs, aot_eager = [], torch._dynamo.lookup_backend("aot_eager")

    def counting(graph, example_inputs):
        made = aot_eager(graph, example_inputs)  # may ask to be called again
        graphs.append(step.model.phase)
        return made

    torch._dynamo.reset()
    monkeypatch.setattr(Block, "compile", partialmethod(torch.nn.Module.compile, backend=counting))
    cfg, step = small_run(variant, **more, max_iters=18, compile="regional", grad_checkpoint=again)
    losses = whole_run(step, cfg)
    torch._dynamo.reset()
    assert Counter(graphs) == dict.fromkeys(("norm", "blend", "scale"), 1)
    eager_cfg, eager = small_run(variant, **more, max_iters=18)
    assert losses == pytest.approx(whole_run(eager, eager_cfg), rel=1e-9)  # float64, 18 steps of AdamW


# --- files and runs


@pytest.mark.slow
def test_a_run_that_removes_site_by_site_goes_on_amid_it(corpus, tmp_path):
    """FakeLN as a whole: seven drops at steps 15 to 35, resumed from step 25."""
    run = dict(norm="layernorm", taper="all", calibration="mean_scale", gate_schedule="sequential",
               gate_gaps="3,3,4", gate_end=None, anchor_target="batch", ema_rate=0.1, dropout=0.1,
               mask_end=True, max_iters=50, eval_interval=25, ckpt_interval=25)  # fmt: skip
    whole, again = tmp_path / "whole", tmp_path / "again"
    train(*flags(whole, corpus, **run))
    cut_back(25, whole, again)
    assert final(again)["meta"]["phase"] == "blend"
    assert final(again)["meta"]["gate"] == [0, 1, 0, 0, 1, 0, 1]  # values' and the last one are up
    train("--init_from=resume", f"--out_dir={again}", "--grad_checkpoint=True")
    assert_same_run(again, whole)
    gates = {line["iter"]: line["gate"] for line in metrics(whole)}
    assert [gates[k] for k in (15, 20, 25, 30, 40)] == pytest.approx([1, 5 / 7, 3 / 7, 2 / 7, 0])
    assert max(load_model(whole / "folded.pt").meta["fold_error"].values()) < 1e-4


def test_a_compiled_forward_leaves_the_batchs_target_for_the_log():
    """In float64, too, of which torch 2.13 loses what is written into a 0-dim buffer."""
    found = []
    for compiled in (False, True):
        model = tiny("rmsnorm", aux_weight=0.3, anchor_target="batch")
        (torch.compile(model, backend="aot_eager") if compiled else model)(*batch())
        found.append(model.anchor.target_now().item())
    assert found[1] == pytest.approx(found[0], rel=1e-9) and found[0] > 0


def test_where_no_token_counts_the_batchs_target_is_1():
    anchor = tiny("rmsnorm", aux_weight=0.3, anchor_target="batch", anchor_unit="absolute").anchor
    h, idx = torch.randn(3, 1, 24, dtype=torch.float64), torch.zeros(3, 1, dtype=torch.long)
    loss = anchor(h, idx)  # a first position alone
    assert anchor.target_now() == 1
    assert loss.item() == pytest.approx((anchor.norm.scale(h) - 1).square().mean().item())
