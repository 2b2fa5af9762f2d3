"""The routes: models, chat completions, completions, health, and the playground page."""

import asyncio
import base64
import hashlib
import hmac
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from fewstep.serve import replies
from fewstep.serve.asks import Ask, Refused, Served, parse
from fewstep.serve.replies import Reply
from fewstep.serve.worker import Busy, End, Job, Stopping, Worker

MAX_BODY = 4 * 2**20  # bytes
LOOK_EVERY = 1.0  # seconds between looks whether the client of an unstreamed answer is still there
PLAYGROUND = Path(__file__).with_name("playground.html")


def make_app(served: Served, worker: Worker, api_key: str | None) -> FastAPI:
    """Return the application.

    Args:
        worker: decodes; started and stopped by the caller.
        api_key: what requests to /v1 must bring as bearer token; None: nothing.
    """
    app = FastAPI(title="fewstep", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(Refused, _refused)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _failed)

    def authorise(request: Request) -> None:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if api_key is None or (
            scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), api_key.encode())
        ):
            return
        raise Refused("this server asks for its API key: Authorization: Bearer …", None, 401, "invalid_api_key")

    v1 = APIRouter(prefix="/v1", dependencies=[Depends(authorise)])

    @v1.get("/models")
    def models() -> dict[str, Any]:
        return {"object": "list", "data": [_card(served)]}

    @v1.get("/models/{name}")
    def model(name: str) -> dict[str, Any]:
        if name != served.name:
            raise Refused(f"model {name!r} is not served here; this server has {served.name}", "model", 404)
        return _card(served)

    @v1.post("/chat/completions")
    async def chat(request: Request) -> Response:
        return await _answer(request, parse("chat", await _body(request), served), served, worker)

    @v1.post("/completions")
    async def completions(request: Request) -> Response:
        return await _answer(request, parse("completion", await _body(request), served), served, worker)

    app.include_router(v1)

    @app.get("/health")
    def health() -> JSONResponse:
        alive = worker.alive()
        content = {"status": "ok" if alive else "stopped", "model": served.name, "waiting": worker.waiting()}
        return JSONResponse(content, 200 if alive else 503)

    page, policy = _playground()

    @app.get("/")
    def playground() -> HTMLResponse:
        headers = {
            "Content-Security-Policy": policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
        }
        return HTMLResponse(page, headers=headers)

    return app


def _card(served: Served) -> dict[str, Any]:
    facts = {
        "block_size": served.model.config.fewstep["block_size"],
        "effort": [level for level, entry in served.effort.items() if "sampler" in entry],
    }
    head = {"id": served.name, "object": "model", "created": served.created, "owned_by": "fewstep"}
    return {**head, "max_model_len": served.context, "fewstep": facts}


async def _body(request: Request) -> bytes:
    # A page of another site may send forms and plain text to this server unasked, but not JSON.
    kind = request.headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != "application/json":
        raise Refused(f"Content-Type is {kind[:60]!r}: send application/json")
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY:
            raise Refused(f"the body is longer than {MAX_BODY} bytes: shorten it", None, 413)
    return body


async def _answer(request: Request, ask: Ask, served: Served, worker: Worker) -> Response:
    queue: asyncio.Queue[tuple[int, str | End | Exception]] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def emitter(index: int) -> Any:
        def emit(event: str | End | Exception) -> None:
            try:
                loop.call_soon_threadsafe(queue.put_nowait, (index, event))
            except RuntimeError:  # the loop is closed: the server did not wait for this answer
                jobs[index].gone = True

        return emit

    jobs = [Job(p, ask.sampling, ask.stops, ask.trace, ask.seed + i, emitter(i)) for i, p in enumerate(ask.prompts)]
    try:
        worker.submit(jobs)
    except Busy as error:
        raise Refused(str(error), None, 429, "busy") from None
    except Stopping as error:
        raise Refused(str(error), None, 503, "stopping") from None
    reply = Reply(ask, served)
    if ask.stream:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return StreamingResponse(_stream(ask, reply, jobs, queue), media_type="text/event-stream", headers=headers)
    texts = [""] * len(jobs)
    ends: list[End | None] = [None] * len(jobs)
    try:
        while None in ends:
            try:
                index, event = await asyncio.wait_for(queue.get(), LOOK_EVERY)
            except TimeoutError:
                if await request.is_disconnected():
                    return Response(status_code=499)
                continue
            if isinstance(event, Exception):
                raise Refused(_line(event), None, _status(event))
            if isinstance(event, End):
                ends[index] = event
            else:
                texts[index] += event
    finally:
        for job in jobs:
            job.gone = True
    return JSONResponse(reply.whole(texts, [end for end in ends if end is not None]))


async def _stream(ask: Ask, reply: Reply, jobs: list[Job], queue: asyncio.Queue) -> AsyncIterator[str]:
    ends: list[End | None] = [None] * len(jobs)
    try:
        for index in range(len(jobs)):
            if (first := reply.opening(index)) is not None:
                yield replies.event(first)
        while None in ends:
            index, event = await queue.get()
            if isinstance(event, Exception):
                yield replies.event(replies.error(_line(event), _status(event)))
                return
            if isinstance(event, str):
                yield replies.event(reply.piece(index, event))
                continue
            ends[index] = event
            yield replies.event(reply.closing(index, event, None if None in ends else ends))
        if ask.include_usage:
            yield replies.event(reply.usage([end for end in ends if end is not None]))
        yield replies.event("[DONE]")
    finally:  # also where the client left
        for job in jobs:
            job.gone = True


def _playground() -> tuple[str, str]:
    """Return the page and its policy: its own style and script run, and they talk to this server alone."""
    page = PLAYGROUND.read_text(encoding="utf-8")
    style, script = (_digest(re.search(f"<{tag}>(.*?)</{tag}>", page, re.S)[1]) for tag in ("style", "script"))
    rules = (
        f"default-src 'none'; style-src {style}; script-src {script}; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return page, rules


def _digest(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


async def _refused(_: Request, error: Any) -> JSONResponse:
    headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else None
    return JSONResponse(replies.error(error.message, error.status, error.param, error.code), error.status, headers)


async def _http_error(request: Request, error: Any) -> JSONResponse:
    message = f"{request.method} {request.url.path}: {error.detail}"
    return JSONResponse(replies.error(message, error.status_code), error.status_code, error.headers)


async def _failed(_: Request, error: Exception) -> JSONResponse:
    return JSONResponse(replies.error(_line(error), _status(error)), _status(error))


def _line(error: Exception) -> str:
    return str(error) if isinstance(error, Stopping) else f"{type(error).__name__}; the server's log says more"


def _status(error: Exception) -> int:
    return 503 if isinstance(error, Stopping) else 500
