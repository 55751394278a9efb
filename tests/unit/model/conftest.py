import os
from unittest import mock

import pytest
import torch.distributed as dist

from megatron_lancet.training.platform.cpu import cpu_platform


@pytest.fixture(scope="module")
def one_rank():
    """Megatron's process groups of a single process; building a model sets environment variables, for here only."""
    with mock.patch.dict(os.environ), cpu_platform():
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        model_parallel_cuda_manual_seed(1, force_reset_rng=True)
        yield
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
