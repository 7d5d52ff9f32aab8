"use strict";
// From the file of an image to what the model takes, as Python does it: broadsight/data/decoding.py, timm's
// transform for evaluation, broadsight/data/normalising.py.

const Images = (() => {
  const MOST_BYTES = 128 * 2 ** 20;
  const MOST_PIXELS = 64_000_000; // 256 MB once decoded; a telephone's 50 megapixels pass

  // Python's round: halves go to the even neighbour.
  function round(x) {
    const below = Math.floor(x);
    if (x - below !== 0.5) return Math.round(x);
    return below % 2 === 0 ? below : below + 1;
  }

  // The size of an image whose shorter side gets `side` pixels, as torchvision's Resize has it.
  function resized({ width, height }, side) {
    const long = Math.trunc((side * Math.max(width, height)) / Math.min(width, height));
    return width <= height ? { width: side, height: long } : { width: long, height: side };
  }

  // Where `crop` pixels begin in a line of `length`, as torchvision's CenterCrop has it; below 0 there is a border.
  function start(length, crop) {
    return length < crop ? -Math.floor((crop - length) / 2) : round((length - crop) / 2);
  }

  // An image as `Resampling.resize` takes it -> bytes (crop, crop, channels) of its resized middle.
  function middle(image, { resize, crop, interpolation }) {
    const size = resized(image, resize);
    const left = start(size.width, crop);
    const top = start(size.height, crop);
    const part = {
      left: Math.max(left, 0),
      top: Math.max(top, 0),
      width: Math.min(size.width, crop),
      height: Math.min(size.height, crop),
    };
    const bytes = Resampling.resize(image, size, part, interpolation);
    if (left >= 0 && top >= 0) return bytes;
    const { channels } = image;
    const whole = new Uint8ClampedArray(crop * crop * channels); // with a black border
    const length = part.width * channels;
    for (let y = 0; y < part.height; y++) {
      const at = ((y + Math.max(-top, 0)) * crop + Math.max(-left, 0)) * channels;
      whole.set(bytes.subarray(y * length, (y + 1) * length), at);
    }
    return whole;
  }

  // Bytes (H, W, C) -> numbers (C, H, W), in single precision throughout.
  function normalised(bytes, channels, mean, std) {
    const pixels = bytes.length / channels;
    const numbers = new Float32Array(bytes.length);
    for (let c = 0; c < channels; c++) {
      const zero = Math.fround(255 * mean[c]);
      const scale = Math.fround(1 / (255 * std[c]));
      for (let i = 0; i < pixels; i++) {
        numbers[c * pixels + i] = Math.fround(bytes[i * channels + c] - zero) * scale;
      }
    }
    return numbers;
  }

  // RGBA of opaque pixels -> RGB, or grey as Pillow's mode L.
  function inChannels(rgba, channels) {
    const bytes = new Uint8ClampedArray((rgba.length / 4) * channels);
    for (let from = 0, to = 0; from < rgba.length; from += 4) {
      const red = rgba[from];
      const green = rgba[from + 1];
      const blue = rgba[from + 2];
      if (channels === 1) {
        bytes[to++] = (red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16;
      } else {
        bytes[to++] = red;
        bytes[to++] = green;
        bytes[to++] = blue;
      }
    }
    return bytes;
  }

  // A source of opaque RGBA -> numbers (channels, crop, crop). `source` has width, height and rgba(left, top, width,
  // height).
  function prepare(source, channels, preprocessing) {
    const image = {
      width: source.width,
      height: source.height,
      channels,
      bytes: (...place) => inChannels(source.rgba(...place), channels),
    };
    return normalised(middle(image, preprocessing), channels, preprocessing.mean, preprocessing.std);
  }

  function megapixels(pixels) {
    return `${(pixels / 1e6).toFixed(0)} million pixels`;
  }

  // Refuses what is too large before all of it is decoded.
  async function check(file) {
    if (file.size === 0) throw new Error("The file is empty.");
    if (file.size > MOST_BYTES) {
      const most = MOST_BYTES / 2 ** 20;
      throw new Error(`The file has ${Math.ceil(file.size / 2 ** 20)} MB; up to ${most} MB are taken.`);
    }
    const address = URL.createObjectURL(file);
    const image = new Image();
    try {
      await new Promise((resolve, reject) => {
        image.onload = resolve;
        image.onerror = () => reject(new Error(UNREADABLE));
        image.src = address;
      });
      const pixels = image.naturalWidth * image.naturalHeight;
      if (pixels > MOST_PIXELS) {
        throw new Error(`The image has ${megapixels(pixels)}; up to ${megapixels(MOST_PIXELS)} are taken.`);
      }
    } finally {
      image.removeAttribute("src");
      URL.revokeObjectURL(address);
    }
  }

  const UNREADABLE = "This is not an image, or of a kind that this browser does not read.";

  // How a WebP file wants to be turned, from 1 (not at all) to 8, as EXIF has it. Browsers turn JPEG, PNG and AVIF by
  // themselves, but not all of them WebP; PIL does.
  async function orientation(file) {
    const head = String.fromCharCode(...new Uint8Array(await file.slice(0, 12).arrayBuffer()));
    if (!/^RIFF.{4}WEBP$/s.test(head)) return 1;
    const view = new DataView(await file.arrayBuffer());
    try {
      let at = 12;
      while (view.getUint32(at) !== EXIF) at += 8 + 2 * Math.ceil(view.getUint32(at + 4, true) / 2);
      at += 8;
      if (view.getUint32(at) === EXIF_OF_JPEG) at += 6; // which some programs copy
      const little = view.getUint16(at) === 0x4949;
      const first = at + view.getUint32(at + 4, little);
      const end = first + 2 + 12 * view.getUint16(first, little);
      for (let entry = first + 2; entry < end; entry += 12) {
        const found = view.getUint16(entry + 8, little);
        if (view.getUint16(entry, little) === ORIENTATION) return found in TURNS ? found : 1;
      }
    } catch {
      // beyond the end: without such a note, or with a damaged one, an image is as it is
    }
    return 1;
  }

  const EXIF = 0x45584946; // "EXIF"
  const EXIF_OF_JPEG = 0x45786966; // "Exif"
  const ORIENTATION = 0x0112;

  // What makes each orientation upright, for an image of w x h before: a canvas's setTransform takes it.
  const TURNS = {
    1: () => [1, 0, 0, 1, 0, 0],
    2: (w) => [-1, 0, 0, 1, w, 0],
    3: (w, h) => [-1, 0, 0, -1, w, h],
    4: (w, h) => [1, 0, 0, -1, 0, h],
    5: () => [0, 1, 1, 0, 0, 0],
    6: (w, h) => [0, 1, -1, 0, h, 0],
    7: (w, h) => [0, -1, -1, 0, h, w],
    8: (w) => [0, -1, 1, 0, 0, w],
  };

  // A file -> its image, upright, its colours as they are in the file: width, height, draw(context) with its upper
  // left corner at 0, 0, and close().
  async function decode(file) {
    await check(file);
    let way, bitmap;
    try {
      way = await orientation(file);
      bitmap = await createImageBitmap(file, {
        colorSpaceConversion: "none",
        imageOrientation: way === 1 ? "from-image" : "none",
        premultiplyAlpha: "none",
      });
    } catch {
      throw new Error(UNREADABLE);
    }
    const { width, height } = bitmap;
    const turn = TURNS[way](width, height);
    return {
      width: way < 5 ? width : height,
      height: way < 5 ? height : width,
      draw(context) {
        context.save();
        context.transform(...turn);
        context.drawImage(bitmap, 0, 0);
        context.restore();
      },
      close: () => bitmap.close(),
    };
  }

  // An image of `decode` as a source for `prepare`; what is transparent becomes white.
  function source(image) {
    const canvas = document.createElement("canvas");
    const context = canvas.getContext("2d", { willReadFrequently: true });
    return {
      width: image.width,
      height: image.height,
      rgba(left, top, width, height) {
        if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
        context.imageSmoothingEnabled = false;
        context.setTransform(1, 0, 0, 1, 0, 0);
        context.fillStyle = "white";
        context.fillRect(0, 0, width, height);
        context.translate(-left, -top);
        image.draw(context);
        return context.getImageData(0, 0, width, height).data;
      },
    };
  }

  return { decode, middle, normalised, prepare, source };
})();
