"""Layers of stages, and pipelines that can't be."""

import json
from dataclasses import replace
from typing import Any

import pytest

from models.flops import head_layers
from parallelism.layout import Layout, ParallelConfig
from parallelism.schedules import SCHEDULES
from parallelism.stages import check_micro_batches, resolve_stages, split_layers
from tests.cases import PARALLEL
from tests.models.presets import model_config

PP4 = Layout(dp=1, pp=4)


def resolved(**settings: Any) -> ParallelConfig:
    """With eight layers on four ranks."""
    return resolve_stages(replace(PARALLEL, **settings), PP4, layers=8, head_layers=0.5)


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "head", "expected"),
    [
        (8, 2, 0.0, [4, 4]),
        (8, 2, 2.0, [5, 3]),  # the head costs two blocks
        (16, 16, 1.3, [1] * 16),  # every stage has a block
        (8, 3, 1.0, [3, 3, 2]),
    ],
)
def test_layers_are_split_by_cost(num_layers: int, num_stages: int, head: float, expected: list[int]) -> None:
    assert split_layers(num_layers, num_stages, head) == expected


def test_the_head_of_gpt2_costs_five_blocks() -> None:
    """50,257 x 768 against 12 x 768^2."""
    assert head_layers(model_config("gpt2")) == pytest.approx(50257 / (12 * 768))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_auto_is_two_stages_a_rank_where_that_may_be(schedule: str) -> None:
    found = resolved(pp_schedule=schedule)
    one = schedule in ("naive", "gpipe", "1f1b", "zb_h1")
    assert found.pp_virtual == (1 if one else 2)
    assert found.pp_split == ([2, 2, 2, 2] if one else [1] * 8)


def test_without_a_pipeline_there_is_one_stage() -> None:
    parallel = replace(PARALLEL, pp_schedule="zbv")
    found = resolve_stages(parallel, Layout(dp=4), layers=8, head_layers=0.5)
    assert (found.pp_virtual, found.pp_split) == (1, [8])


def test_llama3_405b_has_the_stages_of_its_paper() -> None:
    """Llama 3, section 3.3.2: 16 ranks, embedding and head alone in their stages; of 126 layers 8 chunks a rank."""
    parallel = replace(PARALLEL, pp_schedule="interleaved_1f1b", pp_virtual=8, pp_split="llama3")
    config = model_config("llama3_405b")
    found = resolve_stages(parallel, Layout(dp=1, pp=16), layers=config.layers, head_layers=head_layers(config))
    assert found.pp_split == [0, *[1] * 126, 0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"pp_virtual": 3, "pp_schedule": "looped_bfs"},
            r"pp=4 \* parallel.pp_virtual=3 are more stages than model.layers=8; .*pp=2 or parallel.pp_virtual=2$",
        ),
        (
            {"pp_virtual": 2},
            r"pp_virtual=2 is not for .*=1f1b.*; valid: parallel.pp_virtual=1, or .*=interleaved_",
        ),
        (
            {"pp_virtual": 1, "pp_schedule": "zbv"},
            r"zbv, which has 2 stages a rank; valid: .*=2, or .*=1f1b$",
        ),
        (
            {"pp_virtual": 3, "pp_schedule": "dualpipev"},
            r"valid: .*=2, or .*=1f1b with parallel.pp_virtual=1$",
        ),
        ({"pp_split": [4, 4]}, r"pp_split=\[4,4\] has to be 4 numbers .*; valid: parallel.pp_split=\[2,2,2,2\]$"),
        ({"pp_split": [4, 0, 2, 2]}, r"only the first and the last may be 0; valid"),
        ({"pp_split": [4, 4, 4, 0]}, r"add up to model.layers=8"),
        ({"pp_split": [9, 1, -1, -1]}, r"add up to model.layers=8"),
        (
            {"pp_virtual": 3, "pp_schedule": "interleaved_zb", "pp_split": "llama3"},
            r"more stages than model.layers=8 and 2 without a layer; nearest valid: pp=2 or .*_virtual=2 with .*=auto$",
        ),
    ],
)
def test_stages_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolved(**settings)


@pytest.mark.parametrize("split", ["even", "4,4", ["4", "4"], [1.5, 2.5], None])
def test_splits_that_are_none(split: Any) -> None:
    with pytest.raises(ValueError, match=r"parallel.pp_split=.* is not one of auto, llama3, or a list"):
        replace(PARALLEL, pp_split=split)


def test_interleaved_1f1b_takes_micro_batches_in_rounds() -> None:
    parallel = resolved(pp_schedule="interleaved_1f1b")
    check_micro_batches(PP4, parallel, per_rank=24, micro_batch=2)
    with pytest.raises(ValueError, match=r"takes pp=4 micro-batches .* 24 sequences into 6; valid: .*=3 or 6, or"):
        check_micro_batches(PP4, parallel, per_rank=24, micro_batch=4)
    for other in ("interleaved_zb", "looped_bfs", "zbv", "1f1b"):
        check_micro_batches(PP4, resolved(pp_schedule=other), per_rank=24, micro_batch=4)


def test_llama3s_split_needs_a_stage_with_layers() -> None:
    parallel = replace(PARALLEL, pp_split="llama3")
    with pytest.raises(ValueError, match=r"pp=2 \* parallel.pp_virtual=1 are no more than two; valid: pp=3 or more"):
        resolve_stages(parallel, Layout(dp=1, pp=2), layers=8, head_layers=0.5)


def test_no_number_of_ranks_below_one_is_suggested() -> None:
    parallel = replace(PARALLEL, pp_schedule="zbv")
    with pytest.raises(ValueError, match=r"nearest valid: pp=1$"):
        resolve_stages(parallel, Layout(dp=1, pp=4), layers=1, head_layers=0.5)


@pytest.mark.parametrize("num_ranks", [4, 8, 9, 10])
def test_the_split_that_is_suggested_is_taken(num_ranks: int) -> None:
    layout = Layout(dp=1, pp=num_ranks)
    with pytest.raises(ValueError, match="has to be") as refused:
        resolve_stages(replace(PARALLEL, pp_split=[4, 4]), layout, layers=8, head_layers=0.5)
    split = json.loads(str(refused.value).rpartition("=")[2])
    assert resolve_stages(replace(PARALLEL, pp_split=split), layout, layers=8, head_layers=0.5).pp_split == split
