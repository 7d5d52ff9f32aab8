"""Reports of runs and evaluations, each one HTML file that needs nothing else: plain data and images in, text out.

A record is what JSON can hold. All of its keys but `title` may be missing; a section appears if there is something to
say in it. Percentages are numbers from 0 to 100, and None or NaN stands for what is not known.

    title, subtitle, notes  texts; `kind` is "run" or "evaluation"; beside these command, versions, commit, seed
    headline, facts     [{label, value, note}]: the large figures on top; [{group, rows: [[name, value]]}]; as text
    figures             {name: number}; what is known of names, such as their unit: visual/metrics.yaml
    absent, skipped     {name: why}: of figures or sections (page.SECTIONS) that could not be made; {image: why}
    per_class           [{class, images, recall, precision, f1, most_confused_with, confused}]
    class_figures       [{name, objects or pixels, any figures}]: of what a detector or segmenter finds
    classes, confusion  names, and counts with a row for each true class and a column for each predicted one
    confused            [{class, as, count, share}]: the most frequent confusions; made from the matrix if not given
    calibration         {ece, mce, bins: [{low, high, count, confidence, accuracy}]}; low and high are from 0 to 1
    suites              [{name, title, about, axis, model, rows: [{case, at, top1, images}], summary: {name: value}}]
    beside              [{title, parameters, macs, latency_ms, figures}]: other models; our row is made of the same keys
    runs                {heads, rows}: a table of the runs that are drawn together, in texts
    twins               [{title, top1, parameters, minutes, folder}]: this run and those beside it
"""

from .. import lazy

__getattr__, __dir__ = lazy(__name__, {".visual.canvas": "CaptionedImage", "page": "render"})
