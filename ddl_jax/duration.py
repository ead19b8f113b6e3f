"""Durations as people say them."""


def duration(seconds: float) -> str:
    """A duration as people say it: 42 s, 3 min 20 s, 5 h 12 min."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    minutes, seconds = divmod(seconds, 60)
    if minutes < 60:
        return f"{minutes} min {seconds} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"
