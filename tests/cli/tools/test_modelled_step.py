"""The command of a modelled step on a small model: its table, its timeline, and what it refuses."""

import argparse
import re
import sys

import pytest

from megatron_lancet.cli.arguments import add_launch_arguments, own_words
from megatron_lancet.errors import UsageError
from megatron_lancet.lab.launch.launch import read_launch
from megatron_lancet.lab.modelled_step import command
from megatron_lancet.lab.modelled_step.arguments import add_arguments, check_arguments
from megatron_lancet.lab.modelled_step.recording import record
from megatron_lancet.lab.modelled_step.settings import modelled_run
from megatron_lancet.planning.plan_file import MadeFor, PlanFile, write_plan_file
from megatron_lancet.schedule.plan import DwPolicy, Plan, Segment
from megatron_lancet.testkit.virtual_gpu.log import CollectiveBegins, Kernel
from megatron_lancet.training.platform.cpu import cpu_platform

MODEL = (
    "--num-layers 6 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 4 --global-batch-size 32 --train-iters 10 --lr 1e-3 --bf16 --num-experts 8 --moe-router-topk 2 "
    "--expert-model-parallel-size 4 --moe-token-dispatcher-type alltoall --disable-bias-linear --swiglu "
    "--normalization RMSNorm --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0 "
    "--data-path /no/such_document --pipeline-model-parallel-size 2 --lancet-num-chunks 2"
).split()
DEVICE = "--layers 2 --launch-us 0 4 --connections 1 8 --link 100:1".split()


@pytest.fixture
def modelled(monkeypatch):
    def run(*flags: str) -> str:
        monkeypatch.setattr(sys, "argv", ["virtual_gpu.py"])
        monkeypatch.setenv("WORLD_SIZE", "8")
        parser = argparse.ArgumentParser(allow_abbrev=False)
        add_arguments(parser)
        add_launch_arguments(parser)
        words, launch = own_words(parser, [*DEVICE, *flags, *MODEL])
        own = parser.parse_args(words)
        check_arguments(own)
        return command.modelled(own, read_launch(launch))

    return run


def rows_of(output: str, first: str) -> dict[str, list[float]]:
    """Numbers of the lines of a table, by their first cell."""
    lines = output[output.index(first) :].split("\n\n")[0].splitlines()[1:]
    cells = [re.split(r"\s{2,}|(?<=\d) (?=\d)", line.strip()) for line in lines]
    return {line[0]: [float(cell.removesuffix(" %")) for cell in line[1:]] for line in cells}


def test_modelled_step_shows_kernels_steps_and_a_timeline(modelled, tmp_path):
    page = tmp_path / "step.html"
    output = modelled("--timeline", str(page), "--dataloader-inter-document-masking")
    assert output.startswith("modelled, not measured: rank 0 of 8, 4 x 64 tokens, top 2 of 8 experts on 4 ranks")
    assert "6 layers, scaled from 1 and 2" in output
    assert "note: pipeline stages and their messages are left out" in output
    assert "note: attention sees whole samples: documents, which make it cheaper, have no lengths here" in output
    kernels = rows_of(output, "kernels per layer")
    assert list(kernels) == ["stock", "no overlap", "plan"]
    forward, backward, weight_grads, both, host_waits = kernels["plan"]
    assert forward + backward == pytest.approx(both, abs=1)
    assert 0 < weight_grads < backward
    assert host_waits == 2  # counts of each chunk
    assert kernels["stock"][2] == 0
    steps = re.findall(r"^ +([\d.]+) +(\d+) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+) %$", output, re.MULTILINE)
    by_setting = {(launch, connections): [float(one) for one in rest] for launch, connections, *rest in steps}
    assert set(by_setting) == {("0", "1"), ("0", "8"), ("4", "1"), ("4", "8")}
    stock_ms, no_overlap_ms, plan_ms, share = by_setting["0", "8"]
    assert plan_ms < stock_ms
    assert no_overlap_ms > 0
    assert 0 < share < 100
    assert by_setting["4", "8"][2] > plan_ms  # its kernels are far shorter than 4 us
    assert '"source":"predicted"' in page.read_text()
    assert "L2.c1.I.dispatch" in page.read_text()


def test_recorded_messages_and_products_have_the_models_sizes(monkeypatch):
    """A chunk of 128 tokens makes 256 rows of 64 numbers in bf16, 64 for each of the 4 ranks."""
    monkeypatch.setattr(sys, "argv", ["virtual_gpu.py", *MODEL])
    monkeypatch.setenv("WORLD_SIZE", "8")
    with cpu_platform():
        run = modelled_run()
        recording = record(run.with_layers(1), run.plan)
    rows_to_others, counts = 3 * 64, 3 * 2
    sizes = {
        "counts": counts * 8,
        "dispatch": rows_to_others * (64 * 2 + 16),  # with a probability, at an aligned place
        "combine": rows_to_others * 64 * 2,
    }
    assert len(recording.messages) == 2 * 5
    for message in recording.messages:
        assert message.num_bytes == sizes[message.name.split(".")[-1]]
    exchanges = [one for one in recording.log if isinstance(one, CollectiveBegins) and one.name == "all_to_all"]
    assert sorted(one.bytes_to_others for one in exchanges) == sorted(one.num_bytes for one in recording.messages)
    products = [one.flops for one in recording.log if isinstance(one, Kernel) and one.name == "_grouped_mm"]
    fc1, fc2 = 2 * 256 * 64 * 256, 2 * 256 * 128 * 64  # of 256 rows; the first layer has a gate
    assert sorted(products) == sorted([fc1, fc2] * 2 * 3)  # chunks; forward, dX and dW


@pytest.fixture
def planned(monkeypatch):
    """The plan of the model with some more flags, on 8 ranks in two stages."""

    def plan_of(*flags: str) -> Plan:
        monkeypatch.setattr(sys, "argv", ["virtual_gpu.py", *MODEL[:-2], *flags])  # any number of chunks
        monkeypatch.setenv("WORLD_SIZE", "8")
        with cpu_platform():
            return modelled_run().plan

    return plan_of


def test_plan_of_a_stage_pairs_as_the_run_does(planned):
    """A stage has 4 data-parallel ranks, so two micro-batches; Megatron's loop without virtual stages has no pairs."""
    assert planned("--num-virtual-stages-per-pipeline-rank", "3", "--lancet-pairing", "on").is_paired
    with pytest.raises(UsageError, match="Megatron's loop for a pipeline without virtual stages"):
        planned("--global-batch-size", "64", "--lancet-pairing", "on")


def test_plan_file_for_stages_and_predictions_is_followed(planned, tmp_path):
    plan = Plan((Segment(1, 4, 2), Segment(5, None, 1)), DwPolicy.NONE)
    flags = "--mtp-num-layers 1 --moe-layer-freq [0,1,1,1,1,1] --lancet-plan".split()
    made_for = MadeFor(7, "2-7", 2, 4, 64, 8, 2, 4, num_mtp_layers=1)
    write_plan_file(tmp_path / "plan.json", PlanFile(plan, made_for))
    assert planned(*flags, str(tmp_path / "plan.json")) == plan


def test_modelled_step_of_latent_attention_needs_no_te(modelled):
    """As DeepSeek-V3's scripts: head sizes of queries and values differ, and the flags ask for Transformer Engine."""
    latent = "--multi-latent-attention --q-lora-rank 32 --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8"
    te = "--transformer-impl transformer_engine --recompute-granularity selective --recompute-modules mla_up_proj mlp"
    fp8 = "--fp8-format e4m3 --fp8-recipe blockwise --moe-router-padding-for-fp8 --delay-wgrad-compute"
    output = modelled(*f"{latent} --v-head-dim 16 {te} {fp8} --overlap-moe-expert-parallel-comm".split())
    assert "outputs of mla_up_proj are kept: to recompute them takes Transformer Engine's layers" in output
    assert all(count > 0 for count in rows_of(output, "kernels per layer")["plan"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--layers", "3"], "--layers expects an even number"),
        (["--moe-expert-capacity-factor", "1"], "--moe-expert-capacity-factor can't be modelled"),
        (["--lancet-dispatch", "dedup"], "dispatch=dedup can't be modelled: how many rows it sends depends on values"),
        (["--lancet-plan", "off"], "there is no plan to model: off"),
        (["--timeline", "/no/such/folder/page.html"], "there is no folder /no/such/folder"),
        (["--connections", "0"], "--connections expects numbers of at least 1"),
        (["--host-wait-us", "-3"], "--host-wait-us expects a finite number of at least 0, got -3"),
    ],
)
def test_modelled_step_refuses_in_one_line(modelled, flags, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        modelled(*flags)


@pytest.mark.parametrize("flag", ["--tflops", "--memory-gbytes-per-s"])
def test_a_rate_of_nothing_is_refused(flag, capsys):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args([flag, "0"])
    assert f"{flag}: expected a number above 0, got '0'" in capsys.readouterr().err


def test_a_gpu_sets_the_rates_that_are_not_given():
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    default, h200, given = (
        parser.parse_args(words) for words in ([], ["--gpu", "h200"], ["--gpu", "h200", "--tflops", "700"])
    )
    for own in (default, h200, given):
        check_arguments(own)
    assert (default.tflops, default.memory_gbytes_per_s) == (600, 2500)
    assert (h200.tflops, h200.memory_gbytes_per_s) == (pytest.approx(0.65 * 989), pytest.approx(0.725 * 4800))
    assert given.tflops == 700
