"""Reports of runs and evaluations, each one HTML file that needs nothing else: plain data and images in, text out.

A record is what JSON can hold. All of its keys but `title` may be missing; a section appears if there is something to
say in it. Percentages are numbers from 0 to 100, and None or NaN stands for what is not known.

    title, subtitle     text; `kind` is "run" or "evaluation"
    headline            [{label, value, note}]: the large figures on top, as text
    notes               sentences that come before everything else
    figures             {name: number}; what is known of names, such as their unit: visual/metrics.yaml
    absent              {name: why}: of a figure, or of a section (page.SECTIONS), that could not be made
    per_class           [{class, images, recall, precision, f1, most_confused_with, confused}]
    class_figures       [{name, objects or pixels, any figures}]: of what a detector or segmenter finds
    classes, confusion  names, and counts with a row for each true class and a column for each predicted one
    confused            [{class, as, count, share}]: the most frequent confusions; made from the matrix if not given
    calibration         {ece, mce, bins: [{low, high, count, confidence, accuracy}]}; low and high are from 0 to 1
    suites              [{name, title, about, axis, model, rows: [{case, at, top1, images}], summary: {name: value}}]
    beside              [{title, parameters, macs, latency_ms, figures}]: other models on the same images; the row of
                        this one is made of `model` (or `title`), `parameters`, `macs`, `latency_ms`, `figures`
    twins               [{title, top1, parameters, minutes, folder}]: this run and those beside it
    facts               [{group, rows: [[name, value]]}], as text
    skipped             {image: why}
    command, versions, commit, seed
"""

from .. import lazy

_PUBLIC = {".visual.canvas": "CaptionedImage", "page": "render"}

__getattr__, __dir__ = lazy(__name__, _PUBLIC)
