"""Copies between a device and host memory.

On CUDA host memory is pinned and copies run on a stream of their own, beside the computation. On a CPU the same copies
are made, into separate memory: nothing is saved, but all that travels is real.
"""

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.profiler import record_function

HOST = "host memory"  # the range, in a profile, in which host memory is asked for
LEAVING = 8  # tensors on their way out at a time; for more than that the computation waits


@dataclass
class Traffic:
    """Bytes that have travelled to host memory and back."""

    out: int = 0
    back: int = 0


class Copies:
    """Copies to and from one device, one after the other."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.traffic = Traffic()
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._leaving: deque[tuple[Tensor, torch.cuda.Event]] = deque()

    def host_memory(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """(num_elements,) in host memory, without values."""
        with record_function(HOST):
            return torch.empty(num_elements, dtype=dtype, device="cpu", pin_memory=self.stream is not None)

    def out(self, source: Tensor, host: Tensor) -> torch.cuda.Event | None:
        """Begins a copy to host memory; who reads that has to wait for the event, if there is one.

        Until it is over the source is held here, lest its memory is given away; of more than LEAVING the computation
        waits for the first, or they would pile up where it runs ahead of the copies.
        """
        self.traffic.out += source.nbytes
        event = self._copy(source, host)
        if event is not None:
            self._leaving.append((source, event))
            self._let_go(LEAVING)
        return event

    def back(self, host: Tensor, target: Tensor) -> torch.cuda.Event | None:
        """Begins a copy from host memory; who reads the target has to wait for the event, if there is one."""
        self.traffic.back += host.nbytes
        self._let_go(0)
        event = self._copy(host, target)
        if self.stream is not None:
            target.record_stream(self.stream)  # it may never be read, and is not to be given away before it is there
        return event

    def finish(self) -> None:
        """Has the computation wait for all copies."""
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)
        self._leaving.clear()

    def _copy(self, source: Tensor, target: Tensor) -> torch.cuda.Event | None:
        if self.stream is None:
            target.copy_(source)
            return None
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
        return self.stream.record_event()

    def _let_go(self, num_left: int) -> None:
        while len(self._leaving) > num_left:
            _, event = self._leaving.popleft()
            torch.cuda.current_stream(self.device).wait_event(event)


def own_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, apart from autograd."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
