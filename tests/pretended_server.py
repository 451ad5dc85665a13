"""A server that has the real page and answers photos as a test tells it, for states that are hard to bring about."""

import asyncio
import threading

from aiohttp import web

from falconet.serve import site
from gloo import free_port
from served import LIMIT

CLASSES = ("robin", "wren", "kestrel", "barn owl", "goldfinch", "kingfisher", "blackbird")
SHARES = (0.8734, 0.0612, 0.0341, 0.0187, 0.0097, 0.00271, 0.00019)
SCENES = {"name": "scenes", "version": "1", "state": "READY", "reason": ""}
INDEX = [{"name": "birds", "version": "7", "state": "READY", "reason": ""}]


def predicted(names=CLASSES, shares=SHARES, **more):
    """The content of an answer to one photo."""
    top = [{"label": label, "probability": share} for label, share in zip(names, shares, strict=True)]
    times = {"decode": 3.1, "queue": 0.4, "compute": 8.2, "total": 12.5}
    prediction = {"name": "photo", **top[0], "top": top, **more}
    return {"model": "birds", "version": "7", "predictions": [prediction], "milliseconds": times}


class Pretended:
    """Inside the context, a server in a thread; `answer` may be replaced, and `asked` has the requests for photos."""

    def __init__(self, *, index=INDEX, key=None):
        self.index, self.key, self.asked = index, key, []
        self.answer = lambda _: web.json_response(predicted())
        self._loop, self._runner, self.port = asyncio.new_event_loop(), None, None

    async def _start(self, port):
        app = web.Application(middlewares=[self._checked], client_max_size=1 << 26)
        site.add_routes(app)
        app.router.add_post("/predict", self._predict)
        app.router.add_get("/v2/health/ready", _ready)
        app.router.add_post("/v2/repository/index", self._index)
        app.router.add_get("/v2/models/{model}", self._metadata)
        app.router.add_get("/v2/models/{model}/versions/{version}", self._metadata)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
        await self._runner.setup()
        place = web.TCPSite(self._runner, "127.0.0.1", port, reuse_address=True)
        await place.start()
        self.port = self._runner.addresses[0][1]

    @web.middleware
    async def _checked(self, request, handler):
        guarded = request.path.startswith(("/predict", "/v2/models", "/v2/repository"))
        if self.key and guarded and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "API key: missing or wrong"}, status=401)
        return await handler(request)

    async def _predict(self, request):
        self.asked.append((request, await request.read()))
        found = self.answer(request)
        return await found if asyncio.iscoroutine(found) else found

    def has_photo(self, request):
        """Whether the file that was sent claims to be a photo."""
        return any(b"\r\nContent-Type: image/" in body for asked, body in self.asked if asked is request)

    async def _index(self, _):
        return web.json_response(self.index)

    async def _metadata(self, _):
        parameters = {"class_names": CLASSES, "preprocessing": {"image_size": 224}}
        return web.json_response({"name": "birds", "versions": ["7"], "parameters": parameters})

    def start(self, port):
        self._run(self._start(port))

    def stop(self):
        self._run(self._runner.cleanup())

    def call(self, function):
        """Call a function in the server's thread."""
        self._loop.call_soon_threadsafe(function)

    def _run(self, work):
        asyncio.run_coroutine_threadsafe(work, self._loop).result(LIMIT)

    def __enter__(self):
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.start(free_port())  # so that it is free for a second start, too
        return self

    def __exit__(self, *_):
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(LIMIT)
        self._loop.close()

    @property
    def address(self):
        return f"http://127.0.0.1:{self.port}"


async def _ready(_):
    return web.json_response({"ready": True})
