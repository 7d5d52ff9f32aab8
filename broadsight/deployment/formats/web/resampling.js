"use strict";
// Pillow's Image.resize for bytes, bit for bit, of a part of the result: no more than that part is computed.

const Resampling = (() => {
  const BITS = 22; // Pillow keeps weights as whole numbers of 2^-22
  const HALF = 1 << (BITS - 1);

  function sinc(x) {
    return x === 0 ? 1 : Math.sin(x * Math.PI) / (x * Math.PI);
  }

  // Each reaches so many pixels to either side, and gives a pixel at a distance its weight.
  const KERNELS = {
    box: { reach: 0.5, weight: (x) => (x > -0.5 && x <= 0.5 ? 1 : 0) },
    bilinear: { reach: 1, weight: (x) => Math.max(0, 1 - Math.abs(x)) },
    hamming: {
      reach: 1,
      weight(x) {
        x = Math.abs(x);
        if (x === 0) return 1;
        if (x >= 1) return 0;
        x *= Math.PI;
        return (Math.sin(x) / x) * (Math.fround(0.54) + Math.fround(0.46) * Math.cos(x)); // single precision in Pillow
      },
    },
    bicubic: {
      reach: 2,
      weight(x) {
        const a = -0.5;
        x = Math.abs(x);
        if (x < 1) return ((a + 2) * x - (a + 3)) * x * x + 1;
        if (x < 2) return (((x - 5) * x + 8) * x - 4) * a;
        return 0;
      },
    },
    lanczos: { reach: 3, weight: (x) => (x >= -3 && x < 3 ? sinc(x) * sinc(x / 3) : 0) },
  };

  // Which pixels of a line of `before` make up each of `count` from `first` of a line of `after`, and with what weight.
  function taps(kernel, before, after, first, count) {
    const scale = before / after;
    const stretch = Math.max(scale, 1);
    const reach = kernel.reach * stretch;
    const width = 2 * Math.ceil(reach) + 1;
    const from = new Int32Array(count);
    const size = new Int32Array(count);
    const weights = new Int32Array(count * width);
    const exact = new Float64Array(width);
    for (let i = 0; i < count; i++) {
      const centre = (first + i + 0.5) * scale;
      const start = Math.max(Math.trunc(centre - reach + 0.5), 0);
      const taken = Math.min(Math.trunc(centre + reach + 0.5), before) - start;
      let total = 0;
      for (let k = 0; k < taken; k++) {
        exact[k] = kernel.weight((k + start - centre + 0.5) * (1 / stretch));
        total += exact[k];
      }
      for (let k = 0; k < taken; k++) {
        const weight = (total === 0 ? exact[k] : exact[k] / total) * (1 << BITS);
        weights[i * width + k] = Math.trunc(weight < 0 ? weight - 0.5 : weight + 0.5);
      }
      from[i] = start;
      size[i] = taken;
    }
    return { from, size, weights, width };
  }

  // A line that keeps its length is not touched.
  function identity(first, count) {
    const from = Int32Array.from({ length: count }, (_, i) => first + i);
    return { from, size: new Int32Array(count).fill(1), weights: new Int32Array(count).fill(1 << BITS), width: 1 };
  }

  // The nearest pixel, found by adding up steps as Pillow does.
  function nearest(before, after, first, count) {
    const found = identity(0, count);
    const step = before / after;
    let place = step * 0.5;
    for (let i = 0; i < first + count; i++) {
      if (i >= first) found.from[i - first] = Math.trunc(place);
      place += step;
    }
    return found;
  }

  function line(interpolation, before, after, first, count) {
    if (before === after) return identity(first, count);
    if (interpolation === "nearest") return nearest(before, after, first, count);
    if (!(interpolation in KERNELS)) throw new Error(`no interpolation is called ${interpolation}`);
    return taps(KERNELS[interpolation], before, after, first, count);
  }

  // `image` has width, height, channels (1 or 3), and bytes(left, top, width, height): rows of interleaved channels.
  // `size` is what it would be resized to, `part` is what of that is wanted; both have width and height, part also left
  // and top. Gives the part's bytes, channels interleaved.
  function resize(image, size, part, interpolation) {
    const { channels } = image;
    const across = line(interpolation, image.width, size.width, part.left, part.width);
    const down = line(interpolation, image.height, size.height, part.top, part.height);
    const left = Math.min(...across.from);
    const right = across.from.reduce((most, from, i) => Math.max(most, from + across.size[i]), 0);
    const top = Math.min(...down.from);
    const bottom = down.from.reduce((most, from, i) => Math.max(most, from + down.size[i]), 0);
    const narrow = new Uint8ClampedArray((bottom - top) * part.width * channels);
    const strip = Math.max(1, Math.floor(STRIP / (right - left)));
    for (let y = top; y < bottom; y += strip) {
      const rows = Math.min(strip, bottom - y);
      const bytes = image.bytes(left, y, right - left, rows);
      squeeze(bytes, right - left, rows, left, across, channels, narrow, (y - top) * part.width * channels);
    }
    return stack(narrow, part.width * channels, top, down);
  }

  const STRIP = 1 << 20; // pixels that are read at a time: large images need not be in memory as a whole

  function squeeze(bytes, width, rows, left, across, channels, out, at) {
    const { from, size, weights, width: most } = across;
    for (let y = 0; y < rows; y++) {
      const row = y * width;
      for (let i = 0; i < from.length; i++) {
        let p = (row + from[i] - left) * channels;
        const end = i * most + size[i];
        let red = HALF; // or grey
        let green = HALF;
        let blue = HALF;
        if (channels === 1) {
          for (let k = i * most; k < end; k++, p++) red += bytes[p] * weights[k];
          out[at++] = red >> BITS; // the array clips it to a byte
          continue;
        }
        for (let k = i * most; k < end; k++, p += 3) {
          const weight = weights[k];
          red = (red + bytes[p] * weight) | 0;
          green = (green + bytes[p + 1] * weight) | 0;
          blue = (blue + bytes[p + 2] * weight) | 0;
        }
        out[at++] = red >> BITS;
        out[at++] = green >> BITS;
        out[at++] = blue >> BITS;
      }
    }
  }

  function stack(bytes, length, top, down) {
    const { from, size, weights, width: most } = down;
    const out = new Uint8ClampedArray(from.length * length);
    for (let i = 0, at = 0; i < from.length; i++) {
      const begin = (from[i] - top) * length;
      const end = i * most + size[i];
      for (let x = 0; x < length; x++) {
        let sum = HALF;
        for (let k = i * most, p = begin + x; k < end; k++, p += length) sum = (sum + bytes[p] * weights[k]) | 0;
        out[at++] = sum >> BITS;
      }
    }
    return out;
  }

  return { resize };
})();
