# Internal-TaperLN on GPT-2 XL: the norms in the blocks go, all together; the one before the head stays.
from config.gpt2_xl_vanilla import *

out_dir = "out/gpt2_xl_internal"
taper = "internal"
gate_start = 50  # Paper
gate_end = 700  # Paper
calib_skip_first = True  # see gpt2.py
aux_weight = 0.01  # Paper: lambda
