"""scripts/stream.py: its c and what that leaves are TaperNorm's own, a planted sink is found with its place
and text, every kind of network is read, errors are one line."""

import csv
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from conftest import BPE_SIZE, refuses, tiny
from test_evaluate import blocks_of, network, put, text  # noqa: F401 (a fixture)
from test_hub import change, made
from test_init_from import hf_folder

from begin import begun_from
from config import Config
from data.tokenizer import load_tokenizer
from forms import fold
from nanonorm.metrics import residual
from nanonorm.residual import watched
from nanonorm.run import given_weights
from scripts import stream
from scripts.exports.networks import open_network

EXACT = 1e-10  # float64: sums of some hundred tokens in another order


def run(capsys, out, *argv) -> tuple[str, list[dict], list[dict]]:
    """(what was printed, the rows of stream.csv, those of sinks.csv)"""
    capsys.readouterr()
    stream.main([*map(str, argv), f"--out={out}", "--device=cpu"])
    tables = [list(csv.DictReader((out / f"{name}.csv").open())) for name in ("stream", "sinks")]
    return capsys.readouterr().out, *tables


def rows_of(model, idx, multiple: float = 4.0) -> list[dict]:
    r, power = stream.measure(model, idx.split(4))
    return [stream.site_row(*site) for site in zip(r, power, stream.sinks_of(r, multiple), strict=True)]


def test_nobody_watches_any_longer_when_the_body_fails(text):  # noqa: F811
    model = network("rmsnorm", phase="norm")
    with pytest.raises(ZeroDivisionError), watched(model, lambda i, x, h: 1 / 0):
        model(blocks_of(text, 16)[:1])
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("variant", ["layernorm-all", "rmsnorm-all-aux"])
def test_c_is_what_a_calibration_gives(variant, text):  # noqa: F811
    """On the same tokens: TaperNorm's own averages after one step; without position 0, and without sinks."""
    idx = blocks_of(text, 16)[:6]
    ways = {"c_all": {}, "c_skip_first": {"calib_skip_first": True}, "c_ordinary": {"sink_multiple": 4.0}}
    for key, knobs in ways.items():
        model = network(variant, phase="norm", **knobs).train()
        model.tok_emb.weight.data[idx[2, 7]] *= 50
        rows = rows_of(model, idx)
        assert rows[0]["c_ordinary"] > 2 * rows[0]["c_all"]
        model(idx)
        model.update_statistics()
        own = {name: norm.c_now().item() for name, norm in model.taper_norms().items()}
        assert list(own) == stream.sites_of(model)
        assert [row[key] for row in rows] == pytest.approx(list(own.values()), rel=EXACT)
        left = [residual(norm).item() for norm in model.taper_norms().values()]
        assert [row[key.replace("c_", "residual_")] for row in rows] == pytest.approx(left, abs=1e-12)


def test_a_planted_sink_is_found_and_set_apart(capsys, text, tmp_path):  # noqa: F811
    """A token id whose embedding is 50 times the others': where, which, how many; c and its residual without
    it are those of the same tokens without the windows' sinks."""
    ids = blocks_of(text, 16)
    planted = ids[3, 5].item()
    model = network("rmsnorm")
    with torch.no_grad():
        model.tok_emb.weight[planted] *= 50
    folder = put(model.float(), tmp_path / "run", text)
    said, rows, tokens = run(capsys, tmp_path / "out", folder, f"--data={text}", "--tokens=1000000")
    where = (ids == planted).numpy()
    (token,) = [row for row in tokens if row["id"] == str(planted)]
    assert int(token["sinks"]) == int(token["in_text"]) == where.sum()
    assert int(token["behind"]) == where[:, 1:].sum() and float(token["largest"]) > 20
    positions = np.nonzero(where[:, 1:])[1] + 1
    assert token["positions"] == f"{positions.min()} to {positions.max()}"
    assert token["token"] == repr(load_tokenizer(text).decode([planted])) and token["token"] in said
    first = {k: float(v) for k, v in rows[0].items() if k not in ("model", "data", "site")}
    assert first["sinks"] == where.sum() and first["sinks_behind"] == where[:, 1:].sum()
    h = model.tok_emb.weight.detach()[ids].double().numpy()[~where]
    r = np.sqrt((h**2).mean(-1) + model.config.norm_eps)
    power = ((h * model.blocks[0].norm_attn.weight.detach().double().numpy()) ** 2).sum(-1)
    assert first["c_ordinary"] == pytest.approx((power / r).sum() / power.sum(), rel=1e-5)  # float32
    assert first["sd_log"] == pytest.approx(np.log(r).std(), rel=1e-5)
    assert first["residual_of_r"] == pytest.approx(1 - r.mean() ** 2 / (r**2).mean(), rel=1e-5)
    assert first["residual_ordinary"] < 0.1 < 0.3 < first["residual_all"]
    every = model.tok_emb.weight.detach()[ids].double().numpy()
    mean = np.sqrt((every**2).mean(-1) + model.config.norm_eps).mean()
    assert first["c_mean_scale"] == pytest.approx(1 / mean, rel=1e-5)  # FakeLN's, with the sinks
    assert first["c_all_times_r"] < 0.5 < 0.9 < first["c_ordinary_times_r"] < 1.1


def test_a_begin_token_stands_in_front_of_each_window(text, capsys):  # noqa: F811
    held = stream.open_text(str(text))
    windows = stream.windows_of(held, stream.Knobs(begin=7, tokens=64), 16)
    assert windows.shape == (4, 16) and (windows[:, 0] == 7).all()
    blocks = blocks_of(text, 15).numpy()
    assert (windows[0, 1:] == blocks[0]).all() and (windows[-1, 1:] == blocks[-1]).all()
    held.manifest.block_size = 16
    for begin in (None, 7):
        stream.windows_of(held, stream.Knobs(begin=begin, tokens=64), 16)
        assert ("is cut into blocks of 16" in capsys.readouterr().err) == (begin == 7)


NETWORKS = ["rmsnorm", "layernorm-internal-aux", "cbwc", "coupled", "dyt"]


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("variant", NETWORKS)
def test_r_is_the_streams_in_every_kind_of_network(variant, folded):
    """The streams of a folded network are those of the network itself, and so are its sites' r."""
    model, idx = tiny(variant).eval(), torch.arange(32).view(2, 16)
    form = fold(model) if folded else model
    r, _ = stream.measure(form, [idx])
    streams = []  # before each attention and each MLP, and in the end
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, args: streams.append(args[0]))
        block.attn.proj.register_forward_hook(lambda _, args, wrote: streams.append(streams[-1] + wrote))
    with torch.no_grad():
        streams.append(model.stream(idx))
    assert r.shape == (5, 2, 16)
    for h, of_site in zip(streams, r, strict=True):
        assert of_site == pytest.approx(stream.statistic(model.config).scale(h)[..., 0].numpy(), rel=1e-9)


def test_a_fixed_scaling_has_the_streams_sigma(text, tmp_path):  # noqa: F811
    """FakeLN's eps of 1e12 would make sigma 1e6 everywhere."""
    folder = tmp_path / "gpt2"
    made("GPT2LMHeadModel", vocab_size=BPE_SIZE).save_pretrained(folder)
    normal = open_network(str(folder)).model
    change(folder, layer_norm_epsilon=1e12)
    fixed = open_network(str(folder)).model
    a, b = (rows_of(m, blocks_of(text, 64)[:2])[0] for m in (normal, fixed))
    assert a == b and a["median"] < 100


def test_networks_and_texts_side_by_side_have_the_rows_of_each(capsys, text, tmp_path):  # noqa: F811
    """One a folder of transformers; the texts have one name, and each has its figure."""
    ours = put(network("rmsnorm").float(), tmp_path / "a", text)
    both, other = (ours, hf_folder(tmp_path / "b", "gpt2", text)), tmp_path / "other" / text.name
    other.parent.mkdir()
    other.symlink_to(text)
    how = ("--window=16", "--begin=3", "--tokens=256")
    said, rows, _ = run(capsys, tmp_path / "out", *both, f"--data={text},{other}", *how)
    alone = [run(capsys, path / "x", path, f"--data={text}", *how)[1] for path in both]
    first, second = ([row for row in rows if row["data"] == str(of)] for of in (text, other))
    assert first == alone[0] + alone[1] and "| final |" in said
    assert first == [row | {"data": str(text)} for row in second]
    page, figures = (tmp_path / "out/stream.md").read_text(), list((tmp_path / "out").glob("*.png"))
    assert len(figures) == 2 * 2 + 1 and all(f"({path.name})" in page for path in figures)


def test_windows_that_are_not_finite_are_left_out(capsys, text, tmp_path):  # noqa: F811
    ids, model = blocks_of(text, 16), network("rmsnorm-internal")
    with torch.no_grad():
        model.tok_emb.weight[ids[3, 5]] = 1e30
    bad = (ids == ids[3, 5]).any(1).sum().item()
    how = (put(model.float(), tmp_path / "run", text), f"--data={text}", "--tokens=1000000")
    said, rows, _ = run(capsys, tmp_path / "out", *how)
    assert f"Not finite, and left out: {bad}." in said and int(rows[0]["tokens"]) == 16 * (len(ids) - bad)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["RUN", "--data=TEXT"], "name networks, text and a folder"),
        (["RUN", "--data=TEXT", "--begin=99999999"], "is no token of"),
        (["RUN", "--data=TEXT", "--sink_multiple=0.5"], "sink_multiple must be"),
        (["RUN", "--data=TEXT", "--window=1", "--begin=0"], "window must be an int >= 2"),
        (["NEOX", "--data=TEXT"], "our own reader takes"),
    ],
)
def test_errors_are_one_line(argv, said, text, tmp_path):  # noqa: F811
    put(network(), tmp_path / "run", text)
    if argv[0] == "NEOX":
        small = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
        config = transformers.GPTNeoXConfig(**small, vocab_size=BPE_SIZE)
        transformers.GPTNeoXForCausalLM(config).save_pretrained(tmp_path / "neox")
    where = {"RUN": tmp_path / "run", "NEOX": tmp_path / "neox", "TEXT": text}
    for name, path in where.items():
        argv = [word.replace(name, str(path)) for word in argv]
    out = [] if "name networks" in said else [f"--out={tmp_path / 'out'}"]
    with refuses(said):
        stream.main([*argv, *out, "--device=cpu"])
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_real_networks_sinks_are_left_out_of_c(smollm2):
    """results/smollm2/stream.md: one step of the taper's own averages, with its sinks and without."""
    file, path = given_weights(str(smollm2))
    tokenizer, found = load_tokenizer(path), {}
    story = tokenizer.encode(Path(json.__file__).read_text()[:1200])[:200]
    idx = torch.tensor([1, *story, tokenizer.eot_id, *story])[None]
    for multiple in (None, 4.0):  # None: as published
        asked = Config(taper="internal", block_size=512, sink_multiple=multiple, ema_rate=1.0)
        explicit = {"taper", "block_size", "sink_multiple", "ema_rate"}
        model = begun_from(file, asked.started_from(file, explicit, path).model_config(), path).train()
        model.grad_checkpoint = True
        model.stream(idx)
        model.update_statistics()
        found[multiple] = model.taper_norms()
    late = [f"{i}.{kind}" for i in range(12, 30) for kind in ("attn", "mlp")]
    assert all(residual(found[4.0][site]) < 0.04 for site in late)
    assert all(residual(found[None][site]) > 5 * residual(found[4.0][site]) for site in late)
    assert found[4.0]["12.attn"].c_now() > 5 * found[None]["12.attn"].c_now()
    assert all(0 < found[4.0][site].left_out() < 0.05 for site in late)


def test_a_site_and_a_token_are_told_as_they_are():
    r = np.array([[[1.0, 2, 9], [4, 2, 2]], [[10, 30, 20], [20, 20, 500]]])  # medians 2 and 20
    sink, ids = stream.sinks_of(r, 4.0), np.array([[3, 5, 7], [7, 5, 6]])
    row = stream.site_row(r[0], r[0] ** 2, sink[0])
    assert (row["median"], row["first"], row["largest"]) == (2.0, 2.5, 4.5)
    tokenizer = SimpleNamespace(eot_id=6, end_token="<end>", decode=str)
    found = stream.token_rows(r, sink, ids, ["0.attn", "0.mlp"], tokenizer, None)
    seven, six = sorted(found, key=lambda t: -t["id"])
    assert (six["token"], six["sites"], six["largest"]) == ("<end>", "0.mlp to 0.mlp", 25.0)
    assert (seven["in_text"], seven["sinks"]) == (2, 1)
    assert (seven["sites"], seven["largest"]) == ("0.attn to 0.attn", 4.5)
