import pytest

from parallelism.layout import Layout, check_gpus, check_world_size, resolve_layout


@pytest.mark.parametrize(("devices", "expected"), [(0, 1), (1, 1), (8, 8)])
def test_auto_takes_what_is_left_of_the_devices(devices: int, expected: int) -> None:
    assert resolve_layout(dp="auto", num_devices=devices).dp == expected


@pytest.mark.parametrize(("key", "degree"), [("dp", 0), ("dp", -2), ("tp", 0)])
def test_degrees_below_one_are_refused(key: str, degree: int) -> None:
    with pytest.raises(ValueError, match=f"{key}={degree} must be at least 1"):
        resolve_layout(**{"dp": 1, "num_devices": 1, key: degree})


@pytest.mark.parametrize("axis", ["tp", "pp", "cp", "ep", "dp_shard"])
def test_layouts_that_do_not_exist_yet_are_refused(axis: str) -> None:
    with pytest.raises(ValueError, match=f"{axis}=2 is not built yet; valid: {axis}=1"):
        Layout(dp=2, **{axis: 2})


def test_a_word_for_dp_is_refused() -> None:
    with pytest.raises(ValueError, match="dp=many is not a whole number or auto"):
        resolve_layout(dp="many", num_devices=1)


def test_layout_must_have_the_ranks_that_are_there() -> None:
    check_world_size(Layout(dp=4), 4, "torchrun")
    with pytest.raises(ValueError, match="does not fit the 4 ranks that torchrun has started; valid: dp=4 or dp=auto"):
        check_world_size(Layout(dp=2), 4, "torchrun")


def test_too_few_gpus_gives_the_torchrun_line_for_enough_nodes() -> None:
    check_gpus(Layout(dp=8), num_gpus=8, devices_per_node=8)
    with pytest.raises(
        ValueError, match=r"needs 32 GPUs .* has 2; .* 4 nodes.*--nnodes 4 --nproc-per-node 8 .*device=cpu"
    ):
        check_gpus(Layout(dp=32), num_gpus=2, devices_per_node=8)
    # 12 ranks on nodes of 8: two nodes of 6, since every node must run as many.
    with pytest.raises(ValueError, match="--nnodes 2 --nproc-per-node 6"):
        check_gpus(Layout(dp=12), num_gpus=8, devices_per_node=8)
