"""Multi-token prediction in a run, ``--mtp-num-layers`` of Megatron."""

from contextlib import AbstractContextManager, ExitStack

from megatron.core.transformer import multi_token_prediction

from megatron_lancet.feature import ActiveFeature, Feature
from megatron_lancet.feature_parts import SmallLaunch
from megatron_lancet.features.mtp.shifted_tokens import shifted_in_documents
from megatron_lancet.patching import around
from megatron_lancet.training.run import OverlappedRun, Run


class PredictionsFeature(Feature):
    """Layers that predict further tokens."""

    name = "mtp"

    def start(self, run: Run) -> "ActivePredictions | None":
        """Lets predictions stay inside documents."""
        return ActivePredictions() if isinstance(run, OverlappedRun) else None

    def shrink(self, launch: SmallLaunch) -> None:
        """Keeps one layer where stock and the overlap are comparable."""
        args = launch.args
        launch.anew.append("--mtp-num-layers")
        launch.left_out["a stage of predictions alone"] = "--mtp-standalone"
        if not args.mtp_num_layers:
            return
        if launch.axes["pipeline"] > 1 and not args.untie_embeddings_and_output_weights:
            launch.flags.append("--untie-embeddings-and-output-weights")
            launch.changes.append(
                "untied embeddings: with multi-token prediction and pipeline stages Megatron can't save tied ones"
            )
        if launch.stock_mask:
            why = "with a mask, Megatron lets it predict across the ends of documents"
        elif launch.axes["context"] > 1:
            why = (
                "each context-parallel rank averages its loss over its own tokens, of which the last rank has fewer: "
                "not comparable by definition"
            )
        else:
            launch.flags += ["--mtp-num-layers", "1"]
            return
        launch.changes.append(f"no multi-token prediction: {why}")


class ActivePredictions(ActiveFeature):
    """The predictions of a run."""

    def enter(self, stack: ExitStack) -> None:
        """Lets Megatron shift tokens inside documents."""
        stack.enter_context(predictions_in_documents())


def predictions_in_documents() -> AbstractContextManager[None]:
    """Lets multi-token prediction shift tokens and labels inside the documents of several samples."""
    return around(multi_token_prediction, "roll_tensor", shifted_in_documents)


PREDICTIONS = PredictionsFeature()
