# FakeLN on GPT-2 Large: the norms go one by one. Each sigma becomes its mean of late, gamma trains on.
from config.gpt2_l_vanilla import *

out_dir = "out/gpt2_l_fakeln"
taper = "all"
calibration = "mean_scale"
gate_schedule = "sequential"
gate_start = 30  # Code
gate_gaps = (4, 4, 6)  # Code: MLP 30 to 170, queries and keys 174 to 314, values 318 to 528, final 534
aux_weight = 0.03  # Code
anchor_target = "batch"
ema_rate = 1.0  # sigma is the mean over the micro-batches of the last step, as it almost is in Code
