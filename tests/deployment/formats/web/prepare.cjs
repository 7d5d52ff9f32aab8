// Prepares the images of a listing as the page does, under node.
const fs = require("node:fs");
const { runInThisContext } = require("node:vm");
const [folder, listing] = process.argv.slice(2);
for (const file of ["resampling.js", "images.js"]) runInThisContext(fs.readFileSync(`${folder}/${file}`, "utf8"));
const Images = runInThisContext("Images");
for (const { file, width, height, channels, preprocessing } of JSON.parse(fs.readFileSync(listing))) {
  const all = fs.readFileSync(file);
  const rgba = (left, top, w, h) => {
    const part = new Uint8ClampedArray(4 * w * h);
    for (let y = 0; y < h; y++) {
      const at = 4 * ((top + y) * width + left);
      part.set(all.subarray(at, at + 4 * w), 4 * y * w);
    }
    return part;
  };
  fs.writeFileSync(`${file}.out`, Images.prepare({ width, height, rgba }, channels, preprocessing));
}
