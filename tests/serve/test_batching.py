"""Batching: how many executions, and which requests wait, are refused or are dropped."""

import asyncio
import threading

import numpy as np
import pytest

from falconet.infer.predictor import Lanes
from falconet.serve.batching import Batcher, Policy
from falconet.serve.refusals import LateError, OverloadedError
from served import pixels

LIMIT = 100  # seconds


class Lane:
    """Sums each image's pixels, at once or when released."""

    def __init__(self, *, held=False):
        self.batches = []
        self.go = threading.Event()
        if not held:
            self.go.set()

    def __call__(self, portions):
        self.batches.append([len(portion) for portion in portions])
        assert self.go.wait(LIMIT)
        return [portion.reshape(len(portion), -1).sum(axis=1, keepdims=True) for portion in portions]


def in_loop(scenario, lanes, **policy):
    """Run a scenario with a new batcher."""
    rules = Policy(**{"max_batch": 8, "max_delay": 0.02, "max_queue": 1000} | policy)

    async def whole():
        batcher = Batcher(Lanes(each=tuple(lanes)), rules)
        try:
            return await asyncio.wait_for(scenario(batcher), LIMIT)
        finally:
            for lane in lanes:
                lane.go.set()
            batcher.close()

    return asyncio.run(whole())


async def queued(batcher, images):
    while batcher.waiting < images:
        await asyncio.sleep(0)


def test_simultaneous_requests_are_batched_and_get_their_own_answers():
    lane = Lane()
    images = [pixels(1 + number % 3, seed=number) for number in range(20)]

    async def scenario(batcher):
        return await asyncio.gather(*(batcher.submit(each) for each in images)), batcher.counts

    answers, counts = in_loop(scenario, [lane])
    for answer, each in zip(answers, images, strict=True):
        assert np.array_equal(answer.scores[:, 0], each.reshape(len(each), -1).sum(axis=1))
    assert (counts.requests, counts.images) == (20, sum(map(len, images)))
    assert counts.executions == len(lane.batches) < 20
    assert max(map(sum, lane.batches)) <= 8


def test_a_full_batch_does_not_wait():
    lane = Lane()

    async def scenario(batcher):
        return await batcher.submit(pixels(8))

    in_loop(scenario, [lane], max_delay=1000.0)
    assert lane.batches == [[8]]


def test_a_request_that_does_not_fit_starts_the_batch_before_it():
    lane = Lane()

    async def scenario(batcher):
        await asyncio.gather(batcher.submit(pixels(5)), batcher.submit(pixels(8)))

    in_loop(scenario, [lane], max_delay=1000.0)
    assert lane.batches == [[5], [8]]


def test_a_single_request_waits_for_the_delay():
    lane = Lane()

    async def scenario(batcher):
        loop = asyncio.get_running_loop()
        begun = loop.time()
        await batcher.submit(pixels(1))
        return loop.time() - begun

    assert in_loop(scenario, [lane], max_delay=0.2) >= 0.2


def test_requests_that_wait_for_a_busy_lane_form_one_batch():
    lane = Lane(held=True)

    async def scenario(batcher):
        first = asyncio.create_task(batcher.submit(pixels(8)))
        await asyncio.sleep(0)
        others = [asyncio.create_task(batcher.submit(pixels(1))) for _ in range(6)]
        await queued(batcher, 6)
        lane.go.set()
        await asyncio.gather(first, *others)

    in_loop(scenario, [lane], max_delay=0.0)
    assert lane.batches == [[8], [1] * 6]


def test_two_lanes_run_at_the_same_time():
    lanes = [Lane(held=True), Lane(held=True)]

    async def scenario(batcher):
        tasks = [asyncio.create_task(batcher.submit(pixels(8))) for _ in range(2)]
        while not all(lane.batches for lane in lanes):
            await asyncio.sleep(0.01)
        for lane in lanes:
            lane.go.set()
        await asyncio.gather(*tasks)

    in_loop(scenario, lanes)


def test_a_request_that_is_alone_gets_all_cores_and_idle_lanes_divide_what_waits_meanwhile():
    each, whole = (Lane(held=True), Lane(held=True)), Lane(held=True)

    async def scenario(_):
        batcher = Batcher(Lanes(each=each, whole=whole, share=True), Policy(max_batch=8, max_delay=0.0, max_queue=99))
        tasks = [asyncio.create_task(batcher.submit(pixels(1))) for _ in range(6)]
        await queued(batcher, 5)
        assert batcher.counts.executions == 1  # it has all cores
        whole.go.set()
        while not all(lane.batches for lane in each):
            await asyncio.sleep(0.001)
        tasks.append(asyncio.create_task(batcher.submit(pixels(1))))
        for lane in each:
            lane.go.set()
        await asyncio.gather(*tasks)
        batcher.close()

    in_loop(scenario, [Lane()])
    assert whole.batches[0] == [1]
    assert sorted(lane.batches[0] for lane in each) == [[1, 1], [1, 1, 1]]


def test_few_images_of_a_small_network_wait_for_a_busy_lane():
    each = (Lane(held=True), Lane(held=True))

    async def scenario(_):
        rules = Policy(max_batch=8, max_delay=0.0, max_queue=99)
        batcher = Batcher(Lanes(each=each, share=True, least_more=3), rules)
        tasks = [asyncio.create_task(batcher.submit(pixels(1))) for _ in range(3)]
        await queued(batcher, 2)
        assert batcher.counts.executions == 1
        tasks.append(asyncio.create_task(batcher.submit(pixels(1))))
        while not all(lane.batches for lane in each):
            await asyncio.sleep(0.001)
        for lane in each:
            lane.go.set()
        await asyncio.gather(*tasks)
        batcher.close()

    in_loop(scenario, [Lane()])
    assert sorted(lane.batches[0] for lane in each) == [[1], [1, 1, 1]]


def test_a_batch_in_progress_has_an_age_and_none_is_0():
    lane = Lane(held=True)

    async def scenario(batcher):
        working = asyncio.create_task(batcher.submit(pixels(8)))
        while batcher.longest() < 0.01:
            await asyncio.sleep(0.001)
        lane.go.set()
        await working
        return batcher.longest()

    assert in_loop(scenario, [lane]) == 0


def test_a_full_queue_refuses_requests_and_recovers():
    lane = Lane(held=True)

    async def scenario(batcher):
        working = asyncio.create_task(batcher.submit(pixels(8)))
        await asyncio.sleep(0)  # a full batch starts at once
        waiting = [asyncio.create_task(batcher.submit(pixels(4))) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match="8 images are waiting"):
            await batcher.submit(pixels(1))
        lane.go.set()
        await asyncio.gather(working, *waiting)
        await batcher.submit(pixels(1))
        return batcher.counts

    counts = in_loop(scenario, [lane], max_queue=8)
    assert (counts.requests, counts.refused) == (4, 1)


def test_a_cancelled_request_is_not_computed_and_frees_its_place():
    lane = Lane(held=True)

    async def scenario(batcher):
        working = asyncio.create_task(batcher.submit(pixels(8)))
        await asyncio.sleep(0)  # a full batch starts at once
        cancelled = asyncio.create_task(batcher.submit(pixels(4)))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.sleep(0)
        other = asyncio.create_task(batcher.submit(pixels(8)))  # would not fit after the other
        await asyncio.sleep(0)
        lane.go.set()
        await asyncio.gather(working, other)
        return batcher.counts

    counts = in_loop(scenario, [lane], max_queue=8)
    assert lane.batches == [[8], [8]]
    assert (counts.requests, counts.dropped, counts.refused) == (2, 1, 0)


def test_a_failed_batch_fails_its_requests_and_the_next_one_works():
    class Broken(Lane):
        def __call__(self, portions):
            if len(self.batches) == 0:
                self.batches.append([])
                raise RuntimeError("out of memory")
            return super().__call__(portions)

    async def scenario(batcher):
        found = await asyncio.gather(*(batcher.submit(pixels(4)) for _ in range(2)), return_exceptions=True)
        assert [str(error) for error in found] == ["the model failed: RuntimeError: out of memory"] * 2
        return await batcher.submit(pixels(1))

    assert in_loop(scenario, [Broken()]).scores.shape == (1, 1)


def test_a_request_that_is_late_leaves_the_queue_and_says_so():
    lane = Lane(held=True)

    async def scenario(batcher):
        working = asyncio.create_task(batcher.submit(pixels(8)))
        while not lane.batches:
            await asyncio.sleep(0.001)
        with pytest.raises(LateError, match=r"^not computed within .* s, the time limit of the request$"):
            await batcher.submit(pixels(4), deadline=asyncio.get_running_loop().time() + 0.05)
        assert batcher.waiting == 0
        lane.go.set()
        await working
        return batcher.counts

    counts = in_loop(scenario, [lane])
    assert (counts.requests, counts.late, counts.dropped, counts.refused) == (1, 1, 1, 0)
    assert lane.batches == [[8]]


def test_an_answer_says_how_long_it_waited_and_was_computed():
    lane = Lane(held=True)

    async def scenario(batcher):
        first = asyncio.create_task(batcher.submit(pixels(8)))
        second = asyncio.create_task(batcher.submit(pixels(8)))
        while not lane.batches:  # its thread may start late
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        lane.go.set()
        return await asyncio.gather(first, second)

    first, second = in_loop(scenario, [lane])
    assert first.computed >= 0.04
    assert second.queued >= 0.04
