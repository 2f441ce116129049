# GPT-2 fine-tuned until its LayerNorms are gone, a run a row: python train.py config/gpt2.py:s_internal.
#   sizes      s, m, l, xl (124 M, 355 M, 774 M, 1,558 M parameters), and tiny, which gpt2_tiny.py makes
#   protocols  vanilla    trained on with its norms
#              fakeln     the norms go one by one; each sigma becomes its mean of late, gamma trains on
#              internal   TaperLN: the norms in the blocks go, all together; the one before the head stays
#              all        TaperLN: that one goes as well
#
# Code is submarat/removing-layer-norm on GitHub at 583a9e6 (FakeLN): its config.py, and what its train.py
# leaves to Hugging Face's defaults. Paper is TaperNorm, arXiv 2602.10408, Appendix D: it has the steps, the
# windows of the taper and lambda, says that the learning rates are FakeLN's, and no more. So all four
# protocols of a size share its column, and a comparison of them is one of the removal alone; but for L,
# whose warmup is 15 steps in Code and 30 in Paper.
# What neither settles, and how it is here:
# - where the cosine ends: at max_iters for S and M, at 1200 for L and XL, as in Code, for every protocol;
#   so the published L and XL are from the middle of it, at 1.7e-4 and 4.1e-5
# - the scale loss in vanilla: none, it is the plain continuation; in internal and all it begins with the
#   taper, as its target is known then; in fakeln with the first step (Code)
# - averages: they move once a step, over all its micro-batches, with bias correction (Code: with each
#   micro-batch, by 0.1 or less, so that sigma is almost the last step's mean, which it is here)
# - position 0: in FakeLN's mean of sigma, as in Code; not in TaperLN's c, which it would drag down, for its
#   scale in the middle blocks is 14 to 50 times that of the others
# - end of text: an input, never a target (Code), so the loss is the mean over a micro-batch's other targets;
#   all positions count in the scale loss, but FakeLN's target leaves out position 0 and end of text
# - weight decay: none of gamma (Code decays FakeLN's)
# - the first step's learning rate: peak / (warmup_iters + 1) (Code: 0)
# - windows are drawn at random from one stream of tokens, 1,024 targets each (Code: fixed blocks of 1,023,
#   in a random order)
# - float32 products outside of autocast may be TF32 on a GPU (Code: not)
# - memory: grad_checkpoint in L and XL is for 80 GB, where XL's weights, gradients and averages take 25 (Code
#   ran both on 180 GB); never tried there
# - L's published run accumulated 17 micro-batches, Code and this repository 18
# tiny has S's schedule, 10/3 times as long, in which each kind of norm takes S's share: 4 blocks for 12.
# The corpus, about 9 G tokens: python data/openwebtext/prepare.py
# A list has a value a size; what is no list is of all sizes.

# fmt: off
_sizes =                           ["s",    "m",           "l",          "xl",      "tiny"]
_vanilla = {
    "init_from":                   ["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "out/gpt2_tiny"],
    "dataset":                     [*4 * ["openwebtext"],                           "stories_books"],
    "mask_end": True,  # Code: end of text is its padding token, whose targets count nowhere
    "norm": "layernorm",
    "dropout": 0.1,  # Code: GPT-2's own, never switched off in training
    "block_size":                  [1024,   1024,          1024,         1024,      128],
    "batch_size":                  [32,     22,            28,           18,        16],  # Code
    "gradient_accumulation_steps": [16,     23,            18,           28,        1],  # Code: 0.5 M tokens
    "grad_checkpoint":             [False,  False,         True,         True,      False],  # for 80 GB
    "max_iters":                   [300,    500,           600,          800,       1000],  # Paper
    "learning_rate":               [6e-4,   6e-4,          3e-4,         1e-4,      6e-4],  # Code
    "min_lr":                      [3e-4,   3e-4,          4e-5,         2e-5,      3e-4],  # Code
    "warmup_iters":                [25,     10,            15,           20,        83],  # Code
    "lr_decay_iters":              [None,   None,          1200,         1200,      None],  # Code
    "beta1": 0.9, "beta2": 0.999,  # Code: the Trainer's
    "weight_decay": 0.01,  # Code
    "grad_clip": 1.0,  # Code, Paper
    "dtype":                       [*4 * ["bfloat16"],                              "float32"],  # Code, Paper
    "ema_rate": 0.1,  # Paper: mu
    "eval_interval":               [100,    100,           100,          100,       500],
    "ckpt_interval":               [50,     50,            50,           50,        250],
    "log_interval": 1,
}
_fakeln = {
    "taper": "all", "calibration": "mean_scale", "gate_schedule": "sequential", "anchor_target": "batch",
    "gate_start":                  [20,        20,         30,           50,        67],  # Code
    "gate_gaps":                   [(2, 2, 3), (2, 2, 3),  (4, 4, 6),    (4, 4, 6), (20, 20, 30)],  # Code
    "aux_weight":                  [0.1,    0.1,           0.03,         0.01,      0.1],  # Code
    "ema_rate":                    [1.0,    1.0,           1.0,          1.0,       0.1],  # see averages
}
_internal = {
    "taper": "internal", "calib_skip_first": True,  # see position 0
    "gate_start":                  [25,     20,            30,           50,        83],  # Paper
    "gate_end":                    [100,    200,           500,          700,       333],  # Paper
    "warmup_iters":                [25,     10,            30,           20,        83],  # Paper
    "aux_weight":                  [0.1,    0.1,           0.1,          0.01,      0.1],  # Paper: lambda
}
# fmt: on
_protocols = {"vanilla": {}, "fakeln": _fakeln, "internal": _internal, "all": _internal | {"taper": "all"}}


def _row(column: int, protocol: str) -> dict:
    knobs = _vanilla | _protocols[protocol]
    return {name: of[column] if isinstance(of, list) else of for name, of in knobs.items()}


ROWS = {f"{size}_{p}": _row(i, p) for i, size in enumerate(_sizes) for p in _protocols}
