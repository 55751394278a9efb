"""What a run says of experts that stay where they are."""

from types import SimpleNamespace

from megatron_lancet.features.placement import rebalance
from megatron_lancet.planning.load.expert_load import ExpertLoad
from megatron_lancet.planning.load.rebalance import STAY, Costs

LOAD = ExpertLoad(1, 2, ())


def test_only_the_first_decision_that_moves_nothing_is_said(monkeypatch, capsys):
    monkeypatch.setattr(rebalance, "present_placement", lambda _: {})
    monkeypatch.setattr(rebalance, "decide", lambda *_: STAY)
    monkeypatch.setattr(rebalance.Rebalancer, "_costs", lambda _: Costs(30.0, 4.25, 1000, 1e-6, 10))
    args, setup = SimpleNamespace(curr_iteration=9), SimpleNamespace(stages=[])
    run = rebalance.Rebalancer(args, 10, setup, SimpleNamespace(), lambda: True, None)
    for _ in range(2):
        run._rebalance(LOAD, LOAD)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("Megatron-Lancet experts: no experts moved after step 10: ")
    assert "the noise (4.2 ms a step)" in line
    assert "every 10 steps" in line
