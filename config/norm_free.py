# A trained Llama without the norms of its upper blocks: distilled from itself while they taper, with its
# begin token as a sink that becomes constants. Of another network, on a corpus as docs/norm-free.md makes it:
#   python train.py config/norm_free.py --dataset=NAME --init_from=PATH --teacher=PATH --sink_token=ID
# The study norm_free is this on SmolLM2-135M and two cores, on stories, books, WikiText-2 and Python, without
# ends of texts (data/windows.py --sink=True). With --taper_from_layer=0 --max_iters=1200 --gate_end=320 the
# gate arrives, but what is left is finite only under the ceiling.

dataset = "norm_free"
init_from = "HuggingFaceTB/SmolLM2-135M-Instruct"
teacher = "HuggingFaceTB/SmolLM2-135M-Instruct"
sink_token = 1  # <|im_start|>

taper = "internal"
taper_from_layer = 12  # of 30
taper_ceiling = 2
site_weight = 2
site_far = 10
site_until = "scale"
ema_rate = 0.1

block_size = 256
batch_size = 8  # 8 * 255 = 2,040 tokens a step
max_iters = 360
learning_rate = 2e-4
min_lr = 2e-5
warmup_iters = 10
grad_clip = 0.7
dtype = "bfloat16"

gate_start = 20
gate_end = 160  # at the earliest
gate_schedule = "linear"
gate_budget = 0.13

eval_interval = 120
log_interval = 5
ckpt_interval = 50
