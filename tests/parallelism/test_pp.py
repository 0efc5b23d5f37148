"""How a model is cut into stages, what they hold, move and show; that they train as one rank: tests/test_parity.py."""

import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from models.gpt import GPT
from parallelism.distributed_model import DistributedModel
from parallelism.launch import run_ranks
from parallelism.layout import Layout
from parallelism.mesh import make_mesh, start_process_group
from parallelism.nd import parallelize
from parallelism.pp import cut_stage
from parallelism.stop import Stop
from tests.cases import MODELS, SEQ_LEN, SEQUENCES, Case
from tests.cli import ROOT
from tests.parallelism.conftest import Measure, num_parameters
from tests.parity import own_micro_batches

NUM_MICRO_BATCHES = 6
SLEEP = 0.05  # seconds


def test_stages_have_the_names_of_the_whole_and_each_parameter_once() -> None:
    with torch.device("meta"):
        whole = GPT(MODELS["gpt2_untied"])
    names = [name for stage in range(2) for name, _ in cut_stage(whole, [1, 1], stage).named_parameters()]
    assert sorted(names) == sorted(name for name, _ in whole.named_parameters())


class Saved:
    """A tensor that autograd keeps for a backward, counted while it does."""

    num_bytes = most = 0

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # or an output that is kept would keep its own graph
        Saved.num_bytes += tensor.nbytes
        Saved.most = max(Saved.most, Saved.num_bytes)

    def __del__(self) -> None:
        Saved.num_bytes -= self.tensor.nbytes


def keep_count(stop: Stop, out: Path) -> int:
    """Each of four ranks writes the most bytes that autograd kept at a time in a step of each schedule."""
    device = start_process_group("cpu", timeout_minutes=1)
    most = {}
    for schedule in ("naive", "gpipe", "1f1b", "zb_h1"):
        case = Case(Layout(dp=1, pp=4), "gpt2_deep", SEQUENCES // NUM_MICRO_BATCHES, {"pp_schedule": schedule})
        model = laid_out(case, device)
        Saved.num_bytes = Saved.most = 0
        with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
            model.step(own_micro_batches(case, model, 0))
        most[schedule] = Saved.most
    (out / f"{dist.get_rank()}.json").write_text(json.dumps(most))
    dist.destroy_process_group()
    return 0


def slow_down(stop: Stop, out: Path) -> int:
    """The second stage sleeps in each forward; rank 0 writes the slots of the step."""
    device = start_process_group("cpu", timeout_minutes=1)
    case = Case(Layout(dp=1, pp=2), "gpt2_deep", SEQUENCES // NUM_MICRO_BATCHES)
    model = laid_out(case, device)
    if 1 in model.stages:
        model.stages[1].blocks["4"].register_forward_pre_hook(lambda module, inputs: time.sleep(SLEEP))
    model.step(own_micro_batches(case, model, 0))  # makes connections
    model.watch(True)
    model.step(own_micro_batches(case, model, 0))
    spans = model.timeline()
    if spans:
        torch.save([(span.slot.stage, span.slot.kind, span.start, span.end) for span in spans], out / "spans.pt")
    dist.destroy_process_group()
    return 0


def hang(stop: Stop, out: Path) -> int:
    """The last of two ranks does not come to the step."""
    device = start_process_group("cpu", timeout_minutes=0.05)
    case = Case(Layout(dp=1, pp=2), "gpt2", SEQUENCES // NUM_MICRO_BATCHES)
    model = laid_out(case, device, timeout_minutes=0.05)
    if dist.get_rank() == 1:
        time.sleep(60)
    model.step(own_micro_batches(case, model, 0))
    return 0


def laid_out(case: Case, device: torch.device, timeout_minutes: float = 1.0) -> DistributedModel:
    """This rank's part of the model."""
    with torch.device("meta"):
        whole = GPT(MODELS[case.model])
    parallel, _ = case.settings()
    return parallelize(whole, make_mesh(case.layout, device, timeout_minutes), device, parallel, seed=1)


def run(work: str, num_ranks: int, out: Path) -> "subprocess.CompletedProcess[str]":
    """Ranks that do one of the above."""
    command = [sys.executable, "-m", "tests.parallelism.test_pp", work, str(num_ranks), str(out)]
    return subprocess.run(command, cwd=ROOT, timeout=60, capture_output=True, text=True)


def test_as_much_is_in_flight_as_the_schedule_says(tmp_path: Path) -> None:
    """Of what autograd keeps: naive has one micro-batch at a time, GPipe all, 1F1B as many as stages are ahead."""
    done = run("keep_count", 4, tmp_path)
    assert done.returncode == 0, done.stderr
    for rank in range(4):
        most = json.loads((tmp_path / f"{rank}.json").read_text())
        one = most["naive"]
        assert most["gpipe"] == NUM_MICRO_BATCHES * one
        assert most["1f1b"] == min(NUM_MICRO_BATCHES, 4 - rank) * one
        assert 2 * one < most["zb_h1"] <= 4 * one  # where the last rank of 1F1B has one


def test_a_slower_stage_shows_in_the_timeline(tmp_path: Path) -> None:
    done = run("slow_down", 2, tmp_path)
    assert done.returncode == 0, done.stderr
    spans = torch.load(tmp_path / "spans.pt")
    assert Counter((stage, kind) for stage, kind, _, _ in spans) == dict.fromkeys(
        [(0, "F"), (0, "B"), (1, "F"), (1, "B")], NUM_MICRO_BATCHES
    )
    seconds = {
        slot: median(end - start for stage, kind, start, end in spans if (stage, kind) == slot)
        for slot in ((0, "F"), (1, "F"), (1, "B"))
    }
    assert seconds[1, "F"] > SLEEP
    assert seconds[0, "F"] < SLEEP / 2 > seconds[1, "B"]


def test_a_rank_that_hangs_ends_the_run_in_time(tmp_path: Path) -> None:
    began = time.monotonic()
    done = run("hang", 2, tmp_path)
    assert done.returncode == 1
    assert time.monotonic() - began < 30
    assert "rank 0" in done.stderr
    assert "Timed out waiting" in done.stderr
    assert done.stderr.endswith("another rank, which hangs or needs longer than cluster.timeout_minutes.\n")


def test_a_pipeline_moves_the_hidden_states_at_its_boundaries(measure: Measure) -> None:
    """The first rank sends those of the whole batch once and receives their gradients; nothing else moves."""
    measured = measure("llama", 6, pp=2)
    boundary = SEQUENCES * SEQ_LEN * 48
    assert measured["sent"] == measured["received"] == measured["sent_in_evaluation"] == boundary
    assert measured["gathered"] == measured["scattered"] == measured["reduced"] == 0


def test_tied_ends_exchange_their_gradient(measure: Measure) -> None:
    measured = measure("gpt2", 6, pp=2)
    assert measured["sent"] == SEQUENCES * SEQ_LEN * 48 + 65 * 48
    assert measured["reduced"] == measured["gathered"] == 0


def test_fsdp_gathers_a_stage_once_a_step(measure: Measure) -> None:
    """However many micro-batches there are: a pipeline keeps parameters until the step is over."""
    measured = measure("gpt2_even", 3, pp=2, dp=2, dp_shard=2)
    first_stage = num_parameters("gpt2_even", "embedding", "position_embedding", "blocks.0")
    assert measured["gathered"] == measured["scattered"] == first_stage


if __name__ == "__main__":
    work = {"keep_count": keep_count, "slow_down": slow_down, "hang": hang}[sys.argv[1]]
    sys.exit(run_ranks(work, Path(sys.argv[3]), num_ranks=int(sys.argv[2])))
