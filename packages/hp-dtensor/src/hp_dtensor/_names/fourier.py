"""Discrete Fourier transforms."""

from typing import Final

FUNCTIONS: Final[dict[str, str]] = {
    "fft": "fft.fft fft.ifft",
    "rfft": "fft.rfft fft.ihfft",
    "irfft": "fft.irfft fft.hfft",
    "fft2": "fft.fft2 fft.ifft2",
    "rfft2": "fft.rfft2 fft.ihfft2",
    "irfft2": "fft.irfft2 fft.hfft2",
    "fftn": "fft.fftn fft.ifftn",
    "rfftn": "fft.rfftn fft.ihfftn",
    "irfftn": "fft.irfftn fft.hfftn",
    "fftshift": "fft.fftshift fft.ifftshift",
}
