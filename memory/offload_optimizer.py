"""memory.offload=[optimizer]: moments, and a master copy of the weights, lie in host memory and are updated there.

After ZeRO-Offload (Ren et al. 2021, section 4). In a step gradients come over, in float32, and new weights go back: 8
bytes a parameter, however many micro-batches there were. On the device stay weights and gradients.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.profiler import record_function

from memory.copies import HOST, Copies, Traffic, own_part

BUCKET_BYTES = 64 * 2**20  # of parameters that are updated at once, while the next ones' gradients arrive

Make = Callable[[list[nn.Parameter]], Optimizer]  # gives the optimizer of some parameters


class HostOptimizer:
    """An optimizer that works on the host: on CUDA a bucket of parameters travels while another is updated."""

    def __init__(self, parameters: Iterable[nn.Parameter], device: torch.device, make: Make) -> None:
        """Of float32 parameters on a device, which may be filled until the first step."""
        self._parameters = list(parameters)
        self._copies = Copies(device)
        self._buckets = [_Bucket(some, make, self._copies) for some in _cut(self._parameters)]

    @property
    def traffic(self) -> Traffic:
        """What has travelled so far."""
        return self._copies.traffic

    @property
    def host_tensors(self) -> list[Tensor]:
        """Weights, gradients and moments in host memory."""
        states = [state for bucket in self._buckets for state in bucket.optimizer.state.values()]
        moments = [x for state in states for x in state.values() if isinstance(x, Tensor)]
        return [*(flat for bucket in self._buckets for flat in (bucket.flat_weights, bucket.flat_gradients)), *moments]

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


class _Bucket:
    """Some parameters, and their weights, gradients and moments in host memory."""

    def __init__(self, parameters: list[nn.Parameter], make: Make, copies: Copies) -> None:
        self.parameters = parameters
        self.copies = copies
        parts = [own_part(parameter) for parameter in parameters]
        sizes = [part.numel() for part in parts]
        # One piece each, since pinned memory comes in powers of two.
        self.flat_weights, self.flat_gradients = (copies.host_memory(sum(sizes), torch.float32) for _ in range(2))
        pieces = zip(self.flat_weights.split(sizes), parts)
        self.weights = [nn.Parameter(piece.view(part.shape)) for piece, part in pieces]
        self.gradients = [piece.view(part.shape) for piece, part in zip(self.flat_gradients.split(sizes), parts)]
        self.optimizer = make(self.weights)
        self.filled = False
        self.arrived: list[torch.cuda.Event | None] = []

    def fetch(self) -> None:
        """Begins to bring the gradients over, and before the first step the weights."""
        self.arrived = []
        for parameter, weight, gradient in zip(self.parameters, self.weights, self.gradients):
            if not self.filled:
                weight.data.copy_(own_part(parameter))
            weight.grad = None if parameter.grad is None else gradient
            if parameter.grad is not None:
                self.arrived.append(self.copies.out(own_part(parameter.grad), gradient))
        self.filled = True

    def update(self) -> None:
        """Updates the weights and begins to send them back."""
        for event in self.arrived:
            if event is not None:
                event.synchronize()
        with record_function(HOST):
            self.optimizer.step()
        for weight, parameter in zip(self.weights, self.parameters):
            self.copies.back(weight.detach(), own_part(parameter))


def _cut(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """The parameters in order, in groups of about BUCKET_BYTES."""
    buckets: list[list[nn.Parameter]] = []
    room = 0
    for parameter in parameters:
        if room <= 0:
            buckets.append([])
            room = BUCKET_BYTES
        buckets[-1].append(parameter)
        room -= own_part(parameter).nbytes
    return buckets
