"""What an opened artefact looks like, whatever executes it."""

from collections.abc import Callable, Sequence

import numpy as np

from .description import Description


class Session:
    """An artefact in its own runtime: `session(images) -> outputs by name`.

    Args:
        description: What the artefact says of itself.
        run: (B, C, H, W) float32 -> the outputs in order.
    """

    def __init__(self, description: Description, run: Callable[[np.ndarray], Sequence[np.ndarray]]):
        self.description, self._run = description, run

    def __call__(self, images: np.ndarray) -> dict[str, np.ndarray]:
        """Normalised images (B, C, H, W) -> outputs by name.

        Raises:
            ValueError: The images have a shape that the artefact was not exported for.
        """
        images = np.ascontiguousarray(images, np.float32)
        image, came, (channels, height, width) = self.description.image, images.shape, self.description.shape
        fits = len(came) == 4 and came[0] > 0 and came[1] == channels
        if not fits or not (image["any_size"] or came[2:] == (height, width)):
            sides = "H x W of your choice" if image["any_size"] else f"{height} x {width}"
            raise ValueError(
                f"images of shape {came}; {self.description.title} was exported for (B, {channels}, H, W) "
                f"with {sides}: resize them, or export again with --size"
            )
        if image["any_batch"] or len(images) == 1:
            found = self._run(images)
        else:  # exported for one image at a time
            each = [self._run(one[None]) for one in images]
            found = [np.concatenate(parts) for parts in zip(*each, strict=True)]
        return dict(zip(self.description.outputs, found, strict=True))
