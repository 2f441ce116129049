# All-TaperLN on GPT-2 Large: the norm before the head goes as well.
from config.gpt2_l_internal import *

out_dir = "out/gpt2_l_all"
taper = "all"
