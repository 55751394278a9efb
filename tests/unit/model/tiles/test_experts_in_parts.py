"""Local experts that run on parts of their rows, under Megatron's DDP, against stock's on all rows at once."""

import itertools
from unittest import mock

import pytest
import torch

from megatron_lancet.features.tiles.weight_grads import GatheredWeightGrads
from megatron_lancet.patching import replaced
from megatron_lancet.runtime import device
from tests.unit.model.local_experts.pair import Pair, check_equal

SIZES = [[5, 3, 1, 7], [0, 5, 0, 3], [16, 0, 0, 0], [0, 0, 0, 0], [40, 33, 20, 17]]
HOW = {"one after the other": (False, False), "layer by layer": (True, False), "grouped GEMMs": (True, True)}


def in_two_parts(pair: Pair, sizes: list[int]):
    """A step that runs a half of each expert's rows, then the other."""
    experts = {linear: place for place, one in enumerate(pair.ours.local_experts) for linear in one.modules()}
    halves = [[size // 2 for size in sizes], [size - size // 2 for size in sizes]]
    gathered = GatheredWeightGrads(2, lambda: torch.tensor(halves).unsqueeze(1), experts, pair.store)

    def step(_, tokens: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        first_to_last = slice(None, None, -1 if pair.ours.last_expert_first else 1)
        orders = [half[first_to_last] for half in halves]
        cuts = list(itertools.chain(*zip(*orders, strict=True)))
        outputs = []
        for part, half in enumerate(halves):
            rows, its_probs = (torch.cat(values.split(cuts)[part::2]) for values in (tokens, probs))
            with gathered.in_part(part):
                output, _ = pair.ours(rows, torch.tensor(half), its_probs)
            outputs.append(output.split(orders[part]))
        return torch.cat(list(itertools.chain(*zip(*outputs, strict=True))))

    return step


@pytest.mark.thorough
@pytest.mark.parametrize(("may_group", "on_cuda"), HOW.values(), ids=HOW)
def test_experts_on_parts_of_rows_have_stocks_gradients(one_rank, may_group, on_cuda):
    """For ``on_cuda`` device is told that the tensors are there; torch's grouped GEMM knows both."""
    with replaced(device, "_is_cuda", lambda device: on_cuda):
        pair = Pair()
        pair.ours.may_group = may_group
        for sizes in SIZES:
            with mock.patch.object(pair.store, "put", wraps=pair.store.put) as put:
                found = pair.run(sizes, step=in_two_parts(pair, sizes))
            check_equal(found, pair.run_stock(sizes), 1e-6)
            puts = [[weight.name for weight in call.args[0]] for call in put.call_args_list]
            names = [name for names in puts for name in names]
            assert sorted(names) == sorted(name.removesuffix(".weight") for name, _ in pair.ours.named_parameters())
            assert all(len(names) == 1 for names in puts)


def test_parts_of_few_rows_have_the_bits_of_all_rows(one_rank):
    """Where a linear layer keeps stock's order of sums; in segments with several chunks it need not."""
    pair = Pair()
    linear = pair.ours.local_experts[0].linear_fc1
    rows = torch.randn(20, linear.weight.size(1))
    expected, _ = linear(rows)
    gathered = GatheredWeightGrads(20, lambda: torch.ones(20, 1, 1), {linear: 0}, pair.store)
    for part, row in enumerate(rows.split(1)):
        with gathered.in_part(part):
            output, _ = linear(row)
        assert output.equal(expected[part : part + 1])
