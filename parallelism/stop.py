"""A rank's ear for the signals that ask a run to stop."""

import os
import signal
import time
from types import FrameType


class Stop:
    """Called, says which signal has asked this rank to stop, or 0.

    A rank that calls it promises to stop after the step it is in. Until the first call there is no step to finish, and
    a signal ends the rank at once. So does a second one where `impatient`, unless within a second of the first: a
    Ctrl-C reaches a rank twice, from the terminal and from torchrun.
    """

    def __init__(self, *signals: int, impatient: bool) -> None:
        self._impatient = impatient
        self._promised = False
        self._received: tuple[int, float] | None = None
        for number in signals:
            signal.signal(number, self._handle)

    def __call__(self) -> int:
        self._promised = True
        return self._received[0] if self._received else 0

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        second = self._received is not None and now - self._received[1] > 1
        if not self._promised or (second and self._impatient):
            os._exit(128 + number)
        self._received = self._received or (number, now)
