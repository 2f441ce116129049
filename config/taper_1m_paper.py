# taper_1m.py with the paper's gate, which goes down to the end of the run.
from config.taper_1m import *

out_dir = "out/taper_1m_paper"
gate_end_ratio = 1.0
