"""Keys of the `memory` group. Imports no torch."""

from dataclasses import dataclass

from checks import nearest, number_or_auto, one_of

CKPT = ("none", "full", "sqrt", "sqrt_deep", "selective")  # see recompute.py
OFFLOAD = ("optimizer", "params", "activations")  # offload_optimizer.py, parallelism/fsdp.py, offload_activations.py


@dataclass
class MemoryConfig:
    """How to fit a step into memory."""

    micro_batch: int | str
    ckpt: str
    offload: list[str]

    def __post_init__(self) -> None:
        number_or_auto("memory.micro_batch", self.micro_batch, least=1)
        one_of("memory.ckpt", self.ckpt, CKPT)
        for word in self.offload:
            if word not in OFFLOAD:
                raise ValueError(
                    f"memory.offload=[{','.join(self.offload)}] may list {', '.join(OFFLOAD)}{nearest(word, OFFLOAD)}"
                )


def check_offload(offload: list[str], dp_shard: int) -> None:
    """ValueError if parameters are to wait in host memory that no rank gathers from there."""
    if "params" in offload and dp_shard == 1:
        rest = ",".join(word for word in offload if word != "params")
        raise ValueError(
            f"memory.offload=[{','.join(offload)}] with dp_shard=1: params are offloaded where they are sharded; "
            f"valid: parallel=fsdp dp=2 or more, or memory.offload=[{rest}]"
        )


def check_selective(ckpt: str, *, compile: bool, ring: bool) -> None:
    """ValueError where torch.compile can't look into what `selective` recomputes, and would run it as it is."""
    if ckpt == "selective" and compile and ring:
        raise ValueError(
            "memory.ckpt=selective can't be had with compile=true and parallel.cp_method=ring; "
            "valid: memory.ckpt=full, or compile=false, or parallel.cp_method=ulysses"
        )
