"""Images, texts and models that the tests of the tasks train on, made here."""

import random

import hub_files
import numpy as np
from PIL import Image

CLASSES = ("circle", "square")


def draw(label, seed, size=12):
    """A bright square or disc on noise."""
    noise = np.random.default_rng(seed)
    pixels = noise.integers(0, 60, (size, size + 2, 3), dtype=np.uint8)
    y, x = np.mgrid[:size, : size + 2]
    near = np.maximum(abs(y - 6), abs(x - 7)) < 3 if label else (y - 6) ** 2 + (x - 7) ** 2 < 12
    pixels[near] = 220
    return Image.fromarray(pixels)


def write_images(folder, count=12, classes=CLASSES):
    """`count` images in a folder for each class."""
    for label, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            draw(label, 100 * label + number).save(folder / name / f"{number:03}.png")
    return folder


def write_texts(path, count=24):
    """Texts with a class: which of two words is in it."""
    draws = random.Random(0)
    rows = []
    for number in range(count):
        words = draws.choices(hub_files.WORDS, k=3 + number % 7)
        rows.append(
            {"text": " ".join([*words, ("köln", "rivers")[number % 2]]), "label": ("town", "water")[number % 2]}
        )
    return hub_files.write_jsonl(path, rows)
