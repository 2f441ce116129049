"""Train a transformer, with its norms kept or tapered away, and export it.

    python train.py config/demo.py                               # a run on one device
    python train.py config/taper_30m.py --max_iters=20000        # files in order, then flags; --help has all
    python train.py config/demo.py --init_from=resume            # go on with a run; auto: if there is one
    python train.py --init_from=gpt2 --taper=all --dataset=PATH  # from weights: a hub id, a folder, a file
    torchrun --nproc_per_node=4 train.py config/taper_30m.py --batch_size=4 --gradient_accumulation_steps=4
                                                                 # several processes, still 16 windows a step

Writes out_dir/: config.json, metrics.jsonl, ckpt.pt (and ckpt.prev.pt, the one before), the tokenizer and,
at the end, the exports (unfused.pt and folded.pt where a norm can go or shrink, else model.pt).
"""

import gc
import math
import signal
import sys
import time
from contextlib import ExitStack, nullcontext
from dataclasses import asdict

import numpy as np
import torch

from begin import change_of, corpus_of, distance_of, make_trained, odd_sink, provenance
from config import Config
from data import open_corpus, prepare_if_missing
from data.sampling import few_windows, on_device, train_batch, windows
from data.tokenizer import load_tokenizer
from forms import export_files, proved
from model import Block, Transformer
from nanonorm import machine
from nanonorm.adapters import learning, measure_rows
from nanonorm.cli import parse
from nanonorm.errors import one_line_errors
from nanonorm.gates import Gates
from nanonorm.metrics import at_ceiling, log_line
from nanonorm.nonfinite import first_nonfinite
from nanonorm.optimizer import Gradients, clip, hold_floors, make_optimizer
from nanonorm.ranks import Interrupt, Ranks, data_parallel, deal, local
from nanonorm.run import Beginning, RunFolder, beginning_of, load_optimizer, sums_of
from nanonorm.scale import site_losses
from nanonorm.schedules import lr_at, mean_gate


@torch.no_grad()
def validate(module, tokens, cfg, device, autocast, ranks: Ranks, of=("ce",)) -> list[float]:
    """Means of the losses named in `of`, nats per token, over the whole split in order, every token but the
    first predicted once. module: called for losses, as Step's `compiled` is."""
    T, n = cfg.longest_text, len(tokens) - 1
    starts = np.arange(0, n - n % T, T)
    batches = [(starts[i : i + cfg.batch_size], T) for i in range(0, len(starts), cfg.batch_size)]
    if n % T:
        batches.append((np.array([n - n % T]), n % T))
    turns = [(*batch, len(batch[0]) * batch[1]) for batch in batches]
    if cfg.shard:  # the ranks gather weights together: one that has nothing left goes along
        turns += [(*batches[-1], 0)] * (-len(batches) % ranks.size)
    totals = torch.zeros(len(of), dtype=machine.widest_float(device), device=device)
    for first, length, counted in turns[ranks.rank :: ranks.size]:
        whole = (len(first), length) == (cfg.batch_size, T)  # each shape would take a graph of its own
        with autocast, nullcontext() if whole else machine.uncompiled(machine.how_compiled(cfg, device)):
            losses = module(*windows(tokens, first, length, device))
        found = torch.stack([getattr(losses, name) for name in of])
        totals += found.to(totals.dtype) * counted
    ranks.sum(totals)
    return [total / n for total in totals.tolist()]


# ---------------------------------------------------------------------------------------------------------
# one optimizer step


class Step:
    """Forward, backward, statistics, clipping, AdamW: `step.at(k); step(x, y)` is optimizer step k of a run.

    Nothing in it waits for the device, except where AdamW is not fused or the gates have a budget to look at.
    `totals` sums `losses` and 1 over micro-batches until they are read. A step whose loss or gradient is not
    finite updates no weight, nor does any later one; `check` finds out.

    model: the network that trains; `learns`: its adapters, by name, or if none all of it; module: what is
    called for the losses of a micro-batch, a Distilled around the model or the model itself. `compiled` is
    how it is called, compiled where that is asked for; `forward` is the same under DDP, to train.
    """

    def __init__(self, model: Transformer, cfg: Config, device: torch.device, dtype, ranks, module=None):
        self.model, self.cfg, self.ranks = model, cfg, ranks
        self.module, self.learns = model if module is None else module, learning(model)
        self.losses = ("total", "ce", "aux") if module in (None, model) else ("total", "ce", "aux", "kl")
        self.micro_steps = cfg.gradient_accumulation_steps // ranks.size
        model.mask_end, model.grad_checkpoint = cfg.mask_end, cfg.grad_checkpoint
        for site in site_losses(model).values():
            site.share = 1 / self.micro_steps
        self.gates = Gates(model, cfg, device, "kl" if "kl" in self.losses else "ce")
        self.autocast = machine.autocast(device, dtype)
        self.forward = self.compiled = machine.compiled(self.module, Block, cfg, device)
        self.optimizer = make_optimizer(list(self.learns.values()), cfg, device)
        self.fused = self.optimizer.defaults.get("fused", False)
        self.totals = torch.zeros(len(self.losses) + 1, dtype=machine.widest_float(device), device=device)
        self.number = torch.zeros((), dtype=torch.long, device=device)
        self.bad_step = torch.full_like(self.number, cfg.max_iters)  # the first that was not finite
        self.enter(model.phase)

    def enter(self, phase: str):
        """Begin a phase. DDP fixes the trainable parameters and a graph its kernels: both are made anew."""
        self.model.set_phase(phase)
        for name, p in self.model.named_parameters():
            p.requires_grad_(p.requires_grad and name in self.learns)
        self.trained = {name: p for name, p in self.learns.items() if p.requires_grad}
        self.gradients = Gradients(list(self.trained.values()), self.ranks, self.cfg.shard)
        if self.ranks.size > 1 and not self.cfg.shard:
            self.forward = data_parallel(self.compiled)
        self.graph = machine.Replayed(self.update) if self.cfg.cuda_graph else None

    def at(self, step: int):
        """Set a step's phase, gates and learning rate. Raises: ModelError if there is nothing to calibrate
        on."""
        phase = self.gates.phase(step)
        if phase != self.model.phase:
            if self.model.phase == "norm":
                self.model.calibrate()
            self.enter(phase)
        self.gates.set(step)
        self.at_step = step
        self.number.fill_(step)
        lr = lr_at(step, self.cfg)
        for group in self.optimizer.param_groups:  # a graph sees only what tensors hold
            group["lr"] = group["lr"].fill_(lr) if isinstance(group["lr"], torch.Tensor) else lr

    def seed_dropout(self, step: int, micro: int):
        """Make dropout's masks a function of (seed, step, micro-batch over all ranks), as the batches are."""
        if self.cfg.dropout:
            masks = (self.cfg.seed, step, self.ranks.index(micro), 1)  # 1: another stream than the batch's
            torch.manual_seed(int(np.random.default_rng(masks).integers(2**63)))

    def __call__(self, x, y):
        """x, y: inputs and targets (micro_steps, B, T). Returns, and keeps as `last`, the final norm's
        input in the last micro-batch (B, T, D) and the gradient norms of `trained` before clipping
        (len(trained))."""
        run = self.update if self.graph is None else self.graph
        self.last = run(x, y)
        return self.last

    def update(self, x, y):
        for micro in range(self.micro_steps):
            if self.ranks.size > 1:
                self.forward.require_backward_grad_sync = micro == self.micro_steps - 1
            self.seed_dropout(self.at_step, micro)
            with self.autocast:
                losses = self.forward(x[micro], y[micro])
            (losses.total / self.micro_steps).backward()
            found = [getattr(losses, name).detach() for name in self.losses]
            sums = torch.stack((*found, torch.ones_like(losses.ce)))
            self.totals.add_(sums.to(self.totals.dtype))
            self.gates.add(losses)
        self.model.update_statistics(self.ranks.sum)
        parts = self.gradients.parts()
        norms = self.gradients.norms(parts)
        total_norm = torch.linalg.vector_norm(norms)
        if self.cfg.grad_clip:
            clip(parts, self.cfg.grad_clip, total_norm)
        finite = torch.isfinite(total_norm) & torch.isfinite(self.totals).all()
        first_bad = torch.minimum(self.bad_step, self.number)
        self.bad_step.copy_(torch.where(finite, self.bad_step, first_bad))
        self.gates.observe(self.number, self.bad_step == self.cfg.max_iters, self.ranks.sum)
        if self.fused:
            self.optimizer.found_inf = (self.bad_step < self.cfg.max_iters).float()
        if self.fused or self.bad_step.item() == self.cfg.max_iters:  # the unfused one cannot skip by itself
            self.optimizer.step()
        hold_floors(self.trained)
        measure_rows(self.model)
        self.optimizer.zero_grad(set_to_none=True)
        return losses.stream, norms

    def to_come(self) -> int:
        """Bytes on this rank's device of the gradients and averages that the first step makes."""
        averages = 0.5 if self.cfg.optimizer == "adamw_8bit" else 2
        return int((1 + averages) * sum(local(p).nbytes for p in self.learns.values()))

    def resume(self, start: Beginning):
        """Go on with a checkpoint's optimizer and sums. Raises: BadInput."""
        load_optimizer(self.optimizer, start.file, start.source)
        if self.cfg.shard and "parts" in start.file:
            from nanonorm import parts

            live = self.module.to_file({}) | {"optimizer": self.optimizer.state_dict()}
            parts.load(start.file, start.source, live, self.ranks)
            measure_rows(self.model)
        self.gates.resume(start)
        sums = sums_of(start, self.losses)
        sums *= self.cfg.gradient_accumulation_steps / start.file["run"].gradient_accumulation_steps
        if self.ranks.main:
            self.totals += sums.to(self.totals.device)

    def gather_totals(self):
        """Give the main rank everyone's sums; the others begin anew."""
        self.ranks.sum(self.totals)
        if not self.ranks.main:
            self.totals.zero_()

    def first_bad(self) -> int | None:
        """The first step that was not finite on any rank, if there was one. Waits for the device."""
        self.ranks.min(self.bad_step)  # a loss is one rank's own
        bad = self.bad_step.item()
        return bad if bad < self.cfg.max_iters else None

    def with_masks(self, batch, step: int):
        """Yield the (x, y) of each micro-batch, with dropout's masks set as they were in `step`."""
        for micro, pair in enumerate(zip(*batch, strict=True)):
            self.seed_dropout(step, micro)
            yield pair

    def check(self, batch_of, remedy: str, weights: bool):
        """End the run if a step was not finite, or if the `weights` are not, and name the step and the
        tensor. batch_of: step -> its (x, y). Raises: SystemExit."""
        bad, fault = self.first_bad(), ""
        if bad is not None:
            self.gates.set(bad)
            self.graph = self.last = None  # a graph keeps the memory of a whole step
            again = self.with_masks(batch_of(bad), bad)
            fault = f"step {bad}: non-finite {first_nonfinite(self.module, again, self.autocast, self.ranks)}"
        elif weights:
            left = (name for name, p in self.learns.items() if not torch.isfinite(local(p)).all())
            if name := self.ranks.first_word(*left):
                fault = f"step {self.number.item()}: its update left {name} non-finite"
        if fault:
            raise SystemExit(f"train.py: {fault}; {remedy}" if self.ranks.main else 1)


# ---------------------------------------------------------------------------------------------------------
# what is logged


def val_line(step: Step, tokens, corpus: dict, device: torch.device) -> dict[str, float]:
    """The validation split's loss at gate 0, in nats a token and bits a byte, and at the current gate."""
    module, rest = step.module, (step.compiled, tokens, step.cfg, device, step.autocast, step.ranks)
    module.eval()
    of = tuple(name for name in ("ce", "kl") if name in step.losses)
    found, norms = dict(zip(of, validate(*rest, of=of), strict=True)), step.model.taper_norms()
    loss = found["ce"]
    line = {"val/loss": loss, "val/bpb": loss * (len(tokens) - 1) / math.log(2) / corpus["val_bytes"]}
    if "kl" in found:
        line["val/kl"] = found["kl"]
    if norms:
        torch.nn.ModuleList(norms.values()).train()  # they alone, at their gates and with ceilings
        line["val/loss_gated"] = validate(*rest)[0]
    module.train()
    return line


# ---------------------------------------------------------------------------------------------------------
# a run


def export_all(model: Transformer, module, folder: RunFolder, val_tokens, meta: dict):
    """Write a run's exports, each proved against the trained model on real text. Raises: ModelError."""
    module.cpu()
    torch.set_float32_matmul_precision("highest")  # TF32 would hide a fold's error, or add one
    sample, _ = few_windows(val_tokens, model.config)
    if module is not model:
        model, meta["merge_error"] = module.plain()
        if meta["merge_error"]:
            print(f"adapters merged: at most {meta['merge_error']:.1e} of a layer's output off, in float64")
    for name, form in export_files(model.config).items():
        exported, errors = proved(model, form, sample)
        folder.write_export(name, exported.to_file({**meta, "fold_error": errors}))


def main(held: ExitStack):
    # --- what to run
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends a prepare.py as well
    asked, explicit, files = parse(Config, sys.argv[1:], files=True, usage=__doc__)
    ranks = Ranks()
    start = beginning_of(asked, explicit, files, ranks, held)
    cfg, progress = start.settings, start.progress
    cfg.model_config()  # refuses what makes no sense before anything is prepared or written
    device, dtype = machine.set_up(cfg, ranks)
    ranks.start(device, cfg.backend, alone=cfg.shard)

    # --- data, model, optimizer
    data_folder = corpus_of(start)
    if ranks.main:
        prepare_if_missing(data_folder, None if start.given is None else str(start.given))
    corpus, train_tokens, val_tokens = ranks.main_first(open_corpus, data_folder, cfg.longest_text, cfg.ahead)
    start.refuse_to_differ(ranks, corpus, device.type, dtype)
    model, module = make_trained(start, corpus, data_folder, dtype, hollow=not ranks.main)
    notes = cfg.remarks() + odd_sink(cfg.sink_token, data_folder / corpus["tokenizer"])
    if ranks.main:
        notes += change_of(model, start, torch.from_numpy(val_tokens))
    whole_on = torch.device("cpu") if cfg.shard else device
    if not cfg.shard:
        deal(module, device, ranks)
    if ranks.main:
        notes += distance_of(module, start, torch.from_numpy(val_tokens), whole_on, dtype)
    if cfg.shard:
        from nanonorm.shard import Sharded  # torch's FSDP takes a second to import

        sharded = Sharded(module, Block, device, dtype, ranks)
    step = Step(model, cfg, device, dtype, ranks, module.train())
    train_tokens, val_tokens = on_device(device, train_tokens, val_tokens, to_come=step.to_come())
    if start.source is not None:
        step.resume(start)
    start.file = progress.totals = None  # frees the copies
    if cfg.shard or device.type != "cpu":
        machine.release_garbage()

    # --- run folder
    folder = RunFolder(start, ranks)
    folder.claim(held)
    origin = provenance(model, corpus, device, dtype, ranks.size)

    def checkpoint():
        step.gather_totals()
        progress.gates = step.gates.kept()
        folder.save(module, model, step.optimizer, step.totals, origin)

    if progress.iter == 0:
        checkpoint()  # first of all files: from here on a killed run can be resumed
    size = sum(p.numel() for p in step.learns.values())
    header = {"versions": origin["versions"], "corpus": corpus, "parameters": size}
    folder.open_log(header, load_tokenizer(data_folder / corpus["tokenizer"]).files)
    text = f"{corpus['train_tokens']:,} training tokens from {corpus['source']}"
    kind = "{dtype} on {processor}".format(**origin["versions"])
    folder.announce(f"{size / 1e6:.2f} M parameters; {text}; {kind}; writing {folder.path}")
    for note in notes:
        folder.announce(note)

    # --- the loop
    def batch_of(k: int):
        """This rank's inputs and targets of step k, (micro_steps, B, T) each."""
        indices = map(ranks.index, range(step.micro_steps))
        return train_batch(train_tokens, cfg, k, indices, device, corpus.get("block_size"))

    tokens_per_iter = cfg.gradient_accumulation_steps * cfg.batch_size * cfg.longest_text
    better = "If it comes again, start anew in another out_dir with a lower learning_rate"
    remedy = f"{folder.newest} keeps the last good state. {better}"
    interrupt, stop = Interrupt(ranks.main), 0  # stop: the signal that all ranks leave by, at the same step
    folder.open_bar(device, dtype)
    gc.collect()
    gc.disable()  # a collection would distort a step's time; garbage is collected at checkpoints
    clock, clock_iter, batch = time.perf_counter(), progress.iter, batch_of(progress.iter)
    while progress.iter < cfg.max_iters and not stop:
        k = progress.iter
        step.at(k)
        interrupt.run(step, *batch)
        batch = batch_of(k + 1)  # gathered while the device works
        progress.iter = k + 1
        stop = ranks.largest(interrupt.asked)  # a signal that comes after this is for the next step

        # look, where it is time to
        is_last, boundary = k + 1 == cfg.max_iters, step.gates.phase(k + 1) != model.phase
        intervals = (cfg.log_interval, cfg.eval_interval, cfg.ckpt_interval)
        logs, evals, saves = (is_last or (k + 1) % n == 0 for n in intervals)
        if logs or evals or saves or boundary or stop:
            step.check(batch_of, remedy, weights=saves or bool(stop))
        step.gates.set_behind(k)  # a log line describes the model after its step
        line = {}
        if logs:
            speed = (k + 1 - clock_iter) * tokens_per_iter / (time.perf_counter() - clock)
            line = log_line(step, k + 1, speed, folder.peak)
        if evals:
            progress.val = val_line(step, val_tokens, corpus, device)
            line |= progress.val
        if line:
            folder.log(line)
        if evals:
            gate = {"gate": mean_gate(model.gate)} if model.taper_norms() else {}
            folder.tell(", ".join(f"{name} {v:.4f}" for name, v in (progress.val | gate).items()))
        if saves or stop:
            checkpoint()
            gc.collect()
        folder.tick(line)
        if logs or evals or saves:
            clock, clock_iter = time.perf_counter(), k + 1
    folder.close_bar()
    gc.enable()
    interrupt.leave_from_now_on()
    if stop := stop or interrupt.asked:
        folder.stopped(signal.Signals(stop).name)
        sys.exit(128 + stop)

    # --- the exports
    if why_not := step.gates.why_up():
        raise SystemExit(f"train.py: {why_not}" if ranks.main else 1)
    if note := at_ceiling(model):
        folder.announce(note)
    if cfg.shard:
        module = sharded.gathered()
        model = getattr(module, "student", module)
    if ranks.main:
        meta = {"iter": progress.iter, **origin, "run": asdict(cfg), **progress.val}
        export_all(model, module, folder, val_tokens, meta)
    folder.finish()
    ranks.close()


if __name__ == "__main__":
    machine.keep_freed_memory()
    torch.set_flush_denormal(True)  # on gradients that are almost 0 CPUs take 30 times as long
    with one_line_errors(), ExitStack() as held:  # held: the lock on the run folder
        main(held)
