"""OpenWebText and the sets to evaluate on: the recipe's split and cut; nothing large is fetched unasked."""

import json
from unittest.mock import Mock

import numpy as np
import pytest
from conftest import refuses
from running import exit_status, refused, train
from test_data import check_manifest

import data
from data import held_out
from data.openwebtext.prepare import HUB_NAME
from data.tokenizer import END, load_tokenizer

PREPARE, HELD_OUT = "data/openwebtext/prepare.py", "data/held_out.py"


def texts(count: int) -> list[str]:
    return [f"def f{i}(x):\n    return {'x' * (i % 7)} + {i}" for i in range(count)]


def documents(folder, split: str) -> list[str]:
    return check_manifest(folder)[1][split]


# --- the corpus


def test_the_split_is_that_of_the_recipe(hub, bpe_corpus, tmp_path, capfd):
    """0.05% of the rows, rounded up: the first of numpy's permutation with seed 2357."""
    some = texts(4100)
    hub.rows = [{"text": text} for text in some]
    flags = [f"--tokenizer={bpe_corpus}", f"--out_dir={tmp_path}"]
    train(*flags, "--hub=my/copy", "--revision=v1", program=PREPARE)
    train(*flags, program=PREPARE)
    order = np.random.default_rng(2357).permutation(len(some))
    assert documents(tmp_path, "val") == [some[i] for i in order[:3]]
    assert documents(tmp_path, "train") == [some[i] for i in order[3:]]
    assert hub.asked == [("my/copy", "train", "v1", False), (HUB_NAME, "train", "abc123", False)]
    meta = json.loads((tmp_path / "meta.json").read_text())
    assert meta["source"] == f"{HUB_NAME} on the Hugging Face hub, revision abc123" and meta["dtype"] == "<u2"
    assert "4,100 rows, not 8,013,769" in capfd.readouterr().err  # so the split is not the published one
    data.open_corpus(tmp_path, 16)


def corpus_of_ones_own(name: str, monkeypatch, tmp_path, code: str = ""):
    """The folder of a corpus that is not prepared yet, in a checkout of its own."""
    folder = tmp_path / "data" / name
    folder.mkdir(parents=True)
    (folder / "prepare.py").write_text(code)
    monkeypatch.setattr(data, "ROOT", tmp_path)
    return folder


@pytest.mark.parametrize("name", ["openwebtext", "fineweb_edu", "nemotron"])
def test_nothing_large_is_fetched_unasked(name, monkeypatch, tmp_path):
    assert {name} <= set(data.LARGE) <= set(data.corpora())
    folder = corpus_of_ones_own(name, monkeypatch, tmp_path, "raise SystemExit('was run')")
    said = "prepare.py --tokenizer=some/model", data.LARGE[name], "--text="
    with refuses(*said):
        data.prepare_if_missing(folder, "some/model")
    (folder / "meta.json").write_text("{}")
    with refuses(*said):  # also where the tokens alone are missing
        data.prepare_if_missing(folder, "some/model")


@pytest.mark.parametrize(
    "does, raised, said",
    [
        ("exit('no network')", SystemExit, "is missing; once python data/demo/prepare.py has made it, give"),
        ("pass", KeyboardInterrupt, "was prepared; the same command begins anew"),
    ],
)
def test_a_corpus_that_cannot_be_prepared_says_what_to_do(does, raised, said, monkeypatch, tmp_path, capfd):
    folder = corpus_of_ones_own("demo", monkeypatch, tmp_path, does)
    if raised is KeyboardInterrupt:
        monkeypatch.setattr(data.subprocess, "run", Mock(side_effect=raised))
    with pytest.raises(raised):
        data.prepare_if_missing(folder)
    assert said in capfd.readouterr().err


# --- the sets to evaluate on


def test_blocks_are_cut_as_the_recipe_cuts_them():
    """In the shares that `datasets` gives 32 processes, by 512 documents, then as many as fill batches."""
    import datasets

    rng, T = np.random.default_rng(0), 8
    rows = [rng.integers(61, size=n) for n in rng.integers(1, 6, size=32 * 520 + 11)]
    numbers, blocks, dropped = datasets.Dataset.from_dict({"i": list(range(len(rows)))}), [], 0
    for share in range(32):
        of_one = list(numbers.shard(num_shards=32, index=share, contiguous=True)["i"])
        for batch in (of_one[:512], of_one[512:]):
            stream = [t for i in batch for t in rows[i].tolist()]
            blocks += [stream[t : t + T] for t in range(0, len(stream) - T + 1, T)]
            dropped += len(stream) % T
    assert dropped > 0
    assert np.array_equal(held_out.cut_in_batches(rows, T).reshape(-1, T), blocks[: len(blocks) // 8 * 8])


def test_fewer_documents_than_processes():
    rows = [np.arange(40), np.arange(100, 133)]  # 5 blocks of 8, and 4 with one token left over
    cut = held_out.cut_in_batches(rows, 8).reshape(-1, 8)
    assert len(cut) == 8 and cut[5, 0] == 100


def test_openwebtext_is_the_same_from_the_hub_and_from_the_corpus(hub, bpe_corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(held_out, "ROOT", tmp_path)  # nothing is prepared there
    hub.rows = [{"text": text} for text in texts(20_000)]
    train(f"--tokenizer={bpe_corpus}", f"--out_dir={tmp_path}/corpus", program=PREPARE)
    for name, more in (("a", f"--corpus={tmp_path}/corpus"), ("b", f"--tokenizer={bpe_corpus}")):
        argv = ["--set=openwebtext", "--block_size=4", more, f"--out_dir={tmp_path / name}"]
        assert exit_status(held_out.main, HELD_OUT, *argv) == 0
    a, b = ((tmp_path / name / "val.bin").read_bytes() for name in "ab")
    assert a == b and len(a) % (2 * 4 * 8) == 0 and len(a) > 0
    manifest, meta, tokens = data.open_held_out(tmp_path / "a")
    assert manifest.set is None and manifest.block_size == 4 and manifest.val_bytes is None
    assert tokens.dtype == np.uint16 and "train_tokens" not in meta and len(hub.asked) == 2
    monkeypatch.setattr(held_out, "RECIPE_BLOCK", 4)  # now it is what the paper's figure is of
    monkeypatch.setattr(held_out, "GPT2_IDS", manifest.vocab_size)
    for blocks, known in ((len(tokens) // 4, "openwebtext"), (len(tokens) // 4 + 1, None)):
        monkeypatch.setattr(held_out, "OWT_BLOCKS", blocks)
        assert exit_status(held_out.main, HELD_OUT, *argv[:2], f"--corpus={tmp_path}/corpus", argv[3]) == 0
        assert data.open_held_out(tmp_path / "b")[0].set == known


def test_a_corpus_that_is_cut_into_windows_has_lost_its_documents(bpe_corpus, tmp_path, capsys):
    train(bpe_corpus, "--block_size=16", f"--out_dir={tmp_path}/cut", program="data/windows.py")
    flags = ("--set=openwebtext", f"--corpus={tmp_path}/cut", f"--out_dir={tmp_path}/set")
    said = refused(capsys, *flags, program=HELD_OUT)
    assert "is cut into windows; name the corpus that it was made of" in said


def test_pile_is_the_first_records_recut(hub, bpe_corpus, tmp_path, capfd, monkeypatch):
    hub.rows = [{"input_ids": list(range(i, i + 10)), "other": 1} for i in range(50)]
    flags = ["--set=pile_filtered", f"--tokenizer={bpe_corpus}", "--records=7", f"--out_dir={tmp_path}"]
    train(*flags, "--block_size=8", program=HELD_OUT)
    manifest, _, tokens = data.open_held_out(tmp_path)
    stream = [t for row in hub.rows[:7] for t in row["input_ids"]]
    assert tokens.tolist() == stream[:56] and manifest.set is None  # 7 blocks of 70 // 8
    assert hub.asked == [("lucabaroni/apollo-pile-filtered-10k", "train", "abc123", True)]
    assert "10 to 10 tokens" in capfd.readouterr().err
    train(*flags, "--block_size=10", program=HELD_OUT)  # over the old one, and now the records are blocks
    assert "tokens: the recipe shuffles" not in capfd.readouterr().err
    assert data.open_held_out(tmp_path)[0].set is None
    monkeypatch.setattr(held_out, "RECIPE_BLOCK", 10)
    monkeypatch.setattr(held_out.Knobs, "records", 7)
    assert exit_status(held_out.main, HELD_OUT, *flags, "--block_size=10") == 0  # as the paper's
    assert data.open_held_out(tmp_path)[0].set == "pile_filtered"
    assert data.open_held_out(tmp_path)[2].tolist() == stream


def test_text_of_ones_own(corpus, bpe_corpus, tmp_path):
    (tmp_path / "own.txt").write_text("".join(f"{text}\n{END}\n" for text in texts(5)))
    flags = [f"--text={tmp_path}/own.txt", f"--tokenizer={bpe_corpus}", f"--out_dir={tmp_path}/set"]
    train(*flags, program=HELD_OUT)
    manifest, _, tokens = data.open_held_out(tmp_path / "set")
    assert documents(tmp_path / "set", "val") == texts(5) and manifest.block_size is None
    assert manifest.val_bytes == sum(len(text) for text in texts(5)) and manifest.val_documents == 5
    assert len(tokens) == manifest.val_tokens
    with refuses("no train.bin; ", "held_out"):
        data.prepare_if_missing(tmp_path / "set")
    train(*flags, f"--tokenizer={corpus}", program=HELD_OUT)  # once more, in the other kind of tokens
    assert documents(tmp_path / "set", "val") == texts(5)
    assert {path.name for path in (tmp_path / "set").iterdir()} == {"val.bin", "tokenizer.model", "meta.json"}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "either --set, one of openwebtext, pile, pile_filtered, or --text"),
        (["--set=pile"], "name the folder to write"),
        (["--text=missing.txt", "--out_dir=out"], "'missing.txt' is not a file"),
        (["--text=empty.txt", "--out_dir=out"], "empty.txt holds no text"),
        (["--set=openwebtext", "--out_dir=out", "--corpus="], "--corpus= names no folder"),
        (["--text=own.txt", "--out_dir=CORPUS"], "holds a corpus"),
        (["--set=openwebtext", "--corpus=own.txt", "--out_dir=out"], "cannot read the text in own.txt"),
        (["--set=pile", "--out_dir=out"], "token id 999"),
    ],
)
def test_a_set_that_cannot_be_made_is_one_line(flags, said, hub, bpe_corpus, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hub.rows = [{"input_ids": [1, 999]}]
    (tmp_path / "own.txt").write_text(f"text\n{END}\n")
    (tmp_path / "empty.txt").write_text("\n")
    flags = [flag.replace("CORPUS", str(bpe_corpus)) for flag in flags]
    if not any("openwebtext" in flag for flag in flags):
        flags.append(f"--tokenizer={bpe_corpus}")
    before = {path.name: path.read_bytes() for path in bpe_corpus.iterdir()}
    assert said in refused(capsys, *flags, program=HELD_OUT)
    assert not (tmp_path / "out/meta.json").exists()
    assert {path.name: path.read_bytes() for path in bpe_corpus.iterdir()} == before


def test_each_document_of_a_set_ends_with_its_end(bpe_corpus, monkeypatch):
    rows = []
    monkeypatch.setattr(held_out, "cut_in_batches", lambda found, T: rows.extend(found) or np.zeros(T, "<u2"))
    held_out.openwebtext(held_out.Knobs(set="openwebtext", corpus=str(bpe_corpus), block_size=4))
    eot = load_tokenizer(bpe_corpus).eot_id
    assert rows and all(row[-1] == eot and eot not in row[:-1] for row in rows)


def test_fewer_records_than_the_papers_are_not_its_set(hub, bpe_corpus, tmp_path, monkeypatch):
    hub.rows = [{"input_ids": list(range(i, i + 10))} for i in range(50)]
    monkeypatch.setattr(held_out, "RECIPE_BLOCK", 10)
    monkeypatch.setattr(held_out.Knobs, "records", 7)
    flags = ["--set=pile", f"--tokenizer={bpe_corpus}", "--block_size=10", f"--out_dir={tmp_path}"]
    for records, known in ((7, "pile"), (6, None), (8, None)):
        assert exit_status(held_out.main, "data/held_out.py", *flags, f"--records={records}") == 0
        assert data.open_held_out(tmp_path)[0].set == known
