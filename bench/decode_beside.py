"""Measure nvJPEG through Falconet's binding: alone, and beside a CUDA graph that fills the device as a training does.

    python bench/decode_beside.py FOLDER                       any folder of JPEG files, flat or not

Each case decodes for a second with some threads, each with a decoder and a stream of its own. Columns: photos per
second; microseconds of the host's processors for a photo, of all threads; beside the graph, its replays per second
compared with those alone. `whole path` reads files, decodes, crops and resizes. A case that fails is reported, and the
next one begins.
"""

import argparse
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from decode_device import CROPS, SIZE, bad, repeated
from falconet.data import nvjpeg
from falconet.data.gpu import DeviceBuffers, DeviceRows
from falconet.data.gpu_decoders import Place, Places, describe
from falconet.data.gpu_jpeg import Size, plain_size
from falconet.data.nvjpeg import Backend
from falconet.data.readers import reader_for
from falconet.data.storage import FileSource
from falconet.errors import UserError

DEVICE = torch.device("cuda", 0)
KERNELS, NUMBERS = 200, 2**26  # in a graph; each reads and writes 2 x 128 MiB of 16-bit numbers, about 60 us on an H200
WARM = 0.2  # seconds before a measurement
MOST_PLACES = 6
Work = Callable[[], int]  # decodes some photos and returns how many


@dataclass(frozen=True)
class Case:
    """How photos are decoded."""

    backend: Backend = Backend.HARDWARE
    threads: int = 4
    at_once: int = 64
    output: int = nvjpeg.RGB
    pinned: bool = True

    def __str__(self) -> str:
        kind = self.backend.name.lower().replace("_", " ")
        memory = "" if self.pinned or self.backend is Backend.HARDWARE_DEVICE else ", pageable"
        output = "" if self.output == nvjpeg.RGB else f", output {self.output}"
        return f"{kind}, {self.threads} threads, {self.at_once} at once{output}{memory}"


CASES = [
    *(Case(threads=threads) for threads in (1, 2, 4, 6, 8)),
    *(Case(at_once=at_once) for at_once in (16, 32, 128)),
    Case(pinned=False),
    Case(backend=Backend.GPU_HYBRID, at_once=128),
    Case(backend=Backend.GPU_HYBRID, at_once=128, threads=2),
]
# Not used so far, and last: after an error of the device, no other case works.
TRIALS = [
    *(Case(output=output) for output in (5, 1, 0)),  # RGB interleaved, YUV, unchanged
    Case(backend=Backend.HARDWARE_DEVICE),
]


def workers(case: Case, library: nvjpeg.Library, files: Sequence[bytes]) -> list[Work]:
    """What each thread does again and again: decode the next photos, and wait for them."""
    on_device = case.backend is Backend.HARDWARE_DEVICE
    tensors = [torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in files]
    if on_device or case.pinned:
        tensors = [tensor.to(DEVICE) if on_device else tensor.pin_memory() for tensor in tensors]
    sizes = [plain_size(data) or Size(1, 1) for data in files]

    def made(first: int) -> Work:
        decoder = nvjpeg.Decoder(library, case.backend, output=case.output)
        stream = torch.cuda.Stream(DEVICE, priority=-1)
        portions = [
            np.arange(begin, begin + case.at_once) % len(files)
            for begin in range(first, first + len(files), case.at_once)
        ]
        begins = [nvjpeg.laid_out([sizes[number] for number in portion]) for portion in portions]
        block = torch.empty(int(max(each[-1] for each in begins)), dtype=torch.uint8, device=DEVICE)
        torch.cuda.synchronize()
        turn = 0

        def decode() -> int:
            nonlocal turn
            portion = portions[turn % len(portions)]
            turn += 1
            planes = nvjpeg.planes(block.data_ptr(), [sizes[number] for number in portion])
            whole = decoder.decode([tensors[number] for number in portion], planes, stream=stream.cuda_stream)
            done = torch.cuda.Event(blocking=True)
            done.record(stream)
            done.synchronize()
            return sum(whole)

        return decode

    return [made(97 * number) for number in range(case.threads)]


def whole_path(source: FileSource, threads: int, share: float) -> list[Work]:
    """The rows of batches as the loader's threads read them."""
    rows = DeviceRows(DEVICE, source=source, crops=CROPS, host=reader_for(source, crops=CROPS, bad=bad()), share=share)
    rows._places = Places(lambda: Place(DEVICE), most=min(threads, MOST_PLACES))

    def made(seed: int) -> Work:
        random = np.random.default_rng(seed)
        out = DeviceBuffers(DEVICE).batch(rows.rows, size=SIZE).images.permute(0, 2, 3, 1)
        return lambda: int(rows.read(random.integers(len(source), size=rows.rows), epoch=0, out=out).sum())

    return [made(seed) for seed in range(threads)]


@dataclass
class Rate:
    photos: float  # per second
    processor: float  # microseconds of a photo
    replays: float  # per second


def measured(works: Sequence[Work], seconds: float, graph: torch.cuda.CUDAGraph | None) -> Rate:
    """The rate of all threads together, while the graph is replayed, if there is one."""
    counts, ending = [0] * len(works), threading.Event()

    def run(number: int) -> None:
        torch.cuda.set_device(DEVICE)
        while not ending.is_set():
            counts[number] += works[number]()

    with ThreadPoolExecutor(max(1, len(works))) as pool:
        running = [pool.submit(run, number) for number in range(len(works))]
        _replay(graph, WARM)
        begin, before, used = time.perf_counter(), sum(counts), time.process_time()
        replays = _replay(graph, seconds)
        took, photos, used = time.perf_counter() - begin, sum(counts) - before, time.process_time() - used
        ending.set()
    for each in running:
        each.result()
    return Rate(photos / took, used / max(photos, 1) * 1e6, replays / took)


def _replay(graph: torch.cuda.CUDAGraph | None, seconds: float) -> int:
    """As often as it can be in this time, never more than two ahead."""
    if graph is None:
        time.sleep(seconds)
        return 0
    end, number, ahead = time.perf_counter() + seconds, 0, list[torch.cuda.Event]()
    while time.perf_counter() < end:
        graph.replay()
        ahead.append(torch.cuda.Event(blocking=True))
        ahead[-1].record()
        if len(ahead) > 2:
            ahead.pop(0).synchronize()
            number += 1
    for event in ahead:
        event.synchronize()
    return number


def filling() -> torch.cuda.CUDAGraph:
    """Kernels that are bound by memory and fill the device."""
    numbers: Tensor = torch.ones(NUMBERS, dtype=torch.float16, device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(KERNELS):
            numbers.mul_(1.0)
    return graph


def described(library: nvjpeg.Library, files: Sequence[bytes]) -> Iterator[str]:
    """What is measured, and how many of the photos the engines take."""
    sizes = [plain_size(data) for data in files]
    plain = [size for size in sizes if size]
    yield f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {library.path}: {describe(DEVICE)}"
    pixels = sum(size.width * size.height for size in plain) / max(len(plain), 1)
    yield f"{len(files)} photos, {np.mean([len(data) for data in files]) / 1e3:.0f} kB and {pixels / 1e3:.0f} kpixels"
    for backend in Backend:
        decoder = nvjpeg.Decoder(library, backend)
        tensors = [torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in files]
        begin = time.perf_counter()
        taken = sum(decoder.size(tensor) is not None for tensor in tensors)
        took = (time.perf_counter() - begin) / len(files) * 1e6
        yield f"{backend.name}: takes {taken} of {len(files)}, {len(plain)} plain; asking takes {took:.1f} us each"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--images", type=int, default=432, help="of the folder, in turn")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    parser.add_argument("--no-cases", action="store_true", help="only the whole path")
    args = parser.parse_args()
    library, why = nvjpeg.load()
    if library is None:
        raise SystemExit(why)
    source = repeated(args.folder, args.images)
    every = [source.encoded(index) for index in range(len(source))]
    attempt(lambda: print("\n".join(described(library, every)), flush=True))
    files = [data for data in every if plain_size(data)]
    graph = filling()
    alone = measured([], args.seconds, graph).replays
    print(f"the graph alone: {alone:.1f} replays/s of {KERNELS} kernels", flush=True)

    def compare(name: str, make: Callable[[], list[Work]]) -> None:
        works = make()
        for beside in (None, graph):
            rate = measured(works, args.seconds, beside)
            words = f"{rate.photos:8,.0f} photos/s  {rate.processor:6.0f} us of a core each"
            graphs = f"  the graph at {rate.replays / alone:6.1%}" if beside else ""
            print(f"{name:58} {'beside' if beside else 'alone ':6} {words}{graphs}", flush=True)

    def compare_case(case: Case) -> None:
        compare(str(case), lambda: workers(case, library, files))

    def compare_path(threads: int, share: float) -> None:
        compare(f"whole path, {threads} threads, {share:.0%}", lambda: whole_path(source, threads, share))

    for case in () if args.no_cases else CASES:
        attempt(partial(compare_case, case))
    for threads, share in [(2, 1.0), (3, 1.0), (4, 1.0), (6, 1.0), (24, 0.45)]:
        attempt(partial(compare_path, threads, share))
    for case in () if args.no_cases else TRIALS:
        attempt(partial(compare_case, case))


def attempt(part: Callable[[], None]) -> None:
    try:
        part()
    except (RuntimeError, OSError, UserError):
        traceback.print_exc()


if __name__ == "__main__":
    main()
