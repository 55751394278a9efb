"""Damage to JSON values, place by place."""


def leaves(value, place=()):
    """Places of everything in a JSON value that is neither object nor list."""
    if isinstance(value, dict):
        parts = [*value.items()]
    elif isinstance(value, list):
        parts = [*enumerate(value)]
    else:
        return [place]
    return [leaf for key, part in parts for leaf in leaves(part, (*place, key))]


def replaced(value, place, new):
    """A copy of a JSON value with another one at a place."""
    if not place:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[place[0]] = replaced(copy[place[0]], place[1:], new)
    return copy
