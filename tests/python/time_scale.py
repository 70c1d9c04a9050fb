"""The one scale of time in tests, as in tests/support/time_scale.hpp: seconds of a quiet machine, times a factor."""

import os


def time_factor():
    """DEEP_EP_TEST_TIME_FACTOR, or by the load of the machine at this moment."""
    by_hand = os.environ.get("DEEP_EP_TEST_TIME_FACTOR")
    if by_hand is not None:
        return float(by_hand)
    return min(4.0, max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1) / 2))


def scaled(seconds):
    return seconds * time_factor()
