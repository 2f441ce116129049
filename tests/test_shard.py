"""A sharded run (FSDP2) is the same run, holds its share of the bytes, and its checkpoints serve any number
of ranks. On gloo and CPUs: nothing here says how fast nccl is, or whether it overlaps a GPU's work."""

import json

import pytest
import sharded
from running import ROOT, launch

from nanonorm.ranks import Ranks

FEW = ("layernorm-internal-aux", "coupled")


def spread(tmp_path, ranks: int, *cases: str) -> list[dict]:
    """What each rank found of these cases."""
    script, out = ROOT / "tests/sharded.py", tmp_path / "found"
    process = launch(out, *cases, ranks=ranks, script=script, stdout=-1, stderr=-2)
    said = process.communicate(timeout=900)[0]
    assert process.returncode == 0, said
    return [json.loads((tmp_path / f"found.{rank}").read_text()) for rank in range(ranks)]


def assert_equal(found: dict, cases):
    for case in cases:
        expected = sharded.losses(sharded.begun(case, Ranks(), False))
        worst = 0.0
        for a, b in zip(expected, found[case], strict=True):
            worst = max(worst, *(abs(x - y) / max(1, abs(x)) for x, y in zip(a, b, strict=True)))
        print(f"{case}: {worst:.1e}")
        assert worst <= 1e-12, case


def test_two_ranks_are_one(tmp_path):
    """20 steps in float64 through both phase boundaries, from one rank's weights alone."""
    pytest.importorskip("peft")
    assert_equal(spread(tmp_path, 2, *FEW)[0], FEW)


@pytest.mark.slow(minutes=4)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_are_one_for_every_variant(ranks, tmp_path):
    pytest.importorskip("peft")
    assert_equal(spread(tmp_path, ranks, *sharded.CASES)[0], sharded.CASES)
