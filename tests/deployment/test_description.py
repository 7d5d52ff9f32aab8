from dataclasses import replace

import pytest

from broadsight.deployment import Description
from tests.deployment.tiny import described


@pytest.mark.parametrize("changes", [{}, {"classes": None}, {"quantised": {"kept": ["a"]}, "outputs": ("a", "b")}])
def test_json__gives_the_same_back(changes):
    one = described(**changes)
    assert Description.from_json(one.to_json()) == one


def test_shape():
    assert described(48, channels=1).shape == (1, 48, 48)


def test_from_json__refuses_what_is_not_ours():
    for text in ("", "[]", "{}", '{"version": 1}', '{"version": 1, "task": "classify", "outputs": 3}'):
        with pytest.raises(ValueError, match="description is damaged"):
            Description.from_json(text)


def test_from_json__refuses_a_later_version():
    text = replace(described()).to_json().replace('"version": 1', '"version": 99')
    with pytest.raises(ValueError, match="version 99"):
        Description.from_json(text)
