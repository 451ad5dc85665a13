"""Work done ahead on threads and handed over in order."""

from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, Protocol, TypeVar

Result = TypeVar("Result", covariant=True)
Part = tuple[int, int]  # the first row, and the one after the last


class Job(Protocol[Result]):
    """Rows that any threads may do in any order, in parts; `result` is asked when all are done."""

    def parts(self) -> Iterable[Part]: ...

    def do(self, part: Part) -> None: ...

    def result(self) -> Result: ...


def in_order(jobs: Iterable[Job[Result]], *, workers: int, ahead: int) -> Generator[Result, None, None]:
    """The jobs' results in their order, with up to `ahead` rows begun beyond the job handed over.

    No workers: each job is done when it is asked for. Closing the generator, exhausting it or an error in a job, which
    comes out here as it was raised, all end the threads.
    """
    if workers == 0:
        for job in jobs:
            for part in job.parts():
                job.do(part)
            yield job.result()
        return
    with ThreadPoolExecutor(workers, thread_name_prefix="falconet-data") as pool:
        queue = _Queue(iter(jobs), pool, ahead)
        try:
            while (result := queue.next()) is not None:
                yield result.job.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


class _Begun(Generic[Result]):
    """A job, of which not every part need be with the threads."""

    def __init__(self, job: Job[Result]) -> None:
        self.job = job
        self.waiting = deque(job.parts())
        self.rows = sum(end - begin for begin, end in self.waiting)
        self.futures: list[Future[None]] = []


class _Queue(Generic[Result]):
    """The jobs that were begun, the oldest first; rows are given to the threads as long as there are not too many."""

    def __init__(self, jobs: Iterator[Job[Result]], pool: ThreadPoolExecutor, ahead: int) -> None:
        self._jobs, self._pool, self._ahead = jobs, pool, ahead
        self._begun: deque[_Begun[Result]] = deque()
        self._rows = 0  # with the threads or done, and not handed over

    def next(self) -> _Begun[Result] | None:
        """The oldest job, done; None after the last."""
        self._give()
        if not self._begun:
            return None
        oldest = self._begun.popleft()
        for future in oldest.futures:
            future.result()
        self._rows -= oldest.rows
        return oldest

    def _give(self) -> None:
        for begun in self._begun:
            self._give_parts(begun)
        while not self._begun or (not self._begun[-1].waiting and self._rows < self._most()):
            job = next(self._jobs, None)
            if job is None:
                return
            self._begun.append(_Begun(job))
            self._give_parts(self._begun[-1])

    def _give_parts(self, begun: _Begun[Result]) -> None:
        while begun.waiting:
            begin, end = begun.waiting[0]
            if begun is not self._begun[0] and self._rows + end - begin > self._most():
                return
            begun.futures.append(self._pool.submit(begun.job.do, begun.waiting.popleft()))
            self._rows += end - begin

    def _most(self) -> int:
        """The job that is handed over next is done whatever its size."""
        return self._begun[0].rows + self._ahead
