"""One thread per process: the test runner is what uses the cores."""

from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)

TOGETHER = ("claims", "browser")  # parts whose tests share what takes long to set up: one process runs all of them


@pytest.hookimpl(tryfirst=True)  # before the runner reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        part = Path(item.path).parent.name
        if part in TOGETHER:
            item.add_marker(pytest.mark.xdist_group(part))
