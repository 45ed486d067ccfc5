"""Video files to sampled frames: header, sampling and decoding, in bounded memory. Knows neither Ray nor HTTP."""
