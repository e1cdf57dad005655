"""``serve run``, by which the service of these tests was started, says what it does."""

import pytest


@pytest.mark.parametrize(
    "words", ["taking parts on 127.0.0.1, port", "is empty: version 0 is made from", "version 0: staged"]
)
def test_serve_run_says_what_it_does(served, words):
    assert words in served.said
