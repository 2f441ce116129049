# taper_9m.py with the paper's gate, which goes down to the end of the run.
from config.taper_9m import *

out_dir = "out/taper_9m_paper"
gate_end_ratio = 1.0
