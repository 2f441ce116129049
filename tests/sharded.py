"""What a rank of test_shard.py does: torchrun's, or of an unsharded run the only one.

python -m torch.distributed.run --standalone --nproc_per_node=4 tests/sharded.py FILE.json rmsnorm cbwc
"""

import gc
import json
import sys
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from conftest import VARIANTS, randomize

import train
from config import Config
from data.sampling import train_batch
from model import Block, Transformer
from nanonorm.adapters import learning, measure_rows, put_on
from nanonorm.distill import Distilled, share_weights
from nanonorm.ranks import Ranks, local
from nanonorm.shard import Sharded

DEVICE, STEPS = torch.device("cpu"), 20
TOKENS = torch.randint(61, (3000,), generator=torch.Generator().manual_seed(3)).to(torch.int16)
KNOBS = dict(
    max_iters=STEPS, warmup_iters=2, gate_start=6, gate_end=14, batch_size=2, block_size=16, n_layer=2,
    gradient_accumulation_steps=4, learning_rate=2e-3, weight_decay=0.1, grad_clip=0.5,
)  # fmt: skip
GPT2 = {"positions": "learned", "mlp": "gelu", "bias": True, "tie_embeddings": False}
CASES = {name: (knobs, None) for name, knobs in VARIANTS.items()}  # name -> (knobs, adapters)
CASES |= {
    "gpt2": ({"norm": "layernorm", "taper": "all", "aux_weight": 0.1, "dropout": 0.1, **GPT2}, None),
    "checkpointed": ({"taper": "all", "sink_multiple": 1.5, "grad_checkpoint": True}, None),
    "ceiling": (
        {"taper": "all", "taper_ceiling": 0.7, "site_weight": 1.0, "site_far": 9.0, "site_until": "scale"},
        None,
    ),
    "sink": ({"taper": "internal", "aux_weight": 0.1, "sink_token": 3}, None),
    "regional": ({"taper": "all", "aux_weight": 0.1, "compile": "regional"}, None),
    "regional-checkpointed": (
        {"taper": "all", "sink_multiple": 1.5, "compile": "regional", "grad_checkpoint": True},
        None,
    ),
    "teacher": ({"norm": "coupled", "teacher": "x", "ce_weight": 0.2}, None),
    "lora": ({"norm": "coupled", "coupled_floor": True, "teacher": "x", "adapter": "lora"}, "lora"),
    "dora": ({"norm": "rmsnorm", "taper": "internal", "teacher": "x", "adapter": "dora"}, "dora"),
    "dora-untied": ({"teacher": "x", "adapter": "dora", "tie_embeddings": False}, "dora"),
}
SIZE = {"n_layer": 4, "n_embd": 128, "vocab_size": 1000}
LARGE = {  # networks whose bytes are counted
    "bytes": {**SIZE, "taper": "internal"},
    "bytes-gpt2": {**SIZE, **GPT2, "norm": "layernorm", "n_layer": 3, "n_embd": 192, "vocab_size": 1501},
    "bytes-cbwc": {**SIZE, "norm": "cbwc", "n_layer": 6, "n_embd": 96},
}


def settings(knobs: dict) -> Config:
    return Config(**{**KNOBS, **knobs}).resolve()


def networks(cfg: Config, adapter: str | None, dtype) -> tuple:
    """(the model that trains, the module that is called), of random weights, the same in every process."""
    shape = {"vocab_size": 61, "n_head": 4, "n_embd": 24}
    shape |= {name: getattr(cfg, name) for name in ("vocab_size", "n_embd") if cfg.vocab_size}
    config = cfg.model_config(61)
    config = type(config)(**{**vars(config), **shape, "n_kv_head": 4, "head_dim": None, "hidden": None})
    model = randomize(Transformer(config), std=0.1).to(dtype)
    model.end_token = 7
    if cfg.teacher is None:
        return model, model
    plain = type(config)(**vars(config) | {"norm": "rmsnorm", "taper": "none", "coupled_floor": False})
    teacher = randomize(Transformer(plain), std=0.1).to(dtype)
    if adapter is not None:
        of_teacher = teacher.state_dict()
        model.load_state_dict({n: of_teacher.get(n, t) for n, t in model.state_dict().items()})
        share_weights(model, teacher, "")
        torch.manual_seed(0)
        put_on(model, adapter, 3, 6.0)
        for name, p in model.named_parameters():
            if ".lora_B" in name:  # peft has it begin at 0
                p.data.copy_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
        measure_rows(model)
    return model, Distilled(model, teacher, {"path": "x", "sha256": "0"}, cfg.ce_weight, cfg.kl_weight)


def begun(case: str, ranks: Ranks, shard: bool, dtype=torch.float64, **more) -> train.Step:
    """A run's Step. Of a sharded one every rank but the first has other weights, which must not matter."""
    knobs, adapter = CASES[case]
    cfg = settings({**knobs, "shard": shard, **more})
    model, module = networks(cfg, adapter, torch.promote_types(dtype, torch.float32))
    if adapter is not None:  # as begin.make_trained has it
        for p in {*module.parameters()} - {*learning(model).values()}:
            p.data = p.data.to(dtype) if p.dim() >= 2 else p.data
    if shard:
        if not ranks.main:
            with torch.no_grad():
                for p in module.parameters():
                    p.fill_(torch.nan)
        Sharded(module, Block, DEVICE, dtype, ranks)
    else:
        module.to(DEVICE)
    return train.Step(model, cfg, DEVICE, dtype, ranks, module.train())


def batch_of(step: train.Step, k: int):
    indices = [step.ranks.index(micro) for micro in range(step.micro_steps)]
    return train_batch(TOKENS, step.cfg, k, indices, DEVICE)


def losses(step: train.Step) -> list[list[float]]:
    """Of each step: the sums of the losses over all micro-batches, and the gradients' total norm."""
    found = []
    for k in range(STEPS):
        step.at(k)
        _, norms = step(*batch_of(step, k))
        step.ranks.sum(step.totals)
        found.append([*step.totals.tolist(), torch.linalg.vector_norm(norms).item()])
        step.totals.zero_()
    assert step.first_bad() is None
    return found


def end_of(ranks: Ranks, shard: bool, fault: str) -> str | int | None:
    """With what a run ends on this rank if on the last one alone the losses from step 3 on are not finite,
    or a weight after step 4 is not; the gradients are."""
    step = begun("layernorm-internal-aux", ranks, shard)
    last = ranks.rank == ranks.size - 1

    def infinite(module, args, losses):
        hit = last and fault == "loss" and module.training and step.at_step >= 3
        return losses._replace(total=losses.total + torch.inf) if hit else None

    step.module.register_forward_hook(infinite)
    for k in range(5):
        step.at(k)
        step(*batch_of(step, k))
    if last and fault == "weight":
        local(step.learns["blocks.1.mlp.down.weight"].detach()).fill_(torch.nan)
    try:
        step.check(partial(batch_of, step), "start anew", weights=True)
    except SystemExit as e:
        return e.code
    return None


def narrow(ranks: Ranks, shard: bool) -> dict:
    """A run in bfloat16 with a micro-batch a rank: its losses, and of each step and matrix whether the
    gradient of this rank is one that bfloat16 holds."""
    case, knobs = "layernorm-internal-aux", {"gradient_accumulation_steps": 2, "grad_clip": 0.0}
    step, rounded = begun(case, ranks, shard, torch.bfloat16, **knobs), []

    def look(*_):
        grads = [local(p.grad) for p in step.trained.values() if p.dim() == 2]
        rounded.extend(torch.equal(g, g.bfloat16().float()) for g in grads)

    step.optimizer.register_step_pre_hook(look)
    return {"losses": losses(step), "rounded": rounded}


def held() -> int:
    """Bytes of all tensors in this process."""
    with_grads = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor)]
    with_grads += [t.grad for t in with_grads if t.is_leaf and t.grad is not None]
    storages = [local(t.detach()).untyped_storage() for t in with_grads if not t.is_meta]
    return sum({s.data_ptr(): s.nbytes() for s in storages if s.nbytes()}.values())


def bytes_of(step: train.Step) -> dict:
    """What a training in float32 holds between backward and optimizer, per rank."""
    found = []
    step.optimizer.register_step_pre_hook(lambda *_: found.append(held()))
    losses(step)
    return {"held": max(found), "parameters": sum(p.numel() for p in step.model.parameters())}


def main(path: str, *cases: str):
    ranks = Ranks()
    ranks.start(DEVICE, "gloo", alone=True)
    found = {}
    for case in cases:
        torch._dynamo.reset()
        if case in LARGE:
            CASES[case] = LARGE[case], None
            found[case] = bytes_of(begun(case, ranks, True, torch.float32))
            gc.collect()
        elif case == "ends":
            kinds = [(shard, fault) for shard in (True, False) for fault in ("loss", "weight")]
            found[case] = [end_of(ranks, *kind) for kind in kinds]
        elif case == "narrow":
            found[case] = narrow(ranks, True)
        else:
            found[case] = [losses(begun(case, ranks, shard)) for shard in (True, False)]
    Path(f"{path}.{ranks.rank}").write_text(json.dumps(found))
    ranks.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
