"""Text that nobody in this process wrote, such as names in a log, made fit to print."""


def printable(text: str, kept: str = "") -> str:
    """The text with control characters, those that reverse the direction of writing, and all else
    that is not to be seen as `\\x1b` or `\\u202e`; only characters of `kept` stay.

    Printed as they are, they would recolour a terminal or make it do what a name says.
    """
    if text.isprintable():
        return text
    return "".join(
        character
        if character.isprintable() or character in kept
        else character.encode("unicode_escape").decode("ascii")
        for character in text
    )
