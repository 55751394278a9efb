"""How many distinct rows a token has, where a row goes once to each of the groups that hold a part of the experts.

A plain dispatch sends one row for each of a token's k experts. If every choice of k among E experts is equally likely,
a group with e experts gets no row of a token with the probability C(E - e, k) / C(E, k), so a token has on average 1
minus the probability of a row there (hypergeometric distribution), in place of k e / E. Real routers may choose
neighbouring
experts more often together, or, limited to groups of experts, much more often: where a profile has recorded distinct
rows, they count.
"""


def expected_part_of_tokens(num_experts: int, experts_on_rank: float, topk: int) -> float:
    """Part of all tokens that have at least one expert on a rank, if all choices of experts are equally likely.

    Args:
        num_experts: E.
        experts_on_rank: e; a fraction stands for a rank whose experts are chosen more or less often than others.
        topk: k.
    """
    none_there = 1.0
    for chosen in range(topk):
        none_there *= max(0.0, 1.0 - experts_on_rank / (num_experts - chosen))
    # Of whole numbers the product is the formula above; between them it must not give more rows than are chosen.
    return min(1.0 - none_there, topk * experts_on_rank / num_experts)
