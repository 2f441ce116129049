# Internal-TaperLN on gpt2_tiny.py, on the schedule of gpt2_s_internal.py.
from config.gpt2_tiny_vanilla import *

out_dir = "out/gpt2_tiny_internal"
taper = "internal"
gate_start = 83  # 25 of 300
gate_end = 333  # 100 of 300
calib_skip_first = True  # see gpt2.py
aux_weight = 0.1
