"""Classifies a request's photos: decoded in threads, computed with other requests', and answered by class names."""

import asyncio
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import Executor
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from falconet.data.image_files import UnreadableImageError
from falconet.infer.prediction import predicted
from falconet.infer.predictor import Pixels
from falconet.serve import records
from falconet.serve.batching import Computed
from falconet.serve.refusals import RequestError
from falconet.serve.repository import DECODERS, Model
from falconet.serve.uploads import Upload

NOT_FINITE = "the model's scores for it are not finite"
AHEAD = 2 * DECODERS  # photos of one request that the threads have at once; other requests' come in between
_T = TypeVar("_T")


class Read(NamedTuple):
    """A photo as the model takes it."""

    pixels: Pixels | None  # S x S x 3
    problem: str  # why it could not be read


async def classify(model: Model, photos: Sequence[Upload], *, top: int, threads: Executor) -> dict[str, Any]:
    """The answer to a request, for JSON; RequestError if none of its photos can be read."""
    begun = time.perf_counter()
    with model.decoding(len(photos)):
        read = await _read(model, photos, threads)
    decoded = time.perf_counter()
    images = [each.pixels for each in read if each.pixels is not None]
    records.note_photos(len(photos), len(photos) - len(images), begun=begun, seconds=decoded - begun)
    if not images:
        raise RequestError("; ".join(_named(photo, each.problem) for photo, each in zip(photos, read, strict=True)))
    most = model.served.max_batch
    batches = [np.stack(images[first : first + most]) for first in range(0, len(images), most)]
    room = asyncio.Semaphore(model.batcher.policy.share // most)

    async def scored(batch: Pixels) -> Computed:
        async with room:
            return await model.computed(batch.transpose(0, 3, 1, 2))

    computed = await _together([scored(batch) for batch in batches])
    return {
        "model": model.served.name,
        "version": model.served.version,
        "predictions": _predictions(model, photos, read, computed, top=top),
        "milliseconds": {
            "decode": _milliseconds(decoded - begun),
            "queue": _milliseconds(max(each.queued for each in computed)),
            "compute": _milliseconds(max(each.computed for each in computed)),
            "total": _milliseconds(time.perf_counter() - begun),
        },
    }


async def _read(model: Model, photos: Sequence[Upload], threads: Executor) -> list[Read]:
    loop, room = asyncio.get_running_loop(), asyncio.Semaphore(AHEAD)

    def read(photo: Upload) -> Read:
        try:
            return Read(model.decode(photo.encoded), "")
        except UnreadableImageError as error:
            return Read(None, str(error))

    async def in_turn(photo: Upload) -> Read:
        async with room:
            return await loop.run_in_executor(threads, read, photo)

    return await _together([in_turn(photo) for photo in photos])


async def _together(parts: Sequence[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Wait for all parts and return their results; if one fails, the others leave their queue."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _predictions(
    model: Model, photos: Sequence[Upload], read: Sequence[Read], computed: Sequence[Computed], *, top: int
) -> list[dict[str, object]]:
    """An object for each photo, in order."""
    about = model.served
    several = about.activation == "sigmoid"
    rows = iter(row for part in computed for row in part.scores)
    found: list[dict[str, object]] = []
    for photo, each in zip(photos, read, strict=True):
        if each.pixels is None:
            found.append({"name": photo.name, "error": each.problem})
            continue
        scores = next(rows)
        if not np.isfinite(scores).all():
            found.append({"name": photo.name, "error": NOT_FINITE})
            continue
        named = predicted(torch.from_numpy(scores), about.class_names, top=top, several=several)
        found.append({"name": photo.name, **named.to_json(several=several)})
    return found


def _named(photo: Upload, problem: str) -> str:
    return f"{photo.name}: {problem}" if photo.name else problem


def _milliseconds(seconds: float) -> float:
    return round(1000 * seconds, 2)
