"""What the suites of robustness are: what each measures, how hard, and how that is said."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..data.corruptions import CORRUPTIONS, SEVERITIES

SUITES = ("occlusion", "fgsm", "salient", "corruptions")
ORDERS = ("salient first", "random", "least salient first")  # in which pixels go
HALF = 0.5  # of a side: the occlusion that stands for the others
EIGHT = 8.0  # of 255: likewise the attack
HIGHEST = {"sides": 1, "epsilons": 255, "fractions": 1}
# Title of each suite, its settings in a sentence or two, and what `at` means.
WORDS = {
    "occlusion": (
        "Occlusion of the centre",
        "A centred square is set to the mean colour (0 after normalisation). Half the side, a quarter of the area, "
        "is our reading of the papers' centre occlusion, whose size is not printed.",
        "side of the square, as a fraction of the image's",
    ),
    "fgsm": (
        "Fast gradient sign attack",
        "One step along the signs of the gradient of the true class's cross-entropy, clipped to valid pixel values "
        "and not rounded to bytes. 8/255 is our reading of the papers' FGSM, whose step is not printed.",
        "step, in 255ths",
    ),
    "salient": (
        "Removal of salient pixels",
        "Pixels are set to the mean colour (0 after normalisation), first those that are salient by {saliency}; "
        "and for comparison square after square at random, and in the opposite order. An area is the mean height "
        "of a curve.",
        "fraction of the pixels removed",
    ),
    "corruptions": (
        "Common corruptions",
        "Images are resized and cropped, then corrupted: {kinds} of {all} kinds at severity {severities}. These are "
        "the kinds of ImageNet-C in our own drawing, so figures do not compare with those of its published images; "
        "there is no mCE, which needs the errors of an AlexNet.",
        "severity",
    ),
}


@dataclass(frozen=True)
class Choices:
    """How hard the suites are. Images as they are, at 0, are always measured too."""

    corruptions: Sequence[str] = CORRUPTIONS
    severities: Sequence[int] = SEVERITIES
    epsilons: Sequence[float] = (1.0, 4.0, 8.0)  # steps of the attack, in units of pixels between 0 and 255
    sides: Sequence[float] = (0.25, 0.5, 0.75)  # of the square that occludes, as fractions of the image's side
    fractions: Sequence[float] = tuple(tenth / 10 for tenth in range(10))  # parts of the pixels that are removed

    def __post_init__(self) -> None:
        for name, values in vars(self).items():
            if not len(values):
                raise ValueError(f"{name} are empty; expected one or more")
        for name, highest in HIGHEST.items():
            for value in getattr(self, name):
                if not 0 <= value <= highest:
                    raise ValueError(f"{value} among {name}; expected numbers between 0 and {highest}")
        if unknown := [name for name in self.corruptions if name not in CORRUPTIONS]:
            raise ValueError(f"unknown corruption {unknown[0]!r}; corruptions are {', '.join(CORRUPTIONS)}")
        if wrong := [severity for severity in self.severities if severity not in SEVERITIES]:
            raise ValueError(f"severity {wrong[0]}; expected some of {', '.join(map(str, SEVERITIES))}")

    def cases(self, suite: str) -> list[tuple[str, float]]:
        """What a suite measures: case and at, in the order of its rows."""
        if suite not in SUITES:
            raise ValueError(f"unknown suite {suite!r}; suites are {', '.join(SUITES)}")
        if suite == "corruptions":
            names = [name for name in CORRUPTIONS if name in self.corruptions]
            severities = sorted(set(self.severities))
            return [("clean", 0.0), *((name, float(severity)) for name in names for severity in severities)]
        steps = {"occlusion": self.sides, "fgsm": self.epsilons, "salient": self.fractions}[suite]
        cases = {"occlusion": ("centre",), "fgsm": ("fgsm",), "salient": ORDERS}[suite]
        return [(case, at) for case in cases for at in sorted({0.0, *map(float, steps)})]

    def described(self, suite: str, saliency: str) -> tuple[str, str, str]:
        """WORDS of a suite with these choices, and what pixels are removed by in words."""
        title, about, axis = WORDS[suite]
        severities = ", ".join(map(str, sorted(set(self.severities))))
        counts = dict(kinds=len(set(self.corruptions)), all=len(CORRUPTIONS))
        return title, about.format(saliency=saliency, severities=severities, **counts), axis
