"""The actor through which references to weights in Ray's object store travel."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("ray", reason="Ray is not installed")

from wsync.backends.ray_objects import mailbox_class


def test_a_mailbox_that_was_started_again_has_other_numbers_than_the_one_before() -> None:
    """A worker that waits asks for what has another number than the one that it has."""

    async def exchange() -> None:
        before = mailbox_class()()
        for _ in range(3):
            await before.put(0, ["before"])
        seen, _ = await before.get(0, ("", 0))
        after = mailbox_class()()
        waiting = asyncio.create_task(after.get(0, seen))
        await asyncio.sleep(0)  # it waits
        await after.put(0, ["after"])
        assert (await waiting)[1] == ["after"]

    asyncio.run(exchange())
