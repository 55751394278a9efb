"""Real steps of small models in a mocked world, recorded as a list of what the computing thread did."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple
from unittest import mock

import torch

from megatron_lancet.features.comm_priority.comm_scheduler import CommScheduler, PendingReduction
from megatron_lancet.features.two_hop.order import TWO_HOP
from megatron_lancet.patching import around, replaced
from megatron_lancet.planning.profile import Profile
from megatron_lancet.profiler.facts import ProfiledModel
from megatron_lancet.profiler.measure import ProfileRun, plans_to_profile
from megatron_lancet.runtime.comm import Comm
from megatron_lancet.runtime.comm_stats import CommStats
from megatron_lancet.runtime.trace import Trace
from megatron_lancet.runtime.weight_grad_store import DeferredWeight, WeightGradStore
from megatron_lancet.schedule.nodes import Nodes
from megatron_lancet.schedule.plan import Plan, fixed_plan
from megatron_lancet.schedule.reductions import MicroOps
from megatron_lancet.testkit.mock.mock_world import mock_world
from megatron_lancet.training.platform.cpu import cpu_platform
from tests.small_gpt import EXPERTS, SEQ_LENGTH, VOCAB, small_gpt, small_hybrid, transformer_config

EP_SIZE, NUM_STAGES = 4, 3
MICRO_BATCH, NUM_MICRO_BATCHES = 4, 2
PINNED_BYTES = 1000
"""What each deferred dW counts, in place of its real size: how many fit a bound does not depend on the routing then."""


class Verb(StrEnum):
    """What happened to an op, a message, a weight gradient or a reduction."""

    END = "end"
    ISSUE = "issue"
    WAIT = "wait"
    """A wait that is over."""
    WEIGHT_GRAD = "dW"
    WEIGHT_GRAD_INSIDE = "dW inside"
    """It ran before the op that made it ready, or that was the last of the pass, was reported."""
    REPORT = "report"
    REDUCE = "reduce"


class Event(NamedTuple):
    verb: Verb
    name: str


class _Recorder(Trace):
    """A trace that also keeps one list of everything, in order."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), 0)
        self.events: list[Event] = []
        self.is_inside_op = False

    def take(self) -> list[Event]:
        events, self.events = self.events, []
        return events

    def end(self, name: str) -> None:
        self.events.append(Event(Verb.END, name))
        super().end(name)

    @contextmanager
    def waiting(self, name: str) -> Iterator[None]:
        with super().waiting(name):
            yield
        self.events.append(Event(Verb.WAIT, name))

    @contextmanager
    def weight_grad(self, name: str, *sizes: Any) -> Iterator[None]:
        with super().weight_grad(name, *sizes):
            yield
        verb = Verb.WEIGHT_GRAD_INSIDE if self.is_inside_op else Verb.WEIGHT_GRAD
        self.events.append(Event(verb, name))


@dataclass
class _Token:
    """The smallest gradient reduction: it shows where reductions may start."""

    events: list[Event]
    num_bytes: int = 1

    def launch(self) -> None:
        self.events.append(Event(Verb.REDUCE, ""))

    def wait(self) -> None: ...

    def release_if_done(self) -> bool:
        return True


@contextmanager
def _recorded(recorder: _Recorder, num_filled: Mapping[str, int] | None) -> Iterator[None]:
    """While it holds, what a trace does not say goes to the list too, and the clock decides nothing.

    Args:
        num_filled: how many dWs find the message of a backward all-to-all still on its way, by its name; None if the
            host doesn't see that, as with CUDA.
    """

    def launches(stock: Callable[..., Any], comm: Any, op: Any, *args: Any) -> Any:
        handle = stock(comm, op, *args)
        recorder.events.append(Event(Verb.ISSUE, str(op)))
        return handle

    def puts(stock: Callable[..., None], store: Any, weights: Any, compute: Any, num_bytes: int) -> None:
        recorder.is_inside_op = True
        stock(store, weights, compute, PINNED_BYTES)
        recorder.is_inside_op = False

    def flushes(stock: Callable[..., None], store: Any) -> None:
        recorder.is_inside_op = True
        stock(store)
        recorder.is_inside_op = False

    def fills(stock: Callable[..., None], store: Any, _: Any, op: Any) -> None:
        if num_filled is None:
            store.run_ahead(op)
            return
        polls = iter([True] * num_filled.get(str(op), 0))
        stock(store, lambda: next(polls, False), op)

    def reports(stock: Callable[..., None], weight: Any) -> None:
        recorder.events.append(Event(Verb.REPORT, weight.name))
        stock(weight)

    def queues_a_token(stock: Callable[..., None], scheduler: Any) -> None:
        stock(scheduler)
        reduction = PendingReduction(scheduler)
        reduction.micro_ops.append(_Token(recorder.events))
        scheduler.put(reduction)

    with ExitStack() as stack:
        for name in ("launch", "launch_when_known", "launch_counts"):
            stack.enter_context(around(Comm, name, launches))
        stack.enter_context(around(WeightGradStore, "put", puts))
        stack.enter_context(around(WeightGradStore, "flush", flushes))
        stack.enter_context(around(WeightGradStore, "fill", fills))
        stack.enter_context(around(DeferredWeight, "report", reports))
        stack.enter_context(around(CommScheduler, "issued", queues_a_token))
        yield


class _NumberedEvents(list[Any]):
    """A recorder's list in which each event has the number of the micro-batch that it belongs to."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm

    def append(self, event: Event) -> None:
        super().append((self._comm.progress.number, event))


@contextmanager
def mocked_ranks(num_ranks: int, **layout: int) -> Iterator[None]:
    """Inside, this process is rank 0 of a mocked world; ``layout`` is Megatron's."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors are tiny
    with mock.patch.dict(os.environ), cpu_platform():
        from megatron.core import parallel_state
        from megatron.core.transformer.moe.router import MoEAuxLossAutoScaler

        MoEAuxLossAutoScaler.main_loss_backward_scale = None  # another test may have set one of another shape
        MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1) / NUM_MICRO_BATCHES)
        with mock_world(num_ranks):
            parallel_state.initialize_model_parallel(**layout)
            yield
            parallel_state.destroy_model_parallel()
    torch.set_num_threads(num_threads)


class Recorded(NamedTuple):
    """What a micro-batch did."""

    forward: list[Event]
    backward: list[Event]


@dataclass
class _StageOf:
    """Stands for the process group of a pipeline's ranks, of which this one is any."""

    own: int
    num_stages: int

    def rank(self) -> int:
        return self.own

    def size(self) -> int:
        return self.num_stages


@dataclass
class Model:
    """A small model, whole or one stage of a pipeline, that can run by any plan.

    Attributes:
        moe_layers: for each layer of the full model, 1 where it has experts.
        stage: of :data:`NUM_STAGES`; None for the full model.
        overrides: of Megatron's config.
        pattern: symbol of each layer of a hybrid model; None for a GPT.
        nodes: how the expert-parallel ranks lie on nodes; None for a model without two hops.
        is_wired: whether routed sums are added one layer later.
    """

    moe_layers: Sequence[int]
    stage: int | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    pattern: str | None = None
    nodes: Nodes | None = None
    is_wired: bool = False

    def record(self, plan: Plan, num_filled: Mapping[str, int] | None, has_priority: bool) -> list[Recorded]:
        """A step under ``plan``: what each micro-batch did.

        Args:
            num_filled: see :func:`_recorded`.
            has_priority: all-to-alls go before gradient reductions.
        """
        setup, comm = self._setup, self._module.decoder.comm
        setup.switch(plan)
        recorder = _Recorder()
        comm.record_to(recorder)
        scheduler = CommScheduler(MicroOps(chunk_bytes=1), comm.stats) if has_priority else None  # room for one token
        comm.scheduler = scheduler
        with _recorded(recorder, num_filled):
            passes = setup.check_step(lambda: list(self._step(recorder)))
        comm.record_to(None)
        comm.scheduler = None
        if scheduler is not None:
            scheduler.end_step()
        return passes

    def record_pairs(self, plan: Plan, num_micro_batches: int) -> list[tuple[int, Event]]:
        """A step of Megatron's schedule for pairs, in which no dW finds a message still on its way.

        Returns what it did, each with the number of its micro-batch.
        """
        from megatron_lancet.features.pairing.schedules import paired_schedules

        setup, comm = self._setup, self._module.decoder.comm
        setup.switch(plan)
        recorder = _Recorder()
        recorder.events = events = _NumberedEvents(comm)
        comm.record_to(recorder)
        with _recorded(recorder, {}), paired_schedules(lambda: setup.stages):
            setup.check_step(lambda: self._paired_step(num_micro_batches))
        comm.record_to(None)
        setup.switch(fixed_plan(1))  # asks for no more pairs
        return list(events)

    @cached_property
    def profile(self) -> Profile:
        """Of the full model, measured in the mocked world."""
        assert self.stage is None
        setup = self._setup
        model = ProfiledModel((self._module,), torch.device("cpu"), MICRO_BATCH, SEQ_LENGTH, NUM_MICRO_BATCHES)
        dispatches = [TWO_HOP] if self.nodes is not None else []
        has_tiles = not self.is_wired
        plans = plans_to_profile(MICRO_BATCH, SEQ_LENGTH, chunk_counts=(2,), dispatches=dispatches, has_tiles=has_tiles)
        run = ProfileRun(model, plans, num_traced_steps=1)
        for index, plan in enumerate(run.plans):
            setup.switch(plan)
            with run.step(index):
                list(self._step(None))
        return run.finish()

    @cached_property
    def _module(self) -> Any:
        from megatron.core import parallel_state
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        torch.manual_seed(1)
        model_parallel_cuda_manual_seed(1, force_reset_rng=True)
        num_stages, stage = (1, 0) if self.stage is None else (NUM_STAGES, self.stage)
        config = transformer_config(
            **{
                **EXPERTS,
                "num_layers": len(self.moe_layers),
                "moe_layer_freq": list(self.moe_layers),
                "num_moe_experts": 2 * EP_SIZE,
                "expert_model_parallel_size": EP_SIZE,
                "pipeline_model_parallel_size": num_stages,
                "pipeline_dtype": torch.float32,
                **self.overrides,
            }
        )
        groups = ProcessGroupCollection.use_mpu_process_groups()
        if self.pattern is not None:
            groups.pp = groups.tp  # a group of one rank, of which torch is asked
            return small_hybrid(config, self.pattern, pg_collection=groups)
        groups.pp = _StageOf(stage, num_stages)
        ends = {"pre_process": stage == 0, "post_process": stage == num_stages - 1}
        # Megatron builds multi-token predictions where this rank is the last stage.
        with replaced(
            parallel_state, "_MPU_PIPELINE_MODEL_PARALLEL_RANK", NUM_STAGES - 1 if ends["post_process"] else 0
        ):
            return small_gpt(config, stage, pg_collection=groups, **ends)

    @cached_property
    def _setup(self) -> Any:
        from megatron_lancet.features.shortcut.feature import ActiveShortcut
        from megatron_lancet.features.two_hop.feature import ActiveNodes
        from megatron_lancet.training.overlap_setup import OverlapSetup

        device = torch.device("cpu")
        stats, timeout = CommStats(device), timedelta(minutes=2)
        features = [ActiveNodes(self.nodes, device, stats, timeout), *([ActiveShortcut()] if self.is_wired else [])]
        setup = OverlapSetup(fixed_plan(1), device, stats, timeout, switchable=True, features=features)
        setup([self._module])
        return setup

    @cached_property
    def _ddp(self) -> Any:
        from tests.parity.gradients.gradients_worker import wrap_with_ddp

        assert self._setup.delays_weight_grads
        return wrap_with_ddp(self._module, self._module.config, lambda _, plain: plain, deferred=True)

    def _paired_step(self, num_micro_batches: int) -> None:
        from megatron.core.pipeline_parallel import schedules

        from tests.parity.gradients.gradients_worker import logged_losses

        def forward(_: None, model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
            output = model(**_batch(), attention_mask=None).float().mean()
            return output, lambda loss: (loss, {"loss": loss.detach()})

        ddp = self._ddp
        ddp.zero_grad_buffer()
        self._module.config.no_sync_func = ddp.no_sync
        schedules.forward_backward_no_pipelining(
            forward_step_func=forward,
            data_iterator=None,
            model=[ddp],
            num_microbatches=num_micro_batches,
            seq_length=SEQ_LENGTH,
            micro_batch_size=MICRO_BATCH,
        )
        ddp.finish_grad_sync()
        logged_losses()

    def _step(self, recorder: _Recorder | None) -> Iterator[Recorded]:
        from tests.parity.gradients.gradients_worker import logged_losses

        ddp, module = self._ddp, self._module
        take = recorder.take if recorder is not None else list
        ddp.zero_grad_buffer()
        for index in range(NUM_MICRO_BATCHES):
            with ExitStack() as stack:
                if index < NUM_MICRO_BATCHES - 1:
                    stack.enter_context(ddp.no_sync())
                if not module.pre_process:
                    hidden = torch.randn(SEQ_LENGTH, MICRO_BATCH, module.config.hidden_size, requires_grad=True)
                    module.set_input_tensor(hidden)
                loss = ddp(**_batch(), attention_mask=None).float().mean()
                forward = take()
                (loss / NUM_MICRO_BATCHES).backward()
                yield Recorded(forward, take())
        ddp.finish_grad_sync()
        logged_losses()  # the next model may have more layers


def _batch() -> dict[str, torch.Tensor]:
    tokens = torch.randint(VOCAB, (MICRO_BATCH, SEQ_LENGTH + 1))
    positions = torch.arange(SEQ_LENGTH).expand(MICRO_BATCH, -1)
    return {"input_ids": tokens[:, :-1], "position_ids": positions, "labels": tokens[:, 1:]}
