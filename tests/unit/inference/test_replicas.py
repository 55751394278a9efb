"""Columns of experts become columns of slots by the rule of planning; what can't have replicas is refused."""

from types import SimpleNamespace

import pytest
import torch

from megatron_lancet.errors import UsageError
from megatron_lancet.inference import replicas
from megatron_lancet.inference.choices import ChoiceRecorder
from megatron_lancet.inference.replica_choice import (
    Expected,
    ReplicaWish,
    check_replicas,
    expected_rows,
    read_popularity,
)
from megatron_lancet.inference.replicas import _Assignment
from megatron_lancet.planning.load.expert_load import ExpertLoad, LayerLoad
from megatron_lancet.planning.load.replicas import ExpertHolders, choose_holders, holder_of, holders_in_turn

CPU = torch.device("cpu")
LOAD = ExpertLoad(3, 2, (LayerLoad(2, ((9, 1, 1, 1), (7, 1, 1, 1))),))


def routed(num_tokens: int, num_experts: int, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities and the routing map of tokens that prefer low numbers."""
    scores = torch.rand(num_tokens, num_experts, generator=torch.Generator().manual_seed(2))
    scores = scores / torch.arange(1, num_experts + 1)
    chosen = torch.zeros(num_tokens, num_experts, dtype=torch.bool).scatter(1, scores.topk(topk, dim=1).indices, True)
    return scores * chosen, chosen


@pytest.mark.parametrize("source", [2, 3, 4])
@pytest.mark.parametrize("per_node", [None, 2])
def test_places_are_those_of_the_rule(source, per_node):
    holders = ExpertHolders(12, ((4,), (0,), (0,), (4,), (1,), (0,)))
    probs, chosen = routed(40, 12, 3)
    found_probs, found = _Assignment.of(holders, source, per_node, CPU)(None, None, (probs, chosen))
    expected = torch.zeros(40, 18, dtype=torch.bool)
    in_turn = holders_in_turn(holders, source, per_node)
    assert max(map(len, in_turn)) > 1, "an expert whose holders take turns"
    for expert in range(12):
        for number, token in enumerate(chosen[:, expert].nonzero()[:, 0].tolist()):
            rank = holder_of(in_turn[expert], source, number)
            expected[token, holders.slot(expert, rank)] = True
    assert torch.equal(found, expected)
    assert torch.equal(found_probs.sort(1).values[:, -3:], probs.sort(1).values[:, -3:])
    assert torch.equal(found_probs > 0, expected)


def test_recorded_choices_leave_out_tokens_beyond_the_end():
    """Two windows of three positions; routers see the first positions of both windows first."""
    recorder = ChoiceRecorder()
    chosen = torch.eye(6, dtype=torch.bool)[[0, 1, 2, 3, 4, 5]] | torch.eye(6, dtype=torch.bool)[[5, 5, 5, 5, 5, 0]]
    recorder.record(SimpleNamespace(layer_number=7), None, (chosen.float(), chosen))
    weights = torch.tensor([[1, 1, 1], [1, 0, 0]])
    assert recorder.choices(weights) == {7: [(0, 5), (1, 5), (2, 5), (4, 5)]}
    assert recorder.rows(weights) == {7: [1, 1, 1, 0, 1, 4]}


def arguments(**changes: object) -> SimpleNamespace:
    return SimpleNamespace(**{"num_experts": 4, "moe_expert_capacity_factor": None, **changes})


@pytest.mark.parametrize(
    ("changes", "replicas", "ranks", "message"),
    [
        ({}, 3, 2, r"--replicas 3 is not possible: every rank holds equally many: pass a multiple of the 2 ranks"),
        ({}, 2, 1, r"one rank holds all experts: start several ranks"),
        ({}, 6, 2, r"with 4 every one of the 2 ranks holds all 4 experts"),
        ({"num_experts": None}, 2, 2, r"this checkpoint has none"),
        ({"moe_expert_capacity_factor": 1.5}, 2, 2, r"does not work with --moe-expert-capacity-factor"),
    ],
)
def test_replicas_that_cant_be_made_are_refused_in_one_line(monkeypatch, changes, replicas, ranks, message):
    check_replicas(arguments(), 2, 2)
    with pytest.raises(UsageError, match=message) as refused:
        check_replicas(arguments(**changes), replicas, ranks)
    assert "\n" not in str(refused.value)
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    with pytest.raises(UsageError, match=message):
        ReplicaWish.of(arguments(**changes), replicas, None)


def test_popularity_is_read_from_a_measured_load(tmp_path):
    path = tmp_path / "load.json"
    path.write_text(LOAD.to_json())
    assert read_popularity(path, 4) == {2: (16, 2, 2, 2)}
    with pytest.raises(UsageError, match=r"is the load of 4 experts, and the checkpoint's layers have 8"):
        read_popularity(path, 8)
    with pytest.raises(UsageError, match=r"--popularity: .*nothing.json"):
        read_popularity(tmp_path / "nothing.json", 4)


def test_expected_loads_are_of_the_fullest_rank():
    popularity = {2: (16, 2, 2, 2), 3: (1, 1, 1, 1)}
    holders = {2: choose_holders(popularity[2], 2, 2), 3: ExpertHolders(4, ((2,), (0,)))}
    before, after = expected_rows({2: popularity[2]}, {2: ExpertHolders(4, ((2,), (0,)))}, None)
    assert before == Expected(2 * 36 / 44, pytest.approx(0.5))
    assert after == Expected(2 * 22 / 44, pytest.approx(8 / 44 / 2))
    # Rows of all experts are 22 on each rank; expert 0 is on both ranks, and so is 2: 2 and 2 of a rank's are sent.
    assert expected_rows({3: popularity[3]}, {3: holders[3]}, None)[1].most_over_mean == 1


def test_replicas_keep_the_kind_of_dispatcher(monkeypatch):
    """With identity experts a token may send fewer rows than the router chooses, so Megatron's own would not do."""
    monkeypatch.setattr(replicas, "get_default_pg_collection", lambda: None)
    given = []

    class OfFewerRows:
        def __init__(self, *arguments: object) -> None:
            given.append(arguments)

    experts = SimpleNamespace(local_experts=torch.nn.ModuleList())
    moe = SimpleNamespace(config=SimpleNamespace(num_moe_experts=4), token_dispatcher=OfFewerRows(), experts=experts)
    model = SimpleNamespace(rank=1, device=CPU)
    layer = replicas._prepared(moe, ExpertHolders(4, ((), ())), model, None)
    assert type(layer.dispatcher) is OfFewerRows
    assert (given[-1][0], given[-1][1], given[-1][2].num_moe_experts) == (2, [2, 3], 4)
