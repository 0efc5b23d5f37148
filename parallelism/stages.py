"""How a model's layers are shared out to the stages of a pipeline, and what its schedule asks for. Imports no torch."""

from dataclasses import replace

from checks import around, divisors
from parallelism.layout import Layout, ParallelConfig
from parallelism.schedules import SCHEDULES


def split_layers(num_layers: int, num_stages: int, head_layers: float = 0.0) -> list[int]:
    """Layers of each stage, as even as can be when the head costs as much as `head_layers` of them.

    The embedding is counted with what it computes, which is nothing. Every stage has a layer, where there are enough.
    """
    counts = [0] * num_stages
    costs = [0.0] * (num_stages - 1) + [head_layers]
    for _ in range(num_layers):
        least = min(range(num_stages), key=lambda stage: (counts[stage] > 0, costs[stage]))
        counts[least] += 1
        costs[least] += 1
    return counts


def resolve_stages(parallel: ParallelConfig, layout: Layout, *, layers: int, head_layers: float) -> ParallelConfig:
    """With pp_virtual as a number, and in pp_split the layers of each of the pp * pp_virtual stages.

    ValueError: the schedule can't have so many stages a rank, or the layers can't be split so.
    """
    if layout.pp == 1:
        return replace(parallel, pp_virtual=1, pp_split=[layers])
    schedule = SCHEDULES[parallel.pp_schedule]
    virtual = schedule.usual_stages if isinstance(parallel.pp_virtual, str) else parallel.pp_virtual
    if not schedule.allows(virtual):
        usual = schedule.usual_stages
        raise ValueError(
            f"parallel.pp_virtual={virtual} is not for parallel.pp_schedule={parallel.pp_schedule}, which has {usual} "
            f"stages a rank; valid: parallel.pp_virtual={usual}, or "
            f"parallel.pp_schedule={'1f1b' if virtual == 1 or layout.pp * virtual > layers else 'interleaved_1f1b'}"
            + (" with parallel.pp_virtual=1" if virtual > 1 and layout.pp * virtual > layers else "")
        )
    num_stages, split = layout.pp * virtual, parallel.pp_split
    alone = 2 if split != "auto" else 0  # stages that may have no layer: the first and the last
    if split == "llama3" and num_stages <= alone:
        raise ValueError(
            f"parallel.pp_split=llama3 gives embedding and head stages of their own, and pp={layout.pp} * "
            f"parallel.pp_virtual={virtual} are no more than two; valid: pp=3 or more, several stages a rank "
            "(parallel.pp_schedule=interleaved_1f1b), or parallel.pp_split=auto"
        )
    if num_stages > layers + alone:
        fewer, most = layers // virtual, layers // layout.pp
        raise ValueError(
            f"pp={layout.pp} * parallel.pp_virtual={virtual} are more stages than model.layers={layers}"
            + (f" and {alone} without a layer" if alone else "")
            + f"; nearest valid: pp={max(fewer, 1)}"
            + (f" or parallel.pp_virtual={most}" if 0 < most < virtual and schedule.allows(most) else "")
            + (" with parallel.pp_split=auto" if alone else "")
        )
    if split == "llama3":
        split = [0, *split_layers(layers, num_stages - 2), 0]
    elif split == "auto":
        split = split_layers(layers, num_stages, head_layers)
    elif len(split) != num_stages or sum(split) != layers or min(split) < 0 or 0 in split[1:-1]:
        empty = max(num_stages - layers, 0)  # which the first and the last have to be
        even = [0] * (empty // 2) + split_layers(layers, num_stages - empty) + [0] * (empty - empty // 2)
        asked, even_text = (str(each).replace(" ", "") for each in (split, even))
        raise ValueError(
            f"parallel.pp_split={asked} has to be {num_stages} numbers of layers that add up to model.layers={layers}; "
            f"only the first and the last may be 0; valid: parallel.pp_split={even_text}"
        )
    return replace(parallel, pp_virtual=virtual, pp_split=split)


def multiple_of(layout: Layout, parallel: ParallelConfig) -> int:
    """What has to divide the number of a rank's micro-batches."""
    return SCHEDULES[parallel.pp_schedule].multiple(layout.pp, parallel.stages_per_rank) if layout.pp > 1 else 1


def check_micro_batches(
    layout: Layout, parallel: ParallelConfig, *, per_rank: int, micro_batch: int, of: str = ""
) -> None:
    """ValueError where a schedule can't run the micro-batches into which a rank's sequences, `of` a stage, are cut."""
    num_micro_batches = per_rank // micro_batch
    if num_micro_batches % multiple_of(layout, parallel) == 0:
        return
    sizes = [size for size in divisors(per_rank) if per_rank // size % layout.pp == 0]
    smaller = f"memory.micro_batch={around(micro_batch, sizes)}, or " if sizes else ""
    raise ValueError(
        f"parallel.pp_schedule={parallel.pp_schedule} takes pp={layout.pp} micro-batches at a time, and "
        f"memory.micro_batch={micro_batch} cuts a rank's {per_rank} sequences{of} into {num_micro_batches}; "
        f"valid: {smaller}parallel.pp_schedule=looped_bfs, which takes any number"
    )


def check_split_backward(layout: Layout, parallel: ParallelConfig, *, compile: bool, ckpt: str) -> None:
    """ValueError where a schedule that halves backwards meets what needs them whole.

    Torch does not take a compiled backward apart. Of one that recomputes, the half of the inputs and each piece of the
    half of the weights would recompute all: about ten forwards.
    """
    if layout.pp == 1 or not SCHEDULES[parallel.pp_schedule].splits_backward:
        return
    if compile:
        setting, without = "compile=true", "compile=false"
    elif ckpt != "none":
        setting, without = f"memory.ckpt={ckpt}", "memory.ckpt=none"
    else:
        return
    whole = "interleaved_1f1b" if len(parallel.pp_split) > layout.pp else "1f1b"
    raise ValueError(
        f"{setting} can't be had with parallel.pp_schedule={parallel.pp_schedule}, which takes the backward apart; "
        f"valid: {without} or parallel.pp_schedule={whole}"
    )
