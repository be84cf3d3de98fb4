"""What a training script needs beside tensors: who this process is, metrics, reductions, checks of values."""
