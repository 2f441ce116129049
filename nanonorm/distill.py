"""A network learns from another: the divergence of their predictions in pieces, and the two as one module.

Shapes: B batch, T time, N = B T tokens, D width, V vocabulary.
"""

import hashlib
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

from nanonorm.adapters import ADAPTER, adapted, merge
from nanonorm.errors import BadInput
from nanonorm.kernels import NOT_COUNTED, in_pieces, is_watched, upcast

# ---------------------------------------------------------------------------------------------------------
# the loss


def distill_loss(y, head, taught, teacher_head, targets, ce_weight: float, kl_weight: float):
    """(ce_weight * cross-entropy + kl_weight * KL(teacher || student), cross-entropy, KL), 0-dim means over
    the tokens that count, in float32 or better, of which the first has a gradient, for the student alone.

    y, taught: what the output heads of student and teacher read, (B, T, D) each, of which D may differ; head,
    teacher_head: (weight (V, D), bias (V) or None), which may be one; targets: (B, T), of which NOT_COUNTED
    does not count; of none that counts all is 0. The temperature is 1. Of the (N, V) logits no more than
    kernels.LOGITS_AT_ONCE are ever held, nor their gradient.
    """
    teacher_head = (None if t is None else t.detach() for t in teacher_head)
    wants = torch.is_grad_enabled()
    flat, flat_taught = y.flatten(0, 1), taught.detach().flatten(0, 1)
    weights = (ce_weight, kl_weight)
    return in_pieces(flat, *head, flat_taught, *teacher_head, targets.flatten(), weights, wants)


def whole_distill_loss(logits, taught, targets, ce_weight: float, kl_weight: float):
    """distill_loss of the logits of both, (B, T, V) each, which are held whole."""
    student, teacher = (upcast(t).flatten(0, 1).log_softmax(-1) for t in (logits, taught.detach()))
    targets = targets.flatten()
    counts = targets != NOT_COUNTED  # (N)
    n = counts.sum().clamp_min(1)
    ce = F.nll_loss(student, targets, reduction="sum", ignore_index=NOT_COUNTED) / n
    kl = (teacher.exp() * (teacher - student)).sum(-1).where(counts, 0).sum() / n
    return ce_weight * ce + kl_weight * kl, ce.detach(), kl.detach()


# ---------------------------------------------------------------------------------------------------------
# student and teacher


class TaughtLosses(NamedTuple):
    """Of one batch, 0-dim: total = ce_weight ce + kl_weight kl + aux is what a step minimizes; ce: the
    student's cross-entropy; kl: KL to the teacher; aux: the student's scale loss. stream: the input of its
    final norm (B, T, D). Only total has a graph."""

    total: torch.Tensor
    ce: torch.Tensor
    aux: torch.Tensor
    stream: torch.Tensor
    kl: torch.Tensor


class Distilled(nn.Module):
    """The losses of a student that learns from a teacher, each a model.Transformer.

    A student's frozen parameters may be the teacher's own, and then both take the memory of one. `teacher_id`
    {"path", "sha256"} names the teacher in files.
    """

    def __init__(self, student, teacher, teacher_id: dict, ce_weight: float = 0.0, kl_weight: float = 1.0):
        super().__init__()
        self.student, self.teacher = student, teacher.requires_grad_(False).eval()
        self.teacher_id = teacher_id
        self.ce_weight, self.kl_weight = ce_weight, kl_weight

    def train(self, mode: bool = True):
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, idx, targets):
        """(B, T) each -> TaughtLosses"""
        student, teacher = self.student, self.teacher
        with torch.no_grad():
            taught = teacher.norm_final(teacher.stream(idx))
        x = student.stream(idx)
        y, weights = student.norm_final(x), (self.ce_weight, self.kl_weight)
        heads = [m.lm_head for m in (student, teacher) if m.lm_head is not None]
        if any(is_watched(head) for head in heads):  # a hook fires where its module is called
            loss, ce, kl = whole_distill_loss(student.logits(y), teacher.logits(taught), targets, *weights)
        else:
            loss, ce, kl = distill_loss(y, student.head(), taught, teacher.head(), targets, *weights)
        total, _, aux, stream = student.losses(x, loss, idx)
        return TaughtLosses(total, ce, aux, stream, kl)

    def to_file(self, meta: dict) -> dict:
        """What a checkpoint holds: of an adapted student what the teacher has not, the adapters apart."""
        file = self.student.to_file(meta | {"teacher": self.teacher_id})
        if not adapted(self.student):
            return file
        theirs = {id(p) for p in self.teacher.parameters()}
        left_out = {name for name, p in self.student.named_parameters() if id(p) in theirs}
        own = {name: t for name, t in file["state"].items() if name not in left_out}
        adapters = {name: own.pop(name) for name in list(own) if ADAPTER in name}
        own = {name.replace(".base_layer.", "."): t for name, t in own.items()}
        return file | {"state": own, "adapters": adapters}

    def plain(self) -> tuple[nn.Module, float]:
        """(the student with its adapters merged into its weights, all of it in the type in which it trained;
        how far off that is). The adapters are gone then, and the teacher is not to be used again: what both
        share was widened. Raises: ModelError."""
        self.student._apply(upcast)  # what is frozen in bfloat16 would round what adapters learned
        error = merge(self.student)
        return self.student.requires_grad_(True), error


def share_weights(student: nn.Module, teacher: nn.Module, remedy: str):
    """Make every parameter of `student` that equals the teacher's the teacher's own, in place. Gains and
    shifts may differ. Raises: BadInput, with the remedy, for a matrix that does."""
    theirs = dict(teacher.named_parameters())
    for name, p in list(student.named_parameters()):
        other = theirs.get(name)
        alike = other is not None and (p.dtype, p.shape) == (other.dtype, other.shape)
        if alike and (p.is_meta or torch.equal(p, other)):  # without values: the main rank has compared
            owner, _, leaf = name.rpartition(".")
            setattr(student.get_submodule(owner), leaf, other)
        elif p.dim() >= 2:
            raise BadInput(
                f"adapters are for a student with its teacher's weights, and {name} differs; {remedy}"
            )


def fingerprint(state: dict[str, torch.Tensor]) -> str:
    """A sha256 of tensors: names, types, shapes and values, whatever file they are in."""
    found = hashlib.sha256()
    for name, t in sorted(state.items()):
        found.update(f"{name} {t.dtype} {tuple(t.shape)}\n".encode())
        found.update(t.detach().contiguous().flatten().view(torch.uint8).numpy())
    return found.hexdigest()
