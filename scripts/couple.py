"""A trained network with CoupledNorm in place of RMSNorm: measured, calibrated, written, and not yet trained.

    python scripts/couple.py out/llama_tiny --data=tinystories --out=out/llama_tiny_coupled
    python train.py --init_from=out/llama_tiny_coupled --teacher=out/llama_tiny --adapter=dora \\
        --dataset=tinystories --out_dir=out/llama_tiny_distilled        # and back to what it could do

PATH is a run folder, a model file, a Hugging Face folder or a hub id, of a network with RMSNorm. A block's
MLP then divides by alpha r(x) where it divided by r(h): x and h are the stream before attention and before
the MLP, r their RMS; alpha goes into the gain of the MLP's norm. --alpha=layer is a block's own: the one for
which alpha^2 r(x)^2 / r(h)^2 is least far from 1, in squares, over all positions but the first, where r
differs. mean is their mean over the coupled blocks, one for the network, as in the paper (CoupledNorm, 5.3).
floor gives a block a second number: its MLP divides by alpha sqrt(r(x)^2 + floor), fitted alike. No choice
adds a reduction. The first --keep blocks keep RMSNorm, where the stream jumps. What is left open is chosen by
what is measured: the fewest kept blocks whose KL is within a tenth of the least in the table, and with them
the alpha of the least KL.

Prints the RMS by block, and how far each choice is from the original before anything is trained. Writes a
folder: model.pt, the tokenizer, couple.md with the same tables, couple.json with their numbers, and rms.png
(needs matplotlib).
"""

import shlex
import sys
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from begin import begun_from, untapered  # not found? pip install -e .
from config import Config
from data import corpus_folder, open_corpus, refuse_other_tokens, write_tokenizer
from data.sampling import spread_starts, windows
from data.tokenizer import load_tokenizer
from forms import config_of
from model import ModelConfig, RMSNorm, Transformer
from nanonorm.cli import parse
from nanonorm.divergence import Divergence, divergences
from nanonorm.errors import BadInput, exit_on_signals, one_line_errors
from nanonorm.files import phase_and_gates, write_file, write_json
from nanonorm.machine import keep_freed_memory, pick_device
from nanonorm.residual import watched
from nanonorm.run import given_weights
from nanonorm.tables import markdown
from nanonorm.typed import Count, Positive, Several, Whole
from scripts.convert import whole_folder
from scripts.studies.figures import Figures

LINES = (("before attention", "#0072B2", "-"), ("before the MLP", "#D55E00", "--"))
WITHIN = 0.1  # of the least KL, whose standard error on 2,048 tokens of text was 4 to 7% (SmolLM2-135M)
KEPT = (0, 1, 2, 4)  # numbers of kept blocks in the table of choices
AT_ONCE = 2048  # tokens in one forward pass


@dataclass
class Couple:
    """What is made of the network, and on which text it is measured."""

    out: str | None = None  # the folder to make
    data: str | None = None  # a folder under data/, or the path of a prepared corpus, in the network's tokens
    # one for all blocks, one each, one each and a floor, 1, this number; auto: of the first three, by the KL
    alpha: Literal["auto", "mean", "layer", "floor", "none"] | Positive = "auto"
    keep: Literal["auto"] | Whole = "auto"  # first blocks that keep RMSNorm; auto: as few as the KL allows
    tokens: Count = 16_384  # of training text, that are measured
    window: Several = 512  # tokens of a window, at most the network's context
    compared: Count = 2048  # of validation text, on which the choices are compared
    device: str = "auto"  # cpu, cuda, ...


# ---------------------------------------------------------------------------------------------------------
# measured


@torch.no_grad()
def measure(model: Transformer, batches) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(the stream's mean r before attention and before the MLP of each block, (2, n_layer, 2): at the first
    position of a window, and over all later ones; {"layer", "floor": the (alpha, floor) of each block, (2,
    n_layer); "ratio": the same, alpha as the mean of r(h)/r(x)}), in float64. batches: ids (B, T)."""
    n_layer, norm = model.config.n_layer, RMSNorm(model.config.n_embd, model.config.norm_eps)
    sums, tokens = torch.zeros(2, n_layer, 2, dtype=torch.float64), torch.zeros(2, 1, 1)
    products = torch.zeros(n_layer, 3, 3, dtype=torch.float64)  # of the terms of a r(x)^2 + b = r(h)^2
    ratios = torch.zeros(n_layer, dtype=torch.float64)  # sums of r(h)/r(x)

    def see(i, *stream):
        r = torch.stack([norm.inverse(h).reciprocal().double()[..., 0] for h in stream])  # (2, B, T)
        sums[:, i] += torch.stack((r[..., 0].sum(1), r[..., 1:].sum((1, 2)))).cpu()
        x, h = r[..., 1:].square().flatten(1)
        terms = torch.stack((x / h, 1 / h, torch.ones_like(h)))
        products[i] += (terms @ terms.T).cpu()
        ratios[i] += (h / x).sqrt().sum().cpu()

    with watched(model, see):
        for idx in batches:
            model(idx, last_only=True)
            tokens += torch.tensor([len(idx), idx.numel() - len(idx)]).view(2, 1, 1)
    if not products.isfinite().all():
        raise BadInput("the network's stream is not finite on this text, and no scale can be fitted to it")
    ways = {"layer": False, "floor": True}
    own = {way: torch.stack([fit(p, of) for p in products], 1) for way, of in ways.items()}
    own["ratio"] = torch.stack((ratios / tokens[1, 0], torch.zeros_like(ratios)))
    return sums / tokens, own


def fit(products, floor: bool) -> torch.Tensor:
    """(alpha, floor) of least squares, with a floor of 0 where it is not wanted, or would be below. products:
    (3, 3), sums over tokens of those of r(x)^2 / r(h)^2, 1 / r(h)^2 and 1."""
    n = 2 if floor else 1
    size = products.diagonal()[:n].sqrt()
    gram = products[:n, :n] / size / size[:, None]
    a, b = F.pad(torch.linalg.pinv(gram, rtol=1e-9) @ (products[:n, 2] / size) / size, (0, 2 - n))
    return fit(products, False) if b < 0 or a <= 0 else torch.stack((a.sqrt(), b / a))


def numbers_of(own: dict[str, torch.Tensor], keep: int, alpha: str | float) -> torch.Tensor:
    """(alpha, floor) of every coupled block, (2, L - keep). own: of all blocks, as measure() has it."""
    numbers = own.get(alpha, own["layer"])[:, keep:].clone()
    if alpha not in own:
        numbers[0] = {"mean": numbers[0].mean(), "none": 1.0}.get(alpha, alpha)
    return numbers


def chosen(kls: dict[tuple, float], cfg: Couple) -> tuple:
    """The (kept blocks, alpha) to write, of those that `cfg` leaves open. kls: {(kept, alpha): KL}."""
    left = {c: kl for c, kl in kls.items() if cfg.keep in ("auto", c[0]) and cfg.alpha in ("auto", c[1])}
    left = {choice: kl for choice, kl in left.items() if isfinite(kl)}
    if not left:
        raise BadInput("of no choice is the KL to the original finite: is the network damaged?")
    least = min(left.values())
    near = [c for c, kl in left.items() if kl - least <= WITHIN * abs(least)]
    return min(near, key=lambda c: (c[0], left[c]))


# ---------------------------------------------------------------------------------------------------------
# coupled


def whole_rmsnorm(file: dict, path: Path) -> ModelConfig:
    """The architecture of a file whose norms CoupledNorm can take the place of. Raises: BadInput."""
    base = config_of(file, path)
    if base.norm != "rmsnorm":
        raise BadInput(f"{path} has norm={base.norm}; CoupledNorm takes the place of rmsnorm")
    if base.norm_eps > 1:
        raise BadInput(f"{path} has norms that only scale: eps is {base.norm_eps:.0e}; name its original")
    if base.taper != "none" and (base.form != "trained" or phase_and_gates(file, path)[0] != "norm"):
        raise BadInput(f"{path} has begun to taper; CoupledNorm takes the place of norms that are whole")
    return base


def coupled(file: dict, path: Path, keep: int, numbers) -> Transformer:
    """The network of a file with CoupledNorm from block `keep` on; all but the gains of the MLPs' norms are
    the file's own tensors. numbers: as numbers_of has them. Raises: BadInput, ModelError."""
    base, floored = config_of(file, path), bool(numbers[1].any())
    of_norm = {"norm": "coupled", "coupled_from_layer": keep, "coupled_floor": floored}
    asked = Config(block_size=base.block_size, **of_norm)
    explicit = {*of_norm, "block_size", "taper", "aux_weight"}
    config = asked.started_from(file, explicit, str(path)).model_config()
    state = dict(file["state"])
    for i, (alpha, floor) in enumerate(numbers.T.tolist(), keep):
        name = f"blocks.{i}.norm_mlp.weight"
        state[name] = (state[name].double() / alpha).to(state[name].dtype)
        if floored:
            state[f"blocks.{i}.floor"] = torch.tensor(floor).to(state[name])
    return begun_from({**file, "state": state}, config, path)


def every_choice(own, cfg: Couple) -> dict:
    """{(kept blocks, alpha): its numbers} of all that are compared. own: as measure() has it."""
    kept = sorted({*KEPT, *{cfg.keep} - {"auto"}})
    ways = dict.fromkeys(("mean", "layer", "floor", *{cfg.alpha} - {"auto"}))
    n_layer = own["layer"].shape[1]
    return {(k, alpha): numbers_of(own, k, alpha) for k in kept if k < n_layer for alpha in ways}


def compare(file: dict, path: Path, before: Transformer, choices: dict, val, stride: int, cfg) -> dict:
    """{(kept blocks, way): (its numbers, Divergence)} of `choices`, as every_choice has them, on windows from
    all of `val` that begin at multiples of `stride`. before: the original, which runs once; cfg: the
    `window`, and the tokens `compared`."""
    device, T = before.tok_emb.weight.device, min(cfg.window, before.config.longest_text, len(val) - 1)
    x, y = windows(val, spread_starts(len(val), T, cfg.compared, stride), T, device)
    afters = [coupled(file, path, k, numbers).to(device) for (k, _), numbers in choices.items()]
    for after in afters:
        after.rope = before.rope  # of a long context the largest tensor that they do not share
    pairs = tqdm(list(zip(x.split(1), y.split(1), strict=True)), "comparing", disable=None)
    found = divergences(before, afters, pairs)
    return {choice: (choices[choice], d) for choice, d in zip(choices, found, strict=True)}


# ---------------------------------------------------------------------------------------------------------
# told


def rms_table(rms, own: dict[str, torch.Tensor]) -> str:
    head = ["block", "before attention", "before the MLP", "alpha", "with a floor", "floor / r(x)^2"]
    rows = []
    per_block = zip(*rms.tolist(), own["layer"][0].tolist(), *own["floor"].tolist(), strict=True)
    for i, (first, later, alpha, beside, floor) in enumerate(per_block):
        numbers = (*later, alpha, beside, floor / later[0] ** 2, *first)
        rows.append([i, *(f"{v:.4g}" for v in numbers)])
    return markdown(rows, [*head, "first position", "before its MLP"])


def choices_table(found: dict[tuple, tuple[torch.Tensor, Divergence]], choice: tuple) -> str:
    head = ["kept", "alpha", "its values", "cross-entropy", "more than the original's"]
    rows = []
    for (kept, alpha), (numbers, d) in found.items():
        low, high = numbers[0].min().item(), numbers[0].max().item()
        values = f"{low:.4f}" if low == high else f"{low:.4f} to {high:.4f}"
        told = f"{d.after:.4f}", f"{d.after - d.before:+.4f}", f"{d.kl:.5f}"
        rows.append([kept, alpha, values, *told, "written" if (kept, alpha) == choice else ""])
    return markdown(rows, [*head, "KL to the original", ""])


def as_json(rms, own, found: dict[tuple, tuple[torch.Tensor, Divergence]], choice: tuple) -> dict:
    """What couple.json holds. rms: by position (first, later), block, place (attention's input, MLP's); own:
    alphas and floors by block."""
    choices = []
    for (kept, alpha), ((alphas, floors), d) in found.items():
        of_choice = {"kept": kept, "alpha": alpha, "alphas": alphas.tolist(), "floors": floors.tolist()}
        choices.append(of_choice | {"original": d.before, "cross_entropy": d.after, "kl": d.kl})
    of_blocks = {way: own[way].tolist() for way in ("layer", "floor")}
    return {"rms": rms.tolist(), "own": of_blocks, "written": choice, "choices": choices}


def draw(figures: Figures, rms, own, keep: int) -> str:
    """The stream by block, the first position apart, and the alphas; returns its markdown."""
    fig, axes = figures.axes(1, 3, 2.4)
    blocks = np.arange(rms.shape[1])
    for ax, title, values in zip(axes, ("first position", "later positions"), rms.numpy(), strict=False):
        for (name, colour, line), of_place in zip(LINES, values.T, strict=True):
            ax.plot(blocks, of_place, line, color=colour, marker="o", markersize=3, label=name)
        figures.log_scale(ax, values.min() / 1.5, values.max() * 1.5)
        ax.set(xlabel="block", ylabel="RMS of the stream", title=title)
    axes[2].plot(blocks, own["layer"][0], color="#000000", marker="o", markersize=3)
    axes[2].axvspan(-0.5, keep - 0.5, color="#999999", alpha=0.3 if keep else 0)
    axes[2].set(xlabel="block", ylabel="alpha", title="grey: kept blocks")
    for ax in axes:
        ax.xaxis.get_major_locator().set_params(integer=True)
    return figures.save(fig, "rms", axes[0])


def main():
    cfg, _, words = parse(Couple, sys.argv[1:], usage=__doc__)
    if len(words) != 1 or cfg.out is None or cfg.data is None:
        example = "python scripts/couple.py PATH --data=tinystories --out=DIR"
        raise BadInput(f"name a network, a prepared corpus and a folder to make: {example}")
    exit_on_signals()
    keep_freed_memory()
    device = pick_device(cfg.device)
    file, path = given_weights(words[0])
    base = whole_rmsnorm(file, path)
    if cfg.keep != "auto" and cfg.keep >= base.n_layer:
        raise BadInput(f"keep={cfg.keep} leaves none of the {base.n_layer} blocks of {path} to couple")
    T = min(cfg.window, base.longest_text)
    data_folder = corpus_folder(cfg.data)
    corpus, train, val = open_corpus(data_folder, T, base.ahead)
    refuse_other_tokens(corpus, data_folder, file["meta"].get("corpus", {}), path)
    with whole_folder(Path(cfg.out).resolve()) as folder:
        figures = Figures(folder)  # asks for matplotlib now, and not after minutes
        file["state"] = {name: t.to(device) for name, t in file["state"].items()}
        network = untapered(file, path, base.block_size, base.sink_token).to(device)
        stride = corpus.get("block_size", 1)
        starts = spread_starts(len(train), T, cfg.tokens, stride)
        count, few, tokens = len(starts), max(1, AT_ONCE // T), torch.from_numpy(train)
        firsts = tqdm(range(0, count, few), "measuring", disable=None)
        rms, own = measure(network, (windows(tokens, starts[i : i + few], T, device)[0] for i in firsts))
        found = compare(file, path, network, every_choice(own, cfg), torch.from_numpy(val), stride, cfg)
        choice = keep, alpha = chosen({c: d.kl for c, (_, d) in found.items()}, cfg)
        how = f"the fewest blocks whose KL is within {WITHIN:.0%} of the least, and with them the best alpha"
        said = f"{count} x {T} tokens of {corpus['source']}. Written: {keep} blocks kept, alpha {alpha}."
        said += f" What is not named is chosen by the table below: {how}."
        tables = [rms_table(rms, own), said, choices_table(found, choice)]
        original = next(iter(found.values()))[1].before
        tables.append(f"Before any training; the original's cross-entropy is {original:.4f} nats a token.")
        print("\n\n".join(tables))

        numbers = found[choice][0]
        student = coupled(file, path, keep, numbers).cpu()
        how = dict(zip(("alpha", "floor"), numbers.tolist(), strict=True)) | {"kept": keep, "from": str(path)}
        corpus_of = {"tokenizer_sha256": corpus["tokenizer_sha256"], "tokenizer": corpus["tokenizer"]}
        meta = {**student.meta, "corpus": student.meta.get("corpus", corpus_of), "coupled": how}
        write_file(student.to_file(meta), folder / "model.pt")
        write_tokenizer(folder, load_tokenizer(data_folder / corpus["tokenizer"]), again=False)
        settings = " ".join(f"{k}={v}" for k, v in asdict(cfg).items())
        shown = draw(figures, rms, own, keep)
        figures.write("couple.md", [f"# {words[0]} with CoupledNorm", settings, *tables, shown])
        write_json(folder / "couple.json", as_json(rms, own, found, choice), indent=1)
    block = corpus.get("block_size", min(1024, student.config.block_size))  # else it has to be named
    distil = ["train.py", f"--init_from={cfg.out}", f"--teacher={words[0]}", "--adapter=dora"]
    distil += ["--coupled_grad=True", f"--dataset={cfg.data}", f"--block_size={block}"]
    print(f"wrote {cfg.out}\nnext: {shlex.join(['python', *distil])}")


if __name__ == "__main__":
    with one_line_errors():
        main()
