"""Refusals of requests: the reason in one line, and HTTP's status for it."""

from collections.abc import Mapping


class RefusedError(Exception):
    """A request that is refused; the text is one line for its client."""

    status = 500
    headers: Mapping[str, str] = {}  # of the answer over HTTP


class RequestError(RefusedError):
    """The request is malformed."""

    status = 400


class UnauthorizedError(RefusedError):
    """The request has no key that the server knows."""

    status = 401
    headers: Mapping[str, str] = {"WWW-Authenticate": "Bearer"}


class ForbiddenError(RefusedError):
    """The server was not started to do this, or not for this client."""

    status = 403


class UnknownModelError(RefusedError):
    """There is no such model, or no such version of it."""

    status = 404


class SlowError(RefusedError):
    """The request was not received in time."""

    status = 408
    headers: Mapping[str, str] = {"Connection": "close"}  # the rest of the request is not read


class TooLargeError(RefusedError):
    """The request has more bytes than allowed."""

    status = 413


class OverloadedError(RefusedError):
    """Too much is waiting already; the client should try again later."""

    status = 429
    headers: Mapping[str, str] = {"Retry-After": "1"}


class ComputingError(RefusedError):
    """The model failed on a batch; after a fault of the device, it fails on all others too."""

    status = 500


class UnavailableError(RefusedError):
    """The model cannot be used now."""

    status = 503


class LateError(RefusedError):
    """The answer was not ready in time."""

    status = 504
