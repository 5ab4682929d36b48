"""Products that sum over dimensions: dot, ragged dot, convolution."""
