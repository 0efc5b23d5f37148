"""Random products of layouts and options, for which nobody had the time to write a row."""

from collections.abc import Callable
from typing import Any

from hypothesis import Phase, assume, given, reject, seed, settings
from hypothesis import strategies as st

from checks import divisors
from memory.config import CKPT, OFFLOAD, check_offload
from parallelism.layout import CP_METHODS, Layout, check_model, check_seq_len
from parallelism.schedules import SCHEDULES
from parallelism.stages import check_micro_batches, check_split_backward
from tests.cases import MODELS, SEQ_LEN, SEQUENCES, Case

NUM_PRODUCTS = 20


@st.composite
def products(draw: Callable[[st.SearchStrategy[Any]], Any]) -> Case:
    """Any product of layouts that the checks let through, on two to sixteen ranks, with any options."""
    pp, tp, cp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2]))
    dp = draw(st.sampled_from([1, 2, 4]))
    dp_shard = draw(st.sampled_from([degree for degree in (1, 2, 4) if dp % degree == 0]))
    layout = Layout(dp=dp, dp_shard=dp_shard, tp=tp, pp=pp, cp=cp)
    assume(2 <= layout.world_size <= 16)
    options: dict[str, Any] = {}
    if pp > 1:
        options["pp_schedule"] = draw(st.sampled_from(sorted(SCHEDULES)))
    if cp > 1:
        options["cp_method"] = draw(st.sampled_from(CP_METHODS))
    if tp > 1:
        options["sequence_parallel"] = draw(st.booleans())
    if dp_shard > 1:
        options["reshard"] = draw(st.booleans())
    options["ckpt"] = draw(st.sampled_from(CKPT))
    options["offload"] = draw(st.lists(st.sampled_from(OFFLOAD), unique=True))
    model = draw(st.sampled_from(["llama_deep", "gpt2_deep"] if pp > 1 else sorted(set(MODELS) - {"gpt2_dropout"})))
    per_rank = SEQUENCES // dp
    case = Case(layout, model, draw(st.sampled_from(divisors(per_rank)[:-1])), options)
    try:
        parallel, _ = case.settings()
        check_micro_batches(layout, parallel, per_rank=per_rank, micro_batch=case.micro_batch)
        check_split_backward(layout, parallel, compile=False, ckpt=options["ckpt"])
        check_offload(options["offload"], dp_shard)
        config = MODELS[model]
        sizes = {"heads": config.heads, "hidden_dim": config.hidden_dim, "vocab_size": config.vocab_size}
        check_model(layout, parallel, **sizes, dropout=0.0)
        check_seq_len(layout, parallel, SEQ_LEN)
    except ValueError:
        reject()
    return case


def random_products(number: int) -> list[Case]:
    """The twenty products that a seed draws."""
    drawn: dict[str, Case] = {}

    @seed(number)
    @settings(max_examples=5 * NUM_PRODUCTS, database=None, phases=[Phase.generate], deadline=None)
    @given(products())
    def draw(case: Case) -> None:
        drawn[case.name] = case

    draw()
    return list(drawn.values())[:NUM_PRODUCTS]
