# GPT-2 fine-tuned until its LayerNorms are gone: what the runs of all sizes and protocols share. The files
# named vanilla hold a size's numbers and keep the norms; fakeln, internal and all start from them.
#
# Code is submarat/removing-layer-norm on GitHub at 583a9e6 (FakeLN): its config.py, and what its train.py
# leaves to Hugging Face's defaults. Paper is TaperNorm, arXiv 2602.10408, Appendix D: it has the steps, the
# windows of the taper and lambda, says that the learning rates are FakeLN's, and no more. So all four
# protocols of a size share what is here, and a comparison of them is one of the removal alone; but for L,
# whose warmup is 15 steps in Code and 30 in Paper.
# What neither settles, and how it is here:
# - where the cosine ends: at max_iters for S and M, at 1200 for L and XL, as in Code, for every protocol
# - the scale loss in vanilla: none, it is the plain continuation; in internal and all it begins with the
#   taper, as its target is known then; in fakeln with the first step (Code)
# - averages: they move once a step, over all its micro-batches, with bias correction (Code: with each
#   micro-batch, by 0.1 or less, so that sigma is almost the last step's mean, which it is here)
# - position 0: in FakeLN's mean of sigma, as in Code; not in TaperLN's c, which it would drag down, for its
#   scale in the middle blocks is 14 to 50 times that of the others
# - end of text: an input, never a target (Code), so the loss is the mean over a micro-batch's other targets;
#   all positions count in the scale loss, but FakeLN's target leaves out position 0 and end of text
# - weight decay: none of gamma (Code decays FakeLN's)
# - the first step's learning rate: peak / (warmup_iters + 1) (Code: 0)
# - windows are drawn at random from one stream of tokens, 1,024 targets each (Code: fixed blocks of 1,023,
#   in a random order)
# - float32 products outside of autocast may be TF32 on a GPU (Code: not)
# - L's published run accumulated 17 micro-batches, Code and this repository 18
# The corpus, about 9 G tokens: python data/openwebtext/prepare.py

out_dir = "out/gpt2"
init_from = "gpt2"  # hub id, or a folder that save_pretrained wrote
dataset = "openwebtext"
mask_end = True  # Code: end of text is its padding token, whose targets count nowhere

block_size = 1024
norm = "layernorm"
dropout = 0.1  # Code: GPT-2's own, never switched off in training

beta1, beta2 = 0.9, 0.999  # Code: the Trainer's
weight_decay = 0.01  # Code
grad_clip = 1.0  # Code, Paper
dtype = "bfloat16"  # Code, Paper: by autocast; the weights and AdamW's averages are float32

ema_rate = 0.1  # Paper: mu

eval_interval = 100
log_interval = 1
ckpt_interval = 50
