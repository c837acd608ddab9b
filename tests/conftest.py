"""For all tests: no network, one thread."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # read when the hub's client is imported: no test reaches for a network
os.environ["OMP_NUM_THREADS"] = "1"  # for the commands that tests start: `make test` has a worker for every core

import torch

torch.set_num_threads(1)  # tiny models: a second thread costs two to five times the CPU and saves nothing
