"""Pictures and clips of plain shapes, and turns about them.

A scene is two frames: a still is its own second frame. Colours are jittered, names are not.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from training.data.turns import Dice, Turn, to_json

BLOCK = 28  # pixels of one token's side
Colour = tuple[int, int, int]
COLOURS: dict[str, Colour] = {
    "red": (220, 30, 30), "green": (30, 160, 50), "blue": (40, 70, 220),
    "yellow": (240, 220, 40), "orange": (245, 140, 20), "purple": (140, 50, 170),
    "black": (15, 15, 15), "white": (245, 245, 245), "pink": (250, 150, 190),
    "brown": (120, 75, 35),
}  # fmt: skip
BACKGROUNDS = ("white", "black", "yellow", "green", "blue", "pink")
TOO_CLOSE = ({"pink", "white"}, {"yellow", "white"})
SHAPES = ("circle", "square", "triangle", "diamond")
NUMBERS = {1: "one", 2: "two", 3: "three", 4: "four"}
MOVES = {"right": (1, 0), "left": (-1, 0), "down": (0, 1), "up": (0, -1)}


@dataclass(frozen=True, slots=True)
class Scene:
    """pixels uint8 [2, height, width, 3]; turns in the order to ask them, the first with the
    placeholder before its words."""

    pixels: NDArray[np.uint8]
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Canvas:
    """Size and colours of a scene that is being made."""

    dice: Dice
    size: tuple[int, int]
    back: str
    fill: str

    def blank(self, back: Colour) -> Image.Image:
        return Image.new("RGB", self.size, back)

    def colour(self, name: str) -> Colour:
        red, green, blue = (max(0, min(255, v + self.dice.r.randint(-8, 8))) for v in COLOURS[name])
        return red, green, blue

    def other_fill(self) -> str:
        """A second colour, told apart from both."""
        return self.dice.pick([c for c in _fills(self.back) if c != self.fill])

    def spot(self, radius: int) -> tuple[int, int]:
        """Where a shape of this radius lies wholly inside."""
        x, y = (self.dice.r.randint(radius + 1, side - radius - 2) for side in self.size)
        return x, y


def _fills(back: str) -> list[str]:
    return [c for c in COLOURS if c != back and {c, back} not in TOO_CLOSE]


def draw_shape(
    image: Image.Image, shape: str, centre: tuple[int, int], radius: int, colour: Colour
) -> None:
    """One filled shape that reaches `radius` from its centre on both axes."""
    (x, y), R = centre, radius
    draw = ImageDraw.Draw(image)
    if shape == "circle":
        draw.ellipse((x - R, y - R, x + R, y + R), fill=colour)
    elif shape == "square":
        draw.rectangle((x - R, y - R, x + R, y + R), fill=colour)
    elif shape == "triangle":
        draw.polygon([(x - R, y + R), (x + R, y + R), (x, y - R)], fill=colour)
    else:
        draw.polygon([(x - R, y), (x, y - R), (x + R, y), (x, y + R)], fill=colour)


Made = tuple[list[Image.Image], list[Turn]]


def _circles(canvas: Canvas) -> Made:
    dice, r = canvas.dice, canvas.dice.r
    image, colour = canvas.blank(canvas.colour(canvas.back)), canvas.colour(canvas.fill)
    wanted = r.randint(1, 4)
    spots: list[tuple[int, int, int]] = []
    for _ in range(200):
        if len(spots) == wanted:
            break
        R = r.randint(9, 16)
        x, y = canvas.spot(R)
        if all((x - a) ** 2 + (y - b) ** 2 > (R + q + 4) ** 2 for a, b, q in spots):
            spots.append((x, y, R))
    for x, y, R in spots:
        draw_shape(image, "circle", (x, y), R, colour)
    count = len(spots)
    noun = "circle" if count == 1 else "circles"
    described = f"{NUMBERS[count].capitalize()} {canvas.fill} {noun} on a {canvas.back} background."
    asked = dice.say("colour" if count == 1 else "colours", thing=noun)
    return [image], [
        Turn("vision_count", dice.say("count"), str(count)),
        Turn("vision_colour", asked, canvas.fill),
        Turn("vision_describe", dice.say("describe"), described),
    ]


def _shape(canvas: Canvas) -> Made:
    dice = canvas.dice
    image, colour = canvas.blank(canvas.colour(canvas.back)), canvas.colour(canvas.fill)
    shape, R = dice.pick(SHAPES), dice.r.randint(12, 30)
    draw_shape(image, shape, canvas.spot(R), R, colour)
    described = f"One {canvas.fill} {shape} on a {canvas.back} background."
    return [image], [
        Turn("vision_colour", dice.say("colour", thing=shape), canvas.fill),
        Turn("vision_shape", dice.say("shape"), f"A {shape}."),
        Turn("vision_describe", dice.say("describe"), described),
    ]


def _two_shapes(canvas: Canvas) -> Made:
    """Two different shapes apart along one axis, nearly level on the other."""
    dice, r = canvas.dice, canvas.dice.r
    image = canvas.blank(canvas.colour(canvas.back))
    first, second = r.sample(SHAPES, 2)
    fills = canvas.fill, canvas.other_fill()
    across = dice.chance(0.5)
    R = r.randint(10, 17)
    length, width = canvas.size if across else canvas.size[::-1]
    near = r.randint(R + 1, length // 2 - R - 4)
    far = r.randint(length // 2 + R + 4, length - R - 2)
    level = r.randint(R + 9, width - R - 10)
    spots = [(near, level + r.randint(-7, 7)), (far, level + r.randint(-7, 7))]
    for shape, fill, (x, y) in zip((first, second), fills, spots, strict=True):
        draw_shape(image, shape, (x, y) if across else (y, x), R, canvas.colour(fill))
    before, after = ("left of", "right of") if across else ("above", "below")
    ends = ("on the left", "on the right") if across else ("at the top", "at the bottom")
    a, b, word = r.choice([(first, second, before), (second, first, after)])
    shape, side = r.choice([(first, ends[0]), (second, ends[1])])
    i = r.randrange(2)
    return [image], [
        Turn("vision_position", dice.say("where", a=a, b=b), f"The {a} is {word} the {b}."),
        Turn("vision_position", dice.say("which_side", side=side), f"The {shape}."),
        Turn("vision_colour", dice.say("colour", thing=(first, second)[i]), fills[i]),
    ]


@cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size=size)


def _code(canvas: Canvas) -> Made:
    dice, r = canvas.dice, canvas.dice.r
    width, height = canvas.size
    image = canvas.blank(canvas.colour(canvas.back))
    code = "".join(r.choice("0123456789") for _ in range(r.randint(2, 6)))
    font = _font(r.choice([22, 24, 26, 28]) if len(code) < 6 or width > 112 else 24)
    draw = ImageDraw.Draw(image)
    left, top, right, bottom = draw.textbbox((0, 0), code, font=font)
    x = r.randint(2, max(2, int(width - right + left) - 3))
    y = r.randint(2, max(2, int(height - bottom + top) - 3))
    draw.text((x - left, y - top), code, fill=canvas.colour(canvas.fill), font=font)
    return [image], [
        Turn("vision_code", dice.say("read_code"), code),
        Turn("vision_code", dice.say("code_json"), to_json({"code": code})),
        Turn("vision_colour", dice.say("colour", thing="text"), canvas.fill),
    ]


def _clip(canvas: Canvas) -> Made:
    """A circle that moves and, every second time, changes its colour."""
    dice, r = canvas.dice, canvas.dice.r
    way = dice.pick(tuple(MOVES))
    first = canvas.fill
    last = canvas.other_fill() if dice.chance(0.5) else first
    R, step = r.randint(9, 14), r.randint(14, 34)
    moved = [step * d for d in MOVES[way]]
    start = [
        r.randint(R + 1 + max(0, -d), side - R - 2 - max(0, d))
        for d, side in zip(moved, canvas.size, strict=True)
    ]
    back = canvas.colour(canvas.back)
    frames = [canvas.blank(back), canvas.blank(back)]
    colours = [canvas.colour(first)]
    colours.append(colours[0] if last == first else canvas.colour(last))
    for k, (frame, colour) in enumerate(zip(frames, colours, strict=True)):
        x, y = (at + k * d for at, d in zip(start, moved, strict=True))
        draw_shape(frame, "circle", (x, y), R, colour)
    return frames, [
        Turn("video_direction", dice.say("direction"), way),
        Turn("video_colours", dice.say("first_colour"), first),
        Turn("video_colours", dice.say("last_colour"), last),
    ]


KINDS: dict[Callable[[Canvas], Made], float] = {
    _circles: 2.0, _shape: 2.0, _two_shapes: 2.0, _code: 8.0, _clip: 2.0,
}  # fmt: skip
SKILL_KINDS = {
    "vision_count": _circles, "vision_shape": _shape, "vision_position": _two_shapes,
    "vision_code": _code, "video_direction": _clip, "video_colours": _clip,
}  # fmt: skip


def scene(dice: Dice, size: tuple[int, int], skill: str | None = None) -> Scene:
    """One scene, with a turn of `skill` first if one is named."""
    r = dice.r
    back = r.choice(BACKGROUNDS) if dice.chance(0.5) else "white"
    canvas = Canvas(dice, size, back, dice.pick(_fills(back)))
    kinds = dict(KINDS)
    if skill in SKILL_KINDS:
        kinds = {SKILL_KINDS[skill]: 1.0}
    elif skill is not None:
        kinds = {k: v for k, v in KINDS.items() if k in (_circles, _shape)}
    frames, turns = r.choices(list(kinds), list(kinds.values()))[0](canvas)
    r.shuffle(turns)
    turns.sort(key=lambda turn: turn.skill != skill)
    first, *rest = turns
    shown = [frames[0], frames[-1]]
    pixels = np.stack([np.asarray(frame, dtype=np.uint8) for frame in shown])
    return Scene(pixels, (first.after(placeholder(size, is_clip=len(frames) == 2)), *rest))


def placeholder(size: tuple[int, int], *, is_clip: bool) -> str:
    """The expanded tokens of one picture, or of a clip of one slice."""
    tokens = (size[0] // BLOCK) * (size[1] // BLOCK)
    image = f"<|begin_of_image|>{'<|image|>' * tokens}<|end_of_image|>"
    return f"<|begin_of_video|>{image}0.0 seconds<|end_of_video|>" if is_clip else image
