# FakeLN on GPT-2 Medium: the norms go one by one. Each sigma becomes its mean of late, gamma trains on.
from config.gpt2_m_vanilla import *

out_dir = "out/gpt2_m_fakeln"
taper = "all"
calibration = "mean_scale"
gate_schedule = "sequential"
gate_start = 20  # Code
gate_gaps = (2, 2, 3)  # Code: MLP 20 to 66, queries and keys 68 to 114, values 116 to 185, final 188
aux_weight = 0.1  # Code
anchor_target = "batch"
ema_rate = 1.0  # sigma is the mean over the micro-batches of the last step, as it almost is in Code
