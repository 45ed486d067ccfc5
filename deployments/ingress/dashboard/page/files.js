// The user's pictures, videos and sounds, shown by name and preview. Names are inserted as text, never as HTML.

const NOUNS = { image: "picture", video: "video", audio: "sound" };

// Returns the medium of a file, null for another one. A file without a type may be a picture.
const kindOf = (file) => (file.type ? [file.type.split("/")[0]].find((kind) => kind in NOUNS) ?? null : "image");

export class Files {
  #list;
  #items = [];
  #changed;

  constructor(list, changed) {
    this.#list = list;
    this.#changed = changed;
  }

  get items() {
    return [...this.#items];
  }

  add(files) {
    const added = [...files].map((file) => ({ file, kind: kindOf(file) })).filter(({ kind }) => kind);
    for (const { file, kind } of added) this.#items.push({ name: file.name || `pasted ${NOUNS[kind]}`, file, kind, url: URL.createObjectURL(file) });
    this.#show();
    return added.length;
  }

  #remove(item) {
    const place = this.#items.indexOf(item);
    URL.revokeObjectURL(item.url);
    this.#items.splice(place, 1);
    this.#show();
    const buttons = this.#list.querySelectorAll("button");
    (buttons[Math.min(place, buttons.length - 1)] ?? document.getElementById("choose")).focus();
  }

  #show() {
    this.#list.replaceChildren(...this.#items.map((item, place) => this.#row(item, place + 1)));
    this.#changed(this.#items.length);
  }

  #row(item, number) {
    const noun = NOUNS[item.kind];
    const row = document.createElement("li");
    const frame = document.createElement("span");
    frame.className = "frame";
    frame.append(preview(item, `${noun[0].toUpperCase()}${noun.slice(1)} ${number}: ${item.name}`));
    const name = document.createElement("span");
    name.className = "name";
    name.textContent = name.title = item.name;
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = "×";
    button.setAttribute("aria-label", `Remove ${noun} ${number}: ${item.name}`);
    button.addEventListener("click", () => this.#remove(item));
    row.append(frame, name, button);
    return row;
  }
}

function preview(item, label) {
  const element = document.createElement(item.kind === "image" ? "img" : item.kind);
  element.src = item.url;
  if (item.kind === "image") {
    element.alt = label;
    return element;
  }
  element.setAttribute("aria-label", label);
  element.controls = true;
  element.muted = item.kind === "video";
  element.preload = "metadata";
  return element;
}

// Reads a file as a data: URL, the form in which a chat request holds it.
export function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(new Error(`${file.name} cannot be read`)));
    reader.readAsDataURL(file);
  });
}
