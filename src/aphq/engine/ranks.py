"""Several processes that share the work of one run, as `torchrun` starts them: who I am, and what we tell each other.

Passes that cache activations or average importance are shared by batches of images, optimisation steps by the rows of a
batch; what takes seconds (sampling, percentiles, the scale search) everyone does. Every process holds all cached
activations. Sums are the same for all, so the students stay equal; the first process alone writes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from aphq.engine.launch import is_shared
from aphq.errors import RecipeError, RunError

CPU = torch.device("cpu")
PATIENCE = timedelta(hours=1)  # the others wait while one reads images from a slow disk


@dataclass(frozen=True)
class Ranks:
    """One of `count` processes; alone, everything here costs nothing."""

    rank: int = 0
    count: int = 1
    device: torch.device = CPU
    founded: bool = False  # whether the process group is ours to end

    @classmethod
    def join(cls, device: torch.device) -> Ranks:
        """Meet the other processes, if `torchrun` started any."""
        if not is_shared() or not dist.is_available():
            return cls(device=device)
        founds = not dist.is_initialized()
        if founds:
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=PATIENCE)
        return cls(dist.get_rank(), dist.get_world_size(), device, founds)

    @property
    def first(self) -> bool:
        return self.rank == 0

    def owns(self, number: int) -> bool:
        """Whether the `number`-th piece of shared work is mine."""
        return number % self.count == self.rank

    def share_of(self, batch: int) -> slice:
        """Which rows of a step's batch are mine."""
        if batch % self.count:
            raise RecipeError(
                f"{batch} images per step cannot be shared evenly by {self.count} processes; "
                "choose a number of processes that divides the batch"
            )
        mine = batch // self.count
        return slice(self.rank * mine, (self.rank + 1) * mine)

    def add(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Each tensor summed over the processes, all in one message."""
        if self.count == 1:
            return list(tensors)
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.all_reduce(flat)
        parts = flat.split([tensor.numel() for tensor in tensors])
        return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

    def spread(self, tensor: Tensor, owner: int) -> Tensor:
        """The owner's tensor, for everyone; all bring one of the same shape."""
        if self.count > 1:
            tensor = tensor.to(self.device).contiguous()
            dist.broadcast(tensor, owner)
        return tensor

    def decide(self, flag: bool) -> bool:
        """What the first process says."""
        return bool(self.spread(torch.tensor([int(flag)]), 0).item())

    def agree_that(self, flag: bool) -> bool:
        """Whether all processes say so."""
        return self.count == 1 or int(self.add([torch.tensor([int(flag)], device=self.device)])[0]) == self.count

    def require_same(self, what: str, fingerprint: str) -> None:
        """Refuse to go on unless the first process has the same."""
        mine = torch.tensor(list(hashlib.sha256(fingerprint.encode()).digest()), device=self.device)
        if not torch.equal(self.spread(mine.clone(), 0), mine):
            raise RunError(f"process {self.rank} has {what} other than the first process: give all of them the same")

    def agree(self, module: nn.Module) -> None:
        """Give everyone the first process's parameters and buffers."""
        if self.count > 1:
            for tensor in module.state_dict().values():
                tensor.copy_(self.spread(tensor, 0))

    def leave(self) -> None:
        if self.founded and dist.is_initialized():
            dist.destroy_process_group()
