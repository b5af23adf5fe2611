"""The text of a continuation, as soon as it is certain."""

from collections.abc import Sequence

from megatron.data.tokenizers.tokenizer import Tokenizer

INCOMPLETE = "\ufffd"  # what a decoder writes for bytes that are no whole character
CONTEXT = 8  # tokens of the prompt that are decoded too, because a token's text may depend on them
MOST_WAITING = 8  # tokens: no character has more


class Written:
    """What tokens that follow a prompt are as text.

    A token may end inside a character, and a stop string may have begun: such text waits until a
    later token decides. stopped: whether a stop string has come; the text ends before it.
    A token costs the same however long the text has become.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str] = ()
    ) -> None:
        self.stopped = False
        self._tokenizer, self._stops = tokenizer, list(stops)
        self._ids = list(prompt[-CONTEXT:])
        self._known = len(self._ids)  # tokens whose characters were complete
        self._first = 0  # from here on tokens are decoded again
        self._pieces: list[str] = []  # of the text, all certain
        self._taken = 0  # pieces that were taken
        self._waiting = ""  # complete characters with which a stop string may begin
        self._has_characters = False

    @property
    def text(self) -> str:
        """What is certain."""
        return "".join(self._pieces)

    def add(self, token: int) -> None:
        """Append a token."""
        self._ids.append(token)
        self._decode(at_end=False)

    def finish(self) -> None:
        """No token follows: what waited is certain now."""
        if self.stopped:
            return
        self._decode(at_end=True)
        if not self.stopped:
            self._pieces.append(self._waiting)
            self._waiting = ""

    def take(self) -> str:
        """What has become certain since the last call."""
        new = "".join(self._pieces[self._taken :])
        self._taken = len(self._pieces)
        return new

    def _decode(self, *, at_end: bool) -> None:
        known = self._tokenizer.decode(self._ids[self._first : self._known])
        if not self._has_characters:  # the prompt may end inside a character
            known = known.rstrip(INCOMPLETE)
        whole = self._tokenizer.decode(self._ids[self._first :])
        undecided = len(self._ids) - self._known
        if whole.endswith(INCOMPLETE) and undecided < MOST_WAITING and not at_end:
            return
        new = whole[len(known) :]
        self._has_characters = self._has_characters or bool(new)
        self._first, self._known = self._known, len(self._ids)
        self._look_for_stops(self._waiting + new)

    def _look_for_stops(self, text: str) -> None:
        """Find the first stop string, or how much of the text cannot be the beginning of one.

        text: what waited, with what is new. What is before it cannot belong to a stop string.
        """
        found = [text.find(stop) for stop in self._stops]
        places = [place for place in found if place >= 0]
        if places:
            self.stopped = True
            self._pieces.append(text[: min(places)])
            return
        count = max((begun(text, stop) for stop in self._stops), default=0)
        certain = len(text) - count
        self._pieces.append(text[:certain])
        self._waiting = text[certain:]


def begun(text: str, stop: str) -> int:
    """How many last characters of the text may be the beginning of a stop string."""
    for count in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-count:]):
            return count
    return 0
