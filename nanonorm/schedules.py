"""Schedules: the learning rate, the phase and the gates as functions of the step, what each gate governs, and
which gate schedules make sense.

`cfg` is a config.Config, resolved except for settle_gates, which is part of resolving it. Steps count from 0;
what holds at step k holds for optimizer step k.
"""

import math
import statistics
from itertools import accumulate

from nanonorm.errors import BadInput


def lr_at(step: int, cfg) -> float:
    """Linear warmup, then cosine to min_lr."""
    if step < cfg.warmup_iters:
        return cfg.learning_rate * (step + 1) / (cfg.warmup_iters + 1)
    if not cfg.decay_lr:
        return cfg.learning_rate
    t = min(1.0, (step - cfg.warmup_iters) / (cfg.lr_decay_iters - cfg.warmup_iters))
    return cfg.min_lr + 0.5 * (1 + math.cos(math.pi * t)) * (cfg.learning_rate - cfg.min_lr)


def phase_at(step: int, cfg) -> str:
    """ "norm" until gate_start, "scale" from gate_end on, "blend" in between."""
    if step < cfg.gate_start:
        return "norm"
    return "blend" if step < cfg.gate_end else "scale"


def tapers(cfg) -> bool:
    """Whether norms taper in a run: in one that begins from a finished taper or an export none does."""
    return cfg.taper != "none" and cfg.form == "trained"


def reads_start(cfg) -> bool:
    """Whether gate_start means anything to a run: its gates, its anchor or its site loss go by it."""
    anchored = cfg.aux_weight > 0 and cfg.anchor_target == "fixed"
    return tapers(cfg) or anchored or (cfg.site_weight > 0 and cfg.site_until == "norm")


def reads_end(cfg) -> bool:
    """The same of gate_end, where a baseline's site loss ends as that of a taper."""
    return tapers(cfg) or (cfg.site_weight > 0 and cfg.site_until == "blend")


CURVES = {  # gate_schedule -> the gate after `done` of `steps`, where all gates go down alike
    "cosine": lambda done, steps: 0.5 * (1 + math.cos(math.pi * done / steps)),
    "linear": lambda done, steps: 1 - done / steps,
}


def gate_at(step: int, cfg) -> float:
    """The gate of every site, where they go down alike."""
    ends = {"norm": 1.0, "scale": 0.0}
    phase = phase_at(step, cfg)
    if phase in ends:
        return ends[phase]
    return CURVES[cfg.gate_schedule](step - cfg.gate_start, cfg.gate_end - cfg.gate_start)


def mean_gate(gates) -> float:
    """The mean over sites, rounded once: of gates that are all alike it is each of them. gates: (sites)"""
    return statistics.mean(gates.tolist())


# taper -> the kinds of norms that it gates
TAPERED_SITES = {"none": (), "internal": ("block",), "final": ("final",), "all": ("block", "final")}


def gate_sites(c) -> list[str]:
    """The names of the gates of a network, in the order of Transformer.gate: of the norms that taper, the one
    before an attention with a second, ".v", where values have their own. c: a ModelConfig, or a run's."""
    in_block = ["norm_attn", "norm_mlp"]
    if c.calibration == "mean_scale":
        in_block.insert(1, "norm_attn.v")
    if c.taper_qk:
        in_block[-1:-1] = ["attn.norm_q", "attn.norm_k"]
    tapered = TAPERED_SITES[c.taper]
    blocks = range(c.taper_from_layer, c.n_layer) if "block" in tapered else ()
    final = ["norm_final"] if "final" in tapered else []
    return [f"blocks.{i}.{norm}" for i in blocks for norm in in_block] + final


ORDER = {  # a norm's gate, without its block -> when its turn comes
    "norm_mlp": 0, "norm_attn": 1, "attn.norm_q": 1, "attn.norm_k": 1, "norm_attn.v": 2, "norm_final": 3,
}  # fmt: skip


def drop_steps(cfg, sites: list[str]) -> list[int]:
    """The step from which each of `sites` (gate_sites) is at gate 0, where they fall one by one.

    First the MLP norms from the first block that tapers to the last, or with gate_order=last from the last to
    the first, gate_gaps[0] steps apart; so the attention norms for queries and keys, gate_gaps[1] apart, and
    for values, gate_gaps[2]; the final norm at last. From one kind to the next it is a gap of the earlier
    kind. An attention norm that is one site (as with calibration=least_squares) has the turn of queries and
    keys; the final norm waits for the values' turns all the same. gate_order=first is the order of Baroni et
    al. 2025's public code.
    """
    gaps = (*cfg.gate_gaps, 0)
    blocks = cfg.n_layer - cfg.taper_from_layer
    firsts = list(accumulate((gap * blocks for gap in gaps[:3]), initial=cfg.gate_start))
    steps = []
    for site in sites:
        block, kind = site.split(".", 2)[1:] if site.startswith("blocks.") else (0, site)
        turn, before = ORDER[kind], int(block) - cfg.taper_from_layer
        if cfg.gate_order == "last":
            before = blocks - 1 - before
        steps.append(firsts[turn] + gaps[turn] * before)
    return steps


def end_by_ratio(cfg) -> int:
    """Where gate_end_ratio puts the end of a taper."""
    return max(1, round(cfg.gate_end_ratio * cfg.max_iters))


def settle_gates(cfg):
    """Fill in gate_start and gate_end of a run's settings. Raises: BadInput for a schedule that contradicts
    itself."""
    if cfg.gate_start is None:
        cfg.gate_start = cfg.warmup_iters
    one_by_one = cfg.gate_schedule == "sequential"
    if one_by_one and not (tapers(cfg) and cfg.taper in ("internal", "all")):
        needs = "needs taper=internal or all, of which norms go one by one"
        raise BadInput(f"gate_schedule=sequential {needs}")
    if one_by_one != (cfg.gate_gaps is not None):
        raise BadInput("gate_schedule=sequential and gate_gaps go together, as in --gate_gaps='(2,2,3)'")
    if cfg.gate_order != "first" and not one_by_one:
        raise BadInput(f"gate_order={cfg.gate_order} needs gate_schedule=sequential: all gates go down alike")
    if one_by_one and len(cfg.gate_gaps) != 3:
        three = "MLPs' norms, attentions' for queries and keys, for values"
        how = f"as in --gate_gaps='(2,2,3)', not {cfg.gate_gaps}"
        raise BadInput(f"gate_gaps must be three numbers of steps ({three}), {how}")
    last = max(drop_steps(cfg, gate_sites(cfg))) if one_by_one else end_by_ratio(cfg)
    if one_by_one and cfg.gate_end not in (None, last):
        said = f"gate_end={cfg.gate_end} contradicts gate_gaps: the last norm goes at step {last}"
        raise BadInput(f"{said}; leave it out, or set gate_end=None")
    if one_by_one and last <= cfg.gate_start:
        raise BadInput(f"gate_gaps={cfg.gate_gaps} takes every norm at step {last}; make one larger")
    if one_by_one and last > cfg.max_iters:
        said = f"by gate_gaps={cfg.gate_gaps} the last norm goes at step {last}"
        raise BadInput(f"{said}, beyond max_iters={cfg.max_iters}; make them smaller, or the run longer")
    if cfg.gate_end is None:
        cfg.gate_end = last


def check_gates(cfg):
    """Refuse a taper without steps to calibrate on or to go down in, an anchor whose scale is never frozen,
    and a site loss that would end where a taper's could not, or before it begins. Raises: BadInput."""
    unset = "; gate_start is warmup_iters, unless it is set" if cfg.warmup_iters == cfg.gate_start else ""
    if reads_start(cfg) and cfg.gate_start < 1:
        remedy = "set gate_start (or warmup_iters) to 1 or more"
        raise BadInput(f"gate_start=0 leaves no step before it; {remedy}")
    if reads_start(cfg) and not tapers(cfg) and cfg.gate_start >= cfg.max_iters:
        steps = f"gate_start={cfg.gate_start} must be below max_iters={cfg.max_iters}"
        what = f"aux_weight={cfg.aux_weight} begins" if cfg.aux_weight > 0 else "the site loss ends"
        raise BadInput(f"{steps}: there {what}; train longer, or start it earlier{unset}")
    if reads_end(cfg) and not cfg.gate_start < cfg.gate_end <= cfg.max_iters:
        steps = f"gate_start={cfg.gate_start}, gate_end={cfg.gate_end}, max_iters={cfg.max_iters}"
        if cfg.gate_end > cfg.max_iters:
            remedy = f"end it at {cfg.max_iters} at the latest, or train longer"
        elif cfg.max_iters < 2:
            remedy = "train longer: a step to calibrate on, and one to come down in"
        elif cfg.gate_end < 2:
            remedy = "end it later, by gate_end or gate_end_ratio"
        else:
            remedy = f"start it before {cfg.gate_end}"
            if cfg.gate_end == end_by_ratio(cfg):
                remedy += f", where gate_end_ratio={cfg.gate_end_ratio} puts its end"
            remedy += unset
        who = "the gate" if tapers(cfg) else "a site loss, which ends as a gate does,"
        raise BadInput(f"{who} needs gate_start < gate_end <= max_iters, not {steps}; {remedy}")
    ends = {"norm": cfg.gate_start, "blend": cfg.gate_end, "scale": cfg.max_iters}[cfg.site_until]
    if cfg.site_weight > 0 and cfg.site_start >= ends:
        said = f"site_start={cfg.site_start} must be below {ends}, where by site_until={cfg.site_until}"
        raise BadInput(f"{said} the site loss ends")


def gate_remarks(cfg) -> list[str]:
    """What someone who sets these knobs of a taper should know."""
    one_by_one, notes = cfg.gate_schedule == "sequential", []
    if one_by_one and cfg.calibration == "least_squares":
        fixed = "least_squares fixes c and weight_tilde at gate_start, however late a norm goes"
        notes.append(f"{fixed}; with calibration=mean_scale they follow until then")
    if tapers(cfg) and cfg.gate_end_ratio < 1 and cfg.gate_end != end_by_ratio(cfg):
        who = "gate_gaps set" if one_by_one else "the settings have"
        notes.append(f"{who} gate_end={cfg.gate_end}: gate_end_ratio={cfg.gate_end_ratio} is not read")
    if cfg.taper == "final" and cfg.site_weight > 0:
        notes.append("the site loss is of the blocks' norms, none of which tapers with taper=final")
    if tapers(cfg) and cfg.gate_budget is not None and cfg.gate_end == cfg.max_iters:
        notes.append(
            "a gate that waits once will not reach 0 by max_iters, which is gate_end; set that earlier"
        )
    return notes
