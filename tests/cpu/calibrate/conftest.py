from concurrent.futures import ThreadPoolExecutor

import pytest


@pytest.fixture(scope="session")
def pool():
    with ThreadPoolExecutor(2) as found:
        yield found
