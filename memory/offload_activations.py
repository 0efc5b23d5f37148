"""memory.offload=[activations]: what blocks save for their backward waits in host memory, and comes back before it.

After vDNN (Rhu et al. 2016, section 3), by autograd's hooks on saved tensors. Each byte travels out once and back once.
Where a pipeline's schedule halves backwards it stays from the first half to the second.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from memory.copies import Copies, Traffic, own_part
from models.gpt import GPT

AHEAD = 8  # saved tensors on their way back before the backward asks for them: most of a block's


def offload_activations(model: GPT, device: torch.device) -> Traffic:
    """Has what the model's blocks save wait in host memory, in place; the result counts the bytes as they travel.

    With recomputing that is what recomputing keeps, but for the products that `selective` holds outside of autograd.
    Weights stay; what autocast makes of them in bf16 travels. As with all such hooks, autograd does not see whether a
    saved tensor is changed in place later, which no block does.
    """
    copies = Copies(device)
    weights: set[int] = set()

    def note_weights(block: nn.Module, args: Any) -> None:
        weights.update(own_part(parameter).untyped_storage()._cdata for parameter in block.parameters())

    for block in model.blocks.values():
        block.register_forward_pre_hook(torch.compiler.disable(note_weights))  # after FSDP's own: gathered weights
    run_blocks = model.run_blocks

    def run_offloaded(blocks: Sequence[nn.Module], x: Tensor, rotation: Any) -> Tensor:
        saved = SavedTensors(copies, weights)
        with saved_tensors_hooks(saved.pack, saved.unpack):
            return run_blocks(blocks, x, rotation)

    model.run_blocks = run_offloaded
    return copies.traffic


class SavedTensors:
    """What one forward saves, in order: backward asks for it about in reverse."""

    def __init__(self, copies: Copies, weights: set[int]) -> None:
        self.copies = copies
        self.weights = weights  # memory of parameters, which stays where it is
        self.order: list[ref[_Waiting]] = []
        self.known: WeakValueDictionary[tuple[int, int], _Waiting] = WeakValueDictionary()

    def pack(self, tensor: Tensor) -> "_View | Tensor":
        """What autograd keeps in the tensor's place; memory behind several saved tensors travels once."""
        if self._stays(tensor):
            return tensor
        storage = StorageWeakRef(tensor.untyped_storage())  # while it is held no other memory has this number
        key = (storage.cdata, tensor._version)
        waiting = self.known.get(key)
        if waiting is None:
            waiting = self.known[key] = _Waiting(tensor, storage, self.copies, len(self.order))
            self.order.append(ref(waiting))
        return _View(waiting, tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride())

    def _stays(self, tensor: Tensor) -> bool:
        if type(tensor) is not Tensor or tensor.device.type != self.copies.device.type:
            return True
        return tensor.untyped_storage()._cdata in self.weights

    def unpack(self, saved: "_View | Tensor") -> Tensor:
        """The tensor, back on its device; those saved just before it set out, the one needed next ahead."""
        if isinstance(saved, Tensor):
            return saved
        storage = saved.waiting.take().untyped_storage()
        index = saved.waiting.index
        for earlier in reversed(self.order[max(index - AHEAD, 0) : index]):
            waiting = earlier()
            if waiting is not None:
                waiting.prefetch()
        empty = torch.empty(0, dtype=saved.dtype, device=storage.device)
        return empty.set_(storage, saved.offset, saved.shape, saved.stride)


@dataclass(frozen=True)
class _View:
    """A saved tensor, as a part of memory that waits."""

    waiting: "_Waiting"
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]


class _Waiting:
    """The memory of saved tensors, on the host."""

    def __init__(self, tensor: Tensor, storage: StorageWeakRef, copies: Copies, index: int) -> None:
        self.storage = storage
        self.copies = copies
        self.index = index
        self.device = tensor.device
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        self.host = copies.host_memory(whole.numel(), torch.uint8)
        self.back: Tensor | None = None
        self.arrived: torch.cuda.Event | None = None
        copies.out(whole, self.host)

    def prefetch(self) -> None:
        """Sets out, unless it has before."""
        if self.back is None:
            self.back = torch.empty_like(self.host, device=self.device)
            self.arrived = self.copies.back(self.host, self.back)

    def take(self) -> Tensor:
        """All of it on its device. Autograd gives it up, and this with it, when the last that saved it is through."""
        self.prefetch()
        assert self.back is not None
        if self.arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(self.arrived)
        return self.back
