"""Settings for these tests: programs run a few times on a few numbers."""

import pytest

from tests.quick import quick_compilation


@pytest.fixture(scope="module", autouse=True)
def compile_fast():
    """Most of the time would be compilation. (Of a package, it would last: tests of others come in between.)"""
    with quick_compilation():
        yield
