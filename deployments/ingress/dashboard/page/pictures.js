// The user's picture files, shown by name and thumbnail. Names are inserted as text, never as HTML.

export class Pictures {
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
    const pictures = [...files].filter((file) => !file.type || file.type.startsWith("image/"));
    for (const file of pictures) this.#items.push({ name: file.name || "pasted picture", file, url: URL.createObjectURL(file) });
    this.#show();
    return pictures.length;
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
    const row = document.createElement("li");
    const frame = document.createElement("span");
    frame.className = "frame";
    const image = document.createElement("img");
    image.src = item.url;
    image.alt = `Picture ${number}: ${item.name}`;
    frame.append(image);
    const name = document.createElement("span");
    name.className = "name";
    name.textContent = name.title = item.name;
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = "×";
    button.setAttribute("aria-label", `Remove picture ${number}: ${item.name}`);
    button.addEventListener("click", () => this.#remove(item));
    row.append(frame, name, button);
    return row;
  }
}

// Reads a file as a data: URL, the form in which a chat request holds a picture.
export function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(new Error(`${file.name} cannot be read`)));
    reader.readAsDataURL(file);
  });
}
