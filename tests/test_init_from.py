"""Training from given weights, a run's or a Hugging Face folder's of every family; and dropout."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import BPE_SIZE, norm_names, randomize, refuses, slow
from running import assert_goes_on_from, assert_same_log, compiling, flags, metrics, ran, refused, train
from test_gates import micro_batches, small_run
from test_hub import made

from begin import begun_from
from config import Config
from data.tokenizer import load_tokenizer
from forms import begun_as, fold, from_file, load_model
from model import ModelConfig, Transformer
from nanonorm.files import write_file
from nanonorm.hub import read_pretrained

FAMILIES = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM",
            "qwen3": "Qwen3ForCausalLM"}  # fmt: skip
SMALL = {"vocab_size": 400, "n_embd": 16, "n_head": 2, "n_layer": 1, "block_size": 32}
TWO_STEPS = {"max_iters": 2, "gate_start": 1, "gate_end": 2, "warmup_iters": 1}
TWELVE_STEPS = {"max_iters": 12, "gate_start": 4, "gate_end": 8, "warmup_iters": 2, "log_interval": 1,
                "taper": "internal", "dtype": "float64"}  # fmt: skip


def hf_folder(folder: Path, family: str, corpus: Path) -> Path:
    """A checkpoint of transformers' own making, with the corpus's tokenizer."""
    made(FAMILIES[family], torch.float32, vocab_size=BPE_SIZE).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((corpus / name).read_bytes())
    return folder


def started(out, corpus, weights, **knobs):
    """The flags of a short run from given weights, which bring the architecture."""
    run = dict(max_iters=60, warmup_iters=5, gate_start=15, gate_end=45, eval_interval=60, batch_size=4,
               log_interval=5, ckpt_interval=20, learning_rate=1e-3, device="cpu", block_size=32)  # fmt: skip
    knobs = {**run, "dataset": corpus, "out_dir": out, "init_from": weights, **knobs}
    return [f"--{name}={value}" for name, value in knobs.items()]


# --- every family


FAST = [("gpt2", "all", False), ("qwen3", "all", True)]  # family, taper, taper_qk
CELLS = [(family, taper, False) for family in FAMILIES for taper in ("internal", "all")]
SLOW = [slow(*cell) for cell in CELLS if cell not in FAST]


@pytest.mark.parametrize("family, taper, taper_qk", FAST + SLOW)
def test_a_checkpoint_is_tapered_folded_and_exported(family, taper, taper_qk, bpe_corpus, tmp_path, capfd):
    """60 steps in float64 from the weights: gate to 0, both exports exact to 1e-9."""
    weights, out = hf_folder(tmp_path / "hf", family, bpe_corpus), tmp_path / "run"
    knobs = {"taper": taper, "taper_qk": taper_qk, "dtype": "float64", "aux_weight": 0.1}
    train(*started(out, bpe_corpus, weights, **knobs))
    assert metrics(out)[0]["gate"] == 1
    state = torch.load(out / "ckpt.pt", weights_only=True)["state"]
    assert {state[n].item() for n in state if n.endswith("ema_count")} == {15.0}  # gate_start
    for name in ("unfused.pt", "folded.pt"):
        model = load_model(out / name)
        assert model.meta["fold_error"]["float64"] <= 1e-9
        assert model.meta["base"]["name"] == "hf" and model.meta["corpus"]["tokenizer"] == "tokenizer.json"
    assert (model.blocks[0].attn.norm_q is None) == (family != "qwen3" or taper_qk)
    assert load_tokenizer(out).sha256 == load_tokenizer(weights).sha256
    capfd.readouterr()
    train(str(out), "--prompt=import ", "--max_new_tokens=5", program="sample.py")
    assert capfd.readouterr().out.startswith("import ")


def test_gpt2s_layout_in_memory_changes_no_step(bpe_corpus, tmp_path):
    """GPT-2's matrices stay (in, out): optimizer, checkpoint and resume see the numbers of (out, in) ones."""
    weights, columns = hf_folder(tmp_path / "hf", "gpt2", bpe_corpus), "blocks.0.attn.qkv.weight"
    file = read_pretrained(weights)
    assert not file["state"][columns].is_contiguous()
    rows = {**file, "state": {name: t.contiguous() for name, t in file["state"].items()}}
    write_file(rows, tmp_path / "rows.pt")
    more = {**TWELVE_STEPS, "eval_interval": 6, "ckpt_interval": 6}
    for name, given in (("columns", weights), ("rows", tmp_path / "rows.pt")):
        train(*started(tmp_path / name, bpe_corpus, given, **more))
    found = {name: [x["train/ce"] for x in metrics(tmp_path / name)] for name in ("columns", "rows")}
    assert found["columns"] == pytest.approx(found["rows"], rel=1e-10) and len(set(found["rows"])) == 12
    for name, is_row in (("columns", False), ("rows", True)):
        for kept in ("ckpt.pt", "ckpt.prev.pt"):
            state = torch.load(tmp_path / name / kept, weights_only=True)["state"]
            assert state[columns].is_contiguous() == is_row
    assert_goes_on_from(6, tmp_path / "columns", tmp_path / "stopped")


@pytest.mark.slow(minutes=0.6)
@pytest.mark.parametrize("how", ["two ranks", "compiled"])
def test_gpt2s_layout_is_the_same_run_on_two_ranks_and_compiled(how, bpe_corpus, tmp_path):
    """Gradients in the layout of their matrices, whoever sums or computes them; float64, up to rounding."""
    if how == "compiled" and shutil.which("g++") is None:
        pytest.skip("torch.compile needs a C++ compiler on a CPU")
    weights = hf_folder(tmp_path / "hf", "gpt2", bpe_corpus)
    more = {**TWELVE_STEPS, "eval_interval": 12, "gradient_accumulation_steps": 2}
    train(*started(tmp_path / "one", bpe_corpus, weights, **more))
    other = started(tmp_path / "other", bpe_corpus, weights, **more, compile=how == "compiled")
    if how == "compiled":
        with compiling(more_than=1):
            train(*other)
    else:
        ran(*other, ranks=2)
    assert_same_log(tmp_path / "one", tmp_path / "other", 1e-10)


@pytest.mark.parametrize(
    "norm, family, dropout", [("cbwc", "gpt2", 0.0), ("cbwc", "gpt2", 0.1), ("coupled", "llama", 0.0)]
)
def test_cbwc_and_coupled_start_from_a_checkpoint(norm, family, dropout, bpe_corpus, tmp_path, capfd):
    weights = hf_folder(tmp_path / "hf", family, bpe_corpus)
    train(*started(tmp_path / "run", bpe_corpus, weights, norm=norm, dropout=dropout, **TWO_STEPS))
    said = capfd.readouterr().out
    assert f"norm={norm} in place of" in said and "moves the network by" in said
    assert ("cbwc with dropout is not LayerNorm" in said) == (dropout > 0)
    kl = float(said.split("KL ")[1].split()[0])
    assert kl < 1e-6 if norm == "cbwc" else kl > 1e-3
    assert load_model(tmp_path / "run/folded.pt").meta["base"]["architecture"]


# --- a run's own weights


def test_coupling_in_other_blocks_is_said_as_another_norm_is(base, corpus, tmp_path, capfd):
    train(*started(tmp_path / "coupled", corpus, base, norm="coupled", **TWO_STEPS))
    capfd.readouterr()
    train(*started(tmp_path / "run", corpus, tmp_path / "coupled", coupled_from_layer=2, **TWO_STEPS))
    assert "coupled_from_layer=2 in place of 0 moves the network by: " in capfd.readouterr().out


def test_a_run_goes_on_with_a_taper(base, corpus, tmp_path):
    out, before = tmp_path / "run", (base / "ckpt.pt").read_bytes()
    train(*started(out, corpus, base, taper="internal", max_iters=20, gate_start=5, gate_end=15))
    assert before == (base / "ckpt.pt").read_bytes()
    settings = json.loads((out / "config.json").read_text())
    wanted = dict(n_embd=32, n_head=4, n_layer=3, block_size=32, vocab_size=400, taper="internal")
    assert settings | wanted == settings and settings["init_from"] == str(base)
    # the first steps see what the base's last ones saw, not new weights
    assert metrics(out)[0]["train/loss"] < metrics(base)[0]["train/loss"] - 0.1


def test_resumed_from_given_weights_is_the_same_run(base, corpus, tmp_path):
    """Without the weights it began with: the checkpoint holds all it needs."""
    moved, blend = shutil.copy(base / "ckpt.pt", tmp_path / "weights.pt"), {"max_iters": 32, "gate_end": 30}
    train(*started(tmp_path / "run", corpus, moved, taper="all", dropout=0.1, **blend))
    moved.unlink()
    assert_goes_on_from(20, tmp_path / "run", tmp_path / "again")


# --- networks whose norms are gone

SHORT = dict(max_iters=8, warmup_iters=2, eval_interval=8, log_interval=2, ckpt_interval=3)
FINISHED = {  # name -> knobs of a run to its end
    "all": {"taper": "all", "aux_weight": 0.1, "gate_start": 3, "gate_end": 6},
    "to-the-last-step": {"norm": "layernorm", "taper": "internal", "gate_start": 3},
    "fakeln": {"norm": "layernorm", "taper": "all", "calibration": "mean_scale", "gate_start": 1,
               "gate_schedule": "sequential", "gate_gaps": "1,1,1"},
    "coupled": {"norm": "coupled"},
    "cbwc": {"norm": "cbwc"},
}  # fmt: skip
BOTH = {"unfused.pt", "folded.pt"}
BEGUN = {"": BOTH, "unfused.pt": BOTH, "folded.pt": {"folded.pt"}}  # file -> the exports of a run from it


def finished(name: str, corpus, folder: Path) -> Path:
    plain = {"taper": "none", "aux_weight": 0.0, "gate_start": None, "gate_end": None}
    train(*flags(folder / name, corpus, **plain | SHORT | FINISHED[name]))
    return folder / name


@pytest.fixture(scope="module", params=["all", *(slow(name) for name in FINISHED if name != "all")])
def ended(request, corpus, tmp_path_factory) -> Path:
    return finished(request.param, corpus, tmp_path_factory.mktemp("ended"))


@pytest.fixture(scope="module")
def norm_free(corpus, tmp_path_factory) -> Path:
    """A run without any norm at its end, with a scale that was held."""
    return finished("all", corpus, tmp_path_factory.mktemp("norm_free"))


def begun(out, corpus, weights, **knobs):
    run = {**SHORT, "dataset": corpus, "out_dir": out, "init_from": weights, "device": "cpu", "batch_size": 4}
    return [f"--{name}={value}" for name, value in {**run, "learning_rate": 1e-3, **knobs}.items()]


@pytest.mark.parametrize("file", BEGUN)
def test_every_form_is_trained_on_and_exported(file, ended, corpus, tmp_path, capsys):
    """At rate 0 the network stays the one that it began as, whatever it is rewritten to; then it learns. What
    is gone stays gone, and nothing is gated."""
    still, out = tmp_path / "still", tmp_path / "run"
    train(*begun(still, corpus, ended / file, learning_rate=0))
    before = metrics(ended)[-1]["val/loss"]
    assert metrics(still)[-1]["val/loss"] == pytest.approx(before, rel=1e-5)  # float32
    train(*begun(out, corpus, ended / file))
    assert metrics(out)[-1]["val/loss"] < before - 1e-3
    assert {path.name for path in out.glob("*.pt")} - {"ckpt.pt", "ckpt.prev.pt"} == BEGUN[file]
    assert not {"gate", "val/loss_gated"} & set().union(*metrics(out))
    gone = norm_names(load_model(ended / "folded.pt"))
    for name in BEGUN[file]:
        model = load_model(out / name)
        assert name == "unfused.pt" or norm_names(model) == gone
        assert model.meta["fold_error"]["float64"] < 1e-9
    capsys.readouterr()
    train(out, "--prompt=x", "--max_new_tokens=2", program="sample.py")
    train(out, "--iters=1", "--warmup=0", "--seq=8", program="bench.py")
    assert "logits agree" in capsys.readouterr().out


def test_a_run_without_norms_goes_on_as_the_same_run(norm_free, corpus, tmp_path):
    """From a fold, whose scale the loss goes on to hold: with the target that it has in this run."""
    run, anew = tmp_path / "run", tmp_path / "anew"
    train(*begun(run, corpus, norm_free / "folded.pt", aux_weight=0.1, gate_start=2))
    assert_goes_on_from(6, run, tmp_path / "again")
    assert metrics(run)[-1]["train/aux"] > 0
    train(*begun(anew, corpus, run, learning_rate=0))  # and begun from once more, without the loss
    assert metrics(anew)[-1]["val/loss"] == pytest.approx(metrics(run)[-1]["val/loss"], rel=1e-5)


def test_a_weightless_network_stays_one(corpus, tmp_path):
    model = fold(randomize(Transformer(ModelConfig(**SMALL))), gains=True)
    torch.save(model.to_file({}), tmp_path / "weightless.pt")
    train(*begun(tmp_path / "run", corpus, tmp_path / "weightless.pt"))
    trained = load_model(tmp_path / "run/model.pt")
    assert trained.config.form == "weightless" and not any("norm" in name for name in trained.state_dict())


@pytest.mark.parametrize(
    "lost, knobs", [("pos_emb.weight", {}), ("blocks.0.norm_attn.weight", {"taper": "internal"})]
)
def test_a_file_without_one_of_its_tensors_names_it(lost, knobs, corpus, tmp_path, capsys):
    file = Transformer(ModelConfig(**SMALL, positions="learned")).to_file({})
    del file["state"][lost]
    torch.save(file, tmp_path / "less.pt")
    train(*begun(tmp_path / "run", corpus, tmp_path / "less.pt", **knobs), expect=2)
    *_, said = capsys.readouterr().err.splitlines()
    assert said.endswith(f"less.pt does not fit its config: tensor {lost} is missing")


@pytest.mark.parametrize(
    "weights, knobs, said",
    [
        ("base/ckpt.pt", {"n_embd": 64}, "n_embd=64 contradicts"),
        ("base/ckpt.pt", {"block_size": 64}, "block_size=64 is longer than the 32"),
        ("base/ckpt.pt", {"norm": "layernorm"}, "norm=layernorm cannot start from the rmsnorm"),
        ("base/ckpt.pt", {"vocab_size": 500}, "vocab_size=500 contradicts"),
        ("norm_free/folded.pt", {"taper": "internal"}, "the norms that a fold takes are gone, and the rest"),
        ("norm_free/folded.pt", {"gate_schedule": "sequential", "gate_gaps": "1,1,1"}, "needs taper="),
        ("norm_free/folded.pt", {"norm": "coupled"}, "norm=coupled contradicts"),
        ("norm_free/folded.pt", {"calibration": "mean_scale"}, "calibration=mean_scale contradicts"),
        ("norm_free/folded.pt", {"form": "unfused"}, "form=unfused contradicts"),
    ],
)
def test_what_contradicts_the_weights_is_refused(weights, knobs, said, request, corpus, tmp_path, capsys):
    run, _, file = weights.partition("/")
    argv = begun(tmp_path / "run", corpus, request.getfixturevalue(run) / file, **knobs)
    assert said in refused(capsys, *argv) and not (tmp_path / "run").exists()


@pytest.mark.parametrize("mlp", [{"mlp": "swiglu"}, {"mlp": "gelu", "bias": True}], ids=str)
@pytest.mark.parametrize("knobs", [{"dropout": 0.1}, {"teacher": "folded", "adapter": "lora"}], ids=str)
def test_a_folded_coupled_network_trains_with(knobs, mlp, corpus, tmp_path):
    """Though its products add and scale by themselves: the merged and folded export is proved."""
    if "adapter" in knobs:
        pytest.importorskip("peft")
    model = fold(Transformer(ModelConfig(**SMALL, norm="coupled", **mlp)))
    torch.save(model.to_file({}), tmp_path / "folded.pt")
    more = {"teacher": tmp_path / "folded.pt"} if "teacher" in knobs else {}
    train(*begun(tmp_path / "run", corpus, tmp_path / "folded.pt", **knobs | more))
    before, after = (load_model(tmp_path / where).state_dict() for where in ("folded.pt", "run/folded.pt"))
    assert not torch.equal(before["blocks.0.attn.proj.weight"], after["blocks.0.attn.proj.weight"])


def test_a_floor_is_not_left_out():
    model = Transformer(ModelConfig(**SMALL, norm="coupled", coupled_floor=True))
    with refuses("floored.pt has blocks.0.floor, for which coupled_floor=False and", "leave them out"):
        begun_from(model.to_file({}), replace(model.config, coupled_floor=False), "floored.pt")


def test_a_child_of_a_taper_with_a_factor_on_its_table_is_resumed(corpus, tmp_path):
    """The file's settings have the factor still, its weights have it in the table."""
    a, b = tmp_path / "a", tmp_path / "b"
    train(*flags(a, corpus, **TWO_STEPS, taper="internal", emb_scale=2.0))
    argv = begun(b, corpus, a, taper="none")
    train(*argv)
    before = load_model(b / "unfused.pt").state_dict()
    (b / "unfused.pt").unlink()
    train("--init_from=resume", f"--out_dir={b}")
    assert all(torch.equal(t, before[name]) for name, t in load_model(b / "unfused.pt").state_dict().items())


def test_a_site_loss_is_no_part_of_what_begins_from_it():
    """Nor is what said where it held, which nothing else reads in a taper of the final norm."""
    base = ModelConfig(**SMALL | {"n_layer": 2}, taper="final", site_weight=1.0, taper_from_layer=1)
    new = begun_as(base, "scale", [0.0], "x.pt")
    assert (new.form, new.site_weight, new.taper_from_layer) == ("unfused", 0.0, 0)


def test_an_anchor_beside_a_fold_is_saved_with_it():
    file = fold(Transformer(ModelConfig(**SMALL, norm="coupled"))).to_file({})
    anchored = replace(ModelConfig(**SMALL, norm="coupled", aux_weight=0.1), form="folded")
    model = begun_from(file, anchored, "x.pt")
    assert model.anchor is not None and from_file(model.to_file({}), "x.pt").anchor is not None


def test_a_taper_named_none_is_no_contradiction(norm_free, corpus, tmp_path):
    """As of a config file that says so; nor when its command is given again."""
    argv = begun(tmp_path / "run", corpus, norm_free, taper="none")
    train(*argv)
    train(*argv, "--init_from=auto")
    settings = json.loads((tmp_path / "run/config.json").read_text())
    assert (settings["form"], settings["taper"]) == ("unfused", "all")


def test_a_finished_run_that_is_to_go_further_says_how(norm_free, capsys):
    said = refused(capsys, "--init_from=resume", f"--out_dir={norm_free}", "--max_iters=100")
    assert f"a new run from this one with --init_from={norm_free} and another --out_dir" in said


def test_a_corpus_in_other_tokens_is_refused(bpe_corpus, corpus, tmp_path, capsys):
    """A folder of transformers' with more ids than the corpus has, so that only the tokenizers differ."""
    folder = tmp_path / "hf"
    made(FAMILIES["gpt2"], torch.float32, vocab_size=500).save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes((bpe_corpus / "tokenizer.json").read_bytes())
    message = refused(capsys, *started(tmp_path / "run", corpus, folder))
    assert f"{corpus} is not in the tokens of {folder}; prepare it again with --tokenizer=" in message
    (folder / "tokenizer.json").unlink()
    train(*started(tmp_path / "run", corpus, folder, **TWO_STEPS))
    assert "brings no tokenizer" in capsys.readouterr().err


def test_a_run_calibrates_on_its_own_first_steps(corpus, tmp_path):
    """Not on what the run before had averaged, in which the stream was another."""
    old, new = tmp_path / "old", tmp_path / "new"
    train(*flags(old, corpus, taper="none", aux_weight=0.1, max_iters=12, gate_start=10, gate_end=12))
    train(*started(new, corpus, old, taper="internal", aux_weight=0.1, max_iters=12, gate_start=5,
                   gate_end=10, ckpt_interval=4, log_interval=2))  # fmt: skip
    state = torch.load(new / "ckpt.pt", weights_only=True)["state"]
    assert {state[n].item() for n in state if n.endswith("ema_count")} == {5.0}
    first = metrics(new)[0]
    assert first["s/target"] == pytest.approx(first["s/mean"], rel=0.05)


SIZES = [{"hidden": 2**40, "n_embd": 2**40}, {"head_dim": 2**39}, {"block_size": 2**40}]
DAMAGES = [("config", damage) for damage in ({"zzz": 3}, {5: 3}, *SIZES)]
DAMAGES += [("meta", {"corpus": 3}), ("meta", {"phase": []})]


@pytest.mark.parametrize("part, damage", DAMAGES)
def test_a_file_that_makes_no_sense_is_one_line(part, damage, base, corpus, tmp_path, capsys):
    file, bad = torch.load(base / "model.pt", weights_only=True), tmp_path / "bad.pt"
    file[part].update(damage)
    torch.save(file, bad)
    assert str(bad) in refused(capsys, *started(tmp_path / "run", corpus, bad))


def test_auto_starts_from_the_weights_that_a_file_names(base, corpus, tmp_path):
    """And goes on with the run once there is one."""
    file, out = tmp_path / "run.py", tmp_path / "run"
    file.write_text(f"init_from = {str(base)!r}\nlearning_rate = 0.0\n")
    knobs = {"taper": "none", "init_from": "auto", "warmup_iters": 1}
    argv = [a for a in started(out, corpus, None, **knobs) if not a.startswith("--learning_rate")]
    train(file, *argv, "--max_iters=2")
    begun, old = (load_model(run / "ckpt.pt") for run in (out, base))
    assert torch.equal(begun.tok_emb.weight, old.tok_emb.weight)
    assert json.loads((out / "config.json").read_text())["init_from"] == str(base)
    before = metrics(out)
    train(file, *argv, "--max_iters=2")
    assert metrics(out) == before


def test_the_model_that_a_run_starts_from_is_not_written_over(base, corpus, tmp_path, capsys):
    shutil.copy(base / "model.pt", tmp_path / "model.pt")
    said = refused(capsys, *started(tmp_path, corpus, tmp_path, taper="none"))
    assert f"a run in {tmp_path} would write over {tmp_path / 'model.pt'}, which it needs" in said
    said = refused(capsys, *flags(tmp_path, corpus, teacher=tmp_path, taper="none", aux_weight=0))
    assert f"{tmp_path} holds model.pt of another run" in said and "name another --out_dir" in said
    assert {path.name for path in tmp_path.iterdir()} == {"model.pt"}
    (tmp_path / "model.pt").rename(tmp_path / "base.pt")  # no file of a run
    train(*started(tmp_path, corpus, tmp_path / "base.pt", taper="none", max_iters=2, warmup_iters=1))


def test_what_two_of_a_files_losses_read_stays_with_the_one_that_stays():
    """A site loss that is asked for brings its own knobs; what the file's taper reads, too, is the file's.
    All of it goes with the taper: --taper=none asks for no more than that."""
    knobs = {"taper": "internal", "qk_norm": True, "taper_qk": True, "ema_rate": 0.1, "sink_multiple": 4.0}
    base = ModelConfig(**SMALL, **knobs, calib_skip_first=True)
    file = Transformer(base).to_file({"gate": 1.0, "phase": "norm"})
    new = Config(site_weight=1.0, site_far=2.0).started_from(file, {"site_weight"}, "x.pt")
    assert (new.taper, new.site_weight, new.site_far) == ("internal", 1.0, 2.0)
    assert (new.ema_rate, new.calib_skip_first, new.sink_multiple) == (0.1, True, 4.0)
    new = Config().started_from(file, {"taper"}, "x.pt")
    assert (new.taper, new.calib_skip_first, new.sink_multiple) == ("none", False, None)
    assert (new.taper_qk, new.qk_norm) == (False, True)
    assert not begun_from(file, new.resolve().model_config(), "x.pt").taper_norms()


def test_what_a_named_knob_makes_pointless_is_let_go_of():
    """However far down: another norm takes no site loss, and without one nothing says how that looks."""
    site = {"site_weight": 1.0, "site_far": 2.0, "site_rate": 0.5, "sink_multiple": 4.0}
    site |= {"taper_from_layer": 1, "calib_skip_first": True}
    base = ModelConfig(**SMALL | {"n_layer": 2}, norm="layernorm", **site)
    file = Transformer(base).to_file({"gate": 1.0, "phase": "norm"})
    new = Config(norm="cbwc").started_from(file, {"norm"}, "x.pt").resolve().model_config()
    assert all(getattr(new, name) == getattr(ModelConfig, name) for name in site)
    new = Config(sink_token=3).started_from(file, {"sink_token"}, "x.pt").resolve().model_config()
    assert (new.sink_token, new.calib_skip_first, new.site_far) == (3, False, 2.0)


# --- dropout's masks are a function of (seed, step, micro-batch)


def test_dropouts_masks_differ_from_step_to_step():
    _, step = small_run("rmsnorm", dropout=0.5, learning_rate=0.0)
    found = []
    for k in (0, 1, 0):  # the same windows; at rate 0 nothing but the masks changes
        step.at(k)
        step(*micro_batches(0, step.micro_steps))
        found.append(step.totals[1].item())
        step.totals.zero_()
    assert found[0] == found[2] != found[1]
