"""The residual stream of trained networks by block: its RMS before attention and before the MLP."""

from collections import defaultdict
from contextlib import contextmanager

import numpy as np
import torch

from data import corpus_folder, open_corpus
from data.sampling import spread_starts, windows
from forms import from_file
from nanonorm.errors import BadInput, ModelError
from nanonorm.run import given_weights
from nanonorm.stats import spread
from nanonorm.tables import markdown
from scripts.studies.runs import FinishedRun, Unusable


@contextmanager
def watched(model, see):
    """While it is open, see(i, x, h) is called in each block, with the stream before attention and before the
    MLP (B, T, D)."""
    before, hooks = {}, []
    for i, block in enumerate(model.blocks):

        def before_block(module, args, i=i):
            before[i] = args[0]

        def after_attention(module, args, out, i=i):
            # CoupledNorm's blocks call no norm before the MLP, so what would be its input is rebuilt here
            x = before.pop(i, None)
            if x is not None:  # else it is a sink's own pass
                see(i, x, x + out)

        hooks.append(block.register_forward_pre_hook(before_block))
        hooks.append(block.attn.proj.register_forward_hook(after_attention))
    yield
    for hook in hooks:
        hook.remove()


@torch.no_grad()
def stream_rms(run: FinishedRun, tokens: int) -> np.ndarray:
    """(3, layers): RMS of the residual stream before attention, before the MLP, and their ratio, means over
    windows from all of the validation split at gate 0, from the last checkpoint. Raises: Unusable."""
    corpus = corpus_folder(run.settings["dataset"])
    length = run.settings["block_size"] - (run.settings.get("sink_token") is not None)
    try:
        meta, _, val = open_corpus(corpus, length)
        if meta["tokenizer_sha256"] != run.head["corpus"]["tokenizer_sha256"]:
            raise Unusable(f"{corpus.name} is another corpus than the run's")
        model = from_file(*given_weights(str(run.folder)))
    except (BadInput, ModelError) as e:
        raise Unusable(str(e)) from None
    starts = spread_starts(len(val), length, tokens, meta.get("block_size", 1))
    ids, _ = windows(torch.from_numpy(val), starts, length, "cpu")
    found = []  # three means a block

    def see(i, *stream):
        x, h = (part.float().square().mean(-1).sqrt() for part in stream)
        found.append([x.mean().item(), h.mean().item(), (h / x).mean().item()])

    with watched(model, see):
        model(ids, last_only=True)
    return np.array(found).T


def residual_study(rows: dict[str, list[FinishedRun]], tokens: int) -> list[str]:
    """Blocks of markdown about the stream by block. rows: {variant: runs}"""
    reasons, cells = defaultdict(list), []
    for variant, runs in rows.items():
        arrays = []
        for run in runs:
            try:
                arrays.append(stream_rms(run, tokens))
            except Unusable as e:
                reasons[str(e)].append(str(run.folder))
        if arrays:
            found = np.array(arrays)  # (runs, 3, layers)
            of_block = [f"{x:.2f} / {h:.2f}, {alpha:.3f}" for x, h, alpha in found.mean(0).T]
            cells.append([variant, len(found), spread(found[:, 2].mean(1), 3), *of_block])
    lacks = "Not measured in {} of the runs, {} the first: {}"
    text = [lacks.format(len(which), which[0], why) for why, which in reasons.items()]
    if not cells:
        return text
    said = "Of a block: RMS before attention / before the MLP, and alpha, the mean of a token's second over "
    said += f"its first; over up to {tokens:,} tokens from all of the validation split, and over seeds."
    head = ["", "n", "mean alpha", *(f"block {i}" for i in range(max(map(len, cells)) - 3))]
    return [markdown(cells, head), said, *text]
