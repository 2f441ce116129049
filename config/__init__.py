"""Every knob of a training run: its type, default and comment, and whether a resumed run may change it.

The architecture's knobs are declared in model.ModelKnobs and taken from there. nanonorm/cli.py sets them
all from config files and flags; the files of this folder are one run each, and README.md lists them.
"""

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Literal

from forms import begun_as, config_of
from model import NORMS, ModelConfig, ModelKnobs
from nanonorm.cli import name_of, set_knob
from nanonorm.errors import BadInput
from nanonorm.files import phase_and_gates
from nanonorm.knobs import FILLED, V2, Anew, Filled, Needs, Since, brought, facts, off
from nanonorm.schedules import check_gates, gate_remarks, reads_end, reads_start, settle_gates, tapers
from nanonorm.split import keep_windows
from nanonorm.typed import AS_TUPLE, Count, NonNegative, Positive, Range, Seed, Some, Whole, Wholes, hints

# A resumed run is the same run. Only these may differ from what it was started with: none changes what is
# computed, except device, dtype, compile, cuda_graph, shard, by rounding and dropout's masks. A teacher and a
# corpus may have moved: what they hold tells them. A step's windows may be split otherwise, if they stay as
# many: that changes what is computed by rounding, and what is a micro-batch's own (nanonorm/split.py).
AGAIN, SPLIT, MOVED = Anew("resume"), Anew("split"), Anew("moved")
GATES = Needs("taper", tapers)
START, END = Needs("taper", reads_start), Needs("taper", reads_end)
TEACHER = Needs("teacher", lambda c: c.teacher is not None)
ADAPTERS = Needs("adapter", lambda c: c.adapter != "none")
DECAY = Needs("decay_lr", lambda c: c.decay_lr)
Form = hints(ModelConfig)["form"]
Projection = Literal["qkv", "proj", "gate_up", "up", "down", "tok_emb", "lm_head"]  # the last two are refused
Projections = Annotated[Some[Projection], AS_TUPLE]


@dataclass
class Config(ModelKnobs):
    """A training run."""

    vocab_size: Annotated[Annotated[int, Range(2, 2**24)] | None, FILLED] = None  # None: the corpus's
    # the run
    out_dir: Annotated[str | None, AGAIN] = None  # folder it writes; None: out/, files, -key=value of flags
    # scratch, weights (PATH or hub id), resume, or auto: resume, if there is one
    init_from: Annotated[str, AGAIN] = "scratch"
    form: Annotated[Form, Since(3)] = "trained"  # of the network: as the weights have it, not to be set
    max_iters: Count = 10_000  # optimizer steps
    eval_interval: Annotated[Count, AGAIN] = 1000  # steps between passes over the validation split
    log_interval: Annotated[Count, AGAIN] = 10  # steps between log lines
    ckpt_interval: Annotated[Count, AGAIN] = 1000  # steps between checkpoints: the most a kill -9 can cost
    wandb_log: Annotated[bool, AGAIN] = False  # log to Weights & Biases as well
    # offline: in out_dir, for `wandb sync`
    wandb_mode: Annotated[Literal["online", "offline", "disabled"], AGAIN] = "online"
    wandb_project: Annotated[str, AGAIN] = "nanonorm"  # wandb project
    wandb_run_name: Annotated[str | None, AGAIN] = None  # wandb run name; None: the name of out_dir
    # data
    dataset: Annotated[str, MOVED] = "tinystories"  # a folder under data/, or the path of a prepared one
    batch_size: Annotated[Count, SPLIT] = 16  # windows per micro-batch
    # micro-batches per optimizer step, over all ranks together
    gradient_accumulation_steps: Annotated[Count, SPLIT] = 1
    # windows drawn at a time: it, not their split, decides which ones a step has; None: batch_size
    draw_size: Annotated[Count | None, Since(4)] = None
    mask_end: Annotated[bool, V2] = False  # targets that end a text do not count in training
    # optimizer
    optimizer: Annotated[Literal["adamw", "adamw_8bit"], Since(4)] = "adamw"  # 8bit: its averages, by torchao
    learning_rate: NonNegative = 3e-4  # peak learning rate
    weight_decay: NonNegative = 0.0  # on matrices, not on gains and shifts
    beta1: Annotated[float, Range(0.0, 0.999999)] = 0.9  # AdamW
    beta2: Annotated[float, Range(0.0, 0.999999)] = 0.95  # AdamW
    grad_clip: NonNegative = 1.0  # largest global gradient norm; 0 is off
    decay_lr: bool = True  # cosine decay after the warmup
    warmup_iters: Annotated[Whole | None, FILLED] = None  # steps of linear warmup; None: 5% of max_iters
    lr_decay_iters: Annotated[Count | None, DECAY, FILLED] = None  # where it reaches min_lr; None: max_iters
    min_lr: Annotated[NonNegative, DECAY] = 0.0  # where the decay ends
    # taper
    # step that starts the gate, freezes the scale target; None: warmup_iters
    gate_start: Annotated[Whole | None, START, FILLED] = None
    # gate 0 from there; None: by gate_end_ratio or gate_gaps
    gate_end: Annotated[Count | None, END, FILLED] = None
    gate_end_ratio: Annotated[float, Range(0.0, 1.0), END, V2] = 1.0  # of max_iters, where gate_end is None
    # all gates alike, or site by site
    gate_schedule: Annotated[Literal["cosine", "linear", "sequential"], GATES, V2] = "cosine"
    # sequential: steps between MLPs' norms, attentions' (q, k), their values
    gate_gaps: Annotated[Wholes | None, GATES, V2] = None
    gate_order: Annotated[Literal["first", "last"], GATES, Since(4)] = "first"  # sequential: block to begin
    gate_budget: Annotated[Positive | None, GATES, Since(4)] = None  # of KL, or the loss's rise: gates wait
    # a teacher, and adapters
    teacher: Annotated[str | None, AGAIN, V2] = None  # weights: a run, file, Hugging Face folder, hub id
    kl_weight: Annotated[NonNegative, TEACHER, V2] = 1.0  # of KL(teacher || student), at temperature 1
    ce_weight: Annotated[NonNegative, TEACHER, V2] = 0.0  # of the cross-entropy beside it
    # what trains in place of the weights (needs peft)
    adapter: Annotated[Literal["none", "lora", "dora"], V2] = "none"
    # r of a projection; the fused qkv has 3 r, gate_up 2 r, none above full rank
    adapter_rank: Annotated[Count, ADAPTERS, V2] = 64
    # alpha/r multiplies them; None: twice r
    adapter_alpha: Annotated[Positive | None, ADAPTERS, V2, FILLED] = None
    adapter_targets: Annotated[Projections | None, ADAPTERS, V2] = None  # a block's layers; None: all
    # system
    seed: Seed = 1337  # of the weights and of the order of the data
    # cpu, cuda, cuda:1, mps (never tried); auto: a GPU if there is one
    device: Annotated[str, AGAIN] = "auto"
    # bfloat16 is by autocast
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float64"], AGAIN] = "auto"
    # torch.compile the model, or "regional" each block by itself; None: on a GPU the model, sharded: regional
    compile: Annotated[bool | Literal["regional"] | None, AGAIN] = None
    cuda_graph: Annotated[bool, AGAIN, V2] = False  # a step, forward to AdamW, as one CUDA graph (one GPU)
    grad_checkpoint: Annotated[bool, AGAIN, V2] = False  # blocks run again in the backward, to save memory
    backend: Annotated[Literal["auto", "nccl", "gloo"], AGAIN] = "auto"  # of torch.distributed (torchrun)
    shard: Annotated[bool, AGAIN, Since(4)] = False  # each rank holds a part of weights and averages (FSDP2)

    def resolve(self):
        """Fill in the knobs that default to another one and refuse what makes no sense. Returns self."""
        if self.warmup_iters is None:
            self.warmup_iters = max(1, self.max_iters // 20)
        if self.lr_decay_iters is None:
            self.lr_decay_iters = max(self.max_iters, self.warmup_iters + 1)
        settle_gates(self)
        if self.decay_lr and self.warmup_iters >= self.lr_decay_iters:
            decay = f"lr_decay_iters={self.lr_decay_iters}"
            raise BadInput(f"warmup_iters={self.warmup_iters} must be below {decay}")
        if self.dropout and self.cuda_graph:
            raise BadInput("dropout draws anew in each micro-batch, which a CUDA graph cannot; set one")
        if self.decay_lr and self.min_lr > self.learning_rate:
            raise BadInput(f"min_lr={self.min_lr} must not exceed learning_rate={self.learning_rate}")
        check_gates(self)
        if self.form != "trained" and self.init_from == "scratch":
            raise BadInput(f"form={self.form} is not for new weights; leave it out, or name --init_from=PATH")
        self.resolve_distillation()
        return self

    def resolve_distillation(self):
        """Fill in adapter_alpha. Raises: BadInput for a teacher or adapters that make no sense."""
        if self.adapter != "none" and self.adapter_alpha is None:
            self.adapter_alpha = 2.0 * self.adapter_rank
        if self.teacher is not None and not self.kl_weight and not self.ce_weight:
            raise BadInput("kl_weight=0 and ce_weight=0 leave nothing to learn; set one of them")
        if self.teacher is not None and self.mask_end:
            raise BadInput("mask_end=True is not for a student, which learns from every token; leave it out")
        if self.adapter == "none":
            return
        if self.teacher is None:
            needs = "needs teacher=PATH: the weights that it adapts, and that a checkpoint leaves out"
            raise BadInput(f"adapter={self.adapter} {needs}")
        if self.norm == "cbwc" and self.form == "trained":
            centred = "centres the matrices that carry adapters, which would not merge"
            raise BadInput(f"norm=cbwc {centred}; use adapter=none, or norm=layernorm")
        if self.calibration == "mean_scale" and tapers(self):
            reads = "reads qkv in parts, beside its adapter; use calibration=least_squares, or adapter=none"
            raise BadInput(f"calibration=mean_scale {reads}")

    def own_folder(self, files: list[str]) -> str:
        """The folder of a run that names none. Ask before `resolve`, which sets more knobs.

        Not in its name is what a resumed run may set anew, but for weights to start or to learn from. So what
        computes something else goes elsewhere, and --init_from=resume finds a run that no flag gave weights.
        """
        named = {"teacher"} if self.init_from in ("resume", "auto") else {"teacher", "init_from"}
        return f"out/{name_of(self, files, free_on_resume() - named)}"

    def model_config(self, vocab_size: int | None = None) -> ModelConfig:
        """The architecture, with the corpus's `vocab_size` where the run names none. Raises: ModelError."""
        knobs = {f.name: getattr(self, f.name) for f in dataclasses.fields(ModelKnobs)}
        knobs["vocab_size"] = self.vocab_size or vocab_size or ModelConfig.vocab_size
        return ModelConfig(**knobs, form=self.form)

    @classmethod
    def recorded(cls, settings: dict, where: str) -> "Config":
        """The settings that a checkpoint or a log holds, resolved. Raises: BadInput, which names `where`,
        if they are not the knobs of this version: all, but for those that were added later and had their
        defaults."""
        known = {f.name for f in dataclasses.fields(cls)}
        if not known - added_later() <= set(settings) <= known:
            raise BadInput(f"{where}: its settings are those of another version")
        run = cls()
        for name, value in settings.items():
            set_knob(run, name, value, where)
        return run.resolve()

    def started_from(self, file: dict, explicit: set[str], where: str) -> "Config":
        """The settings of a run that starts from the weights in `file`, not resolved yet: the architecture is
        theirs, but for what is named in `explicit` and free. Raises: BadInput, ModelError, naming what
        contradicts them."""
        base = begun_as(config_of(file, where), *phase_and_gates(file, where), where)
        theirs = {f.name: getattr(base, f.name) for f in dataclasses.fields(ModelKnobs)} | {"form": base.form}
        free = free_of_weights()
        if base.form != "trained":  # its norms are what they are
            free = free - {"norm", "coupled_from_layer", "sink_token", *off(ModelKnobs, "taper")}
            if "taper" in explicit and self.taper != "none":
                gone = f"which is {base.form} by now: the norms that a fold takes are gone, and the rest stay"
                remedy = "use taper=none, or start from weights from before the taper"
                raise BadInput(f"taper={self.taper} cannot start from {where}, {gone}; {remedy}")
            explicit = explicit - {"taper"}
        for name in sorted(explicit & theirs.keys() - free):
            asked = getattr(self, name)
            if asked is not None and asked != theirs[name]:
                raise BadInput(f"{name}={asked} contradicts {where}, which has {theirs[name]}; leave it out")
        if "block_size" not in explicit and base.block_size > LONGEST_UNASKED:
            ask = "say how much of it a window takes, as with --block_size=1024"
            raise BadInput(f"{where} has a context of {base.block_size:,} tokens; {ask}")
        if "block_size" in explicit and self.block_size > base.block_size:
            longest = f"block_size={self.block_size} is longer than the {base.block_size} of {where}"
            raise BadInput(f"{longest}; make it smaller")
        within_reach = [name for name, variant in NORMS.items() if base.norm in (name, variant.of)]
        if "norm" in explicit and self.norm not in within_reach:
            ways = " or ".join(within_reach)
            raise BadInput(f"norm={self.norm} cannot start from the {base.norm} of {where}; use {ways}")
        chosen = explicit & {"taper", "aux_weight", "site_weight", "norm"}  # with what they bring
        anew = (explicit | brought(base, *chosen)) & free | {"dropout"}
        if "sink_token" in explicit:  # which takes the place of a sink in the text
            anew.add("calib_skip_first")
        return dataclasses.replace(self, **theirs | {name: getattr(self, name) for name in anew})

    def remarks(self) -> list[str]:
        """What someone who sets these knobs should know."""
        notes = []
        if self.norm == "cbwc" and self.form in ("folded", "weightless"):
            notes.append(f"cbwc, {self.form}, trains as RMSNorm: nothing centres its matrices any more")
        elif self.norm == "cbwc" and self.dropout:
            notes.append("cbwc with dropout is not LayerNorm: dropout gives the stream a mean again")
        return notes + gate_remarks(self)

    def resumed(self, explicit: set[str], run: "Config") -> "Config":
        """The settings that `run` goes on with, when this is what was asked for and `explicit` the knobs
        that were named. Raises: BadInput if that is another run."""
        free = free_on_resume() | free_on_resume(SPLIT) | free_on_resume(MOVED)
        over = {"taper"} if self.taper == "none" and run.form != "trained" else set()  # see started_from
        filled = facts(Config, Filled)
        for name in sorted(explicit - free - over):
            asked, recorded = getattr(self, name), getattr(run, name)
            if asked != recorded and not (asked is None and name in filled):
                remedy = "leave it out, or name another out_dir"
                if name == "max_iters":
                    begin = f"start a new run from this one with --init_from={self.out_dir}"
                    remedy = f"to train on, {begin} and another --out_dir"
                differs = f"{name}={asked} differs from {recorded} of the run in {self.out_dir}"
                raise BadInput(f"{differs}; {remedy}")
        if "teacher" in explicit and (self.teacher is None) != (run.teacher is None):
            began = f"the run in {self.out_dir} began with teacher={run.teacher}"
            raise BadInput(f"{began}; leave teacher={self.teacher} out, or name another out_dir")
        anew = explicit & free - {"init_from"} | {"out_dir"}  # what it began with stays on record
        now = dataclasses.replace(run, **{name: getattr(self, name) for name in anew})
        keep_windows(now, run)
        return now.resolve()


def free_on_resume(fact: Anew = AGAIN) -> set[str]:
    """The knobs that a resumed run may set anew; with SPLIT or MOVED, those that it may on terms."""
    return {name for name, of_knob in facts(Config, Anew).items() if fact in of_knob}


def free_of_weights() -> set[str]:
    """The knobs of the architecture that a run which starts from given weights may set anew."""
    return set(facts(ModelKnobs, Anew))


def added_later() -> set[str]:
    """The knobs that settings recorded by an earlier version lack: there they had what is now the default."""
    return set(facts(Config, Since))


LONGEST_UNASKED = 1024  # tokens of context; beyond, a run has to say how many of them it wants
