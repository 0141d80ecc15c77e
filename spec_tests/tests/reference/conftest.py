"""Slow commands run with `--profile deep` only; shards for those that train.

The suite's own process never imports the reference, so that its ranks can load any implementation.
"""

from pathlib import Path

import pytest

from spec_tests.tests.reference.training import shard, trained, write_shards


def pytest_configure(config):
    """Declare the marker."""
    config.addinivalue_line("markers", "slow: half a minute or more; runs with --profile deep")


def pytest_collection_modifyitems(config, items):
    """Skip what is slow, saying how to run it."""
    if config.getoption("--profile") == "deep":
        return
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="slow: runs with --profile deep"))


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    """A folder with two training shards and one of validation, of 64 words."""
    folder = tmp_path_factory.mktemp("data")
    write_shards(folder, 1500)
    (folder / "x_val_000000.bin").write_bytes(shard(700, seed=9, vocabulary=64))
    return folder


@pytest.fixture(scope="session")
def baseline(data, tmp_path_factory) -> Path:
    """The folder of a plain run, with which others are compared."""
    folder = tmp_path_factory.mktemp("baseline")
    trained(data, folder)
    return folder
