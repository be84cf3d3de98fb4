"""What a training script needs beside tensors: who and where this process is, objects, results, metrics, a doctor."""
