"""From pictures to the pixels a vision model was trained on.

`preparation` does what a model's preprocessor_config.json says. The image processors of
transformers differ between its versions and with torchvision installed; this needs PIL only.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from sotalign_jax import checks


class Preparation(NamedTuple):
    """Resize, crop the centre, scale and normalise.

    Attributes:
        resize: (height, width), or the length of the shorter side, or None.
        crop: (height, width) or None.
        resample: PIL's number of the filter.
        scale: factor of the bytes.
        mean: subtracted from each channel after scaling.
        std: each channel is divided by it.
    """

    resize: tuple[int, int] | int | None
    crop: tuple[int, int] | None
    resample: int
    scale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, image: Any) -> np.ndarray:
        """Pixels [3, height, width] in float32."""
        image = on_white(image)
        if self.resize is not None:
            image = image.resize(_size(image.size, self.resize), self.resample)
        if self.crop is not None:
            left, top = (image.width - self.crop[1]) // 2, (image.height - self.crop[0]) // 2
            image = image.crop((left, top, left + self.crop[1], top + self.crop[0]))
        pixels = np.asarray(image, np.float32) * np.float32(self.scale)
        normal = (pixels - np.array(self.mean, np.float32)) / np.array(self.std, np.float32)
        return np.ascontiguousarray(normal.transpose(2, 0, 1))


def preparation(config: Mapping[str, Any]) -> Preparation:
    """What a preprocessor_config.json asks for.

    Raises:
        InputError: it asks for something unknown.
    """
    kind = str(config.get("image_processor_type") or config.get("feature_extractor_type") or "")
    convnext = kind.startswith("ConvNext")
    resize = _sides(config.get("size"), shorter=convnext) if config.get("do_resize", True) else None
    crop = None
    if config.get("do_center_crop"):
        crop = _sides(config.get("crop_size"))
    if convnext and isinstance(resize, int) and resize < 384:  # as these models are evaluated
        crop, resize = (resize, resize), int(resize / config.get("crop_pct", 0.875))
    elif convnext and isinstance(resize, int):
        resize = (resize, resize)
    if isinstance(crop, int) or (resize is None and crop is None):
        raise checks.InputError(f"encoder: its preprocessor_config.json is unknown: {dict(config)}")
    normalise = config.get("do_normalize", True)
    return Preparation(
        resize=resize,
        crop=crop,
        resample=int(config.get("resample", 2)),
        scale=float(config.get("rescale_factor", 1 / 255)) if config.get("do_rescale", True) else 1,
        mean=tuple(config["image_mean"]) if normalise else (0.0, 0.0, 0.0),
        std=tuple(config["image_std"]) if normalise else (1.0, 1.0, 1.0),
    )


def _sides(size: Any, *, shorter: bool = False) -> tuple[int, int] | int | None:
    """(height, width) or the shorter side, from the ways in which configs write a size."""
    if isinstance(size, int):
        return size if shorter else (size, size)
    if isinstance(size, Mapping) and size.get("shortest_edge"):
        return int(size["shortest_edge"])
    if isinstance(size, Mapping) and size.get("height"):
        return int(size["height"]), int(size["width"])
    return None


def _size(old: tuple[int, int], wanted: tuple[int, int] | int) -> tuple[int, int]:
    """(width, height) after resizing."""
    if isinstance(wanted, tuple):
        return wanted[1], wanted[0]
    width, height = old
    if width <= height:
        return wanted, int(wanted * height / width)
    return int(wanted * width / height), wanted


def on_white(image: Any) -> Any:
    """A picture in RGB; what is transparent becomes white, where PIL would show what is hidden."""
    import PIL.Image

    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        ground = PIL.Image.new("RGBA", image.size, "white")
        ground.alpha_composite(image)
        image = ground
    return image.convert("RGB")
