"""gloo's own all-to-all against one group per sender, when ranks are out of step: why the CPU transport is as it is.

Start it with two ranks, on the network that is to be measured:

    torchrun --nproc-per-node 2 -m benchmarks.parts.transport [--megabytes 4] [--skew-ms 0 2 5] [--output FILE.json]

The two transports take turns within one run; the table has the median time of an exchange (slowest rank, from when the
later rank sends) and the median of the paired ratios. Bytes are per direction.
"""

import argparse
import statistics
import time
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from benchmarks.parts.frame import new_parser, paired_ratios, parsed, rounded, timed_pairs, write_result
from megatron_lancet.runtime.comm_stats import CommStats
from megatron_lancet.runtime.transport.gloo import PerSenderTransport

ROW_FLOATS = 1024
TRANSPORTS = ("gloo", "per-sender")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = new_parser(__doc__, repeats=20)
    parser.add_argument("--megabytes", type=float, default=4.0, help="sent to the other rank in an exchange (4)")
    parser.add_argument("--skew-ms", type=float, nargs="+", default=[0.0, 2.0, 5.0], help="rank 1 is late by (0 2 5)")
    return parsed(parser, "transport")


class Exchange:
    """The same exchange over both transports; half of the rows stay on their rank."""

    def __init__(self, megabytes: float) -> None:
        rows = max(1, round(megabytes * 1e6 / (4 * ROW_FLOATS)))
        self.splits = [rows, rows]
        self.sent = torch.randn(2 * rows, ROW_FLOATS)
        self.received = torch.empty_like(self.sent)
        stats = CommStats(torch.device("cpu"))
        world = dist.group.WORLD
        assert world is not None
        self.per_sender = PerSenderTransport(world, world, stats, timedelta(minutes=5))

    def time_ms(self, transport: str, skew_ms: float) -> float:
        """One exchange, timed from when the later rank sends to when the slower one has everything."""
        dist.barrier()
        start_s = time.perf_counter()
        if dist.get_rank() == 1:
            time.sleep(skew_ms / 1e3)
        if transport == "per-sender":
            self.per_sender.launch(self.received, self.sent, self.splits, self.splits).wait()
        else:
            dist.all_to_all_single(self.received, self.sent, self.splits, self.splits)
        elapsed = torch.tensor((time.perf_counter() - start_s) * 1e3 - skew_ms)
        dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
        return elapsed.item()


def main() -> None:
    """Measure and print."""
    args = parse_arguments()
    dist.init_process_group("gloo")
    if dist.get_world_size() != 2:
        raise SystemExit(f"error: expected 2 ranks, found {dist.get_world_size()}: torchrun --nproc-per-node 2 ...")
    exchange = Exchange(args.megabytes)
    samples: dict[str, dict[str, list[float]]] = {}
    for skew_ms in args.skew_ms:
        exchanges = {name: partial(exchange.time_ms, name, skew_ms) for name in TRANSPORTS}
        for once in exchanges.values():
            once()  # connections and buffers
        samples[str(skew_ms)] = timed_pairs(exchanges, args.repeats)
    if dist.get_rank() == 0:
        print(f"{args.megabytes} MB per direction; {args.repeats} pairs\n skew ms   gloo ms   per sender ms   ratio")
        for skew, times in samples.items():
            gloo_ms, per_sender_ms = (statistics.median(times[name]) for name in TRANSPORTS)
            ratio = paired_ratios(*(times[name] for name in TRANSPORTS)).median
            print(f"{float(skew):8.1f} {gloo_ms:9.1f} {per_sender_ms:15.1f} {ratio:7.2f}")
        written = {skew: rounded(times, 4) for skew, times in samples.items()}
        write_result(args, {"megabytes": args.megabytes, "samples_ms": written})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
