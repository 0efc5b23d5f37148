"""CPU offload: what a step does not need all the time waits in host memory.

    optimizer    moments and master weights; the update runs there      8 bytes a parameter travel each step
    activations  what blocks save for their backward                    each byte travels out and back
    params       shards, which FSDP gathers from there and updates there: see parallelism/fsdp.py

The first two are ZeRO-Offload's (Ren et al. 2021, section 4) and vDNN's (Rhu et al. 2016, section 3). On CUDA host
memory is pinned and copies run on a stream of their own, beside the computation. On a CPU the same copies are made,
into separate memory: nothing is saved, but all that travels is real.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.profiler import record_function

from memory.footprint import HOST
from models.gpt import GPT

BUCKET_BYTES = 64 * 2**20  # of parameters that are updated at once, while the next ones' gradients arrive
AHEAD = 8  # saved tensors on their way back before the backward asks for them: most of a block's


@dataclass
class Traffic:
    """Bytes that have travelled to host memory and back."""

    out: int = 0
    back: int = 0


class Copies:
    """Copies between a device and host memory, one after the other, beside the computation where that is CUDA."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.traffic = Traffic()
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def empty_like(self, tensor: Tensor) -> Tensor:
        """Host memory for the tensor."""
        with record_function(HOST):
            return torch.empty_like(tensor, device="cpu", pin_memory=self.stream is not None)

    def out(self, source: Tensor, host: Tensor) -> Any:
        """Begins a copy to host memory; the result waits for it to be there."""
        self.traffic.out += source.nbytes
        return self._copy(source, host, source)

    def back(self, host: Tensor, target: Tensor) -> Any:
        """Begins a copy from host memory."""
        self.traffic.back += host.nbytes
        return self._copy(host, target, target)

    def _copy(self, source: Tensor, target: Tensor, on_device: Tensor) -> Any:
        if self.stream is None:
            target.copy_(source)
            return None
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
        on_device.record_stream(self.stream)  # its memory must not be given away before
        return self.stream.record_event()

    def finish(self) -> None:
        """Has the computation wait for all copies."""
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)


class HostOptimizer:
    """An optimizer whose weights and moments lie in host memory, and are updated there.

    In a step gradients come over, in float32, and new weights go back, once each however many micro-batches there were;
    on CUDA a bucket of them travels while another is updated.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        device: torch.device,
        make: Callable[[list[nn.Parameter]], Optimizer],
    ) -> None:
        """Of parameters on a device; `make` gives the optimizer of some."""
        self._parameters = list(parameters)
        self._copies = Copies(device)
        self._buckets = [Bucket(some, make, self._copies) for some in _buckets(self._parameters)]

    @property
    def traffic(self) -> Traffic:
        """What has travelled so far."""
        return self._copies.traffic

    @property
    def host_tensors(self) -> list[Tensor]:
        """Weights, gradients and moments in host memory."""
        weights = [weight for bucket in self._buckets for weight in bucket.weights]
        gradients = [gradient for bucket in self._buckets for gradient in bucket.gradients]
        states = [state for bucket in self._buckets for state in bucket.optimizer.state.values()]
        return [*weights, *gradients, *(x for state in states for x in state.values() if isinstance(x, Tensor))]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of all buckets, whose learning rates may be set."""
        return [group for bucket in self._buckets for group in bucket.optimizer.param_groups]

    def step(self) -> None:
        """Updates the parameters by their gradients."""
        for bucket in self._buckets:
            bucket.fetch()
        for bucket in self._buckets:
            bucket.update()
        self._copies.finish()

    def zero_grad(self) -> None:
        """Gives the gradients' memory back."""
        for parameter in self._parameters:
            parameter.grad = None


class Bucket:
    """Some parameters, and their weights, gradients and moments in host memory."""

    def __init__(
        self, parameters: list[nn.Parameter], make: Callable[[list[nn.Parameter]], Optimizer], copies: Copies
    ) -> None:
        self.parameters = parameters
        self.copies = copies
        self.weights = [nn.Parameter(copies.empty_like(local(parameter))) for parameter in parameters]
        for weight, parameter in zip(self.weights, parameters):
            weight.data.copy_(local(parameter))
        self.gradients = [copies.empty_like(weight) for weight in self.weights]
        self.optimizer = make(self.weights)
        self.arrived: list[Any] = []

    def fetch(self) -> None:
        """Begins to bring the gradients over."""
        self.arrived = []
        for parameter, weight, gradient in zip(self.parameters, self.weights, self.gradients):
            weight.grad = None if parameter.grad is None else gradient
            if parameter.grad is not None:
                self.arrived.append(self.copies.out(local(parameter.grad), gradient))

    def update(self) -> None:
        """Updates the weights and begins to send them back."""
        for event in self.arrived:
            if event is not None:
                event.synchronize()
        with record_function(HOST):
            self.optimizer.step()
        for weight, parameter in zip(self.weights, self.parameters):
            self.copies.back(weight.detach(), local(parameter))


def _buckets(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """The parameters in order, cut into groups of about BUCKET_BYTES."""
    buckets: list[list[nn.Parameter]] = []
    room = 0
    for parameter in parameters:
        if room <= 0:
            buckets.append([])
            room = BUCKET_BYTES
        buckets[-1].append(parameter)
        room -= local(parameter).nbytes
    return buckets


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, without a gradient of its own."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def offload_activations(model: GPT, device: torch.device) -> Traffic:
    """Has what the model's blocks save for backward wait in host memory, in place; returns what travels, as it does.

    With recomputing that is what recomputing keeps, but for the products that `selective` holds outside of autograd.
    Weights stay; what autocast makes of them in bf16 travels.
    """
    copies = Copies(device)
    weights: set[int] = set()

    def note_weights(block: nn.Module, args: Any) -> None:
        weights.update(local(parameter).untyped_storage()._cdata for parameter in block.parameters())

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
        self.order: list[ref[Waiting]] = []
        self.known: WeakValueDictionary[tuple[int, int], Waiting] = WeakValueDictionary()

    def pack(self, tensor: Tensor) -> "View | Tensor":
        """What autograd keeps in the tensor's place; memory behind several saved tensors travels once."""
        if self._stays(tensor):
            return tensor
        storage = StorageWeakRef(tensor.untyped_storage())  # while it is held no other memory has this number
        key = (storage.cdata, tensor._version)
        waiting = self.known.get(key)
        if waiting is None:
            waiting = self.known[key] = Waiting(tensor, storage, self.copies, len(self.order))
            self.order.append(ref(waiting))
        waiting.num_views += 1
        return View(waiting, tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride())

    def _stays(self, tensor: Tensor) -> bool:
        if type(tensor) is not Tensor or tensor.device.type != self.copies.device.type:
            return True
        whole = tensor if tensor._base is None else tensor._base
        return isinstance(whole, nn.Parameter) or tensor.untyped_storage()._cdata in self.weights

    def unpack(self, saved: "View | Tensor") -> Tensor:
        """The tensor, back on its device; those saved just before it set out."""
        if isinstance(saved, Tensor):
            return saved
        storage = saved.waiting.take().untyped_storage()
        index = saved.waiting.index
        for earlier in self.order[max(index - AHEAD, 0) : index]:
            waiting = earlier()
            if waiting is not None:
                waiting.prefetch()
        empty = torch.empty(0, dtype=saved.dtype, device=storage.device)
        return empty.set_(storage, saved.offset, saved.shape, saved.stride)


@dataclass(frozen=True)
class View:
    """A saved tensor, as a part of memory that waits."""

    waiting: "Waiting"
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]


class Waiting:
    """The memory of saved tensors, on the host."""

    def __init__(self, tensor: Tensor, storage: StorageWeakRef, copies: Copies, index: int) -> None:
        self.storage = storage
        self.copies = copies
        self.index = index
        self.num_views = 0  # that are saved
        self.num_taken = 0
        self.device = tensor.device
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        self.host = copies.empty_like(whole)
        self.back: Tensor | None = None
        self.arrived: Any = None
        copies.out(whole, self.host)

    def prefetch(self) -> None:
        """Sets out, unless it has before."""
        if self.back is None and not self.num_taken:
            self._set_out()

    def take(self) -> Tensor:
        """All of it on its device, which is not kept here once each view has been asked for."""
        if self.back is None:
            self._set_out()
        whole = self.back
        assert whole is not None
        if self.arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(self.arrived)
        self.num_taken += 1
        if self.num_taken % self.num_views == 0:
            self.back = self.arrived = None
        return whole

    def _set_out(self) -> None:
        self.back = torch.empty_like(self.host, device=self.device)
        self.arrived = self.copies.back(self.host, self.back)
