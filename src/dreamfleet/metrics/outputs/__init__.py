"""Outputs: JSON lines, media files, TensorBoard, Weights & Biases. A new one is a class (see
`Output` in `base`) in a module of its own."""
