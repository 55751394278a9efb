"""Functions whose outputs are dropped, and made again once in the backward pass."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import rms_norm
from torch.utils.checkpoint import checkpoint

from megatron_lancet.model import recompute
from megatron_lancet.model.recompute import DroppedOutputs, maybe_recomputed, outputs_dropped_in_stock
from megatron_lancet.patching import replaced
from megatron_lancet.training.megatron.patches import dropped_outputs


class Norm:
    """A norm that counts its calls, and knows whether an output of theirs is in memory."""

    def __init__(self, width: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.weight = torch.randn(width, generator=generator).requires_grad_()
        self.calls = 0
        self._outputs: list[StorageWeakRef] = []

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        output = rms_norm(hidden, hidden.shape[-1:], self.weight)
        self._outputs.append(StorageWeakRef(output.untyped_storage()))
        self.calls += 1
        return output

    @property
    def output_is_kept(self) -> bool:
        return not all(output.expired() for output in self._outputs)


def tensors():
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(6, 4, 8, generator=generator).requires_grad_()
    return hidden, *(torch.randn(8, 8, generator=generator).requires_grad_() for _ in range(2))


def consumers(normed: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Two functions that save the norm's output, one of them a view of it with other strides."""
    return (normed.view(-1, 8) @ first).sigmoid().sum() + (normed.transpose(0, 1)[1:3] * 2 @ second).tanh().sum()


def gradients(loss: torch.Tensor, *leaves: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, leaves))


def plain_gradients() -> list[torch.Tensor]:
    (hidden, *weights), norm = tensors(), Norm(8)
    return gradients(consumers(norm(hidden), *weights), hidden, norm.weight, *weights)


def test_dropped_outputs_give_same_gradients_and_are_not_kept():
    (hidden, *weights), norm, dropped = tensors(), Norm(8), DroppedOutputs()
    normed = dropped.run(norm, hidden)
    with dropped.consumed():
        loss = consumers(normed, *weights)
    assert norm.output_is_kept
    del normed, dropped
    assert not norm.output_is_kept
    found = gradients(loss, hidden, norm.weight, *weights)
    assert norm.calls == 2  # for three readers: two consumers and the norm itself
    assert not norm.output_is_kept
    assert all(map(torch.equal, found, plain_gradients()))


def test_outputs_are_kept_by_a_consumer_outside():
    (hidden, *weights), norm, dropped = tensors(), Norm(8), DroppedOutputs()
    loss = consumers(dropped.run(norm, hidden), *weights)
    assert norm.output_is_kept
    assert all(map(torch.equal, gradients(loss, hidden, norm.weight, *weights), plain_gradients()))


def test_dropped_outputs_written_to_since_are_kept():
    """Recomputed, they would have their first values."""
    (hidden, *weights), norm, dropped = tensors(), Norm(8), DroppedOutputs()
    normed = dropped.run(norm, hidden)
    with dropped.consumed():
        loss = consumers(normed.mul_(3), *weights)
    del normed
    assert norm.output_is_kept
    expected = gradients(consumers(Norm(8)(hidden) * 3, *weights), hidden, *weights)
    assert all(map(torch.equal, gradients(loss, hidden, *weights), expected))


@pytest.mark.parametrize("parts", [1, 2])
def test_functions_of_dropped_outputs_are_dropped_too(parts):
    (hidden, *weights), norm, dropped = tensors(), Norm(8), DroppedOutputs()
    normed = dropped.run(norm, hidden)
    chunks, following = dropped.then(lambda whole: [part.clone() for part in whole.chunk(parts)], normed)
    storages = [StorageWeakRef(chunk.untyped_storage()) for chunk in chunks]
    with following.consumed():
        loss = sum(((chunk @ weights[0]).sigmoid() @ weights[1]).sum() for chunk in chunks)
    del normed, chunks
    assert not norm.output_is_kept
    assert all(storage.expired() for storage in storages)
    found = gradients(loss, hidden, norm.weight, *weights)
    assert norm.calls == 2
    plain = Norm(8)
    loss = sum(((chunk @ weights[0]).sigmoid() @ weights[1]).sum() for chunk in plain(hidden).chunk(parts))
    assert all(map(torch.equal, found, gradients(loss, hidden, plain.weight, *weights)))


def test_dropped_outputs_may_be_consumed_by_a_checkpoint():
    """It keeps its inputs, which are dropped, and saves nothing else."""
    (hidden, *weights), norm, dropped = tensors(), Norm(8), DroppedOutputs()
    normed = dropped.run(norm, hidden)
    with dropped.consumed():
        loss = checkpoint(consumers, normed, *weights, use_reentrant=False)
    del normed
    assert not norm.output_is_kept
    assert all(map(torch.equal, gradients(loss, hidden, norm.weight, *weights), plain_gradients()))


def test_other_saved_tensors_reach_the_hooks_outside():
    (hidden, *weights), norm, dropped, seen = tensors(), Norm(8), DroppedOutputs(), []

    def pack(tensor):
        seen.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        normed = dropped.run(norm, hidden)
        with dropped.consumed():
            loss = (normed @ weights[0]).sigmoid().sum()
    addresses = {tensor.untyped_storage().data_ptr() for tensor in seen}
    kept = {tensor.untyped_storage().data_ptr() for tensor in (hidden, weights[0])}
    assert kept < addresses  # and the sigmoid's output
    assert normed.untyped_storage().data_ptr() not in addresses
    assert len(gradients(loss, hidden)) == 1


def test_dropped_outputs_without_gradients_are_plain():
    hidden, *_ = tensors()
    norm, dropped = Norm(8), DroppedOutputs()
    with torch.no_grad(), dropped.consumed():
        assert torch.equal(dropped.run(norm, hidden), Norm(8)(hidden))
    assert norm.calls == 1


def stock_module(norms: list[Norm], hidden: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    """Drops an output inside the use of another, as multi-latent attention does inside its layer."""
    from megatron.core import tensor_parallel

    outer, inner = (tensor_parallel.CheckpointWithoutOutput(fp8=None) for _ in norms)
    normed = outer.checkpoint(norms[0], hidden)
    again = inner.checkpoint(norms[1], normed)
    output = again @ weights[0]
    inner.discard_output_and_register_recompute(output)
    output = output.sigmoid() @ weights[1]
    outer.discard_output_and_register_recompute(output)
    return output.tanh().sum()


def test_stock_modules_drop_outputs_of_several_calls():
    (hidden, *weights), norms = tensors(), [[Norm(8), Norm(8)] for _ in range(2)]
    with dropped_outputs(), outputs_dropped_in_stock(True):
        losses = [stock_module(pair, hidden, *weights) for pair in norms]
    assert not any(norm.output_is_kept for pair in norms for norm in pair)
    expected = [Norm(8), Norm(8)]
    loss = ((expected[1](expected[0](hidden)) @ weights[0]).sigmoid() @ weights[1]).tanh().sum()
    expected_gradients = gradients(loss, hidden, expected[0].weight, expected[1].weight, *weights)
    for pair, its_loss in zip(norms, losses, strict=True):
        found = gradients(its_loss, hidden, pair[0].weight, pair[1].weight, *weights)
        assert [norm.calls for norm in pair] == [2, 2]
        assert all(map(torch.equal, found, expected_gradients))


def test_stock_checkpoints_are_restored_after_an_error():
    from megatron.core import tensor_parallel

    stock, (hidden, *weights) = tensor_parallel.CheckpointWithoutOutput, tensors()
    with dropped_outputs():
        with pytest.raises(RuntimeError), outputs_dropped_in_stock(True):
            stock_module([Norm(8), Norm(5)], hidden, *weights)
        assert isinstance(tensor_parallel.CheckpointWithoutOutput(), stock)
    assert tensor_parallel.CheckpointWithoutOutput is stock
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def test_outputs_are_dropped_in_stock_on_request_only():
    from megatron.core import tensor_parallel

    stock = tensor_parallel.CheckpointWithoutOutput
    with dropped_outputs(), outputs_dropped_in_stock(False):
        assert isinstance(tensor_parallel.CheckpointWithoutOutput(), stock)
    with pytest.raises(AssertionError, match="own class"), outputs_dropped_in_stock(True):
        pass


class GraphSafeTracker:
    """Megatron's tracker with generators as random states, as with ``--te-rng-tracker``."""

    def __init__(self) -> None:
        self.states_ = {"model-parallel-rng": torch.Generator().manual_seed(5)}

    def get_states(self) -> dict[str, torch.Generator]:
        return dict(self.states_)

    def set_states(self, states: dict[str, torch.Generator]) -> None:
        self.states_ = states

    def draw(self, size: torch.Size) -> torch.Tensor:
        return torch.rand(size, generator=self.states_["model-parallel-rng"])


def test_recomputed_dropout_draws_the_same_numbers():
    tracker = GraphSafeTracker()
    masks = []

    def drop(hidden: torch.Tensor) -> torch.Tensor:
        masks.append(tracker.draw(hidden.shape))
        return (hidden * masks[-1]).square()

    hidden = [torch.ones(8, requires_grad=True) for _ in range(2)]
    with replaced(recompute.tensor_parallel, "get_cuda_rng_tracker", lambda: tracker):
        outputs = [maybe_recomputed(True, drop, one) for one in hidden]
        after_forward = tracker.states_["model-parallel-rng"].get_state()
        torch.stack(outputs).sum().backward()
    first, second, *_ = masks
    assert not first.equal(second)
    assert [one.grad.equal(2 * mask.square()) for one, mask in zip(hidden, (first, second), strict=True)] == [True] * 2
    assert len(masks) == 4
    assert tracker.states_["model-parallel-rng"].get_state().equal(after_forward)
