# FakeLN on gpt2_tiny.py: 4 blocks in place of 12, and each kind of norm takes its share of gpt2_s_fakeln.py.
from config.gpt2_tiny_vanilla import *

out_dir = "out/gpt2_tiny_fakeln"
taper = "all"
calibration = "mean_scale"
gate_schedule = "sequential"
gate_start = 67  # 20 of 300
gate_gaps = (20, 20, 30)  # MLP 67 to 127, queries and keys 147 to 207, values 227 to 317, final 347
aux_weight = 0.1
anchor_target = "batch"
ema_rate = 0.1  # Code's, which has a step of one micro-batch here
