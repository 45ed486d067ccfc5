"""Pictures drawn from a seed, in the formats and modes that clients send."""

from __future__ import annotations

import base64
import io
import random

from PIL import Image, ImageDraw

MEDIA_TYPES = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif", "BMP": "image/bmp"}


def picture(seed: int, width: int, height: int) -> Image.Image:
    """RGB: a plain ground with a dozen rectangles and ellipses. Another seed gives another picture."""
    rng = random.Random(seed)

    def colour() -> tuple[int, int, int]:
        return rng.randrange(256), rng.randrange(256), rng.randrange(256)

    image = Image.new("RGB", (width, height), colour())
    draw = ImageDraw.Draw(image)
    for number in range(12):
        left, right = sorted((rng.randrange(width), rng.randrange(width)))
        top, bottom = sorted((rng.randrange(height), rng.randrange(height)))
        shape = draw.ellipse if number % 2 else draw.rectangle
        shape((left, top, right, bottom), fill=colour())
    return image


def circle_and_square() -> Image.Image:
    """A red circle and a blue square, for the shipped model."""
    image = Image.new("RGB", (448, 336), "white")
    canvas = ImageDraw.Draw(image)
    canvas.ellipse((60, 90, 200, 230), fill="red")
    canvas.rectangle((280, 190, 360, 270), fill="blue")
    return image


def three_triangles() -> Image.Image:
    """Three green triangles, likewise."""
    image = Image.new("RGB", (320, 320), "lightgrey")
    canvas = ImageDraw.Draw(image)
    for x, y in ((70, 80), (220, 110), (130, 230)):
        canvas.polygon(((x, y - 45), (x + 45, y + 36), (x - 45, y + 36)), fill="green")
    return image


def encoded(image: Image.Image, image_format: str = "PNG", **options: object) -> bytes:
    """The image as a file."""
    file = io.BytesIO()
    image.save(file, image_format, **options)
    return file.getvalue()


def data_url(file: bytes, image_format: str = "PNG") -> str:
    return f"data:{MEDIA_TYPES[image_format]};base64,{base64.b64encode(file).decode()}"


def url(seed: int, width: int = 80, height: int = 64, image_format: str = "PNG", **options: object) -> str:
    """A picture as a `data:` URL."""
    return data_url(encoded(picture(seed, width, height), image_format, **options), image_format)


def with_alpha(seed: int, width: int, height: int) -> Image.Image:
    """RGBA, with a mask of another picture's luminance, so that every degree of transparency occurs."""
    image = picture(seed, width, height).convert("RGBA")
    image.putalpha(picture(seed + 1, width, height).convert("L"))
    return image


def with_palette(seed: int, width: int, height: int) -> Image.Image:
    """16 colours, the first of them transparent."""
    image = picture(seed, width, height).quantize(16)
    image.info["transparency"] = 0
    return image


def rotated_by_exif(seed: int, width: int, height: int, orientation: int) -> bytes:
    """A JPEG whose EXIF orientation turns or mirrors it."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(picture(seed, width, height), "JPEG", exif=exif)
