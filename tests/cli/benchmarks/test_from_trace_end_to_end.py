"""The benchmark of profiles from traces on a real, small network: it records, profiles, compares, and writes it all."""

import pytest

from benchmarks.from_trace.summary import compare
from megatron_lancet.files.reader import from_plain
from megatron_lancet.planning.profile import Profile
from tests.cli.benchmarks.runs import run_on_network


@pytest.mark.nightly
@pytest.mark.distributed
@pytest.mark.alone
@pytest.mark.usefixtures("shaped_network")
def test_profile_from_traces_is_compared_with_our_profilers(tmp_path):
    _, result, tables = run_on_network("from_trace", tmp_path, "--cases", 45)
    (case,) = result["cases"]
    own, read = (from_plain(Profile, case[name], name) for name in ("own_profile", "trace_profile"))
    for name in ("layer_kinds", "micro_batch_size", "seq_length", "topk", "num_experts", "ep_size", "row_bytes"):
        assert getattr(read.model, name) == getattr(own.model, name), name
    assert {(op.kind, op.phase) for op in read.ops} <= {(op.kind, op.phase) for op in own.ops}
    assert {dw.name for dw in read.weight_grads} == {dw.name for dw in own.weight_grads}
    assert [one.received for one in read.routing] == [
        one.received for one in own.routing if one.num_chunks == 1 and one.layer == 1
    ]
    assert all(pair.trace_ms > 0 for pair in compare(case).whole)
    assert all(len(ranks) == 2 for name in ("stock", "k1", "from-trace") for ranks in case["samples"][name])
    assert "| from-trace |" in tables
