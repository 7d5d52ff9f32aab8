"""Makes the images of the pages on dense tasks: scenes with the truth beside what a run finds.

python docs/images.py RUN docs/images/detection.png [--first 3] [--count 3]
"""

import argparse

import torch
from PIL import Image

from broadsight.data.dense.resolve import open_dense_part
from broadsight.evaluation.dense import truth_and
from broadsight.prediction.dense import finder
from broadsight.runs.dense_model import open_dense

GAP = 12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("image", metavar="FILE")
    parser.add_argument("--first", type=int, default=0, help="number of the first scene")
    parser.add_argument("--count", type=int, default=3)
    parser.add_argument("--part", default="test", help="of the scenes: test ones were neither trained on nor judged on")
    given = parser.parse_args()
    run = open_dense(given.run)
    part = open_dense_part(
        "scenes:400",
        run.task,
        given.part,
        classes=run.classes,
        category_ids=run.category_ids,
        keypoint_names=run.keypoint_names,
        scenes_size=run.recipe.image_size or 128,
    )
    find = finder(run)
    rows = []
    with torch.inference_mode():
        for index in range(given.first, given.first + given.count):
            image, target = part.images[index]
            boxes = target["boxes"].as_subclass(torch.Tensor) if run.top_down else None
            found = find(image, boxes)
            if run.top_down:
                found["labels"] = target["labels"]
            rows.append(truth_and(run, image, target, found))
    width = max(row.width for row in rows)
    canvas = Image.new("RGB", (width, sum(row.height for row in rows) + GAP * (len(rows) - 1)), "white")
    top = 0
    for row in rows:
        canvas.paste(row, (0, top))
        top += row.height + GAP
    canvas.thumbnail((900, 1400), Image.Resampling.LANCZOS)
    canvas.quantize(256).save(given.image, optimize=True)


if __name__ == "__main__":
    main()
