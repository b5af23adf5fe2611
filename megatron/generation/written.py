"""The text of a continuation, as soon as it is certain."""

from collections.abc import Sequence

from megatron.data.tokenizers.tokenizer import Tokenizer

INCOMPLETE = "\ufffd"  # what a decoder writes for bytes that are no whole character
CONTEXT = 8  # tokens of the prompt that are decoded too, because a token's text may depend on them
MOST_WAITING = 8  # tokens: no character has more


class Written:
    """What tokens that follow a prompt are as text.

    A token may end inside a character, and a stop string may have begun: such text waits until a
    later token decides. text: what is certain; stopped: whether a stop string has come; the text
    ends before it.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str] = ()
    ) -> None:
        self.text = ""
        self.stopped = False
        self._tokenizer, self._stops = tokenizer, list(stops)
        self._ids = list(prompt[-CONTEXT:])
        self._known = len(self._ids)  # tokens whose characters were complete
        self._first = 0  # from here on tokens are decoded again
        self._decoded = ""  # all complete characters of the continuation
        self._taken = 0  # characters of `text` that were taken

    def add(self, token: int) -> None:
        """Append a token."""
        self._ids.append(token)
        self._decode(at_end=False)

    def finish(self) -> None:
        """No token follows: what waited is certain now."""
        if not self.stopped:
            self._decode(at_end=True)
            self.text = self._decoded if not self.stopped else self.text

    def take(self) -> str:
        """What has become certain since the last call."""
        new = self.text[self._taken :]
        self._taken = len(self.text)
        return new

    def _decode(self, *, at_end: bool) -> None:
        known = self._tokenizer.decode(self._ids[self._first : self._known])
        if not self._decoded:  # the prompt may end inside a character
            known = known.rstrip(INCOMPLETE)
        whole = self._tokenizer.decode(self._ids[self._first :])
        waiting = len(self._ids) - self._known
        if whole.endswith(INCOMPLETE) and waiting < MOST_WAITING and not at_end:
            return
        self._decoded += whole[len(known) :]
        self._first, self._known = self._known, len(self._ids)
        self._look_for_stops()

    def _look_for_stops(self) -> None:
        """Find the first stop string, or how much of the text cannot be the beginning of one."""
        found = [self._decoded.find(stop) for stop in self._stops]
        places = [place for place in found if place >= 0]
        if places:
            self.stopped = True
            self.text = self._decoded[: min(places)]
            return
        waiting = max((begun(self._decoded, stop) for stop in self._stops), default=0)
        self.text = self._decoded[: len(self._decoded) - waiting]


def begun(text: str, stop: str) -> int:
    """How many last characters of the text may be the beginning of a stop string."""
    for count in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-count:]):
            return count
    return 0
