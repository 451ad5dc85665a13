"""JPEG files decoded, cropped, resized and flipped on a CUDA device."""
