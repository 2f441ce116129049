# GPT-2's shape at 1.07 M parameters, 4 * (12 * 128^2 + 13 * 128) + (2,048 + 128) * 128 + 2 * 128, pre-trained
# on children's stories and books: what gpt2.py:tiny_{vanilla,fakeln,internal,all} begin with, where no
# pretrained GPT-2 can be had. The study gpt2_small runs them all. The corpus, text with a line
# <|endoftext|> after every story and book:
#   python data/tinystories/prepare.py --text=train.txt --val_text=val.txt --vocab_size=2048 \
#       --out_dir=data/stories_books

dataset = "stories_books"

n_layer = 4
n_head = 4
n_embd = 128
block_size = 128
positions = "learned"
mlp = "gelu"
bias = True
norm = "layernorm"
norm_eps = 1e-5
dropout = 0.1  # GPT-2's

batch_size = 32  # 32 * 128 = 4,096 tokens a step
max_iters = 8000  # 33 M tokens
learning_rate = 2e-3
min_lr = 1e-4
warmup_iters = 400
lr_decay_iters = 6400  # the last fifth is at min_lr, so that the network is done
beta1, beta2 = 0.9, 0.95
weight_decay = 0.1
grad_clip = 1.0

eval_interval = 400
log_interval = 20
ckpt_interval = 400
