"""Lines that say what limits a training run and what would make it faster."""

from collections.abc import Iterator
from dataclasses import dataclass

from falconet.data import input
from falconet.doctor.bottleneck import AUGMENT, COMPUTE, COPY, DECODE, LOAD, READ, Finding
from falconet.report.console import counted
from falconet.report.epochs import span

WORTH = 1.05  # times as fast, to be recommended
MOST = 2  # changes


@dataclass(frozen=True, kw_only=True)
class Advice:
    """A finding and the facts about the machine that lead to advice."""

    found: Finding
    free: int  # bytes of the host's memory
    cores: int
    decoder: str

    @property
    def is_cached(self) -> bool:
        """Whether the system can keep all files in memory after the first epoch."""
        return self.found.stored is None or self.found.stored <= self.free

    @property
    def limit(self) -> str:
        """The part that limits the speed after the first epoch."""
        return self.found.parts.limit(from_disk=not self.is_cached)

    @property
    def workers(self) -> int:
        return max(1, input.workers(self.found.options.data))

    def lines(self) -> Iterator[str]:
        found, parts = self.found, self.found.parts
        yield found.described
        yield f"{'part':<10} {'images/s':>9}"
        for name, rate in parts.alone().items():
            shown, about = ("-", self._absent(name)) if rate is None else (f"{rate:,.0f}", self._about(name))
            yield f"{name:<10} {shown:>9}  {about}"
            yield from self._loading() if name == DECODE else ()
        later, first = (parts.together(from_disk=each) for each in (not self.is_cached, True))
        yield f"{'together':<10} {later:>9,.0f}  predicted for the run: {self._overlap(later)}"
        yield f"limited by: {self._named_limit()}"
        slower = f", the first one {span(found.images / first)}, from the disk" if first < 0.95 * later else ""
        taken = f"{span(found.images / later)}{slower}"
        yield f"an epoch of {found.images:,} images takes about {taken}, without validation"
        yield from (f"change: {each}" for each in self.changes())

    def _loading(self) -> Iterator[str]:
        """A line about reading and decoding together."""
        parts = self.found.parts
        rate = parts.loading(from_disk=not self.is_cached)
        if rate is not None and parts.kept is not None and parts.decode is not None:
            place = "memory" if self.is_cached else "the disk"
            yield f"{LOAD:<10} {rate:>9,.0f}  each thread reads a photo from {place}, and then decodes it"

    def _named_limit(self) -> str:
        share = self.found.parts.share(self.limit, from_disk=not self.is_cached)
        return self.limit if share is None else f"{LOAD}, of which {self.limit} takes {share:.0%}"

    def _about(self, name: str) -> str:
        found, threads = self.found, counted(self.workers, "thread")
        if name == READ:
            again = "" if found.parts.kept is None else f"; {found.parts.kept:,.0f} from memory"
            return f"{threads}, from the disk: the system was told to forget the files (posix_fadvise){again}"
        if name == DECODE:
            return f"{threads}, {self.decoder}, crops and augmentation as in training"
        if name == AUGMENT:
            return f"{threads}, crops, mirroring and batches as in training"
        if name == COPY:
            return "from pinned memory to the device"
        updates, asked = found.parts.updates, found.options.data.micro_batch
        instead = "" if updates.micro_batch == asked else f", not {asked}, to be quick"
        return (
            f"{counted(updates.number, 'update')} with micro-batches of {updates.micro_batch}{instead}, precision"
            f" {found.options.machine.precision}, on {found.device.type}"
        )

    def _absent(self, name: str) -> str:
        is_made = self.found.parts.load is None
        return {
            READ: "the images are made on the device" if is_made else "the images are in memory",
            DECODE: "the images are made on the device" if is_made else self._undecoded(),
            COPY: "the images are not copied",
        }[name]

    def _undecoded(self) -> str:
        is_stored = self.found.parts.kept is None
        return (
            "the images are stored decoded" if is_stored else "cannot be separated from reading, which is much slower"
        )

    def _overlap(self, together: float) -> str:
        parts = self.found.parts
        if parts.load is None:
            return "nothing is loaded"
        if not self.is_cached and parts.limit(from_disk=True) == READ:
            return "the files do not fit into memory, and are read from the disk in every epoch"
        if together < 0.9 * min(parts.overlapping(from_disk=not self.is_cached).values()):
            return "loading and computing compete for the cores" if self._on_cpu else "they slow each other down"
        return "loading overlaps with computing"

    @property
    def _on_cpu(self) -> bool:
        return self.found.device.type == "cpu"

    def changes(self) -> list[str]:
        """Suggested changes with reasons, the most promising first."""
        by = {
            READ: self._of_reading,
            DECODE: self._of_decoding,
            AUGMENT: self._of_augmenting,
            COPY: self._of_copying,
            COMPUTE: self._of_computing,
        }
        return [*by[self.limit]()][:MOST]

    def _of_reading(self) -> Iterator[str]:
        yield f"--dataloader-workers {4 * self.workers}: threads that wait for a disk take no core"
        if not self.found.packed:
            yield "`falconet data pack`: shards are read in long pieces, photos file by file"
        yield "a faster disk, or a copy of the data on one"

    def _of_decoding(self) -> Iterator[str]:
        data = self.found.options.data
        if self.workers < self.cores and data.decode_device != "cuda":
            yield f"--dataloader-workers {self.cores}: {counted(self.workers, 'thread')} decode on {self.cores} cores"
        if "Pillow" in self.decoder:
            yield "a C++ compiler, and Falconet installed again: its own decoder is several times as fast as Pillow"
        if not self._on_cpu and data.decode_device != "cuda":
            yield "--decode-device cuda: the cores are the limit; `falconet doctor` alone measures both decoders"
        yield "`falconet data pack --resize`: smaller photos have fewer pixels to decode"

    def _of_augmenting(self) -> Iterator[str]:
        is_on_host = self._on_cpu or self.found.options.data.dataset_location == "host"
        if self.workers < self.cores and is_on_host:  # for images on the device, two threads are enough
            yield f"--dataloader-workers {self.cores}: {counted(self.workers, 'thread')} augment on {self.cores} cores"
        if not self._on_cpu and is_on_host:
            yield "--dataset-location device: images of the model's size are shifted and mirrored there"
        yield f"a simpler --augment: preparing batches on the {'cores' if is_on_host else 'device'} is the limit"

    def _of_copying(self) -> Iterator[str]:
        if not self.found.options.data.eight_bit_io:
            yield "--eight-bit-io: pixels are copied as bytes, a quarter to a half of what their values take"
        yield "--decode-device cuda: photos are copied as files, which are smaller than their pixels"

    def _of_computing(self) -> Iterator[str]:
        parts, tried = self.found.parts, self.found.tried
        now = parts.updates.computed
        for option, rate in sorted(tried.items(), key=lambda each: -each[1]):
            if rate > WORTH * now:
                yield f"{option}: computes {rate:,.0f} images/s, {rate / now:.2f} times as many; compare the accuracy"
        if self._on_cpu and parts.decode is not None and parts.decode < 4 * now and not self.found.packed:
            yield "`falconet data pack --resize`: smaller photos leave more of the cores to computing"
        slower = [option for option, rate in tried.items() if rate <= WORTH * now]
        no_gain = f" ({' and '.join(slower)}: tried, no faster)" if slower else ""
        or_a_device = ", or a GPU" if self._on_cpu else ""
        yield f"a smaller --image-size or --model{or_a_device}: computing is the limit{no_gain}"
