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
        self._check(images.shape)
        if self.description.image["any_batch"] or len(images) == 1:
            found = self._run(images)
        else:  # exported for one image at a time
            each = [self._run(image[None]) for image in images]
            found = [np.concatenate(parts) for parts in zip(*each, strict=True)]
        return dict(zip(self.description.outputs, found, strict=True))

    def _check(self, came: tuple[int, ...]) -> None:
        image = self.description.image
        wanted = self.description.shape
        fits = len(came) == 4 and came[0] > 0 and came[1] == wanted[0]
        if not fits or not (image["any_size"] or came[2:] == wanted[1:]):
            sides = "H x W of your choice" if image["any_size"] else f"{wanted[1]} x {wanted[2]}"
            raise ValueError(
                f"images of shape {tuple(came)}; {self.description.title} was exported for (B, {wanted[0]}, H, W) "
                f"with {sides}: resize them, or export again with --size"
            )
