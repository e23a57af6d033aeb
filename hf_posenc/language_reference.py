"""Python's language reference, as the standard library carries it for `help()`: real English without a download."""


def language_reference() -> dict[str, str]:
    """The chapters, some 430,000 characters, by topic."""
    from pydoc_data.topics import topics  # only here: half a megabyte

    return topics
