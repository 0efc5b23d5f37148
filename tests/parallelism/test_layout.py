import pytest

from parallelism.layout import Layout, check_gpus, check_model, check_world_size, node_warning, resolve_layout


@pytest.mark.parametrize(("devices", "expected"), [(0, 1), (1, 1), (8, 8)])
def test_auto_takes_what_is_left_of_the_devices(devices: int, expected: int) -> None:
    assert resolve_layout(dp="auto", num_devices=devices).dp == expected


@pytest.mark.parametrize(("key", "degree"), [("dp", 0), ("dp", -2), ("tp", 0)])
def test_degrees_below_one_are_refused(key: str, degree: int) -> None:
    with pytest.raises(ValueError, match=f"{key}={degree} must be at least 1"):
        resolve_layout(**{"dp": 1, "num_devices": 1, key: degree})


@pytest.mark.parametrize("axis", ["pp", "cp", "ep"])
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
    [(4, 3, "2 or 4"), (6, 4, "3 or 6"), (2, 8, "2")],
)
def test_dp_shard_has_to_divide_dp(dp: int, dp_shard: int, valid: str) -> None:
    with pytest.raises(ValueError, match=f"{dp_shard} does not divide dp={dp}; nearest valid: dp_shard={valid}$"):
        Layout(dp=dp, dp_shard=dp_shard)


def test_tp_has_to_divide_the_heads() -> None:
    check_model(Layout(dp=1, tp=4), heads=8, seq_len=30, sequence_parallel=False)
    with pytest.raises(ValueError, match=r"tp=3 does not divide model.heads=8; nearest valid: tp=2 or 4$"):
        check_model(Layout(dp=1, tp=3), heads=8, seq_len=32, sequence_parallel=False)
    with pytest.raises(ValueError, match=r"tp=16 does not divide model.heads=8; nearest valid: tp=8$"):
        check_model(Layout(dp=1, tp=16), heads=8, seq_len=32, sequence_parallel=False)


def test_sequence_parallelism_needs_tp_to_divide_the_sequence() -> None:
    with pytest.raises(
        ValueError,
        match=r"batch.seq_len=30 does not divide by tp=4.*; nearest valid: batch.seq_len=28 or 32$",
    ):
        check_model(Layout(dp=1, tp=4), heads=8, seq_len=30, sequence_parallel=True)


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


def test_tp_across_nodes_is_warned_of() -> None:
    assert node_warning(Layout(dp=2, tp=8), local_world_size=8) is None
    assert node_warning(Layout(dp=2, tp=2), local_world_size=8) is None
    for tp, better in ((16, "8"), (3, "2 or 4")):
        warning = node_warning(Layout(dp=1, tp=tp), local_world_size=8)
        assert warning is not None
        assert warning.startswith(f"tp={tp} crosses nodes of 8 ranks")
        assert warning.endswith(f"tp={better}")
