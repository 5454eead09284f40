"""What every test runs under: no model hub, one thread, the same random examples each time."""

import os

# Before torch or a hub client is imported anywhere: they read these once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Give a job of two processes."""
    from tests.jobs import job_of  # imports torch, which few tests need

    with job_of(2, tmp_path_factory.mktemp("two")) as job:
        yield job


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """Give a job of three processes."""
    from tests.jobs import job_of

    with job_of(3, tmp_path_factory.mktemp("three")) as job:
        yield job
