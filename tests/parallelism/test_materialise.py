"""No rank ever holds the whole model, measured by the operating system."""

import subprocess
import sys
from pathlib import Path

import pytest

from parallelism.launch import run_ranks
from parallelism.stop import Stop
from tests.cli import ROOT

WIDE = {"layers": 12, "dim": 768, "heads": 12, "context": 64, "vocab_size": 1000, "ffn_dim": 3072}
PARAMETERS = 12 * 12 * 768**2  # of the blocks' matrices


def build(stop: Stop, dp: int, dp_shard: int, tp: int, out: Path) -> int:
    """One rank: builds a model; rank 0 writes the bytes by which its memory grew, at the highest."""
    import torch
    import torch.distributed as dist

    from models.gpt import GPT
    from parallelism.layout import Layout
    from parallelism.mesh import make_mesh, start_process_group
    from parallelism.nd import parallelize
    from tests.cases import PARALLEL
    from tests.models.presets import model_config

    device = start_process_group("cpu", timeout_minutes=1)
    mesh = make_mesh(Layout(dp=dp, dp_shard=dp_shard, tp=tp), device, 1)
    (torch.ones(64, 64) @ torch.ones(64, 64)).sum()  # what torch allocates once is not the model's
    with torch.device("meta"):
        model = GPT(model_config("gpt2", **WIDE))
    before = resident("VmRSS")
    parallelize(model, mesh, device, PARALLEL, seed=0)
    if dist.get_rank() == 0:
        out.write_text(str(resident("VmHWM") - before))
    dist.destroy_process_group()
    return 0


def resident(key: str) -> int:
    """Bytes of this process in memory: VmRSS now, VmHWM at the highest."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("dp", "dp_shard", "tp"),
    [pytest.param(4, 4, 1, marks=pytest.mark.slow), pytest.param(1, 1, 4, marks=pytest.mark.slow), (2, 2, 2)],
)
def test_building_takes_the_shard_and_one_parameter(dp: int, dp_shard: int, tp: int, tmp_path: Path) -> None:
    out = tmp_path / "grown"
    arguments = [str(dp), str(dp_shard), str(tp), str(out)]
    subprocess.run(
        [sys.executable, "-m", "tests.parallelism.test_materialise", *arguments], cwd=ROOT, check=True, timeout=60
    )
    whole, largest = PARAMETERS * 4, 3072 * 768 * 4
    assert whole / 4 < int(out.read_text()) < whole / 4 + 4 * largest  # far below the whole


if __name__ == "__main__":
    dp, dp_shard, tp = map(int, sys.argv[1:4])
    sys.exit(run_ranks(build, dp, dp_shard, tp, Path(sys.argv[4]), num_ranks=dp * tp))
