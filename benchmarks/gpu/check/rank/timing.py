"""Steps of each variant in turns on ranks with a device each, and the bandwidth of a plain all-to-all between them."""

import math
import random
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist

from benchmarks.gpu.check.rank.place import RankPlace
from benchmarks.gpu.measure import elapsed_ms
from benchmarks.gpu.record import Recorder
from benchmarks.gpu.sizes import ON_CPU, SIZES
from benchmarks.gpu.variants import MEGATRON_OVERLAP, STOCK, Runner, Variant, Work, why_megatron_refuses
from megatron_lancet.runtime.comm_stats import CommStats

TIMED = (STOCK, "ours k=1", "pairs", "ours k=2 sequence", "tiles", "dedup", MEGATRON_OVERLAP)
_NUM_EXPERTS = 128
_NUM_MICRO_BATCHES, _MICRO_BATCHES_ON_CPU = 4, 2
_MOST_ROUNDS = 15
_ROUNDS_ON_CPU = 2
_BUILD_LIMIT_S = 20.0
_ROUND_LIMIT_S = 30.0
_LEAST_LEFT_S = 1.0
"""Of the limit when the last round has ended."""
_FIRST_S = 3.0
"""What the first message of a kind, the first model, or the first round may take."""
_MESSAGE_MB = (1, 8, 64, 256)
_MB_ON_CPU = (1,)
_MAX_CTAS = (None, 8, 16, 32)
"""Bounds on the SMs of an all-to-all; None for NCCL's own choice."""
_NUM_MESSAGES = 5


def time_messages(record: Recorder, place: RankPlace) -> None:
    """Saves how long all-to-alls of several sizes take. Collective."""
    on_gpu = place.device.type == "cuda"
    for max_ctas in _MAX_CTAS if on_gpu else (None,):
        if place.largest(_FIRST_S - record.time_left_s()) > 0:
            record.add("left out", what=f"all-to-alls on at most {max_ctas} SMs", why="the time is up")
            continue
        group = _group(max_ctas)
        for num_mb in _MESSAGE_MB if on_gpu else _MB_ON_CPU:
            with place.watchdog.limit("all-to-alls", _ROUND_LIMIT_S):
                ms = _message_ms(place, group, num_mb * 1_000_000)
            sent_bytes = num_mb * 1e6 * (place.num_ranks - 1) / place.num_ranks
            record.add("all-to-all", mb=num_mb, max_ctas=max_ctas, wire_ms=ms, gbytes_per_s=sent_bytes / ms * 1e-6)


def _group(max_ctas: int | None) -> dist.ProcessGroup | None:
    """All ranks; None for the group that is there."""
    if max_ctas is None:
        return None
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = max_ctas
    return dist.new_group(pg_options=options)


def _message_ms(place: RankPlace, group: dist.ProcessGroup | None, num_bytes: int) -> float:
    """Time of an all-to-all on the slowest rank; the mean of a few in a row."""
    sent = torch.ones(num_bytes // 4 // place.num_ranks * place.num_ranks, device=place.device)
    received = torch.empty_like(sent)

    def send() -> None:
        for _ in range(_NUM_MESSAGES):
            dist.all_to_all_single(received, sent, group=group)

    send()
    place.largest(0.0)
    return place.largest(elapsed_ms(send, place.device) / _NUM_MESSAGES)


def time_steps(record: Recorder, place: RankPlace) -> None:
    """Saves the time of each variant's step in rounds, as long as the limit permits. Collective."""
    work = _work(place)
    place.share_experts(place.num_ranks)
    runners = _build(record, place, work)
    dice = random.Random(0)  # noqa: S311
    most, round_s = _MOST_ROUNDS if place.device.type == "cuda" else _ROUNDS_ON_CPU, _FIRST_S
    for number in range(most):
        if place.largest(round_s + _LEAST_LEFT_S - record.time_left_s()) > 0:
            record.add("left out", what=f"{most - number} of {most} rounds", why="the time is up")
            break
        start_s = time.monotonic()
        with place.watchdog.limit(f"round {number}", _ROUND_LIMIT_S):
            for name in dice.sample(list(runners), len(runners)):
                place.watchdog.position = lambda name=name: f"{name}: {runners[name].position}"  # type: ignore[misc]
                ms, exposed_ms = _step(runners[name], name, place)
                record.add("step", variant=name, round=number, ms=ms, exposed_ms=exposed_ms)
        round_s = time.monotonic() - start_s


def _work(place: RankPlace) -> Work:
    """On devices the size of the part that times steps with a modelled link."""
    if place.device.type != "cuda":
        return Work(SIZES[ON_CPU], place.num_ranks, _MICRO_BATCHES_ON_CPU, place.device, rank=place.rank)
    size = replace(SIZES["qwen3-like"], micro_batch=1, experts_per_rank=_NUM_EXPERTS // place.num_ranks)
    return Work(size, place.num_ranks, _NUM_MICRO_BATCHES, place.device, rank=place.rank)


def _build(record: Recorder, place: RankPlace, work: Work) -> dict[str, Runner]:
    """The variants that can run, each after a step to warm up."""
    runners: dict[str, Runner] = {}
    refusal = why_megatron_refuses(work)
    needed_bytes, build_s = 0.0, _FIRST_S
    for name in TIMED:
        start_s = time.monotonic()
        if place.largest(build_s + _LEAST_LEFT_S - record.time_left_s()) > 0:
            record.add("left out", what=name, why="the time is up")
            continue
        if name == MEGATRON_OVERLAP and refusal is not None:
            record.add("left out", what=name, why=refusal)
            continue
        before_bytes = _free_bytes(place.device)
        if place.largest(needed_bytes - before_bytes) > 0:
            record.add("left out", what=name, why="the device has too little memory for one more model")
            continue
        with place.watchdog.limit(f"building {name}", _BUILD_LIMIT_S):
            runners[name] = runner = Runner(Variant.named(name), work)
            place.watchdog.position = lambda runner=runner: runner.position  # type: ignore[misc]
            _step(runner, name, place)
        build_s = time.monotonic() - start_s
        if not needed_bytes and place.device.type == "cuda":  # models are alike, and plans keep at most twice as much
            needed_bytes = 1.5 * torch.cuda.max_memory_allocated(place.device)
    return runners


def _free_bytes(device: torch.device) -> float:
    """Memory of the device that new tensors can get; infinite on a CPU."""
    if device.type != "cuda":
        return math.inf
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return float(free_bytes + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def _step(runner: Runner, name: str, place: RankPlace) -> tuple[float, float | None]:
    """Time of a step that all ranks begin together, and of its exposed communication; None where it is not known.

    Stock waits for all of a message: its exposed time is the time of its messages.
    """
    stats = CommStats(place.device)
    runner.reset_gradients()
    place.largest(0.0)
    with _messages_of_stock(name, stats):
        ms = elapsed_ms(runner.step, place.device)
    times, of_stock = runner.take_times(), stats.take()
    if name == MEGATRON_OVERLAP:
        return ms, None
    if name == STOCK:
        times = of_stock
    return ms, times.exposed_ms + times.counts_exposed_ms


def _messages_of_stock(name: str, stats: CommStats) -> AbstractContextManager[None]:
    from megatron_lancet.training.megatron.patches import measured_stock_communication

    return measured_stock_communication(stats) if name == STOCK else nullcontext()
