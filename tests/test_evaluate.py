"""scripts/evaluate.py: its figures are those of a direct computation, whoever reads the network."""

import json
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import transformers
from conftest import BPE_SIZE, refuses, tiny
from safetensors.torch import load_file, save_file
from test_hub import made
from test_init_from import hf_folder

import data
from data.tokenizer import load_tokenizer
from forms import fold
from scripts import evaluate
from scripts.exports import Job, describe, hf
from scripts.exports.networks import by_transformers, open_network
from scripts.studies import table4

# float64: sums of a few thousand losses in another order; the logits of a block differ by 1e-15
EXACT = 1e-12


def run(capsys, *argv):
    """(what was printed and said, the rows of the JSON in its last line)"""
    capsys.readouterr()
    evaluate.main([*map(str, argv), "--device=cpu"])
    told = capsys.readouterr()
    return told.out + told.err, json.loads(told.out.splitlines()[-1])["rows"]


@pytest.fixture(scope="module")
def text(bpe_corpus, tmp_path_factory) -> Path:
    """A corpus of many short documents, in the tokens of bpe_corpus."""
    folder = tmp_path_factory.mktemp("text")
    parts = [(part, True) for part in Path(json.__file__).read_text().split("\n\n")]
    tokenizer = load_tokenizer(bpe_corpus)
    data.prepare(lambda: parts, lambda: parts[:40], folder, None, "parts of a module", tokenizer=tokenizer)
    return folder


def blocks_of(folder: Path, T: int) -> torch.Tensor:
    ids = np.fromfile(folder / "val.bin", "<u2").astype(np.int64)
    return torch.from_numpy(ids[: len(ids) // T * T].reshape(-1, T))


def put(model, folder: Path, corpus: Path | None = None) -> Path:
    """A run folder of a model."""
    folder.mkdir(parents=True, exist_ok=True)
    meta = {} if corpus is None else {"corpus": {"tokenizer_sha256": load_tokenizer(corpus).sha256}}
    torch.save(model.to_file(meta), folder / "model.pt")
    return folder


def network(variant="layernorm", seed=0, **more):
    return tiny(variant, seed=seed, vocab_size=BPE_SIZE, block_size=16, **more).eval()


@torch.no_grad()
def direct(model, blocks: torch.Tensor) -> torch.Tensor:
    """-log p of each token but the first of its block, one block at a time."""
    p = torch.cat([model(block[None])[:, :-1].softmax(-1) for block in blocks])
    return -p.gather(2, blocks[:, 1:, None])[..., 0].log()


# --- the figures


def test_figures_are_those_of_a_direct_computation(capsys, text, tmp_path):
    model, out = network(), tmp_path / "figures.json"
    folder = put(model, tmp_path / "run", text)
    _, (row,) = run(capsys, folder, f"--data={text}", "--dtype=float64", f"--out={out}")
    blocks = blocks_of(text, 16)
    losses, targets = direct(model, blocks), blocks[:, 1:]
    meta = json.loads((text / "meta.json").read_text())
    kept = losses[targets != meta["end_token_id"]].tolist()
    assert row["end_targets"] == losses.numel() - len(kept) > 20
    assert row["targets"] == losses.numel() == 15 * row["blocks"] and row["block_size"] == 16
    flat = losses.flatten().tolist()
    assert row["ce"] == pytest.approx(math.fsum(flat) / len(flat), rel=EXACT)
    assert row["ce_no_end"] == pytest.approx(math.fsum(kept) / len(kept), rel=EXACT)
    assert abs(row["ce"] - row["ce_no_end"]) > 1e-3
    for key, share in {"p2.5": 0.025, "median": 0.5, "p97.5": 0.975, "p99.9": 0.999}.items():
        level = np.quantile(flat, share)
        assert row[key] == pytest.approx(level, rel=EXACT) and row["p2.5"] < row["median"] < row["p97.5"]
    assert row["perplexity"] == pytest.approx(math.exp(row["ce"]), rel=EXACT)
    per_byte = row["ce"] / math.log(2) * meta["val_tokens"] / meta["val_bytes"]
    assert row["bits_per_byte"] == pytest.approx(per_byte, rel=EXACT) and row["gap"] == 0
    assert row["paper"] is row["paper_gap"] is None
    report = json.loads(out.read_text())
    assert report["rows"] == [row] and report["texts"][str(text)]["source"] == "parts of a module"


def test_blocks_that_are_not_finite_are_counted_and_compared_with_none(capsys, text, tmp_path):
    """If that is asked for; else they are an error. The gap and the KL are of the blocks that are left."""
    plain = network("rmsnorm-internal", tie_embeddings=False)
    bad = network("rmsnorm-internal", tie_embeddings=False)
    blocks = blocks_of(text, 16)
    token = blocks[3, 2].item()
    bad.tok_emb.weight.data[token] = 1e200
    good = ~(blocks == token).any(1)  # attention's weight of 0 makes no number of its value
    assert 0 < good.sum() < len(blocks) - 1
    folders = put(plain, tmp_path / "plain", text), put(bad, tmp_path / "bad", text)
    flags = (f"--data={text}", "--dtype=float64", "--kl=True")
    with refuses("is the network damaged"):
        run(capsys, *folders, *flags)
    _, (first, row) = run(capsys, *folders, *flags, "--finite=True")
    assert (first["not_finite"], row["not_finite"]) == (0, int((~good).sum())) and first["gap"] == 0
    of_good = direct(plain, blocks[good]).mean().item()  # a token that is in none of them
    assert row["ce"] == pytest.approx(of_good, rel=EXACT) and abs(row["gap"]) < EXACT > row["kl"]
    bad.tok_emb.weight.data.fill_(1e200)
    worse = put(bad, tmp_path / "worse", text)
    _, (_, row) = run(capsys, folders[0], worse, *flags, "--finite=True")
    assert row["not_finite"] == len(blocks) and row["ce"] is row["gap"] is row["kl"] is None
    with refuses("not every block is finite, and gaps are to it"):
        run(capsys, worse, folders[0], *flags, "--finite=True")


def test_the_batch_size_is_of_no_account(capsys, text, tmp_path):
    argv = put(network("rmsnorm", std=0.5), tmp_path / "run", text), f"--data={text}"
    one, three = (run(capsys, *argv, "--dtype=float64", f"--batch_size={n}")[1][0] for n in (1, 3))
    for key in ("ce", "ce_no_end", "median", "p99.9"):
        assert three[key] == pytest.approx(one[key], rel=EXACT)
    narrow = run(capsys, *argv)[1][0]
    assert narrow["ce"] == pytest.approx(one["ce"], rel=1e-5) and narrow["ce"] != one["ce"]


def test_gaps_are_to_vanilla(capsys, text, bpe_corpus, tmp_path):
    folders = [put(network(seed=i), tmp_path / f"run{i}", text) for i in range(3)]
    both = f"--data={text},{bpe_corpus}"
    _, rows = run(capsys, *folders[:2], both, f"--vanilla={folders[2]}", "--blocks=5")
    ce = {(row["model"], row["data"]): row["ce"] for row in rows}
    assert len(ce) == 6 and rows[0]["model"] == str(folders[2])  # it comes first
    for row in rows:
        assert row["gap"] == ce[row["model"], row["data"]] - ce[str(folders[2]), row["data"]]
        assert row["blocks"] == 5
    first = run(capsys, *folders, both, "--blocks=5")[1]
    assert first[0]["model"] == str(folders[0]) and first[0]["gap"] == 0 != first[2]["gap"]


def test_a_set_that_is_cut_is_recut_only_with_a_remark(capfd, text, tmp_path):
    """The first token of a window has no bytes; a set whose bytes are not known has no bits of one."""
    folder, meta = put(network(), tmp_path / "run", text), json.loads((text / "meta.json").read_text())
    meta = {k: v for k, v in meta.items() if not k.startswith("train")}
    copy, rows = shutil.copytree(text, tmp_path / "set", ignore=shutil.ignore_patterns("train.bin")), []
    for cut, more in ((16, {}), (32, {}), (16, {"set": "pile", "val_bytes": None})):
        (copy / "meta.json").write_text(json.dumps(meta | {"block_size": cut} | more))
        said, found = run(capfd, folder, f"--data={copy}")
        assert (f"blocks of {cut}; it is read as one stream" in said) == (cut == 32)
        rows += found
    assert rows[0]["ce"] == rows[1]["ce"] == rows[2]["ce"] and rows[2]["bits_per_byte"] is None
    of_all = [row["bits_per_byte"] / share for row, share in zip(rows, (15 / 16, 31 / 32), strict=False)]
    assert of_all[0] == pytest.approx(of_all[1], rel=EXACT)  # every second block of 16 begins a window of 32


def test_kl_is_that_of_the_vanilla_networks_predictions(capsys, text, tmp_path):
    """As its definition has it, at every target; the vanilla network has none. The losses stay."""
    models = [network(seed=seed) for seed in (0, 1)]
    folders = [put(model, tmp_path / str(i)) for i, model in enumerate(models)]
    flags = (*folders, f"--data={text}", "--dtype=float64", "--batch_size=3")
    _, rows = run(capsys, *flags, "--kl=True")
    with torch.no_grad():
        p, q = (model.double()(blocks_of(text, 16))[:, :-1].softmax(-1) for model in models)
    expected = (p * (p / q).log()).sum(-1).mean().item()
    assert expected > 1e-3 and rows[1]["kl"] == pytest.approx(expected, rel=1e-9) and rows[0]["kl"] is None
    assert run(capsys, *flags)[1] == [row | {"kl": None} for row in rows]
    padded = put(tiny("layernorm", vocab_size=BPE_SIZE + 8, block_size=16), tmp_path / "padded")
    assert len(run(capsys, folders[0], padded, f"--data={text}")[1]) == 2
    too_many = f"padded predicts {BPE_SIZE + 8} token ids, "
    with refuses(too_many, f" {BPE_SIZE}: they have no KL; leave --kl out"):
        run(capsys, folders[0], padded, f"--data={text}", "--kl=True")


# --- whatever holds a network


def test_a_kl_that_is_not_finite_is_an_error_as_a_loss_is():
    """-inf at a token that is no target: every loss is finite."""
    logits = torch.zeros(1, 4, 5), torch.zeros(1, 4, 5).index_fill_(2, torch.tensor([4]), -torch.inf)
    teacher, network = (Mock(return_value=of, title="n") for of in logits)
    network.name, blocks = "n", np.zeros((1, 4), np.int64)
    with refuses("the KL of token 1 of block 0 is inf"):
        evaluate.token_losses(network, blocks, evaluate.Evaluate(), torch.device("cpu"), teacher)


def test_transformers_agrees_with_our_reader(capsys, text, tmp_path):
    """The same GPT-2 folder by both, in float64; the losses are those of its own forward."""
    folder = hf_folder(tmp_path / "gpt2", "gpt2", text)
    _, (row,) = run(capsys, folder, f"--data={text}", "--dtype=float64")
    theirs = by_transformers(str(folder), folder, "a reason")
    theirs.model.double()
    knobs = evaluate.Evaluate(dtype="float64")
    blocks = blocks_of(text, 64)
    assert row["block_size"] == theirs.context == 64
    losses, _ = evaluate.token_losses(theirs, blocks.numpy(), knobs, torch.device("cpu"))
    assert losses.mean() == pytest.approx(row["ce"], rel=1e-9)
    own = [theirs.model(input_ids=block[None], labels=block[None]).loss.item() for block in blocks]
    assert np.mean(own) == pytest.approx(row["ce"], rel=1e-6)  # that loss is computed in float32


def test_what_our_reader_refuses_transformers_reads(capfd, text, tmp_path):
    shape = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
    config = transformers.GPTNeoXConfig(**shape, vocab_size=BPE_SIZE, max_position_embeddings=16)
    model = transformers.GPTNeoXForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "neox")
    said, (row,) = run(capfd, tmp_path / "neox", f"--data={text}")
    assert "GPTNeoXForCausalLM of transformers, since" in said and "brings no tokenizer" in said
    losses = direct(lambda idx: model(input_ids=idx).logits, blocks_of(text, 16))
    assert row["ce"] == pytest.approx(losses.mean().item(), rel=1e-5)


def test_fakeln_folders_are_read(capfd, text, tmp_path):
    """Gains of 1e6/sigma and an eps of 1e12 are 1/sigma; in float32 as well."""
    theirs = made("GPT2LMHeadModel", vocab_size=BPE_SIZE, layer_norm_epsilon=1e12)
    with torch.no_grad():
        for i, norm in enumerate(m for m in theirs.modules() if isinstance(m, torch.nn.LayerNorm)):
            norm.weight *= 1e6 / (0.7 + 0.3 * i)
    theirs.save_pretrained(folder := tmp_path / "lnfree")
    losses = direct(lambda idx: theirs(input_ids=idx).logits, blocks_of(text, 64))
    said, (row,) = run(capfd, folder, f"--data={text}", "--dtype=float64")
    assert row["ce"] == pytest.approx(losses.mean().item(), rel=1e-9)
    assert "eps of 1e+12 makes each norm a fixed scaling" in said
    assert run(capfd, folder, f"--data={text}")[1][0]["ce"] == pytest.approx(row["ce"], rel=1e-4)


def test_runs_model_files_and_whole_exports_agree(capsys, text, tmp_path):
    """A checkpoint at gate 0, its folded form, and that exported with code of its own, which is not run."""
    model = network("layernorm-all")
    run_folder = put(model, tmp_path / "run", text)
    folded = fold(model)
    torch.save(folded.to_file({}), tmp_path / "run/folded.pt")
    export, sample = tmp_path / "export", blocks_of(text, 16)[:2]
    export.mkdir()
    (export / "config.json").write_text('{"model_type": "nanonorm_llama"}')
    with refuses("nanonorm.json, which says ", " cannot be read"):
        open_network(str(export))
    job = Job(folded, load_tokenizer(text), {}, tmp_path / "run/folded.pt", export, sample)
    describe(job, "hf", hf.write(job))
    (export / "modeling_nanonorm.py").write_text("raise SystemExit('was run')")
    rows = run(capsys, run_folder / "model.pt", run_folder, export, f"--data={text}", "--dtype=float64")[1]
    assert max(abs(row["gap"]) for row in rows) < 1e-12 * rows[0]["ce"] * 10
    assert len(rows) == 3
    tensors = load_file(export / "model.safetensors")
    del tensors["lm_head.bias"]
    save_file(tensors, export / "model.safetensors")
    with refuses("tensor lm_head.bias is missing; export it again"):
        open_network(str(export))


def test_a_table_is_of_one_block_size(capsys, text, tmp_path):
    long, short = put(network(), tmp_path / "long", text), tmp_path / "short"
    put(tiny("layernorm", vocab_size=BPE_SIZE, block_size=8).eval(), short, text)
    with refuses("reads 16 tokens, ", "short 8; choose one ", "--block_size=8"):
        run(capsys, long, short, f"--data={text}")
    rows = run(capsys, long, short, f"--data={text}", "--block_size=8")[1]
    assert {row["block_size"] for row in rows} == {8}


# --- what is wrong with them


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--data=TEXT"], "name networks and text"),
        (["RUN", "--data=nowhere"], "cannot read the text in"),
        (["no/such/run", "--data=TEXT"], "no/such/run"),
        (["RUN", "--data=TEXT", "--block_size=17"], "reads 16 tokens"),
        (["RUN", "--data=OTHER"], "is not in the tokens of"),
        (["SMALL", "--data=TEXT"], "token ids"),
        (["RUN", "--data=SHORT"], "not one block of 16"),
        (["RUN", "--data=TEXT", "--out=x.txt"], "must be a .json file"),
    ],
)
def test_errors_are_one_line(argv, said, capsys, text, corpus, tmp_path):
    put(network(), tmp_path / "run", text)
    put(tiny("layernorm", vocab_size=61, block_size=16).eval(), tmp_path / "small")
    (tmp_path / "short").mkdir()
    parts, tokens = [("abc", True)], load_tokenizer(text)
    data.prepare(lambda: parts, lambda: parts, tmp_path / "short", None, "short", tokenizer=tokens)
    where = {name: tmp_path / name.lower() for name in ("RUN", "SMALL", "SHORT")}
    where |= {"OTHER": corpus, "TEXT": text}
    argv = [re.sub(r"[A-Z]{3,}", lambda m: str(where[m[0]]), word) for word in argv]
    with refuses(said):
        run(capsys, *argv)


def test_another_file_of_the_same_tokenizer_will_do(capsys, text, tmp_path):
    """As transformers writes it anew beside each model."""
    folder = hf_folder(tmp_path / "gpt2", "gpt2", text)
    written = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(written, indent=7))
    row = run(capsys, folder, f"--data={text}")[1][0]
    vocab = written["model"]["vocab"]
    (a, i), (b, j) = list(vocab.items())[100:102]
    vocab[a], vocab[b] = j, i
    (folder / "tokenizer.json").write_text(json.dumps(written))
    with refuses("not in the tokens"):
        run(capsys, folder, f"--data={text}")
    assert row["targets"] > 0


# --- beside the paper


def test_what_the_paper_says_stands_beside_it(monkeypatch, capsys, text, tmp_path):
    """On a network small enough to be here, under the names and the set of the paper."""
    monkeypatch.setitem(table4.SIZES, "s", (2, 24))
    monkeypatch.setattr(table4, "CONTEXT", 16)
    folder = put(network(), tmp_path / "out/gpt2_s_fakeln", text)
    meta = json.loads((text / "meta.json").read_text())
    owt = shutil.copytree(text, tmp_path / "owt")
    (owt / "meta.json").write_text(json.dumps(meta | {"set": "openwebtext", "block_size": 16}))
    _, (row, other) = run(capsys, folder, f"--data={owt},{text}")
    assert row["paper"] == 3.0797 and row["paper_gap"] == pytest.approx(0.0671) and other["paper"] is None
    by_file = run(capsys, folder / "model.pt", f"--data={owt}", "--within=9")[1][0]
    assert by_file["paper"] == 3.0797 and abs(by_file["ce"] - 3.0797) < 9
    with refuses("the paper 3.0797, more than 0.005 apart"):
        run(capsys, folder, f"--data={owt}", "--within=0.005")


@pytest.mark.parametrize("size, name, steps", [("s", "gpt2-small", 300), ("xl", "gpt2-xl", 800)])
def test_a_hub_name_is_its_own_row(size, name, steps):
    methods = {f"{name}_vanilla{steps}": "vanilla", f"{name}_LNFree{steps}": "fakeln"}
    methods["gpt2" if size == "s" else name] = "original"
    for title, method in methods.items():
        assert table4.row_of(title, *table4.SIZES[size]) == (size, method)


def test_the_papers_figure_is_of_all_its_blocks(monkeypatch, capsys, bpe_corpus, tmp_path):
    monkeypatch.setitem(table4.SIZES, "s", (2, 24))
    monkeypatch.setattr(table4, "CONTEXT", 16)
    owt = shutil.copytree(bpe_corpus, tmp_path / "owt")
    meta = json.loads((owt / "meta.json").read_text())
    (owt / "meta.json").write_text(json.dumps(meta | {"set": "openwebtext", "block_size": 16}))
    folder = put(network(), tmp_path / "out/gpt2_s_fakeln", owt)
    for flags, said in (((), 3.0797), (("--blocks=2",), None), (("--block_size=8",), None)):
        assert run(capsys, folder, f"--data={owt}", *flags)[1][0]["paper"] == said


def evaluated(monkeypatch, text, losses, kl=None, size: int = 8, **of) -> dict:
    """The row of a network of these losses, and KL, on a text whose teacher loses 1 a token."""
    named = SimpleNamespace(**{"name": "n", "title": "n", "remark": None, "layers": 12, "width": 768, **of})
    monkeypatch.setattr(evaluate, "token_losses", lambda *_: (losses, kl))
    k, teacher = evaluate.Evaluate(blocks=None if kl is None else len(kl), finite=True), kl is not None
    first = {text.name: np.ones_like(losses)}
    return evaluate.evaluate(named, text, size, k, "cpu", first, named if teacher else None)


@pytest.mark.parametrize("last, paper", [(1.0, 3.0685), (np.nan, None)])
def test_the_papers_figure_is_of_no_part_of_its_blocks(last, paper, bpe_corpus, monkeypatch):
    text = evaluate.open_text(str(bpe_corpus))
    text.manifest = text.manifest.model_copy(update={"set": "openwebtext"})
    losses = np.array([[1.0], [last]]).repeat(1023, 1)
    row = evaluated(monkeypatch, text, losses, size=1024, title="gpt2_s_all")
    assert (row["not_finite"], row["paper"]) == (int(paper is None), paper)


def test_a_block_whose_kl_alone_is_not_finite_is_left_out(bpe_corpus, monkeypatch):
    losses, kl = np.ones((3, 7)), np.full((3, 7), 0.25)
    kl[1, 2] = np.inf
    row = evaluated(monkeypatch, evaluate.open_text(str(bpe_corpus)), losses, kl)
    assert (row["not_finite"], row["targets"], row["kl"], row["gap"]) == (1, 14, 0.25, 0)
