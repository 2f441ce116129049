# FakeLN on GPT-2 XL: the norms go one by one. Each sigma becomes its mean of late, gamma trains on.
from config.gpt2_xl_vanilla import *

out_dir = "out/gpt2_xl_fakeln"
taper = "all"
calibration = "mean_scale"
gate_schedule = "sequential"
gate_start = 50  # Code
gate_gaps = (4, 4, 6)  # Code: MLP 50 to 238, queries and keys 242 to 430, values 434 to 716, final 722
aux_weight = 0.01  # Code
anchor_target = "batch"
ema_rate = 1.0  # sigma is the mean over the micro-batches of the last step, as it almost is in Code
