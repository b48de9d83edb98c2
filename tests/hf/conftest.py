import pytest

from .checkpoints import CONFIGS, random_tensors, write_directory


@pytest.fixture(params=list(CONFIGS))
def config(request):
    return CONFIGS[request.param]


@pytest.fixture
def checkpoint_dir(config, tmp_path):
    return write_directory(tmp_path / "source", config, random_tensors(config))
