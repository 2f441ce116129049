"""--to=onnx: token ids to logits as one graph, proved in onnxruntime on its CPU.

Batch and length are free. Weights and arithmetic are float32: onnxruntime's CPU multiplies no bfloat16.
"""

import copy
import tempfile
from pathlib import Path

import torch

from nanonorm.onnx import Session, export
from scripts.exports import Job, name_of, prove

NEEDS = ("onnx", "onnxscript", "onnxruntime")

HOW = """\
    import numpy, onnxruntime
    session = onnxruntime.InferenceSession("model.onnx")
    ids = numpy.array([[1, 2, 3]])                          # int64, (batch, length up to {length})
    logits = session.run(None, {{"input_ids": ids}})[0]       # float32, (batch, length, {vocabulary})

RMSNorm and attention are one operator each (opset 23). Tokens on the right change nothing on their
left: pad there where rows differ in length."""
SAVES = """\
The norms that were removed are not in the graph. Under onnxruntime, in which a norm is one kernel, that
gains a few percent at most (nanonorm's results/speed.md). There is no KV cache: every call computes all
positions."""
CAST = "\nThe weights were {dtype}; here they are float32, as onnxruntime's CPU multiplies nothing narrower."


def write(job: Job) -> dict:
    """model.onnx and the tokenizer's files; weights above 2 GB stand beside the graph."""
    c = job.model.config
    erf = c.mlp == "gelu_erf" or c.norm == "derf"  # of which onnxruntime's CPU has no float64
    dtypes = [torch.float32, *([torch.float64] if job.exact and not erf else [])]
    errors = {name_of(dtype): proved(job, dtype) for dtype in dtypes}
    for name, content in job.tokenizer.files.items():
        (job.folder / name).write_bytes(content)
    return {
        "errors": errors,
        "dtype": "float32",
        "how": HOW.format(length=c.block_size, vocabulary=c.vocab_size),
        "saves": SAVES if job.dtype == torch.float32 else SAVES + CAST.format(dtype=name_of(job.dtype)),
    }


def proved(job: Job, dtype: torch.dtype) -> float:
    """The largest error of the graph in a type, over several batches and lengths; the float32 one stays."""
    model = job.model if job.dtype == dtype else copy.deepcopy(job.model).to(dtype)
    for part in model.modules():
        if model is not job.model and hasattr(part, "eps"):  # an operator keeps its eps in float32
            part.eps = torch.tensor(part.eps, dtype=torch.float32).item()
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(job.folder if dtype == torch.float32 else scratch, "model.onnx")
        length = min(job.model.config.block_size, 3)
        export(model, torch.zeros(2, length, dtype=torch.long), path, {0: "batch", 1: "length"})
        session, errors = Session(path), []
        for idx in pieces(job.sample):
            with torch.no_grad():
                ours = model(idx)
            errors.append(prove(ours, session(idx), dtype, f"onnxruntime on {tuple(idx.shape)} tokens"))
    return max(errors)


def pieces(sample):
    """Parts of a sample (B, T) in several batches and lengths, up to three rows of all of it."""
    rows, T = sample.repeat(3, 1)[:3], sample.shape[1]
    return [rows[:batch, :length] for batch in (1, 3) for length in sorted({1, min(2, T), (T + 1) // 2, T})]
