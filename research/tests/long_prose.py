"""Sentences that differ, for long documents."""

PEOPLE = ["the cat", "a small dog", "my old friend", "the tall tree", "every child", "one bird", "her brother"]
PLACES = ["in the house", "on a hill", "near the river", "behind that wall", "under the bridge", "at sea"]


def prose(number: int) -> str:
    """Sentences of one article, none of which another has."""
    return " ".join(
        f"{who.capitalize()} saw {what} {where} in the year {1000 * number + 10 * i + j}, and nobody knew."
        for i, where in enumerate(PLACES)
        for j, (who, what) in enumerate(zip(PEOPLE, PEOPLE[1:]))
    )
