"""AdamW whose averages take 8 bits a number, by torchao (the method: Dettmers et al., arXiv 2110.02861)."""

import torch

from nanonorm.machine import quiet_torchao

quiet_torchao()
from torchao.optim import AdamW8bit  # noqa: E402

SIGNED = {"exp_avg": True, "exp_avg_sq": False}  # the averages, and whether they have a sign


class AdamW8(AdamW8bit):
    """torchao's, with state in files as plain tensors: of an average {"codes": uint8, one a number, "scale":
    float32, one a block of 256}; of what torchao leaves in float32 the tensor."""

    def state_dict(self) -> dict:
        file = super().state_dict()
        return file | {"state": {i: {k: packed(t) for k, t in of.items()} for i, of in file["state"].items()}}

    def load_state_dict(self, file: dict):
        """Raises: ValueError for state of other shapes, or in other types."""
        super().load_state_dict({**file, "state": {}})
        named = [p for group in self.param_groups for p in group["params"]]
        for i, of in file["state"].items():
            step = of["step"].to(torch.float32).clone()
            averages = {k: filled(self._new_buffer(named[i], signed), of[k]) for k, signed in SIGNED.items()}
            self.state[named[i]] = {"step": step, **averages}


def packed(t):
    return {"codes": t.codes, "scale": t.scale} if hasattr(t, "codes") else t


def filled(t, value):
    """An average, given what a file holds of it. Raises: ValueError."""
    pairs = [(t, value)]
    if hasattr(t, "codes") and not isinstance(value, dict):
        raise ValueError(f"an average of {tuple(t.shape)} is not in 8 bits")
    if hasattr(t, "codes"):
        pairs = [(t.codes, value["codes"]), (t.scale, value["scale"])]
    for ours, theirs in pairs:
        if not isinstance(theirs, torch.Tensor) or (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
            raise ValueError(f"an average of {tuple(t.shape)} has another shape or type")
        ours.copy_(theirs)
    return t
