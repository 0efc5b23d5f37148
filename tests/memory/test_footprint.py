"""Whose memory is whose: allocations of known sizes, and what a run writes of a model's."""

from pathlib import Path
from threading import Thread

import pytest
import torch
from torch import Tensor
from torch.profiler import record_function

from memory.footprint import (
    BACKWARD,
    FORWARD,
    GATHERED,
    HOST,
    OPTIMIZER,
    Footprint,
    draw_footprint,
    peaks,
)

CPU = torch.device("cpu")
KB = 1024


def memory(kilobytes: int) -> Tensor:
    """So much memory."""
    return torch.empty(kilobytes * KB, dtype=torch.uint8)


def held_at(footprint: Footprint, phase: str | None) -> dict[str, int]:
    """Kilobytes by kind, but for those that are nothing, after the last event in a phase of the last step."""
    held = [moment.held for moment in footprint.steps[-1] if moment.phase == phase][-1]
    return {kind: num_bytes // KB for kind, num_bytes in held.items() if num_bytes >= KB}


def test_what_a_forward_leaves_is_an_activation_and_what_goes_in_it_is_temporary() -> None:
    footprint = Footprint(CPU, {}, num_steps=1)
    with footprint.step():
        with record_function(FORWARD):
            kept, gone = memory(100), memory(30)
            del gone
            last = memory(1)
        with record_function(BACKWARD):
            other = memory(7)
            del kept, other
            end = memory(2)
        del last, end
    found = footprint.measured()
    assert found is not None
    assert held_at(footprint, FORWARD) == {"activations": 101}
    assert held_at(footprint, BACKWARD) == {"activations": 1, "gradients": 2}
    in_forward = {kind: num_bytes // KB for kind, num_bytes in found["phases"][FORWARD].items() if num_bytes}
    assert in_forward == {"activations": 100, "temporaries": 30}  # the forward's peak
    assert found["activations"] == 100 * KB  # the step's


@pytest.mark.parametrize(("name", "kind"), [(HOST, "host"), (f"{GATHERED} (blocks.0)", "parameters")])
def test_what_memory_is_asked_for_says_what_it_is(name: str, kind: str) -> None:
    footprint = Footprint(CPU, {}, num_steps=1)
    with footprint.step(), record_function(FORWARD):
        with record_function(name):
            some = memory(50)
        more = memory(1)
    footprint.measured()
    assert held_at(footprint, FORWARD)[kind] == 50
    del some, more


def test_owners_say_what_is_theirs_whenever_it_came() -> None:
    weights, gradients, moments = [memory(100)], list[Tensor](), list[Tensor]()
    owners = {"parameters": lambda: weights, "gradients": lambda: gradients, "optimizer": lambda: moments}
    footprint = Footprint(CPU, owners, num_steps=2)
    for _ in range(2):
        with footprint.step():
            with record_function(FORWARD):
                torch.empty(10)
            with record_function(BACKWARD):
                gradients.append(memory(40))
            footprint.note()
            with record_function(OPTIMIZER):
                moments = moments or [memory(80)]
                gradients.clear()
        footprint.measured()
        assert held_at(footprint, OPTIMIZER) == {"parameters": 100, "optimizer": 80}
        assert held_at(footprint, BACKWARD)["gradients"] == 40
    assert held_at(footprint, FORWARD) == {"parameters": 100, "optimizer": 80}  # of the second step


def test_what_a_step_asks_for_outside_of_its_phases_is_there_in_the_next() -> None:
    """As a pipeline's buffers are."""
    footprint, kept = Footprint(CPU, {}, num_steps=2), []
    for _ in range(2):
        with footprint.step():
            kept.append(memory(100))
            with record_function(FORWARD):
                torch.empty(10)
        footprint.measured()
    assert held_at(footprint, FORWARD) == {"temporaries": 200}


def test_what_is_given_back_between_two_steps_is_gone() -> None:
    footprint = Footprint(CPU, {}, num_steps=2)
    for _ in range(2):
        with footprint.step():
            kept = memory(100)
            with record_function(FORWARD):
                torch.empty(10)
        footprint.measured()
        del kept
    assert held_at(footprint, FORWARD) == {"temporaries": 100}


def test_memory_from_before_is_held_as_long_as_its_owner_says_so() -> None:
    """DDP's first buckets are older than all that is watched, and are exchanged for others in the second step."""
    bucket, gradients = memory(40), list[Tensor]()
    footprint = Footprint(CPU, {"gradients": lambda: gradients}, num_steps=2)
    for kilobytes in (40, 41):
        with footprint.step():
            with record_function(BACKWARD):
                if kilobytes == 41:
                    bucket = memory(41)
                gradients = [bucket]
            footprint.note()
            with record_function(OPTIMIZER):
                gradients = []
                torch.empty(10)
        footprint.measured()
        assert held_at(footprint, OPTIMIZER) == {"gradients": kilobytes}


def test_the_peak_is_the_device_s_whatever_the_host_holds_then() -> None:
    footprint = Footprint(CPU, {}, num_steps=1)
    with footprint.step(), record_function(FORWARD):
        most = memory(300)
        del most
        with record_function(HOST):
            there = memory(900)
        some = memory(100)
    found = footprint.measured()
    assert found is not None
    assert found["temporaries"] == 300 * KB
    assert found["host"] == 0
    del there, some


def test_a_step_without_any_memory_is_not_known() -> None:
    footprint = Footprint(torch.device("cuda", 7), {}, num_steps=1)  # of which no event comes
    with footprint.step():
        memory(1)
    assert footprint.measured() is None


def test_only_the_first_steps_are_watched() -> None:
    footprint = Footprint(CPU, {}, num_steps=0)
    with footprint.step():
        footprint.note()
    assert footprint.measured() is None
    assert footprint.steps == []


def test_a_step_that_fails_fails_as_it_would_unwatched() -> None:
    footprint = Footprint(CPU, {}, num_steps=1)
    with pytest.raises(ZeroDivisionError), footprint.step():
        raise ZeroDivisionError
    footprint.close()
    again = Footprint(CPU, {}, num_steps=1)
    with again.step():
        pass
    again.close()


def test_of_many_moments_the_fullest_are_kept() -> None:
    footprint = Footprint(CPU, {}, num_steps=1)
    with footprint.step(), record_function(FORWARD):
        for number in range(20_000):
            memory(1000 if number == 777 else 1)
    found = footprint.measured()
    assert found is not None
    assert found["temporaries"] == 1000 * KB
    assert len(footprint.steps[0]) <= 1300


def test_what_another_thread_gives_back_is_not_held_for_ever() -> None:
    """As threads of collectives do, which the profiler does not watch."""
    footprint, held = Footprint(CPU, {}, num_steps=3), list[Tensor]()
    for _ in range(3):
        with footprint.step():
            with record_function(BACKWARD):
                held.append(memory(100))
                kept = memory(10)
            thread = Thread(target=held.clear)
            thread.start()
            thread.join()
            with record_function(OPTIMIZER):
                torch.empty(10)
            del kept
        footprint.measured()
    assert held_at(footprint, BACKWARD) == {"gradients": 110}


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    footprint = Footprint(CPU, {}, num_steps=1)
    with footprint.step(), record_function(FORWARD):
        kept = memory(100), memory(1)
    footprint.measured()
    draw_footprint(footprint.steps, tmp_path / "footprint.png", "memory")
    assert (tmp_path / "footprint.png").read_bytes().startswith(b"\x89PNG")
    assert peaks(footprint.steps[0])["activations"] >= 100 * KB
    del kept
