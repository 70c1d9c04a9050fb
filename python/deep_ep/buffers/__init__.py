"""The interfaces by generation: ``legacy`` is the first, ``elastic`` the second."""
