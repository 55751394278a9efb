"""The benchmark of profiles from traces on a real, small network: it records, profiles, compares, and writes it all."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.from_trace.summary import compare
from megatron_lancet.files import from_plain
from megatron_lancet.planning.profile import Profile

REPO = Path(__file__).parents[3]
TINY = "--layers 1 --hidden 64 --seq-length 32 --repeats 2 --rate 100 --cases 45".split()


@pytest.mark.distributed
@pytest.mark.alone
@pytest.mark.usefixtures("shaped_network")
def test_profile_from_traces_is_compared_with_our_profilers(tmp_path):
    command = [sys.executable, "-m", "benchmarks.from_trace", *TINY, "--output", str(tmp_path / "run")]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    (case,) = json.loads((tmp_path / "run.json").read_text())["cases"]
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
    assert "| from-trace |" in (tmp_path / "run.md").read_text()
