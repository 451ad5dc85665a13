"""Work done ahead on threads and handed over in order."""

from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeVar

Result = TypeVar("Result", covariant=True)


class Job(Protocol[Result]):
    """Something made of parts that any threads may do in any order; `result` is asked when all are done."""

    def parts(self) -> Iterable[tuple[int, int]]: ...

    def do(self, part: tuple[int, int]) -> None: ...

    def result(self) -> Result: ...


def in_order(jobs: Iterable[Job[Result]], *, workers: int, ahead: int) -> Generator[Result, None, None]:
    """The jobs' results in their order, with up to `ahead` jobs begun beyond the one handed over.

    No workers: each job is done when it is asked for. Closing the generator, exhausting it or an error in a job, which
    comes out here as it was raised, all end the threads.
    """
    if workers == 0:
        for job in jobs:
            for part in job.parts():
                job.do(part)
            yield job.result()
        return
    pool = ThreadPoolExecutor(workers, thread_name_prefix="falconet-data")
    begun: deque[tuple[Job[Result], list[Future[None]]]] = deque()
    try:
        for job in jobs:
            begun.append((job, [pool.submit(job.do, part) for part in job.parts()]))
            if len(begun) > ahead:
                yield _finished(*begun.popleft())
        while begun:
            yield _finished(*begun.popleft())
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _finished(job: Job[Result], futures: list[Future[None]]) -> Result:
    for future in futures:
        future.result()
    return job.result()
