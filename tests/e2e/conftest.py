"""The stack that a module's tests share (``shared``, one per module), put to rest before each of them."""

from __future__ import annotations

import pytest

from tests.support.rest import put_to_rest
from tests.support.stack import Stack


@pytest.fixture
async def stack(shared: Stack) -> Stack:
    """The module's stack at rest: a test may be the first or follow any other, one that failed included."""
    await put_to_rest(shared)
    return shared
