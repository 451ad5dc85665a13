"""`falconet serve`: serve a checkpoint's model over HTTP."""

import asyncio
import gc

from falconet import exits
from falconet.config.commands import ServeOptions
from falconet.config.fields import value_or
from falconet.config.load import Loaded
from falconet.exits import INTERRUPTED
from falconet.infer.predictor import Predictor, open_served
from falconet.report.console import Screen, counted
from falconet.serve import app, connections  # need aiohttp, which the command line has checked
from falconet.serve.batching import Batcher, Policy
from falconet.serve.protocol import Served

PORT, MAX_BATCH = 8000, 64
FRONT_ENDS = 4  # for a CUDA device, which computes faster than one thread reads
WAITING_BATCHES = 16  # full batches that may wait


def run(loaded: Loaded[ServeOptions]) -> int:
    screen, serving = Screen(), loaded.options.serving
    address = connections.Address(host=serving.host, port=value_or(serving.port, PORT))
    with address.open() as listening:  # first, because a mistake here is found at once
        classifier, options = open_served(loaded.line, screen.line)
        max_batch = value_or(serving.max_batch, MAX_BATCH)
        predictor = Predictor(classifier, max_batch=max_batch)
        served = Served(
            name=classifier.served_name,
            preprocessing=classifier.preprocessing,
            class_names=classifier.class_names,
            output=str(predictor.dtype).removeprefix("torch."),
            max_batch=max_batch,
            activation=classifier.activation,
        )
        policy = Policy(
            max_batch=max_batch,
            max_delay=serving.max_delay / 1000,
            max_queue=max(value_or(serving.max_queue, WAITING_BATCHES * max_batch), max_batch),
        )
        batcher = Batcher(predictor.lanes(), policy)
        memory = app.Memory(2 * max(policy.max_queue // max_batch, 1) * served.most_bytes)

        def fronts() -> list[app.FrontEnd]:
            """One for the batcher's own thread, the others with a thread each."""
            count = value_or(serving.front_ends, FRONT_ENDS if classifier.device.type == "cuda" else 1)
            ways = [batcher.submit, *[app.from_other_threads(batcher.submit)] * (count - 1)]
            return [
                app.FrontEnd(served, way, counts=batcher.counts, memory=memory, max_delay=policy.max_delay)
                for way in ways
            ]

        host, port = listening.getsockname()[:2]
        side = classifier.preprocessing.image_size
        shown = f"[{host}]" if ":" in host else host
        line = (
            f"serving {served.name} at http://{shown}:{port}: input_0 uint8 [1 to {max_batch}, 3, {side}, {side}],"
            f" {options.machine.precision} on {classifier.device}; Ctrl-C stops"
        )
        gc.freeze()  # else each full collection looks at all of torch's objects, and stops every thread meanwhile
        try:
            code, cut = asyncio.run(
                connections.serve(
                    fronts, listening, drain_seconds=serving.drain_timeout, started=lambda: screen.line(line)
                )
            )
        except asyncio.CancelledError:
            code, cut = INTERRUPTED, 0  # the second Ctrl-C
        finally:
            gc.unfreeze()  # nanobind reports what is left at the end as leaks
            batcher.close(wait=False)
        if cut:
            late = counted(cut, "request")
            screen.line(f"cut off {late} that had not finished after {serving.drain_timeout:g} s (--drain-timeout)")
        counts = batcher.counts
        batches = counted(counts.executions, "batch")
        screen.line(f"stopped: {counted(counts.requests, 'request')}, {counted(counts.images, 'image')} in {batches}")
        if cut:
            exits.now(code)  # not after a batch that is still being computed, perhaps for ever by a broken device
        return code
