"""A run's network spread over its ranks by torch's own fully_shard (FSDP2): each holds some rows of every
matrix, of its gradient and of AdamW's averages, and has a block whole only while it computes it.

What is smaller than a matrix (gains, shifts, scalars, DoRA's magnitudes, averages of the stream) is whole on
every rank, in float32 or better, and its gradients are summed here. Only the main rank reads or draws the
weights; the others' matrices are on torch's meta device until each is dealt out.
"""

import copy

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from nanonorm.machine import return_freed_memory
from nanonorm.ranks import whole


def emptied(module: nn.Module) -> dict[str, torch.Tensor]:
    """Leave a module its matrices' shapes alone, on the meta device; what is smaller and was never filled
    gets memory. Returns: name -> the values that the matrices had. Parameters that were one stay one."""
    values, made, kept = {}, {}, []
    for name, p in list(module.named_parameters(remove_duplicate=False)):
        kept.append(p)  # or another might be given its id
        if id(p) not in made:
            place = "meta" if p.dim() >= 2 else ("cpu" if p.is_meta else p.device)
            if p.dim() >= 2 or p.is_meta:
                empty = torch.zeros(p.shape, dtype=p.dtype, device=place)
                made[id(p)] = nn.Parameter(empty, requires_grad=p.requires_grad)
                if not p.is_meta:
                    values[name] = p.detach()
            else:
                made[id(p)] = p
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, made[id(p)])
    for part in module.modules():
        for name, b in part.named_buffers(recurse=False):
            if b.is_meta:
                setattr(part, name, torch.zeros(b.shape, dtype=b.dtype))
    return values


class Sharded:
    """A module spread over the ranks, in place.

    module: what is called for a run's losses, a Transformer or a Distilled of two; block: the class whose
    instances are gathered one at a time. The values are the main rank's; matrices that it has none for, those
    of a sharded run's checkpoint, wait for parts.load.
    """

    def __init__(self, module: nn.Module, block: type, device, dtype, ranks):
        self.module, self.ranks, self.device = module, ranks, device
        self.mesh = init_device_mesh(device.type, (ranks.size,))
        values = emptied(module)
        self.plain = copy.deepcopy(module)  # takes no memory for the matrices
        for part in module.modules():
            for name, b in part.named_buffers(recurse=False):
                setattr(part, name, b.to(device))
        for p in module.parameters():
            if p.dim() < 2:
                p.data = p.data.to(device)
        self.spread(block, dtype)
        self.deal(values)
        for network in (part for part in module.modules() if hasattr(part, "bind_gates")):
            network.rope = None if network.rope is None else network.rope.to(device)
            network.bind_gates()

    def spread(self, block: type, dtype):
        """Cut every matrix by its rows. A matrix of two owners, student and teacher, stays one."""
        blocks = [part for part in self.module.modules() if isinstance(part, block)]
        owners = {}
        for part in self.module.modules():
            for name, p in part.named_parameters(recurse=False):
                owners.setdefault(id(p), []).append((part, name))
        inside = {part for of_block in blocks for part in of_block.modules()}
        for _, *others in owners.values():  # fully_shard refuses one that two of its groups share
            for part, name in (owner for owner in others if owner[0] in inside):
                p = getattr(part, name)
                setattr(part, name, nn.Parameter(p.detach(), p.requires_grad) if p.is_meta else p)
        # a matrix that is centred in the forward pass is so in float32
        linears = [part for part in self.module.modules() if isinstance(part, nn.Linear)]
        centred = any(hasattr(part, "centred") for part in linears)
        narrow = dtype if dtype == torch.bfloat16 and not centred else None
        wide = torch.float32 if dtype == torch.bfloat16 else None
        how = {
            "mesh": self.mesh,
            "reshard_after_forward": True,  # the root's as well: else validation would leave it gathered
            "ignored_params": {p for p in self.module.parameters() if p.dim() < 2},
        }
        for part in blocks:
            policy = MixedPrecisionPolicy(narrow, wide, cast_forward_inputs=False)
            fully_shard(part, mp_policy=policy, **how)
        # a table as it is kept: the gradient of a row is a sum over all tokens that looked it up
        fully_shard(self.module, mp_policy=MixedPrecisionPolicy(None, wide, cast_forward_inputs=False), **how)
        for part in blocks:
            register_fsdp_forward_method(part, "alone")
        for first, *others in owners.values():
            p = getattr(*first)
            if isinstance(p, DTensor):
                p = nn.Parameter(torch.empty_like(p, device=self.device), requires_grad=p.requires_grad)
            for part, name in (first, *others):
                setattr(part, name, p)

    @torch.no_grad()
    def deal(self, values: dict[str, torch.Tensor]):
        """Give the ranks the main one's values, a matrix at a time."""
        named = list(self.module.named_parameters())
        has = torch.tensor([name in values for name, _ in named])
        if self.ranks.size > 1:
            dist.broadcast(has, 0, self.ranks.host_group)
        small = [p.data for _, p in named if not isinstance(p, DTensor)] + list(self.module.buffers())
        for t in small if self.ranks.size > 1 else ():
            dist.broadcast(t, 0)
        for (name, p), there in zip(named, has.tolist(), strict=True):
            if there:
                if self.ranks.main:
                    own = values.pop(name).to(self.device, p.dtype).contiguous()
                else:  # never filled
                    own = torch.empty(p.shape, dtype=p.dtype, device=self.device)
                p.to_local().copy_(distribute_tensor(own, self.mesh, [Shard(0)]).to_local())
                del own
                return_freed_memory()

    @torch.no_grad()
    def gathered(self) -> nn.Module | None:
        """The module as one process holds it, on the CPU of the main rank; None elsewhere. A matrix is
        gathered at a time. A teacher stays away."""
        named = dict(self.module.named_parameters(remove_duplicate=False))
        done = {}
        for name, p in list(self.plain.named_parameters(remove_duplicate=False)):
            if name.startswith("teacher."):
                continue
            if id(p) not in done:
                t = whole(named[name].detach())
                done[id(p)] = nn.Parameter(t.cpu()) if self.ranks.main else p
            owner, _, leaf = name.rpartition(".")
            setattr(self.plain.get_submodule(owner), leaf, done[id(p)])
        if not self.ranks.main:
            return None
        for new, old in zip(self.plain.modules(), self.module.modules(), strict=True):
            for name, b in old.named_buffers(recurse=False):
                setattr(new, name, b.cpu())
            if hasattr(old, "phase"):
                new.phase = old.phase
            if hasattr(old, "bind_gates"):
                new.bind_gates()
        self.plain.teacher = None
        return self.plain
