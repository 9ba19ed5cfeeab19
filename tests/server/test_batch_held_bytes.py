from __future__ import annotations

import asyncio

from server.batch.held_bytes import HeldBytes


async def is_waiting(task: asyncio.Task[None]) -> bool:
    for _ in range(5):
        await asyncio.sleep(0)
    return not task.done()


async def test_what_does_not_fit_waits_until_there_is_room() -> None:
    held = HeldBytes(10)
    await held.take(6)
    await held.take(4)
    third = asyncio.create_task(held.take(5))
    assert await is_waiting(third)
    held.exchange(4, 1)
    assert await is_waiting(third)
    held.exchange(6, 4)
    assert not await is_waiting(third)


async def test_what_is_larger_than_the_room_goes_alone() -> None:
    held = HeldBytes(10)
    await held.take(1)
    large = asyncio.create_task(held.take(11))
    assert await is_waiting(large)
    held.exchange(1, 0)
    assert not await is_waiting(large)
    small = asyncio.create_task(held.take(1))
    assert await is_waiting(small)
    held.exchange(11, 9)
    assert not await is_waiting(small)
