"""A run's folder: what it holds, how a run begins from it, and what is written there.

    config.json  metrics.jsonl                        what the run is, and its log
    tokenizer.model, or tokenizer.json and its kin     how it reads text
    ckpt.pt  ckpt.prev.pt                              everything to go on with; the one before
    ckpt.0.parts/ ...                                  of a sharded run, what they leave out (parts.py)
    unfused.pt  folded.pt, or model.pt                 the exports of a finished run

A checkpoint is a model file with more in it: the optimizer's state, the settings (`run`) and the progress.
"""

import difflib
import shlex
import uuid
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import AfterValidator, ConfigDict, Field, ValidationError
from tqdm import tqdm

from nanonorm.cli import parse
from nanonorm.errors import AdaptersAlone, BadFile, BadInput, ModelError
from nanonorm.files import (
    TOKENIZER_FILES,
    atomic_write,
    hold_folder,
    read_file,
    write_file,
    write_json,
    writing,
)
from nanonorm.hub import find, is_pretrained, read_pretrained
from nanonorm.log import Writer, say, start_wandb
from nanonorm.machine import measure_peak, pick_device
from nanonorm.ranks import Ranks, local, rows_like
from nanonorm.split import other_masks, other_split
from nanonorm.typed import STRICT, Record, Whole, printable, why

MARKS = ("ckpt.pt", "ckpt.prev.pt", "config.json", "metrics.jsonl")  # any of them: a run was here
EXPORTS = ("unfused.pt", "folded.pt", "model.pt")
RUN_FILES = (*MARKS, *TOKENIZER_FILES, *EXPORTS)


def model_file(path: str | Path) -> Path:
    """The model file that `path` means: itself, or the first of folded.pt, model.pt, ckpt.pt in a run folder.
    Raises: BadInput."""
    path = Path(path)
    if not path.is_dir():
        if path.exists():
            return path
        raise BadInput(f"no model file {path}")
    for name in ("folded.pt", "model.pt", "ckpt.pt"):
        if (path / name).exists():
            return path / name
    raise BadInput(f"{path} holds no run: no folded.pt, model.pt or ckpt.pt in it")


def open_model(name: str | Path, hollow: bool = False) -> tuple[dict, Path]:
    """(file, its path) of a model file, a run folder, a GGUF file, a Hugging Face folder or a hub id: the one
    door by which a model comes in. hollow: without the values of its matrices, which are then on the meta
    device; another rank reads them. Raises: BadInput, ModelError."""
    path = find(name)
    if is_pretrained(path):
        return read_pretrained(path, hollow=hollow), path
    path = model_file(path)
    try:
        return read_file(path, hollow=hollow), path
    except BadFile as e:
        newest, before = path.with_name("ckpt.pt"), path.with_name("ckpt.prev.pt")
        if path == newest and before.exists():
            raise BadFile(f"{e}; the checkpoint before it is {before}") from None
        if path.name in EXPORTS and newest.exists():
            again = f"python train.py --init_from=resume --out_dir={path.parent}"
            raise BadFile(f"{e}; {again} exports a finished run again") from None
        raise


def checkpoint_step(meta: dict) -> int | None:
    """The step of a checkpoint, by what its file says of itself; None for what is no checkpoint."""
    return None if "run" in meta else meta.get("iter")  # an export has the run in its meta


# ---------------------------------------------------------------------------------------------------------
# reading a checkpoint


def checked_sums(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() != 1 or not tensor.is_floating_point() or not tensor.isfinite().all():
        raise ValueError("should be finite numbers")
    return tensor


class Progress(Record):
    """Where a run is, beside its weights and its optimizer's state."""

    model_config = ConfigDict(**STRICT, arbitrary_types_allowed=True)

    iter: Whole = 0  # steps done
    run_id: str  # of wandb
    # of losses since the last log line, and of gates that wait (nanonorm/gates.py)
    totals: Annotated[torch.Tensor, AfterValidator(checked_sums)] | None = None
    gates: Annotated[torch.Tensor, AfterValidator(checked_sums)] | None = None
    val: dict[str, Any] = Field(default_factory=dict)  # what the last validation found
    logged: Whole = 0  # lines of the log


class RanWith(Record):
    """The versions that wrote a checkpoint; an older one may lack some."""

    versions: dict[str, Annotated[str | int | None, AfterValidator(printable)]]


def read_checkpoint(path: Path, settings: type) -> dict:
    """What a ckpt.pt holds, its `run` as an instance of `settings`. Raises: BadFile."""
    file = read_file(path, whole=False)
    for part in ("run", "optimizer", "progress"):
        if not isinstance(file.get(part), dict):
            raise BadFile(f"{path} is not a training checkpoint: it has no {part}")
    if "parts" in file:
        from nanonorm import parts

        parts.folder_of(file, path)
    if type(file["progress"].get("iter")) is not int:
        raise BadFile(f"{path} is not a training checkpoint of this version: it does not say its step")
    try:
        file["run"] = settings.recorded(file["run"], str(path))
    except BadInput as e:
        raise BadFile(str(e)) from None
    return file


def read_progress(file: dict, source: Path) -> tuple[Progress, dict]:
    """(progress, versions that wrote it) of a checkpoint. Raises: BadInput for values no run could have
    written."""
    try:
        progress = Progress.model_validate(file["progress"])
        versions = RanWith.model_validate({"versions": file["meta"].get("versions", {})}).versions
        if progress.totals is None:
            raise ValueError("its sums are missing")
        if progress.iter > file["run"].max_iters:
            raise ValueError(f"its step {progress.iter} is beyond the run's last, {file['run'].max_iters}")
    except ValidationError as e:
        raise damaged(source, why(e)) from None
    except ValueError as e:
        raise damaged(source, str(e)) from None
    return progress, versions


def sums_of(start: "Beginning", names: tuple[str, ...]) -> torch.Tensor:
    """The sums in a checkpoint, of the losses `names` and of 1. Earlier versions kept ce, aux and 1, and aux
    was all that is added to ce: with a teacher KL as well. Raises: BadInput."""
    found, source = start.progress.totals, start.source
    if len(found) == 3:
        ce, aux, n = found
        if n and "kl" in names:
            before = "was written between log lines by a version that kept no sum of KL"
            its = f"nanonorm at commit {start.ran_with.get('commit') or 'unknown'}, which wrote it"
            raise BadInput(f"{source} {before}; go on with {its}, until the next log line, or start anew")
        kl = [torch.zeros_like(n)] if "kl" in names else []
        found = torch.stack((ce + aux, ce, aux, *kl, n))
    if len(found) != len(names) + 1:
        raise damaged(source, f"it should have {len(names) + 1} sums, not {len(found)}")
    return found


def damaged(source: Path, reason: str) -> BadInput:
    remedy = "move it away to go on from another, or start anew in another out_dir"
    return BadInput(f"{source} is damaged ({reason:.200}); {remedy}")


def load_optimizer(optimizer: torch.optim.Optimizer, file: dict, source: Path):
    """Give AdamW the state that a checkpoint holds. Its first group is the one whose every parameter trains.

    Raises: BadInput for values no run could have written.
    """
    try:
        named = [p for group in optimizer.param_groups for p in group["params"]]
        own = {i: rows_like(named[i], of) for i, of in file["optimizer"]["state"].items()}
        state = {**optimizer.state_dict(), "state": own}  # the settings stay
        optimizer.load_state_dict(state)
        needed = set(optimizer.state)
        if file["progress"]["iter"]:  # after a step every matrix has state; a gain may not have trained yet
            needed |= set(optimizer.param_groups[0]["params"])
        for p in needed:
            if not fits_adamw(optimizer.state[p], p):
                raise ValueError(f"optimizer state of a parameter {tuple(p.shape)}, not AdamW's")
    except torch.OutOfMemoryError:
        raise
    except (LookupError, ValueError, TypeError, AttributeError, RuntimeError, AssertionError) as e:
        raise damaged(source, repr(e)) from None


def fits_adamw(state: dict, p) -> bool:
    """True if a step of AdamW can go on from this state of the parameter `p`."""
    shapes = {"step": (), "exp_avg": p.shape, "exp_avg_sq": p.shape}
    if set(state) != set(shapes):
        return False
    # of one in 8 bits its scales are looked at
    finite = (getattr(local(t), "scale", local(t)).isfinite().all() for t in state.values())
    return all(state[k].shape == s for k, s in shapes.items()) and all(finite)


# ---------------------------------------------------------------------------------------------------------
# how a run begins


# knobs in which the ranks may differ: paths, and what a machine has or shows
OF_A_MACHINE = {"out_dir", "dataset", "init_from", "teacher", "device", "compile", "grad_checkpoint",
                "wandb_log", "wandb_mode", "wandb_project", "wandb_run_name"}  # fmt: skip


@dataclass
class Beginning:
    """How a run begins: settings, progress, and a file: the checkpoint `source` to go on from, or the weights
    `given` to start from. Without a file the weights are new."""

    settings: Any
    file: dict | None = None
    source: Path | None = None
    progress: Progress = field(default_factory=lambda: Progress(run_id=uuid.uuid4().hex[:8]))
    ran_with: dict = field(default_factory=dict)  # the versions that wrote the file
    given: Path | None = None

    def refuse_to_differ(self, ranks: Ranks, corpus: dict, kind: str, dtype: torch.dtype):
        """Raises: BadInput if the ranks found checkpoints of different steps, or some found none, or if they
        have other settings, another text, or another kind of device or type: each would train a network of
        its own."""
        first, last = ranks.span(-1 if self.source is None else self.progress.iter)
        if first != last:
            found = f"the ranks found checkpoints of steps {first} to {last} in {self.settings.out_dir}"
            raise BadInput(f"{found}: it was being written; start again")
        facts = {name: value for name, value in asdict(self.settings).items() if name not in OF_A_MACHINE}
        facts |= {name: corpus[name] for name in ("train_sha256", "val_sha256")}
        facts |= {"kind of device": kind, "dtype": str(dtype).removeprefix("torch.")}  # what auto came to
        if differ := ranks.differ_in(facts):
            named = ", ".join(f"{name} ({' and '.join(values)})" for name, values in differ.items())
            raise BadInput(f"the ranks differ in {named}; start each with the same")


def beginning_of(asked, explicit: set[str], files: list[str], ranks: Ranks, held: ExitStack) -> Beginning:
    """How a run begins: from scratch, with given weights, or with the checkpoint in its folder, which `held`
    then keeps locked.

    Args: asked: settings with out_dir, init_from and the methods of config.Config; explicit: the knobs that
    were named; files: the config files among them. Raises: BadInput, also for a folder that holds another
    run.
    """
    if asked.out_dir is None:
        asked.out_dir = asked.own_folder(files)
    out_dir, settings = Path(asked.out_dir), type(asked)
    newest, previous = out_dir / "ckpt.pt", out_dir / "ckpt.prev.pt"
    there = newest.exists() or previous.exists()
    if asked.init_from == "resume" and not there:
        remedy = "name its folder with --out_dir, or start the run without --init_from=resume"
        raise BadInput(f"nothing to resume: {newest} does not exist; {remedy}")
    died_early = asked.init_from != "resume" and nothing_trained(out_dir, settings)
    if asked.init_from not in ("resume", "auto") or not there or died_early:
        if not died_early:
            refuse_another_run(out_dir)
        if asked.init_from == "auto":
            asked.init_from = beginning_in(files, settings)
        if asked.init_from == "scratch":
            refuse_exports(out_dir)
            return Beginning(asked.resolve())
        near = difflib.get_close_matches(asked.init_from, ("scratch", "resume", "auto"), n=1, cutoff=0.75)
        if near and not Path(asked.init_from).exists():
            meant = f"did you mean {near[0]}? There is no file or folder of that name"
            raise BadInput(f"init_from={asked.init_from}: {meant}")
        file, given = given_weights(asked.init_from, hollow=not ranks.main)
        refuse_to_write_over(given, asked.out_dir)
        refuse_exports(out_dir)
        return Beginning(asked.started_from(file, explicit, str(given)).resolve(), file, given=given)
    if ranks.main:  # before the checkpoint is read: another process may be about to replace it
        held.enter_context(hold_folder(out_dir))
    file, source, why_not = first_good(newest, previous, settings=settings)
    if why_not and ranks.main:
        say(f"{why_not}; going on from step {file['progress']['iter']} of {source}")
    run = asked.resumed(explicit, file["run"])
    if ranks.main:
        masks = other_masks(run, file["run"], pick_device(run.device))
        for note in other_split(run, file["run"]) + masks:
            say(note)
    if "parts" in file:
        from nanonorm import parts

        if ranks.size > 1 and not run.shard:
            whole = f"{source} is of a sharded run, and each of {ranks.size} ranks would read all of it"
            raise BadInput(f"{whole}; go on with --shard=True, or in one process")
        parts.join(file, source, values=not run.shard)
    progress, ran_with = read_progress(file, source)
    return Beginning(run, file, source, progress, ran_with)


def beginning_in(files: list[str], settings: type) -> str:
    """What the last of some config files that names one has a run begin from: weights, or scratch."""
    for path in reversed(files):
        of_file, explicit, _ = parse(settings, [path], files=True)
        if "init_from" in explicit and of_file.init_from not in ("resume", "auto"):
            return of_file.init_from
    return "scratch"


def given_weights(name: str, hollow: bool = False) -> tuple[dict, Path]:
    """(file, its path) of the weights to start from: a run's checkpoint, or its export where that holds
    adapters alone; or what else open_model takes. hollow: as there. Raises: BadInput, ModelError."""
    checkpoint = Path(name) / "ckpt.pt"
    if not checkpoint.exists():
        return open_model(name, hollow)
    try:
        return open_model(checkpoint, hollow)
    except AdaptersAlone:
        if model_file(name) == checkpoint:  # the run is not over
            raise
        return open_model(name, hollow)


def first_good(*paths: Path, settings: type) -> tuple[dict, Path, str]:
    """The first checkpoint that can be read: (what it holds, its path, what is wrong with those before it).
    Raises: BadInput if none can."""
    reasons = []
    for path in paths:
        try:
            return read_checkpoint(path, settings), path, "; ".join(reasons)
        except BadFile as e:
            reasons.append(str(e))
    raise BadInput(f"{'; '.join(reasons)}; start anew in another out_dir")


def nothing_trained(out_dir: Path, settings: type) -> bool:
    """True if the run in a folder died before its first step was logged or saved, so nothing is lost."""
    if (out_dir / "ckpt.prev.pt").exists() or not (out_dir / "ckpt.pt").exists():
        return False
    log = out_dir / "metrics.jsonl"
    with suppress(ModelError):
        if read_checkpoint(out_dir / "ckpt.pt", settings)["progress"]["iter"]:
            return False
        return not log.exists() or log.read_bytes().count(b"\n") < 2
    return False


def refuse_another_run(out_dir: Path):
    """Raises: BadInput if `out_dir` holds a run, or what is left of one."""
    held = [name for name in MARKS if (out_dir / name).exists()]
    if held and held[0].startswith("ckpt"):
        remedy = "add --init_from=resume to go on with it, or name another --out_dir"
        raise BadInput(f"{out_dir} holds a run ({held[0]}); {remedy}")
    if held == ["config.json"]:  # of another program's, or of a run that was killed at once
        remedy = "name another --out_dir, or remove it if you know it"
        raise BadInput(f"{out_dir} holds a config.json, and no run; {remedy}")
    if held:
        what = f"what is left of a run without a checkpoint ({', '.join(held)})"
        raise BadInput(f"{out_dir} holds {what}; remove it, or name another --out_dir")


def refuse_exports(out_dir: Path):
    """Raises: BadInput if `out_dir` holds exports: until a run ends they would be taken for its own."""
    if held := [name for name in EXPORTS if (out_dir / name).exists()]:
        own = "which would be taken for this run's; name another --out_dir, or move it away"
        raise BadInput(f"{out_dir} holds {', '.join(held)} of another run, {own}")


def refuse_to_write_over(weights: Path, out_dir: str):
    """Raises: BadInput if a run in `out_dir` would write over the weights that it starts or learns from."""
    if weights.name in RUN_FILES and weights.parent.resolve() == Path(out_dir).resolve():
        lost = f"would write over {weights}, which it needs"
        raise BadInput(f"a run in {out_dir} {lost}; name another --out_dir")


# ---------------------------------------------------------------------------------------------------------
# writing


def clear_parts(out_dir: Path):
    """Remove what no checkpoint of a sharded run names."""
    if list(out_dir.glob("ckpt.*.parts")):
        from nanonorm import parts

        parts.clear(out_dir)


def by_main_rank(method):
    """Let a method of RunFolder do nothing on the ranks that neither write nor talk."""

    @wraps(method)
    def guarded(self, *args, **more):
        return method(self, *args, **more) if self.ranks.main else None

    return guarded


class RunFolder:
    """Writes a run's folder, and speaks for the run, on the main rank; elsewhere its methods do nothing."""

    def __init__(self, start: Beginning, ranks: Ranks):
        self.settings, self.progress, self.ranks = start.settings, start.progress, ranks
        self.path, self.source, self.ran_with = Path(start.settings.out_dir), start.source, start.ran_with
        self.newest, self.previous = self.path / "ckpt.pt", self.path / "ckpt.prev.pt"
        self.quoted, self.exported = shlex.quote(start.settings.out_dir), {}
        self.metrics = self.wandb = self.bar = None
        self.peak = 0.0  # FLOP/s of all ranks together, on the main one

    @by_main_rank
    def claim(self, held: ExitStack):
        """Lock the folder, unless `begin` has; clear it; start wandb if it is asked for. Raises: BadInput."""
        if self.source is None:
            held.enter_context(hold_folder(self.path))
        self.clear()
        if self.settings.wandb_log:
            self.wandb = start_wandb(self.settings, self.progress.run_id)

    def clear(self):
        """Remove what a killed run left, and put a damaged checkpoint aside. Raises: BadInput."""
        if self.source is None:
            if nothing_trained(self.path, type(self.settings)):
                # ckpt.pt last: killed in between, this is done again
                for name in (*TOKENIZER_FILES, *reversed(MARKS)):
                    (self.path / name).unlink(missing_ok=True)
            refuse_another_run(self.path)
        elif self.source != self.newest and self.newest.exists():
            with writing(self.path):  # else the next checkpoint would keep it as the previous one
                self.newest.replace(self.path / "ckpt.bad.pt")
        clear_parts(self.path)
        for stale in (self.path / f"{name}.tmp" for name in RUN_FILES):
            try:
                stale.unlink(missing_ok=True)
            except OSError as e:
                remedy = "remove it, or name another --out_dir"
                raise BadInput(
                    f"cannot clear {stale}, left by a killed run: {e.strerror}; {remedy}"
                ) from None

    @by_main_rank
    def open_log(self, header: dict, tokenizer: dict[str, bytes]):
        """Open the log, and write what goes with a run: its settings and its tokenizer's files. Raises:
        BadInput."""
        progress, settings = self.progress, asdict(self.settings)
        log = self.path / "metrics.jsonl"
        self.metrics = Writer(
            log, {"settings": settings, **header}, progress.iter, progress.logged, self.ran_with
        )
        for name, content in tokenizer.items():
            with atomic_write(self.path / name) as f:
                f.write(content)
        write_json(self.path / "config.json", settings, indent=1)

    @by_main_rank
    def log(self, line: dict):
        """Add a line to the log, and to wandb."""
        self.metrics.write(self.progress.iter, line)
        if "train/spike" in line:
            loss, excess = line["train/loss"], line["train/spike"]
            self.tell(f"train/loss {loss:.4f} is {excess:.2f} nats above the median before it")
        if self.wandb is not None:
            self.wandb.log(line, step=self.progress.iter)

    @by_main_rank
    def announce(self, message: str):
        """Print a line."""
        print(message)

    @by_main_rank
    def open_bar(self, device: torch.device, dtype: torch.dtype):
        """Measure what the machine could do at most, then show the progress of the run."""
        self.peak = measure_peak(device, dtype) * self.ranks.size
        steps = self.settings.max_iters
        self.bar = tqdm(total=steps, initial=self.progress.iter, unit="step", disable=None, smoothing=0.05)

    @by_main_rank
    def tick(self, line: dict):
        """One step is done; `line` is what was logged after it, if anything was."""
        if "train/loss" in line:
            shown = {"loss": f"{line['train/loss']:.3f}", "gate": f"{line.get('gate', 1):.2f}"}
            self.bar.set_postfix(shown, tok_s=f"{line['perf/tok_s']:,.0f}", refresh=False)
        self.bar.update()

    @by_main_rank
    def close_bar(self):
        self.bar.close()

    @by_main_rank
    def tell(self, message: str):
        """Print a line about the step that was done, above the progress bar."""
        tqdm.write(f"step {self.progress.iter}: {message}")

    def save(self, module, model, optimizer, totals, meta: dict):
        """Write ckpt.pt: everything that the next step depends on. The one before stays as ckpt.prev.pt. In a
        sharded run every rank writes its part. module: what writes itself, the `model` that trains or a
        Distilled around it."""
        progress = self.progress
        if not (self.ranks.main or self.settings.shard):
            return
        if self.metrics is not None:
            self.metrics.sync()  # the log reaches the disk first, so no line is missing behind a checkpoint
            progress.logged = self.metrics.logged
        meta = {"iter": progress.iter, "phase": model.phase, "gate": model.gate.tolist(), **meta}
        kept = progress.model_dump(exclude_none=True) | {"totals": totals.cpu()}
        file = module.to_file(meta) | {"optimizer": optimizer.state_dict(), "run": asdict(self.settings)}
        file |= {"progress": kept}
        if self.settings.shard:
            from nanonorm import parts

            file = parts.save(self.path, file, self.ranks)
        if self.ranks.main:
            write_file(file, self.newest, kept=self.previous)
            clear_parts(self.path)

    @by_main_rank
    def write_export(self, name: str, file: dict):
        """Write an export, whose meta holds its fold_error."""
        write_file(file, self.path / name)
        self.exported[name] = file["meta"]["fold_error"]

    @by_main_rank
    def finish(self):
        """Say what was exported, how well it was proved, and what comes next."""
        print(f"exported {' and '.join(str(self.path / name) for name in self.exported)}")
        proofs = [
            f"{name} " + ", ".join(f"{error:.1e} in {kind}" for kind, error in errors.items())
            for name, errors in self.exported.items()
        ]
        measure = "largest logit difference from the trained model, relative to the largest logit"
        print(f"{measure}: {'; '.join(proofs)}")
        print(f"next: python bench.py {self.quoted}    or    python sample.py {self.quoted} --prompt=...")
        if self.wandb is not None:
            self.wandb.finish()

    @by_main_rank
    def stopped(self, name: str):
        """Say by which signal the run ended before its end, and how it goes on."""
        resume = f"python train.py --init_from=resume --out_dir={self.quoted}"
        print(f"stopped by {name} at step {self.progress.iter}; go on with: {resume}")
