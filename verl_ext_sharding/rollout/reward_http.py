"""The reward server's HTTP side: routes, errors as JSON, and a uvicorn thread of its own."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from typing import Any, Protocol

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from verl_ext_sharding.rollout.reward_requests import RewardRequestError, error_body

logger = logging.getLogger(__name__)

_POLL_S = 0.01
_KEEP_ALIVE_S = 75  # longer than aiohttp's clients keep a connection, so that none posts into one that just closed


class Answers(Protocol):
    """Who answers."""

    async def answer(self, body: Any) -> dict[str, Any]:
        """The answer to a decoded `/classify` body, or a `RewardRequestError`."""

    def state(self) -> dict[str, Any]:
        """What `/health` says."""

    def models(self) -> list[dict[str, Any]]:
        """What `/v1/models` lists."""


class RewardHTTP:
    """Routes of a reward server. Apart from the actor's class, since Ray adds a parameter to the methods of those.

    Args:
        answers: The server behind the routes.
    """

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._uvicorn: uvicorn.Server | None = None
        self.app = FastAPI(title="verl-ext-sharding reward server", openapi_url=None)
        self.app.add_api_route("/classify", self._classify, methods=["POST"])
        self.app.add_api_route("/health", self._health, methods=["GET"])
        self.app.add_api_route("/v1/models", self._models, methods=["GET"])
        self.app.add_exception_handler(HTTPException, _no_such_route)

    async def listen(self, host: str) -> str:
        """Starts to answer on a free port, in a thread of its own: whatever the caller's loop does, HTTP stays responsive.

        Args:
            host: Address of this node to listen on.

        Returns:
            "host:port", with brackets around an IPv6 host.

        Raises:
            OSError: Nothing can be opened there.
        """
        listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        listener.bind((host, 0))
        self._uvicorn = uvicorn.Server(
            uvicorn.Config(
                self.app, log_level="warning", access_log=False, lifespan="off", timeout_keep_alive=_KEEP_ALIVE_S
            )
        )
        thread = threading.Thread(target=self._uvicorn.run, args=([listener],), name="hf-reward-http", daemon=True)
        thread.start()
        while not self._uvicorn.started:
            if not thread.is_alive():
                raise OSError(f"the HTTP server on {host} ended as it started; see the log of this process")
            await asyncio.sleep(_POLL_S)
        port = listener.getsockname()[1]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def close(self) -> None:
        """Lets the thread end."""
        if self._uvicorn is not None:
            self._uvicorn.should_exit = True

    async def _classify(self, request: Request) -> JSONResponse:
        try:
            body = await request.json()
        except ValueError as error:
            return _error(RewardRequestError(f"the body is not JSON: {error}"))
        try:
            return JSONResponse(await self._answers.answer(body))
        except RewardRequestError as error:
            return _error(error)
        except Exception as error:
            logger.exception("a reward request failed")
            return _error(RewardRequestError(f"{type(error).__name__}: {error}", status=500))

    async def _health(self) -> JSONResponse:
        return JSONResponse(self._answers.state())

    async def _models(self) -> JSONResponse:
        return JSONResponse({"object": "list", "data": self._answers.models()})


def _error(error: RewardRequestError) -> JSONResponse:
    """The answer, and a line in this process's log: verl's router keeps only the status of a failed request."""
    logger.warning("reward request refused with HTTP %d: %s", error.status, error.message)
    return JSONResponse(error_body(error.message, error.status), status_code=error.status)


async def _no_such_route(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    path = request.url.path
    message = (
        f"{request.method} {path}: {error.detail}; a reward model with rollout.name=hf answers POST /classify, "
        "GET /health and GET /v1/models"
    )
    if path.startswith(("/v1/chat", "/v1/completions")):
        message += "; one that generates needs reward.reward_model.rollout.name=vllm"
    return JSONResponse(error_body(message, error.status_code), status_code=error.status_code)
