"""What all-to-alls may carry in a layout."""


def why_not_dedup(ep_size: int, num_experts: int, topk: int, pads_to_capacity: bool) -> str | None:
    """Why a run can't use deduplicated dispatch, as the end of a sentence; None if it can.

    Args:
        ep_size: number of ranks that share the experts.
        num_experts: experts of a MoE layer, on all ranks; 0 for a model without experts.
        topk: experts of a token.
        pads_to_capacity: whether routers give every expert equally many rows of a micro-batch.
    """
    if num_experts < 1:
        return "the model has no experts"
    if ep_size <= 1:
        return "there is one expert-parallel rank, so nothing is sent"
    if topk <= 1:
        return "a token has one expert (top-1), so no rank gets it twice"
    if num_experts <= ep_size:
        return "a rank has one expert, so no rank gets a token twice"
    if pads_to_capacity:
        return "experts' inputs are padded to capacity, and padded rows belong to no rank's tokens"
    return None
