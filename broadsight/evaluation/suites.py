"""What the suites of robustness are: what each measures, how hard, and how that is said."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..data.corruptions import CORRUPTIONS, SEVERITIES
from .corrupted import check_corruptions
from .removal import ORDERS

SUITES = ("occlusion", "fgsm", "salient", "corruptions")
HALF = 0.5  # of a side: the occlusion that stands for the others
EIGHT = 8.0  # of 255: likewise the attack
HIGHEST = {"sides": 1, "epsilons": 255, "fractions": 1}


@dataclass(frozen=True)
class Choices:
    """How hard the suites are. Images as they are, at 0, are always measured too.

    Args:
        saliency: What pixels are removed by: "scenes", "gradcam", "dino", or one's own as "file.py:function"; by
            default the scenes' own where there are scenes, and else gradcam.
        dino_checkpoint: Weights of dino; timm's if None.
        corruptions, severities: Names, and numbers from 1 to 5.
        epsilons: Steps of the attack, in units of pixels between 0 and 255.
        sides: Of the square that occludes, as fractions of the image's side.
        fractions: Parts of the pixels that are removed.
    """

    saliency: str | None = None
    dino_checkpoint: str | None = None
    corruptions: Sequence[str] = CORRUPTIONS
    severities: Sequence[int] = SEVERITIES
    epsilons: Sequence[float] = (1.0, 4.0, 8.0)
    sides: Sequence[float] = (0.25, 0.5, 0.75)
    fractions: Sequence[float] = tuple(tenth / 10 for tenth in range(10))

    def __post_init__(self) -> None:
        for name in ("corruptions", "severities", *HIGHEST):
            if not len(getattr(self, name)):
                raise ValueError(f"{name} are empty; expected one or more")
        for name, highest in HIGHEST.items():
            for value in getattr(self, name):
                if not 0 <= value <= highest:
                    raise ValueError(f"{value} among {name}; expected numbers between 0 and {highest}")
        check_corruptions(self.corruptions, self.severities)

    def cases(self, suite: str) -> list[tuple[str, float]]:
        """What a suite measures: case and at, in the order of its rows."""
        if suite == "occlusion":
            return [("centre", at) for at in _from_zero(self.sides)]
        if suite == "fgsm":
            return [("fgsm", at) for at in _from_zero(self.epsilons)]
        if suite == "salient":
            return [(order, at) for order in ORDERS for at in _from_zero(self.fractions)]
        if suite == "corruptions":
            names = [name for name in CORRUPTIONS if name in self.corruptions]
            severities = sorted(set(self.severities))
            return [("clean", 0.0), *((name, float(severity)) for name in names for severity in severities)]
        raise ValueError(f"unknown suite {suite!r}; suites are {', '.join(SUITES)}")


def _from_zero(values: Sequence[float]) -> list[float]:
    return sorted({0.0, *map(float, values)})


def passes_of(name: str, choices: Choices | None = None) -> int:
    """How often each image is asked about in a suite."""
    return len((choices or Choices()).cases(name))


def described(name: str, choices: Choices, saliency: str) -> tuple[str, str, str]:
    """Title of a suite, its settings in a sentence or two, and what `at` means.

    Args:
        saliency: What pixels are removed by, in words.
    """
    if name == "occlusion":
        return (
            "Occlusion of the centre",
            "A centred square is set to the mean colour (0 after normalisation). Half the side, a quarter of the area, "
            "is our reading of the papers' centre occlusion, whose size is not printed.",
            "side of the square, as a fraction of the image's",
        )
    if name == "fgsm":
        return (
            "Fast gradient sign attack",
            "One step along the signs of the gradient of the true class's cross-entropy, clipped to valid pixel values "
            "and not rounded to bytes. 8/255 is our reading of the papers' FGSM, whose step is not printed.",
            "step, in 255ths",
        )
    if name == "salient":
        return (
            "Removal of salient pixels",
            f"Pixels are set to the mean colour (0 after normalisation), first those that are salient by {saliency}; "
            "and for comparison square after square at random, and in the opposite order. An area is the mean height "
            "of a curve.",
            "fraction of the pixels removed",
        )
    kinds, severities = len(set(choices.corruptions)), ", ".join(map(str, sorted(set(choices.severities))))
    return (
        "Common corruptions",
        f"Images are resized and cropped, then corrupted: {kinds} of {len(CORRUPTIONS)} kinds at severity "
        f"{severities}. These are the kinds of ImageNet-C in our own drawing, so figures do not compare with those of "
        "its published images; there is no mCE, which needs the errors of an AlexNet.",
        "severity",
    )
