"""How much memory it takes to load a network, and to fold and prove it, over the size of its weights.

Measured at 1.2 B random weights in the shape of Llama 3.2 1B (head tied, untied by the fold), in a process of
its own: the peak above what the process has once torch is imported, with what it imports at first use.
"""

import json
from pathlib import Path

import pytest
import torch
from running import said_by

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
SHAPE = dict(
    vocab_size=128_256, block_size=512, n_layer=16, n_head=32, n_kv_head=8, n_embd=2048, hidden=8192,
    rope_base=500_000.0, rope_scaling=(32.0, 1.0, 4.0, 8192.0), taper="all",
)  # fmt: skip
PROGRAM = """
import json, sys
import torch
from forms import from_file, proved, skeleton
from nanonorm.files import write_file
from nanonorm.run import open_model
from model import ModelConfig, Transformer
from tests.running import Peak

path, shape, dtype, job = sys.argv[1], json.loads(sys.argv[2]), getattr(torch, sys.argv[3]), sys.argv[4]
if job == "make":
    torch.set_default_dtype(dtype)
    model = Transformer(ModelConfig(**shape))
    model.set_phase("scale")
    write_file(model.to_file({"gate": 0.0, "phase": "scale"}), path)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    print(json.dumps({"weights": size}))
else:
    skeleton(ModelConfig(), "a small one")  # torch imports 65 MB when it first makes a model without values
    with Peak() as loading:
        model = from_file(*open_model(path))
    with Peak() as folding:
        proved(model, job, torch.randint(1000, (4, 512) if job == "folded" else (1, 64)))
    held = folding.before - loading.before
    print(json.dumps({"load": loading.bytes, "fold": held + folding.bytes}))
"""


def run(*words) -> dict:
    return json.loads(said_by("-c", PROGRAM, *words, timeout=None).splitlines()[-1])


@pytest.mark.slow(minutes=8)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loading_and_folding_a_billion_weights(dtype, tmp_path):
    if dtype == "bfloat16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this CPU has no bfloat16 arithmetic: the proof takes it a quarter of an hour and more")
    path = str(tmp_path / "model.pt")
    weights = run(path, json.dumps(SHAPE), dtype, "make")["weights"]
    took = run(path, json.dumps(SHAPE), dtype, "folded")
    print({job: round(n / weights, 3) for job, n in took.items()}, f"of {weights:,} bytes in {dtype}")
    assert took["load"] <= 1.1 * weights
    assert took["fold"] <= 2.6 * weights


@pytest.mark.slow
def test_loading_and_folding_a_quantized_file(smollm2):
    """Over its size in float32; the tokens of the proof are few, as its logits are not in the promise."""
    weights = 4 * 134_515_008
    took = run(str(smollm2), "{}", "float32", "weightless")
    print({job: round(n / weights, 3) for job, n in took.items()}, f"of {weights:,} bytes")
    assert took["load"] <= 1.1 * weights
    assert took["fold"] <= 2.6 * weights
