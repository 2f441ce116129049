# All-TaperLN on GPT-2 Medium: the norm before the head goes as well.
from config.gpt2_m_internal import *

out_dir = "out/gpt2_m_all"
taper = "all"
