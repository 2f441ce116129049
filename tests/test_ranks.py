"""Ranks that start again find each other, not those that died. test_reliability.py tries it on a run."""

import json
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from conftest import refuses
from running import ROOT, assert_same_run, flags, launch

from config import Config
from nanonorm.errors import BadInput
from nanonorm.ranks import Ranks, store_of_this_attempt
from nanonorm.run import Beginning


def come(store, size, ranks, timeout_s) -> list:
    """What each of these ranks, a thread of its own, gets."""
    store.set_timeout(timedelta(seconds=timeout_s))
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: store_of_this_attempt(store, rank, size), ranks))


def test_each_attempt_has_keys_of_its_own():
    """Whoever died before it, and whatever it left in the store."""
    store, seen = dist.HashStore(), []
    for size, missing in ((2, 1), (3, 0), (4, 2), (4, 3), (2, 0)):
        with pytest.raises(BadInput if missing else dist.DistStoreError):
            come(store, size, [rank for rank in range(size) if rank != missing], timeout_s=0.2)
        parts = come(store, size, range(size), timeout_s=10)
        assert not any(part.check(["address"]) for part in parts)
        parts[-1].set("address", str(size))
        assert [part.get("address") for part in parts] == [str(size).encode()] * size
        seen.append(parts[0])
    assert [part.get("address") for part in seen] == [b"2", b"3", b"4", b"4", b"2"]


def test_a_rank_that_does_not_come_is_missed():
    with pytest.raises(BadInput, match=r"^1 of 2 ranks came within 0.005 minutes; start them all again$"):
        come(dist.HashStore(), 2, [0], timeout_s=0.3)


@pytest.mark.slow
def test_two_launchers_that_count_their_restarts_apart(corpus, tmp_path):
    """As on two machines: only the torchrun whose rank dies counts a restart, three times."""
    knobs = {"max_iters": 8, "warmup_iters": 2, "gate_start": 3, "gate_end": 6, "log_interval": 1}
    knobs |= {"ckpt_interval": 2, "gradient_accumulation_steps": 2, "batch_size": 2}
    process = launch(*flags(tmp_path / "run", corpus, **knobs), ranks=2, stdout=-1, stderr=-2)
    assert process.wait(timeout=300) == 0, process.communicate()[0]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    argv = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1"]
    argv += ["--max_restarts=3", "--rdzv_id=two", "--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{port}"]
    argv += [str(ROOT / "tests/faults.py"), json.dumps({"at": "before", "n": 4, "do": "kill", "rank": 1})]
    argv += flags(tmp_path / "again", corpus, **knobs, init_from="auto")
    env, said = {**os.environ, "OMP_NUM_THREADS": "1"}, tmp_path / "said"
    with open(said, "a") as file:
        both = [subprocess.Popen(argv, env=env, stdout=file, stderr=file) for _ in range(2)]
    try:
        status = [process.wait(timeout=300) for process in both]
    finally:
        for process in both:
            process.terminate()
    assert status == [0, 0] and said.read_text().count("M parameters; ") == 4, said.read_text()
    assert_same_run(tmp_path / "run", tmp_path / "again")


def test_a_difference_is_seen_however_far_back_it_stands(monkeypatch):
    ranks, facts = Ranks(), {"alike": None, "long": "a" * 50}
    assert ranks.differ_in(facts) == {}
    monkeypatch.setattr(ranks, "told", lambda of: [of, of | {"long": "a" * 49 + "b"}])
    assert ranks.differ_in(facts) == {"long": ["a" * 20] * 2}


def test_what_auto_comes_to_is_the_same_on_every_rank(monkeypatch):
    monkeypatch.setattr(ranks := Ranks(), "told", lambda of: [of, of | {"dtype": "float32"}])
    sums = dict.fromkeys(("train_sha256", "val_sha256"))
    with refuses("the ranks differ in dtype (bfloat16 and float32)"):
        Beginning(Config().resolve()).refuse_to_differ(ranks, sums, "cpu", torch.bfloat16)


@pytest.mark.slow
def test_ranks_of_other_settings_or_text_are_refused(corpus, bpe_corpus, tmp_path):
    """As on two machines that were not prepared alike, of which each would train its own network."""
    for other, named in (({"beta2": 0.5}, "beta2"), ({"dataset": bpe_corpus}, "train_sha256")):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = str(server.getsockname()[1])
        place = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        both = []
        for rank, knobs in ((0, {}), (1, other)):
            env = {**os.environ, **place, "OMP_NUM_THREADS": "1", "RANK": str(rank)}
            argv = flags(tmp_path / "run", corpus, gradient_accumulation_steps=2, **knobs)
            both.append(launch(*argv, env=env, stderr=subprocess.PIPE))
        said = [process.communicate(timeout=120)[1] for process in both]
        assert all(f"the ranks differ in {named}" in text for text in said), said
        assert not (tmp_path / "run").exists() and [process.returncode for process in both] == [2, 2]


def test_nccl_without_a_gpu_is_refused():
    with refuses("backend=nccl is for GPUs", "not cpu"):
        Ranks().start(torch.device("cpu"), "nccl", alone=True)
    assert not dist.is_initialized()
