import gc
import os

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.forks import Forked
from tests.pool import Pool, Template

torch.set_num_threads(1)
gc.set_threshold(20_000)  # by default the collector takes a twelfth of the time
if not (torch.version.cuda or torch.version.hip or torch.version.xpu):
    # Otherwise each torch.manual_seed formats and keeps a stack trace for every kind of device that is absent.
    for devices in (torch.cuda, torch.mtia, torch.xpu):
        devices.manual_seed_all = lambda seed: None
settings.register_profile("untimed", deadline=None)  # a slow machine is no failure
settings.load_profile("untimed")
# With this policy a thread does not preempt the one that has just woken it. By default gloo's thread preempts the
# sender, which holds a lock, and spins on that lock until the end of its time slice. macOS has no such policy.
if hasattr(os, "SCHED_BATCH"):
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


TEMPLATE = pytest.StashKey[Template]()
COLLECTED = pytest.StashKey[set[str]]()


@pytest.fixture(scope="session")
def pool(pytestconfig):
    workers = Pool(pytestconfig.stash[TEMPLATE])
    yield workers
    workers.stop()


@pytest.fixture
def collected(pytestconfig):
    """The ids of the tests in the files of this run, with those that its marks leave out."""
    return pytestconfig.stash[COLLECTED]


@pytest.fixture
def world():
    """Start a pretended world: `world(rank, size)` makes this process its rank `rank`; its collectives do nothing."""
    started = []

    def start(rank, size):
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        started.append(rank)

    yield start
    if started:
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def no_world_is_left():
    """A test whose world outlives it changes what later tests see: it fails itself, and the world ends."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("this test left a process group: end it, or let ranks of the pool run what needs one")


@pytest.fixture(autouse=True, scope="module")
def only_what_is_new_is_visited():
    """A collection in a test does not visit what earlier files have left. Late in a run, it took half a second."""
    yield
    gc.collect()
    gc.freeze()


def pytest_collection_finish(session):
    gc.collect()
    gc.freeze()  # a collection that a test asks for need not visit the objects of every import
    session.config.stash[TEMPLATE] = Forked.template = Template(shown=session.config.option.capture == "no")


def pytest_unconfigure(config):
    if template := config.stash.get(TEMPLATE, None):
        template.stop()


@pytest.hookimpl(tryfirst=True)  # before marks deselect some
def pytest_collection_modifyitems(config, items):
    config.stash[COLLECTED] = {item.nodeid for item in items}
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available() and os.environ.get("WEFT_REHEARSE") != "1":
            item.add_marker(pytest.mark.skip(reason="needs CUDA"))
