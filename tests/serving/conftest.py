"""A server with the demo model, for the tests of a file."""

from collections.abc import Iterator

import pytest

from serving.test_serving_http import app_of


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with app_of() as (url, _):
        yield url
