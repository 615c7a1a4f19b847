"""One checkpoint per set of weights and session, opened by transformers and by emberbox."""

import pytest
import torch

pytest.importorskip("transformers", minversion="5.24", reason="the oracle is transformers 5.24")

from tests.oracle import checkpoints
from tests.oracle.harness import TABLES, TOLERANCE, Oracle, load_network


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.inference_mode():
        yield


@pytest.fixture(scope="session", params=TOLERANCE)
def oracle(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    checkpoints.write_checkpoint(folder, request.param)
    return Oracle(request.param, folder)


@pytest.fixture(scope="session", params=TABLES)
def any_network(request, oracle):
    """The network on the plain references, and on what a CPU would choose."""
    return load_network(oracle.folder, TABLES[request.param]())


@pytest.fixture(scope="session")
def network(oracle):
    """The network on what a CPU would choose."""
    return load_network(oracle.folder, TABLES["cpu"]())
