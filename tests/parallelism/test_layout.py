from dataclasses import replace
from typing import Any

import pytest

from parallelism.layout import (
    Layout,
    ParallelConfig,
    check_gpus,
    check_host_memory,
    check_model,
    check_seq_len,
    check_world_size,
    node_warning,
    resolve_layout,
)
from tests.cases import PARALLEL


@pytest.mark.parametrize(("devices", "expected"), [(0, 1), (1, 1), (8, 8)])
def test_auto_takes_what_is_left_of_the_devices(devices: int, expected: int) -> None:
    assert resolve_layout(dp="auto", num_devices=devices).dp == expected


@pytest.mark.parametrize(("key", "degree"), [("dp", 0), ("dp", -2), ("tp", 0)])
def test_degrees_below_one_are_refused(key: str, degree: int) -> None:
    with pytest.raises(ValueError, match=f"{key}={degree} must be at least 1"):
        resolve_layout(**{"dp": 1, "num_devices": 1, key: degree})


@pytest.mark.parametrize("axis", ["ep"])
def test_layouts_that_do_not_exist_yet_are_refused(axis: str) -> None:
    with pytest.raises(ValueError, match=f"{axis}=2 is not built yet; valid: {axis}=1"):
        Layout(dp=2, **{axis: 2})


@pytest.mark.parametrize("key", ["dp", "dp_shard"])
def test_a_word_for_a_degree_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match=f"{key}=many is not a whole number or auto"):
        resolve_layout(num_devices=1, **{"dp": 2, key: "many"})  # type: ignore[arg-type]


def test_dp_shares_the_devices_with_tp() -> None:
    layout = resolve_layout(dp="auto", dp_shard="auto", tp=2, num_devices=8)
    assert (layout.dp, layout.dp_shard, layout.world_size) == (4, 4, 8)


@pytest.mark.parametrize(
    ("dp", "dp_shard", "valid"),
    [(4, 3, "2 or 4, or dp=3 or 6"), (6, 4, "3 or 6, or dp=4 or 8"), (2, 8, "2, or dp=8")],
)
def test_dp_shard_has_to_divide_dp(dp: int, dp_shard: int, valid: str) -> None:
    with pytest.raises(ValueError, match=f"{dp_shard} does not divide dp={dp}; nearest valid: dp_shard={valid}$"):
        Layout(dp=dp, dp_shard=dp_shard)


MODEL = {"heads": 8, "hidden_dim": 7, "vocab_size": 65, "dropout": 0.0}


def parallel(sequence_parallel: bool = False, cp_method: str = "ring") -> ParallelConfig:
    return replace(PARALLEL, sequence_parallel=sequence_parallel, cp_method=cp_method)


def check(layout: Layout, parallel: ParallelConfig, seq_len: int = 32, **model: Any) -> None:
    check_model(layout, parallel, **MODEL | model)
    check_seq_len(layout, parallel, seq_len)


@pytest.mark.parametrize(
    ("degrees", "settings", "model"),
    [
        ({"tp": 4}, {}, {"seq_len": 30}),
        ({"tp": 4, "cp": 4}, {"sequence_parallel": True}, {}),
        ({"tp": 2, "cp": 4}, {"cp_method": "ulysses"}, {"dropout": 0.1}),
        ({"cp": 4}, {"cp_method": "ulysses"}, {"seq_len": 36}),
    ],
)
def test_layouts_that_fit_the_model(degrees: dict[str, int], settings: dict[str, Any], model: dict[str, Any]) -> None:
    check(Layout(**{"dp": 1} | degrees), parallel(**settings), **model)


@pytest.mark.parametrize(
    ("degrees", "settings", "model", "message"),
    [
        ({"tp": 3}, {}, {}, r"tp=3 does not divide model.heads=8; nearest valid: tp=2 or 4$"),
        ({"tp": 16}, {}, {}, r"tp=16 does not divide model.heads=8; nearest valid: tp=8$"),
        (
            {"tp": 4},
            {"sequence_parallel": True},
            {"seq_len": 30},
            r"by tp = 4, .*: batch.seq_len=28 or 32, or",
        ),
        ({"cp": 4}, {}, {"seq_len": 36}, r"by 2 \* cp = 8, .*; nearest valid: batch.seq_len=32 or 40$"),
        (
            {"cp": 4, "tp": 2},
            {"sequence_parallel": True},
            {"seq_len": 8},
            r"by 2 \* cp \* tp = 16, .*=16, or",
        ),
        ({"cp": 8, "tp": 2}, {"cp_method": "ulysses"}, {}, r"cp=8 does not divide the 4 heads .*: cp=4, or .*=ring$"),
        ({"tp": 8}, {"sequence_parallel": True}, {"seq_len": 30}, r"=24 or 32, or parallel.sequence_parallel=false$"),
        ({"dp": 2, "tp": 8}, {}, {}, r"tp=8 cuts model.ffn_dim=7 .*; nearest valid: tp=4$"),
        ({"cp": 2, "tp": 4}, {}, {"vocab_size": 5}, r"tp=4 cuts model.vocab_size=5 .*; nearest valid: tp=2$"),
        ({"cp": 2}, {}, {"dropout": 0.1}, r"model.dropout=0.1 can't be had with cp=2 .*; valid: model.dropout=0 or"),
    ],
)
def test_layouts_that_do_not_fit_the_model(
    degrees: dict[str, int], settings: dict[str, Any], model: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check(Layout(**{"dp": 1} | degrees), parallel(**settings), **model)


def test_layout_must_have_the_ranks_that_are_there() -> None:
    check_world_size(Layout(dp=4), 4, "torchrun")
    with pytest.raises(ValueError, match="does not fit the 4 ranks that torchrun has started; valid: dp=4 or dp=auto"):
        check_world_size(Layout(dp=2), 4, "torchrun")


def test_too_few_gpus_gives_the_torchrun_line_for_enough_nodes() -> None:
    check_gpus(Layout(dp=8), num_gpus=8, devices_per_node=8)
    with pytest.raises(
        ValueError, match=r"needs 32 GPUs .* has 2; .* 4 nodes.*--nnodes 4 --nproc-per-node 8 .*device=cpu .*plan.py"
    ):
        check_gpus(Layout(dp=32), num_gpus=2, devices_per_node=8)
    # 12 ranks on nodes of 8: two nodes of 6, since every node must run as many.
    with pytest.raises(ValueError, match="--nnodes 2 --nproc-per-node 6"):
        check_gpus(Layout(dp=12), num_gpus=8, devices_per_node=8)


def test_tp_is_innermost_and_each_rank_has_a_place_of_its_own() -> None:
    layout = Layout(dp=4, dp_shard=2, cp=2, tp=3)
    places = [layout.place(rank) for rank in range(layout.world_size)]
    assert places[0] == {"pp": 0, "replicate": 0, "shard": 0, "cp": 0, "tp": 0}
    assert places[1] == places[0] | {"tp": 1}
    assert places[3] == places[0] | {"cp": 1}
    assert places[6] == places[0] | {"shard": 1}
    assert places[12] == places[0] | {"replicate": 1}
    assert len({tuple(place.values()) for place in places}) == 24


def test_tp_across_nodes_is_warned_of() -> None:
    assert node_warning(Layout(dp=2, tp=8), local_world_size=8) is None
    assert node_warning(Layout(dp=2, tp=2), local_world_size=8) is None
    warning = node_warning(Layout(dp=1, cp=4, tp=4), local_world_size=8)
    assert warning is not None
    assert warning.startswith("cp * tp=16 crosses nodes of 8 ranks")
    for tp, better in ((16, "8"), (3, "2 or 4")):
        warning = node_warning(Layout(dp=1, tp=tp), local_world_size=8)
        assert warning is not None
        assert warning.startswith(f"tp={tp} crosses nodes of 8 ranks")
        assert warning.endswith(f"tp={better}")


def test_ranks_that_do_not_fit_the_memory_are_refused() -> None:
    title = Layout(dp=1, tp=8, pp=16)
    check_host_memory(title, num_parameters=10**6, offload=[], available=9 * 2**30)
    check_host_memory(title, num_parameters=10**6, offload=[], available=None)
    with pytest.raises(ValueError, match=r"tp=8 pp=16, 128 ranks\) needs about 8.0 GiB and this machine has 4.0 GiB"):
        check_host_memory(title, num_parameters=10**6, offload=[], available=4 * 2**30)


def test_weights_and_gradients_are_there_twice_with_an_offloaded_optimizer() -> None:
    check_host_memory(Layout(dp=1), num_parameters=10**9, offload=["activations"], available=17 * 10**9)
    with pytest.raises(ValueError, match=r"needs about 22\.4 GiB"):
        check_host_memory(Layout(dp=1), num_parameters=10**9, offload=["optimizer"], available=17 * 10**9)
