"""What a run trains: new weights, those of a file, or a student beside its teacher; and, in words, how far
that is from what it began with.

A file may hold any form of a network. With all its norms it begins as a plain one, which may be given other
norms and a taper. Where a taper is over, or an export has taken norms away, the network goes on in the form
that it has: what is gone stays gone, and nothing is calibrated or gated.
"""

from contextlib import nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path

import torch

from data import corpus_folder, is_text_of, open_corpus, refuse_other_tokens
from data.sampling import few_windows
from data.tokenizer import load_tokenizer
from forms import begun_as, config_of, from_file, skeleton, unfuse
from model import ModelConfig, Transformer, rope_tables
from nanonorm.adapters import load_adapters, put_on
from nanonorm.distill import Distilled, fingerprint, share_weights
from nanonorm.divergence import divergence
from nanonorm.errors import BadInput, ModelError
from nanonorm.files import phase_and_gates, thin
from nanonorm.knobs import off
from nanonorm.machine import autocast, versions
from nanonorm.rotary import ROTARY_ANGLES
from nanonorm.run import Beginning, given_weights, refuse_to_write_over
from nanonorm.scale import refuse_loose_tensors


def make_trained(start: Beginning, corpus: dict, data_folder: Path, dtype, hollow: bool = False):
    """(the Transformer that trains, the module that is called for its losses), on the CPU: one and the same,
    or with a teacher a Distilled of the two networks. hollow: without the values of matrices, which another
    rank has. Raises: BadInput."""
    cfg, wide = start.settings, torch.promote_types(dtype, torch.float32)
    if hollow and start.file is not None:
        start.file["state"] = thin(start.file["state"])
    teacher = make_teacher(start, hollow)
    model = make_model(start, corpus, data_folder, hollow)
    if start.file is not None and other_norm(model, start) is None:
        start.file["state"] = {}  # so that what the network lets go of is free
    model.end_token = corpus.get("end_token_id")
    if teacher is None:
        return with_rope(model.to(wide)), model
    teacher_id = teacher.meta["id"]
    if start.source is None and str(start.given) != teacher_id["path"]:
        refuse_other_tokens(corpus, data_folder, teacher.meta.get("corpus", {}), Path(teacher_id["path"]))
    if model.config.vocab_size != teacher.config.vocab_size:
        sizes = f"{model.config.vocab_size} token ids, {cfg.teacher} {teacher.config.vocab_size}"
        raise BadInput(f"the student has {sizes}; a teacher and its student need the same")
    narrow = wide
    if cfg.adapter != "none":  # what is frozen is read in `dtype` alone, so it is kept in that
        remedy = f"start it from {cfg.teacher}, or from what scripts/couple.py made of that"
        share_weights(model, teacher, remedy)
        narrow = dtype
    for network in (model, teacher):
        network._apply(lambda t: t.to(narrow if t.dim() >= 2 else wide))
    if cfg.adapter != "none":
        torch.manual_seed(cfg.seed)
        put_on(model, cfg.adapter, cfg.adapter_rank, cfg.adapter_alpha, cfg.adapter_targets)
        if start.source is not None:
            load_adapters(model, start.file.get("adapters"), start.source, spread="parts" in start.file)
    pair = with_rope(model), with_rope(teacher)
    return model, Distilled(*pair, teacher_id, cfg.ce_weight, cfg.kl_weight)


def with_rope(model: Transformer) -> Transformer:
    """A network on the CPU, with its rotary tables even where its matrices are on the meta device."""
    model.rope = rope_tables(model.config, "cpu")
    return model


def refuse_few_ids(cfg, needed: int, data_folder: Path):
    """Raises: BadInput for a network that has fewer token ids than its corpus needs."""
    if (cfg.vocab_size or needed) < needed:
        below = f"vocab_size={cfg.vocab_size} is below the {needed} of {data_folder}"
        raise BadInput(f"{below}; leave it out or raise it" if cfg.init_from == "scratch" else below)


def corpus_of(start: Beginning) -> Path:
    """The folder of a run's corpus. A resumed run may name it anew where it has moved. Raises: BadInput for
    another text, before that would be prepared."""
    cfg, folder = start.settings, corpus_folder(start.settings.dataset)
    if start.source is None or folder == corpus_folder(began := start.file["run"].dataset):
        return folder
    recorded, same = start.file["meta"].get("corpus", {}), False
    if "train_sha256" in recorded and (folder / "meta.json").exists():
        same = is_text_of(open_corpus(folder, cfg.longest_text, cfg.ahead)[0], recorded)
    if not same:
        run = f"with which the run in {cfg.out_dir} began"
        remedy = "leave it out, name where that text is now, or name another out_dir"
        raise BadInput(f"dataset={cfg.dataset} is not the text of {began}, {run}; {remedy}")
    return folder


def make_model(start: Beginning, corpus: dict, data_folder: Path, hollow: bool) -> Transformer:
    """New weights, the same on every rank, or the file's. Raises: BadInput if its corpus is another, or lacks
    what the run needs, and for floors that nothing would train; ModelError for a tensor that no file would
    hold."""
    cfg = start.settings
    needs_end = {"mask_end": cfg.mask_end, "anchor_target": cfg.anchor_target == "batch"}
    for knob in (knob for knob, needs in needs_end.items() if needs and corpus.get("end_token_id") is None):
        lacks = f"{knob}={getattr(cfg, knob)} needs end_token_id, which {data_folder / 'meta.json'} lacks"
        raise BadInput(f"{lacks}; prepare the corpus again, or leave {knob} out")
    refuse_few_ids(cfg, corpus["vocab_size"], data_folder)
    config = cfg.model_config(corpus["vocab_size"])
    torch.manual_seed(cfg.seed)
    if start.file is None:
        with torch.device("meta") if hollow else nullcontext():
            model = Transformer(config)
        refuse_loose_tensors(model)
        return model
    if start.given is not None:
        refuse_other_tokens(corpus, data_folder, start.file["meta"].get("corpus", {}), start.given)
        had = config_of(start.file, start.given)
        trained = had.coupled_floor and had.coupled_from_layer <= cfg.coupled_from_layer
        if cfg.adapter != "none" and cfg.coupled_floor and not trained:
            remedy = "start from what scripts/couple.py --alpha=floor made, or use adapter=none"
            raise BadInput(f"coupled_floor=True: adapters would leave the floors at 0; {remedy}")
        return begun_from(start.file, config, start.given)
    model = from_file(start.file, start.source)
    config = skeleton(config, start.source, trains=True).config  # without what only begun weights had
    if model.config != config or not is_text_of(corpus, model.meta.get("corpus", {})):
        began = f"is not the corpus that the run in {cfg.out_dir} began with"
        raise BadInput(f"{data_folder} {began}; restore it, or start anew in another out_dir")
    return model


def make_teacher(start: Beginning, hollow: bool) -> Transformer | None:
    """The network to learn from, if there is one, in its file's type; a checkpoint of adapters gets the
    tensors that it left out. Raises: BadInput."""
    cfg = start.settings
    if cfg.teacher is None:
        return None
    file, path = given_weights(cfg.teacher, hollow)
    refuse_to_write_over(path, cfg.out_dir)
    longest = config_of(file, path).block_size
    if longest < cfg.block_size:
        raise BadInput(f"block_size={cfg.block_size} is longer than the {longest} of {path}")
    sha256 = None if hollow else fingerprint(file["state"])
    teacher = untapered(file, path, cfg.block_size, cfg.sink_token)
    teacher.meta["id"] = {"path": str(path), "sha256": sha256}
    if start.source is not None:
        recorded = start.file["meta"].get("teacher")
        if not isinstance(recorded, dict) or recorded.get("sha256") != (sha256 or recorded.get("sha256")):
            began = f"is not the teacher that the run in {cfg.out_dir} began with"
            raise BadInput(f"{path} {began}; name that one with --teacher=")
        if "adapters" in start.file:
            matrix = teacher.tok_emb.weight.dtype  # its file's; the checkpoint's were narrowed to train
            own = {n: t.to(matrix) if t.dim() >= 2 else t for n, t in start.file["state"].items()}
            start.file["state"] = teacher.state_dict() | own
    return teacher


def odd_sink(sink_token: int | None, tokenizer: Path) -> list[str]:
    """What to say of a sink that is not the begin token of the corpus's tokenizer, where that names one."""
    if sink_token is None:
        return []
    begin = None
    with suppress(BadInput):  # its vocabulary may lack the one that it names
        begin = load_tokenizer(tokenizer).special_id("bos_token")
    if begin in (None, sink_token):
        return []
    return [f"sink_token={sink_token} is not the begin token of {tokenizer}, which is {begin}"]


# of trackers, and what begins with a taper
EMAS = ("ema_num", "ema_den", "ema_s", "ema_log_s", "ema_limited", "ema_count")
TRACKED = ("weight_tilde", "c", *EMAS, "target")


def begun_from(file: dict, config: ModelConfig, path) -> Transformer:
    """The network of `file` with the norm, taper, dropout, anchor and (shorter) context of `config`, in its
    form: with its norms, nothing tapered and nothing calibrated yet; a taper that is over as `unfused`. Its
    tensors are the file's own. Raises: ModelError."""
    if config.form == "unfused" and config_of(file, path).form == "trained":
        file = unfuse(from_file(file, path)).to_file(file["meta"])
    wanted = skeleton(config, path, trains=True).state_dict()
    state = {name: t for name, t in file["state"].items() if name.rpartition(".")[2] not in TRACKED}
    for name in {"sink_k", "sink_v"} & state.keys() - wanted.keys():
        del state[name]  # the norms are there, and give them again
    if floors := sorted(name for name in state.keys() - wanted.keys() if name.endswith(".floor")):
        kept = f"coupled_floor={config.coupled_floor} and coupled_from_layer={config.coupled_from_layer}"
        raise ModelError(f"{path} has {floors[0]}, for which {kept} leave no place; leave them out")
    for name in wanted.keys() - state.keys():
        if name.endswith("weight_tilde"):
            if (gain := name.removesuffix("_tilde")) in state:
                state[name] = state[gain].clone()
        elif name.rpartition(".")[2] in (*TRACKED, "floor"):
            state[name] = torch.tensor(1.0 if name.endswith(".c") else 0.0)
    if "pos_emb.weight" in wanted.keys() & state.keys():
        state["pos_emb.weight"] = state["pos_emb.weight"][: config.block_size].clone()
    meta = {k: v for k, v in file["meta"].items() if k in ("base", "corpus", "format")}
    begun = {"config": asdict(config), "state": state, "meta": meta, "run": {}}  # run: as a checkpoint's
    return from_file(begun, path)


def untapered(file: dict, path, block_size: int, sink_token: int | None = None) -> Transformer:
    """The network of a file with its plain norms, or without those that are gone, a context of `block_size`
    at most its own, and `sink_token` in front of each text, which to a network with norms is one more token.
    Raises: BadInput in the middle of a taper; ModelError."""
    base = begun_as(config_of(file, path), *phase_and_gates(file, path), path)
    choices = ("taper", "aux_weight", "site_weight") if base.form == "trained" else ("aux_weight",)
    plain = off(ModelConfig, *choices) | {"block_size": block_size}
    if base.sink_token is None and base.form == "trained":
        plain["sink_token"] = sink_token
    elif base.sink_token != sink_token:
        differs = f"sink_token={sink_token} differs from {base.sink_token} of {path}"
        raise BadInput(f"{differs}, which is {base.form}; give weights that have the same")
    return begun_from(file, replace(base, **plain), path)


def provenance(model: Transformer, corpus: dict, device, dtype, ranks: int) -> dict:
    """What a run's files say of where they come from: the text, the versions, and what the weights were."""
    code = versions(device) | {"dtype": str(dtype).removeprefix("torch."), "ranks": ranks}
    code |= {"rotary angles": ROTARY_ANGLES} if model.config.positions == "rope" else {}
    names = ("tokenizer_sha256", "train_sha256", "val_sha256", "vocab_size", "source", "tokenizer")
    of_weights = {"base": model.meta["base"]} if "base" in model.meta else {}
    return {"corpus": {name: corpus[name] for name in names}, "versions": code, **of_weights}


# ---------------------------------------------------------------------------------------------------------
# in words


def other_norm(model: Transformer, start: Beginning) -> str | None:
    """The knob that gives a network without a teacher another norm than the weights it begins from, or
    puts CoupledNorm into other blocks; None if none does."""
    if start.given is None or start.settings.teacher is not None:
        return None
    before = ModelConfig(**start.file["config"])
    knobs = ("norm", "coupled_from_layer")
    return next((name for name in knobs if getattr(model.config, name) != getattr(before, name)), None)


def change_of(model: Transformer, start: Beginning, val_tokens) -> list[str]:
    """How far a network begun with another norm is from the one it was begun from; nothing of any other."""
    knob = other_norm(model, start)
    if knob is None:
        return []
    base = config_of(start.file, start.given)
    c = model.config
    before = untapered(start.file, start.given, c.block_size, c.sink_token).to(model.tok_emb.weight.dtype)
    x, y = few_windows(val_tokens, model.config)
    found = divergence(before, model.eval(), zip(x.split(1), y.split(1), strict=True))
    norms = f"{knob}={getattr(c, knob)} in place of {getattr(base, knob)} moves the network by"
    return [f"{norms}: {found}, on {len(x)} x {x.shape[1]} tokens of the validation split"]


def distance_of(pair: Distilled, start: Beginning, val_tokens, device, dtype) -> list[str]:
    """How far a student that begins is from its teacher, its norms on as they are then; nothing of any other
    network."""
    if start.settings.teacher is None or start.source is not None:
        return []
    student = pair.student.eval()
    torch.nn.ModuleList(student.taper_norms().values()).train()
    x, y = (t.to(device) for t in few_windows(val_tokens, student.config))
    with autocast(device, dtype):
        found = divergence(pair.teacher, student, zip(x.split(1), y.split(1), strict=True))
    pair.train()
    return [f"from teacher to student: {found}, on {len(x)} x {x.shape[1]} tokens of the validation split"]
