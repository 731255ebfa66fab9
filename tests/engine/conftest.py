"""A real engine in the test process, shared by the tests of this folder."""

import shutil
from collections.abc import Iterator

import pytest

from tests.support.engine import Engine


@pytest.fixture(scope="session")
def shared_engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return Engine(tmp_path_factory.mktemp("engine"))


@pytest.fixture
def engine(shared_engine: Engine) -> Iterator[Engine]:
    """The shared engine; whatever the test did to it and to its checkpoint is mended afterwards."""
    backup = shared_engine.folder / "backup"
    shutil.copytree(shared_engine.checkpoint, backup)
    yield shared_engine
    shutil.rmtree(shared_engine.checkpoint, ignore_errors=True)
    backup.rename(shared_engine.checkpoint)
    shared_engine.reload()
    shared_engine.ask()
    shared_engine.assert_whole()
