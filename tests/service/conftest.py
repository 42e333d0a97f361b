"""Caches of both kinds, and a data directory with a save."""

import pytest

from attnd.service.caches import PagesBy
from tests.support.saving import FILE_BYTES, first_state, house, run

KINDS = list(PagesBy)


@pytest.fixture(params=KINDS, ids=[kind.value for kind in KINDS])
def kind(request) -> PagesBy:
    return request.param


@pytest.fixture
def saved(kind, tmp_path):
    """A data directory with a save of the first state."""

    async def scenario():
        async with house(tmp_path / "saved", file_bytes=FILE_BYTES) as home:
            await first_state(home, kind)
            await home.save(home.caches.all()[0])

    (tmp_path / "saved").mkdir()
    run(scenario())
    return tmp_path / "saved"
