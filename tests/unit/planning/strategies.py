"""Small random machines, for property tests of the cost model, the simulator and the planner."""

from hypothesis import strategies as st

from benchmarks.synthetic_profile import Machine
from megatron_lancet.schedule.plan import ChunkDim, DwPolicy, OverlapRange, Plan, Segment

_times = st.sampled_from([0.0, 0.3, 1.0, 2.0, 5.0])
_op_ms = st.fixed_dictionaries(
    dict.fromkeys(("attention", "norm", "route", "preprocess", "experts", "postprocess", "mlp"), _times),
    optional=dict.fromkeys(("shared_experts", "embedding", "head", "cut"), _times),
)
_dw_ms = st.dictionaries(st.sampled_from(["attention", "experts", "mlp", "head"]), _times)
EVEN, UNEVEN, ALONE = (0.5, 0.5), (0.7, 0.3), (1.0,)


@st.composite
def machines(draw, max_layers=3, shares=(EVEN, UNEVEN, (0.5, 0.3, 0.2), ALONE), max_stages=1, topk=1):
    letters = draw(st.sampled_from(["md", "md", "*E-"]))  # of a GPT, or of a hybrid model
    layers = draw(st.text(letters, min_size=1, max_size=max_layers).filter(lambda text: {"m", "E"} & set(text)))
    sends_share_link = draw(st.booleans())
    stages = tuple(sorted(draw(st.integers(0, max_stages - 1)) for _ in layers))
    return Machine(
        layers=layers,
        stages=tuple(sorted(set(stages)).index(stage) for stage in stages),
        op_ms=draw(_op_ms),
        dw_ms=draw(_dw_ms),
        link_ms=draw(st.sampled_from([0.5, 2.0, 6.0, 20.0])),
        latency_ms=draw(st.sampled_from([0.0, 0.4])),
        counts_ms=draw(st.sampled_from([0.0, 0.7])),
        overhead_ms=draw(st.sampled_from([0.0, 0.2])),
        backward_factor=draw(st.sampled_from([1.0, 1.5])),
        shares=draw(st.sampled_from(shares)),
        topk=topk,
        num_micro_batches=draw(st.integers(1, 2)),
        chunk_counts=(1, 2, 3, 4),
        micro_batch_size=draw(st.sampled_from([2, 4, 5])),
        dims=tuple(ChunkDim),
        sends_share_link=sends_share_link,
        host_polls=sends_share_link or draw(st.booleans()),
        compute_slowdown=draw(st.sampled_from([1.0, 1.0, 1.3])),
    )


@st.composite
def machines_and_plans(draw, max_layers=4, **settings):
    """With a plan that fits, of any segments and dW options."""
    machine = draw(machines(max_layers=max_layers, max_stages=2, **settings))
    num_layers = len(machine.layers)
    cuts = {number for number in range(1, num_layers) if draw(st.booleans())}
    cuts |= {number for number in range(1, num_layers) if machine.stages[number - 1] != machine.stages[number]}
    ends = [*sorted(cuts), num_layers]
    segments = []
    for start, end in zip([0, *ends], ends, strict=False):
        num_chunks = draw(st.integers(1, machine.micro_batch_size))
        dim, overlap_range = draw(st.sampled_from(list(ChunkDim))), draw(st.sampled_from(list(OverlapRange)))
        segments.append(Segment(start + 1, end, min(num_chunks, 4), dim, overlap_range))
    policy = draw(st.sampled_from(list(DwPolicy)))
    window = 0 if policy is DwPolicy.NONE else draw(st.integers(1, 8))
    bound = draw(st.sampled_from([None, 400_000, 2_000_000])) if policy is DwPolicy.FILL else None
    return machine, Plan(tuple(segments), policy, window, bound)
