"""A sharded run (FSDP2) is the same run, holds its share of the bytes, and its checkpoints serve any number
of ranks. On gloo and CPUs: nothing here says how fast nccl is, or whether it overlaps a GPU's work."""

import errno
import json
import shutil
import time
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import faults
import pytest
import sharded
import torch
import torch.distributed as dist
from conftest import refuses, scale_of_difference, slow
from running import ROOT, assert_same_log, cut_back, final, flags, gguf_file, launch, ran, refused, train
from torch.utils._python_dispatch import TorchDispatchMode

from config import Config
from model import Block, ModelConfig, Transformer
from nanonorm import parts
from nanonorm.cli import parse
from nanonorm.errors import BadInput
from nanonorm.files import read_file, write_file
from nanonorm.hub import write_pretrained
from nanonorm.machine import refuse_to_shard
from nanonorm.ranks import Ranks, data_parallel, whole
from nanonorm.run import beginning_of
from nanonorm.shard import Sharded

FEW = ("layernorm-internal-aux", "sink")
RUN = dict(
    max_iters=20, gate_start=6, gate_end=14, ckpt_interval=8, log_interval=1, eval_interval=10, taper="all",
    gradient_accumulation_steps=4, dtype="float64", learning_rate=1e-3,
)  # fmt: skip


@pytest.fixture(autouse=True)
def alone():
    """A run that is refused leaves its group of one process behind."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def spread(tmp_path, ranks: int, *cases: str) -> list[dict]:
    """What each rank found of these cases."""
    script, out = ROOT / "tests/sharded.py", tmp_path / "found"
    process = launch(out, *cases, ranks=ranks, script=script, stdout=-1, stderr=-2)
    said = process.communicate(timeout=900)[0]
    assert process.returncode == 0, said
    return [json.loads((tmp_path / f"found.{rank}").read_text()) for rank in range(ranks)]


def furthest(expected: list, found: list) -> float:
    """Of the numbers of two runs, each relative to itself if that is above 1."""
    expected, found = (torch.tensor(numbers, dtype=torch.float64).flatten() for numbers in (expected, found))
    pairs = zip(expected, found, strict=True)
    return max(abs(x - y).item() / max(1, abs(x.item())) for x, y in pairs)


def assert_equal(found: dict, cases):
    """On several ranks, sharded and not, as on one."""
    for case in cases:
        expected = sharded.losses(sharded.begun(case, Ranks(), False))
        worst = [furthest(expected, run) for run in found[case]]
        print(f"{case}: " + ", ".join(f"{w:.1e}" for w in worst))
        assert max(worst) <= 1e-12, case


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    pytest.importorskip("peft")
    return spread(tmp_path_factory.mktemp("two"), 2, *FEW, "ends", "narrow")


def test_two_ranks_are_one(two_ranks):
    """20 steps in float64 through both phase boundaries, from one rank's weights alone."""
    assert_equal(two_ranks[0], FEW)


def test_two_ranks_in_bfloat16_sum_in_float32(two_ranks):
    """The sum of two gradients of bfloat16 is none of its numbers. The losses are those of one rank, but for
    the type's digits."""
    alone = sharded.narrow(Ranks(), False)
    for of_rank in two_ranks:
        assert of_rank["narrow"]["rounded"] and not any(of_rank["narrow"]["rounded"])
    found, expected = (torch.tensor(run["losses"]) for run in (two_ranks[0]["narrow"], alone))
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_what_is_not_finite_on_one_rank_ends_all(two_ranks):
    """Sharded or not, at the same place; the main rank names it, wherever it was."""
    loss = "train.py: step 3: non-finite output of the loss; start anew"
    weight = "train.py: step 4: its update left blocks.1.mlp.down.weight non-finite; start anew"
    assert [of_rank["ends"] for of_rank in two_ranks] == [[loss, weight] * 2, [1] * 4]


@pytest.mark.slow(minutes=4)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_are_one_for_every_variant(ranks, tmp_path):
    pytest.importorskip("peft")
    assert_equal(spread(tmp_path, ranks, *sharded.CASES)[0], sharded.CASES)


class Reads(TorchDispatchMode):
    """Counts the numbers that the host asks tensors for: on a GPU each would wait."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("case", ["layernorm-internal-aux", "checkpointed", "teacher"])
def test_a_sharded_step_asks_for_no_number(case):
    ranks = Ranks()
    ranks.start(sharded.DEVICE, "gloo", alone=True)
    step = sharded.begun(case, ranks, True)
    for k in (0, 7, 8, 15):
        step.at(k)
        batch = sharded.batch_of(step, k)
        with Reads() as reads:
            step(*batch)
        assert reads.count == 0, k
    with Reads() as reads:
        step.first_bad()
    assert reads.count == 1


@pytest.mark.parametrize("case", ["layernorm-internal-aux", "cbwc", slow("coupled"), slow("dora")])
def test_a_sharded_run_in_bfloat16_is_the_same_but_for_its_digits(case):
    """Weights are gathered in bfloat16, but for centred ones, and stay in float32. One rank of a CPU."""
    found, ranks = {}, Ranks()
    for shard in (False, True):
        ranks.start(sharded.DEVICE, "gloo", alone=shard)
        step = sharded.begun(case, ranks, shard, torch.bfloat16)
        found[shard] = torch.tensor(sharded.losses(step))
        averages = [t for kept in step.optimizer.state.values() for t in kept.values()]
        assert {t.dtype for t in (*averages, *step.trained.values())} == {torch.float32}
    torch.testing.assert_close(found[True], found[False], rtol=2e-2, atol=2e-2)


def test_a_sharded_table_sums_over_its_tokens_in_float32():
    """A gradient of bfloat16 stops to grow after a few hundred tokens; here one is there more than 1,000
    times."""
    config = ModelConfig(vocab_size=64, n_layer=1, n_embd=32, n_head=2, block_size=256, tie_embeddings=False)
    torch.manual_seed(0)
    idx = torch.multinomial(1 / torch.arange(1, 65.0), 32 * 257, replacement=True).view(32, 257)
    assert (idx == 0).sum() > 1000
    found, ranks = {}, Ranks()
    for kind in ("exact", "plain", "sharded"):
        torch.manual_seed(1)
        model = Transformer(config)
        if kind == "sharded":
            ranks.start(sharded.DEVICE, "gloo", alone=True)
            Sharded(model, Block, sharded.DEVICE, torch.bfloat16, ranks)
        with torch.autocast("cpu", torch.bfloat16, enabled=kind != "exact"):
            model(idx[:, :-1], idx[:, 1:]).total.backward()
        found[kind] = whole(model.tok_emb.weight.grad)
    plain, split = (scale_of_difference(found[kind], found["exact"]) for kind in ("plain", "sharded"))
    assert split < 2 * plain


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_holds_its_share(ranks, tmp_path):
    """Of weights, gradients and averages, 16 bytes a parameter in float32, when all of them are there."""
    for of_rank in spread(tmp_path, ranks, *sharded.LARGE):
        for case, found in of_rank.items():
            share = 16 * found["parameters"] / ranks
            print(f"{case}: {found['held']:,} bytes of {share:,.0f}")
            assert found["held"] <= 1.1 * share, case


def together(pids) -> int:
    """Bytes of memory of some processes, a page that several share counted once: their PSS."""
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()]
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def peak_of_start(folder: Path, corpus, small, large, **knobs) -> int:
    """The most that four ranks of train.py hold together while they start, above what they do before."""
    knobs = {"dataset": corpus, "out_dir": folder / "run", "device": "cpu", "dtype": "float32", **knobs}
    argv = (folder, small, large, *(f"--{name}={value}" for name, value in knobs.items()))
    with open(folder / "said", "w+") as said:
        process = launch(*argv, ranks=4, script=ROOT / "tests/starting.py", stdout=said, stderr=said)
        late = time.monotonic() + 300
        while len(pids := [path.stem for path in folder.glob("*.pid")]) < 4:
            assert process.poll() is None and time.monotonic() < late, (folder / "said").read_text()
            time.sleep(0.05)
        before, peak = together(pids), 0
        (folder / "go").touch()
        while process.poll() is None:
            assert time.monotonic() < late, (folder / "said").read_text()
            with suppress(OSError):  # one of them has ended
                peak = max(peak, together(pids) - before)
            time.sleep(0.02)
    assert process.returncode == 0, (folder / "said").read_text()
    return peak


def write_weights(kind: str, path: Path, **shape) -> tuple[Path, int]:
    """(a file or folder of a random Llama with 400 token ids, bytes of its weights in float32)."""
    c = ModelConfig(vocab_size=400, block_size=32, n_head=4, **shape)
    model = Transformer(c)
    if kind == "pt":
        write_file(model.to_file({}), path)
    elif kind == "hf":
        write_pretrained(model.to_file({}), path)
    else:
        gguf_file(path, model.to_file({}), "llama")
    return path, sum(p.nbytes for p in model.parameters())


@pytest.mark.slow(minutes=0.5)
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="reads /proc")
@pytest.mark.parametrize(
    ("kind", "shard"), [("hf", True), ("hf", False), ("gguf", True), ("pt", True), ("pt", False)]
)
def test_ranks_start_in_little_more_than_they_keep(kind, shard, corpus, tmp_path):
    """Four on a CPU: sharded they keep one network together, else one each, which on GPUs is not the host's.
    A .pt file is mapped by the main rank while it deals its matrices out, and its pages count as well."""
    if kind == "gguf":
        pytest.importorskip("gguf")
    small, _ = write_weights(kind, tmp_path / "small", n_layer=1, n_embd=64)
    large, size = write_weights(kind, tmp_path / "large", n_layer=24, n_embd=512)
    peak = peak_of_start(tmp_path, corpus, small, large, shard=shard, gradient_accumulation_steps=4) / size
    print(f"{kind}, sharded {shard}: {peak:.2f} networks of {size:,} bytes")
    kept = 1 if shard else 4
    assert peak <= kept + 0.3 + (kind == "pt" and shard)


# --- runs of train.py and their checkpoints


@pytest.fixture(scope="module")
def plain(corpus, tmp_path_factory):
    """An unsharded run, and beside it a sharded one of one process."""
    folder = tmp_path_factory.mktemp("plain")
    train(*flags(folder / "run", corpus, **RUN))
    train(*flags(folder / "alone", corpus, **RUN, shard=True))
    return folder / "run"


def test_a_checkpoint_in_parts_is_the_same_checkpoint(plain, capsys):
    alone = plain.parent / "alone"
    assert_same_log(plain, alone, 1e-12)
    small, joined = final(alone), read_file(alone / "ckpt.pt")
    assert all(t.dim() < 2 for t in small["state"].values()) and "parts" in small
    named = {file["parts"]["folder"] for file in (small, torch.load(alone / "ckpt.prev.pt"))}
    assert {path.name for path in alone.glob("*.parts")} == named
    for file in (joined, whole := final(plain)):
        averages = file["optimizer"]["state"].items()
        file["state"] |= {f"{i}.{k}": t for i, of in averages for k, t in of.items()}
    assert joined["state"].keys() == whole["state"].keys()
    for name, tensor in whole["state"].items():
        torch.testing.assert_close(joined["state"][name], tensor, rtol=1e-10, atol=1e-12, msg=name)
    train(alone / "ckpt.pt", "--prompt=import ", "--max_new_tokens=5", program="sample.py")


def went_on(run: Path, again: Path, *more: str, ranks: int = 1) -> Path:
    """A copy of a run, gone on with from its step 16."""
    cut_back(16, run, again)
    start = partial(ran, ranks=ranks) if ranks > 1 else train
    start("--init_from=resume", f"--out_dir={again}", *more)
    return again


@pytest.mark.parametrize("shard", [True, False])
def test_one_process_goes_on_from_either(plain, shard, tmp_path):
    run = plain if shard else plain.parent / "alone"
    assert_same_log(plain, went_on(run, tmp_path / "again", f"--shard={shard}"), 1e-10)


def test_damage_to_a_part_is_found(plain, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(plain.parent / "alone", run)
    part = next((run / final(run)["parts"]["folder"]).iterdir())
    content, argv = bytearray(part.read_bytes()), ("--init_from=resume", f"--out_dir={run}")
    content[-5] ^= 1
    part.write_bytes(content)
    for shard in (True, False):
        assert "fails its checksum; move" in refused(capsys, *argv, f"--shard={shard}")
        if dist.is_initialized():
            dist.destroy_process_group()
    part.write_bytes(content[:-9])
    train(*argv)
    assert "going on from step 16 of" in capsys.readouterr().err
    assert (run / torch.load(run / "ckpt.bad.pt")["parts"]["folder"]).is_dir()
    assert_same_log(plain, run, 1e-10)


def test_gradients_of_ranks_lie_in_the_buckets_that_are_sent():
    """So DDP holds them once; but what micro-batches before the last add up to, twice (scripts/plan.py)."""
    Ranks().start(sharded.DEVICE, "gloo", alone=True)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 7))
    wrapped, found = data_parallel(model), []
    for sent in (False, True):
        wrapped.require_backward_grad_sync = sent
        wrapped(torch.ones(2, 3)).sum().backward()
        found.append({p.grad.untyped_storage().data_ptr() for p in model.parameters()})
    assert [len(places) for places in found] == [4, 1] and not found[0] & found[1]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_full_disk_is_one_line(n, corpus, tmp_path, monkeypatch, capsys):
    """At each of the first checkpoint's files: the part, its folder, ckpt.pt."""
    with monkeypatch.context() as patch:
        faults.install({"at": "fsync", "n": n, "do": "ENOSPC"}, patch.setattr)
        said = refused(capsys, *flags(tmp_path / "run", corpus, **RUN, shard=True))
    assert "cannot write" in said and "free the disk" in said and "ckpt." in said


def test_only_what_no_checkpoint_names_is_cleared(plain, tmp_path, monkeypatch, capsys):
    """Not while a checkpoint cannot be opened; one that was put aside keeps its matrices."""
    run = tmp_path / "run"
    shutil.copytree(plain.parent / "alone", run)
    (run / "ckpt.pt").replace(run / "ckpt.bad.pt")
    named, stray = {path.name for path in run.glob("*.parts")}, run / parts.FOLDERS[-1]
    stray.mkdir()
    for error in (OSError(errno.EMFILE, "Too many open files"), RuntimeError("unable to mmap 9 bytes")):
        with monkeypatch.context() as patch:
            patch.setattr(torch, "load", Mock(side_effect=error))
            parts.clear(run)
        assert {path.name for path in run.glob("*.parts")} == named | {stray.name}
        assert "is left there" in capsys.readouterr().err
    parts.clear(run)
    assert {path.name for path in run.glob("*.parts")} == named
    (run / "ckpt.bad.pt").write_bytes(b"PK\3\4")
    parts.clear(run)
    assert len(list(run.glob("*.parts"))) == 1


def test_many_ranks_do_not_read_all_of_a_sharded_run(plain):
    ranks = Ranks()
    ranks.size = 2
    argv = ["--init_from=resume", f"--out_dir={plain.parent / 'alone'}", "--shard=False"]
    with ExitStack() as held, pytest.raises(BadInput, match="each of 2 ranks would read all"):
        beginning_of(*parse(Config, argv, files=True), ranks, held)


@pytest.mark.parametrize(
    ("knobs", "device", "said"),
    [
        ({"compile": True}, "cpu", "gathers block by block; use --compile=regional"),
        ({"cuda_graph": True}, "cuda", "gathers weights within a step, which a CUDA graph cannot"),
        ({}, "mps", "needs a CPU or GPUs, and device=mps"),
    ],
)
def test_what_does_not_combine_is_refused(knobs, device, said, corpus, tmp_path, capsys):
    with refuses(f"shard=True {said}"):
        refuse_to_shard(Config(shard=True, **knobs), torch.device(device))
    if device == "cpu":  # and by the command
        assert said in refused(capsys, *flags(tmp_path / "run", corpus, shard=True, **knobs))


@pytest.mark.slow(minutes=1.3)
@pytest.mark.parametrize("others", [(2, 4), (4, 1), (1, 2)])
def test_another_number_of_ranks_goes_on(others, plain, corpus, tmp_path):
    first, then = others
    run = plain.parent / "alone"
    if first > 1:
        run = tmp_path / "run"
        ran(*flags(run, corpus, **RUN, shard=True), ranks=first)
        assert_same_log(plain, run, 1e-10)
    assert_same_log(plain, went_on(run, tmp_path / "again", ranks=then), 1e-10)


@pytest.mark.slow(minutes=3)
def test_ranks_shard_an_unsharded_run_and_the_other_way(plain, tmp_path):
    again = went_on(plain, tmp_path / "again", "--shard=True", ranks=2)
    assert_same_log(plain, again, 1e-10)
    assert_same_log(plain, went_on(again, tmp_path / "whole", "--shard=False"), 1e-10)


@pytest.mark.slow(minutes=0.8)
@pytest.mark.parametrize(
    "fault", [(1, "fsync", 2), (1, "fsync", 3), (0, "fsync", 7), (0, "replace", 6), (0, "write", 20)]
)
def test_a_kill_in_the_middle_of_a_checkpoint_leaves_the_one_before(fault, plain, corpus, tmp_path):
    rank, at, n = fault
    argv = flags(tmp_path / "run", corpus, **RUN, shard=True, init_from="auto")
    said = ran(*argv, ranks=2, fault={"at": at, "n": n, "do": "kill", "rank": rank}, fails=True)
    assert "SIGKILL" in said.upper(), said
    ran(*argv, ranks=2)
    assert_same_log(plain, tmp_path / "run", 1e-10)
    assert len(list((tmp_path / "run").glob("*.parts"))) == 2
