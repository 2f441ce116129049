"""What a rank of test_shard.py's start-ups does: train.py until its step and weights are there, once with a
small network, for what torch imports at first use, then, when the test says go, with the one to be measured.

python -m torch.distributed.run --standalone --nproc_per_node=4 tests/starting.py FOLDER SMALL LARGE --flags
"""

import gc
import os
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import begin
import train
from nanonorm import machine


class Started(Exception):
    """Step and weights are there."""


def started(*_, **more):
    raise Started


def start(weights: str, flags: list[str]):
    sys.argv = ["train.py", f"--init_from={weights}", *flags]
    with suppress(Started), ExitStack() as held:
        train.main(held)
    dist.barrier()
    dist.destroy_process_group()
    machine.release_garbage()


if __name__ == "__main__":
    machine.keep_freed_memory()  # as train.py does
    torch.set_num_threads(1)
    train.on_device, begin.refuse_other_tokens = started, lambda *_: None
    folder, small, large, *flags = sys.argv[1:]
    start(small, flags)
    gc.collect()
    (Path(folder) / f"{os.getpid()}.pid").touch()
    while not (Path(folder) / "go").exists():
        time.sleep(0.01)
    start(large, flags)
