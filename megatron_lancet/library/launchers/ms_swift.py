"""The overlap in ms-swift, with ``--bridge_backend megatron-bridge``.

``--external_plugins FILE`` takes a file with two lines::

    from megatron_lancet.library.launchers.ms_swift import install
    install()

Not this file itself: ms-swift would put its folder in front of all packages.
"""

from megatron_lancet.errors import UsageError
from megatron_lancet.library.launchers import close, install_from_environment


def install() -> None:
    """Installs the overlap, and adds ``--callbacks lancet``, which prints the report at the end of the training.

    Raises:
        UsageError: ms-swift is not installed; see :func:`~megatron_lancet.library.launchers.install_from_environment`.
    """
    try:
        from swift.megatron.callbacks import MegatronCallback, megatron_callbacks_map
    except ImportError as error:
        raise UsageError(f"expected ms-swift with Megatron, found none ({error}). Install ms-swift 4.6.") from error

    class Closing(MegatronCallback):
        """Ends the overlap with the training, while process groups are still there."""

        def on_train_end(self) -> None:
            close()

    megatron_callbacks_map["lancet"] = Closing
    install_from_environment()
