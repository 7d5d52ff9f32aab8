"""What a call says that must fail."""

import re
from collections.abc import Callable
from typing import Any

import pytest


def refused(
    words: str,
    call: Callable[..., Any],
    *arguments: Any,
    error: type[BaseException] | tuple[type[BaseException], ...] = ValueError,
    **options: Any,
) -> str:
    """The message: one line, in which the words are found, which are a regular expression."""
    with pytest.raises(error) as raised:
        call(*arguments, **options)
    message = str(raised.value)
    assert re.search(words, message) and "\n" not in message, message
    return message
