# The environment of deep_ep, made by `deep_ep env`. The library also works with no variable set.
