"""Sends P's first token to a client while D still computes its own.

P samples a token when it has computed a prompt. D reads P's KV, computes the last token of the
prompt again, and samples the same token a step later. Where both must be equal, the client's stream
begins with P's token, and D's answer continues it as the answer of a second instance
(`continuation.py`): its first token is compared and taken away. Another token ends the stream with
an error event, since nothing that was sent can be taken back.

Conditions:

    request   a stream at temperature 0 of a model that D serves, without fields that may change the
              first token or its event (`EndpointSchema.keep_first_token`)
    engines   `--first-token`; chats also need engines that parse no reasoning
    P         computes whole prompts: its model has no sliding windows and no states
    P         has ended its leg in the process of D's grant, at the limit of one token, with text
    D         has accepted the request: its status 200 is here, its first content is not
    both      the last streams of this pair have agreed: see below

Agreement. The form of D's first events depends on its version and flags, so it is learned: a pair's
first stream is D's alone. It shows the form, and whether P's token is D's. A systematic difference,
such as another chat parser, so never reaches a client. After a difference, seen by a client or not,
AGREEMENTS_AFTER_DIFFERENCE streams of the pair must agree before P's token is sent again.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple, Protocol

import msgspec

from ...protocol.peers import EngineInfo
from ..flags import FirstTokenMode
from ..http.headers import Headers, find
from ..routing.pairing import InstancePair
from .bodies import Body
from .choice_events import NotReplayable, answer_identity, is_blank_or_comment
from .continuation import ChoiceTranscript

log = logging.getLogger(__name__)

AGREEMENTS_AFTER_DIFFERENCE = 100
# 40 P and 60 D are 2,400 pairs, for each path and model, and restarts make new ones. Of more, the
# one that served longest ago is forgotten. With fewer places than pairs each would be forgotten
# before it serves again. 14 MB when full.
MAX_KNOWN_PAIRS = 16384

_DATA = b"data: "
_CHAT = "/v1/chat/completions"
_SAFE_ID = re.compile(r'[^"\\\x00-\x1f]+')
_DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class _PrefillMessage(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None


class _PrefillChoice(msgspec.Struct):
    finish_reason: str | None = None
    text: str | None = None
    message: _PrefillMessage | None = None


class _PrefillAnswer(msgspec.Struct):
    id: str
    created: Annotated[int, msgspec.Meta(ge=0)]
    choices: list[_PrefillChoice]


class _Shape(msgspec.Struct):
    """The shape of an event of D, whatever else it has."""

    object: str
    choices: list[dict[str, Any]]


_decode_prefill_answer = msgspec.json.Decoder(_PrefillAnswer).decode
_check_shape = msgspec.json.Decoder(_Shape).decode
_decode_event = msgspec.json.Decoder(dict[str, Any]).decode
_encode = msgspec.json.Encoder().encode


class FirstToken(NamedTuple):
    """The token that a prefill leg's answer has, with the answer's identity."""

    id: str
    created: int
    text: str


class OpeningForm(NamedTuple):
    """The events with which a D begins its streams, without identity and text."""

    object: bytes
    lead: list[bytes]  # the events before the text: of a chat the role, else none
    before: bytes  # of the event with the text: what stands before it, and behind it
    after: bytes

    def fill(self, token: FirstToken) -> bytes:
        """Returns the events with P's identity and text."""
        identity = b'data: {"id":%b,"object":"%b","created":%d' % (
            _encode(token.id),
            self.object,
            token.created,
        )
        text = self.before + _encode(token.text) + self.after
        return b"".join(identity + rest + b"\n\n" for rest in (*self.lead, text))


class Opening(NamedTuple):
    """The first events of D's stream, up to its first text."""

    form: OpeningForm
    text: str


def first_token_in(content: bytes) -> FirstToken | None:
    """Returns the token of a prefill leg's answer; None if a stream cannot begin with it.

    A text without characters is one whose bytes need the next token. A token at which the answer
    would end, or that a parser has read, is left to D.
    """
    try:
        answer = _decode_prefill_answer(content)
    except _DECODE_ERRORS:
        return None
    if len(answer.choices) != 1 or not _SAFE_ID.fullmatch(answer.id):
        return None
    choice = answer.choices[0]
    text = choice.text
    if choice.message:
        message = choice.message
        if message.reasoning or message.reasoning_content or message.tool_calls:
            return None
        text = message.content
    if choice.finish_reason != "length" or not text:
        return None
    return FirstToken(answer.id, answer.created, text)


def read_opening(beginning: bytes) -> Opening | None:
    """Reads the beginning of a stream; None if it has other content than one text.

    `beginning`: bytes up to the first content or more.
    """
    lead: list[bytes] = []
    try:
        for event in beginning.split(b"\n\n"):
            if is_blank_or_comment(event):
                continue
            identity = answer_identity(event)
            rest = event[len(identity) :]
            _check_shape(event[len(_DATA) :])
            content = _decode_event(event[len(_DATA) :])
            text = _text_of(content)
            if text is None:
                return None
            if text:
                before, found, after = rest.partition(b":" + _encode(text))
                kind = content["object"].encode()
                form = OpeningForm(kind, lead, before + b":", after)
                return Opening(form, text) if found and _is_proven(form, content) else None
            lead.append(rest)
    except (NotReplayable, *_DECODE_ERRORS):
        pass
    return None


def _text_of(event: dict[str, Any]) -> str | None:
    """Returns the text of an event, "" for a role; None if the event has any other content."""
    present = {name for name, value in event.items() if value is not None}
    if present != {"id", "object", "created", "model", "choices"} or len(event["choices"]) != 1:
        return None
    choice = {name: value for name, value in event["choices"][0].items() if value is not None}
    if choice.pop("index", None) != 0 or len(choice) != 1:
        return None
    text = choice.get("text")
    if isinstance(text, str):
        return text or None
    given = choice.get("delta")
    if not isinstance(given, dict):
        return None
    delta = {name: value for name, value in given.items() if value is not None}
    role = delta.pop("role", "")
    text = delta.pop("content", "")
    if delta or not (isinstance(role, str) and isinstance(text, str)) or bool(role) == bool(text):
        return None
    return text


def _is_proven(form: OpeningForm, event: dict[str, Any]) -> bool:
    """Proof by trial: the form around another text is the event with that text.

    D's answer will continue the events, so they must be understood as that of a first instance.
    """
    trial = FirstToken("x", 1, "another text")
    ChoiceTranscript().add(form.fill(trial).split(b"\n\n"))  # raises NotReplayable
    last = form._replace(lead=[]).fill(trial).strip()[len(_DATA) :]
    choice = dict(event["choices"][0])
    if "text" in choice:
        choice["text"] = trial.text
    else:
        choice["delta"] = {**choice["delta"], "content": trial.text}
    return _decode_event(last) == {**event, "id": "x", "created": 1, "choices": [choice]}


class StreamHead(Protocol):
    """The answer of D's leg, whose body may not have begun."""

    status: int
    headers: Headers
    is_stream: bool

    def peek(self) -> bytes:
        """Returns the part of the body that is here."""


class KnownPair(msgspec.Struct):
    """The form of a pair's streams, and how far P's tokens are trusted to be D's."""

    form: OpeningForm | None = None  # known once two tokens agreed
    agreements_due: int = 0  # after a difference

    @property
    def trusted_form(self) -> OpeningForm | None:
        """The form in which P's token may be sent; None if it may not."""
        return None if self.agreements_due else self.form

    def on_agreement(self, form: OpeningForm) -> None:
        """Notes that P's token was D's."""
        self.form = form
        self.agreements_due = max(0, self.agreements_due - 1)

    def on_difference(self) -> None:
        """Notes that it was not."""
        self.agreements_due = AGREEMENTS_AFTER_DIFFERENCE


class FirstTokenRelay:
    """Sends P's token of one attempt, when P has it and D has accepted the request."""

    def __init__(
        self, pair: KnownPair, names: str, write: Callable[[Any, bytes], bool], count: Count
    ) -> None:
        """`names`: of the pair, for the log. `write`: see `FirstTokens.relay`."""
        self._pair = pair
        self._names = names
        self._write = write
        self._count = count
        self._token: FirstToken | None = None
        self._decode_answer: StreamHead | None = None
        self.is_sent = False

    def on_prefill_answer(self, content: bytes) -> None:
        """Takes the answer of a prefill leg that was verified."""
        self._token = first_token_in(content)
        self._send_if_possible()

    def on_decode_head(self, answer: StreamHead) -> None:
        """Takes D's answer when its head is here."""
        is_plain_stream = answer.is_stream and not find(answer.headers, b"content-encoding")
        if answer.status == 200 and is_plain_stream:
            self._decode_answer = answer
            self._send_if_possible()

    def _send_if_possible(self) -> None:
        form = self._pair.trusted_form
        if form and self._token and self._decode_answer and not self.is_sent:
            self.is_sent = self._write(self._decode_answer, form.fill(self._token))
            if self.is_sent:
                self._count("sent")

    def on_decode_started(self) -> None:
        """Compares P's token with the beginning of D's stream, unless the client has it."""
        if self.is_sent or not self._token or not self._decode_answer:
            return
        opening = read_opening(self._decode_answer.peek())
        if opening is None:
            return
        if opening.text.startswith(self._token.text):
            self._pair.on_agreement(opening.form)
        else:
            self._pair.on_difference()

    def on_difference(self) -> None:
        """Notes that D's answer does not begin with the token that the client has."""
        self._count("different")
        self._pair.on_difference()
        log.warning(
            "first token: %s made different tokens of a request at temperature 0; its stream ended"
            " with an error. The prefill instance's token is not sent until %d streams agreed",
            self._names,
            AGREEMENTS_AFTER_DIFFERENCE,
        )


def _do_engines_permit(
    mode: FirstTokenMode, prefill: EngineInfo, decode: EngineInfo, path: str
) -> bool:
    """Returns whether the token of such a P may begin the stream of such a D."""
    # In this fact, as in all of the layout, the engines of a pair are equal.
    if mode == "auto" and decode.layout.get("VLLM_BATCH_INVARIANT") != "1":
        return False
    # With sliding windows or states P leaves out the prompt's last token, and samples one that is
    # in no answer. It may equal D's by chance, so agreement alone would not do.
    if not prefill.computes_last_token:
        return False
    return path != _CHAT or (prefill.plain_chat and decode.plain_chat)


Count = Callable[[str], None]  # takes the label of a metric


class FirstTokens:
    """Decides which requests may begin with P's token, and remembers what pairs have agreed on."""

    def __init__(self, mode: FirstTokenMode, count: Count) -> None:
        self._mode = mode
        self._count = count
        self._known: dict[tuple[str, str, str, str], KnownPair] = {}

    def relay(
        self, pair: InstancePair, path: str, body: Body, write: Callable[[Any, bytes], bool]
    ) -> FirstTokenRelay | None:
        """Returns the relay for an attempt; None if its stream begins with D's token.

        `write` begins the client's stream under the head of D's answer with some events; returns
        False if the stream has begun already.
        """
        prefill = pair.prefill.engine
        decode = pair.decode.engine
        if self._mode == "decode" or not prefill or not decode:
            return None
        if not _do_engines_permit(self._mode, prefill, decode, path):
            return None
        if body.one_token or not body.begins_with_prefill_token:
            return None
        # D refuses other names. A client may invent them, and each would be a pair to remember.
        if body.model and body.model not in pair.decode.models:
            return None
        key = (prefill.incarnation, decode.incarnation, path, body.model)
        known = self._known.pop(key, None) or KnownPair()
        self._known[key] = known  # the last one now
        if len(self._known) > MAX_KNOWN_PAIRS:
            del self._known[next(iter(self._known))]
        names = f"{pair.prefill.url} and {pair.decode.url}"
        return FirstTokenRelay(known, names, write, self._count)
