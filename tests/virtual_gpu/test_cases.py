"""Training steps on the virtual GPU: ordered, equal to stock with late streams, and with few waits of the host."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from megatron_lancet.features.two_hop.order import TWO_HOP
from megatron_lancet.schedule.dispatch import PLAIN
from megatron_lancet.schedule.plan import DwPolicy
from tests.ranks import launch
from tests.small_gpt import SETTINGS
from tests.virtual_gpu.case import HOPS, logged_error
from tests.virtual_gpu.cases import CASES, DAMAGED, TE_CASES
from tests.virtual_gpu.worker import all_shown

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

TIMEOUT_S = 900
ALL = {**CASES, **TE_CASES}
# About twice the largest measured deviation of any parameter: 4.2e-7 in fp32, and 1.5e-2 in bf16 for the weight of a
# norm; half of the parameters are within 2.5e-3. bf16 has 8 bits, so it rounds by up to 2e-3, and such a gradient
# remains after cancellation in sums over all tokens: stock's bf16 gradient deviates from its fp32 gradient by 1.9e-2.
TOLERANCE = {"fp32": 1e-6, "bf16": 0.03}
SUPPORT = Path(__file__).parents[2] / "docs" / "support.md"
COUNTS = "nccl.py", "wait"
"""File and function in which the host waits for token counts."""
OWN_COUNTS = "nccl.py", "wait_for_own"
"""Where it waits for the rows that this rank sends, if the router drops tokens: nobody else knows how many are left."""
TESTS_OWN = ("case.py", "paired.py", "pipeline.py")
"""Files of the test's step, which reads its losses."""


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Both workers at once: one has Transformer Engine."""

    def shown(te: bool, folder: Path) -> dict[str, Any]:
        device = launch.Te() if te else None
        return launch.results_of(all_shown, 1, folder, TIMEOUT_S, [te], device, joins=False)[0]

    # The first call deletes and makes pytest's base folder, so it must not run in two threads at once.
    folders = [tmp_path_factory.mktemp("cases") for _ in range(2)]
    with ThreadPoolExecutor() as pool:
        local, with_te = pool.map(shown, (False, True), folders)
    return local | with_te


@pytest.mark.parametrize("name", ALL)
def test_steps_are_ordered_and_free_no_memory_in_use(results, name):
    assert results[name]["problems"] == []


@pytest.mark.parametrize("name", DAMAGED)
def test_message_that_leaves_before_its_rows_are_made_is_found(results, name):
    assert "race" in results[name]


@pytest.mark.parametrize("name", ALL)
def test_losses_and_gradients_equal_stocks_with_late_streams(results, check_gradients, name):
    case, found = ALL[name], results[name]
    # On a GPU, GEMMs of parts of the rows do not have the bits of all rows. The fused attention is another kernel.
    is_exact = case.equals_stock and all(
        plan.num_chunks == 1 and not plan.has_tiles and not plan.fused_attention for plan in case.plans
    )
    precision = "bf16" if case.overrides.get("bf16") else "fp32"
    tolerance = 0.0 if is_exact else TOLERANCE[precision]
    check_gradients(found["gradients"], tolerance, name, precision)
    assert found["loss"] <= tolerance
    assert found["logged"] <= tolerance


def test_loss_that_is_not_logged_is_an_infinite_error():
    assert logged_error({"load_balancing_loss": [1.0]}, {}) == float("inf")
    assert logged_error({"load_balancing_loss": [1.0]}, {"load_balancing_loss": [1.0], "z_loss": [2.0]}) == 0
    assert logged_error({}, {}) == 0


def test_bounds_are_those_of_the_document():
    (row,) = (line for line in SUPPORT.read_text().splitlines() if line.startswith("| GPUs, NCCL |"))
    found = re.search(
        r"gradients exact with one chunk in one piece, else within (\S+) of the norm in fp32, (\S+) in bf16", row
    )
    assert found
    assert [float(bound) for bound in found.groups()] == [TOLERANCE["fp32"], TOLERANCE["bf16"]]


@pytest.mark.parametrize("name", ALL)
def test_all_to_alls_run_beside_the_compute_stream(results, name):
    # Without CUDA, Megatron's gathers of unequal parts between the expert-TP ranks are also all-to-alls.
    others = {"compute"} if ALL[name].layout.get("expert_tensor_parallel_size", 1) > 1 else set()
    has_counts = not all(needs_no_counts(ALL[name], plan) for plan in ALL[name].plans)
    streams = {"counts"} if has_counts else set()
    for plan in ALL[name].plans:
        hops = {f"comm {place}" for place in HOPS.values()}
        streams |= hops if plan.dispatch is TWO_HOP else {"comm"}
    assert set(results[name]["exchanges"]) - others == streams


@pytest.mark.parametrize("name", ALL)
def test_host_waits_once_per_layer_and_chunk_and_not_in_backward(results, name):
    """For the token counts, forward; what else the host waits for is none of the layer's business."""
    case = ALL[name]
    for step, waits in enumerate(results[name]["host_waits"]):
        plan = case.plans[step // len(case.late)]
        sites = [place(wait) for wait in waits]
        num_at_ends = 2 if plan.is_paired else 0
        num_expected = num_at_ends * num_exchanges(case, plan.at_ends)
        num_expected += (case.num_micro_batches - num_at_ends) * num_exchanges(case, plan)
        assert sites.count(COUNTS) == num_expected
        # Distinct rows are also counted, but more than there are may be made. Tiles need the rows for each rank.
        needs_own = plan.dispatch is PLAIN and "moe_expert_capacity_factor" in case.overrides
        needs_own = needs_own or plan.has_tiles
        assert sites.count(OWN_COUNTS) == (num_expected if needs_own else 0)
        assert not {site for site in sites if site not in (COUNTS, OWN_COUNTS) and site[0] not in TESTS_OWN}


def place(wait: dict[str, Any]) -> tuple[str, str]:
    """File and function of the innermost site."""
    file, _, function = wait["site"].split(" < ")[0].split(":")
    return file, function


def num_exchanges(case, plan) -> int:
    """Exchanges of token counts in a micro-batch: one for each chunk of each layer with experts on this rank."""
    if needs_no_counts(case, plan):
        return 0
    num_stages = case.layout.get("pipeline_model_parallel_size", 1)
    num_layers = case.overrides.get("num_layers", SETTINGS["num_layers"]) // num_stages
    has_experts = case.overrides.get("moe_layer_freq", [1] * num_layers)
    predicted = case.overrides.get("mtp_num_layers", 0)
    chunks = [plan.segment_of(layer + 1).num_chunks for layer in range(num_layers) if has_experts[layer]]
    return sum(chunks) + predicted * plan.segment_of(num_layers).num_chunks


def needs_no_counts(case, plan) -> bool:
    """Whether every expert gets as many rows from each rank as from the others, whatever the tokens."""
    return case.overrides.get("moe_pad_expert_input_to_capacity", False) and plan.num_chunks == 1


def test_cases_cover_each_late_stream_with_each_dw_policy():
    for policy in DwPolicy:
        late = {name for case in CASES.values() if uses(case, policy) for names in case.late for name in names}
        assert late >= {"compute", "comm", "DDP", "NCCL"}


def uses(case, policy) -> bool:
    return any(plan.dw_policy is policy for plan in case.plans)
