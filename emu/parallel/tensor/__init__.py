"""Inside the layer: tensor and sequence parallelism of plain models, by a map of module names."""
