// Images of messages, as data URLs. They are drawn on canvases: the policy loads no image from a URL of data.

import { h, iconButton } from "../dom.js";

const MAX_BYTES = 400_000;
const MAX_SIDE = 1024;
const KEPT_TYPES = ["image/png", "image/jpeg", "image/webp"];
export const MAX_IMAGES = 8;

/** Return whether a value is an image as a message holds it. */
export function isImage(value) {
  if (typeof value !== "string" || !/^data:image\/(png|jpeg|webp);base64,[A-Za-z0-9+/]+={0,2}$/.test(value)) return false;
  return (value.length - value.indexOf(",") - 1) % 4 === 0; // else atob throws
}

/** Return the bytes of a data URL. */
function blobOf(url) {
  const [head, data] = url.split(",", 2);
  const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
  return new Blob([bytes], { type: /^data:([^;]+)/.exec(head)[1] });
}

function asUrl(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(reader.error));
    reader.readAsDataURL(blob);
  });
}

/** Return a file as a data URL; a large one is made smaller, so that the browser can keep it. Raises
 * Error, with words for people, for a file that is no image. */
export async function readImage(file) {
  let bitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    throw new Error(`${file.name || "The file"} is not an image that this browser reads.`);
  }
  if (file.size <= MAX_BYTES && KEPT_TYPES.includes(file.type)) return asUrl(file);
  const scale = Math.min(1, MAX_SIDE / Math.max(bitmap.width, bitmap.height));
  const canvas = h("canvas", { width: Math.max(1, Math.round(bitmap.width * scale)), height: Math.max(1, Math.round(bitmap.height * scale)) });
  const context = canvas.getContext("2d");
  context.fillStyle = "white"; // JPEG has no transparency
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.88);
}

/** Return images as elements. onRemove: takes the place of one to remove; without it they stay. */
export function thumbnails(images, onRemove) {
  return images.map((url, i) => {
    const canvas = h("canvas", { class: "thumb", role: "img", "aria-label": `Image ${i + 1}` });
    createImageBitmap(blobOf(url)).then(
      (bitmap) => {
        [canvas.width, canvas.height] = [bitmap.width, bitmap.height];
        canvas.getContext("2d").drawImage(bitmap, 0, 0);
      },
      () => canvas.replaceWith("(an image that this browser cannot read)"),
    );
    return h("span", { class: "attached" }, canvas, onRemove ? iconButton("close", `Remove image ${i + 1}`, () => onRemove(i)) : null);
  });
}
