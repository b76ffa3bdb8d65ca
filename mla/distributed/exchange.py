"""Tensors that go round a process group: everybody sends to one rank and receives from another, while work goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mla.errors import ArgumentError, DTypeError

Group = dist.ProcessGroup | DeviceMesh


def as_process_group(group: Group | None) -> dist.ProcessGroup:
    """Return the process group of a one-dimensional mesh, of None (all ranks), or the group itself.

    Raises
    ------
    ArgumentError
        torch.distributed is not initialised, the mesh has several dimensions, or this process is not in the group.
    DTypeError
        Something else than a group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise ArgumentError("torch.distributed is not initialised; call torch.distributed.init_process_group first")
    if group is None:
        group = dist.group.WORLD
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            names = group.mesh_dim_names or group.ndim
            raise ArgumentError(f"group must be a mesh of one dimension, got one of {names}; pass mesh[name]")
        return group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise DTypeError(f"group must be a ProcessGroup, a DeviceMesh or None, got {type(group).__name__}")
    if dist.get_rank(group) < 0:
        raise ArgumentError("group does not contain this process")
    return group


@dataclass(slots=True)
class Arrival:
    """Tensors on their way; those that were sent are kept until then."""

    works: list[dist.Work]
    received: list[torch.Tensor]
    sent: list[torch.Tensor]

    def wait(self) -> list[torch.Tensor]:
        """Return what was received. On a GPU the current stream waits, and the host does not."""
        for work in self.works:
            work.wait()
        self.sent.clear()
        return self.received


def exchange(tensors: Sequence[torch.Tensor], shift: int, group: dist.ProcessGroup) -> Arrival:
    """Send tensors `shift` ranks on in the group, and receive as many of the same shapes from `shift` ranks back.

    Everybody in the group calls this in the same order. NCCL and RCCL work on a stream of their own, behind what the
    current stream holds now.

    Notes
    -----
    An all-to-all in which one rank alone gets something is one call of the host, a batch of sends and receives is
    several; on the wire both are the same sends and receives.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    arrival = Arrival([], [], [])
    for tensor in tensors:
        sent = tensor.contiguous()
        received = torch.empty_like(sent)
        counts = [0] * world, [0] * world
        counts[0][(rank - shift) % world] = counts[1][(rank + shift) % world] = sent.nbytes
        work = dist.all_to_all_single(_as_bytes(received), _as_bytes(sent), *counts, group, async_op=True)
        arrival.works.append(work)
        arrival.received.append(received)
        arrival.sent.append(sent)
    return arrival


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
