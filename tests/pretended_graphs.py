"""CUDA graphs pretended on a CPU: a capture computes and sends nothing, a replay makes the update that was captured."""

from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace

import torch
import torch.distributed as dist

from falconet.parallel.data_parallel import digest
from falconet.train.capture import CapturedStep
from replica_scenarios import Case, build_case, images, own_part

CUDA = torch.device("cuda", 0)
MESSAGES = ("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor")


class Pretended:
    """A device for one step, and what it was asked to do."""

    def __init__(self, state, step, *, fails=False):
        """`fails`: at the second message of every capture."""
        self.state, self.fails, self.captures, self.messages, self.events = state, fails, False, 0, []
        self.compute, step.make = step.make, self.make
        pretended = self

        class Graph:
            def capture_begin(self, pool, *, capture_error_mode):
                pretended.captures, pretended.messages = True, 0
                pretended.events.append("capture")

            def capture_end(self):
                pretended.captures = False

            def replay(self):
                pretended.events.append("replay")
                for held, made in zip(pretended.result, pretended.compute(pretended.inputs), strict=True):
                    held.copy_(made)

        stream = SimpleNamespace(wait_stream=lambda other: None, device=CUDA)
        for name, value in {
            "Stream": lambda device: stream,
            "stream": lambda _: nullcontext(),
            "current_stream": lambda _: stream,
            "graph_pool_handle": lambda: (0, 1),
            "CUDAGraph": Graph,
            "Event": lambda: SimpleNamespace(record=lambda: None, query=lambda: True),
            "is_current_stream_capturing": lambda: self.captures,
            "synchronize": lambda _: None,
            "empty_cache": lambda: None,
        }.items():
            setattr(torch.cuda, name, value)
        torch.Tensor.record_stream = lambda tensor, stream: None
        for name in MESSAGES:
            setattr(dist, name, self.message(getattr(dist, name)))

    def message(self, send):
        """A collective that a capture only takes note of."""

        def sent(*args, **kwargs):
            if not self.captures:
                return send(*args, **kwargs)
            self.messages += 1
            if self.fails and self.messages == 2:
                raise RuntimeError("NCCL cannot be captured here\nand more lines")
            return SimpleNamespace(wait=lambda: None)

        return sent

    def make(self, micro_batches):
        if not self.captures:
            self.events.append("make")
            return self.compute(micro_batches)
        for batch in micro_batches:
            batch.images.zero_(), batch.labels.zero_()
        with self.nothing_computed():
            self.inputs, self.result = micro_batches, self.compute(micro_batches)
        return self.result

    @contextmanager
    def nothing_computed(self):
        """Leave all state as it was, and gradients that must not be used."""
        slots = [t for each in self.state.optimizer.state.values() for t in each.values() if torch.is_tensor(t)]
        scale = self.state.scale.state_tensors().values() if self.state.scale else []
        kept = [(t, t.clone()) for t in (*self.state.model.state_dict().values(), *slots, *scale)]
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, value in kept:
                    tensor.copy_(value)
                for group in self.state.optimizer.param_groups:
                    for p in group["params"]:
                        if p.grad is not None and not any(p.grad is slot for slot in slots):
                            p.grad.fill_(torch.nan)


def captured(world, case: Case, failing: int | None = None, updates=6):
    """Updates with and without graphs; the process `failing` cannot capture. Digests, events and notes."""
    plain, step, _ = build_case(world, case)
    for update in range(updates):
        step(own_part(images(update), world, case.accumulation), update=update, lr=0.05)
    state, step, _ = build_case(world, case)
    pretended, notes = Pretended(state, step, fails=world.rank == failing), []
    graphs = CapturedStep(step, replace(world, device=CUDA), note=notes.append)
    step.moving.replicas._world = replace(world, device=CUDA)
    for update in range(updates):
        graphs(own_part(images(update), world, case.accumulation), update=update, lr=0.05)
    return digest(plain.model), digest(state.model), pretended.events, notes
