// Draws a random sample picture: one to four shapes on a white background.

const COLOURS = { red: "#e6194b", green: "#2ca02c", blue: "#1f4fe0", yellow: "#ffd500", orange: "#ff8c00", purple: "#800080" };
const SIDE = 320;
const CELLS = [[80, 80], [240, 80], [160, 160], [80, 240], [240, 240]];

const any = (values) => values[Math.floor(Math.random() * values.length)];

const SHAPES = {
  circle: (pen, x, y, r) => pen.arc(x, y, r, 0, 2 * Math.PI),
  square: (pen, x, y, r) => pen.rect(x - r, y - r, 2 * r, 2 * r),
  triangle: (pen, x, y, r) => { pen.moveTo(x, y - r); pen.lineTo(x + r, y + r); pen.lineTo(x - r, y + r); pen.closePath(); },
};

export async function drawnPicture(number) {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = SIDE;
  const pen = canvas.getContext("2d");
  pen.fillStyle = "#ffffff";
  pen.fillRect(0, 0, SIDE, SIDE);
  // The middle cell overlaps the others and is left empty.
  const corners = CELLS.filter((_, place) => place !== 2).sort(() => Math.random() - 0.5);
  for (const [x, y] of corners.slice(0, 1 + Math.floor(Math.random() * corners.length))) {
    pen.beginPath();
    pen.fillStyle = any(Object.values(COLOURS));
    any(Object.values(SHAPES))(pen, x, y, any([28, 54]));
    pen.fill();
  }
  const blob = await new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
  return new File([blob], `drawn-${number}.png`, { type: "image/png" });
}
