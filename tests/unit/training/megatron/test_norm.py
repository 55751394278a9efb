from types import SimpleNamespace

import pytest
import torch

from megatron_lancet.training.megatron.norm import sequence_parallel_norm


def config(normalization: str, zero_centered: bool = False) -> SimpleNamespace:
    return SimpleNamespace(normalization=normalization, layernorm_zero_centered_gamma=zero_centered)


@pytest.mark.parametrize(("normalization", "num_parameters"), [("LayerNorm", 2), ("RMSNorm", 1)])
def test_norm_gradients_are_marked_as_partial_sums(normalization, num_parameters):
    norm = sequence_parallel_norm(config(normalization), 8, eps=1e-5)
    parameters = list(norm.parameters())
    assert len(parameters) == num_parameters
    assert all(parameter.sequence_parallel for parameter in parameters)
    x = torch.randn(3, 8)
    plain = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}[normalization](8, eps=1e-5)
    assert norm(x).equal(plain(x))
    assert list(norm.state_dict()) == list(plain.state_dict())


@pytest.mark.parametrize("unsupported", [config("L2Norm"), config("LayerNorm", zero_centered=True)])
def test_other_norms_are_refused(unsupported):
    with pytest.raises(ValueError, match="supports"):
        sequence_parallel_norm(unsupported, 8, eps=1e-5)
