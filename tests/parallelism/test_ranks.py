from parallelism.ranks import joined, torchrun_variables


def test_nobody_has_started_ranks() -> None:
    assert joined({}) is None


def test_torchrun_is_joined() -> None:
    ranks = joined({"RANK": "3", "WORLD_SIZE": "8"})
    assert ranks is not None
    assert (ranks.rank, ranks.world_size, ranks.started_by) == (3, 8, "torchrun")


SRUN = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),3",
    "SLURM_STEP_NODELIST": "gpu[007-009]",
}


def test_srun_is_joined_and_put_into_torchruns_words() -> None:
    ranks = joined(SRUN)
    assert ranks is not None
    assert (ranks.rank, ranks.world_size, ranks.started_by) == (5, 7, "srun")
    assert ranks.variables["LOCAL_RANK"] == "1"
    assert ranks.variables["LOCAL_WORLD_SIZE"] == "3"  # the third node's
    assert ranks.local_world_size == 3
    assert ranks.variables["MASTER_ADDR"] == "gpu007"


def test_all_tasks_of_a_step_agree_on_a_port_and_steps_do_not_share_one() -> None:
    port = torchrun_variables(SRUN)["MASTER_PORT"]
    assert (
        torchrun_variables({**SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"})["MASTER_PORT"]
        == port
    )
    assert torchrun_variables({**SRUN, "SLURM_STEP_ID": "1"})["MASTER_PORT"] != port


def test_a_batch_script_is_no_rank() -> None:
    without_step = {key: value for key, value in SRUN.items() if key != "SLURM_STEP_ID"}
    assert joined(without_step) is None


def test_first_hosts() -> None:
    for nodelist, host in {"n1": "n1", "n1,n2": "n1", "a[1,3]-ib,b2": "a1-ib", "node-[01-04]": "node-01"}.items():
        assert torchrun_variables({**SRUN, "SLURM_STEP_NODELIST": nodelist})["MASTER_ADDR"] == host
