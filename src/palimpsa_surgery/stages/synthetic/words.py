"""Keys and values of needles: words (an adjective and a noun), numbers of seven digits, uuids, as in RULER."""

import uuid
from collections.abc import Callable

import numpy as np

ADJECTIVES = tuple(
    """
    abrupt ample ancient animated arid artful astute autumn bashful blissful blond brave brisk brittle bumpy
    calm candid careful cheery chilly civic clever cosmic crisp curly dapper daring deep dense dim dizzy
    dreamy dusty eager earnest elastic elder exact faint famous fierce floral fluffy formal fragile frank
    fresh frosty gentle giddy gilded glossy golden graceful grand gritty happy hasty hollow honest humble icy
    idle jagged jolly keen kind lavish lazy lively lofty loyal lucid lunar mellow merry mighty misty modest
    mossy narrow nimble noble novel oblong odd opaque patient pensive placid plucky polite proud quaint quiet
    rapid rustic salty scarlet serene sharp shy silent sleek smooth snug solemn sour spry steady stormy subtle
    sunny swift tame tender tidy timid tranquil trusty urban vast velvet vivid warm weary whimsical witty
    wooden woolly young zany zesty
    """.split()  # noqa: SIM905 (a list would take a line for each)
)

NOUNS = tuple(
    """
    acorn anchor apricot arrow attic bagel balcony banjo barley basin beacon bicycle blanket bobbin bonnet
    bottle bridge bucket butter cabin cactus camel candle canyon carpet cellar chapel cherry cinder clover
    cobweb comet copper cricket curtain cushion dagger daisy desert dolphin donkey drawer eagle easel ember
    engine falcon feather fiddle flute forest fossil fountain furnace galaxy garden garlic glacier goblet
    gravel guitar hammer harbor harvest hazel hedge helmet heron island ivory jacket jasmine jungle kettle
    kitten ladder lagoon lantern lemon lettuce lizard magnet maple marble meadow mirror monkey mortar needle
    nickel oasis olive onion orchard otter oyster paddle panther parcel peach pebble pencil piano pigeon
    pillow planet pocket pumpkin puzzle rabbit raven ribbon river rocket saddle salmon sandal satchel saucer
    scissors shovel sparrow spider spoon stable sweater teapot thimble thunder ticket tiger timber tractor
    trumpet tulip tunnel turnip umbrella valley vinegar violin wagon walnut whistle willow window yogurt zebra
    """.split()  # noqa: SIM905 (a list would take a line for each)
)

WORDS = len(ADJECTIVES) * len(NOUNS)
"""How many different words there are: about 20,000."""


def draw_word(rng: np.random.Generator) -> str:
    """An adjective and a noun, such as `mossy-lantern`."""
    return f"{ADJECTIVES[rng.integers(len(ADJECTIVES))]}-{NOUNS[rng.integers(len(NOUNS))]}"


def draw_number(rng: np.random.Generator, digits: int = 7) -> str:
    """A number of so many digits, the first of which is not zero."""
    return str(rng.integers(10 ** (digits - 1), 10**digits, dtype=np.int64))


def draw_uuid(rng: np.random.Generator) -> str:
    """A random uuid (version 4)."""
    return str(uuid.UUID(bytes=rng.bytes(16), version=4))


KINDS: dict[str, Callable[[np.random.Generator], str]] = {
    "words": draw_word,
    "numbers": draw_number,
    "uuids": draw_uuid,
}


def draw_distinct(draw: Callable[[], str], count: int, taken: set[str]) -> list[str]:
    """Draw `count` strings, none twice and none of those in `taken`, which they are added to."""
    drawn = []
    while len(drawn) < count:
        candidate = draw()
        if candidate not in taken:
            taken.add(candidate)
            drawn.append(candidate)
    return drawn
