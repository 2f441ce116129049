# all_taper_30m.py with the paper's gate, which goes down to the end of the run.
from config.all_taper_30m import *

out_dir = "out/all_taper_30m_paper"
gate_end_ratio = 1.0
