"""A trained network with CoupledNorm in place of RMSNorm: measured, calibrated, written, and not yet trained.

    python scripts/couple.py out/llama_tiny --data=tinystories --out=out/llama_tiny_coupled
    python train.py --init_from=out/llama_tiny_coupled --teacher=out/llama_tiny --adapter=dora \\
        --dataset=tinystories --out_dir=out/llama_tiny_distilled        # and back to what it could do

PATH is a run folder, a model file, a Hugging Face folder or a hub id, of a network with RMSNorm. A block's
MLP then divides by alpha r(x) where it divided by r(h): x and h are the stream before attention and before
the MLP, r their RMS. A block's alpha is the one by which the MLP's input is least wrong, in squares, over all
positions but the first, where r is another; it goes into the gain of the MLP's norm. --alpha=layer is a
block's own, which costs nothing as it folds, and is not in the paper; mean is one for the network, the mean
over the coupled blocks (CoupledNorm, 5.3). The first --keep blocks keep RMSNorm, where the stream jumps.
What is left open is chosen by what is measured: the fewest kept blocks whose KL is within a tenth of the
least in the table, and with them the alpha of the least KL.

Prints the RMS by block, and how far each choice is from the original before anything is trained. Writes a
folder: model.pt, the tokenizer, couple.md with the same tables, couple.json with their numbers, and rms.png
(needs matplotlib).
"""

import json
import sys
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from tqdm import tqdm

from begin import begun_from  # not found? pip install -e .
from config import Config
from data import corpus_folder, open_corpus, refuse_other_tokens
from data.sampling import windows
from data.tokenizer import load_tokenizer
from forms import config_of
from model import RMSNorm, Transformer
from nanonorm.cli import parse
from nanonorm.divergence import Divergence, divergences
from nanonorm.errors import BadInput, one_line_errors
from nanonorm.files import atomic_write, write_file
from nanonorm.machine import keep_freed_memory, pick_device
from nanonorm.run import given_weights
from nanonorm.typed import Count, Positive, Whole
from scripts.convert import whole_folder
from scripts.studies.figures import Figures
from scripts.studies.residual import LINES, watched
from scripts.studies.tables import markdown

WITHIN = 0.1  # of the least KL
KEPT = (0, 1, 2, 4)  # numbers of kept blocks in the table of choices
AT_ONCE = 2048  # tokens in one forward pass


@dataclass
class Couple:
    """What is made of the network, and on which text it is measured."""

    out: str | None = None  # the folder to make
    data: str | None = None  # a folder under data/, or the path of a prepared corpus, in the network's tokens
    # one for all blocks, one each, 1, this number, or auto: of the first three what the KL says
    alpha: Literal["auto", "mean", "layer", "none"] | Positive = "auto"
    keep: Literal["auto"] | Whole = "auto"  # first blocks that keep RMSNorm; auto: as few as the KL allows
    tokens: Count = 16_384  # of training text, that are measured
    window: Count = 512  # tokens of a window, at most the network's context
    compared: Count = 2048  # of validation text, on which the choices are compared
    device: str = "auto"  # cpu, cuda, ...


# ---------------------------------------------------------------------------------------------------------
# measured


def spread_starts(length: int, window: int, tokens: int, apart: int = 1) -> np.ndarray:
    """Where windows begin that hold `tokens` of a text of `length`, at least one of them, from all of it: at
    multiples of `apart`."""
    count = max(1, min(tokens, length - 1) // window)
    return np.linspace(0, (length - 1 - window) // apart, count).astype(np.int64) * apart


@torch.no_grad()
def stream_rms(model: Transformer, batches) -> tuple[torch.Tensor, torch.Tensor]:
    """(the stream's mean r before attention and before the MLP of each block, (2, n_layer, 2): at the first
    position of a window, and over all later ones; each block's own alpha, (n_layer)), in float64. batches:
    ids (B, T).

    The MLP's input becomes q / alpha times what it was, q = r(h) / r(x); alpha = E q^2 / E q minimizes
    E (q / alpha - 1)^2 over the later tokens.
    """
    n_layer, norm = model.config.n_layer, RMSNorm(model.config.n_embd, model.config.norm_eps)
    sums, tokens = torch.zeros(2, n_layer, 2, dtype=torch.float64), torch.zeros(2, 1, 1)
    moments = torch.zeros(2, n_layer, dtype=torch.float64)

    def see(i, *stream):
        r = torch.stack([norm.inverse(h).reciprocal().double()[..., 0] for h in stream])  # (2, B, T)
        q = (r[1] / r[0])[:, 1:]
        sums[:, i] += torch.stack((r[..., 0].sum(1), r[..., 1:].sum((1, 2)))).cpu()
        moments[:, i] += torch.stack((q.sum(), q.square().sum())).cpu()

    with watched(model, see):
        for idx in batches:
            model(idx, last_only=True)
            tokens += torch.tensor([len(idx), idx.numel() - len(idx)]).view(2, 1, 1)
    return sums / tokens, moments[1] / moments[0]


def alphas_of(own, keep: int, alpha: str | float) -> torch.Tensor:
    """The alpha of every coupled block, (L - keep). own: each block's own, (L)."""
    own = own[keep:]
    if alpha == "layer":
        return own
    value = {"mean": own.mean(), "none": 1.0}.get(alpha, alpha)
    return torch.full_like(own, float(value))


def chosen(kls: dict[tuple, float], cfg: Couple) -> tuple:
    """The (kept blocks, alpha) to write, of those that `cfg` leaves open. kls: {(kept, alpha): KL}."""
    left = {c: kl for c, kl in kls.items() if cfg.keep in ("auto", c[0]) and cfg.alpha in ("auto", c[1])}
    least = min(left.values())
    near = [c for c, kl in left.items() if kl - least <= WITHIN * abs(least)]
    return min(near, key=lambda c: (c[0], left[c]))


# ---------------------------------------------------------------------------------------------------------
# coupled


def coupled(file: dict, path: Path, keep: int, alphas) -> Transformer:
    """The network of a file with CoupledNorm from block `keep` on; all but the gains of the MLPs' norms are
    the file's own tensors. Raises: BadInput, ModelError."""
    base = config_of(file, path)
    asked = Config(norm="coupled", coupled_from_layer=keep, block_size=base.block_size)
    explicit = {"norm", "coupled_from_layer", "block_size", "taper", "aux_weight"}
    config = asked.started_from(file, explicit, str(path)).model_config()
    state = dict(file["state"])
    for i, alpha in enumerate(alphas.tolist(), keep):
        name = f"blocks.{i}.norm_mlp.weight"
        state[name] = (state[name].double() / alpha).to(state[name].dtype)
    return begun_from({**file, "state": state}, config, path)


def plain(file: dict, path: Path) -> Transformer:
    """The network itself, before any taper. Raises: BadInput, ModelError."""
    asked = Config(taper="none", block_size=config_of(file, path).block_size)
    config = asked.started_from(file, {"block_size", "taper", "aux_weight"}, str(path)).model_config()
    return begun_from(file, config, path)


@contextmanager
def progress(label: str, networks: list[Transformer], tokens: int):
    """A bar that moves with every batch that one of `networks` reads."""
    with tqdm(total=tokens, desc=label, unit="token", unit_scale=True, disable=None) as bar:

        def has_read(network, args, out):
            bar.update(args[0].numel())

        hooks = [network.register_forward_hook(has_read) for network in networks]
        yield
        for hook in hooks:
            hook.remove()


def compare(file: dict, path: Path, before: Transformer, own, cfg: Couple, val, apart: int) -> dict:
    """{(kept blocks, alpha): (the alphas, Divergence)} of every choice, on windows from all of `val` that
    begin at multiples of `apart`. before: the original, which runs once; own: each block's alpha, (L)."""
    device = before.tok_emb.weight.device
    T = min(cfg.window, before.config.block_size, len(val) - 1)
    x, y = windows(val, spread_starts(len(val), T, cfg.compared, apart), T, device)
    kept = sorted({*KEPT, *{cfg.keep} - {"auto"}})
    ways = dict.fromkeys(("none", "mean", "layer", *{cfg.alpha} - {"auto"}))
    choices = {(k, alpha): alphas_of(own, k, alpha) for k in kept if k < len(own) for alpha in ways}
    afters = [coupled(file, path, k, alphas).to(device) for (k, _), alphas in choices.items()]
    for after in afters:
        after.rope = before.rope  # of a long context the largest tensor that they do not share
    pairs = list(zip(x.split(1), y.split(1), strict=True))
    with progress("comparing", [before, *afters], x.numel() * (1 + len(afters))):
        found = divergences(before, afters, pairs)
    return {choice: (choices[choice], d) for choice, d in zip(choices, found, strict=True)}


# ---------------------------------------------------------------------------------------------------------
# told


def rms_table(rms, own) -> str:
    head = ["block", "before attention", "before the MLP", "alpha", "first position", "before its MLP"]
    rows = []
    for i, (first, later) in enumerate(zip(*rms.tolist(), strict=True)):
        rows.append([i, *(f"{v:.4g}" for v in (*later, own[i].item(), *first))])
    return markdown(rows, head)


def choices_table(found: dict[tuple, tuple[torch.Tensor, Divergence]], choice: tuple) -> str:
    head = [
        "kept",
        "alpha",
        "its values",
        "cross-entropy",
        "more than the original's",
        "KL to the original",
        "",
    ]
    rows = []
    for (kept, alpha), (alphas, d) in found.items():
        low, high = alphas.min().item(), alphas.max().item()
        values = f"{low:.4f}" if low == high else f"{low:.4f} to {high:.4f}"
        numbers = f"{d.after:.4f}", f"{d.after - d.before:+.4f}", f"{d.kl:.5f}"
        rows.append([kept, alpha, values, *numbers, "written" if (kept, alpha) == choice else ""])
    return markdown(rows, head)


def as_json(rms, own, found: dict[tuple, tuple[torch.Tensor, Divergence]], choice: tuple) -> dict:
    """What couple.json holds. rms: by position (first, later), block, place (attention's input, MLP's)."""
    choices = []
    for (kept, alpha), (alphas, d) in found.items():
        of_choice = {"kept": kept, "alpha": alpha, "alphas": alphas.tolist()}
        choices.append(of_choice | {"original": d.before, "cross_entropy": d.after, "kl": d.kl})
    return {"rms": rms.tolist(), "alphas": own.tolist(), "written": choice, "choices": choices}


def draw(figures: Figures, rms, own, keep: int) -> str:
    """The stream by block, the first position apart, and the alphas; returns its markdown."""
    fig, axes = figures.axes(1, 3, 2.4)
    blocks = np.arange(len(own))
    for ax, title, values in zip(axes, ("first position", "later positions"), rms.numpy(), strict=False):
        for (name, colour, line), of_place in zip(LINES, values.T, strict=True):
            ax.plot(blocks, of_place, line, color=colour, marker="o", markersize=3, label=name)
        figures.log_scale(ax, values.min() / 1.5, values.max() * 1.5)
        ax.set(xlabel="block", ylabel="RMS of the stream", title=title)
    axes[2].plot(blocks, own, color="#000000", marker="o", markersize=3)
    axes[2].axvspan(-0.5, keep - 0.5, color="#999999", alpha=0.3 if keep else 0)
    axes[2].set(xlabel="block", ylabel="alpha", title="growth in a block (grey: kept)")
    for ax in axes:
        figures.whole_numbers(ax)
    return figures.save(fig, "rms", axes[0])


def main():
    cfg, _, words = parse(Couple, sys.argv[1:], usage=__doc__)
    if len(words) != 1 or cfg.out is None or cfg.data is None:
        example = "python scripts/couple.py PATH --data=tinystories --out=DIR"
        raise BadInput(f"name a network, a prepared corpus and a folder to make: {example}")
    keep_freed_memory()
    device = pick_device(cfg.device)
    file, path = given_weights(words[0])
    base = config_of(file, path)
    if base.norm != "rmsnorm":
        raise BadInput(f"{path} has norm={base.norm}; CoupledNorm takes the place of rmsnorm")
    if cfg.keep != "auto" and cfg.keep >= base.n_layer:
        raise BadInput(f"keep={cfg.keep} leaves none of the {base.n_layer} blocks of {path} to couple")
    T = min(cfg.window, base.block_size)
    data_folder = corpus_folder(cfg.data)
    corpus, train, val = open_corpus(data_folder, T)
    refuse_other_tokens(corpus, data_folder, file["meta"].get("corpus", {}), path)
    with whole_folder(Path(cfg.out).resolve()) as folder:
        file["state"] = {name: t.to(device) for name, t in file["state"].items()}
        network = plain(file, path).to(device)
        apart = corpus.get("block_size", 1)
        starts = spread_starts(len(train), T, cfg.tokens, apart)
        count, few, tokens = len(starts), max(1, AT_ONCE // T), torch.from_numpy(train)
        batches = (windows(tokens, starts[i : i + few], T, device)[0] for i in range(0, count, few))
        with progress("measuring", [network], count * T):
            rms, own = stream_rms(network, batches)
        found = compare(file, path, network, own, cfg, torch.from_numpy(val), apart)
        choice = keep, alpha = chosen({c: d.kl for c, (_, d) in found.items()}, cfg)
        how = f"the fewest blocks whose KL is within {WITHIN:.0%} of the least, and with them the best alpha"
        said = (
            f"{count} x {T} tokens of {corpus['source']}. Written: {keep} blocks kept, alpha {alpha}. What is"
        )
        said += f" not named is chosen by the table below: {how}."
        tables = [rms_table(rms, own), said, choices_table(found, choice)]
        original = next(iter(found.values()))[1].before
        tables.append(f"Before any training; the original's cross-entropy is {original:.4f} nats a token.")
        print("\n\n".join(tables))

        alphas = found[choice][0]
        student = coupled(file, path, keep, alphas).cpu()
        how = {"alpha": alphas.tolist(), "kept": keep, "from": str(path)}
        corpus_of = {"tokenizer_sha256": corpus["tokenizer_sha256"], "tokenizer": corpus["tokenizer"]}
        meta = {**student.meta, "corpus": student.meta.get("corpus", corpus_of), "coupled": how}
        write_file(student.to_file(meta), folder / "model.pt")
        for name, content in load_tokenizer(data_folder / corpus["tokenizer"]).files.items():
            with atomic_write(folder / name) as f:
                f.write(content)
        figures, settings = Figures(folder), " ".join(f"{k}={v}" for k, v in asdict(cfg).items())
        shown = draw(figures, rms, own, keep)
        figures.write("couple.md", [f"# {words[0]} with CoupledNorm", settings, *tables, shown])
        with atomic_write(folder / "couple.json", "w") as f:
            f.write(json.dumps(as_json(rms, own, found, choice), indent=1) + "\n")
    distil = f"python train.py --init_from={cfg.out} --teacher={words[0]} --adapter=dora --dataset={cfg.data}"
    print(f"wrote {cfg.out}\nnext: {distil}")


if __name__ == "__main__":
    with one_line_errors():
        main()
