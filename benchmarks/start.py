"""How long ranks take to start: from the command to the end of the first step.

python benchmarks/start.py
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent


def seconds_to_first_step(num_ranks: int) -> float:
    """Runs the default model on synthetic tokens for one step."""
    settings = f"dp={num_ranks} device=cpu data=synthetic train.steps=1 train.eval_tokens=256 train.sample_tokens=0"
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "run" / "metrics.jsonl"
        command = [sys.executable, str(ROOT / "train.py"), *settings.split(), f"hydra.run.dir={folder}/run"]
        began = time.monotonic()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        while not (metrics.exists() and metrics.read_text()):
            assert process.poll() is None or metrics.exists(), "the run failed"
            time.sleep(0.05)
        seconds = time.monotonic() - began
        assert process.wait() == 0
    return seconds


if __name__ == "__main__":
    print("| ranks | seconds to the end of the first step |\n| --- | --- |")
    for num_ranks in (1, 2, 4, 8):
        print(f"| {num_ranks} | {seconds_to_first_step(num_ranks):.1f} |")
