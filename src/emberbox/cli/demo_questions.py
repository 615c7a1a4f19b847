"""The questions of the demonstration and how an answer is judged. Knows no server.

The wordings are those the nano model was trained on; the answers are checked, not assumed.
"""

import base64
import io
import json
from collections.abc import Callable
from dataclasses import dataclass

from PIL import Image, ImageDraw

SECRET_NAME = "harbor"
SECRET_CODE = "48213"
OTHER_CODES = {"lantern": "7305", "meadow": "91644"}

_SUBJECTS = ("The keeper", "A visitor", "The older clerk", "One of the guides", "The night crew")
_ACTIONS = (
    "walked along the quiet shore before the morning bell was heard",
    "wrote a short letter about the weather and put it on the shelf",
    "carried the wooden boxes up the stairs and opened every window",
    "repaired the small boat with rope and a piece of grey cloth",
    "counted the lamps in the hall and turned off those not needed",
    "asked whether the garden gate should stay open during the night",
    "found the old map behind the clock and showed it to the others",
    "made tea for everyone and talked about the long road to the hills",
    "read the first chapter aloud while the rain fell on the roof",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One question: `content` is the user message's content on the wire, `shown` is printed."""

    name: str
    shown: str
    content: str | list[dict[str, object]]
    expected: str
    is_right: Callable[[str], bool]


def questions() -> tuple[Question, ...]:
    """List as JSON, a code buried in a long text, a picture: each a conversation of its own."""
    numbers = list(range(1, 21))
    ask_list = 'List the numbers 1 to 20 as JSON {"numbers":[...]}.'
    ask_code = f"Return the codes for {SECRET_NAME} as JSON."
    ask_image = "Describe the image."
    image: dict[str, object] = {"type": "image_url", "image_url": {"url": picture_data_uri()}}
    return (
        Question(
            name="list as JSON",
            shown=ask_list,
            content=ask_list,
            expected=json.dumps({"numbers": numbers}, separators=(",", ":")),
            is_right=lambda answer: _parsed(answer) == {"numbers": numbers},
        ),
        Question(
            name="code in a long text",
            shown=f"({len(long_text().split())} words of text) {ask_code}",
            content=f"Read this text.\n{long_text()}{ask_code}",
            expected=json.dumps({SECRET_NAME: SECRET_CODE}),
            is_right=lambda answer: _parsed(answer) == {SECRET_NAME: SECRET_CODE},
        ),
        Question(
            name="image",
            shown=f"(a picture of 112 x 112 pixels) {ask_image}",
            content=[image, {"type": "text", "text": ask_image}],
            expected="Three red circles on a white background.",
            is_right=lambda answer: answer.strip() == "Three red circles on a white background.",
        ),
    )


def follow_up() -> Question:
    """The second turn after the code in the long text: another code of the same text."""
    name, code = next(iter(OTHER_CODES.items()))
    ask = f"Return the codes for {name} as JSON."
    return Question(
        name="second turn on the long text",
        shown=f"(after the long text and its answer) {ask}",
        content=ask,
        expected=json.dumps({name: code}),
        is_right=lambda answer: _parsed(answer) == {name: code},
    )


def long_text() -> str:
    """About 1,000 tokens of plain sentences, with three codes at different depths."""
    lines = [f"{subject} {action}.\n" for action in _ACTIONS for subject in _SUBJECTS]
    codes = {**OTHER_CODES, SECRET_NAME: SECRET_CODE}
    for depth, (name, code) in zip((9, 40, 22), codes.items(), strict=True):
        lines.insert(depth, f"The code for {name} is {code}.\n")
    return "".join(lines)


def picture_data_uri() -> str:
    """Three red circles on white, 112 x 112, as a PNG data URI."""
    picture = Image.new("RGB", (112, 112), (245, 245, 245))
    draw = ImageDraw.Draw(picture)
    for x, y, radius in ((28, 30, 13), (80, 40, 15), (45, 84, 14)):
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=(220, 30, 30))
    png = io.BytesIO()
    picture.save(png, format="PNG")
    return "data:image/png;base64," + base64.b64encode(png.getvalue()).decode("ascii")


def _parsed(answer: str) -> object:
    try:
        return json.loads(answer)
    except ValueError:
        return None
