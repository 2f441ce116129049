# taper_3m.py with the paper's gate, which goes down to the end of the run.
from config.taper_3m import *

out_dir = "out/taper_3m_paper"
gate_end_ratio = 1.0
