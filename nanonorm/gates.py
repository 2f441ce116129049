"""The gates of a run, which follow its steps, or wait for its loss."""

import torch

from nanonorm.machine import widest_float
from nanonorm.run import Beginning, damaged
from nanonorm.schedules import drop_steps, gate_at, phase_at, tapers

RATE = 0.1  # a step's share in the running loss
LOOK = 10  # steps; the host asks no more often whether gates that wait have come down


class Gates:
    """Sets the gates of a model.Transformer: `set(k)` before optimizer step k.

    Without `gate_budget` they are a function of the step. With it the schedule counts gate steps in place of
    steps: a step of the blend is one if the running loss behind it is under the budget. So gates go down or
    stand still, at the fastest as the schedule without a budget. The running loss is an EMA (RATE) of the KL
    to the teacher; without a teacher of the cross-entropy, less what it was as the blend began. It and the
    count stay on the device, are alike on all ranks, and part of a checkpoint.
    """

    def __init__(self, model, cfg, device: torch.device, watched: str):
        """cfg: a config.Config, resolved; watched: the loss, "kl" or "ce"."""
        self.model, self.cfg, self.watched, self.drops = model, cfg, watched, None
        self.waits, self.last = tapers(cfg) and cfg.gate_budget is not None, cfg.gate_end - cfg.gate_start
        self.state = torch.zeros(3, dtype=widest_float(device), device=device)
        self.done, self.running, self.before = self.state.unbind()  # gate steps, nats, nats
        self.sum = torch.zeros_like(self.done)  # of the step's losses, over micro-batches
        if cfg.gate_gaps is not None:  # the step at which each gate falls
            self.drops = torch.tensor(drop_steps(cfg, model.gate_sites()), device=device)
        elif self.waits:
            steps = range(cfg.gate_start, cfg.gate_end + 1)
            self.curve = self.state.new_tensor([gate_at(step, cfg) for step in steps])

    def set(self, step: int):
        """Set the gates of a step, with nothing that comes from the host's memory."""
        waits = self.waits and step >= self.cfg.gate_start
        if self.drops is not None:
            self.model.gate.copy_(self.drops > (self.cfg.gate_start + self.done if waits else step))
        elif waits:
            self.model.gate.copy_(self.curve.index_select(0, self.done.long().unsqueeze(0)))
        else:
            self.model.gate.fill_(gate_at(step, self.cfg))

    def set_behind(self, step: int):
        """Set the gates with which a step leaves the network: the next one's; but where that begins the taper
        all norms are on until then."""
        if self.model.phase != "norm":
            self.set(step + 1)

    def phase(self, step: int) -> str:
        """The phase of a step. From gate_end on gates that wait are asked for, every LOOK steps."""
        late = step - self.cfg.gate_end
        if not self.waits or late < 0:
            return phase_at(step, self.cfg)
        over = self.model.phase == "scale" or (late % LOOK == 0 and self.are_down())
        return "scale" if over else "blend"

    def are_down(self) -> bool:
        """Whether all gate steps are done. Waits for the device."""
        return self.done.item() == self.last

    def add(self, losses):
        """Count the losses of a micro-batch."""
        if self.waits:
            self.sum.add_(getattr(losses, self.watched).detach())

    def observe(self, number, finite, all_reduce):
        """Once a step: go on, or stand still. number: of the step; finite: whether all steps were, 0-dim;
        all_reduce sums over ranks in place."""
        if not self.waits or self.model.phase == "scale":
            return
        all_reduce(self.sum)
        share = torch.where(number == 0, 1.0, RATE).to(self.sum.dtype)
        self.running.lerp_(self.sum / self.cfg.gradient_accumulation_steps, share)
        self.sum.zero_()
        if self.model.phase == "blend":
            under = self.running - self.before < self.cfg.gate_budget
            self.done.add_(under & finite).clamp_(max=self.last)
        elif self.watched == "ce":
            self.before.copy_(self.running)

    def metrics(self) -> dict[str, float]:
        """What the log tells of gates that wait, until they are down."""
        if not self.waits or self.model.phase == "scale":
            return {}
        done, running, before = self.state.tolist()
        return {"gate/steps": done, "gate/excess": running - before}

    def kept(self) -> torch.Tensor | None:
        """What a checkpoint holds of them."""
        return self.state.cpu() if self.waits else None

    def resume(self, start: Beginning):
        """Go on as a checkpoint's. Raises: BadInput for a state no run could have written."""
        kept = start.progress.gates
        if not self.waits:
            return
        if kept is None or len(kept) != 3 or not 0 <= kept[0] <= self.last or kept[0] != kept[0].floor():
            raise damaged(start.source, "it does not say where its gates wait")
        self.state.copy_(kept)

    def why_up(self) -> str:
        """Why a run that is over has nothing to export; "" if it has. Waits for the device."""
        if not self.waits or self.are_down():
            return ""
        c, done = self.cfg, int(self.done)
        held = f"gate_budget={c.gate_budget} let {done} of {self.last} gate steps be done"
        remedy = "start anew in another out_dir with a larger one, or a larger max_iters"
        return f"step {c.max_iters}: the gates are not at 0, so nothing is exported: {held}; {remedy}"
