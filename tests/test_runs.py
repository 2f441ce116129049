"""When two runs are the same: what is said of their settings, and what train.py makes."""

import shutil
from dataclasses import asdict

import pytest
from conftest import refuses
from running import assert_same_run, flags, train

import data
from config import Config
from nanonorm.cli import parse
from nanonorm.errors import BadInput, ModelError
from nanonorm.knobs import Needs, facts
from scripts.studies import runs
from scripts.studies.runs import read_finished

# Another value for each knob that only some runs read
ANOTHER = {
    "gate_start": 6, "ema_rate": 0.5, "gate_end": 9, "gate_end_ratio": 0.75, "calib_skip_first": True,
    "sink_multiple": 1.2, "calibration": "mean_scale", "gate_schedule": "linear", "gate_gaps": "2,2,3",
    "gate_budget": 0.5,
    "anchor_target": "batch", "anchor_unit": "relative", "coupled_grad": True, "coupled_from_layer": 1,
    "taper_from_layer": 1, "coupled_floor": True, "norm_bias": False, "site_far": 1,
    "site_rate": 0.5, "site_until": "scale", "site_start": 2, "taper_ceiling": 2, "gate_order": "last",
    "dyt_alpha": "(1,1,1)", "kl_weight": 0.5, "ce_weight": 0.5, "adapter_rank": 2, "adapter_alpha": 3,
    "adapter_targets": "qkv", "min_lr": 1e-4, "lr_decay_iters": 40,
}  # fmt: skip
SHORT = {"max_iters": 12, "eval_interval": 12, "ckpt_interval": 12, "gate_start": 3, "gate_end": 8}
PLAIN = {**SHORT, "taper": "none", "aux_weight": 0}
REFUSED_UNREAD = {
    "calib_skip_first", "sink_multiple", "calibration", "gate_gaps", "gate_order", "anchor_target",
    "anchor_unit", "coupled_grad", "coupled_from_layer", "coupled_floor", "taper_from_layer", "norm_bias",
    "dyt_alpha", "site_far", "site_rate", "site_until", "site_start", "taper_ceiling",
}  # fmt: skip
RUNS = {
    "the baseline": PLAIN,
    "anchored": PLAIN | {"aux_weight": 0.5},
    "anchored to each batch": PLAIN | {"aux_weight": 0.5, "anchor_target": "batch"},
    "a taper at a constant rate": SHORT | {"taper": "all", "aux_weight": 0, "decay_lr": False},
}


def settled(knobs: dict) -> Config:
    """The settings as a run has them. Raises: BadInput, ModelError."""
    config = parse(Config, [f"--{name}={value}" for name, value in knobs.items()])[0].resolve()
    config.model_config()
    return config


def unread(knobs: dict) -> dict:
    """{knob that a run does not read, and may be given all the same: another value}."""
    config = settled(knobs)
    others = sorted(set(ANOTHER) - REFUSED_UNREAD)
    return {name: ANOTHER[name] for name in others if not runs.is_read(name, config)}


def test_each_knob_that_only_some_read_is_tried_or_refused():
    assert set(ANOTHER) == set(facts(Config, Needs)) - {"taper_qk", "site_weight"}  # which are never let be
    assert set(ANOTHER) - REFUSED_UNREAD == {name for knobs in RUNS.values() for name in unread(knobs)}
    for name in REFUSED_UNREAD:
        with pytest.raises((BadInput, ModelError)):
            settled(PLAIN | {name: ANOTHER[name]})


def test_a_run_that_logs_more_often_from_a_resume_on_is_whole(corpus, tmp_path):
    """And one that was rolled back past that resume."""
    argv = flags(tmp_path / "run", corpus, **SHORT | {"ckpt_interval": 4, "log_interval": 4})
    train(*argv)
    for interval, steps in ((3, [4, 8, 9, 12]), (2, [4, 8, 10, 12])):
        (tmp_path / "run/ckpt.prev.pt").replace(tmp_path / "run/ckpt.pt")  # as a kill after step 8 leaves it
        train(f"--out_dir={tmp_path / 'run'}", "--init_from=resume", f"--log_interval={interval}")
        header, lines = read_finished(tmp_path / "run")
        assert [line["iter"] for line in lines] == steps
        assert [again["log_interval"] for again in header["resumed"]] == [interval]


def test_a_corpus_is_a_name_or_a_path(corpus, tmp_path, monkeypatch):
    shutil.copytree(corpus, tmp_path / "texts/mine")
    monkeypatch.chdir(tmp_path)
    assert data.corpus_folder("texts/mine") == tmp_path / "texts/mine"
    assert data.corpus_folder(str(corpus)) == corpus
    assert data.corpus_folder("texts/nowhere") == tmp_path / "texts/nowhere"
    (tmp_path / "stdlib").mkdir()
    (tmp_path / "stdlib/meta.json").touch()
    assert data.corpus_folder("stdlib") == data.ROOT / "data/stdlib"
    assert data.corpus_folder(".") == tmp_path and data.corpus_folder("..") == tmp_path.parent
    assert data.corpus_folder("./stdlib") == data.corpus_folder("stdlib/") == tmp_path / "stdlib"
    assert data.corpus_folder(f"../{tmp_path.name}/stdlib") == tmp_path / "stdlib"
    with refuses("an empty name where a corpus is asked for"):
        data.corpus_folder("")
    train(*flags(tmp_path / "run", "texts/mine", **PLAIN | {"max_iters": 2, "eval_interval": 2}))


def test_without_a_config_json_the_checkpoint_says_whose_run_it_is(corpus, tmp_path):
    argv = flags(tmp_path / "run", corpus, **SHORT | {"weight_decay": 5.0})
    train(*argv)
    (tmp_path / "run/config.json").write_text("{")
    for decay, wanted in ((5.0, ("resume", "")), (0.0, ("refused", "weight_decay=5.0, not 0.0"))):
        settings = parse(Config, [*argv, f"--weight_decay={decay}"])[0].resolve()
        state, why = runs.look(runs.PlannedRun("run", tmp_path / "run", [], asdict(settings)))
        assert state == wanted[0] and wanted[1] in why


@pytest.mark.parametrize("name", RUNS)
def test_a_knob_that_is_not_read_changes_nothing(name, corpus, tmp_path):
    """Weights, optimizer and log equal to the bit with every such knob set anew, and one identity."""
    for folder, more in (("as_it_is", {}), ("anew", unread(RUNS[name]))):
        train(*flags(tmp_path / folder, corpus, **RUNS[name] | more))
    assert_same_run(tmp_path / "as_it_is", tmp_path / "anew")
    first, second = (runs.settings_in(tmp_path / folder) for folder in ("as_it_is", "anew"))
    assert first != second and runs.identity(first) == runs.identity(second)
