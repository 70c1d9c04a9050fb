import pytest
from cluster import Cluster

_clusters = {}


@pytest.fixture
def ranks():
    """``ranks(size)``: a cluster, shared by all tests that want this size."""

    def get(size):
        if size not in _clusters or not _clusters[size].usable:
            _clusters[size] = Cluster(size)
        return _clusters[size]

    return get


def pytest_sessionfinish():
    for cluster in _clusters.values():
        if cluster.usable:
            cluster.close()
