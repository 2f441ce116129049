# The same with CoupledNorm in every block.
from config.gpt2_124m_baseline import *

out_dir = "out/gpt2_124m_coupled"
norm = "coupled"
