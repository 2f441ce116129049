"""How much of a card's memory a run would take: counted on tensors without values, with no card.

    python scripts/plan.py config/distill_qwen_8b.py --ranks=2 --shard=True
    python scripts/plan.py config/gpt2.py:xl_fakeln --memory=48

Config files and flags are train.py's. Weights are read for their shapes alone; those that are named in SHAPES
need not be there. Prints bytes by card: what stays (weights, averages), what a step adds at its peak, and
whether all of it fits.

Counted: every tensor that a run keeps, what autograd keeps of a micro-batch, the largest pieces of logits and
of gathered weights. Not counted: CUDA and its libraries, the allocator's gaps, and what an operator uses for
itself; a tenth of the card is left for those. These are counts, not measurements, and with grad_checkpoint an
upper bound: a block's activations are added to the logits, though they come when these are gone.
"""

import copy
import math
import sys
import warnings
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from begin import begun_from, refuse_few_ids, untapered  # not found? pip install -e .
from config import Config
from data import Manifest, corpus_folder
from data.sampling import SHARE
from forms import config_of, skeleton
from model import NORMS, ModelConfig, Transformer, rope_tables
from nanonorm.adapters import learning, put_on
from nanonorm.cli import parse, print_report
from nanonorm.distill import Distilled, share_weights
from nanonorm.errors import BadInput, one_line_errors
from nanonorm.families import FAMILIES, architecture_of, to_ours
from nanonorm.files import json_object
from nanonorm.hub import find, is_pretrained, read_config
from nanonorm.kernels import LOGITS_AT_ONCE, WHOLE_LOGITS, turned_off
from nanonorm.log import say
from nanonorm.machine import refuse_beside_eight_bits
from nanonorm.run import beginning_in, open_model
from nanonorm.typed import Count, Positive

LEFT = 0.1  # of a card
_gpt2 = {"vocab_size": 50_257, "block_size": 1024, "positions": "learned", "mlp": "gelu", "bias": True,
         "norm": "layernorm", "norm_eps": 1e-5}  # fmt: skip
_llama3 = {"rope_base": 500_000.0, "rope_scaling": (32.0, 1.0, 4.0, 8192.0), "norm_eps": 1e-5}
_llama = {"vocab_size": 128_256, "block_size": 131_072, "n_kv_head": 8, "hidden": 8192} | _llama3
_qwen = {"vocab_size": 151_936, "block_size": 40_960, "n_kv_head": 8, "head_dim": 128, "qk_norm": True,
         "rope_base": 1e6}  # fmt: skip
_qwen_8b = _qwen | {"hidden": 12_288, "tie_embeddings": False}
_smollm2 = {"vocab_size": 49_152, "block_size": 8192, "n_kv_head": 3, "hidden": 1536, "rope_base": 1e5,
            "norm_eps": 1e-5}  # fmt: skip
SHAPES = {  # weights -> layers, width, heads and the rest
    "gpt2": (12, 768, 12, _gpt2), "gpt2-medium": (24, 1024, 16, _gpt2),
    "gpt2-large": (36, 1280, 20, _gpt2), "gpt2-xl": (48, 1600, 25, _gpt2),
    "meta-llama/Llama-3.2-1B-Instruct": (16, 2048, 32, _llama),
    "meta-llama/Llama-3.2-3B-Instruct": (28, 3072, 24, _llama),
    "HuggingFaceTB/SmolLM2-135M-Instruct": (30, 576, 9, _smollm2),
    "Qwen/Qwen3-0.6B": (28, 1024, 16, _qwen | {"hidden": 3072}),
    "Qwen/Qwen3-1.7B": (28, 2048, 16, _qwen | {"hidden": 6144}),
    "Qwen/Qwen3-8B": (36, 4096, 32, _qwen_8b),
}  # fmt: skip


@dataclass
class Plan(Config):
    """A training run, and the cards it is to run on."""

    ranks: Count = 1  # cards, all of one size
    memory: Positive = 80.0  # of one, GB (1e9 bytes)


class Part(NamedTuple):
    """Of a card's memory: what, bytes, and how many numbers that is over all cards (0: not counted so)."""

    name: str
    bytes: int
    numbers: int = 0


def shape_of(name: str | None) -> ModelConfig | None:
    """The architecture of weights in SHAPES."""
    if name not in SHAPES:
        return None
    n_layer, n_embd, n_head, rest = SHAPES[name]
    return ModelConfig(n_layer=n_layer, n_embd=n_embd, n_head=n_head, **rest)


def hollow_file(name: str, teacher: str | None = None) -> dict:
    """The file of some weights, without values; where there is none yet, what scripts/couple.py makes of the
    teacher. Raises: BadInput, ModelError."""
    config, of_teacher = shape_of(name), shape_of(teacher)
    if config is None and of_teacher is not None and not Path(name).exists():
        say(f"{name} is not there yet: counted as {teacher} with norm=coupled but for its first block")
        config = replace(of_teacher, norm="coupled", coupled_from_layer=1)
    elif config is None:
        path = find(name, weights=False)
        if is_pretrained(path) and path.is_dir():
            keys = read_config(path)
            config = ModelConfig(**to_ours(keys, FAMILIES[architecture_of(keys, path)], path))
        else:
            config = config_of(*open_model(path, hollow=True))
    return {"config": asdict(config), "state": skeleton(config, name, trains=True).state_dict(), "meta": {}}


def corpus_of(dataset: str) -> Manifest | None:
    """What is known of a corpus, None where it is not prepared. Raises: BadInput."""
    path = corpus_folder(dataset) / "meta.json"
    try:
        return Manifest.model_validate(json_object(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        raise BadInput(f"{path} describes no corpus to train on; prepare it again, or name another") from None


def trained(asked: Config, explicit: set[str]) -> tuple[Config, Transformer, torch.nn.Module]:
    """(settings, the network that trains, the module that is called) of a run, on the meta device, in the
    types that begin.make_trained gives them."""
    teacher = None
    if asked.init_from == "scratch":
        corpus, cfg = corpus_of(asked.dataset), asked.resolve()
        if corpus:
            refuse_few_ids(cfg, corpus.vocab_size, corpus_folder(asked.dataset))
        shape = cfg.model_config(corpus.vocab_size if corpus else None)
        model = skeleton(shape, "this run", trains=True)
    else:
        file = hollow_file(asked.init_from, asked.teacher)
        cfg = asked.started_from(file, explicit, asked.init_from).resolve()
        model = begun_from(file, cfg.model_config(), asked.init_from)
    dtype = number_type(cfg)
    wide = torch.promote_types(dtype, torch.float32)
    narrow = wide if cfg.adapter == "none" else dtype
    if cfg.teacher is not None:
        teacher = untapered(hollow_file(cfg.teacher), cfg.teacher, cfg.block_size, cfg.sink_token)
        if cfg.adapter != "none":
            share_weights(model, teacher, f"start it from {cfg.teacher}")
    for network in (model, teacher) if teacher is not None else (model,):
        network._apply(lambda t: t.to(narrow if t.dim() >= 2 else wide))
    if cfg.adapter != "none":
        with torch.device("meta"):
            put_on(model, cfg.adapter, cfg.adapter_rank, cfg.adapter_alpha, cfg.adapter_targets)
    return cfg, model, model if teacher is None else Distilled(model, teacher, {})


def number_type(cfg: Config) -> torch.dtype:
    """The type that a GPU would compute in."""
    return torch.bfloat16 if cfg.dtype == "auto" else getattr(torch, cfg.dtype)


def share_of(p: torch.Tensor, cfg: Plan) -> int:
    """Bytes of a parameter on one card: in a sharded run a matrix's rows, rounded up."""
    rows = math.ceil(len(p) / cfg.ranks) if cfg.shard and p.dim() >= 2 else None
    return p.nbytes if rows is None else rows * p[0].nbytes


def in_eight_bits(p: torch.Tensor) -> int:
    """Bytes of one of its averages: torchao has a scale for 256 numbers, and leaves what is small alone."""
    n = p.numel()
    return n + n // 256 * 4 if n >= 4096 and n % 256 == 0 else 4 * n


def total(name: str, parameters, cfg: Plan, factor: int = 1) -> Part:
    parameters = list(parameters)
    numbers = sum(p.numel() for p in parameters)
    return Part(name, factor * sum(share_of(p, cfg) for p in parameters), factor * numbers)


def fake(model: Transformer, narrow: torch.dtype | None):
    """Have a model's tensors be of a CPU, still without values, matrices of type `narrow`. To be called under
    a FakeTensorMode."""
    for part in model.modules():
        for name, p in part.named_parameters(recurse=False):
            empty = torch.empty(p.shape, dtype=narrow if narrow and p.dim() >= 2 else p.dtype)
            part.register_parameter(name, torch.nn.Parameter(empty, requires_grad=p.requires_grad))
        for name, b in part.named_buffers(recurse=False):
            part.register_buffer(name, torch.empty(b.shape, dtype=b.dtype))
    model.rope = rope_tables(model.config, "cpu")
    model.bind_gates()


def kept_for_backward(cfg: Plan, model: Transformer) -> tuple[int, int]:
    """Bytes that autograd keeps of a micro-batch's stream on a GPU, (of one block, of all), without
    checkpointing."""
    config, dtype = model.config, number_type(cfg)
    ours, sizes, seen = set(), {}, []

    def keep(t):
        storage = t.untyped_storage()
        if storage._cdata not in ours:
            sizes[storage._cdata] = storage.nbytes()
            kept.append(t)  # else another may be given its place
        return t

    autocast = torch.autocast("cpu", dtype) if dtype == torch.bfloat16 else nullcontext()
    kept = []
    # gathered in that type, which the row "gathered" counts; else autocast makes copies, and keeps them
    narrow = dtype if cfg.shard and not NORMS[config.norm].centred else None
    model = copy.deepcopy(model).train()
    if model.taper_norms():
        model.set_phase("blend")  # the phase that keeps most: norms and fixed scalings
    for block in model.blocks:
        block.attn.dropout = 0.0  # a GPU's attention draws it again; a CPU's keeps T x T weights
    with FakeTensorMode(), turned_off(), warnings.catch_warnings(action="ignore"):  # torch's, on mixed types
        fake(model, narrow)
        ours |= {p.untyped_storage()._cdata for p in model.parameters()}
        ids = torch.zeros(cfg.batch_size, config.longest_text, dtype=torch.long)
        model.blocks[-1].register_forward_pre_hook(lambda *_: seen.append(sum(sizes.values())))
        with autocast, torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            model.stream(ids)
    return sum(sizes.values()) - seen[-1], sum(sizes.values())


def parts_of(cfg: Plan, model: Transformer, module) -> list[Part]:
    """What one card holds."""
    config, learns = model.config, list(learning(model).values())
    taught = [] if module is model else list(module.teacher.parameters())
    of_teacher, learned = {id(p) for p in taught}, {id(p) for p in learns}
    own = [p for p in model.parameters() if id(p) not in of_teacher | learned]
    weights = "weights" if cfg.adapter == "none" else "adapters"
    # ranks that are not sharded add micro-batches up beside the buckets that the last one sends
    accumulates = cfg.ranks > 1 and not cfg.shard and cfg.gradient_accumulation_steps > cfg.ranks
    parts = [total(weights, learns, cfg), total("gradients", learns, cfg, 2 if accumulates else 1)]
    averages = total("AdamW's averages", learns, cfg, 2)
    if cfg.optimizer == "adamw_8bit":
        averages = averages._replace(bytes=2 * sum(map(in_eight_bits, learns)))
    parts.append(averages)
    if own:
        parts.append(total("frozen, its own", own, cfg))
    if taught:
        shared = "" if cfg.adapter == "none" else ", the student's base"
        parts.append(total(f"teacher{shared}", taught, cfg))
    narrow = number_type(cfg).itemsize
    if cfg.shard:
        block = sum(p.numel() for p in model.blocks[-1].parameters() if p.dim() >= 2)
        networks = [model] if module is model else [model, module.teacher]
        inside = {id(p) for network in networks for p in network.blocks.parameters()}
        outside = [p for p in {*model.parameters(), *taught} if p.dim() >= 2 and id(p) not in inside]
        tables = sum(p.nbytes for p in outside)
        learned_tables = sum(p.numel() for p in set(outside) & set(learns))
        of_block = sum(p.numel() for p in learning(model.blocks[-1]).values() if p.requires_grad)
        # two blocks, the next one being fetched, the gradient of one in float32; the tables and theirs
        parts.append(Part("gathered", narrow * 2 * block + tables + 4 * (of_block + learned_tables)))
    of_block, of_all = kept_for_backward(cfg, model)
    stream = cfg.batch_size * config.block_size * config.n_embd * 4
    activations = config.n_layer * stream + of_block if cfg.grad_checkpoint else of_all
    parts.append(Part("activations", activations))
    tokens, V = cfg.batch_size * config.block_size, config.vocab_size
    head = model.head()[0]
    whole = V * tokens <= (LOGITS_AT_ONCE if taught else WHOLE_LOGITS)
    # log-probabilities and a gradient, beside the teacher's; whole, those of torch's two operators
    pieces = 3 if taught or whole else 2
    in_float32 = 4 * head.numel() if not whole and head.requires_grad else 0  # the head's gradient
    parts.append(Part("logits", pieces * 4 * (V * tokens if whole else max(V, LOGITS_AT_ONCE)) + in_float32))
    if corpus := corpus_of(cfg.dataset):
        size = (corpus.train_tokens + corpus.val_tokens) * int(corpus.dtype[-1])
        steady = sum(part.bytes for part in parts if part.numbers)
        there = size <= SHARE * (cfg.memory * 1e9 * (1 - LEFT) - steady)
        parts.append(Part("corpus" if there else "corpus, on the host", size if there else 0))
    else:
        parts.append(Part("corpus, not prepared", 0))
    return parts


def main():
    asked, explicit, files = parse(Plan, sys.argv[1:], files=True, usage=__doc__)
    if asked.init_from == "resume":
        raise BadInput("--init_from=resume: name the run's own config and flags, and what it began from")
    if asked.init_from == "auto":
        asked.init_from = beginning_in(files, Plan)
    if asked.ranks > 1 and asked.gradient_accumulation_steps % asked.ranks:
        steps = f"gradient_accumulation_steps={asked.gradient_accumulation_steps}"
        raise BadInput(f"{steps} must be a multiple of the {asked.ranks} ranks")
    if asked.optimizer == "adamw_8bit":
        refuse_beside_eight_bits(asked)
    cfg, model, module = trained(asked, explicit)
    parts = parts_of(cfg, model, module)
    size, room = sum(part.bytes for part in parts), cfg.memory * 1e9 * (1 - LEFT)
    how = "sharded" if cfg.shard else "each with all of it"
    how = f"{cfg.ranks} cards, {how}" if cfg.ranks > 1 else "1 card"
    print(f"{how}; {cfg.batch_size} x {model.config.block_size} tokens a micro-batch; GB of one card")
    for part in parts:
        numbers = f"   of {part.numbers / 1e6:,.1f} M numbers in all" if part.numbers else ""
        print(f"{part.name:28} {part.bytes / 1e9:8.2f}{numbers}")
    fits = "fits in" if size <= room else "does not fit in"
    print(f"{'together':28} {size / 1e9:8.2f}   {fits} {room / 1e9:g} of {cfg.memory:g} GB")
    print_report({"parts": {part.name: part.bytes for part in parts}, "bytes": size, "fits": size <= room})


if __name__ == "__main__":
    with one_line_errors():
        main()
