"""The slots of the actor through which references to weights in Ray's object store travel."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("ray", reason="Ray is not installed")

from wsync.backends.ray_objects import mailbox_class


def test_a_worker_that_ends_late_takes_nothing_from_its_successor() -> None:
    async def exchange() -> None:
        mailbox = mailbox_class()()
        await mailbox.put(0, ["for the worker"])
        seen, _ = await mailbox.get(0, 0)
        await mailbox.put(0, ["for its successor"])
        await mailbox.put(0, [], seen)
        assert (await mailbox.get(0, 0))[1] == ["for its successor"]

    asyncio.run(exchange())


@pytest.mark.parametrize("puts", [0, 1])
def test_the_end_of_a_worker_ends_its_own_wait(puts: int) -> None:
    async def exchange() -> None:
        mailbox = mailbox_class()()
        for _ in range(puts):
            await mailbox.put(0, ["for the worker"])
        waiting = asyncio.create_task(mailbox.get(0, puts))
        await asyncio.sleep(0)  # it waits
        await mailbox.put(0, [], puts)
        assert (await waiting)[1] == []

    asyncio.run(exchange())
