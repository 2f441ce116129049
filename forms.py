"""What becomes of a trained network: unfused, folded, weightless; how, and the proof; model files.

A form is the same function in other modules: `unfused` writes what is left of a tapered norm as an explicit
scaling, `folded` moves everything linear that stands before a matrix product into the matrix, `weightless`
the gains and shifts of the norms that stay as well. `proved` compares a form with the network it came from.
Shapes: B batch, T time, D width, V vocabulary.
"""

import copy
from dataclasses import replace
from functools import partial

import torch
import torch.nn as nn

from model import (
    NORMS,
    Attention,
    Block,
    CentredEmbedding,
    CentredLinear,
    ModelConfig,
    Scaling,
    Taper,
    Transformer,
    Variant,
    rope_tables,
)
from nanonorm.adapters import refuse_unmerged
from nanonorm.errors import BadInput, ModelError
from nanonorm.files import check_state, phase_and_gates, read_file
from nanonorm.knobs import changed
from nanonorm.scale import drop_held
from nanonorm.sink import store_sink, text_calls

IN_TRAINING = {"site_weight": 0.0, "taper_ceiling": None}  # and what a site loss brings
AT_ONCE = 1 << 24  # numbers of a large matrix in float64: 128 MiB


def types_of(model: nn.Module) -> list[torch.dtype]:
    """The types of a model's weights, the widest first."""
    return sorted({p.dtype for p in model.parameters()}, key=lambda t: -torch.finfo(t).bits)


def by_rows(table, change) -> torch.Tensor:
    """change(rows) of a large table (out, in), in float64 and cast back."""
    new = torch.empty_like(table)
    rows = max(1, AT_ONCE // table.shape[1])
    for to, piece in zip(new.split(rows), table.detach().split(rows), strict=True):
        to.copy_(change(piece.double()))
    return new


def with_factor(table: nn.Embedding, factor) -> nn.Embedding:
    """The same table (V, D), times a 0-dim factor."""
    rows = by_rows(table.weight, lambda rows: rows * factor.double())
    return type(table).from_pretrained(rows, freeze=False)


# ---------------------------------------------------------------------------------------------------------
# folding: everything linear that stands before a matrix product moves into the matrix, part by part (a block,
# or the final norm with some rows of the head), so that float64 never holds more than one of them


def absorb(norm: nn.Module, linear: nn.Linear, gains: bool, rows=None) -> nn.Module:
    """Move the linear part of `norm` into the layer that reads it; returns what is left of the norm.

    y = core(h) * gain + shift read by W:  W <- W diag(gain), b <- b + W shift, and a centring of h becomes
    W <- W (I - 11'/D). `rows` (out, 1) then multiplies what W writes, bias and all.
    """
    core, gain, shift, centre = norm.factor(gains)
    W, b = linear.weight.data, None if linear.bias is None else linear.bias.data
    if shift is not None:
        b = W @ shift.data + (0 if b is None else b)
    if gain is not None:
        W = W * gain.data
    if centre:
        W = W - W.mean(1, keepdim=True)
    if rows is not None:
        W, b = W * rows, None if b is None else b * rows[:, 0]
    linear.weight, linear.bias = nn.Parameter(W), None if b is None else nn.Parameter(b)
    return core


def take_out_scaling(attn: Attention):
    """Remove the norms of queries and keys if they are scalings at gate 0. Returns what the rows of qkv are
    to be multiplied by in their place, ((H + 2K) C, 1), or None."""
    if not isinstance(attn.norm_q, Taper | Scaling):
        return None
    q, k = (norm.factor(gains=False)[1].detach() for norm in (attn.norm_q, attn.norm_k))
    attn.norm_q = attn.norm_k = None
    K = attn.n_kv_head
    return torch.cat((q.repeat(attn.n_head), k.repeat(K), torch.ones_like(k).repeat(K))).unsqueeze(1)


def fold_part(part: nn.Module, gains: bool):
    """Fold the norms of a Block or an Output into the layers that read them, in place."""
    if isinstance(part, Output):
        part.norm = absorb(part.norm, part.linear, gains)
        return
    rows = take_out_scaling(part.attn)
    part.norm_attn = absorb(part.norm_attn, part.attn.qkv, gains, rows)
    part.norm_mlp = absorb(part.norm_mlp, part.mlp.reader, gains)


def uncentred(layer: CentredLinear | CentredEmbedding) -> nn.Linear | nn.Embedding:
    """The plain layer whose weights are what CBWC's writes with."""
    if isinstance(layer, CentredEmbedding):
        table = by_rows(layer.weight, lambda rows: rows - rows.mean(1, keepdim=True))
        return nn.Embedding.from_pretrained(table, freeze=False)
    linear = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
    weight, bias = layer.centred()
    linear.weight, linear.bias = nn.Parameter(weight), None if bias is None else nn.Parameter(bias)
    return linear


class Output(nn.Module):
    """The final norm, and some rows of the output head: (B, T, D) -> (B, T, rows)."""

    def __init__(self, norm: nn.Module, weight, bias):
        super().__init__()
        self.norm = norm
        self.linear = nn.Linear(*reversed(weight.shape), bias=False, device="meta")
        self.linear.weight = nn.Parameter(weight)
        self.linear.bias = None if bias is None else nn.Parameter(bias)

    def forward(self, x):
        return self.linear(self.norm(x))


def outputs(model: Transformer) -> list[Output]:
    """The final norm and all rows of the head, in views of at most AT_ONCE numbers."""
    weight, bias = (None if t is None else t.detach() for t in model.head())
    weights = weight.split(max(1, AT_ONCE // weight.shape[1]))
    biases = [None] * len(weights) if bias is None else bias.split(len(weights[0]))
    return [Output(model.norm_final, *piece) for piece in zip(weights, biases, strict=True)]


def reformed(part: nn.Module, form: str) -> nn.Module:
    """A copy of a Block or an Output in another form, in eval mode: changed in float64, cast back once. It
    shares the tensors that come out as they were."""
    old = dict(part.named_parameters())
    room = {name: torch.empty_like(p) for name, p in old.items()}  # first, or what is freed leaves holes
    new = copy.deepcopy(part).double()
    drop_held(new)
    if form == "unfused":
        changed = {name: m.at_zero() for name, m in new.named_modules() if isinstance(m, Taper)}
    else:
        fold_part(new, gains=form == "weightless")
        changed = {name: uncentred(m) for name, m in new.named_modules() if isinstance(m, CentredLinear)}
    for name, module in changed.items():
        new.set_submodule(name, module)
    for name, p in list(new.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        was, p = old.get(name), p.detach()
        p = p.to(old[f"{owner}.weight"].dtype) if was is None else room.pop(name).copy_(p)
        same = was is not None and not p.is_meta and torch.equal(p, was)
        setattr(new.get_submodule(owner), leaf, nn.Parameter(was.detach() if same else p))
    for name, buffer in [(n, part.get_buffer(n)) for n, _ in new.named_buffers()]:
        owner, _, leaf = name.rpartition(".")
        setattr(new.get_submodule(owner), leaf, buffer)
    return new.eval()


@torch.no_grad()
def transformed(model: Transformer, form: str) -> Transformer:
    """The model in another form, in eval mode and without the anchor. What the form does not change is
    shared with `model`, which is left alone."""
    shared = {id(p): nn.Parameter(p.detach()) for p in model.parameters()} | {id(model.rope): model.rope}
    new, folds = copy.deepcopy(model, shared), form != "unfused"
    new.anchor = None
    drop_held(new)
    new.blocks = nn.ModuleList(reformed(block, form) for block in model.blocks)
    weight, bias = (None if t is None else t.detach() for t in model.head())
    tip = reformed(Output(model.norm_final, weight[:1], None if bias is None else bias[:1]), form)
    new.norm_final = tip.norm
    of_norm = model.norm_final.factor(form == "weightless")[1:] if folds else ()
    if any(part is not None and part is not False for part in of_norm):  # then the head changes
        bias = None if tip.linear.bias is None else weight.new_empty(len(weight))
        new.lm_head = Output(tip.norm, torch.empty_like(weight), bias).linear
        for to, piece in zip(outputs(new), outputs(model), strict=True):
            linear = reformed(piece, form).linear
            to.linear.weight.copy_(linear.weight)
            if bias is not None:
                to.linear.bias.copy_(linear.bias)
    elif model.emb_scale is not None or (folds and isinstance(model.tok_emb, CentredEmbedding)):
        new.lm_head = Output(tip.norm, weight, bias).linear
    if model.emb_scale is not None:
        new.tok_emb, new.emb_scale = with_factor(model.tok_emb, model.emb_scale), None
    for name in ("tok_emb", "pos_emb"):
        if folds and isinstance(getattr(new, name), CentredEmbedding):
            setattr(new, name, uncentred(getattr(new, name)))
    config = changed(model.config, tie_embeddings=new.lm_head is None, emb_scale=None, **IN_TRAINING)
    new.config = replace(config, form=form)
    store_sink(model, new)
    return new.eval()


def fold(model: Transformer, gains: bool = False) -> Transformer:
    """A plain model with the same logits: tapered norms at g = 0 are gone, CBWC's weights are centred for
    good, CoupledNorm keeps one bare statistic a block. `gains` moves the gains and shifts of the norms that
    stay into the layers that read them as well. A tied head that changes is untied. `model` itself is left
    alone, and shares the tensors that the fold does not change; hooks on its norms do not come along."""
    refuse_unmerged(model)
    return transformed(model, "weightless" if gains else "folded")


def unfuse(model: Transformer) -> Transformer:
    """The model with every tapered norm as an explicit scaling (`Scaling`); it shares all other tensors."""
    return transformed(model, "unfused")


def changed_by_fold(variant: Variant) -> bool:
    """Whether a fold changes a network without a taper."""
    return variant.centred or variant.block is not Block


def export_files(config: ModelConfig) -> dict[str, str]:
    """{file name: form} that a finished run writes: two where folding changes the network, else one. A run
    begun from a folded or weightless network keeps that form."""
    if config.form == "folded":
        return {"folded.pt": "folded"}
    if config.form == "weightless":
        return {"model.pt": "weightless"}
    changes = config.taper != "none" or changed_by_fold(NORMS[config.norm])
    return {"unfused.pt": "unfused", "folded.pt": "folded"} if changes else {"model.pt": "unfused"}


FORMS = {"trained": lambda m: m, "unfused": unfuse, "folded": fold, "weightless": partial(fold, gains=True)}

# Largest |logit difference| over largest |logit|: float64 shows that the algebra is exact; in the model's own
# type two orders of summation differ by rounding, which grows with depth (seen: 1e-6 in float32 at 8 layers).
FOLD_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 1e-1}


@torch.no_grad()
def first_stream(model: Transformer, idx, dtype: torch.dtype, form: str = "trained"):
    """What `model`, its tables brought to `form`, embeds idx (B, T) as, computed in `dtype`. (B, T, D)"""
    positions = torch.arange(idx.shape[1], device=idx.device) + model.config.ahead
    x, tables = 0, ((model.tok_emb, idx, model.emb_scale), (model.pos_emb, positions, None))
    for table, ids, factor in tables:
        if table is not None:
            small = type(table).from_pretrained(table.weight[ids.flatten()].to(dtype))  # a few rows
            if factor is not None and form != "trained":
                small, factor = with_factor(small, factor), None
            if form not in ("trained", "unfused") and isinstance(small, CentredEmbedding):
                small = uncentred(small)
            found = small(torch.arange(ids.numel(), device=idx.device)).view(*ids.shape, -1)
            x = x + (found if factor is None else found * factor.to(dtype))
    return x


@torch.no_grad()
def fold_error(model: Transformer, form: str, idx, dtype: torch.dtype) -> float:
    """max |logits(FORMS[form](model)) - logits(model)| / max |logits(model)| in `dtype` on idx (B, T), on the
    CPU and part by part. In another type than the model's own the parts are cast first, then folded."""
    own = dtype in types_of(model)
    new = FORMS[form](model) if own else model

    def both(part, changed):
        exact = copy.deepcopy(part).to(dtype).eval()
        return exact, copy.deepcopy(changed).to(dtype).eval() if own else reformed(exact, form)

    x = first_stream(model, idx, dtype)
    y = first_stream(new, idx, dtype, form)
    rope = None if model.rope is None else model.rope[:, model.config.ahead :][:, : idx.shape[1]]
    calls = text_calls(model, dtype), text_calls(new, dtype)
    for *parts, kv, kv_changed in zip(model.blocks, new.blocks, *calls, strict=True):
        exact, changed = both(*parts)
        x, y = exact(x, rope, kv), changed(y, rope, kv_changed)
    differences, scales = [], []
    for parts in zip(outputs(model), outputs(new), strict=True):
        exact, changed = both(*parts)
        logits = exact(x)
        differences.append((changed(y) - logits).abs().max())
        scales.append(logits.abs().max())
    return (torch.stack(differences).max() / torch.stack(scales).max()).item()


def proved(model: Transformer, form: str, idx) -> tuple[Transformer, dict[str, float]]:
    """(FORMS[form](model), {dtype: its fold_error on idx (B, T)}), in float64 and in the model's own type: of
    several the widest, held to what the narrowest can do. Raises: ModelError if an error is not finite or
    exceeds FOLD_TOLERANCE."""
    errors, types = {}, types_of(model)
    for dtype, limit in ((torch.float64, torch.float64), (types[0], types[-1])):
        name = str(dtype).removeprefix("torch.")
        errors[name] = fold_error(model, form, idx, dtype)
        if not errors[name] <= FOLD_TOLERANCE[limit]:
            off = f"differs from the trained one by {errors[name]:.1e} of the logit scale"
            if errors[name] != errors[name]:  # nan
                off = "cannot be compared with the trained one: logits are not finite, or all 0,"
            raise ModelError(f"the {form} model {off} in {name}; not exported")
    return FORMS[form](model), errors


# ---------------------------------------------------------------------------------------------------------
# files


def load_model(path, device="cpu") -> Transformer:
    """The model of any file this project writes, in eval mode on `device`; its `meta` is the file's.

    Raises: ModelError, one line, for a file that is missing, cut short, foreign, or does not fit its config.
    """
    return from_file(read_file(path), path).to(device)


def from_file(file: dict, path="file") -> Transformer:
    """The same from what read_file(path) returned; the tensors are the file's own, not copies."""
    config, (phase, gates) = config_of(file, path), phase_and_gates(file, path)
    model = skeleton(config, path, trains="run" in file or "anchor.ema_count" in file["state"])
    check_state(file["state"], model.state_dict(), path)
    if len(gates) not in (1, len(model.gate)):
        raise ModelError(f"{path} does not fit its config: {len(gates)} gates in place of {len(model.gate)}")
    model.load_state_dict(file["state"], assign=True)
    model.fill_buffers()
    model.rope = rope_tables(config, "cpu")
    model.meta = file["meta"]
    model.bind_gates()
    model.gate.copy_(torch.tensor(gates, device="cpu"))
    model.set_phase(phase)
    return model.eval()


def begun_as(base: ModelConfig, phase: str, gates: list[float], where: str) -> ModelConfig:
    """The architecture that a run has, or a teacher, which begins as the network of a file: a taper that is
    over is unfused, its norms being scalings. Raises: BadInput in the middle of a taper."""
    if base.taper == "none" and base.form == "unfused":
        return replace(base, form="trained")  # nothing was unfused
    if base.taper == "none" or base.form != "trained" or phase == "norm":
        return base
    if max(gates) > 0:
        middle = f"is in the middle of its taper (gates up to {max(gates):.2g})"
        raise BadInput(f"{where} {middle}; start from weights from before or after it")
    return replace(changed(base, **IN_TRAINING), form="unfused")


def config_of(file: dict, path) -> ModelConfig:
    """The architecture that a file says it holds. Raises: ModelError if its tensors contradict it."""
    try:
        config = ModelConfig(**file["config"])
    except (TypeError, ModelError) as e:
        raise ModelError(f"{path} holds a config that this version cannot use: {e}") from None
    table, theirs = (config.vocab_size, config.n_embd), file["state"].get("tok_emb.weight")
    if config.n_layer > len(file["state"]) or theirs is None or theirs.shape != table:
        raise ModelError(f"{path} does not fit its config: other shapes")  # before they are made
    return config


def skeleton(config: ModelConfig, path, trains: bool = False) -> Transformer:
    """A model without values, on the meta device. One that `trains`, as a checkpoint's does, has its anchor
    in every form; an export has none. Raises: ModelError if no memory could hold it."""
    try:
        with torch.device("meta"):
            trained = Transformer(replace(config, form="trained"))
            model = FORMS[config.form](trained)
            model.anchor = trained.anchor if trains or config.form == "trained" else None
            return model
    except RuntimeError as e:
        raise ModelError(f"{path} holds a config that this version cannot use: {e}") from None
