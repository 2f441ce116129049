"""Which LayerNorms of a network can be RMSNorm without changing the function, and the network rewritten so.

LayerNorm is RMSNorm of what is left when the mean is gone, and RMSNorm needs no mean where its input has
none. The paper ("Enjoy your Layer Normalization with the computational efficiency of RMSNorm", arXiv
2605.14521) centres the weights of the layers that write that input. Its printed algorithm marks zero-mean
tensors in one forward pass, which is unsound: it takes a LayerNorm's output for centred and does not ask who
else reads a value. Here:

    find    torch.export gives the graph (graph.py). From each LayerNorm walk back: what must be centred for
            its input to be? An addition asks both terms, a matrix product its weight (rules.py); a parameter
            can be edited. Forward from each centred value: who reads it? A LayerNorm over the same elements
            does not see the difference; an addition hands it on; any other reader (a head, an output of the
            model, an activation) forbids it. Where weights cannot do it an explicit centring operation may be
            inserted. Which LayerNorms to fold with which operations is a minimum cut (search.py): a LayerNorm
            is worth 1, an operation costs `op_cost`.
    fold    edit the module, prove it in float64, in float32 if its code takes no other (on the inputs given;
            on random gains, shifts, biases and inputs; on another batch size and length), or refuse and leave
            the model alone.
    center  the same for training: the parameters stay as they are, the forward pass sees them centred.

A fold holds for the outputs that `outputs` selects and for inputs that take the same path through the code as
the example did. What the example does not run (a returned hidden state, another head) is not examined.
"""

import contextlib
import copy
import functools
import inspect
import itertools
import math
import time
from collections.abc import Callable

import torch
import torch.nn as nn
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_map_only

from nanonorm.errors import BadInput
from nanonorm.foldable.graph import (
    Graph,
    InDouble,
    SearchOptions,
    Selected,
    first_tensor,
    is_plain_layer_norm,
    names_of,
    rms_norm_over,
    split_inputs,
    tensor_at,
)
from nanonorm.foldable.rules import Spot, centred
from nanonorm.foldable.search import FoldReport, Search

# Of the largest output. Rounding through a dozen layers stays below 1e-12 and 1e-5, wrong folds above 1e-4.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}


def find(
    model: nn.Module,
    example_inputs,
    *,
    outputs: Callable | None = None,
    untie: bool = False,
    allow_dropout: bool = False,
    absorb: bool = True,
    assume_centered_ln: bool = False,
    op_cost: float = 1.0,
) -> FoldReport:
    """Say which LayerNorms of `model` can be RMSNorm, and by which edits. It changes nothing.

    Args: model: on the meta device too; example_inputs: a tensor, a tuple of positional arguments or a dict
    of named ones; outputs: f(model output) -> what must be preserved (default: every tensor in it); untie: a
    table shared with a head gets a copy of its own; allow_dropout: ignore dropout in training mode, though it
    does break the zero mean; absorb: move LayerScale into the layer before it; assume_centered_ln: the
    paper's printed algorithm (a LayerNorm's output counts as zero-mean, readers are not asked, tables are not
    centred), which is unsound; op_cost: what an inserted centring operation costs, in LayerNorms.
    Raises: BadInput if torch.export cannot capture the model.
    """
    begin = time.perf_counter()
    options = SearchOptions(untie, allow_dropout, absorb, assume_centered_ln, op_cost)
    graph = Graph(model, example_inputs, outputs, options)
    report = Search(graph).solve()
    if report.folded < len(report.norms) and not assume_centered_ln:
        options.parts = True
        report = max(report, Search(graph).solve(), key=lambda found: found.folded)
    report.inputs, report.seconds = describe_inputs(example_inputs), time.perf_counter() - begin
    return report


def fold(
    model: nn.Module,
    example_inputs,
    *,
    inplace: bool = False,
    outputs: Callable | None = None,
    report: FoldReport | None = None,
    **options,
) -> tuple[nn.Module, FoldReport]:
    """Replace every foldable LayerNorm by an RMSNorm of the same gain and shift, and prove it.

    Args: as for find(); inplace: edit `model` itself instead of a copy; report: what find() returned, to save
    the search. The proof needs memory for one copy of the model in float64.
    Returns: (model, report with `errors`, relative to the largest output, in the precision `proved_in`). With
    assume_centered_ln the fold is that of the printed algorithm: its errors are measured and nothing is
    refused.
    Raises: BadInput if the proof fails (an error above TOLERANCE) or cannot be run (meta tensors, a model
    that does not run again); `model` is then untouched.
    """
    if report is not None and (unread := options.keys() - {"assume_centered_ln"}):
        raise BadInput(f"with a report {min(unread)} is not read: it is an option of find()")
    report = report or find(model, example_inputs, outputs=outputs, **options)
    if any(t.is_meta for t in model.parameters()):
        raise BadInput("a model on the meta device has no values to fold; use find(), which needs none")
    prove(model, example_inputs, report, outputs)
    if not report.certified and not options.get("assume_centered_ln"):
        kind, worst = max(report.errors.items(), key=lambda item: item[1])
        why = f"the fold changes the outputs by {worst:.1e} of the largest one ({kind})"
        raise BadInput(f"{why}; nothing was changed")
    model = model if inplace else copy.deepcopy(model)
    apply_report(model, report)
    return model, report


def center(model: nn.Module, report: FoldReport, *, allow_dropout: bool = False) -> nn.Module:
    """Replace LayerNorm by RMSNorm in a model that is to be trained (CBWC): parametrizations centre the
    producers in the forward pass.

    Edits `model` in place and returns it; make the optimizer afterwards. With the same optimizer it trains as
    the LayerNorm model does: the gradient of a centred weight is centred, and so is LayerNorm's. At the end
    `torch.nn.utils.parametrize.remove_parametrizations(module, name)` makes the centred weight the parameter.
    Raises: BadInput for a report with absorbed LayerScale (find(..., absorb=False) makes one without), with
    untied tables, or with dropout on a centred stream: these would not train as the LayerNorm model does.
    """
    if report.absorb:
        why = f"{next(iter(report.absorb))} would move into the layer before it and not train"
        raise BadInput(f"{why}; use find(..., absorb=False)")
    if report.untied:
        why = f"{report.untied[0]} would get a copy of its own, to train apart"
        raise BadInput(f"{why}; use find(..., untie=False)")
    if report.dropout and not allow_dropout:
        why = f"dropout breaks the zero mean in training ({report.dropout[0]})"
        raise BadInput(f"{why}; set it to 0, or pass allow_dropout=True")
    apply_report(model, report, parametrized=True)
    return model


# ---------------------------------------------------------------------------------------------------------
# the edits


class RMSNormWithShift(nn.RMSNorm):
    """RMSNorm in place of an nn.LayerNorm over one dimension, with its parameters."""

    def __init__(self, norm: nn.LayerNorm, n: int, eps: float):
        super().__init__(n, eps, elementwise_affine=norm.weight is not None)
        self.weight, self.bias = norm.weight, norm.bias

    def forward(self, x):
        y = super().forward(x)
        return y if self.bias is None else y + self.bias


class RMSNormOver(nn.Module):
    """RMSNorm in place of any other norm: over groups, over channels, with a gain of two dimensions."""

    def __init__(self, norm: nn.Module, how: tuple):
        super().__init__()
        self.how = how
        self.weight, self.bias = getattr(norm, "weight", None), getattr(norm, "bias", None)

    def forward(self, x):
        return rms_norm_over(x, self, *self.how)


def rms_in_place_of(norm: nn.Module, *how) -> nn.Module:
    """The RMSNorm that `how` describes to rms_norm_over(), with the own parameters and hooks of `norm`."""
    _, n, _, eps, *_ = how
    new = RMSNormWithShift(norm, n, eps) if is_plain_layer_norm(norm) else RMSNormOver(norm, how)
    for kind in ("_forward_hooks", "_forward_pre_hooks"):
        for hooks in (kind, f"{kind}_with_kwargs"):
            setattr(new, hooks, getattr(norm, hooks))
    return new.train(norm.training)


class Centring(nn.Module):
    """Parametrization: the forward pass sees a centred parameter, the optimizer updates the uncentred one."""

    def __init__(self, spot: Spot):
        super().__init__()
        self.spot = spot

    def forward(self, x):
        return centred(x, self.spot)


def centre_output(module, args, output, *, spot: Spot):
    """Forward hook: centre the first tensor that the module returns."""
    if isinstance(output, torch.Tensor):
        return centred(output, spot)
    first, _ = first_tensor(output)
    return type(output)([*output[:first], centred(output[first], spot), *output[first + 1 :]])


def centre_input(module, args, kwargs, *, spot: Spot, key: int | str | None = None):
    """Forward pre-hook: centre argument `key`, given by position or by name, or the first tensor among the
    arguments."""
    args, kwargs = list(args), dict(kwargs)
    if key is None:
        key = next(k for k, _ in (first_tensor(args), first_tensor(kwargs)) if k is not None)
    elif isinstance(key, int) and key >= len(args):
        key = list(inspect.signature(module.forward).parameters)[key]
    elif isinstance(key, str) and key not in kwargs:
        key = list(inspect.signature(module.forward).parameters).index(key)
    arguments = args if isinstance(key, int) else kwargs
    arguments[key] = centred(arguments[key], spot)
    return tuple(args), kwargs


def set_member(model: nn.Module, name: str, member: nn.Module | nn.Parameter):
    """Assign to the attribute with this dotted name."""
    path, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(path), attribute, member)


@torch.no_grad()
def apply_report(model: nn.Module, report: FoldReport, parametrized: bool = False):
    """Edit `model` in place as `report` says, without a proof. The algebra is in float64, with one cast at
    the end. With `parametrized` the values stay, and are centred in the forward pass."""
    for name in report.untied:
        t = tensor_at(model, name)
        set_member(model, name, nn.Parameter(t.detach().clone(), t.requires_grad))
        if hasattr(getattr(model, "config", None), "tie_word_embeddings"):
            model.config.tie_word_embeddings = False
    scaled = absorb_gains(model, report)
    names = names_of(model)
    for name, spots in report.centre.items():
        t = tensor_at(model, name)
        if not parametrized:
            t.copy_(functools.reduce(centred, spots, scaled.pop(name, t.double())))
            continue
        for own_name, spot in itertools.product(names[id(t)], spots):
            path, _, attribute = own_name.rpartition(".")
            owner = model.get_submodule(path)
            parametrize.register_parametrization(owner, attribute, Centring(spot), unsafe=True)
    for name, t in scaled.items():
        tensor_at(model, name).copy_(t)
    for name, how in report.replace.items():
        set_member(model, name, rms_in_place_of(model.get_submodule(name), *how))
    for op in report.ops:
        module = model.get_submodule(op.module)
        if op.where == "output":
            module.register_forward_hook(functools.partial(centre_output, spot=op.spot))
        else:
            key = op.key if op.where == "argument" else None
            hook = functools.partial(centre_input, spot=op.spot, key=key)
            module.register_forward_pre_hook(hook, with_kwargs=True)


def absorb_gains(model: nn.Module, report: FoldReport) -> dict[str, torch.Tensor]:
    """Set each absorbed LayerScale to 1. Returns: {parameter: its value times the gains, in float64}."""
    scaled = {}
    for gain, targets in report.absorb.items():
        factor = tensor_at(model, gain)
        for name, axis in targets.items():
            t = tensor_at(model, name)
            shape = [1] * t.dim()
            shape[axis] = -1
            scaled[name] = scaled.get(name, t.double()) * factor.double().reshape(shape)
        factor.fill_(1)
    return scaled


# ---------------------------------------------------------------------------------------------------------
# the proof


def prove(model: nn.Module, inputs, report: FoldReport, outputs: Callable | None = None):
    """Measure what the fold changes and write it into the report: in float64, or in float32 if the model does
    not run in float64. Raises: BadInput if it runs in neither."""
    reasons = []
    for dtype, tolerance in TOLERANCE.items():
        try:
            report.errors = fold_errors(model, inputs, report, outputs, dtype)
        except Exception as e:
            reasons.append(f"{type(e).__name__}: {' '.join(str(e).split())[:300]}")
            continue
        why = f"float32, to {tolerance:.0e} (float64 fails: {reasons[0]})" if reasons else "float64"
        report.certified, report.proved_in = all(e <= tolerance for e in report.errors.values()), why
        return
    raise BadInput(f"the fold cannot be proved: {reasons[0]}; nothing was changed")


def fold_errors(model: nn.Module, inputs, report: FoldReport, outputs=None, dtype=torch.float64) -> dict:
    """Measure what the fold changes, computed in `dtype`, relative to the largest output.

    Returns: {"given": on the model and inputs as they are; "random": with gains, shifts, biases and inputs
    drawn at random; "other batch", "other length": such inputs with half the size along their first and
    second axis, since the graph is that of the example's sizes}. The last three are left out where the model
    does not run on them.
    """
    rng = torch.Generator().manual_seed(0)
    given = cast_inputs(inputs, dtype)
    twin = twin_of(model, dtype)
    errors = changes(twin, {"given": given}, report, outputs)
    del twin  # before there is a second one
    twin = perturb(twin_of(model, dtype), rng)
    drawn = shuffled(given, rng)
    trials = {"random": drawn, "other batch": resized(drawn, 0), "other length": resized(drawn, 1)}
    return errors | changes(twin, trials, report, outputs, may_fail=True)


def twin_of(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    twin = copy.deepcopy(model).eval()
    return twin.double() if dtype == torch.float64 else twin.float()


def changes(model: nn.Module, trials: dict, report: FoldReport, outputs, may_fail: bool = False) -> dict:
    """Run `model` on each trial's inputs, edit it in place, run it again. Returns: {trial: relative
    difference}; with `may_fail` it leaves out the trials on which the unedited model does not run."""
    want = {}
    for kind, data in trials.items():
        try:
            want[kind] = outputs_of(model, data, outputs)
        except Exception:
            if not may_fail:
                raise
    apply_report(model, report)
    got = {kind: outputs_of(model, trials[kind], outputs) for kind in want}
    return {kind: relative_difference(got[kind], want[kind]) for kind in want}


def outputs_of(model: nn.Module, inputs, outputs: Callable | None) -> list[torch.Tensor]:
    """The tensors that `outputs` selects from model(inputs), computed without gradients, and in float64 only
    if the parameters are in it."""
    args, kwargs = split_inputs(inputs)
    double = any(p.dtype == torch.float64 for p in model.parameters())
    with torch.no_grad(), InDouble() if double else contextlib.nullcontext():
        return Selected(model, outputs)(*args, **kwargs)


def relative_difference(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    """max |got - want| over max |want|, the worst of the outputs; infinite where only one of the two is
    finite, or where no output has a finite number. What would hide any error sets no scale but its own: a
    mask's fill value, -1e38, in elements that are equal, or beyond a thousand times the median."""
    worst, compared = 0.0, not want
    for a, b in zip(got, want, strict=True):
        if a.shape != b.shape or not torch.equal(torch.isfinite(a), torch.isfinite(b)):
            return math.inf
        a, b = a[torch.isfinite(a)].double(), b[torch.isfinite(b)].double()
        compared, moved = compared or a.numel() > 0, a != b
        if moved.any():
            error, size = (a - b)[moved].abs(), b[moved].abs().clamp(min=1e-300)
            usual = size[size > 1e-300]
            scale = size.max().clamp(max=1e3 * usual.median()) if len(usual) else size.max()
            worst = max(worst, (error / size.clamp(min=scale)).max().item())
    return worst if compared else math.inf


def perturb(model: nn.Module, rng: torch.Generator) -> nn.Module:
    """Add noise, in place, to every vector and to every tensor that is all 0. Fresh models have gain 1, shift
    0, bias 0, some a last matrix of 0, and with those a wrong fold can look right."""
    with torch.no_grad():
        for p in model.parameters():
            if p.is_floating_point() and (p.dim() < 2 or not p.any()):
                p += 0.3 * torch.randn(p.shape, generator=rng, dtype=torch.float64).to(p)
    return model


def cast_inputs(inputs, dtype: torch.dtype = torch.float64):
    """The inputs, with every floating point tensor in `dtype`."""

    return tree_map_only(torch.Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, inputs)


def shuffled(inputs, rng: torch.Generator):
    """Other inputs of the same kind: normal numbers, the same integers in another order, the same masks."""

    def other(x):
        if x.is_floating_point():
            return torch.randn(x.shape, generator=rng, dtype=torch.float64).to(x)
        if x.dtype == torch.bool:
            return x
        return x.flatten()[torch.randperm(x.numel(), generator=rng).to(x.device)].reshape(x.shape)

    return tree_map_only(torch.Tensor, other, inputs)


def resized(inputs, axis: int):
    """The inputs with every tensor half as long along `axis`, or twice as long where it was 1."""

    def other(x):
        if x.dim() <= axis:
            return x
        if x.shape[axis] == 1:
            return torch.cat([x, x], axis)
        return x.narrow(axis, 0, (x.shape[axis] + 1) // 2).clone()

    return tree_map_only(torch.Tensor, other, inputs)


def describe_inputs(inputs) -> str:
    """Name or position and shape of each argument: "input_ids (2, 9), mask (2, 9)"."""
    args, kwargs = split_inputs(inputs)
    parts = []
    for name, x in [*enumerate(args), *kwargs.items()]:
        what = tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
        parts.append(f"{name} {what}")
    return ", ".join(parts)
