"""Cross-entropy of networks on held-out text, token by token: the measure of the TaperNorm paper's Table 4.

    python scripts/evaluate.py out/vanilla out/all --data=tinystories
    python scripts/evaluate.py gpt2 schaeff/gpt2-small_LNFree300 --data=data/owt_held_out,data/pile_held_out

PATH is a run folder, a model file, an export, a GGUF file, a Hugging Face folder or a hub id; of the last
two, transformers reads what our reader refuses. Whatever tapers is at gate 0. --data names prepared corpora,
whose validation split is read, or sets of data/held_out.py.

The text is cut into blocks of T tokens, what fills no block is left out, and each token but the first of its
block is predicted from those before it in the block: T - 1 targets. (`val/loss` of train.py predicts that
first token too, from the block before.) No begin token is added, nothing is masked between documents. Means
are in nats a token; "no end" leaves out targets that are the end-of-text token. A loss is kept for every
token and summed in their order, in float64, so the batch size is of no account. The gap is to --vanilla, or
to the first PATH; "its gap" is the paper's, to its vanilla, and stands only beside a whole set.

Prints a table, then a line of JSON, which --out=x.json keeps.
"""

import math
import platform
import sys
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from bench import hardware  # not found? pip install -e .
from data import HeldOut, corpus_folder, open_held_out, refuse_other_tokens
from model import Transformer
from nanonorm.cli import check_out, parse, print_report
from nanonorm.errors import BadInput, one_line_errors
from nanonorm.kernels import upcast
from nanonorm.log import say
from nanonorm.machine import pick_device
from nanonorm.tables import table_of
from nanonorm.typed import Count, Positive
from scripts.exports.networks import Network, open_network
from scripts.studies.table4 import CONTEXT, paper_says, row_of

PERCENTILES = {"p2.5": 2.5, "median": 50.0, "p97.5": 97.5, "p99.9": 99.9}


@dataclass
class Evaluate:
    """What is evaluated, on what, and how."""

    data: tuple[str, ...] | None = None  # folders, or names under data/
    vanilla: str | None = None  # the network that gaps are to; None: the first PATH
    block_size: Count | None = None  # tokens of a block; None: that of the networks, 1024 at most
    blocks: Count | None = None  # of each text, from its beginning; None: all
    batch_size: Count = 8  # blocks at a time
    device: str = "auto"  # cpu, cuda, cuda:1; auto: a GPU if there is one
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"  # bfloat16: autocast of float32 weights
    kl: bool = False  # KL(vanilla || network) as well, for which the vanilla network runs beside each other
    finite: bool = False  # leave out, and count, blocks with a loss or KL that is not finite, else an error
    within: Positive | None = None  # leave with status 2 if a mean is further than this from the paper's
    out: str | None = None  # .json file for the numbers


# ---------------------------------------------------------------------------------------------------------
# the text


@dataclass
class Text:
    """Blocks of a text: (n, T) ids, unsigned and memory-mapped."""

    name: str
    folder: Path
    manifest: HeldOut
    meta: dict = field(repr=False)
    tokens: np.ndarray = field(repr=False)

    def blocks(self, T: int, limit: int | None) -> np.ndarray:
        """(n, T); what fills no block is left out. Raises: BadInput if that is all of it."""
        n = min(len(self.tokens) // T, limit or len(self.tokens))
        if n == 0:
            held = f"{self.name} holds {len(self.tokens)} tokens"
            raise BadInput(f"{held}, not one block of {T}; name more text")
        return self.tokens[: n * T].reshape(n, T)

    def remark_on(self, T: int):
        """Say so if the text is cut into other blocks."""
        cut = self.manifest.block_size
        if cut not in (None, T):
            say(f"{self.name} is cut into blocks of {cut}; it is read as one stream, in blocks of {T}")

    def bits_per_byte(self, ce: float, T: int) -> float | None:
        """By the bytes a token of the whole split, which the blocks of T leave a little of out. A window of
        data/windows.py begins with a token without bytes, which is no target where a block begins with it."""
        m = self.manifest
        first = m.val_tokens / math.lcm(T, m.block_size) if m.block_size else 0
        return None if m.val_bytes is None else ce * (m.val_tokens - first) / math.log(2) / m.val_bytes


def open_text(name: str) -> Text:
    """The text in a folder, or in one of that name under data/. Raises: BadInput."""
    folder = corpus_folder(name)
    return Text(name, folder, *open_held_out(folder))


def common_block_size(k: Evaluate, networks: list[Network], texts: list[Text]) -> int:
    """The T of the whole table. Raises: BadInput if the networks' contexts differ, or are too short."""
    contexts = {n.name: min(CONTEXT, n.context or CONTEXT) for n in networks}
    shortest = min(contexts, key=contexts.get)
    if k.block_size is None and len(set(contexts.values())) > 1:
        longest = max(contexts, key=contexts.get)
        found = f"{longest} reads {contexts[longest]} tokens, {shortest} {contexts[shortest]}"
        raise BadInput(f"{found}; choose one for all, --block_size={contexts[shortest]}, or leave one out")
    T = k.block_size or contexts[shortest]
    for network in networks:
        if network.context is not None and network.context < T:
            raise BadInput(f"{network.name} reads {network.context} tokens: --block_size={T} is too long")
    if T < 2:
        raise BadInput("a block of 1 token has no target; --block_size must be 2 at least")
    for text in texts:
        text.remark_on(T)
    return T


# ---------------------------------------------------------------------------------------------------------
# losses


def batches(blocks: np.ndarray, size: int, device, label: str):
    """Yield (first block, ids (B, T)), with a bar of batches; no bar unless stderr is a terminal."""
    for first in tqdm(range(0, len(blocks), size), label[-30:], disable=None):
        some = blocks[first : first + size].astype(np.int64)
        yield first, torch.from_numpy(some).to(device)


@torch.inference_mode()
def token_losses(network: Network, blocks: np.ndarray, k: Evaluate, device, teacher: Network | None = None):
    """(-log p of every token of `blocks` (n, T) but each block's first: (n, T-1), float64 if --dtype is that,
    else float32; KL(teacher || network) there, alike, or None). Raises: BadInput if a number is not finite,
    without --finite."""
    n, T = blocks.shape
    losses = np.empty((n, T - 1), np.float64 if k.dtype == "float64" else np.float32)
    kl = None if teacher is None else np.empty_like(losses)
    autocast = torch.autocast(device.type, torch.bfloat16) if k.dtype == "bfloat16" else nullcontext()
    for first, idx in batches(blocks, k.batch_size, device, network.title):
        with autocast:
            logits = network(idx)  # (B, T, V)
            taught = None if teacher is None else teacher(idx)
        for i, (of_block, ids) in enumerate(zip(logits, idx, strict=True), first):  # one: they are large
            losses[i] = F.cross_entropy(upcast(of_block[:-1]), ids[1:], reduction="none").cpu().numpy()
            if teacher is not None:
                log_p, log_q = (upcast(z[:-1]).log_softmax(-1) for z in (taught[i - first], of_block))
                kl[i] = F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1).cpu().numpy()
    for what, values in (("loss", losses), ("KL", kl)):
        if not k.finite and values is not None and not np.isfinite(values).all():
            i, t = np.argwhere(~np.isfinite(values))[0].tolist()
            where = f"{network.name}: the {what} of token {t + 1} of block {i} is {values[i, t]}"
            raise BadInput(f"{where}; is the network damaged, or --dtype={k.dtype} too narrow for it?")
    return losses, kl


def summary(losses: np.ndarray, targets: np.ndarray, end: int | None) -> dict:
    """Means and percentiles of losses (n, T-1), in nats a token; `end`: the id of the end-of-text token."""
    ce, kept = losses.mean(dtype=np.float64).item(), None
    if end is not None:
        counted = targets != end
        kept = losses[counted].mean(dtype=np.float64).item() if counted.any() else None
    levels = np.percentile(losses, list(PERCENTILES.values())).tolist()
    return {
        "targets": losses.size,
        "ce": ce,
        "ce_no_end": kept,
        "end_targets": None if end is None else int(losses.size - counted.sum()),
        **dict(zip(PERCENTILES, levels, strict=True)),
        "perplexity": math.exp(min(ce, 700.0)),  # beyond it is no number of JSON's
    }


def evaluate(network: Network, text: Text, T: int, k: Evaluate, device, vanilla: dict, teacher) -> dict:
    """A row of the table. vanilla: {text: losses} of the network that gaps are to, which is the first;
    teacher: that network, or None. Raises: BadInput."""
    blocks, first = text.blocks(T, k.blocks), text.name not in vanilla
    losses, kl = token_losses(network, blocks, k, device, None if first else teacher)
    theirs, good = vanilla.setdefault(text.name, losses), np.isfinite(losses).all(1)
    good &= True if kl is None else np.isfinite(kl).all(1)
    row = {"model": network.name, "data": text.name, "blocks": len(blocks), "block_size": T}
    row |= {"remark": network.remark} if network.remark else {}
    if k.finite:
        row["not_finite"] = len(good) - int(good.sum())
        if first and not good.all():
            raise BadInput(f"{network.name}: on {text.name} not every block is finite, and gaps are to it")
        if not good.any():
            nothing = {key: None for key, _ in COLUMNS.values() if key not in row}
            return row | {"targets": 0, "end_targets": None} | nothing
        losses, theirs, blocks, kl = (None if t is None else t[good] for t in (losses, theirs, blocks, kl))
    row |= summary(losses, blocks[:, 1:], text.manifest.end_token_id)
    row["bits_per_byte"] = text.bits_per_byte(row["ce"], T)
    row["kl"] = None if kl is None else kl.mean(dtype=np.float64).item()
    row["gap"] = row["ce"] - theirs.mean(dtype=np.float64).item()
    place = row_of(network.title, network.layers, network.width)
    of_set = text.manifest.set if k.blocks is None and not row.get("not_finite") else None
    row["paper"] = paper_says(place, of_set, T)
    of_vanilla = None if place is None else paper_says((place[0], "vanilla"), of_set, T)
    row["paper_gap"] = None if row["paper"] is None else row["paper"] - of_vanilla
    return row


# ---------------------------------------------------------------------------------------------------------
# the table


COLUMNS = {  # head -> (key of a row, its form)
    "mean": ("ce", ".4f"),
    "no end": ("ce_no_end", ".4f"),
    "median": ("median", ".4f"),
    "2.5%": ("p2.5", ".4f"),
    "97.5%": ("p97.5", ".3f"),
    "99.9%": ("p99.9", ".3f"),
    "perplexity": ("perplexity", ".5g"),
    "bits/byte": ("bits_per_byte", ".4f"),
    "gap": ("gap", "+.4f"),
    "KL": ("kl", ".5f"),
    "not finite": ("not_finite", "d"),  # blocks, left out; the gap is to the others
    "paper": ("paper", ".4f"),
    "its gap": ("paper_gap", "+.4f"),
}


# ---------------------------------------------------------------------------------------------------------
# the command


def read_command(argv: list[str]) -> tuple[Evaluate, list[str]]:
    """(the knobs, the networks to evaluate, the vanilla one first). Raises: BadInput."""
    k, _, words = parse(Evaluate, argv, usage=__doc__)
    names = list(dict.fromkeys(([k.vanilla] if k.vanilla else []) + words))
    if not words or not k.data:
        usage = "python scripts/evaluate.py PATH... --data=FOLDER[,FOLDER...]"
        missing = "text to evaluate on" if words else "networks and text to evaluate them on"
        raise BadInput(f"name {missing}: {usage}")
    check_out("out", k.out, ".json")
    if k.kl and len(names) == 1:
        say(f"the KL is to the first network, and {names[0]} is the only one; name another behind it")
    return k, names


def checked(names: list[str], texts: list[Text], kl: bool = False, own: bool = False) -> list[Network]:
    """Every network once, before hours are spent on the first, without its weights if it is not the only one.
    Raises: BadInput for a text in other tokens, for the KL of a network that has others, and with `own` for
    one that only transformers reads."""
    networks = []
    for name in names:
        network = open_network(name)
        if own and not isinstance(network.model, Transformer):
            raise BadInput(f"{name} must be one that our own reader takes: {network.remark}")
        for text in texts:
            refuse_other_tokens(text.meta, text.folder, network.corpus, network.path)
            if text.manifest.vocab_size > network.vocab_size:
                ids = f"{text.name} has {text.manifest.vocab_size} token ids, {name} {network.vocab_size}"
                raise BadInput(f"{ids}; prepare it again with --tokenizer={name}")
        if network.remark:
            say(f"{name}: {network.remark}")
        if len(names) > 1:
            network.model = None
        networks.append(network)
        if kl and network.vocab_size != networks[0].vocab_size:
            differs = f"{name} predicts {network.vocab_size} token ids, {names[0]} {networks[0].vocab_size}"
            raise BadInput(f"{differs}: they have no KL; leave --kl out, or one of them")
    return networks


def opened(networks: list[Network], device, dtype=torch.float32):
    """Yield each network on `device`, one at a time."""
    for network in networks:
        if network.model is None:
            network = open_network(network.name)
        network.model.to(device, dtype)
        yield network
        network.model = None


def main(argv: list[str]):
    k, names = read_command(argv)
    device = pick_device(k.device)
    if k.dtype == "float64" and device.type == "mps":
        raise BadInput("mps has no float64; use --dtype=float32")
    texts = [open_text(name) for name in dict.fromkeys(k.data)]
    networks = checked(names, texts, k.kl)
    T = common_block_size(k, networks, texts)
    machine = hardware(device)
    print(f"machine  {machine}; torch {torch.__version__}; {k.dtype}")
    for text in texts:
        n = len(text.blocks(T, k.blocks))
        cut = f"{n:,} blocks of {T:,}, {len(text.tokens) - n * T:,} tokens left out"
        print(f"data     {text.name}: {cut}; {text.manifest.source}")
    print(f"measure  nats a token, {T - 1:,} targets a block; gaps to {names[0]}", flush=True)

    dtype, vanilla = torch.float64 if k.dtype == "float64" else torch.float32, {}
    loaded, teacher = opened(networks, device, dtype), open_network(names[0]) if k.kl else None
    if teacher is not None:
        teacher.model.to(device, dtype)
    rows = [evaluate(network, text, T, k, device, vanilla, teacher) for network in loaded for text in texts]
    table = table_of(rows, ["model", "data"], {head: of for head, of in COLUMNS.items() if of[0] in rows[0]})
    print(f"\n{table}")
    report = dict(settings=asdict(k), networks=names, machine=machine, torch=torch.__version__,
                  python=platform.python_version(), rows=rows)  # fmt: skip
    report["texts"] = {text.name: text.meta for text in texts}
    print_report(report, k.out)
    if k.within and not any(row["paper"] for row in rows):
        raise BadInput("--within: the paper has no figure of these networks on these texts")
    far = [row for row in rows if k.within and row["paper"] and abs(row["ce"] - row["paper"]) > k.within]
    if far:
        row = far[0]
        off = f"{row['model']} has {row['ce']:.4f} on {row['data']}, the paper {row['paper']:.4f}"
        raise BadInput(f"{off}, more than {k.within} apart; is it the same model and the same text?")


if __name__ == "__main__":
    with one_line_errors(torch.OutOfMemoryError):
        main(sys.argv[1:])
