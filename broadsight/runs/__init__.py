"""Trained models ready for use: `open_run` gives a Classifier or a DenseModel, whatever a folder holds."""

from .classifier import Classifier as Classifier
from .classifier import open_classifier as open_classifier
from .dense_model import DenseModel as DenseModel
from .dense_model import open_dense as open_dense
from .opening import is_dense as is_dense
from .opening import open_run as open_run
from .opening import task_of as task_of
