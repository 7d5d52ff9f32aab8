"""Models as files that other runtimes execute, with everything inside that is needed to use them."""

from .. import lazy

_PUBLIC = {"agreement": "Agreement compare rounding_of", "graph": "capture prepare"}
_PUBLIC |= {"formats": "FORMATS need open_artefact", "session": "Description Session"}
__getattr__, __dir__ = lazy(__name__, _PUBLIC)
