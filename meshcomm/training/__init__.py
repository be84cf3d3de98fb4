"""What a training script needs beside tensors: who this process is, metrics, reductions, checks of values.

In: values of one rank. Out: values of all, or a question about ranks answered on the host.
"""
