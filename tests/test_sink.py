"""sink_token: the network with a token that it puts in front of every text itself is the plain network with
that token in front, whatever becomes of its norms."""

import json
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from conftest import VARIANTS, batch, norm_names, refuses, scale_of_difference, tiny, tokens
from running import assert_goes_on_from, flags, metrics, refused, train
from test_convert import assert_generates, convert, facts, ids, network, opened
from test_generation import ragged
from test_model import greedy_by_recomputation
from test_taper import every_tapered

import bench
from begin import make_trained, untapered
from config import Config
from data.tokenizer import load_tokenizer
from forms import FORMS, fold, load_model, proved, unfuse
from model import Transformer
from nanonorm.cache import KVCache
from nanonorm.distill import Distilled
from nanonorm.files import write_file
from nanonorm.generation import aligned
from nanonorm.kernels import NOT_COUNTED
from nanonorm.run import Beginning, given_weights, read_checkpoint
from nanonorm.scale import site_losses
from sample import prompt_ids
from scripts.exports.networks import open_network

S = 7  # the token in front
EXACT, FOLDED = 1e-12, 1e-9  # float64: another order of summation; products of other matrices
QK = {"qk_norm": True, "n_kv_head": 2}
SHAPES = {
    "rope": {**QK, "rope_scaling": (8.0, 1.0, 4.0, 8.0)},
    "learned": {"positions": "learned", "mlp": "gelu", "bias": True, "emb_scale": 2.7},
    "wide heads": {"head_dim": 20, "tie_embeddings": False, "emb_scale": 1.3},
}
# every variant where queries and keys have norms, which may taper; one of each kind in the other shapes
PAIRS = [(variant, "rope") for variant in VARIANTS]
PAIRS += [(v, shape) for v in ("rmsnorm-internal", "layernorm-all", "coupled", "cbwc") for shape in SHAPES]
every_pair = pytest.mark.parametrize("variant, shape", dict.fromkeys(PAIRS))


def shape_of(variant: str, shape: str) -> dict:
    """The shape, its norms of queries and keys tapering with the blocks'."""
    taper_qk = shape == "rope" and VARIANTS[variant].get("taper") in ("internal", "all")
    return SHAPES[shape] | ({"taper_qk": True} if taper_qk else {})


def sunk(plain: Transformer) -> Transformer:
    """The same weights, phase and gates, with the sink."""
    model = Transformer(replace(plain.config, sink_token=S)).to(plain.tok_emb.weight.dtype)
    model.load_state_dict(plain.state_dict())
    model.set_phase(plain.phase)
    model.gate.copy_(plain.gate)
    return model.train(plain.training)


def in_front(idx, token: int = S):
    return torch.nn.functional.pad(idx, (1, 0), value=token)


def gradients(model) -> dict:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(model, other):
    ours, theirs = gradients(model), gradients(other)
    assert ours.keys() == theirs.keys()
    for name, grad in theirs.items():
        assert (ours[name] - grad).abs().max() <= 1e-10 * (1 + grad.abs().max()), name


# --- with norms


@every_pair
def test_with_its_norms_it_is_the_plain_network_behind_the_token(variant, shape):
    """Losses and gradients; the norms that taper are norms as long as the gate is up."""
    plain = tiny(variant, phase="norm", **shape_of(variant, shape))
    model, (x, y) = sunk(plain), batch(T=15)
    losses = model(x, y), plain(in_front(x), in_front(y, NOT_COUNTED))
    assert scale_of_difference(losses[0].ce, losses[1].ce) <= EXACT
    assert scale_of_difference(losses[0].stream, losses[1].stream[:, 1:]) <= EXACT
    for of_model in losses:
        of_model.total.backward()
    if plain.config.anchor_target != "batch" or not plain.config.aux_weight:  # whose mean is over all tokens
        assert_same_gradients(model, plain)
    assert plain.tok_emb.weight.grad[S].abs().max() > 0


@pytest.mark.parametrize("variant", ["rmsnorm", "layernorm", "coupled", "dyt"])
@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_evaluated_it_is_the_plain_network_too(variant, shape):
    plain = tiny(variant, **SHAPES[shape]).eval()
    model, idx = sunk(plain), tokens(3, 15)
    assert scale_of_difference(model(idx), plain(in_front(idx))[:, 1:]) <= EXACT
    assert scale_of_difference(unfuse(model)(idx), plain(in_front(idx))[:, 1:]) <= EXACT
    with refuses("16 tokens are more than this model's block_size=16 holds with its sink; give fewer"):
        model(tokens(1, 16))


@every_tapered
def test_no_statistic_sees_the_sink(variant):
    """They are those of the plain network that leaves its first position out."""
    more = {"site_weight": 1.0, "site_far": 2.0}
    plain = tiny(variant, phase="norm", **more, calib_skip_first=True)
    model = sunk(tiny(variant, phase="norm", **more))
    x, y = batch(T=15)
    model(x, y).total.backward()
    plain(in_front(x), in_front(y, NOT_COUNTED)).total.backward()
    theirs = plain.trackers()
    for name, tracker in model.trackers().items():
        if name != "anchor":  # which has no such choice
            torch.testing.assert_close(tracker.sums, theirs[name].sums, rtol=1e-12, atol=0)
            assert tracker.sums[-1] % x.numel() == 0 and tracker.sums[-1] > 0
    assert len(site_losses(model)) == 2 * (2 - model.config.taper_from_layer)
    if model.anchor is None:
        assert_same_gradients(model, plain)  # the site loss's among them
    if "anchor" in theirs:
        assert model.anchor.sums[-1] == x.numel()


# --- its norms stay while the others go


@every_tapered
@pytest.mark.parametrize("phase", ["blend", "scale"])
def test_its_keys_and_values_are_the_norms_whatever_the_gates(variant, phase):
    wanted = sunk(tiny(variant, phase="norm", **shape_of(variant, "rope"))).sink()
    model = sunk(tiny(variant, phase=phase, **shape_of(variant, "rope")))
    assert model.gate.max() < 1
    for training in (True, False):
        for pair, other in zip(model.train(training).sink(), wanted, strict=True):
            assert all(scale_of_difference(a, b) <= EXACT for a, b in zip(pair, other, strict=True))
    assert not any(t.apart for t in model.trackers().values())


@pytest.mark.parametrize("phase", ["norm", "blend", "scale"])
def test_what_the_sink_trains(phase):
    """The matrices in each phase, and the gains as long as they train."""
    model = sunk(tiny("rmsnorm-internal", phase=phase, n_layer=3))
    sum(t.square().sum() for pair in model.sink() for t in pair).backward()
    found = gradients(model)
    assert ("blocks.1.norm_attn.weight" in found) == (phase != "scale")
    assert not [name for name in found if name.endswith("weight_tilde")]
    assert found["blocks.1.mlp.down.weight"].abs().max() > 0 and found["tok_emb.weight"][S].abs().max() > 0


@every_tapered
@pytest.mark.parametrize("phase", ["norm", "blend"])
def test_checkpointed_blocks_have_the_same_gradients(variant, phase):
    models, (x, y) = [sunk(tiny(variant, phase=phase, site_weight=1.0)) for _ in range(2)], batch(T=15)
    models[1].grad_checkpoint = True
    for model in models:
        model(x, y).total.backward()
    assert_same_gradients(*models)
    theirs = models[1].trackers()
    assert all(torch.equal(t.sums, theirs[name].sums) for name, t in models[0].trackers().items())


# --- forms and files


@every_pair
@pytest.mark.parametrize("form", ["unfused", "folded", "weightless"])
def test_a_form_stores_the_sink_and_says_the_same(variant, shape, form, tmp_path):
    plain = tiny(variant, **shape_of(variant, shape))
    model, idx = sunk(plain).eval(), tokens(3, 15)
    c = model.config
    new = FORMS[form](model)
    assert new.sink_k.shape == new.sink_v.shape == (c.n_layer, c.n_kv_head, 1, c.head_dim)
    assert new.emb_scale is None and new.config.emb_scale is None
    with torch.no_grad():
        assert scale_of_difference(new(idx), model(idx)) <= FOLDED
        again = FORMS[form](new)
        assert torch.equal(again.sink_k, new.sink_k) and norm_names(new) == norm_names(FORMS[form](plain))
        write_file(new.to_file({}), tmp_path / "model.pt")
        assert torch.equal(load_model(tmp_path / "model.pt")(idx), new(idx))
    assert proved(model, form, idx)[1]["float64"] <= FOLDED
    assert proved(sunk(tiny(variant, dtype=torch.float32)), form, idx)[1]["float32"] <= 1e-4


def test_a_wrong_slot_is_no_proof(monkeypatch):
    """The proof of a form covers the slot."""
    model = sunk(tiny("rmsnorm-internal")).eval()

    def store_ones(old, new):
        for name in ("sink_k", "sink_v"):
            new.register_buffer(name, torch.ones(2, 4, 1, 6, dtype=torch.float64))

    monkeypatch.setattr("forms.store_sink", store_ones)
    with refuses("differs from the trained one"):
        proved(model, "folded", tokens(2, 15))


# --- text


@every_pair
@pytest.mark.parametrize("form", ["trained", "folded"])
@torch.no_grad()
def test_with_a_cache_it_says_the_same(variant, form, shape):
    """Whole or in pieces; behind padding, of which a first piece may hold nothing else; and generating, rows
    of one length or of several, past the end of the context too."""
    model = FORMS[form](sunk(tiny(variant, std=0.5, **shape_of(variant, shape))).eval()).eval()
    idx, wanted = tokens(3, 15), model(tokens(3, 15))
    for cuts in ((0, 15), (0, 1, 15), (0, 6, 7, 15)):
        cache = KVCache(model, 3, 15)
        pieces = [model(idx[:, a:b], cache=cache) for a, b in pairwise(cuts)]
        assert scale_of_difference(torch.cat(pieces, 1), wanted) <= EXACT, cuts
    prompts = ragged(5, 1, 14)
    padded, padding = aligned(prompts, "cpu")
    cache, pad = KVCache(model, 3, 15), torch.tensor(padding)
    pieces = [model(padded[:, a:b], cache=cache, pad=pad) for a, b in ((0, 6), (6, 7), (7, 14))]
    for logits in (torch.cat(pieces, 1), model(padded, pad=pad)):
        for row, n, prompt in zip(logits, padding, prompts, strict=True):
            assert scale_of_difference(row[n:], model(prompt[None])[0]) <= EXACT
    prompts = ragged(5, 1, 15, 21)
    alone = [greedy_by_recomputation(model, row[None], 20, 15)[0] for row in prompts]
    for use_cache in (True, False):
        assert all(map(torch.equal, model.generate(prompts, 20, temperature=0, use_cache=use_cache), alone))


# --- runs


def test_a_student_learns_from_the_plain_network_behind_the_token():
    plain, other = tiny("rmsnorm", phase="norm", seed=1), tiny("rmsnorm-internal", phase="blend")
    teacher = untapered(plain.to_file({"phase": "norm", "gate": 1.0}), "file", 16, S)
    student, (x, y) = sunk(other), batch(T=15)
    losses = Distilled(student, teacher, {}, ce_weight=0.5)(x, y)
    with torch.no_grad():
        p = plain.eval()(in_front(x))[:, 1:].log_softmax(-1)
        q = student(x).log_softmax(-1)
        kl = (p.exp() * (p - q)).sum(-1).mean()
    assert scale_of_difference(losses.kl, kl) <= 1e-9
    kept = tiny("rmsnorm-internal", phase="norm", calib_skip_first=True)
    kept = kept.to_file({"phase": "norm", "gate": 1.0})
    assert untapered(kept, "file", 16, S).config.sink_token == S  # the taper's knobs are let go
    finished = unfuse(other.eval()).to_file({"phase": "scale", "gate": 0.0})
    with refuses("sink_token=7 differs from None of file, which is unfused"):
        untapered(finished, "file", 16, S)


def test_adapters_of_a_network_without_norms_go_on_in_bfloat16(tmp_path, monkeypatch):
    """What the slot holds is written as it was narrowed to train, beside a teacher's file in float32."""
    monkeypatch.setattr("begin.refuse_other_tokens", lambda *_: None)
    base, source = tmp_path / "base.pt", tmp_path / "ckpt.pt"
    network = unfuse(sunk(tiny("rmsnorm-internal", dtype=torch.float32)).eval())
    write_file(network.to_file({}), base)
    of_run = {"init_from": str(base), "teacher": str(base), "adapter": "lora", "adapter_rank": 2}
    asked = Config(out_dir=str(tmp_path), **of_run)
    file, given = given_weights(asked.init_from)
    settings = asked.started_from(file, set(of_run), str(given)).resolve()
    corpus = dict.fromkeys(("tokenizer_sha256", "train_sha256", "val_sha256"), "x")
    corpus |= {"vocab_size": network.config.vocab_size, "end_token_id": 0}
    _, pair = make_trained(Beginning(settings, file, given=given), corpus, tmp_path, torch.bfloat16)
    state = {"optimizer": {}, "run": asdict(settings), "progress": {"iter": 1}}
    meta = {"corpus": corpus, "phase": "scale", "gate": pair.student.gate.tolist()}
    write_file(pair.to_file(meta) | state, source)
    resumed = Beginning(settings, read_checkpoint(source, Config), source=source)
    again, _ = make_trained(resumed, corpus, tmp_path, torch.bfloat16)
    assert again.sink_k.dtype == torch.bfloat16
    for name, tensor in pair.student.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


RUN = dict(sink_token=3, max_iters=24, gate_start=8, gate_end=20, ckpt_interval=12)


def test_a_run(corpus, tmp_path, capsys):
    """Resumed it is the same run; its exports have the slot and no norm in the blocks; a run goes on from
    them, and from a network without a sink."""
    train(*flags(tmp_path / "run", corpus, **RUN))
    assert_goes_on_from(12, tmp_path / "run", tmp_path / "again")
    folded = load_model(tmp_path / "run/folded.pt")
    assert norm_names(folded) == ["norm_final"] and folded.sink_k.abs().max() > 0
    assert folded.meta["fold_error"]["float64"] <= FOLDED
    more = dict(max_iters=2, taper="none", aux_weight=0, gate_start=None, gate_end=None)
    more = [*flags(tmp_path / "more", corpus, **more), f"--init_from={tmp_path / 'run'}"]
    assert "sink_token=5 contradicts" in refused(capsys, *more, "--sink_token=5")
    train(*more)
    on = load_model(tmp_path / "more/unfused.pt")
    assert norm_names(on) == ["norm_final"] and on.config.sink_token == 3
    shorter = flags(tmp_path / "no", corpus, **RUN, calib_skip_first=True)
    assert "with sink_token leave it out" in refused(capsys, *shorter)


@pytest.mark.parametrize("shape", ["rope", "learned"])
def test_a_run_from_a_plain_network_begins_as_its_teacher(shape, corpus, tmp_path):
    """The same function, behind the token."""
    plain = tiny("rmsnorm", dtype=torch.float32, phase="norm", vocab_size=400, **SHAPES[shape])
    given = tmp_path / "plain.pt"
    write_file(plain.to_file({"phase": "norm"}), given)
    run = dict(sink_token=3, taper="internal", max_iters=4, gate_start=2, gate_end=4, log_interval=1)
    run |= dict(init_from=given, teacher=given, dataset=corpus, out_dir=tmp_path / "run", batch_size=4)
    train(*(f"--{name}={value}" for name, value in run.items()), "--device=cpu")
    first = metrics(tmp_path / "run")[0]
    assert load_model(tmp_path / "run/folded.pt").config.sink_token == 3 and first["train/kl"] < 1e-4


# --- other tools

SUNK = {"sink_token": 3}
FAMILIES = [("llama", "internal"), ("qwen3", "all"), ("qwen2", "coupled"), ("gpt2", "internal")]
FAMILIES.append(("llama", "baseline"))


@pytest.mark.parametrize("shape, change", FAMILIES)
def test_transformers_says_the_same(shape, change, saved, tmp_path, code_cache):
    """With its caches, with padding on the left, with beams, with masks of one's own; our reader finds the
    same network in it."""
    pytest.importorskip("transformers")
    ours = network(shape, change, **SUNK)
    out = convert(saved(ours), "hf", tmp_path / "out")
    theirs, idx = opened(out), ids(3, 47)
    with torch.no_grad():
        assert scale_of_difference(theirs(idx).logits, ours(idx)) <= FOLDED
        assert scale_of_difference(open_network(str(out))(idx), ours(idx)) <= FOLDED
        first = theirs(idx[:, :20], use_cache=True)
        rest = theirs(idx[:, 20:], past_key_values=first.past_key_values)
        assert scale_of_difference(torch.cat((first.logits, rest.logits), 1), ours(idx)) <= FOLDED
        seen = torch.ones(3, 1, 47, 47, dtype=torch.bool).tril()
        for mask in (seen, torch.zeros(seen.shape).double().masked_fill(~seen, -torch.inf)):
            assert scale_of_difference(theirs(idx, attention_mask=mask).logits, ours(idx)) <= FOLDED
    assert_generates(theirs, ours)
    with pytest.raises(ValueError, match="eager would leave out the sink of this network"):
        opened(out, attn_implementation="eager")
    with pytest.raises(ValueError, match="eager would leave out the sink of this network"):
        theirs.set_attn_implementation("eager")
    theirs.set_attn_implementation("sdpa")
    assert scale_of_difference(theirs(idx).logits, ours(idx)) <= FOLDED
    theirs.base_model.set_attn_implementation("eager")  # of a plain class, which takes it
    with pytest.raises(ValueError, match="eager would leave out the sink of this network"):
        theirs(idx)
    theirs.base_model.config._attn_implementation = "sdpa"
    assert scale_of_difference(theirs(idx).logits, ours(idx)) <= FOLDED
    assert "Token 3 stands in front" in (out / "README.md").read_text()
    longest = ids(1, stated_length(out))
    assert scale_of_difference(theirs(longest).logits, ours(longest)) <= FOLDED


@pytest.mark.parametrize("form", ["trained", "unfused"])
def test_float32_weights_with_all_norms_are_exported_exactly(form, saved, tmp_path):
    """The sink is rounded as it is stored: what is compared in float64 has the stored one. Its slot is no
    room for text."""
    pytest.importorskip("transformers")
    ours = FORMS[form](network("llama", "baseline", torch.float32, **SUNK))
    out = convert(saved(ours), "hf", tmp_path / "out")
    assert facts(out)["errors"]["float64"] <= FOLDED
    assert stated_length(out) == ours.config.longest_text == ours.config.block_size - 1


def stated_length(folder: Path) -> int:
    """The longest text that an export says it takes, as who asks its configuration reads it."""
    said = json.loads((folder / "tokenizer_config.json").read_text())["model_max_length"]
    config = pytest.importorskip("transformers").AutoConfig.from_pretrained(folder, trust_remote_code=True)
    assert config.max_position_embeddings == said
    return said


def test_it_is_sampled_and_timed(corpus, capsys):
    tokenizer = load_tokenizer(corpus)
    begin = tokenizer.bos_id
    plain = prompt_ids(tokenizer, "def main", chat=False)
    assert prompt_ids(tokenizer, "def main", False, plain[0]) == plain[1:]
    assert prompt_ids(tokenizer, "def main", False, 399) == plain and (begin is None or plain[0] == begin)
    shape = ["--vocab_size=64", "--block_size=32", "--n_layer=2", "--n_head=4", "--n_embd=32", "--device=cpu"]
    quick = [*shape, "--iters=2", "--warmup=1", "--batch=2", "--seq=16", "--sink_token=3"]
    for mode in ("prefill", "decode"):
        bench.main([*quick, f"--mode={mode}", "--variants=baseline,unfused,folded,coupled"])
        rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
        work = {row["variant"]: row["work"] for row in rows}
        assert work["folded"] < work["unfused"] < work["baseline"]
    with refuses("seq=32 is longer than the model's block_size=32 has room for behind its sink"):
        bench.main([*quick, "--seq=32"])


def test_a_form_stores_the_sink_without_dropout():
    model = tiny("rmsnorm-internal", sink_token=3, dropout=0.5)
    trained, evaluated = fold(model.train()), fold(model.eval())
    assert torch.equal(trained.sink_k, evaluated.sink_k) and torch.equal(trained.sink_v, evaluated.sink_v)
