"""plan.py as a user runs it."""

import re
import subprocess
import sys
from pathlib import Path

from tests.cli import ROOT


def plan(folder: Path, *arguments: str, code: int = 0) -> "subprocess.CompletedProcess[str]":
    """Runs plan.py in a folder, telling what it imports."""
    command = [sys.executable, "-X", "importtime", str(ROOT / "plan.py"), *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    return done


def test_the_schedule_of_llama3_is_a_table_that_needs_no_rank(tmp_path: Path) -> None:
    done = plan(tmp_path, "schedule=true", "batch=llama3")
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [row[1:6] for row in rows[1:4]] == [
        ["0", "61", "4,194,304", "4,096", "1,024"],
        ["255,852,544", "342,101", "8,388,608", "8,192", "1,024"],
        ["2,870,007,037,952", "758,767", "16,777,216", "8,192", "2,048"],
    ]
    assert "1,100,929 steps, 15,600,004,890,624 tokens" in done.stdout
    assert (tmp_path / "schedule.png").read_bytes().startswith(b"\x89PNG")
    assert not re.search(r"\|\s+torch$", done.stderr, re.MULTILINE)


def test_a_batch_that_the_noise_scale_drives_says_how_far(tmp_path: Path) -> None:
    assert (
        "in fewer steps where the noise scale doubles the batch: to 16,384"
        in plan(tmp_path, "schedule=true", "batch=noise_scale").stdout
    )


def test_the_timeline_of_a_pipeline(tmp_path: Path) -> None:
    done = plan(tmp_path, "timeline=true", "pp=4", "batch.tokens=512", "memory.micro_batch=1")
    assert "1f1b: 4 ranks, 4 micro-batches, 1 stages a rank; bubble 42.9%, so 57.1% use" in done.stdout
    assert (tmp_path / "timeline.png").exists()


def test_one_view_is_shown(tmp_path: Path) -> None:
    for views in ([], ["schedule=true", "timeline=true"], ["schedule=false"]):
        errors = plan(tmp_path, *views, code=2).stderr
        valid = "valid: python plan.py schedule=true, or python plan.py timeline=true"
        assert f"error: plan.py shows one view; {valid}" in errors
    assert "error: timeline=true draws pipelines, and pp=1" in plan(tmp_path, "timeline=true", code=2).stderr
