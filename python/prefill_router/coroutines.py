"""What `BatchedForward` gives asyncio. Apart from the compiled core because a coroutine is written in Python."""

from __future__ import annotations

import asyncio

from ._core import BatchedForward, ForwardOutput, ForwardRequest


async def aforward(batched: BatchedForward, request: ForwardRequest, deadline: float | None) -> ForwardOutput:
    """See `BatchedForward.aforward`. Cancelling it cancels the future, which takes the request back."""
    return await asyncio.wrap_future(batched.submit(request, deadline=deadline))
