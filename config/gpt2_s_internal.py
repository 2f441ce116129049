# Internal-TaperLN on GPT-2 Small: the norms in the blocks go, all together; the one before the head stays.
from config.gpt2_s_vanilla import *

out_dir = "out/gpt2_s_internal"
taper = "internal"
gate_start = 25  # Paper
gate_end = 100  # Paper
calib_skip_first = True  # see gpt2.py
aux_weight = 0.1  # Paper: lambda
