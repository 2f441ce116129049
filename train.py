"""Train a transformer, with its norms kept or tapered away, and export it.

    python train.py config/demo.py                                 # a run on one device
    python train.py config/taper_30m.py --max_iters=20000          # files in order, then flags; --help lists them
    python train.py --init_from=resume --out_dir=out/taper_30m     # go on with a run; auto: if there is one, else start
    torchrun --nproc_per_node=4 train.py config/taper_30m.py --batch_size=4 --gradient_accumulation_steps=4
                                                                   # several GPUs or processes, the same 16 windows a step

Writes out_dir/: config.json, metrics.jsonl, ckpt.pt (and ckpt.prev.pt, the one before), tokenizer.model and, at the end,
the exports (unfused.pt and folded.pt where a norm can go or shrink, else model.pt).
"""

import gc
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
import uuid
import warnings
from collections import deque
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, fields, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import config
from config import ROOT, BadInput, Config, atomic_write, hold_folder, keep_freed_memory, one_line_errors, parse
from data import open_corpus
from data.checkpoint import begin_log, clear_folder, nothing_trained, read_checkpoint, restore
from data.sampling import train_batch, windows
from data.watch import first_nonfinite, grad_norms, measure_peak, spike
from model import BadFile, ModelConfig, ModelError, Transformer, export, exports

try:
    from tqdm import tqdm
except ImportError:  # training needs torch, numpy and sentencepiece; without tqdm there is no bar, only lines

    class tqdm:
        def __init__(self, **_):
            self.update = self.set_postfix = self.close = lambda *_, **__: None

        write = staticmethod(print)


@torch.no_grad()
def validate(model, tokens, cfg, device, autocast, rank: int, ranks: int) -> float:
    """Mean cross-entropy, nats per token, over the whole split in order, every token but the first predicted once."""
    T, n = cfg.block_size, len(tokens) - 1
    starts = np.arange(0, n - n % T, T)
    batches = [(starts[i : i + cfg.batch_size], T) for i in range(0, len(starts), cfg.batch_size)]
    if n % T:
        batches.append((np.array([n - n % T]), n % T))
    total = torch.zeros((), dtype=torch.float64, device=device)
    for begin, length in batches[rank::ranks]:
        with autocast:
            total += model(*windows(tokens, begin, length, device)).ce.double() * (len(begin) * length)
    if ranks > 1:
        dist.all_reduce(total)
    return total.item() / n


# ---------------------------------------------------------------------------------------------------------
# schedules: functions of the step


def lr_at(step: int, cfg) -> float:
    """Linear warmup, then cosine to min_lr."""
    if step < cfg.warmup_iters:
        return cfg.learning_rate * (step + 1) / (cfg.warmup_iters + 1)
    if not cfg.decay_lr:
        return cfg.learning_rate
    t = min(1.0, (step - cfg.warmup_iters) / (cfg.lr_decay_iters - cfg.warmup_iters))
    return cfg.min_lr + 0.5 * (1 + math.cos(math.pi * t)) * (cfg.learning_rate - cfg.min_lr)


def gate_at(step: int, cfg) -> tuple[str, float]:
    """(phase, gate)."""
    if step < cfg.gate_start:
        return "norm", 1.0
    if step >= cfg.gate_end:
        return "scale", 0.0
    return "blend", 0.5 * (1 + math.cos(math.pi * (step - cfg.gate_start) / (cfg.gate_end - cfg.gate_start)))


# ---------------------------------------------------------------------------------------------------------
# a step as one launch


class Replayed:
    """A function of tensors, in which only what tensors hold differs from call to call, as one CUDA graph: called `warmup` times as
    it is, while libraries and the compiler set themselves up, then captured, then replayed on the new inputs. It returns the
    same tensors each time. The current stream must not be the default one, on which nothing can be captured."""

    warmup = 3

    def __init__(self, function):
        self.function, self.calls, self.graph = function, 0, None

    def __call__(self, *inputs):
        self.calls += 1
        if self.calls <= self.warmup:
            return self.function(*inputs)
        if self.graph is None:
            self.graph, self.inputs = torch.cuda.CUDAGraph(), [t.clone() for t in inputs]
            with torch.cuda.graph(self.graph, stream=torch.cuda.current_stream()):
                self.outputs = self.function(*self.inputs)
        for kept, new in zip(self.inputs, inputs, strict=True):
            kept.copy_(new)
        self.graph.replay()
        return self.outputs


# ---------------------------------------------------------------------------------------------------------
# files


def save(payload: dict, path: Path, kept: Path | None = None):
    with atomic_write(path, kept=kept) as f:
        torch.save(payload, f)


def start_wandb(cfg: Config, run_id: str):
    """The wandb run of this training run, new or gone on with. BadInput if it cannot be had."""
    if cfg.wandb_mode != "online":
        os.environ["WANDB_ERROR_REPORTING"] = "false"  # its telemetry would go out all the same
    try:
        import wandb

        return wandb.init(project=cfg.wandb_project, name=cfg.wandb_run_name or Path(cfg.out_dir).name, config=asdict(cfg),
                          id=run_id, resume="allow", mode=cfg.wandb_mode, dir=cfg.out_dir)  # fmt: skip
    except ImportError:
        raise BadInput("wandb_log=True needs wandb: pip install wandb, or --wandb_log=False") from None
    except Exception as e:  # no login, no network, a refused project: wandb has many ways to say so
        raise BadInput(f"wandb does not start ({e}); use --wandb_mode=offline or --wandb_log=False") from None


def main(held: ExitStack):
    # --- what to run
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # until the loop; takes a prepare.py down with it
    cfg, explicit, _ = parse(Config, sys.argv[1:], files=True, usage=__doc__)
    rank, ranks, local_rank = config.place_among_ranks()
    main_rank, ckpt, source = rank == 0, None, None
    out_dir, quoted = Path(cfg.out_dir), shlex.quote(cfg.out_dir)
    newest, previous = out_dir / "ckpt.pt", out_dir / "ckpt.prev.pt"
    found = (newest.exists() or previous.exists()) and (cfg.init_from == "resume" or not nothing_trained(out_dir))
    if cfg.init_from == "resume" and not found:
        raise BadInput(f"nothing to resume: {newest} does not exist; start the run without --init_from=resume")
    if cfg.init_from == "scratch" or not found:
        if not nothing_trained(out_dir):
            config.refuse_another_run(out_dir)
        cfg.resolve()
    else:
        if main_rank:
            held.enter_context(hold_folder(out_dir))  # before the checkpoint is read: no other process may be about to replace it
        ckpt, source, damage = config.first_good(read_checkpoint, BadFile, newest, previous)
        if damage and main_rank:
            print(f"train.py: {damage}; going on from step {ckpt['progress']['iter']} of {source}", file=sys.stderr)
        cfg = config.resumed(cfg, explicit, ckpt["run"], source)
    knobs = {f.name: getattr(cfg, f.name) for f in fields(ModelConfig) if f.name != "form" and getattr(cfg, f.name, None) is not None}
    model_config = ModelConfig(**knobs)  # refuses what means nothing before anything is prepared or written
    if cfg.gradient_accumulation_steps % ranks:
        raise BadInput(f"gradient_accumulation_steps={cfg.gradient_accumulation_steps} must be a multiple of the {ranks} ranks")
    device, dtype = config.pick_device(cfg, local_rank)
    if cfg.cuda_graph and ranks > 1:
        raise BadInput("cuda_graph=True is for a single GPU; under torchrun use --cuda_graph=False")
    if cfg.cuda_graph:
        torch.cuda.set_stream(torch.cuda.Stream())  # nothing can be captured on the default one
        warnings.filterwarnings("ignore", "This instance was constructed with capturable")  # AdamW, about the first steps of a phase
    compiles = cfg.compile if cfg.compile is not None else device.type == "cuda"
    if compiles:
        try:
            torch.compile(lambda x: x + 1)(torch.ones(1, device=device))
        except Exception as e:
            reason = (str(e) or type(e).__name__).splitlines()[0]
            raise BadInput(f"torch.compile does not work here ({reason}); install a C++ compiler, or use --compile=False") from None
    if ranks > 1:
        dist.init_process_group(cfg.backend if cfg.backend != "auto" else "nccl" if device.type == "cuda" else "gloo")
        host_group = dist.new_group(backend="gloo")  # for agreeing on signals without touching the GPU
        step = -1 if ckpt is None else ckpt["progress"]["iter"]
        dist.all_reduce(ends := torch.tensor([step, -step]), dist.ReduceOp.MAX, host_group)
        if ends.sum():
            raise BadInput(f"the ranks found checkpoints of steps {-ends[1]} to {ends[0]} in {out_dir}: it was being written; start again")

    # --- data
    folder = ROOT / "data" / cfg.dataset
    if not (folder / "meta.json").exists() and main_rank:
        if cfg.dataset not in (known := config.corpora()):
            names = ", ".join(known)
            raise BadInput(f"no corpus {cfg.dataset}: {folder} has no meta.json; prepare one of {names}, or name a prepared folder")
        if subprocess.run([sys.executable, folder / "prepare.py"]).returncode:
            sys.exit(2)  # prepare.py has said why
    if ranks > 1:
        dist.barrier()
    corpus, *splits = open_corpus(folder, cfg.block_size)
    train_tokens, val_tokens = map(torch.from_numpy, splits)
    if (cfg.vocab_size or corpus["vocab_size"]) < corpus["vocab_size"]:
        raise BadInput(f"vocab_size={cfg.vocab_size} is below the {corpus['vocab_size']} of {folder}; leave it out or raise it")
    model_config = replace(model_config, vocab_size=cfg.vocab_size or corpus["vocab_size"])
    if device.type == "cuda" and 2 * (len(train_tokens) + len(val_tokens)) < 0.25 * torch.cuda.mem_get_info(device)[0]:
        train_tokens, val_tokens = train_tokens.to(device), val_tokens.to(device)  # else they stay memory-mapped

    # --- model, optimizer
    if device.type == "cuda" and dtype == torch.bfloat16:
        torch.set_float32_matmul_precision("high")  # TF32 where autocast leaves float32 products
    torch.manual_seed(cfg.seed)  # the same weights on every rank
    iter_num, run_id, val, logged, ran_with = 0, uuid.uuid4().hex[:8], {}, 0, {}
    totals = torch.zeros(3, dtype=torch.float64, device=device)  # of ce, aux and 1 since the last log line
    if ckpt is None:
        model = Transformer(model_config)
    else:
        model = Transformer.from_file(ckpt, source)
        texts = ("train_sha256", "val_sha256")
        was = {k: corpus[k] for k in texts} | model.meta.get("corpus", {})  # an older checkpoint knows its tokenizer only
        if model.config != model_config or any(was.get(k) != corpus[k] for k in ("tokenizer_sha256", *texts)):
            raise BadInput(f"{folder} is not the corpus that the run in {out_dir} began with; restore it, or start anew in another out_dir")
    model.to(device, torch.float64 if dtype == torch.float64 else torch.float32).train()
    autocast = torch.autocast(device.type, torch.bfloat16) if dtype == torch.bfloat16 else nullcontext()
    decay = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]  # gains, shifts and scalars do not decay
    groups = [{"params": decay, "weight_decay": cfg.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    lr = torch.zeros((), device=device) if cfg.cuda_graph else 0.0  # a graph sees only what tensors hold
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(cfg.beta1, cfg.beta2), fused=True, capturable=cfg.cuda_graph)
    if ckpt is not None:
        progress = restore(optimizer, ckpt, source, cfg.max_iters)
        iter_num, run_id, val, logged, ran_with = (progress[k] for k in ("iter", "run_id", "val", "logged", "ran_with"))
        totals += progress["totals"].to(device) if main_rank else 0
    compiled = torch.compile(model) if compiles else model

    # --- run folder
    code = config.versions(device) | {"dtype": str(dtype).removeprefix("torch."), "ranks": ranks}
    names = ("tokenizer_sha256", "train_sha256", "val_sha256", "vocab_size", "source")
    origin = {k: corpus[k] for k in names} | {"tokenizer": "tokenizer.model"}

    def checkpoint():
        """Everything that the next step depends on. The metrics reach the disk first, so none is missing behind it."""
        if ranks > 1:
            dist.all_reduce(totals)
        if not main_rank:
            totals.zero_()  # the first rank now holds everyone's
            return
        if metrics is not None:
            with config.writing(out_dir / "metrics.jsonl"):
                os.fsync(metrics.fileno())
        meta = {"iter": iter_num, "phase": model.phase, "gate": model.gate.item(), "corpus": origin, "versions": code}
        progress = {"iter": iter_num, "run_id": run_id, "totals": totals.cpu(), "val": val, "logged": logged}
        save({**model.to_file(meta), "optimizer": optimizer.state_dict(), "run": asdict(cfg), "progress": progress}, newest, kept=previous)

    metrics, wandb_run = None, None
    if main_rank:
        if ckpt is None:
            held.enter_context(hold_folder(out_dir))
        clear_folder(out_dir, source)
        wandb_run = start_wandb(cfg, run_id) if cfg.wandb_log else None
    ckpt = None  # frees the copy
    if iter_num == 0:
        checkpoint()  # first of all files: from here on a killed run can be resumed
    if main_rank:
        size = sum(p.numel() for p in model.parameters())
        header = {"settings": asdict(cfg), "versions": code, "corpus": corpus, "parameters": size}
        lines = begin_log(out_dir / "metrics.jsonl", header, iter_num, logged, ran_with)
        logged, recent = len(lines) - 1, deque([x for line in lines if (x := line.get("train/loss")) is not None], maxlen=20)
        del lines  # long, in a long run
        with atomic_write(out_dir / "tokenizer.model") as f:
            f.write((folder / corpus["tokenizer"]).read_bytes())
        with atomic_write(out_dir / "config.json", "w") as f:
            f.write(json.dumps(asdict(cfg), indent=1) + "\n")
        with config.writing(out_dir / "metrics.jsonl"):
            metrics = open(out_dir / "metrics.jsonl", "a")  # noqa: SIM115 (open as long as the run)
        kind = f"{str(dtype).removeprefix('torch.')} on {code['processor']}"
        print(
            f"{size / 1e6:.2f} M parameters; {corpus['train_tokens']:,} training tokens from {corpus['source']}; {kind}; writing {out_dir}"
        )

    # --- the loop
    tokens_per_iter = cfg.gradient_accumulation_steps * cfg.batch_size * cfg.block_size
    micro_steps = cfg.gradient_accumulation_steps // ranks
    peak = measure_peak(device, dtype) * ranks if main_rank else 0.0
    asked = stop = 0  # the signal that asked this process to leave; the one that all ranks leave by, at the same step

    def on_signal(signum, frame):
        nonlocal asked
        if asked and signum == signal.SIGINT:  # a second Ctrl-C leaves at once; a second SIGTERM is the first, by way of torchrun
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)
        asked = signum

    for s in (signal.SIGINT, signal.SIGTERM):
        signal.signal(s, on_signal)
    bad_step = torch.full((), cfg.max_iters, device=device)  # first step with a non-finite loss or gradient; no update from there on
    now = torch.zeros_like(bad_step)  # iter_num
    remedy = f"{newest} keeps the last good state. If it comes again, start anew in another out_dir with a lower learning_rate"

    def micro_batches(step: int):
        """This rank's of one step: inputs and targets, (micro_steps, B, T) each."""
        batches = [train_batch(train_tokens, cfg, step, micro * ranks + rank, device) for micro in range(micro_steps)]
        return map(torch.stack, zip(*batches, strict=True))

    def whole_step(x, y):
        """Forward, backward, clip, AdamW. Nothing here waits for the device; with a non-finite gradient the weights stay as they are.
        Returns the final norm's input in the last micro-batch and the gradient norms (len(trained)) before clipping."""
        for micro in range(micro_steps):
            if ranks > 1:
                step_model.require_backward_grad_sync = micro == micro_steps - 1
            with autocast:
                losses = step_model(x[micro], y[micro])
            (losses.total / micro_steps).backward()
            totals.add_(torch.stack((losses.ce, losses.aux, torch.ones_like(losses.ce))).double())
        model.update_statistics(dist.all_reduce if ranks > 1 else None)
        norms = torch.stack(torch._foreach_norm([p.grad for p in trained.values()]))
        total_norm = torch.linalg.vector_norm(norms)
        if cfg.grad_clip:
            torch.nn.utils.clip_grads_with_norm_(trained.values(), cfg.grad_clip, total_norm)
        fine = torch.isfinite(total_norm) & torch.isfinite(totals).all()
        bad_step.copy_(torch.where(fine, bad_step, torch.minimum(bad_step, now)))
        optimizer.found_inf = (bad_step < cfg.max_iters).float()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return losses.stream, norms

    def begin(phase: str):
        """A phase's step_model, which DDP ties to the parameters that train when it is built; those parameters by name; and its step."""
        model.set_phase(phase)
        with warnings.catch_warnings(action="ignore", category=FutureWarning):  # torch 2.13 has another name for broadcast_buffers
            wrapped = compiled if ranks == 1 else DistributedDataParallel(compiled, broadcast_buffers=False)
        training = {name: p for name, p in model.named_parameters() if p.requires_grad}
        return wrapped, training, Replayed(whole_step) if cfg.cuda_graph else whole_step

    step_model, trained, take_step = begin(model.phase)  # whole_step reads the first two
    bar = tqdm(total=cfg.max_iters, initial=iter_num, unit="step", disable=None if main_rank else True, smoothing=0.05)
    gc.collect()
    gc.disable()  # its pauses are not the step's; whatever gathers goes when a checkpoint is written
    clock, clock_iter = time.perf_counter(), iter_num
    while iter_num < cfg.max_iters and not stop:
        phase, gate = gate_at(iter_num, cfg)
        if phase != model.phase:
            if model.phase == "norm":
                model.calibrate()
            step_model, trained, take_step = begin(phase)
        model.gate.fill_(gate)
        now.fill_(iter_num)
        for group in optimizer.param_groups:
            group["lr"] = group["lr"].fill_(lr_at(iter_num, cfg)) if cfg.cuda_graph else lr_at(iter_num, cfg)
        stream, norms = take_step(*micro_batches(iter_num))
        iter_num += 1
        stop = asked
        if ranks > 1:  # a signal that comes after this is for the next step
            flag = torch.tensor(stop)
            dist.all_reduce(flag, dist.ReduceOp.MAX, host_group)
            stop = flag.item()

        # look, where it is time to
        ends, boundary = iter_num == cfg.max_iters, gate_at(iter_num, cfg)[0] != phase
        logs, evals, saves = (ends or iter_num % n == 0 for n in (cfg.log_interval, cfg.eval_interval, cfg.ckpt_interval))
        line, looks = {}, logs or evals or saves or boundary or stop
        if looks and ranks > 1:
            dist.all_reduce(bad_step, dist.ReduceOp.MIN)  # a loss is one rank's own
        if looks and (k := bad_step.item()) < cfg.max_iters:
            model.gate.fill_(gate_at(k, cfg)[1])
            take_step = stream = norms = None  # a graph keeps the memory of a whole step
            where = first_nonfinite(model, zip(*micro_batches(k), strict=True), autocast)
            raise SystemExit(f"train.py: step {k}: non-finite {where}; {remedy}")
        if (saves or stop) and (name := next((n for n, p in model.named_parameters() if not torch.isfinite(p).all()), None)):
            raise SystemExit(f"train.py: step {iter_num - 1}: its update left {name} non-finite; {remedy}")
        model.gate.fill_(gate_at(iter_num, cfg)[1])  # a log line describes the model after its step
        if logs:
            if ranks > 1:
                dist.all_reduce(totals)
            ce, aux, n = totals.tolist()
            totals.zero_()
            seconds = time.perf_counter() - clock
            speed = (iter_num - clock_iter) * tokens_per_iter / seconds
            s, l2 = model.diagnostics(stream)  # of the first rank's last micro-batch, which the old weights saw
            line = grad_norms(list(trained), norms)
            line |= {"train/loss": (ce + aux) / n, "train/ce": ce / n, "train/aux": aux / n,
                     "lr": lr_at(iter_num, cfg), "s/mean": s.item(), "logits/l2": l2.item(), "perf/tok_s": speed,
                     "perf/mfu": speed * model.flops_per_token() / peak if peak else 0.0}  # fmt: skip
            if model.anchor is not None:
                line["s/target"] = model.anchor.target_now().item()
            if model.taper_norms():
                line["gate"] = model.gate.item()
            for name, norm in model.taper_norms().items():
                line[f"taper/c.{name}"] = (norm.c_now() if model.phase == "norm" else norm.c).item()
            bar.set_postfix(loss=f"{line['train/loss']:.3f}", gate=f"{line.get('gate', 1):.2f}", tok_s=f"{speed:,.0f}", refresh=False)
        if evals:
            shard = (val_tokens, cfg, device, autocast, rank, ranks)
            model.eval()
            val = {"val/loss": validate(model, *shard)}
            val["val/bpb"] = val["val/loss"] * (len(val_tokens) - 1) / math.log(2) / corpus["val_bytes"]
            model.train()
            if model.taper_norms():  # the same at the current gate
                val["val/loss_gated"] = validate(model, *shard)
            line |= val
        if main_rank and logs:
            if excess := spike(line["train/loss"], recent):
                line["train/spike"] = excess
                tqdm.write(f"step {iter_num}: train/loss {line['train/loss']:.4f} is {excess:.2f} nats above the median before it")
            recent.append(line["train/loss"])
        if main_rank and (logs or evals):
            finite = {k: v if math.isfinite(v) else None for k, v in line.items()}  # JSON has no nan
            with config.writing(out_dir / "metrics.jsonl"):
                metrics.write(json.dumps({"iter": iter_num, **finite}) + "\n")
                metrics.flush()
            logged += 1
            if wandb_run is not None:
                wandb_run.log(line, step=iter_num)
        if main_rank and evals:
            shown = val | ({"gate": model.gate.item()} if model.taper_norms() else {})
            tqdm.write(f"step {iter_num}: " + ", ".join(f"{k} {v:.4f}" for k, v in shown.items()))
        if saves or stop:
            checkpoint()
            gc.collect()
        bar.update()
        if logs or evals or saves:
            clock, clock_iter = time.perf_counter(), iter_num
    bar.close()
    gc.enable()
    for s in (signal.SIGINT, signal.SIGTERM):
        signal.signal(s, lambda signum, _: sys.exit(128 + signum))  # the checkpoint is written; a resumed run exports
    if stop := stop or asked:
        if main_rank:
            name = signal.Signals(stop).name
            print(f"stopped by {name} at step {iter_num}; go on with: python train.py --init_from=resume --out_dir={quoted}")
        sys.exit(128 + stop)

    # --- the exports, each proved against the trained model on real text
    if main_rank:
        model.cpu()  # where float32 is float32: a GPU's TF32 products would hide a fold's error, or show one of their own
        count = min(4, (len(val_tokens) - 1) // cfg.block_size)
        sample, _ = windows(val_tokens, np.arange(count) * cfg.block_size, cfg.block_size, "cpu")
        files, proofs = exports(model_config), []
        for name, form in files.items():
            exported, errors = export(model, form, sample)
            meta = {"iter": iter_num, "corpus": origin, "versions": code, "fold_error": errors, "run": asdict(cfg), **val}
            save(exported.to_file(meta), out_dir / name)
            proofs.append(f"{name} " + ", ".join(f"{error:.1e} in {kind}" for kind, error in errors.items()))
        print(f"exported {' and '.join(str(out_dir / name) for name in files)}")
        print(f"largest logit difference from the trained model, relative to the largest logit: {'; '.join(proofs)}")
        print(f"next: python bench.py {quoted}    or    python sample.py {quoted} --prompt=...")
        if wandb_run is not None:
            wandb_run.finish()
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    keep_freed_memory()
    torch.set_flush_denormal(True)  # a network that hardly trains has gradients so small that a CPU needs 30 times as long for them
    with one_line_errors(ModelError), ExitStack() as held:  # of the run folder
        main(held)
