"""How the windows of an optimizer step are split into micro-batches, and what another split changes.

`run` is the settings of a run: batch_size windows go through at a time, gradient_accumulation_steps times a
step, over all ranks together.
"""

import torch

from nanonorm.errors import BadInput
from nanonorm.machine import how_compiled


def windows_a_step(run) -> int:
    return run.gradient_accumulation_steps * run.batch_size


def as_split(run) -> str:
    return f"{run.gradient_accumulation_steps} x {run.batch_size}"


def keep_windows(now, before):
    """Let `now` go on with the windows of `before`, which it may split otherwise. Raises: BadInput if a step
    has another number of them."""
    if windows_a_step(now) != windows_a_step(before):
        split = f"{as_split(now)} windows a step are not the {as_split(before)} of the run in {now.out_dir}"
        raise BadInput(f"{split}; gradient_accumulation_steps x batch_size must stay the same")
    if as_split(now) != as_split(before):
        now.draw_size = before.draw_size or before.batch_size


def other_split(now, before) -> list[str]:
    """What it means, in words, that a run goes on with another split of its steps than `before`."""
    if as_split(now) == as_split(before):
        return []
    follows_batch = now.aux_weight > 0 and now.anchor_target == "batch"
    own = {"dropout's masks": now.dropout, "mask_end's means": now.mask_end}
    own |= {"the means that anchor_target=batch holds to": follows_batch}
    own |= {"the medians that sink_multiple goes by": now.sink_multiple is not None}
    changed = " and ".join(what for what, happens in own.items() if happens)
    but_for = f", but for {changed}, which are a micro-batch's own" if changed else ""
    split = f"a step's windows go through as {as_split(now)}, not {as_split(before)}"
    coarse = ", which in 8 bits is coarse" if now.optimizer == "adamw_8bit" else ""
    return [f"{split}: the run goes on equal to rounding{coarse}, not to the bit{but_for}"]


def other_masks(now, before, device) -> list[str]:
    """The same of what draws dropout's masks, on a device: compiled code draws its own. On what `before` ran
    is known if it named a device; else it is judged by this one."""
    there = device if before.device == "auto" else torch.device(before.device)
    ours, theirs = how_compiled(now, device), how_compiled(before, there)
    if not now.dropout or ours == theirs:
        return []
    return [f"compile={ours} draws dropout's masks otherwise than compile={theirs}, as the run was set"]
