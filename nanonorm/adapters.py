"""LoRA and DoRA on the projections of a network's blocks, by peft: put on, loaded, merged.

Two of our matrices hold several of the projections that papers adapt one by one. They get the ranks of all
together, qkv 3 r and gate_up 2 r, and so can become whatever r for each could make of them; never more than
full rank. alpha / rank is the same for all.
"""

import copy

import torch
import torch.nn as nn

from nanonorm.errors import BadInput, ModelError, needed
from nanonorm.files import check_state, is_plain
from nanonorm.kernels import upcast
from nanonorm.machine import quiet_torchao
from nanonorm.ranks import whole

ADAPTER = ".lora_"  # in the names of an adapter's tensors, and in no others
PROJECTIONS_IN = {"qkv": 3, "gate_up": 2}  # projections in one matrix
MERGE_TOLERANCE = 1e-9  # of the merged layer's output, in float64: two orders of the same sums
PROOF_TOKENS = 64


def adapted(network: nn.Module) -> dict[str, nn.Module]:
    """Name -> layer, of those that carry an adapter."""
    return {name: m for name, m in network.named_modules() if hasattr(m, "lora_A")}


def refuse_unmerged(model: nn.Module):
    """Raises: ModelError for a layer behind a norm that is no plain one, as with an adapter or a
    parametrization, and for any whose weight is no parameter, as a pruned one's: nothing folds into it."""
    behind = {id(layer) for block in model.blocks for layer in (block.attn.qkv, block.mlp.reader)}
    behind.add(id(model.lm_head))
    for name, layer in model.named_modules():
        plain = "weight" in layer._parameters and (type(layer) is nn.Linear or hasattr(layer, "centred"))
        if (id(layer) in behind and not plain) or torch.is_tensor(layer.__dict__.get("weight")):
            cannot = f"cannot fold: {name} is no plain layer"
            raise ModelError(f"{cannot}; merge adapters, remove parametrizations, make pruning permanent")


def learning(network: nn.Module) -> dict[str, nn.Parameter]:
    """Name -> parameter, of those that learn: the adapters, or without any all."""
    named = dict(network.named_parameters())
    return {name: p for name, p in named.items() if ADAPTER in name} or named


def put_on(network: nn.Module, kind: str, rank: int, alpha: float, targets: tuple[str, ...] | None = None):
    """Put adapters of a kind, "lora" or "dora", on layers of every block, in place; the function stays. All
    but the adapters, which are in float32 or better, takes no gradient any more.

    targets: qkv, proj, gate_up (or up) and down; None: all. Raises: BadInput, ModelError.
    """
    quiet_torchao()  # which peft imports where it is installed
    needed("peft.tuners.lora.variants", "peft", f"adapter={kind}")
    import peft

    from nanonorm.dora import Dora

    linears = {n: m for n, m in network.blocks[0].named_modules() if isinstance(m, nn.Linear)}
    there = {name.rpartition(".")[2]: name for name in linears}
    for target in targets or ():
        if target in ("tok_emb", "lm_head"):
            tables = "the tables of embeddings and logits carry no adapters: student and teacher share them"
            raise BadInput(f"{tables}; leave {target} out of adapter_targets")
        if target not in there:
            ways = ", ".join(there)
            raise BadInput(f"adapter_targets={target}: no such layer in a block, which has {ways}")
    chosen = {there[target]: target for target in targets or there}
    odd = [name for name in chosen if type(linears[name]) is not nn.Linear]
    if odd:
        raise ModelError(f"{odd[0]} is centred in the forward pass and carries no adapter; use another norm")
    ranks = {
        n: min(rank * PROJECTIONS_IN.get(target, 1), *linears[n].weight.shape) for n, target in chosen.items()
    }
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=list(chosen),
        rank_pattern=ranks,
        alpha_pattern={name: alpha / rank * r for name, r in ranks.items()},
        use_dora=kind == "dora",
    )
    peft.inject_adapter_in_model(config, network.blocks)
    network.requires_grad_(False)
    for layer in adapted(network).values():
        for name, p in layer.named_parameters():
            if ADAPTER in f".{name}":  # peft makes them in the type of the weights
                p.data = upcast(p.data)
                p.requires_grad_()
        for name, magnitude in layer.lora_magnitude_vector.items():
            layer.lora_variant[name] = Dora
            magnitude.register_buffer("row_lengths", magnitude.weight.detach().clone(), persistent=False)
            measure_rows(layer)
            magnitude.weight.data.copy_(magnitude.row_lengths)


@torch.no_grad()
def measure_rows(network: nn.Module):
    """Compute anew what DoRA divides by: |W + s B A| of each row (out), in the adapters' type. To be called
    after every change of adapters or weights, so once a step: it costs what W costs on as many tokens as the
    rank. (|W|^2 + 2 s W A' B + |s B A|^2 would save nothing, W A' being as large as B A, and could cancel.)
    """
    for layer in adapted(network).values():
        for name, magnitude in layer.lora_magnitude_vector.items():
            A, B = layer.lora_A[name].weight, layer.lora_B[name].weight
            rows = layer.get_base_layer().weight.to(B.dtype, copy=True)  # (out, in)
            rows.addmm_(B, A, alpha=layer.scaling[name])  # in place: autocast narrows no such product
            magnitude.row_lengths.copy_(whole(torch.linalg.vector_norm(rows, dim=1)))


@torch.no_grad()
def load_adapters(network: nn.Module, tensors, path, spread: bool = False):
    """Give adapters the values in a file. spread: a sharded run's are not all in it. Raises: ModelError if
    they are another network's."""
    own = {name: p for name, p in network.named_parameters() if ADAPTER in name}
    if not isinstance(tensors, dict) or not all(is_plain(t) or spread for t in tensors.values()):
        raise ModelError(f"{path} is damaged: its adapters are no tensors")
    check_state(tensors, own, path)
    for name, p in own.items():
        if not (tensors[name].is_meta or p.is_meta):
            p.copy_(tensors[name])
    measure_rows(network)


@torch.no_grad()
def merge(network: nn.Module) -> float:
    """Put adapters into the weights, in place: in float64, cast back once. A DoRA's magnitudes are of rows,
    and a fold scales columns, so this comes before it.

    Returns: the largest error of a layer in float64, relative to its largest output, on random inputs, which
    show any difference of two linear maps. Raises: ModelError if that is above MERGE_TOLERANCE.
    """
    worst, rng = 0.0, torch.Generator().manual_seed(0)
    for name, layer in adapted(network).items():
        exact, base = copy.deepcopy(layer).cpu().double().eval(), layer.get_base_layer()
        measure_rows(exact)
        x = torch.randn(PROOF_TOKENS, exact.in_features, generator=rng, dtype=torch.float64)
        before = exact(x)
        exact.merge()
        after = exact.get_base_layer()(x)
        error = ((after - before).abs().max() / before.abs().max()).item()
        if not error <= MERGE_TOLERANCE:
            raise ModelError(f"{name} with its adapter merged is off by {error:.1e}; not exported")
        worst = max(worst, error)
        linear = nn.Linear(base.in_features, base.out_features, bias=False, device="meta")
        linear.weight = nn.Parameter(exact.get_base_layer().weight.detach().to(base.weight))
        linear.bias = base.bias
        network.set_submodule(name, linear)
    return worst
