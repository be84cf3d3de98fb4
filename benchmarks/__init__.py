"""Programs that print what the library costs, as ratios to what else there is, taken in one run."""
