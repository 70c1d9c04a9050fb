import pytest
from cluster import Cluster


def clusters():
    """``get(size)``: a cluster, shared by all that want this size; a new one where a test has broken it."""
    made = {}

    def get(size):
        if size not in made or not made[size].usable:
            made[size] = Cluster(size)
        return made[size]

    yield get
    for cluster in made.values():
        cluster.close(kill=not cluster.usable)


ranks = pytest.fixture(clusters, scope="session", name="ranks")
ranks_of_this_file = pytest.fixture(clusters, scope="module", name="ranks_of_this_file")
