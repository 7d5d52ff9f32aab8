"""Images to try: scenes that no run was trained on, one of every class."""

from functools import cache

from PIL import Image

from ..data.scenes import CLASSES, draw_scene

SIZE = 288


@cache
def samples() -> tuple[tuple[str, Image.Image], ...]:
    """Names and images of the samples, from the test part, which training never draws."""
    scenes = [draw_scene(index, size=SIZE, split="test") for index in range(len(CLASSES))]  # one of each class
    scenes.sort(key=lambda scene: scene.label)
    return tuple((CLASSES[scene.label], Image.fromarray(scene.image)) for scene in scenes)


def sample(index: object) -> Image.Image:
    """The sample of this number; a ValueError for anything else that is sent."""
    if not isinstance(index, int) or not 0 <= index < len(samples()):
        raise ValueError("there is no such sample; pick one of those shown")
    return samples()[index][1]
