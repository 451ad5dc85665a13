"""The HTTP application: its routes and their answers."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

from aiohttp import web

from falconet.errors import UserError, did_you_mean
from falconet.infer.predictor import Scores
from falconet.serve import bodies, protocol, records, site, uploads
from falconet.serve.access import OPEN, Access, Handler
from falconet.serve.bodies import Memory
from falconet.serve.classification import classify
from falconet.serve.connections import Connection, log_failure, refusal
from falconet.serve.direct import Direct, DirectConnection
from falconet.serve.prometheus import Metrics
from falconet.serve.protocol import AT_ONCE, Asked, Served
from falconet.serve.refusals import RefusedError, RequestError
from falconet.serve.repository import DECODERS, Model, Repository, require_control
from falconet.serve.telemetry import Telemetry

TOP = 5  # classes per photo, unless the request says how many
QUERY = frozenset({"model", "top", "version"})  # what the address of a request with photos may have


class FrontEnd:
    """Answers HTTP requests with the models of a repository."""

    def __init__(
        self,
        repository: Repository,
        *,
        memory: Memory,
        most_body: int,
        seconds: float,
        may_load: bool = False,
        access: Access = OPEN,
        telemetry: Telemetry | None = None,
    ) -> None:
        """`most_body`: bytes in a request with photos; `seconds`: until one is late; `may_load`: if clients may."""
        self._access, self._telemetry = access, telemetry or Telemetry(Metrics())
        self._telemetry.metrics.watch(models=lambda: repository.models, in_flight=lambda: self._telemetry.in_flight)
        self._repository, self._memory = repository, memory
        self._most_body, self._seconds, self._may_load = most_body, seconds, may_load
        # One long JSON at a time: numpy needs ten times its size to read it, which `memory` does not count.
        self._parsing = ThreadPoolExecutor(1, thread_name_prefix="json")
        self._decoding = ThreadPoolExecutor(DECODERS, thread_name_prefix="decode")
        self._unpacking = ThreadPoolExecutor(DECODERS, thread_name_prefix="upload")  # not after all waiting photos
        self.is_ready = True  # until the server is asked to stop
        self._direct = Direct(repository, self._inferred, memory=memory, access=access, telemetry=self._telemetry)

    def close(self) -> None:
        """Let the threads end, after the last request."""
        for threads in (self._parsing, self._unpacking, self._decoding):
            threads.shutdown(wait=False)

    def connection(self, server: web.Server, loop: asyncio.AbstractEventLoop) -> Connection:
        """Make the connection of a client."""
        return DirectConnection(server, loop, self._direct)

    def application(self) -> web.Application:
        """The application with all routes."""
        app = web.Application()
        self._telemetry.follow(app)  # outermost, so that it also sees what the others refuse
        app.middlewares.append(_in_one_line)
        self._access.guard(app)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/predict", self._predict)
        app.router.add_get("/v2", _always(protocol.server_metadata()))
        app.router.add_get("/v2/health/live", _always({"live": True}))
        app.router.add_get("/v2/health/ready", self._ready)
        app.router.add_get("/v2/models/stats", self._all_statistics)
        for base in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
            app.router.add_get(base, self._metadata)
            app.router.add_get(f"{base}/ready", self._model_ready)
            app.router.add_get(f"{base}/config", self._config)
            app.router.add_get(f"{base}/stats", self._statistics)
            app.router.add_post(f"{base}/infer", self._infer)
        app.router.add_post("/v2/repository/index", self._index)
        app.router.add_post("/v2/repository/models/{model}/load", self._load)
        app.router.add_post("/v2/repository/models/{model}/unload", self._unload)
        site.add_routes(app)
        return app

    async def _metrics(self, request: web.Request) -> web.Response:
        show, accept = self._telemetry.metrics.exposition, request.headers.get("Accept", "")
        text, content_type = await asyncio.to_thread(show, accept)  # it takes milliseconds
        return web.Response(body=text, headers={"Content-Type": content_type})

    # Photos.

    async def _predict(self, request: web.Request) -> web.Response:
        for name in request.query.keys() - QUERY:
            meant = did_you_mean(name[: protocol.SHOWN], QUERY)
            raise RequestError(f"?{name[: protocol.SHOWN]}: unknown, expected {', '.join(sorted(QUERY))}{meant}")
        name, version = request.query.get("model", ""), request.query.get("version", "")
        with (await self._repository.find(name, version)).used() as model:
            length = bodies.announced(request, most=self._most_body, kind="a request with photos")
            with self._memory.reserved(length) as incoming:
                await bodies.receive(incoming, request)
                body, kind = incoming.bytes.data, request.headers.get("Content-Type", "")
                async with model.in_time(self._seconds):
                    loop = asyncio.get_running_loop()
                    sent = await loop.run_in_executor(self._unpacking, uploads.read, body, kind)
                    top = _top(request.query.get("top", sent.fields.get("top")), model.served)
                    answer = await classify(model, sent.photos, top=top, threads=self._decoding)
        return web.json_response(answer)

    # The Open Inference Protocol.

    async def _found(self, request: web.Request) -> Model:
        return await self._repository.find(request.match_info["model"], request.match_info.get("version", ""))

    async def _ready(self, _: web.Request) -> web.Response:
        return _readiness(self.is_ready and all(model.works for model in self._repository.models))

    async def _model_ready(self, request: web.Request) -> web.Response:
        return _readiness(self.is_ready and (await self._found(request)).works)

    async def _metadata(self, request: web.Request) -> web.Response:
        return web.json_response(protocol.metadata((await self._found(request)).served))

    async def _config(self, request: web.Request) -> web.Response:
        return web.json_response((await self._found(request)).configuration())

    async def _statistics(self, request: web.Request) -> web.Response:
        return web.json_response({"model_stats": [(await self._found(request)).statistics()]})

    async def _all_statistics(self, _: web.Request) -> web.Response:
        return web.json_response({"model_stats": [model.statistics() for model in self._repository.models]})

    async def _infer(self, request: web.Request) -> web.Response:
        with (await self._found(request)).used() as model:
            header = request.headers.get(protocol.HEADER)
            most = protocol.MOST_JSON if header is None else model.served.most_binary
            kind = "a request of JSON alone" if header is None else f"a request with {protocol.HEADER}"
            with self._memory.reserved(bodies.announced(request, most=most, kind=kind)) as incoming:
                await bodies.receive(incoming, request)
                answer, headers = await self._inferred(model, incoming.bytes.data, header)
        return web.Response(body=answer, headers=headers)

    async def _inferred(self, model: Model, body: memoryview, header: str | None) -> tuple[bytes, dict[str, str]]:
        received = asyncio.get_running_loop().time()
        asked = await self._read(body, header, model.served)
        seconds = min(self._seconds, asked.seconds or self._seconds)
        computed = await model.computed(asked.images, deadline=received + seconds)
        return await self._written(computed.scores, asked, model.served)

    async def _read(self, body: memoryview, header: str | None, served: Served) -> Asked:
        if len(body) <= AT_ONCE or (header is not None and len(header) < len(str(AT_ONCE))):
            return protocol.read_request(body, header, served)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._parsing, protocol.read_request, body, header, served)

    async def _written(self, scores: Scores, asked: Asked, served: Served) -> tuple[bytes, dict[str, str]]:
        if asked.binary or scores.size <= AT_ONCE:
            return protocol.write_answer(scores, asked, served)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._parsing, protocol.write_answer, scores, asked, served)

    # The repository of models.

    async def _index(self, _: web.Request) -> web.Response:
        return web.json_response([each._asdict() for each in await self._repository.indexed()])

    async def _load(self, request: web.Request) -> web.Response:
        require_control(self._may_load)
        await self._repository.load(request.match_info["model"])
        return web.json_response({})

    async def _unload(self, request: web.Request) -> web.Response:
        require_control(self._may_load)
        await self._repository.unload(request.match_info["model"])
        return web.json_response({})


def _top(asked: str | None, served: Served) -> int:
    if asked is None:
        return min(TOP, len(served.class_names))
    number = int(asked) if asked.isascii() and asked.isdigit() and len(asked) < 10 else 0
    if number < 1:
        raise RequestError(f"top: got '{asked[: protocol.SHOWN]}', expected a whole number, at least 1")
    return min(number, len(served.class_names))


def _readiness(ready: bool) -> web.Response:
    return web.json_response({"ready": ready}, status=200 if ready else 503)


@web.middleware
async def _in_one_line(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer errors as in the protocol: JSON with one line."""
    try:
        return await handler(request)
    except RefusedError as error:
        log_failure(error)
        records.note_refusal(error)
        return refusal(error.status, str(error), error.headers)
    except UserError as error:  # a model that cannot be loaded
        records.note_refusal(error)
        return refusal(400, str(error))


def _always(content: dict[str, object]) -> Handler:
    text = json.dumps(content)

    async def answer(_: web.Request) -> web.StreamResponse:
        return web.Response(text=text, content_type="application/json")

    return answer
