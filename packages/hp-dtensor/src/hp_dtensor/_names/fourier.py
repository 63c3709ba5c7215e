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

PRIMITIVES: Final[dict[str, str]] = {
    "fft": "FFT IFFT",
    "rfft": "RFFT IHFFT",
    "irfft": "IRFFT HFFT",
    "fft2": "FFT2 IFFT2",
    "rfft2": "RFFT2 IHFFT2",
    "irfft2": "IRFFT2 HFFT2",
    "fftn": "FFTN IFFTN",
    "rfftn": "RFFTN IHFFTN",
    "irfftn": "IRFFTN HFFTN",
    "fftshift": "FFTShift IFFTShift",
}
