# All-TaperLN on GPT-2 Small: the norm before the head goes as well.
from config.gpt2_s_internal import *

out_dir = "out/gpt2_s_all"
taper = "all"
