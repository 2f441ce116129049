# FakeLN on GPT-2 Small: the norms go one by one. Each sigma becomes its mean of late, gamma trains on.
from config.gpt2_s_vanilla import *

out_dir = "out/gpt2_s_fakeln"
taper = "all"
calibration = "mean_scale"
gate_schedule = "sequential"
gate_start = 20  # Code
gate_gaps = (2, 2, 3)  # Code: MLP 20 to 42, queries and keys 44 to 66, values 68 to 101, final 104
aux_weight = 0.1  # Code
anchor_target = "batch"
ema_rate = 1.0  # sigma is the mean over the micro-batches of the last step, as it almost is in Code
