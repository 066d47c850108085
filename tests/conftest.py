"""One thread a process: the test runner is what uses the cores."""

import torch

torch.set_num_threads(1)
