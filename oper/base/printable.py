"""Text that nobody in this process wrote, such as names in a log, made fit to print."""

import unicodedata


def printable(text: str, kept: str = "") -> str:
    """The text with control characters, those that reverse the direction of writing, and all else
    that is not to be seen as `\\x1b` or `\\u202e`; only spaces of any width, what joins letters or
    keeps them apart, and characters of `kept` stay.

    Printed as they are, they would recolour a terminal or make it do what a name says.
    """
    if text.isprintable():
        return text
    return "".join(
        character
        if character.isprintable() or character in kept or _is_spelling(character)
        else character.encode("unicode_escape").decode("ascii")
        for character in text
    )


def _is_spelling(character: str) -> bool:
    return unicodedata.category(character) == "Zs" or character in "\u200c\u200d"
