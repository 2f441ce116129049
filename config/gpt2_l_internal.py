# Internal-TaperLN on GPT-2 Large: the norms in the blocks go, all together; the one before the head stays.
from config.gpt2_l_vanilla import *

out_dir = "out/gpt2_l_internal"
taper = "internal"
gate_start = 30  # Paper
gate_end = 500  # Paper
warmup_iters = 30  # Paper; Code has 15
calib_skip_first = True  # see gpt2.py
aux_weight = 0.1  # Paper: lambda
