"""The overlap in NeMo-RL: the module of the policy's worker calls :func:`install`.

That is ``nemo_rl/models/policy/workers/megatron_policy_worker.py``, or the module of a worker that is derived from it,
``Policy(worker_extension_cls_fqn=...)``. The configuration has no place for it.
"""

from megatron_lancet.library.launchers import install_from_environment


def install() -> None:
    """Lets the policy run by the plan of ``LANCET_FLAGS``; the reference model, which is built later, stays stock.

    Raises:
        UsageError: see :func:`~megatron_lancet.library.launchers.install_from_environment`.
    """
    install_from_environment()
