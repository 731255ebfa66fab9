"""A real engine in the test process, shared by the tests of this folder."""

import shutil
from collections.abc import Iterator

import pytest

from tests.support.engine import Engine


@pytest.fixture(scope="session", autouse=True)
def process_groups_stay() -> Iterator[None]:
    """From 0.32 on, an engine in this process that is collected destroys the process groups, of all engines in it.

    So one that failed, in a step say, would take those down that answer, and those that start.
    """
    from vllm.v1.engine import core

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "cleanup_dist_env_and_memory", lambda *args, **kwargs: None, raising=False)
        yield


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
