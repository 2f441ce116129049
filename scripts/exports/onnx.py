"""--to=onnx: one graph with a KV cache, for prompts and for decoding, proved in onnxruntime on its CPU.

Batch, length and the length of what came before are free. Weights and arithmetic are float32, as
onnxruntime's CPU multiplies no bfloat16.
"""

import copy
import tempfile
from pathlib import Path

import torch

from nanonorm.onnx import Session, export_with_past
from scripts.exports import Job, name_of, prove

NEEDS = ("onnx", "onnxscript", "onnxruntime")

HOW = """\
    import numpy, onnxruntime
    session = onnxruntime.InferenceSession("model.onnx")
    names = [i.name for i in session.get_inputs() if i.name.startswith("past_key_values.")]
    past = {past}
    ids = numpy.array([[1, 2, 3]])                          # int64, (batch, length)
    for _ in range(8):                                      # the likeliest next tokens
        given = {{"input_ids": ids, "logits_from": numpy.array(ids.shape[1] - 1), **past}}
        logits, *present = session.run(None, given)
        ids, past = logits[:, -1:].argmax(-1), dict(zip(names, present))

logits: float32, (batch, length - logits_from, {vocabulary}), of the tokens from `logits_from` on; with 0 of
all. Past and length are up to {length} tokens together{among}. RMSNorm and attention are one operator each
(opset 23). Tokens on the right change nothing on their left: pad there where rows differ in length, and
throw the keys and values of the padding away."""
SAVES = """\
The norms that were removed are not in the graph. Under onnxruntime, in which a norm is one kernel, that
gained a few percent at most for a prompt (nanonorm's results/speed.md)."""
NO_TOKEN = '{{name: numpy.zeros((1, {heads}, 0, {size}), "float32") for name in names}}  # of no token'
SINK = 'dict(numpy.load("past.npz"))  # of the token in front of every text, which is no id of it: one row'
CAST = "\nThe weights were {dtype}; here they are float32, as onnxruntime's CPU multiplies nothing narrower."


def write(job: Job) -> dict:
    """model.onnx and the tokenizer's files; weights above 2 GB stand beside the graph."""
    c = job.model.config
    past, among = NO_TOKEN.format(heads=c.n_kv_head, size=c.head_dim), ""
    if c.sink_token is not None:
        past, among = SINK, ", that of past.npz among them"
    erf = c.mlp == "gelu_erf" or c.norm == "derf"  # of which onnxruntime's CPU has no float64
    dtypes = [torch.float32, *([torch.float64] if job.exact and not erf else [])]
    errors = {name_of(dtype): proved(job, dtype) for dtype in dtypes}
    for name, content in job.tokenizer.files.items():
        (job.folder / name).write_bytes(content)
    how = HOW.format(past=past, length=c.block_size, among=among, vocabulary=c.vocab_size)
    saves = SAVES if job.dtype == torch.float32 else SAVES + CAST.format(dtype=name_of(job.dtype))
    return {"errors": errors, "dtype": "float32", "runs": "onnxruntime", "how": how, "saves": saves}


def proved(job: Job, dtype: torch.dtype) -> float:
    """The largest error of the graph in a type, over several batches and lengths; the float32 one stays."""
    model = job.model if job.dtype == dtype else copy.deepcopy(job.model).to(dtype)
    for part in model.modules():
        if model is not job.model and hasattr(part, "eps"):  # an operator keeps its eps in float32
            part.eps = torch.tensor(part.eps, dtype=torch.float32).item()
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(job.folder if dtype == torch.float32 else scratch, "model.onnx")
        export_with_past(model, path)
        session, errors = Session(path), []
        for idx in pieces(job.sample):
            with torch.no_grad():
                ours = model(idx)
            what = f"onnxruntime on {tuple(idx.shape)} tokens"
            errors.append(prove(ours, session(idx), dtype, what))
            errors.append(prove(ours, piecewise(session, idx), dtype, f"{what}, with its cache"))
    return max(errors)


def piecewise(session: Session, idx):
    """The logits of a prompt, the first half, of up to 32 tokens one by one, and of the rest at once."""
    half = (idx.shape[1] + 1) // 2
    past, found = {}, []
    for part in idx.split([half, *[1] * min(32, idx.shape[1] - half), max(0, idx.shape[1] - half - 32)], 1):
        if part.numel():
            logits, past = session.after(past, part)
            found.append(logits)
    return torch.cat(found, 1)


def pieces(sample):
    """Parts of a sample (B, T) in several batches and lengths, up to three rows of all of it."""
    rows, T = sample.repeat(3, 1)[:3], sample.shape[1]
    return [rows[:batch, :length] for batch in (1, 3) for length in sorted({1, min(2, T), (T + 1) // 2, T})]
