"""This process among those of torchrun, and the signal that asks it to leave."""

import contextlib
import os
import signal
import sys
import time
import warnings

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

from nanonorm.errors import BadInput


class Ranks:
    """This process among those that torchrun started; without torchrun, the only one.

    With one process the collectives do nothing, so callers need not ask how many there are.
    """

    def __init__(self):
        """Raises: BadInput if the environment tells only part of where this process stands."""
        self.rank, self.size, self.local = 0, 1, 0
        names, env = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"), os.environ
        told = [f"{n}={env[n]}" for n in names[:3] if n in env]
        missing = [n for n in names if n not in env]
        if not told:
            return
        try:
            self.rank, self.size = int(env["RANK"]), int(env["WORLD_SIZE"])
            self.local = int(env.get("LOCAL_RANK", 0))
            if not (0 <= self.rank < self.size and 0 <= self.local < self.size) or (
                self.size > 1 and missing
            ):
                raise ValueError
        except (KeyError, ValueError):
            wrong = "but RANK and LOCAL_RANK must be ints from 0 to WORLD_SIZE - 1"
            if missing:
                wrong = f"but no {', '.join(missing)}"
            remedy = "start with torchrun, or unset them"
            raise BadInput(f"the environment has {', '.join(told)}, {wrong}; {remedy}") from None

    @property
    def main(self) -> bool:
        """Whether this is the rank that writes files and talks."""
        return self.rank == 0

    def start(self, device: torch.device, backend: str = "auto", alone: bool = False):
        """Join the others. `backend`: nccl, gloo, or auto for nccl on GPUs and gloo elsewhere. alone: be a
        group of one where there are no others. Raises: BadInput."""
        if self.size == 1 and not alone:
            return
        if backend == "auto":
            backend = "nccl" if device.type == "cuda" else "gloo"
        if backend == "nccl" and not (device.type == "cuda" and dist.is_nccl_available()):
            raise BadInput(f"backend=nccl is for GPUs and a torch that has it, not {device}; leave it out")
        store = dist.HashStore()
        if self.size > 1:
            store = store_of_this_attempt(*next(dist.rendezvous("env://", self.rank, self.size)))
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size)
        self.host_group = dist.new_group(backend="gloo")  # for numbers on the host: no GPU sync

    def sum(self, tensor):
        """Sum over ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)

    def min(self, tensor):
        """Minimum over ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, dist.ReduceOp.MIN)

    def span(self, number: int) -> tuple[int, int]:
        """The lowest and the highest of the ranks' numbers, which live on the host."""
        if self.size == 1:
            return number, number
        ends = torch.tensor([number, -number])
        dist.all_reduce(ends, dist.ReduceOp.MAX, self.host_group)
        highest, lowest = ends.tolist()
        return -lowest, highest

    def largest(self, number: int) -> int:
        """The largest of the ranks' numbers, which live on the host."""
        return self.span(number)[1]

    def told(self, what) -> list:
        """What each rank tells, on every rank."""
        said = [what] * self.size
        if self.size > 1:
            dist.all_gather_object(said, what, self.host_group)
        return said

    def first_word(self, *words: str) -> str:
        """The first word of the lowest rank that has one, on every rank; "" if none has."""
        return next((first for first, *_ in filter(None, self.told(words))), "")

    def differ_in(self, facts: dict) -> dict[str, list[str]]:
        """Of the facts that are not the same on every rank, name -> their values, shortened."""
        told = self.told(facts)
        values = {name: dict.fromkeys(str(of[name]) for of in told) for name in facts}
        return {name: [f"{value:.20}" for value in of] for name, of in values.items() if len(of) > 1}

    def index(self, micro: int) -> int:
        """The index, over all ranks, of this one's micro-batch `micro`."""
        return micro * self.size + self.rank

    def main_first(self, function, *args):
        """Call a function on the main rank, and once it is done there on the others. Returns its value."""
        found = function(*args) if self.main else None
        if self.size > 1:
            dist.barrier(self.host_group)  # a corpus may take longer than nccl would wait
        return found if self.main else function(*args)

    def close(self):
        if dist.is_initialized():
            dist.destroy_process_group()


@torch.no_grad()
def deal(module: nn.Module, device: torch.device, ranks: Ranks):
    """Bring a module to a device, on every rank with the main one's values, a tensor at a time: others may
    have it on the meta device. A parameter of two owners stays one."""
    made = {}
    for part in module.modules():
        for name, t in (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)):
            if t.is_meta and t not in made:
                empty = torch.empty_like(t, device=device)
                made[t] = nn.Parameter(empty, t.requires_grad) if isinstance(t, nn.Parameter) else empty
            if t.is_meta:
                setattr(part, name, made[t])
    module.to(device)
    for t in (*module.parameters(), *module.buffers()) if ranks.size > 1 else ():
        sent = t.contiguous()
        dist.broadcast(sent, 0)
        t.copy_(sent)  # if it lies in another order


def data_parallel(module: nn.Module) -> DistributedDataParallel:
    """A module whose gradients are means over the ranks, which have the same weights already."""
    how = {"init_sync": False, "gradient_as_bucket_view": True, "broadcast_buffers": False}
    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # that the last has another name
        return DistributedDataParallel(module, **how)


def local(t):
    """This rank's rows of a tensor that is spread over the ranks (a DTensor); any other as it is."""
    return t.to_local() if hasattr(t, "to_local") else t


def whole(t):
    """All of a tensor that is spread, on every rank, which all must ask for it; any other as it is."""
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def rows_like(parameter, tensors: dict) -> dict:
    """What an optimizer keeps of a parameter; where that is spread, spread like it: each rank takes its own
    rows, and of what has no values yet zeros."""
    if not hasattr(parameter, "to_local"):
        return tensors
    found = dict(tensors)
    for name, t in tensors.items():
        if isinstance(t, torch.Tensor) and t.shape == parameter.shape:
            found[name] = torch.zeros_like(parameter, requires_grad=False)
            pieces, rank = t.chunk(parameter.device_mesh.size()), parameter.device_mesh.get_local_rank()
            if not t.is_meta and rank < len(pieces):
                found[name].to_local().copy_(pieces[rank])
    return found


def store_of_this_attempt(store: dist.Store, rank: int, size: int) -> dist.Store:
    """The part of the ranks' store that belongs to this attempt alone; returns once every rank has come.

    After a restart torchrun's store still holds the addresses of the ranks that have died, and torch would
    connect to those. TORCHELASTIC_RESTART_COUNT does not tell attempts apart: the torchrun of each machine
    counts its own. So every process draws a number that none before it had, rank 0 tells its own to all
    numbers until every other rank has confirmed it, and that number names the attempt.
    Raises: BadInput on rank 0, and torch's DistStoreError on the others, if a rank is not there within the
    store's timeout."""
    number = store.add("ranks/drawn", 1)
    if rank == 0:
        attempt, told, deadline = number, 0, time.monotonic() + store.timeout.total_seconds()
        while (came := 1 + store.add(f"ranks/confirmed/{attempt}", 0)) < size:
            if time.monotonic() > deadline:
                waited = f"{came} of {size} ranks came within {store.timeout.total_seconds() / 60:g} minutes"
                raise BadInput(f"{waited}; start them all again")
            drawn = store.add("ranks/drawn", 0)
            for other in range(told + 1, drawn + 1):  # entries for dead processes are never read
                store.set(f"ranks/attempt_of/{other}", str(attempt))
            told = drawn
            time.sleep(0.01)
    else:
        attempt = int(store.get(f"ranks/attempt_of/{number}"))
        store.add(f"ranks/confirmed/{attempt}", 1)
    return dist.PrefixStore(f"attempt/{attempt}", store)


class Interrupt:
    """Remembers the signal that asked this process to leave.

    A second Ctrl-C leaves at once; a second SIGTERM is ignored: torchrun forwards the first. talks: the first
    Ctrl-C is answered on stderr, without Python's buffers, in which it may have come.
    """

    def __init__(self, talks: bool = True):
        self.asked, self.talks = 0, talks
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, self.ask)

    def ask(self, signum, frame):
        if self.asked and signum == signal.SIGINT:
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)
        if not self.asked and signum == signal.SIGINT and self.talks:
            said = b"\nsaving after this step; Ctrl-C again leaves at once, with the last checkpoint\n"
            with contextlib.suppress(OSError):  # a closed stderr is no reason not to save
                os.write(2, said)
        self.asked = signum

    def run(self, step, *batch):
        """step(*batch). A compiler at work gets the signals of a terminal and of torchrun as well, and the
        step that it dies under fails: then this process leaves, with the last checkpoint. Raises: as the
        step does."""
        try:
            step(*batch)
        except Exception as e:
            if not self.asked:
                raise
            name = signal.Signals(self.asked).name
            failed = f"stopped by {name} within a step, which failed with it ({type(e).__name__})"
            print(f"{failed}; the last checkpoint stands: --init_from=resume goes on", file=sys.stderr)
            sys.exit(128 + self.asked)

    def leave_from_now_on(self):
        """For when everything is saved: a signal then ends the process."""
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, lambda signum, _: sys.exit(128 + signum))
